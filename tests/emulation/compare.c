/* Random calls on the emulated GPU against the same on the CPU: layers, projections, adapters
 * alone, alignments, packing; as planned and with a kernel forced; and in batch-invariant mode a
 * part of the tokens, with another kernel, against the whole, bit for bit.
 *
 *   compare KIND FIRST COUNT [NAME]    KIND: experts, gemm, delta, mlp, align, pack or all; NAME:
 * what forced variants have in common, "-": none Prints a hash of all outputs, for builds that
 * should agree. */
#include "cases.h"

static const char *wanted = "";
static uint64_t hash = 14695981039346656037u;
static char drawn[512];
static const moelora_layout native;

static void hash_tensor(const moelora_tensor *t) {
  const unsigned char *bytes = t->data;
  for (size_t i = 0; i < (size_t)count_of(t) * dtype_bytes(t->dtype); i++)
    hash = (hash ^ bytes[i]) * 1099511628211u;
}

#define DESCRIBE(...) snprintf(drawn + strlen(drawn), sizeof drawn - strlen(drawn), __VA_ARGS__)

static moelora_exec gpu(bool invariant) {
  return (moelora_exec){.device = MOELORA_CUDA, .batch_invariant = invariant};
}

/* A kernel of what a case has: its dtype, and the format of its weights. */
static bool suits(const char *name, moelora_dtype dtype, const moelora_layout *layout) {
  static const char *words[] = {"mxfp4", "int4", "w8a16", "w8a8"};
  const moelora_format f = layout->format;
  const int word = f == MOELORA_NATIVE             ? -1
                   : f == MOELORA_MXFP4            ? 0
                   : f < MOELORA_FP8               ? 1
                   : layout->x == MOELORA_X_NATIVE ? 2
                                                   : 3;
  if (!strstr(name, "_i32_") && dtype_of(name) != dtype)
    return false;
  if (strncmp(name, "gemm", 4) && strncmp(name, "decode", 6))
    return true;
  for (int i = 0; i < 4; i++)
    if (strstr(name, words[i]))
      return i == word;
  return word < 0;
}

/* One or two kernels of different roles; of four cases one has none. */
static void force_any(moelora_dtype dtype, const moelora_layout *layout) {
  static const char *names[512];
  static int count;
  const char *name;
  for (int32_t i = count ? -1 : 0; i >= 0 && (name = moelora_variant_name(i)); i++)
    if (strstr(name, "_sm"))
      names[count++] = name;
  CHECK_OK(moelora_force_variant(NULL));
  if (strcmp(wanted, "-") == 0 || (!*wanted && random_in(0, 3) == 0))
    return;
  for (int tries = 0; tries < 10000; tries++) {
    char both[256];
    const char *first = names[random_in(0, count - 1)], *second = names[random_in(0, count - 1)];
    if (!strstr(first, wanted) || !suits(first, dtype, layout) || !suits(second, dtype, layout))
      continue;
    snprintf(both, sizeof both, maybe() ? "%s" : "%s,%s", first, second);
    if (moelora_force_variant(both) == MOELORA_OK) {
      DESCRIBE(" forced %s", both);
      return;
    }
  }
}

/* Rows of what differs. `slack`: how much more than a rounding a row may be off. */
static void compare(const char *what, const moelora_tensor *got, const moelora_tensor *want,
                    double slack) {
  const int64_t columns = got->size[got->ndim - 1], rows = count_of(got) / columns;
  const double unit = got->dtype == MOELORA_F16 ? 0x1p-11 : 0x1p-8;
  double largest = 0;
  for (int64_t i = 0; i < rows * columns; i++)
    largest = fmax(largest, fabs(read_value(want->data, want->dtype, i)));
  for (int64_t row = 0; row < rows; row++) {
    double error = 0, size = 0, most = 0;
    int64_t place = 0;
    for (int64_t i = 0; i < columns; i++) {
      const double a = read_value(got->data, got->dtype, row * columns + i);
      const double b = read_value(want->data, want->dtype, row * columns + i);
      const double off = isfinite(a) ? fabs(a - b) : INFINITY;
      if (off > most)
        most = off, place = i;
      error += off * off, size += b * b;
    }
    const double limit = slack * unit * fmax(sqrt(size / (double)columns), 0.1 * largest);
    if (!(sqrt(error / (double)columns) <= 2 * limit) || !(most <= 12 * limit))
      FAIL("%s%s: row %lld of %lld is off by %g of %g (rms %g of %g), most at %lld of %lld: %g, "
           "expected %g (%s)",
           what, drawn, (long long)row, (long long)rows, most, largest,
           sqrt(error / (double)columns), sqrt(size / (double)columns), (long long)place,
           (long long)columns, read_value(got->data, got->dtype, row * columns + place),
           read_value(want->data, want->dtype, row * columns + place), moelora_last_plan());
  }
}

static moelora_tensor like(const moelora_tensor *t) {
  moelora_tensor copy = new_tensor(t->dtype, t->ndim, t->size);
  memcpy(copy.data, t->data, (size_t)count_of(t) * dtype_bytes(t->dtype));
  return copy;
}

#define RUN(NAME)                                                                                  \
  static void run_##NAME(const moelora_##NAME##_args *args, moelora_exec exec) {                   \
    size_t bytes;                                                                                  \
    moelora_status status = NAME##_bytes(args, &exec, &bytes);                                     \
    if (status != MOELORA_OK)                                                                      \
      FAIL(#NAME "%s: %s", drawn, moelora_error_message());                                        \
    give_workspace(&exec, bytes);                                                                  \
    if (bytes)                                                                                     \
      memset(exec.workspace, 0xff, bytes);                                                         \
    CHECK_OK(call_##NAME(args, &exec));                                                            \
    if (getenv("EMULATION_VERBOSE"))                                                               \
      fprintf(stderr, "%s: %s\n", drawn, moelora_last_plan());                                     \
    check_guards();                                                                                \
  }
RUN(experts)
RUN(gemm)
RUN(delta)
RUN(mlp_delta)
RUN(align)
RUN(align_lists)

/* ---- problems ---- */

static int64_t one_of(const int64_t *values, int64_t count) {
  return values[random_in(0, count - 1)];
}
#define ONE_OF(...)                                                                                \
  one_of((int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static sizes draw_sizes(int64_t depth_of) {
  sizes s = {.experts = random_in(1, 6)};
  s.tokens = ONE_OF(1, random_in(2, 8), random_in(2, 8), random_in(9, 40), random_in(41, 120),
                    random_in(121, 300));
  s.top_k = random_in(1, s.experts < 4 ? s.experts : 4);
  const int64_t most = s.tokens > 100 ? 256 : 512;
  s.hidden = depth_of * random_in(1, most / depth_of);
  s.inner = depth_of * random_in(1, most / 2 / depth_of);
  s.slots = random_in(1, 4);
  return s;
}

static int64_t draw_rank(void) {
  return ONE_OF(random_in(1, 16), 8, 16, 32, 64, random_in(17, 128), 128);
}

static moelora_adapters draw_adapters(sizes s, int64_t max_rank) {
  moelora_adapters adapters = random_adapters(s, max_rank);
  if (random_in(0, 3) == 0) /* one for all */
    for (int64_t m = 0; m < s.tokens; m++)
      write_value(adapters.token_lora_mapping.data, adapters.token_lora_mapping.dtype, m, 0);
  return adapters;
}

static moelora_lora draw_lora(sizes s, moelora_dtype dtype, int32_t slices, int64_t n, int64_t k) {
  return random_lora(s, dtype, slices, draw_rank(), n, k);
}

/* Weights of a format: random bytes of tiles, with scales that keep sums near 1. */
static moelora_tensor draw_tiles(moelora_dtype dtype, sizes s, int64_t k,
                                 const moelora_layout *layout) {
  const moelora_format f = layout->format;
  const int64_t n = layout->rows;
  const bool fp8 = f >= MOELORA_FP8, gate_up = layout->order != MOELORA_ROWS_PLAIN;
  const bool zeros = f == MOELORA_INT4_ZP || f == MOELORA_INT4_ZP_G32;
  const bool of_32 = f == MOELORA_MXFP4 || f == MOELORA_INT4_G32 || f == MOELORA_INT4_ZP_G32;
  const double scale = 1 / sqrt((double)k);
  moelora_quantized w = {0};
  if (fp8) {
    const int64_t wide = f == MOELORA_FP8_G64 ? 64 : 128;
    w.block_rows = f == MOELORA_FP8_ROWS ? random_in(1, n) : gate_up ? n : 64 * random_in(1, 2);
    w.block_columns = maybe() ? wide : k;
    w.values = random_ids(MOELORA_U8, 0, 251, SIZES(s.experts, n, k));
    for (int64_t i = 0; i < count_of(&w.values); i++)
      ((uint8_t *)w.values.data)[i] += ((uint8_t *)w.values.data)[i] >= 126 ? 2 : 0;
    w.scales = new_tensor(
        MOELORA_F32, SIZES(s.experts, (n - 1) / w.block_rows + 1, (k - 1) / w.block_columns + 1));
    for (int64_t i = 0; i < count_of(&w.scales); i++)
      ((float *)w.scales.data)[i] = (float)(scale / 100 * (1.5 + random_unit()));
  } else {
    const int64_t group = of_32 ? 32 : k % 64 == 0 && maybe() ? 64 : k;
    w.values = random_ids(MOELORA_U8, 0, 255, SIZES(s.experts, n, k / 2));
    w.scales = f == MOELORA_MXFP4
                   ? random_ids(MOELORA_U8, 120, 123, SIZES(s.experts, n, k / group))
                   : random_tensor(MOELORA_F32, scale / 4, SIZES(s.experts, n, k / group));
    if (zeros)
      w.zeros = random_ids(MOELORA_U8, 0, 16, SIZES(s.experts, n, k / group));
  }
  const int64_t rows = gate_up ? (n / 2 + 63) / 64 * 2 : (n + 63) / 64;
  moelora_tensor tiles =
      new_tensor(MOELORA_U8, SIZES(s.experts, rows, fp8 ? (k + 127) / 128 : (k + 63) / 64,
                                   moelora_tile_bytes(f)));
  CHECK_OK(moelora_pack_quantized(&w, layout, dtype, &tiles, &serial));
  return tiles;
}

static moelora_layout draw_layout(int64_t rows, moelora_row_order order, moelora_x_format x) {
  const int64_t kind = random_in(0, 3);
  if (kind == 0)
    return (moelora_layout){0};
  moelora_layout layout = {.rows = rows, .order = order};
  layout.format = kind == 3 ? (moelora_format)random_in(MOELORA_FP8, MOELORA_FP8_ROWS)
                            : (moelora_format)random_in(MOELORA_MXFP4, MOELORA_INT4_ZP_G32);
  if (kind == 3) {
    layout.x = x;
    layout.x_scale = x == MOELORA_X_STATIC ? 0.01f : 0;
  }
  return layout;
}

static moelora_tensor draw_weights(moelora_dtype dtype, sizes s, int64_t n, int64_t k,
                                   moelora_layout *layout) {
  if (layout->format != MOELORA_NATIVE)
    return draw_tiles(dtype, s, k, layout);
  return random_weights(s, dtype, n, k, n % 64 == 0 && k % 64 == 0 && maybe());
}

static double slack_of(const moelora_layout *layout) {
  return layout->x == MOELORA_X_NATIVE ? 2 : 10;
}

/* A part of the rows of a tensor whose first dimension is tokens (or rows of them). */
static moelora_tensor part(const moelora_tensor *t, int64_t first, int64_t count) {
  moelora_tensor p = *t;
  if (!t->data)
    return p;
  p.data = (char *)t->data + (size_t)(first * t->stride[0]) * dtype_bytes(t->dtype);
  p.size[0] = count;
  return p;
}

static void same_rows(const moelora_tensor *got, const moelora_tensor *whole, int64_t first,
                      const char *plan) {
  const size_t row = (size_t)whole->stride[0] * dtype_bytes(whole->dtype);
  for (int64_t m = 0; m < got->size[0]; m++)
    if (memcmp((char *)got->data + (size_t)m * row, (char *)whole->data + (size_t)(first + m) * row,
               row))
      FAIL("%s: token %lld alone differs: %s and %s", drawn, (long long)(first + m), plan,
           moelora_last_plan());
}

static void test_experts(uint64_t number) {
  seed(number + 1000);
  const bool quantised = maybe();
  sizes s = draw_sizes(quantised ? 32 : ONE_OF(1, 8, 64, 64));
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const moelora_activation activation = (moelora_activation)random_in(0, 4);
  const bool gated = activation != MOELORA_RELU2, invariant = maybe();
  const int64_t n13 = s.inner * (gated ? 2 : 1);
  const moelora_x_format x = (moelora_x_format)random_in(0, 3);
  moelora_layout layout13 = {0}, layout2 = {0};
  if (quantised) {
    layout13 = draw_layout(n13,
                           activation == MOELORA_SWIGLUOAI ? MOELORA_ROWS_INTERLEAVED
                           : gated                         ? MOELORA_ROWS_GATE_UP
                                                           : MOELORA_ROWS_PLAIN,
                           x);
    if (random_in(0, 3)) {
      layout2 = layout13;
      layout2.order = MOELORA_ROWS_PLAIN;
      layout2.rows = layout13.format ? s.hidden : 0;
    } else {
      layout2 = draw_layout(s.hidden, MOELORA_ROWS_PLAIN, x);
    }
  }
  if (random_in(0, 3) == 0)
    s.top_k = 1;
  moelora_experts_args args = {
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .w13 = draw_weights(dtype, s, n13, s.hidden, &layout13),
      .w2 = draw_weights(dtype, s, s.hidden, s.inner, &layout2),
      .w13_layout = layout13,
      .w2_layout = layout2,
      .w13_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n13)) : absent,
      .w2_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, s.hidden)) : absent,
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .w13_lora = random_in(0, 5) ? draw_lora(s, dtype, gated && maybe() ? 2 : 1, n13, s.hidden)
                                  : (moelora_lora){0},
      .w2_lora = random_in(0, 5) ? draw_lora(s, dtype, 1, s.hidden, s.inner) : (moelora_lora){0},
      .activation = activation,
      .apply_router_weight_on_input = s.top_k == 1 && maybe(),
      .out = new_tensor(dtype, SIZES(s.tokens, s.hidden)),
  };
  if (maybe() && (activation == MOELORA_SILU || activation == MOELORA_SWIGLUOAI))
    args.activation_limit = 0.5;
  moelora_experts_args want = args;
  want.out = like(&args.out);
  snprintf(
      drawn, sizeof drawn,
      " %llu: %s M=%lld k=%lld E=%lld K=%lld I=%lld act=%d formats=%d,%d x=%d,%d ranks=%lld,%lld%s",
      (unsigned long long)number, dtype_name(dtype), (long long)s.tokens, (long long)s.top_k,
      (long long)s.experts, (long long)s.hidden, (long long)s.inner, activation, layout13.format,
      layout2.format, layout13.x, layout2.x,
      (long long)(args.w13_lora.num_slices ? args.w13_lora.a[0].size[2] : 0),
      (long long)(args.w2_lora.num_slices ? args.w2_lora.a[0].size[2] : 0),
      invariant ? " invariant" : "");
  moelora_force_variant(NULL);
  run_experts(&want, serial);
  force_any(dtype, maybe() ? &layout13 : &layout2);
  run_experts(&args, gpu(invariant));
  char plan[512];
  snprintf(plan, sizeof plan, "%s", moelora_last_plan());
  compare("experts", &args.out, &want.out, fmax(slack_of(&layout13), slack_of(&layout2)));
  hash_tensor(&args.out);
  if (invariant) {
    const int64_t count = random_in(1, s.tokens), first = random_in(0, s.tokens - count);
    moelora_experts_args some = args;
    some.hidden_states = part(&args.hidden_states, first, count);
    some.routing.topk_ids = part(&args.routing.topk_ids, first, count);
    some.routing.topk_weights = part(&args.routing.topk_weights, first, count);
    some.adapters.token_lora_mapping = part(&args.adapters.token_lora_mapping, first, count);
    some.out = new_tensor(dtype, SIZES(count, s.hidden));
    DESCRIBE(", %lld tokens from %lld", (long long)count, (long long)first);
    force_any(dtype, maybe() ? &layout13 : &layout2);
    run_experts(&some, gpu(true));
    same_rows(&some.out, &args.out, first, plan);
  }
  release_all();
}

static void test_gemm(uint64_t number) {
  seed(number + 2000);
  const bool quantised = maybe();
  sizes s = draw_sizes(quantised ? 32 : ONE_OF(1, 8, 64));
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const int64_t n = ONE_OF(random_in(1, 300), 64 * random_in(1, 6), 8 * random_in(1, 40));
  moelora_layout layout = {0};
  if (quantised)
    layout = draw_layout(n, MOELORA_ROWS_PLAIN, (moelora_x_format)random_in(0, 3));
  const bool invariant = maybe(), per_row = maybe();
  const int32_t slices = n % 3 == 0 ? 3 : n % 2 == 0 ? 2 : 1;
  moelora_gemm_args args = {
      .x = random_tensor(dtype, 1, SIZES(per_row ? s.tokens * s.top_k : s.tokens, s.hidden)),
      .w = draw_weights(dtype, s, n, s.hidden, &layout),
      .w_layout = layout,
      .bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n)) : absent,
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .lora = random_in(0, 5) ? draw_lora(s, dtype, maybe() ? slices : 1, n, s.hidden)
                              : (moelora_lora){0},
      .mul_routed_weight = maybe(),
      .out = new_tensor(dtype, SIZES(s.tokens, s.top_k, n)),
  };
  if (maybe())
    args.x = spread_rows(args.x, s.hidden + ONE_OF(1, 8, 64));
  moelora_gemm_args want = args;
  want.out = like(&args.out);
  snprintf(drawn, sizeof drawn,
           " %llu: %s M=%lld k=%lld E=%lld K=%lld N=%lld format=%d x=%d rank=%lld%s",
           (unsigned long long)number, dtype_name(dtype), (long long)s.tokens, (long long)s.top_k,
           (long long)s.experts, (long long)s.hidden, (long long)n, layout.format, layout.x,
           (long long)(args.lora.num_slices ? args.lora.a[0].size[2] : 0),
           invariant ? " invariant" : "");
  moelora_force_variant(NULL);
  run_gemm(&want, serial);
  force_any(dtype, &layout);
  run_gemm(&args, gpu(invariant));
  char plan[512];
  snprintf(plan, sizeof plan, "%s", moelora_last_plan());
  compare("gemm", &args.out, &want.out, slack_of(&layout));
  hash_tensor(&args.out);
  if (invariant) {
    const int64_t count = random_in(1, s.tokens), first = random_in(0, s.tokens - count);
    moelora_gemm_args some = args;
    const int64_t rows = per_row ? s.top_k : 1;
    some.x = part(&args.x, first * rows, count * rows);
    some.routing.topk_ids = part(&args.routing.topk_ids, first, count);
    some.routing.topk_weights = part(&args.routing.topk_weights, first, count);
    some.adapters.token_lora_mapping = part(&args.adapters.token_lora_mapping, first, count);
    some.out = new_tensor(dtype, SIZES(count, s.top_k, n));
    DESCRIBE(", %lld tokens from %lld", (long long)count, (long long)first);
    force_any(dtype, &layout);
    run_gemm(&some, gpu(true));
    same_rows(&some.out, &args.out, first, plan);
  }
  release_all();
}

static void test_delta(uint64_t number) {
  seed(number + 3000);
  sizes s = draw_sizes(ONE_OF(1, 8, 64));
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const bool summed = random_in(0, 2) == 0, invariant = maybe(), silu = random_in(0, 3) == 0,
             lists = random_in(0, 2) == 0;
  const int32_t slices = silu ? (int32_t)random_in(1, 2) : (int32_t)random_in(1, 4);
  const int64_t n = 2 * slices * ONE_OF(random_in(1, 64), 8 * random_in(1, 10), 32);
  const int64_t columns = silu ? n / 2 : n;
  moelora_delta_args args = {
      .num_experts = (int32_t)s.experts,
      .x = random_tensor(dtype, 1, SIZES(maybe() ? s.tokens * s.top_k : s.tokens, s.hidden)),
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .lora = draw_lora(s, dtype, slices, n, s.hidden),
      .silu_and_mul = silu,
      .mul_routed_weight = !silu && maybe(),
      .add_inputs = !silu && maybe(),
      .out_offset = silu ? 0 : ONE_OF(0, random_in(0, 3), 8),
      .num_tokens = s.tokens,
      .top_k = (int32_t)s.top_k,
  };
  const int64_t width = args.out_offset + columns + (silu ? 0 : ONE_OF(0, random_in(0, 3), 8));
  args.out = summed && !silu ? random_tensor(dtype, 1, SIZES(s.tokens, width))
                             : random_tensor(dtype, 1, SIZES(s.tokens, s.top_k, width));
  const int64_t rank = args.lora.a[0].size[2];
  snprintf(drawn, sizeof drawn,
           " %llu: %s M=%lld k=%lld E=%lld K=%lld N=%lld rank=%lld slices=%d%s%s%s%s",
           (unsigned long long)number, dtype_name(dtype), (long long)s.tokens, (long long)s.top_k,
           (long long)s.experts, (long long)s.hidden, (long long)n, (long long)rank, slices,
           summed ? " summed" : "", silu ? " silu" : "", lists ? " lists" : "",
           invariant ? " invariant" : "");
  moelora_force_variant(NULL);
  if (lists) {
    const int32_t block = (int32_t)ONE_OF(16, 32, 64);
    const int64_t blocks = moelora_align_max_blocks(MOELORA_ALIGN_BASE, s.tokens * s.top_k,
                                                    (int32_t)s.experts, 0, block);
    moelora_align_lists_args align = {
        .num_experts = (int32_t)s.experts,
        .max_loras = (int32_t)s.slots,
        .routing = args.routing,
        .adapters = {.token_lora_mapping = args.adapters.token_lora_mapping,
                     .adapter_enabled = args.adapters.adapter_enabled},
        .lists = {.sorted_token_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks * block)),
                  .expert_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks)),
                  .num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(s.slots)),
                  .lora_ids = new_tensor(MOELORA_I32, SIZES(s.slots)),
                  .num_active = (int32_t)s.slots,
                  .block_size = block},
    };
    if (align.routing.expert_map.data)
      align.num_experts = (int32_t)align.routing.expert_map.size[0];
    const int64_t blocks_of_all = moelora_align_max_blocks(MOELORA_ALIGN_BASE, s.tokens * s.top_k,
                                                           align.num_experts, 0, block);
    align.lists.sorted_token_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks_of_all * block));
    align.lists.expert_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks_of_all));
    align.routing.topk_weights = absent;
    for (int64_t l = 0; l < s.slots; l++)
      write_value(align.lists.lora_ids.data, MOELORA_I32, l, (double)l);
    moelora_align_lists_args other = align;
    run_align_lists(&align, serial);
    other.lists.sorted_token_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks_of_all * block));
    other.lists.expert_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks_of_all));
    other.lists.num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(s.slots));
    run_align_lists(&other, gpu(false));
    if (!same_bytes(&other.lists.expert_ids, &align.lists.expert_ids) ||
        !same_bytes(&other.lists.sorted_token_ids, &align.lists.sorted_token_ids) ||
        !same_bytes(&other.lists.num_tokens_post_padded, &align.lists.num_tokens_post_padded))
      FAIL("lists%s differ", drawn);
    args.lists = align.lists;
    args.routing.topk_ids = absent;
    args.routing.expert_map = absent;
    if (!args.mul_routed_weight)
      args.routing.topk_weights = absent;
    args.adapters.token_lora_mapping = absent;
  } else {
    args.num_tokens = 0, args.top_k = 0;
  }
  moelora_delta_args want = args;
  want.out = like(&args.out);
  moelora_tensor before = like(&args.out);
  run_delta(&want, serial);
  force_any(dtype, &native);
  run_delta(&args, gpu(invariant));
  char plan[512];
  snprintf(plan, sizeof plan, "%s", moelora_last_plan());
  compare("delta", &args.out, &want.out, 2);
  hash_tensor(&args.out);
  /* what the CPU leaves keeps its bits here, too */
  for (int64_t row = 0; row < count_of(&before) / width; row++) {
    const size_t bytes = (size_t)width * 2, from = (size_t)row * bytes;
    if (memcmp((char *)want.out.data + from, (char *)before.data + from, bytes) == 0 &&
        memcmp((char *)args.out.data + from, (char *)before.data + from, bytes) != 0)
      FAIL("delta%s: row %lld was written (%s)", drawn, (long long)row, plan);
  }
  if (invariant && !lists) {
    const int64_t count = random_in(1, s.tokens), first = random_in(0, s.tokens - count);
    const int64_t rows = args.x.size[0] / s.tokens;
    moelora_delta_args some = args;
    some.x = part(&args.x, first * rows, count * rows);
    some.routing.topk_ids = part(&args.routing.topk_ids, first, count);
    some.routing.topk_weights = part(&args.routing.topk_weights, first, count);
    some.adapters.token_lora_mapping = part(&args.adapters.token_lora_mapping, first, count);
    moelora_tensor some_before = part(&before, first, count);
    some.out = like(&some_before);
    DESCRIBE(", %lld tokens from %lld", (long long)count, (long long)first);
    force_any(dtype, &native);
    run_delta(&some, gpu(true));
    same_rows(&some.out, &args.out, first, plan);
  }
  /* the halves, through an h of the caller's */
  if (!silu && maybe()) {
    moelora_delta_args half = args;
    half.h = new_tensor(dtype, SIZES(slices, s.tokens, s.top_k, rank));
    memset(half.h.data, 0, (size_t)count_of(&half.h) * 2);
    half.out = absent;
    half.add_inputs = half.mul_routed_weight = false;
    half.out_offset = 0;
    for (int i = 0; i < slices; i++)
      half.lora.b[i] = absent;
    moelora_delta_args half_want = half;
    half_want.h = like(&half.h);
    DESCRIBE(", halves");
    moelora_force_variant(NULL);
    run_delta(&half_want, serial);
    force_any(dtype, &native);
    run_delta(&half, gpu(invariant));
    compare("shrink", &half.h, &half_want.h, 2);
    hash_tensor(&half.h);
    moelora_delta_args other = args;
    other.h = half_want.h;
    other.x = absent;
    other.out = like(&before);
    for (int i = 0; i < slices; i++)
      other.lora.a[i] = absent;
    force_any(dtype, &native);
    run_delta(&other, gpu(invariant));
    compare("expand", &other.out, &want.out, 2);
    hash_tensor(&other.out);
  }
  release_all();
}

static void test_mlp(uint64_t number) {
  seed(number + 4000);
  sizes s = draw_sizes(ONE_OF(1, 8, 64));
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const bool invariant = maybe();
  moelora_mlp_delta_args args = {
      .num_experts = (int32_t)s.experts,
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .gate_up = draw_lora(s, dtype, maybe() ? 2 : 1, 2 * s.inner, s.hidden),
      .down = draw_lora(s, dtype, 1, s.hidden, s.inner),
      .out = random_tensor(dtype, 0.1, SIZES(s.tokens, s.hidden)),
  };
  moelora_mlp_delta_args want = args;
  want.out = like(&args.out);
  const moelora_tensor before = like(&args.out);
  snprintf(drawn, sizeof drawn, " %llu: %s M=%lld k=%lld E=%lld K=%lld I=%lld%s",
           (unsigned long long)number, dtype_name(dtype), (long long)s.tokens, (long long)s.top_k,
           (long long)s.experts, (long long)s.hidden, (long long)s.inner,
           invariant ? " invariant" : "");
  moelora_force_variant(NULL);
  run_mlp_delta(&want, serial);
  force_any(dtype, &native);
  run_mlp_delta(&args, gpu(invariant));
  char plan[512];
  snprintf(plan, sizeof plan, "%s", moelora_last_plan());
  compare("mlp", &args.out, &want.out, 2);
  hash_tensor(&args.out);
  if (invariant) {
    const int64_t count = random_in(1, s.tokens), first = random_in(0, s.tokens - count);
    moelora_mlp_delta_args some = args;
    some.hidden_states = part(&args.hidden_states, first, count);
    some.routing.topk_ids = part(&args.routing.topk_ids, first, count);
    some.routing.topk_weights = part(&args.routing.topk_weights, first, count);
    some.adapters.token_lora_mapping = part(&args.adapters.token_lora_mapping, first, count);
    moelora_tensor some_before = part(&before, first, count);
    some.out = like(&some_before);
    DESCRIBE(", %lld tokens from %lld", (long long)count, (long long)first);
    force_any(dtype, &native);
    run_mlp_delta(&some, gpu(true));
    same_rows(&some.out, &args.out, first, plan);
  }
  release_all();
}

static void check_same(const char *what, const moelora_tensor *a, const moelora_tensor *b) {
  if (!same_bytes(a, b))
    FAIL("align%s: %s differ (%s)", drawn, what, moelora_last_plan());
}

static void test_align(uint64_t number) {
  seed(number + 5000);
  sizes s = draw_sizes(1);
  s.experts = random_in(1, 70);
  s.top_k = random_in(1, s.experts < 8 ? s.experts : 8);
  if (random_in(0, 5) == 0)
    s.tokens = random_in(300, 3000);
  const moelora_align_mode mode = (moelora_align_mode)random_in(0, 2);
  const bool adapters = mode != MOELORA_ALIGN_BASE;
  moelora_align_args args = {
      .mode = mode,
      .block_size = (int32_t)ONE_OF(16, 32, 64, 128),
      .max_loras = adapters ? (int32_t)s.slots : 0,
      .routing = random_routing(s),
  };
  if (adapters) {
    const moelora_adapters all = draw_adapters(s, 16);
    args.adapters.token_lora_mapping = all.token_lora_mapping;
    args.adapters.adapter_enabled = all.adapter_enabled;
  }
  args.num_experts =
      args.routing.expert_map.data ? (int32_t)args.routing.expert_map.size[0] : (int32_t)s.experts;
  args.routing.topk_weights = absent;
  const int64_t blocks = moelora_align_max_blocks(mode, s.tokens * s.top_k, args.num_experts,
                                                  args.max_loras, args.block_size);
  const int64_t rows = blocks * args.block_size;
  moelora_align_args want = args;
  for (int i = 0; i < 2; i++) {
    moelora_align_args *to = i ? &args : &want;
    to->sorted_token_ids = new_tensor(MOELORA_I32, SIZES(rows));
    to->expert_ids = new_tensor(MOELORA_I32, SIZES(blocks));
    if (adapters)
      to->lora_ids = new_tensor(MOELORA_I32, SIZES(mode == MOELORA_ALIGN_UNIFORM ? blocks : rows));
    to->num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(1));
  }
  snprintf(drawn, sizeof drawn, " %llu: mode %d M=%lld k=%lld E=%d block=%d loras=%d",
           (unsigned long long)number, mode, (long long)s.tokens, (long long)s.top_k,
           args.num_experts, args.block_size, args.max_loras);
  moelora_force_variant(NULL);
  run_align(&want, serial);
  force_any(MOELORA_BF16, &native);
  run_align(&args, gpu(false));
  check_same("rows", &args.sorted_token_ids, &want.sorted_token_ids);
  check_same("experts", &args.expert_ids, &want.expert_ids);
  if (adapters)
    check_same("adapters", &args.lora_ids, &want.lora_ids);
  check_same("counts", &args.num_tokens_post_padded, &want.num_tokens_post_padded);
  hash_tensor(&args.sorted_token_ids);
  release_all();
}

static void test_pack(uint64_t number) {
  seed(number + 6000);
  const moelora_dtype dtype = maybe() ? MOELORA_BF16 : MOELORA_F16;
  const moelora_format f = (moelora_format)random_in(1, MOELORA_FP8_ROWS);
  const bool fp8 = f >= MOELORA_FP8;
  const int64_t experts = random_in(1, 3), k = fp8 ? random_in(1, 300) : 32 * random_in(1, 8);
  const moelora_row_order order = (moelora_row_order)random_in(0, 2);
  const int64_t n = order == MOELORA_ROWS_PLAIN ? random_in(1, 200) : 2 * random_in(1, 100);
  const moelora_layout layout = {.format = f, .order = order, .rows = n};
  const bool zeros = f == MOELORA_INT4_ZP || f == MOELORA_INT4_ZP_G32;
  const bool of_32 = f == MOELORA_MXFP4 || f == MOELORA_INT4_G32 || f == MOELORA_INT4_ZP_G32;
  moelora_quantized w = {.values =
                             random_ids(MOELORA_U8, 0, 255, SIZES(experts, n, fp8 ? k : k / 2))};
  if (fp8) {
    w.block_rows = f == MOELORA_FP8_ROWS         ? random_in(1, n)
                   : order == MOELORA_ROWS_PLAIN ? 64 * random_in(1, 2)
                                                 : n;
    w.block_columns = maybe() ? (f == MOELORA_FP8_G64 ? 64 : 128) : k;
    w.scales = random_tensor(
        MOELORA_F32, 1, SIZES(experts, (n - 1) / w.block_rows + 1, (k - 1) / w.block_columns + 1));
    for (int64_t i = 0; i < count_of(&w.values); i++) /* no NaN */
      if ((((uint8_t *)w.values.data)[i] & 0x7f) == 0x7f)
        ((uint8_t *)w.values.data)[i] ^= 1;
  } else {
    const int64_t group = of_32 ? 32 : k % 64 == 0 && maybe() ? 64 : k;
    w.scales = f == MOELORA_MXFP4 ? random_ids(MOELORA_U8, 0, 128, SIZES(experts, n, k / group))
                                  : random_tensor((moelora_dtype)random_in(0, 2), 0.05,
                                                  SIZES(experts, n, k / group));
    if (zeros)
      w.zeros = random_ids(MOELORA_U8, 0, 16, SIZES(experts, n, k / group));
  }
  const int64_t rows = order != MOELORA_ROWS_PLAIN ? (n / 2 + 63) / 64 * 2 : (n + 63) / 64;
  moelora_tensor tiles[2], matrix[2];
  snprintf(drawn, sizeof drawn, " %llu: %s format %d order %d E=%lld N=%lld K=%lld",
           (unsigned long long)number, dtype_name(dtype), f, order, (long long)experts,
           (long long)n, (long long)k);
  for (int i = 0; i < 2; i++) {
    const moelora_exec exec = i ? gpu(false) : serial;
    tiles[i] = new_tensor(MOELORA_U8, SIZES(experts, rows, fp8 ? (k + 127) / 128 : (k + 63) / 64,
                                            moelora_tile_bytes(f)));
    matrix[i] = new_tensor(dtype, SIZES(experts, n, k));
    CHECK_OK(moelora_pack_quantized(&w, &layout, dtype, &tiles[i], &exec));
    CHECK_OK(moelora_unpack_quantized(&tiles[i], &layout, &matrix[i], &exec));
  }
  check_same("tiles", &tiles[0], &tiles[1]);
  check_same("matrices", &matrix[0], &matrix[1]);
  hash_tensor(&tiles[1]);
  release_all();
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: compare KIND FIRST COUNT [NAME]\n");
    return 2;
  }
  wanted = argc > 4 ? argv[4] : "";
  static const struct {
    const char *name;
    void (*test)(uint64_t);
  } kinds[] = {{"experts", test_experts}, {"gemm", test_gemm},   {"delta", test_delta},
               {"mlp", test_mlp},         {"align", test_align}, {"pack", test_pack}};
  const uint64_t first = strtoull(argv[2], NULL, 10), count = strtoull(argv[3], NULL, 10);
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    for (uint64_t n = first; n < first + count; n++)
      if (strcmp(argv[1], kinds[i].name) == 0 || strcmp(argv[1], "all") == 0)
        kinds[i].test(n);
  printf("%s: %llu cases from %llu, hash %016llx\n", argv[1], (unsigned long long)count,
         (unsigned long long)first, (unsigned long long)hash);
  return 0;
}
