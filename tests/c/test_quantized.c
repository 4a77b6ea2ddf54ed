/* Products with quantized weights of every format, by every kernel variant that this machine runs,
 * have the bits of those with the unpacked weights, which are compared with the scalar kernels'. */
#include "cases.h"

static moelora_format any_format(void) {
  return (moelora_format)random_in(1, MOELORA_FORMATS - 1);
}

/* Packed by any number of threads; `unpacked` receives the dequantized values. */
static moelora_tensor packed(moelora_dtype dtype, int64_t experts, int64_t k,
                             const moelora_layout *layout, moelora_tensor *unpacked) {
  const moelora_quantized w = random_quantized(experts, k, layout, layout->x != MOELORA_X_NATIVE);
  moelora_tensor out = new_tiles(experts, k, layout);
  CHECK_OK(moelora_pack_quantized(&w, layout, dtype, &out, maybe() ? &serial : &threaded));
  *unpacked = new_tensor(dtype, SIZES(experts, layout->rows, k));
  CHECK_OK(moelora_unpack_quantized(&out, layout, unpacked, maybe() ? &serial : &threaded));
  return out;
}

/* Compares OUT with what the scalar kernels make of the call; VARIANT is forced again. */
#define CHECK_SCALAR(NAME, VARIANT, ARGS, OUT)                                                     \
  do {                                                                                             \
    moelora_##NAME##_args scalar_ = *(ARGS);                                                       \
    scalar_.out = copy_of(OUT);                                                                    \
    CHECK_OK(moelora_force_variant((OUT)->dtype == MOELORA_BF16 ? "gemm_bf16_scalar"               \
                                                                : "gemm_f16_scalar"));             \
    CHECK_RUN(NAME, &scalar_, serial);                                                             \
    CHECK_OK(moelora_force_variant(VARIANT));                                                      \
    compare(#NAME, OUT, &scalar_.out, 2);                                                          \
  } while (0)

/* `e4m3`: of FP8 weights and FP8 x, any number of columns; x that e4m3 represents exactly is
 * unchanged. */
static void test_gemm(const char *variant, uint64_t number, bool e4m3) {
  const moelora_dtype dtype = dtype_of(variant);
  seed(number + (e4m3 ? 2000 : 0));
  sizes s = random_sizes();
  s.hidden = e4m3 ? random_in(1, 400) : 32 * (maybe() ? random_in(1, 6) : random_in(9, 20));
  if (number == 0 && !e4m3) { /* an expert with several blocks of rows */
    s.tokens = 200;
    s.experts = s.top_k = 1;
    s.hidden = 512;
  }
  const int64_t n = random_in(1, 150);
  moelora_layout layout = {.rows = n};
  layout.format = any_format();
  if (e4m3) {
    layout.format = (moelora_format)random_in(MOELORA_FP8, MOELORA_FP8_ROWS);
    layout.x = MOELORA_X_STATIC, layout.x_scale = 0.25f;
  }
  moelora_gemm_args args = {
      .x = e4m3 ? random_ids(dtype, -8, 8, SIZES(s.tokens, s.hidden))
                : random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n)) : absent,
      .routing = random_routing(s),
      .adapters = random_adapters(s, 8),
      .lora = random_lora(s, dtype, 1, random_in(1, 20), n, s.hidden),
      .out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n)),
  };
  moelora_gemm_args dense = args;
  args.w = packed(dtype, s.experts, s.hidden, &layout, &dense.w);
  args.w_layout = layout;
  CHECK_RUN(gemm, &args, maybe() ? serial : threaded);
  if (!e4m3) {
    dense.out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n));
    CHECK_RUN(gemm, &dense, serial);
    CHECK(same_bytes(&args.out, &dense.out));
  }
  CHECK_SCALAR(gemm, variant, &dense, &args.out);
  release_all();
}

static void test_experts(const char *variant, uint64_t number) {
  const moelora_dtype dtype = dtype_of(variant);
  seed(number + 1000);
  sizes s = random_sizes();
  s.hidden = 32 * random_in(1, 5);
  s.inner = 32 * random_in(1, 5);
  const moelora_activation activation = (moelora_activation)(number % NUM_ACTIVATIONS);
  const bool gated = activation != MOELORA_RELU2;
  const int64_t n13 = s.inner * (gated ? 2 : 1);
  const moelora_layout layout13 = {
      .format = any_format(),
      .order = activation == MOELORA_SWIGLUOAI            ? MOELORA_ROWS_INTERLEAVED
               : !gated || (s.inner % 64 == 0 && maybe()) ? MOELORA_ROWS_PLAIN
                                                          : MOELORA_ROWS_GATE_UP,
      .rows = n13,
  };
  const moelora_layout layout2 = {.format = any_format(), .rows = s.hidden};
  moelora_experts_args args = {
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .w13_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n13)) : absent,
      .w2_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, s.hidden)) : absent,
      .routing = random_routing(s),
      .adapters = random_adapters(s, 8),
      .w13_lora = random_lora(s, dtype, gated ? 2 : 1, random_in(1, 20), n13, s.hidden),
      .w2_lora = random_lora(s, dtype, 1, random_in(1, 20), s.hidden, s.inner),
      .activation = activation,
      .out = new_tensor(dtype, SIZES(s.tokens, s.hidden)),
  };
  moelora_experts_args dense = args;
  args.w13 = packed(dtype, s.experts, s.hidden, &layout13, &dense.w13);
  args.w2 = packed(dtype, s.experts, s.inner, &layout2, &dense.w2);
  args.w13_layout = layout13;
  args.w2_layout = layout2;
  if (number % 4 == 3) { /* one projection in the dtype of the activations */
    args.w2 = dense.w2;
    args.w2_layout = (moelora_layout){0};
  }
  dense.out = new_tensor(dtype, SIZES(s.tokens, s.hidden));
  CHECK_RUN(experts, &args, maybe() ? serial : threaded);
  CHECK_RUN(experts, &dense, serial);
  CHECK(same_bytes(&args.out, &dense.out));
  CHECK_SCALAR(experts, variant, &dense, &dense.out);
  release_all();
}

static void test_errors(void) {
  const moelora_layout layout = {.format = MOELORA_MXFP4, .rows = 70};
  const moelora_quantized good = random_quantized(2, 96, &layout, false);
  const moelora_tensor out = new_tiles(2, 96, &layout);
  CHECK_INT(moelora_tile_bytes(MOELORA_NATIVE), 0);
  CHECK_INT(moelora_tile_bytes((moelora_format)99), 0);
  CHECK_INT(moelora_tile_bytes(MOELORA_MXFP4), 2048 + 128);
  CHECK_INT(moelora_tile_bytes(MOELORA_INT4_ZP_G32), 2048 + 256 + 128);
  CHECK_INT(moelora_tile_bytes(MOELORA_FP8_G64), 8192 + 128);
  CHECK_INT(moelora_tile_bytes(MOELORA_FP8_ROWS), 8192 + 256);
  CHECK_OK(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &out, &serial));
  CHECK_INVALID(moelora_pack_quantized(&good, NULL, MOELORA_BF16, &out, &serial), "layout is NULL");
  CHECK_INVALID(moelora_pack_quantized(&good, &layout, MOELORA_F32, &out, &serial),
                "dtype is float32, expected bfloat16 or float16");
  moelora_tensor wrong = out;
  wrong.size[1] = 1;
  CHECK_INVALID(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &wrong, &serial),
                "tiles.size(1) is 1, expected 2 tiles, as layout.rows is 70, in PLAIN order");
  wrong = out, wrong.stride[2] += 16;
  CHECK_INVALID(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &wrong, &serial),
                "tiles.stride(2) is 2192, expected 2176: tiles must be contiguous");
  wrong = out, wrong.data = good.values.data;
  CHECK_INVALID(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &wrong, &serial),
                "tiles shares memory with values");
  moelora_tensor matrix = new_tensor(MOELORA_BF16, SIZES(2, 70, 96));
  CHECK_OK(moelora_unpack_quantized(&out, &layout, &matrix, &serial));
  matrix.size[1] = 71;
  CHECK_INVALID(moelora_unpack_quantized(&out, &layout, &matrix, &serial),
                "out.size(1) is 71, layout.rows is 70");
  release_all();
}

int main(int argc, char **argv) {
  const uint64_t cases = argc > 1 ? strtoull(argv[1], NULL, 10) : 20;
  int tested = 0;
  test_errors();
  const char *name;
  for (int32_t i = 0; (name = moelora_variant_name(i)); i++) {
    if (!moelora_variant_usable(i) || strstr(name, "_sm") || dtype_of(name) == MOELORA_F32)
      continue;
    CHECK_OK(moelora_force_variant(name));
    snprintf(drawn, sizeof drawn, " by %s", name);
    for (uint64_t number = 0; number < cases; number++) {
      test_gemm(name, number, false);
      test_gemm(name, number, true);
      test_experts(name, number);
    }
    tested++;
  }
  CHECK(tested >= 2); /* the scalar variants run everywhere */
  printf("test_quantized: %d variants, %llu cases each\n", tested, (unsigned long long)cases);
  return 0;
}
