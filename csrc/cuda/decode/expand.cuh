/* Expand of the decode kernel: adds xa B^T to the base product. */
#ifndef MOELORA_CUDA_DECODE_EXPAND_CUH
#define MOELORA_CUDA_DECODE_EXPAND_CUH

#include "cuda/decode/product.cuh"
#include "cuda/launch/routes.cuh"
#include "cuda/launch/launch.h"

namespace decode {

/* Two consecutive k16 slabs of a segment. Slabs are numbered across slices, so the two may be of
 * different slices. In a quad, lanes 0 and 1 hold the first slab, 8 ranks each, lanes 2 and 3 the
 * second. */
struct DoubleSlab {
  int segment, rank, slabs; // slabs: per slice
  int first;                // index of the first of the two
};

/* Calls visit(slab) for the double slabs of an item, in order; a shrink item has none. */
template <class Visit>
__device__ __forceinline__ void for_each_slab(const DecodeParams &p, const Tables &t,
                                              const WorkItem &item, Visit visit) {
  const moelora_factors &f = factors_of(p, item.kind);
  if (is_shrink(item.kind) || f.num_slices == 0 || t.segments == 0 ||
      item.active >= t.active_experts)
    return;
#pragma unroll 1
  for (int s = t.first_segment[item.active]; s < t.first_segment[item.active + 1]; s++) {
    const int rank = rank_in(f, t.segment_rank[s]), slabs = (rank + 15) / 16;
#pragma unroll 1
    for (int first = 0; first < slabs * f.num_slices; first += 2)
      visit(DoubleSlab{s, rank, slabs, first});
  }
}

/* The eight ranks of a double slab that a lane multiplies: `column` is the first. */
struct LaneRanks {
  int slice, column, left; // left: number of valid ranks
};

__device__ __forceinline__ LaneRanks lane_ranks(const moelora_factors &f, const DoubleSlab &slab) {
  const int c = threadIdx.x % 4, index = slab.first + c / 2;
  LaneRanks e;
  e.slice = (int)((unsigned)index / (unsigned)slab.slabs);
  e.column = (index - e.slice * slab.slabs) * 16 + c % 2 * 8;
  e.left = e.slice < f.num_slices ? min(8, max(0, slab.rank - e.column)) : 0;
  return e;
}

/* Returns the address of a lane's ranks in B, for the item's output lane / 4 + 8 * half; NULL if
 * the lane has none. */
__device__ __forceinline__ const uint16_t *slab_row(const DecodeParams &p, const Tables &t,
                                                    const WorkItem &item, const DoubleSlab &slab,
                                                    const LaneRanks &e, int half) {
  const int kind = item.kind;
  const moelora_factors &f = factors_of(p, kind);
  const int g = threadIdx.x % 32 / 4;
  const int output = item.tile * 16 + g + 8 * half;
  const int64_t n = weight_row(p, kind, output, half_of_warp(p, kind)) - e.slice * f.slice_n;
  if (output >= outputs_of(p, kind) || n < 0 || n >= f.slice_n || e.left == 0)
    return nullptr;
  return factor_row<uint16_t>(f.b[e.slice], t.segment_adapter[slab.segment],
                              t.expert[t.segment_active[slab.segment]], n) +
         e.column;
}

__device__ __forceinline__ void prefetch_slabs(const DecodeParams &p, const Tables &t,
                                               const WorkItem &item) {
  for_each_slab(p, t, item, [&](const DoubleSlab &slab) {
    const LaneRanks e = lane_ranks(factors_of(p, item.kind), slab);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (const uint16_t *row = slab_row(p, t, item, slab, e, half))
        prefetch_l2(row);
  });
}

/* Zeroes elements from `count` on: beyond the true rank a factor may hold NaN. */
__device__ __forceinline__ uint4 keep_elements(uint4 v, int count) {
  auto keep = [&](uint32_t word, int first) {
    return count >= first + 2 ? word : count == first + 1 ? word & 0xffff : 0;
  };
  return make_uint4(keep(v.x, 0), keep(v.y, 2), keep(v.z, 4), keep(v.w, 6));
}

/* Adds xa B^T to d: the delta of each adapter to its tokens only. */
template <class T>
__device__ __forceinline__ void expand(const DecodeParams &p, const Tables &t, const WorkItem &item,
                                       float (&d)[4]) {
  const int lane = threadIdx.x % 32, kind = item.kind, projection = kind == W2;
  for_each_slab(p, t, item, [&](const DoubleSlab &slab) {
    const moelora_factors &f = factors_of(p, kind);
    const LaneRanks e = lane_ranks(f, slab);
    const int active = t.segment_active[slab.segment], width = moelora_padded_rank(f.max_rank);
    const uint32_t tokens = t.segment_tokens[slab.segment];
    uint4 b[2];
    uint32_t rows = 0; // bit `half`: a lane of the quad has ranks for output lane / 4 + 8 * half
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint16_t *from = slab_row(p, t, item, slab, e, half);
      b[half] = p.b_vectors[projection]
                    ? keep_elements(load_16<Read::CONSTANT>(from, from != nullptr), e.left)
                    : load_elements(from, from ? e.left : 0);
      rows |= (uint32_t)((__ballot_sync(~0u, from != nullptr) >> (lane & 28) & 15) != 0) << half;
    }
    const uint16_t *xa = p.xa[projection] +
                         ((int64_t)t.row[active][lane / 4] * f.num_slices + e.slice) * width +
                         e.column;
    const uint4 x = load_16<Read::WRITTEN>(xa, e.left > 0 && (tokens >> lane / 4 & 1));
    float with[4] = {d[0], d[1], d[2], d[3]};
    multiply_block<T>(with, b, x);
#pragma unroll
    for (int q = 0; q < 4; q++)
      if (tokens >> (lane % 4 * 2 + q % 2) & 1 && rows >> q / 2 & 1)
        d[q] = with[q];
  });
}

} // namespace decode

#endif
