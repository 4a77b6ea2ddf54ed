/* Standalone kernel for resolve.cuh: each thread handles a strided part of each table. */
#include "cuda/align/resolve.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024; // about one wave on the largest GPUs

__global__ void __launch_bounds__(kThreads) resolve(const __grid_constant__ ResolveParams p) {
  follow_previous_kernel();
  const int64_t begin = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  for (int64_t row = begin; p.expert && row < p.from.num_rows; row += step)
    resolve_expert(p, row);
  for (int64_t token = begin; p.adapter && token < p.from.num_tokens; token += step)
    resolve_adapter(p, token);
  resolve_others(p, begin, step);
}

} // namespace

/* Allocates a table. In a size query, which has no memory, returns the original, since later size
 * queries test its pointer for NULL. */
template <class Table> static Table *take_table(moelora_arena *arena, int64_t count, Table *from) {
  if (!from)
    return nullptr;
  void *taken = moelora_take_array(arena, (size_t)count, sizeof(int32_t));
  return taken ? (Table *)taken : from;
}

moelora_routes moelora_cuda_take_routes(const moelora_routes *routes, bool with_map,
                                        moelora_arena *arena) {
  moelora_routes to = *routes;
  to.adapter_enabled = nullptr;
  to.topk_ids = {
      take_table(arena, routes->num_rows, routes->topk_ids.data), {routes->top_k, 1}, false};
  to.token_lora_mapping = {
      take_table(arena, routes->num_tokens, routes->token_lora_mapping.data), {1, 0}, false};
  to.lora_ranks = take_table(arena, routes->max_loras, routes->lora_ranks);
  to.lora_scalings = take_table(arena, routes->max_loras, routes->lora_scalings);
  to.w13_one_a = take_table(arena, routes->max_loras, routes->w13_one_a);
  to.num_global = with_map ? routes->num_global : 0;
  to.expert_map = with_map ? take_table(arena, routes->num_global, routes->expert_map) : nullptr;
  return to;
}

moelora_list_blocks moelora_cuda_take_lists(const moelora_list_blocks *lists, int32_t max_loras,
                                            bool with_counts, moelora_arena *arena) {
  moelora_list_blocks to = *lists;
  to.lora_ids = take_table(arena, lists->num_active, lists->lora_ids);
  if (with_counts)
    to.num_tokens_post_padded = take_table(arena, max_loras, lists->num_tokens_post_padded);
  return to;
}

ResolveParams describe_resolve(const moelora_routes *from, const moelora_routes *to,
                               const moelora_list_blocks *from_lists,
                               const moelora_list_blocks *to_lists) {
  ResolveParams p = {};
  p.from = *from;
  p.top_k = moelora_divisor_of((uint32_t)from->top_k);
  p.expert = from->topk_ids.data ? (int32_t *)to->topk_ids.data : nullptr;
  p.adapter = from->token_lora_mapping.data ? (int32_t *)to->token_lora_mapping.data : nullptr;
  p.ranks = from->lora_ranks ? (int32_t *)to->lora_ranks : nullptr;
  p.scalings = from->lora_scalings ? (float *)to->lora_scalings : nullptr;
  p.one_a = (int32_t *)to->w13_one_a;
  p.expert_map = (int32_t *)to->expert_map;
  if (from_lists) {
    p.lists = *from_lists;
    p.list_ids = (int32_t *)to_lists->lora_ids;
    if (to_lists->num_tokens_post_padded != from_lists->num_tokens_post_padded)
      p.list_counts = to_lists->num_tokens_post_padded;
  }
  return p;
}

moelora_status moelora_cuda_resolve(const moelora_routes *from, const moelora_routes *to,
                                    const moelora_list_blocks *from_lists,
                                    const moelora_list_blocks *to_lists, bool overlaps,
                                    const moelora_exec *exec) {
  const ResolveParams p = describe_resolve(from, to, from_lists, to_lists);
  int64_t most = from->num_rows > from->max_loras ? from->num_rows : from->max_loras;
  if (from_lists && most < from_lists->num_active)
    most = from_lists->num_active;
  const int64_t wanted = (most + kThreads - 1) / kThreads;
  const int64_t blocks = wanted < 1 ? 1 : wanted < kMaxBlocks ? wanted : kMaxBlocks;
  return overlaps ? launch_blocks<resolve>("resolve", blocks, kThreads, 0, exec, p)
                  : launch_blocks<resolve, 1, false>("resolve", blocks, kThreads, 0, exec, p);
}
