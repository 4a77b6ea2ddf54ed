/* The backward of a projection or of a delta, in steps over workspace arrays. Operands of products
 * are stored as float32, rounded to the dtype; rows are in sorted order unless stated otherwise.
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

#include "cpu/back.h"

typedef struct gemm_backward {
  const moelora_gemm_backward_problem *problem;
  moelora_gemm_problem forward; /* with factors of the dtype */
  moelora_gemm_backward_needs needs;
  moelora_back_call call;
  moelora_scratch *scratch;
  float *x, *y;
  float *operands; /* x as the shrink reads it; NULL: it reads the caller's x */
  void *shrunk;    /* output of the shrink, as operands; xa is its float32 copy */
  float *xa, *yb, *dz;
  size_t bytes;
} gemm_backward;

static void lay_out(const moelora_gemm_backward_problem *problem,
                    const moelora_gemm_backward_plan *plan, const moelora_exec *exec,
                    gemm_backward *b) {
  const moelora_gemm_problem *forward = &problem->forward;
  const moelora_routes *routes = &forward->routes;
  const int64_t rows = routes->num_rows, k = forward->w.k;
  const int64_t rows_of_x = moelora_rows_of_x(routes, forward->x_per_row);
  const int64_t ranks = (int64_t)forward->lora.num_slices * forward->lora.max_rank;
  moelora_arena arena = moelora_workspace_of(exec);
  *b = (gemm_backward){
      .problem = problem,
      .forward = *forward,
      .needs = plan->needs,
      .call = {plan->variant, routes, exec, problem->accumulate},
  };
  moelora_back_call_take(&b->call, &problem->pairs, moelora_max(k, forward->w.n),
                         forward->lora.max_rank, &arena);
  b->scratch = moelora_scratch_take(plan->variant, exec, &arena);
  b->x = moelora_take_floats(&arena, rows_of_x, k);
  b->y = moelora_take_floats(&arena, rows, forward->w.n);
  if (b->needs.xa) {
    if (moelora_cpu_kernels_of(plan->variant)->widens)
      b->operands = moelora_take_floats(&arena, rows_of_x, k);
    b->shrunk = moelora_take_xa(plan->variant, routes, &forward->lora, &arena);
    b->xa = moelora_take_floats(&arena, rows, ranks);
  }
  if (b->needs.yb)
    b->yb = moelora_take_floats(&arena, rows, ranks);
  if (b->needs.dz)
    b->dz = moelora_take_floats(&arena, rows, k);
  b->forward.lora = moelora_rounded(&forward->lora, k, routes, forward->dtype, &arena);
  b->bytes = arena.used;
}

static size_t element_bytes(const gemm_backward *b) {
  return moelora_dtype_bytes(b->forward.dtype);
}

static const char *dout_row(const gemm_backward *b, int64_t row) {
  const int64_t *stride = b->problem->dout_stride, top_k = b->forward.routes.top_k;
  return (const char *)b->problem->dout +
         (size_t)(row / top_k * stride[0] + row % top_k * stride[1]) * element_bytes(b);
}

/* Returns x of flat row p. */
static const char *x_row(const gemm_backward *b, int64_t p) {
  const int64_t row = b->forward.x_per_row ? p : p / b->forward.routes.top_k;
  return (const char *)b->forward.x + (size_t)(row * b->forward.x_stride) * element_bytes(b);
}

/* Converts a row of s x A^T from operands to float32. */
static void load_xa_row(void *context, int64_t at, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(b->call.variant);
  const moelora_factors *lora = &b->forward.lora;
  const int32_t rank = moelora_rank_at(&b->call.sorted, at, lora->max_rank);
  for (int32_t slice = 0; slice < lora->num_slices; slice++) {
    const int64_t first = (at * lora->num_slices + slice) * lora->max_rank;
    const char *from = (const char *)b->shrunk + (size_t)first * kernels->operand_bytes;
    moelora_operands_to_f32(kernels, from, b->xa + first, rank);
  }
}

static void shrink(const gemm_backward *b) {
  const moelora_gemm_problem *forward = &b->forward;
  moelora_projection projection = {
      .variant = b->call.variant,
      .routes = &forward->routes,
      .sorted = &b->call.sorted,
      .scratch = b->scratch,
      .x = forward->x,
      .x_stride = forward->x_stride,
      .x_index = forward->x_per_row ? MOELORA_BY_ROW : MOELORA_BY_TOKEN,
      .w = &forward->w,
      .lora = &forward->lora,
      .xa = b->shrunk,
  };
  moelora_cpu_operands(&projection, moelora_rows_of_x(&forward->routes, forward->x_per_row), NULL,
                       b->operands, b->call.exec);
  moelora_cpu_shrink(&projection, b->call.exec);
  const int64_t rows = b->call.sorted.num_rows;
  moelora_cpu_parallel(b->call.exec, rows, (double)rows * forward->lora.max_rank, load_xa_row,
                       (void *)b);
  moelora_cpu_weigh_ranks(&b->call, &forward->lora, b->xa);
}

/* ---- gradients of x and of routing weights ---- */

/* Stores dx[p] = t dz[p], rounded. */
static void store_row(void *context, int64_t p, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const int64_t k = b->forward.w.k;
  char *to = (char *)b->problem->dx + (size_t)(p * b->problem->dx_stride) * element_bytes(b);
  if (b->call.sorted.tables.expert[p] < 0) {
    memset(to, 0, (size_t)k * element_bytes(b));
    return;
  }
  float line[256];
  for (int64_t i = 0; i < k; i += 256) {
    const int64_t count = moelora_min(256, k - i);
    for (int64_t j = 0; j < count; j++)
      line[j] = (b->call.weight ? b->call.weight[p] : 1.0f) * b->dz[p * k + i + j];
    moelora_cpu_kernels_of(b->call.variant)->store(line, to + (size_t)i * element_bytes(b), count);
  }
}

static void sum_dt(void *context, int64_t p, int32_t worker) {
  (void)worker;
  const gemm_backward *b = context;
  const moelora_gemm_problem *forward = &b->forward;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(b->call.variant);
  const int64_t *stride = b->problem->dtopk_weights_stride, top_k = forward->routes.top_k;
  const int32_t expert = b->call.sorted.tables.expert[p];
  float sum = 0;
  if (expert >= 0 && forward->mul_routed_weight) {
    sum = moelora_dot_with(kernels, element_bytes(b), b->dz + p * forward->w.k, x_row(b, p),
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
  const moelora_routes *routes = &b->forward.routes;
  const double elements = (double)routes->num_rows * (double)b->forward.w.k;
  const moelora_combine combine = {
      .variant = b->call.variant,
      .routes = routes,
      .tables = &b->call.sorted.tables,
      .z = b->dz,
      .columns = b->forward.w.k,
      .weighted = b->call.weight != NULL,
      .out = b->problem->dx,
      .out_stride = b->problem->dx_stride,
  };
  if (b->problem->dx && b->forward.x_per_row)
    moelora_cpu_parallel(b->call.exec, routes->num_rows, elements, store_row, (void *)b);
  else if (b->problem->dx)
    moelora_cpu_combine(&combine, b->call.exec);
  if (b->problem->dtopk_weights)
    moelora_cpu_parallel(b->call.exec, routes->num_rows, elements, sum_dt, (void *)b);
}

/* ---- gradients of factors and biases ---- */

static void finish_factors(const gemm_backward *b) {
  const moelora_factors *lora = &b->forward.lora;
  const int64_t n = lora->slice_n, k = b->forward.w.k;
  const moelora_columns x = {b->x, k, !b->forward.x_per_row, k};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    const moelora_columns y = moelora_sorted_columns(b->y, b->forward.w.n, i * n, n);
    if (b->needs.yb)
      moelora_cpu_grouped_product(&(moelora_grouped_product){
          &b->call, moelora_rank_columns(b->yb, lora, i), x, false, &b->problem->a[i]});
    if (b->needs.xa)
      moelora_cpu_grouped_product(&(moelora_grouped_product){
          &b->call, moelora_rank_columns(b->xa, lora, i), y, true, &b->problem->b[i]});
  }
}

/* ---- the operator ---- */

moelora_status moelora_cpu_gemm_backward(const moelora_gemm_backward_problem *problem,
                                         const moelora_gemm_backward_plan *plan,
                                         const moelora_exec *exec, size_t *bytes) {
  gemm_backward b;
  lay_out(problem, plan, exec, &b);
  MOELORA_MEASURE(bytes, b.bytes);
  moelora_gemm_problem *forward = &b.forward;
  const int64_t top_k = forward->routes.top_k, n = forward->w.n;
  const int64_t x_stride = forward->x_stride;
  moelora_cpu_round_factors(plan->variant, &forward->routes, &problem->forward.lora, &forward->lora,
                            exec);
  moelora_cpu_back_begin(&b.call, &problem->pairs, forward->mul_routed_weight);
  const moelora_loaded_rows y = {
      problem->dout, {problem->dout_stride[0], problem->dout_stride[1]}, n, false, NULL};
  const bool by_token = !forward->x_per_row;
  const moelora_loaded_rows x = {
      forward->x, {by_token ? x_stride : top_k * x_stride, x_stride}, forward->w.k, by_token, NULL};
  moelora_cpu_load_rows(&b.call, &y, b.y);
  moelora_cpu_load_rows(&b.call, &x, b.x);
  const moelora_back_projection back = {
      .call = &b.call,
      .y = b.y,
      .y_stride = n,
      .w = &forward->w,
      .lora = &forward->lora,
      .yb = b.yb,
      .dz = b.dz,
  };
  if (b.needs.yb)
    moelora_cpu_back_shrink(&back);
  if (b.needs.dz)
    moelora_cpu_back_project(&back);
  finish_inputs(&b);
  if (b.needs.yb)
    moelora_cpu_weigh_ranks(&b.call, &forward->lora, b.yb);
  if (b.needs.xa)
    shrink(&b);
  /* all slices, also of adapters without rows in this call */
  moelora_cpu_zero_gradients(&b.call, problem->a, MOELORA_MAX_SLICES, problem->pairs.count);
  moelora_cpu_zero_gradients(&b.call, problem->b, MOELORA_MAX_SLICES, problem->pairs.count);
  finish_factors(&b);
  moelora_cpu_row_sum(&(moelora_row_sum){&b.call, moelora_sorted_columns(b.y, n, 0, n),
                                         b.call.weight, &problem->bias});
  return MOELORA_OK;
}
