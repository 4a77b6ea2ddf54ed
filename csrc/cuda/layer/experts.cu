/* Launches a single projection, or a layer, in its workspace. The launches of a layer are
 *
 *   [round factors], resolve, align, [scale x], [quantize x],
 *   shrink13, w13 + expand + activation [+ quantize h], [quantize h],
 *   shrink2, w2 + expand, [save for the backward], sum
 *
 * or, for a few tokens, [round factors] and the single kernel of decode.cu.
 *
 * Intermediate results are stored by position in the blocks of rows, so that TMA can read and write
 * them in boxes: the shrink results xa, h [position, I] and the outputs before the sum, z
 * [position, K]. In training, z is ordered by flat row if the kernel of w2 supports that, because
 * it takes less memory. */
#include "cuda/backward/gradients.h"
#include "cuda/layer/alignment.cuh"
#include "cuda/layer/rows.h"
#include "cuda/gemm/common/tile.cuh"

namespace {

/* ---- workspace ---- */

void *take_xa(moelora_arena *arena, const Alignment *a, const moelora_factors *f) {
  if (f->num_slices == 0)
    return nullptr;
  return moelora_take_array(arena, moelora_times(positions(a), (size_t)moelora_padded_columns(f)),
                            2);
}

/* ---- one projection over an alignment ---- */

moelora_gemm_launch projection(const Alignment *a, const moelora_routes *routes,
                               const moelora_weights *w, const moelora_factors *lora,
                               const moelora_projection_plan *plan) {
  moelora_gemm_launch g = {};
  describe_product(a, routes, w, lora, plan, &g);
  g.schedule.tile_counter = tile_counter(a, 0);
  g.schedule.run = plan->run;
  g.tokens.k = (int32_t)w->k;
  g.weights.n_out = (int32_t)w->n;
  if (g.schedule.blocks.packed_ranks) {
    g.weights.factors_vectors = plan->b_vectors;
    g.weights.factors_boxes = plan->b_boxes;
  }
  return g;
}

moelora_status launch_gemm(const moelora_gemm_launch *g, const moelora_variant *variant,
                           const moelora_projection_plan *plan, const moelora_exec *exec) {
  // The saving launchers also store values before the activation. On Hopper, only they can store
  // the rows of a PLAIN epilogue by flat row.
  const bool by_row = !g->epilogue.out_by_position && plan->epilogue == MOELORA_EPILOGUE_PLAIN &&
                      variant->needs == MOELORA_SM90;
  moelora_gemm_launcher *const launch = g->before.rows || by_row
                                            ? moelora_cuda_saving_launchers[variant->id]
                                            : moelora_cuda_gemm_launchers[variant->id];
  return launch ? launch(g, plan, exec) : moelora_no_kernel(variant->name, "is not built");
}

/* Buffers for the quantized x of a projection with W8A8 weights. */
struct QuantizedRows {
  moelora_quantized_rows to; // values NULL: not quantized
  bool early;                // x is the caller's, not the output of an earlier kernel of the layer
};

QuantizedRows take_quantized(moelora_arena *arena, const moelora_variant *variant,
                             const moelora_weights *w, size_t rows) {
  if (!moelora_is_e4m3_kernel(variant->format))
    return {};
  moelora_quantized_rows q = {};
  q.rule = w->x;
  q.scale = w->x_scale;
  q.scales_stride = (int64_t)rows;
  q.stride = moelora_depth_tiles(w->format, w->k) * moelora_tile_depth(w->format);
  q.values = moelora_take_array(arena, moelora_times(rows, (size_t)q.stride),
                                variant->needs == MOELORA_SM90 ? 1 : 2);
  const size_t groups = (size_t)(q.stride / moelora_x_group(w->format));
  take_array(arena, &q.scales, moelora_times(rows, groups));
  return {q, false};
}

moelora_status quantize(const QuantizedRows *q, const moelora_gemm_launch *g,
                        const moelora_variant *variant, const moelora_projection_plan *plan,
                        const moelora_exec *exec) {
  moelora_quantize_launch launch = {};
  launch.x = g->tokens.x;
  launch.x_stride = g->tokens.stride;
  launch.rows = q->to.scales_stride;
  if (g->tokens.divisor.value == 0) {
    launch.num_post = g->schedule.blocks.num_post;
    launch.counts = g->schedule.blocks.counts;
    launch.block = moelora_divisor_of((uint32_t)g->schedule.blocks.rows);
  }
  launch.early = q->early;
  launch.k = g->tokens.k;
  launch.dtype = variant->dtype;
  launch.bytes = variant->needs == MOELORA_SM90;
  launch.vectors = plan->quantizes_vectors;
  launch.format = g->weights.w.format;
  launch.rule = g->weights.w.x;
  launch.x_scale = g->weights.w.x_scale;
  launch.values = q->to.values;
  launch.values_stride = q->to.stride;
  launch.scales = q->to.scales;
  return moelora_cuda_quantize_rows(&launch, exec);
}

/* Returns the tokens that a projection's kernel reads after quantization. */
moelora_tokens quantized_tokens(const QuantizedRows *q, const moelora_tokens *from,
                                const moelora_variant *variant) {
  moelora_tokens tokens = *from;
  const bool bytes = variant->needs == MOELORA_SM90;
  tokens.x = q->to.values;
  tokens.stride = q->to.stride;
  tokens.k = bytes ? (int32_t)q->to.stride : from->k; // e4m3 rows are zero-padded
  tokens.scales = q->to.scales;
  tokens.scales_stride = q->to.scales_stride;
  return tokens;
}

/* Launches the shrink before a projection. */
moelora_status shrink(const moelora_gemm_launch *g, const moelora_variant *variant,
                      const moelora_shrink_plan *plan, const moelora_routes *routes, void *xa,
                      const moelora_exec *exec) {
  const int deferred =
      moelora_deferred_exponent(g->weights.w.format, variant->dtype == MOELORA_BF16);
  const moelora_shrink_launch s = {
      g->schedule, g->tokens, g->adapters,     routes->lora_scalings, 1.f / (float)(1 << deferred),
      xa,          false,     plan->by_adapter};
  return moelora_cuda_shrink(&s, plan, exec);
}

moelora_status project(moelora_gemm_launch *g, const moelora_variant *variant,
                       const moelora_projection_plan *plan, const moelora_shrink_plan *shrink_plan,
                       const moelora_routes *routes, void *xa, const QuantizedRows *quantized,
                       const moelora_exec *exec) {
  moelora_tokens tokens = g->tokens;
  if (plan->quantizes_x)
    MOELORA_TRY(quantize(quantized, g, variant, plan, exec));
  if (quantized->to.values)
    tokens = quantized_tokens(quantized, &g->tokens, variant);
  if (g->schedule.blocks.packed_ranks) {
    MOELORA_TRY(shrink(g, variant, shrink_plan, routes, xa, exec));
    g->adapters.xa = xa;
  }
  g->tokens = tokens;
  return launch_gemm(g, variant, plan, exec);
}

struct GemmLayout {
  moelora_factors lora; // of the dtype
  Alignment alignment;
  void *xa;
  QuantizedRows quantized;
  size_t bytes;
};

GemmLayout lay_out_gemm(const moelora_gemm_problem *p, const moelora_gemm_plan *plan,
                        const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  GemmLayout l;
  l.lora = moelora_rounded(&p->lora, p->w.k, &p->routes, p->dtype, &arena);
  l.alignment = take_alignment(&arena, &p->routes, plan->variant, plan->projection.num_counters, 1,
                               &plan->align, false, p->mul_routed_weight);
  l.xa = take_xa(&arena, &l.alignment, &p->lora);
  l.quantized = take_quantized(&arena, plan->variant, &p->w,
                               (size_t)(p->x_per_row ? p->routes.num_rows : p->routes.num_tokens));
  l.quantized.early = true;
  l.bytes = arena.used;
  return l;
}

struct ExpertsLayout {
  Alignment alignment;
  void *x; /* scaled hidden states; only with apply_router_weight_on_input */
  void *xa13, *h, *xa2, *z;
  QuantizedRows x_fp8, h_fp8;
  size_t bytes;
};

ExpertsLayout lay_out_experts(const moelora_experts_problem *p, const moelora_experts_plan *plan,
                              const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  ExpertsLayout l;
  const int64_t of_w13 = plan->projection[0].num_counters, of_w2 = plan->projection[1].num_counters;
  l.alignment = take_alignment(&arena, &p->routes, plan->variant, of_w13 > of_w2 ? of_w13 : of_w2,
                               2, &plan->align, true, false);
  const size_t rows = positions(&l.alignment), hidden = (size_t)p->hidden;
  l.x = plan->scales_x
            ? moelora_take_array(&arena, moelora_times((size_t)p->routes.num_tokens, hidden), 2)
            : nullptr;
  l.xa13 = take_xa(&arena, &l.alignment, &p->w13_lora);
  l.h = moelora_take_array(&arena, moelora_times(rows, (size_t)p->intermediate), 2);
  l.xa2 = take_xa(&arena, &l.alignment, &p->w2_lora);
  l.z = moelora_take_array(
      &arena, moelora_times(plan->z_by_row ? (size_t)p->routes.num_rows : rows, hidden), 2);
  l.x_fp8 = take_quantized(&arena, plan->variant, &p->w13, (size_t)p->routes.num_tokens);
  l.x_fp8.early = !plan->scales_x; // weigh_tokens writes x first
  l.h_fp8 = take_quantized(&arena, plan->w2, &p->w2, rows);
  l.bytes = arena.used;
  return l;
}

moelora_saved_shrink saved_shrink(const moelora_weights *w, moelora_dtype dtype,
                                  const moelora_factors *lora, const moelora_saved_rows *saved,
                                  int which, const void *xa) {
  moelora_saved_shrink s = {};
  s.slices = lora->num_slices;
  s.max_rank = lora->max_rank;
  s.xa = xa;
  s.xa_slice = moelora_padded_rank(lora->max_rank);
  s.deferred_exponent = moelora_deferred_exponent(w->format, dtype == MOELORA_BF16);
  s.to = saved->shrink[which];
  s.stride[0] = saved->shrink_stride[which][0];
  s.stride[1] = saved->shrink_stride[which][1];
  return s;
}

/* Saves the shrink results for the backward, and zeroes skipped rows of all saved tensors. */
moelora_status save_rows(const moelora_experts_problem *p, const ExpertsLayout *l,
                         const moelora_exec *exec) {
  moelora_save_launch s = {};
  s.blocks = l->alignment.blocks;
  s.num_rows = p->routes.num_rows;
  s.gate_up = {p->saved.gate_up, p->saved.gate_up_stride};
  s.columns = p->w13.n;
  s.projection[0] = saved_shrink(&p->w13, p->dtype, &p->w13_lora, &p->saved, 0, l->xa13);
  s.projection[1] = saved_shrink(&p->w2, p->dtype, &p->w2_lora, &p->saved, 1, l->xa2);
  return moelora_cuda_save_rows(&s, exec);
}

/* Launches the steps of a layer one by one. saves_alone: computes the saved tensors, but not `out`,
 * which another kernel writes. */
moelora_status run_staged(const moelora_experts_problem *p, const moelora_experts_plan *plan,
                          bool saves_alone, const moelora_exec *exec) {
  const ExpertsLayout l = lay_out_experts(p, plan, exec);
  const moelora_routes *routes = &l.alignment.routes;
  MOELORA_TRY(align(&l.alignment, &p->routes, &plan->align, exec));

  moelora_gemm_launch g =
      projection(&l.alignment, routes, &p->w13, &p->w13_lora, &plan->projection[0]);
  g.adapters.one_a = routes->w13_one_a;
  g.tokens.x = p->x;
  g.tokens.stride = p->x_stride;
  if (plan->scales_x) {
    MOELORA_TRY(weigh_tokens(p, routes, l.x, exec));
    g.tokens.x = l.x;
    g.tokens.stride = p->hidden;
  }
  g.tokens.divisor = moelora_divisor_of(routes->top_k);
  g.weights.n_out = (int32_t)p->intermediate;
  g.weights.gated = moelora_is_gated(p->activation.kind);
  g.weights.interleaved = moelora_is_interleaved(p->activation.kind);
  g.epilogue.activation = p->activation;
  g.epilogue.plain_silu = moelora_activation_form_of(&p->activation) == MOELORA_FORM_SILU;
  g.epilogue.out = l.h;
  g.epilogue.out_by_position = true;
  g.epilogue.out_stride[0] = p->intermediate;
  if (plan->projection[0].stores_e4m3)
    g.epilogue.e4m3 = l.h_fp8.to;
  g.epilogue.out_unread = !plan->projection[0].stores_out;
  g.before = {p->saved.gate_up, p->saved.gate_up_stride};
  MOELORA_TRY(project(&g, plan->variant, &plan->projection[0], &plan->shrink[0], routes, l.xa13,
                      &l.x_fp8, exec));

  g = projection(&l.alignment, routes, &p->w2, &p->w2_lora, &plan->projection[1]);
  g.schedule.tile_counter = tile_counter(&l.alignment, 1);
  g.tokens.x = l.h;
  g.tokens.stride = p->intermediate;
  g.tokens.divisor = moelora_divisor_of(0);
  g.epilogue.out = l.z;
  g.epilogue.out_by_position = !plan->z_by_row;
  g.epilogue.out_stride[0] = p->hidden * (plan->z_by_row ? routes->top_k : 1);
  g.epilogue.out_stride[1] = p->hidden;
  if (!saves_alone)
    MOELORA_TRY(project(&g, plan->w2, &plan->projection[1], &plan->shrink[1], routes, l.xa2,
                        &l.h_fp8, exec));
  else if (g.schedule.blocks.packed_ranks)
    MOELORA_TRY(shrink(&g, plan->w2, &plan->shrink[1], routes, l.xa2, exec));
  if (p->saved.gate_up)
    MOELORA_TRY(save_rows(p, &l, exec));
  if (saves_alone)
    return MOELORA_OK;

  const moelora_sum_launch s = sum_of_rows(&l.alignment, l.z, plan->z_by_row, p->hidden,
                                           !p->apply_router_weight_on_input, p->out, p->out_stride);
  return moelora_cuda_sum(&s, plan->sum, exec);
}

} // namespace

moelora_status moelora_cuda_gemm(const moelora_gemm_problem *p, const moelora_gemm_plan *plan,
                                 const moelora_exec *exec, size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out_gemm(p, plan, exec).bytes);
  const GemmLayout l = lay_out_gemm(p, plan, exec);
  const moelora_routes *routes = &l.alignment.routes;
  const moelora_rounding factors = {&p->lora, &l.lora};
  MOELORA_TRY(moelora_cuda_round_factors(&factors, 1, &p->routes, p->dtype, exec));
  MOELORA_TRY(align(&l.alignment, &p->routes, &plan->align, exec));
  MOELORA_TRY(moelora_cuda_zero_skipped(routes, p->out, p->out_stride, p->w.n, exec));

  moelora_gemm_launch g = projection(&l.alignment, routes, &p->w, &l.lora, &plan->projection);
  g.tokens.x = p->x;
  g.tokens.stride = p->x_stride;
  g.tokens.divisor = moelora_divisor_of(p->x_per_row ? 1 : routes->top_k);
  g.epilogue.weighted = p->mul_routed_weight;
  g.epilogue.out = p->out;
  g.epilogue.out_stride[0] = p->out_stride[0];
  g.epilogue.out_stride[1] = p->out_stride[1];
  return project(&g, plan->variant, &plan->projection, &plan->shrink, routes, l.xa, &l.quantized,
                 exec);
}

namespace {

/* Returns the plan for separate launches of a layer that was planned as a single launch. */
moelora_experts_plan staged_plan(const moelora_experts_plan *plan) {
  moelora_experts_plan staged = *plan;
  staged.variant = plan->staged;
  return staged;
}

/* A problem whose factors are rounded to the dtype of the layer, and the rest of the workspace. */
struct Prepared {
  moelora_experts_problem problem;
  moelora_exec exec;
  size_t bytes;
};

Prepared prepare(const moelora_experts_problem *p, const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  Prepared prepared = {*p, *exec, 0};
  prepared.problem.w13_lora =
      moelora_rounded(&p->w13_lora, p->hidden, &p->routes, p->dtype, &arena);
  prepared.problem.w2_lora =
      moelora_rounded(&p->w2_lora, p->intermediate, &p->routes, p->dtype, &arena);
  prepared.bytes = arena.used;
  if (exec->workspace) {
    prepared.exec.workspace = (char *)exec->workspace + arena.used;
    prepared.exec.workspace_bytes -= arena.used;
  }
  return prepared;
}

size_t bytes_of(const moelora_experts_problem *p, const moelora_experts_plan *plan,
                const moelora_exec *exec) {
  const Prepared prepared = prepare(p, exec);
  const moelora_experts_plan staged = plan->staged ? staged_plan(plan) : *plan;
  const size_t one = plan->staged ? moelora_cuda_decode_workspace(&prepared.problem, exec) : 0;
  const size_t several = lay_out_experts(&prepared.problem, &staged, exec).bytes;
  size_t all;
  return __builtin_add_overflow(prepared.bytes, one > several ? one : several, &all) ? SIZE_MAX
                                                                                     : all;
}

} // namespace

moelora_status moelora_cuda_experts(const moelora_experts_problem *p,
                                    const moelora_experts_plan *plan, const moelora_exec *exec,
                                    size_t *bytes) {
  MOELORA_MEASURE(bytes, bytes_of(p, plan, exec));
  const Prepared prepared = prepare(p, exec);
  const moelora_experts_problem *problem = &prepared.problem;
  const moelora_rounding factors[] = {{&p->w13_lora, &problem->w13_lora},
                                      {&p->w2_lora, &problem->w2_lora}};
  MOELORA_TRY(moelora_cuda_round_factors(factors, 2, &p->routes, p->dtype, exec));
  if (!plan->staged)
    return run_staged(problem, plan, false, &prepared.exec);
  const moelora_experts_plan staged = staged_plan(plan);
  if (problem->saved.gate_up)
    MOELORA_TRY(run_staged(problem, &staged, true, &prepared.exec));
  bool fits = true;
  const moelora_status status = moelora_cuda_decode(problem, plan, &prepared.exec, &fits);
  if (fits)
    return status;
  return run_staged(problem, &staged, false, &prepared.exec);
}
