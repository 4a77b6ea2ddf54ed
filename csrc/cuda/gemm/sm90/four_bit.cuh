/* 4-bit weights: their pipeline stage and its producer. A stage covers 128 elements of K, two
 * quantized tiles. With 64 elements, barriers would take much of the consumers' time. */
#ifndef MOELORA_CUDA_SM90_FOUR_BIT_CUH
#define MOELORA_CUDA_SM90_FOUR_BIT_CUH

#include "cuda/gemm/common/format.cuh"
#include "cuda/gemm/sm90/warp_context.cuh"
#include "cuda/gemm/sm90/weight_tiles.cuh"

constexpr int kFourBitSpans = 2;

/* sW: the tile of span s of m64 tile i is at 2 i SLOT_BYTES + s * tile_bytes. */
template <int TOKENS, int TILES, moelora_kernel_format FORMAT> struct FourBitStage {
  static constexpr int SLOT_BYTES = FormatTraits<FORMAT>::MAX_TILE_BYTES;

  uint8_t sW[(TILES * kFourBitSpans * SLOT_BYTES + 1023) / 1024 * 1024]; // weights and scales
  SwizzledRow sX[kFourBitSpans][TOKENS];                                 // token rows
};

/* Producer of the weights of a k step. One bulk copy covers both spans of an m64 tile: a single
 * lane issues all copies and cannot saturate memory with small ones. In a span past the end of K,
 * x is zero and weights may be anything: load the last tile again. */
template <class S> struct FourBitLoads : WeightTiles<S> {
  static __device__ __forceinline__ uint32_t bytes(const moelora_gemm_launch &g, const Tile &tile) {
    return weight_tile_bytes<S>(g, tile);
  }
  __device__ __forceinline__ void load(const CUtensorMap *, const moelora_gemm_launch &g,
                                       const Tile &, int step, const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline, uint64_t policy) {
    const uint32_t bytes = S::Format::tile_bytes(g.weights.w.format);
    const bool whole = (step + 1) * S::SPANS * kDepth < g.tokens.k + kDepth;
#pragma unroll
    for (int m64 = 0; m64 < S::TILES; m64++) {
      const uint32_t sW = smem.sW(pipeline.stage) + m64 * S::SPANS * S::Stage::SLOT_BYTES;
      bulk_load(sW, this->gW[m64], whole ? S::SPANS * bytes : bytes, pipeline.full(), policy);
      if (S::SPANS > 1 && !whole)
        bulk_load(sW + bytes, this->gW[m64], bytes, pipeline.full(), policy);
    }
    this->advance(g, S::SPANS);
  }
};

/* After the K loop: multiplies accumulators by the scale of the tensor, read from the tile in
 * stage `stage`; every tile stores it. */
template <class S, class T, int N>
__device__ __forceinline__ void scale_accumulators(float (&rAcc)[2][S::TOKENS / 2],
                                                   const WarpContext<S> &warp, int stage) {
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const int m64 = 2 * warp.consumer + t;
    const float scale = S::Format::template tile_scale<T>(warp.smem.sW(stage) +
                                                          m64 * S::SPANS * S::Stage::SLOT_BYTES);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      multiply_in_place(rAcc[t][i], scale);
  }
}

#endif
