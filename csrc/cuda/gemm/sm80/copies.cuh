/* Copies of chunks of eight elements to a stage of the portable GEMM. */
#pragma once

#include "cuda/gemm/common/tile.cuh"

/* Copies eight elements of a row if `wanted`; zero-fills from element `left` on (VECTORS: a
 * multiple of 8). No cache policy: with one, ptxas 13.0 emits an invalid descriptor register. */
template <bool VECTORS, class T>
__device__ __forceinline__ void copy_chunk(uint32_t to, const T *from, int left, bool wanted) {
  if (VECTORS)
    copy_async_16<256>(to, from, left > 0 ? 16 : 0, wanted);
  else if (wanted)
    copy_elements(to, from, max(0, min(8, left)));
}

/* Returns the byte offset of a thread's chunk in its first row; a row is 128 bytes. */
__device__ __forceinline__ uint32_t row_chunk() {
  const int thread = threadIdx.x;
  return thread / 8 * kRowBytes + ((thread & 7 ^ thread / 8 & 7) << 4);
}
