/* Lays out the workspace of an alignment and launches its sorts. If UNIFORM mode needs two sorts,
 * an additional launch pads the blocks.
 *
 * All sorts use resolved routes (resolve.cuh), so that all CTAs and all launches see the same ids.
 * A sort of routes that are already resolved overlaps the previous launch (PDL). */
#include "cuda/align/align.h"

static int64_t adapter_keys_of(const moelora_align_problem *problem) {
  return moelora_adapter_keys(problem->mode, &problem->routes);
}

moelora_sort_scratch moelora_cuda_take_scratch(const moelora_routes *routes,
                                               moelora_align_mode mode,
                                               const moelora_align_plan *plan,
                                               moelora_arena *arena) {
  moelora_sort_scratch parts = {};
  const size_t tokens = plan->tokens.table_bytes, rows = plan->rows.table_bytes;
  if (plan->tokens.variant) {
    take_array(arena, &parts.order, (size_t)routes->num_tokens);
    if (mode == MOELORA_ALIGN_UNIFORM) {
      take_array(arena, &parts.row, (size_t)routes->num_rows);
      take_array(arena, &parts.expert, (size_t)routes->num_rows);
      take_array(arena, &parts.adapter, (size_t)routes->num_rows);
      take_array(arena, &parts.count, 1);
    }
  }
  if (tokens || rows)
    parts.table = (uint32_t *)moelora_take(arena, tokens > rows ? tokens : rows);
  return parts;
}

/* ---- sorts ---- */

/* Assigns threads to groups. The number of lanes per group is a power of two. */
static void set_lanes(align_sort *sort) {
  const int64_t groups = sort->num_groups, ways = sort->ways;
  uint32_t shift = 0;
  while (shift < 5 && (int64_t)1 << shift < ways && groups << (shift + 1) <= ALIGN_THREADS)
    shift++;
  sort->scan_shift = shift;
  sort->scan_ways = (uint32_t)moelora_divide_up(ways, (int64_t)1 << shift);
  sort->scan_groups = (uint32_t)moelora_divide_up(groups, ALIGN_THREADS >> shift);
  const int64_t own = moelora_divide_up(groups, sort->num_chunks);
  while (own << (sort->around_shift + 1) <= ALIGN_THREADS)
    sort->around_shift++;
}

/* Sets the members that depend on the numbers of items and keys. */
static void set_size(align_sort *sort, const moelora_sort_plan &plan, int64_t items, int64_t keys,
                     int64_t ways, const moelora_sort_scratch &parts) {
  sort->num_items = (uint32_t)items;
  sort->num_keys = (uint32_t)keys;
  sort->ways = (uint32_t)ways;
  sort->num_groups = (uint32_t)(keys / ways);
  sort->num_chunks = plan.num_chunks;
  sort->chunk_items = plan.chunk_items;
  set_lanes(sort);
  if (plan.table_bytes) {
    sort->table = parts.table;
    sort->num_rows = plan.num_rows;
    sort->row_chunks = plan.row_chunks;
    sort->words = moelora_divisor_of((uint32_t)((keys + 1) / 2));
  }
}

/* Describes a problem, except for how its items are sorted. */
static align_sort describe(const moelora_align_problem *problem) {
  align_sort sort = {};
  sort.routes = problem->routes;
  sort.top_k = moelora_divisor_of((uint32_t)problem->routes.top_k);
  sort.adapter_keys = moelora_divisor_of(1);
  sort.block_size = moelora_divisor_of((uint32_t)problem->block_size);
  sort.by_expert = true;
  sort.emit_tokens = sort.empty_blocks = problem->mode == MOELORA_ALIGN_SORTING;
  sort.sorted_ids = problem->sorted_token_ids;
  sort.expert_ids = problem->expert_ids;
  sort.block_loras = problem->mode == MOELORA_ALIGN_UNIFORM ? problem->lora_ids : NULL;
  sort.row_loras = problem->mode == MOELORA_ALIGN_SEGMENTED ? problem->lora_ids : NULL;
  sort.sorted_weights = problem->sorted_weights;
  sort.num_post = problem->num_tokens_post_padded;
  sort.max_blocks = problem->max_blocks;
  sort.padding = (int32_t)problem->routes.num_rows;
  sort.zero = problem->out_to_zero;
  sort.zero_bytes = problem->out_to_zero ? problem->out_to_zero_bytes : 0;
  return sort;
}

/* Describes a sort of tokens by adapter, unpadded, into parts.order. */
static align_sort describe_tokens(const moelora_align_problem *problem,
                                  const moelora_sort_plan &plan,
                                  const moelora_sort_scratch &parts) {
  align_sort sort = {};
  const int64_t tokens = problem->routes.num_tokens, adapters = adapter_keys_of(problem);
  sort.routes = problem->routes;
  sort.top_k = sort.block_size = moelora_divisor_of(1);
  sort.by_adapter = true;
  sort.adapter_keys = moelora_divisor_of((uint32_t)adapters);
  sort.sorted_ids = parts.order;
  sort.max_blocks = tokens;
  set_size(&sort, plan, tokens, adapters, 1, parts);
  return sort;
}

/* Adds the members that only moelora_blocks has. Blocks of one row need no balancing. */
static void apply_blocks(align_sort *sort, const moelora_blocks *blocks) {
  if (!blocks)
    return;
  sort->packs_ranks = blocks->rows > 1;
  sort->grain = blocks->rows > 1 ? blocks->grain : 0;
  sort->cluster = (uint32_t)blocks->cluster;
  sort->block_counts = blocks->counts;
  sort->block_pairs = blocks->pairs;
  sort->positions = blocks->positions;
  sort->segments = blocks->segments;
  sort->tile_counters = blocks->tile_counters;
  sort->num_counters = blocks->num_counters;
}

/* Sorts. Unless `from` is NULL, first resolves it: by a separate launch if `resolves`, otherwise in
 * the launch of the sort. */
static moelora_status run_sort(const align_sort &sort, const moelora_sort_plan &plan,
                               const moelora_routes *from, bool resolves,
                               const moelora_exec *exec) {
  if (from && resolves)
    MOELORA_TRY(moelora_cuda_resolve(from, &sort.routes, NULL, NULL, false, exec));
  switch (plan.variant->id) {
  case CUDA_sort_i32_64_sm80:
    return align_launch_tiny(sort, resolves ? NULL : from, exec);
  case CUDA_sort_i32_2048_sm80:
    return align_launch_small_2(sort, exec);
  case CUDA_sort_i32_16384_sm80:
    return align_launch_small_8(sort, exec);
  case CUDA_sort_i32_any_sm80:
    MOELORA_TRY(align_launch_count(sort, exec));
    return align_launch_place(sort, exec);
  }
  return moelora_no_kernel(plan.variant->name, "sorts nothing");
}

/* Sorts rows by expert and adapter: at once, or in two sorts, first the tokens by adapter. Unless
 * `from` is NULL, the first sort resolves it. */
static moelora_status run(const moelora_align_problem *problem, const moelora_align_plan &plan,
                          const moelora_blocks *blocks, const moelora_sort_scratch &parts,
                          const moelora_routes *from, const moelora_exec *exec) {
  const bool two_sorts = plan.tokens.variant;
  const bool pads = two_sorts && problem->mode == MOELORA_ALIGN_UNIFORM;
  if (two_sorts) {
    const align_sort tokens = describe_tokens(problem, plan.tokens, parts);
    MOELORA_TRY(run_sort(tokens, plan.tokens, from, plan.resolves, exec));
    from = NULL;
  }
  align_sort rows = describe(problem);
  apply_blocks(&rows, blocks);
  align_pad pad = {};
  pad.out = rows;
  rows.order = parts.order;
  if (pads) {
    /* use blocks of one row, which need no padding, and write the expert and adapter of each row */
    rows.block_size = moelora_divisor_of(1);
    rows.max_blocks = problem->routes.num_rows;
    rows.sorted_ids = parts.row;
    rows.expert_ids = parts.expert;
    rows.row_loras = parts.adapter;
    rows.block_loras = NULL;
    rows.num_post = parts.count;
  }
  const int64_t adapters = two_sorts ? 1 : adapter_keys_of(problem);
  rows.by_adapter = adapters > 1;
  rows.adapter_keys = moelora_divisor_of((uint32_t)adapters);
  set_size(&rows, plan.rows, problem->routes.num_rows, problem->routes.num_experts * adapters,
           problem->mode == MOELORA_ALIGN_SEGMENTED ? adapters : 1, parts);
  MOELORA_TRY(run_sort(rows, plan.rows, from, plan.resolves, exec));
  if (!pads)
    return MOELORA_OK;
  pad.row = parts.row;
  pad.expert = parts.expert;
  pad.adapter = parts.adapter;
  pad.count = parts.count;
  return align_launch_pad(pad, exec);
}

/* ---- backend functions ---- */

struct AlignLayout {
  moelora_align_problem sorted; /* a problem with resolved routes */
  moelora_sort_scratch scratch;
  size_t bytes;
};

static AlignLayout lay_out(const moelora_align_problem *problem, const moelora_align_plan *plan,
                           const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  AlignLayout l = {};
  moelora_routes routes = problem->routes;
  if (adapter_keys_of(problem) == 1)
    routes.token_lora_mapping.data = NULL;
  l.sorted = *problem;
  l.sorted.routes =
      moelora_cuda_take_routes(&routes, problem->mode == MOELORA_ALIGN_SORTING, &arena);
  l.scratch = moelora_cuda_take_scratch(&l.sorted.routes, problem->mode, plan, &arena);
  l.bytes = arena.used;
  return l;
}

moelora_status moelora_cuda_align(const moelora_align_problem *problem,
                                  const moelora_align_plan *plan, const moelora_exec *exec,
                                  size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(problem, plan, exec).bytes);
  const AlignLayout l = lay_out(problem, plan, exec);
  MOELORA_TRY(moelora_cuda_resolve(&problem->routes, &l.sorted.routes, NULL, NULL, true, exec));
  return run(&l.sorted, *plan, NULL, l.scratch, NULL, exec);
}

/* ---- blocks of a layer ---- */

moelora_status moelora_cuda_align_rows(const moelora_routes *from, const moelora_routes *routes,
                                       const moelora_blocks *blocks, const moelora_align_plan *plan,
                                       const moelora_sort_scratch *scratch,
                                       const moelora_exec *exec) {
  moelora_align_problem problem = {};
  problem.mode = MOELORA_ALIGN_SEGMENTED;
  problem.routes = *routes;
  problem.block_size = blocks->rows;
  problem.max_blocks = blocks->max_blocks;
  problem.sorted_token_ids = blocks->sorted_ids;
  problem.expert_ids = blocks->expert_ids;
  problem.lora_ids = blocks->packed_ranks;
  problem.sorted_weights = blocks->weights;
  problem.num_tokens_post_padded = blocks->num_post;
  return run(&problem, *plan, blocks, *scratch, from, exec);
}

/* ---- unpadded rows ---- */

moelora_sorted_rows moelora_cuda_take_sorted(const moelora_routes *routes,
                                             const moelora_align_plan *plan, moelora_arena *arena) {
  moelora_sorted_rows sorted = {};
  const size_t rows = (size_t)routes->num_rows;
  take_array(arena, &sorted.row, rows);
  take_array(arena, &sorted.expert, rows);
  take_array(arena, &sorted.adapter, rows);
  take_array(arena, &sorted.count, 1);
  if (plan->segments > 0)
    take_array(arena, &sorted.segments, (size_t)plan->segments);
  sorted.scratch = moelora_cuda_take_scratch(routes, MOELORA_ALIGN_SEGMENTED, plan, arena);
  return sorted;
}

moelora_status moelora_cuda_sort_rows(const moelora_routes *routes,
                                      const moelora_sorted_rows *sorted,
                                      const moelora_align_plan *plan, const moelora_exec *exec) {
  const moelora_blocks blocks = {.rows = 1,
                                 .cluster = 1,
                                 .max_blocks = routes->num_rows,
                                 .sorted_ids = sorted->row,
                                 .expert_ids = sorted->expert,
                                 .packed_ranks = sorted->adapter,
                                 .segments = sorted->segments,
                                 .num_post = sorted->count};
  return moelora_cuda_align_rows(NULL, routes, &blocks, plan, &sorted->scratch, exec);
}
