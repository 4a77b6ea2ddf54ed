/* The scheduler of the decode kernel: which work items a CTA has, how its warps go through them,
 * and which rows of weights, factors and outputs belong to them. */
#ifndef MOELORA_CUDA_DECODE_SCHEDULER_CUH
#define MOELORA_CUDA_DECODE_SCHEDULER_CUH

#include "cuda/decode/tables.cuh"
#include "cuda/launch/factors.cuh"
#include "cuda/launch/divisor.h"

namespace decode {

constexpr int kBlockDepth = 32;
constexpr int kChunk = 8; // blocks in flight: 64 registers, of the 128 at two CTAs per SM

struct DecodeParams {
  moelora_experts_problem p;
  int32_t tiles13;                       // items of W13 of an active expert
  moelora_divisor by_tiles13, by_depth2; // by the tiles of depth of w2
  int32_t most_shrinks13;                // more items SHRINK13 cannot have, whatever ids say
  int32_t staged_bytes;                  // for tokens in shared memory; of weights in tiles
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

/* Where a warp is: the blocks [block, end) of an item that it has yet to begin. */
struct WorkIterator {
  int kind, index, block, end;
};

/* A W13 or W2 item: 16 rows of the weights of active expert number `active`, or of all of them (0).
 */
struct WorkItem {
  int kind, active, tile;
};

/* A k-span: neighbouring blocks of one active expert; of W13 half an item. */
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
  const int blocks = blocks_of(p, work.kind) * (work.kind == W2 ? t.active_experts : 1);
  const int warp = threadIdx.x / 32;
  work.block = work.kind == W13 ? 0 : warp * blocks / kWarps;
  work.end = work.kind == W13 ? blocks : (warp + 1) * blocks / kWarps;
}

__device__ __forceinline__ bool is_there(const Tables &t, const WorkIterator &work) {
  return work.index < t.items[work.kind];
}

/* What comes next; an empty span where a warp has nothing of an item, or no item. */
__device__ __forceinline__ KSpan span_of(const DecodeParams &p, const Tables &t,
                                         const WorkIterator &work) {
  KSpan span = {0, work.block, 0};
  if (!is_there(t, work))
    return span;
  const int blocks = blocks_of(p, work.kind);
  if (work.kind == W13)
    span.active = item_of(p, W13, work.index).active;
  else if (work.kind == W2)
    span.active = (int)((unsigned)work.block / (unsigned)blocks),
    span.first = work.block - span.active * blocks;
  else
    span.active = t.segment_active[segment_of(t, work.kind == SHRINK2, work.index)];
  span.blocks = min(blocks - span.first, work.end - work.block);
  if (work.kind == W13 && work.block == 0)
    span.blocks = min(blocks, (blocks + 2 * kChunk - 1) / (2 * kChunk) * kChunk);
  return span;
}

/* Behind `span`. False when that was the item's last, and `work` is in another item. */
__device__ __forceinline__ bool advance(const DecodeParams &p, const Tables &t, const KSpan &span,
                                        WorkIterator &work) {
  work.block += span.blocks;
  if (work.block < work.end)
    return true;
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

/* ---- items of weights in tiles: all of a CTA, 16 outputs ---- */

/* Of W13, gated, half of the warps have the gate rows, the others the matching up rows. */
__device__ __forceinline__ int warps_of_part(const DecodeParams &p, int kind) {
  return kind == W13 && p.gated ? kWarps / 2 : kWarps;
}

__device__ __forceinline__ int part_of_warp(const DecodeParams &p, int kind) {
  return (int)threadIdx.x / 32 / warps_of_part(p, kind);
}

/* Neighbouring tiles of depth of one part of an active expert. */
struct TileSpan {
  int active, part, first, tiles;
};

__device__ __forceinline__ int depth_tiles_of(const DecodeParams &p, int kind) {
  return (depth_of(p, kind) + MOELORA_PACK - 1) / MOELORA_PACK;
}

/* Gives a warp its share of the item of `work`: of the tiles of all parts and active experts. */
__device__ __forceinline__ void open_tiles(const DecodeParams &p, const Tables &t,
                                           WorkIterator &work) {
  const int parts = work.kind == W2 ? t.active_experts : p.gated ? 2 : 1;
  const int tiles = depth_tiles_of(p, work.kind) * parts, warp = threadIdx.x / 32;
  work.block = warp * tiles / kWarps;
  work.end = (warp + 1) * tiles / kWarps;
}

__device__ __forceinline__ WorkItem tile_item_of(const DecodeParams &p, int kind, int index) {
  WorkItem item = {kind, 0, index};
  if (kind == W13) {
    item.active = (int)divide((uint32_t)index, p.by_tiles13);
    item.tile = index - item.active * p.tiles13;
  }
  return item;
}

/* What comes next of an item; no tiles where a warp has had all of its share. */
__device__ __forceinline__ TileSpan tile_span_of(const DecodeParams &p, const WorkItem &item,
                                                 const WorkIterator &work) {
  const int depth = depth_tiles_of(p, item.kind);
  TileSpan span = {item.active, 0, work.block, 0};
  if (item.kind == W2) {
    span.active = (int)divide((uint32_t)work.block, p.by_depth2);
    span.first -= span.active * depth;
  } else if (work.block >= depth) {
    span.part = 1;
    span.first -= depth;
  }
  span.tiles = min(depth - span.first, work.end - work.block);
  return span;
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
