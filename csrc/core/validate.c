/* Validates projections and layers: sizes, activations, saved tensors, outputs. */
#include "core/check.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

/* Describes weights NAME of `args`, which multiply activations x. */
#define WEIGHTS_ARG(NAME, ...)                                                                     \
  ((moelora_weights_arg){.tensor = MOELORA_ARG(#NAME, &args->NAME),                                \
                         .x = x,                                                                   \
                         .layout = &args->NAME##_layout,                                           \
                         .layout_name = #NAME "_layout",                                           \
                         __VA_ARGS__})

/* Defines the sizes E, K, and the one called `n`, the rows of the weights. */
static void name_sizes(moelora_arguments *all, const moelora_weights_arg *arg, const char *n) {
  moelora_name_size(all, "E", moelora_size_of(arg->tensor, 0));
  moelora_name_size(all, "K", moelora_size_of(arg->x, 1));
  moelora_name_size(all, n, arg->n);
}

/* Drops all adapter arguments if mapping or factors are absent: then no row has an adapter. */
static void drop_unused_adapters(moelora_routes *routes, moelora_factors *first,
                                 moelora_factors *second) {
  if ((first->num_slices || second->num_slices) && routes->token_lora_mapping.data)
    return;
  first->num_slices = second->num_slices = 0;
  routes->max_loras = 0;
  routes->token_lora_mapping.data = NULL;
  routes->w13_one_a = NULL;
  moelora_drop_unused_tables(routes);
}

/* ---- one projection ---- */

moelora_status moelora_check_projection(moelora_arguments *all, const moelora_gemm_args *args,
                                        const int32_t *num_experts, moelora_gemm_problem *problem) {
  const moelora_arg x = MOELORA_ARG("x", &args->x);
  const bool has_w = !num_experts || !moelora_is_absent(&args->w);
  moelora_routes *routes = &problem->routes;
  moelora_weights *weights = &problem->w;
  moelora_factors_arg lora;
  if (has_w) {
    moelora_weights_arg w = WEIGHTS_ARG(w, .order = MOELORA_ROWS_PLAIN, .k = moelora_size_of(x, 1));
    MOELORA_TRY(moelora_check_weights(&w, weights, &routes->num_experts));
    MOELORA_TRY(moelora_check_size(x, 1, w.k));
    name_sizes(all, &w, "N");
    lora = moelora_factors_of(&w, MOELORA_MAX_SLICES);
  } else {
    MOELORA_REQUIRE(moelora_is_absent(&args->bias), "bias is given, but w is absent");
    MOELORA_TRY(moelora_check_at_least("num_experts", *num_experts, 1));
    MOELORA_REQUIRE_DIM(args->x.size[1] >= 1, x, size, 1, "expected at least 1");
    lora = moelora_factors_alone(x, *num_experts, MOELORA_MAX_SLICES);
    lora.may_be_wide = true;
    routes->num_experts = *num_experts;
    moelora_name_size(all, "E", lora.experts);
  }
  weights->bias = moelora_take_view(&args->bias, &weights->bias_stride_e, 1);
  MOELORA_TRY(moelora_take_routing(all, &args->routing, args->mul_routed_weight, routes));
  MOELORA_TRY(moelora_check_factors(all, &args->lora, &lora, &problem->lora));
  moelora_take_adapters(all, &args->adapters, routes);
  if (has_w) {
    MOELORA_TRY(moelora_check_padded_rows(&args->routing, routes, false));
    drop_unused_adapters(routes, &problem->lora, &problem->lora);
  } else {
    weights->n = problem->lora.num_slices * problem->lora.slice_n;
    weights->k = args->x.size[1];
    moelora_name_size(all, "N", moelora_words(weights->n, "the number of columns of lora_b"));
    MOELORA_TRY(moelora_check_padded_rows(&args->routing, routes, true));
    moelora_drop_unused_tables(routes);
  }
  problem->mul_routed_weight = args->mul_routed_weight;
  problem->dtype = args->x.dtype;
  problem->x = moelora_take_view(&args->x, &problem->x_stride, 1);
  problem->x_per_row = args->x.size[0] != routes->num_tokens;
  return MOELORA_OK;
}

moelora_status moelora_check_gemm(const moelora_gemm_args *args, moelora_gemm_problem *problem) {
  moelora_arguments all;
  *problem = (moelora_gemm_problem){0};
  MOELORA_TRY(moelora_begin_gemm(args, &all));
  MOELORA_TRY(moelora_check_projection(&all, args, NULL, problem));
  problem->out = moelora_take_view(&args->out, problem->out_stride, 2);
  return moelora_check_fit(&all);
}

/* ---- the whole layer ---- */

enum { ALPHA, LIMIT };

/* Defaults of the activations' parameters; 0: the activation has no such parameter. */
static const struct {
  const char *name;
  float defaults[2];
} activations[] = {
#define MOELORA_ROW(NAME, TEXT, FORM, ROWS, ALPHA, LIMIT) [MOELORA_##NAME] = {TEXT, {ALPHA, LIMIT}},
    MOELORA_ACTIVATIONS(MOELORA_ROW)
#undef MOELORA_ROW
};

/* Checks a parameter of an activation; 0 selects the default. */
static moelora_status check_number(const char *name, double value, moelora_activation kind,
                                   int32_t which, float *number) {
  char names[256] = "";
  size_t used = 0;
  *number = activations[kind].defaults[which];
  if (value == 0)
    return MOELORA_OK;
  MOELORA_REQUIRE(value >= FLT_MIN && value <= FLT_MAX,
                  "%s is %g, expected a normal float32 above 0", name, value);
  for (int i = 0; i < MOELORA_NUM_ACTIVATIONS && *number == 0 && used < sizeof names; i++)
    if (activations[i].defaults[which] != 0)
      used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                               activations[i].name);
  MOELORA_REQUIRE(*number != 0, "%s is %g, but %s takes none, unlike %s", name, value,
                  activations[kind].name, names);
  *number = (float)value;
  return MOELORA_OK;
}

/* Returns the g at which silu(g) = `limit`. silu increases for positive g, so min(silu(x), limit) =
 * silu(min(x, g)). */
static float inverse_silu(float limit) {
  double g = fmin(2.0 * limit, limit + 0.2785); /* above g, as g - silu(g) <= min(g / 2, 0.2785) */
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
      check_number("activation_alpha", args->activation_alpha, kind, ALPHA, &problem->alpha));
  MOELORA_TRY(
      check_number("activation_limit", args->activation_limit, kind, LIMIT, &problem->limit));
  if (problem->alpha == 0) /* the activation takes none */
    problem->alpha = 1;
  if (problem->limit == 0)
    problem->limit = INFINITY;
  problem->alpha = fminf(problem->alpha, FLT_MAX / 2); /* keeps alpha * log2(e) finite in kernels */
  problem->gate_limit = kind == MOELORA_SWIGLUSTEP ? inverse_silu(problem->limit) : problem->limit;
  if (moelora_has_form(kind, MOELORA_FORM_SOFT_CAPPED)) { /* keeps the reciprocals normal */
    problem->alpha = fminf(problem->alpha, 1 / FLT_MIN);
    problem->limit = fminf(problem->limit, 1 / FLT_MIN);
    problem->inverse_alpha = 1 / problem->alpha;
    problem->inverse_limit = 1 / problem->limit;
    problem->gate_limit = INFINITY;
  }
  return MOELORA_OK;
}

/* Checks the weights of a layer, and that their sizes fit together. */
static moelora_status check_layer_weights(const moelora_experts_args *args,
                                          moelora_weights_arg *w13, moelora_weights_arg *w2,
                                          moelora_experts_problem *problem) {
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const bool gated = moelora_is_gated(args->activation);
  const int32_t halves = gated ? 2 : 1;
  int32_t experts2 = 0;
  *w13 = WEIGHTS_ARG(w13, .k = moelora_size_of(x, 1));
  w13->order = moelora_is_interleaved(args->activation) ? MOELORA_ROWS_INTERLEAVED
               : gated                                  ? MOELORA_ROWS_GATE_UP
                                                        : MOELORA_ROWS_PLAIN;
  MOELORA_TRY(moelora_check_weights(w13, &problem->w13, &problem->routes.num_experts));
  *w2 = WEIGHTS_ARG(w2, .order = MOELORA_ROWS_PLAIN,
                    .k = moelora_words(problem->w13.n / halves, "the intermediate size"));
  MOELORA_TRY(moelora_check_weights(w2, &problem->w2, &experts2));
  MOELORA_TRY(moelora_check_size(x, 1, w13->k));
  MOELORA_TRY(moelora_check_size(w2->tensor, 0, moelora_size_of(w13->tensor, 0)));
  problem->hidden = w13->k.value;
  problem->intermediate = w2->k.value;
  MOELORA_REQUIRE(problem->w2.n == problem->hidden,
                  "%s is %lld, %s is %lld: both are the hidden size",
                  moelora_label_extent(w2->n).text, (long long)problem->w2.n,
                  moelora_label_extent(w13->k).text, (long long)problem->hidden);
  MOELORA_TRY(check_activation(args, &problem->activation));
  const int64_t want = problem->intermediate * halves;
  MOELORA_REQUIRE(problem->w13.n == want,
                  "%s is %lld, expected %lld: %s%s, as the activation is %sgated",
                  moelora_label_extent(w13->n).text, (long long)problem->w13.n, (long long)want,
                  gated ? "2 * " : "", moelora_label_extent(w2->k).text, gated ? "" : "not ");
  return MOELORA_OK;
}

moelora_status moelora_check_layer(moelora_arguments *all, const moelora_experts_args *args,
                                   moelora_experts_problem *problem) {
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  moelora_routes *routes = &problem->routes;
  moelora_weights_arg w13, w2;
  *problem = (moelora_experts_problem){
      .apply_router_weight_on_input = args->apply_router_weight_on_input,
  };
  MOELORA_TRY(check_layer_weights(args, &w13, &w2, problem));
  name_sizes(all, &w13, "2 I");
  problem->w13.bias = moelora_take_view(&args->w13_bias, &problem->w13.bias_stride_e, 1);
  problem->w2.bias = moelora_take_view(&args->w2_bias, &problem->w2.bias_stride_e, 1);
  MOELORA_TRY(moelora_take_routing(all, &args->routing, true, routes));
  MOELORA_TRY(moelora_check_padded_rows(&args->routing, routes, false));
  MOELORA_REQUIRE_DIM(!args->apply_router_weight_on_input || routes->top_k == 1, topk_ids, size, 1,
                      "expected 1 with apply_router_weight_on_input");
  const bool gated = moelora_is_gated(args->activation);
  moelora_factors_arg lora13 = moelora_factors_of(&w13, gated ? 2 : 1);
  lora13.slices = gated ? ": one for all rows, or gate and up" : ": one for all rows";
  const moelora_factors_arg lora2 = moelora_factors_of(&w2, 1);
  MOELORA_TRY(moelora_check_factors(all, &args->w13_lora, &lora13, &problem->w13_lora));
  MOELORA_TRY(moelora_check_factors(all, &args->w2_lora, &lora2, &problem->w2_lora));
  moelora_take_adapters(all, &args->adapters, routes);
  if (problem->w13_lora.num_slices == 2)
    routes->w13_one_a = args->w13_one_a.data;
  drop_unused_adapters(routes, &problem->w13_lora, &problem->w2_lora);
  problem->dtype = args->hidden_states.dtype;
  problem->x = moelora_take_view(&args->hidden_states, &problem->x_stride, 1);
  return MOELORA_OK;
}

/* ---- saved tensors ---- */

/* Takes the saved shrink output of a projection, [P, slices, R] or [P, R]. Without adapters, it
 * must be absent or have no elements. */
static moelora_status take_shrink(moelora_arg arg, int32_t ndim, const moelora_factors *lora,
                                  void **data, int64_t stride[2]) {
  if (lora->num_slices == 0) {
    MOELORA_REQUIRE(moelora_is_absent(arg.tensor) || arg.tensor->size[0] == 0,
                    "%s is given, but the projection has no adapters", arg.name);
    return MOELORA_OK;
  }
  MOELORA_TRY(moelora_check_view(arg, ndim == 3 ? "[M * top_k, slices, R]" : "[M * top_k, R]"));
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
  /* If no row has an adapter, the factors were dropped, and empty tensors may have any width. */
  const bool has13 = lora13->num_slices > 0, has2 = lora2->num_slices > 0;
  moelora_name_size(all, "slices",
                    moelora_words(has13 ? lora13->num_slices : MOELORA_ANY_SIZE,
                                  "the number of slices of the factors"));
  moelora_name_size(all, "R13", moelora_words(has13 ? lora13->max_rank : MOELORA_ANY_SIZE, rank));
  moelora_name_size(all, "R2", moelora_words(has2 ? lora2->max_rank : MOELORA_ANY_SIZE, rank));
  moelora_name_size(all, "0", moelora_words(0, "the size of a placeholder"));
  saved->gate_up = moelora_take_view(&from->gate_up, &saved->gate_up_stride, 1);
  MOELORA_TRY(take_shrink(MOELORA_ARG("saved.w13_shrink", &from->w13_shrink), 3, lora13,
                          &saved->shrink[0], saved->shrink_stride[0]));
  return take_shrink(MOELORA_ARG("saved.w2_shrink", &from->w2_shrink), 2, lora2, &saved->shrink[1],
                     saved->shrink_stride[1]);
}

/* Whether both views have the same memory and layout. */
static bool is_same_view(const moelora_tensor *a, const moelora_tensor *b) {
  if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim)
    return false;
  for (int32_t i = 0; i < a->ndim; i++)
    if (a->size[i] != b->size[i] || (a->size[i] > 1 && a->stride[i] != b->stride[i]))
      return false;
  return true;
}

moelora_status moelora_check_experts(const moelora_experts_args *args,
                                     moelora_experts_problem *problem) {
  const moelora_saved *saved = &args->saved;
  const bool saving = !moelora_is_absent(&saved->gate_up);
  moelora_arguments all;
  MOELORA_TRY(moelora_begin_experts(args, &all));
  if (!saving && is_same_view(&args->out, &args->hidden_states))
    all.aliased = &args->hidden_states;
  MOELORA_TRY(moelora_check_layer(&all, args, problem));
  for (int32_t i = 0; i < 2 && !saving; i++)
    MOELORA_REQUIRE(moelora_is_absent(i ? &saved->w2_shrink : &saved->w13_shrink),
                    "saved.%s is given, but saved.gate_up is absent",
                    i ? "w2_shrink" : "w13_shrink");
  if (saving)
    MOELORA_TRY(moelora_check_saved(&all, args, problem));
  problem->out = moelora_take_view(&args->out, &problem->out_stride, 1);
  return moelora_check_fit(&all);
}
