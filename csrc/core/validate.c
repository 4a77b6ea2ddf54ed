/* Checks of the operators that compute: weights, adapters' factors, activations, outputs. */
#include "core/check.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

/* A layer's alignment pads each touched expert to blocks of at most this many rows, and row numbers
 * after padding are int32. */
enum { MAX_BLOCK_ROWS = 256 };

/* The names of one projection's arguments. */
typedef struct projection_names {
  const char *x, *w, *num_experts, *bias, *lora_a, *lora_b;
} projection_names;

static moelora_status check_at_least_one(moelora_arg arg) {
  for (int32_t i = 0; i < arg.tensor->ndim; i++)
    MOELORA_REQUIRE(arg.tensor->size[i] >= 1, "%s.size(%d) is 0, expected at least 1", arg.name, i);
  return MOELORA_OK;
}

/* A weight's N or K as messages call it: a dimension, in tiles times 64, for a slice divided by
 * their number. Made into text only when a check fails. */
typedef struct extent {
  const char *w;
  int32_t dim;
  bool packed;
  int32_t slices;
} extent;

typedef struct extent_text {
  char text[64];
} extent_text;

static extent_text name_of(extent extent) {
  extent_text name;
  int used = snprintf(name.text, sizeof name.text,
                      extent.packed ? "%s.size(%d) * 64" : "%s.size(%d)", extent.w, extent.dim);
  if (extent.slices > 1)
    snprintf(name.text + used, sizeof name.text - (size_t)used, " / %d slices", extent.slices);
  return name;
}

static moelora_status check_extent(moelora_arg arg, int32_t dim, int64_t want, extent source) {
  if (arg.tensor->size[dim] == want)
    return MOELORA_OK;
  return moelora_check_size(arg, dim, want, name_of(source).text);
}

static moelora_status check_weights(moelora_arg arg, moelora_weights *weights,
                                    int32_t *num_experts) {
  const moelora_tensor *w = arg.tensor;
  bool packed = w->ndim == 5;
  MOELORA_REQUIRE(packed || w->ndim == 3 || moelora_is_absent(w),
                  "%s has %d dimensions, expected 3: [E, N, K], or 5: packed "
                  "[E, N/64, K/64, 64, 64]",
                  arg.name, w->ndim);
  MOELORA_TRY(
      moelora_check_view(arg, packed ? 5 : 3, packed ? "[E, N/64, K/64, 64, 64]" : "[E, N, K]"));
  MOELORA_TRY(moelora_check_compute_dtype(arg));
  MOELORA_TRY(check_at_least_one(arg));
  if (packed) {
    for (int32_t dim = 3; dim < 5; dim++)
      MOELORA_TRY(moelora_check_size(arg, dim, MOELORA_PACK, "the side of a tile"));
    MOELORA_REQUIRE(w->stride[3] == MOELORA_PACK && w->stride[4] == 1,
                    "%s has tiles of strides (%lld, %lld), expected (64, 1)", arg.name,
                    (long long)w->stride[3], (long long)w->stride[4]);
    for (int32_t dim = 1; dim < 3; dim++)
      MOELORA_REQUIRE(w->size[dim] <= INT32_MAX / MOELORA_PACK,
                      "%s.size(%d) is %lld, expected at most %d tiles", arg.name, dim,
                      (long long)w->size[dim], INT32_MAX / MOELORA_PACK);
  } else {
    MOELORA_TRY(moelora_check_rows(arg));
  }
  *num_experts = (int32_t)w->size[0];
  *weights = (moelora_weights){
      .data = w->data,
      .n = w->size[1] * (packed ? MOELORA_PACK : 1),
      .k = w->size[2] * (packed ? MOELORA_PACK : 1),
      .stride_e = moelora_stride(w, 0),
      .stride_nt = moelora_stride(w, 1) * (packed ? 1 : MOELORA_PACK),
      .stride_n = packed ? MOELORA_PACK : moelora_stride(w, 1),
      .stride_kt = packed ? moelora_stride(w, 2) : MOELORA_PACK,
      .packed = packed,
  };
  return MOELORA_OK;
}

static moelora_status check_bias(moelora_arg arg, const moelora_tensor *w, const char *w_name,
                                 int64_t num_experts, moelora_weights *weights) {
  if (moelora_is_absent(arg.tensor))
    return MOELORA_OK;
  MOELORA_TRY(moelora_check_view(arg, 2, "[E, N]"));
  MOELORA_TRY(moelora_check_dtype(arg, w->dtype, w_name));
  MOELORA_TRY(check_extent(arg, 0, num_experts, (extent){.w = w_name}));
  MOELORA_TRY(check_extent(arg, 1, weights->n, (extent){w_name, 1, weights->packed, 1}));
  MOELORA_TRY(moelora_check_rows(arg));
  weights->bias = arg.tensor->data;
  weights->bias_stride_e = moelora_stride(arg.tensor, 0);
  return MOELORA_OK;
}

/* The factors of one projection against its weights. `max_loras` < 0 is not known yet; the first
 * factor then sets it and names itself as `source`. */
static moelora_status check_lora(const moelora_lora *lora, const projection_names *names,
                                 const moelora_tensor *w, const moelora_weights *weights,
                                 int64_t *max_loras, const char *source, moelora_factors *factors) {
  int32_t slices = lora->num_slices;
  MOELORA_REQUIRE(slices >= 0 && slices <= MOELORA_MAX_SLICES, "%s has %d slices, expected 0 to %d",
                  names->lora_a, slices, MOELORA_MAX_SLICES);
  if (slices == 0)
    return MOELORA_OK;
  const extent n_name = {names->w, 1, weights->packed, 1};
  const extent k_name = {names->w, 2, weights->packed, 1};
  MOELORA_REQUIRE(weights->n % slices == 0,
                  "%s is %lld, expected a multiple of the %d slices of %s", name_of(n_name).text,
                  (long long)weights->n, slices, names->lora_a);
  factors->num_slices = slices;
  factors->slice_n = weights->n / slices;
  const extent slice_name = {names->w, 1, weights->packed, slices};
  for (int32_t i = 0; i < slices; i++) {
    const moelora_arg a = {names->lora_a, i, &lora->a[i]}, b = {names->lora_b, i, &lora->b[i]};
    MOELORA_TRY(moelora_check_factor(a, w->dtype, names->w, w->size[0], names->num_experts,
                                     "[max_loras, E or 1, R, K]", &factors->a[i]));
    MOELORA_TRY(moelora_check_factor(b, w->dtype, names->w, w->size[0], names->num_experts,
                                     "[max_loras, E or 1, N, R]", &factors->b[i]));
    if (*max_loras < 0) {
      MOELORA_REQUIRE(a.tensor->size[0] < INT32_MAX, "%s[0].size(0) is %lld, expected fewer slots",
                      names->lora_a, (long long)a.tensor->size[0]);
      *max_loras = a.tensor->size[0];
    }
    if (i == 0)
      factors->max_rank = (int32_t)a.tensor->size[2];
    MOELORA_TRY(moelora_check_size(a, 0, *max_loras, source));
    MOELORA_TRY(moelora_check_size(b, 0, *max_loras, source));
    MOELORA_TRY(moelora_check_size(a, 2, factors->max_rank, "the rank of the first slice"));
    MOELORA_TRY(moelora_check_size(b, 3, factors->max_rank, "the rank of the first slice"));
    MOELORA_TRY(check_extent(a, 3, weights->k, k_name));
    MOELORA_TRY(check_extent(b, 2, factors->slice_n, slice_name));
  }
  return MOELORA_OK;
}

/* Both or neither: a row has an adapter only where a mapping and factors meet. */
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
  routes->adapter_enabled = NULL;
}

static moelora_status check_padded_rows(const moelora_routes *routes) {
  int64_t rows = routes->num_rows;
  int64_t touched = rows < routes->num_experts ? rows : routes->num_experts;
  MOELORA_REQUIRE(rows + touched * (MAX_BLOCK_ROWS - 1) <= INT32_MAX,
                  "topk_ids has %lld rows (M * top_k), too many for row numbers of 32 bits after "
                  "padding by expert",
                  (long long)rows);
  return MOELORA_OK;
}

/* ---- one projection ---- */

moelora_status moelora_check_gemm(const moelora_gemm_args *args, moelora_gemm_problem *problem) {
  *problem = (moelora_gemm_problem){.mul_routed_weight = args->mul_routed_weight};
  const projection_names names = {"x", "w", "w.size(0)", "bias", "lora_a", "lora_b"};
  const moelora_arg x = MOELORA_ARG("x", &args->x), w = MOELORA_ARG("w", &args->w);
  const moelora_arg out = MOELORA_ARG("out", &args->out), bias = MOELORA_ARG("bias", &args->bias);
  moelora_routes *routes = &problem->routes;
  moelora_weights *weights = &problem->w;

  MOELORA_TRY(moelora_check_view(x, 2, "[M, K] or [M * top_k, K]"));
  MOELORA_TRY(moelora_check_compute_dtype(x));
  MOELORA_TRY(moelora_check_rows(x));
  MOELORA_TRY(check_weights(w, weights, &routes->num_experts));
  const extent k_name = {"w", 2, weights->packed, 1};
  const extent n_name = {"w", 1, weights->packed, 1};
  MOELORA_TRY(moelora_check_dtype(w, args->x.dtype, "x"));
  MOELORA_TRY(check_extent(x, 1, weights->k, k_name));
  MOELORA_TRY(check_bias(bias, &args->w, "w", routes->num_experts, weights));

  MOELORA_TRY(moelora_check_routing(&args->routing, args->mul_routed_weight, routes));
  MOELORA_TRY(check_padded_rows(routes));
  int64_t x_rows = args->x.size[0];
  MOELORA_REQUIRE(
      x_rows == routes->num_tokens || x_rows == routes->num_rows,
      "x.size(0) is %lld, expected topk_ids.size(0), which is %lld, or M * top_k, which "
      "is %lld",
      (long long)x_rows, (long long)routes->num_tokens, (long long)routes->num_rows);

  int64_t max_loras = -1;
  const char *source = "lora_a[0].size(0)";
  MOELORA_TRY(
      check_lora(&args->lora, &names, &args->w, weights, &max_loras, source, &problem->lora));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, max_loras, source, routes));
  drop_unused_adapters(routes, &problem->lora, NULL);

  MOELORA_TRY(moelora_check_view(out, 3, "[M, top_k, N]"));
  MOELORA_TRY(moelora_check_dtype(out, args->x.dtype, "x"));
  MOELORA_TRY(moelora_check_size(out, 0, routes->num_tokens, "topk_ids.size(0)"));
  MOELORA_TRY(moelora_check_size(out, 1, routes->top_k, "topk_ids.size(1)"));
  MOELORA_TRY(check_extent(out, 2, weights->n, n_name));
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  const moelora_arg inputs[] = {x, w, bias};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->lora, names.lora_a, names.lora_b));
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

/* A number that the activation takes, or its own; `wanted` says which take one. */
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

static moelora_status check_activation(const moelora_experts_args *args,
                                       moelora_activation_problem *problem) {
  const moelora_activation kind = args->activation;
  MOELORA_REQUIRE(kind >= MOELORA_SILU && kind <= MOELORA_SWIGLUOAI_UNINTERLEAVE,
                  "activation is %d, expected a moelora_activation", (int)kind);
  const bool oai = kind == MOELORA_SWIGLUOAI || kind == MOELORA_SWIGLUOAI_UNINTERLEAVE;
  problem->kind = kind;
  MOELORA_TRY(check_number("activation_alpha", args->activation_alpha,
                           "swigluoai and swigluoai_uninterleave have one", oai, oai ? 1.702f : 1.f,
                           &problem->alpha));
  problem->alpha = fminf(problem->alpha, FLT_MAX / 2); /* room for the log2(e) of a kernel's exp2 */
  return check_number("activation_limit", args->activation_limit,
                      "silu, swigluoai and swigluoai_uninterleave have one",
                      oai || kind == MOELORA_SILU, oai ? 7.f : INFINITY, &problem->limit);
}

static moelora_status check_layer_shapes(const moelora_experts_args *args,
                                         moelora_experts_problem *problem) {
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg w13 = MOELORA_ARG("w13", &args->w13), w2 = MOELORA_ARG("w2", &args->w2);
  int32_t experts2 = 0;
  MOELORA_TRY(moelora_check_view(x, 2, "[M, K]"));
  MOELORA_TRY(moelora_check_compute_dtype(x));
  MOELORA_TRY(moelora_check_rows(x));
  MOELORA_TRY(check_weights(w13, &problem->w13, &problem->routes.num_experts));
  MOELORA_TRY(check_weights(w2, &problem->w2, &experts2));
  MOELORA_TRY(moelora_check_dtype(w13, args->hidden_states.dtype, "hidden_states"));
  MOELORA_TRY(moelora_check_dtype(w2, args->hidden_states.dtype, "hidden_states"));

  const bool packed13 = problem->w13.packed, packed2 = problem->w2.packed;
  const extent k13 = {"w13", 2, packed13, 1};
  const extent n13 = {"w13", 1, packed13, 1};
  const extent n2 = {"w2", 1, packed2, 1};
  const extent k2 = {"w2", 2, packed2, 1};
  MOELORA_TRY(check_extent(x, 1, problem->w13.k, k13));
  MOELORA_TRY(moelora_check_size(w2, 0, problem->routes.num_experts, "w13.size(0)"));
  MOELORA_REQUIRE(problem->w2.n == problem->w13.k,
                  "%s is %lld, %s is %lld: both are the hidden size", name_of(n2).text,
                  (long long)problem->w2.n, name_of(k13).text, (long long)problem->w13.k);

  MOELORA_TRY(check_activation(args, &problem->activation));
  bool gated = moelora_is_gated(args->activation);
  int64_t want = problem->w2.k * (gated ? 2 : 1);
  MOELORA_REQUIRE(problem->w13.n == want,
                  "%s is %lld, expected %lld: %s%s, as the activation is %sgated",
                  name_of(n13).text, (long long)problem->w13.n, (long long)want,
                  gated ? "2 * " : "", name_of(k2).text, gated ? "" : "not ");
  problem->hidden = problem->w13.k;
  problem->intermediate = problem->w2.k;
  return MOELORA_OK;
}

static moelora_status check_layer_adapters(const moelora_experts_args *args,
                                           const projection_names *names13,
                                           const projection_names *names2,
                                           moelora_experts_problem *problem) {
  int32_t most = moelora_is_gated(args->activation) ? 2 : 1;
  MOELORA_REQUIRE(args->w13_lora.num_slices <= most,
                  "w13_lora_a has %d slices, expected at most %d: one for all rows of w13%s",
                  args->w13_lora.num_slices, most, most == 2 ? ", or gate and up" : "");
  MOELORA_REQUIRE(args->w2_lora.num_slices <= 1, "w2_lora_a has %d slices, expected at most 1",
                  args->w2_lora.num_slices);
  int64_t max_loras = -1;
  const char *source = args->w13_lora.num_slices ? "w13_lora_a[0].size(0)" : "w2_lora_a[0].size(0)";
  MOELORA_TRY(check_lora(&args->w13_lora, names13, &args->w13, &problem->w13, &max_loras, source,
                         &problem->w13_lora));
  MOELORA_TRY(check_lora(&args->w2_lora, names2, &args->w2, &problem->w2, &max_loras, source,
                         &problem->w2_lora));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, max_loras, source, &problem->routes));
  drop_unused_adapters(&problem->routes, &problem->w13_lora, &problem->w2_lora);
  return MOELORA_OK;
}

moelora_status moelora_check_experts(const moelora_experts_args *args,
                                     moelora_experts_problem *problem) {
  *problem = (moelora_experts_problem){
      .apply_router_weight_on_input = args->apply_router_weight_on_input,
  };
  const projection_names names13 = {"hidden_states", "w13",        "w13.size(0)",
                                    "w13_bias",      "w13_lora_a", "w13_lora_b"};
  const projection_names names2 = {"", "w2", "w2.size(0)", "w2_bias", "w2_lora_a", "w2_lora_b"};
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg bias13 = MOELORA_ARG("w13_bias", &args->w13_bias);
  const moelora_arg bias2 = MOELORA_ARG("w2_bias", &args->w2_bias);
  const moelora_arg out = MOELORA_ARG("out", &args->out);
  moelora_routes *routes = &problem->routes;

  MOELORA_TRY(check_layer_shapes(args, problem));
  MOELORA_TRY(check_bias(bias13, &args->w13, "w13", routes->num_experts, &problem->w13));
  MOELORA_TRY(check_bias(bias2, &args->w2, "w2", routes->num_experts, &problem->w2));
  MOELORA_TRY(moelora_check_routing(&args->routing, true, routes));
  MOELORA_TRY(check_padded_rows(routes));
  MOELORA_TRY(moelora_check_size(x, 0, routes->num_tokens, "topk_ids.size(0)"));
  MOELORA_REQUIRE(!args->apply_router_weight_on_input || routes->top_k == 1,
                  "topk_ids.size(1) is %d, expected 1 with apply_router_weight_on_input",
                  routes->top_k);
  MOELORA_TRY(check_layer_adapters(args, &names13, &names2, problem));

  MOELORA_TRY(moelora_check_view(out, 2, "[M, K]"));
  MOELORA_TRY(moelora_check_dtype(out, args->hidden_states.dtype, "hidden_states"));
  MOELORA_TRY(moelora_check_size(out, 0, routes->num_tokens, "topk_ids.size(0)"));
  MOELORA_TRY(moelora_check_size(out, 1, problem->hidden, "hidden_states.size(1)"));
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  if (!moelora_same_view(&args->out, &args->hidden_states))
    MOELORA_TRY(moelora_check_disjoint(out, x));
  const moelora_arg inputs[] = {MOELORA_ARG("w13", &args->w13), MOELORA_ARG("w2", &args->w2),
                                bias13, bias2};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->w13_lora, names13.lora_a, names13.lora_b));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->w2_lora, names2.lora_a, names2.lora_b));
  MOELORA_TRY(moelora_check_disjoint_routes(out, &args->routing, &args->adapters));

  problem->dtype = args->hidden_states.dtype;
  problem->x = args->hidden_states.data;
  problem->x_stride = moelora_stride(&args->hidden_states, 0);
  problem->out = args->out.data;
  problem->out_stride = moelora_stride(&args->out, 0);
  return MOELORA_OK;
}

/* ---- packing ---- */

moelora_status moelora_check_pack(const moelora_tensor *w, const moelora_tensor *out,
                                  moelora_pack_problem *problem) {
  const moelora_arg source = MOELORA_ARG("w", w), target = MOELORA_ARG("out", out);
  int32_t num_experts = 0;
  *problem = (moelora_pack_problem){0};
  MOELORA_TRY(moelora_check_view(source, 3, "[E, N, K]"));
  MOELORA_TRY(check_weights(source, &problem->w, &num_experts));
  for (int32_t dim = 1; dim < 3; dim++)
    MOELORA_REQUIRE(w->size[dim] % MOELORA_PACK == 0,
                    "w.size(%d) is %lld, expected a multiple of %d", dim, (long long)w->size[dim],
                    MOELORA_PACK);
  MOELORA_TRY(moelora_check_view(target, 5, "[E, N/64, K/64, 64, 64]"));
  MOELORA_TRY(moelora_check_dtype(target, w->dtype, "w"));
  MOELORA_TRY(moelora_check_size(target, 0, w->size[0], "w.size(0)"));
  MOELORA_TRY(moelora_check_size(target, 1, w->size[1] / MOELORA_PACK, "w.size(1) / 64"));
  MOELORA_TRY(moelora_check_size(target, 2, w->size[2] / MOELORA_PACK, "w.size(2) / 64"));
  for (int32_t dim = 3; dim < 5; dim++)
    MOELORA_TRY(moelora_check_size(target, dim, MOELORA_PACK, "the side of a tile"));
  MOELORA_TRY(moelora_check_contiguous(target));
  MOELORA_TRY(moelora_check_disjoint(target, source));
  problem->num_experts = num_experts;
  problem->element_bytes = (int32_t)moelora_dtype_bytes(w->dtype);
  problem->out = out->data;
  return MOELORA_OK;
}
