/* The backward of a layer: sequence of launches and workspace.
 *
 *   [round factors], resolve, align, [list rows of gradients], [scale x],
 *   shrink by B2, v = dout W2 + yb2 A2 with the gradient of the activation,
 *   shrink by B13, dz = dgu W13 + yb13 A13, sum to dx, [dt], [factors], [biases]
 *
 * As in the forward, intermediate results are ordered by position in the blocks of rows: yb2,
 * yb13, h, dgu and the parts of dt. dz is ordered by flat row, which takes no memory for the rows
 * that pad blocks. It has the dtype of the call, for any number of rows: the result of a token does
 * not depend on the rest of the batch. Steps whose results are not needed are skipped; launches do
 * not depend on the contents of device memory. */
#include <math.h>

#include "cuda/backward/backward.h"
#include "cuda/backward/gradients.h"
#include "cuda/backward/products.h"
#include "cuda/layer/alignment.cuh"
#include "cuda/layer/rows.h"

namespace {

/* ---- workspace ---- */

struct BackwardLayout {
  moelora_rounded_factors rounded[2]; // of w13, of w2
  Alignment alignment;
  moelora_gradient_rows rows; // for factors; only if gradients of factors are requested
  void *x;                    // [M, K] times routing weights
  void *yb2, *yb13;           // [position, slices, padded rank]
  void *h, *dgu;
  void *dz;  // [P, K]; also the slots of gradients
  float *dt; // [position, dt_parts]
  int32_t dt_parts;
  float *slots;
  size_t bytes;
};

bool has_adapters(const moelora_experts_problem *p, const moelora_factors *lora) {
  return p->routes.token_lora_mapping.data && lora->num_slices > 0;
}

bool is_shared(const moelora_experts_problem *p, const moelora_gradient *g) {
  return g->data && g->experts == 1 && p->routes.num_experts > 1;
}

/* All gradients of factors. */
struct FactorGradients {
  const moelora_gradient *all[6];

  explicit FactorGradients(const moelora_experts_backward_problem *b)
      : all{&b->a13[0], &b->a13[1], &b->b13[0], &b->b13[1], &b->a2, &b->b2} {}
  bool any() const {
    bool wanted = false;
    for (const moelora_gradient *g : all)
      wanted = wanted || g->data;
    return wanted;
  }
  bool any_shared(const moelora_experts_problem *p) const {
    bool shared = false;
    for (const moelora_gradient *g : all)
      shared = shared || is_shared(p, g);
    return shared;
  }
};

/* Products that compute gradients of factors; with operands, if the layout has memory. */
moelora_gradients_launch describe_gradients(const moelora_experts_backward_problem *b,
                                            const BackwardLayout *l) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_factors *w13 = &p->w13_lora, *w2 = &p->w2_lora;
  const bool weighted = !p->apply_router_weight_on_input;
  moelora_gradients_launch g = {};
  g.dtype = p->dtype;
  g.top_k = p->routes.top_k;
  g.accumulate = b->accumulate;
  g.slots = l->slots;
  const auto add = [&](moelora_gradient_product product) {
    if (product.gradient[0].data || product.gradient[1].data)
      g.product[g.count++] = product;
  };
  if (has_adapters(p, w13)) {
    const int64_t slice = moelora_padded_rank(w13->max_rank), slices = w13->num_slices;
    moelora_gradient_product a = {};
    a.ranks = {l->yb13, slice * slices, MOELORA_ROW_POSITION};
    a.ranks_slice = slice;
    a.wide = {l->x ? l->x : p->x, l->x ? p->hidden : p->x_stride, MOELORA_ROW_TOKEN};
    a.slices = (int32_t)slices;
    a.max_rank = w13->max_rank;
    a.columns = p->hidden;
    for (int i = 0; i < slices; i++)
      a.gradient[i] = b->a13[i];
    add(a);
    for (int i = 0; i < slices; i++) {
      moelora_gradient_product of_b = {};
      const size_t at = (size_t)i * (size_t)p->saved.shrink_stride[0][1];
      of_b.ranks = {(const uint16_t *)p->saved.shrink[0] + at, p->saved.shrink_stride[0][0],
                    MOELORA_ROW_FLAT};
      of_b.wide = {(const uint16_t *)l->dgu + (l->dgu ? (size_t)(i * w13->slice_n) : 0), p->w13.n,
                   MOELORA_ROW_POSITION};
      of_b.slices = 1;
      of_b.max_rank = w13->max_rank;
      of_b.columns = w13->slice_n;
      of_b.transposed = true;
      of_b.gradient[0] = b->b13[i];
      add(of_b);
    }
  }
  if (has_adapters(p, w2)) {
    moelora_gradient_product a = {};
    a.ranks = {l->yb2, moelora_padded_rank(w2->max_rank), MOELORA_ROW_POSITION};
    a.wide = {l->h, p->intermediate, MOELORA_ROW_POSITION};
    a.slices = 1;
    a.max_rank = w2->max_rank;
    a.columns = p->intermediate;
    a.weighted = weighted;
    a.gradient[0] = b->a2;
    add(a);
    moelora_gradient_product of_b = {};
    of_b.ranks = {p->saved.shrink[1], p->saved.shrink_stride[1][0], MOELORA_ROW_FLAT};
    of_b.wide = {b->dout, b->dout_stride, MOELORA_ROW_TOKEN};
    of_b.slices = 1;
    of_b.max_rank = w2->max_rank;
    of_b.columns = p->hidden;
    of_b.weighted = weighted;
    of_b.transposed = true;
    of_b.gradient[0] = b->b2;
    add(of_b);
  }
  return g;
}

BackwardLayout lay_out(const moelora_experts_backward_problem *b, const moelora_backward_plan *plan,
                       const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_backward_needs *needs = &plan->needs;
  const FactorGradients factors(b);
  const bool weighted = !p->apply_router_weight_on_input;
  moelora_arena arena = moelora_workspace_of(exec);
  BackwardLayout l = {};
  l.rounded[0] = moelora_cuda_take_rounded(&p->w13_lora, p->hidden, &p->routes, p->dtype, &arena);
  l.rounded[1] =
      moelora_cuda_take_rounded(&p->w2_lora, p->intermediate, &p->routes, p->dtype, &arena);
  const int64_t of_w2 = plan->product[0].num_counters, of_w13 = plan->product[1].num_counters;
  l.alignment = take_alignment(&arena, &p->routes, plan->variant, of_w2 > of_w13 ? of_w2 : of_w13,
                               MOELORA_PROJECTIONS, &plan->align, true, weighted);
  const size_t rows = positions(&l.alignment);
  const auto take = [&](size_t columns, size_t bytes) {
    return moelora_take_array(&arena, moelora_times(rows, columns), bytes);
  };
  if (!weighted && (b->a13[0].data || b->a13[1].data))
    l.x = moelora_take_array(&arena, moelora_times((size_t)p->routes.num_tokens, (size_t)p->hidden),
                             2);
  if (needs->yb2)
    l.yb2 = take((size_t)moelora_padded_columns(&p->w2_lora), 2);
  if (needs->yb13)
    l.yb13 = take((size_t)moelora_padded_columns(&p->w13_lora), 2);
  if (needs->v) {
    l.dt_parts = (int32_t)((p->intermediate + MOELORA_DT_OUTPUTS - 1) / MOELORA_DT_OUTPUTS);
    l.dt = (float *)take((size_t)l.dt_parts, sizeof(float));
    l.dgu = take((size_t)p->w13.n, 2);
    if (has_adapters(p, &p->w2_lora) && b->a2.data)
      l.h = take((size_t)p->intermediate, 2);
  }
  const size_t num_dz =
      needs->dz ? moelora_times((size_t)p->routes.num_rows, (size_t)p->hidden) : 0;
  const size_t dz_bytes = moelora_times(num_dz, 2);
  size_t slot_bytes = 0;
  if (p->routes.token_lora_mapping.data && factors.any()) {
    l.rows = moelora_cuda_take_gradient_rows(&l.alignment.routes, factors.any_shared(p), weighted,
                                             !b->accumulate, &arena);
    const moelora_gradients_launch g = describe_gradients(b, &l);
    slot_bytes = moelora_cuda_gradient_slot_bytes(&g, &l.rows);
  }
  l.dz = moelora_take(&arena, dz_bytes > slot_bytes ? dz_bytes : slot_bytes);
  l.slots = (float *)l.dz;
  l.bytes = arena.used;
  return l;
}

/* ---- steps ---- */

/* A product with `w`: its schedule, weights and adapters. */
moelora_back_launch product(const BackwardLayout *l, const moelora_weights *w,
                            const moelora_factors *lora, const moelora_back_product_plan *plan) {
  moelora_back_launch g = {};
  describe_product(&l->alignment, &l->alignment.routes, w, lora, plan, &g);
  g.tokens.k = (int32_t)w->n;
  g.weights.w.bias = nullptr;
  g.weights.n_out = (int32_t)w->k;
  if (g.schedule.blocks.packed_ranks)
    g.weights.factors_vectors = plan->a_vectors;
  return g;
}

/* Shrinks and multiplies its rows. */
moelora_status multiply(moelora_back_launch *g, const moelora_back_product_plan *plan,
                        const moelora_routes *routes, void *yb, bool shrinks_alone,
                        const moelora_exec *exec) {
  const moelora_variant *variant = plan->variant;
  if (yb) {
    MOELORA_TRY(moelora_cuda_back_shrink(g, routes->lora_scalings, yb, plan->shrinks_vectors,
                                         variant->dtype, exec));
    g->adapters.xa = yb;
  }
  if (shrinks_alone)
    return MOELORA_OK;
  moelora_back_launcher *const launch = moelora_cuda_back_launchers[variant->id];
  return launch ? launch(g, plan, exec) : moelora_no_kernel(variant->name, "is not built");
}

moelora_activation_gradient gradient_of(const moelora_activation_problem *p) {
  moelora_activation_gradient g = {};
  g.a = p->alpha;
  g.gate_limit = p->gate_limit;
  g.limit = p->limit;
  g.saturated = 88.f / p->alpha;
  g.gated = moelora_is_gated(p->kind);
  if (p->kind == MOELORA_SITU) {
    g.soft_capped = true;
    g.inverse[0] = p->inverse_alpha;
    g.inverse[1] = p->inverse_limit;
    g.saturated = 88.f;
  }
  if (p->kind == MOELORA_GELU)
    g.a = 1.5957691216057308f, g.b = 0.07135481627159729f, g.saturated = 16.f;
  if (p->kind == MOELORA_SWIGLUOAI || p->kind == MOELORA_SWIGLUOAI_UNINTERLEAVE)
    g.c = 1.f;
  return g;
}

/* yb2, then v and the gradient of the activation: h, dgu, dt. */
moelora_status back_through_w2(const moelora_experts_backward_problem *b,
                               const moelora_backward_plan *plan, const BackwardLayout *l,
                               const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  moelora_back_launch g = product(l, &p->w2, &l->rounded[1].to, &plan->product[0]);
  g.schedule.tile_counter = l->alignment.tile_counters[0];
  g.tokens.x = b->dout;
  g.tokens.stride = b->dout_stride;
  g.tokens.divisor = moelora_divisor_of((uint32_t)p->routes.top_k);
  g.epilogue.activation = p->activation;
  g.epilogue.out_by_position = true;
  g.epilogue.out = l->dgu;
  g.epilogue.out_stride[0] = p->w13.n;
  g.through.gate_up = p->saved.gate_up;
  g.through.gate_up_stride = p->saved.gate_up_stride;
  g.through.h = l->h;
  g.through.dgu = l->dgu;
  g.through.dt = l->dt;
  g.through.dt_parts = l->dt_parts;
  g.through.activation = gradient_of(&p->activation);
  return multiply(&g, &plan->product[0], &l->alignment.routes, l->yb2, false, exec);
}

/* yb13, then dz if needed. */
moelora_status back_through_w13(const moelora_experts_backward_problem *b,
                                const moelora_backward_plan *plan, const BackwardLayout *l,
                                const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  moelora_back_launch g = product(l, &p->w13, &l->rounded[0].to, &plan->product[1]);
  g.schedule.tile_counter = l->alignment.tile_counters[1];
  g.schedule.blocks.weights = nullptr;
  g.tokens.x = l->dgu;
  g.tokens.stride = p->w13.n;
  g.tokens.divisor = moelora_divisor_of(0);
  g.epilogue.out = l->dz;
  g.epilogue.out_stride[0] = p->routes.top_k * p->hidden;
  g.epilogue.out_stride[1] = p->hidden;
  g.epilogue.activation.kind = MOELORA_SILU; // none, since it is not gated
  return multiply(&g, &plan->product[1], &l->alignment.routes, l->yb13, !plan->needs.dz, exec);
}

moelora_status finish_inputs(const moelora_experts_backward_problem *b,
                             const moelora_backward_plan *plan, const BackwardLayout *l,
                             const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const moelora_routes *routes = &l->alignment.routes;
  if (b->dx) {
    moelora_sum_launch s = {};
    s.routes = *routes;
    s.z = l->dz;
    s.z_stride = p->hidden;
    s.columns = (int32_t)p->hidden;
    s.positions = l->alignment.blocks.positions;
    s.by_row = true;
    if (p->apply_router_weight_on_input) {
      s.weights = routes->topk_weights;
      s.weights_stride[0] = routes->topk_weights_stride[0];
      s.weights_stride[1] = routes->topk_weights_stride[1];
    }
    s.out = b->dx;
    s.out_stride = b->dx_stride;
    MOELORA_TRY(moelora_cuda_sum(&s, plan->sum, exec));
  }
  if (!b->dtopk_weights)
    return MOELORA_OK;
  moelora_weight_gradients s = {};
  s.positions = l->alignment.blocks.positions;
  s.experts = (const int32_t *)routes->topk_ids.data;
  s.num_rows = routes->num_rows;
  s.top_k = routes->top_k;
  s.dt = l->dt;
  s.parts = l->dt_parts;
  s.hidden = p->hidden;
  s.bias = p->w2.bias;
  s.bias_stride_e = p->w2.bias_stride_e;
  s.dout = b->dout;
  s.dout_stride = b->dout_stride;
  s.dz = p->apply_router_weight_on_input ? l->dz : nullptr;
  s.x = p->x;
  s.x_stride = p->x_stride;
  s.out = b->dtopk_weights;
  s.out_stride[0] = b->dtopk_weights_stride[0];
  s.out_stride[1] = b->dtopk_weights_stride[1];
  return moelora_cuda_weight_gradients(&s, p->dtype, exec);
}

moelora_status finish_biases(const moelora_experts_backward_problem *b, const BackwardLayout *l,
                             const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  const bool weighted = !p->apply_router_weight_on_input;
  const moelora_bias_launch biases[] = {
      {{l->dgu, p->w13.n, MOELORA_ROW_POSITION},
       p->w13.n,
       p->dtype,
       false,
       b->bias13,
       b->accumulate},
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

/* Called if no row contributes to gradients: to those of factors without adapters, to any without
 * tokens. */
moelora_status zero_gradients(const moelora_experts_backward_problem *b, const moelora_exec *exec) {
  const moelora_routes *routes = &b->forward.routes;
  if (b->accumulate)
    return MOELORA_OK;
  if (routes->num_rows == 0 || !routes->token_lora_mapping.data)
    for (const moelora_gradient *g : FactorGradients(b).all)
      if (g->data)
        MOELORA_TRY(moelora_cuda_zero_gradient(g, exec));
  if (routes->num_rows == 0)
    for (const moelora_gradient *g : {&b->bias13, &b->bias2})
      if (g->data)
        MOELORA_TRY(moelora_cuda_zero_gradient(g, exec));
  return MOELORA_OK;
}

} // namespace

extern "C" size_t
moelora_cuda_experts_backward_workspace(const moelora_experts_backward_problem *problem,
                                        const moelora_backward_plan *plan,
                                        const moelora_exec *exec) {
  return problem->forward.routes.num_rows ? lay_out(problem, plan, exec).bytes : 0;
}

extern "C" moelora_status moelora_cuda_experts_backward(const moelora_experts_backward_problem *b,
                                                        const moelora_backward_plan *plan,
                                                        const moelora_exec *exec) {
  const moelora_experts_problem *p = &b->forward;
  MOELORA_TRY(zero_gradients(b, exec));
  if (p->routes.num_rows == 0)
    return MOELORA_OK;
  const BackwardLayout l = lay_out(b, plan, exec);
  const moelora_routes *routes = &l.alignment.routes;
  MOELORA_TRY(moelora_cuda_round_factors(l.rounded, 2, &p->routes, p->dtype, exec));
  MOELORA_TRY(align(&l.alignment, &p->routes, &plan->align, exec));
  if (l.x)
    MOELORA_TRY(moelora_cuda_scale_rows(p->x, p->x_stride, routes, p->hidden, p->dtype, l.x, exec));
  const moelora_gradients_launch gradients = describe_gradients(b, &l);
  if (gradients.count)
    MOELORA_TRY(moelora_cuda_list_gradient_rows(&l.rows, routes, &l.alignment.blocks, exec));
  if (plan->needs.v)
    MOELORA_TRY(back_through_w2(b, plan, &l, exec));
  if (plan->needs.dz || plan->needs.yb13)
    MOELORA_TRY(back_through_w13(b, plan, &l, exec));
  MOELORA_TRY(finish_inputs(b, plan, &l, exec));
  if (gradients.count)
    MOELORA_TRY(moelora_cuda_factor_gradients(&gradients, &l.rows, exec));
  return finish_biases(b, &l, exec);
}
