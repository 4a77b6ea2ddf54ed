/* The runs of adapters among a block's tokens, and the pieces that a GEMM takes of them: 16 ranks
 * of the adapter that a run carries. Where gate and up have a slice each, a piece covers both;
 * otherwise there is one for each slice that the tile meets. */
#ifndef MOELORA_CUDA_RUNS_CUH
#define MOELORA_CUDA_RUNS_CUH

#include "cuda/gemm/common/tile.cuh"

/* What a piece is made of; the same in all lanes of a warp. */
struct AdapterPiece {
  int low, high, pair; // tokens [low, high)
  int slice, rank;
};

/* The runs of one block, listed in shared memory by one warp: { int16 low, high; int32 pair }. */
template <class S> struct Runs {
  uint32_t list;
  int count, pieces; // runs; pieces of all of them
  uint32_t slices;   // that the tile meets

  /* From the adapters of the block's tokens, lane by lane. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile,
                                       const Segments<S::LANES> &segments) {
    slices = slices_met(g, tile);
    pieces = pieces_of(segments);
    count = 0;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const bool carries = segments.pair[i] >= 0 && segments.pair[i] % kRanks > 0;
      const bool first = segments.starts[i] >> lane & 1;
      const uint32_t begin = __ballot_sync(0xffffffffu, carries && first);
      const uint32_t after = i + 1 < S::LANES ? segments.starts[i + 1] : 1;
      const bool last = (lane < 31 ? segments.starts[i] >> (lane + 1) : after) & 1;
      const uint32_t at = list + 8 * (count + __popc(begin & ((2u << lane) - 1)) - 1);
      const int t = i * 32 + lane;
      if (carries && first)
        asm volatile("st.shared.b16 [%0], %1;\n"
                     "st.shared.b32 [%0 + 4], %2;" ::"r"(at),
                     "h"((int16_t)t), "r"(segments.pair[i])
                     : "memory");
      if (carries && last)
        asm volatile("st.shared.b16 [%0 + 2], %1;" ::"r"(at), "h"((int16_t)(t + 1)) : "memory");
      count += __popc(begin);
    }
    __syncwarp();
  }

  /* Bit i: some output of the tile lies in slice i. */
  static __device__ __forceinline__ uint32_t slices_met(const moelora_gemm_launch &g,
                                                        const Tile &tile) {
    if (is_paired(g) || g.lora.num_slices == 1)
      return 1;
    uint32_t met = 0;
    for (int slice = 0; slice < g.lora.num_slices; slice++)
      for (int group = 0; group < S::TILES; group++)
        met |= (uint32_t)group_meets_slice<S>(g, tile.column, group, slice) << slice;
    return met;
  }

  /* Pieces of one slice. */
  static __device__ __forceinline__ int pieces_of(const Segments<S::LANES> &segments) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < S::LANES; i++)
      if (segments.pair[i] >= 0 && segments.starts[i] >> (threadIdx.x & 31) & 1)
        sum += (segments.pair[i] % kRanks + kPieceDepth - 1) / kPieceDepth;
    return __reduce_add_sync(0xffffffffu, sum);
  }

  __device__ __forceinline__ AdapterPiece run(int index) const {
    const uint2 run = load_shared_8(list + 8 * index);
    return {(int)(run.x & 0xffff), (int)(run.x >> 16), (int)run.y, 0, 0};
  }
};

/* Where a walk over a tile's pieces stands: runs, slices of each, 16 ranks at a time. */
struct PieceCursor {
  int run = 0, slice = -1, rank = 0;

  /* There must be one more. */
  template <class S> __device__ __forceinline__ AdapterPiece next(const Runs<S> &runs) {
    AdapterPiece piece = runs.run(run);
    if (slice < 0)
      slice = __ffs(runs.slices) - 1;
    piece.slice = slice;
    piece.rank = rank;
    rank += kPieceDepth;
    if (rank >= piece.pair % kRanks) {
      rank = 0;
      slice = __ffs(runs.slices & ~((2u << slice) - 1)) - 1;
      run += slice < 0;
    }
    return piece;
  }
};

#endif
