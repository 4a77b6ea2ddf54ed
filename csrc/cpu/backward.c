/* The backward of a layer, in steps over workspace arrays. Operands are stored as float32, rounded
 * to the dtype. x and dout are by token, other arrays by sorted position unless stated otherwise:
 *
 *   sort, segments    rows by (expert, adapter), as in the forward
 *   xa13, xa2         saved by the forward: s x A13^T and s h A2^T
 *   yb2 [P, R]        = s dout B2
 *   v [P, I]          = dout W2 + yb2 A2; each block of columns is then turned into
 *                       h = act(gate_up), dgu = act'(gate_up) t v, and its part of dt = <v, h>
 *   yb13 [P, s, R]    = s dgu B13
 *   dz [P, K]         = dgu W13 + yb13 A13, float32 by flat row
 *   dx [M, K]         = sum over j of dz, rounded once
 *   dB2  = dout^T (t xa2)    dA2  = (t yb2)^T h        products over the rows of each segment
 *   dB13 = dgu^T xa13        dA13 = yb13^T x
 *
 * With apply_router_weight_on_input, t x replaces x, t is 1 elsewhere, dx is multiplied by t, and
 * dt = <dz, x>. Steps whose results are not needed are skipped. */
#include <string.h>

#include "cpu/back.h"

typedef struct backward {
  const moelora_experts_backward_problem *problem;
  moelora_experts_problem forward; /* with factors of the dtype */
  moelora_backward_needs want;
  moelora_back_call call;
  float *x_copy, *dout_copy; /* [M, K]; NULL: the inputs are used directly */
  float *h;                  /* [P, I] */
  float *dgu;                /* [P, rows of w13] */
  float *dt;                 /* [P, blocks of I] by flat row: partial sums of dt */
  float *dz;                 /* [P, K] */
  float *xa13, *xa2, *yb13, *yb2;
  size_t bytes;
  const float *x, *dout; /* by token */
  int64_t x_stride, dout_stride;
} backward;

static int64_t dt_parts(const moelora_experts_problem *forward) {
  return moelora_divide_up(forward->intermediate, MOELORA_BACK_COLUMNS);
}

static float *take_ranks(moelora_arena *arena, int64_t rows, const moelora_factors *lora) {
  return moelora_take_floats(arena, rows, (int64_t)lora->num_slices * lora->max_rank);
}

static void lay_out(const moelora_experts_backward_problem *problem,
                    const moelora_backward_plan *plan, const moelora_exec *exec, backward *b) {
  const moelora_experts_problem *forward = &problem->forward;
  const moelora_routes *routes = &forward->routes;
  const bool wide = plan->variant->dtype == MOELORA_F32;
  const moelora_backward_needs *want = &plan->needs;
  const int64_t rows = routes->num_rows, tokens = routes->num_tokens;
  moelora_arena arena = moelora_workspace_of(exec);
  *b = (backward){
      .problem = problem,
      .forward = *forward,
      .want = *want,
      .call = {plan->variant, routes, exec, problem->accumulate},
      .x = forward->x,
      .x_stride = forward->x_stride,
      .dout = problem->dout,
      .dout_stride = problem->dout_stride,
  };
  moelora_back_call_take(&b->call, &problem->pairs, moelora_max(forward->hidden, forward->w13.n),
                         moelora_max(forward->w13_lora.max_rank, forward->w2_lora.max_rank),
                         &arena);
  b->forward.w13_lora =
      moelora_rounded(&forward->w13_lora, forward->hidden, routes, forward->dtype, &arena);
  b->forward.w2_lora =
      moelora_rounded(&forward->w2_lora, forward->intermediate, routes, forward->dtype, &arena);
  if (!wide || forward->apply_router_weight_on_input)
    b->x_copy = moelora_take_floats(&arena, tokens, forward->hidden);
  if (!wide)
    b->dout_copy = moelora_take_floats(&arena, tokens, forward->hidden);
  if (want->v) {
    b->h = moelora_take_floats(&arena, rows, forward->intermediate);
    b->dgu = moelora_take_floats(&arena, rows, forward->w13.n);
    b->dt = moelora_take_floats(&arena, rows, dt_parts(forward));
  }
  if (want->dz)
    b->dz = moelora_take_floats(&arena, rows, forward->hidden);
  if (want->xa13)
    b->xa13 = take_ranks(&arena, rows, &forward->w13_lora);
  if (want->yb13)
    b->yb13 = take_ranks(&arena, rows, &forward->w13_lora);
  if (want->xa2)
    b->xa2 = take_ranks(&arena, rows, &forward->w2_lora);
  if (want->yb2)
    b->yb2 = take_ranks(&arena, rows, &forward->w2_lora);
  b->bytes = arena.used;
}

/* ---- through the activation ---- */

/* Loads columns [begin, begin + count) of gate and up of a flat row, as float32. */
static void load_gate_up(const moelora_experts_problem *forward, const moelora_variant *variant,
                         int64_t row, int64_t begin, int64_t count, float *gate, float *up) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const size_t bytes = moelora_dtype_bytes(variant->dtype);
  const moelora_activation kind = forward->activation.kind;
  const char *from =
      (const char *)forward->saved.gate_up + (size_t)(row * forward->saved.gate_up_stride) * bytes;
  if (moelora_is_interleaved(kind)) {
    float both[2 * MOELORA_BACK_COLUMNS];
    kernels->load(from + (size_t)(2 * begin) * bytes, both, 2 * count);
    for (int64_t i = 0; i < count; i++) {
      gate[i] = both[2 * i];
      up[i] = both[2 * i + 1];
    }
    return;
  }
  kernels->load(from + (size_t)begin * bytes, gate, count);
  if (moelora_is_gated(kind))
    kernels->load(from + (size_t)(forward->intermediate + begin) * bytes, up, count);
}

/* Stores the gradients of gate and up, rounded, to a row of dgu. */
static void put_gate_up(const moelora_experts_problem *forward, const moelora_variant *variant,
                        int64_t begin, int64_t count, const float *gate, const float *up,
                        float *to) {
  const moelora_activation kind = forward->activation.kind;
  if (moelora_is_interleaved(kind)) {
    for (int64_t i = 0; i < count; i++) {
      to[2 * (begin + i)] = gate[i];
      to[2 * (begin + i) + 1] = up[i];
    }
    moelora_round_floats(variant, to + 2 * begin, 2 * count);
    return;
  }
  memcpy(to + begin, gate, (size_t)count * sizeof *to);
  moelora_round_floats(variant, to + begin, count);
  if (moelora_is_gated(kind)) {
    memcpy(to + forward->intermediate + begin, up, (size_t)count * sizeof *to);
    moelora_round_floats(variant, to + forward->intermediate + begin, count);
  }
}

static void emit_v(const moelora_back_projection *p, int64_t at, int64_t begin, int64_t count,
                   const float *v) {
  const backward *b = p->context;
  const moelora_experts_problem *forward = &b->forward;
  const moelora_variant *variant = b->call.variant;
  const int64_t row = b->call.sorted.row[at];
  const float weight = b->call.weight ? b->call.weight[row] : 1.0f;
  float gate[MOELORA_BACK_COLUMNS], up[MOELORA_BACK_COLUMNS], dh[MOELORA_BACK_COLUMNS];
  float *h = b->h + at * forward->intermediate + begin, sum = 0;
  load_gate_up(forward, variant, row, begin, count, gate, up);
  for (int64_t i = 0; i < count; i++)
    dh[i] = weight * v[i];
  moelora_cpu_kernels_of(variant)->activate_backward(&forward->activation, gate, up, dh, h, count);
  moelora_round_floats(variant, h, count);
  put_gate_up(forward, variant, begin, count, gate, up, b->dgu + at * forward->w13.n);
  for (int64_t i = 0; i < count; i++)
    sum += v[i] * h[i];
  b->dt[row * dt_parts(forward) + begin / MOELORA_BACK_COLUMNS] = sum;
}

/* ---- gradients of x and of the routing weights ---- */

static void sum_dt(void *context, int64_t m, int32_t worker) {
  (void)worker;
  const backward *b = context;
  const moelora_experts_problem *forward = &b->forward;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(b->call.variant);
  const size_t bytes = moelora_dtype_bytes(forward->dtype);
  const int64_t parts = dt_parts(forward);
  for (int32_t j = 0; j < forward->routes.top_k; j++) {
    const int64_t p = m * forward->routes.top_k + j;
    const int32_t expert = b->call.sorted.tables.expert[p];
    float sum = 0;
    if (expert >= 0 && forward->apply_router_weight_on_input) {
      const char *x = (const char *)forward->x + (size_t)(m * forward->x_stride) * bytes;
      sum = moelora_dot_with(kernels, bytes, b->dz + p * forward->hidden, x, forward->hidden);
    } else if (expert >= 0) {
      for (int64_t i = 0; i < parts; i++)
        sum += b->dt[p * parts + i];
      if (forward->w2.bias)
        sum += moelora_row_dot(
            kernels, bytes,
            (const char *)forward->w2.bias + (size_t)(expert * forward->w2.bias_stride_e) * bytes,
            (const char *)b->problem->dout + (size_t)(m * b->problem->dout_stride) * bytes,
            forward->hidden);
    }
    const int64_t *stride = b->problem->dtopk_weights_stride;
    b->problem->dtopk_weights[m * stride[0] + j * stride[1]] = sum;
  }
}

static void finish_inputs(const backward *b) {
  const moelora_exec *exec = b->call.exec;
  const moelora_routes *routes = &b->forward.routes;
  const moelora_combine combine = {
      .variant = b->call.variant,
      .routes = routes,
      .tables = &b->call.sorted.tables,
      .z = b->dz,
      .columns = b->forward.hidden,
      .weighted = b->forward.apply_router_weight_on_input,
      .out = b->problem->dx,
      .out_stride = b->problem->dx_stride,
  };
  if (b->problem->dx)
    moelora_cpu_combine(&combine, exec);
  if (b->problem->dtopk_weights)
    moelora_cpu_parallel(exec, routes->num_tokens,
                         (double)routes->num_rows * (double)b->forward.hidden, sum_dt, (void *)b);
}

/* ---- gradients of factors and biases ---- */

static void add_product(const backward *b, moelora_columns ranks, moelora_columns wide,
                        bool transposed, const moelora_gradient *gradient) {
  moelora_cpu_grouped_product(
      &(moelora_grouped_product){&b->call, ranks, wide, transposed, gradient});
}

static void finish_factors(const backward *b) {
  const moelora_experts_backward_problem *problem = b->problem;
  const moelora_factors *w13 = &b->forward.w13_lora, *w2 = &b->forward.w2_lora;
  const int64_t hidden = b->forward.hidden, inter = b->forward.intermediate;
  for (int32_t i = 0; i < w13->num_slices; i++) {
    add_product(b, moelora_rank_columns(b->yb13, w13, i),
                moelora_token_columns(b->x, b->x_stride, hidden), false, &problem->a13[i]);
    add_product(b, moelora_rank_columns(b->xa13, w13, i),
                moelora_sorted_columns(b->dgu, b->forward.w13.n, i * w13->slice_n, w13->slice_n),
                true, &problem->b13[i]);
  }
  if (w2->num_slices) {
    add_product(b, moelora_rank_columns(b->yb2, w2, 0),
                moelora_sorted_columns(b->h, inter, 0, inter), false, &problem->a2);
    add_product(b, moelora_rank_columns(b->xa2, w2, 0),
                moelora_token_columns(b->dout, b->dout_stride, hidden), true, &problem->b2);
  }
}

static void finish_biases(const backward *b) {
  const int64_t n = b->forward.w13.n;
  const moelora_row_sum sums[] = {
      {&b->call, moelora_sorted_columns(b->dgu, n, 0, n), NULL, &b->problem->bias13},
      {&b->call, moelora_token_columns(b->dout, b->dout_stride, b->forward.hidden), b->call.weight,
       &b->problem->bias2},
  };
  for (int32_t i = 0; i < 2; i++)
    moelora_cpu_row_sum(&sums[i]);
}

/* ---- the operator ---- */

static void back_through_w2(const backward *b) {
  const moelora_back_projection w2 = {
      .call = &b->call,
      .y = b->dout,
      .y_stride = b->dout_stride,
      .y_by_token = true,
      .w = &b->forward.w2,
      .lora = &b->forward.w2_lora,
      .yb = b->yb2,
      .emit = emit_v,
      .context = (void *)b,
  };
  if (w2.yb)
    moelora_cpu_back_shrink(&w2);
  moelora_cpu_back_project(&w2);
  if (b->problem->a2.data && w2.yb)
    moelora_cpu_weigh_ranks(&b->call, w2.lora, w2.yb);
}

static void back_through_w13(const backward *b) {
  const moelora_back_projection w13 = {
      .call = &b->call,
      .y = b->dgu,
      .y_stride = b->forward.w13.n,
      .w = &b->forward.w13,
      .lora = &b->forward.w13_lora,
      .yb = b->yb13,
      .dz = b->dz,
  };
  if (w13.yb)
    moelora_cpu_back_shrink(&w13);
  if (b->want.dz)
    moelora_cpu_back_project(&w13);
}

/* Loads x and dout to their float32 copies, if they have any. */
static void load_inputs(backward *b) {
  const moelora_experts_problem *forward = &b->forward;
  const moelora_loaded_rows x = {forward->x,
                                 {forward->x_stride},
                                 forward->hidden,
                                 true,
                                 b->call.weight ? NULL : b->call.sorted.tables.weight};
  const moelora_loaded_rows dout = {
      b->problem->dout, {b->dout_stride}, forward->hidden, true, NULL};
  if (b->x_copy) {
    moelora_cpu_load_rows(&b->call, &x, b->x_copy);
    b->x = b->x_copy;
    b->x_stride = forward->hidden;
  }
  if (b->dout_copy) {
    moelora_cpu_load_rows(&b->call, &dout, b->dout_copy);
    b->dout = b->dout_copy;
    b->dout_stride = forward->hidden;
  }
}

static void zero_gradients(const backward *b) {
  const moelora_experts_backward_problem *p = b->problem;
  moelora_cpu_zero_gradients(&b->call, p->a13, 2, p->pairs.count);
  moelora_cpu_zero_gradients(&b->call, p->b13, 2, p->pairs.count);
  moelora_cpu_zero_gradients(&b->call, &p->a2, 1, p->pairs.count);
  moelora_cpu_zero_gradients(&b->call, &p->b2, 1, p->pairs.count);
}

moelora_status moelora_cpu_experts_backward(const moelora_experts_backward_problem *problem,
                                            const moelora_backward_plan *plan,
                                            const moelora_exec *exec, size_t *bytes) {
  backward b;
  lay_out(problem, plan, exec, &b);
  MOELORA_MEASURE(bytes, b.bytes);
  moelora_experts_problem *forward = &b.forward;
  const moelora_routes *routes = &forward->routes;
  moelora_cpu_back_begin(&b.call, &problem->pairs, !forward->apply_router_weight_on_input);
  moelora_cpu_round_factors(plan->variant, routes, &problem->forward.w13_lora, &forward->w13_lora,
                            exec);
  moelora_cpu_round_factors(plan->variant, routes, &problem->forward.w2_lora, &forward->w2_lora,
                            exec);
  load_inputs(&b);
  zero_gradients(&b);
  if (b.want.v)
    back_through_w2(&b);
  back_through_w13(&b);
  finish_inputs(&b);
  if (b.want.xa13)
    moelora_cpu_load_shrink(&b.call, &forward->w13_lora, &forward->saved, 0, b.xa13);
  if (b.want.xa2) {
    moelora_cpu_load_shrink(&b.call, &forward->w2_lora, &forward->saved, 1, b.xa2);
    moelora_cpu_weigh_ranks(&b.call, &forward->w2_lora, b.xa2);
  }
  finish_factors(&b);
  finish_biases(&b);
  return MOELORA_OK;
}
