/* Validates the operators that compute: weights, LoRA factors, activations, outputs. */
#include "core/check.h"

#include <float.h>
#include <math.h>

/* Maximum rows of a layer's alignment block. Each expert is padded to whole blocks, and padded row
 * numbers must fit int32. */
enum { MAX_BLOCK_ROWS = 256 };

static moelora_status check_bias(moelora_arg arg, const moelora_weights_arg *w, int64_t num_experts,
                                 moelora_weights *weights) {
  if (moelora_is_absent(arg.tensor))
    return MOELORA_OK;
  const moelora_arg like = moelora_dtype_source(w);
  MOELORA_TRY(moelora_check_view(arg, 2, "[E, N]"));
  MOELORA_TRY(moelora_check_dtype(arg, like.tensor->dtype, like.name));
  MOELORA_TRY(moelora_check_size(arg, 0, num_experts, moelora_size_of(w->tensor, 0)));
  MOELORA_TRY(moelora_check_size(arg, 1, weights->n, w->n));
  MOELORA_TRY(moelora_check_rows(arg));
  weights->bias = arg.tensor->data;
  weights->bias_stride_e = moelora_stride(arg.tensor, 0);
  return MOELORA_OK;
}

/* Checks the factors of a projection against its weights. If `max_loras` < 0, the first factor
 * defines it and becomes its `source`. */
static moelora_status check_lora(const moelora_lora *lora, const char *name_a, const char *name_b,
                                 const moelora_weights_arg *w, const moelora_weights *weights,
                                 int64_t *max_loras, moelora_source source,
                                 moelora_factors *factors) {
  const moelora_arg first = MOELORA_ARG(name_a, &lora->a[0]);
  int32_t slices = lora->num_slices;
  MOELORA_REQUIRE(slices >= 0 && slices <= MOELORA_MAX_SLICES, "%s has %d slices, expected 0 to %d",
                  first.name, slices, MOELORA_MAX_SLICES);
  if (slices == 0)
    return MOELORA_OK;
  const moelora_source num_experts = moelora_size_of(w->tensor, 0);
  const moelora_source rank = moelora_words("the rank of the first slice");
  MOELORA_REQUIRE(weights->n % slices == 0,
                  "%s is %lld, expected a multiple of the %d slices of %s",
                  moelora_label_source(w->n).text, (long long)weights->n, slices, first.name);
  factors->num_slices = slices;
  factors->slice_n = weights->n / slices;
  moelora_source slice_source = w->n;
  slice_source.slices = slices;
  const moelora_arg base = moelora_dtype_source(w);
  factors->wide = moelora_are_wide(lora, base.tensor->dtype);
  const moelora_arg like = factors->wide ? first : base;
  const moelora_dtype dtype = like.tensor->dtype;
  const int64_t experts = w->tensor.tensor->size[0];
  for (int32_t i = 0; i < slices; i++) {
    const moelora_arg a = moelora_entry(name_a, i, &lora->a[i]);
    const moelora_arg b = moelora_entry(name_b, i, &lora->b[i]);
    MOELORA_TRY(moelora_check_factor(a, dtype, like.name, experts, num_experts,
                                     "[max_loras, E or 1, R, K]", &factors->a[i]));
    MOELORA_TRY(moelora_check_factor(b, dtype, like.name, experts, num_experts,
                                     "[max_loras, E or 1, N, R]", &factors->b[i]));
    if (*max_loras < 0) {
      MOELORA_REQUIRE(a.tensor->size[0] < INT32_MAX, "%s.size(0) is %lld, expected fewer slots",
                      moelora_label_of(a).text, (long long)a.tensor->size[0]);
      *max_loras = a.tensor->size[0];
    }
    if (i == 0)
      factors->max_rank = (int32_t)a.tensor->size[2];
    MOELORA_TRY(moelora_check_size(a, 0, *max_loras, source));
    MOELORA_TRY(moelora_check_size(b, 0, *max_loras, source));
    MOELORA_TRY(moelora_check_size(a, 2, factors->max_rank, rank));
    MOELORA_TRY(moelora_check_size(b, 3, factors->max_rank, rank));
    MOELORA_TRY(moelora_check_size(a, 3, weights->k, w->k));
    MOELORA_TRY(moelora_check_size(b, 2, factors->slice_n, slice_source));
  }
  return MOELORA_OK;
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
  routes->lora_ranks = NULL;
  routes->lora_scalings = NULL;
  routes->w13_one_a = NULL;
  routes->adapter_enabled = NULL;
}

static moelora_status check_padded_rows(moelora_arg topk_ids, const moelora_routes *routes) {
  int64_t rows = routes->num_rows;
  int64_t touched = rows < routes->num_experts ? rows : routes->num_experts;
  MOELORA_REQUIRE(rows + touched * (MAX_BLOCK_ROWS - 1) <= INT32_MAX,
                  "%s has %lld rows (M * top_k), too many for row numbers of 32 bits after padding "
                  "by expert",
                  topk_ids.name, (long long)rows);
  return MOELORA_OK;
}

/* ---- one projection ---- */

moelora_status moelora_check_gemm(const moelora_gemm_args *args, moelora_gemm_problem *problem) {
  *problem = (moelora_gemm_problem){.mul_routed_weight = args->mul_routed_weight};
  const moelora_arg x = MOELORA_ARG("x", &args->x), w = MOELORA_ARG("w", &args->w);
  const moelora_arg out = MOELORA_ARG("out", &args->out), bias = MOELORA_ARG("bias", &args->bias);
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  moelora_routes *routes = &problem->routes;
  moelora_weights *weights = &problem->w;

  MOELORA_TRY(moelora_check_view(x, 2, "[M, K] or [M * top_k, K]"));
  MOELORA_TRY(moelora_check_compute_dtype(x));
  MOELORA_TRY(moelora_check_rows(x));
  moelora_weights_arg w_arg = {
      .tensor = w,
      .x = x,
      .layout = &args->w_layout,
      .layout_name = "w_layout",
      .rows_name = "w_layout.rows",
      .order = MOELORA_ROWS_PLAIN,
      .depth = args->x.size[1],
      .k = moelora_size_of(x, 1),
  };
  MOELORA_TRY(moelora_check_weights(&w_arg, weights, &routes->num_experts));
  MOELORA_TRY(moelora_check_size(x, 1, weights->k, w_arg.k));
  MOELORA_TRY(check_bias(bias, &w_arg, routes->num_experts, weights));

  MOELORA_TRY(moelora_check_routing(&args->routing, args->mul_routed_weight, routes));
  MOELORA_TRY(check_padded_rows(topk_ids, routes));
  int64_t x_rows = args->x.size[0];
  MOELORA_REQUIRE(
      x_rows == routes->num_tokens || x_rows == routes->num_rows,
      "%s.size(0) is %lld, expected %s.size(0), which is %lld, or M * top_k, which is %lld", x.name,
      (long long)x_rows, topk_ids.name, (long long)routes->num_tokens, (long long)routes->num_rows);

  int64_t max_loras = -1;
  const moelora_source source = moelora_size_of(moelora_entry("lora_a", 0, &args->lora.a[0]), 0);
  MOELORA_TRY(check_lora(&args->lora, "lora_a", "lora_b", &w_arg, weights, &max_loras, source,
                         &problem->lora));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, topk_ids.tensor, max_loras, source, routes));
  drop_unused_adapters(routes, &problem->lora, NULL);

  MOELORA_TRY(moelora_check_view(out, 3, "[M, top_k, N]"));
  MOELORA_TRY(moelora_check_dtype(out, args->x.dtype, x.name));
  MOELORA_TRY(moelora_check_size(out, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_TRY(moelora_check_size(out, 1, routes->top_k, moelora_size_of(topk_ids, 1)));
  MOELORA_TRY(moelora_check_size(out, 2, weights->n, w_arg.n));
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  const moelora_arg inputs[] = {x, w, bias};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->lora, "lora_a", "lora_b"));
  MOELORA_TRY(moelora_check_disjoint_routes(out, &args->routing, &args->adapters));

  problem->dtype = args->x.dtype;
  problem->x = args->x.data;
  problem->x_stride = moelora_stride(&args->x, 0);
  problem->x_per_row = x_rows != routes->num_tokens;
  problem->out = args->out.data;
  problem->out_stride[0] = moelora_stride(&args->out, 0);
  problem->out_stride[1] = moelora_stride(&args->out, 1);
  return MOELORA_OK;
}

/* ---- the whole layer ---- */

/* Resolves an activation parameter, or its default; `wanted` names the activations that take one.
 */
static moelora_status check_number(const char *name, double value, const char *wanted, bool takes,
                                   float own, float *number) {
  *number = own;
  if (value == 0)
    return MOELORA_OK;
  MOELORA_REQUIRE(value >= FLT_MIN && value <= FLT_MAX,
                  "%s is %g, expected a normal float32 above 0", name, value);
  MOELORA_REQUIRE(takes, "%s is %g, but the activation takes none: %s", name, value, wanted);
  *number = (float)value;
  return MOELORA_OK;
}

/* The g at which silu(g) is `limit`. silu increases for positive g, so that
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
  MOELORA_REQUIRE(kind >= MOELORA_SILU && kind <= MOELORA_SWIGLUSTEP,
                  "activation is %d, expected a moelora_activation", (int)kind);
  const bool oai = kind == MOELORA_SWIGLUOAI || kind == MOELORA_SWIGLUOAI_UNINTERLEAVE;
  const bool situ = kind == MOELORA_SITU, step = kind == MOELORA_SWIGLUSTEP;
  problem->kind = kind;
  MOELORA_TRY(check_number("activation_alpha", args->activation_alpha,
                           "swigluoai, swigluoai_uninterleave and situ have one", oai || situ,
                           oai ? 1.702f : 1.f, &problem->alpha));
  problem->alpha = fminf(problem->alpha, FLT_MAX / 2); /* keeps alpha * log2(e) finite in kernels */
  MOELORA_TRY(check_number("activation_limit", args->activation_limit,
                           "silu, swigluoai, swigluoai_uninterleave, situ and swiglustep have one",
                           oai || situ || step || kind == MOELORA_SILU,
                           oai || step ? 7.f : INFINITY, &problem->limit));
  problem->gate_limit = step ? inverse_silu(problem->limit) : problem->limit;
  if (situ) { /* caps with normal reciprocals */
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
  layer->w13 = (moelora_weights_arg){
      .tensor = MOELORA_ARG("w13", &args->w13),
      .x = x,
      .layout = &args->w13_layout,
      .layout_name = "w13_layout",
      .rows_name = "w13_layout.rows",
      .order = moelora_is_interleaved(args->activation) ? MOELORA_ROWS_INTERLEAVED
               : gated                                  ? MOELORA_ROWS_GATE_UP
                                                        : MOELORA_ROWS_PLAIN,
      .depth = args->hidden_states.size[1],
      .k = moelora_size_of(x, 1),
  };
  MOELORA_TRY(moelora_check_weights(&layer->w13, &problem->w13, &problem->routes.num_experts));
  layer->w2 = (moelora_weights_arg){
      .tensor = MOELORA_ARG("w2", &args->w2),
      .x = x,
      .layout = &args->w2_layout,
      .layout_name = "w2_layout",
      .rows_name = "w2_layout.rows",
      .order = MOELORA_ROWS_PLAIN,
      .depth = problem->w13.n / (gated ? 2 : 1),
      .k = moelora_words("the intermediate size"),
  };
  return moelora_check_weights(&layer->w2, &problem->w2, &experts2);
}

static moelora_status check_layer_shapes(const moelora_experts_args *args, layer_weights *layer,
                                         moelora_experts_problem *problem) {
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  MOELORA_TRY(moelora_check_view(x, 2, "[M, K]"));
  MOELORA_TRY(moelora_check_compute_dtype(x));
  MOELORA_TRY(moelora_check_rows(x));
  MOELORA_TRY(check_layer_weights(args, layer, problem));

  const moelora_source k13 = layer->w13.k, n13 = layer->w13.n, k2 = layer->w2.k, n2 = layer->w2.n;
  MOELORA_TRY(moelora_check_size(x, 1, problem->w13.k, k13));
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

static moelora_status check_layer_adapters(const moelora_experts_args *args,
                                           const layer_weights *layer,
                                           moelora_experts_problem *problem) {
  const moelora_arg a13 = moelora_entry("w13_lora_a", 0, &args->w13_lora.a[0]);
  const moelora_arg a2 = moelora_entry("w2_lora_a", 0, &args->w2_lora.a[0]);
  int32_t most = moelora_is_gated(args->activation) ? 2 : 1;
  MOELORA_REQUIRE(args->w13_lora.num_slices <= most,
                  "%s has %d slices, expected at most %d: one for all rows of %s%s", a13.name,
                  args->w13_lora.num_slices, most, layer->w13.tensor.name,
                  most == 2 ? ", or gate and up" : "");
  MOELORA_REQUIRE(args->w2_lora.num_slices <= 1, "%s has %d slices, expected at most 1", a2.name,
                  args->w2_lora.num_slices);
  int64_t max_loras = -1;
  const moelora_source source = moelora_size_of(args->w13_lora.num_slices ? a13 : a2, 0);
  MOELORA_TRY(check_lora(&args->w13_lora, "w13_lora_a", "w13_lora_b", &layer->w13, &problem->w13,
                         &max_loras, source, &problem->w13_lora));
  MOELORA_TRY(check_lora(&args->w2_lora, "w2_lora_a", "w2_lora_b", &layer->w2, &problem->w2,
                         &max_loras, source, &problem->w2_lora));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, &args->routing.topk_ids, max_loras, source,
                                     &problem->routes));
  if (!moelora_is_absent(&args->w13_one_a)) {
    const moelora_arg one_a = MOELORA_ARG("w13_one_a", &args->w13_one_a);
    MOELORA_TRY(moelora_check_vector(one_a, MOELORA_I32, "[max_loras]"));
    if (max_loras >= 0)
      MOELORA_TRY(moelora_check_size(one_a, 0, max_loras, source));
    if (problem->w13_lora.num_slices == 2)
      problem->routes.w13_one_a = args->w13_one_a.data;
  }
  drop_unused_adapters(&problem->routes, &problem->w13_lora, &problem->w2_lora);
  return MOELORA_OK;
}

moelora_status moelora_check_layer(const moelora_experts_args *args,
                                   moelora_experts_problem *problem) {
  *problem = (moelora_experts_problem){
      .apply_router_weight_on_input = args->apply_router_weight_on_input,
  };
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  const moelora_arg bias13 = MOELORA_ARG("w13_bias", &args->w13_bias);
  const moelora_arg bias2 = MOELORA_ARG("w2_bias", &args->w2_bias);
  moelora_routes *routes = &problem->routes;

  layer_weights layer;
  MOELORA_TRY(check_layer_shapes(args, &layer, problem));
  MOELORA_TRY(check_bias(bias13, &layer.w13, routes->num_experts, &problem->w13));
  MOELORA_TRY(check_bias(bias2, &layer.w2, routes->num_experts, &problem->w2));
  MOELORA_TRY(moelora_check_routing(&args->routing, true, routes));
  MOELORA_TRY(check_padded_rows(topk_ids, routes));
  MOELORA_TRY(moelora_check_size(x, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_REQUIRE(!args->apply_router_weight_on_input || routes->top_k == 1,
                  "%s.size(1) is %d, expected 1 with apply_router_weight_on_input", topk_ids.name,
                  routes->top_k);
  MOELORA_TRY(check_layer_adapters(args, &layer, problem));
  problem->dtype = args->hidden_states.dtype;
  problem->x = args->hidden_states.data;
  problem->x_stride = moelora_stride(&args->hidden_states, 0);
  return MOELORA_OK;
}

moelora_status moelora_check_disjoint_layer(moelora_arg out, const moelora_experts_args *args) {
  const moelora_arg inputs[] = {
      MOELORA_ARG("w13", &args->w13),
      MOELORA_ARG("w2", &args->w2),
      MOELORA_ARG("w13_bias", &args->w13_bias),
      MOELORA_ARG("w2_bias", &args->w2_bias),
  };
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  MOELORA_TRY(moelora_check_disjoint(out, MOELORA_ARG("w13_one_a", &args->w13_one_a)));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->w13_lora, "w13_lora_a", "w13_lora_b"));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->w2_lora, "w2_lora_a", "w2_lora_b"));
  return moelora_check_disjoint_routes(out, &args->routing, &args->adapters);
}

/* ---- saved tensors ---- */

/* Checks a saved tensor with P rows, in the dtype of hidden_states. */
static moelora_status check_rows_of(moelora_arg arg, int32_t ndim, const char *layout,
                                    const moelora_experts_args *args,
                                    const moelora_experts_problem *problem) {
  MOELORA_TRY(moelora_check_view(arg, ndim, layout));
  MOELORA_TRY(moelora_check_dtype(arg, args->hidden_states.dtype,
                                  MOELORA_ARG("hidden_states", &args->hidden_states).name));
  MOELORA_TRY(moelora_check_size(arg, 0, problem->routes.num_rows,
                                 moelora_words("the number of routed rows, M * top_k,")));
  return moelora_check_rows(arg);
}

/* Checks the saved shrink output of a projection: [P, slices, R], or [P, R]. */
static moelora_status check_shrink(moelora_arg arg, int32_t ndim, const moelora_experts_args *args,
                                   const moelora_experts_problem *problem,
                                   const moelora_factors *lora, void **data, int64_t stride[2]) {
  const bool given = !moelora_is_absent(arg.tensor);
  if (lora->num_slices == 0) {
    MOELORA_REQUIRE(!given || arg.tensor->size[0] == 0,
                    "%s is given, but the projection has no adapters", arg.name);
    return MOELORA_OK;
  }
  MOELORA_TRY(check_rows_of(arg, ndim, ndim == 3 ? "[M * top_k, slices, R]" : "[M * top_k, R]",
                            args, problem));
  if (ndim == 3)
    MOELORA_TRY(moelora_check_size(arg, 1, lora->num_slices,
                                   moelora_words("the number of slices of the factors")));
  MOELORA_TRY(moelora_check_size(arg, ndim - 1, lora->max_rank,
                                 moelora_words("the maximum rank of the factors")));
  *data = arg.tensor->data;
  stride[0] = moelora_stride(arg.tensor, 0);
  stride[1] = ndim == 3 ? moelora_stride(arg.tensor, 1) : lora->max_rank;
  return MOELORA_OK;
}

void moelora_saved_args(const moelora_saved *saved, moelora_arg args[MOELORA_SAVED]) {
  args[0] = MOELORA_ARG("saved.gate_up", &saved->gate_up);
  args[1] = MOELORA_ARG("saved.w13_shrink", &saved->w13_shrink);
  args[2] = MOELORA_ARG("saved.w2_shrink", &saved->w2_shrink);
}

moelora_status moelora_check_saved_views(const moelora_experts_args *args,
                                         moelora_experts_problem *problem) {
  moelora_arg all[MOELORA_SAVED];
  moelora_saved_args(&args->saved, all);
  const moelora_arg gate_up = all[0];
  moelora_saved_rows *saved = &problem->saved;
  MOELORA_TRY(check_rows_of(gate_up, 2, "[M * top_k, 2 I]", args, problem));
  MOELORA_TRY(
      moelora_check_size(gate_up, 1, problem->w13.n, moelora_words("the number of rows of w13")));
  saved->gate_up = gate_up.tensor->data;
  saved->gate_up_stride = moelora_stride(gate_up.tensor, 0);
  MOELORA_TRY(check_shrink(all[1], 3, args, problem, &problem->w13_lora, &saved->shrink[0],
                           saved->shrink_stride[0]));
  return check_shrink(all[2], 2, args, problem, &problem->w2_lora, &saved->shrink[1],
                      saved->shrink_stride[1]);
}

/* Checks the tensors that a forward saves, if any: outputs that share no memory. */
static moelora_status check_saved(const moelora_experts_args *args,
                                  moelora_experts_problem *problem) {
  moelora_arg all[MOELORA_SAVED];
  moelora_saved_args(&args->saved, all);
  if (moelora_is_absent(all[0].tensor)) {
    for (int32_t i = 1; i < MOELORA_SAVED; i++)
      MOELORA_REQUIRE(moelora_is_absent(all[i].tensor), "%s is given, but %s is absent",
                      all[i].name, all[0].name);
    return MOELORA_OK;
  }
  MOELORA_TRY(moelora_check_saved_views(args, problem));
  for (int32_t i = 0; i < MOELORA_SAVED; i++) {
    if (moelora_is_absent(all[i].tensor))
      continue;
    MOELORA_TRY(moelora_check_distinct(all[i]));
    MOELORA_TRY(moelora_check_disjoint(all[i], MOELORA_ARG("hidden_states", &args->hidden_states)));
    MOELORA_TRY(moelora_check_disjoint(all[i], MOELORA_ARG("out", &args->out)));
    MOELORA_TRY(moelora_check_disjoint_layer(all[i], args));
    for (int32_t j = 0; j < i; j++)
      MOELORA_TRY(moelora_check_disjoint(all[i], all[j]));
  }
  return MOELORA_OK;
}

moelora_status moelora_check_experts(const moelora_experts_args *args,
                                     moelora_experts_problem *problem) {
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  const moelora_arg out = MOELORA_ARG("out", &args->out);
  MOELORA_TRY(moelora_check_layer(args, problem));
  MOELORA_TRY(moelora_check_view(out, 2, "[M, K]"));
  MOELORA_TRY(moelora_check_dtype(out, args->hidden_states.dtype, x.name));
  MOELORA_TRY(moelora_check_size(out, 0, problem->routes.num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_TRY(moelora_check_size(out, 1, problem->hidden, moelora_size_of(x, 1)));
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  const bool saving = !moelora_is_absent(&args->saved.gate_up);
  if (saving || !moelora_same_view(&args->out, &args->hidden_states))
    MOELORA_TRY(moelora_check_disjoint(out, x));
  MOELORA_TRY(moelora_check_disjoint_layer(out, args));
  problem->out = args->out.data;
  problem->out_stride = moelora_stride(&args->out, 0);
  return check_saved(args, problem);
}
