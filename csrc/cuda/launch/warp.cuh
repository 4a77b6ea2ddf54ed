#ifndef MOELORA_CUDA_WARP_CUH
#define MOELORA_CUDA_WARP_CUH

#include <stdint.h>

/* Makes a value that all lanes hold warp-uniform for the compiler. */
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

/* Inclusive prefix sum over the lanes of a warp. All lanes must call it. */
template <class Value> __device__ __forceinline__ Value warp_inclusive_sum(Value value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Value other = __shfl_up_sync(~0u, value, step);
    value += lane >= step ? other : 0;
  }
  return value;
}

/* Sum over four neighboring lanes, returned to all of them. */
template <class Value> __device__ __forceinline__ Value quad_sum(Value value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

#endif
