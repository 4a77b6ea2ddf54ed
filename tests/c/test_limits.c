/* Plans respect the limits of GPU kernels: they select a kernel that supports the problem, or
 * refuse the call before anything is launched. Plans need no GPU. And the bound of an alignment's
 * blocks. */
#include "harness.h"
#include "plans.h"

enum { K = 1024, N = 512, RANK = 16 };
#define MAX_RANK (MOELORA_RANKS - 1)

static const moelora_device_info hopper = {.device = MOELORA_CUDA,
                                           .compute_capability = 90,
                                           .num_units = 132,
                                           .l2_bytes = 50 << 20,
                                           .shared_bytes = 227 << 10,
                                           .overlaps = true};
static const moelora_device_info ada = {.device = MOELORA_CUDA,
                                        .compute_capability = 89,
                                        .num_units = 128,
                                        .l2_bytes = 50 << 20,
                                        .shared_bytes = 99 << 10};
static const moelora_device_info cpu = {.device = MOELORA_CPU, .num_units = 1};

/* A projection and a layer of 8 experts, of rows of x that far apart. */
static moelora_gemm_problem gemm_with(int64_t tokens, int64_t x_stride) {
  moelora_gemm_problem p = gemm_of(routes_of(tokens, 2, 8, 0), native_of(N, K));
  p.x_stride = x_stride;
  return p;
}

static moelora_experts_problem experts_with(int64_t tokens, int64_t x_stride) {
  moelora_experts_problem p =
      experts_of(routes_of(tokens, 1, 8, 0), native_of(N, K), native_of(K, N / 2));
  p.x_stride = x_stride;
  return p;
}

#define CHECK_PLANNED(CALL)                                                                        \
  do {                                                                                             \
    moelora_clear_error();                                                                         \
    CHECK_OK(CALL);                                                                                \
  } while (0)

static moelora_family gemm_family(const moelora_gemm_problem *p) {
  moelora_gemm_plan plan;
  CHECK_PLANNED(moelora_plan_gemm(p, &hopper, &plan));
  return (moelora_family)plan.variant->needs;
}

static moelora_family layer_family(const moelora_experts_problem *p) {
  moelora_experts_plan plan;
  CHECK_PLANNED(moelora_plan_experts(p, &hopper, &plan));
  CHECK_INT(plan.w2->needs, plan.variant->needs);
  return (moelora_family)plan.variant->needs;
}

#define CHECK_REFUSED(CALL, MESSAGE) CHECK_FAILS(CALL, MOELORA_UNSUPPORTED, MESSAGE)

/* Hopper kernels index the 16-byte chunks of a gathered x with 32 bits: up to 64 GiB from the
 * first row to the last. Portable kernels keep the distance of two rows in 32 bits. */
static void test_rows_of_x_far_apart(void) {
  const int64_t far = INT64_C(1) << 30; /* elements: 2 GiB */
  const char *message =
      "rows of x are 2147483648 elements apart: the GPU kernels take at most 2147483647";
  moelora_gemm_plan plan;
  moelora_gemm_problem p = gemm_with(31, far);
  CHECK_INT(gemm_family(&p), MOELORA_SM90);
  p = gemm_with(16, far), p.x_per_row = true; /* 32 rows */
  CHECK_INT(gemm_family(&p), MOELORA_SM80);
  p = gemm_with(32, far);
  for (int forced = 0; forced < 2; forced++) {
    CHECK_OK(moelora_force_variant(forced ? "gemm_bf16_96x128x64_sm90" : NULL));
    CHECK_INT(gemm_family(&p), MOELORA_SM80);
  }
  CHECK_OK(moelora_force_variant(NULL));
  p = gemm_with(15, 2 * far);
  CHECK_INT(gemm_family(&p), MOELORA_SM90);
  CHECK_REFUSED(moelora_plan_gemm(&p, &ada, &plan), message);
  p = gemm_with(16, 2 * far);
  CHECK_REFUSED(moelora_plan_gemm(&p, &hopper, &plan), message);
  CHECK_PLANNED(moelora_plan_gemm(&p, &cpu, &plan));
  /* e4m3 x is in the workspace */
  p.w = weights_of(MOELORA_FP8, MOELORA_X_GROUP, MOELORA_ROWS_PLAIN, N, K);
  CHECK_INT(gemm_family(&p), MOELORA_SM90);
}

/* Tiles of a run look their adapters up once: tiles of different slices are in none. */
static void test_projections_of_several_slices_have_no_runs(void) {
  moelora_gemm_plan plan;
  moelora_gemm_problem p = gemm_with(4096, K);
  p.w = native_of(4096, 128);
  p.x_stride = p.w.k, p.out_stride[0] = 2 * p.w.n, p.out_stride[1] = p.w.n;
  p.routes = routes_of(4096, 2, 8, 4);
  for (int32_t slices = 1; slices <= 2; slices++) {
    p.lora = factors_of(slices, RANK, p.w.n, p.w.k);
    CHECK_PLANNED(moelora_plan_gemm(&p, &hopper, &plan));
    CHECK_INT(plan.variant->block_m, 144);
    CHECK_INT(plan.projection.run, slices == 1 ? 8 : 1);
  }
}

static void test_hidden_states_far_apart(void) {
  const int64_t far = INT64_C(1) << 30;
  moelora_experts_plan plan;
  moelora_experts_problem p = experts_with(31, far);
  CHECK_INT(layer_family(&p), MOELORA_SM90);
  p = experts_with(32, far);
  CHECK_INT(layer_family(&p), MOELORA_SM80);
  p.apply_router_weight_on_input = true; /* scaled rows are in the workspace */
  CHECK_INT(layer_family(&p), MOELORA_SM90);
  const char *message = "rows of hidden_states are 4294967296 elements apart: the GPU kernels take "
                        "at most 2147483647";
  p = experts_with(32, 4 * far);
  CHECK_REFUSED(moelora_plan_experts(&p, &hopper, &plan), message);
  p = experts_with(2, 4 * far); /* Hopper's kernels count 16 bytes */
  CHECK_INT(layer_family(&p), MOELORA_SM90);
  CHECK_OK(moelora_limit_capability(80));
  CHECK_REFUSED(moelora_plan_experts(&p, &hopper, &plan), message);
  CHECK_OK(moelora_limit_capability(0));
}

/* The shrink of a backward keeps the distance of two rows of B in 32 bits. */
static void test_rows_of_factors_far_apart(void) {
  const int64_t far = INT64_C(1) << 31; /* elements: 4 GiB */
  moelora_gemm_backward_plan gemm_plan;
  moelora_gemm_backward_problem gemm = {.forward = gemm_with(64, K), .dout_stride = {2 * N, N}};
  gemm.forward.routes = routes_of(64, 2, 8, 4);
  gemm.forward.lora = factors_of(1, RANK, N, K);
  gemm.forward.lora.b[0].stride_i = far - 1;
  CHECK_PLANNED(moelora_plan_gemm_backward(&gemm, &hopper, &gemm_plan));
  gemm.forward.lora.b[0].stride_i = far;
  CHECK_REFUSED(
      moelora_plan_gemm_backward(&gemm, &hopper, &gemm_plan),
      "rows of lora_b are 2147483648 elements apart: the GPU kernels take at most 2147483647");
  CHECK_PLANNED(moelora_plan_gemm_backward(&gemm, &cpu, &gemm_plan));
  gemm.forward.lora.wide = true; /* rounded copies are in the workspace */
  CHECK_PLANNED(moelora_plan_gemm_backward(&gemm, &hopper, &gemm_plan));

  moelora_backward_plan plan;
  moelora_experts_backward_problem layer = {.forward = experts_with(64, K), .dout_stride = K};
  layer.forward.routes = routes_of(64, 1, 8, 4);
  layer.forward.w13_lora = factors_of(2, RANK, N, K);
  layer.forward.w2_lora = factors_of(1, RANK, K, N / 2);
  CHECK_PLANNED(moelora_plan_experts_backward(&layer, &hopper, &plan));
  layer.forward.w13_lora.b[1].stride_i = far;
  CHECK_REFUSED(
      moelora_plan_experts_backward(&layer, &hopper, &plan),
      "rows of w13_lora_b are 2147483648 elements apart: the GPU kernels take at most 2147483647");
  layer.forward.w2_lora.b[0].stride_i = far;
  CHECK_REFUSED(
      moelora_plan_experts_backward(&layer, &hopper, &plan),
      "rows of w2_lora_b are 2147483648 elements apart: the GPU kernels take at most 2147483647");
}

/* The driver rejects tensor maps with strides of 2^40 bytes or more. */
static void test_strides_of_tensor_maps(void) {
  const int64_t most = INT64_C(1) << 39; /* elements of 16 bits */
  moelora_gemm_problem p = gemm_with(64, K);
  p.w.stride_e = most - 8;
  CHECK_INT(gemm_family(&p), MOELORA_SM90);
  p.w.stride_e = most;
  CHECK_INT(gemm_family(&p), MOELORA_SM80);
  p = gemm_with(64, K);
  p.w.stride_n = most / N;
  CHECK_INT(gemm_family(&p), MOELORA_SM80);

  /* Of adapters, of experts, of rows; and rows that are one. */
  const moelora_factors good = factors_of(1, RANK, N, K);
  CHECK(moelora_are_boxes(&good, 64, K) && moelora_are_map_factors(good.b, 1, N));
  for (int i = 0; i < 4; i++) {
    moelora_factors f = good;
    if (i == 0)
      f.a[0].stride_l = f.b[0].stride_l = most;
    else if (i == 1)
      f.a[0].stride_e = f.b[0].stride_e = most;
    else
      f.a[0].stride_i = i == 2 ? most : 0, f.b[0].stride_i = i == 2 ? most / N : 0;
    CHECK(!moelora_are_boxes(&f, 64, K) && !moelora_are_map_factors(f.b, 1, N));
  }
}

static void test_ranks(void) {
  const char *message = "rank 4096: the GPU kernels take ranks below 4096";
  moelora_gemm_plan plan;
  moelora_experts_plan layer;
  moelora_gemm_problem p = gemm_with(64, K);
  p.routes = routes_of(64, 2, 8, 4);
  p.lora = factors_of(1, MAX_RANK, N, K);
  CHECK_PLANNED(moelora_plan_gemm(&p, &hopper, &plan));
  p.lora = factors_of(1, MAX_RANK + 1, N, K);
  CHECK_REFUSED(moelora_plan_gemm(&p, &hopper, &plan), message);
  CHECK_PLANNED(moelora_plan_gemm(&p, &cpu, &plan));
  moelora_experts_problem first = experts_with(64, K), second = first;
  first.routes = second.routes = routes_of(64, 1, 8, 4);
  first.w13_lora = factors_of(2, MAX_RANK + 1, N, K);
  second.w2_lora = factors_of(1, MAX_RANK + 1, K, N / 2);
  CHECK_REFUSED(moelora_plan_experts(&first, &hopper, &layer), message);
  CHECK_REFUSED(moelora_plan_experts(&second, &hopper, &layer), message);
  /* Deltas do not use the packed ranks that sorts list. */
  moelora_delta_problem d = delta_of(routes_of(4096, 2, 8, 4), MAX_RANK, N, K);
  moelora_delta_plan delta;
  CHECK_PLANNED(moelora_plan_delta(&d, &hopper, &delta));
  CHECK_INT(delta.shrink[0].variant->method, MOELORA_SHRINK_SEGMENTS);
  d.lora = factors_of(1, MAX_RANK + 1, N, K);
  CHECK_PLANNED(moelora_plan_delta(&d, &hopper, &delta));
  CHECK_INT(delta.shrink[0].variant->method, MOELORA_SHRINK_WINDOWS);

  d.lora = factors_of(3, RANK, 3 * N, K), d.silu_and_mul = true;
  CHECK_REFUSED(moelora_plan_delta(&d, &hopper, &delta),
                "silu_and_mul of 3 slices: the GPU kernels take 1 or an even number");
  CHECK_PLANNED(moelora_plan_delta(&d, &cpu, &delta));
}

/* Every operator that sorts. */
static void test_keys(void) {
  static const struct {
    int32_t experts, slots;
    const char *message;
  } cases[] = {
      {MOELORA_SORT_KEYS - 1, 0, NULL},
      {MOELORA_SORT_KEYS, 0,
       "7680 experts and 0 adapters: CUDA alignment takes at most 7679 of either"},
      {8, MOELORA_SORT_KEYS - 1, NULL},
      {8, MOELORA_SORT_KEYS,
       "8 experts and 7680 adapters: CUDA alignment takes at most 7679 of either"},
  };
  enum { M = 4096 };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const moelora_routes routes = routes_of(M, 1, cases[i].experts, cases[i].slots);
    moelora_align_problem align = {
        .mode = MOELORA_ALIGN_UNIFORM, .routes = routes, .block_size = 16, .max_blocks = M};
    moelora_align_lists_problem lists = {.routes = routes, .lists = {.block_size = 16}};
    moelora_gemm_problem gemm = gemm_with(M, K);
    moelora_experts_problem layer = experts_with(M, K);
    gemm.routes = layer.routes = routes;
    moelora_align_plan align_plan, lists_plan;
    moelora_gemm_plan gemm_plan;
    moelora_experts_plan layer_plan;
    const moelora_status statuses[] = {
        moelora_plan_align(&align, &hopper, &align_plan),
        moelora_plan_align_lists(&lists, &hopper, &lists_plan),
        moelora_plan_gemm(&gemm, &hopper, &gemm_plan),
        moelora_plan_experts(&layer, &hopper, &layer_plan),
    };
    for (size_t j = 0; j < sizeof statuses / sizeof *statuses; j++)
      CHECK_INT(statuses[j], cases[i].message ? MOELORA_UNSUPPORTED : MOELORA_OK);
    if (cases[i].message && strcmp(moelora_error_message(), cases[i].message) != 0)
      FAIL("got '%s', expected '%s'", moelora_error_message(), cases[i].message);
  }
  /* More pairs than that: one sort if each has a row on average and the bins of pairs and experts
   * fit in shared memory, otherwise two. */
  static const struct {
    int32_t rows, experts, slots;
    bool one;
  } sorts[] = {
      {128 * 65 - 1, 128, 64, false}, {128 * 65, 128, 64, true}, {128 * 89, 128, 88, true},
      {128 * 90, 128, 89, false},     {2 * 7680, 2, 5758, true}, {2 * 7680, 2, 5759, false},
      {INT32_MAX, 7679, 7679, false},
  };
  for (size_t i = 0; i < sizeof sorts / sizeof *sorts; i++) {
    const moelora_align_problem align = {
        .mode = MOELORA_ALIGN_SEGMENTED,
        .routes = routes_of(sorts[i].rows, 1, sorts[i].experts, sorts[i].slots),
        .block_size = 16,
        .max_blocks = sorts[i].rows};
    moelora_align_plan plan;
    CHECK_PLANNED(moelora_plan_align(&align, &hopper, &plan));
    const int64_t keys = (int64_t)sorts[i].experts * (sorts[i].slots + 1);
    CHECK_INT(plan.segments, sorts[i].one ? keys : 0);
    CHECK_INT(plan.tokens.variant == NULL, sorts[i].one);
  }
  const char *message = cases[3].message;
  moelora_delta_problem d = delta_of(routes_of(M, 1, 8, MOELORA_SORT_KEYS), RANK, N, K);
  const moelora_mlp_delta_problem mlp = {{d, d}};
  moelora_delta_plan plan;
  CHECK_REFUSED(moelora_plan_delta(&d, &hopper, &plan), message);
  CHECK_REFUSED(moelora_plan_mlp_delta(&mlp, &hopper, &plan), message);
}

/* The bound is attained by the worst routing, and does not overflow. */
static void test_max_blocks(void) {
  const struct {
    moelora_align_mode mode;
    int64_t rows;
    int32_t experts, loras, block;
    int64_t want;
  } table[] = {
      {MOELORA_ALIGN_BASE, 0, 8, 0, 16, 0},
      {MOELORA_ALIGN_BASE, 3, 8, 0, 16, 3},   /* three experts of one row */
      {MOELORA_ALIGN_BASE, 40, 8, 0, 16, 10}, /* seven of one row, one of 33 */
      {MOELORA_ALIGN_SEGMENTED, 40, 8, 4, 16, 10},
      {MOELORA_ALIGN_UNIFORM, 40, 2, 3, 16, 10},
      {MOELORA_ALIGN_UNIFORM, 40, 8, 4, 16, 40},
      {MOELORA_ALIGN_SORTING, 0, 8, 0, 16, 8},
      {MOELORA_ALIGN_SORTING, 40, 8, 0, 16, 10},
      {MOELORA_ALIGN_UNIFORM, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX},
      {MOELORA_ALIGN_BASE, 40, 8, 0, 0, 0},
      {MOELORA_ALIGN_SORTING, INT64_MAX, 8, 0, 1, INT64_MAX}, /* limited by int64 */
      {MOELORA_ALIGN_UNIFORM, INT64_MAX, INT32_MAX, INT32_MAX, 1, INT64_MAX},
  };
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    CHECK_INT(moelora_align_max_blocks(table[i].mode, table[i].rows, table[i].experts,
                                       table[i].loras, table[i].block),
              table[i].want);
}

int main(void) {
  test_max_blocks();
  test_rows_of_x_far_apart();
  test_projections_of_several_slices_have_no_runs();
  test_hidden_states_far_apart();
  test_rows_of_factors_far_apart();
  test_strides_of_tensor_maps();
  test_ranks();
  test_keys();
  printf("test_limits: plans know what kernels have room for\n");
  return 0;
}
