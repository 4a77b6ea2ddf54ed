/* Quantised weights for every format and kernel variant that this machine runs: numbers to tiles
 * and back, then products bit by bit against those with the unpacked weights. */
#include "cases.h"

enum { NUM_FORMATS = MOELORA_INT4_ZP_G32 };

static bool has_zeros(moelora_format format) {
  return format == MOELORA_INT4_ZP || format == MOELORA_INT4_ZP_G32;
}

static bool groups_of_32(moelora_format format) {
  return format == MOELORA_MXFP4 || format == MOELORA_INT4_G32 || format == MOELORA_INT4_ZP_G32;
}

static int64_t tiles(int64_t n) {
  return (n + 63) / 64;
}

static moelora_tensor new_tiles(int64_t experts, int64_t k, const moelora_layout *layout) {
  const int64_t rows =
      layout->order == MOELORA_ROWS_PLAIN ? tiles(layout->rows) : 2 * tiles(layout->rows / 2);
  return new_tensor(MOELORA_U8, SIZES(experts, rows, tiles(k), moelora_tile_bytes(layout->format)));
}

/* Any numbers of [experts, n, k]; scales that keep products small. */
static moelora_quantized random_numbers(int64_t experts, int64_t n, int64_t k,
                                        moelora_format format) {
  const int64_t group = groups_of_32(format) ? 32 : k % 64 == 0 && maybe() ? 64 : k;
  const bool mxfp4 = format == MOELORA_MXFP4;
  const moelora_dtype dtype = (moelora_dtype)random_in(MOELORA_F32, MOELORA_F16);
  moelora_quantized w = {
      .values = random_ids(MOELORA_U8, 0, 255, SIZES(experts, n, k / 2)),
      .scales = mxfp4 ? random_ids(MOELORA_U8, 118, 124, SIZES(experts, n, k / group))
                      : random_tensor(dtype, 0.05, SIZES(experts, n, k / group)),
  };
  if (has_zeros(format))
    w.zeros = random_ids(MOELORA_U8, 0, 16, SIZES(experts, n, k / group));
  return w;
}

static double number_at(const moelora_quantized *w, moelora_format format, moelora_dtype dtype,
                        int64_t e, int64_t n, int64_t k) {
  static const double e2m1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  const int64_t group = 2 * w->values.size[2] / w->scales.size[2];
  const int byte =
      ((uint8_t *)w->values.data)[(e * w->values.size[1] + n) * w->values.size[2] + k / 2];
  const int q = k % 2 ? byte >> 4 : byte & 15;
  const int64_t place = (e * w->values.size[1] + n) * w->scales.size[2] + k / group;
  if (format == MOELORA_MXFP4)
    return round_to((q & 8 ? -1 : 1) * ldexp(e2m1[q & 7], ((uint8_t *)w->scales.data)[place] - 127),
                    dtype);
  const double scale = round_to(read_value(w->scales.data, w->scales.dtype, place), dtype);
  const int zero = has_zeros(format) ? ((uint8_t *)w->zeros.data)[place] : 8;
  return round_to((q - zero) * scale, dtype);
}

/* Packed by any number of threads; `unpacked` is what they mean. */
static moelora_tensor packed(moelora_dtype dtype, int64_t experts, int64_t k,
                             const moelora_layout *layout, moelora_tensor *unpacked) {
  const moelora_quantized w = random_numbers(experts, layout->rows, k, layout->format);
  moelora_tensor out = new_tiles(experts, k, layout);
  CHECK_OK(moelora_pack_quantized(&w, layout, dtype, &out, maybe() ? &serial : &threaded));
  *unpacked = new_tensor(dtype, SIZES(experts, layout->rows, k));
  CHECK_OK(moelora_unpack_quantized(&out, layout, unpacked, maybe() ? &serial : &threaded));
  for (int64_t e = 0; e < experts; e++)
    for (int64_t n = 0; n < layout->rows; n++)
      for (int64_t i = 0; i < k; i++) {
        const double got = at(unpacked, e, n, i, 0);
        const double want = number_at(&w, layout->format, dtype, e, n, i);
        if (got != want)
          FAIL("format %d, order %d: number (%lld, %lld, %lld) is %g, expected %g", layout->format,
               layout->order, (long long)e, (long long)n, (long long)i, got, want);
      }
  return out;
}

static void run_experts(const moelora_experts_args *args, moelora_exec exec) {
  size_t bytes;
  CHECK_OK(experts_bytes(args, &exec, &bytes));
  give_workspace(&exec, bytes);
  CHECK_OK(call_experts(args, &exec));
}

static void run_gemm(const moelora_gemm_args *args, moelora_exec exec) {
  size_t bytes;
  CHECK_OK(gemm_bytes(args, &exec, &bytes));
  give_workspace(&exec, bytes);
  CHECK_OK(call_gemm(args, &exec));
}

static void test_gemm(moelora_dtype dtype, uint64_t number) {
  seed(number);
  sizes s = random_sizes(false);
  s.hidden = 32 * random_in(1, 6);
  const int64_t n = random_in(1, 150);
  const moelora_layout layout = {.format = (moelora_format)random_in(1, NUM_FORMATS), .rows = n};
  moelora_gemm_args args = {
      .x = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n)) : absent,
      .routing = random_routing(s),
      .adapters = random_adapters(s, 8),
      .lora = random_lora(s, dtype, 1, random_in(1, 20), n, s.hidden),
      .out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n)),
  };
  moelora_gemm_args dense = args;
  args.w = packed(dtype, s.experts, s.hidden, &layout, &dense.w);
  args.w_layout = layout;
  dense.out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n));
  run_gemm(&args, maybe() ? serial : threaded);
  run_gemm(&dense, serial);
  CHECK(same_bytes(&args.out, &dense.out));
  release_all();
}

static void test_experts(moelora_dtype dtype, uint64_t number) {
  seed(number + 1000);
  sizes s = random_sizes(false);
  s.hidden = 32 * random_in(1, 5);
  s.inner = 32 * random_in(1, 5);
  const moelora_activation activation = (moelora_activation)(number % 5);
  const bool gated = activation != MOELORA_RELU2;
  const int64_t n13 = s.inner * (gated ? 2 : 1);
  const moelora_layout layout13 = {
      .format = (moelora_format)random_in(1, NUM_FORMATS),
      .order = activation == MOELORA_SWIGLUOAI            ? MOELORA_ROWS_INTERLEAVED
               : !gated || (s.inner % 64 == 0 && maybe()) ? MOELORA_ROWS_PLAIN
                                                          : MOELORA_ROWS_GATE_UP,
      .rows = n13,
  };
  const moelora_layout layout2 = {.format = (moelora_format)random_in(1, NUM_FORMATS),
                                  .rows = s.hidden};
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
  if (number % 4 == 3) { /* one of both in the dtype of the activations */
    args.w2 = dense.w2;
    args.w2_layout = (moelora_layout){0};
  }
  dense.out = new_tensor(dtype, SIZES(s.tokens, s.hidden));
  run_experts(&args, maybe() ? serial : threaded);
  run_experts(&dense, serial);
  CHECK(same_bytes(&args.out, &dense.out));
  release_all();
}

static void test_errors(void) {
  const moelora_layout layout = {.format = MOELORA_MXFP4, .rows = 70};
  const moelora_quantized good = random_numbers(2, 70, 96, MOELORA_MXFP4);
  const moelora_tensor out = new_tiles(2, 96, &layout);
  CHECK_INT(moelora_tile_bytes(MOELORA_NATIVE), 0);
  CHECK_INT(moelora_tile_bytes((moelora_format)99), 0);
  CHECK_INT(moelora_tile_bytes(MOELORA_MXFP4), 2048 + 128);
  CHECK_INT(moelora_tile_bytes(MOELORA_INT4_ZP_G32), 2048 + 256 + 128);
  CHECK_OK(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &out, &serial));
  CHECK_FAILS(moelora_pack_quantized(&good, NULL, MOELORA_BF16, &out, &serial),
              MOELORA_INVALID_ARGUMENT, "layout is NULL");
  CHECK_FAILS(moelora_pack_quantized(&good, &layout, MOELORA_F32, &out, &serial),
              MOELORA_INVALID_ARGUMENT, "dtype is float32, expected bfloat16 or float16");
  moelora_tensor wrong = out;
  wrong.size[1] = 1;
  CHECK_FAILS(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &wrong, &serial),
              MOELORA_INVALID_ARGUMENT,
              "tiles.size(1) is 1, expected 2 tiles, as layout.rows is 70, in PLAIN order");
  wrong = out, wrong.stride[2] += 16;
  CHECK_FAILS(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &wrong, &serial),
              MOELORA_INVALID_ARGUMENT,
              "tiles.stride(2) is 2192, expected 2176: tiles must be contiguous");
  wrong = out, wrong.data = good.values.data;
  CHECK_FAILS(moelora_pack_quantized(&good, &layout, MOELORA_BF16, &wrong, &serial),
              MOELORA_INVALID_ARGUMENT, "tiles shares memory with values");
  moelora_tensor matrix = new_tensor(MOELORA_BF16, SIZES(2, 70, 96));
  CHECK_OK(moelora_unpack_quantized(&out, &layout, &matrix, &serial));
  matrix.size[1] = 71;
  CHECK_FAILS(moelora_unpack_quantized(&out, &layout, &matrix, &serial), MOELORA_INVALID_ARGUMENT,
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
    for (uint64_t number = 0; number < cases; number++) {
      test_gemm(dtype_of(name), number);
      test_experts(dtype_of(name), number);
    }
    tested++;
  }
  CHECK(tested >= 2); /* the scalar rows run everywhere */
  printf("test_quantized: %d variants, %llu cases each\n", tested, (unsigned long long)cases);
  return 0;
}
