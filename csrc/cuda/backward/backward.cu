/* Launches the backward of a layer, in its workspace:
 *
 *   [round factors], resolve, align, [weigh x], [list rows of gradients],
 *   shrink by B2, v = dout W2 + yb2 A2 with the gradient of the activation,
 *   shrink by B13, dz = dgu W13 + yb13 A13, sum to dx, [dt], [factors], [biases]
 *
 * dgu, h and dz are ordered by flat row, so that padding takes no memory; yb2, yb13 and the parts
 * of dt are ordered by position in the blocks of rows. dgu overwrites gate_up if the caller allows
 * it. dz has the dtype of the call for any number of rows, so a token's result does not depend on
 * the rest of the batch. Steps whose results are not needed are skipped; launches do not depend on
 * the contents of device memory. */

#include "cuda/backward/steps.cuh"

namespace {

/* ---- workspace ---- */

struct BackwardLayout {
  moelora_factors w13_lora, w2_lora; // of the dtype
  Alignment alignment;
  moelora_gradient_rows rows; // only if gradients of factors are requested
  void *x;                    // [M, K] times routing weights
  void *yb2, *yb13;           // [position, slices, padded rank]
  void *dgu;                  // [P, N], in the memory of gate_up if that may be overwritten
  int64_t dgu_stride;
  float *dt; // [position, dt_parts]
  int32_t dt_parts;
  void *h;  // [P, I]
  void *dz; // [P, K]; later the slots of split sums
  size_t bytes;
};

SummedGradients summed(const moelora_experts_backward_problem *b) {
  SummedGradients s = {};
  s.add_ranks(&b->forward.w13_lora);
  s.add_ranks(&b->forward.w2_lora);
  s.add_factors(b->a13, 2);
  s.add_factors(b->b13, 2);
  s.add_factors(&b->a2, 1);
  s.add_factors(&b->b2, 1);
  s.add_bias(&b->bias13);
  s.add_bias(&b->bias2);
  s.pairs = b->pairs;
  return s;
}

void add_gradients_of_w13(moelora_gradients_launch *g, const moelora_experts_backward_problem *b,
                          const BackwardLayout *l) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_factors *lora = &p->w13_lora;
  const int64_t slice = moelora_padded_rank(lora->max_rank), slices = lora->num_slices;
  moelora_gradient_product a = {};
  a.ranks = {l->yb13, slice * slices, MOELORA_ROW_POSITION};
  a.ranks_slice = slice;
  a.wide = {l->x ? l->x : p->x, l->x ? p->hidden : p->x_stride, MOELORA_ROW_TOKEN};
  a.slices = (int32_t)slices;
  a.max_rank = lora->max_rank;
  a.columns = p->hidden;
  for (int i = 0; i < slices; i++)
    a.gradient[i] = b->a13[i];
  add_product(g, a);
  for (int i = 0; i < slices; i++) {
    moelora_gradient_product of_b = {};
    const size_t at = (size_t)i * (size_t)p->saved.shrink_stride[0][1];
    of_b.ranks = {(const uint16_t *)p->saved.shrink[0] + at, p->saved.shrink_stride[0][0],
                  MOELORA_ROW_FLAT};
    of_b.wide = {(const uint16_t *)l->dgu + (l->dgu ? (size_t)(i * lora->slice_n) : 0),
                 l->dgu_stride, MOELORA_ROW_FLAT};
    of_b.slices = 1;
    of_b.max_rank = lora->max_rank;
    of_b.columns = lora->slice_n;
    of_b.transposed = true;
    of_b.gradient[0] = b->b13[i];
    add_product(g, of_b);
  }
}

void add_gradients_of_w2(moelora_gradients_launch *g, const moelora_experts_backward_problem *b,
                         const BackwardLayout *l) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_factors *lora = &p->w2_lora;
  moelora_gradient_product a = {};
  a.ranks = {l->yb2, moelora_padded_rank(lora->max_rank), MOELORA_ROW_POSITION};
  a.wide = {l->h, p->intermediate, MOELORA_ROW_FLAT};
  a.slices = 1;
  a.max_rank = lora->max_rank;
  a.columns = p->intermediate;
  a.weighted = !p->apply_router_weight_on_input;
  a.gradient[0] = b->a2;
  add_product(g, a);
  moelora_gradient_product of_b = a;
  of_b.ranks = {p->saved.shrink[1], p->saved.shrink_stride[1][0], MOELORA_ROW_FLAT};
  of_b.wide = {b->dout, b->dout_stride, MOELORA_ROW_TOKEN};
  of_b.columns = p->hidden;
  of_b.transposed = true;
  of_b.gradient[0] = b->b2;
  add_product(g, of_b);
}

/* Describes the products of all factors; the operands are NULL if the layout has no memory. */
moelora_gradients_launch describe_gradients(const moelora_experts_backward_problem *b,
                                            const BackwardLayout *l) {
  const moelora_experts_problem *p = &b->forward;
  moelora_gradients_launch g = {};
  g.dtype = p->dtype;
  g.top_k = p->routes.top_k;
  g.accumulate = b->accumulate;
  g.slots = (float *)l->dz;
  if (has_adapters(&p->routes, &p->w13_lora))
    add_gradients_of_w13(&g, b, l);
  if (has_adapters(&p->routes, &p->w2_lora))
    add_gradients_of_w2(&g, b, l);
  return g;
}

BackwardLayout lay_out(const moelora_experts_backward_problem *b, const moelora_backward_plan *plan,
                       const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_backward_needs *needs = &plan->needs;
  const SummedGradients gradients = summed(b);
  const bool weighted = !p->apply_router_weight_on_input;
  moelora_arena arena = moelora_workspace_of(exec);
  BackwardLayout l = {};
  l.dgu_stride = p->w13.n;
  if (b->overwrites_gate_up)
    l.dgu = p->saved.gate_up, l.dgu_stride = p->saved.gate_up_stride;
  l.w13_lora = moelora_rounded(&p->w13_lora, p->hidden, &p->routes, p->dtype, &arena);
  l.w2_lora = moelora_rounded(&p->w2_lora, p->intermediate, &p->routes, p->dtype, &arena);
  const int64_t of_w2 = plan->product[0].num_counters, of_w13 = plan->product[1].num_counters;
  l.alignment = take_alignment(&arena, &p->routes, plan->variant, of_w2 > of_w13 ? of_w2 : of_w13,
                               2, &plan->align, true, weighted);
  const size_t by_position = positions(&l.alignment), rows = (size_t)p->routes.num_rows;
  const auto bytes_of = [](size_t count, int64_t columns) {
    return moelora_times(moelora_times(count, (size_t)columns), 2);
  };
  if (!weighted && (b->a13[0].data || b->a13[1].data))
    l.x = moelora_take(&arena, bytes_of((size_t)p->routes.num_tokens, p->hidden));
  if (needs->yb2)
    l.yb2 = moelora_take(&arena, bytes_of(by_position, moelora_padded_columns(&p->w2_lora)));
  if (needs->yb13)
    l.yb13 = moelora_take(&arena, bytes_of(by_position, moelora_padded_columns(&p->w13_lora)));
  if (needs->v) {
    l.dt_parts = (int32_t)((p->intermediate + MOELORA_DT_OUTPUTS - 1) / MOELORA_DT_OUTPUTS);
    take_array(&arena, &l.dt, moelora_times(by_position, (size_t)l.dt_parts));
    if (!b->overwrites_gate_up)
      l.dgu = moelora_take(&arena, bytes_of(rows, p->w13.n));
  }
  if (needs->v && has_adapters(&p->routes, &p->w2_lora) && b->a2.data)
    l.h = moelora_take(&arena, bytes_of(rows, p->intermediate));
  const size_t dz_bytes = needs->dz ? bytes_of(rows, p->hidden) : 0;
  size_t slot_bytes = 0;
  if (p->routes.token_lora_mapping.data && gradients.num_factors) {
    const moelora_gradient_uses uses = gradients.uses(&p->routes, weighted, b->accumulate);
    l.rows = moelora_cuda_take_gradient_rows(&l.alignment.routes, &uses, &arena);
    const moelora_gradients_launch g = describe_gradients(b, &l);
    slot_bytes = moelora_cuda_gradient_slot_bytes(&g, &l.rows);
  }
  l.dz = moelora_take(&arena, dz_bytes > slot_bytes ? dz_bytes : slot_bytes);
  l.bytes = arena.used;
  return l;
}

/* ---- steps ---- */

/* Computes yb2, then the product v, whose epilogue writes dgu, dt and, if needed, h. */
moelora_status back_through_w2(const moelora_experts_backward_problem *b,
                               const moelora_backward_plan *plan, const BackwardLayout *l,
                               const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_routes *routes = &l->alignment.routes;
  moelora_back_launch g = back_product(&l->alignment, &p->w2, &l->w2_lora, &plan->product[0]);
  g.schedule.tile_counter = tile_counter(&l->alignment, 0);
  g.tokens.x = b->dout;
  g.tokens.stride = b->dout_stride;
  g.tokens.divisor = moelora_divisor_of((uint32_t)routes->top_k);
  g.epilogue.activation = p->activation;
  g.dact.gate_up = p->saved.gate_up;
  g.dact.gate_up_stride = p->saved.gate_up_stride;
  g.dact.h = l->h;
  g.dact.dgu = l->dgu;
  g.dact.dgu_stride = l->dgu_stride;
  g.dact.dt = l->dt;
  g.dact.dt_parts = l->dt_parts;
  g.dact.activation = moelora_activation_terms_of(&p->activation);
  MOELORA_TRY(back_shrink(&g, &plan->product[0], routes, l->yb2, exec));
  return multiply(&g, &plan->product[0], exec);
}

/* Computes yb13, then dz and dx if they are needed. */
moelora_status back_through_w13(const moelora_experts_backward_problem *b,
                                const moelora_backward_plan *plan, const BackwardLayout *l,
                                const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_routes *routes = &l->alignment.routes;
  moelora_back_launch g = back_product(&l->alignment, &p->w13, &l->w13_lora, &plan->product[1]);
  g.schedule.tile_counter = tile_counter(&l->alignment, 1);
  g.schedule.blocks.weights = nullptr;
  g.tokens.x = l->dgu;
  g.tokens.stride = l->dgu_stride;
  g.tokens.divisor = moelora_divisor_of(1);
  g.epilogue.out = l->dz;
  g.epilogue.out_stride[0] = routes->top_k * p->hidden;
  g.epilogue.out_stride[1] = p->hidden;
  MOELORA_TRY(back_shrink(&g, &plan->product[1], routes, l->yb13, exec));
  if (plan->needs.dz)
    MOELORA_TRY(multiply(&g, &plan->product[1], exec));
  if (!b->dx)
    return MOELORA_OK;
  const moelora_sum_launch s = sum_of_rows(&l->alignment, l->dz, true, p->hidden,
                                           p->apply_router_weight_on_input, b->dx, b->dx_stride);
  return moelora_cuda_sum(&s, plan->sum, exec);
}

moelora_status finish_weights(const moelora_experts_backward_problem *b, const BackwardLayout *l,
                              const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  moelora_weight_gradients s =
      gradients_of_weights(&l->alignment, b->dtopk_weights, b->dtopk_weights_stride);
  if (p->apply_router_weight_on_input) {
    s.dz = l->dz;
    s.x = {p->x, p->x_stride, p->hidden, p->routes.top_k};
  } else {
    s.dt = l->dt;
    s.parts = l->dt_parts;
    s.bias = p->w2.bias;
    s.bias_stride_e = p->w2.bias_stride_e;
    s.dout = {b->dout, b->dout_stride, p->hidden, p->routes.top_k};
  }
  return moelora_cuda_weight_gradients(&s, p->dtype, exec);
}

moelora_status finish_biases(const moelora_experts_backward_problem *b, const BackwardLayout *l,
                             const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const bool weighted = !p->apply_router_weight_on_input;
  const moelora_bias_launch biases[] = {
      {{l->dgu, p->w13.n, MOELORA_ROW_FLAT}, p->w13.n, p->dtype, false, b->bias13, b->accumulate},
      {{b->dout, b->dout_stride, MOELORA_ROW_TOKEN},
       p->hidden,
       p->dtype,
       weighted,
       b->bias2,
       b->accumulate},
  };
  for (const moelora_bias_launch &bias : biases)
    if (bias.gradient.data)
      MOELORA_TRY(
          moelora_cuda_bias_gradient(&bias, &l->alignment.routes, &l->alignment.blocks, exec));
  return MOELORA_OK;
}

} // namespace

moelora_status moelora_cuda_experts_backward(const moelora_experts_backward_problem *b,
                                             const moelora_backward_plan *plan,
                                             const moelora_exec *exec, size_t *bytes) {
  const moelora_experts_problem *p = &b->forward;
  MOELORA_MEASURE(bytes, p->routes.num_rows ? lay_out(b, plan, exec).bytes : 0);
  if (!b->accumulate)
    MOELORA_TRY(summed(b).zero(&p->routes, exec));
  if (p->routes.num_rows == 0)
    return MOELORA_OK;
  BackwardLayout l = lay_out(b, plan, exec);
  const moelora_routes *routes = &l.alignment.routes;
  const moelora_rounding factors[] = {{&p->w13_lora, &l.w13_lora}, {&p->w2_lora, &l.w2_lora}};
  MOELORA_TRY(moelora_cuda_round_factors(factors, 2, &p->routes, p->dtype, exec));
  MOELORA_TRY(align(&l.alignment, &p->routes, &plan->align, exec));
  if (l.x)
    MOELORA_TRY(weigh_tokens(p, routes, l.x, exec));
  const moelora_gradients_launch gradients = describe_gradients(b, &l);
  if (gradients.count)
    MOELORA_TRY(list_gradient_rows(&l.rows, &l.alignment, exec));
  if (plan->needs.v)
    MOELORA_TRY(back_through_w2(b, plan, &l, exec));
  if (plan->needs.dz || plan->needs.yb13)
    MOELORA_TRY(back_through_w13(b, plan, &l, exec));
  if (b->dtopk_weights)
    MOELORA_TRY(finish_weights(b, &l, exec));
  if (gradients.count)
    MOELORA_TRY(moelora_cuda_factor_gradients(&gradients, &l.rows, exec));
  return finish_biases(b, &l, exec);
}
