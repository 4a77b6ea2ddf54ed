/* Rounds float32 factors to the 16-bit dtype of a call, each to a contiguous copy. */
#include "cpu/cpu.h"

/* One factor [max_loras, experts, rows, columns]; a task rounds a row. */
typedef struct round_tasks {
  const moelora_variant *variant;
  const moelora_factor *from, *to;
  int64_t experts, rows;
} round_tasks;

static void round_row(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const round_tasks *tasks = context;
  const moelora_factor *from = tasks->from;
  const int64_t columns = tasks->to->stride_i;
  const int64_t i = index % tasks->rows, e = index / tasks->rows % tasks->experts;
  const int64_t l = index / tasks->rows / tasks->experts;
  const float *row =
      (const float *)from->data + l * from->stride_l + e * from->stride_e + i * from->stride_i;
  char *to = (char *)tasks->to->data;
  moelora_cpu_kernels_of(tasks->variant)
      ->store(row, to + (size_t)(index * columns) * moelora_dtype_bytes(tasks->variant->dtype),
              columns);
}

static void round_factor(const moelora_variant *variant, const moelora_routes *routes,
                         const moelora_factor *from, const moelora_factor *to, int64_t rows,
                         const moelora_exec *exec) {
  round_tasks tasks = {variant, from, to, from->stride_e ? routes->num_experts : 1, rows};
  const int64_t count = routes->max_loras * tasks.experts * rows;
  moelora_cpu_parallel(exec, count, (double)count * (double)to->stride_i, round_row, &tasks);
}

void moelora_cpu_round_factors(const moelora_variant *variant, const moelora_routes *routes,
                               const moelora_factors *from, const moelora_factors *to,
                               const moelora_exec *exec) {
  for (int32_t i = 0; from->wide && i < from->num_slices; i++) {
    round_factor(variant, routes, &from->a[i], &to->a[i], from->max_rank, exec);
    round_factor(variant, routes, &from->b[i], &to->b[i], moelora_slice_columns(from, i), exec);
  }
}
