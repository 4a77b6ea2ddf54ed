/* The scheduler of the decode kernel: which work items a CTA has, how its warps go through them,
 * and which rows of weights, factors and outputs belong to them. */
#ifndef MOELORA_CUDA_DECODE_SCHEDULER_CUH
#define MOELORA_CUDA_DECODE_SCHEDULER_CUH

#include "cuda/decode/tables.cuh"
#include "cuda/launch/divisor.h"
#include "cuda/launch/factors.cuh"

namespace decode {

constexpr int kBlockDepth = 32;
constexpr int kChunk = 8; // blocks in flight: 64 registers, of the 128 at two CTAs per SM

struct DecodeParams {
  moelora_experts_problem p;
  int32_t tiles13;            // items of W13 of an active expert
  moelora_divisor by_tiles13; // of weights in tiles
  int32_t most_shrinks13;     // more items SHRINK13 cannot have, whatever ids say
  int32_t staged_bytes;       // for tokens in shared memory; of weights in tiles
  int32_t span_blocks[2];     // of a shrink: blocks of depth that are summed apart; of w13, of w2
  bool gated, interleaved;
  bool a_vectors[2], b_vectors[2]; // factors allow 16-byte accesses; of w13, of w2
  uint32_t *digests;               // [CTAs] of what each read of the tables
  Reading *reading;                // of the first CTA
  uint16_t *h;                     // [P, I]
  uint16_t *xa[2];                 // [P, num_slices * padded rank]; of w13, of w2
};

/* launch_<FORMAT>, of decode.cu and a file for each kernel format of tiles: queues its kernel on at
 * most `work` CTAs. */
#define MOELORA_CUDA_DECODE(NAME, DTYPE, FORMAT, FAMILY)                                           \
  moelora_status launch_##FORMAT(const DecodeParams &params, int64_t work,                         \
                                 const moelora_exec *exec, bool *fits);
#include "cuda/variants.inc"

/* Where a warp is: before product `part` of an item. Of W2 that is the one with active expert
 * number `part`, which a CTA's warps share out; of a shrink the warp's span of the depth. */
struct WorkIterator {
  int kind, index, part;
};

/* An item: 16 rows of the weights of active expert number `active`, which in one of W2 is that of
 * the product at hand. */
struct WorkItem {
  int kind, active, tile;
};

/* A k-span: neighbouring blocks of one active expert, what a warp sums in one accumulator. */
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

__device__ __forceinline__ WorkItem item_of(const DecodeParams &p, int kind, int index) {
  WorkItem item = {kind, 0, index};
  if (kind == W13) {
    item.active = (int)((unsigned)index / (unsigned)p.tiles13);
    item.tile = index - item.active * p.tiles13;
  }
  return item;
}

/* ---- from one k-span to the next ---- */

/* Shrink items are dealt from the last CTA on: the first ones cannot have any of SHRINK13. */
__device__ __forceinline__ int free_ctas(const DecodeParams &p) {
  return max((int)gridDim.x - p.most_shrinks13, 0);
}

/* Items of W13 belong to single warps, first to those of free CTAs, then to the others; in a CTA
 * last to the warp that takes part in grid syncs. */
__device__ __forceinline__ void deal_w13(const DecodeParams &p, Tables &t) {
  const int ctas = gridDim.x, cta = blockIdx.x, free = free_ctas(p);
  t.first_w13 = cta < free ? cta : kWarps * free + cta - free;
  t.next_w13 = cta < free ? free : ctas - free;
}

__device__ __forceinline__ int first_item(const Tables &t, int kind) {
  if (kind == W13)
    return t.first_w13 + (kWarps - 1 - (int)threadIdx.x / 32) * t.next_w13;
  return (int)(is_shrink(kind) ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* Settles on an item: behind the last shrink, on the first of what follows. */
__device__ __forceinline__ void open_item(const DecodeParams &p, const Tables &t,
                                          WorkIterator &work) {
  if (is_shrink(work.kind) && work.index >= t.items[work.kind])
    work.index = first_item(t, ++work.kind);
  work.part = work.kind == W13 ? 0 : threadIdx.x / 32;
}

__device__ __forceinline__ bool is_there(const Tables &t, const WorkIterator &work) {
  return work.index < t.items[work.kind];
}

/* What comes next; an empty span where a warp has nothing of an item, or no item. */
__device__ __forceinline__ KSpan span_of(const DecodeParams &p, const Tables &t,
                                         const WorkIterator &work) {
  KSpan span = {0, 0, 0};
  if (!is_there(t, work) || (work.kind == W2 && work.part >= t.active_experts))
    return span;
  const int blocks = blocks_of(p, work.kind);
  span.blocks = blocks;
  if (work.kind == W13) {
    span.active = item_of(p, W13, work.index).active;
  } else if (work.kind == W2) {
    span.active = work.part;
  } else {
    const int each = p.span_blocks[work.kind == SHRINK2];
    span.active = t.segment_active[segment_of(t, work.kind == SHRINK2, work.index)];
    span.first = min(work.part * each, blocks);
    span.blocks = min(each, blocks - span.first);
  }
  return span;
}

/* To the next product. False when that is of another item. */
__device__ __forceinline__ bool advance(const DecodeParams &p, const Tables &t,
                                        WorkIterator &work) {
  if (work.kind == W2 && work.part + kWarps < t.active_experts) {
    work.part += kWarps;
    return true;
  }
  work.index += (int)(work.kind == W13 ? kWarps * gridDim.x : gridDim.x);
  open_item(p, t, work);
  return false;
}

/* ---- rows of an item ---- */

/* 16 ranks of one slice of a segment's adapter. */
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

/* Output that row g + 8 half of an item stands for; it may lie behind the last one. */
__device__ __forceinline__ int output_of(const DecodeParams &p, const WorkItem &item, int g,
                                         int half) {
  const bool gate_up = item.kind == W13 && p.gated;
  return item.tile * (gate_up ? 8 : 16) + g + (gate_up ? 0 : 8 * half);
}

__device__ __forceinline__ int outputs_of(const DecodeParams &p, int kind) {
  return (int)(kind == W13 ? p.p.intermediate : p.p.hidden);
}

/* Row of w13 or w2, and of its bias, that makes an output. */
__device__ __forceinline__ int64_t weight_row(const DecodeParams &p, int kind, int output,
                                              int half) {
  if (kind == W2 || !p.gated)
    return output;
  return p.interleaved ? 2 * (int64_t)output + half : half * p.p.intermediate + output;
}

/* ---- items of weights in tiles: all of a CTA ---- */

/* Of W13, gated, half of the warps have gate rows, the others the matching up rows. */
__device__ __forceinline__ int warps_of_half(const DecodeParams &p) {
  return p.gated ? kWarps / 2 : kWarps;
}

__device__ __forceinline__ int half_of_warp(const DecodeParams &p, int kind) {
  return kind == W13 ? (int)threadIdx.x / 32 / warps_of_half(p) : 0;
}

__device__ __forceinline__ int depth_tiles_of(const DecodeParams &p, int kind) {
  return (depth_of(p, kind) + MOELORA_PACK - 1) / MOELORA_PACK;
}

/* This warp's item: one of W13 is 16 outputs for each warp of a half, so that `tile` is the
 * warp's. */
__device__ __forceinline__ WorkItem tile_item_of(const DecodeParams &p, const WorkIterator &work) {
  WorkItem item = {work.kind, work.part, work.index};
  if (work.kind == W13) {
    const int warps = warps_of_half(p);
    item.active = (int)divide((uint32_t)work.index, p.by_tiles13);
    item.tile = (work.index - item.active * p.tiles13) * warps + (int)threadIdx.x / 32 % warps;
  }
  return item;
}

/* The warp has product `work.part` of the item. */
__device__ __forceinline__ bool has_product(const DecodeParams &p, const Tables &t,
                                            const WorkIterator &work, const WorkItem &item) {
  return work.kind == W2 ? work.part < t.active_experts
                         : work.part == 0 && item.tile * 16 < p.p.intermediate;
}

/* Before the first product of an item. */
__device__ __forceinline__ WorkIterator first_part(int kind, int index) {
  return {kind, index, kind == W13 ? 0 : (int)threadIdx.x / 32};
}

/* ---- rows of an item that is not in tiles ---- */

/* Rows g and g + 8 of the item of `work`, at the depth where `span` begins. What lies behind the
 * last row repeats it: nobody looks at the sums. */
__device__ __forceinline__ void item_rows(const DecodeParams &p, const Tables &t,
                                          const WorkIterator &work, const KSpan &span, int g,
                                          const uint16_t *(&row)[2]) {
  const int64_t expert = t.expert[span.active];
  const uint16_t *from;
  int64_t stride, at[2];
  if (is_shrink(work.kind)) {
    const RankTile r = ranks_of(p, t, work.kind, work.index);
    const moelora_factor &a = factors_of(p, work.kind).a[r.slice];
    from = factor_row<uint16_t>(a, t.segment_adapter[r.segment], expert, 0);
    stride = a.stride_i;
    for (int half = 0; half < 2; half++)
      at[half] = min(r.first + 8 * half + g, r.rank - 1);
  } else {
    const moelora_weights &w = work.kind == W13 ? p.p.w13 : p.p.w2;
    const WorkItem item = item_of(p, work.kind, work.index);
    from = (const uint16_t *)w.data + expert * w.stride_e;
    stride = w.stride_n;
    for (int half = 0; half < 2; half++)
      at[half] = weight_row(p, work.kind,
                            min(output_of(p, item, g, half), outputs_of(p, work.kind) - 1), half);
  }
  from += span.first * kBlockDepth;
  for (int half = 0; half < 2; half++)
    row[half] = from + at[half] * stride;
}

} // namespace decode

#endif
