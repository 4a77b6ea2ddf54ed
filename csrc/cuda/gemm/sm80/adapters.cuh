/* Adapters of a tile in the portable GEMM: fills pipeline stages with k16 slabs and multiplies
 * them, one subtile per slab. Rows of B replace the weights of a stage; chunks 2j and 2j + 1 of
 * such a row belong to slab j of the stage. */
#pragma once

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/sm80/product.cuh"
#include "cuda/gemm/sm80/transposed.cuh"
#include "cuda/ptx/opaque.cuh"

/* Rows of B in the weight part of a stage: a row has four slabs (as in X), two or one. */
template <class E> struct FactorRows {
  static constexpr int SLABS = E::W_BYTES >= E::ROWS * kRowBytes       ? 4
                               : E::W_BYTES >= E::ROWS * kRowBytes / 2 ? 2
                                                                       : 1;
  static constexpr int BYTES = SLABS * 32, M64_BYTES = 64 * BYTES;
  static_assert(E::ROWS * BYTES <= E::W_BYTES, "a slab fits the weight half of a stage");

  /* Returns the offset of a chunk of a row, swizzled against bank conflicts between eight rows. */
  static __device__ __forceinline__ uint32_t at(int row, int chunk) {
    return row * BYTES + ((chunk ^ row / (4 / SLABS) & 2 * SLABS - 1) << 4);
  }
};

/* Returns the slabs per stage. A row of X has room for two slabs that cover gate and up, but slabs
 * of different segments use different rows: four fit unless a segment has more than two. */
template <class E> __device__ __forceinline__ int slabs_in_stage(const moelora_gemm_launch &g) {
  constexpr int MAX_SLABS = FactorRows<E>::SLABS;
  return MAX_SLABS > 2 && has_gate_up_slices(g) && g.adapters.lora.max_rank > 2 * kSlabDepth
             ? 2
             : MAX_SLABS;
}

/* The part of a tile to which a slab contributes. */
struct Subtile {
  int low, high; // tokens [low, high)
  uint32_t m64s; // bit mask of m64 tiles
};

/* Adapters of a tile in shared memory, which saves registers in the main loop. */
template <class E, int STAGES> struct AdapterStorage {
  struct Stage {
    uint4 cursor;                                       // SlabIterator after the stage's slabs
    uint2 subtiles[(FactorRows<E>::SLABS + 1) / 2 * 2]; // of each slab: low | high << 16, m64s
  };
  uint4 tile; // slabs, slices, overlaps: TILES bits per slice, the m64 tiles that it overlaps
  Stage stages[STAGES];
  ListedSegment segments[E::TOKENS];
};

/* Reads and writes the AdapterStorage at shared address `at`. */
template <class E, int STAGES> struct TileAdapters {
  using Storage = AdapterStorage<E, STAGES>;
  using Stage = typename Storage::Stage;

  const uint32_t at;
  SegmentList<E> list;
  uint32_t overlaps;

  __device__ __forceinline__ explicit TileAdapters(uint32_t at) : at(at) {
    list.base = at + (uint32_t)offsetof(Storage, segments);
  }

  /* Lists the adapters of the tile. Called by one warp, with the packed ranks of the block's
   * tokens. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile,
                                       Segments<E::LANES> &segments) {
    segments.find(g.adapters.lora.max_rank);
    list.find(g, tile, segments);
    const int lane = threadIdx.x & 31, slice = lane / E::TILES;
    const bool all = E::TRANSPOSED || has_gate_up_slices(g) || g.adapters.lora.num_slices == 1;
    overlaps =
        __ballot_sync(0xffffffffu, all || (slice < g.adapters.lora.num_slices &&
                                           m64_overlaps_slice<E>(g, tile, lane % E::TILES, slice)));
    if (lane == 0)
      store_shared_16(
          at, make_uint4((uint32_t)(list.slabs * __popc(list.slices)), list.slices, overlaps, 0));
  }

  /* Loads the state written by `find`. Returns the slabs in adapter stage `stage`; 0 or less:
   * none. */
  __device__ __forceinline__ int slabs_at(const moelora_gemm_launch &g, int stage) {
    if (!g.schedule.blocks.packed_ranks)
      return 0;
    const uint4 found = load_shared_16(at);
    list.slabs = (int)found.x, list.slices = found.y, overlaps = found.z;
    const int per_stage = slabs_in_stage<E>(g);
    return min(per_stage, list.slabs - stage * per_stage);
  }

  __device__ __forceinline__ uint32_t stage(int step) const {
    return at + (uint32_t)offsetof(Storage, stages) + step % STAGES * (int)sizeof(Stage);
  }

  __device__ __forceinline__ SlabIterator cursor(int step) const {
    const uint4 v = load_shared_16(stage(step));
    return {(int)v.x, (int)v.y, (int)v.z};
  }
  __device__ __forceinline__ void write(int step, const SlabIterator &cursor) const {
    store_shared_16(stage(step),
                    make_uint4(cursor.segment, (uint32_t)cursor.slice, cursor.rank, 0));
  }

  __device__ __forceinline__ uint32_t subtile_at(int step, int j) const {
    return stage(step) + (uint32_t)offsetof(Stage, subtiles) + 8 * j;
  }
  __device__ __forceinline__ Subtile subtile(int step, int j) const {
    const uint2 v = load_shared_8(subtile_at(step, j));
    return {(int)(v.x & 0xffff), (int)(v.x >> 16), v.y};
  }
  __device__ __forceinline__ void write(int step, int j, const Slab &slab) const {
    const uint32_t m64s = overlaps >> slab.slice * E::TILES & ((1u << E::TILES) - 1);
    store_shared_8(subtile_at(step, j), make_uint2(slab.low | slab.high << 16, m64s));
  }
};

/* Returns slab j's first chunk in a row of X. If gate_up, a slab has four chunks, else two. */
__device__ __forceinline__ int first_chunk(bool gate_up, int j) {
  return gate_up ? j % 2 * 4 : j * 2;
}

/* Copies this thread's chunk of a slab's rows of B; zero-fills beyond the true rank and outside the
 * slice. */
template <class E, class T, bool VECTORS>
__device__ __forceinline__ void load_factors(const moelora_gemm_launch &g, const Tile &tile,
                                             const Slab &slab, int thread, uint32_t w) {
  using Rows = FactorRows<E>;
  constexpr int CHUNKS = 2 * Rows::SLABS, AT_ONCE = WarpTile<E>::THREADS / CHUNKS;
  constexpr int HALVES = AT_ONCE > 64 ? 2 : 1, STEP = AT_ONCE / HALVES;
  const bool gate_up = has_gate_up_slices(g);
  const int chunk = thread & (CHUNKS - 1);
  const int row = HALVES == 1 ? thread / CHUNKS : thread / CHUNKS & (STEP - 1);
  const int column = slab.rank + chunk % 2 * 8, width = (int)g.adapters.lora.slice_n;
  const int ranks = max(0, min(8, slab.packed % kRanks - column));   // of this chunk
  const int step = g.weights.gated && g.weights.interleaved ? 2 : 1; // rows of B per output
  const int next_row_group = g.weights.gated ? 64 : 128;             // outputs between row groups
  w += Rows::at(row, chunk);
#pragma unroll(VECTORS ? 2 : 1)
  for (int half = HALVES == 1 ? 0 : thread / CHUNKS / STEP; half < 2; half += HALVES) {
    const int slice = gate_up ? half : slab.slice;
    const moelora_factor &b = g.adapters.lora.b[slice];
    const T *from = factor_row<T>(b, slab.packed / kRanks, tile.expert, 0) + column;
    const int output = first_output<E>(g, tile, half);
    const int first = gate_up ? output : (int)weight_row(g, half, output) - slice * width;
#pragma unroll(VECTORS ? E::TILES / 2 : 1)
    for (int row_group = 0; row_group < E::TILES / 2; row_group++) {
#pragma unroll(VECTORS ? 64 / STEP : 1)
      for (int i = 0; i < 64; i += STEP) {
        const int ahead = row_group * next_row_group + i + row;
        const uint32_t n = first + ahead * step;
        const bool valid = n < (uint32_t)width;
        const bool wanted =
            output + ahead < g.weights.n_out; // rows past the last output are unused
        const uint32_t to = w + (2 * row_group + half) * Rows::M64_BYTES + i * Rows::BYTES;
        const T *at = from + (valid ? n : 0) * b.stride_i;
        if (VECTORS)
          copy_async_16(to, at, valid ? 2 * ranks : 0, wanted);
        else if (wanted)
          copy_elements(to, at, valid ? ranks : 0);
      }
    }
  }
}

/* Copies the `count` slabs of step `step` to the stage at `w`: rows of B (backward: A), and rows of
 * xa of the tokens that carry the adapter. Other rows of X keep their contents. */
template <class E, class T, int STAGES>
__device__ __forceinline__ void load_slabs(const moelora_gemm_launch &g, const Tile &shown,
                                           const TileAdapters<E, STAGES> &adapters, int step,
                                           bool first, int count, uint32_t w) {
  const int thread = opaque(threadIdx.x);
  const Tile tile = {opaque(shown.block), opaque(shown.column), opaque(shown.expert)};
  const bool gate_up = has_gate_up_slices(g);
  const int shift = gate_up ? 2 : 1; // a slab has 1 << shift chunks of xa
  const int chunk = thread & ((1 << shift) - 1), row = thread >> shift;
  const int stride = (int)g.adapters.xa_stride;
  const T *xa = (const T *)g.adapters.xa + (int64_t)tile.block * E::TOKENS * stride + chunk % 2 * 8;
  SlabIterator cursor;
  if (!first)
    cursor = adapters.cursor(step - 1);
  Slab mine = {};
#pragma unroll 1
  for (int j = 0; j < count; j++) {
    const Slab slab = cursor.next(adapters.list);
    if (thread == 0)
      adapters.write(step, j, slab);
    if (j == (thread & (2 * FactorRows<E>::SLABS - 1)) / 2)
      mine = slab;
    const int slice = gate_up ? chunk / 2 : slab.slice, to = first_chunk(gate_up, j) + chunk;
    const T *from = xa + slice * g.adapters.xa_slice + slab.rank;
#pragma unroll 1
    for (int t = slab.low + row; t < slab.high; t += WarpTile<E>::THREADS >> shift)
      copy_async_16(w + E::W_BYTES + t * kRowBytes + ((to ^ (t & 7)) << 4), from + t * stride, 16);
    if constexpr (E::TRANSPOSED) {
      if (g.weights.factors_vectors)
        load_factor_depth<E, T, true>(g, tile, slab, thread, w + j * kSlabBytes,
                                      FactorRows<E>::M64_BYTES);
      else
        load_factor_depth<E, T, false>(g, tile, slab, thread, w + j * kSlabBytes,
                                       FactorRows<E>::M64_BYTES);
    }
  }
  if (thread == 0)
    adapters.write(step, cursor);
  if constexpr (E::TRANSPOSED)
    return;
  if ((thread & (2 * FactorRows<E>::SLABS - 1)) / 2 >= count)
    return;
  if (g.weights.factors_vectors)
    load_factors<E, T, true>(g, tile, mine, thread, w);
  else
    load_factors<E, T, false>(g, tile, mine, thread, w);
}

/* Adds B xa^T of slab `slot` of step `step` to `sum`; its stage is at `w`. An n8 tile that only
 * partly belongs to the subtile is multiplied into a copy: a factor's values, NaN included, never
 * reach a token that does not carry the adapter. */
template <class E, class T, int STAGES>
__device__ __forceinline__ void expand(WarpTile<E> &sum, bool gate_up,
                                       const TileAdapters<E, STAGES> &adapters, int step, int slot,
                                       uint32_t w) {
  using S = WarpTile<E>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int row = warp * 16 + (lane & 15);
  uint32_t a[E::TILES][4];
#pragma unroll
  for (int m64 = 0; m64 < E::TILES; m64++) {
    if constexpr (E::TRANSPOSED)
      load_matrix_x4_trans(a[m64], w + m64 * FactorRows<E>::M64_BYTES + slot * kSlabBytes +
                                       transposed_offset());
    else
      load_matrix_x4(a[m64], w + m64 * FactorRows<E>::M64_BYTES +
                                 FactorRows<E>::at(row, 2 * slot + (lane >> 4)));
  }
  const Subtile subtile = adapters.subtile(step, slot);
  // The second half of b is for m64 tiles of up rows.
  const int chunk = first_chunk(gate_up, slot) + (lane >> 3 & 1) + (gate_up ? lane >> 4 << 1 : 0);
  const uint32_t x =
      w + E::W_BYTES + (S::first_token() + (lane & 7)) * kRowBytes + ((chunk ^ lane & 7) << 4);
  // Count tokens from the start of the segment: counting from that of the block would need a
  // register per n8 tile.
  const int begin = S::first_token() - subtile.low, length = subtile.high - subtile.low;
  const bool all = subtile.m64s == (1u << E::TILES) - 1;
  const int whole = all ? length - 8 : -1; // last start of an n8 tile in the subtile; -1: none
#pragma unroll
  for (int j = 0; j < S::N8_TILES; j++) {
    const int n8 = begin + j * S::NEXT;
    if (n8 >= length || n8 <= -8)
      continue;
    uint32_t b[4];
    load_matrix_x4(b, x + j * S::NEXT * kRowBytes);
    if (n8 >= 0 && n8 <= whole) {
#pragma unroll
      for (int m64 = 0; m64 < E::TILES; m64++)
        mma_16816<T>(sum.d[m64 / 2][j][m64 % 2], a[m64], b + m64 % 2 * 2);
      continue;
    }
    uint32_t m64s[2]; // m64 tiles to which this thread's two tokens add
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const int t = n8 + (lane & 3) * 2 + q;
      m64s[q] = t >= 0 && t < length ? subtile.m64s : 0;
    }
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++) {
      float (&d)[4] = sum.d[m64 / 2][j][m64 % 2];
      float more[4] = {d[0], d[1], d[2], d[3]};
      mma_16816<T>(more, a[m64], b + m64 % 2 * 2);
#pragma unroll
      for (int q = 0; q < 4; q++)
        d[q] = m64s[q % 2] >> m64 & 1 ? more[q] : d[q];
    }
  }
}
