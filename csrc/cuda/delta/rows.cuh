/* Windows of routed rows in shared memory, split into segments of one (expert, adapter) pair, and
 * segments into work items.
 *
 * Several CTAs share a window: each loads all of it and takes every n-th item, which balances
 * segments of different lengths. A row without an adapter, with an adapter of rank 0 or without a
 * local expert has rank 0 and belongs to no segment; it is neither read nor written.
 *
 * With MOELORA_GROUPED, each CTA sorts the rows of every window that it loads. The plan chooses
 * this for batches of at most two windows, where it costs less than a launch that sorts them. */
#pragma once

#include "cuda/align/align.cuh"
#include "cuda/delta/delta.h"
#include "cuda/launch/routes.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"

/* A window of at most ROWS rows and its segments, in order: segment s has rows low[s] to high[s] -
 * 1, and items from first[s] on. */
template <int ROWS> struct Window {
  static constexpr int WORDS = ROWS / 32;
  int32_t row[ROWS], expert[ROWS], adapter[ROWS], rank[ROWS];
  union {
    struct {
      int32_t low[ROWS], high[ROWS], first[ROWS];
    };
    uint16_t bins[6 * ROWS]; // of group_rows(), which finishes before segments exist
  };
  uint32_t starts[WORDS]; // bit mask: rows that start a segment
  int32_t sums[WORDS];    // number of items per 32 segments
  int32_t segments, items;

  /* Returns the segment of a valid item. All lanes of a warp pass the same item. */
  __device__ __forceinline__ int segment_of(int item) const {
    const int lane = threadIdx.x % 32, stride = (segments + 31) / 32;
    const bool group = lane * stride < segments && first[lane * stride] <= item;
    const int begin = (__popc(__ballot_sync(~0u, group)) - 1) * stride, s = begin + lane;
    const bool here = lane < stride && s < segments && first[s] <= item;
    return begin + __popc(__ballot_sync(~0u, here)) - 1;
  }
};

/* A window of a list: entries [first, end) of the list of `adapter`, within block `block`. */
struct ListWindow {
  int32_t adapter = -1;
  int64_t block = 0, first = 0, end = 0;
};

__device__ __forceinline__ int64_t windows_per_block(const delta_rows &r) {
  return (r.lists.block_size + r.window - 1) / r.window;
}

/* Returns the number of windows of the list of lora_ids[at], and its adapter. */
__device__ __forceinline__ int64_t windows_of_list(const delta_rows &r, int32_t at,
                                                   int32_t *adapter) {
  *adapter = -1;
  if (at >= r.lists.num_active)
    return 0;
  int32_t id[1] = {r.lists.lora_ids[at]};
  active_adapters(r.routes, id); // resolved: -1, or a valid adapter
  if (id[0] < 0)
    return 0;
  *adapter = id[0];
  const int64_t size = r.lists.block_size;
  const int64_t used = min((int64_t)r.lists.num_tokens_post_padded[id[0]], r.lists.rows);
  return min(max(used + size - 1, (int64_t)0) / size, r.lists.blocks) * windows_per_block(r);
}

/* Calls visit(adapter, windows of earlier lists, windows of the list) for each list, from all lanes
 * of a warp with one list per lane; adapter is -1 for lanes without a list. Returns the number of
 * windows. */
template <class Visit>
__device__ __forceinline__ int64_t for_each_list(const delta_rows &r, Visit visit) {
  int64_t before = 0;
  for (int32_t at = 0; at < r.lists.num_active; at += 32) {
    int32_t adapter;
    const int lane = threadIdx.x % 32;
    const int64_t own = windows_of_list(r, at + lane, &adapter);
    const int64_t sum = warp_inclusive_sum(own);
    visit(adapter, before + sum - own, own);
    before += __shfl_sync(~0u, sum, 31);
  }
  return before;
}

/* Returns the number of windows. For sorted rows, this includes empty windows after the last row:
 * reading *r.count first would cost every kernel a round trip to memory before its first load. */
__device__ __forceinline__ int64_t count_windows(const delta_rows &r) {
  if (r.order == MOELORA_LISTED)
    return for_each_list(r, [](int32_t, int64_t, int64_t) {});
  return (r.routes.num_rows + r.window - 1) / r.window;
}

__device__ __forceinline__ ListWindow find_list_window(const delta_rows &r, int64_t window) {
  ListWindow found;
  int64_t index = 0;
  for_each_list(r, [&](int32_t adapter, int64_t before, int64_t own) {
    const bool here = window >= before && window < before + own;
    const uint32_t lanes = __ballot_sync(~0u, here);
    if (lanes) {
      found.adapter = __shfl_sync(~0u, adapter, __ffs(lanes) - 1);
      index = window - __shfl_sync(~0u, before, __ffs(lanes) - 1);
    }
  });
  const int64_t per_block = windows_per_block(r), size = r.lists.block_size;
  found.block = index / per_block;
  const int64_t block_end = min((found.block + 1) * size, r.lists.rows);
  found.first = found.block * size + index % per_block * r.window;
  found.end = min(min(found.first + r.window, block_end),
                  found.adapter < 0 ? 0 : (int64_t)r.lists.num_tokens_post_padded[found.adapter]);
  return found;
}

/* Returns row `i` of a window, in routing order or sorted. */
__device__ __forceinline__ RoutedRow window_row(const delta_rows &r, int64_t window, int i) {
  RoutedRow found;
  const int64_t at = window * r.window + i;
  if (i >= r.window || at >= r.routes.num_rows)
    return found;
  if (r.order != MOELORA_SORTED)
    return routed_row(r.routes, (uint32_t)at);
  const int32_t row = r.row[at], expert = r.expert[at], adapter = r.adapter[at];
  if (at < *r.count) { // *r.count is loaded together with the row
    found.row = row;
    found.expert = expert;
    found.adapter = adapter;
  }
  return found;
}

/* Returns row `i` of a window of a list. */
__device__ __forceinline__ RoutedRow listed_row(const delta_rows &r, const ListWindow &list,
                                                int i) {
  RoutedRow found;
  if (list.first + i >= list.end)
    return found;
  const int32_t row =
      r.lists.sorted_token_ids[list.adapter * r.lists.sorted_stride + list.first + i];
  const int32_t expert = r.lists.expert_ids[list.adapter * r.lists.expert_stride + list.block];
  if (!inside(row, (int32_t)r.routes.num_rows) || !inside(expert, r.routes.num_experts))
    return found;
  found.row = row;
  found.expert = expert;
  found.adapter = list.adapter;
  return found;
}

/* Sorts the rows of a window by pair, then by row, identically in every CTA; rows of rank 0 come
 * last. Begins with a barrier; the caller needs one before it overwrites `w`.
 *
 * Shared atomics count the rows of each pair, and a scan turns the counts into offsets. The order
 * of arrival differs between CTAs, so each row counts the earlier rows of its pair. */
template <int THREADS, int ROWS, int PASSES>
__device__ __forceinline__ void group_rows(const delta_rows &r, Window<ROWS> &w, int thread,
                                           RoutedRow (&own)[PASSES], int (&rank)[PASSES]) {
  uint32_t *const words = (uint32_t *)w.bins; // two bins per word
  const int max_loras = opaque(r.routes.max_loras);
  const int used = r.routes.num_experts * max_loras / 2 + 1;
  const int per_thread = (used + THREADS - 1) / THREADS, begin = min(thread * per_thread, used);
  const int end = min(begin + per_thread, used);
  int pair[PASSES], place[PASSES];
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + thread;
    w.row[i] = w.expert[i] = w.adapter[i] = -1;
    w.rank[i] = 0;
  }
  for (int i = begin; i < end; i++)
    words[i] = 0;
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    pair[pass] = own[pass].expert * max_loras + own[pass].adapter;
    const int shift = pair[pass] % 2 * 16;
    if (rank[pass] > 0)
      place[pass] = atomicAdd(&words[pair[pass] / 2], 1u << shift) >> shift & 0xffff;
  }
  __syncthreads();
  int rows = 0;
  for (int i = begin; i < end; i++)
    rows += (int)(words[i] & 0xffff) + (int)(words[i] >> 16);
  const int upto = warp_inclusive_sum(rows), lane = thread % 32;
  if (lane == 31)
    w.sums[thread / 32] = upto;
  __syncthreads();
  int at = upto - rows;
  for (int warp = 0; warp < thread / 32; warp++)
    at += w.sums[warp];
  for (int i = begin; i < end; i++) {
    const uint32_t low = words[i] & 0xffff, high = words[i] >> 16;
    words[i] = (uint32_t)at | ((uint32_t)at + low) << 16;
    at += low + high;
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++)
    if (rank[pass] > 0)
      w.row[w.bins[pair[pass]] + place[pass]] = pass * THREADS + thread;
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    if (rank[pass] == 0)
      continue;
    const int first = w.bins[pair[pass]], last = w.bins[pair[pass] + 1];
    place[pass] = first;
    for (int i = first; i < last; i++)
      place[pass] += w.row[i] < pass * THREADS + thread;
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    if (rank[pass] == 0)
      continue;
    w.row[place[pass]] = own[pass].row;
    w.expert[place[pass]] = own[pass].expert;
    w.adapter[place[pass]] = own[pass].adapter;
    w.rank[place[pass]] = rank[pass];
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + thread;
    own[pass].row = w.row[i];
    own[pass].expert = w.expert[i];
    own[pass].adapter = w.adapter[i];
    rank[pass] = w.rank[i];
  }
}

/* Fills `w`, after a barrier for readers of the previous window, and ends with a barrier. For every
 * row i of the window with a rank above 0, one thread calls each(i, flat row); count(rows, rank)
 * returns the number of items of a segment. */
template <int THREADS, int ROWS, class Each, class Count>
__device__ __forceinline__ void load_window(const delta_rows &r, int64_t window, Window<ROWS> &w,
                                            Each each, Count count) {
  constexpr int PASSES = ROWS / THREADS, WORDS = ROWS / 32;
  static_assert(ROWS % THREADS == 0 && THREADS % 32 == 0 && WORDS <= 32, "a word to a lane");
  const int thread = opaque(threadIdx.x); // opaque: derived values are not kept between windows
  const int lane = thread % 32;
  RoutedRow own[PASSES];
  int rank[PASSES];
  if (r.order != MOELORA_LISTED) {
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
      own[pass] = window_row(r, window, pass * THREADS + thread);
  } else {
    const ListWindow list = find_list_window(r, window);
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
      own[pass] = listed_row(r, list, pass * THREADS + thread);
  }
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++)
    rank[pass] = own[pass].expert >= 0 && own[pass].adapter >= 0
                     ? true_rank(r.routes, own[pass].adapter, r.max_rank)
                     : 0;
  if (r.order == MOELORA_GROUPED)
    group_rows<THREADS>(r, w, thread, own, rank);
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + thread;
    w.row[i] = own[pass].row;
    w.expert[i] = own[pass].expert;
    w.adapter[i] = own[pass].adapter;
    w.rank[i] = rank[pass];
    if (*(volatile int32_t *)&w.rank[i] > 0) // loaded when needed: predicate registers are scarce
      each(i, (uint32_t)own[pass].row);
  }
  __syncthreads();
  int ends[PASSES]; // the row before was the last of a segment
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + thread, before = i > 0 ? i - 1 : 0;
    const bool first =
        i == 0 || w.expert[before] != own[pass].expert || w.adapter[before] != own[pass].adapter;
    ends[pass] = opaque(first && i > 0 && w.rank[before] > 0);
    rank[pass] = opaque(rank[pass]);
    const uint32_t mask = __ballot_sync(~0u, first && rank[pass] > 0);
    if (lane == 0)
      w.starts[i / 32] = mask;
  }
  __syncthreads();
  const int here = lane < WORDS ? __popc(w.starts[lane]) : 0, upto = warp_inclusive_sum(here);
  const int segments = __shfl_sync(~0u, upto, 31);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + thread;
    const int before =
        __shfl_sync(~0u, upto - here, i / 32) + __popc(w.starts[i / 32] & ((1u << lane) - 1));
    if (w.starts[i / 32] >> lane & 1)
      w.low[before] = i;
    if (ends[pass])
      w.high[before - 1] = i;
    if (i == ROWS - 1 && rank[pass] > 0)
      w.high[segments - 1] = ROWS;
  }
  __syncthreads();
  int items[PASSES], sum[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int s = pass * THREADS + thread;
    items[pass] = s < segments ? count(w.high[s] - w.low[s], w.rank[w.low[s]]) : 0;
    sum[pass] = warp_inclusive_sum(items[pass]);
    if (lane == 31)
      w.sums[s / 32] = sum[pass];
  }
  __syncthreads();
  const int own_sum = lane < WORDS ? w.sums[lane] : 0, all = warp_inclusive_sum(own_sum);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int s = pass * THREADS + thread;
    w.first[s] = __shfl_sync(~0u, all - own_sum, s / 32) + sum[pass] - items[pass];
  }
  if (thread == 31) {
    w.segments = segments;
    w.items = all;
  }
  __syncthreads();
}
