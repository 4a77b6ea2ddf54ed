/* Aligns routed rows: sorts them into blocks of one expert, or of one expert and adapter. It runs
 * serially, since a few operations per row are negligible next to a layer. */
#include <string.h>

#include "cpu/cpu.h"

static moelora_routes align_routes(const moelora_align_problem *problem) {
  moelora_routes routes = problem->routes;
  if (problem->mode == MOELORA_ALIGN_BASE || problem->mode == MOELORA_ALIGN_SORTING)
    routes.token_lora_mapping.data = NULL;
  return routes;
}

typedef struct align_layout {
  moelora_routes routes;
  moelora_sorted sorted;
  uint8_t *local; /* [E] */
  size_t bytes;
} align_layout;

static align_layout lay_out(const moelora_align_problem *problem, const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  align_layout layout = {.routes = align_routes(problem)};
  moelora_sorted_take(&layout.routes, &arena, &layout.sorted);
  layout.local = moelora_take_array(&arena, (size_t)layout.routes.num_experts, 1);
  layout.bytes = arena.used;
  return layout;
}

static void fill_padding(const moelora_align_problem *problem) {
  int64_t blocks = problem->max_blocks, rows = blocks * problem->block_size;
  for (int64_t i = 0; i < rows; i++)
    problem->sorted_token_ids[i] = (int32_t)problem->routes.num_rows;
  for (int64_t i = 0; i < blocks; i++)
    problem->expert_ids[i] = -1;
  if (problem->lora_ids) {
    int64_t count = problem->mode == MOELORA_ALIGN_SEGMENTED ? rows : blocks;
    for (int64_t i = 0; i < count; i++)
      problem->lora_ids[i] = -1;
  }
  if (problem->sorted_weights)
    memset(problem->sorted_weights, 0, (size_t)rows * sizeof(float));
}

/* Writes sorted rows [begin, end) of one expert, starting at block `block`; returns the next
 * block. */
static int64_t write_blocks(const moelora_align_problem *problem, const moelora_sorted *sorted,
                            int64_t begin, int64_t end, int32_t expert, int64_t block) {
  const moelora_routes *routes = &problem->routes;
  int64_t size = problem->block_size, next = block + (end - begin + size - 1) / size;
  for (int64_t i = begin; i < end; i++) {
    int64_t at = block * size + (i - begin);
    int32_t row = sorted->row[i];
    bool sorting = problem->mode == MOELORA_ALIGN_SORTING;
    problem->sorted_token_ids[at] = sorting ? row / routes->top_k : row;
    if (problem->sorted_weights)
      problem->sorted_weights[at] = sorted->tables.weight[row];
    if (problem->mode == MOELORA_ALIGN_SEGMENTED && problem->lora_ids)
      problem->lora_ids[at] = sorted->adapter[i];
  }
  for (; block < next; block++) {
    problem->expert_ids[block] = expert;
    if (problem->mode == MOELORA_ALIGN_UNIFORM && problem->lora_ids)
      problem->lora_ids[block] = sorted->adapter[begin];
  }
  return next;
}

/* Marks the local experts, which get a block in SORTING mode even without rows. */
static void mark_local(const moelora_routes *routes, const moelora_tables *tables, uint8_t *local) {
  memset(local, tables->expert_map ? 0 : 1, (size_t)routes->num_experts);
  for (int32_t i = 0; tables->expert_map && i < routes->num_global; i++)
    if (tables->expert_map[i] >= 0)
      local[tables->expert_map[i]] = 1;
}

moelora_status moelora_cpu_align(const moelora_align_problem *problem,
                                 const moelora_align_plan *plan, const moelora_exec *exec,
                                 size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(problem, exec).bytes);
  (void)plan;
  align_layout layout = lay_out(problem, exec);
  const moelora_routes *routes = &layout.routes;
  const moelora_sorted *sorted = &layout.sorted;
  moelora_sort_rows(routes, &layout.sorted);
  fill_padding(problem);
  if (problem->mode == MOELORA_ALIGN_SORTING)
    mark_local(routes, &sorted->tables, layout.local);

  int64_t block = 0;
  for (int32_t e = 0; e < routes->num_experts; e++) {
    int64_t begin = sorted->offset[e], end = sorted->offset[e + 1];
    while (problem->mode == MOELORA_ALIGN_UNIFORM && begin < end) {
      const int64_t next = moelora_segment_end(sorted, begin, end);
      block = write_blocks(problem, sorted, begin, next, e, block);
      begin = next;
    }
    if (begin < end)
      block = write_blocks(problem, sorted, begin, end, e, block);
    else if (problem->mode == MOELORA_ALIGN_SORTING && layout.local[e])
      problem->expert_ids[block++] = e;
  }
  *problem->num_tokens_post_padded = (int32_t)(block * problem->block_size);
  if (problem->out_to_zero)
    memset(problem->out_to_zero, 0, problem->out_to_zero_bytes);
  return MOELORA_OK;
}
