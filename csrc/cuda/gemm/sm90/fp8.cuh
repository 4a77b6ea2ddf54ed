/* Weights and tokens in e4m3: common parts of the weight-major and the token-major kernel.
 *
 * wgmma accumulates e4m3 products with fewer mantissa bits than float32, so that long sums lose
 * accuracy (DeepSeek-V3 Technical Report, 2024, section 3.3.2). Each 128 elements of K are
 * therefore accumulated separately in rPartial, which is then promoted: multiplied by the scales
 * of weights and tokens and added to rAcc in float32.
 *
 * Weights are stored in the tiles described in moelora.h, token rows in the same column order. A
 * row of a stage is 128 bytes, which is 128 elements of K instead of the 64 of 16-bit formats. */
#pragma once

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/common/format.cuh"
#include "cuda/gemm/sm90/producer.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/wgmma.cuh"

/* Operands of a stage, both as rows of 128 e4m3 elements. */
template <int TOKENS, int TILES> struct Fp8Stage {
  SwizzledRow sW[TILES][64]; // m64 tiles of weight rows
  SwizzledRow sX[1][TOKENS]; // token rows
};

/* Scales of a stage. Formats with one scale per tile use the first of 64. Within 16 tokens, the
 * scales are in the order of quad_position: those that a weight-major thread needs are adjacent, of
 * tokens 2q, 2q + 1, 2q + 8 and 2q + 9. */
template <int TOKENS, int TILES> struct Fp8Scales {
  float sWScale[TILES][64], sXScale[TOKENS];
};
template <class S> using ScalesOf = Fp8Scales<S::TOKENS, S::TILES>;

constexpr int kM64ScaleBytes = 64 * 4;

/* Return the addresses of scales: member `scales[stage]` of the kernel's Storage. */
template <class S>
__device__ __forceinline__ uint32_t sWScale(const SharedMemory<S> &smem, int stage, int m64) {
  return smem.base + (uint32_t)offsetof(typename S::template Storage<S>, scales) +
         stage * (int)sizeof(ScalesOf<S>) + m64 * kM64ScaleBytes;
}
template <class S>
__device__ __forceinline__ uint32_t sXScale(const SharedMemory<S> &smem, int stage) {
  return sWScale<S>(smem, stage, S::TILES);
}

/* Producer of token scales, in the gather warps. A thread copies the scales of tokens thread +
 * i * kGatherers. It looks up their rows of x during the K loop of the previous tile. */
template <class S> struct TokenScales {
  static constexpr int EACH = (S::TOKENS + kGatherers - 1) / kGatherers;
  static_assert(kGatherers % 16 == 0, "a thread's tokens have the same place among 16");

  uint32_t row[EACH], next[EACH];
  uint32_t to;          // offset of the first token's scale
  const float *gXScale; // address of the scales of the next k step

  __device__ __forceinline__ explicit TokenScales(int thread)
      : to(opaque((uint32_t)(quad_position(thread) * 4))) {}

  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile, int count,
                                       int thread) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      next[i] = tile.block * S::TOKENS + max(min(thread + i * kGatherers, count - 1), 0);
    find_x_rows(g.schedule.blocks, g.tokens, next);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (thread + i * kGatherers >= count)
        next[i] = kNoRow;
  }
  /* Switches `copy` to the rows that `find` looked up. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const Tile &, int) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      row[i] = next[i];
    gXScale = g.tokens.scales;
  }
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const SharedMemory<S> &smem,
                                       int stage) {
    const uint32_t at = sXScale<S>(smem, stage) + to;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (row[i] != kNoRow)
        copy_async_4(at + i * kGatherers * 4, row_address(gXScale, row[i], 4), true);
    gXScale += g.tokens.scales_stride;
  }
};

/* Consumer: issues the wgmmas of a stage, 128 elements of K. They overwrite rPartial. */
template <int N>
__device__ __forceinline__ void wgmma_e4m3(float *rPartial, uint64_t a, uint64_t b) {
  fence_accumulators<N / 2>(rPartial);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    Wgmma<N>::mma_e4m3(rPartial, move_descriptor(a, 2 * k), move_descriptor(b, 2 * k), k > 0);
  wgmma_commit();
}
