/* Plans the sorts of an alignment, with keys = experts * (adapters + 1):
 *
 *   keys <= MOELORA_SORT_KEYS      one sort, of rows by (expert, adapter)
 *   keys <= rows, SEGMENTED mode   the same, in two launches, if its bins fit in shared memory
 *   otherwise                      two sorts, of tokens by adapter, then of rows by expert: sorts
 *                                  are stable, so the order is the same */
#include "core/check.h"
#include "core/plan.h"

enum {
  /* one launch, in which each CTA counts all items */
  FILL_ROWS = 4096, /* output rows that one CTA fills while placing its items */
  MAX_SMALL_CHUNKS = 128,
  MIN_SMALL_CHUNKS = 16, /* minimum number of CTAs, which also write padding */
  /* two launches, with a table of counts between them */
  MAX_LARGE_CHUNKS = 128,                      /* about one CTA per SM of large GPUs */
  MAX_CHUNK_ITEMS = 63 * MOELORA_SORT_THREADS, /* counts are 16 bits wide */
  ROUND_WORDS = 1000, /* words of the table that a CTA reads in the time in which it counts
                         MOELORA_SORT_THREADS items */
  TINY_ITEMS = 64,    /* maximum for the sort by pairwise comparison, which gives no blocks to empty
                         experts and zeroes no memory */
  /* lists: minimum rows per CTA, since each CTA computes the whole layout */
  PART_ROWS = 4096,
  MAX_PARTS = 32,
};

static int64_t at_most(int64_t a, int64_t b) {
  return a < b ? a : b;
}

static bool is_two_launches(const moelora_variant *v) {
  return v->block_m == INT32_MAX;
}

static bool serves(const moelora_variant *v, int64_t items, int64_t keys, bool compact) {
  return v && v->role == MOELORA_ROLE_SORT && items <= v->block_m &&
         (keys <= MOELORA_SORT_KEYS || is_two_launches(v)) &&
         (v->block_m > TINY_ITEMS || compact) && (items > 0 || !is_two_launches(v));
}

static const moelora_variant *choose(int64_t items, int64_t keys, bool compact,
                                     const moelora_device_info *device,
                                     const moelora_variant *tuned) {
  const moelora_variant *v = moelora_forced(MOELORA_ROLE_SORT, MOELORA_I32, device);
  if (serves(v, items, keys, compact))
    return v;
  if (serves(tuned, items, keys, compact))
    return tuned;
  for (int32_t i = 0; (v = moelora_variant_at(i)); i++)
    if (serves(v, items, keys, compact))
      return v;
  return NULL;
}

/* Plans one sort. compact: empty experts get no block, and there is no memory to zero. */
static moelora_sort_plan plan_sort(int64_t items, int64_t keys, int64_t out_rows, bool compact,
                                   const moelora_device_info *device,
                                   const moelora_variant *tuned) {
  moelora_sort_plan plan = {.variant = choose(items, keys, compact, device, tuned)};
  if (!is_two_launches(plan.variant)) {
    const int64_t fill = at_most(moelora_divide_up(out_rows, FILL_ROWS), MAX_SMALL_CHUNKS);
    const int64_t least = moelora_divide_up(items, MOELORA_SORT_GROUP);
    const int64_t chunks = fill < least ? least : fill;
    plan.num_chunks = (uint32_t)(chunks < MIN_SMALL_CHUNKS ? MIN_SMALL_CHUNKS : chunks);
    plan.chunk_items = MOELORA_SORT_GROUP;
    return plan;
  }
  const int64_t threads = MOELORA_SORT_THREADS;
  const int64_t size =
      at_most(moelora_divide_up(moelora_divide_up(items, MAX_LARGE_CHUNKS), threads) * threads,
              MAX_CHUNK_ITEMS);
  const int64_t chunks = moelora_divide_up(items, size), words = (keys + 1) / 2;
  /* With q chunks per table row, a CTA counts the items of up to q chunks (`threads` items in the
   * time of ROUND_WORDS words) and reads chunks * words / q words: best if both take equal time. */
  int64_t q = 1;
  while ((q + 1) * (q + 1) * (size / threads) * ROUND_WORDS <= chunks * words &&
         (q + 1) * size <= MAX_CHUNK_ITEMS)
    q++;
  plan.chunk_items = (uint32_t)size;
  plan.num_chunks = (uint32_t)chunks;
  plan.row_chunks = (uint32_t)q;
  plan.num_rows = (uint32_t)moelora_divide_up(chunks, q);
  plan.table_bytes = (size_t)plan.num_rows * (size_t)words * sizeof(uint32_t);
  return plan;
}

/* Inputs to the plan of an alignment. */
typedef struct alignment {
  moelora_align_mode mode;
  const moelora_routes *routes;
  int64_t out_rows; /* of all blocks */
  bool zeroes;
} alignment;

int64_t moelora_adapter_keys(moelora_align_mode mode, const moelora_routes *routes) {
  const bool wanted = mode == MOELORA_ALIGN_UNIFORM || mode == MOELORA_ALIGN_SEGMENTED;
  return wanted && routes->token_lora_mapping.data && routes->max_loras > 0
             ? (int64_t)routes->max_loras + 1
             : 1;
}

moelora_status moelora_check_sort(moelora_align_mode mode, const moelora_routes *routes) {
  const int64_t adapters = moelora_adapter_keys(mode, routes);
  if (routes->num_experts < MOELORA_SORT_KEYS && adapters <= MOELORA_SORT_KEYS)
    return MOELORA_OK;
  return moelora_fail(MOELORA_UNSUPPORTED,
                      "%d experts and %lld adapters: CUDA alignment takes at most %d of either",
                      routes->num_experts, (long long)adapters - 1, MOELORA_SORT_KEYS - 1);
}

static void plan_alignment(const alignment *a, const moelora_device_info *device,
                           const moelora_variant *tuned, moelora_align_plan *plan) {
  *plan = (moelora_align_plan){0};
  const moelora_routes *routes = a->routes;
  const int64_t experts = routes->num_experts, adapters = moelora_adapter_keys(a->mode, routes);
  const bool compact = a->mode != MOELORA_ALIGN_SORTING && !a->zeroes;
  const int64_t keys = experts * adapters;
  /* The large sort has a third bin per expert, not per key. With few rows two sorts are faster. */
  const bool large = a->mode == MOELORA_ALIGN_SEGMENTED && routes->num_rows >= keys &&
                     2 * keys + experts <= 3 * MOELORA_SORT_KEYS;
  if (keys <= MOELORA_SORT_KEYS || large) {
    plan->rows = plan_sort(routes->num_rows, keys, a->out_rows, compact, device, tuned);
    if (adapters > 1 && plan->rows.variant->block_m > TINY_ITEMS)
      plan->segments = keys;
    return;
  }
  /* In UNIFORM mode, a later launch pads the blocks. */
  const int64_t out_rows = a->mode == MOELORA_ALIGN_UNIFORM ? routes->num_rows : a->out_rows;
  plan->tokens = plan_sort(routes->num_tokens, adapters, routes->num_tokens, true, device, tuned);
  plan->rows = plan_sort(routes->num_rows, experts, out_rows, compact, device, tuned);
}

moelora_status moelora_plan_align(const moelora_align_problem *problem,
                                  const moelora_device_info *device, moelora_align_plan *plan) {
  *plan = (moelora_align_plan){0};
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  MOELORA_TRY(moelora_check_sort(problem->mode, &problem->routes));
  const alignment a = {problem->mode, &problem->routes, problem->max_blocks * problem->block_size,
                       problem->out_to_zero && problem->out_to_zero_bytes > 0};
  plan_alignment(&a, device, NULL, plan);
  plan->resolves = true;
  return MOELORA_OK;
}

moelora_status moelora_plan_align_lists(const moelora_align_lists_problem *problem,
                                        const moelora_device_info *device,
                                        moelora_align_plan *plan) {
  *plan = (moelora_align_plan){0};
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  MOELORA_TRY(moelora_check_sort(MOELORA_ALIGN_SEGMENTED, &problem->routes));
  moelora_plan_blocks(&problem->routes, 1, 1, device, NULL, plan);
  plan->segments = 0; /* lists are built from sorted rows */
  const moelora_list_blocks *lists = &problem->lists;
  const int64_t parts = lists->rows / PART_ROWS;
  const int64_t most = lists->num_active <= INT32_MAX / MAX_PARTS ? MAX_PARTS : 1;
  plan->list_parts = (int32_t)(parts < 1 ? 1 : at_most(parts, most));
  return MOELORA_OK;
}

int64_t moelora_align_max_blocks(moelora_align_mode mode, int64_t num_rows, int32_t num_experts,
                                 int32_t max_loras, int32_t block_size) {
  if (num_rows < 0 || num_experts < 1 || block_size < 1 ||
      (mode == MOELORA_ALIGN_UNIFORM && max_loras < 0))
    return 0;
  if (mode == MOELORA_ALIGN_SORTING) {
    int64_t blocks;
    return __builtin_add_overflow(num_rows / block_size, num_experts, &blocks) ? INT64_MAX : blocks;
  }
  /* Each expert, or (expert, adapter), adds at most one partial block. */
  int64_t groups = num_experts;
  if (mode == MOELORA_ALIGN_UNIFORM)
    groups *= (int64_t)max_loras + 1;
  if (groups > num_rows)
    groups = num_rows;
  return groups + (num_rows - groups) / block_size;
}

int64_t moelora_max_blocks(const moelora_routes *routes, int32_t rows, int32_t cluster) {
  return cluster * moelora_align_max_blocks(MOELORA_ALIGN_SEGMENTED, routes->num_rows,
                                            routes->num_experts, routes->max_loras, cluster * rows);
}

void moelora_plan_blocks(const moelora_routes *routes, int32_t rows, int32_t cluster,
                         const moelora_device_info *device, const moelora_variant *tuned,
                         moelora_align_plan *plan) {
  const int64_t max_blocks =
      rows == 1 ? routes->num_rows : moelora_max_blocks(routes, rows, cluster);
  const alignment a = {MOELORA_ALIGN_SEGMENTED, routes, max_blocks * rows, false};
  plan_alignment(&a, device, tuned, plan);
  /* The sort by pairwise comparison also resolves the tables, in its single CTA, with two
   * exceptions: for blocks of one row an earlier launch resolves them, and the first of two sorts
   * has tokens instead of rows. */
  plan->resolves = rows == 1 || plan->tokens.variant || plan->rows.variant->block_m > TINY_ITEMS;
}
