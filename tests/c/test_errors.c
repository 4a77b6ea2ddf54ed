/* Every refusal, with its message: each case starts from valid arguments and breaks one thing. */
#include "harness.h"

static const moelora_exec serial = {.device = MOELORA_CPU};

enum { M = 5, TOP_K = 2, E = 4, K = 16, I = 12, R = 3, SLOTS = 2, BLOCK = 4 };

#define INVALID(MESSAGE) CHECK_FAILS(run(&a), MOELORA_INVALID_ARGUMENT, MESSAGE)

/* ---- alignment ---- */

#define run(A) moelora_align(A, &exec)

static moelora_align_args align_args(moelora_align_mode mode) {
  int64_t blocks = moelora_align_max_blocks(mode, M * TOP_K, E, SLOTS, BLOCK);
  moelora_align_args a = {
      .mode = mode,
      .num_experts = E,
      .block_size = BLOCK,
      .max_loras = SLOTS,
      .routing = {.topk_ids = random_ids(MOELORA_I32, 0, E - 1, SIZES(M, TOP_K)),
                  .topk_weights = random_tensor(MOELORA_F32, 1, SIZES(M, TOP_K))},
      .adapters = {.token_lora_mapping = random_ids(MOELORA_I32, -1, SLOTS - 1, SIZES(M))},
      .sorted_token_ids = new_tensor(MOELORA_I32, SIZES(blocks * BLOCK)),
      .expert_ids = new_tensor(MOELORA_I32, SIZES(blocks)),
      .num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(1)),
  };
  if (mode == MOELORA_ALIGN_UNIFORM)
    a.lora_ids = new_tensor(MOELORA_I32, SIZES(blocks));
  if (mode == MOELORA_ALIGN_SEGMENTED)
    a.lora_ids = new_tensor(MOELORA_I32, SIZES(blocks * BLOCK));
  if (mode == MOELORA_ALIGN_SORTING)
    a.sorted_weights = new_tensor(MOELORA_F32, SIZES(blocks * BLOCK));
  return a;
}

static void test_align_errors(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 16);
  const moelora_align_args base = align_args(MOELORA_ALIGN_BASE);
  const moelora_align_args uniform = align_args(MOELORA_ALIGN_UNIFORM);
  const moelora_align_args segmented = align_args(MOELORA_ALIGN_SEGMENTED);
  const moelora_align_args sorting = align_args(MOELORA_ALIGN_SORTING);
  moelora_align_args a = base;
  CHECK_OK(moelora_align(&base, &exec));
  CHECK_OK(moelora_align(&uniform, &exec));
  CHECK_OK(moelora_align(&segmented, &exec));
  CHECK_OK(moelora_align(&sorting, &exec));

  a = base, a.mode = (moelora_align_mode)9;
  INVALID("mode is 9, expected a moelora_align_mode");
  a = base, a.num_experts = 0;
  INVALID("num_experts is 0, expected at least 1");
  a = base, a.block_size = 0;
  INVALID("block_size is 0, expected at least 1");
  a = uniform, a.max_loras = 0;
  INVALID("max_loras is 0, expected at least 1");
  /* What a mode does not read must not lower what it asks for, nor be looked at. */
  a = base, a.max_loras = -1, a.expert_ids.size[0] = 0;
  INVALID("expert_ids.size(0) is 0, expected at least 5 blocks");
  a = base, a.adapters.token_lora_mapping = base.expert_ids;
  a.adapters.token_lora_mapping.ndim = INT32_MAX;
  CHECK_OK(moelora_align(&a, &exec));

  a = base, a.routing.topk_ids = absent;
  INVALID("topk_ids is absent, expected a tensor [M, top_k]");
  a = base, a.routing.topk_ids.ndim = 1;
  INVALID("topk_ids has 1 dimensions, expected 2: [M, top_k]");
  a = base, a.routing.topk_ids.dtype = MOELORA_F32;
  INVALID("topk_ids has dtype float32, expected int32 or int64");
  a = base, a.routing.topk_ids.dtype = (moelora_dtype)17;
  INVALID("topk_ids has dtype 17, which is not a moelora_dtype");
  a = base, a.routing.topk_ids.size[1] = 0;
  INVALID("topk_ids.size(1) is 0, expected top_k of at least 1");
  a = base, a.routing.topk_ids.size[0] = -1;
  INVALID("topk_ids.size(0) is -1, expected 0 or more");
  a = base, a.routing.topk_ids.size[0] = 1ll << 31;
  INVALID("topk_ids.size(0) is 2147483648, expected at most 2147483647");
  a = base, a.routing.topk_ids.size[0] = 1 << 30;
  INVALID("topk_ids has 2147483648 rows (M * top_k), expected at most 2147483647");
  a = base, a.routing.topk_ids.stride[0] = -2;
  INVALID("topk_ids.stride(0) is -2, expected 0 or more");
  a = base, a.routing.topk_ids.stride[0] = INT64_MAX / 2;
  INVALID("topk_ids has strides that reach beyond the address space");
  a = base, a.routing.topk_ids.data = NULL;
  INVALID("topk_ids has elements but its data pointer is NULL");
  a = base, a.routing.topk_ids.data = (char *)a.routing.topk_ids.data + 4;
  a.routing.topk_ids.dtype = MOELORA_I64;
  char text[160];
  snprintf(text, sizeof text, "topk_ids starts at %p, expected a multiple of the 8 bytes of int64",
           a.routing.topk_ids.data);
  INVALID(text);

  a = sorting, a.routing.topk_weights = absent;
  INVALID("topk_weights is absent, expected a tensor [M, top_k]");
  a = sorting, a.routing.topk_weights.dtype = MOELORA_BF16;
  INVALID("topk_weights has dtype bfloat16, expected float32");
  a = sorting, a.routing.topk_weights.size[0] = 4;
  INVALID("topk_weights.size(0) is 4, topk_ids.size(0) is 5");
  a = sorting, a.routing.topk_weights.size[1] = 1;
  INVALID("topk_weights.size(1) is 1, topk_ids.size(1) is 2");

  moelora_tensor map = random_ids(MOELORA_I32, -1, E - 1, SIZES(E));
  a = base, a.routing.expert_map = map, a.routing.expert_map.size[0] = 3;
  INVALID("expert_map.size(0) is 3, num_experts is 4");
  a = base, a.routing.expert_map = map, a.routing.expert_map.size[0] = 0;
  INVALID("expert_map.size(0) is 0, expected at least 1");
  a = base, a.routing.expert_map = map, a.routing.expert_map.dtype = MOELORA_I64;
  INVALID("expert_map has dtype int64, expected int32");
  a = base, a.routing.expert_map = map, a.routing.expert_map.stride[0] = 2;
  INVALID("expert_map.stride(0) is 2, expected 1: expert_map must be contiguous");

  a = uniform, a.adapters.token_lora_mapping.size[0] = 4;
  INVALID("token_lora_mapping.size(0) is 4, topk_ids.size(0) is 5");
  a = uniform, a.adapters.token_lora_mapping.dtype = MOELORA_BOOL;
  INVALID("token_lora_mapping has dtype bool, expected int32 or int64");
  a = uniform, a.adapters.token_lora_mapping.ndim = 2;
  INVALID("token_lora_mapping has 2 dimensions, expected 1: [M]");
  a = uniform, a.adapters.adapter_enabled = new_tensor(MOELORA_I32, SIZES(SLOTS + 2));
  INVALID("adapter_enabled.size(0) is 4, max_loras is 2: expected as many entries or one more");
  a = uniform, a.adapters.adapter_enabled = new_tensor(MOELORA_I64, SIZES(SLOTS));
  INVALID("adapter_enabled has dtype int64, expected bool or int32");

  a = base, a.expert_ids.size[0] = 4;
  INVALID("expert_ids.size(0) is 4, expected at least 5 blocks");
  a = base, a.expert_ids.dtype = MOELORA_I64;
  INVALID("expert_ids has dtype int64, expected int32");
  a = base, a.sorted_token_ids.size[0] = 19;
  INVALID("sorted_token_ids.size(0) is 19, expert_ids.size(0) * block_size is 20");
  a = base, a.num_tokens_post_padded.size[0] = 2;
  INVALID("num_tokens_post_padded.size(0) is 2, the number of totals is 1");
  a = base, a.block_size = INT32_MAX, a.expert_ids.size[0] = 5;
  INVALID("expert_ids.size(0) * block_size is 10737418235, expected at most 2147483647");
  a = base, a.lora_ids = uniform.lora_ids;
  INVALID("lora_ids is given, but only a mode with adapters writes it");
  a = base, a.sorted_weights = sorting.sorted_weights;
  INVALID("sorted_weights is given, but only moe_sorting writes it");
  a = base, a.out_to_zero = sorting.sorted_weights;
  INVALID("out_to_zero is given, but only moe_sorting writes it");
  a = uniform, a.lora_ids = absent;
  INVALID("lora_ids is absent, expected a tensor [blocks]");
  a = segmented, a.lora_ids.size[0] = 5;
  INVALID("lora_ids.size(0) is 5, expert_ids.size(0) * block_size is 20");
  a = sorting, a.sorted_weights = absent;
  INVALID("sorted_weights is absent, expected a tensor [rows]");
  a = sorting, a.out_to_zero = map;
  INVALID("out_to_zero has dtype int32, expected float32, bfloat16 or float16");
  a = sorting, a.out_to_zero = new_tensor(MOELORA_F32, SIZES(4, 4)), a.out_to_zero.stride[0] = 5;
  INVALID("out_to_zero.stride(0) is 5, expected 4: out_to_zero must be contiguous");
  a = base, a.sorted_token_ids.data = a.routing.topk_ids.data;
  INVALID("sorted_token_ids shares memory with topk_ids");
  a = base, a.expert_ids.data = a.sorted_token_ids.data;
  INVALID("expert_ids shares memory with sorted_token_ids");
  release_all();
}

/* ---- one projection ---- */

#undef run
#define run(A) moelora_gemm(A, &exec)

static moelora_lora lora_of(int32_t slices, int64_t n, int64_t k) {
  moelora_lora lora = {.num_slices = slices};
  for (int32_t i = 0; i < slices; i++) {
    lora.a[i] = random_tensor(MOELORA_F32, 1, SIZES(SLOTS, E, R, k));
    lora.b[i] = random_tensor(MOELORA_F32, 1, SIZES(SLOTS, E, n / slices, R));
  }
  return lora;
}

static moelora_adapters some_adapters(void) {
  return (moelora_adapters){
      .token_lora_mapping = random_ids(MOELORA_I32, -1, SLOTS - 1, SIZES(M)),
      .lora_ranks = random_ids(MOELORA_I32, 0, R, SIZES(SLOTS)),
      .lora_scalings = random_tensor(MOELORA_F32, 1, SIZES(SLOTS)),
      .adapter_enabled = random_ids(MOELORA_BOOL, 0, 1, SIZES(SLOTS + 1)),
  };
}

static moelora_routing some_routing(void) {
  return (moelora_routing){
      .topk_ids = random_ids(MOELORA_I32, 0, E - 1, SIZES(M, TOP_K)),
      .topk_weights = random_tensor(MOELORA_F32, 1, SIZES(M, TOP_K)),
  };
}

static void test_gemm_errors(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  const moelora_gemm_args good = {
      .x = random_tensor(MOELORA_F32, 1, SIZES(M, K)),
      .w = random_tensor(MOELORA_F32, 1, SIZES(E, I, K)),
      .bias = random_tensor(MOELORA_F32, 1, SIZES(E, I)),
      .routing = some_routing(),
      .adapters = some_adapters(),
      .lora = lora_of(2, I, K),
      .mul_routed_weight = true,
      .out = new_tensor(MOELORA_F32, SIZES(M, TOP_K, I)),
  };
  moelora_gemm_args a = good;
  CHECK_OK(moelora_gemm(&good, &exec));

  a = good, a.x.ndim = 3;
  INVALID("x has 3 dimensions, expected 2: [M, K] or [M * top_k, K]");
  a = good, a.x.dtype = MOELORA_I32;
  INVALID("x has dtype int32, expected float32, bfloat16 or float16");
  a = good, a.x.stride[1] = 2;
  INVALID("x.stride(1) is 2, expected 1: the last dimension must be contiguous");
  a = good, a.x.size[1] = 15;
  INVALID("x.size(1) is 15, w.size(2) is 16");
  a = good, a.x.size[0] = 4;
  INVALID("x.size(0) is 4, expected topk_ids.size(0), which is 5, or M * top_k, which is 10");

  a = good, a.w.ndim = 2;
  INVALID("w has 2 dimensions, expected 3: [E, N, K], or 5: packed [E, N/64, K/64, 64, 64]");
  a = good, a.w = absent;
  INVALID("w is absent, expected a tensor [E, N, K]");
  a = good, a.w.dtype = MOELORA_BF16;
  INVALID("w has dtype bfloat16, expected float32 as x");
  a = good, a.w.size[0] = 0;
  INVALID("w.size(0) is 0, expected at least 1");
  a = good, a.w.stride[2] = 0;
  INVALID("w.stride(2) is 0, expected 1: the last dimension must be contiguous");
  moelora_tensor tiles = new_tensor(MOELORA_F32, SIZES(E, 1, 1, 64, 64));
  a = good, a.w = tiles;
  INVALID("x.size(1) is 16, w.size(2) * 64 is 64");
  a = good, a.w = tiles, a.w.size[4] = 32;
  INVALID("w.size(4) is 32, the side of a tile is 64");
  a = good, a.w = tiles, a.w.stride[3] = 128;
  INVALID("w has tiles of strides (128, 1), expected (64, 1)");

  a = good, a.bias.size[1] = 11;
  INVALID("bias.size(1) is 11, w.size(1) is 12");
  a = good, a.bias.size[0] = 3;
  INVALID("bias.size(0) is 3, w.size(0) is 4");
  a = good, a.bias.dtype = MOELORA_F16;
  INVALID("bias has dtype float16, expected float32 as w");
  a = good, a.bias.stride[1] = 4;
  INVALID("bias.stride(1) is 4, expected 1: the last dimension must be contiguous");
  a = good, a.routing.topk_weights = absent;
  INVALID("topk_weights is absent, expected a tensor [M, top_k]");
  a = good, a.routing.topk_ids.size[0] = INT32_MAX / TOP_K, a.routing.topk_weights = absent;
  a.mul_routed_weight = false;
  INVALID("topk_ids has 2147483646 rows (M * top_k), too many for row numbers of 32 bits after "
          "padding by expert");

  a = good, a.lora.num_slices = 5;
  INVALID("lora_a has 5 slices, expected 0 to 4");
  a = good, a.lora.num_slices = -1;
  INVALID("lora_a has -1 slices, expected 0 to 4");
  a = good, a.w.size[1] = 11, a.bias = absent;
  INVALID("w.size(1) is 11, expected a multiple of the 2 slices of lora_a");
  a = good, a.lora.a[1] = absent;
  INVALID("lora_a[1] is absent, expected a tensor [max_loras, E or 1, R, K]");
  a = good, a.lora.b[0].ndim = 3;
  INVALID("lora_b[0] has 3 dimensions, expected 4: [max_loras, E or 1, N, R]");
  a = good, a.lora.b[1].dtype = MOELORA_BF16;
  INVALID("lora_b[1] has dtype bfloat16, expected float32 as w");
  a = good, a.lora.a[0].size[2] = 0;
  INVALID("lora_a[0].size(2) is 0, expected at least 1");
  a = good, a.lora.a[0].size[1] = 2;
  INVALID("lora_a[0].size(1) is 2, w.size(0) is 4: expected as many experts, or 1 factor shared by "
          "all");
  a = good, a.lora.a[1].stride[3] = 2;
  INVALID("lora_a[1].stride(3) is 2, expected 1: the last dimension must be contiguous");
  a = good, a.lora.b[0].size[0] = 1;
  INVALID("lora_b[0].size(0) is 1, lora_a[0].size(0) is 2");
  a = good, a.lora.a[1].size[2] = 2;
  INVALID("lora_a[1].size(2) is 2, the rank of the first slice is 3");
  a = good, a.lora.b[1].size[3] = 2;
  INVALID("lora_b[1].size(3) is 2, the rank of the first slice is 3");
  a = good, a.lora.a[1].size[3] = 15;
  INVALID("lora_a[1].size(3) is 15, w.size(2) is 16");
  a = good, a.lora.b[1].size[2] = 5;
  INVALID("lora_b[1].size(2) is 5, w.size(1) / 2 slices is 6");
  a = good, a.lora = lora_of(1, I - 1, K);
  INVALID("lora_b[0].size(2) is 11, w.size(1) is 12");

  a = good, a.adapters.lora_ranks.size[0] = 1;
  INVALID("lora_ranks.size(0) is 1, lora_a[0].size(0) is 2");
  a = good, a.adapters.lora_ranks.dtype = MOELORA_I64;
  INVALID("lora_ranks has dtype int64, expected int32");
  a = good, a.adapters.lora_scalings.size[0] = 3;
  INVALID("lora_scalings.size(0) is 3, lora_a[0].size(0) is 2");
  a = good, a.adapters.lora_scalings.dtype = MOELORA_BF16;
  INVALID("lora_scalings has dtype bfloat16, expected float32");
  a = good, a.adapters.lora_scalings.stride[0] = 0;
  INVALID("lora_scalings.stride(0) is 0, expected 1: lora_scalings must be contiguous");
  a = good, a.adapters.adapter_enabled.size[0] = 1;
  INVALID("adapter_enabled.size(0) is 1, lora_a[0].size(0) is 2: expected as many entries or one "
          "more");

  a = good, a.out.size[0] = 4;
  INVALID("out.size(0) is 4, topk_ids.size(0) is 5");
  a = good, a.out.size[1] = 1;
  INVALID("out.size(1) is 1, topk_ids.size(1) is 2");
  a = good, a.out.size[2] = 11;
  INVALID("out.size(2) is 11, w.size(1) is 12");
  a = good, a.out.dtype = MOELORA_F16;
  INVALID("out has dtype float16, expected float32 as x");
  a = good, a.out.stride[2] = 3;
  INVALID("out.stride(2) is 3, expected 1: the last dimension must be contiguous");
  a = good, a.out.stride[0] = 20;
  INVALID("out.stride(0) is 20, expected at least 24: elements of an output must not share memory");
  a = good, a.out.stride[1] = 0;
  INVALID("out.stride(1) is 0, expected at least 1: elements of an output must not share memory");
  a = good, a.out.data = a.x.data;
  INVALID("out shares memory with x");
  a = good, a.out.data = (char *)a.w.data + 400;
  INVALID("out shares memory with w");
  a = good, a.out.data = a.lora.b[1].data;
  INVALID("out shares memory with lora_b[1]");
  a = good, a.out.data = a.routing.topk_weights.data;
  INVALID("out shares memory with topk_weights");

  /* What is allowed: a transposed output, no factors with tables of any length, no mapping. */
  a = good, a.out.stride[0] = I, a.out.stride[1] = M * I;
  CHECK_OK(moelora_gemm(&a, &exec));
  a = good, a.lora.num_slices = 0, a.adapters.lora_ranks.size[0] = 1;
  CHECK_OK(moelora_gemm(&a, &exec));
  a = good, a.adapters = (moelora_adapters){.token_lora_mapping = absent};
  CHECK_OK(moelora_gemm(&a, &exec));
  a = good, a.w.stride[0] = 0; /* one expert's weights for all */
  CHECK_OK(moelora_gemm(&a, &exec));
  release_all();
}

/* ---- the layer ---- */

#undef run
#define run(A) moelora_experts(A, &exec)

static void test_experts_errors(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  const moelora_experts_args good = {
      .hidden_states = random_tensor(MOELORA_F32, 1, SIZES(M, K)),
      .w13 = random_tensor(MOELORA_F32, 1, SIZES(E, 2 * I, K)),
      .w2 = random_tensor(MOELORA_F32, 1, SIZES(E, K, I)),
      .w13_bias = random_tensor(MOELORA_F32, 1, SIZES(E, 2 * I)),
      .w2_bias = random_tensor(MOELORA_F32, 1, SIZES(E, K)),
      .routing = some_routing(),
      .adapters = some_adapters(),
      .w13_lora = lora_of(2, 2 * I, K),
      .w2_lora = lora_of(1, K, I),
      .out = new_tensor(MOELORA_F32, SIZES(M, K)),
  };
  moelora_experts_args a = good;
  CHECK_OK(moelora_experts(&good, &exec));

  a = good, a.hidden_states.size[1] = 8;
  INVALID("hidden_states.size(1) is 8, w13.size(2) is 16");
  a = good, a.hidden_states.size[0] = 4;
  INVALID("hidden_states.size(0) is 4, topk_ids.size(0) is 5");
  a = good, a.hidden_states.dtype = MOELORA_BOOL;
  INVALID("hidden_states has dtype bool, expected float32, bfloat16 or float16");
  a = good, a.w13.dtype = MOELORA_F16;
  INVALID("w13 has dtype float16, expected float32 as hidden_states");
  a = good, a.w2.dtype = MOELORA_F16;
  INVALID("w2 has dtype float16, expected float32 as hidden_states");
  a = good, a.w2.size[0] = 3;
  INVALID("w2.size(0) is 3, w13.size(0) is 4");
  a = good, a.w2.size[1] = 15;
  INVALID("w2.size(1) is 15, w13.size(2) is 16: both are the hidden size");
  a = good, a.w13.size[1] = 23;
  INVALID("w13.size(1) is 23, expected 24: 2 * w2.size(2), as the activation is gated");
  a = good, a.activation = MOELORA_RELU2;
  INVALID("w13.size(1) is 24, expected 12: w2.size(2), as the activation is not gated");
  a = good, a.activation = (moelora_activation)7;
  INVALID("activation is 7, expected a moelora_activation");
  a = good, a.w13_bias.size[1] = 12;
  INVALID("w13_bias.size(1) is 12, w13.size(1) is 24");
  a = good, a.w2_bias.size[0] = 1;
  INVALID("w2_bias.size(0) is 1, w2.size(0) is 4");
  a = good, a.routing.topk_weights = absent;
  INVALID("topk_weights is absent, expected a tensor [M, top_k]");
  a = good, a.apply_router_weight_on_input = true;
  INVALID("topk_ids.size(1) is 2, expected 1 with apply_router_weight_on_input");

  a = good, a.w13_lora.num_slices = 3;
  INVALID("w13_lora_a has 3 slices, expected at most 2: one for all rows of w13, or gate and up");
  a = good, a.w13.size[1] = I, a.w13_bias = absent, a.activation = MOELORA_RELU2;
  INVALID("w13_lora_a has 2 slices, expected at most 1: one for all rows of w13");
  a = good, a.w2_lora.num_slices = 2;
  INVALID("w2_lora_a has 2 slices, expected at most 1");
  a = good, a.w13_lora.a[1].size[3] = 8;
  INVALID("w13_lora_a[1].size(3) is 8, w13.size(2) is 16");
  a = good, a.w13_lora.b[0].size[2] = 24;
  INVALID("w13_lora_b[0].size(2) is 24, w13.size(1) / 2 slices is 12");
  a = good, a.w2_lora.a[0].size[0] = 1;
  INVALID("w2_lora_a[0].size(0) is 1, w13_lora_a[0].size(0) is 2");
  a = good, a.w2_lora.b[0].size[2] = 15;
  INVALID("w2_lora_b[0].size(2) is 15, w2.size(1) is 16");
  a = good, a.w13_lora.num_slices = 0, a.adapters.lora_ranks.size[0] = 1;
  INVALID("lora_ranks.size(0) is 1, w2_lora_a[0].size(0) is 2");

  a = good, a.out.size[1] = 8;
  INVALID("out.size(1) is 8, hidden_states.size(1) is 16");
  a = good, a.out.size[0] = 6;
  INVALID("out.size(0) is 6, topk_ids.size(0) is 5");
  a = good, a.out.stride[0] = 0;
  INVALID("out.stride(0) is 0, expected at least 1: elements of an output must not share memory");
  a = good, a.out.data = (char *)a.hidden_states.data + 4;
  INVALID("out shares memory with hidden_states");
  a = good, a.out = a.hidden_states, a.out.stride[0] = K + 1; /* same place, other rows */
  INVALID("out shares memory with hidden_states");
  a = good, a.out.data = a.w2_bias.data;
  INVALID("out shares memory with w2_bias");
  a = good, a.out.data = a.w13_lora.a[1].data;
  INVALID("out shares memory with w13_lora_a[1]");

  /* Allowed: in place, and beside the input in one buffer. */
  a = good, a.out = a.hidden_states;
  CHECK_OK(moelora_experts(&a, &exec));
  moelora_tensor wide = random_tensor(MOELORA_F32, 1, SIZES(M, 2 * K));
  a = good, a.hidden_states.data = wide.data, a.out.data = (float *)wide.data + K;
  a.hidden_states.stride[0] = a.out.stride[0] = 2 * K;
  CHECK_OK(moelora_experts(&a, &exec));
  a.out.data = (float *)wide.data + K - 1;
  INVALID("out shares memory with hidden_states");
  release_all();
}

/* ---- packing, exec, variants ---- */

#undef run
#define run(A) moelora_pack_weights(&(A)->w, &(A)->out, &serial)

static void test_pack_errors(void) {
  struct {
    moelora_tensor w, out;
  } a, good = {
           .w = random_tensor(MOELORA_BF16, 1, SIZES(E, 128, 64)),
           .out = new_tensor(MOELORA_BF16, SIZES(E, 2, 1, 64, 64)),
       };
  CHECK_OK(run(&good));
  a = good, a.w.size[1] = 100;
  INVALID("w.size(1) is 100, expected a multiple of 64");
  a = good, a.w.size[2] = 63;
  INVALID("w.size(2) is 63, expected a multiple of 64");
  a = good, a.w = good.out;
  INVALID("w has 5 dimensions, expected 3: [E, N, K]");
  a = good, a.out.ndim = 4;
  INVALID("out has 4 dimensions, expected 5: [E, N/64, K/64, 64, 64]");
  a = good, a.out.dtype = MOELORA_F16;
  INVALID("out has dtype float16, expected bfloat16 as w");
  a = good, a.out.size[1] = 1;
  INVALID("out.size(1) is 1, w.size(1) / 64 is 2");
  a = good, a.out.size[3] = 32;
  INVALID("out.size(3) is 32, the side of a tile is 64");
  a = good, a.out.stride[0] *= 2;
  INVALID("out.stride(0) is 16384, expected 8192: out must be contiguous");
  a = good, a.out.data = a.w.data;
  INVALID("out shares memory with w");
  release_all();
}

static void test_exec_errors(void) {
  moelora_align_args args = align_args(MOELORA_ALIGN_BASE);
  moelora_exec exec = serial;
  size_t bytes;
  CHECK_OK(moelora_align_workspace_size(&args, &exec, &bytes));
  CHECK(bytes > 0);
  char text[160];
  snprintf(text, sizeof text, "the workspace has 0 bytes, expected at least %zu", bytes);
  CHECK_FAILS(moelora_align(&args, &exec), MOELORA_WORKSPACE_TOO_SMALL, text);
  give_workspace(&exec, bytes + 256);
  exec.workspace_bytes = bytes - 1;
  snprintf(text, sizeof text, "the workspace has %zu bytes, expected at least %zu", bytes - 1,
           bytes);
  CHECK_FAILS(moelora_align(&args, &exec), MOELORA_WORKSPACE_TOO_SMALL, text);
  exec.workspace = (char *)exec.workspace + 64;
  exec.workspace_bytes = bytes;
  snprintf(text, sizeof text, "the workspace starts at %p, expected a multiple of 256 bytes",
           exec.workspace);
  CHECK_FAILS(moelora_align(&args, &exec), MOELORA_INVALID_ARGUMENT, text);
  exec.workspace = (char *)exec.workspace - 64;
  CHECK_OK(moelora_align(&args, &exec)); /* and clears the message */

  CHECK_FAILS(moelora_align(NULL, &exec), MOELORA_INVALID_ARGUMENT, "args or exec is NULL");
  CHECK_FAILS(moelora_align(&args, NULL), MOELORA_INVALID_ARGUMENT, "args or exec is NULL");
  exec.num_threads = -1;
  CHECK_FAILS(moelora_align(&args, &exec), MOELORA_INVALID_ARGUMENT,
              "exec.num_threads is -1, expected 0 or more");
  exec.num_threads = 0;
  exec.device = (moelora_device)5;
  CHECK_FAILS(moelora_align(&args, &exec), MOELORA_INVALID_ARGUMENT,
              "exec.device is 5, expected a moelora_device");
  exec.device = MOELORA_CUDA;
  if (!moelora_has_device(MOELORA_CUDA))
    CHECK(moelora_align(&args, &exec) == MOELORA_UNSUPPORTED && *moelora_error_message());

  CHECK(moelora_has_device(MOELORA_CPU));
  CHECK_FAILS(moelora_force_variant("gemm_f32_nonsense"), MOELORA_INVALID_ARGUMENT,
              "variant 'gemm_f32_nonsense' does not exist");
  CHECK_OK(moelora_force_variant(NULL));
  CHECK_FAILS(moelora_limit_capability(8), MOELORA_INVALID_ARGUMENT,
              "compute_capability is 8, expected 80 or more, or 0");
  CHECK_OK(moelora_limit_capability(0));
  CHECK(moelora_variant_name(-1) == NULL && moelora_variant_name(10000) == NULL);
  CHECK(!moelora_variant_usable(-1) && !moelora_variant_usable(10000));
  release_all();
}

int main(void) {
  test_align_errors();
  test_gemm_errors();
  test_experts_errors();
  test_pack_errors();
  test_exec_errors();
  printf("test_errors: all refusals as expected\n");
  return 0;
}
