/* Reading moelora_routes: the one place that decides which rows are skipped and which are base. */
#ifndef MOELORA_CPU_ROUTES_H
#define MOELORA_CPU_ROUTES_H

#include "core/backend.h"

/* Local expert of routed row p, or -1: the row is skipped. */
static inline int32_t moelora_expert_of(const moelora_routes *routes, int64_t p) {
  int64_t m = p / routes->top_k, j = p % routes->top_k;
  const moelora_ids *ids = &routes->topk_ids;
  int64_t expert = moelora_read_id(ids, m * ids->stride[0] + j * ids->stride[1]);
  if (routes->expert_map)
    expert = expert >= 0 && expert < routes->num_global ? routes->expert_map[expert] : -1;
  return expert >= 0 && expert < routes->num_experts ? (int32_t)expert : -1;
}

static inline bool moelora_is_enabled(const moelora_routes *routes, int32_t adapter) {
  const void *enabled = routes->adapter_enabled;
  if (!enabled)
    return true;
  return routes->adapter_enabled_bytes == 1 ? ((const uint8_t *)enabled)[adapter] != 0
                                            : ((const int32_t *)enabled)[adapter] != 0;
}

/* Adapter slot of token m, or -1: its rows are base rows. */
static inline int32_t moelora_adapter_of(const moelora_routes *routes, int64_t m) {
  const moelora_ids *ids = &routes->token_lora_mapping;
  if (!ids->data)
    return -1;
  int64_t adapter = moelora_read_id(ids, m * ids->stride[0]);
  if (adapter < 0 || adapter >= routes->max_loras)
    return -1;
  return moelora_is_enabled(routes, (int32_t)adapter) ? (int32_t)adapter : -1;
}

/* Rows of A and columns of B that take part: the true rank, at most the stack's. */
static inline int32_t moelora_rank_of(const moelora_routes *routes, int32_t adapter,
                                      int32_t max_rank) {
  int32_t rank = routes->lora_ranks ? routes->lora_ranks[adapter] : max_rank;
  return rank < 0 ? 0 : rank < max_rank ? rank : max_rank;
}

static inline float moelora_weight_of(const moelora_routes *routes, int64_t p) {
  const int64_t *stride = routes->topk_weights_stride;
  return routes->topk_weights[p / routes->top_k * stride[0] + p % routes->top_k * stride[1]];
}

#endif
