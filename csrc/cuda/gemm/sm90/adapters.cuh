/* Adapters as more depth of a Hopper GEMM's tile. A stage of the pipeline holds a few k16 slabs:
 *
 *   W  [slab][TILES][64]    rows of B of 32 bytes, 32-byte swizzle
 *   or [TILES][64]          rows of 64 or 128 bytes, in the swizzle of as many
 *   X  [TOKENS]             shrink results in rows of 128 bytes as in tile.cuh
 *
 * The copy engine is slow with narrow rows: a stage that is full with the ranks of one segment has
 * wide ones. Of a gated projection, rows of gate come before those of up. Where a token does not
 * carry the adapter, there are zeros. */
#ifndef MOELORA_CUDA_SM90_ADAPTERS_CUH
#define MOELORA_CUDA_SM90_ADAPTERS_CUH

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/common/tile_scheduler.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/ptx/mma.cuh"

constexpr int kSlabM64Bytes = 64 * 32;

/* Slabs in a stage: what W holds, and X. There, slab j lies in chunks 2j and 2j + 1; the two slices
 * of one that covers gate and up follow each other, in chunks 4j to 4j + 3. */
template <class S>
__host__ __device__ __forceinline__ int slabs_per_stage(const moelora_gemm_launch &g) {
  constexpr int MOST = S::W_BYTES / (S::TILES * kSlabM64Bytes);
  static_assert(MOST >= 2, "slabs of wide rows fit the weight half of a stage");
  return has_gate_up_slices(g) || MOST < 4 ? 2 : 4;
}

/* Tensor maps of a matrix that lies by position: boxes of many of its rows and of few. */
struct RowMaps {
  CUtensorMap many, few;
};

/* Tensor maps of the slices of B: [max_loras, E, halves, rows, ranks], in boxes of one slab and of
 * those of a whole stage; see map_factors. */
struct FactorMaps {
  CUtensorMap slice[MOELORA_MAX_SLICES], wide[MOELORA_MAX_SLICES];
  StackDims dims;
};

/* Place of an m64 tile in a slab. */
template <class S> __device__ __forceinline__ int slab_m64(const moelora_gemm_launch &g, int m64) {
  return g.weights.gated ? (m64 & 1) * (S::TILES / 2) + m64 / 2 : m64;
}

/* How the rows of B lie in a stage. */
template <class S> struct SlabLayout {
  int width; // slabs side by side in a row: 1, or all of the stage

  /* From the begin of the stage: an m64 tile, by its place in a slab; a slab of it. */
  __device__ __forceinline__ uint32_t m64(int place) const { return place * kSlabM64Bytes * width; }
  __device__ __forceinline__ uint32_t slab(int j) const {
    return j * (width == 1 ? S::TILES * kSlabM64Bytes : 32);
  }
  __device__ __forceinline__ uint64_t descriptor(uint32_t address) const {
    return wgmma_descriptor_of(address, width);
  }
};

/* Whether the next `slabs` are the ranks of one segment, and all that a stage holds. */
template <class S>
__device__ __forceinline__ bool is_wide(const moelora_gemm_launch &g, const SegmentList<S> &list,
                                        int slabs, SlabIterator cursor) {
  if (slabs < slabs_per_stage<S>(g))
    return false;
  const Slab first = cursor.next(list);
  return first.packed % kRanks - first.rank > (slabs - 1) * kSlabDepth;
}

/* Lists the segments of this CTA's block; returns the adapter stages that the cluster needs, whose
 * other block may need more. */
template <class S>
__device__ __forceinline__ int find_adapters(const moelora_gemm_launch &g, const ClusterTile &tile,
                                             SegmentList<S> &list) {
  list.slabs = 0;
  if (!g.schedule.blocks.packed_ranks || !is_last_split<S>(g, tile))
    return 0;
  const auto read = [&](Segments<S::LANES> &segments, int block) {
    segments.read(g.schedule.blocks.packed_ranks, (int64_t)block * S::TOKENS, S::TOKENS);
  };
  Segments<S::LANES> segments, beside;
  read(segments, tile.block);
  int most = 0;
  if (S::CLUSTER > 1) {
    read(beside, tile.beside);
    beside.find(g.adapters.lora.max_rank);
    most = list.slabs_of(beside);
  }
  segments.find(g.adapters.lora.max_rank);
  __syncwarp(); // all lanes have read the last tile's list
  list.find(g, tile, segments);
  const int slices = __popc(list.slices), per_stage = slabs_per_stage<S>(g);
  most = max(most, list.slabs) * slices;
  list.slabs *= slices;
  return (most + per_stage - 1) / per_stage;
}

/* What the consumers are told, of a tile with `tokens` in use; a warp. */
template <class S>
__device__ __forceinline__ AdaptersHeader adapters_header(const SegmentList<S> &list, int tokens,
                                                          int stages) {
  if (stages == 0)
    return {0, false, false};
  const Slab first = list.at(0);
  bool ragged = false;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < list.count; i += 32)
    ragged |= list.at(i).packed % kSlabDepth != 0;
  return {stages, list.count > 1 || first.low > 0 || first.high < tokens,
          __any_sync(0xffffffffu, ragged) != 0};
}

/* Slabs of a tile's adapter stage `stage`. */
template <class S>
__device__ __forceinline__ int slabs_in(const moelora_gemm_launch &g, const SegmentList<S> &list,
                                        int stage) {
  const int per_stage = slabs_per_stage<S>(g);
  return max(0, min(per_stage, list.slabs - stage * per_stage));
}

/* A stage's rows of B, by the copy engine; one lane. */
template <class S>
__device__ __forceinline__ void load_factors(const FactorMaps *maps, const moelora_gemm_launch &g,
                                             const Tile &tile, const SegmentList<S> &list,
                                             const SlabsHeader &header, SlabIterator &cursor,
                                             const Pipeline<S> &pipeline, uint64_t policy) {
  const SlabLayout<S> layout = {header.width};
  const bool gate_up = has_gate_up_slices(g);
  const int halves = g.weights.gated && !gate_up ? 2 : 1,
            rows = (int)g.adapters.lora.slice_n / halves;
  const int boxes = g.weights.gated ? 2 : 1, output = first_output<S>(g, tile, 0);
#pragma unroll 1
  for (int j = 0; j < header.slabs; j++) {
    const Slab slab = cursor.next(list);
    if ((j & (header.width - 1)) != 0)
      continue;
#pragma unroll 1
    for (int half = 0; half < boxes; half++) {
      const int slice = gate_up ? half : slab.slice;
      tma_load_5d(pipeline.weights() + layout.slab(j) + layout.m64(half * (S::TILES / 2)),
                  header.width > 1 ? &maps->wide[slice] : &maps->slice[slice], slab.rank,
                  output - (gate_up ? 0 : slab.slice * rows), halves == 2 ? half : 0,
                  maps->dims.expert(slice, tile.expert),
                  maps->dims.adapter(slice, slab.packed / kRanks), pipeline.full(), policy);
    }
  }
}

/* The same element by element, for factors that no tensor map covers. */
template <class S, class T, int THREADS>
__device__ __forceinline__ void
copy_factors(const moelora_gemm_launch &g, const Tile &tile, const SegmentList<S> &list, int slabs,
             SlabIterator cursor, const Pipeline<S> &pipeline, int thread) {
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
      const bool there = output < g.weights.n_out && n >= 0 && n < g.adapters.lora.slice_n;
      const moelora_factor &b = g.adapters.lora.b[slice];
      const T *from = factor_row<T>(b, slab.packed / kRanks, tile.expert, n) + column;
      copy_elements(pipeline.weights() + (j * S::TILES + slab_m64<S>(g, m64)) * kSlabM64Bytes +
                        r * 32 + ((chunk ^ (r >> 2 & 1)) << 4),
                    from, there ? ranks : 0);
    }
  }
  __threadfence_block(); // the arrival to come speaks for asynchronous copies only
}

/* A stage's token side: up to row `tokens`, by THREADS threads. */
template <class S, class T, int THREADS>
__device__ __forceinline__ void copy_xa(const moelora_gemm_launch &g, const Tile &tile,
                                        const SegmentList<S> &list, int slabs, SlabIterator &cursor,
                                        int tokens, const Pipeline<S> &pipeline, int thread) {
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
  const T *xa = (const T *)g.adapters.xa +
                ((int64_t)tile.block * S::TOKENS + first) * g.adapters.xa_stride +
                slice * g.adapters.xa_slice + mine.rank + (chunk & 1) * 8;
  const uint32_t row = pipeline.tokens() + first * kRowBytes, segment = mine.high - mine.low;
  const uint32_t at[2] = {row + ((chunk ^ (first & 7)) << 4),
                          row + ((chunk ^ ((first + STEP) & 7)) << 4)};
  int low = mine.low - first, left = tokens - first;
  asm volatile("" : "+l"(xa), "+r"(low), "+r"(left)); // found once, not for every row
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (i * STEP >= left)
      break;
    copy_async_16(at[i % 2] + i * STEP * kRowBytes, row_address(xa, i * STEP, stride),
                  (uint32_t)(i * STEP - low) < segment ? 16 : 0);
  }
}

/* Where a lane reads the tokens of 16 of depth in a stage, two n8 tiles by one instruction: those
 * of slab K at `^ K << 5`. */
__device__ __forceinline__ uint32_t token_offset() {
  const int lane = threadIdx.x & 31, row = lane & 7;
  return ((lane >> 4) * 8 + row) * kRowBytes + ((lane >> 3 & 1 ^ row) << 4);
}

/* The products of a stage's `slabs` with N tokens, by mma.sync: of so few, wgmma is mostly latency.
 * Both have the same bits. */
template <class S, class T, int N>
__device__ __forceinline__ void add_slabs(float (&d)[2][S::TOKENS / 2],
                                          const moelora_gemm_launch &g, const Pipeline<S> &pipeline,
                                          int consumer, const SlabsHeader &header) {
  const SlabLayout<S> layout = {header.width};
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
  // The swizzle: a row of `width` slabs begins in chunk `first`, and has twice as many of them.
  const int first = row >> (2 - header.width / 2) & (2 * header.width - 1);
  const uint32_t factors =
      pipeline.weights() + row * 32 * header.width + ((lane >> 4 ^ first) << 4);
  const uint32_t tokens = pipeline.tokens() + token_offset();
  const bool gate_up = has_gate_up_slices(g);
#pragma unroll 1
  for (int j = 0; j < header.slabs; j++) {
    const uint32_t slab = header.width == 1 ? factors + layout.slab(j) : factors ^ layout.slab(j);
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const uint32_t at = tokens ^ (gate_up ? 2 * j + t : j) << 5;
      uint32_t a[4], b[(N + 8) / 16][4];
      load_matrix_x4(a, slab + layout.m64(slab_m64<S>(g, 2 * consumer + t)));
#pragma unroll
      for (int i = 0; i < (N + 8) / 16; i++)
        load_matrix_x4(b[i], at + i * 16 * kRowBytes);
#pragma unroll
      for (int n8 = 0; n8 < N / 8; n8++)
        mma_16816<T>(&d[t][n8 * 4], a, &b[n8 / 2][n8 % 2 * 2]);
    }
  }
}

#endif
