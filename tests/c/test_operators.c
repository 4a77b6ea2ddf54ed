/* gemm, the layer and packing against plain loops, for every kernel variant that this machine
 * runs: values, batch invariance of base rows, determinism with threads, guard bands, skipped ids.
 */
#include "cases.h"

/* ---- one projection ---- */

static void test_gemm(moelora_dtype dtype, uint64_t number, const char *variant) {
  seed(number);
  bool packed = number % 4 == 3;
  sizes s = random_sizes(packed);
  int32_t slices = (int32_t)random_in(0, 3);
  int64_t rank = random_in(1, 20), n = s.inner;
  if (slices == 3)
    n = packed ? 192 : 3 * (1 + n / 3);
  else if (slices == 2)
    n = packed ? n : 2 * (1 + n / 2);
  bool per_row = maybe();
  moelora_gemm_args args = {
      .x = random_tensor(dtype, 1, SIZES(per_row ? s.tokens * s.top_k : s.tokens, s.hidden)),
      .w = random_weights(s, dtype, n, s.hidden, packed),
      .bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n)) : absent,
      .routing = random_routing(s),
      .adapters = random_adapters(s, rank + 3), /* ranks above the stack's are clamped */
      .lora = random_lora(s, dtype, slices, rank, n, s.hidden),
      .mul_routed_weight = maybe(),
      .out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n)),
  };
  if (maybe())
    args.x = spread_rows(args.x, s.hidden + random_in(0, 9));
  int64_t count = count_of(&args.out);
  double *exact = allocate((size_t)count * 8), *rounded = allocate((size_t)count * 8);
  naive_gemm(&args, (rounding){0}, exact);
  naive_gemm(&args, (rounding){true, dtype}, rounded);

  CHECK_RUN(gemm, &args, serial);
  char plan[96], what[96];
  snprintf(plan, sizeof plan, "w=%s", variant);
  snprintf(what, sizeof what, "gemm case %llu with %s", (unsigned long long)number, variant);
  CHECK(strcmp(moelora_last_plan(), plan) == 0);
  check_close(what, &args.out, exact, rounded, count);

  moelora_gemm_args again = args;
  again.out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n));
  CHECK_RUN(gemm, &again, threaded);
  CHECK(same_bytes(&args.out, &again.out));

  /* Rows of tokens without an adapter keep their bits without adapters. */
  again.adapters = (moelora_adapters){.token_lora_mapping = absent};
  again.lora.num_slices = 0;
  CHECK_RUN(gemm, &again, serial);
  for (int64_t m = 0; m < s.tokens; m++)
    if (adapter_of(&args.adapters, slots_of(&args.lora, NULL), m) < 0)
      CHECK(same_token(&args.out, &again.out, m));
  release_all();
}

/* ---- the layer ---- */

static void test_experts(moelora_dtype dtype, uint64_t number, const char *variant) {
  seed(number + 1000);
  bool packed = number % 4 == 3;
  sizes s = random_sizes(packed);
  moelora_activation activation = (moelora_activation)(number % NUM_ACTIVATIONS);
  bool early = number % 7 == 6;
  if (early)
    s.top_k = 1;
  bool gated = activation != MOELORA_RELU2;
  int64_t n13 = s.inner * (gated ? 2 : 1), rank = random_in(1, 20);
  moelora_experts_args args = {
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .w13 = random_weights(s, dtype, n13, s.hidden, packed),
      .w2 = random_weights(s, dtype, s.hidden, s.inner, packed && maybe()),
      .w13_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n13)) : absent,
      .w2_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, s.hidden)) : absent,
      .routing = random_routing(s),
      .adapters = random_adapters(s, rank + 3),
      .w13_lora = random_lora(s, dtype, (int32_t)random_in(0, gated ? 2 : 1), rank, n13, s.hidden),
      .w2_lora =
          random_lora(s, dtype, (int32_t)random_in(0, 1), random_in(1, 20), s.hidden, s.inner),
      .activation = activation,
      .activation_alpha = takes_alpha(activation) && maybe() ? 0.75 : 0,
      .activation_limit = takes_limit(activation) && maybe() ? 0.5 : 0,
      .apply_router_weight_on_input = early,
      .out = new_tensor(dtype, SIZES(s.tokens, s.hidden)),
  };
  int64_t count = count_of(&args.out);
  double *exact = allocate((size_t)count * 8), *rounded = allocate((size_t)count * 8);
  naive_experts(&args, (rounding){0}, exact);
  naive_experts(&args, (rounding){true, dtype}, rounded);

  CHECK_RUN(experts, &args, serial);
  char plan[160], what[96];
  snprintf(plan, sizeof plan, "w13=%s w2=%s", variant, variant);
  snprintf(what, sizeof what, "layer case %llu with %s", (unsigned long long)number, variant);
  CHECK(strcmp(moelora_last_plan(), plan) == 0);
  check_close(what, &args.out, exact, rounded, count);

  moelora_experts_args again = args;
  again.out = new_tensor(dtype, SIZES(s.tokens, s.hidden));
  CHECK_RUN(experts, &again, threaded);
  CHECK(same_bytes(&args.out, &again.out));

  /* In place, from non-contiguous rows. */
  again.hidden_states = spread_rows(args.hidden_states, s.hidden + random_in(0, 9));
  again.out = again.hidden_states;
  CHECK_RUN(experts, &again, serial);
  for (int64_t m = 0; m < s.tokens; m++)
    CHECK(same_token(&args.out, &again.out, m));

  /* Base rows keep their bits without adapters. */
  again = args;
  again.out = new_tensor(dtype, SIZES(s.tokens, s.hidden));
  again.adapters = (moelora_adapters){.token_lora_mapping = absent};
  again.w13_lora.num_slices = again.w2_lora.num_slices = 0;
  CHECK_RUN(experts, &again, serial);
  for (int64_t m = 0; m < s.tokens; m++)
    if (adapter_of(&args.adapters, slots_of(&args.w13_lora, &args.w2_lora), m) < 0)
      CHECK(same_token(&args.out, &again.out, m));
  release_all();
}

/* A batch without tokens is valid and needs neither data nor workspace. */
static void test_empty_batch(void) {
  sizes s = {0, 2, 3, 8, 6, 2};
  moelora_routing routing = {
      .topk_ids = view(NULL, MOELORA_I32, SIZES(0, 2)),
      .topk_weights = view(NULL, MOELORA_F32, SIZES(0, 2)),
  };
  moelora_adapters adapters = {.token_lora_mapping = view(NULL, MOELORA_I32, SIZES(0))};
  moelora_experts_args layer = {
      .hidden_states = view(NULL, MOELORA_F32, SIZES(0, 8)),
      .w13 = random_weights(s, MOELORA_F32, 12, 8, false),
      .w2 = random_weights(s, MOELORA_F32, 8, 6, false),
      .routing = routing,
      .adapters = adapters,
      .w13_lora = random_lora(s, MOELORA_F32, 2, 4, 12, 8),
      .w2_lora = random_lora(s, MOELORA_F32, 1, 4, 8, 6),
      .out = view(NULL, MOELORA_F32, SIZES(0, 8)),
  };
  size_t bytes = 1;
  CHECK_OK(experts_bytes(&layer, &serial, &bytes));
  CHECK_INT(bytes, 0);
  CHECK_OK(call_experts(&layer, &serial));
  moelora_gemm_args gemm = {
      .x = layer.hidden_states,
      .w = layer.w13,
      .routing = routing,
      .adapters = adapters,
      .lora = layer.w13_lora,
      .out = view(NULL, MOELORA_F32, SIZES(0, 2, 12)),
  };
  bytes = 1;
  CHECK_OK(gemm_bytes(&gemm, &serial, &bytes));
  CHECK_INT(bytes, 0);
  CHECK_OK(call_gemm(&gemm, &serial));
  release_all();
}

int main(int argc, char **argv) {
  uint64_t cases = argc > 1 ? strtoull(argv[1], NULL, 10) : 40;
  int tested = 0;
  test_empty_batch();
  const char *name;
  for (int32_t i = 0; (name = moelora_variant_name(i)); i++) {
    if (!moelora_variant_usable(i) || strstr(name, "_sm"))
      continue;
    CHECK_OK(moelora_force_variant(name));
    for (uint64_t number = 0; number < cases; number++) {
      test_gemm(dtype_of(name), number, name);
      test_experts(dtype_of(name), number, name);
    }
    tested++;
  }
  CHECK(tested >= 3); /* the scalar variants run everywhere */
  printf("test_operators: %d variants, %llu cases each\n", tested, (unsigned long long)cases);
  return 0;
}
