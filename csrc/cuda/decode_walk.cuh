/* Items of the decode kernel: which of them a CTA has, how its warps walk through them, and which
 * rows of weights, factors and outputs belong to them. */
#ifndef MOELORA_CUDA_DECODE_WALK_CUH
#define MOELORA_CUDA_DECODE_WALK_CUH

#include "decode_tables.cuh"

namespace decode {

constexpr int kBlockDepth = 32;
/* Blocks of a chunk: 64 registers, of the 128 at two CTAs per SM. */
constexpr int kChunk = 8;

struct Params {
  moelora_experts_problem p;
  int32_t tiles13; // items of W13 in a unit
  bool gated, interleaved;
  bool a_vectors[2], b_vectors[2]; // factors allow 16-byte accesses; of w13, of w2
  uint16_t *h;                     // [P, I]
  uint16_t *hl[2];                 // [P, num_slices * padded rank]; of w13, of w2
};

/* Where a warp is: the blocks [block, end) of an item that it has yet to multiply. */
struct Walk {
  int kind, index, block, end;
};

/* Up to kChunk blocks of one unit. */
struct Chunk {
  int unit, first, blocks;
};

__device__ __forceinline__ bool is_shrink(int kind) {
  return kind == SHRINK13 || kind == SHRINK2;
}

__device__ __forceinline__ const moelora_factors &factors_of(const Params &p, int kind) {
  return kind < SHRINK2 ? p.p.w13_lora : p.p.w2_lora;
}

__device__ __forceinline__ int depth_of(const Params &p, int kind) {
  return (int)(kind < SHRINK2 ? p.p.hidden : p.p.intermediate);
}

__device__ __forceinline__ int blocks_of(const Params &p, int kind) {
  return (depth_of(p, kind) + kBlockDepth - 1) / kBlockDepth;
}

/* ---- from one chunk to the next ---- */

/* Shrink items are dealt from the last CTA on: the first ones have the odd items of W13 and W2. */
__device__ __forceinline__ int first_item(int kind) {
  return (int)(is_shrink(kind) ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* Settles on the next item at or after walk.index that there is. A warp has a chunk in every item
 * of its CTA, if an empty one. */
__device__ __forceinline__ void open_item(const Params &p, const Tables &t, Walk &walk) {
  while (walk.kind < DONE && walk.index >= t.items[walk.kind])
    walk.index = first_item(++walk.kind);
  const int warp = threadIdx.x / 32;
  const int blocks = blocks_of(p, walk.kind) * (walk.kind == W2 ? t.units : 1);
  walk.block = warp * blocks / kWarps;
  walk.end = (warp + 1) * blocks / kWarps;
}

__device__ __forceinline__ Chunk chunk_of(const Params &p, const Tables &t, const Walk &walk) {
  Chunk chunk = {0, walk.block, 0};
  const int blocks = blocks_of(p, walk.kind);
  if (walk.kind == W13)
    chunk.unit = walk.index / p.tiles13;
  else if (walk.kind == W2)
    chunk.unit = walk.block / blocks, chunk.first = walk.block % blocks;
  else if (walk.kind != DONE)
    chunk.unit = t.segment_unit[segment_of(t, walk.kind == SHRINK2, walk.index)];
  if (walk.kind != DONE)
    chunk.blocks = min(min(kChunk, blocks - chunk.first), walk.end - walk.block);
  return chunk;
}

/* False when that was the item's last chunk, and the walk is in another item. */
__device__ __forceinline__ bool advance(const Params &p, const Tables &t, Walk &walk) {
  walk.block += chunk_of(p, t, walk).blocks;
  if (walk.block < walk.end)
    return true;
  walk.index += gridDim.x;
  open_item(p, t, walk);
  return false;
}

/* ---- rows of an item ---- */

/* 16 ranks of one slice of a segment's adapter. */
struct Ranks {
  int segment, slice, first, rank;
};

__device__ __forceinline__ Ranks ranks_of(const Params &p, const Tables &t, int kind, int index) {
  const int projection = kind == SHRINK2;
  Ranks r;
  r.segment = segment_of(t, projection, index);
  r.rank = rank_in(factors_of(p, kind), t.segment_rank[r.segment]);
  const int groups = (r.rank + 15) / 16;
  const int item = index - (r.segment ? t.shrinks_end[projection][r.segment - 1] : 0);
  r.slice = item / groups;
  r.first = item % groups * 16;
  return r;
}

/* Output that row g + 8 half of a W13 or W2 item stands for; it may lie behind the last one. */
__device__ __forceinline__ int output_of(const Params &p, int kind, int index, int g, int half) {
  if (kind == W13 && p.gated)
    return index % p.tiles13 * 8 + g;
  return (kind == W13 ? index % p.tiles13 : index) * 16 + 8 * half + g;
}

__device__ __forceinline__ int outputs_of(const Params &p, int kind) {
  return (int)(kind == W13 ? p.p.intermediate : p.p.hidden);
}

/* Row of w13 or w2, and of its bias, that makes an output. */
__device__ __forceinline__ int64_t weight_row(const Params &p, int kind, int output, int half) {
  if (kind == W2 || !p.gated)
    return output;
  return p.interleaved ? 2 * (int64_t)output + half : half * p.p.intermediate + output;
}

/* Row g + 8 half of an item at depth 0. What lies behind the last row repeats it: nobody looks at
 * the sums. */
__device__ __forceinline__ const uint16_t *item_row(const Params &p, const Tables &t,
                                                    const Walk &walk, int unit, int g, int half) {
  const int64_t expert = t.expert[unit];
  if (is_shrink(walk.kind)) {
    const Ranks r = ranks_of(p, t, walk.kind, walk.index);
    const moelora_factor &a = factors_of(p, walk.kind).a[r.slice];
    return (const uint16_t *)a.data + t.segment_adapter[r.segment] * a.stride_l +
           expert * a.stride_e + min(r.first + 8 * half + g, r.rank - 1) * a.stride_i;
  }
  const moelora_weights &w = walk.kind == W13 ? p.p.w13 : p.p.w2;
  const int output =
      min(output_of(p, walk.kind, walk.index, g, half), outputs_of(p, walk.kind) - 1);
  return (const uint16_t *)w.data + expert * w.stride_e +
         weight_row(p, walk.kind, output, half) * w.stride_n;
}

} // namespace decode

#endif
