/* A grouped projection over sorted rows, and the operator gemm, which consists of one.
 *
 * A task is (expert, block of columns, chunk of the expert's rows). It reads its weights, up to
 * block_n rows, from memory once; they stay in L2 while rows are processed in blocks of block_m:
 *
 *   c [block_m, block_n] = x w^T            the tile
 *   c += xa B^T                             segment by segment
 *   c += bias; activation                   gate and up: left and right half of c, or alternating
 *   emit(row)                               rounds, and writes where the next step reads */
#include <string.h>

#include "cpu/cpu.h"

typedef struct project_tasks {
  const moelora_projection *projection;
  int64_t column_blocks, row_chunks, rows_per_chunk;
  int64_t columns;       /* output columns per block: at most block_n, or half of it if gated */
  int64_t total_columns; /* output columns of all blocks */
} project_tasks;

static void add_bias(const moelora_projection *p, int32_t expert, const moelora_columns_of *range,
                     int64_t m, float *c, float *line) {
  const size_t bytes = moelora_dtype_bytes(p->variant->dtype);
  const char *bias =
      (const char *)p->w->bias + (size_t)(expert * p->w->bias_stride_e + range->begin) * bytes;
  const int64_t count = range->end - range->begin, ldc = p->variant->block_n;
  moelora_cpu_kernels_of(p->variant)->load(bias, line, count);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < count; j++)
      c[i * ldc + range->at + j] += line[j];
}

/* Applies the activation to a row of the tile; returns its `count` outputs, in c or `line`. */
static const float *activate(const moelora_projection *p, float *c, int64_t count, float *line) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  if (!p->activated)
    return c;
  float *up = c + p->variant->block_n / 2;
  if (p->interleaved) {
    up = line + p->variant->block_n / 2;
    for (int64_t j = 0; j < count; j++) {
      line[j] = c[2 * j];
      up[j] = c[2 * j + 1];
    }
    c = line;
  }
  kernels->activate(&p->activation, c, up, count);
  return c;
}

/* Saves the columns of `range` of sorted row `at`, as they are before the activation. */
static void keep_before(const moelora_projection *p, int64_t at, const moelora_columns_of *range,
                        const float *c) {
  const size_t bytes = moelora_dtype_bytes(p->variant->dtype);
  char *to =
      (char *)p->before + (size_t)(p->sorted->row[at] * p->before_stride + range->begin) * bytes;
  moelora_cpu_kernels_of(p->variant)->store(c + range->at, to, range->end - range->begin);
}

/* Computes output columns [begin, begin + count) of sorted rows [first, first + m) of one expert.
 */
static void project_tile(const moelora_projection *p, int64_t first, int64_t m, int64_t begin,
                         int64_t count, moelora_scratch *scratch) {
  const int32_t expert = p->sorted->expert[first];
  const int64_t ldc = p->variant->block_n;
  const int64_t up = p->w->n / 2 + begin;
  moelora_columns_of ranges[2] = {{begin, begin + count, 0}};
  int num_ranges = 1;
  if (p->interleaved)
    ranges[0] = (moelora_columns_of){2 * begin, 2 * (begin + count), 0};
  else if (p->gated)
    ranges[num_ranges++] = (moelora_columns_of){up, up + count, ldc / 2};
  const moelora_weights w = moelora_expert_weights(p->w, p->variant->dtype, expert);

  for (int i = 0; i < num_ranges && p->xa; i++)
    moelora_cpu_expand_ahead(p, first, m, ranges[i].begin, ranges[i].end);
  memset(scratch->c, 0, (size_t)(m * ldc) * sizeof(float));
  moelora_cpu_base_rows(p, first, m, scratch);
  (moelora_is_quantized(w.format) ? moelora_cpu_quantized_tile : moelora_cpu_weights_tile)(
      p->variant, &w, ranges, num_ranges, m, scratch->c, ldc, scratch);
  for (int i = 0; i < num_ranges; i++) {
    if (p->xa)
      moelora_cpu_expand(p, first, m, ranges[i].begin, ranges[i].end, scratch->c + ranges[i].at,
                         ldc, scratch);
    if (w.bias)
      add_bias(p, expert, &ranges[i], m, scratch->c, scratch->line);
  }
  for (int64_t i = 0; i < m; i++) {
    for (int j = 0; j < num_ranges && p->before; j++)
      keep_before(p, first + i, &ranges[j], scratch->c + i * ldc);
    p->emit(p, first + i, begin, count, activate(p, scratch->c + i * ldc, count, scratch->line));
  }
}

static void project_task(void *context, int64_t index, int32_t worker) {
  const project_tasks *tasks = context;
  const moelora_projection *p = tasks->projection;
  const int64_t chunk = index % tasks->row_chunks;
  const int64_t block = index / tasks->row_chunks % tasks->column_blocks;
  const int64_t expert = index / tasks->row_chunks / tasks->column_blocks;
  const int64_t begin = p->first_column + block * tasks->columns;
  const int64_t count = moelora_min(tasks->columns, p->first_column + tasks->total_columns - begin);
  int64_t row = p->sorted->offset[expert] + chunk * tasks->rows_per_chunk;
  const int64_t end = moelora_min(p->sorted->offset[expert + 1], row + tasks->rows_per_chunk);
  if (row >= end)
    return;
  const moelora_cpu_matrix *matrix = moelora_cpu_kernels_of(p->variant)->matrix;
  if (matrix)
    matrix->enter();
  for (; row < end; row += p->variant->block_m)
    project_tile(p, row, moelora_min(p->variant->block_m, end - row), begin, count,
                 &p->scratch[worker]);
  if (matrix)
    matrix->leave();
}

/* Minimum output columns per block: the weight rows of two matrix registers. */
enum { MIN_COLUMNS = 2 * MOELORA_MATRIX_ROWS };

void moelora_cpu_project(const moelora_projection *projection, const moelora_exec *exec) {
  const moelora_sorted *sorted = projection->sorted;
  const int64_t block_m = projection->variant->block_m, block_n = projection->variant->block_n;
  project_tasks tasks = {
      .projection = projection,
      .columns = projection->gated ? block_n / 2 : block_n,
      .total_columns = projection->gated ? projection->w->n / 2 : projection->w->n,
  };
  if (projection->columns)
    tasks.total_columns = projection->columns;

  /* Aims at four tasks per worker: with few experts, narrows the blocks of columns, and splits rows
   * only if that does not suffice, since each chunk rereads the weights. */
  const int64_t wanted = 4 * (int64_t)moelora_workers(exec);
  while (tasks.columns > MIN_COLUMNS &&
         sorted->active * moelora_divide_up(tasks.total_columns, tasks.columns) < wanted)
    tasks.columns /= 2;
  tasks.column_blocks = moelora_divide_up(tasks.total_columns, tasks.columns);
  int64_t splits = moelora_divide_up(wanted, moelora_max(1, sorted->active * tasks.column_blocks));
  tasks.rows_per_chunk =
      block_m * moelora_divide_up(moelora_divide_up(sorted->longest, splits), block_m);
  tasks.row_chunks = moelora_divide_up(sorted->longest, tasks.rows_per_chunk);
  /* A register tile uses a weight for several rows, so 16 rows count as one read of the weights. */
  int64_t passes = moelora_max(sorted->active, sorted->num_rows / 16);
  moelora_cpu_parallel(
      exec, projection->routes->num_experts * tasks.column_blocks * tasks.row_chunks,
      (double)passes * (double)(tasks.total_columns * (projection->gated ? 2 : 1)) *
          (double)projection->w->k,
      project_task, &tasks);
}

typedef struct operand_tasks {
  const moelora_projection *projection;
  const float *weight;
  char *out;
} operand_tasks;

static void operand_row(void *context, int64_t row, int32_t worker) {
  (void)worker;
  const operand_tasks *tasks = context;
  const moelora_projection *p = tasks->projection;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const size_t bytes = moelora_dtype_bytes(p->variant->dtype);
  const char *x = (const char *)p->x + (size_t)(row * p->x_stride) * bytes;
  char *out = tasks->out + (size_t)(row * p->w->k) * kernels->operand_bytes;
  float line[256];
  for (int64_t k = 0; k < p->w->k; k += 256) {
    int64_t count = moelora_min(256, p->w->k - k);
    kernels->load(x + (size_t)k * bytes, line, count);
    for (int64_t i = 0; i < count && tasks->weight; i++)
      line[i] *= tasks->weight[row];
    kernels->round(line, out + (size_t)k * kernels->operand_bytes, count);
  }
}

void moelora_cpu_operands(moelora_projection *p, int64_t rows, const float *weight, void *out,
                          const moelora_exec *exec) {
  operand_tasks tasks = {p, weight, out};
  if (!out)
    return;
  moelora_cpu_parallel(exec, rows, (double)rows * (double)p->w->k, operand_row, &tasks);
  p->x = out;
  p->x_stride = p->w->k;
}

/* ---- the operator ---- */

typedef struct gemm_layout {
  moelora_sorted sorted;
  moelora_scratch *scratch;
  void *x;  /* [rows of x, K] operands; NULL: x is used directly */
  void *xa; /* NULL without adapters */
  moelora_quantized_rows x_e4m3;
  moelora_factors lora; /* of the dtype */
  size_t bytes;
} gemm_layout;

static gemm_layout gemm_lay_out(const moelora_gemm_problem *problem, const moelora_gemm_plan *plan,
                                const moelora_exec *exec) {
  const moelora_routes *routes = &problem->routes;
  moelora_arena arena = moelora_workspace_of(exec);
  gemm_layout layout = {0};
  moelora_sorted_take(routes, &arena, &layout.sorted);
  layout.scratch = moelora_scratch_take(plan->variant, exec, &arena);
  const int64_t rows = moelora_rows_of_x(routes, problem->x_per_row);
  if (moelora_cpu_kernels_of(plan->variant)->widens)
    layout.x = moelora_take_operands(plan->variant, rows, problem->w.k, &arena);
  layout.x_e4m3 = moelora_quantized_rows_take(plan->variant, &problem->w, rows, &arena);
  if (problem->lora.num_slices && routes->token_lora_mapping.data)
    layout.xa = moelora_take_xa(plan->variant, routes, &problem->lora, &arena);
  layout.lora = moelora_rounded(&problem->lora, problem->w.k, routes, problem->dtype, &arena);
  layout.bytes = arena.used;
  return layout;
}

moelora_status moelora_cpu_gemm(const moelora_gemm_problem *problem, const moelora_gemm_plan *plan,
                                const moelora_exec *exec, size_t *bytes) {
  MOELORA_MEASURE(bytes, gemm_lay_out(problem, plan, exec).bytes);
  const moelora_routes *routes = &problem->routes;
  gemm_layout layout = gemm_lay_out(problem, plan, exec);
  moelora_sort_rows(routes, &layout.sorted);
  moelora_cpu_round_factors(plan->variant, routes, &problem->lora, &layout.lora, exec);
  moelora_projection projection = {
      .variant = plan->variant,
      .routes = routes,
      .sorted = &layout.sorted,
      .scratch = layout.scratch,
      .x = problem->x,
      .x_stride = problem->x_stride,
      .x_index = problem->x_per_row ? MOELORA_BY_ROW : MOELORA_BY_TOKEN,
      .w = &problem->w,
      .x_e4m3 = layout.x_e4m3,
      .lora = &layout.lora,
      .xa = layout.sorted.has_adapters ? layout.xa : NULL,
      .emit = moelora_cpu_emit_out,
      .out = problem->out,
      .out_stride = {problem->out_stride[0], problem->out_stride[1]},
      .mul_routed_weight = problem->mul_routed_weight,
  };
  const int64_t rows = moelora_rows_of_x(routes, problem->x_per_row);
  moelora_cpu_operands(&projection, rows, NULL, layout.x, exec);
  moelora_cpu_quantize(&projection, rows, exec);
  if (projection.xa)
    moelora_cpu_shrink(&projection, exec);
  moelora_cpu_project(&projection, exec);
  for (int64_t p = 0; p < routes->num_rows; p++)
    if (layout.sorted.tables.expert[p] < 0)
      memset(moelora_cpu_out(&projection, p, 0), 0,
             (size_t)problem->w.n * moelora_dtype_bytes(problem->dtype));
  return MOELORA_OK;
}
