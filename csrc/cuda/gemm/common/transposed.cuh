/* Weight tiles for a backward, which multiplies without transposing the weights in memory: an m64
 * tile of a stage is 64 elements of K, each a row of 64 outputs, chunk c of row r at c ^ (r & 7).
 * ldmatrix transposes on load; wgmma reads the tile as an MN-major operand. */
#ifndef MOELORA_CUDA_TRANSPOSED_CUH
#define MOELORA_CUDA_TRANSPOSED_CUH

#include <type_traits>

#include "cuda/backward/products.h"
#include "cuda/gemm/common/tile.cuh"

template <class E>
using LaunchOf = std::conditional_t<E::TRANSPOSED, moelora_back_launch, moelora_gemm_launch>;

constexpr int kSlabBytes = kSlabDepth * kRowBytes; // a k16 slab of an m64 tile

/* Offset at which this lane reads the first k16 slab of such a tile, as operand A of mma.m16n8k16.
 */
__device__ __forceinline__ uint32_t transposed_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int row = (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
  return row * kRowBytes + ((chunk ^ lane & 7) << 4);
}

#endif
