/* Adapter stages of the Hopper GEMM. LoRA extends the K loop of a tile: after the K columns of the
 * weights come k16 slabs, each 16 ranks of one segment, several slabs per stage:
 *
 *   sW  rows of B: [slab][TILES][64] rows of 32 bytes, 32-byte swizzle,
 *       or [TILES][64] rows of 64 or 128 bytes, 64- or 128-byte swizzle ("wide");
 *       in a backward rows of A: [TILES][slab][16] rows of 128 bytes, 128-byte swizzle
 *   sX  [TOKENS] rows of xa, 128 bytes; zeros for tokens that do not carry the slab's adapter
 *
 * Producers list the segments of a tile, each warp for itself; TMA loads rows of B, cp.async rows
 * of xa. Consumers accumulate B xa into the accumulators of the weights.
 *
 * TMA boxes with narrow rows are slow, so a full stage uses wide rows if all its ranks are of one
 * slice of a segment. In a gated projection the gate rows precede the up rows. Slab j of xa
 * occupies chunks 2j and 2j + 1 or, if slabs cover both gate and up, chunks 4j to 4j + 3. */
#pragma once

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/sm90/fixup.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/wgmma.cuh"

/* ---- layout ---- */

/* Returns the number of slabs of a full stage, which the sizes of sW and sX limit. */
template <class S>
__host__ __device__ __forceinline__ int slabs_per_stage(const moelora_gemm_launch &g) {
  constexpr int MAX_SLABS = sizeof(S::Stage::sW) / (S::TILES * kSlabBytes);
  static_assert(MAX_SLABS >= 2, "slabs of wide rows fit the weights of a stage");
  return has_gate_up_slices(g) || MAX_SLABS < 4 ? 2 : 4;
}

/* Backward: bytes that all slabs of an adapter stage take for an m64 tile. */
template <class S>
constexpr int kDepthM64Bytes =
    (sizeof(S::Stage::sW) < S::TILES * 4 * kSlabBytes ? 2 : 4) * kSlabBytes;

/* Returns the index of an m64 tile within a slab, where gate rows precede up rows. Token-major, m64
 * tiles are numbered in that order. */
template <class S> __device__ __forceinline__ int slab_m64(const moelora_gemm_launch &g, int m64) {
  return g.weights.gated && S::SWAP_AB ? (m64 & 1) * (S::TILES / 2) + m64 / 2 : m64;
}

/* Layout of the rows of B in sW. */
template <class S> struct SlabLayout {
  int width; // slabs that share a row: 1, or all slabs of the stage

  /* m64() returns the offset of an m64 tile, given its slab_m64; slab(), that of slab j. */
  __device__ __forceinline__ uint32_t m64(int place) const { return place * kSlabBytes * width; }
  /* Offset of the second half of the rows, which are up rows in a gated projection. */
  __device__ __forceinline__ uint32_t half() const { return m64(S::TILES / 2); }
  __device__ __forceinline__ uint32_t slab(int j) const {
    return j * (width == 1 ? S::TILES * kSlabBytes : 32);
  }
  __device__ __forceinline__ uint64_t descriptor(uint32_t address) const {
    return wgmma_descriptor_of(address, width);
  }
};

/* Layout of the rows of xa in sX, in chunks of 16 bytes. */
struct XaLayout {
  int slab, up; // stride between slabs; offset of the up slice from the gate slice

  __device__ __forceinline__ explicit XaLayout(bool gate_up)
      : slab(gate_up ? 4 : 2), up(gate_up ? 2 : 0) {}
};

/* ---- producers ---- */

/* Returns whether the next `slabs` slabs belong to one slice of a segment and fill a stage. */
template <class S>
__device__ __forceinline__ bool is_wide(const moelora_gemm_launch &g, const SegmentList<S> &list,
                                        int slabs, SlabIterator cursor) {
  if (slabs < slabs_per_stage<S>(g))
    return false;
  const Slab first = cursor.next(list);
  return first.packed % kRanks - first.rank > (slabs - 1) * kSlabDepth;
}

/* Lists the segments of this CTA's block. Returns the number of adapter stages of the tile: the
 * maximum over both CTAs of the cluster, because their pipelines advance together. */
template <class S>
__device__ __forceinline__ int find_adapters(const moelora_gemm_launch &g, const ClusterTile &tile,
                                             SegmentList<S> &list) {
  list.slabs = 0;
  if (!g.schedule.blocks.packed_ranks)
    return 0;
  const auto read = [&](Segments<S::LANES> &segments, int block) {
    segments.read(g.schedule.blocks.packed_ranks, (int64_t)block * S::TOKENS, S::TOKENS);
  };
  Segments<S::LANES> segments, peer;
  read(segments, tile.block);
  int most = 0;
  if (S::CLUSTER > 1) {
    read(peer, tile.peer_block);
    peer.find(g.adapters.lora.max_rank);
    most = list.slabs_of(peer);
  }
  segments.find(g.adapters.lora.max_rank);
  __syncwarp(); // all lanes have read the list of the previous tile
  list.find(g, tile, segments);
  const int slices = __popc(list.slices), per_stage = slabs_per_stage<S>(g);
  most = max(most, list.slabs) * slices;
  list.slabs *= slices;
  return (most + per_stage - 1) / per_stage;
}

/* Returns the AdaptersHeader of a tile with `tokens` valid tokens. Called by a whole warp. */
template <class S>
__device__ __forceinline__ AdaptersHeader adapters_header(const SegmentList<S> &list, int tokens,
                                                          int stages) {
  if (stages == 0 || S::TRANSPOSED) // backward: consumers predicate by token
    return {stages, false, false};
  const Slab first = list.at(0);
  bool ragged = false;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < list.count; i += 32)
    ragged |= list.at(i).packed % kSlabDepth != 0;
  return {stages, list.count > 1 || first.low > 0 || first.high < tokens,
          __any_sync(0xffffffffu, ragged) != 0};
}

/* Returns the number of slabs in adapter stage `stage` of a tile. */
template <class S>
__device__ __forceinline__ int slabs_in(const moelora_gemm_launch &g, const SegmentList<S> &list,
                                        int stage) {
  const int per_stage = slabs_per_stage<S>(g);
  return max(0, min(per_stage, list.slabs - stage * per_stage));
}

/* Issues the TMA loads of a stage's rows of B. Called by the elected lane. */
template <class S>
__device__ __forceinline__ void
load_factors(const FactorMaps *maps, const moelora_gemm_launch &g, const Tile &tile,
             const SegmentList<S> &list, const SlabsHeader &header, SlabIterator &cursor,
             const SharedMemory<S> &smem, const GemmPipeline<S> &pipeline, uint64_t policy) {
  const SlabLayout<S> layout = {header.width};
  const bool gate_up = has_gate_up_slices(g);
  const int halves = g.weights.gated && !gate_up ? 2 : 1,
            rows = (int)g.adapters.lora.slice_n / halves;
  const int boxes = g.weights.gated ? 2 : 1, output = first_output<S>(g, tile, 0);
#pragma unroll 1
  for (int j = 0; j < header.slabs; j++) {
    const Slab slab = cursor.next(list);
    if ((j & (header.width - 1)) != 0)
      continue; // already loaded as part of a wide row
#pragma unroll 1
    for (int half = 0; half < boxes; half++) {
      const int slice = gate_up ? half : slab.slice;
      tma_load_5d(smem.sW(pipeline.stage) + layout.slab(j) + half * layout.half(),
                  header.width > 1 ? &maps->wide[slice] : &maps->slice[slice], slab.rank,
                  output - (gate_up ? 0 : slab.slice * rows), halves == 2 ? half : 0,
                  maps->dims.expert(slice, tile.expert),
                  maps->dims.adapter(slice, slab.packed / kRanks), pipeline.full(), policy);
    }
  }
}

/* Copies rows of B element by element, for factors that no tensor map can describe. Called by the
 * gather warps. */
template <class S, class T, int THREADS>
__device__ __forceinline__ void
copy_factors(const moelora_gemm_launch &g, const Tile &tile, const SegmentList<S> &list, int slabs,
             SlabIterator cursor, const SharedMemory<S> &smem, int stage, int thread) {
  for (int j = 0; j < slabs; j++) {
    const Slab slab = cursor.next(list);
#pragma unroll 1
    for (int i = thread; i < S::ROWS * 2; i += THREADS) {
      const int row = i / 2, chunk = i & 1, up = g.weights.gated && row >= S::ROWS / 2;
      const int slice = has_gate_up_slices(g) ? up : slab.slice;
      const int output = first_output<S>(g, tile, 0) + row - up * (S::ROWS / 2);
      const int64_t n = weight_row(g, up, output) - slice * g.adapters.lora.slice_n;
      const int column = slab.rank + chunk * 8;
      const int ranks = max(0, min(8, slab.packed % kRanks - column));
      const bool exists = output < g.weights.n_out && n >= 0 && n < g.adapters.lora.slice_n;
      const moelora_factor &b = g.adapters.lora.b[slice];
      const T *gB = factor_row<T>(b, slab.packed / kRanks, tile.expert, n) + column;
      copy_elements(smem.sW(stage) + j * S::TILES * kSlabBytes + row * 32 +
                        ((chunk ^ (row >> 2 & 1)) << 4),
                    gB, exists ? ranks : 0);
    }
  }
  __threadfence_block(); // cp.async.mbarrier.arrive only orders asynchronous copies
}

/* Backward: copies rows of A, 16 ranks per slab; zero-fills beyond the true rank and past the last
 * output. Called by the gather warps. */
template <class S, class T, bool VECTORS, int THREADS>
__device__ __forceinline__ void copy_factor_depth(const moelora_gemm_launch &g, const Tile &tile,
                                                  const SegmentList<S> &list, int slabs,
                                                  SlabIterator cursor, const SharedMemory<S> &smem,
                                                  int stage, int thread) {
  static_assert(THREADS % 8 == 0, "a thread has the same chunk of all rows");
  const int chunk = thread & 7;
  for (int j = 0; j < slabs; j++) {
    const Slab slab = cursor.next(list);
    const moelora_factor &a = g.adapters.lora.a[slab.slice];
    const T *gA = factor_row<T>(a, slab.packed / kRanks, tile.expert, slab.rank);
    const int ranks = slab.packed % kRanks - slab.rank;
    const uint32_t sA = smem.sW(stage) + j * kSlabBytes;
#pragma unroll 2
    for (int i = thread / 8; i < S::TILES * kSlabDepth; i += THREADS / 8) {
      const int m64 = i / kSlabDepth, r = i % kSlabDepth;
      const int output = first_output<S>(g, tile, m64) + chunk * 8;
      const int count = r < ranks ? g.weights.n_out - output : 0;
      const T *from = count > 0 ? gA + r * a.stride_i + output : gA;
      const uint32_t to = sA + m64 * kDepthM64Bytes<S> + r * kRowBytes + ((chunk ^ r & 7) << 4);
      if (VECTORS)
        copy_async_16(to, from, count > 0 ? 16 : 0);
      else
        copy_elements(to, from, max(0, min(8, count)));
    }
  }
  if (!VECTORS)
    __threadfence_block(); // cp.async.mbarrier.arrive only orders asynchronous copies
}

/* Writes the token ranges of a stage's slabs, for consumers that predicate by token. Called by one
 * lane. */
template <class S>
__device__ __forceinline__ void write_slab_tokens(const SegmentList<S> &list, int slabs,
                                                  SlabIterator &cursor, uint32_t header) {
  for (int j = 0; j < slabs; j++) {
    const Slab slab = cursor.next(list);
    SlabTokens{slab.low, slab.high}.write(header, j);
  }
}

/* Copies a stage's rows of xa for `tokens` tokens; zeros for those without the slab's adapter. */
template <class S, class T, int THREADS>
__device__ __forceinline__ void
copy_xa(const moelora_gemm_launch &g, const Tile &tile, const SegmentList<S> &list, int slabs,
        SlabIterator &cursor, int tokens, const SharedMemory<S> &smem, int stage, int thread) {
  constexpr int STEP = THREADS / 8, ROWS = (S::TOKENS + STEP - 1) / STEP;
  static_assert(STEP % 4 == 0, "every other row has the same place in the swizzle");
  const bool gate_up = has_gate_up_slices(g);
  const int chunk = thread & 7, slot = gate_up ? chunk / 4 : chunk / 2, first = thread / 8;
  Slab mine = {};
  for (int j = 0; j < slabs; j++) {
    const Slab slab = cursor.next(list);
    if (j == slot)
      mine = slab;
  }
  if (slot >= slabs)
    return;
  const int slice = gate_up ? chunk / 2 & 1 : mine.slice;
  const uint32_t stride = (uint32_t)(g.adapters.xa_stride * sizeof(T));
  const T *gXa = opaque((const T *)g.adapters.xa +
                        ((int64_t)tile.block * S::TOKENS + first) * g.adapters.xa_stride +
                        slice * g.adapters.xa_slice + mine.rank + (chunk & 1) * 8);
  const uint32_t row = smem.sX(stage) + first * kRowBytes, segment = mine.high - mine.low;
  const uint32_t at[2] = {row + ((chunk ^ (first & 7)) << 4),
                          row + ((chunk ^ ((first + STEP) & 7)) << 4)};
  const int low = opaque(mine.low - first), left = opaque(tokens - first); // once for all rows
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (i * STEP >= left)
      break;
    copy_async_16(at[i % 2] + i * STEP * kRowBytes, row_address(gXa, i * STEP, stride),
                  (uint32_t)(i * STEP - low) < segment ? 16 : 0);
  }
}

/* ---- consumers ---- */

/* Returns the offset in sX from which a lane loads two n8 tiles of the first k16 slab with one
 * ldmatrix. Slab K is at this offset ^ K << 5. */
__device__ __forceinline__ uint32_t token_offset() {
  const int lane = threadIdx.x & 31, row = lane & 7;
  return ((lane >> 4) * 8 + row) * kRowBytes + ((lane >> 3 & 1 ^ row) << 4);
}

/* A full adapter stage, and this consumer's rows of B in it. */
template <class S, class T> struct AdapterStage {
  SlabsHeader header;
  SlabLayout<S> layout;
  uint32_t sB; // rows of B of the consumer's first m64 tile
  int next;    // byte offset from the first m64 tile to the second
  bool nonfinite;

  /* Waits for the stage. If `clears`, zeros the non-finite elements of B (see fixup.cuh). */
  static __device__ __forceinline__ AdapterStage wait(const moelora_gemm_launch &g,
                                                      const WarpContext<S> &warp, bool clears) {
    warp.pipeline.wait_full();
    const int stage = warp.pipeline.stage;
    const SlabsHeader header = SlabsHeader::read(warp.smem.header(stage));
    const SlabLayout<S> layout = {header.width};
    const int m64 = 2 * warp.consumer, first = layout.m64(slab_m64<S>(g, m64));
    const int next = layout.m64(slab_m64<S>(g, m64 + 1)) - first;
    const uint32_t sB = warp.smem.sW(stage) + first;
    const bool nonfinite = clears && NonFinite<S, T>::clear(sB, next, warp.consumer, header);
    return {header, layout, sB, next, nonfinite};
  }
};

/* Multiplies an adapter stage with mma.sync, for N <= 32 tokens, where the latency of wgmma
 * dominates. mma.sync and wgmma round identically. */
template <class S, class T, int N>
__device__ __forceinline__ void mma_slabs(float (&rAcc)[2][S::TOKENS / 2],
                                          const moelora_gemm_launch &g, const WarpContext<S> &warp,
                                          const SlabsHeader &header) {
  const SlabLayout<S> layout = {header.width};
  const int stage = warp.pipeline.stage;
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
  // Swizzle: a row has 2 * width chunks; logical chunk c is at c ^ first.
  const int first = row >> (2 - header.width / 2) & (2 * header.width - 1);
  const uint32_t sB = warp.smem.sW(stage) + row * 32 * header.width + ((lane >> 4 ^ first) << 4);
  const uint32_t sXa = warp.smem.sX(stage) + token_offset();
  const bool gate_up = has_gate_up_slices(g);
#pragma unroll 1
  for (int j = 0; j < header.slabs; j++) {
    const uint32_t slab = header.width == 1 ? sB + layout.slab(j) : sB ^ layout.slab(j);
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const uint32_t at = sXa ^ (gate_up ? 2 * j + t : j) << 5;
      uint32_t rB[4], rXa[(N + 8) / 16][4];
      load_matrix_x4(rB, slab + layout.m64(slab_m64<S>(g, 2 * warp.consumer + t)));
#pragma unroll
      for (int i = 0; i < (N + 8) / 16; i++)
        load_matrix_x4(rXa[i], at + i * 16 * kRowBytes);
#pragma unroll
      for (int n8 = 0; n8 < N / 8; n8++)
        mma_16816<T>(&rAcc[t][n8 * 4], rB, &rXa[n8 / 2][n8 % 2 * 2]);
    }
  }
}

/* Adapter stages of the weight-major (swap_ab) kernels. */
template <class S, class T> struct WeightMajorAdapters {
  /* Accumulates the current adapter stage and releases stage `previous`. Returns whether elements
   * of B were cleared. */
  template <int N>
  static __device__ __forceinline__ bool
  add_stage(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g,
            const WarpContext<S> &warp, const TileHeader &, int previous, bool clears) {
    // With several CTAs per SM, release stage `previous` early: another CTA hides the wait.
    if (S::RESIDENT > 1)
      wgmma_wait<0>(), warp.pipeline.release(previous);

    const AdapterStage<S, T> stage = AdapterStage<S, T>::wait(g, warp, clears);

    // Up to 32 tokens: use mma.sync.
    if constexpr (S::TOKENS <= 32) {
      mma_slabs<S, T, N>(rAcc, g, warp, stage.header);
      __syncwarp(); // all lanes have read the stage
      return stage.nonfinite;
    }

    // Release stage `previous` once its wgmmas have completed.
    fence_async_proxy(); // make writes by cp.async and by `clear` visible to wgmma
    if (S::RESIDENT == 1)
      wgmma_wait<0>(), warp.pipeline.release(previous);

    // Issue the wgmmas of each slab.
    const uint64_t a = stage.layout.descriptor(stage.sB),
                   b = wgmma_descriptor(warp.smem.sX(warp.pipeline.stage));
    const XaLayout xa(has_gate_up_slices(g));
#pragma unroll 1
    for (int j = 0; j < stage.header.slabs; j++) {
      wgmma_fence();
      const uint64_t slab = a + stage.layout.slab(j) / 16;
      Wgmma<N>::template mma<Element<T>::is_bf16>(rAcc[0], slab, b + xa.slab * j);
      Wgmma<N>::template mma<Element<T>::is_bf16>(rAcc[1], slab + stage.next / 16,
                                                  b + xa.slab * j + xa.up);
      wgmma_commit();
      if (S::Format::IS_W8A8)
        wgmma_wait<0>(); // the loop merges rAcc with that of promotion: no wgmma may be in flight
    }
    return stage.nonfinite;
  }

  /* Returns whether each row has a finite accumulator for the tile's first or second token. Only
   * the lanes that hold these check. Neither token is padding: a tile is only checked if one of its
   * tokens carries an adapter that another token does not carry. */
  static __device__ __forceinline__ bool are_finite(const float (&rAcc)[2][S::TOKENS / 2], int) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *two = &rAcc[i / 2][i % 2 * 2];
      const float least = fminf(fabsf(two[0]), fabsf(two[1])); // the finite one, if any
      most = max_nan(most, least);
    }
    return (threadIdx.x & 3) != 0 || most < __builtin_inff();
  }
};

/* Adapter stages of the backward. After the wgmmas of the K loop, these use mma.sync and predicate
 * by token, so that A need not be cleared. mma.sync and wgmma round identically. */
template <class S, class T> struct TransposedAdapters {
  /* Accumulates the current adapter stage and releases stage `previous`. */
  template <int N>
  static __device__ __forceinline__ bool
  add_stage(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g,
            const WarpContext<S> &warp, const TileHeader &, int previous, bool) {
    wgmma_wait<0>(); // accumulators are read from here on
    warp.pipeline.release(previous);
    warp.pipeline.wait_full();
    const int stage = warp.pipeline.stage;
    const uint32_t header = warp.smem.header(stage);
    const int slabs = SlabsHeader::read(header).slabs;
    const uint32_t sA =
        warp.smem.sW(stage) + 2 * warp.consumer * kDepthM64Bytes<S> + transposed_offset();
    const uint32_t sYb = warp.smem.sX(stage) + token_offset();
#pragma unroll 1
    for (int j = 0; j < slabs; j++) {
      const SlabTokens tokens = SlabTokens::read(header, j);
      // Distances from the slab's first token: to the lane's first token, and to the slab's end.
      int ahead = 2 * (int)(threadIdx.x & 3) - tokens.low;
      const uint32_t length = tokens.high - tokens.low;
      uint32_t rA[2][4];
#pragma unroll
      for (int t = 0; t < 2; t++)
        load_matrix_x4_trans(rA[t], sA + t * kDepthM64Bytes<S> + j * kSlabBytes);
#pragma unroll
      for (int i = 0; i < (N + 8) / 16; i++, ahead += 16) {
        ahead = opaque(ahead);
        if (16 * i >= tokens.high || 16 * i + 16 <= tokens.low)
          continue;
        uint32_t rYb[4];
        load_matrix_x4(rYb, (sYb ^ j << 5) + i * 16 * kRowBytes);
#pragma unroll
        for (int half = 0; half < 2 && 16 * i + 8 * half < N; half++) {
          const bool carries[2] = {(uint32_t)(ahead + 8 * half) < length,
                                   (uint32_t)(ahead + 8 * half + 1) < length};
#pragma unroll
          for (int t = 0; t < 2; t++) {
            float *d = &rAcc[t][8 * i + 4 * half];
            float more[4] = {d[0], d[1], d[2], d[3]};
            mma_16816<T>(more, rA[t], rYb + 2 * half);
#pragma unroll
            for (int q = 0; q < 4; q++)
              d[q] = carries[q % 2] ? more[q] : d[q];
          }
        }
      }
    }
    __syncwarp(); // all lanes have read the stage
    return false;
  }

  static __device__ __forceinline__ bool are_finite(const float (&)[2][S::TOKENS / 2], int) {
    return true;
  }
};

/* Accumulates all adapter stages of a tile and completes its wgmmas. `last` is the stage of the
 * last k step. Adapters is WeightMajorAdapters, TransposedAdapters or Fp8TokenMajorMainloop. */
template <class Adapters, int N, class S>
__device__ __forceinline__ PendingCheck add_adapters(float (&rAcc)[2][S::TOKENS / 2],
                                                     const moelora_gemm_launch &g,
                                                     WarpContext<S> &warp, const TileHeader &header,
                                                     int last) {
  GemmPipeline<S> &pipeline = warp.pipeline;
  const AdaptersHeader adapters = AdaptersHeader::read(warp.smem.header(last));
  const bool clears = adapters.ragged || (adapters.shared && FixupPass<S>(warp.smem).is_running());
  bool nonfinite = false;
#pragma unroll 1
  for (int i = 0; i < adapters.stages; i++) {
    nonfinite |= Adapters::template add_stage<N>(rAcc, g, warp, header, last, clears);
    last = pipeline.stage;
    pipeline.advance();
  }
  wgmma_wait<0>();
  warp.take_last_stage(last);
  return nonfinite                    ? PendingCheck::FIX_UP
         : adapters.shared && !clears ? PendingCheck::CHECK_ACCUMULATORS
                                      : PendingCheck::NOTHING;
}
