/* Saves tensors of a layer's forward by flat row, in its dtype; loads them by sorted position. */
#include <string.h>

#include "cpu/back.h"

/* ---- shrink outputs ---- */

typedef struct shrink_rows {
  const moelora_variant *variant;
  const moelora_sorted *sorted;
  const moelora_factors *lora;
  char *saved;
  int64_t stride[2];
  void *xa; /* [P, slices, R] by sorted position: operands, or float32 */
} shrink_rows;

static shrink_rows rows_of(const moelora_variant *variant, const moelora_sorted *sorted,
                           const moelora_factors *lora, const moelora_saved_rows *saved,
                           int32_t which, void *xa) {
  const int64_t *stride = saved->shrink_stride[which];
  return (shrink_rows){variant, sorted, lora, saved->shrink[which], {stride[0], stride[1]}, xa};
}

static char *saved_row(const shrink_rows *rows, int64_t row, int32_t slice) {
  return rows->saved + (size_t)(row * rows->stride[0] + slice * rows->stride[1]) *
                           moelora_dtype_bytes(rows->variant->dtype);
}

static char *sorted_row(const shrink_rows *rows, int64_t at, int32_t slice, size_t bytes) {
  return (char *)rows->xa +
         (size_t)((at * rows->lora->num_slices + slice) * rows->lora->max_rank) * bytes;
}

static void zero_row(void *context, int64_t row, int32_t worker) {
  (void)worker;
  const shrink_rows *rows = context;
  for (int32_t slice = 0; slice < rows->lora->num_slices; slice++)
    memset(saved_row(rows, row, slice), 0,
           (size_t)rows->lora->max_rank * moelora_dtype_bytes(rows->variant->dtype));
}

static void save_row(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const shrink_rows *rows = context;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(rows->variant);
  const int32_t rank = moelora_rank_at(rows->sorted, at, rows->lora->max_rank);
  for (int32_t slice = 0; slice < rows->lora->num_slices; slice++)
    moelora_store_operands(kernels, sorted_row(rows, at, slice, kernels->operand_bytes),
                           saved_row(rows, rows->sorted->row[at], slice), rank);
}

static void load_row(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const shrink_rows *rows = context;
  const int32_t rank = moelora_rank_at(rows->sorted, at, rows->lora->max_rank);
  for (int32_t slice = 0; slice < rows->lora->num_slices; slice++)
    moelora_cpu_kernels_of(rows->variant)
        ->load(saved_row(rows, rows->sorted->row[at], slice),
               (float *)sorted_row(rows, at, slice, sizeof(float)), rank);
}

static double elements_of(const shrink_rows *rows, int64_t count) {
  return (double)count * rows->lora->num_slices * rows->lora->max_rank;
}

void moelora_cpu_save_shrink(const moelora_projection *projection, const moelora_saved_rows *saved,
                             int32_t which, const moelora_exec *exec) {
  shrink_rows rows = rows_of(projection->variant, projection->sorted, projection->lora, saved,
                             which, projection->xa);
  const int64_t count = projection->routes->num_rows;
  if (!rows.saved)
    return;
  moelora_cpu_parallel(exec, count, elements_of(&rows, count), zero_row, &rows);
  if (rows.xa)
    moelora_cpu_parallel(exec, rows.sorted->num_rows, elements_of(&rows, count), save_row, &rows);
}

void moelora_cpu_load_shrink(const moelora_back_call *call, const moelora_factors *lora,
                             const moelora_saved_rows *saved, int32_t which, float *xa) {
  shrink_rows rows = rows_of(call->variant, &call->sorted, lora, saved, which, xa);
  const int64_t count = call->sorted.num_rows;
  moelora_cpu_parallel(call->exec, count, elements_of(&rows, count), load_row, &rows);
}

void moelora_cpu_save_skipped(const moelora_experts_problem *problem,
                              const moelora_sorted *sorted) {
  const size_t bytes = moelora_dtype_bytes(problem->dtype);
  for (int64_t p = 0; p < problem->routes.num_rows; p++)
    if (sorted->tables.expert[p] < 0)
      memset((char *)problem->saved.gate_up + (size_t)(p * problem->saved.gate_up_stride) * bytes,
             0, (size_t)problem->w13.n * bytes);
}
