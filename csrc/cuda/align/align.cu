/* Alignment on the host: which sorts a problem needs, their workspace, their launches.
 *
 *   experts * (adapters + 1) <= ALIGN_MAX_KEYS   rows by (expert, adapter), one sort
 *   otherwise                                    tokens by adapter, then their rows by expert:
 * stable, so the order is the same; UNIFORM also pads pairs
 *
 * A sort is one launch up to SMALL_ITEMS items, of another kernel up to ALIGN_TINY_ITEMS, and two
 * beyond; of resolved routes (resolve.cu), so that all CTAs and both launches see the same ids. A
 * launch overlaps with the one before it by programmatic dependent launch where the GPU has it. */
#include "cuda/align/align.h"
#include "cuda/backend.h"

/* Each CTA of a small sort counts all items: 16 for each of its threads. */
constexpr int64_t SMALL_ITEMS = 16384;
/* Output rows that one CTA fills while it places its items. */
constexpr int64_t FILL_ROWS = 4096;
constexpr int64_t MAX_SMALL_CHUNKS = 128;
/* However few the items, what lies around their groups is written by so many CTAs. */
constexpr int64_t MIN_SMALL_CHUNKS = 16;
/* About a CTA for each SM of the large GPUs. */
constexpr int64_t MAX_LARGE_CHUNKS = 128;
/* Counts of a row of the table are 16 bits wide. */
constexpr int64_t MAX_CHUNK_ITEMS = 63 * ALIGN_THREADS;
/* Words of the table that a CTA reads in the time in which it counts ALIGN_THREADS items. */
constexpr int64_t ROUND_WORDS = 1000;

/* ---- shapes ---- */

struct sort_shape {
  bool small;
  uint32_t num_chunks, chunk_items;
  uint32_t num_rows, row_chunks; /* of the table */
  size_t table_bytes;
};

static int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

static sort_shape shape_of(int64_t items, int64_t keys, int64_t out_rows) {
  sort_shape shape = {};
  shape.small = items <= SMALL_ITEMS;
  if (shape.small) {
    int64_t fill = ceil_div(out_rows, FILL_ROWS);
    int64_t chunks = fill < MAX_SMALL_CHUNKS ? fill : MAX_SMALL_CHUNKS;
    int64_t least = ceil_div(items, ALIGN_GROUP);
    chunks = chunks < least ? least : chunks;
    shape.num_chunks = (uint32_t)(chunks < MIN_SMALL_CHUNKS ? MIN_SMALL_CHUNKS : chunks);
    shape.chunk_items = ALIGN_GROUP;
    return shape;
  }
  int64_t size = ceil_div(ceil_div(items, MAX_LARGE_CHUNKS), ALIGN_THREADS) * ALIGN_THREADS;
  size = size < MAX_CHUNK_ITEMS ? size : MAX_CHUNK_ITEMS;
  const int64_t chunks = ceil_div(items, size), words = (keys + 1) / 2;
  /* With q chunks to a row, a CTA counts the items of q chunks, ROUND_WORDS words' time for
   * each ALIGN_THREADS of them, and reads chunks * words / q words: least where both are equal. */
  int64_t q = 1;
  while ((q + 1) * (q + 1) * (size / ALIGN_THREADS) * ROUND_WORDS <= chunks * words &&
         (q + 1) * size <= MAX_CHUNK_ITEMS)
    q++;
  shape.chunk_items = (uint32_t)size;
  shape.num_chunks = (uint32_t)chunks;
  shape.row_chunks = (uint32_t)q;
  shape.num_rows = (uint32_t)ceil_div(chunks, q);
  shape.table_bytes = (size_t)shape.num_rows * (size_t)words * sizeof(uint32_t);
  return shape;
}

/* What a call keeps in its workspace; NULL where it needs none. */
struct scratch {
  uint32_t *table;
  int32_t *order;                          /* [M] */
  int32_t *row, *expert, *adapter, *count; /* [P], [P], [P], [1] */
};

static bool sorts_by_adapter(const moelora_align_problem *problem) {
  bool wanted = problem->mode == MOELORA_ALIGN_UNIFORM || problem->mode == MOELORA_ALIGN_SEGMENTED;
  return wanted && problem->routes.token_lora_mapping.data && problem->routes.max_loras > 0;
}

static int64_t adapter_keys_of(const moelora_align_problem *problem) {
  return sorts_by_adapter(problem) ? (int64_t)problem->routes.max_loras + 1 : 1;
}

static bool one_sort_does(const moelora_align_problem *problem) {
  return problem->routes.num_experts * adapter_keys_of(problem) <= ALIGN_MAX_KEYS;
}

static void take_scratch(const moelora_align_problem *problem, moelora_arena *arena,
                         scratch *parts) {
  const moelora_routes *routes = &problem->routes;
  *parts = {};
  const int64_t experts = routes->num_experts, adapters = adapter_keys_of(problem);
  size_t table = 0;
  if (one_sort_does(problem)) {
    table = shape_of(routes->num_rows, experts * adapters, 0).table_bytes;
  } else {
    size_t tokens = shape_of(routes->num_tokens, adapters, 0).table_bytes;
    table = shape_of(routes->num_rows, experts, 0).table_bytes;
    table = table > tokens ? table : tokens;
    parts->order = (int32_t *)moelora_take(arena, (size_t)routes->num_tokens * sizeof(int32_t));
    if (problem->mode == MOELORA_ALIGN_UNIFORM) {
      const size_t rows = (size_t)routes->num_rows * sizeof(int32_t);
      parts->row = (int32_t *)moelora_take(arena, rows);
      parts->expert = (int32_t *)moelora_take(arena, rows);
      parts->adapter = (int32_t *)moelora_take(arena, rows);
      parts->count = (int32_t *)moelora_take(arena, sizeof(int32_t));
    }
  }
  if (table)
    parts->table = (uint32_t *)moelora_take(arena, table);
}

/* ---- sorts ---- */

/* How threads share the groups: lanes are powers of two. */
static void set_lanes(align_sort *sort) {
  const int64_t groups = sort->num_groups, ways = sort->ways;
  uint32_t shift = 0;
  while (shift < 5 && (int64_t)1 << shift < ways && groups << (shift + 1) <= ALIGN_THREADS)
    shift++;
  sort->scan_shift = shift;
  sort->scan_ways = (uint32_t)ceil_div(ways, (int64_t)1 << shift);
  sort->scan_groups = (uint32_t)ceil_div(groups, ALIGN_THREADS >> shift);
  const int64_t own = ceil_div(groups, sort->num_chunks);
  while (own << (sort->around_shift + 1) <= ALIGN_THREADS)
    sort->around_shift++;
}

/* The last step of a description: the rest must be there. */
static void set_size(align_sort *sort, int64_t items, int64_t keys, int64_t ways,
                     const scratch &parts) {
  sort_shape shape = shape_of(items, keys, sort->max_blocks * sort->block_size.value);
  sort->num_items = (uint32_t)items;
  sort->num_keys = (uint32_t)keys;
  sort->ways = (uint32_t)ways;
  sort->num_groups = (uint32_t)(keys / ways);
  sort->num_chunks = shape.num_chunks;
  sort->chunk_items = shape.chunk_items;
  set_lanes(sort);
  if (!shape.small) {
    sort->table = parts.table;
    sort->num_rows = shape.num_rows;
    sort->row_chunks = shape.row_chunks;
    sort->words = moelora_divisor_of((uint32_t)((keys + 1) / 2));
  }
}

/* All of a problem but how its items are sorted. */
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

/* Tokens by adapter, unpadded, into parts.order. */
static align_sort describe_tokens(const moelora_align_problem *problem, const scratch &parts) {
  align_sort sort = {};
  const int64_t tokens = problem->routes.num_tokens, adapters = adapter_keys_of(problem);
  sort.routes = problem->routes;
  sort.top_k = sort.block_size = moelora_divisor_of(1);
  sort.by_adapter = true;
  sort.adapter_keys = moelora_divisor_of((uint32_t)adapters);
  sort.sorted_ids = parts.order;
  sort.max_blocks = tokens;
  set_size(&sort, tokens, adapters, 1, parts);
  return sort;
}

/* What a layer asks beyond the public modes; rows in blocks of one, which the adapters alone ask
 * for, have nothing to be dealt to. */
static void apply_blocks(align_sort *sort, const moelora_blocks *blocks) {
  if (!blocks)
    return;
  sort->even = sort->packs_ranks = blocks->rows > 1;
  sort->cluster = (uint32_t)blocks->cluster;
  sort->block_counts = blocks->counts;
  sort->positions = blocks->positions;
  sort->segments = blocks->segments;
  sort->tile_counters = blocks->tile_counters;
}

static moelora_status run_sort(const align_sort &sort, const moelora_exec *exec) {
  if (sort.table) {
    const moelora_status status = align_launch_count(sort, exec);
    return status == MOELORA_OK ? align_launch_place(sort, exec) : status;
  }
  if (sort.num_items <= ALIGN_TINY_ITEMS && !sort.empty_blocks && !sort.zero_bytes)
    return align_launch_tiny(sort, exec);
  return align_launch_small(sort, exec);
}

static moelora_status run_one_sort(const moelora_align_problem *problem,
                                   const moelora_blocks *blocks, const scratch &parts,
                                   const moelora_exec *exec) {
  align_sort sort = describe(problem);
  apply_blocks(&sort, blocks);
  const int64_t adapters = adapter_keys_of(problem);
  sort.by_adapter = sorts_by_adapter(problem);
  sort.adapter_keys = moelora_divisor_of((uint32_t)adapters);
  set_size(&sort, problem->routes.num_rows, problem->routes.num_experts * adapters,
           problem->mode == MOELORA_ALIGN_SEGMENTED ? adapters : 1, parts);
  return run_sort(sort, exec);
}

static moelora_status run_two_sorts(const moelora_align_problem *problem,
                                    const moelora_blocks *blocks, const scratch &parts,
                                    const moelora_exec *exec) {
  align_sort tokens = describe_tokens(problem, parts);
  moelora_status status = run_sort(tokens, exec);
  if (status != MOELORA_OK)
    return status;
  align_sort rows = describe(problem);
  apply_blocks(&rows, blocks);
  align_pad pad = {};
  pad.out = rows;
  rows.order = parts.order;
  if (problem->mode == MOELORA_ALIGN_UNIFORM) {
    /* blocks of one row: unpadded, with the expert and the adapter of each row */
    rows.block_size = moelora_divisor_of(1);
    rows.max_blocks = problem->routes.num_rows;
    rows.sorted_ids = parts.row;
    rows.expert_ids = parts.expert;
    rows.row_loras = parts.adapter;
    rows.block_loras = NULL;
    rows.num_post = parts.count;
  }
  set_size(&rows, problem->routes.num_rows, problem->routes.num_experts, 1, parts);
  status = run_sort(rows, exec);
  if (status != MOELORA_OK || problem->mode != MOELORA_ALIGN_UNIFORM)
    return status;
  pad.row = parts.row;
  pad.expert = parts.expert;
  pad.adapter = parts.adapter;
  pad.count = parts.count;
  return align_launch_pad(pad, exec);
}

/* ---- the backend's slots ---- */

static moelora_status run(const moelora_align_problem *problem, const moelora_blocks *blocks,
                          moelora_arena *arena, const moelora_exec *exec) {
  const int64_t adapters = adapter_keys_of(problem);
  if (problem->routes.num_experts >= ALIGN_MAX_KEYS || adapters > ALIGN_MAX_KEYS)
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "%d experts and %lld adapters: CUDA alignment takes at most %d of either",
                        problem->routes.num_experts, (long long)adapters - 1, ALIGN_MAX_KEYS - 1);
  scratch parts;
  take_scratch(problem, arena, &parts);
  const moelora_status status = moelora_cuda_check_layout(arena->used, exec);
  if (status != MOELORA_OK)
    return status;
  return one_sort_does(problem) ? run_one_sort(problem, blocks, parts, exec)
                                : run_two_sorts(problem, blocks, parts, exec);
}

/* The problem over routes that lie in front of a sort's scratch memory. */
static moelora_align_problem resolved(const moelora_align_problem *problem, moelora_arena *arena) {
  moelora_align_problem to = *problem;
  moelora_routes routes = problem->routes;
  if (!sorts_by_adapter(problem))
    routes.token_lora_mapping.data = NULL;
  to.routes = moelora_cuda_take_routes(&routes, problem->mode == MOELORA_ALIGN_SORTING, arena);
  return to;
}

extern "C" size_t moelora_cuda_align_workspace(const moelora_align_problem *problem) {
  moelora_arena arena = {};
  const moelora_align_problem sorted = resolved(problem, &arena);
  scratch parts;
  take_scratch(&sorted, &arena, &parts);
  return arena.used;
}

extern "C" moelora_status moelora_cuda_align(const moelora_align_problem *problem,
                                             const moelora_exec *exec) {
  moelora_arena arena = {(char *)exec->workspace, 0};
  const moelora_align_problem sorted = resolved(problem, &arena);
  moelora_status status = moelora_cuda_check_layout(arena.used, exec);
  if (status == MOELORA_OK)
    status = moelora_cuda_resolve(&problem->routes, &sorted.routes, NULL, NULL, true, exec);
  return status == MOELORA_OK ? run(&sorted, NULL, &arena, exec) : status;
}

/* ---- blocks of a layer ---- */

static moelora_align_problem rows_problem(const moelora_routes *routes, int32_t rows) {
  moelora_align_problem problem = {};
  problem.mode = MOELORA_ALIGN_SEGMENTED;
  problem.routes = *routes;
  problem.block_size = rows;
  return problem;
}

/* A cluster of blocks is one block of their rows together. */
extern "C" int64_t moelora_cuda_max_blocks(const moelora_routes *routes, int32_t rows,
                                           int32_t cluster) {
  return cluster * moelora_align_max_blocks(MOELORA_ALIGN_SEGMENTED, routes->num_rows,
                                            routes->num_experts, routes->max_loras, cluster * rows);
}

extern "C" int64_t moelora_cuda_count_segments(const moelora_routes *routes) {
  const moelora_align_problem problem = rows_problem(routes, 1);
  const bool listed = sorts_by_adapter(&problem) && one_sort_does(&problem);
  return listed && routes->num_rows > ALIGN_TINY_ITEMS
             ? routes->num_experts * adapter_keys_of(&problem)
             : 0;
}

extern "C" size_t moelora_cuda_align_rows_workspace(const moelora_routes *routes, int32_t rows) {
  const moelora_align_problem problem = rows_problem(routes, rows);
  moelora_arena arena = {};
  scratch parts;
  take_scratch(&problem, &arena, &parts);
  return arena.used;
}

extern "C" moelora_status moelora_cuda_align_rows(const moelora_routes *routes,
                                                  const moelora_blocks *blocks, void *workspace,
                                                  const moelora_exec *exec) {
  moelora_align_problem problem = rows_problem(routes, blocks->rows);
  if (blocks->packed_ranks && routes->max_loras > INT32_MAX / kRanks)
    return moelora_fail(MOELORA_UNSUPPORTED, "%d adapters: the GPU kernels take at most %d",
                        routes->max_loras, INT32_MAX / kRanks);
  problem.max_blocks = blocks->max_blocks;
  problem.sorted_token_ids = blocks->sorted_ids;
  problem.expert_ids = blocks->expert_ids;
  problem.lora_ids = blocks->packed_ranks;
  problem.sorted_weights = blocks->weights;
  problem.num_tokens_post_padded = blocks->num_post;
  moelora_arena arena = {(char *)workspace, 0};
  return run(&problem, blocks, &arena, exec);
}
