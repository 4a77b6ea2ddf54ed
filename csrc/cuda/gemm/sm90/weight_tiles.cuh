/* Loads the tiles of quantized weights by bulk copies, and defines the pipeline stage for quantized
 * weights and 16-bit tokens. */
#pragma once

#include "cuda/gemm/common/format.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/tile_scheduler.cuh"

/* Quantized tiles along K that a stage holds for each m64 tile. */
template <class S>
constexpr int kDepthTiles = S::SPANS * S::Format::X_ELEMENTS / S::Format::TILE_DEPTH;

/* Producer's iterator over quantized weights: holds the global addresses of this CTA's share of the
 * m64 tiles at the next k step. One lane must issue copies of a few KB as fast as memory delivers
 * them, so the state per step is minimal. */
template <class S> struct WeightTiles {
  static constexpr int SHARE = S::TILES / S::CLUSTER;
  const char *gW[SHARE];

  /* Starts at the first k step of a tile. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const ClusterTile &tile) {
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      const int m64 = first() + i;
      gW[i] = quantized_tile(g, tile.expert, m64, first_output<S>(g, tile, m64));
    }
  }
  static __device__ __forceinline__ int first() {
    return S::CLUSTER == 1 ? 0 : (int)cluster_rank() * SHARE;
  }
  /* Returns the bytes of weights, including scales, that this CTA receives per k step. */
  static __device__ __forceinline__ uint32_t bytes(const moelora_gemm_launch &g, const Tile &) {
    return kDepthTiles<S> * S::TILES * S::Format::tile_bytes(g.weights.w.format);
  }
  __device__ __forceinline__ void advance(const moelora_gemm_launch &g, int tiles) {
#pragma unroll
    for (int i = 0; i < SHARE; i++)
      gW[i] += tiles * g.weights.w.stride_kt;
  }
};

/* K extent of a stage of quantized weights and 16-bit tokens, in units of 64 elements: two 4-bit
 * tiles, or one FP8 tile. With one unit, barriers would take much of the consumers' time. */
constexpr int kQuantizedSpans = 2;

/* sW: m64 tile i begins at i * SLOT_BYTES; its quantized tiles along K are contiguous. */
template <int TOKENS, int TILES, moelora_kernel_format FORMAT> struct QuantizedStage {
  using Format = FormatTraits<FORMAT>;
  static constexpr int SLOT_BYTES =
      kQuantizedSpans * kDepth / Format::TILE_DEPTH * Format::MAX_TILE_BYTES;
  static_assert(!Format::IS_FP8 || SLOT_BYTES % 128 == 0, "TileFragment swizzles addresses by xor");

  uint8_t sW[(TILES * SLOT_BYTES + 1023) / 1024 * 1024]; // weights and scales
  SwizzledRow sX[kQuantizedSpans][TOKENS];               // token rows
};

/* Producer of the weights of a k step. One bulk copy covers both spans of an m64 tile: a single
 * lane issues all copies and cannot saturate memory with small ones. If the second 4-bit tile is
 * past the end of K, x is zero there and weights may be anything: the first one is loaded again. */
template <class S> struct QuantizedLoads : WeightTiles<S> {
  __device__ __forceinline__ void load(const CUtensorMap *, const moelora_gemm_launch &g,
                                       const Tile &, int step, const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline, uint64_t policy) {
    const uint32_t bytes = S::Format::tile_bytes(g.weights.w.format);
    const bool whole = kDepthTiles<S> == 1 || (step + 1) * S::SPANS * kDepth < g.tokens.k + kDepth;
#pragma unroll
    for (int m64 = 0; m64 < S::TILES; m64++) {
      const uint32_t sW = smem.sW(pipeline.stage) + m64 * S::Stage::SLOT_BYTES;
      bulk_load(sW, this->gW[m64], whole ? kDepthTiles<S> * bytes : bytes, pipeline.full(), policy);
      if (!whole)
        bulk_load(sW + bytes, this->gW[m64], bytes, pipeline.full(), policy);
    }
    this->advance(g, kDepthTiles<S>);
  }
};

/* After the K loop, multiplies accumulators by the tile scale, which all tiles along K share: reads
 * it from stage `stage`. */
template <class S, class T, int N>
__device__ __forceinline__ void scale_accumulators(float (&rAcc)[2][S::TOKENS / 2],
                                                   const WarpContext<S> &warp, int stage) {
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const int m64 = 2 * warp.consumer + t;
    const float scale =
        S::Format::template tile_scale<T>(warp.smem.sW(stage) + m64 * S::Stage::SLOT_BYTES);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      multiply_in_place(rAcc[t][i], scale);
  }
}
