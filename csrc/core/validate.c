/* Checks of the operators that compute: weights, adapters' factors, activations, outputs. */
#include "core/check.h"

#include <float.h>
#include <math.h>

/* A layer's alignment pads each touched expert to blocks of at most this many rows, and row numbers
 * after padding are int32. */
enum { MAX_BLOCK_ROWS = 256 };

static moelora_status check_at_least_one(moelora_arg arg) {
  for (int32_t i = 0; i < arg.tensor->ndim; i++)
    MOELORA_REQUIRE(arg.tensor->size[i] >= 1, "%s.size(%d) is 0, expected at least 1", arg.name, i);
  return MOELORA_OK;
}

/* A weight's N or K: a dimension, in tiles times 64. */
static moelora_source extent_of(moelora_arg w, int32_t dim) {
  moelora_source source = moelora_size_of(w, dim);
  source.scale = w.tensor->ndim == 5 ? " * 64" : NULL;
  return source;
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
      MOELORA_TRY(moelora_check_size(arg, dim, MOELORA_PACK, moelora_words("the side of a tile")));
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

static moelora_status check_bias(moelora_arg arg, moelora_arg w, int64_t num_experts,
                                 moelora_weights *weights) {
  if (moelora_is_absent(arg.tensor))
    return MOELORA_OK;
  MOELORA_TRY(moelora_check_view(arg, 2, "[E, N]"));
  MOELORA_TRY(moelora_check_dtype(arg, w.tensor->dtype, w.name));
  MOELORA_TRY(moelora_check_size(arg, 0, num_experts, moelora_size_of(w, 0)));
  MOELORA_TRY(moelora_check_size(arg, 1, weights->n, extent_of(w, 1)));
  MOELORA_TRY(moelora_check_rows(arg));
  weights->bias = arg.tensor->data;
  weights->bias_stride_e = moelora_stride(arg.tensor, 0);
  return MOELORA_OK;
}

/* The factors of one projection against its weights. `max_loras` < 0 is not known yet; the first
 * factor then sets it and names itself as `source`. */
static moelora_status check_lora(const moelora_lora *lora, const char *name_a, const char *name_b,
                                 moelora_arg w, const moelora_weights *weights, int64_t *max_loras,
                                 moelora_source source, moelora_factors *factors) {
  const moelora_arg first = MOELORA_ARG(name_a, &lora->a[0]);
  int32_t slices = lora->num_slices;
  MOELORA_REQUIRE(slices >= 0 && slices <= MOELORA_MAX_SLICES, "%s has %d slices, expected 0 to %d",
                  first.name, slices, MOELORA_MAX_SLICES);
  if (slices == 0)
    return MOELORA_OK;
  const moelora_source n_source = extent_of(w, 1), num_experts = moelora_size_of(w, 0);
  const moelora_source rank = moelora_words("the rank of the first slice");
  MOELORA_REQUIRE(weights->n % slices == 0,
                  "%s is %lld, expected a multiple of the %d slices of %s",
                  moelora_label_source(n_source).text, (long long)weights->n, slices, first.name);
  factors->num_slices = slices;
  factors->slice_n = weights->n / slices;
  moelora_source slice_source = n_source;
  slice_source.slices = slices;
  const moelora_dtype dtype = w.tensor->dtype;
  const int64_t experts = w.tensor->size[0];
  for (int32_t i = 0; i < slices; i++) {
    const moelora_arg a = moelora_entry(name_a, i, &lora->a[i]);
    const moelora_arg b = moelora_entry(name_b, i, &lora->b[i]);
    MOELORA_TRY(moelora_check_factor(a, dtype, w.name, experts, num_experts,
                                     "[max_loras, E or 1, R, K]", &factors->a[i]));
    MOELORA_TRY(moelora_check_factor(b, dtype, w.name, experts, num_experts,
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
    MOELORA_TRY(moelora_check_size(a, 3, weights->k, extent_of(w, 2)));
    MOELORA_TRY(moelora_check_size(b, 2, factors->slice_n, slice_source));
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
  MOELORA_TRY(check_weights(w, weights, &routes->num_experts));
  MOELORA_TRY(moelora_check_dtype(w, args->x.dtype, x.name));
  MOELORA_TRY(moelora_check_size(x, 1, weights->k, extent_of(w, 2)));
  MOELORA_TRY(check_bias(bias, w, routes->num_experts, weights));

  MOELORA_TRY(moelora_check_routing(&args->routing, args->mul_routed_weight, routes));
  MOELORA_TRY(check_padded_rows(topk_ids, routes));
  int64_t x_rows = args->x.size[0];
  MOELORA_REQUIRE(
      x_rows == routes->num_tokens || x_rows == routes->num_rows,
      "%s.size(0) is %lld, expected %s.size(0), which is %lld, or M * top_k, which is %lld", x.name,
      (long long)x_rows, topk_ids.name, (long long)routes->num_tokens, (long long)routes->num_rows);

  int64_t max_loras = -1;
  const moelora_source source = moelora_size_of(moelora_entry("lora_a", 0, &args->lora.a[0]), 0);
  MOELORA_TRY(
      check_lora(&args->lora, "lora_a", "lora_b", w, weights, &max_loras, source, &problem->lora));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, topk_ids.tensor, max_loras, source, routes));
  drop_unused_adapters(routes, &problem->lora, NULL);

  MOELORA_TRY(moelora_check_view(out, 3, "[M, top_k, N]"));
  MOELORA_TRY(moelora_check_dtype(out, args->x.dtype, x.name));
  MOELORA_TRY(moelora_check_size(out, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_TRY(moelora_check_size(out, 1, routes->top_k, moelora_size_of(topk_ids, 1)));
  MOELORA_TRY(moelora_check_size(out, 2, weights->n, extent_of(w, 1)));
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
  MOELORA_TRY(moelora_check_dtype(w13, args->hidden_states.dtype, x.name));
  MOELORA_TRY(moelora_check_dtype(w2, args->hidden_states.dtype, x.name));

  const moelora_source k13 = extent_of(w13, 2), n13 = extent_of(w13, 1);
  const moelora_source k2 = extent_of(w2, 2), n2 = extent_of(w2, 1);
  MOELORA_TRY(moelora_check_size(x, 1, problem->w13.k, k13));
  MOELORA_TRY(moelora_check_size(w2, 0, problem->routes.num_experts, moelora_size_of(w13, 0)));
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
                                           moelora_experts_problem *problem) {
  const moelora_arg w13 = MOELORA_ARG("w13", &args->w13), w2 = MOELORA_ARG("w2", &args->w2);
  const moelora_arg a13 = moelora_entry("w13_lora_a", 0, &args->w13_lora.a[0]);
  const moelora_arg a2 = moelora_entry("w2_lora_a", 0, &args->w2_lora.a[0]);
  int32_t most = moelora_is_gated(args->activation) ? 2 : 1;
  MOELORA_REQUIRE(args->w13_lora.num_slices <= most,
                  "%s has %d slices, expected at most %d: one for all rows of %s%s", a13.name,
                  args->w13_lora.num_slices, most, w13.name, most == 2 ? ", or gate and up" : "");
  MOELORA_REQUIRE(args->w2_lora.num_slices <= 1, "%s has %d slices, expected at most 1", a2.name,
                  args->w2_lora.num_slices);
  int64_t max_loras = -1;
  const moelora_source source = moelora_size_of(args->w13_lora.num_slices ? a13 : a2, 0);
  MOELORA_TRY(check_lora(&args->w13_lora, "w13_lora_a", "w13_lora_b", w13, &problem->w13,
                         &max_loras, source, &problem->w13_lora));
  MOELORA_TRY(check_lora(&args->w2_lora, "w2_lora_a", "w2_lora_b", w2, &problem->w2, &max_loras,
                         source, &problem->w2_lora));
  MOELORA_TRY(moelora_check_adapters(&args->adapters, &args->routing.topk_ids, max_loras, source,
                                     &problem->routes));
  drop_unused_adapters(&problem->routes, &problem->w13_lora, &problem->w2_lora);
  return MOELORA_OK;
}

moelora_status moelora_check_experts(const moelora_experts_args *args,
                                     moelora_experts_problem *problem) {
  *problem = (moelora_experts_problem){
      .apply_router_weight_on_input = args->apply_router_weight_on_input,
  };
  const moelora_arg x = MOELORA_ARG("hidden_states", &args->hidden_states);
  const moelora_arg w13 = MOELORA_ARG("w13", &args->w13), w2 = MOELORA_ARG("w2", &args->w2);
  const moelora_arg topk_ids = MOELORA_ARG("topk_ids", &args->routing.topk_ids);
  const moelora_arg bias13 = MOELORA_ARG("w13_bias", &args->w13_bias);
  const moelora_arg bias2 = MOELORA_ARG("w2_bias", &args->w2_bias);
  const moelora_arg out = MOELORA_ARG("out", &args->out);
  moelora_routes *routes = &problem->routes;

  MOELORA_TRY(check_layer_shapes(args, problem));
  MOELORA_TRY(check_bias(bias13, w13, routes->num_experts, &problem->w13));
  MOELORA_TRY(check_bias(bias2, w2, routes->num_experts, &problem->w2));
  MOELORA_TRY(moelora_check_routing(&args->routing, true, routes));
  MOELORA_TRY(check_padded_rows(topk_ids, routes));
  MOELORA_TRY(moelora_check_size(x, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_REQUIRE(!args->apply_router_weight_on_input || routes->top_k == 1,
                  "%s.size(1) is %d, expected 1 with apply_router_weight_on_input", topk_ids.name,
                  routes->top_k);
  MOELORA_TRY(check_layer_adapters(args, problem));

  MOELORA_TRY(moelora_check_view(out, 2, "[M, K]"));
  MOELORA_TRY(moelora_check_dtype(out, args->hidden_states.dtype, x.name));
  MOELORA_TRY(moelora_check_size(out, 0, routes->num_tokens, moelora_size_of(topk_ids, 0)));
  MOELORA_TRY(moelora_check_size(out, 1, problem->hidden, moelora_size_of(x, 1)));
  MOELORA_TRY(moelora_check_rows(out));
  MOELORA_TRY(moelora_check_distinct(out));
  if (!moelora_same_view(&args->out, &args->hidden_states))
    MOELORA_TRY(moelora_check_disjoint(out, x));
  const moelora_arg inputs[] = {w13, w2, bias13, bias2};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->w13_lora, "w13_lora_a", "w13_lora_b"));
  MOELORA_TRY(moelora_check_disjoint_lora(out, &args->w2_lora, "w2_lora_a", "w2_lora_b"));
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
                    "%s.size(%d) is %lld, expected a multiple of %d", source.name, dim,
                    (long long)w->size[dim], MOELORA_PACK);
  MOELORA_TRY(moelora_check_view(target, 5, "[E, N/64, K/64, 64, 64]"));
  MOELORA_TRY(moelora_check_dtype(target, w->dtype, source.name));
  MOELORA_TRY(moelora_check_size(target, 0, w->size[0], moelora_size_of(source, 0)));
  for (int32_t dim = 1; dim < 3; dim++) {
    moelora_source tiles = moelora_size_of(source, dim);
    tiles.scale = " / 64";
    MOELORA_TRY(moelora_check_size(target, dim, w->size[dim] / MOELORA_PACK, tiles));
  }
  for (int32_t dim = 3; dim < 5; dim++)
    MOELORA_TRY(moelora_check_size(target, dim, MOELORA_PACK, moelora_words("the side of a tile")));
  MOELORA_TRY(moelora_check_contiguous(target));
  MOELORA_TRY(moelora_check_disjoint(target, source));
  problem->num_experts = num_experts;
  problem->element_bytes = (int32_t)moelora_dtype_bytes(w->dtype);
  problem->out = out->data;
  return MOELORA_OK;
}
