/* Steps that the backward passes of a layer and of a projection share. */
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/backward/products.h"
#include "cuda/layer/alignment.cuh"

namespace {

inline bool has_adapters(const moelora_routes *routes, const moelora_factors *lora) {
  return routes->token_lora_mapping.data && lora->num_slices > 0;
}

/* The gradients of a call that sum over rows: of factors, and of biases. */
struct SummedGradients {
  const moelora_gradient *factors[2 * MOELORA_MAX_SLICES], *biases[2];
  int num_factors, num_biases;
  int32_t rank_columns; // maximum over the projections
  moelora_gradient_pairs pairs;

  void add_ranks(const moelora_factors *lora) {
    const int64_t columns = lora->num_slices * moelora_padded_rank(lora->max_rank);
    rank_columns = columns > rank_columns ? (int32_t)columns : rank_columns;
  }
  void add_factors(const moelora_gradient *of, int count) {
    for (int i = 0; i < count; i++)
      if (of[i].data)
        factors[num_factors++] = of + i;
  }
  void add_bias(const moelora_gradient *of) {
    if (of->data)
      biases[num_biases++] = of;
  }
  /* Returns whether a factor that experts share has a gradient. */
  bool any_shared(const moelora_routes *routes) const {
    bool shared = false;
    for (int i = 0; i < num_factors; i++)
      shared =
          shared || (factors[i]->experts == 1 && !factors[i]->sparse && routes->num_experts > 1);
    return shared;
  }
  moelora_gradient_uses uses(const moelora_routes *routes, bool weighted, bool accumulate) const {
    bool few = true;
    for (int i = 0; i < num_factors; i++)
      few = few && moelora_is_few_gradient(factors[i], accumulate);
    return {any_shared(routes), weighted,         !accumulate,
            pairs.index,        pairs.num_sparse, few ? MOELORA_GRADIENT_FEW(rank_columns) : 0};
  }
  /* Zeroes the gradients to which no row contributes: those of factors if there are no adapters,
   * all if there are no rows. */
  moelora_status zero(const moelora_routes *routes, const moelora_exec *exec) const {
    if (routes->num_rows == 0 || !routes->token_lora_mapping.data)
      for (int i = 0; i < num_factors; i++)
        MOELORA_TRY(moelora_cuda_zero_gradient(factors[i], pairs.index, pairs.count, exec));
    if (routes->num_rows == 0)
      for (int i = 0; i < num_biases; i++)
        MOELORA_TRY(moelora_cuda_zero_gradient(biases[i], nullptr, 0, exec));
    return MOELORA_OK;
  }
};

/* Adds a product, if one of its gradients is requested. */
inline void add_product(moelora_gradients_launch *g, const moelora_gradient_product &product) {
  if (product.gradient[0].data || product.gradient[1].data)
    g->product[g->count++] = product;
}

/* Describes a product with `w`: its schedule, weights and adapters. */
inline moelora_back_launch back_product(const Alignment *a, const moelora_weights *w,
                                        const moelora_factors *lora,
                                        const moelora_back_product_plan *plan) {
  moelora_back_launch g = {};
  describe_product(a, &a->routes, w, lora, plan, &g);
  g.tokens.k = w->data ? (int32_t)w->n : 0; // a delta has no weights, only factors
  g.weights.w.bias = nullptr;
  g.weights.n_out = (int32_t)w->k;
  g.epilogue.activation.kind = MOELORA_SILU; // no activation, since the product is not gated
  if (g.schedule.blocks.packed_ranks)
    g.weights.factors_vectors = plan->a_vectors;
  return g;
}

/* Lists the rows of gradients; the shrinks use the list's segments if the sort has listed none. */
inline moelora_status list_gradient_rows(const moelora_gradient_rows *list, Alignment *a,
                                         const moelora_exec *exec) {
  MOELORA_TRY(moelora_cuda_list_gradient_rows(list, &a->routes, &a->blocks, exec));
  if (!a->blocks.segments)
    a->blocks.segments = list->segments;
  return MOELORA_OK;
}

/* Computes yb, unless it is NULL. */
inline moelora_status back_shrink(moelora_back_launch *g, const moelora_back_product_plan *plan,
                                  const moelora_routes *routes, void *yb,
                                  const moelora_exec *exec) {
  if (!yb)
    return MOELORA_OK;
  g->adapters.xa = yb;
  return moelora_cuda_back_shrink(g, routes->lora_scalings, yb, plan->shrinks_vectors,
                                  plan->variant->dtype, exec);
}

inline moelora_status multiply(const moelora_back_launch *g, const moelora_back_product_plan *plan,
                               const moelora_exec *exec) {
  moelora_back_launcher *const launch = moelora_cuda_back_launchers[plan->variant->id];
  return launch ? launch(g, plan, exec) : moelora_no_kernel(plan->variant->name, "is not built");
}

/* Returns a description of dt without terms, which the caller adds. */
inline moelora_weight_gradients gradients_of_weights(const Alignment *a, float *out,
                                                     const int64_t out_stride[2]) {
  moelora_weight_gradients s = {};
  s.experts = (const int32_t *)a->routes.topk_ids.data;
  s.positions = a->blocks.positions;
  s.num_rows = a->routes.num_rows;
  s.top_k = a->routes.top_k;
  s.out = out;
  s.out_stride[0] = out_stride[0];
  s.out_stride[1] = out_stride[1];
  return s;
}

} // namespace
