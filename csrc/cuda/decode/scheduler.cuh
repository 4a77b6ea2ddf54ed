/* Work scheduler of the decode kernel: assigns items to CTAs, iterates over them, and maps them to
 * rows of weights, factors and outputs. */
#ifndef MOELORA_CUDA_DECODE_SCHEDULER_CUH
#define MOELORA_CUDA_DECODE_SCHEDULER_CUH

#include "cuda/decode/tables.cuh"
#include "cuda/launch/divisor.h"
#include "cuda/launch/routes.cuh"

namespace decode {

constexpr int kBlockDepth = 32;
constexpr int kChunk = 8; // blocks in flight: 64 registers of the 128 available at two CTAs per SM

struct DecodeParams {
  moelora_experts_problem p;
  int32_t tiles13;            // W13 items per active expert
  moelora_divisor by_tiles13; // divides by tiles13
  int32_t max_shrinks13;      // upper bound of SHRINK13 items, whatever ids contain
  int32_t staged_bytes;       // shared memory for tokens
  int32_t span_blocks[2];     // [projection] blocks of K per span of a shrink
  bool gated, interleaved;
  bool a_vectors[2], b_vectors[2]; // [projection] whether factors allow 16-byte accesses
  uint32_t *digests;               // [kCopies, digest_pitch] digest of each CTA's snapshot
  RoutingSnapshot *snapshot;       // snapshot of the first CTA
  uint16_t *h;                     // [P, I]
  uint16_t *xa[2];                 // [projection] [P, num_slices * padded rank]
};

/* launch_<FORMAT>, in a generated source per kernel format, launches the kernel on at most `work`
 * CTAs. */
#define MOELORA_CUDA_DECODE(STEM, FORMAT, FAMILY)                                                  \
  moelora_status launch_##FORMAT(const DecodeParams &params, int64_t work,                         \
                                 const moelora_exec *exec, bool *fits);
#include "cuda/variants.inc"

/* Position of a warp: product `part` of item `index`. In W2, `part` is an active expert: the warps
 * of a CTA split the experts. In a shrink, it is the warp's K span. In W13, it is 0. */
struct WorkIterator {
  int kind, index, part;
};

/* W13 and W2: a warp's product, of 16 outputs, from 16 * tile on, for active expert `active`.
 * Shrinks: `tile` is the index of the item. */
struct WorkItem {
  int kind, active, tile;
};

/* K span of a shrink: `blocks` blocks of K, from `first` on, that a warp multiplies. */
struct KSpan {
  int active, first, blocks;
};

__device__ __forceinline__ bool is_shrink(int kind) {
  return kind == SHRINK13 || kind == SHRINK2;
}

__device__ __forceinline__ const moelora_factors &factors_of(const DecodeParams &p, int kind) {
  return kind < SHRINK2 ? p.p.w13_lora : p.p.w2_lora;
}

__device__ __forceinline__ int depth_of(const DecodeParams &p, int kind) {
  return (int)(kind < SHRINK2 ? p.p.hidden : p.p.intermediate);
}

__device__ __forceinline__ int blocks_of(const DecodeParams &p, int kind) {
  return (depth_of(p, kind) + kBlockDepth - 1) / kBlockDepth;
}

/* ---- iteration over K spans ---- */

/* Returns n such that the first n CTAs have no SHRINK13 item. The last CTA takes the first item. */
__device__ __forceinline__ int free_ctas(const DecodeParams &p) {
  return max((int)gridDim.x - p.max_shrinks13, 0);
}

__device__ __forceinline__ int first_shrink() {
  return (int)(gridDim.x - 1 - blockIdx.x);
}

__device__ __forceinline__ bool has_item(const Tables &t, const WorkIterator &work) {
  return work.index < t.items[work.kind];
}

/* Returns the warp's K span of the shrink item at `work`; empty if there is none. */
__device__ __forceinline__ KSpan span_of(const DecodeParams &p, const Tables &t,
                                         const WorkIterator &work) {
  if (!has_item(t, work))
    return {0, 0, 0};
  const int projection = work.kind == SHRINK2, each = p.span_blocks[projection];
  const int blocks = blocks_of(p, work.kind), first = min(work.part * each, blocks);
  return {t.segment_active[segment_of(t, projection, work.index)], first,
          min(each, blocks - first)};
}

/* ---- rows of an item ---- */

/* Up to 16 ranks, from `first` on, of one slice of a segment's adapter, whose rank is `rank`. */
struct RankTile {
  int segment, slice, first, rank;
};

__device__ __forceinline__ RankTile ranks_of(const DecodeParams &p, const Tables &t, int kind,
                                             int index) {
  const int projection = kind == SHRINK2;
  RankTile r;
  r.segment = segment_of(t, projection, index);
  r.rank = rank_in(factors_of(p, kind), t.segment_rank[r.segment]);
  const unsigned groups = (r.rank + 15) / 16u;
  const unsigned left = index - (r.segment ? t.shrinks_end[projection][r.segment - 1] : 0);
  r.slice = (int)(left / groups);
  r.first = (int)(left - r.slice * groups) * 16;
  return r;
}

__device__ __forceinline__ int outputs_of(const DecodeParams &p, int kind) {
  return (int)(kind == W13 ? p.p.intermediate : p.p.hidden);
}

/* Returns the row of w13 or w2, and of its bias, that computes an output. half: 0 gate, 1 up. */
__device__ __forceinline__ int64_t weight_row(const DecodeParams &p, int kind, int output,
                                              int half) {
  if (kind == W2 || !p.gated)
    return output;
  return p.interleaved ? 2 * (int64_t)output + half : half * p.p.intermediate + output;
}

/* ---- W13 and W2 items ---- */

/* Returns the number of warps that multiply the rows of a half: in gated W13 items, half of the
 * warps multiply gate rows, the others up rows of the same outputs. */
__device__ __forceinline__ int warps_of_half(const DecodeParams &p) {
  return p.gated ? kWarps / 2 : kWarps;
}

__device__ __forceinline__ int half_of_warp(const DecodeParams &p, int kind) {
  return kind == W13 ? (int)threadIdx.x / 32 / warps_of_half(p) : 0;
}

__device__ __forceinline__ int depth_tiles_of(const DecodeParams &p, int kind) {
  return (depth_of(p, kind) + MOELORA_PACK - 1) / MOELORA_PACK;
}

/* Returns this warp's item. In W13 each warp of a half has 16 outputs, so `tile` differs between
 * warps. */
__device__ __forceinline__ WorkItem item_of(const DecodeParams &p, const WorkIterator &work) {
  WorkItem item = {work.kind, work.part, work.index};
  if (work.kind == W13) {
    const int warps = warps_of_half(p);
    item.active = (int)divide((uint32_t)work.index, p.by_tiles13);
    item.tile = (work.index - item.active * p.tiles13) * warps + (int)threadIdx.x / 32 % warps;
  }
  return item;
}

/* Returns whether the item has product `work.part`. */
__device__ __forceinline__ bool has_product(const DecodeParams &p, const Tables &t,
                                            const WorkIterator &work, const WorkItem &item) {
  return work.kind == W2 ? work.part < t.active_experts
                         : work.part == 0 && item.tile * 16 < p.p.intermediate;
}

/* Returns the position of this warp's first product of an item. */
__device__ __forceinline__ WorkIterator first_part(int kind, int index) {
  return {kind, index, kind == W13 ? 0 : (int)threadIdx.x / 32};
}

/* ---- rows of a shrink item ---- */

/* Sets `row` to the addresses of rows g and g + 8 of A in the shrink item at `work`, at the start
 * of `span`. Rows past the true rank repeat the last row; epilogue_shrink() stores 0 for them. */
__device__ __forceinline__ void item_rows(const DecodeParams &p, const Tables &t,
                                          const WorkIterator &work, const KSpan &span, int g,
                                          const uint16_t *(&row)[2]) {
  const RankTile r = ranks_of(p, t, work.kind, work.index);
  const moelora_factor &a = factors_of(p, work.kind).a[r.slice];
  const uint16_t *from =
      factor_row<uint16_t>(a, t.segment_adapter[r.segment], t.expert[span.active], 0);
  for (int half = 0; half < 2; half++)
    row[half] =
        from + span.first * kBlockDepth + min(r.first + 8 * half + g, r.rank - 1) * a.stride_i;
}

} // namespace decode

#endif
