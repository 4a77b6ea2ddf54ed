/* Valid arguments of every operator, with everything that it can take: what refusals start from. */
#pragma once

#include "cases.h"

/* Each row starts from valid arguments `GOOD`, changes them, and is refused with a message; needs
 * `a` and run(&a). */
#define REFUSED(GOOD, MESSAGE, ...)                                                                \
  do {                                                                                             \
    a = GOOD;                                                                                      \
    __VA_ARGS__;                                                                                   \
    CHECK_INVALID(run(&a), MESSAGE);                                                               \
  } while (0)

enum { VALID_RANK = 3, VALID_BLOCK = 4 };

static inline moelora_routing valid_routing(sizes s) {
  return (moelora_routing){
      .topk_ids = random_ids(MOELORA_I32, 0, s.experts - 1, SIZES(s.tokens, s.top_k)),
      .topk_weights = random_tensor(MOELORA_F32, 1, SIZES(s.tokens, s.top_k)),
      .expert_map = random_ids(MOELORA_I32, 0, s.experts - 1, SIZES(s.experts)),
  };
}

static inline moelora_adapters valid_adapters(sizes s) {
  return (moelora_adapters){
      .token_lora_mapping = random_ids(MOELORA_I32, -1, s.slots - 1, SIZES(s.tokens)),
      .lora_ranks = random_ids(MOELORA_I32, 0, VALID_RANK, SIZES(s.slots)),
      .lora_scalings = random_tensor(MOELORA_F32, 1, SIZES(s.slots)),
      .adapter_enabled = random_ids(MOELORA_BOOL, 0, 1, SIZES(s.slots + 1)),
  };
}

static inline moelora_lora valid_lora(sizes s, moelora_dtype dtype, int32_t slices, int64_t n,
                                      int64_t k) {
  moelora_lora lora = {.num_slices = slices};
  for (int32_t i = 0; i < slices; i++) {
    lora.a[i] = random_tensor(dtype, 1, SIZES(s.slots, s.experts, VALID_RANK, k));
    lora.b[i] = random_tensor(dtype, 1, SIZES(s.slots, s.experts, n / slices, VALID_RANK));
  }
  return lora;
}

static inline moelora_gemm_args valid_gemm(sizes s) {
  return (moelora_gemm_args){
      .x = random_tensor(MOELORA_F32, 1, SIZES(s.tokens, s.hidden)),
      .w = random_tensor(MOELORA_F32, 1, SIZES(s.experts, s.inner, s.hidden)),
      .bias = random_tensor(MOELORA_F32, 1, SIZES(s.experts, s.inner)),
      .routing = valid_routing(s),
      .adapters = valid_adapters(s),
      .lora = valid_lora(s, MOELORA_F32, 2, s.inner, s.hidden),
      .mul_routed_weight = true,
      .out = new_tensor(MOELORA_F32, SIZES(s.tokens, s.top_k, s.inner)),
  };
}

static inline moelora_experts_args valid_experts(sizes s, moelora_dtype dtype) {
  return (moelora_experts_args){
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .w13 = random_tensor(dtype, 1, SIZES(s.experts, 2 * s.inner, s.hidden)),
      .w2 = random_tensor(dtype, 1, SIZES(s.experts, s.hidden, s.inner)),
      .w13_bias = random_tensor(dtype, 1, SIZES(s.experts, 2 * s.inner)),
      .w2_bias = random_tensor(dtype, 1, SIZES(s.experts, s.hidden)),
      .routing = valid_routing(s),
      .adapters = valid_adapters(s),
      .w13_one_a = random_ids(MOELORA_I32, 0, 1, SIZES(s.slots)),
      .w13_lora = valid_lora(s, dtype, 2, 2 * s.inner, s.hidden),
      .w2_lora = valid_lora(s, dtype, 1, s.hidden, s.inner),
      .out = new_tensor(dtype, SIZES(s.tokens, s.hidden)),
  };
}

/* Without an expert_map. */
static inline moelora_align_args valid_align(sizes s, moelora_align_mode mode) {
  moelora_align_args a = {
      .mode = mode,
      .num_experts = (int32_t)s.experts,
      .block_size = VALID_BLOCK,
      .max_loras = (int32_t)s.slots,
      .routing = valid_routing(s),
      .adapters = valid_adapters(s),
  };
  a.routing.expert_map = absent;
  new_alignment(&a, s.tokens * s.top_k);
  return a;
}

/* By routing; in two slices. */
static inline moelora_delta_args valid_delta(sizes s) {
  return (moelora_delta_args){
      .num_experts = (int32_t)s.experts,
      .x = random_tensor(MOELORA_F32, 1, SIZES(s.tokens, s.hidden)),
      .routing = valid_routing(s),
      .adapters = valid_adapters(s),
      .lora = valid_lora(s, MOELORA_F32, 2, s.inner, s.hidden),
      .out = new_tensor(MOELORA_F32, SIZES(s.tokens, s.top_k, s.inner)),
  };
}
