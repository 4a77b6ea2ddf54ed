/* Producer side of the adapter stages: lists the segments of a tile, loads rows of B by TMA and
 * rows of xa by cp.async. Each producer warp builds its own list of segments. */
#ifndef MOELORA_CUDA_SM90_ADAPTER_LOADS_CUH
#define MOELORA_CUDA_SM90_ADAPTER_LOADS_CUH

#include "cuda/gemm/common/transposed.cuh"
#include "cuda/gemm/sm90/adapter_layout.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cuda/ptx/opaque.cuh"

/* Whether the next `slabs` slabs belong to one segment and fill a stage. */
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

/* Builds the adapters header of a tile with `tokens` valid tokens. Called by a whole warp. */
template <class S>
__device__ __forceinline__ AdaptersHeader adapters_header(const SegmentList<S> &list, int tokens,
                                                          int stages) {
  if (stages == 0 || S::TRANSPOSED) // there, products are predicated by token and rank
    return {stages, false, false};
  const Slab first = list.at(0);
  bool ragged = false;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < list.count; i += 32)
    ragged |= list.at(i).packed % kSlabDepth != 0;
  return {stages, list.count > 1 || first.low > 0 || first.high < tokens,
          __any_sync(0xffffffffu, ragged) != 0};
}

/* Number of slabs in adapter stage `stage` of a tile. */
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
      tma_load_5d(smem.sW(pipeline.stage) + layout.slab(j) + layout.m64(half * (S::TILES / 2)),
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
    for (int i = thread; i < S::TILES * 128; i += THREADS) {
      const int m64 = i / 128, r = i / 2 % 64, chunk = i & 1;
      const int slice = has_gate_up_slices(g) ? m64 & 1 : slab.slice;
      const int output = first_output<S>(g, tile, m64) + r;
      const int64_t n = weight_row(g, m64, output) - slice * g.adapters.lora.slice_n;
      const int column = slab.rank + chunk * 8;
      const int ranks = max(0, min(8, slab.packed % kRanks - column));
      const bool exists = output < g.weights.n_out && n >= 0 && n < g.adapters.lora.slice_n;
      const moelora_factor &b = g.adapters.lora.b[slice];
      const T *gB = factor_row<T>(b, slab.packed / kRanks, tile.expert, n) + column;
      copy_elements(smem.sW(stage) + (j * S::TILES + slab_m64<S>(g, m64)) * kSlabM64Bytes + r * 32 +
                        ((chunk ^ (r >> 2 & 1)) << 4),
                    gB, exists ? ranks : 0);
    }
  }
  __threadfence_block(); // cp.async.mbarrier.arrive only orders asynchronous copies
}

/* Copies rows of the factors A, 16 of K per slab; zeros beyond the true rank and the last output.
 * Called by the gather warps. */
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

/* Copies a stage's rows of xa, for the first `tokens` tokens, by THREADS threads. */
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

#endif
