/* Device helpers that map ids to local experts and enabled adapters, and that address LoRA factors.
 * Functions of N ids issue all N loads before using one: for an id out of range, they load entry 0
 * and discard it. */
#pragma once

#include "core/backend.h"

__device__ __forceinline__ int64_t load_id(const moelora_ids &ids, int64_t at) {
  return ids.is_64 ? ((const int64_t *)ids.data)[at] : ((const int32_t *)ids.data)[at];
}

/* Returns whether 0 <= id < size, with one comparison. */
__device__ __forceinline__ bool inside(int32_t id, int32_t size) {
  return (uint32_t)id < (uint32_t)size;
}
__device__ __forceinline__ bool inside(int64_t id, int32_t size) {
  return (uint64_t)id < (uint64_t)size;
}

/* Maps ids to local experts, or -1. */
template <typename Id, int N>
__device__ __forceinline__ void local_experts(const moelora_routes &routes, Id (&id)[N]) {
  if (routes.expert_map) {
#pragma unroll
    for (int u = 0; u < N; u++) {
      const bool known = inside(id[u], routes.num_global);
      const int32_t expert = routes.expert_map[known ? id[u] : 0];
      id[u] = known ? expert : -1;
    }
  }
#pragma unroll
  for (int u = 0; u < N; u++)
    if (!inside(id[u], routes.num_experts))
      id[u] = -1;
}

/* Maps ids to adapters that exist and are enabled, or -1. */
template <typename Lora, int N>
__device__ __forceinline__ void active_adapters(const moelora_routes &routes, Lora (&id)[N]) {
#pragma unroll
  for (int u = 0; u < N; u++)
    if (!inside(id[u], routes.max_loras))
      id[u] = -1;
  if (!routes.adapter_enabled)
    return;
  bool on[N];
  if (routes.adapter_enabled_bytes == 1) {
#pragma unroll
    for (int u = 0; u < N; u++)
      on[u] = ((const uint8_t *)routes.adapter_enabled)[id[u] < 0 ? 0 : id[u]] != 0;
  } else {
#pragma unroll
    for (int u = 0; u < N; u++)
      on[u] = ((const int32_t *)routes.adapter_enabled)[id[u] < 0 ? 0 : id[u]] != 0;
  }
#pragma unroll
  for (int u = 0; u < N; u++)
    if (!on[u])
      id[u] = -1;
}

/* Returns an adapter's true rank, limited to max_rank; 0: it adds nothing. `adapter` must exist. */
__device__ __forceinline__ int true_rank(const moelora_routes &routes, int32_t adapter,
                                         int32_t max_rank) {
  return routes.lora_ranks ? max(0, min(routes.lora_ranks[adapter], max_rank)) : max_rank;
}

/* A flat row with its expert and its adapter; -1: none. */
struct RoutedRow {
  int32_t row = -1, expert = -1, adapter = -1;
};

/* Returns a flat row with its expert and adapter; `routes` must be resolved. */
__device__ __forceinline__ RoutedRow routed_row(const moelora_routes &routes, uint32_t row) {
  const uint32_t token = row / (uint32_t)routes.top_k;
  RoutedRow found;
  found.row = (int32_t)row;
  found.expert = ((const int32_t *)routes.topk_ids.data)[row];
  found.adapter = ((const int32_t *)routes.token_lora_mapping.data)[token];
  return found;
}

/* Returns the address of row i of a factor. */
template <class T>
__device__ __forceinline__ const T *factor_row(const moelora_factor &f, int64_t adapter,
                                               int64_t expert, int64_t i) {
  return (const T *)f.data + adapter * f.stride_l + expert * f.stride_e + i * f.stride_i;
}
