/* Functions that exchange values within a warp. */
#pragma once

#include <stdint.h>

/* Returns lane 0's value, which the compiler then knows to be warp-uniform. */
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

/* Returns the inclusive prefix sum over the lanes of a warp. All lanes must call it. */
template <class Value> __device__ __forceinline__ Value warp_inclusive_sum(Value value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Value other = __shfl_up_sync(~0u, value, step);
    value += lane >= step ? other : 0;
  }
  return value;
}

/* Exchanges 32 consecutive 16-bit elements within a quad. Lane c of four passes elements 8c to
 * 8c + 7. It gets its registers of an mma operand for the first 16 elements in .x and .y, and for
 * the last 16 in .z and .w. From Hopper on, the order of K within an mma does not change the
 * result, so the 16 may be permuted, equally in both operands. Older GPUs add eight products at a
 * time, so each eight must consist of the elements that the instruction's layout names. */
__device__ __forceinline__ uint4 neighbors_16(uint4 v) {
  const bool low = threadIdx.x % 4 < 2;
  const uint32_t first = __shfl_xor_sync(~0u, low ? v.z : v.x, 2);
  const uint32_t second = __shfl_xor_sync(~0u, low ? v.w : v.y, 2);
  v = low ? make_uint4(v.x, v.y, first, second) : make_uint4(first, second, v.z, v.w);
#if __CUDA_ARCH__ < 900
  const bool even = threadIdx.x % 2 == 0;
  const uint32_t x = __shfl_xor_sync(~0u, even ? v.y : v.x, 1);
  const uint32_t z = __shfl_xor_sync(~0u, even ? v.w : v.z, 1);
  v = even ? make_uint4(v.x, x, v.z, z) : make_uint4(x, v.y, z, v.w);
#endif
  return v;
}

/* Returns the sum over the four lanes of the quad, in all of them. */
template <class Value> __device__ __forceinline__ Value quad_sum(Value value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
