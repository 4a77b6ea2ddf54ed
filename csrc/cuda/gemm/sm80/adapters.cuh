/* Adapters of a tile for the portable GEMM: stages of its ring filled with pieces, and their
 * products, patch by patch. Piece j of a stage has its rows of B in chunks 2j and 2j + 1 of W. */
#ifndef MOELORA_CUDA_SM80_ADAPTERS_CUH
#define MOELORA_CUDA_SM80_ADAPTERS_CUH

#include "cuda/gemm/common/runs.cuh"
#include "cuda/gemm/sm80/product.cuh"

/* Pieces in a stage. X has room for two paired pieces only, but those of different runs lie in
 * different rows: four fit unless a run has more than two. */
__device__ __forceinline__ int pieces_in_stage(const moelora_gemm_launch &g) {
  return is_paired(g) && g.lora.max_rank > 2 * kPieceDepth ? 2 : 4;
}

/* The part of a tile that a piece adds to. */
struct Patch {
  int low, high;   // tokens [low, high)
  uint32_t groups; // a bit each
};

/* What is known about a tile's adapters lies in shared memory, where it costs the main loop no
 * registers:
 *
 *   { int32 pieces; uint32 slices, met }   TILES bits of met for each slice: groups that meet it
 *   [STAGES] { int32 run, slice, rank }    where the walk stands behind a stage's pieces
 *            [4] { int16 low, high; uint32 groups } a patch for each of them
 *   runs                                   as in runs.cuh */
template <class E, int STAGES> struct TileAdapters {
  static constexpr int STAGE_BYTES = 48;
  static constexpr int BYTES = 16 + STAGES * STAGE_BYTES + 8 * E::TOKENS;

  const uint32_t at;
  Runs<E> runs;
  uint32_t met;

  __device__ __forceinline__ explicit TileAdapters(uint32_t at) : at(at) {
    runs.list = at + 16 + STAGES * STAGE_BYTES;
  }

  /* By one warp, from the pairs of the block's tokens. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile,
                                       Segments<E::LANES> &segments) {
    segments.find(g.lora.max_rank);
    runs.find(g, tile, segments);
    const int lane = threadIdx.x & 31, slice = lane / E::TILES;
    const bool all = is_paired(g) || g.lora.num_slices == 1;
    met = __ballot_sync(0xffffffffu,
                        all || (slice < g.lora.num_slices &&
                                group_meets_slice<E>(g, tile.column, lane % E::TILES, slice)));
    if (lane == 0)
      store_shared_16(
          at, make_uint4((uint32_t)(runs.pieces * __popc(runs.slices)), runs.slices, met, 0));
  }

  /* Reads what was found; pieces of the tile's adapter stage `stage`. */
  __device__ __forceinline__ int pieces_at(const moelora_gemm_launch &g, int stage) {
    if (!g.blocks.pairs)
      return 0;
    const uint4 found = load_shared_16(at);
    runs.pieces = (int)found.x, runs.slices = found.y, met = found.z;
    const int per_stage = pieces_in_stage(g);
    return min(per_stage, runs.pieces - stage * per_stage);
  }

  __device__ __forceinline__ uint32_t stage(int step) const {
    return at + 16 + step % STAGES * STAGE_BYTES;
  }

  __device__ __forceinline__ PieceCursor cursor(int step) const {
    const uint4 v = load_shared_16(stage(step));
    return {(int)v.x, (int)v.y, (int)v.z};
  }
  __device__ __forceinline__ void write(int step, const PieceCursor &cursor) const {
    store_shared_16(stage(step), make_uint4(cursor.run, (uint32_t)cursor.slice, cursor.rank, 0));
  }

  __device__ __forceinline__ Patch patch(int step, int j) const {
    const uint2 v = load_shared_8(stage(step) + 16 + 8 * j);
    return {(int)(v.x & 0xffff), (int)(v.x >> 16), v.y};
  }
  __device__ __forceinline__ void write(int step, int j, const AdapterPiece &piece) const {
    const uint32_t groups = met >> piece.slice * E::TILES & ((1u << E::TILES) - 1);
    store_shared_8(stage(step) + 16 + 8 * j, make_uint2(piece.low | piece.high << 16, groups));
  }
};

/* First chunk of X that piece j of a stage takes: of two, or of four if it is paired. */
__device__ __forceinline__ int first_chunk(bool paired, int j) {
  return paired ? j % 2 * 4 : j * 2;
}

/* The same value. What follows from it is not found before it is needed, nor kept in registers
 * through the main loop. */
__device__ __forceinline__ int hidden(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/* This thread's chunk of a stage's rows of B, zeros beyond the true rank and outside the slice. */
template <class E, class T, bool VECTORS>
__device__ __forceinline__ void load_factors(const moelora_gemm_launch &g, const Tile &tile,
                                             const AdapterPiece &piece, int thread, uint32_t w) {
  constexpr int STEP = Share<E>::THREADS / 8;
  const bool paired = is_paired(g);
  const int chunk = thread & 7, row = thread / 8;
  const int column = piece.rank + chunk % 2 * 8, width = (int)g.lora.slice_n;
  const int ranks = max(0, min(8, piece.pair % kRanks - column)); // of this chunk
  const int step = g.gated && g.interleaved ? 2 : 1;              // rows of B between two outputs
  const int next_pair = g.gated ? 64 : 128;                       // outputs between pairs of groups
  w += row * kRowBytes + ((chunk ^ row & 7) << 4);
#pragma unroll(VECTORS ? 2 : 1)
  for (int half = 0; half < 2; half++) {
    const int slice = paired ? half : piece.slice;
    const moelora_factor &b = g.lora.b[slice];
    const T *from = factor_row<T>(b, piece.pair / kRanks, tile.expert, 0) + column;
    const int output = first_output<E>(g, tile.column, half);
    const int first = paired ? output : (int)weight_row(g, half, output) - slice * width;
#pragma unroll(VECTORS ? E::TILES / 2 : 1)
    for (int pair = 0; pair < E::TILES / 2; pair++) {
#pragma unroll(VECTORS ? 64 / STEP : 1)
      for (int i = 0; i < 64; i += STEP) {
        const int ahead = pair * next_pair + i + row;
        const uint32_t n = first + ahead * step;
        const bool there = n < (uint32_t)width;
        const bool wanted = output + ahead < g.n_out; // nobody looks at rows behind the last
        const uint32_t to = w + (2 * pair + half) * kGroupBytes + i * kRowBytes;
        const T *at = from + (there ? n : 0) * b.stride_i;
        if (VECTORS)
          copy_async_16(to, at, there ? 2 * ranks : 0, wanted);
        else if (wanted)
          copy_elements(to, at, there ? ranks : 0);
      }
    }
  }
}

/* Copies the `count` pieces of stage `step`: rows of B to `w`, and behind them rows of hl of the
 * tokens that carry the adapter. What lies in other rows does not matter. */
template <class E, class T, int STAGES>
__device__ __forceinline__ void load_pieces(const moelora_gemm_launch &g, const Tile &shown,
                                            const TileAdapters<E, STAGES> &adapters, int step,
                                            bool first, int count, uint32_t w) {
  const int thread = hidden(threadIdx.x);
  const Tile tile = {hidden(shown.block), hidden(shown.column), hidden(shown.expert)};
  const bool paired = is_paired(g);
  const int shift = paired ? 2 : 1; // of hl a piece has 1 << shift chunks
  const int chunk = thread & ((1 << shift) - 1), row = thread >> shift;
  const int stride = (int)g.hl_stride;
  const T *hl = (const T *)g.hl + (int64_t)tile.block * E::TOKENS * stride + chunk % 2 * 8;
  PieceCursor cursor;
  if (!first)
    cursor = adapters.cursor(step - 1);
  AdapterPiece mine = {};
#pragma unroll 1
  for (int j = 0; j < count; j++) {
    const AdapterPiece piece = cursor.next(adapters.runs);
    if (thread == 0)
      adapters.write(step, j, piece);
    if (j == (thread & 7) / 2)
      mine = piece;
    const int slice = paired ? chunk / 2 : piece.slice, to = first_chunk(paired, j) + chunk;
    const T *from = hl + slice * g.hl_slice + piece.rank;
#pragma unroll 1
    for (int t = piece.low + row; t < piece.high; t += Share<E>::THREADS >> shift)
      copy_async_16(w + E::W_BYTES + t * kRowBytes + ((to ^ (t & 7)) << 4), from + t * stride, 16);
  }
  if (thread == 0)
    adapters.write(step, cursor);
  if ((thread & 7) / 2 >= count)
    return;
  if (g.factors_vectors)
    load_factors<E, T, true>(g, tile, mine, thread, w);
  else
    load_factors<E, T, false>(g, tile, mine, thread, w);
}

/* sum += B hl^T over piece `slot` of stage `step`, at `w`, as further depth. An eight that only
 * partly belongs to the patch is multiplied in a copy: what an adapter's factors hold, NaN
 * included, never reaches a token that does not carry it, and a base row keeps its bits. */
template <class E, class T, int STAGES>
__device__ __forceinline__ void expand(Share<E> &sum, bool paired,
                                       const TileAdapters<E, STAGES> &adapters, int step, int slot,
                                       uint32_t w) {
  using S = Share<E>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int row = warp * 16 + (lane & 15);
  uint32_t a[E::TILES][4];
#pragma unroll
  for (int group = 0; group < E::TILES; group++)
    load_matrix_x4(a[group], w + group * kGroupBytes + row * kRowBytes +
                                 ((2 * slot + (lane >> 4) ^ row & 7) << 4));
  const Patch patch = adapters.patch(step, slot);
  // The second half of b is for groups of up rows.
  const int chunk = first_chunk(paired, slot) + (lane >> 3 & 1) + (paired ? lane >> 4 << 1 : 0);
  const uint32_t x =
      w + E::W_BYTES + (S::first_token() + (lane & 7)) * kRowBytes + ((chunk ^ lane & 7) << 4);
  // From the run's start on: to count from the block's would keep a register for each eight.
  const int begin = S::first_token() - patch.low, length = patch.high - patch.low;
  const bool all = patch.groups == (1u << E::TILES) - 1;
  const int whole = all ? length - 8 : -1; // where the last whole eight may begin
#pragma unroll
  for (int j = 0; j < S::EIGHTS; j++) {
    const int eight = begin + j * S::NEXT;
    if (eight >= length || eight <= -8)
      continue;
    uint32_t b[4];
    load_matrix_x4(b, x + j * S::NEXT * kRowBytes);
    if (eight >= 0 && eight <= whole) {
#pragma unroll
      for (int group = 0; group < E::TILES; group++)
        mma_16816<T>(sum.d[group / 2][j][group % 2], a[group], b + group % 2 * 2);
      continue;
    }
    uint32_t groups[2]; // of this thread's two tokens
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const int t = eight + (lane & 3) * 2 + q;
      groups[q] = t >= 0 && t < length ? patch.groups : 0;
    }
#pragma unroll
    for (int group = 0; group < E::TILES; group++) {
      float (&d)[4] = sum.d[group / 2][j][group % 2];
      float more[4] = {d[0], d[1], d[2], d[3]};
      mma_16816<T>(more, a[group], b + group % 2 * 2);
#pragma unroll
      for (int q = 0; q < 4; q++)
        d[q] = groups[q % 2] >> group & 1 ? more[q] : d[q];
    }
  }
}

#endif
