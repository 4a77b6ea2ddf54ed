/* Alignment on the GPU: a stable counting sort of items by key, and its padded layout.
 *
 * Items are routed rows (or, for huge key spaces, first the tokens alone). An item's key is
 *   expert * adapter_keys + adapter + 1
 * where either part may be absent, or -1 when the item is skipped. `ways` consecutive keys make a
 * group, and a group is what gets padded to whole blocks:
 *   BASE, SORTING  key = expert             ways = 1
 *   UNIFORM        key = (expert, adapter)  ways = 1
 *   SEGMENTED      key = (expert, adapter)  ways = adapter_keys: a group is an expert
 *
 * With c[k] the number of items of key k, group g starts at block b[g] = sum of ceil(c /
 * block_size) over the groups before it, and the i-th item of key k, in item order, goes to b[g] *
 * block_size + (items of g with smaller keys) + i. A CTA owns one chunk of consecutive items. It
 * knows for every key how many items come before its chunk (`before`) and how many there are in all
 * (`total`), and works out the rest by itself: start[k]   position of the first item of key k so
 * CTAs never talk to each other, nothing has to be reset, and the order is always the same. Each
 * CTA writes its own items and its share of padding, block ids and the unused tail.
 *
 * align_tiny.cu: every CTA compares each item with all others; one launch, no bins.
 * align_small.cu: every CTA reads all items and counts for itself; one launch.
 * align_large.cu: a first launch counts each chunk, a second one sums the counts and places. */
#ifndef MOELORA_CUDA_ALIGN_CUH
#define MOELORA_CUDA_ALIGN_CUH

#include "cuda/align.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/routes.cuh"
#include "cuda/warp.cuh"

constexpr int ALIGN_WARPS = ALIGN_THREADS / 32;

/* Shared memory beside the bins. */
struct align_shared {
  alignas(16) int32_t key[ALIGN_THREADS]; /* keys of the items being placed */
  int32_t warp_sum[2][ALIGN_WARPS];
  uint32_t local[ALIGN_MAX_KEYS / 32]; /* bit per expert of this rank; SORTING only */
};

/* The bins, [num_keys] each, `start` with one more. */
struct align_bins {
  int32_t *before, *total, *start;
};

static __device__ __forceinline__ uint32_t divide(uint32_t n, const align_divisor &d) {
  return (__umulhi(n, d.magic) + n) >> d.shift;
}

/* ---- items ---- */

/* Item `index` before reordering: choice j of the token at place `token`. */
struct align_item {
  uint32_t token, choice;
};

static __device__ __forceinline__ align_item locate(const align_sort &s, uint32_t index) {
  align_item item;
  item.token = divide(index, s.top_k);
  item.choice = index - item.token * s.top_k.value;
  return item;
}

/* The functions below work on N items at once and branch outside of their loops, so that the N
 * loads of a step are in flight together. */

/* Ids of the experts and adapters of N items, as they are in memory. */
template <typename Id, typename Lora, int N>
static __device__ __forceinline__ void load_ids(const align_sort &s, const uint32_t (&index)[N],
                                                Id (&expert)[N], Lora (&adapter)[N]) {
  const Id *ids = (const Id *)s.routes.topk_ids.data;
  const Lora *mapping = (const Lora *)s.routes.token_lora_mapping.data;
  if (s.dense) { /* the usual case, at half of the instructions */
#pragma unroll
    for (int u = 0; u < N; u++)
      expert[u] = ids[index[u]];
    if (s.by_adapter) {
#pragma unroll
      for (int u = 0; u < N; u++)
        adapter[u] = mapping[divide(index[u], s.top_k)];
    }
    return;
  }
  align_item item[N];
#pragma unroll
  for (int u = 0; u < N; u++)
    item[u] = locate(s, index[u]);
  if (s.order) { /* written by an earlier launch: not through L1 */
#pragma unroll
    for (int u = 0; u < N; u++)
      item[u].token = (uint32_t)__ldcg(s.order + item[u].token);
  }
  if (s.by_expert) {
#pragma unroll
    for (int u = 0; u < N; u++)
      expert[u] = ids[item[u].token * s.routes.topk_ids.stride[0] +
                      item[u].choice * s.routes.topk_ids.stride[1]];
  }
  if (s.by_adapter) {
#pragma unroll
    for (int u = 0; u < N; u++)
      adapter[u] = mapping[item[u].token * s.routes.token_lora_mapping.stride[0]];
  }
}

/* Keys of items first, first + ALIGN_THREADS, ... below `end`; -1 for the others. */
template <typename Id, typename Lora, int N>
static __device__ __forceinline__ void load_keys(const align_sort &s, uint32_t first, uint32_t end,
                                                 int32_t (&key)[N]) {
#pragma unroll
  for (int u = 0; u < N; u++)
    key[u] = -1;
  if (first >= end)
    return;
  uint32_t index[N];
  Id expert[N];
  Lora adapter[N];
#pragma unroll
  for (int u = 0; u < N; u++) {
    index[u] = first + u * ALIGN_THREADS;
    index[u] = index[u] < end ? index[u] : first;
    expert[u] = 0;
    adapter[u] = -1;
  }
  load_ids(s, index, expert, adapter);
  if (s.by_adapter)
    active_adapters(s.routes, adapter);
  if (s.by_expert)
    local_experts(s.routes, expert);
#pragma unroll
  for (int u = 0; u < N; u++)
    if (first + u * ALIGN_THREADS < end && expert[u] >= 0)
      key[u] = (int32_t)expert[u] * (int32_t)s.adapter_keys.value +
               (s.by_adapter ? (int32_t)adapter[u] + 1 : 0);
}

/* ---- scans ---- */

/* Sum of `value` over the threads before this one, and over all of them. One barrier; `warp_sum`
 * must not be reused without another. */
static __device__ __forceinline__ int32_t block_sum_before(int32_t value, int32_t *warp_sum,
                                                           int32_t *all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t inclusive = warp_inclusive_sum(value);
  if (lane == 31)
    warp_sum[warp] = inclusive;
  __syncthreads();
  int32_t warps = warp_inclusive_sum(warp_sum[lane]);
  *all = __shfl_sync(~0u, warps, 31);
  int32_t earlier = __shfl_sync(~0u, warps, warp ? warp - 1 : 0);
  return (warp ? earlier : 0) + inclusive - value;
}

/* ---- layout ---- */

static __device__ __forceinline__ void mark_local_experts(const align_sort &s,
                                                          align_shared &shared) {
  if (!s.empty_blocks || !s.routes.expert_map)
    return;
  for (int32_t i = threadIdx.x; i < s.routes.num_global; i += ALIGN_THREADS) {
    int32_t expert = s.routes.expert_map[i];
    if (expert >= 0 && expert < s.routes.num_experts)
      atomicOr(&shared.local[expert / 32], 1u << expert % 32);
  }
}

/* Blocks that hold `count` > 0 items of a group. */
static __device__ __forceinline__ int32_t blocks_for(const align_sort &s, int32_t count) {
  const int32_t blocks = (int32_t)divide((uint32_t)count - 1, s.block_size) + 1;
  return s.cluster == 2 ? (blocks + 1) & ~1 : blocks;
}

/* Blocks of a group with `count` items; SORTING gives every expert of this rank at least one. */
static __device__ __forceinline__ int32_t blocks_of(const align_sort &s, const align_shared &shared,
                                                    uint32_t group, int32_t count) {
  if (count == 0)
    return s.empty_blocks &&
           (!s.routes.expert_map || (shared.local[group / 32] >> group % 32 & 1u));
  return blocks_for(s, count);
}

/* Items of each block but the last ones, where `count` of them are dealt out evenly: the fewest
 * eights that fit. */
static __device__ __forceinline__ int32_t even_share(int32_t count, int32_t blocks) {
  return ((count + blocks - 1) / blocks + 7) & ~7;
}

/* Where in its group the item goes that comes behind `place` others. */
static __device__ __forceinline__ int32_t place_in_group(const align_sort &s, int32_t place,
                                                         int32_t count, int32_t blocks) {
  if (!s.even)
    return place;
  const int32_t share = even_share(count, blocks), block = place / share;
  return block * (int32_t)s.block_size.value + place - block * share;
}

/* The group of a key, its first position and its items. */
struct align_group {
  uint32_t index;
  int32_t first, count;
};

static __device__ __forceinline__ uint32_t group_of_key(const align_sort &s, int32_t key) {
  return s.ways == 1 ? (uint32_t)key : divide((uint32_t)key, s.adapter_keys);
}

static __device__ __forceinline__ align_group group_of(const align_sort &s, const align_bins &bins,
                                                       uint32_t index) {
  const int32_t *count = s.ways == 1 ? bins.total : bins.total + s.num_groups;
  return {index, bins.start[index * s.ways], count[index]};
}

/* A thread's share of n consecutive bins. Odd, so that a warp's accesses fall in 32 banks. */
static __device__ __forceinline__ uint32_t bins_per_thread(uint32_t n) {
  return (n + ALIGN_THREADS - 1) / ALIGN_THREADS | 1u;
}

static __device__ __forceinline__ int32_t lay_out_single(const align_sort &s,
                                                         const align_bins &bins,
                                                         align_shared &shared) {
  const uint32_t run = bins_per_thread(s.num_keys), first = threadIdx.x * run;
  const uint32_t last = min(first + run, s.num_keys);
  int32_t blocks = 0, all;
  for (uint32_t k = first; k < last; k++) {
    bins.total[k] += bins.before[k];
    blocks += blocks_of(s, shared, k, bins.total[k]);
  }
  int32_t block = block_sum_before(blocks, shared.warp_sum[0], &all);
  for (uint32_t k = first; k < last; k++) {
    bins.start[k] = block * (int32_t)s.block_size.value;
    block += blocks_of(s, shared, k, bins.total[k]);
  }
  __syncthreads();
  return all;
}

/* As above with several keys to a group. Leaves the items of group g in total[num_groups + g]. */
static __device__ __forceinline__ int32_t lay_out_grouped(const align_sort &s,
                                                          const align_bins &bins,
                                                          align_shared &shared) {
  const uint32_t run = bins_per_thread(s.num_keys), first = threadIdx.x * run;
  const uint32_t last = min(first + run, s.num_keys);
  int32_t items = 0, all_items, all;
  for (uint32_t k = first; k < last; k++) {
    bins.total[k] += bins.before[k];
    items += bins.total[k];
  }
  int32_t item = block_sum_before(items, shared.warp_sum[0], &all_items);
  for (uint32_t k = first; k < last; k++) {
    bins.start[k] = item;
    item += bins.total[k];
  }
  if (threadIdx.x == 0)
    bins.start[s.num_keys] = all_items;
  __syncthreads();

  /* The totals are now differences of `start`; their memory holds what belongs to groups. */
  int32_t *shift = bins.total, *count = bins.total + s.num_groups;
  const uint32_t group_run = bins_per_thread(s.num_groups), first_group = threadIdx.x * group_run;
  const uint32_t last_group = min(first_group + group_run, s.num_groups);
  int32_t blocks = 0;
  for (uint32_t g = first_group; g < last_group; g++)
    blocks += blocks_of(s, shared, g, bins.start[(g + 1) * s.ways] - bins.start[g * s.ways]);
  int32_t block = block_sum_before(blocks, shared.warp_sum[1], &all);
  for (uint32_t g = first_group; g < last_group; g++) {
    int32_t begin = bins.start[g * s.ways];
    count[g] = bins.start[(g + 1) * s.ways] - begin;
    shift[g] = block * (int32_t)s.block_size.value - begin;
    block += blocks_of(s, shared, g, count[g]);
  }
  __syncthreads();
  for (uint32_t k = threadIdx.x; k < s.num_keys; k += ALIGN_THREADS)
    bins.start[k] += shift[divide(k, s.adapter_keys)];
  __syncthreads();
  return all;
}

/* Fills `start` from `before` and `total`, which at entry counts the items *not* before the chunk.
 * Returns the number of blocks in use. */
static __device__ __forceinline__ int32_t lay_out(const align_sort &s, const align_bins &bins,
                                                  align_shared &shared) {
  return s.ways == 1 ? lay_out_single(s, bins, shared) : lay_out_grouped(s, bins, shared);
}

/* ---- output ---- */

static __device__ __forceinline__ void write_padding(const align_sort &s, int64_t position) {
  s.sorted_ids[position] = s.padding;
  if (s.row_loras)
    s.row_loras[position] = -1;
  if (s.sorted_weights)
    s.sorted_weights[position] = 0.0f;
}

/* What lies around the `count` items of a group in blocks from `block` on; a warp. */
static __device__ __forceinline__ void write_around_group(const align_sort &s, uint32_t group,
                                                          int32_t block, int32_t count,
                                                          int32_t blocks) {
  const int lane = threadIdx.x % 32;
  const int32_t size = (int32_t)s.block_size.value, first = block * size;
  if (s.even && blocks > 0) {
    const int32_t share = even_share(count, blocks);
    for (int32_t b = 0; b < blocks; b++) {
      const int32_t here = min(max(count - b * share, 0), share);
      if (s.block_counts && lane == 0)
        s.block_counts[block + b] = here;
      for (int32_t i = here + lane; i < size; i += 32)
        write_padding(s, first + b * size + i);
    }
  } else {
    for (int32_t position = first + count + lane; position < first + blocks * size; position += 32)
      write_padding(s, position);
  }
  if (!s.expert_ids)
    return;
  const int32_t expert = s.ways == 1 ? (int32_t)divide(group, s.adapter_keys) : (int32_t)group;
  const int32_t adapter = (int32_t)group - expert * (int32_t)s.adapter_keys.value - s.by_adapter;
  for (int32_t b = block + lane; b < block + blocks; b += 32) {
    s.expert_ids[b] = expert;
    if (s.block_loras)
      s.block_loras[b] = s.by_adapter ? adapter : -1;
  }
}

/* What lies behind all groups, and how much does not; thread `me` of `step`. */
static __device__ __forceinline__ void write_around_groups(const align_sort &s, int32_t num_blocks,
                                                           int64_t me, int64_t step) {
  const int64_t rows = (int64_t)num_blocks * s.block_size.value;
  for (int64_t position = rows + me; position < s.max_blocks * s.block_size.value; position += step)
    write_padding(s, position);
  for (int64_t b = num_blocks + me; s.expert_ids && b < s.max_blocks; b += step) {
    s.expert_ids[b] = -1;
    if (s.block_loras)
      s.block_loras[b] = -1;
  }
  if (me == 0 && s.num_post)
    *s.num_post = (int32_t)rows;
}

/* adapter * kRanks + true rank; -1 where that is 0. */
static __device__ __forceinline__ int32_t pair_of(const align_sort &s, int32_t adapter) {
  if (adapter < 0)
    return -1;
  const int32_t rank =
      s.routes.lora_ranks ? min(s.routes.lora_ranks[adapter], kRanks - 1) : kRanks - 1;
  return rank > 0 ? adapter * kRanks + rank : -1;
}

/* The segments of a group; a warp. */
static __device__ __forceinline__ void write_segments(const align_sort &s, const align_bins &bins,
                                                      const align_group &group, int32_t blocks) {
  const uint32_t first = group.index * s.ways;
  for (uint32_t way = threadIdx.x % 32; way < s.ways; way += 32) {
    const int32_t begin = bins.start[first + way] - group.first;
    const int32_t end = way + 1 < s.ways ? bins.start[first + way + 1] - group.first : group.count;
    moelora_segment segment = {pair_of(s, (int32_t)way - 1), 0, end - begin, 0};
    if (end > begin) {
      segment.position = group.first + place_in_group(s, begin, group.count, blocks);
      segment.share = even_share(group.count, blocks);
    }
    s.segments[first + way] = segment;
  }
}

/* This CTA's share of everything that is not an item. A warp takes a group. */
static __device__ __forceinline__ void write_around_items(const align_sort &s,
                                                          const align_bins &bins,
                                                          const align_shared &shared,
                                                          int32_t num_blocks) {
  /* the last warps first: the first ones still place items */
  const uint32_t warp = ALIGN_WARPS - 1 - threadIdx.x / 32;
  for (uint32_t g = blockIdx.x + s.num_chunks * warp; g < s.num_groups;
       g += s.num_chunks * ALIGN_WARPS) {
    const align_group group = group_of(s, bins, g);
    const int32_t blocks = blocks_of(s, shared, g, group.count);
    write_around_group(s, g, (int32_t)divide((uint32_t)group.first, s.block_size), group.count,
                       blocks);
    if (s.segments)
      write_segments(s, bins, group, blocks);
  }
  write_around_groups(s, num_blocks, (int64_t)blockIdx.x * ALIGN_THREADS + threadIdx.x,
                      (int64_t)s.num_chunks * ALIGN_THREADS);
}

/* Rank of a thread's key among equal keys of the lower threads of its group of ALIGN_GROUP.
 * `group_key` are the keys of that group. */
static __device__ __forceinline__ int32_t rank_in_group(const int32_t *group_key, int32_t key) {
  const int lane = threadIdx.x % 32, earlier = threadIdx.x % ALIGN_GROUP / 32 * 32;
  int32_t rank = __popc(__match_any_sync(~0u, key) & ((1u << lane) - 1));
  for (int i = 0; i < earlier; i += 4) {
    int4 four = *(const int4 *)(group_key + i);
    rank += (four.x == key) + (four.y == key) + (four.z == key) + (four.w == key);
  }
  return rank;
}

/* The position of the item that would be at `position` if its group were filled block by block. */
static __device__ __forceinline__ int32_t even_position(const align_sort &s, const align_bins &bins,
                                                        const align_shared &shared, int32_t key,
                                                        int32_t position) {
  if (!s.even)
    return position;
  const align_group group = group_of(s, bins, group_of_key(s, key));
  return group.first + place_in_group(s, position - group.first, group.count,
                                      blocks_of(s, shared, group.index, group.count));
}

template <typename Lora>
static __device__ __forceinline__ void write_item(const align_sort &s, uint32_t index, int32_t key,
                                                  int32_t position) {
  align_item item = locate(s, index);
  if (s.order)
    item.token = (uint32_t)__ldcg(s.order + item.token);
  uint32_t row = item.token * s.top_k.value + item.choice;
  if (s.positions)
    s.positions[row] = position;
  s.sorted_ids[position] = (int32_t)(s.emit_tokens ? item.token : row);
  if (s.sorted_weights)
    s.sorted_weights[position] =
        s.routes.topk_weights[item.token * s.routes.topk_weights_stride[0] +
                              item.choice * s.routes.topk_weights_stride[1]];
  if (s.row_loras) {
    Lora adapter[1] = {-1};
    if (s.by_adapter) {
      adapter[0] = key - (int32_t)(divide(key, s.adapter_keys) * s.adapter_keys.value) - 1;
    } else if (s.routes.token_lora_mapping.data) {
      adapter[0] = ((const Lora *)s.routes.token_lora_mapping
                        .data)[item.token * s.routes.token_lora_mapping.stride[0]];
      active_adapters(s.routes, adapter);
    }
    s.row_loras[position] = s.pairs ? pair_of(s, (int32_t)adapter[0]) : (int32_t)adapter[0];
  }
}

/* For an item without a key. */
static __device__ __forceinline__ void skip_item(const align_sort &s, uint32_t index) {
  if (!s.positions)
    return;
  align_item item = locate(s, index);
  if (s.order)
    item.token = (uint32_t)__ldcg(s.order + item.token);
  s.positions[item.token * s.top_k.value + item.choice] = -1;
}

static __device__ __forceinline__ void clear_bins(const align_sort &s, const align_bins &bins,
                                                  align_shared &shared) {
  for (uint32_t k = threadIdx.x; k < s.num_keys; k += ALIGN_THREADS)
    bins.before[k] = bins.total[k] = 0;
  if (threadIdx.x < ALIGN_MAX_KEYS / 32)
    shared.local[threadIdx.x] = 0;
}

/* The CTAs after the chunks zero the caller's buffer, in 16-byte stores between ragged ends. */
static __device__ __forceinline__ void write_zeros(const align_sort &s) {
  wait_for_previous_kernel();
  start_next_kernel();
  char *begin = (char *)s.zero, *end = begin + s.zero_bytes;
  char *body = (char *)(((uintptr_t)begin + 15) & ~(uintptr_t)15);
  if (body > end)
    body = end;
  const size_t vectors = (size_t)(end - body) / 16;
  const uint32_t cta = blockIdx.x - s.num_chunks, ctas = gridDim.x - s.num_chunks;
  for (size_t i = (size_t)cta * ALIGN_THREADS + threadIdx.x; i < vectors;
       i += (size_t)ctas * ALIGN_THREADS)
    ((int4 *)body)[i] = make_int4(0, 0, 0, 0);
  if (cta == 0 && threadIdx.x < 16) {
    if (begin + threadIdx.x < body)
      begin[threadIdx.x] = 0;
    if (body + vectors * 16 + threadIdx.x < end)
      body[vectors * 16 + threadIdx.x] = 0;
  }
}

#endif
