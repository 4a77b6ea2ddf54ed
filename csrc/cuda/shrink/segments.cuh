/* Distributes whole segments, as listed by the alignment, evenly over the CTAs of a shrink.
 *
 * The length of a segment is the number of rows that it reads: its rows of x for each RANKS rows of
 * A, and its rows of A for each TOKENS rows of x. Segments are concatenated, and every CTA takes an
 * equal part of the total. A segment in several parts is split at multiples of 16 rows. A segment
 * of up to TOKENS rows is not split if the split would reread at least twice as many rows of A as
 * the segment has rows of x, or if it is one of many short segments. The rows of a segment in a
 * part are split evenly into items of up to TOKENS rows. If there are enough CTAs, and segments
 * have similar lengths, each is split between equally many CTAs instead, and a CTA reads a single
 * A. The split does not affect results: each row is multiplied on its own, over K in the same
 * order. */
#pragma once

#include "cuda/shrink/product.cuh"
#include "cuda/gemm/common/tile.cuh"
#include "cuda/launch/warp.cuh"

constexpr int kListedItems = 64;  // per CTA, listed at a time
constexpr int kCut = 16;          // segments are split at multiples of this many rows
constexpr int kAnotherPart = 32;  // cost, in rows, of another pass over K for another segment
constexpr int kManySegments = 6;  // segments per CTA from which short ones stay whole
constexpr int kShortSegment = 64; // maximum rows; half as many take nearly as long

/* An item: `tokens` rows of a segment by up to RANKS padded ranks, from `first` on, of `columns`
 * (columns_of()). It begins `row` rows, without padding, after position `block`, where a block
 * starts. The segment's blocks have `share` rows each. */
struct SegmentItem {
  int expert, packed, block, row, share;
  uint32_t magic; // multiplier that divides by `share`
  int tokens;
  uint16_t first, columns;

  /* Returns whether both slices share one A. */
  __device__ __forceinline__ bool has_one_a(const moelora_shrink_launch &s, int width) const {
    return s.adapters.one_a && columns == width;
  }

  /* Returns the position of a token's row. */
  __device__ __forceinline__ int position_of(const moelora_shrink_launch &s, int token) const {
    const uint32_t at = row + token, blocks = divide(at, divisor_with(share, magic));
    return block + blocks * s.schedule.blocks.rows + at - blocks * share;
  }
  __device__ __forceinline__ int x_row(const moelora_shrink_launch &s, int token) const {
    uint32_t at[] = {(uint32_t)position_of(s, token)};
    find_x_rows(s.schedule.blocks, s.tokens, at);
    return at[0];
  }
};

/* Returns the address of a token's results in slice 0. */
template <class T>
__device__ __forceinline__ T *row_of_xa(const moelora_shrink_launch &s, const SegmentItem &item,
                                        int token) {
  const int at = item.position_of(s, token);
  return (T *)s.xa + (s.by_row ? s.schedule.blocks.sorted_ids[at] : at) * s.adapters.xa_stride;
}

/* Items of a CTA in shared memory. WARPS warps find its part. */
template <int TOKENS_, int RANKS_, int WARPS_> struct ItemList {
  static constexpr int TOKENS = TOKENS_, RANKS = RANKS_, WARPS = WARPS_;
  SegmentItem items[kListedItems];
  int64_t warp_length[WARPS];   // scratch of sum_before: length per warp
  int warp_used[WARPS];         // scratch of sum_before: non-empty segments per warp
  int longest;                  // maximum over segments of rows of x times chunks of ranks
  int64_t part_begin, part_end; // the CTA's part of the summed lengths of all segments
  int64_t begin;                // where segment `first` starts in that sum
  int first;                    // the first segment of the part
  int ctas;                     // CTAs per segment, which are its length; 0: lengths are in rows
  bool many;                    // whether there are kManySegments per CTA
  int all;                      // number of items of the part
};

/* Returns the sum of `value` over lower threads; sets `all` to the total. Calls sync() once. */
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

/* Length of a segment: the rows that it reads or, if `ctas` is not 0, `ctas`. */
template <class L> struct SegmentLength {
  int columns = 0, chunks = 0;
  int64_t rows = 0;
  bool whole = false; // not split

  __device__ __forceinline__ SegmentLength(const moelora_shrink_launch &s, int2 packed_and_count,
                                           int ctas = 0, bool many = false) {
    const int packed = packed_and_count.x, count = packed_and_count.y;
    if (packed < 0 || count == 0)
      return;
    columns = columns_of(s.adapters, packed);
    chunks = ceil_divide(columns, L::RANKS);
    whole = ctas == 0 && count <= L::TOKENS &&
            (columns >= 2 * count || (many && count <= kShortSegment));
    rows = ctas ? ctas : (int64_t)count * chunks + (int64_t)ceil_divide(count, L::TOKENS) * columns;
  }

  /* Returns the row (0 to `count`) at which `cut` splits the segment, which starts at `begin`. Both
   * are positions in the summed lengths. */
  __device__ __forceinline__ int row_at(int count, int64_t begin, int64_t cut) const {
    if (cut <= begin || rows == 0)
      return 0;
    if (cut >= begin + rows)
      return count;
    if (whole)
      return 2 * (cut - begin) < rows ? 0 : count;
    return (int)((cut - begin) * count / rows / kCut) * kCut;
  }
};

__device__ __forceinline__ int segments_of(const moelora_shrink_launch &s) {
  return s.schedule.num_experts * (s.schedule.max_loras + 1);
}

__device__ __forceinline__ int4 load_segment(const moelora_shrink_launch &s, int i) {
  return *(const int4 *)&s.schedule.blocks.segments[i];
}

/* Finds the CTA's part. Called by all threads of the list's warps, which synchronize by sync();
 * `sizes` is shared memory for the (packed rank, count) of every segment. */
template <class L, class Sync>
__device__ __forceinline__ void take_part(const moelora_shrink_launch &s, L &list, int2 *sizes,
                                          Sync sync) {
  constexpr int THREADS = 32 * L::WARPS, BATCH = 10; // loads in flight
  const int segments = segments_of(s);
  for (int base = threadIdx.x; base < segments; base += BATCH * THREADS) {
    int4 batch[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++)
      batch[u] = load_segment(s, min(base + u * THREADS, segments - 1));
#pragma unroll
    for (int u = 0; u < BATCH; u++)
      if (base + u * THREADS < segments)
        sizes[base + u * THREADS] = make_int2(batch[u].x, batch[u].z);
  }
  if (threadIdx.x == 0)
    list.first = segments, list.longest = 0;
  sync();
  const int per_thread = ceil_divide(segments, THREADS) | 1; // odd: avoids bank conflicts
  const int low = min((int)threadIdx.x * per_thread, segments),
            high = min(low + per_thread, segments);
  int64_t own = 0, all;
  int own_used = 0, used, longest = 0;
  for (int i = low; i < high; i++) {
    const SegmentLength<L> length(s, sizes[i]);
    own += length.rows;
    own_used += length.rows > 0;
    longest = max(longest, length.rows > 0 ? sizes[i].y * length.chunks : 0);
  }
  atomicMax(&list.longest, longest);
  int64_t at = sum_before(own, list.warp_length, &all, sync);
  const int used_before = sum_before(own_used, list.warp_used, &used, sync);
  const int each = used ? (int)gridDim.x / used : 0;
  int64_t parts = gridDim.x;
  int ctas = 0;
  // Give all segments equally many CTAs, unless equal parts with another pass over K cost less.
  if (each > 0 && list.longest / each <= all / parts + kAnotherPart) {
    ctas = each, at = (int64_t)used_before * each, own = (int64_t)own_used * each;
    all = parts = (int64_t)used * each;
  }
  const int64_t part_begin = min(all * blockIdx.x / parts, all);
  if (threadIdx.x == 0) {
    list.part_begin = part_begin, list.part_end = min(all * (blockIdx.x + 1) / parts, all);
    list.ctas = ctas;
    list.many = used >= kManySegments * (int)gridDim.x;
  }
  if (at <= part_begin && part_begin < at + own) {
    int i = low;
    for (int64_t rows; at + (rows = SegmentLength<L>(s, sizes[i], ctas).rows) <= part_begin; i++)
      at += rows;
    list.first = i, list.begin = at;
  }
  sync();
}

/* Orders the `count` listed items by adapter, so that CTAs process the same adapter at about the
 * same time and share its rows of x in L2. Called by one warp. */
template <class L> __device__ __forceinline__ void order_items(L &list, int count) {
  static_assert(kListedItems == 64, "two items per lane");
  const int lane = threadIdx.x & 31;
  SegmentItem item[2];
  int before[2] = {0, 0}; // number of items ordered before it
#pragma unroll
  for (int i = 0; i < 2; i++)
    item[i] = list.items[min(i * 32 + lane, count - 1)];
  for (int j = 0; j < count; j++) {
    const int adapter = list.items[j].packed / kRanks;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int own = item[i].packed / kRanks;
      before[i] += adapter < own || (adapter == own && j < i * 32 + lane);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (i * 32 + lane < count)
      list.items[before[i]] = item[i];
}

/* Lists the CTA's items from number `listed` on, as many as fit, and counts all items. Any warp may
 * call it; only the first does the work, one segment per lane. */
template <class L>
__device__ __forceinline__ void list_items(const moelora_shrink_launch &s, L &list, int listed) {
  if (threadIdx.x >= 32)
    return;
  const int segments = segments_of(s);
  const int64_t part_begin = list.part_begin, part_end = list.part_end;
  int64_t at = list.begin;
  int all = 0;
  for (int base = list.first; base < segments && at < part_end; base += 32) {
    const int i = base + (int)threadIdx.x;
    const int4 v = load_segment(s, min(i, segments - 1));
    const moelora_segment segment = {i < segments ? v.x : -1, v.y, v.z, v.w};
    const SegmentLength<L> length(s, make_int2(segment.packed, segment.count), list.ctas,
                                  list.many);
    const int64_t end = at + warp_inclusive_sum(length.rows);
    const int low = length.row_at(segment.count, end - length.rows, part_begin);
    const int high = length.row_at(segment.count, end - length.rows, part_end);
    const int cuts = ceil_divide(high - low, L::TOKENS), items = cuts * length.chunks;
    const int number = all + warp_inclusive_sum(items);
    if (items > 0) {
      const int rows = ceil_divide(high - low, kCut * cuts) * kCut;
      const int block = segment.position / s.schedule.blocks.rows * s.schedule.blocks.rows;
      const uint32_t magic = moelora_divisor_of(segment.share).magic;
      for (int j = 0; j < items; j++) {
        const int from = low + j / length.chunks * rows, to = number - items - listed + j;
        if (to >= 0 && to < kListedItems)
          list.items[to] = {i / (s.schedule.max_loras + 1),
                            segment.packed,
                            block,
                            segment.position - block + from,
                            segment.share,
                            magic,
                            min(rows, high - from),
                            (uint16_t)(j % length.chunks * L::RANKS),
                            (uint16_t)length.columns};
      }
    }
    at = __shfl_sync(0xffffffffu, end, 31);
    all = __shfl_sync(0xffffffffu, number, 31);
  }
  if (threadIdx.x == 0)
    list.all = all;
  __syncwarp();
  const int count = min(all - listed, kListedItems);
  if (s.by_adapter && count > 0)
    order_items(list, count);
}
