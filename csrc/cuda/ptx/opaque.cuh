/* opaque(value) returns `value`, but hides its origin from the optimizer: the compiler does not
 * recompute it, and computes no expression of it before the call, e.g. outside a loop. */
#ifndef MOELORA_CUDA_PTX_OPAQUE_CUH
#define MOELORA_CUDA_PTX_OPAQUE_CUH

#include <stdint.h>

__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <class T> __device__ __forceinline__ const T *opaque(const T *value) {
  asm volatile("" : "+l"(value));
  return value;
}

#endif
