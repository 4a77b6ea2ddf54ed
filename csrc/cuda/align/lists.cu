/* vLLM's alignment: a list of blocks per adapter, from rows sorted by expert, then adapter.
 *
 * One CTA, or several if the list is long, processes a list. Each CTA finds where the rows of each
 * expert with the list's adapter (a pair) start and computes the whole layout, then writes its
 * share of the blocks and of the padding. */
#include "cuda/align/align.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

struct Lists {
  moelora_routes routes;
  moelora_list_blocks lists;
  const int32_t *row, *expert, *adapter; /* [*count], sorted by expert, then adapter */
  const int32_t *count;
  int32_t parts; /* CTAs per list */
};

/* Returns the first sorted row that is not before (expert, adapter). */
__device__ __forceinline__ int32_t lower_bound(const Lists &p, int32_t count, int32_t expert,
                                               int32_t adapter) {
  int32_t low = 0, high = count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    const int32_t e = __ldcg(p.expert + middle), l = __ldcg(p.adapter + middle);
    if (e < expert || (e == expert && l < adapter))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__global__ void __launch_bounds__(ALIGN_THREADS) fill_lists(const __grid_constant__ Lists p) {
  extern __shared__ int32_t memory[];
  __shared__ int32_t warp_sum[ALIGN_WARPS];
  const int32_t experts = p.routes.num_experts, size = p.lists.block_size;
  int32_t *const begin = memory;               // [experts] first sorted row of the pair
  int32_t *const rows = memory + experts;      // [experts] number of rows of the pair
  int32_t *const block = memory + 2 * experts; // [experts] first block of the pair
  follow_previous_kernel();

  const int32_t part = blockIdx.x % p.parts;
  const int32_t adapter = p.lists.lora_ids[blockIdx.x / p.parts];
  if (adapter < 0)
    return;
  const int32_t count = __ldcg(p.count);
  const int32_t per_thread = (experts + ALIGN_THREADS - 1) / ALIGN_THREADS;
  const int32_t first = min((int32_t)threadIdx.x * per_thread, experts),
                last = min(first + per_thread, experts);
  int32_t blocks = 0, used;
  for (int32_t e = first; e < last; e++) {
    begin[e] = lower_bound(p, count, e, adapter);
    rows[e] = lower_bound(p, count, e, adapter + 1) - begin[e];
    blocks += (rows[e] + size - 1) / size;
  }
  int32_t at = block_sum_before(blocks, warp_sum, &used);
  for (int32_t e = first; e < last; e++) {
    block[e] = at;
    at += (rows[e] + size - 1) / size;
  }
  __syncthreads();

  int32_t *const ids = p.lists.sorted_token_ids + adapter * p.lists.sorted_stride;
  int32_t *const expert_ids = p.lists.expert_ids + adapter * p.lists.expert_stride;
  const int32_t padding = (int32_t)p.routes.num_rows, lane = threadIdx.x % 32;
  for (int32_t b = part * ALIGN_WARPS + threadIdx.x / 32; b < used; b += p.parts * ALIGN_WARPS) {
    int32_t low = 0,
            high = experts; // find the expert of b: the last with block[expert] <= b
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (block[middle] <= b)
        low = middle;
      else
        high = middle;
    }
    const int32_t from = (b - block[low]) * size;
    for (int32_t i = lane; i < size; i += 32)
      ids[(int64_t)b * size + i] = from + i < rows[low] ? p.row[begin[low] + from + i] : padding;
    if (lane == 0)
      expert_ids[b] = low;
  }
  const int64_t me = part * ALIGN_THREADS + threadIdx.x, step = p.parts * ALIGN_THREADS;
  for (int64_t i = (int64_t)used * size + me; i < p.lists.rows; i += step)
    ids[i] = padding;
  for (int64_t b = used + me; b < p.lists.blocks; b += step)
    expert_ids[b] = -1;
  if (me == 0)
    p.lists.num_tokens_post_padded[adapter] = used * size;
}

struct ListsLayout {
  moelora_routes routes; // resolved
  moelora_list_blocks lists;
  moelora_sorted_rows sorted;
  size_t bytes;
};

ListsLayout lay_out(const moelora_align_lists_problem *problem, const moelora_align_plan *plan,
                    const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  ListsLayout l;
  l.routes = moelora_cuda_take_routes(&problem->routes, false, &arena);
  l.lists = moelora_cuda_take_lists(&problem->lists, problem->routes.max_loras, false, &arena);
  l.sorted = moelora_cuda_take_sorted(&l.routes, plan, &arena);
  l.bytes = arena.used;
  return l;
}

} // namespace

moelora_status moelora_cuda_align_lists(const moelora_align_lists_problem *problem,
                                        const moelora_align_plan *plan, const moelora_exec *exec,
                                        size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(problem, plan, exec).bytes);
  if (problem->lists.num_active == 0)
    return MOELORA_OK;
  const ListsLayout l = lay_out(problem, plan, exec);
  MOELORA_TRY(
      moelora_cuda_resolve(&problem->routes, &l.routes, &problem->lists, &l.lists, true, exec));
  MOELORA_TRY(moelora_cuda_sort_rows(&l.routes, &l.sorted, plan, exec));
  Lists lists = {};
  lists.routes = l.routes;
  lists.lists = l.lists;
  lists.row = l.sorted.row;
  lists.expert = l.sorted.expert;
  lists.adapter = l.sorted.adapter;
  lists.count = l.sorted.count;
  lists.parts = plan->list_parts;
  return launch_sized<fill_lists>("align_lists", (int64_t)problem->lists.num_active * lists.parts,
                                  ALIGN_THREADS, 3 * sizeof(int32_t) * problem->routes.num_experts,
                                  exec, lists);
}
