/* vLLM's alignment: a list of rows for each adapter, sorted by expert. */
#include "cpu/cpu.h"

typedef struct lists_layout {
  moelora_sorted sorted;
  int32_t *used; /* [max_loras] rows so far, with padding; -1: the list is not requested */
  size_t bytes;
} lists_layout;

static lists_layout lay_out(const moelora_align_lists_problem *problem, const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  lists_layout layout = {0};
  moelora_sorted_take(&problem->routes, &arena, &layout.sorted);
  layout.used = moelora_take_array(&arena, (size_t)problem->routes.max_loras, sizeof(int32_t));
  layout.bytes = arena.used;
  return layout;
}

/* Fills the list of `adapter` with padding. */
static void start_list(const moelora_align_lists_problem *problem, int32_t adapter) {
  const moelora_list_blocks *lists = &problem->lists;
  for (int64_t i = 0; i < lists->rows; i++)
    lists->sorted_token_ids[adapter * lists->sorted_stride + i] = (int32_t)problem->routes.num_rows;
  for (int64_t i = 0; i < lists->blocks; i++)
    lists->expert_ids[adapter * lists->expert_stride + i] = -1;
}

moelora_status moelora_cpu_align_lists(const moelora_align_lists_problem *problem,
                                       const moelora_align_plan *plan, const moelora_exec *exec,
                                       size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(problem, exec).bytes);
  (void)plan;
  const moelora_routes *routes = &problem->routes;
  const moelora_list_blocks *lists = &problem->lists;
  lists_layout layout = lay_out(problem, exec);
  const moelora_sorted *sorted = &layout.sorted;
  moelora_sort_rows(routes, &layout.sorted);
  for (int32_t i = 0; i < routes->max_loras; i++)
    layout.used[i] = -1;
  for (int32_t i = 0; i < lists->num_active; i++) {
    const int32_t adapter =
        moelora_active_adapter(routes, &sorted->tables, moelora_read_i32(&lists->lora_ids[i]));
    if (adapter < 0)
      continue;
    start_list(problem, adapter);
    layout.used[adapter] = 0;
  }

  for (int64_t at = 0, next; at < sorted->num_rows; at = next) {
    next = moelora_segment_end(sorted, at, sorted->num_rows);
    const int32_t adapter = sorted->adapter[at];
    if (adapter < 0 || layout.used[adapter] < 0)
      continue;
    const int32_t first = layout.used[adapter];
    for (int64_t i = at; i < next; i++)
      lists->sorted_token_ids[adapter * lists->sorted_stride + first + (i - at)] = sorted->row[i];
    const int64_t blocks = moelora_divide_up(next - at, lists->block_size);
    for (int64_t i = 0; i < blocks; i++)
      lists->expert_ids[adapter * lists->expert_stride + first / lists->block_size + i] =
          sorted->expert[at];
    layout.used[adapter] += (int32_t)(blocks * lists->block_size);
  }
  for (int32_t i = 0; i < routes->max_loras; i++)
    if (layout.used[i] >= 0)
      lists->num_tokens_post_padded[i] = layout.used[i];
  return MOELORA_OK;
}
