/* Lists the rows that each gradient of a factor sums over, and splits them into parts.
 *
 *   search_segments   finds the segment of an (expert, adapter) by binary search, one per thread;
 *                     skipped if the sort has listed the segments
 *   find_parts        counts the rows before each (adapter, expert), and splits pairs and adapters
 *                     into parts, with one CTA
 *   list_rows         lists the rows by (adapter, expert, flat row)
 *
 * The gradient of a pair, or of an adapter, sums over consecutive rows of the list. */
#include "cuda/align/align.cuh"
#include "cuda/backward/gradients.h"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kThreads = 256;

struct ListLaunch {
  moelora_gradient_rows list;
  moelora_blocks blocks;
  const int32_t *adapters; // [M] resolved
  const int32_t *ranks;    // [max_loras] or NULL
  const float *weights;
  int64_t weights_stride[2];
  int32_t num_rows, num_experts, max_loras;
  moelora_divisor top_k;
};

__device__ __forceinline__ const moelora_segment &segment_of(const ListLaunch &s, int adapter,
                                                             int expert) {
  return s.list.segments[(int64_t)expert * (s.max_loras + 1) + 1 + adapter];
}

/* Returns the position of row `at` of the blocks from `block` on, which hold `share` rows each. */
__device__ __forceinline__ int position_of(const moelora_blocks &blocks, int block, int share,
                                           int at) {
  return (block + at / share) * blocks.rows + at % share;
}

__global__ void __launch_bounds__(kThreads) search_segments(const __grid_constant__ ListLaunch s) {
  follow_previous_kernel();
  const int ways = s.max_loras + 1;
  const int64_t keys = (int64_t)s.num_experts * ways;
  const int used = *s.blocks.num_post / s.blocks.rows;
  for (int64_t key = (int64_t)blockIdx.x * kThreads + threadIdx.x; key < keys;
       key += (int64_t)gridDim.x * kThreads) {
    const int expert = (int)(key / ways), adapter = (int)(key % ways) - 1;
    const int block = lower_bound(used, [&](int b) { return s.blocks.expert_ids[b] < expert; });
    const int end = lower_bound(used, [&](int b) { return s.blocks.expert_ids[b] <= expert; });
    moelora_segment segment = {-1, 0, 0, 0};
    if (end > block) {
      // `rows` includes padding after the rows of the expert.
      const int share = s.blocks.counts[block], rows = (end - block) * share;
      const auto first_of = [&](int wanted) {
        return lower_bound(rows, [&](int at) {
          const int row = s.blocks.sorted_ids[position_of(s.blocks, block, share, at)];
          return row < s.num_rows && s.adapters[divide((uint32_t)row, s.top_k)] < wanted;
        });
      };
      const int first = first_of(adapter);
      segment.count = first_of(adapter + 1) - first;
      if (segment.count > 0) {
        segment.position = position_of(s.blocks, block, share, first);
        segment.share = share;
        segment.packed = s.blocks.packed_ranks[segment.position];
      }
    }
    s.list.segments[key] = segment;
  }
}

/* Returns the index of a pair in sparse gradients, or -1. Reads the table once, because other
 * streams may write to it. */
__device__ __forceinline__ int sparse_index(const ListLaunch &s, int pair) {
  const int index = s.list.given[pair];
  return index >= 0 && index < s.list.num_sparse ? index : -1;
}

/* Splits the rows of `groups` groups into parts; a group is `experts` neighboring (adapter, expert)
 * pairs. sparse: [groups] indices in sparse gradients, or NULL. */
__device__ __forceinline__ void cut(const ListLaunch &s, const moelora_gradient_parts &parts,
                                    int groups, int experts, const int32_t *sparse,
                                    int32_t *warp_sum) {
  const int per_thread = (groups + ALIGN_THREADS - 1) / ALIGN_THREADS;
  const int low = min((int)threadIdx.x * per_thread, groups), high = min(low + per_thread, groups);
  const auto rows_of = [&](int group) {
    return s.list.begin[(int64_t)(group + 1) * experts] - s.list.begin[(int64_t)group * experts];
  };
  const auto parts_of = [&](int group, int rows) {
    return rows > 0 ? (rows + MOELORA_GRADIENT_ROWS - 1) / MOELORA_GRADIENT_ROWS
                    : (int)(s.list.zeroes && !(sparse && sparse[group] < 0));
  };
  const auto is_few = [&](int rows) { return parts.few && rows <= parts.few_rows; };
  int own_parts = 0, own_splits = 0, own_slots = 0, own_few = 0;
  int all_parts, all_splits, all_slots, all_few;
  for (int group = low; group < high; group++) {
    const int rows = rows_of(group), count = parts_of(group, rows);
    if (is_few(rows))
      own_few += count;
    else
      own_parts += count;
    if (count > 1)
      own_splits++, own_slots += count;
  }
  int part = block_sum_before(own_parts, warp_sum, &all_parts);
  __syncthreads();
  int split = block_sum_before(own_splits, warp_sum, &all_splits);
  __syncthreads();
  int slot = block_sum_before(own_slots, warp_sum, &all_slots);
  __syncthreads();
  int few = block_sum_before(own_few, warp_sum, &all_few);
  __syncthreads();
  for (int group = low; group < high; group++) {
    const int rows = rows_of(group), count = parts_of(group, rows);
    const int adapter = experts == 1 ? group / s.num_experts : group;
    const int expert = experts == 1 ? group % s.num_experts : 0;
    const int rank = s.ranks ? max(s.ranks[adapter], 0) : INT32_MAX;
    const int to[2] = {sparse ? 0 : adapter, sparse ? sparse[group] : expert};
    const int first = s.list.begin[(int64_t)group * experts];
    if (count > 1)
      parts.split[split++] = {{to[0], to[1]}, rank, slot, count};
    for (int i = 0; i < count; i++) {
      const int done = i * MOELORA_GRADIENT_ROWS;
      moelora_gradient_part &to_fill = is_few(rows) ? parts.few[few++] : parts.part[part++];
      to_fill = {adapter,
                 expert,
                 {to[0], to[1]},
                 rank,
                 first + done,
                 min(rows - done, MOELORA_GRADIENT_ROWS),
                 count > 1 ? slot++ : -1};
    }
  }
  if (threadIdx.x == 0) {
    parts.count[0] = all_parts, parts.count[1] = all_splits, parts.count[2] = all_few;
    *parts.few_counter = 0;
  }
}

__global__ void __launch_bounds__(ALIGN_THREADS) find_parts(const __grid_constant__ ListLaunch s) {
  __shared__ int32_t warp_sum[ALIGN_WARPS];
  follow_previous_kernel();
  const int pairs = s.max_loras * s.num_experts;
  const int per_thread = (pairs + ALIGN_THREADS - 1) / ALIGN_THREADS;
  const int low = min((int)threadIdx.x * per_thread, pairs), high = min(low + per_thread, pairs);
  int own = 0, all;
  for (int pair = low; pair < high; pair++) {
    own += segment_of(s, pair / s.num_experts, pair % s.num_experts).count;
    if (s.list.sparse)
      s.list.sparse[pair] = sparse_index(s, pair);
  }
  int begin = block_sum_before(own, warp_sum, &all);
  for (int pair = low; pair < high; pair++) {
    s.list.begin[pair] = begin;
    begin += segment_of(s, pair / s.num_experts, pair % s.num_experts).count;
  }
  if (threadIdx.x == 0)
    s.list.begin[pairs] = all;
  __syncthreads();
  cut(s, s.list.pairs, pairs, 1, s.list.sparse, warp_sum);
  if (s.list.adapters.part)
    cut(s, s.list.adapters, s.max_loras, s.num_experts, nullptr, warp_sum);
}

__global__ void __launch_bounds__(kThreads) list_rows(const __grid_constant__ ListLaunch s) {
  follow_previous_kernel();
  const moelora_gradient_parts &pairs = s.list.pairs;
  const int parts = pairs.count[0], all = parts + pairs.count[2];
  for (int p = blockIdx.x; p < all; p += (int)gridDim.x) {
    const moelora_gradient_part part = p < parts ? pairs.part[p] : pairs.few[p - parts];
    const moelora_segment segment = segment_of(s, part.adapter, part.expert);
    const int block = segment.position / s.blocks.rows;
    const int done = part.first - s.list.begin[part.adapter * s.num_experts + part.expert];
    const int from = segment.position - block * s.blocks.rows + done;
    for (int i = threadIdx.x; i < part.count; i += kThreads) {
      const int position = position_of(s.blocks, block, segment.share, from + i);
      const int row = s.blocks.sorted_ids[position];
      s.list.position[part.first + i] = position;
      s.list.row[part.first + i] = row;
      const int token = (int)divide((uint32_t)row, s.top_k);
      s.list.token[part.first + i] = token;
      if (s.list.weight) {
        s.list.weight[part.first + i] =
            s.weights[token * s.weights_stride[0] +
                      (row - token * (int)s.top_k.value) * s.weights_stride[1]];
      }
    }
  }
}

moelora_gradient_parts take_parts(int64_t groups, int64_t rows, bool zeroes, int32_t few_rows,
                                  moelora_arena *arena) {
  const int64_t part = MOELORA_GRADIENT_ROWS, splits = rows / (part + 1);
  moelora_gradient_parts parts = {};
  parts.max_parts = (zeroes || groups < rows ? groups : rows) + rows / part;
  parts.max_splits = splits;
  parts.max_slots = splits ? 2 * splits + 1 : 0;
  take_array(arena, &parts.part, (size_t)parts.max_parts);
  take_array(arena, &parts.split, (size_t)splits);
  parts.few_rows = few_rows;
  if (few_rows) {
    parts.max_few = zeroes || groups < rows ? groups : rows;
    take_array(arena, &parts.few, (size_t)parts.max_few);
  }
  take_array(arena, &parts.few_counter, 1);
  take_array(arena, &parts.count, 3);
  return parts;
}

} // namespace

moelora_gradient_rows moelora_cuda_take_gradient_rows(const moelora_routes *routes,
                                                      const moelora_gradient_uses *uses,
                                                      moelora_arena *arena) {
  moelora_gradient_rows list = {};
  const size_t rows = (size_t)routes->num_rows;
  const int64_t pairs = (int64_t)routes->num_experts * routes->max_loras;
  list.zeroes = uses->zeroes;
  list.given = uses->pairs;
  list.num_sparse = uses->num_sparse;
  take_array(arena, &list.position, rows);
  take_array(arena, &list.row, rows);
  take_array(arena, &list.token, rows);
  if (uses->weighted)
    take_array(arena, &list.weight, rows);
  take_array(arena, &list.segments, (size_t)(pairs + routes->num_experts));
  take_array(arena, &list.begin, (size_t)pairs + 1);
  if (uses->pairs)
    take_array(arena, &list.sparse, (size_t)pairs);
  list.pairs = take_parts(pairs, routes->num_rows, uses->zeroes, uses->few_rows, arena);
  if (uses->shared)
    list.adapters = take_parts(routes->max_loras, routes->num_rows, uses->zeroes, 0, arena);
  return list;
}

moelora_status moelora_cuda_list_gradient_rows(const moelora_gradient_rows *list,
                                               const moelora_routes *routes,
                                               const moelora_blocks *blocks,
                                               const moelora_exec *exec) {
  ListLaunch s = {};
  s.list = *list;
  s.blocks = *blocks;
  s.adapters = (const int32_t *)routes->token_lora_mapping.data;
  s.ranks = routes->lora_ranks;
  s.weights = routes->topk_weights;
  s.weights_stride[0] = routes->topk_weights_stride[0];
  s.weights_stride[1] = routes->topk_weights_stride[1];
  s.num_rows = (int32_t)routes->num_rows;
  s.num_experts = routes->num_experts;
  s.max_loras = routes->max_loras;
  s.top_k = moelora_divisor_of((uint32_t)routes->top_k);
  if (blocks->segments) {
    s.list.segments = blocks->segments;
  } else {
    const int64_t keys = (int64_t)s.num_experts * (s.max_loras + 1);
    MOELORA_TRY((launch_kernel<search_segments>("search_segments", (keys + kThreads - 1) / kThreads,
                                                kThreads, 0, exec, s)));
  }
  MOELORA_TRY((launch_blocks<find_parts>("find_gradient_parts", 1, ALIGN_THREADS, 0, exec, s)));
  return launch_kernel<list_rows>("list_gradient_rows", list->pairs.max_parts + list->pairs.max_few,
                                  kThreads, 0, exec, s);
}
