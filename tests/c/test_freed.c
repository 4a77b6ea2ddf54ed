/* A tensor with elements but without memory is refused by name, in every argument of every
 * operator, before anything is written. Tensors without elements need no memory. */
#include "valid.h"

enum { M = 5, TOP_K = 2, E = 4, K = 64, I = 64, SLOTS = 2 };

static const sizes shape = {M, TOP_K, E, K, I, SLOTS};
static int refused;

/* `PREPARE` fails if one of the tensors has no memory, and succeeds otherwise. */
#define CHECK_FREED(PREPARE, ...)                                                                  \
  do {                                                                                             \
    moelora_tensor *tensors[] = {__VA_ARGS__};                                                     \
    for (size_t i_ = 0; i_ < sizeof tensors / sizeof *tensors; i_++) {                             \
      void *data_ = tensors[i_]->data;                                                             \
      CHECK(data_);                                                                                \
      tensors[i_]->data = NULL;                                                                    \
      tensors[i_]->name = "freed";                                                                 \
      moelora_status status_ = (PREPARE);                                                          \
      const char *message_ = moelora_error_message();                                              \
      if (status_ != MOELORA_INVALID_ARGUMENT || strncmp(message_, "freed", 5) != 0 ||             \
          !strstr(message_, " has elements but its data is NULL"))                                 \
        FAIL("%s without tensor %d: status %d, '%s'", #PREPARE, (int)i_, (int)status_, message_);  \
      tensors[i_]->data = data_;                                                                   \
      tensors[i_]->name = NULL;                                                                    \
      refused++;                                                                                   \
    }                                                                                              \
    CHECK_OK(PREPARE);                                                                             \
  } while (0)

#define ROUTING(A) &(A).routing.topk_ids, &(A).routing.topk_weights, &(A).routing.expert_map
#define TABLES(A)                                                                                  \
  &(A).adapters.lora_ranks, &(A).adapters.lora_scalings, &(A).adapters.adapter_enabled
#define MAPPING(A) &(A).adapters.token_lora_mapping
#define LISTS(A)                                                                                   \
  &(A).lists.sorted_token_ids, &(A).lists.expert_ids, &(A).lists.num_tokens_post_padded,           \
      &(A).lists.lora_ids

static moelora_call call;

static void test_projection(void) {
  moelora_gemm_args a = valid_gemm(shape);
  CHECK_FREED(moelora_prepare_gemm(&a, &serial, &call), &a.x, &a.w, &a.bias, &a.out, ROUTING(a),
              MAPPING(a), TABLES(a), &a.lora.a[0], &a.lora.a[1], &a.lora.b[0], &a.lora.b[1]);
  a.w = new_tensor(MOELORA_F32, SIZES(E, 1, 1, MOELORA_PACK, MOELORA_PACK));
  CHECK_FREED(moelora_prepare_gemm(&a, &serial, &call), &a.w);
  release_all();
}

static void test_layer(void) {
  moelora_experts_args a = valid_experts(shape, MOELORA_BF16);
  CHECK_FREED(moelora_prepare_experts(&a, &serial, &call), &a.hidden_states, &a.w13, &a.w2,
              &a.w13_bias, &a.w2_bias, &a.out, ROUTING(a), MAPPING(a), TABLES(a), &a.w13_one_a,
              &a.w13_lora.a[1], &a.w13_lora.b[1], &a.w2_lora.a[0], &a.w2_lora.b[0]);
  a.w13_layout = (moelora_layout){.format = MOELORA_MXFP4, .rows = 2 * I};
  a.w13 = new_tensor(MOELORA_U8, SIZES(E, 2, 1, moelora_tile_bytes(MOELORA_MXFP4)));
  a.w2_layout = (moelora_layout){.format = MOELORA_FP8, .rows = K, .x = MOELORA_X_TOKEN};
  a.w2 = new_tensor(MOELORA_U8, SIZES(E, 1, 1, moelora_tile_bytes(MOELORA_FP8)));
  CHECK_FREED(moelora_prepare_experts(&a, &serial, &call), &a.w13, &a.w2);
  release_all();
}

static void test_alignment(void) {
  moelora_align_args a = valid_align(shape, MOELORA_ALIGN_UNIFORM);
  a.routing.expert_map = random_ids(MOELORA_I32, 0, E - 1, SIZES(E));
  CHECK_FREED(moelora_prepare_align(&a, &serial, &call), &a.sorted_token_ids, &a.expert_ids,
              &a.lora_ids, &a.num_tokens_post_padded, ROUTING(a), MAPPING(a),
              &a.adapters.adapter_enabled);
  a.mode = MOELORA_ALIGN_SORTING;
  a.lora_ids = absent;
  a.sorted_weights = new_tensor(MOELORA_F32, a.sorted_token_ids.ndim, a.sorted_token_ids.size);
  a.out_to_zero = new_tensor(MOELORA_F32, SIZES(M, K));
  CHECK_FREED(moelora_prepare_align(&a, &serial, &call), &a.sorted_weights, &a.out_to_zero);
  release_all();
}

static void test_adapters_alone(void) {
  moelora_align_lists_args align = {
      .num_experts = E,
      .max_loras = SLOTS,
      .routing = valid_routing(shape),
      .adapters = valid_adapters(shape),
      .lists = valid_lists(shape),
  };
  CHECK_FREED(moelora_prepare_align_lists(&align, &serial, &call), LISTS(align),
              &align.routing.topk_ids, &align.routing.expert_map, MAPPING(align),
              &align.adapters.adapter_enabled);

  moelora_delta_args a = valid_delta(shape);
  a.mul_routed_weight = true;
  CHECK_FREED(moelora_prepare_delta(&a, &serial, &call), &a.x, &a.out, ROUTING(a), MAPPING(a),
              TABLES(a), &a.lora.a[0], &a.lora.b[0]);
  a.lists = valid_lists(shape);
  a.num_tokens = M;
  a.top_k = TOP_K;
  CHECK_FREED(moelora_prepare_delta(&a, &serial, &call), LISTS(a), &a.routing.topk_weights,
              TABLES(a));
  a.x = absent;
  a.h = random_tensor(MOELORA_F32, 1, SIZES(2, M, TOP_K, VALID_RANK));
  CHECK_FREED(moelora_prepare_delta(&a, &serial, &call), &a.h);

  moelora_mlp_delta_args mlp = {
      .num_experts = E,
      .hidden_states = random_tensor(MOELORA_F32, 1, SIZES(M, K)),
      .routing = valid_routing(shape),
      .adapters = valid_adapters(shape),
      .gate_up = valid_lora(shape, MOELORA_F32, 2, 2 * I, K),
      .down = valid_lora(shape, MOELORA_F32, 1, K, I),
      .out = random_tensor(MOELORA_F32, 1, SIZES(M, K)),
  };
  CHECK_FREED(moelora_prepare_mlp_delta(&mlp, &serial, &call), &mlp.hidden_states, &mlp.out,
              ROUTING(mlp), MAPPING(mlp), TABLES(mlp), &mlp.gate_up.a[1], &mlp.gate_up.b[1],
              &mlp.down.a[0], &mlp.down.b[0]);
  release_all();
}

static void test_packing(void) {
  moelora_tensor w = random_tensor(MOELORA_F32, 1, SIZES(E, I, K));
  moelora_tensor packed = new_tensor(MOELORA_F32, SIZES(E, 1, 1, MOELORA_PACK, MOELORA_PACK));
  CHECK_FREED(moelora_pack_weights(&w, &packed, &serial), &w, &packed);

  const moelora_layout layout = {.format = MOELORA_INT4_ZP, .rows = I};
  moelora_quantized q = {
      .values = random_ids(MOELORA_U8, 0, 255, SIZES(E, I, K / 2)),
      .scales = random_tensor(MOELORA_F32, 0.1, SIZES(E, I, 1)),
      .zeros = random_ids(MOELORA_U8, 0, 15, SIZES(E, I, 1)),
  };
  moelora_tensor tiles = new_tensor(MOELORA_U8, SIZES(E, 1, 1, moelora_tile_bytes(layout.format)));
  CHECK_FREED(moelora_pack_quantized(&q, &layout, MOELORA_BF16, &tiles, &serial), &q.values,
              &q.scales, &q.zeros, &tiles);
  moelora_tensor out = new_tensor(MOELORA_BF16, SIZES(E, I, K));
  CHECK_FREED(moelora_unpack_quantized(&tiles, &layout, &out, &serial), &tiles, &out);
  release_all();
}

static void test_no_elements_need_no_memory(void) {
  moelora_gemm_args a = {
      .x = view(NULL, MOELORA_F32, SIZES(0, K)),
      .w = random_tensor(MOELORA_F32, 1, SIZES(E, I, K)),
      .routing.topk_ids = view(NULL, MOELORA_I32, SIZES(0, TOP_K)),
      .adapters.token_lora_mapping = view(NULL, MOELORA_I32, SIZES(0)),
      .lora = valid_lora(shape, MOELORA_F32, 1, I, K),
      .out = view(NULL, MOELORA_F32, SIZES(0, TOP_K, I)),
  };
  CHECK_OK(call_gemm(&a, &serial));
  release_all();
}

int main(void) {
  test_projection();
  test_layer();
  test_alignment();
  test_adapters_alone();
  test_packing();
  test_no_elements_need_no_memory();
  CHECK(refused > 80);
  printf("test_freed: %d arguments refused\n", refused);
  return 0;
}
