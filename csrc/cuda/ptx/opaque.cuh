/* opaque(value) returns the value, hidden from the optimizer: the compiler keeps the value in a
 * register and does not hoist expressions of it out of loops, where they would take registers. */
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
