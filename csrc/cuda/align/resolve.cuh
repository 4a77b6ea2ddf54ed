/* Copies the caller's tables once, with ids resolved, for all later kernels of a call. Other
 * streams may change the originals during the call.
 *
 *   expert[p]    local expert of flat row p; -1: skipped
 *   adapter[m]   adapter of token m if it exists and is enabled; -1: none
 *   ranks[l], scalings[l], one_a[l], expert_map[g]   copied
 *   lists        lora_ids as adapters that exist and are enabled, -1: none; counts copied */
#pragma once

#include "cuda/launch/launch.h"
#include "cuda/launch/routes.cuh"

struct ResolveParams {
  moelora_routes from;
  moelora_list_blocks lists; // NULL lora_ids: none
  moelora_divisor top_k;
  int32_t *expert, *adapter, *ranks, *one_a, *expert_map; // NULL: not requested
  float *scalings;
  int32_t *list_ids, *list_counts;
};

/* Copies elements begin, begin + step, ..., reading each once; does nothing if `to` is NULL. */
template <class Value>
static __device__ __forceinline__ void copy_table(Value *to, const Value *from, int64_t count,
                                                  int64_t begin, int64_t step) {
  for (int64_t i = begin; to && i < count; i += step)
    to[i] = from[i];
}

static __device__ __forceinline__ int32_t resolve_expert(const ResolveParams &p, int64_t row) {
  const uint32_t token = divide((uint32_t)row, p.top_k);
  const uint32_t choice = (uint32_t)row - token * p.top_k.value;
  const moelora_ids &ids = p.from.topk_ids;
  int64_t id[1] = {load_id(ids, token * ids.stride[0] + choice * ids.stride[1])};
  local_experts(p.from, id);
  return p.expert[row] = (int32_t)id[0];
}

static __device__ __forceinline__ int32_t resolve_adapter(const ResolveParams &p, int64_t token) {
  int64_t id[1] = {load_id(p.from.token_lora_mapping, token * p.from.token_lora_mapping.stride[0])};
  active_adapters(p.from, id);
  return p.adapter[token] = (int32_t)id[0];
}

/* Copies elements begin, begin + step, ... of all tables except expert and adapter. */
static __device__ __forceinline__ void resolve_others(const ResolveParams &p, int64_t begin,
                                                      int64_t step) {
  const moelora_routes &from = p.from;
  copy_table(p.ranks, from.lora_ranks, from.max_loras, begin, step);
  copy_table(p.scalings, from.lora_scalings, from.max_loras, begin, step);
  copy_table(p.one_a, from.w13_one_a, from.max_loras, begin, step);
  copy_table(p.expert_map, from.expert_map, from.num_global, begin, step);
  copy_table(p.list_counts, (const int32_t *)p.lists.num_tokens_post_padded, from.max_loras, begin,
             step);
  for (int64_t i = begin; p.list_ids && i < p.lists.num_active; i += step) {
    int32_t id[1] = {p.lists.lora_ids[i]};
    active_adapters(from, id);
    p.list_ids[i] = id[0];
  }
}

/* Describes the copy of the caller's routes, and of lists unless NULL, to the workspace. */
ResolveParams describe_resolve(const moelora_routes *from, const moelora_routes *to,
                               const moelora_list_blocks *from_lists,
                               const moelora_list_blocks *to_lists);
