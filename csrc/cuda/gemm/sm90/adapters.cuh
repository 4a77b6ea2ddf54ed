/* Adapters as more depth of a Hopper GEMM's tile. A stage of the ring holds a few pieces:
 *
 *   W  [piece][TILES][64]   rows of B of 32 bytes, 32-byte swizzle
 *   X  [TOKENS]             shrink results in rows of 128 bytes as in tile.cuh
 *
 * Of a gated projection, rows of gate come before those of up. Where a token does not carry the
 * adapter, there are zeros. */
#ifndef MOELORA_CUDA_SM90_ADAPTERS_CUH
#define MOELORA_CUDA_SM90_ADAPTERS_CUH

#include "cuda/gemm/common/runs.cuh"
#include "cuda/gemm/sm90/ring.cuh"
#include "cuda/gemm/sm90/tensor_map.h"

constexpr int kPieceGroupBytes = 64 * 32;

/* Pieces in a stage. In X, piece j lies in chunks 2j and 2j + 1; the two slices of a paired one
 * follow each other, in chunks 4j to 4j + 3. */
__device__ __forceinline__ int pieces_per_stage(const moelora_gemm_launch &g) {
  return is_paired(g) ? 2 : 4;
}

/* Tensor maps of a matrix that lies by position: boxes of many of its rows and of few. */
struct RowMaps {
  CUtensorMap many, few;
};

/* Tensor maps of the slices of B: [max_loras, E, halves, rows, ranks], see map_factors. */
struct FactorMaps {
  CUtensorMap slice[MOELORA_MAX_SLICES];
  StackDims dims;
};

/* Place of a group in a piece. */
template <class S>
__device__ __forceinline__ int piece_group(const moelora_gemm_launch &g, int group) {
  return g.gated ? (group & 1) * (S::TILES / 2) + group / 2 : group;
}

/* The adapters of this CTA's block and of its neighbour's, lane by lane. */
template <class S> struct Pairs {
  int32_t own[S::LANES], other[S::LANES];

  __device__ __forceinline__ void load(const moelora_gemm_launch &g, int block) {
    if (!g.blocks.pairs)
      return;
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const int t = i * 32 + (threadIdx.x & 31);
      const int32_t *pairs = g.blocks.pairs + t;
      own[i] = t < S::TOKENS ? pairs[(int64_t)block * S::TOKENS] : -1;
      if (S::CLUSTER > 1)
        other[i] = t < S::TOKENS ? pairs[(int64_t)(block ^ 1) * S::TOKENS] : -1;
    }
  }

  /* Lists this CTA's runs; returns the adapter stages that the cluster needs. */
  __device__ __forceinline__ int find(const moelora_gemm_launch &g, const Tile &tile,
                                      Runs<S> &runs) const {
    runs.pieces = 0;
    if (!g.blocks.pairs)
      return 0;
    Segments<S::LANES> segments;
    int most = 0;
    if (S::CLUSTER > 1)
      most = runs.pieces_of(segments.of(other, g.lora.max_rank));
    segments.of(own, g.lora.max_rank);
    __syncwarp(); // all lanes have read the last tile's list
    runs.find(g, tile, segments);
    const int slices = __popc(runs.slices), per_stage = pieces_per_stage(g);
    most = max(most, runs.pieces) * slices;
    runs.pieces *= slices;
    return (most + per_stage - 1) / per_stage;
  }
};

/* What the consumers are told, of a tile with `tokens` in use; a warp. */
template <class S>
__device__ __forceinline__ AdaptersNote note_of(const Runs<S> &runs, int tokens, int stages) {
  if (stages == 0)
    return {0, false, false};
  const AdapterPiece first = runs.run(0);
  bool ragged = false;
  for (int i = threadIdx.x & 31; i < runs.count; i += 32)
    ragged |= runs.run(i).pair % kPieceDepth != 0;
  return {stages, runs.count > 1 || first.low > 0 || first.high < tokens,
          __any_sync(0xffffffffu, ragged) != 0};
}

/* Pieces of a tile's adapter stage `stage`. */
template <class S>
__device__ __forceinline__ int pieces_in(const moelora_gemm_launch &g, const Runs<S> &runs,
                                         int stage) {
  const int per_stage = pieces_per_stage(g);
  return max(0, min(per_stage, runs.pieces - stage * per_stage));
}

/* A stage's rows of B, by the copy engine. */
template <class S>
__device__ __forceinline__ void load_factors(const FactorMaps *maps, const moelora_gemm_launch &g,
                                             const Tile &tile, const Runs<S> &runs, int pieces,
                                             PieceCursor &cursor, const Ring<S> &ring,
                                             uint64_t policy) {
  const bool paired = is_paired(g);
  const int halves = g.gated && !paired ? 2 : 1, rows = (int)g.lora.slice_n / halves;
  const int boxes = g.gated ? 2 : 1, output = first_output<S>(g, tile.column, 0);
  for (int j = 0; j < pieces; j++) {
    const AdapterPiece piece = cursor.next(runs);
    if ((threadIdx.x & 31) != 0)
      continue;
    for (int half = 0; half < boxes; half++) {
      const int slice = paired ? half : piece.slice;
      tma_load_5d(ring.weights() + (j * S::TILES + half * (S::TILES / 2)) * kPieceGroupBytes,
                  &maps->slice[slice], piece.rank, output - (paired ? 0 : piece.slice * rows),
                  halves == 2 ? half : 0, maps->dims.expert(slice, tile.expert),
                  maps->dims.adapter(slice, piece.pair / kRanks), ring.full(), policy);
    }
  }
}

/* The same element by element, for factors that no tensor map covers. */
template <class S, class T, int THREADS>
__device__ __forceinline__ void copy_factors(const moelora_gemm_launch &g, const Tile &tile,
                                             const Runs<S> &runs, int pieces, PieceCursor cursor,
                                             const Ring<S> &ring, int thread) {
  for (int j = 0; j < pieces; j++) {
    const AdapterPiece piece = cursor.next(runs);
#pragma unroll 1
    for (int i = thread; i < S::TILES * 128; i += THREADS) {
      const int group = i / 128, r = i / 2 % 64, chunk = i & 1;
      const int slice = is_paired(g) ? group & 1 : piece.slice;
      const int output = first_output<S>(g, tile.column, group) + r;
      const int64_t n = weight_row(g, group, output) - slice * g.lora.slice_n;
      const int column = piece.rank + chunk * 8;
      const int ranks = max(0, min(8, piece.pair % kRanks - column));
      const bool there = output < g.n_out && n >= 0 && n < g.lora.slice_n;
      const moelora_factor &b = g.lora.b[slice];
      const T *from = factor_row<T>(b, piece.pair / kRanks, tile.expert, n) + column;
      copy_elements(ring.weights() + (j * S::TILES + piece_group<S>(g, group)) * kPieceGroupBytes +
                        r * 32 + ((chunk ^ (r >> 2 & 1)) << 4),
                    from, there ? ranks : 0);
    }
  }
  __threadfence_block(); // the arrival to come speaks for asynchronous copies only
}

/* A stage's token side: up to row `tokens`, by THREADS threads. */
template <class S, class T, int THREADS>
__device__ __forceinline__ void copy_shrunk(const moelora_gemm_launch &g, const Tile &tile,
                                            const Runs<S> &runs, int pieces, PieceCursor &cursor,
                                            int tokens, const Ring<S> &ring, int thread) {
  constexpr int STEP = THREADS / 8;
  const bool paired = is_paired(g);
  const int chunk = thread & 7, slot = paired ? chunk / 4 : chunk / 2;
  AdapterPiece mine = {};
  for (int j = 0; j < pieces; j++) {
    const AdapterPiece piece = cursor.next(runs);
    if (j == slot)
      mine = piece;
  }
  if (slot >= pieces)
    return;
  const int slice = paired ? chunk / 2 & 1 : mine.slice, stride = (int)g.hl_stride;
  const T *hl = (const T *)g.hl + (int64_t)tile.block * S::TOKENS * stride + slice * g.hl_slice +
                mine.rank + (chunk & 1) * 8;
#pragma unroll 4
  for (int t = thread / 8; t < tokens; t += STEP) {
    const bool carries = t >= mine.low && t < mine.high;
    copy_async_16(ring.tokens() + t * kRowBytes + ((chunk ^ (t & 7)) << 4),
                  hl + (carries ? t : mine.low) * stride, carries ? 16 : 0);
  }
}

#endif
