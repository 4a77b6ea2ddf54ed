/* Every error of an alignment and of the exec that all operators share, with its message. */
#include "valid.h"

enum { M = 5, TOP_K = 2, E = 4, SLOTS = 2 };

static const sizes shape = {M, TOP_K, E, 0, 0, SLOTS};

#define run(A) call_align(A, &exec)

static void test_align_errors(void) {
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 16);
  const moelora_align_args base = valid_align(shape, MOELORA_ALIGN_BASE);
  const moelora_align_args uniform = valid_align(shape, MOELORA_ALIGN_UNIFORM);
  const moelora_align_args segmented = valid_align(shape, MOELORA_ALIGN_SEGMENTED);
  const moelora_align_args sorting = valid_align(shape, MOELORA_ALIGN_SORTING);
  moelora_align_args a = base;
  const moelora_align_args *const valid[] = {&base, &uniform, &segmented, &sorting};
  for (int i = 0; i < 4; i++)
    CHECK_OK(call_align(valid[i], &exec));

  REFUSED(base, "mode is 9, expected a moelora_align_mode", a.mode = (moelora_align_mode)9);
  REFUSED(base, "num_experts is 0, expected at least 1", a.num_experts = 0);
  REFUSED(base, "block_size is 0, expected at least 1", a.block_size = 0);
  REFUSED(uniform, "max_loras is 0, expected at least 1", a.max_loras = 0);
  /* Arguments that a mode does not read must not lower its requirements, nor be looked at. */
  REFUSED(base, "expert_ids.size(0) is 0, expected at least 5 blocks", a.max_loras = -1,
          a.expert_ids.size[0] = 0);
  a = base, a.adapters.token_lora_mapping = base.expert_ids;
  a.adapters.token_lora_mapping.ndim = INT32_MAX;
  CHECK_OK(call_align(&a, &exec));

  REFUSED(base, "topk_ids is absent, expected a tensor [M, top_k]", a.routing.topk_ids = absent);
  REFUSED(base, "topk_ids has 1 dimensions, expected 2: [M, top_k]", a.routing.topk_ids.ndim = 1);
  REFUSED(base, "topk_ids has dtype float32, expected int32 or int64",
          a.routing.topk_ids.dtype = MOELORA_F32);
  REFUSED(base, "topk_ids has dtype 17, which is not a moelora_dtype",
          a.routing.topk_ids.dtype = (moelora_dtype)17);
  REFUSED(base, "topk_ids.size(1) is 0, expected top_k of at least 1",
          a.routing.topk_ids.size[1] = 0);
  REFUSED(base, "topk_ids.size(0) is -1, expected 0 or more", a.routing.topk_ids.size[0] = -1);
  REFUSED(base, "topk_ids.size(0) is 2147483648, expected at most 2147483647",
          a.routing.topk_ids.size[0] = 1ll << 31);
  REFUSED(base, "topk_ids has 2147483648 rows (M * top_k), expected at most 2147483647",
          a.routing.topk_ids.size[0] = 1 << 30);
  REFUSED(base, "topk_ids.stride(0) is -2, expected 0 or more", a.routing.topk_ids.stride[0] = -2);
  REFUSED(base, "topk_ids has strides that reach beyond the address space",
          a.routing.topk_ids.stride[0] = INT64_MAX / 2);
  REFUSED(base,
          "topk_ids has elements but its data is NULL, expected memory on the device of the call: "
          "bring it back if it was freed or offloaded",
          a.routing.topk_ids.data = NULL);
  char text[160], *odd = (char *)base.routing.topk_ids.data + 4;
  snprintf(text, sizeof text, "topk_ids starts at %p, expected a multiple of the 8 bytes of int64",
           (void *)odd);
  REFUSED(base, text, a.routing.topk_ids.data = odd, a.routing.topk_ids.dtype = MOELORA_I64);

  REFUSED(sorting, "topk_weights is absent, expected a tensor [M, top_k]",
          a.routing.topk_weights = absent);
  REFUSED(sorting, "topk_weights has dtype bfloat16, expected float32",
          a.routing.topk_weights.dtype = MOELORA_BF16);
  REFUSED(sorting, "topk_weights.size(0) is 4, topk_ids.size(0) is 5",
          a.routing.topk_weights.size[0] = 4);

  moelora_tensor map = random_ids(MOELORA_I32, -1, E - 1, SIZES(E));
  REFUSED(base, "expert_map.size(0) is 3, num_experts is 4", a.routing.expert_map = map,
          a.routing.expert_map.size[0] = 3);
  REFUSED(base, "expert_map.size(0) is 0, expected at least 1", a.routing.expert_map = map,
          a.routing.expert_map.size[0] = 0);
  REFUSED(base, "expert_map has dtype int64, expected int32", a.routing.expert_map = map,
          a.routing.expert_map.dtype = MOELORA_I64);
  REFUSED(base, "expert_map.stride(0) is 2, expected 1: expert_map must be contiguous",
          a.routing.expert_map = map, a.routing.expert_map.stride[0] = 2);

  REFUSED(uniform, "token_lora_mapping.size(0) is 4, topk_ids.size(0) is 5",
          a.adapters.token_lora_mapping.size[0] = 4);
  REFUSED(uniform, "token_lora_mapping has dtype bool, expected int32 or int64",
          a.adapters.token_lora_mapping.dtype = MOELORA_BOOL);
  REFUSED(
      uniform,
      "adapter_enabled.size(0) is 4, expected max_loras, which is 2, or max_loras + 1, which is 3",
      a.adapters.adapter_enabled = new_tensor(MOELORA_I32, SIZES(SLOTS + 2)));
  REFUSED(uniform, "adapter_enabled has dtype int64, expected bool or int32",
          a.adapters.adapter_enabled = new_tensor(MOELORA_I64, SIZES(SLOTS)));

  REFUSED(base, "expert_ids.size(0) is 4, expected at least 5 blocks", a.expert_ids.size[0] = 4);
  REFUSED(base, "expert_ids has dtype int64, expected int32", a.expert_ids.dtype = MOELORA_I64);
  REFUSED(base, "sorted_token_ids.size(0) is 19, expert_ids.size(0) * block_size is 20",
          a.sorted_token_ids.size[0] = 19);
  REFUSED(base, "num_tokens_post_padded.size(0) is 2, the number of totals is 1",
          a.num_tokens_post_padded.size[0] = 2);
  REFUSED(base, "expert_ids.size(0) * block_size is 10737418235, expected at most 2147483647",
          a.block_size = INT32_MAX, a.expert_ids.size[0] = 5);
  REFUSED(base, "lora_ids is given, but only a mode with adapters writes it",
          a.lora_ids = uniform.lora_ids);
  REFUSED(base, "sorted_weights is given, but only moe_sorting writes it",
          a.sorted_weights = sorting.sorted_weights);
  REFUSED(base, "out_to_zero is given, but only moe_sorting writes it",
          a.out_to_zero = sorting.sorted_weights);
  REFUSED(uniform, "lora_ids is absent, expected a tensor [blocks]", a.lora_ids = absent);
  REFUSED(segmented, "lora_ids.size(0) is 5, expert_ids.size(0) * block_size is 20",
          a.lora_ids.size[0] = 5);
  REFUSED(sorting, "sorted_weights is absent, expected a tensor [rows]", a.sorted_weights = absent);
  REFUSED(sorting, "out_to_zero has dtype int32, expected float32, bfloat16 or float16",
          a.out_to_zero = map);
  REFUSED(sorting, "out_to_zero.stride(0) is 5, expected 4: out_to_zero must be contiguous",
          a.out_to_zero = new_tensor(MOELORA_F32, SIZES(4, 4)), a.out_to_zero.stride[0] = 5);
  REFUSED(base, "sorted_token_ids shares memory with topk_ids",
          a.sorted_token_ids.data = a.routing.topk_ids.data);
  REFUSED(base, "expert_ids shares memory with sorted_token_ids",
          a.expert_ids.data = a.sorted_token_ids.data);
  release_all();
}

static void test_exec_errors(void) {
  moelora_align_args args = valid_align(shape, MOELORA_ALIGN_BASE);
  moelora_exec exec = serial;
  size_t bytes;
  CHECK_OK(align_bytes(&args, &exec, &bytes));
  CHECK(bytes > 0);
  char text[160];
  snprintf(text, sizeof text, "the workspace has 0 bytes, expected at least %zu", bytes);
  CHECK_FAILS(call_align(&args, &exec), MOELORA_WORKSPACE_TOO_SMALL, text);
  give_workspace(&exec, bytes + 256);
  exec.workspace_bytes = bytes - 1;
  snprintf(text, sizeof text, "the workspace has %zu bytes, expected at least %zu", bytes - 1,
           bytes);
  CHECK_FAILS(call_align(&args, &exec), MOELORA_WORKSPACE_TOO_SMALL, text);
  exec.workspace = (char *)exec.workspace + 64;
  exec.workspace_bytes = bytes;
  snprintf(text, sizeof text, "the workspace starts at %p, expected a multiple of 256 bytes",
           exec.workspace);
  CHECK_INVALID(call_align(&args, &exec), text);
  exec.workspace = (char *)exec.workspace - 64;
  CHECK_OK(call_align(&args, &exec)); /* clears the message */

  CHECK_INVALID(call_align(NULL, &exec), "args or exec is NULL");
  CHECK_INVALID(call_align(&args, NULL), "args or exec is NULL");
  exec.num_threads = -1;
  CHECK_INVALID(call_align(&args, &exec), "exec.num_threads is -1, expected 0 or more");
  exec.num_threads = 0;
  exec.device = (moelora_device)5;
  CHECK_INVALID(call_align(&args, &exec), "exec.device is 5, expected a moelora_device");
  exec.device = MOELORA_CUDA;
  if (!moelora_has_device(MOELORA_CUDA))
    CHECK_FAILS(call_align(&args, &exec), MOELORA_UNSUPPORTED,
                "this build has no CUDA kernels: see docs/install.md");

  CHECK(moelora_has_device(MOELORA_CPU));
  CHECK_INVALID(moelora_force_variant("gemm_f32_nonsense"),
                "variant 'gemm_f32_nonsense' does not exist");
  CHECK_OK(moelora_force_variant(NULL));
  static const int32_t no_capabilities[] = {8, 79, -80, 1000};
  for (int i = 0; i < 4; i++) {
    snprintf(text, sizeof text, "compute_capability is %d, expected 80 or more, or 0",
             no_capabilities[i]);
    CHECK_INVALID(moelora_limit_capability(no_capabilities[i]), text);
  }
  CHECK_OK(moelora_limit_capability(0));
  CHECK(moelora_variant_name(-1) == NULL && moelora_variant_name(10000) == NULL);
  CHECK(!moelora_variant_usable(-1) && !moelora_variant_usable(10000));
  release_all();
}

int main(void) {
  test_align_errors();
  test_exec_errors();
  printf("test_errors_align: all refusals as expected\n");
  return 0;
}
