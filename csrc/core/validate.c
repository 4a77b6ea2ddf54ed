/* Validates the operators that compute: weights, LoRA factors, activations, outputs. */
#include "core/check.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

/* Names E, K, and, as `n`, the number of rows of weights. */
static void name_sizes(moelora_arguments *all, const moelora_weights_arg *arg,
                       const moelora_weights *weights, const char *n) {
  moelora_name_size(all, "E", arg->tensor.tensor->size[0], moelora_size_of(arg->tensor, 0));
  moelora_name_size(all, "K", weights->k, moelora_size_of(arg->x, 1));
  moelora_name_size(all, n, weights->n, arg->n);
}

/* Describes the weights NAME of `args` for activations x. */
#define WEIGHTS_ARG(NAME, ...)                                                                     \
  ((moelora_weights_arg){.tensor = MOELORA_ARG(#NAME, &args->NAME),                                \
                         .x = x,                                                                   \
                         .layout = &args->NAME##_layout,                                           \
                         .layout_name = #NAME "_layout",                                           \
                         __VA_ARGS__})

/* Describes the factors of a projection, which must fit its weights. */
static moelora_factors_arg factors_of(const moelora_lora *lora, int32_t most, const char *name_a,
                                      const char *name_b, const moelora_weights_arg *w,
                                      const moelora_weights *weights) {
  return (moelora_factors_arg){
      .lora = lora,
      .name_a = name_a,
      .name_b = name_b,
      .most = most,
      .shrink = true,
      .expand = true,
      .like = moelora_dtype_source(w),
      .may_be_wide = true,
      .num_experts = w->tensor.tensor->size[0],
      .experts_source = moelora_size_of(w->tensor, 0),
      .n = weights->n,
      .n_source = w->n,
      .k = weights->k,
      .k_source = w->k,
  };
}

/* A row has an adapter only if there are both a mapping and factors. */
static void drop_unused_adapters(moelora_routes *routes, moelora_factors *first,
                                 moelora_factors *second) {
  bool any = first->num_slices || (second && second->num_slices);
  if (any && routes->token_lora_mapping.data)
    return;
  first->num_slices = 0;
  if (second)
    second->num_slices = 0;
  routes->max_loras = 0;
  routes->token_lora_mapping.data = NULL;
  routes->w13_one_a = NULL;
  moelora_drop_unused_tables(routes);
}

/* ---- one projection ---- */

moelora_status moelora_check_gemm(const moelora_gemm_args *args, moelora_gemm_problem *problem) {
  const moelora_arg x = MOELORA_ARG("x", &args->x);
  moelora_routes *routes = &problem->routes;
  moelora_weights *weights = &problem->w;
  *problem = (moelora_gemm_problem){.mul_routed_weight = args->mul_routed_weight};
  moelora_arguments all;
  moelora_arguments_of_gemm(args, &all);
  MOELORA_TRY(moelora_check_views(&all));
  moelora_weights_arg w = WEIGHTS_ARG(w, .order = MOELORA_ROWS_PLAIN, .depth = args->x.size[1],
                                      .k = moelora_size_of(x, 1));
  MOELORA_TRY(moelora_check_weights(&w, weights, &routes->num_experts));
  MOELORA_TRY(moelora_check_size(x, 1, weights->k, w.k));
  name_sizes(&all, &w, weights, "N");
  weights->bias = moelora_take_view(&args->bias, &weights->bias_stride_e, 1);
  MOELORA_TRY(moelora_take_routing(&all, &args->routing, args->mul_routed_weight, routes));
  MOELORA_TRY(moelora_check_padded_rows(&args->routing, routes, routes->num_experts, "expert"));

  int64_t max_loras = MOELORA_ANY_SIZE;
  const moelora_source slots = moelora_size_of(moelora_entry("lora_a", 0, &args->lora.a[0]), 0);
  const moelora_factors_arg lora =
      factors_of(&args->lora, MOELORA_MAX_SLICES, "lora_a", "lora_b", &w, weights);
  MOELORA_TRY(moelora_check_factors(&lora, &max_loras, slots, &problem->lora));
  moelora_take_adapters(&all, &args->adapters, max_loras, slots, routes);
  drop_unused_adapters(routes, &problem->lora, NULL);
  MOELORA_TRY(moelora_check_sizes(&all));
  MOELORA_TRY(moelora_check_apart(&all));

  problem->dtype = args->x.dtype;
  problem->x = moelora_take_view(&args->x, &problem->x_stride, 1);
  problem->x_per_row = args->x.size[0] != routes->num_tokens;
  problem->out = moelora_take_view(&args->out, problem->out_stride, 2);
  return MOELORA_OK;
}

/* ---- the whole layer ---- */

/* The defaults of the activations' parameters. */
typedef struct activation_row {
  const char *name;
  float alpha, limit;
} activation_row;
static const activation_row activations[] = {
#define MOELORA_ROW(NAME, TEXT, FORM, ROWS, ALPHA, LIMIT) [MOELORA_##NAME] = {TEXT, ALPHA, LIMIT},
    MOELORA_ACTIVATIONS(MOELORA_ROW)
#undef MOELORA_ROW
};

static float default_of(const activation_row *row, bool is_alpha) {
  return is_alpha ? row->alpha : row->limit;
}

/* Writes the names of the activations that take a parameter: "a, b and c". */
static const char *names_with(bool is_alpha, char *text, size_t bytes) {
  int last = -1, count = 0;
  for (int i = 0; i < MOELORA_NUM_ACTIVATIONS; i++)
    if (default_of(&activations[i], is_alpha) != 0)
      last = i;
  size_t at = 0;
  for (int i = 0; i <= last && at < bytes; i++)
    if (default_of(&activations[i], is_alpha) != 0)
      at += (size_t)snprintf(text + at, bytes - at, "%s%s",
                             count++ == 0 ? ""
                             : i == last  ? " and "
                                          : ", ",
                             activations[i].name);
  return text;
}

/* Resolves an activation's parameter, or its default. */
static moelora_status check_number(const char *name, double value, moelora_activation kind,
                                   bool is_alpha, float *number) {
  char names[256];
  *number = default_of(&activations[kind], is_alpha);
  if (value == 0)
    return MOELORA_OK;
  MOELORA_REQUIRE(value >= FLT_MIN && value <= FLT_MAX,
                  "%s is %g, expected a normal float32 above 0", name, value);
  MOELORA_REQUIRE(*number != 0, "%s is %g, but the activation takes none: %s have one", name, value,
                  names_with(is_alpha, names, sizeof names));
  *number = (float)value;
  return MOELORA_OK;
}

/* Returns the g at which silu(g) is `limit`. silu increases for positive g, so that
 * min(silu(g), limit) = silu(min(g, this)). */
static float inverse_silu(float limit) {
  double g = fmin(2.0 * limit, limit + 0.2785); /* not below: g - silu(g) <= min(g / 2, 0.2785) */
  for (int step = 0; step < 8; step++) {        /* Newton's method */
    const double q = 1 / (1 + exp(-g));
    g -= (g * q - limit) / (q * (1 + g * (1 - q)));
  }
  return (float)fmin(g, FLT_MAX);
}

static moelora_status check_activation(const moelora_experts_args *args,
                                       moelora_activation_problem *problem) {
  const moelora_activation kind = args->activation;
  MOELORA_REQUIRE((int)kind >= 0 && (int)kind < MOELORA_NUM_ACTIVATIONS,
                  "activation is %d, expected a moelora_activation", (int)kind);
  problem->kind = kind;
  MOELORA_TRY(
      check_number("activation_alpha", args->activation_alpha, kind, true, &problem->alpha));
  MOELORA_TRY(
      check_number("activation_limit", args->activation_limit, kind, false, &problem->limit));
  if (problem->alpha == 0) /* takes none */
    problem->alpha = 1;
  if (problem->limit == 0)
    problem->limit = INFINITY;
  problem->alpha = fminf(problem->alpha, FLT_MAX / 2); /* keeps alpha * log2(e) finite in kernels */
  problem->gate_limit = kind == MOELORA_SWIGLUSTEP ? inverse_silu(problem->limit) : problem->limit;
  if (moelora_has_form(kind, MOELORA_FORM_SOFT_CAPPED)) { /* caps with normal reciprocals */
    problem->alpha = fminf(problem->alpha, 1 / FLT_MIN);
    problem->limit = fminf(problem->limit, 1 / FLT_MIN);
    problem->inverse_alpha = 1 / problem->alpha;
    problem->inverse_limit = 1 / problem->limit;
    problem->gate_limit = INFINITY;
  }
  return MOELORA_OK;
}

/* Weights of a layer as arguments. */
typedef struct layer_weights {
  moelora_weights_arg w13, w2;
} layer_weights;

static moelora_status check_layer_weights(const moelora_experts_args *args, layer_weights *layer,
                                          moelora_experts_problem *problem) {
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const bool gated = moelora_is_gated(args->activation);
  int32_t experts2 = 0;
  layer->w13 = WEIGHTS_ARG(w13, .depth = args->hidden_states.size[1], .k = moelora_size_of(x, 1));
  layer->w13.order = moelora_is_interleaved(args->activation) ? MOELORA_ROWS_INTERLEAVED
                     : gated                                  ? MOELORA_ROWS_GATE_UP
                                                              : MOELORA_ROWS_PLAIN;
  MOELORA_TRY(moelora_check_weights(&layer->w13, &problem->w13, &problem->routes.num_experts));
  layer->w2 =
      WEIGHTS_ARG(w2, .order = MOELORA_ROWS_PLAIN, .depth = problem->w13.n / (gated ? 2 : 1),
                  .k = moelora_words("the intermediate size"));
  return moelora_check_weights(&layer->w2, &problem->w2, &experts2);
}

static moelora_status check_layer_shapes(const moelora_experts_args *args, layer_weights *layer,
                                         moelora_experts_problem *problem) {
  MOELORA_TRY(check_layer_weights(args, layer, problem));
  const moelora_source k13 = layer->w13.k, n13 = layer->w13.n, k2 = layer->w2.k, n2 = layer->w2.n;
  MOELORA_TRY(moelora_check_size(layer->w13.x, 1, problem->w13.k, k13));
  MOELORA_TRY(moelora_check_size(layer->w2.tensor, 0, problem->routes.num_experts,
                                 moelora_size_of(layer->w13.tensor, 0)));
  MOELORA_REQUIRE(problem->w2.n == problem->w13.k,
                  "%s is %lld, %s is %lld: both are the hidden size", moelora_label_source(n2).text,
                  (long long)problem->w2.n, moelora_label_source(k13).text,
                  (long long)problem->w13.k);

  MOELORA_TRY(check_activation(args, &problem->activation));
  bool gated = moelora_is_gated(args->activation);
  int64_t want = problem->w2.k * (gated ? 2 : 1);
  MOELORA_REQUIRE(problem->w13.n == want,
                  "%s is %lld, expected %lld: %s%s, as the activation is %sgated",
                  moelora_label_source(n13).text, (long long)problem->w13.n, (long long)want,
                  gated ? "2 * " : "", moelora_label_source(k2).text, gated ? "" : "not ");
  problem->hidden = problem->w13.k;
  problem->intermediate = problem->w2.k;
  return MOELORA_OK;
}

static moelora_status check_layer_adapters(moelora_arguments *all, const moelora_experts_args *args,
                                           const layer_weights *layer,
                                           moelora_experts_problem *problem) {
  const moelora_arg a13 = moelora_entry("w13_lora_a", 0, &args->w13_lora.a[0]);
  const moelora_arg a2 = moelora_entry("w2_lora_a", 0, &args->w2_lora.a[0]);
  const bool gated = moelora_is_gated(args->activation);
  int64_t max_loras = MOELORA_ANY_SIZE;
  const moelora_source source = moelora_size_of(args->w13_lora.num_slices ? a13 : a2, 0);
  moelora_factors_arg w13 = factors_of(&args->w13_lora, gated ? 2 : 1, "w13_lora_a", "w13_lora_b",
                                       &layer->w13, &problem->w13);
  w13.slices = gated ? ": one for all rows, or gate and up" : ": one for all rows";
  const moelora_factors_arg w2 =
      factors_of(&args->w2_lora, 1, "w2_lora_a", "w2_lora_b", &layer->w2, &problem->w2);
  MOELORA_TRY(moelora_check_factors(&w13, &max_loras, source, &problem->w13_lora));
  MOELORA_TRY(moelora_check_factors(&w2, &max_loras, source, &problem->w2_lora));
  moelora_take_adapters(all, &args->adapters, max_loras, source, &problem->routes);
  if (problem->w13_lora.num_slices == 2)
    problem->routes.w13_one_a = args->w13_one_a.data;
  drop_unused_adapters(&problem->routes, &problem->w13_lora, &problem->w2_lora);
  return MOELORA_OK;
}

moelora_status moelora_check_layer(moelora_arguments *all, const moelora_experts_args *args,
                                   moelora_experts_problem *problem) {
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  moelora_routes *routes = &problem->routes;
  layer_weights layer;
  *problem = (moelora_experts_problem){
      .apply_router_weight_on_input = args->apply_router_weight_on_input,
  };
  MOELORA_TRY(moelora_check_views(all));
  MOELORA_TRY(check_layer_shapes(args, &layer, problem));
  name_sizes(all, &layer.w13, &problem->w13, "2 I");
  problem->w13.bias = moelora_take_view(&args->w13_bias, &problem->w13.bias_stride_e, 1);
  problem->w2.bias = moelora_take_view(&args->w2_bias, &problem->w2.bias_stride_e, 1);
  MOELORA_TRY(moelora_take_routing(all, &args->routing, true, routes));
  MOELORA_TRY(moelora_check_padded_rows(&args->routing, routes, routes->num_experts, "expert"));
  MOELORA_REQUIRE(!args->apply_router_weight_on_input || routes->top_k == 1,
                  "%s.size(1) is %d, expected 1 with apply_router_weight_on_input", topk_ids.name,
                  routes->top_k);
  MOELORA_TRY(check_layer_adapters(all, args, &layer, problem));
  problem->dtype = args->hidden_states.dtype;
  problem->x = moelora_take_view(&args->hidden_states, &problem->x_stride, 1);
  return MOELORA_OK;
}

/* ---- saved tensors ---- */

/* Takes the saved shrink output of a projection: [P, slices, R] or [P, R]; absent, or a placeholder
 * without elements, if the projection has no adapters. */
static moelora_status take_shrink(moelora_arg arg, int32_t ndim, const moelora_factors *lora,
                                  void **data, int64_t stride[2]) {
  if (lora->num_slices == 0) {
    MOELORA_REQUIRE(moelora_is_absent(arg.tensor) || arg.tensor->size[0] == 0,
                    "%s is given, but the projection has no adapters", arg.name);
    return MOELORA_OK;
  }
  MOELORA_TRY(
      moelora_check_view(arg, ndim, ndim == 3 ? "[M * top_k, slices, R]" : "[M * top_k, R]"));
  *data = moelora_take_view(arg.tensor, stride, 2);
  if (ndim == 2)
    stride[1] = lora->max_rank;
  return MOELORA_OK;
}

moelora_status moelora_check_saved(moelora_arguments *all, const moelora_experts_args *args,
                                   moelora_experts_problem *problem) {
  static const char rank[] = "the maximum rank of the factors";
  const moelora_saved *from = &args->saved;
  const moelora_factors *lora13 = &problem->w13_lora, *lora2 = &problem->w2_lora;
  moelora_saved_rows *saved = &problem->saved;
  /* Factors are dropped if no row has an adapter: an empty batch has tensors of any width. */
  const bool has13 = lora13->num_slices > 0, has2 = lora2->num_slices > 0;
  moelora_name_size(all, "slices", has13 ? lora13->num_slices : MOELORA_ANY_SIZE,
                    moelora_words("the number of slices of the factors"));
  moelora_name_size(all, "R13", has13 ? lora13->max_rank : MOELORA_ANY_SIZE, moelora_words(rank));
  moelora_name_size(all, "R2", has2 ? lora2->max_rank : MOELORA_ANY_SIZE, moelora_words(rank));
  moelora_name_size(all, "0", 0, moelora_words("the size of a placeholder"));
  saved->gate_up = moelora_take_view(&from->gate_up, &saved->gate_up_stride, 1);
  MOELORA_TRY(take_shrink(MOELORA_ARG("saved.w13_shrink", &from->w13_shrink), 3, lora13,
                          &saved->shrink[0], saved->shrink_stride[0]));
  return take_shrink(MOELORA_ARG("saved.w2_shrink", &from->w2_shrink), 2, lora2, &saved->shrink[1],
                     saved->shrink_stride[1]);
}

moelora_status moelora_check_experts(const moelora_experts_args *args,
                                     moelora_experts_problem *problem) {
  const moelora_saved *saved = &args->saved;
  const bool saving = !moelora_is_absent(&saved->gate_up);
  moelora_arguments all;
  moelora_arguments_of_experts(args, &all);
  if (!saving && moelora_same_view(&args->out, &args->hidden_states))
    all.aliased = &args->hidden_states;
  MOELORA_TRY(moelora_check_layer(&all, args, problem));
  for (int32_t i = 0; i < 2 && !saving; i++)
    MOELORA_REQUIRE(moelora_is_absent(i ? &saved->w2_shrink : &saved->w13_shrink),
                    "saved.%s is given, but saved.gate_up is absent",
                    i ? "w2_shrink" : "w13_shrink");
  if (saving)
    MOELORA_TRY(moelora_check_saved(&all, args, problem));
  problem->out = moelora_take_view(&args->out, &problem->out_stride, 1);
  MOELORA_TRY(moelora_check_sizes(&all));
  return moelora_check_apart(&all);
}
