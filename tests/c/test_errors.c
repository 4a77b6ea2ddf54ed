/* Every error of an operator that computes, with its message: each case starts from valid
 * arguments and breaks one of them. */
#include "valid.h"

enum { M = 5, TOP_K = 2, E = 4, K = 16, I = 12, SLOTS = 2 };

static const sizes shape = {M, TOP_K, E, K, I, SLOTS};

#define NO_MEMORY                                                                                  \
  " has elements but its data is NULL, expected memory on the device of the call: bring it back "  \
  "if it was freed or offloaded"

/* Changes valid arguments `good`, or the refused ones once more. */
#define BAD(...) REFUSED(good, __VA_ARGS__)
#define STILL_BAD(MESSAGE) CHECK_INVALID(run(&a), MESSAGE)

/* ---- one projection ---- */

#define run(A) call_gemm(A, &exec)

static void test_gemm_errors(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  const moelora_gemm_args good = valid_gemm(shape);
  moelora_gemm_args a = good;
  CHECK_OK(call_gemm(&good, &exec));

  BAD("hidden has 3 dimensions, expected 2: [M, K] or [M * top_k, K]", a.x.name = "hidden",
      a.x.ndim = 3);
  BAD("hidden" NO_MEMORY, a.x.name = "hidden", a.x.data = NULL);
  BAD("x.size(1) is 15, experts.weight.size(2) is 16", a.x.size[1] = 15,
      a.w.name = "experts.weight");
  BAD("x.size(0) is 4, expected ids.size(0), which is 5, or M * top_k, which is 10",
      a.x.size[0] = 4, a.routing.topk_ids.name = "ids");
  BAD("up[1] has dtype float16, expected float32 as weight", a.lora.b[1].name = "up",
      a.lora.b[1].dtype = MOELORA_F16, a.w.name = "weight");
  BAD("lora_ranks.size(0) is 3, down[0].size(0) is 2", a.adapters.lora_ranks.size[0] = 3,
      a.lora.a[0].name = "down");
  BAD("result shares memory with weight", a.out = a.w, a.out.name = "result", a.w.name = "weight",
      a.out.ndim = 3, a.out.size[0] = M, a.out.size[1] = TOP_K, a.out.size[2] = I,
      a.out.stride[0] = TOP_K * I, a.out.stride[1] = I);
  BAD("x has dtype int32, expected float32, bfloat16 or float16", a.x.dtype = MOELORA_I32);
  BAD("x.stride(1) is 2, expected 1: the last dimension must be contiguous", a.x.stride[1] = 2);

  BAD("w has 2 dimensions, expected 3: [E, N, K], or 5: packed [E, N/64, K/64, 64, 64]",
      a.w.ndim = 2);
  BAD("w is absent, expected a tensor [E, N, K]", a.w = absent);
  BAD("w has dtype bfloat16, expected float32 as x", a.w.dtype = MOELORA_BF16);
  BAD("w.size(0) is 0, expected at least 1", a.w.size[0] = 0);
  BAD("w.stride(2) is 0, expected 1: the last dimension must be contiguous", a.w.stride[2] = 0);
  moelora_tensor tiles = new_tensor(MOELORA_F32, SIZES(E, 1, 1, 64, 64));
  BAD("x.size(1) is 16, w.size(2) * 64 is 64", a.w = tiles);
  BAD("w.size(4) is 32, the side of a tile is 64", a.w = tiles, a.w.size[4] = 32);
  BAD("w has tiles of strides (128, 1), expected (64, 1)", a.w = tiles, a.w.stride[3] = 128);

  BAD("bias.size(1) is 11, w.size(1) is 12", a.bias.size[1] = 11);
  BAD("bias.size(0) is 3, w.size(0) is 4", a.bias.size[0] = 3);
  BAD("bias has dtype float16, expected float32 as x", a.bias.dtype = MOELORA_F16);
  BAD("topk_weights is absent, expected a tensor [M, top_k]", a.routing.topk_weights = absent);
  BAD("topk_ids has 2147483646 rows (M * top_k), too many for row numbers of 32 bits after "
      "padding by expert",
      a.routing.topk_ids.size[0] = INT32_MAX / TOP_K, a.routing.topk_weights = absent,
      a.mul_routed_weight = false);

  BAD("lora_a has 5 slices, expected 0 to 4", a.lora.num_slices = 5);
  BAD("lora_a has -1 slices, expected 0 to 4", a.lora.num_slices = -1);
  BAD("w.size(1) is 11, expected a multiple of the 2 slices of lora_a", a.w.size[1] = 11,
      a.bias = absent);
  BAD("lora_a[1] is absent, expected a tensor [max_loras, E or 1, R, K]", a.lora.a[1] = absent);
  BAD("lora_b[0] has 3 dimensions, expected 4: [max_loras, E or 1, N, R]", a.lora.b[0].ndim = 3);
  BAD("lora_b[1] has dtype bfloat16, expected float32 as w", a.lora.b[1].dtype = MOELORA_BF16);
  BAD("lora_a[0].size(2) is 0, expected at least 1", a.lora.a[0].size[2] = 0);
  BAD("lora_a[0].size(1) is 2, w.size(0) is 4: expected as many experts, or 1 factor shared by all",
      a.lora.a[0].size[1] = 2);
  BAD("lora_a[1].stride(3) is 2, expected 1: the last dimension must be contiguous",
      a.lora.a[1].stride[3] = 2);
  BAD("lora_b[0].size(0) is 1, lora_a[0].size(0) is 2", a.lora.b[0].size[0] = 1);
  BAD("lora_a[1].size(2) is 2, the rank of the first slice is 3", a.lora.a[1].size[2] = 2);
  BAD("lora_b[1].size(3) is 2, the rank of the first slice is 3", a.lora.b[1].size[3] = 2);
  BAD("lora_a[1].size(3) is 15, w.size(2) is 16", a.lora.a[1].size[3] = 15);
  BAD("lora_b[1].size(2) is 5, w.size(1) / 2 slices is 6", a.lora.b[1].size[2] = 5);
  BAD("lora_b[0].size(2) is 11, w.size(1) is 12",
      a.lora = valid_lora(shape, MOELORA_F32, 1, I - 1, K));

  BAD("lora_ranks has dtype int64, expected int32", a.adapters.lora_ranks.dtype = MOELORA_I64);
  BAD("lora_scalings.size(0) is 3, lora_a[0].size(0) is 2", a.adapters.lora_scalings.size[0] = 3);
  BAD("lora_scalings has dtype bfloat16, expected float32",
      a.adapters.lora_scalings.dtype = MOELORA_BF16);
  BAD("adapter_enabled.size(0) is 1, expected lora_a[0].size(0), which is 2, or max_loras + 1, "
      "which is 3",
      a.adapters.adapter_enabled.size[0] = 1);

  BAD("out.size(0) is 4, topk_ids.size(0) is 5", a.out.size[0] = 4);
  BAD("out.size(1) is 1, topk_ids.size(1) is 2", a.out.size[1] = 1);
  BAD("out.size(2) is 11, w.size(1) is 12", a.out.size[2] = 11);
  BAD("out has dtype float16, expected float32 as x", a.out.dtype = MOELORA_F16);
  BAD("out.stride(0) is 20, expected at least 24: elements of an output must not share memory",
      a.out.stride[0] = 20);
  BAD("out.stride(1) is 0, expected at least 1: elements of an output must not share memory",
      a.out.stride[1] = 0);
  BAD("out shares memory with x", a.out.data = a.x.data);
  BAD("out shares memory with lora_b[1]", a.out.data = a.lora.b[1].data);
  BAD("out shares memory with topk_weights", a.out.data = a.routing.topk_weights.data);

  /* Allowed: a transposed output, tables of any length without factors, no mapping. */
  a = good, a.out.stride[0] = I, a.out.stride[1] = M * I;
  CHECK_OK(call_gemm(&a, &exec));
  a = good, a.lora.num_slices = 0, a.adapters.lora_ranks.size[0] = 1;
  CHECK_OK(call_gemm(&a, &exec));
  a = good, a.adapters = (moelora_adapters){.token_lora_mapping = absent};
  CHECK_OK(call_gemm(&a, &exec));
  a = good, a.w.stride[0] = 0; /* all experts share the weights */
  CHECK_OK(call_gemm(&a, &exec));
  release_all();
}

/* ---- the layer ---- */

#undef run
#define run(A) call_experts(A, &exec)

static void test_experts_errors(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  const moelora_experts_args good = valid_experts(shape, MOELORA_F32);
  moelora_experts_args a = good;
  CHECK_OK(call_experts(&good, &exec));

  BAD("hidden_states.size(1) is 8, w13.size(2) is 16", a.hidden_states.size[1] = 8);
  BAD("hidden_states.size(0) is 4, topk_ids.size(0) is 5", a.hidden_states.size[0] = 4);
  BAD("w13 has dtype float16, expected float32 as hidden_states", a.w13.dtype = MOELORA_F16);
  BAD("w2.size(0) is 3, w13.size(0) is 4", a.w2.size[0] = 3);
  BAD("w2.size(1) is 15, w13.size(2) is 16: both are the hidden size", a.w2.size[1] = 15);
  BAD("w13.size(1) is 23, expected 24: 2 * w2.size(2), as the activation is gated",
      a.w13.size[1] = 23);
  BAD("w13.size(1) is 24, expected 12: w2.size(2), as the activation is not gated",
      a.activation = MOELORA_RELU2);
  BAD("activation is 7, expected a moelora_activation", a.activation = (moelora_activation)7);
  BAD("activation_limit is -7, expected a normal float32 above 0", a.activation_limit = -7);
  BAD("activation_limit is 1e+39, expected a normal float32 above 0", a.activation_limit = 1e39);
  BAD("activation_alpha is 1.5, but silu takes none, unlike swigluoai, swigluoai_uninterleave, "
      "situ",
      a.activation_alpha = 1.5);
  BAD("activation_limit is 7, but gelu takes none, unlike silu, swigluoai, "
      "swigluoai_uninterleave, situ, swiglustep",
      a.activation = MOELORA_GELU, a.activation_limit = 7);
  BAD("activation_alpha is 4, but swiglustep takes none, unlike swigluoai, "
      "swigluoai_uninterleave, situ",
      a.activation = MOELORA_SWIGLUSTEP, a.activation_alpha = 4);
  BAD("activation_alpha is inf, expected a normal float32 above 0",
      a.activation = MOELORA_SWIGLUOAI, a.activation_alpha = INFINITY);
  BAD("w13_one_a.size(0) is 3, w13_lora_a[0].size(0) is 2",
      a.w13_one_a = random_ids(MOELORA_I32, 0, 1, SIZES(3)));
  BAD("w13_one_a has dtype bool, expected int32",
      a.w13_one_a = random_ids(MOELORA_BOOL, 0, 1, SIZES(SLOTS)));
  BAD("w13_bias.size(1) is 12, w13.size(1) is 24", a.w13_bias.size[1] = 12);
  BAD("w2_bias.size(0) is 1, w13.size(0) is 4", a.w2_bias.size[0] = 1);
  BAD("topk_weights is absent, expected a tensor [M, top_k]", a.routing.topk_weights = absent);
  BAD("topk_ids.size(1) is 2, expected 1 with apply_router_weight_on_input",
      a.apply_router_weight_on_input = true);

  BAD("w13_lora_a has 3 slices, expected 0 to 2: one for all rows, or gate and up",
      a.w13_lora.num_slices = 3);
  BAD("w13_lora_a has 2 slices, expected 0 to 1: one for all rows", a.w13.size[1] = I,
      a.w13_bias = absent, a.activation = MOELORA_RELU2);
  BAD("w2_lora_a has 2 slices, expected 0 to 1", a.w2_lora.num_slices = 2);
  BAD("w13_lora_a[1].size(3) is 8, w13.size(2) is 16", a.w13_lora.a[1].size[3] = 8);
  BAD("w13_lora_b[0].size(2) is 24, w13.size(1) / 2 slices is 12", a.w13_lora.b[0].size[2] = 24);
  BAD("w2_lora_a[0].size(0) is 1, w13_lora_a[0].size(0) is 2", a.w2_lora.a[0].size[0] = 1);
  BAD("w2_lora_b[0].size(2) is 15, w2.size(1) is 16", a.w2_lora.b[0].size[2] = 15);
  BAD("lora_ranks.size(0) is 1, w2_lora_a[0].size(0) is 2", a.w13_lora.num_slices = 0,
      a.adapters.lora_ranks.size[0] = 1);

  BAD("out.size(1) is 8, hidden_states.size(1) is 16", a.out.size[1] = 8);
  BAD("out.size(0) is 6, topk_ids.size(0) is 5", a.out.size[0] = 6);
  BAD("out shares memory with hidden_states", a.out.data = (char *)a.hidden_states.data + 4);
  BAD("out shares memory with hidden_states", a.out = a.hidden_states,
      a.out.stride[0] = K + 1); /* same address, other rows */

  /* Allowed: in place, and next to the input in one buffer. */
  a = good, a.out = a.hidden_states;
  CHECK_OK(call_experts(&a, &exec));
  moelora_tensor wide = random_tensor(MOELORA_F32, 1, SIZES(M, 2 * K));
  a = good, a.hidden_states.data = wide.data, a.out.data = (float *)wide.data + K;
  a.hidden_states.stride[0] = a.out.stride[0] = 2 * K;
  CHECK_OK(call_experts(&a, &exec));
  a.out.data = (float *)wide.data + K - 1;
  STILL_BAD("out shares memory with hidden_states");
  release_all();
}

/* ---- adapters alone ---- */

#undef run
#define run(A) call_delta(A, &exec)

static void test_delta_errors(void) {
  const sizes s = {M, TOP_K, E, K, 24, SLOTS};
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  moelora_delta_args good = valid_delta(s), a;
  good.routing.topk_weights = absent;
  CHECK_OK(call_delta(&good, &exec));
  BAD("1 of x, h and out are given, expected two: x and h, h and out, or x and out", a.x = absent);
  BAD("num_experts is 0, expected at least 1", a.num_experts = 0);
  BAD("lora_a has 0 slices, expected 1 to 4", a.lora.num_slices = 0);
  BAD("x.size(0) is 4, expected topk_ids.size(0), which is 5, or M * top_k, which is 10",
      a.x.size[0] = 4);
  BAD("slices of lora_b have different numbers of columns, 23 in all, expected the 24 of out",
      a.lora.b[1].size[2] = 11);
  BAD("offset is 1, expected 0 or more and at most 0: out has 24 columns, the slices have 24",
      a.out_offset = 1);
  BAD("offset is 9223372036854775800, expected 0 or more and at most 0: out has 24 columns, "
      "the slices have 24",
      a.out_offset = INT64_MAX - 7);
  BAD("offset is -9223372036854775808, expected 0 or more and at most 0: out has 24 columns, "
      "the slices have 24",
      a.out_offset = INT64_MIN);
  BAD("topk_weights is absent, expected a tensor [M, top_k]", a.mul_routed_weight = true);
  BAD("silu_and_mul takes an even number of columns and writes half of them to a 3-D out of as "
      "many, without add_inputs, mul_routed_weight and out_offset; there are 24 columns, out "
      "has 24",
      a.silu_and_mul = true);
  BAD("out shares memory with x", a.out.data = a.x.data);
  BAD("num_tokens is 5 and top_k is 0, expected top_k of at least 1 and at most 2147483647 rows",
      a.lists.sorted_token_ids = new_tensor(MOELORA_I32, SIZES(SLOTS, 8)), a.num_tokens = 5);
  a.top_k = 2, a.lists.expert_ids = new_tensor(MOELORA_I32, SIZES(2, 1));
  a.lists.num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(2));
  a.lists.lora_ids = new_tensor(MOELORA_I32, SIZES(3));
  STILL_BAD("block_size is 0, expected at least 1");
  a.lists.block_size = 4;
  STILL_BAD("expert_ids.size(1) is 1, expected at least a block of 4 for each of the 8 rows of "
            "sorted_token_ids");
  a.lists.block_size = 8, a.lists.num_active = 4;
  STILL_BAD("num_active_loras is 4, expected 0 to lora_ids.size(0), which is 3");
  a.lists.num_active = 0;
  CHECK_OK(call_delta(&a, &exec));
  a = good;
  a.lora = valid_lora(s, MOELORA_F32, 2, 24, K), a.x.dtype = a.out.dtype = MOELORA_BF16;
  a.h = new_tensor(MOELORA_BF16, SIZES(2, M, TOP_K, VALID_RANK)), a.out = absent;
  STILL_BAD("lora_a[0] has dtype float32, expected bfloat16 as x");
  release_all();
}

/* ---- backwards ---- */

static moelora_tensor like(const moelora_tensor *t) {
  return new_tensor(t->dtype, t->ndim, t->size);
}

static moelora_lora like_lora(const moelora_lora *lora) {
  moelora_lora grads = {.num_slices = lora->num_slices};
  for (int32_t i = 0; i < lora->num_slices; i++)
    grads.a[i] = like(&lora->a[i]), grads.b[i] = like(&lora->b[i]);
  return grads;
}

#undef run
#define run(A) experts_backward_bytes(A, &serial, &bytes)

static void test_backward_errors(void) {
  size_t bytes;
  moelora_experts_backward_args a, good = {.forward = valid_experts(shape, MOELORA_F32)};
  moelora_experts_args *f = &good.forward;
  f->saved.gate_up = new_tensor(MOELORA_F32, SIZES(M * TOP_K, 2 * I));
  f->saved.w13_shrink = new_tensor(MOELORA_F32, SIZES(M * TOP_K, 2, VALID_RANK));
  f->saved.w2_shrink = new_tensor(MOELORA_F32, SIZES(M * TOP_K, VALID_RANK));
  good.dout = like(&f->hidden_states);
  good.grads = (moelora_experts_grads){
      .hidden_states = like(&f->hidden_states),
      .w13_lora = like_lora(&f->w13_lora),
      .w2_lora = like_lora(&f->w2_lora),
      .w2_bias = like(&f->w2_bias),
  };
  CHECK_OK(run(&good));
  BAD("dout is absent, expected a tensor [M, K]", a.dout = absent);
  BAD("dout.size(1) is 3, hidden_states.size(1) is 16", a.dout.size[1] = 3);
  BAD("saved.gate_up is absent, expected a tensor [M * top_k, 2 I]",
      a.forward.saved.gate_up = absent);
  BAD("saved.gate_up.size(1) is 7, w13.size(1) is 24", a.forward.saved.gate_up.size[1] = 7);
  BAD("saved.w13_shrink is absent, expected a tensor [M * top_k, slices, R]",
      a.forward.saved.w13_shrink = absent);
  BAD("saved.w13_shrink.size(1) is 1, the number of slices of the factors is 2",
      a.forward.saved.w13_shrink.size[1] = 1);
  BAD("saved.w2_shrink.size(1) is 1, the maximum rank of the factors is 3",
      a.forward.saved.w2_shrink.size[1] = 1);
  BAD("grads.w2_lora_a[0] has dtype float16, expected float32",
      a.grads.w2_lora.a[0].dtype = MOELORA_F16);
  BAD("grads.w13_lora_a has 1 slices, w13_lora_a has 2", a.grads.w13_lora.num_slices = 1);
  BAD("grads.hidden_states shares memory with dout", a.grads.hidden_states = a.dout);
  BAD("grads.w2_bias.size(0) is 5, w2_bias.size(0) is 4", a.grads.w2_bias = a.grads.hidden_states);
  BAD("grads.pairs.size(1) is 5, w13.size(0) is 4",
      a.grads.pairs = new_tensor(MOELORA_I32, SIZES(SLOTS, E + 1)));
  BAD("grads.w2_bias is given, but w2_bias is absent", a.forward.w2_bias = absent);

  /* What the forward saves. */
  moelora_experts_args forward = *f;
  forward.saved.gate_up = absent;
  CHECK_INVALID(experts_bytes(&forward, &serial, &bytes),
                "saved.w13_shrink is given, but saved.gate_up is absent");
  forward.saved.w13_shrink = absent;
  CHECK_INVALID(experts_bytes(&forward, &serial, &bytes),
                "saved.w2_shrink is given, but saved.gate_up is absent");
  forward = *f;
  forward.out = forward.hidden_states;
  CHECK_INVALID(experts_bytes(&forward, &serial, &bytes), "out shares memory with hidden_states");

  moelora_gemm_backward_args gemm = {.forward = valid_gemm(shape)};
  gemm.dout = like(&gemm.forward.out);
  gemm.grads.lora.num_slices = gemm.forward.lora.num_slices;
  gemm.grads.pairs = new_tensor(MOELORA_I32, SIZES(SLOTS, E + 1));
  CHECK_INVALID(gemm_backward_bytes(&gemm, &serial, &bytes),
                "grads.pairs.size(1) is 5, w.size(0) is 4");
  gemm.forward.w = gemm.forward.bias = absent, gemm.num_experts = E;
  CHECK_INVALID(gemm_backward_bytes(&gemm, &serial, &bytes),
                "grads.pairs.size(1) is 5, num_experts is 4");
  release_all();
}

/* ---- packing ---- */

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
  BAD("w" NO_MEMORY, a.w.data = NULL);
  BAD("w.size(1) is 100, expected a multiple of 64", a.w.size[1] = 100);
  BAD("w.size(2) is 63, expected a multiple of 64", a.w.size[2] = 63);
  BAD("w has 5 dimensions, expected 3: [E, N, K]", a.w = good.out);
  BAD("out has 4 dimensions, expected 5: [E, N/64, K/64, 64, 64]", a.out.ndim = 4);
  BAD("out has dtype float16, expected bfloat16 as w", a.out.dtype = MOELORA_F16);
  BAD("out.size(1) is 1, w.size(1) / 64 is 2", a.out.size[1] = 1);
  BAD("out.size(3) is 32, the side of a tile is 64", a.out.size[3] = 32);
  BAD("out.stride(0) is 16384, expected 8192: out must be contiguous", a.out.stride[0] *= 2);
  BAD("out shares memory with w", a.out.data = a.w.data);
  release_all();
}

/* ---- sizes that no memory holds ---- */

/* A view of any shape without memory: all dimensions but the last have stride 0. */
static moelora_tensor expanded(moelora_dtype dtype, int32_t ndim, const int64_t *size) {
  static int64_t somewhere;
  moelora_tensor t = view(&somewhere, dtype, ndim, size);
  for (int32_t i = 0; i + 1 < ndim; i++)
    t.stride[i] = 0;
  return t;
}

/* Factors of two adapters and one expert; `n` columns of a slice. */
static moelora_lora expanded_lora(int32_t slices, int64_t rank, int64_t n, int64_t k) {
  moelora_lora lora = {.num_slices = slices};
  for (int32_t i = 0; i < slices; i++) {
    lora.a[i] = expanded(MOELORA_F32, SIZES(2, 1, rank, k));
    lora.b[i] = expanded(MOELORA_F32, SIZES(2, 1, n, rank));
  }
  return lora;
}

/* An output of these sizes, at an address of its own. */
static moelora_tensor spread(moelora_dtype dtype, int32_t ndim, const int64_t *size) {
  return view((void *)((uintptr_t)1 << 60), dtype, ndim, size);
}

#define TOO_LARGE(NAME, ARGS, SIZES)                                                               \
  do {                                                                                             \
    size_t bytes_ = 1;                                                                             \
    CHECK_INVALID(NAME##_bytes(ARGS, &exec, &bytes_),                                              \
                  SIZES ": too large, the workspace would take more than 2^56 bytes");             \
    CHECK(bytes_ == 0);                                                                            \
    CHECK(call_##NAME(ARGS, &exec) == MOELORA_INVALID_ARGUMENT);                                   \
  } while (0)

/* Sums and products of these sizes wrap around to a few bytes at 2^64, or to negative values at
 * 2^63. */
static void test_huge_sizes(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  enum { ROWS = INT32_MAX - 255, FEWER = ROWS - 255, WIDE = INT32_MAX };
  const moelora_routing routing = {
      .topk_ids = expanded(MOELORA_I32, SIZES(1, ROWS)),
      .topk_weights = expanded(MOELORA_F32, SIZES(1, ROWS)),
  };
  const moelora_adapters adapters = {.token_lora_mapping = expanded(MOELORA_I32, SIZES(1))};
  const moelora_lora lora = expanded_lora(4, WIDE, 2, 8);

  const moelora_experts_args experts = {
      .hidden_states = expanded(MOELORA_F32, SIZES(1, 509)),
      .w13 = expanded(MOELORA_F32, SIZES(1, WIDE, 509)),
      .w2 = expanded(MOELORA_F32, SIZES(1, 509, WIDE)),
      .routing = routing,
      .activation = MOELORA_RELU2,
      .out = spread(MOELORA_F32, SIZES(1, 509)),
  };
  TOO_LARGE(experts, &experts, "M is 1, top_k is 2147483392, E is 1, K is 509, I is 2147483647");

  const moelora_gemm_args gemm = {
      .x = expanded(MOELORA_F32, SIZES(1, 8)),
      .w = expanded(MOELORA_F32, SIZES(1, 8, 8)),
      .routing = routing,
      .adapters = adapters,
      .lora = lora,
      .out = spread(MOELORA_F32, SIZES(1, ROWS, 8)),
  };
  TOO_LARGE(gemm, &gemm,
            "M is 1, top_k is 2147483392, E is 1, max_loras is 2, N is 8, K is 8, R is 2147483647");

  const moelora_delta_args delta = {
      .num_experts = 1,
      .x = gemm.x,
      .routing = {.topk_ids = expanded(MOELORA_I32, SIZES(1, FEWER))},
      .adapters = adapters,
      .lora = lora,
      .out = spread(MOELORA_F32, SIZES(1, 8)),
  };
  TOO_LARGE(delta, &delta,
            "M is 1, top_k is 2147483137, E is 1, max_loras is 2, K is 8, columns is 8, "
            "R is 2147483647");

  const moelora_mlp_delta_args mlp = {
      .num_experts = 1,
      .hidden_states = expanded(MOELORA_F32, SIZES(1, WIDE)),
      .routing = {expanded(MOELORA_I32, SIZES(1, FEWER)), expanded(MOELORA_F32, SIZES(1, FEWER))},
      .adapters = adapters,
      .gate_up = expanded_lora(1, 8, 8, WIDE),
      .down = expanded_lora(1, 8, WIDE, 4),
      .out = spread(MOELORA_F32, SIZES(1, WIDE)),
  };
  TOO_LARGE(mlp_delta, &mlp,
            "M is 1, top_k is 2147483137, E is 1, max_loras is 2, K is 2147483647, I is 4, "
            "R of gate_up is 8, R of down is 8");
  release_all();
}

int main(void) {
  test_gemm_errors();
  test_huge_sizes();
  test_experts_errors();
  test_delta_errors();
  test_backward_errors();
  test_pack_errors();
  printf("test_errors: all refusals as expected\n");
  return 0;
}
