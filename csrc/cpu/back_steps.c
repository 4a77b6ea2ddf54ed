#include "cpu/back.h"

static moelora_panel take_panel(int64_t rows, moelora_arena *arena) {
  return (moelora_panel){
      .rows = moelora_take_array(arena, (size_t)rows, sizeof(float *)),
      .copy = moelora_take_array(arena, (size_t)rows, MOELORA_BACK_COLUMNS * sizeof(float)),
  };
}

static moelora_back_scratch *take_scratch(int64_t depth, int64_t rank, const moelora_exec *exec,
                                          moelora_arena *arena) {
  const size_t columns = MOELORA_BACK_COLUMNS;
  const int32_t workers = moelora_workers(exec);
  moelora_back_scratch *all = moelora_take_array(arena, (size_t)workers, sizeof *all);
  for (int32_t i = 0; i < workers; i++) {
    moelora_back_scratch one = {
        .x = moelora_take(arena, columns * sizeof(float *)),
        .c = moelora_take(arena, columns * columns * sizeof(float)),
        .panel = take_panel(moelora_max(depth, MOELORA_PART_ROWS), arena),
        .factor = take_panel(rank, arena),
        .ranks = moelora_take(arena, columns * MOELORA_PART_ROWS * sizeof(float)),
    };
    if (all)
      all[i] = one;
  }
  return all;
}

void moelora_back_call_take(moelora_back_call *call, const moelora_gradient_pairs *pairs,
                            int64_t depth, int64_t rank, moelora_arena *arena) {
  moelora_sorted_take(call->routes, arena, &call->sorted);
  moelora_segments_take(call->routes, arena, &call->segments);
  call->scratch = take_scratch(depth, rank, call->exec, arena);
  if (pairs->index)
    call->pairs = moelora_take_array(arena, (size_t)pairs->count, sizeof(int32_t));
}

void moelora_cpu_back_begin(moelora_back_call *call, const moelora_gradient_pairs *pairs,
                            bool weighted) {
  moelora_sort_rows(call->routes, &call->sorted);
  moelora_find_segments(call->routes, &call->sorted, &call->segments);
  for (int64_t i = 0; pairs->index && i < pairs->count; i++) {
    const int32_t index = moelora_read_i32(&pairs->index[i]);
    call->pairs[i] = index >= 0 && index < pairs->num_sparse ? index : -1;
  }
  call->weight = weighted ? call->sorted.tables.weight : NULL;
}

typedef struct load_tasks {
  const moelora_back_call *call;
  const moelora_loaded_rows *rows;
  float *to;
} load_tasks;

static void load_row(void *context, int64_t i, int32_t worker) {
  (void)worker;
  const load_tasks *tasks = context;
  const moelora_variant *variant = tasks->call->variant;
  const moelora_loaded_rows *rows = tasks->rows;
  const int64_t top_k = tasks->call->routes->top_k;
  const int64_t p = rows->by_token ? i * top_k : tasks->call->sorted.row[i];
  const int64_t at = p / top_k * rows->stride[0] + p % top_k * rows->stride[1];
  float *to = tasks->to + i * rows->columns;
  moelora_cpu_kernels_of(variant)->load((const char *)rows->from +
                                            (size_t)at * moelora_dtype_bytes(variant->dtype),
                                        to, rows->columns);
  for (int64_t j = 0; j < rows->columns && rows->weight; j++)
    to[j] *= rows->weight[i];
  if (rows->weight)
    moelora_round_floats(variant, to, rows->columns);
}

void moelora_cpu_load_rows(const moelora_back_call *call, const moelora_loaded_rows *rows,
                           float *to) {
  load_tasks tasks = {call, rows, to};
  const int64_t count = rows->by_token ? call->routes->num_tokens : call->sorted.num_rows;
  moelora_cpu_parallel(call->exec, count, (double)count * (double)rows->columns, load_row, &tasks);
}

typedef struct weigh_tasks {
  const moelora_back_call *call;
  const moelora_factors *lora;
  float *rows;
} weigh_tasks;

static void weigh_row(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const weigh_tasks *tasks = context;
  const moelora_sorted *sorted = &tasks->call->sorted;
  const moelora_factors *lora = tasks->lora;
  const int32_t rank = moelora_rank_at(sorted, at, lora->max_rank);
  for (int32_t slice = 0; slice < lora->num_slices; slice++) {
    float *row = tasks->rows + (at * lora->num_slices + slice) * lora->max_rank;
    for (int32_t i = 0; i < rank; i++)
      row[i] *= tasks->call->weight[sorted->row[at]];
    moelora_round_floats(tasks->call->variant, row, rank);
  }
}

void moelora_cpu_weigh_ranks(const moelora_back_call *call, const moelora_factors *lora,
                             float *rows) {
  weigh_tasks tasks = {call, lora, rows};
  const int64_t count = call->sorted.num_rows;
  if (call->weight)
    moelora_cpu_parallel(call->exec, count, (double)count * lora->max_rank, weigh_row, &tasks);
}
