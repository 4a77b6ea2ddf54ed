/* The operators as plain loops over views: in double, or rounding like a chain of operators of one
 * dtype would (float32 sums, every result stored in the dtype). The difference bounds the error of
 * a kernel of that dtype. */
#pragma once

#include "harness.h"

static inline double at(const moelora_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l) {
  return read_value(t->data, t->dtype,
                    i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3]);
}

static inline double weight_at(const moelora_tensor *w, int64_t e, int64_t n, int64_t k) {
  if (w->ndim == 3)
    return at(w, e, n, k, 0);
  return read_value(w->data, w->dtype,
                    e * w->stride[0] + n / 64 * w->stride[1] + k / 64 * w->stride[2] +
                        n % 64 * w->stride[3] + k % 64);
}

static inline int64_t weight_rows(const moelora_tensor *w) {
  return w->size[1] * (w->ndim == 5 ? 64 : 1);
}

static inline int64_t weight_cols(const moelora_tensor *w) {
  return w->size[2] * (w->ndim == 5 ? 64 : 1);
}

/* Local expert of row (m, j), or -1. */
static inline int64_t expert_of(const moelora_routing *routing, int64_t num_experts, int64_t m,
                                int64_t j) {
  int64_t e = (int64_t)at(&routing->topk_ids, m, j, 0, 0);
  const moelora_tensor *map = &routing->expert_map;
  if (map->data)
    e = e >= 0 && e < map->size[0] ? (int64_t)at(map, e, 0, 0, 0) : -1;
  return e >= 0 && e < num_experts ? e : -1;
}

/* Adapter of token m among max_loras slots, or -1. */
static inline int64_t adapter_of(const moelora_adapters *adapters, int64_t max_loras, int64_t m) {
  if (!adapters->token_lora_mapping.data)
    return -1;
  int64_t l = (int64_t)at(&adapters->token_lora_mapping, m, 0, 0, 0);
  if (l < 0 || l >= max_loras)
    return -1;
  return adapters->adapter_enabled.data && at(&adapters->adapter_enabled, l, 0, 0, 0) == 0 ? -1 : l;
}

/* Rounding of the loops: none, or to a dtype after each operator, with float32 sums. */
typedef struct rounding {
  bool on;
  moelora_dtype dtype;
} rounding;

static inline double add(rounding r, double a, double b) {
  return r.on ? (float)a + (float)b : a + b;
}

static inline double store(rounding r, double x) {
  return r.on ? round_to(x, r.dtype) : x;
}

/* y = x w[e]^T + LoRA + bias for one row */
static inline void naive_row(const double *x, const moelora_tensor *w, const moelora_tensor *bias,
                             const moelora_lora *lora, const moelora_adapters *adapters, int64_t e,
                             int64_t l, rounding r, double *y) {
  int64_t n = weight_rows(w), depth = weight_cols(w);
  for (int64_t i = 0; i < n; i++) {
    double sum = 0;
    for (int64_t k = 0; k < depth; k++)
      sum = add(r, sum, x[k] * weight_at(w, e, i, k));
    y[i] = store(r, sum);
  }
  for (int32_t slice = 0; l >= 0 && slice < lora->num_slices; slice++) {
    const moelora_tensor *a = &lora->a[slice], *b = &lora->b[slice];
    int64_t rank = a->size[2], slice_n = b->size[2];
    if (adapters->lora_ranks.data && at(&adapters->lora_ranks, l, 0, 0, 0) < (double)rank)
      rank = (int64_t)at(&adapters->lora_ranks, l, 0, 0, 0);
    double scale = adapters->lora_scalings.data ? at(&adapters->lora_scalings, l, 0, 0, 0) : 1;
    int64_t ea = a->size[1] == 1 ? 0 : e, eb = b->size[1] == 1 ? 0 : e;
    double h[512];
    for (int64_t i = 0; i < rank; i++) {
      double sum = 0;
      for (int64_t k = 0; k < depth; k++)
        sum = add(r, sum, x[k] * at(a, l, ea, i, k));
      h[i] = store(r, scale * store(r, sum));
    }
    for (int64_t i = 0; i < slice_n; i++) {
      double sum = 0;
      for (int64_t k = 0; k < rank; k++)
        sum = add(r, sum, h[k] * at(b, l, eb, i, k));
      y[slice * slice_n + i] = store(r, y[slice * slice_n + i] + store(r, sum));
    }
  }
  for (int64_t i = 0; bias->data && i < n; i++)
    y[i] = store(r, y[i] + at(bias, e, i, 0, 0));
}

static inline int64_t slots_of(const moelora_lora *first, const moelora_lora *second) {
  return first->num_slices              ? first->a[0].size[0]
         : second && second->num_slices ? second->a[0].size[0]
                                        : 0;
}

/* out [P, N] */
static inline void naive_gemm(const moelora_gemm_args *args, rounding r, double *out) {
  int64_t top_k = args->routing.topk_ids.size[1], n = weight_rows(&args->w);
  int64_t num_tokens = args->routing.topk_ids.size[0], depth = weight_cols(&args->w);
  bool per_row = args->x.size[0] != num_tokens;
  double *x = malloc((size_t)depth * sizeof *x);
  for (int64_t p = 0; p < num_tokens * top_k; p++) {
    int64_t m = p / top_k, j = p % top_k;
    int64_t e = expert_of(&args->routing, args->w.size[0], m, j);
    memset(out + p * n, 0, (size_t)n * sizeof *out);
    if (e < 0)
      continue;
    for (int64_t k = 0; k < depth; k++)
      x[k] = at(&args->x, per_row ? p : m, k, 0, 0);
    naive_row(x, &args->w, &args->bias, &args->lora, &args->adapters, e,
              adapter_of(&args->adapters, slots_of(&args->lora, NULL), m), r, out + p * n);
    for (int64_t i = 0; args->mul_routed_weight && i < n; i++)
      out[p * n + i] = store(r, out[p * n + i] * at(&args->routing.topk_weights, m, j, 0, 0));
  }
  free(x);
}

static inline double naive_activation(moelora_activation activation, double alpha, double limit,
                                      double g, double u) {
  bool oai = activation == MOELORA_SWIGLUOAI || activation == MOELORA_SWIGLUOAI_UNINTERLEAVE;
  if (alpha == 0)
    alpha = oai ? 1.702 : 1;
  if (limit == 0)
    limit = oai || activation == MOELORA_SWIGLUSTEP ? 7 : INFINITY;
  switch (activation) {
  case MOELORA_SILU:
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g / (1 + exp(-g)) * u;
  case MOELORA_GELU:
    return 0.5 * g * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g))) * u;
  case MOELORA_SWIGLUOAI:
  case MOELORA_SWIGLUOAI_UNINTERLEAVE:
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g / (1 + exp(-alpha * g)) * (u + 1);
  case MOELORA_SITU:
    u = limit < INFINITY ? limit * tanh(u / limit) : u;
    return alpha * tanh(g / alpha) / (1 + exp(-g)) * u;
  case MOELORA_SWIGLUSTEP:
    u = u > limit ? limit : u < -limit ? -limit : u;
    return fmin(g / (1 + exp(-g)), limit) * u;
  default:
    return g > 0 ? g * g : 0;
  }
}

/* out [M, K] */
static inline void naive_experts(const moelora_experts_args *args, rounding r, double *out) {
  int64_t num_tokens = args->hidden_states.size[0], hidden = args->hidden_states.size[1];
  int64_t top_k = args->routing.topk_ids.size[1], n13 = weight_rows(&args->w13);
  int64_t inner = weight_cols(&args->w2);
  int64_t slots = slots_of(&args->w13_lora, &args->w2_lora);
  double *x = malloc((size_t)(2 * hidden + n13 + inner) * sizeof *x);
  double *y = x + hidden, *h = y + n13, *z = h + inner;
  for (int64_t m = 0; m < num_tokens; m++) {
    memset(out + m * hidden, 0, (size_t)hidden * sizeof *out);
    for (int64_t j = 0; j < top_k; j++) {
      int64_t e = expert_of(&args->routing, args->w13.size[0], m, j);
      if (e < 0)
        continue;
      int64_t l = adapter_of(&args->adapters, slots, m);
      double weight = at(&args->routing.topk_weights, m, j, 0, 0);
      bool early = args->apply_router_weight_on_input;
      for (int64_t k = 0; k < hidden; k++)
        x[k] = at(&args->hidden_states, m, k, 0, 0);
      for (int64_t k = 0; early && k < hidden; k++)
        x[k] = store(r, x[k] * weight);
      naive_row(x, &args->w13, &args->w13_bias, &args->w13_lora, &args->adapters, e, l, r, y);
      for (int64_t i = 0; i < inner; i++) {
        bool interleaved = args->activation == MOELORA_SWIGLUOAI;
        bool gated = args->activation != MOELORA_RELU2;
        h[i] = store(r, naive_activation(args->activation, args->activation_alpha,
                                         args->activation_limit, y[interleaved ? 2 * i : i],
                                         interleaved ? y[2 * i + 1]
                                         : gated     ? y[inner + i]
                                                     : 0));
      }
      naive_row(h, &args->w2, &args->w2_bias, &args->w2_lora, &args->adapters, e, l, r, z);
      for (int64_t k = 0; k < hidden; k++)
        out[m * hidden + k] = add(r, out[m * hidden + k], store(r, z[k] * (early ? 1 : weight)));
    }
    for (int64_t k = 0; k < hidden; k++)
      out[m * hidden + k] = store(r, out[m * hidden + k]);
  }
  free(x);
}

static inline double max_difference(const double *a, const double *b, int64_t count) {
  double most = 0;
  for (int64_t i = 0; i < count; i++)
    most = fmax(most, fabs(a[i] - b[i]));
  return most;
}
