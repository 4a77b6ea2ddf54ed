/* Whole segments, as the alignment lists them, shared out evenly among the CTAs of a shrink.
 *
 * Segments are laid end to end, each as long as what it reads: its rows of x and, for every TOKENS
 * of them, its rows of A. Every CTA takes an equal part of that length. A segment that lies in
 * several parts is cut between rows, in sixteens; what a part has of it is cut evenly into items of
 * up to TOKENS rows. How rows are cut changes no bit: each is multiplied by itself, over all of the
 * depth, in the same order. */
#ifndef MOELORA_CUDA_SHRINK_SEGMENTS_CUH
#define MOELORA_CUDA_SHRINK_SEGMENTS_CUH

#include "shrink_product.cuh"
#include "warp.cuh"

constexpr int kListedItems = 64; // of a CTA, listed at once
constexpr int kCut = 16;         // rows

struct SegmentShrink {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  void *hl;

  /* Columns of A of the largest rank. */
  int columns() const { return g.lora.num_slices * moelora_padded_rank(g.lora.max_rank); }

  __device__ __forceinline__ float scaling(int pair) const {
    return scalings ? scalings[pair / kRanks] : 1.f;
  }
  /* Slice 0 of what an item's token becomes. */
  template <class T, class Item>
  __device__ __forceinline__ T *row_of_hl(const Item &item, int token) const {
    const int at = item.position_of(g, token);
    return (T *)hl + (g.hl_by_row ? g.blocks.sorted_ids[at] : at) * g.hl_stride;
  }
};

/* Rows [low, high) of a segment by columns of A from `first` on. */
struct SegmentItem {
  int expert, pair, position, share, low, high, first;

  __device__ __forceinline__ int tokens() const { return high - low; }

  /* Where a token's row lies. */
  __device__ __forceinline__ int position_of(const moelora_gemm_launch &g, int token) const {
    const int rows = g.blocks.rows, block = position / rows * rows;
    const int row = position - block + low + token; // from the block's first on
    return block + row / share * rows + row % share;
  }
  __device__ __forceinline__ int x_row(const moelora_gemm_launch &g, int token) const {
    const int at = position_of(g, token);
    return g.x_divisor ? (uint32_t)g.blocks.sorted_ids[at] / (uint32_t)g.x_divisor : at;
  }
};

/* Items of a CTA, in shared memory; WARPS warps list them. */
template <int TOKENS_, int RANKS_, int WARPS_> struct ItemList {
  static constexpr int TOKENS = TOKENS_, RANKS = RANKS_, WARPS = WARPS_;
  SegmentItem items[kListedItems];
  int64_t warp_length[WARPS];
  int warp_items[WARPS];
};

/* Sum of `value` over the threads before this one, and over all of them; one `sync`. */
template <int WARPS, class Value, class Sync>
__device__ __forceinline__ Value sum_before(Value value, Value (&warp_sum)[WARPS], Value *all,
                                            Sync sync) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Value inclusive = warp_inclusive_sum(value);
  if (lane == 31)
    warp_sum[warp] = inclusive;
  sync();
  Value before = 0;
  *all = 0;
  for (int w = 0; w < WARPS; w++) {
    before += w < warp ? warp_sum[w] : 0;
    *all += warp_sum[w];
  }
  return before + inclusive - value;
}

/* What a segment reads, in rows. */
template <class L> struct SegmentLength {
  int columns, chunks;
  int64_t rows = 0;

  __device__ __forceinline__ SegmentLength(const moelora_gemm_launch &g, int pair, int count) {
    if (pair < 0 || count == 0)
      return;
    columns = columns_of(g, pair);
    chunks = ceil_divide(columns, L::RANKS);
    rows = (int64_t)count * chunks + (int64_t)ceil_divide(count, L::TOKENS) * columns;
  }

  /* The first of the segment's `count` rows that lies behind `cut`; it begins at `begin`. */
  __device__ __forceinline__ int row_at(int count, int64_t begin, int64_t cut) const {
    if (cut <= begin || rows == 0)
      return 0;
    if (cut >= begin + rows)
      return count;
    return (int)((cut - begin) * count / rows / kCut) * kCut;
  }
};

/* What a thread knows of its CTA's items: they are of segments [first, last), of which the first
 * begins at `begin`, within the CTA's part. */
template <class L> struct Share {
  int first, last = 0, before, items; // items: of the CTA; before: those of threads before this one
  int64_t begin, part_begin, part_end;

  /* All threads of the list's warps come here and meet by sync(). `pairs`, shared memory for a
   * (pair, count) of every segment, is free again afterwards. */
  template <class Sync>
  __device__ __forceinline__ Share(const moelora_gemm_launch &g, L &list, int2 *pairs, Sync sync) {
    const int segments = g.num_experts * (g.max_loras + 1);
#pragma unroll 4
    for (int i = threadIdx.x; i < segments; i += 32 * L::WARPS) {
      const moelora_segment &s = g.blocks.segments[i];
      pairs[i] = make_int2(s.pair, s.count);
    }
    sync();
    const int run = ceil_divide(segments, 32 * L::WARPS) | 1; // odd: all banks
    const int low = min((int)threadIdx.x * run, segments), high = min(low + run, segments);
    int64_t own = 0, all;
    for (int i = low; i < high; i++)
      own += SegmentLength<L>(g, pairs[i].x, pairs[i].y).rows;
    int64_t at = sum_before(own, list.warp_length, &all, sync);
    part_begin = all * blockIdx.x / gridDim.x;
    part_end = all * (blockIdx.x + 1) / gridDim.x;
    first = high;
    int own_items = 0;
    for (int i = low; i < high && at < part_end; i++) {
      const int count = pairs[i].y;
      const SegmentLength<L> length(g, pairs[i].x, count);
      const int rows = rows_in_part(length, count, at);
      if (rows > 0) {
        own_items += ceil_divide(rows, L::TOKENS) * length.chunks;
        begin = i < first ? at : begin;
        first = min(first, i), last = i + 1;
      }
      at += length.rows;
    }
    before = sum_before(own_items, list.warp_items, &items, sync);
  }

  __device__ __forceinline__ int rows_in_part(const SegmentLength<L> &length, int count,
                                              int64_t at) const {
    return length.row_at(count, at, part_end) - length.row_at(count, at, part_begin);
  }

  /* Lists the items from number `listed` on that fit. */
  __device__ __forceinline__ void write(const moelora_gemm_launch &g, L &list, int listed) const {
    int number = before - listed;
    int64_t at = begin;
    for (int i = first; i < last; i++) {
      const moelora_segment s = g.blocks.segments[i];
      const SegmentLength<L> length(g, s.pair, s.count);
      const int low = length.row_at(s.count, at, part_begin);
      const int high = length.row_at(s.count, at, part_end);
      const int cuts = ceil_divide(high - low, L::TOKENS);
      const int rows = cuts ? ceil_divide(high - low, kCut * cuts) * kCut : 0;
      for (int j = 0; j < cuts * length.chunks; j++, number++) {
        const int from = low + j / length.chunks * rows;
        if (number >= 0 && number < kListedItems)
          list.items[number] = {i / (g.max_loras + 1),
                                s.pair,
                                s.position,
                                s.share,
                                from,
                                min(from + rows, high),
                                j % length.chunks * L::RANKS};
      }
      at += length.rows;
    }
  }
};

#endif
