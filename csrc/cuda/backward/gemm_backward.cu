/* Launches the backward of a projection, or of a delta, in its workspace:
 *
 *   [round factors], resolve, align, [copy dout], [list rows of gradients],
 *   shrink by B, dz = dout W + yb A, [sum dz to dx, or weigh rows of dz], [dt],
 *   shrink by A, [factors], [bias]
 *
 * A delta runs the same product without W. xa = s x A^T is computed again, as in the forward.
 * yb and xa are ordered by position in the blocks of rows, dz by flat row. If x has a row per
 * routed row and there are no routing weights, the product writes dx itself. Steps whose results
 * are not needed are skipped; launches do not depend on the contents of device memory. */
#include "cuda/backward/steps.cuh"

namespace {

struct GemmBackwardLayout {
  moelora_factors lora; // of the dtype
  Alignment alignment;
  moelora_gradient_rows rows; // only if gradients of factors are requested
  void *dout;                 // [P, dout_stride] if dout is copied
  void *yb, *xa;              // [position, slices, padded rank]
  void *dz;                   // [P, K] by flat row, if needed; later the slots of split sums
  size_t bytes;
};

SummedGradients summed(const moelora_gemm_backward_problem *b) {
  SummedGradients s = {};
  s.add_ranks(&b->forward.lora);
  s.add_factors(b->a, MOELORA_MAX_SLICES);
  s.add_factors(b->b, MOELORA_MAX_SLICES);
  s.add_bias(&b->bias);
  s.pairs = b->pairs;
  return s;
}

bool writes_dx(const moelora_gemm_backward_problem *b) {
  return b->dx && b->forward.x_per_row && !b->forward.mul_routed_weight;
}

/* Returns dout, or its copy, as an operand of gradients, which has a single row stride. */
moelora_gradient_operand rows_of_dout(const moelora_gemm_backward_problem *b,
                                      const moelora_gemm_backward_plan *plan,
                                      const GemmBackwardLayout *l) {
  return {plan->copies_dout ? l->dout : b->dout, plan->dout_stride, MOELORA_ROW_FLAT};
}

/* Describes the products of all factors; the operands are NULL if the layout has no memory. */
moelora_gradients_launch describe_gradients(const moelora_gemm_backward_problem *b,
                                            const moelora_gemm_backward_plan *plan,
                                            const GemmBackwardLayout *l) {
  const moelora_gemm_problem *p = &b->forward;
  const moelora_factors *lora = &p->lora;
  moelora_gradients_launch g = {};
  g.dtype = p->dtype;
  g.top_k = p->routes.top_k;
  g.accumulate = b->accumulate;
  g.slots = (float *)l->dz;
  if (!has_adapters(&p->routes, lora))
    return g;
  const int64_t slice = moelora_padded_rank(lora->max_rank), slices = lora->num_slices;
  moelora_gradient_product product = {};
  product.max_rank = lora->max_rank;
  product.weighted = p->mul_routed_weight;
  for (int i = 0; i < slices; i += 2) { // two slices of A at a time
    moelora_gradient_product a = product;
    a.ranks = {(const uint16_t *)l->yb + (l->yb ? i * slice : 0), slice * slices,
               MOELORA_ROW_POSITION};
    a.ranks_slice = slice;
    a.wide = {p->x, p->x_stride, p->x_per_row ? MOELORA_ROW_FLAT : MOELORA_ROW_TOKEN};
    a.slices = i + 1 < slices ? 2 : 1;
    a.columns = p->w.k;
    for (int j = 0; j < a.slices; j++)
      a.gradient[j] = b->a[i + j];
    add_product(&g, a);
  }
  for (int i = 0; i < slices; i++) {
    moelora_gradient_product of_b = product;
    of_b.ranks = {(const uint16_t *)l->xa + (l->xa ? i * slice : 0), slice * slices,
                  MOELORA_ROW_POSITION};
    of_b.wide = rows_of_dout(b, plan, l);
    of_b.wide.data = (const uint16_t *)of_b.wide.data + (of_b.wide.data ? i * lora->slice_n : 0);
    of_b.slices = 1;
    of_b.columns = lora->slice_n;
    of_b.transposed = true;
    of_b.gradient[0] = b->b[i];
    add_product(&g, of_b);
  }
  return g;
}

GemmBackwardLayout lay_out(const moelora_gemm_backward_problem *b,
                           const moelora_gemm_backward_plan *plan, const moelora_exec *exec) {
  const moelora_gemm_problem *p = &b->forward;
  const SummedGradients gradients = summed(b);
  const size_t num_rows = (size_t)p->routes.num_rows;
  moelora_arena arena = moelora_workspace_of(exec);
  GemmBackwardLayout l = {};
  l.lora = moelora_rounded(&p->lora, p->w.k, &p->routes, p->dtype, &arena);
  l.alignment = take_alignment(&arena, &p->routes, plan->variant, plan->product.num_counters, 1,
                               &plan->align, true, false);
  const auto take = [&](size_t rows, int64_t columns) {
    return moelora_take_array(&arena, moelora_times(rows, (size_t)columns), 2);
  };
  if (plan->copies_dout)
    l.dout = take(num_rows, plan->dout_stride);
  const size_t by_position = positions(&l.alignment);
  if (plan->needs.yb)
    l.yb = take(by_position, moelora_padded_columns(&p->lora));
  if (plan->needs.xa)
    l.xa = take(by_position, moelora_padded_columns(&p->lora));
  const size_t dz_bytes = plan->needs.dz && !writes_dx(b)
                              ? moelora_times(moelora_times(num_rows, (size_t)p->w.k), 2)
                              : 0;
  size_t slot_bytes = 0;
  if (has_adapters(&p->routes, &p->lora) && gradients.num_factors) {
    const moelora_gradient_uses uses =
        gradients.uses(&p->routes, p->mul_routed_weight, b->accumulate);
    l.rows = moelora_cuda_take_gradient_rows(&l.alignment.routes, &uses, &arena);
    const moelora_gradients_launch g = describe_gradients(b, plan, &l);
    slot_bytes = moelora_cuda_gradient_slot_bytes(&g, &l.rows);
  }
  l.dz = moelora_take(&arena, dz_bytes > slot_bytes ? dz_bytes : slot_bytes);
  l.bytes = arena.used;
  return l;
}

/* Computes yb, then dz if it is needed. */
moelora_status back_through_w(const moelora_gemm_backward_problem *b,
                              const moelora_gemm_backward_plan *plan, const GemmBackwardLayout *l,
                              const moelora_exec *exec) {
  const moelora_gemm_problem *p = &b->forward;
  const moelora_routes *routes = &l->alignment.routes;
  const moelora_gradient_operand dout = rows_of_dout(b, plan, l);
  const int64_t stride = writes_dx(b) ? b->dx_stride : p->w.k;
  moelora_back_launch g = back_product(&l->alignment, &p->w, &l->lora, &plan->product);
  g.schedule.tile_counter = tile_counter(&l->alignment, 0);
  g.tokens.x = dout.data;
  g.tokens.stride = dout.stride;
  g.tokens.divisor = moelora_divisor_of(1);
  g.epilogue.out = writes_dx(b) ? b->dx : l->dz;
  g.epilogue.out_stride[0] = routes->top_k * stride;
  g.epilogue.out_stride[1] = stride;
  MOELORA_TRY(back_shrink(&g, &plan->product, routes, l->yb, exec));
  return plan->needs.dz ? multiply(&g, &plan->product, exec) : MOELORA_OK;
}

moelora_status finish_inputs(const moelora_gemm_backward_problem *b,
                             const moelora_gemm_backward_plan *plan, const GemmBackwardLayout *l,
                             const moelora_exec *exec) {
  const moelora_gemm_problem *p = &b->forward;
  const moelora_routes *routes = &l->alignment.routes;
  const int64_t top_k = routes->top_k;
  if (plan->sum) {
    const moelora_sum_launch s =
        sum_of_rows(&l->alignment, l->dz, true, p->w.k, p->mul_routed_weight, b->dx, b->dx_stride);
    MOELORA_TRY(moelora_cuda_sum(&s, plan->sum, exec));
  } else if (writes_dx(b)) {
    const int64_t stride[2] = {top_k * b->dx_stride, b->dx_stride};
    MOELORA_TRY(moelora_cuda_zero_skipped(routes, b->dx, stride, p->w.k, exec));
  } else if (b->dx) {
    const moelora_row_copy c = {l->dz, {top_k * p->w.k, p->w.k}, true, b->dx, b->dx_stride, p->w.k};
    MOELORA_TRY(moelora_cuda_copy_rows(&c, routes, p->dtype, exec));
  }
  if (!b->dtopk_weights)
    return MOELORA_OK;
  moelora_weight_gradients s =
      gradients_of_weights(&l->alignment, b->dtopk_weights, b->dtopk_weights_stride);
  if (p->mul_routed_weight) {
    const moelora_gradient_operand dout = rows_of_dout(b, plan, l);
    s.dz = l->dz;
    s.x = {p->x, p->x_stride, p->w.k, p->x_per_row ? 1 : routes->top_k};
    s.bias = p->w.bias;
    s.bias_stride_e = p->w.bias_stride_e;
    s.dout = {dout.data, dout.stride, p->w.n, 1};
  }
  return moelora_cuda_weight_gradients(&s, p->dtype, exec);
}

/* Computes xa = s x A^T from the unquantized x, for all formats of weights. */
moelora_status shrink_again(const moelora_gemm_backward_problem *b,
                            const moelora_gemm_backward_plan *plan, const GemmBackwardLayout *l,
                            const moelora_exec *exec) {
  const moelora_gemm_problem *p = &b->forward;
  const moelora_routes *routes = &l->alignment.routes;
  const moelora_back_launch g = back_product(&l->alignment, &p->w, &l->lora, &plan->product);
  moelora_shrink_launch s = {};
  s.schedule = g.schedule;
  s.adapters = g.adapters;
  s.tokens.x = p->x;
  s.tokens.stride = p->x_stride;
  s.tokens.k = (int32_t)p->w.k;
  s.tokens.divisor = moelora_divisor_of(p->x_per_row ? 1 : routes->top_k);
  s.scalings = routes->lora_scalings;
  s.unit = 1.f;
  s.xa = l->xa;
  return moelora_cuda_shrink(&s, &plan->shrink, exec);
}

} // namespace

moelora_status moelora_cuda_gemm_backward(const moelora_gemm_backward_problem *b,
                                          const moelora_gemm_backward_plan *plan,
                                          const moelora_exec *exec, size_t *bytes) {
  const moelora_gemm_problem *p = &b->forward;
  MOELORA_MEASURE(bytes, p->routes.num_rows ? lay_out(b, plan, exec).bytes : 0);
  if (!b->accumulate)
    MOELORA_TRY(summed(b).zero(&p->routes, exec));
  if (p->routes.num_rows == 0)
    return MOELORA_OK;
  GemmBackwardLayout l = lay_out(b, plan, exec);
  const moelora_routes *routes = &l.alignment.routes;
  const moelora_rounding factors = {&p->lora, &l.lora};
  MOELORA_TRY(moelora_cuda_round_factors(&factors, 1, &p->routes, p->dtype, exec));
  MOELORA_TRY(align(&l.alignment, &p->routes, &plan->align, exec));
  if (plan->copies_dout) {
    const moelora_row_copy c = {
        b->dout, {b->dout_stride[0], b->dout_stride[1]}, false, l.dout, plan->dout_stride, p->w.n};
    MOELORA_TRY(moelora_cuda_copy_rows(&c, routes, p->dtype, exec));
  }
  const moelora_gradients_launch gradients = describe_gradients(b, plan, &l);
  if (gradients.count)
    MOELORA_TRY(list_gradient_rows(&l.rows, &l.alignment, exec));
  if (plan->needs.dz || plan->needs.yb)
    MOELORA_TRY(back_through_w(b, plan, &l, exec));
  MOELORA_TRY(finish_inputs(b, plan, &l, exec));
  if (plan->needs.xa)
    MOELORA_TRY(shrink_again(b, plan, &l, exec));
  if (gradients.count)
    MOELORA_TRY(moelora_cuda_factor_gradients(&gradients, &l.rows, exec));
  const moelora_bias_launch bias = {rows_of_dout(b, plan, &l), p->w.n,  p->dtype,
                                    p->mul_routed_weight,      b->bias, b->accumulate};
  return b->bias.data ? moelora_cuda_bias_gradient(&bias, routes, &l.alignment.blocks, exec)
                      : MOELORA_OK;
}
