/* The whole layer, in steps over workspace arrays:
 *
 *   sort       rows by (expert, adapter)
 *   w13        h [P, I] by sorted position, operands     = act(x w13^T + adapters + bias)
 *   w2         z [P, columns] by flat row, float32       = h w2^T + adapters + bias
 *   combine    out [M, columns]                          = sum over j of weight * z, rounded once
 *
 * w2 and combine run for one window of columns after another, so that z of a window fits a cache.
 * The shrink, and for W8A8 the quantization of x or h, precede each projection. `out` may be x:
 * only combine writes it, after the last read of x. For a backward, w13 also saves its values
 * before the activation, and both projections save their shrink outputs. */
#include "cpu/back.h"

typedef struct experts_layout {
  moelora_sorted sorted;
  moelora_scratch *scratch;
  void *x;  /* [M, K] operands; NULL: hidden_states are used directly */
  void *h;  /* [P, I] operands by sorted position */
  float *z; /* [P, window] by flat row */
  int64_t window;
  void *xa13; /* NULL without adapters */
  void *xa2;  /* NULL without adapters */
  moelora_quantized_rows x_e4m3, h_e4m3;
  moelora_factors lora13, lora2; /* of the dtype */
  size_t bytes;
} experts_layout;

/* Returns the columns of a window: all, or at least LEAST, so that every worker has tasks. */
static int64_t window_of(const moelora_experts_problem *problem) {
  enum { Z_BYTES = 8 << 20, LEAST = 512 };
  const int64_t rows = moelora_max(1, problem->routes.num_rows);
  const int64_t most = Z_BYTES / (int64_t)sizeof(float) / rows / LEAST * LEAST;
  return moelora_min(problem->hidden, moelora_max(LEAST, most));
}

static experts_layout lay_out(const moelora_experts_problem *problem,
                              const moelora_experts_plan *plan, const moelora_exec *exec) {
  const moelora_routes *routes = &problem->routes;
  const moelora_variant *variant = plan->variant;
  moelora_arena arena = moelora_workspace_of(exec);
  experts_layout layout = {0};
  moelora_sorted_take(routes, &arena, &layout.sorted);
  layout.scratch = moelora_scratch_take(variant, exec, &arena);
  if (moelora_cpu_kernels_of(variant)->widens || problem->apply_router_weight_on_input)
    layout.x = moelora_take_operands(variant, routes->num_tokens, problem->hidden, &arena);
  layout.h = moelora_take_operands(variant, routes->num_rows, problem->intermediate, &arena);
  layout.x_e4m3 = moelora_quantized_rows_take(variant, &problem->w13, routes->num_tokens, &arena);
  layout.h_e4m3 = moelora_quantized_rows_take(variant, &problem->w2, routes->num_rows, &arena);
  layout.window = window_of(problem);
  layout.z = moelora_take_floats(&arena, routes->num_rows, layout.window);
  if (routes->token_lora_mapping.data && problem->w13_lora.num_slices)
    layout.xa13 = moelora_take_xa(variant, routes, &problem->w13_lora, &arena);
  if (routes->token_lora_mapping.data && problem->w2_lora.num_slices)
    layout.xa2 = moelora_take_xa(variant, routes, &problem->w2_lora, &arena);
  layout.lora13 =
      moelora_rounded(&problem->w13_lora, problem->hidden, routes, problem->dtype, &arena);
  layout.lora2 =
      moelora_rounded(&problem->w2_lora, problem->intermediate, routes, problem->dtype, &arena);
  layout.bytes = arena.used;
  return layout;
}

moelora_status moelora_cpu_experts(const moelora_experts_problem *problem,
                                   const moelora_experts_plan *plan, const moelora_exec *exec,
                                   size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(problem, plan, exec).bytes);
  const moelora_routes *routes = &problem->routes;
  experts_layout layout = lay_out(problem, plan, exec);
  moelora_sort_rows(routes, &layout.sorted);
  moelora_cpu_round_factors(plan->variant, routes, &problem->w13_lora, &layout.lora13, exec);
  moelora_cpu_round_factors(plan->variant, routes, &problem->w2_lora, &layout.lora2, exec);
  moelora_projection w13 = {
      .variant = plan->variant,
      .routes = routes,
      .sorted = &layout.sorted,
      .scratch = layout.scratch,
      .x = problem->x,
      .x_stride = problem->x_stride,
      .x_index = MOELORA_BY_TOKEN,
      .w = &problem->w13,
      .x_e4m3 = layout.x_e4m3,
      .lora = &layout.lora13,
      .xa = layout.sorted.has_adapters ? layout.xa13 : NULL,
      .activated = true,
      .gated = moelora_is_gated(problem->activation.kind),
      .interleaved = moelora_is_interleaved(problem->activation.kind),
      .activation = problem->activation,
      .before = problem->saved.gate_up,
      .before_stride = problem->saved.gate_up_stride,
      .emit = moelora_cpu_emit_operands, /* read by w2 */
      .out = layout.h,
      .out_stride = {problem->intermediate},
  };
  moelora_projection w2 = {
      .variant = plan->variant,
      .routes = routes,
      .sorted = &layout.sorted,
      .scratch = layout.scratch,
      .x = layout.h,
      .x_stride = problem->intermediate,
      .x_index = MOELORA_BY_SORTED,
      .w = &problem->w2,
      .x_e4m3 = layout.h_e4m3,
      .lora = &layout.lora2,
      .xa = layout.sorted.has_adapters ? layout.xa2 : NULL,
      .emit = moelora_cpu_emit_f32,
      .out = layout.z,
  };
  moelora_cpu_operands(&w13, routes->num_tokens,
                       problem->apply_router_weight_on_input ? layout.sorted.tables.weight : NULL,
                       layout.x, exec);
  moelora_cpu_quantize(&w13, routes->num_tokens, exec);
  if (w13.xa)
    moelora_cpu_shrink(&w13, exec);
  moelora_cpu_project(&w13, exec);
  moelora_cpu_quantize(&w2, layout.sorted.num_rows, exec);
  if (w2.xa)
    moelora_cpu_shrink(&w2, exec);

  moelora_combine combine = {
      .variant = w2.variant,
      .routes = routes,
      .tables = &layout.sorted.tables,
      .z = layout.z,
      .weighted = !problem->apply_router_weight_on_input,
      .out_stride = problem->out_stride,
  };
  for (int64_t begin = 0; begin < problem->hidden; begin += layout.window) {
    w2.first_column = begin;
    w2.columns = moelora_min(layout.window, problem->hidden - begin);
    w2.out_stride[0] = combine.columns = w2.columns;
    moelora_cpu_project(&w2, exec);
    combine.out = (char *)problem->out + (size_t)begin * moelora_dtype_bytes(problem->dtype);
    moelora_cpu_combine(&combine, exec);
  }
  if (problem->saved.gate_up) {
    moelora_cpu_save_skipped(problem, &layout.sorted);
    moelora_cpu_save_shrink(&w13, &problem->saved, 0, exec);
    moelora_cpu_save_shrink(&w2, &problem->saved, 1, exec);
  }
  return MOELORA_OK;
}
