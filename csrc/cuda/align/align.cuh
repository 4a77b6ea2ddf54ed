/* Alignment on the GPU: a stable counting sort of items by key, with a padded layout.
 *
 * Items are routed rows or, in the first of two sorts for huge key spaces, tokens. A key is
 *   expert * adapter_keys + adapter + 1
 * with expert 0 unless by_expert, and adapter -1 unless by_adapter. Key -1 means that the item is
 * skipped. `ways` consecutive keys form a group, and each group is padded to whole blocks:
 *   BASE, SORTING  key = expert             ways = 1
 *   UNIFORM        key = (expert, adapter)  ways = 1
 *   SEGMENTED      key = (expert, adapter)  ways = adapter_keys: a group is an expert
 *
 * Group g starts at block b[g], the sum of blocks_of() over the previous groups. The i-th item of
 * key k, in item order, is placed at b[g] * block_size + (items of g with smaller keys) + i, unless
 * `grain` spreads the items of g over its blocks. A CTA places a chunk of consecutive items. From
 * the number of items of each key before its chunk (`before`) and from there on (`total`) it
 * computes the rest itself, so that CTAs need no communication, no state has to be reset, and the
 * order is deterministic. Each CTA writes its own items and its share of padding, block ids and the
 * unused tail.
 *
 * align/tiny.cu: each item is compared with all others; one launch, no bins. align/small.cu: each
 * CTA reads all items and counts them itself; one launch. align/large.cu: a first launch counts the
 * items of several chunks per CTA, a second one sums the counts and places the items. */
#pragma once

#include "cuda/align/align.h"
#include "cuda/ptx/pdl.cuh"
#include "cuda/launch/routes.cuh"
#include "cuda/launch/warp.cuh"

/* Returns the first index in [0, count) for which `less` is false; count if there is none. */
template <class Less> __device__ __forceinline__ int lower_bound(int count, Less less) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (less(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

constexpr int ALIGN_WARPS = ALIGN_THREADS / 32;

/* Shared memory of a sort, besides the bins. */
struct align_shared {
  alignas(16) int32_t key[ALIGN_THREADS]; /* keys of the items being placed */
  int32_t warp_sum[ALIGN_WARPS];
  uint32_t local[ALIGN_MAX_KEYS / 32]; /* bit mask of local experts; SORTING only */
};

/* Bins. After the layout, total[k] is the number of items with smaller keys in the group of k; for
 * the group's first key, where this would be 0, it is the number of items of the group. */
struct align_bins {
  int32_t *before, *total; /* [num_keys] */
  int32_t *first; /* [num_groups] first position of a group; small sorts use [num_keys] for counts
                     before the layout */
};

static __device__ __forceinline__ align_bins bins_in(const align_sort &s, int32_t *memory) {
  return {memory, memory + s.num_keys, memory + 2 * s.num_keys};
}

/* ---- items ---- */

/* An item before sorting: choice `choice` of the token at index `token`. */
struct align_item {
  uint32_t token, choice;
};

static __device__ __forceinline__ align_item locate(const align_sort &s, uint32_t index) {
  align_item item;
  item.token = divide(index, s.top_k);
  item.choice = index - item.token * s.top_k.value;
  return item;
}

/* Loads the keys of items first, first + ALIGN_THREADS, ... below `end`; -1 for items past it. */
template <int N>
static __device__ __forceinline__ void load_keys(const align_sort &s, uint32_t first, uint32_t end,
                                                 int32_t (&key)[N]) {
#pragma unroll
  for (int u = 0; u < N; u++)
    key[u] = -1;
  if (first >= end)
    return;
  const int32_t *experts = (const int32_t *)s.routes.topk_ids.data;
  const int32_t *adapters = (const int32_t *)s.routes.token_lora_mapping.data;
  align_item item[N];
  int32_t expert[N], adapter[N];
#pragma unroll
  for (int u = 0; u < N; u++) {
    const uint32_t index = first + u * ALIGN_THREADS;
    item[u] = locate(s, index < end ? index : first);
    expert[u] = 0;
    adapter[u] = -1;
  }
  if (s.order) { /* written by an earlier launch: bypass L1 */
#pragma unroll
    for (int u = 0; u < N; u++)
      item[u].token = (uint32_t)__ldcg(s.order + item[u].token);
  }
  if (s.by_expert) {
#pragma unroll
    for (int u = 0; u < N; u++)
      expert[u] = __ldcg(experts + item[u].token * s.top_k.value + item[u].choice);
  }
  if (s.by_adapter) {
#pragma unroll
    for (int u = 0; u < N; u++)
      adapter[u] = __ldcg(adapters + item[u].token);
  }
#pragma unroll
  for (int u = 0; u < N; u++)
    if (first + u * ALIGN_THREADS < end && expert[u] >= 0)
      key[u] = expert[u] * (int32_t)s.adapter_keys.value + (s.by_adapter ? adapter[u] + 1 : 0);
}

/* ---- scans ---- */

/* Returns the sum of `value` over all lower threads, and the total in `all`. Has one barrier; the
 * caller needs another one before it reuses `warp_sum`. */
static __device__ __forceinline__ int32_t block_sum_before(int32_t value, int32_t *warp_sum,
                                                           int32_t *all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t inclusive = warp_inclusive_sum(value);
  if (lane == 31)
    warp_sum[warp] = inclusive;
  __syncthreads();
  const int32_t sum = warp_sum[lane];
  *all = __reduce_add_sync(~0u, sum);
  return __reduce_add_sync(~0u, lane < warp ? sum : 0) + inclusive - value;
}

/* ---- layout ---- */

static __device__ __forceinline__ void mark_local_experts(const align_sort &s,
                                                          align_shared &shared) {
  if (!s.empty_blocks || !s.routes.expert_map)
    return;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < s.routes.num_global; i += ALIGN_THREADS) {
    const int32_t expert = __ldcg(s.routes.expert_map + i);
    if (expert >= 0 && expert < s.routes.num_experts)
      atomicOr(&shared.local[expert / 32], 1u << expert % 32);
  }
}

/* Returns the sum of a word's bytes below bit `end`. */
static __device__ __forceinline__ int32_t bytes_below(uint32_t word, uint32_t end) {
  return (int32_t)__dp4a(end < 32 ? word & ((1u << end) - 1) : word, 0x01010101u, 0u);
}

/* Returns the number of lower lanes in the warp with the same key. */
static __device__ __forceinline__ int32_t rank_in_warp(int32_t key) {
  return __popc(__match_any_sync(~0u, key) & ((1u << threadIdx.x % 32) - 1));
}

/* Returns the number of blocks that hold `count` > 0 items of a group. */
static __device__ __forceinline__ int32_t blocks_for(const align_sort &s, int32_t count) {
  const int32_t blocks = (int32_t)divide((uint32_t)count - 1, s.block_size) + 1;
  return s.cluster == 2 ? (blocks + 1) & ~1 : blocks;
}

/* Returns the number of blocks of a group with `count` items. SORTING allocates at least one block
 * per local expert. */
static __device__ __forceinline__ int32_t blocks_of(const align_sort &s, const align_shared &shared,
                                                    uint32_t group, int32_t count) {
  if (count == 0)
    return s.empty_blocks &&
           (!s.routes.expert_map || (shared.local[group / 32] >> group % 32 & 1u));
  return blocks_for(s, count);
}

/* Returns the number of items per block (fewer in the last blocks) if `count` items are distributed
 * evenly: the smallest sufficient multiple of the grain. */
static __device__ __forceinline__ int32_t even_share(const align_sort &s, int32_t count,
                                                     int32_t blocks) {
  return ((count + blocks - 1) / blocks + s.grain - 1) & -s.grain;
}

/* Returns an item's index within its group's padded layout, given its index `place` among the
 * group's items. */
static __device__ __forceinline__ int32_t place_in_group(const align_sort &s, int32_t place,
                                                         int32_t count, int32_t blocks) {
  if (!s.grain || blocks == 1)
    return place;
  const int32_t share = even_share(s, count, blocks), block = place / share;
  return block * (int32_t)s.block_size.value + place - block * share;
}

/* A group of keys: its index, its first position and its number of items. */
struct align_group {
  uint32_t index;
  int32_t first, count;
};

static __device__ __forceinline__ uint32_t group_of_key(const align_sort &s, int32_t key) {
  return s.ways == 1 ? (uint32_t)key : divide((uint32_t)key, s.adapter_keys);
}

static __device__ __forceinline__ align_group group_of(const align_sort &s, const align_bins &bins,
                                                       uint32_t index) {
  return {index, bins.first[index], bins.total[index * s.ways]};
}

/* Computes the layout from `before` and `total`; on entry, `total` counts the items *not* before
 * the chunk. Returns the number of blocks. 1 << scan_shift neighboring threads handle `scan_groups`
 * groups, with `scan_ways` keys of each group per thread. */
static __device__ __forceinline__ int32_t lay_out(const align_sort &s, const align_bins &bins,
                                                  align_shared &shared) {
  const uint32_t lanes = 1u << s.scan_shift, lane = threadIdx.x & (lanes - 1);
  const uint32_t first = (threadIdx.x >> s.scan_shift) * s.scan_groups;
  const uint32_t low = min(lane * s.scan_ways, s.ways);
  const uint32_t high = min(low + s.scan_ways, s.ways);
  int32_t blocks = 0, all;
#pragma unroll 1
  for (uint32_t g = first; g < first + s.scan_groups; g++) {
    const bool valid = g < s.num_groups;
    const uint32_t begin = g * s.ways + low, end = valid ? g * s.ways + high : begin;
    int32_t items = 0;
#pragma unroll 2
    for (uint32_t k = begin; k < end; k++)
      items += bins.before[k] + bins.total[k];
    int32_t upto = items;
    for (uint32_t step = 1; step < lanes; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, upto, step, lanes);
      upto += lane >= step ? other : 0;
    }
    const int32_t count = __shfl_sync(~0u, upto, lanes - 1, lanes);
    int32_t earlier = upto - items;
#pragma unroll 2
    for (uint32_t k = begin; k < end; k++) {
      const int32_t own = bins.before[k] + bins.total[k];
      bins.total[k] = earlier;
      earlier += own;
    }
    if (valid && lane == 0) {
      bins.total[begin] = count;
      blocks += blocks_of(s, shared, g, count);
    }
  }
  int32_t block = block_sum_before(blocks, shared.warp_sum, &all);
#pragma unroll 1
  for (uint32_t g = first; lane == 0 && g < min(first + s.scan_groups, s.num_groups); g++) {
    bins.first[g] = block * (int32_t)s.block_size.value;
    block += blocks_of(s, shared, g, bins.total[g * s.ways]);
  }
  __syncthreads();
  return all;
}

/* Returns the position of an item with `earlier` items of the same key before it. */
static __device__ __forceinline__ int32_t position_of(const align_sort &s, const align_bins &bins,
                                                      const align_shared &shared, int32_t key,
                                                      int32_t earlier) {
  const align_group group = group_of(s, bins, group_of_key(s, key));
  const bool first = (uint32_t)key == group.index * s.ways;
  const int32_t place = first ? earlier : bins.total[key] + earlier;
  if (!s.grain)
    return group.first + place;
  return group.first +
         place_in_group(s, place, group.count, blocks_of(s, shared, group.index, group.count));
}

/* ---- output ---- */

static __device__ __forceinline__ void write_padding(const align_sort &s, int64_t position) {
  s.sorted_ids[position] = s.padding;
  if (s.row_loras)
    s.row_loras[position] = -1;
  if (s.sorted_weights)
    s.sorted_weights[position] = 0.0f;
}

/* Writes block ids and padding around the `count` items of a group whose blocks start at `block`,
 * as thread `lane` of `lanes`. */
static __device__ __forceinline__ void write_around_group(const align_sort &s, uint32_t group,
                                                          int32_t block, int32_t count,
                                                          int32_t blocks, int32_t lane,
                                                          int32_t lanes) {
  const int32_t size = (int32_t)s.block_size.value;
  const bool spread = s.grain && blocks > 1;
  const int32_t share = spread ? even_share(s, count, blocks) : size;
#pragma unroll 1
  for (int32_t i = (spread ? 0 : count) + lane; i < blocks * size; i += lanes) {
    const int32_t b = (int32_t)divide((uint32_t)i, s.block_size), offset = i - b * size;
    if (offset >= share || b * share + offset >= count)
      write_padding(s, block * size + i);
  }
  if (!s.expert_ids)
    return;
  const auto items_of = [&](int32_t b) { return min(max(count - b * share, 0), share); };
  const int32_t expert = s.ways == 1 ? (int32_t)divide(group, s.adapter_keys) : (int32_t)group;
  const int32_t adapter = (int32_t)group - expert * (int32_t)s.adapter_keys.value - s.by_adapter;
#pragma unroll 1
  for (int32_t b = lane; b < blocks; b += lanes) {
    s.expert_ids[block + b] = expert;
    if (s.block_loras)
      s.block_loras[block + b] = s.by_adapter ? adapter : -1;
    if (s.block_counts)
      s.block_counts[block + b] = items_of(b);
    if (s.block_pairs)
      s.block_pairs[block + b] = b & 1 ? -items_of(b - 1) : items_of(b + 1);
  }
}

/* Writes the tail after all groups and the number of positions in use, and zeroes tile counters, as
 * thread `me` of `step`. */
static __device__ __forceinline__ void write_around_groups(const align_sort &s, int32_t num_blocks,
                                                           int64_t me, int64_t step) {
  const int64_t rows = (int64_t)num_blocks * s.block_size.value;
#pragma unroll 1
  for (int64_t position = rows + me; position < s.max_blocks * s.block_size.value; position += step)
    write_padding(s, position);
#pragma unroll 1
  for (int64_t b = num_blocks + me; s.expert_ids && b < s.max_blocks; b += step) {
    s.expert_ids[b] = -1;
    if (s.block_loras)
      s.block_loras[b] = -1;
  }
  if (me == 0 && s.num_post)
    *s.num_post = (int32_t)rows;
#pragma unroll 1
  for (int64_t i = me; s.tile_counters && i < s.num_counters; i += step)
    s.tile_counters[i] = 0;
}

/* Returns adapter * kRanks + true rank; -1 without an adapter, or if the rank is 0. */
static __device__ __forceinline__ int32_t pack_rank(const align_sort &s, int32_t adapter) {
  if (adapter < 0)
    return -1;
  const int32_t rank = true_rank(s.routes, adapter, kRanks - 1);
  return rank > 0 ? adapter * kRanks + rank : -1;
}

/* Writes the segments of a group, as thread `lane` of `lanes`. */
static __device__ __forceinline__ void write_segments(const align_sort &s, const align_bins &bins,
                                                      const align_group &group, int32_t blocks,
                                                      uint32_t lane, uint32_t lanes) {
  const uint32_t first = group.index * s.ways;
#pragma unroll 1
  for (uint32_t way = lane; way < s.ways; way += lanes) {
    const int32_t begin = way ? bins.total[first + way] : 0;
    const int32_t end = way + 1 < s.ways ? bins.total[first + way + 1] : group.count;
    moelora_segment segment = {pack_rank(s, (int32_t)way - 1), 0, end - begin, 0};
    if (end > begin) {
      segment.position = group.first + place_in_group(s, begin, group.count, blocks);
      segment.share = s.grain ? even_share(s, group.count, blocks) : group.count;
    }
    s.segments[first + way] = segment;
  }
}

/* Writes this CTA's share of everything except items. 1 << around_shift threads handle a group. */
static __device__ __forceinline__ void write_around_items(const align_sort &s,
                                                          const align_bins &bins,
                                                          const align_shared &shared,
                                                          int32_t num_blocks) {
  /* start with the last threads: the first ones may still be placing items */
  const uint32_t me = ALIGN_THREADS - 1 - threadIdx.x;
  const uint32_t lanes = 1u << s.around_shift, lane = me & (lanes - 1);
#pragma unroll 1
  for (uint32_t g = blockIdx.x + s.num_chunks * (me >> s.around_shift); g < s.num_groups;
       g += s.num_chunks * (ALIGN_THREADS >> s.around_shift)) {
    const align_group group = group_of(s, bins, g);
    const int32_t blocks = blocks_of(s, shared, g, group.count);
    if (blocks > 0)
      write_around_group(s, g, (int32_t)divide((uint32_t)group.first, s.block_size), group.count,
                         blocks, (int32_t)lane, (int32_t)lanes);
    if (s.segments)
      write_segments(s, bins, group, blocks, lane, lanes);
  }
  write_around_groups(s, num_blocks, (int64_t)blockIdx.x * ALIGN_THREADS + me,
                      (int64_t)s.num_chunks * ALIGN_THREADS);
}

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
    int32_t adapter = -1;
    if (s.by_adapter)
      adapter = key - (int32_t)(divide(key, s.adapter_keys) * s.adapter_keys.value) - 1;
    else if (s.routes.token_lora_mapping.data)
      adapter = __ldcg((const int32_t *)s.routes.token_lora_mapping.data + item.token);
    s.row_loras[position] = s.packs_ranks ? pack_rank(s, adapter) : adapter;
  }
}

/* Writes the outputs of an item without a key. */
static __device__ __forceinline__ void skip_item(const align_sort &s, uint32_t index) {
  if (!s.positions)
    return;
  align_item item = locate(s, index);
  if (s.order)
    item.token = (uint32_t)__ldcg(s.order + item.token);
  s.positions[item.token * s.top_k.value + item.choice] = -1;
}

static __device__ __forceinline__ void clear_bins(const align_bins &bins, uint32_t count,
                                                  align_shared &shared) {
#pragma unroll 1
  for (uint32_t k = threadIdx.x; k < count; k += ALIGN_THREADS)
    bins.before[k] = 0;
  if (threadIdx.x < ALIGN_MAX_KEYS / 32)
    shared.local[threadIdx.x] = 0;
}

/* Zeroes the caller's buffer in the CTAs after the chunks; 16-byte stores except at its ends. */
static __device__ __forceinline__ void write_zeros(const align_sort &s) {
  follow_previous_kernel();
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
