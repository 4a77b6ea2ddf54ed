/* Rows that wait for their top-k sum, in float32 or in a 16-bit dtype. */
#ifndef MOELORA_CUDA_SUM_CUH
#define MOELORA_CUDA_SUM_CUH

#include "cuda/ptx/mma.cuh"

/* sum += weight * WIDTH neighbouring columns; more than one of them are a whole number of 16 bytes.
 */
template <int WIDTH, class Z>
__device__ __forceinline__ void add_columns(float (&sum)[WIDTH], const Z *from, float weight) {
  __align__(16) Z chunk[WIDTH];
  if constexpr (WIDTH > 1) {
#pragma unroll
    for (int v = 0; v < WIDTH * (int)sizeof(Z) / 16; v++)
      ((uint4 *)chunk)[v] = ((const uint4 *)from)[v];
  } else {
    chunk[0] = *from;
  }
#pragma unroll
  for (int c = 0; c < WIDTH; c++) {
    if constexpr (sizeof(Z) == 4)
      sum[c] += weight * chunk[c];
    else
      sum[c] += weight * Element<Z>::to_float(chunk[c]);
  }
}

#endif
