/* Tiles of weights that a backward takes as they lie: an m64 tile of a stage is 64 of depth in rows
 * of 64 outputs, chunk c of row r at c ^ (r & 7). ldmatrix transposes while it loads, wgmma takes
 * the tile as an MN-major operand. */
#ifndef MOELORA_CUDA_TRANSPOSED_CUH
#define MOELORA_CUDA_TRANSPOSED_CUH

#include <type_traits>

#include "cuda/backward/products.h"
#include "cuda/gemm/common/tile.cuh"

template <class E>
using LaunchOf = std::conditional_t<E::TRANSPOSED, moelora_back_launch, moelora_gemm_launch>;

constexpr int kSlabBytes = kSlabDepth * kRowBytes; // 16 of depth of an m64 tile

/* Where in such a tile this lane reads the first 16 of depth, as operand A of mma.m16n8k16. */
__device__ __forceinline__ uint32_t transposed_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int row = (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
  return row * kRowBytes + ((chunk ^ lane & 7) << 4);
}

#endif
