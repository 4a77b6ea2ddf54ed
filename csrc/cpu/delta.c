/* Deltas, LoRA without a base product, over the sorted rows that have an adapter:
 *
 *   shrink   xa [rows, slices, R] by sorted position, operands         (lora.c)
 *   expand   c [block_m, block_n] = xa B^T, with silu_and_mul silu(gate) * up of c, written to out
 *            or, for the sum over a token's rows, to z [P, columns], float32
 *
 * A shrink alone writes xa to the caller's h, an expand alone reads it from there. An adapter MLP
 * runs two projections: the first writes x of the second. */
#include <string.h>

#include "cpu/cpu.h"

/* ---- rows ---- */

typedef struct delta_rows {
  moelora_sorted sorted;
  uint8_t *active; /* [P] whether a row is in `sorted` */
} delta_rows;

static void rows_take(const moelora_routes *routes, bool listed, moelora_arena *arena,
                      delta_rows *rows) {
  moelora_routes few = *routes;
  if (listed)
    few.num_experts = 0; /* lists need no offsets per expert */
  moelora_sorted_take(&few, arena, &rows->sorted);
  rows->active = moelora_take_array(arena, (size_t)routes->num_rows, 1);
}

static void add_row(int32_t max_rank, int32_t row, int32_t expert, int32_t adapter,
                    delta_rows *rows) {
  moelora_sorted *sorted = &rows->sorted;
  if (rows->active[row] || moelora_rank_of(&sorted->tables, adapter, max_rank) == 0)
    return;
  rows->active[row] = 1;
  sorted->row[sorted->num_rows] = row;
  sorted->expert[sorted->num_rows] = expert;
  sorted->adapter[sorted->num_rows++] = adapter;
}

/* Sorts the routed rows, and keeps those whose adapter has a rank above 0. */
static void rows_of_routes(const moelora_routes *routes, int32_t max_rank, delta_rows *rows) {
  moelora_sort_rows(routes, &rows->sorted);
  memset(rows->active, 0, (size_t)routes->num_rows);
  const int64_t count = rows->sorted.num_rows;
  rows->sorted.num_rows = 0;
  for (int64_t i = 0; i < count; i++)
    if (rows->sorted.adapter[i] >= 0)
      add_row(max_rank, rows->sorted.row[i], rows->sorted.expert[i], rows->sorted.adapter[i], rows);
}

/* Collects the rows of lists, each once, so that the contents of lists cannot overflow arrays. */
static void rows_of_lists(const moelora_routes *routes, const moelora_list_blocks *lists,
                          int32_t max_rank, delta_rows *rows) {
  moelora_tables_read(routes, &rows->sorted.tables);
  memset(rows->active, 0, (size_t)routes->num_rows);
  rows->sorted.num_rows = 0;
  for (int32_t i = 0; i < lists->num_active; i++) {
    const int32_t adapter =
        moelora_active_adapter(routes, &rows->sorted.tables, moelora_read_i32(&lists->lora_ids[i]));
    if (adapter < 0)
      continue;
    const int64_t used =
        moelora_min(moelora_read_i32(&lists->num_tokens_post_padded[adapter]), lists->rows);
    for (int64_t at = 0; at < used; at++) {
      const int64_t block = at / lists->block_size;
      if (block >= lists->blocks)
        break;
      const int32_t expert =
          moelora_read_i32(&lists->expert_ids[adapter * lists->expert_stride + block]);
      const int32_t row =
          moelora_read_i32(&lists->sorted_token_ids[adapter * lists->sorted_stride + at]);
      if (expert >= 0 && expert < routes->num_experts && row >= 0 && row < routes->num_rows)
        add_row(max_rank, row, expert, adapter, rows);
    }
  }
}

/* ---- expand ---- */

typedef struct expand_tasks {
  const moelora_projection *projection;
  int64_t row_chunk;
  int64_t columns;       /* output columns per block: block_n, or half of it if gated */
  int64_t total_columns; /* output columns of the projection */
  int64_t column_blocks;
} expand_tasks;

static void expand_task(void *context, int64_t index, int32_t worker) {
  const expand_tasks *tasks = context;
  const moelora_projection *p = tasks->projection;
  moelora_scratch *scratch = &p->scratch[worker];
  const int64_t ldc = p->variant->block_n;
  const int64_t first = index / tasks->column_blocks * tasks->row_chunk;
  const int64_t m = moelora_min(tasks->row_chunk, p->sorted->num_rows - first);
  const int64_t begin = index % tasks->column_blocks * tasks->columns;
  const int64_t count = moelora_min(tasks->columns, tasks->total_columns - begin);
  float *up = scratch->c + ldc / 2;

  memset(scratch->c, 0, (size_t)(m * ldc) * sizeof(float));
  moelora_cpu_expand(p, first, m, begin, begin + count, scratch->c, ldc, scratch);
  if (p->gated)
    moelora_cpu_expand(p, first, m, tasks->total_columns + begin,
                       tasks->total_columns + begin + count, up, ldc, scratch);
  for (int64_t i = 0; i < m; i++) {
    if (p->gated)
      moelora_cpu_kernels_of(p->variant)
          ->activate(&p->activation, scratch->c + i * ldc, up + i * ldc, count);
    p->emit(p, first + i, begin, count, scratch->c + i * ldc);
  }
}

/* Expands projection->xa into the given columns. */
static void expand(const moelora_projection *p, int64_t columns, const moelora_exec *exec) {
  const int64_t rows = p->sorted->num_rows, workers = moelora_workers(exec);
  expand_tasks tasks = {
      .projection = p,
      .columns = p->gated ? p->variant->block_n / 2 : p->variant->block_n,
      .total_columns = p->gated ? columns / 2 : columns,
  };
  tasks.column_blocks = moelora_divide_up(tasks.total_columns, tasks.columns);
  /* Splits rows only if columns make too few tasks: each chunk of rows rereads its part of B. */
  const int64_t wanted = moelora_divide_up(4 * workers, tasks.column_blocks);
  tasks.row_chunk =
      moelora_max(1, moelora_min(moelora_divide_up(rows, wanted), p->variant->block_m));
  moelora_cpu_parallel(exec, moelora_divide_up(rows, tasks.row_chunk) * tasks.column_blocks,
                       (double)rows * (double)columns * p->lora->max_rank, expand_task, &tasks);
}

/* ---- h ---- */

typedef struct h_tasks {
  const moelora_delta_problem *problem;
  const moelora_projection *projection;
} h_tasks;

/* Copies all slices of a sorted row from xa to the caller's h (shrink), or back (expand). */
static void copy_h(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const h_tasks *tasks = context;
  const moelora_delta_problem *problem = tasks->problem;
  const moelora_projection *p = tasks->projection;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const size_t bytes = moelora_dtype_bytes(problem->dtype);
  const int32_t max_rank = p->lora->max_rank;
  const int64_t rank = moelora_rank_at(p->sorted, at, max_rank);
  const int64_t row = p->sorted->row[at], top_k = p->routes->top_k;
  for (int32_t slice = 0; slice < p->lora->num_slices; slice++) {
    char *operands = (char *)p->xa + (size_t)((at * p->lora->num_slices + slice) * max_rank) *
                                         kernels->operand_bytes;
    char *h = (char *)problem->xa +
              (size_t)(slice * problem->xa_stride[0] + row / top_k * problem->xa_stride[1] +
                       row % top_k * problem->xa_stride[2]) *
                  bytes;
    if (problem->k) {
      moelora_store_operands(kernels, operands, h, rank);
      memset(h + (size_t)rank * bytes, 0, (size_t)(max_rank - rank) * bytes);
    } else {
      moelora_load_as_operands(kernels, h, operands, rank);
    }
  }
}

/* ---- the operators ---- */

/* Workspace of up to two projections. */
typedef struct delta_layout {
  delta_rows rows;
  moelora_scratch *scratch;
  void *x;     /* [rows of x, K] operands; NULL if x is used directly, or absent */
  void *xa[2]; /* [P, slices, R] operands of each projection */
  void *act;   /* [P, I] operands by sorted position: output of the first, x of the second */
  float *z;    /* [P, columns] by flat row; NULL unless rows are summed */
  moelora_factors lora[2]; /* of the dtype */
  size_t bytes;
} delta_layout;

static delta_layout lay_out(const moelora_delta_problem *p, int32_t count,
                            const moelora_delta_plan *plan, const moelora_exec *exec) {
  const moelora_delta_problem *last = &p[count - 1];
  const moelora_routes *routes = &last->routes;
  moelora_arena arena = moelora_workspace_of(exec);
  delta_layout layout = {0};
  rows_take(routes, last->lists.sorted_token_ids, &arena, &layout.rows);
  layout.scratch = moelora_scratch_take(plan->variant, exec, &arena);
  if (p->k && moelora_cpu_kernels_of(plan->variant)->widens)
    layout.x =
        moelora_take_operands(plan->variant, moelora_rows_of_x(routes, p->x_per_row), p->k, &arena);
  for (int32_t i = 0; i < count; i++) {
    layout.xa[i] = moelora_take_xa(plan->variant, routes, &p[i].lora, &arena);
    layout.lora[i] = moelora_rounded(&p[i].lora, p[i].k, routes, p->dtype, &arena);
  }
  if (count > 1)
    layout.act = moelora_take_operands(plan->variant, routes->num_rows, last->k, &arena);
  if (last->sum_top_k)
    layout.z = moelora_take_floats(&arena, routes->num_rows, last->columns);
  layout.bytes = arena.used;
  return layout;
}

/* Runs projection i of a call, whose rows are sorted. */
static void project(const moelora_delta_problem *problem, const delta_layout *layout, int32_t i,
                    const moelora_delta_plan *plan, const moelora_exec *exec) {
  const moelora_weights depth = {.k = problem->k};
  moelora_sorted sorted = layout->rows.sorted;
  const moelora_factors *lora = &layout->lora[i];
  moelora_projection p = {
      .variant = plan->variant,
      .routes = &problem->routes,
      .sorted = &sorted,
      .scratch = layout->scratch,
      .x = i ? layout->act : problem->x,
      .x_stride = problem->x_stride,
      .x_index = i                    ? MOELORA_BY_SORTED
                 : problem->x_per_row ? MOELORA_BY_ROW
                                      : MOELORA_BY_TOKEN,
      .w = &depth,
      .lora = lora,
      .xa = layout->xa[i],
      .gated = problem->silu_and_mul,
      .activation = moelora_silu_problem(),
      .emit = moelora_cpu_emit_out,
      .out = problem->out,
      .out_stride = {problem->out_stride[0], problem->out_stride[1]},
      .mul_routed_weight = problem->mul_routed_weight,
      .add = problem->add_inputs,
  };
  if (problem->sum_top_k) {
    p.emit = moelora_cpu_emit_f32;
    p.out = layout->z;
    p.out_stride[0] = problem->columns;
  } else if (!problem->out) {
    p.emit = moelora_cpu_emit_operands;
    p.out = layout->act;
    p.out_stride[0] = problem->columns / 2;
  }
  if (!problem->routes.lora_scalings)
    sorted.tables.scaling = NULL;
  moelora_cpu_round_factors(plan->variant, &problem->routes, &problem->lora, lora, exec);
  if (i == 0)
    moelora_cpu_operands(&p, moelora_rows_of_x(&problem->routes, problem->x_per_row), NULL,
                         layout->x, exec);
  if (problem->k)
    moelora_cpu_shrink(&p, exec);
  if (problem->xa) {
    h_tasks tasks = {problem, &p};
    moelora_cpu_parallel(exec, sorted.num_rows, (double)sorted.num_rows * lora->max_rank, copy_h,
                         &tasks);
  }
  if (problem->columns)
    expand(&p, problem->columns, exec);
}

static moelora_status run(const moelora_delta_problem *p, int32_t count,
                          const moelora_delta_plan *plan, const moelora_exec *exec, size_t *bytes) {
  const moelora_delta_problem *last = &p[count - 1];
  const int32_t max_rank = p->lora.max_rank; /* a row whose true rank is 0 has no adapter */
  delta_layout layout = lay_out(p, count, plan, exec);
  MOELORA_MEASURE(bytes, layout.bytes);
  if (last->lists.sorted_token_ids)
    rows_of_lists(&last->routes, &last->lists, max_rank, &layout.rows);
  else
    rows_of_routes(&last->routes, max_rank, &layout.rows);
  if (layout.rows.sorted.num_rows == 0)
    return MOELORA_OK;
  for (int32_t i = 0; i < count; i++)
    project(&p[i], &layout, i, plan, exec);
  const moelora_combine combine = {
      .variant = plan->variant,
      .routes = &last->routes,
      .tables = &layout.rows.sorted.tables,
      .z = layout.z,
      .columns = last->columns,
      .active = layout.rows.active,
      .weighted = last->mul_routed_weight,
      .add = last->add_inputs,
      .out = last->out,
      .out_stride = last->out_stride[0],
  };
  if (last->sum_top_k)
    moelora_cpu_combine(&combine, exec);
  return MOELORA_OK;
}

moelora_status moelora_cpu_delta(const moelora_delta_problem *problem,
                                 const moelora_delta_plan *plan, const moelora_exec *exec,
                                 size_t *bytes) {
  return run(problem, 1, plan, exec, bytes);
}

moelora_status moelora_cpu_mlp_delta(const moelora_mlp_delta_problem *problem,
                                     const moelora_delta_plan *plan, const moelora_exec *exec,
                                     size_t *bytes) {
  return run(problem->of, 2, plan, exec, bytes);
}
