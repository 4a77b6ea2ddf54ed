/* Work items of the blockwise shrink: tokens of a segment by up to RANKS rows of A, concatenated
 * over slices. Teams that have the same rows of A take up to `part` tokens each.
 *
 * With `listed`, every CTA counts the items of all listed segments and takes every gridDim-th item,
 * so that CTAs differ by at most one item. Concurrent CTAs then share A in L2 or, if segments are
 * ordered by adapter, the adapter's rows of x.
 *
 * Otherwise, each warp searches blocks for segments. The items of a block are distributed to
 * `shares` work units, and these to the warps of CTAs, such that concurrent CTAs work on a `group`
 * of adjacent blocks. */
#pragma once

#include "cuda/gemm/common/segments.cuh"
#include "cuda/shrink/segments.cuh"

constexpr int kLaneTokens = 8;   // maximum tokens of a block per lane
constexpr int kShares = 8;       // usual work units per block, for every RANKS ranks
constexpr int kSegmentBatch = 5; // loads in flight per thread

struct ShrinkParams {
  moelora_shrink_launch s;
  int32_t part, shares, group;
  bool listed; // whether items are taken from listed segments
  bool few;    // whether to search all blocks, without loading how many are in use
};

/* Distributes an item with a given number of columns over the teams of a CTA: team t * ranks + r
 * takes the r-th part of the columns and the t-th part of the tokens. */
template <class S> struct Teams {
  static_assert(S::TEAMS <= 2, "one side takes them all");
  int ranks, tokens;

  __device__ __forceinline__ explicit Teams(int columns)
      : ranks(columns > S::TEAM_RANKS ? S::TEAMS : 1), tokens(S::TEAMS / ranks) {}
  /* Returns the number of tokens per team, of `count` tokens. */
  __device__ __forceinline__ int split(int count) const {
    return ceil_divide(count, 8 * tokens) * 8;
  }
};

/* Splits a segment into `parts` of up to `tokens` tokens, and each into `chunks` of columns. */
template <class S> struct SegmentCut {
  int tokens = 1, parts = 0, chunks = 0, columns = 0;

  __device__ __forceinline__ SegmentCut(const ShrinkParams &p, int packed, int rows) {
    if (packed < 0 || rows == 0)
      return;
    columns = columns_of(p.s.adapters, packed);
    const Teams<S> teams(columns);
    const int most = teams.tokens * p.part;
    tokens = rows, parts = 1, chunks = ceil_divide(columns, S::RANKS);
    if (rows > most) {
      tokens = teams.split(ceil_divide(rows, ceil_divide(rows, most))) * teams.tokens;
      parts = ceil_divide(rows, tokens);
    }
  }
  __device__ __forceinline__ int items() const { return parts * chunks; }
};

template <class S> struct ShrinkItems {
  static constexpr int OF_WARP = 32 * kLaneTokens / kShares; // maximum per work unit
  static constexpr int LISTED = S::WARPS * OF_WARP;
  SegmentItem items[S::WARPS][OF_WARP];
  int found[S::WARPS];

  /* Lists the CTA's items from number `from` on, as many as fit. Returns the number of all items of
   * the CTA. Called by all threads. */
  __device__ __forceinline__ int list(const ShrinkParams &p, int from) {
    const int segments = segments_of(p.s), each = ceil_divide(segments, S::THREADS);
    const int low = min((int)threadIdx.x * each, segments), high = min(low + each, segments);
    const int cta = blockIdx.x, ctas = gridDim.x;
    int own = 0, all;
    visit(p, low, high, [&](int, const int4 &, const SegmentCut<S> &cut) { own += cut.items(); });
    int before = sum_before<S::WARPS>(own, found, &all, [] { __syncthreads(); });
    // The CTA has items cta + i * ctas. The first of them in this thread's segments is number
    // `next` among all items, and number `slot` among the CTA's.
    int slot = before <= cta ? 0 : ceil_divide(before - cta, ctas), next = cta + slot * ctas;
    if (next < before + own)
      visit(p, low, high, [&](int key, const int4 &v, const SegmentCut<S> &cut) {
        const int end = before + cut.items();
        for (; next < end; next += ctas, slot++)
          if (slot >= from && slot < from + LISTED)
            items[0][slot - from] = item_of(p.s, key, v, cut, next - before);
        before = end;
      });
    __syncthreads();
    return all <= cta ? 0 : ceil_divide(all - cta, ctas);
  }

  /* Lists the items of a work unit and returns their number. Each warp has its own work unit. */
  __device__ __forceinline__ int find(const ShrinkParams &p, int blocks, int work_unit) {
    const moelora_shrink_launch &s = p.s;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = s.schedule.blocks.rows;
    if (work_unit >= blocks * p.shares)
      return 0;
    const int before = work_unit / (p.group * p.shares) * p.group; // blocks of the previous groups
    const int height = min(p.group, blocks - before), rest = work_unit - before * p.shares;
    const int block = before + rest % height, share = rest / height;
    const int position = block * rows;
    if (s.tokens.divisor.value && lane * 8 < rows)
      prefetch(s.schedule.blocks.sorted_ids + position + lane * 8);
    const int expert = s.schedule.blocks.expert_ids[block];
    Segments<kLaneTokens> segments;
    segments.load(s.schedule.blocks, s.adapters.lora.max_rank, position, rows);
    const uint32_t magic = moelora_divisor_of(rows).magic;
    int count = 0; // items of the block so far
#pragma unroll 1
    for (int i = 0; i * 32 < rows; i++) {
      const int low = i * 32 + lane;
      int packed = -1, high = low;
#pragma unroll
      for (int j = 0; j < kLaneTokens; j++)
        if (j == i && segments.starts[j] >> lane & 1)
          packed = segments.packed[j];
      if (packed >= 0) {
        high = segments.next(low + 1, rows);
        if (s.scalings)
          prefetch(s.scalings + packed / kRanks);
      }
      const SegmentCut<S> cut(p, packed, high - low);
      const int end = warp_inclusive_sum(cut.items()), first = count + end - cut.items();
      for (int j = (share + p.shares - first % p.shares) % p.shares; j < cut.items();
           j += p.shares) {
        const int at = low + j / cut.chunks * cut.tokens;
        items[warp][(first + j) / p.shares] = SegmentItem{expert,
                                                          packed,
                                                          position,
                                                          at,
                                                          rows,
                                                          magic,
                                                          min(cut.tokens, high - at),
                                                          (uint16_t)(j % cut.chunks * S::RANKS),
                                                          (uint16_t)cut.columns};
      }
      count += __shfl_sync(0xffffffffu, end, 31);
    }
    return (count - share + p.shares - 1) / p.shares;
  }

private:
  /* Visits segments [low, high) of the list, or of its order by adapter, with several loads in
   * flight. */
  template <class Visit>
  static __device__ __forceinline__ void visit(const ShrinkParams &p, int low, int high,
                                               Visit visit) {
    const int experts = p.s.schedule.num_experts, adapters = p.s.schedule.max_loras + 1;
    const int step = p.s.by_adapter ? adapters : 1, segments = experts * adapters;
    int key = p.s.by_adapter ? low % experts * adapters + low / experts : low;
#pragma unroll 1
    for (int base = low; base < high; base += kSegmentBatch) {
      int4 batch[kSegmentBatch];
      int keys[kSegmentBatch];
#pragma unroll
      for (int u = 0; u < kSegmentBatch; u++) {
        keys[u] = key;
        batch[u] = load_segment(p.s, key);
        if (base + u + 1 < high)
          key += key + step < segments ? step : step + 1 - segments;
      }
#pragma unroll
      for (int u = 0; u < kSegmentBatch; u++)
        if (base + u < high)
          visit(keys[u], batch[u], SegmentCut<S>(p, batch[u].x, batch[u].z));
    }
  }

  /* Returns item `number` of a segment; the parts of a chunk are consecutive. */
  static __device__ __forceinline__ SegmentItem item_of(const moelora_shrink_launch &s, int key,
                                                        const int4 &v, const SegmentCut<S> &cut,
                                                        int number) {
    const moelora_segment segment = {v.x, v.y, v.z, v.w};
    const int chunk = number / cut.parts, from = (number - chunk * cut.parts) * cut.tokens;
    const int block = segment.position / s.schedule.blocks.rows * s.schedule.blocks.rows;
    return {key / (s.schedule.max_loras + 1),
            segment.packed,
            block,
            segment.position - block + from,
            segment.share,
            moelora_divisor_of(segment.share).magic,
            min(cut.tokens, segment.count - from),
            (uint16_t)(chunk * S::RANKS),
            (uint16_t)cut.columns};
  }
};
