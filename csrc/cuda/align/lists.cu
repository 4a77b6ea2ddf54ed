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
  moelora_sorted_rows sorted;
  int32_t parts; /* CTAs per list */
};

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
  const int32_t count = __ldcg(p.sorted.count);
  const auto first_row_of = [&](int32_t e, int32_t l) { // the first that is not before (e, l)
    return lower_bound(count, [&](int i) {
      const int32_t expert = __ldcg(p.sorted.expert + i), of_row = __ldcg(p.sorted.adapter + i);
      return expert < e || (expert == e && of_row < l);
    });
  };
  const int32_t per_thread = (experts + ALIGN_THREADS - 1) / ALIGN_THREADS;
  const int32_t first = min((int32_t)threadIdx.x * per_thread, experts),
                last = min(first + per_thread, experts);
  int32_t blocks = 0, used;
  for (int32_t e = first; e < last; e++) {
    begin[e] = first_row_of(e, adapter);
    rows[e] = first_row_of(e, adapter + 1) - begin[e];
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
    const int32_t e = lower_bound(experts, [&](int i) { return block[i] <= b; }) - 1;
    const int32_t from = (b - block[e]) * size;
    for (int32_t i = lane; i < size; i += 32)
      ids[(int64_t)b * size + i] = from + i < rows[e] ? p.sorted.row[begin[e] + from + i] : padding;
    if (lane == 0)
      expert_ids[b] = e;
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
  const Lists lists = {l.routes, l.lists, l.sorted, plan->list_parts};
  return launch_sized<fill_lists>("align_lists", (int64_t)problem->lists.num_active * lists.parts,
                                  ALIGN_THREADS, 3 * sizeof(int32_t) * problem->routes.num_experts,
                                  exec, lists);
}
