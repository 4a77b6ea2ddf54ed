/* Adapters on top of a base product of the decode kernel: hl B^T. */
#ifndef MOELORA_CUDA_DECODE_EXPAND_CUH
#define MOELORA_CUDA_DECODE_EXPAND_CUH

#include "cuda/decode/product.cuh"
#include "cuda/adapters/factors.cuh"
#include "cuda/launch/launch.h"

namespace decode {

/* 16 ranks to two lanes of a quad: two neighbours in the list of a segment's 16-rank groups, which
 * goes over all slices. */
struct Piece {
  int segment, rank, groups; // of one slice
  int first;                 // of the two
};

/* visit(piece) for this warp's pieces of an item; a shrink has none. */
template <class Visit>
__device__ __forceinline__ void for_each_piece(const Params &p, const Tables &t, const Item &item,
                                               Visit visit) {
  const int kind = item.kind;
  const moelora_factors &f = factors_of(p, kind);
  if (is_shrink(kind) || f.num_slices == 0 || t.segments == 0)
    return;
  const int end = kind == W13 ? t.first_segment[item.unit + 1] : t.segments;
  int turn = kind == W13 ? 0 : threadIdx.x / 32;
#pragma unroll 1
  for (int s = t.first_segment[item.unit]; s < end; s++) {
    const int rank = rank_in(f, t.segment_rank[s]), groups = (rank + 15) / 16;
#pragma unroll 1
    for (int first = 0; first < groups * f.num_slices; first += 2) {
      if (turn == 0)
        visit(Piece{s, rank, groups, first});
      turn = kind == W13 ? 0 : (turn + kWarps - 1) % kWarps;
    }
  }
}

/* This lane's eight ranks of a piece. */
struct Eight {
  int slice, column, left; // left: 0 where there are none
};

__device__ __forceinline__ Eight eight_of(const moelora_factors &f, const Piece &piece) {
  const int c = threadIdx.x % 4, group = piece.first + c / 2;
  Eight e;
  e.slice = (int)((unsigned)group / (unsigned)piece.groups);
  e.column = (group - e.slice * piece.groups) * 16 + c % 2 * 8;
  e.left = e.slice < f.num_slices ? min(8, max(0, piece.rank - e.column)) : 0;
  return e;
}

/* They in B's row of g + 8 half; NULL where the slice has none. */
__device__ __forceinline__ const uint16_t *piece_row(const Params &p, const Tables &t,
                                                     const Item &item, const Piece &piece,
                                                     const Eight &e, int half) {
  const int kind = item.kind;
  const moelora_factors &f = factors_of(p, kind);
  const int output = output_of(p, item, threadIdx.x % 32 / 4, half);
  const int64_t n = weight_row(p, kind, output, half) - e.slice * f.slice_n;
  if (output >= outputs_of(p, kind) || n < 0 || n >= f.slice_n || e.left == 0)
    return nullptr;
  return factor_row<uint16_t>(f.b[e.slice], t.segment_adapter[piece.segment],
                              t.expert[t.segment_unit[piece.segment]], n) +
         e.column;
}

__device__ __forceinline__ void prefetch_pieces(const Params &p, const Tables &t,
                                                const Item &item) {
  for_each_piece(p, t, item, [&](const Piece &piece) {
    const Eight e = eight_of(factors_of(p, item.kind), piece);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (const uint16_t *row = piece_row(p, t, item, piece, e, half))
        prefetch_l2(row);
  });
}

/* The first `count` of eight elements; what a factor holds beyond the true rank may be NaN. */
__device__ __forceinline__ uint4 keep_elements(uint4 v, int count) {
  auto keep = [&](uint32_t pair, int first) {
    return count >= first + 2 ? pair : count == first + 1 ? pair & 0xffff : 0;
  };
  return make_uint4(keep(v.x, 0), keep(v.y, 2), keep(v.z, 4), keep(v.w, 6));
}

/* total += hl B^T for the tokens that carry each adapter. */
template <class T>
__device__ __forceinline__ void expand(const Params &p, const Tables &t, const Item &item,
                                       float (&total)[4]) {
  const int lane = threadIdx.x % 32, kind = item.kind, projection = kind == W2;
  for_each_piece(p, t, item, [&](const Piece &piece) {
    const moelora_factors &f = factors_of(p, kind);
    const Eight e = eight_of(f, piece);
    const int unit = t.segment_unit[piece.segment], width = moelora_padded_rank(f.max_rank);
    const uint32_t tokens = t.segment_tokens[piece.segment];
    uint4 b[2];
    uint32_t rows = 0; // bit of each half that some lane of the quad has ranks for
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint16_t *from = piece_row(p, t, item, piece, e, half);
      b[half] = p.b_vectors[projection]
                    ? keep_elements(load_16<Read::CONSTANT>(from, from != nullptr), e.left)
                    : load_elements(from, from ? e.left : 0);
      rows |= (uint32_t)((__ballot_sync(~0u, from != nullptr) >> (lane & 28) & 15) != 0) << half;
    }
    const uint16_t *hl = p.hl[projection] +
                         ((int64_t)t.row[unit][lane / 4] * f.num_slices + e.slice) * width +
                         e.column;
    const uint4 x = load_16<Read::WRITTEN>(hl, e.left > 0 && (tokens >> lane / 4 & 1));
    float d[2][4] = {};
    multiply_block<T>(d, b, x);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = lane % 4 * 2 + i;
      if (!(tokens >> token & 1))
        continue;
      const float weight = kind == W2 ? t.weight[unit][token] : 1.f;
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (rows >> half & 1)
          total[2 * half + i] += weight * (d[0][2 * half + i] + d[1][2 * half + i]);
    }
  });
}

} // namespace decode

#endif
