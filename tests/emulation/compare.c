/* Compares random calls on the emulated GPU with the CPU: layers, projections, deltas,
 * alignments, packing; as planned and with a forced kernel. Also compares part of the tokens, with
 * another kernel, with the whole batch, bit for bit.
 *
 *   compare KIND FIRST COUNT [NAME]
 *
 * KIND: experts, training, gemm, projection, delta, mlp, align, pack or devices, several with
 * commas between, or all. NAME: substring of forced variants; "-": none. Runs COUNT cases of each
 * kind, not counting those that no variant with this name supports or that need a kernel left out
 * of this build; with the NAME of a variant, some kinds may have none. Prints a hash of all
 * outputs, to compare builds. */
#define _POSIX_C_SOURCE 200112L /* setenv */
#include "projections.h"

static void check_same(const char *what, const moelora_tensor *a, const moelora_tensor *b) {
  if (!same_bytes(a, b))
    FAIL("%s: %s differ (%s)", drawn, what, moelora_last_plan());
}

static void test_experts(uint64_t number) {
  seed(number + 1000);
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const layer_problem p = draw_layer(dtype, dtype);
  const sizes s = p.s;
  moelora_experts_args args = p.args;
  const bool one_a = args.w13_lora.num_slices == 2 && maybe();
  if (one_a)
    args.w13_lora.a[1] = args.w13_lora.a[0];
  moelora_experts_args want = args;
  want.out = copy_of(&args.out);
  if (one_a)
    args.w13_one_a = random_ids(MOELORA_I32, 0, 1, SIZES(s.slots));
  describe_layer(number, &p, dtype);
  RUN_BOTH(experts, &args, &want, dtype, maybe() ? &p.w13 : &p.w2);
  check_output("experts", &args.out, &want.out, fmax(slack_of(&p.w13), slack_of(&p.w2)));
  const tokens t = draw_tokens(s);
  moelora_experts_args some = args;
  some.hidden_states = part(&args.hidden_states, t, 1);
  take_part(&some.routing, &some.adapters, t);
  some.out = new_tensor(dtype, SIZES(t.count, s.hidden));
  RUN_FORCED(experts, &some, dtype, maybe() ? &p.w13 : &p.w2);
  same_rows(&some.out, &args.out, t.first);
  release_all();
}

static void test_gemm(uint64_t number) {
  seed(number + 2000);
  projection_problem p = draw_projection(false, ANY);
  const sizes s = p.s;
  moelora_gemm_args *args = &p.args;
  args->out = new_tensor(p.dtype, SIZES(s.tokens, s.top_k, p.n));
  moelora_gemm_args want = *args;
  want.out = copy_of(&args->out);
  describe_projection(number, &p);
  RUN_BOTH(gemm, args, &want, p.dtype, &p.layout);
  check_output("gemm", &args->out, &want.out, 2); /* quantized to the same values on both */
  const tokens t = draw_tokens(s);
  moelora_gemm_args some = tokens_of(&p, t);
  some.out = new_tensor(p.dtype, SIZES(t.count, s.top_k, p.n));
  RUN_FORCED(gemm, &some, p.dtype, &p.layout);
  same_rows(&some.out, &args->out, t.first);
  release_all();
}

static void test_delta(uint64_t number) {
  seed(number + 3000);
  sizes s = draw_sizes(ONE_OF(1, 8, 64));
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const bool summed = random_in(0, 2) == 0, silu = random_in(0, 3) == 0,
             lists = random_in(0, 2) == 0;
  /* Lists and halves only take factors in the dtype of x. */
  const moelora_dtype of_factors = lists || random_in(0, 3) ? dtype : MOELORA_F32;
  const int32_t slices = silu ? (int32_t)random_in(1, 2) : (int32_t)random_in(1, 4);
  const int64_t n = 2 * slices * ONE_OF(random_in(1, 64), 8 * random_in(1, 10), 32);
  int64_t columns = silu ? n / 2 : n;
  moelora_delta_args args = {
      .num_experts = (int32_t)s.experts,
      .x = random_tensor(dtype, 1, SIZES(maybe() ? s.tokens * s.top_k : s.tokens, s.hidden)),
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .lora = draw_lora(s, of_factors, slices, n, s.hidden),
      .silu_and_mul = silu,
      .mul_routed_weight = !silu && maybe(),
      .add_inputs = !silu && maybe(),
      .out_offset = silu ? 0 : ONE_OF(0, random_in(0, 3), 8),
      .num_tokens = s.tokens,
      .top_k = (int32_t)s.top_k,
  };
  const bool uneven = !lists && !silu && slices > 1 && maybe();
  if (uneven) {
    const int64_t *size = args.lora.b[0].size, more = ONE_OF(8, random_in(1, 70), 64);
    columns += more;
    args.out_offset = 0;
    args.lora.b[0] = random_tensor(of_factors, 1 / sqrt((double)size[3]),
                                   SIZES(size[0], size[1], size[2] + more, size[3]));
  }
  const int64_t width =
      args.out_offset + columns + (silu || uneven ? 0 : ONE_OF(0, random_in(0, 3), 8));
  args.out = summed && !silu ? random_tensor(dtype, 1, SIZES(s.tokens, width))
                             : random_tensor(dtype, 1, SIZES(s.tokens, s.top_k, width));
  const int64_t rank = args.lora.a[0].size[2];
  describe(number, dtype, s);
  DESCRIBE(" N=%lld rank=%lld slices=%d of %s%s%s%s%s", (long long)n, (long long)rank, slices,
           dtype_name(of_factors), summed ? " summed" : "", silu ? " silu" : "",
           lists ? " lists" : "", uneven ? " uneven" : "");
  moelora_force_variant(NULL);
  if (lists) {
    moelora_align_lists_args align = {
        .num_experts = (int32_t)s.experts,
        .max_loras = (int32_t)s.slots,
        .routing = args.routing,
        .adapters = {.token_lora_mapping = args.adapters.token_lora_mapping,
                     .adapter_enabled = args.adapters.adapter_enabled},
        .lists = {.lora_ids = new_tensor(MOELORA_I32, SIZES(s.slots)),
                  .num_active = (int32_t)s.slots,
                  .block_size = (int32_t)ONE_OF(16, 32, 64)},
    };
    if (align.routing.expert_map.data)
      align.num_experts = (int32_t)align.routing.expert_map.size[0];
    align.routing.topk_weights = absent;
    for (int64_t l = 0; l < s.slots; l++)
      write_value(align.lists.lora_ids.data, MOELORA_I32, l, (double)l);
    moelora_align_lists_args other = align;
    new_lists(&align, s.tokens * s.top_k);
    new_lists(&other, s.tokens * s.top_k);
    run_align_lists(&align, serial);
    run_align_lists(&other, gpu());
    check_same("experts", &other.lists.expert_ids, &align.lists.expert_ids);
    check_same("rows", &other.lists.sorted_token_ids, &align.lists.sorted_token_ids);
    check_same("counts", &other.lists.num_tokens_post_padded, &align.lists.num_tokens_post_padded);
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
  want.out = copy_of(&args.out);
  moelora_tensor before = copy_of(&args.out);
  RUN_BOTH(delta, &args, &want, dtype, &native);
  check_output("delta", &args.out, &want.out, 2);
  /* rows that the CPU leaves unchanged must keep their bits here, too */
  for (int64_t row = 0; row < count_of(&before) / width; row++) {
    const size_t bytes = (size_t)width * 2, from = (size_t)row * bytes;
    if (memcmp((char *)want.out.data + from, (char *)before.data + from, bytes) == 0 &&
        memcmp((char *)args.out.data + from, (char *)before.data + from, bytes) != 0)
      FAIL("delta%s: row %lld was written (%s)", drawn, (long long)row, noted_plan);
  }
  if (!lists) {
    const tokens t = draw_tokens(s);
    const int64_t rows = args.x.size[0] / s.tokens;
    moelora_delta_args some = args;
    some.x = part(&args.x, t, rows);
    take_part(&some.routing, &some.adapters, t);
    moelora_tensor some_before = part(&before, t, 1);
    some.out = copy_of(&some_before);
    RUN_FORCED(delta, &some, dtype, &native);
    same_rows(&some.out, &args.out, t.first);
  }
  /* both halves, through the caller's h */
  if (!silu && !uneven && of_factors == dtype && maybe()) {
    moelora_delta_args half = args;
    half.h = new_tensor(dtype, SIZES(slices, s.tokens, s.top_k, rank));
    memset(half.h.data, 0, (size_t)count_of(&half.h) * 2);
    half.out = absent;
    half.add_inputs = half.mul_routed_weight = false;
    half.out_offset = 0;
    for (int i = 0; i < slices; i++)
      half.lora.b[i] = absent;
    moelora_delta_args half_want = half;
    half_want.h = copy_of(&half.h);
    DESCRIBE(", halves");
    RUN_BOTH(delta, &half, &half_want, dtype, &native);
    check_output("shrink", &half.h, &half_want.h, 2);
    moelora_delta_args other = args;
    other.h = half_want.h;
    other.x = absent;
    other.out = copy_of(&before);
    for (int i = 0; i < slices; i++)
      other.lora.a[i] = absent;
    RUN_FORCED(delta, &other, dtype, &native);
    check_output("expand", &other.out, &want.out, 2);
  }
  release_all();
}

static void test_mlp(uint64_t number) {
  seed(number + 4000);
  sizes s = draw_sizes(ONE_OF(1, 8, 64));
  const moelora_dtype dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
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
  want.out = copy_of(&args.out);
  const moelora_tensor before = copy_of(&args.out);
  describe(number, dtype, s);
  DESCRIBE(" I=%lld", (long long)s.inner);
  RUN_BOTH(mlp_delta, &args, &want, dtype, &native);
  check_output("mlp", &args.out, &want.out, 2);
  const tokens t = draw_tokens(s);
  moelora_mlp_delta_args some = args;
  some.hidden_states = part(&args.hidden_states, t, 1);
  take_part(&some.routing, &some.adapters, t);
  moelora_tensor some_before = part(&before, t, 1);
  some.out = copy_of(&some_before);
  RUN_FORCED(mlp_delta, &some, dtype, &native);
  same_rows(&some.out, &args.out, t.first);
  release_all();
}

static void test_align(uint64_t number) {
  seed(number + 5000);
  sizes s = draw_sizes(1);
  s.experts = random_in(1, 70);
  s.top_k = random_in(1, s.experts < 8 ? s.experts : 8);
  if (random_in(0, 5) == 0)
    s.tokens = random_in(300, 3000);
  const bool most = random_in(0, 9) == 0; /* one sort of more keys than others take */
  if (most)
    s.experts = 70, s.slots = 110, s.tokens = 2000, s.top_k = 4;
  const moelora_align_mode mode =
      most ? MOELORA_ALIGN_SEGMENTED : (moelora_align_mode)random_in(0, 2);
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
  moelora_align_args want = args;
  new_alignment(&args, s.tokens * s.top_k);
  new_alignment(&want, s.tokens * s.top_k);
  describe(number, MOELORA_BF16, s);
  DESCRIBE(" mode=%d block=%d loras=%d", mode, args.block_size, args.max_loras);
  RUN_BOTH(align, &args, &want, MOELORA_BF16, &native);
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
  const moelora_format f = (moelora_format)random_in(1, MOELORA_FORMATS - 1);
  const bool fp8 = moelora_is_fp8(f);
  const int64_t experts = random_in(1, 3), k = fp8 ? random_in(1, 300) : 32 * random_in(1, 8);
  const moelora_row_order order = (moelora_row_order)random_in(0, 2);
  const int64_t n = order == MOELORA_ROWS_PLAIN ? random_in(1, 200) : 2 * random_in(1, 100);
  const moelora_layout layout = {.format = f, .order = order, .rows = n};
  moelora_quantized w = random_quantized(experts, k, &layout, false);
  if (moelora_scale_bytes(f) == 1)
    w.scales = random_ids(MOELORA_U8, 0, f == MOELORA_MXFP4 ? 128 : 126, 3, w.scales.size);
  moelora_tensor tiles[2], matrix[2];
  describe(number, dtype, (sizes){.experts = experts, .hidden = k});
  DESCRIBE(" N=%lld format=%d order=%d", (long long)n, f, order);
  for (int i = 0; i < 2; i++) {
    const moelora_exec exec = i ? gpu() : serial;
    tiles[i] = new_tiles(experts, k, &layout);
    matrix[i] = new_tensor(dtype, SIZES(experts, n, k));
    CHECK_OK(moelora_pack_quantized(&w, &layout, dtype, &tiles[i], &exec));
    CHECK_OK(moelora_unpack_quantized(&tiles[i], &layout, &matrix[i], &exec));
  }
  check_same("tiles", &tiles[0], &tiles[1]);
  check_same("matrices", &matrix[0], &matrix[1]);
  hash_tensor(&tiles[1]);
  release_all();
}

/* ---- two GPUs ---- */

long emulation_launches(int device);
int *emulation_current_device(void);

/* A call runs on the device that it names, and restores the thread's current one. */
static void test_devices(uint64_t number) {
  seed(number + 7000);
  const int at = (int)random_in(0, 1), current = (int)random_in(0, 1);
  sizes s = draw_sizes(8);
  moelora_gemm_args args = {
      .x = random_tensor(MOELORA_BF16, 1, SIZES(s.tokens, s.hidden)),
      .w = random_tensor(MOELORA_BF16, 0.1, SIZES(s.experts, 64, s.hidden)),
      .routing = random_routing(s),
      .out = new_tensor(MOELORA_BF16, SIZES(s.tokens, s.top_k, 64)),
  };
  moelora_tensor w = random_tensor(MOELORA_BF16, 1, SIZES(2, 64, 64));
  moelora_tensor packed = new_tensor(MOELORA_BF16, SIZES(2, 1, 1, 64, 64));
  moelora_exec exec = {.device = MOELORA_CUDA, .device_index = at};
  const long here = emulation_launches(at), there = emulation_launches(1 - at);
  *emulation_current_device() = current;
  moelora_force_variant(NULL);
  run_gemm(&args, exec);
  CHECK_OK(moelora_pack_weights(&w, &packed, &exec));
  CHECK(emulation_launches(at) > here && emulation_launches(1 - at) == there);
  CHECK_INT(*emulation_current_device(), current);
  exec.device_index = 2;
  CHECK_INVALID(moelora_pack_weights(&w, &packed, &exec),
                "exec.device_index is 2, there are 2 devices");
  CHECK_INT(*emulation_current_device(), current);
  *emulation_current_device() = 0;
  release_all();
}

/* Runs `count` cases and returns how many could run. Adds those skipped before the last. */
static uint64_t run_cases(void (*test)(uint64_t), uint64_t first, uint64_t count,
                          uint64_t *skipped) {
  volatile uint64_t n = first, ran = 0;
  for (; ran < count && n - first - ran <= 100 * count; n++) {
    if (setjmp(skip) == 0) {
      test(n);
      ran++;
    } else {
      release_all();
    }
  }
  *skipped += n - first - ran;
  return ran;
}

/* Whether `names` is "all" or has `name` among its words, which commas separate. */
static bool has_word(const char *names, const char *name) {
  const size_t length = strlen(name);
  for (const char *at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (strncmp(at, name, length) == 0 && (at[length] == ',' || !at[length]))
      return true;
  return strcmp(names, "all") == 0;
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: compare KIND FIRST COUNT [NAME]\n");
    return 2;
  }
  wanted = argc > 4 ? argv[4] : "";
  setenv("EMULATION_DEVICES", "2", 1);
  static const struct {
    const char *name;
    void (*test)(uint64_t);
  } kinds[] = {
      {"experts", test_experts},       {"training", test_training}, {"gemm", test_gemm},
      {"projection", test_projection}, {"delta", test_delta},       {"mlp", test_mlp},
      {"align", test_align},           {"pack", test_pack},         {"devices", test_devices}};
  const uint64_t first = strtoull(argv[2], NULL, 10), count = strtoull(argv[3], NULL, 10);
  const bool is_forced = *wanted && strcmp(wanted, "-") != 0;
  uint64_t skipped = 0, ran = 0;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    if (!has_word(argv[1], kinds[i].name))
      continue;
    const uint64_t own = run_cases(kinds[i].test, first, count, &skipped);
    if (own < count && (own || !is_forced))
      FAIL("%s: %llu of %llu cases could run: their kernels are not built, or none is called %s",
           kinds[i].name, (unsigned long long)own, (unsigned long long)count, wanted);
    ran += own;
  }
  if (!ran && count)
    FAIL("no case of %s could run: their kernels are not built, or none is called %s", argv[1],
         wanted);
  printf("%s: %llu cases from %llu, hash %016llx", argv[1], (unsigned long long)count,
         (unsigned long long)first, (unsigned long long)hash);
  printf(skipped ? ", skipped %llu others\n" : "\n", (unsigned long long)skipped);
  return 0;
}
