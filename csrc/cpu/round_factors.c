/* Rounds float32 factors to the 16-bit dtype of a call, each to a contiguous copy. */
#include "cpu/cpu.h"

/* One factor [max_loras, experts, rows, columns]; a task rounds a row. */
typedef struct round_tasks {
  const moelora_variant *variant;
  const moelora_factor *from;
  int64_t experts, rows, columns;
  char *to;
} round_tasks;

static int64_t experts_of(const moelora_routes *routes, const moelora_factor *factor) {
  return factor->stride_e ? routes->num_experts : 1;
}

static void round_row(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const round_tasks *tasks = context;
  const moelora_factor *from = tasks->from;
  const int64_t i = index % tasks->rows, e = index / tasks->rows % tasks->experts;
  const int64_t l = index / tasks->rows / tasks->experts;
  const float *row =
      (const float *)from->data + l * from->stride_l + e * from->stride_e + i * from->stride_i;
  moelora_cpu_kernels_of(tasks->variant)
      ->store(row,
              tasks->to +
                  (size_t)(index * tasks->columns) * moelora_dtype_bytes(tasks->variant->dtype),
              tasks->columns);
}

static void round_factor(const moelora_variant *variant, const moelora_routes *routes,
                         moelora_factor *factor, int64_t rows, int64_t columns, void *to,
                         const moelora_exec *exec) {
  round_tasks tasks = {variant, factor, experts_of(routes, factor), rows, columns, to};
  const int64_t count = routes->max_loras * tasks.experts * rows;
  moelora_cpu_parallel(exec, count, (double)count * (double)columns, round_row, &tasks);
  *factor = (moelora_factor){
      .data = to,
      .stride_l = tasks.experts * rows * columns,
      .stride_e = factor->stride_e ? rows * columns : 0,
      .stride_i = columns,
  };
}

static void *take_factor(const moelora_routes *routes, moelora_dtype dtype,
                         const moelora_factor *factor, int64_t rows, int64_t columns,
                         moelora_arena *arena) {
  const size_t count = moelora_times((size_t)routes->max_loras, (size_t)experts_of(routes, factor));
  return moelora_take_array(arena,
                            moelora_times(count, moelora_times((size_t)rows, (size_t)columns)),
                            moelora_dtype_bytes(dtype));
}

void moelora_rounded_take(const moelora_routes *routes, moelora_dtype dtype,
                          const moelora_factors *lora, int64_t depth, moelora_arena *arena,
                          moelora_rounded *rounded) {
  *rounded = (moelora_rounded){0};
  for (int32_t i = 0; lora->wide && i < lora->num_slices; i++) {
    rounded->a[i] = take_factor(routes, dtype, &lora->a[i], lora->max_rank, depth, arena);
    rounded->b[i] = take_factor(routes, dtype, &lora->b[i], moelora_slice_columns(lora, i),
                                lora->max_rank, arena);
  }
}

void moelora_cpu_round_factors(const moelora_variant *variant, const moelora_routes *routes,
                               int64_t depth, const moelora_rounded *rounded, moelora_factors *lora,
                               const moelora_exec *exec) {
  for (int32_t i = 0; lora->wide && i < lora->num_slices; i++) {
    round_factor(variant, routes, &lora->a[i], lora->max_rank, depth, rounded->a[i], exec);
    round_factor(variant, routes, &lora->b[i], moelora_slice_columns(lora, i), lora->max_rank,
                 rounded->b[i], exec);
  }
  lora->wide = false;
}
