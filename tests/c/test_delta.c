/* Deltas against plain loops, for every kernel variant that this machine runs: values,
 * rows that keep their bits, halves, vLLM's lists, SGLang's MLP, determinism with threads, error
 * messages. */
#include "valid.h"

/* Whether the row has an adapter and a local expert. */
static bool is_active(const moelora_routing *routing, const moelora_adapters *adapters,
                      int64_t experts, int64_t slots, int64_t m, int64_t j) {
  int64_t l = adapter_of(adapters, slots, m);
  bool empty = l >= 0 && adapters->lora_ranks.data && at(&adapters->lora_ranks, l, 0, 0, 0) <= 0;
  return l >= 0 && !empty && expert_of(routing, experts, m, j) >= 0;
}

/* z [P, N] of a delta: a projection whose weights are 0. */
static void naive_delta(const moelora_delta_args *args, moelora_tensor zeros, rounding r,
                        double *z) {
  moelora_gemm_args gemm = {
      .x = args->x,
      .w = zeros,
      .routing = args->routing,
      .adapters = args->adapters,
      .lora = args->lora,
      .mul_routed_weight = args->mul_routed_weight,
  };
  naive_gemm(&gemm, r, z);
}

static moelora_tensor zero_weights(moelora_dtype dtype, sizes s, int64_t n, int64_t k) {
  moelora_tensor w = new_tensor(dtype, SIZES(s.experts, n, k));
  memset(w.data, 0, (size_t)count_of(&w) * dtype_bytes(dtype));
  return w;
}

/* Checks `out`, previously `before`: before + (or =) z in active rows, unchanged elsewhere. */
static void check_out(const char *what, const moelora_delta_args *args, sizes s,
                      const moelora_tensor *before, const double *z, const double *z_rounded) {
  const int64_t n = args->lora.num_slices * args->lora.b[0].size[2];
  const bool summed = args->out.ndim == 2;
  const int64_t width = args->out.size[args->out.ndim - 1], rows = count_of(&args->out) / width;
  double *exact = allocate((size_t)(rows * width) * 8),
         *rounded = allocate((size_t)(rows * width) * 8);
  const rounding r = {true, args->out.dtype};
  for (int64_t row = 0; row < rows; row++) {
    const int64_t first = summed ? row * s.top_k : row, last = summed ? first + s.top_k : row + 1;
    bool any = false;
    for (int64_t p = first; p < last; p++)
      any |=
          is_active(&args->routing, &args->adapters, s.experts, s.slots, p / s.top_k, p % s.top_k);
    for (int64_t i = 0; i < width; i++) {
      const int64_t to = row * width + i;
      exact[to] = rounded[to] = read_value(before->data, before->dtype, to);
      const bool inside = i >= args->out_offset && i < args->out_offset + n;
      if (!any || !inside) {
        CHECK(read_value(args->out.data, before->dtype, to) == exact[to]);
        continue;
      }
      double sum = 0, sum_rounded = 0;
      for (int64_t p = first; p < last; p++) {
        sum += z[p * n + i - args->out_offset];
        sum_rounded += z_rounded[p * n + i - args->out_offset];
      }
      exact[to] = (args->add_inputs ? exact[to] : 0) + sum;
      rounded[to] = store(r, (args->add_inputs ? rounded[to] : 0) + sum_rounded);
    }
  }
  check_close(what, &args->out, exact, rounded, rows * width);
}

static void test_delta(moelora_dtype dtype, uint64_t number, const char *variant) {
  seed(number + 2000);
  sizes s = random_sizes(false);
  const int32_t slices = (int32_t)random_in(1, 4);
  const int64_t rank = random_in(1, 20), n = slices * random_in(1, 80);
  const bool summed = number % 3 == 2;
  moelora_delta_args args = {
      .num_experts = (int32_t)s.experts,
      .x = random_tensor(dtype, 1, SIZES(maybe() ? s.tokens * s.top_k : s.tokens, s.hidden)),
      .routing = random_routing(s),
      .adapters = random_adapters(s, rank + 3),
      .lora = random_lora(s, dtype, slices, rank, n, s.hidden),
      .mul_routed_weight = maybe(),
      .add_inputs = maybe(),
      .out_offset = random_in(0, 3),
  };
  const int64_t width = args.out_offset + n + random_in(0, 3);
  args.out = summed ? random_tensor(dtype, 1, SIZES(s.tokens, width))
                    : random_tensor(dtype, 1, SIZES(s.tokens, s.top_k, width));
  if (maybe())
    args.x = spread_rows(args.x, s.hidden + random_in(0, 9));
  const moelora_tensor before = copy_of(&args.out), zeros = zero_weights(dtype, s, n, s.hidden);
  const size_t bytes = (size_t)(s.tokens * s.top_k * n) * sizeof(double);
  double *z = allocate(bytes), *rounded = allocate(bytes);
  naive_delta(&args, zeros, (rounding){0}, z);
  naive_delta(&args, zeros, (rounding){true, dtype}, rounded);

  CHECK_RUN(delta, &args, serial);
  char what[96];
  snprintf(what, sizeof what, "delta case %llu with %s", (unsigned long long)number, variant);
  check_out(what, &args, s, &before, z, rounded);

  moelora_delta_args again = args;
  again.out = copy_of(&before);
  CHECK_RUN(delta, &again, threaded);
  CHECK(same_bytes(&args.out, &again.out));

  /* Both halves, through the caller's h. */
  again.out = copy_of(&before);
  moelora_delta_args half = again;
  half.h = new_tensor(dtype, SIZES(slices, s.tokens, s.top_k, rank));
  half.out = absent;
  CHECK_RUN(delta, &half, serial);
  half.x = absent;
  half.out = again.out;
  CHECK_RUN(delta, &half, threaded);
  CHECK(same_bytes(&args.out, &again.out));
  release_all();
}

/* Lists created by the alignment define the same rows as routing and mapping. */
static void test_lists(moelora_dtype dtype, uint64_t number) {
  seed(number + 3000);
  sizes s = random_sizes(false);
  const int64_t rank = random_in(1, 20), n = random_in(1, 80);
  const int32_t block_size = (int32_t)random_in(1, 9);
  moelora_delta_args args = {
      .num_experts = (int32_t)s.experts,
      .x = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .routing = random_routing(s),
      .adapters = random_adapters(s, rank),
      .lora = random_lora(s, dtype, 1, rank, n, s.hidden),
      .mul_routed_weight = true,
      .add_inputs = true,
      .out = random_tensor(dtype, 1, SIZES(s.tokens, s.top_k, n)),
  };
  const moelora_tensor *map = &args.routing.expert_map;
  const int32_t known = map->data ? (int32_t)map->size[0] : (int32_t)s.experts;
  const int64_t blocks =
      moelora_align_max_blocks(MOELORA_ALIGN_BASE, s.tokens * s.top_k, known, 0, block_size);
  moelora_align_lists_args align = {
      .num_experts = known,
      .max_loras = (int32_t)s.slots,
      .routing = args.routing,
      .adapters = args.adapters,
      .lists =
          {
              .sorted_token_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks * block_size)),
              .expert_ids = new_tensor(MOELORA_I32, SIZES(s.slots, blocks)),
              .num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(s.slots)),
              .lora_ids = new_tensor(MOELORA_I32, SIZES(s.slots + 2)),
              .num_active = (int32_t)s.slots + 2,
              .block_size = block_size,
          },
  };
  for (int64_t i = 0; i < s.slots + 2; i++)
    ((int32_t *)align.lists.lora_ids.data)[i] =
        (int32_t)i - 1; /* -1, the slots, one out of range */
  CHECK_RUN(align_lists, &align, serial);

  moelora_delta_args listed = args;
  listed.lists = align.lists;
  listed.routing.topk_ids = absent;
  listed.num_tokens = s.tokens;
  listed.top_k = (int32_t)s.top_k;
  listed.out = copy_of(&args.out);
  CHECK_RUN(delta, &args, serial);
  CHECK_RUN(delta, &listed, serial);
  CHECK(same_bytes(&args.out, &listed.out));

  /* Without active lists, everything keeps its bits. */
  const moelora_tensor before = copy_of(&listed.out);
  listed.lists.num_active = 0;
  CHECK_RUN(delta, &listed, serial);
  CHECK(same_bytes(&before, &listed.out));
  release_all();
}

/* silu_and_mul, and the MLP that consists of both halves. */
static void test_mlp(moelora_dtype dtype, uint64_t number, const char *variant) {
  seed(number + 4000);
  sizes s = random_sizes(false);
  const int64_t rank = random_in(1, 20), rows = s.tokens * s.top_k;
  const int32_t slices = (int32_t)random_in(1, 2);
  moelora_mlp_delta_args args = {
      .num_experts = (int32_t)s.experts,
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .routing = random_routing(s),
      .adapters = random_adapters(s, rank),
      .gate_up = random_lora(s, dtype, slices, rank, 2 * s.inner, s.hidden),
      .down = random_lora(s, dtype, 1, rank, s.hidden, s.inner),
      .out = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
  };
  const moelora_tensor before = copy_of(&args.out);
  moelora_adapters unscaled = args.adapters;
  unscaled.lora_scalings = absent;
  moelora_tensor h = random_tensor(dtype, 1, SIZES(s.tokens, s.top_k, s.inner));
  moelora_delta_args gate_up = {
      .num_experts = args.num_experts,
      .x = args.hidden_states,
      .routing = args.routing,
      .adapters = unscaled,
      .lora = args.gate_up,
      .silu_and_mul = true,
      .out = h,
  };
  moelora_delta_args down = {
      .num_experts = args.num_experts,
      .x = view(h.data, dtype, SIZES(rows, s.inner)),
      .routing = args.routing,
      .adapters = args.adapters,
      .lora = args.down,
      .mul_routed_weight = true,
      .add_inputs = true,
      .out = copy_of(&before),
  };
  const size_t bytes = (size_t)(rows * 2 * s.inner) * sizeof(double);
  double *exact = allocate(bytes), *rounded = allocate(bytes);
  const moelora_tensor zeros = zero_weights(dtype, s, 2 * s.inner, s.hidden);
  naive_delta(&gate_up, zeros, (rounding){0}, exact);
  naive_delta(&gate_up, zeros, (rounding){true, dtype}, rounded);
  const moelora_tensor h_before = copy_of(&h);
  CHECK_RUN(delta, &gate_up, serial);
  double *h_exact = allocate((size_t)(rows * s.inner) * 8);
  double *h_rounded = allocate((size_t)(rows * s.inner) * 8);
  for (int64_t p = 0; p < rows; p++)
    for (int64_t i = 0; i < s.inner; i++) {
      const double *g = exact + p * 2 * s.inner, *g_rounded = rounded + p * 2 * s.inner;
      const bool active =
          is_active(&args.routing, &args.adapters, s.experts, s.slots, p / s.top_k, p % s.top_k);
      const double kept = read_value(h_before.data, dtype, p * s.inner + i);
      h_exact[p * s.inner + i] =
          active ? naive_activation(MOELORA_SILU, 0, 0, g[i], g[s.inner + i]) : kept;
      h_rounded[p * s.inner + i] =
          active ? store((rounding){true, dtype},
                         naive_activation(MOELORA_SILU, 0, 0, g_rounded[i], g_rounded[s.inner + i]))
                 : kept;
    }
  char what[96];
  snprintf(what, sizeof what, "silu_and_mul case %llu with %s", (unsigned long long)number,
           variant);
  check_close(what, &h, h_exact, h_rounded, rows * s.inner);
  CHECK_RUN(delta, &down, serial);

  for (int round = 0; round < 2; round++) {
    args.out = copy_of(&before);
    CHECK_RUN(mlp_delta, &args, round ? threaded : serial);
    CHECK(same_bytes(&args.out,
                     &down.out)); /* on a CPU, the single call is identical to the stages */
  }
  release_all();
}

/* ---- errors ---- */

static void test_errors(void) {
  const sizes s = {5, 2, 4, 16, 24, 2};
  moelora_exec exec = serial;
  give_workspace(&exec, 1 << 20);
  moelora_delta_args good = valid_delta(s), a;
  good.routing.topk_weights = absent;
  CHECK_OK(call_delta(&good, &exec));
#define run(A) call_delta(A, &exec)
  REFUSED(good, "1 of x, h and out are given, expected two: x and h, h and out, or x and out",
          a.x = absent);
  REFUSED(good, "num_experts is 0, expected at least 1", a.num_experts = 0);
  REFUSED(good, "lora_a has 0 slices, expected 1 to 4", a.lora.num_slices = 0);
  REFUSED(good, "x.size(0) is 4, expected topk_ids.size(0), which is 5, or M * top_k, which is 10",
          a.x.size[0] = 4);
  REFUSED(good, "lora_b[1].size(2) is 11, the columns of the first slice is 12",
          a.lora.b[1].size[2] = 11);
  REFUSED(good,
          "offset is 1, expected 0 or more and at most 0: out has 24 columns, the slices have 24",
          a.out_offset = 1);
  REFUSED(good,
          "offset is 9223372036854775800, expected 0 or more and at most 0: out has 24 columns, "
          "the slices have 24",
          a.out_offset = INT64_MAX - 7);
  REFUSED(good,
          "offset is -9223372036854775808, expected 0 or more and at most 0: out has 24 columns, "
          "the slices have 24",
          a.out_offset = INT64_MIN);
  REFUSED(good, "topk_weights is absent, expected a tensor [M, top_k]", a.mul_routed_weight = true);
  REFUSED(good,
          "silu_and_mul takes an even number of columns and writes half of them to a 3-D out of as "
          "many, without add_inputs, mul_routed_weight and out_offset; there are 24 columns, out "
          "has 24",
          a.silu_and_mul = true);
  REFUSED(good, "out shares memory with x", a.out.data = a.x.data);
  REFUSED(
      good,
      "num_tokens is 5 and top_k is 0, expected top_k of at least 1 and at most 2147483647 rows",
      a.lists.sorted_token_ids = new_tensor(MOELORA_I32, SIZES(2, 8)), a.num_tokens = 5);
  a.top_k = 2, a.lists.expert_ids = new_tensor(MOELORA_I32, SIZES(2, 1));
  a.lists.num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(2));
  a.lists.lora_ids = new_tensor(MOELORA_I32, SIZES(3));
  CHECK_FAILS(run(&a), MOELORA_INVALID_ARGUMENT, "block_size is 0, expected at least 1");
  a.lists.block_size = 4;
  CHECK_FAILS(run(&a), MOELORA_INVALID_ARGUMENT,
              "expert_ids.size(1) is 1, expected at least a block of 4 for each of the 8 rows of "
              "sorted_token_ids");
  a.lists.block_size = 8, a.lists.num_active = 4;
  CHECK_FAILS(run(&a), MOELORA_INVALID_ARGUMENT,
              "num_active_loras is 4, expected 0 to lora_ids.size(0), which is 3");
  a.lists.num_active = 0;
  CHECK_OK(call_delta(&a, &exec));

  /* Arguments that a mode does not read may be anything. */
  const moelora_tensor wild = {a.x.data,        (moelora_dtype)99, 77,
                               {INT64_MAX, -1}, {INT64_MIN, 3},    NULL};
  a.routing = (moelora_routing){wild, wild, wild};
  a.adapters.token_lora_mapping = wild;
  CHECK_OK(call_delta(&a, &exec));
  a = good, a.lists = (moelora_lists){absent, wild, wild, wild, INT32_MIN, -1};
  a.num_tokens = INT64_MIN, a.top_k = INT32_MIN;
  CHECK_OK(call_delta(&a, &exec));
  a = good, a.out = absent, a.h = new_tensor(MOELORA_F32, SIZES(2, 5, 2, 3));
  a.lora.b[0] = a.lora.b[1] = wild;
  CHECK_OK(call_delta(&a, &exec));
  a = good, a.x = absent, a.h = random_tensor(MOELORA_F32, 1, SIZES(2, 5, 2, 3));
  a.lora.a[0] = a.lora.a[1] = wild;
  CHECK_OK(call_delta(&a, &exec));
  release_all();
}

int main(int argc, char **argv) {
  uint64_t cases = argc > 1 ? strtoull(argv[1], NULL, 10) : 30;
  int tested = 0;
  test_errors();
  const char *name;
  for (int32_t i = 0; (name = moelora_variant_name(i)); i++) {
    if (!moelora_variant_usable(i) || strstr(name, "_sm"))
      continue;
    CHECK_OK(moelora_force_variant(name));
    for (uint64_t number = 0; number < cases; number++) {
      test_delta(dtype_of(name), number, name);
      test_lists(dtype_of(name), number);
      test_mlp(dtype_of(name), number, name);
    }
    tested++;
  }
  CHECK(tested >= 3); /* the scalar variants run everywhere */
  printf("test_delta: %d variants, %llu cases each\n", tested, (unsigned long long)cases);
  return 0;
}
