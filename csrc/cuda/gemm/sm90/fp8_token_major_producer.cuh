/* Producers of the FP8 kernel with tokens as operand A (fp8_token_major.cuh), and its shared
 * memory: the TMA warp loads weights, gather warps token rows and the scales of both. */
#pragma once

#include "cuda/gemm/sm90/fp8.cuh"

/* Shared memory. `rows` lists the offsets of a block's rows of x, see ListedTokenRows. */
constexpr int kListedAtOnce = kGatherers / 4; // rows that the gather warps copy at once
template <class S> struct Fp8TokenMajorStorage {
  SharedStorage<S> gemm;
  alignas(16) uint32_t rows[(S::TOKENS + kListedAtOnce - 1) / kListedAtOnce * kListedAtOnce];
  alignas(16) ScalesOf<S> scales[S::STAGES];
};

/* Returns whether rows of x are gathered; otherwise x is ordered by position. */
template <class S> __device__ __forceinline__ bool gathers_x(const moelora_gemm_launch &g) {
  return S::GATHERS && g.tokens.divisor.value;
}

/* Returns the address, at k = 0, of the stored tile that is m64 tile i of a stage: in a gated
 * projection gate tiles precede up tiles. */
template <class S>
__device__ __forceinline__ const char *stored_tile(const moelora_gemm_launch &g, const Tile &tile,
                                                   int i) {
  const int m64 = g.weights.gated ? i / 2 + i % 2 * 2 : i;
  return quantized_tile(g, tile.expert, m64, first_output<S>(g, tile, m64));
}

/* Producer of the weights of a k step. Each CTA of a cluster loads half of the rows and multicasts
 * them, unless the CTAs process different columns of the same block. One lane issues all copies and
 * takes about as long as the products, so it leaves scales to the gather warps. */
template <class S> struct Fp8Halves {
  static constexpr int EACH = S::TILES / 2; // m64 tiles of a half
  const char *gW[S::TILES]; // stored tiles at the next k step; of this CTA's half, or of both
  uint32_t to;              // offset of this CTA's half in sW
  bool are_all;             // loads both halves: no multicast from the other CTA

  static __device__ __forceinline__ uint32_t bytes(const moelora_gemm_launch &, const Tile &) {
    return S::TILES * kM64Bytes;
  }
  /* Starts at the first k step of a tile. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const ClusterTile &tile) {
    const int first = tile.is_shared() ? 0 : (int)cluster_rank() * EACH;
    are_all = tile.is_shared();
    to = opaque(first * kM64Bytes);
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
      gW[i] = stored_tile<S>(g, tile, (first + i) % S::TILES);
  }
  __device__ __forceinline__ void load(const CUtensorMap *, const moelora_gemm_launch &g,
                                       const Tile &, int, const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline, uint64_t policy) {
    const uint32_t sW = smem.sW(pipeline.stage) + to, barrier = pipeline.full();
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
      if (i >= EACH && !are_all)
        break;
      if (are_all)
        bulk_load(sW + i * kM64Bytes, gW[i], kM64Bytes, barrier, policy);
      else
        bulk_load_multicast(sW + i * kM64Bytes, gW[i], kM64Bytes, barrier, policy);
      gW[i] += g.weights.w.stride_kt;
    }
  }
};

/* Producer of scales, in the gather warps: of tokens, and of weights. */
template <class S> struct TokenMajorScales : TokenScales<S> {
  using Tokens = TokenScales<S>;
  const char *gWScale; // what this thread copies in the next k step
  int to;              // its offset; -1: nothing

  __device__ __forceinline__ explicit TokenMajorScales(int thread) : Tokens(thread), to(-1) {}

  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const Tile &tile,
                                        int thread) {
    Tokens::begin(g, tile, thread);
    const int row = thread * (moelora_has_row_scales(g.weights.w.format) ? 4 : 64);
    to = row < S::ROWS ? row * 4 : -1;
    gWScale = stored_tile<S>(g, tile, row / 64 % S::TILES) + kM64Bytes + row % 64 * 4;
  }
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const SharedMemory<S> &smem,
                                       int stage) {
    Tokens::copy(g, smem, stage);
    if (to >= 0) {
      const uint32_t at = sWScale<S>(smem, stage, 0) + to;
      if (moelora_has_row_scales(g.weights.w.format))
        copy_async_16(at, gWScale, 16);
      else
        copy_async_4(at, gWScale, true);
      gWScale += g.weights.w.stride_kt;
    }
  }
};

/* Producer of token rows: by TMA, or gathered by cp.async. Each thread has looked up the rows whose
 * scales it copies; the threads exchange these rows through a list in shared memory. */
template <class S> struct ListedTokenRows {
  using Rows = GatherShare<S::TOKENS, 4, kGatherers, S::Format::X_ELEMENTS / 8>;
  static constexpr int LIST_BYTES = sizeof(Fp8TokenMajorStorage<S>::rows);
  static_assert(Rows::STEP == kListedAtOnce, "a list of all that is read");
  static constexpr bool LOADS_BOXES = true;
  Rows rows;
  TokenBoxes<S> boxes;
  int first, step; // position of the block's first row; the next k step

  __device__ __forceinline__ explicit ListedTokenRows(int thread) : rows(thread), boxes(0) {}

  __device__ __forceinline__ void find(const moelora_gemm_launch &, const Tile &, int, int) {}

  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const Tile &tile, int count,
                                        const TokenScales<S> &scales, int thread,
                                        const SharedMemory<S> &smem) {
    // One thread loads boxes.
    boxes = TokenBoxes<S>(thread == 0 ? count : 0), first = tile.block * S::TOKENS, step = 0;
    if (gathers_x<S>(g)) {
      const uint32_t sRows = smem.base + (uint32_t)offsetof(Fp8TokenMajorStorage<S>, rows);
      list(g.tokens, scales, sRows, thread);
#pragma unroll
      for (int i = 0; i < Rows::ROWS; i++)
        rows.token[i] = load_shared_4(sRows + (thread / 4 + Rows::STEP * i) * 4);
      rows.begin(g.tokens, thread);
    }
  }
  __device__ __forceinline__ void copy(const RowMaps *x_maps, const moelora_gemm_launch &g,
                                       const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline) {
    if (gathers_x<S>(g)) {
      rows.copy(smem.sX(pipeline.stage));
    } else if (boxes.boxes + boxes.rest > 0) {
      barrier_expect_tx(pipeline.full(), boxes.rows() * kRowBytes);
      boxes.load(x_maps, step++, first, smem, pipeline);
    }
  }

private:
  /* Lists the offset of each token's row, in units of 16 bytes, or kNoRow. Called by all gather
   * threads. */
  static __device__ __forceinline__ void
  list(const moelora_tokens &tokens, const TokenScales<S> &scales, uint32_t sRows, int thread) {
    warpgroup_sync<kGatherers>(kGatherBarrier); // all have read the list of the previous tile
#pragma unroll
    for (int i = 0; i < TokenScales<S>::EACH; i++) {
      const int t = thread + i * kGatherers;
      const uint32_t row = scales.row[i];
      if (t * 4 < LIST_BYTES)
        store_shared_4(
            sRows + t * 4,
            row == kNoRow ? kNoRow : row * (uint32_t)(tokens.stride / (S::Format::X_ELEMENTS / 8)));
    }
    warpgroup_sync<kGatherers>(kGatherBarrier);
  }
};
