/* The backward of a projection, or of a delta, in workspace arrays. Operands of products
 * are float32 in memory, rounded to the dtype; rows are by sorted position unless stated
 * otherwise.
 *
 *   y [P, N]       = dout
 *   x              [M, K] by token, or [P, K]
 *   xa [P, s, R]   = s x A^T, recomputed as in the forward
 *   yb [P, s, R]   = s y B
 *   dz [P, K]      = y W + yb A, float32 by flat row
 *   dx             = sum over j of t dz, or t dz, rounded once; dt = <dz, x> + <dout, bias>
 *   dB = y^T (t xa)   dA = (t yb)^T x        products over the rows of each segment
 *
 * t is the routing weight with mul_routed_weight, otherwise 1. Steps whose results are not
 * requested are skipped. */
#include <string.h>

#include "cpu/f32_rows.h"
#include "cpu/gradients.h"

typedef struct gemm_backward_layout {
  moelora_sorted sorted;
  moelora_segments segments;
  moelora_scratch *scratch;
  moelora_back_scratch *back_scratch;
  float *x, *y;
  float *operands; /* x as the shrink reads it; NULL: x itself */
  void *shrunk;    /* operands, as the shrink stores them */
  float *xa, *yb, *dz;
  moelora_rounded rounded;
  int32_t *pairs; /* [max_loras, E] index in sparse gradients or -1; NULL: none are sparse */
  size_t bytes;
} gemm_backward_layout;

typedef struct gemm_backward {
  const moelora_gemm_backward_problem *problem;
  const moelora_gemm_problem *forward;
  const moelora_variant *variant;
  const moelora_exec *exec;
  gemm_backward_layout layout;
  moelora_gemm_backward_needs needs;
  const float *weight; /* [P] t, NULL: 1 */
} gemm_backward;

static gemm_backward_layout lay_out(const gemm_backward *b, const moelora_exec *exec) {
  const moelora_gemm_problem *forward = b->forward;
  const moelora_routes *routes = &forward->routes;
  const int64_t rows = routes->num_rows, k = forward->w.k;
  const int64_t rows_of_x = moelora_rows_of_x(routes, forward->x_per_row);
  const int64_t ranks = (int64_t)forward->lora.num_slices * forward->lora.max_rank;
  moelora_arena arena = moelora_workspace_of(exec);
  gemm_backward_layout layout = {0};
  moelora_sorted_take(routes, &arena, &layout.sorted);
  moelora_segments_take(routes, &arena, &layout.segments);
  layout.scratch = moelora_scratch_take(b->variant, exec, &arena);
  layout.back_scratch =
      moelora_back_scratch_take(moelora_max(k, forward->w.n), forward->lora.max_rank, exec, &arena);
  layout.x = moelora_take_floats(&arena, rows_of_x, k);
  layout.y = moelora_take_floats(&arena, rows, forward->w.n);
  if (b->needs.xa) {
    if (moelora_cpu_kernels_of(b->variant)->widen)
      layout.operands = moelora_take_floats(&arena, rows_of_x, k);
    layout.shrunk = moelora_take(&arena, moelora_xa_bytes(b->variant, routes, &forward->lora));
    layout.xa = moelora_take_floats(&arena, rows, ranks);
  }
  if (b->needs.yb)
    layout.yb = moelora_take_floats(&arena, rows, ranks);
  if (b->needs.dz)
    layout.dz = moelora_take_floats(&arena, rows, k);
  moelora_rounded_take(routes, forward->dtype, &forward->lora, k, &arena, &layout.rounded);
  layout.pairs = moelora_pairs_take(&b->problem->pairs, &arena);
  layout.bytes = arena.used;
  return layout;
}

static gemm_backward describe(const moelora_gemm_backward_problem *problem,
                              const moelora_gemm_backward_plan *plan, const moelora_exec *exec) {
  return (gemm_backward){
      .problem = problem,
      .forward = &problem->forward,
      .variant = plan->variant,
      .exec = exec,
      .needs = plan->needs,
  };
}

size_t moelora_cpu_gemm_backward_workspace(const moelora_gemm_backward_problem *problem,
                                           const moelora_gemm_backward_plan *plan,
                                           const moelora_exec *exec) {
  const gemm_backward b = describe(problem, plan, exec);
  return lay_out(&b, exec).bytes;
}

/* ---- loads ---- */

static size_t element_bytes(const gemm_backward *b) {
  return moelora_dtype_bytes(b->forward->dtype);
}

static const char *dout_row(const gemm_backward *b, int64_t row) {
  const int64_t *stride = b->problem->dout_stride, top_k = b->forward->routes.top_k;
  return (const char *)b->problem->dout +
         (size_t)(row / top_k * stride[0] + row % top_k * stride[1]) * element_bytes(b);
}

/* Returns the row of x of flat row p. */
static const char *x_row(const gemm_backward *b, int64_t p) {
  const int64_t row = b->forward->x_per_row ? p : p / b->forward->routes.top_k;
  return (const char *)b->forward->x + (size_t)(row * b->forward->x_stride) * element_bytes(b);
}

static void load_y(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const int64_t n = b->forward->w.n;
  moelora_cpu_kernels_of(b->variant)
      ->load(dout_row(b, b->layout.sorted.row[at]), b->layout.y + at * n, n);
}

/* By token, or by sorted position. */
static void load_x(void *context, int64_t i, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const int64_t k = b->forward->w.k;
  const int64_t p = b->forward->x_per_row ? b->layout.sorted.row[i] : i * b->forward->routes.top_k;
  moelora_cpu_kernels_of(b->variant)->load(x_row(b, p), b->layout.x + i * k, k);
}

/* Multiplies rank rows by t and rounds them again. */
typedef struct weigh_tasks {
  const gemm_backward *b;
  float *rows;
} weigh_tasks;

static void weigh_row(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const weigh_tasks *tasks = context;
  const gemm_backward *b = tasks->b;
  const moelora_sorted *sorted = &b->layout.sorted;
  const moelora_factors *lora = &b->forward->lora;
  if (sorted->adapter[at] < 0)
    return;
  const int32_t rank = moelora_rank_of(&sorted->tables, sorted->adapter[at], lora->max_rank);
  for (int32_t slice = 0; slice < lora->num_slices; slice++) {
    float *row = tasks->rows + (at * lora->num_slices + slice) * lora->max_rank;
    for (int32_t i = 0; i < rank; i++)
      row[i] *= b->weight[sorted->row[at]];
    moelora_round_floats(b->variant, row, rank);
  }
}

static void weigh(const gemm_backward *b, float *rows) {
  weigh_tasks tasks = {b, rows};
  const int64_t count = b->layout.sorted.num_rows;
  if (b->weight)
    moelora_cpu_parallel(b->exec, count, (double)count * b->forward->lora.max_rank, weigh_row,
                         &tasks);
}

/* Computes s x A^T as the forward does, in float32. */
static void load_xa_row(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(b->variant);
  const moelora_factors *lora = &b->forward->lora;
  const int32_t adapter = b->layout.sorted.adapter[at];
  if (adapter < 0)
    return;
  const int32_t rank = moelora_rank_of(&b->layout.sorted.tables, adapter, lora->max_rank);
  for (int32_t slice = 0; slice < lora->num_slices; slice++) {
    const int64_t first = (at * lora->num_slices + slice) * lora->max_rank;
    const char *from = (const char *)b->layout.shrunk + (size_t)first * kernels->operand_bytes;
    moelora_operands_to_f32(kernels, from, b->layout.xa + first, rank);
  }
}

static void shrink(const gemm_backward *b) {
  const moelora_gemm_problem *forward = b->forward;
  moelora_projection projection = {
      .variant = b->variant,
      .routes = &forward->routes,
      .sorted = &b->layout.sorted,
      .scratch = b->layout.scratch,
      .x = forward->x,
      .x_stride = forward->x_stride,
      .x_index = forward->x_per_row ? MOELORA_BY_ROW : MOELORA_BY_TOKEN,
      .w = &forward->w,
      .lora = &forward->lora,
      .xa = b->layout.shrunk,
  };
  moelora_cpu_operands(&projection, moelora_rows_of_x(&forward->routes, forward->x_per_row), NULL,
                       b->layout.operands, b->exec);
  moelora_cpu_shrink(&projection, b->exec);
  const int64_t rows = b->layout.sorted.num_rows;
  moelora_cpu_parallel(b->exec, rows, (double)rows * forward->lora.max_rank, load_xa_row,
                       (void *)b);
  weigh(b, b->layout.xa);
}

/* ---- gradients of x and of routing weights ---- */

static void emit_dz(const moelora_back_projection *p, int64_t at, int64_t begin, int64_t count,
                    const float *values) {
  const gemm_backward *b = p->context;
  memcpy(b->layout.dz + p->sorted->row[at] * b->forward->w.k + begin, values,
         (size_t)count * sizeof *values);
}

/* dx[p] = round(t dz[p]) */
static void store_row(void *context, int64_t p, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const int64_t k = b->forward->w.k;
  char *to = (char *)b->problem->dx + (size_t)(p * b->problem->dx_stride) * element_bytes(b);
  if (b->layout.sorted.tables.expert[p] < 0) {
    memset(to, 0, (size_t)k * element_bytes(b));
    return;
  }
  float line[256];
  for (int64_t i = 0; i < k; i += 256) {
    const int64_t count = moelora_min(256, k - i);
    for (int64_t j = 0; j < count; j++)
      line[j] = (b->weight ? b->weight[p] : 1.0f) * b->layout.dz[p * k + i + j];
    moelora_cpu_kernels_of(b->variant)->store(line, to + (size_t)i * element_bytes(b), count);
  }
}

static void sum_dt(void *context, int64_t p, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const moelora_gemm_problem *forward = b->forward;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(b->variant);
  const int64_t *stride = b->problem->dtopk_weights_stride, top_k = forward->routes.top_k;
  const int32_t expert = b->layout.sorted.tables.expert[p];
  float sum = 0;
  if (expert >= 0 && forward->mul_routed_weight) {
    sum = moelora_dot_with(kernels, element_bytes(b), b->layout.dz + p * forward->w.k, x_row(b, p),
                           forward->w.k);
    if (forward->w.bias)
      sum += moelora_row_dot(kernels, element_bytes(b),
                             (const char *)forward->w.bias +
                                 (size_t)(expert * forward->w.bias_stride_e) * element_bytes(b),
                             dout_row(b, p), forward->w.n);
  }
  b->problem->dtopk_weights[p / top_k * stride[0] + p % top_k * stride[1]] = sum;
}

static void finish_inputs(const gemm_backward *b) {
  const moelora_routes *routes = &b->forward->routes;
  const double elements = (double)routes->num_rows * (double)b->forward->w.k;
  const moelora_combine combine = {
      .variant = b->variant,
      .routes = routes,
      .tables = &b->layout.sorted.tables,
      .z = b->layout.dz,
      .columns = b->forward->w.k,
      .weighted = b->weight != NULL,
      .out = b->problem->dx,
      .out_stride = b->problem->dx_stride,
  };
  if (b->problem->dx && b->forward->x_per_row)
    moelora_cpu_parallel(b->exec, routes->num_rows, elements, store_row, (void *)b);
  else if (b->problem->dx)
    moelora_cpu_combine(&combine, b->exec);
  if (b->problem->dtopk_weights)
    moelora_cpu_parallel(b->exec, routes->num_rows, elements, sum_dt, (void *)b);
}

/* ---- gradients of factors and biases ---- */

/* For all slices, including adapters without rows in this call. */
static void zero_gradients(const gemm_backward *b) {
  const moelora_gemm_backward_problem *p = b->problem;
  for (int32_t i = 0; i < MOELORA_MAX_SLICES && !p->accumulate; i++) {
    if (p->a[i].data)
      moelora_cpu_zero_gradient(&p->a[i], b->layout.pairs, p->pairs.count, b->exec);
    if (p->b[i].data)
      moelora_cpu_zero_gradient(&p->b[i], b->layout.pairs, p->pairs.count, b->exec);
  }
}

static void finish_factors(const gemm_backward *b) {
  const moelora_factors *lora = &b->forward->lora;
  const int64_t width = (int64_t)lora->num_slices * lora->max_rank;
  moelora_grouped_product product = {
      .variant = b->variant,
      .routes = &b->forward->routes,
      .sorted = &b->layout.sorted,
      .segments = &b->layout.segments,
      .scratch = b->layout.back_scratch,
      .pairs = b->layout.pairs,
      .accumulate = b->problem->accumulate,
  };
  for (int32_t i = 0; i < lora->num_slices; i++) {
    const moelora_gradient *const gradients[] = {&b->problem->a[i], &b->problem->b[i]};
    for (int32_t of_b = 0; of_b < 2; of_b++) {
      product.gradient = gradients[of_b];
      if (!product.gradient->data || !(of_b ? b->needs.xa : b->needs.yb))
        continue;
      product.transposed = of_b;
      product.ranks = (moelora_columns){
          .rows = (of_b ? b->layout.xa : b->layout.yb) + i * lora->max_rank,
          .stride = width,
          .count = lora->max_rank,
      };
      product.wide = of_b ? (moelora_columns){.rows = b->layout.y + i * lora->slice_n,
                                              .stride = b->forward->w.n,
                                              .count = lora->slice_n}
                          : (moelora_columns){.rows = b->layout.x,
                                              .stride = b->forward->w.k,
                                              .by_token = !b->forward->x_per_row,
                                              .count = b->forward->w.k};
      moelora_cpu_grouped_product(&product, b->exec);
    }
  }
}

static void finish_bias(const gemm_backward *b) {
  const moelora_row_sum sum = {
      .variant = b->variant,
      .routes = &b->forward->routes,
      .sorted = &b->layout.sorted,
      .rows = {.rows = b->layout.y, .stride = b->forward->w.n, .count = b->forward->w.n},
      .weight = b->weight,
      .gradient = &b->problem->bias,
      .accumulate = b->problem->accumulate,
  };
  if (sum.gradient->data)
    moelora_cpu_row_sum(&sum, b->exec);
}

/* ---- the operator ---- */

moelora_status moelora_cpu_gemm_backward(const moelora_gemm_backward_problem *problem,
                                         const moelora_gemm_backward_plan *plan,
                                         const moelora_exec *exec) {
  gemm_backward b = describe(problem, plan, exec);
  b.layout = lay_out(&b, exec);
  moelora_gemm_problem rounded = problem->forward;
  const moelora_gemm_problem *forward = b.forward = &rounded;
  const moelora_routes *routes = &forward->routes;
  moelora_cpu_round_factors(plan->variant, routes, rounded.w.k, &b.layout.rounded, &rounded.lora,
                            exec);
  moelora_cpu_read_pairs(&problem->pairs, b.layout.pairs);
  moelora_sort_rows(routes, &b.layout.sorted);
  moelora_find_segments(routes, &b.layout.sorted, &b.layout.segments);
  b.weight = forward->mul_routed_weight ? b.layout.sorted.tables.weight : NULL;
  const int64_t rows = b.layout.sorted.num_rows;
  const int64_t x_rows = forward->x_per_row ? rows : routes->num_tokens;
  moelora_cpu_parallel(exec, rows, (double)rows * (double)forward->w.n, load_y, &b);
  moelora_cpu_parallel(exec, x_rows, (double)x_rows * (double)forward->w.k, load_x, &b);
  const moelora_back_projection back = {
      .variant = b.variant,
      .routes = routes,
      .sorted = &b.layout.sorted,
      .segments = &b.layout.segments,
      .scratch = b.layout.back_scratch,
      .y = b.layout.y,
      .y_stride = forward->w.n,
      .w = &forward->w,
      .lora = &forward->lora,
      .yb = b.layout.yb,
      .emit = emit_dz,
      .context = &b,
  };
  if (b.needs.yb)
    moelora_cpu_back_shrink(&back, exec);
  if (b.needs.dz)
    moelora_cpu_back_project(&back, exec);
  finish_inputs(&b);
  if (b.needs.yb)
    weigh(&b, b.layout.yb);
  if (b.needs.xa)
    shrink(&b);
  zero_gradients(&b);
  finish_factors(&b);
  finish_bias(&b);
  return MOELORA_OK;
}
