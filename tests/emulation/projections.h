/* Tests the backward of a projection, or of adapters alone: gradients against those of the CPU, and
 * part of the tokens with another kernel bit for bit. */
#pragma once

#include "training.h"

RUN(gemm_backward)

/* Rows of tokens and of their choices that are not equally spaced. */
static inline moelora_tensor spread_tokens(moelora_tensor t) {
  const int64_t n = t.size[2], row = n + ONE_OF(1, 8, 16), token = t.size[1] * row + ONE_OF(3, 8);
  moelora_tensor wide = random_tensor(t.dtype, 3e4, SIZES(t.size[0] * token));
  wide.ndim = 3;
  for (int i = 0; i < 3; i++)
    wide.size[i] = t.size[i];
  wide.stride[0] = token, wide.stride[1] = row, wide.stride[2] = 1;
  for (int64_t m = 0; m < t.size[0]; m++)
    for (int64_t j = 0; j < t.size[1]; j++)
      for (int64_t i = 0; i < n; i++)
        write_value(wide.data, t.dtype, m * token + j * row + i,
                    read_value(t.data, t.dtype, (m * t.size[1] + j) * n + i));
  return wide;
}

static inline gradients gemm_gradients_of(moelora_gemm_grads *g) {
  gradients list = {0};
  GRADIENT(x);
  GRADIENT(topk_weights);
  GRADIENT(bias);
  for (int i = 0; i < MOELORA_MAX_SLICES; i++) {
    GRADIENT(lora.a[i]);
    GRADIENT(lora.b[i]);
  }
  return list;
}

/* ANY: as problems.h draws them. SPLIT: one pair of adapter and expert with more rows than a part
 * of its gradient. MANY: so many pairs that rows are sorted twice. */
typedef enum projection_size { ANY, SPLIT, MANY } projection_size;

/* A random projection, without its output. */
typedef struct projection_problem {
  sizes s;
  moelora_dtype dtype, of_factors;
  int64_t n;
  moelora_layout layout;
  bool per_row; /* x has a row for each routed row */
  moelora_gemm_args args;
} projection_problem;

/* `alone`: of adapters without weights. */
static inline projection_problem draw_projection(bool alone, projection_size size) {
  const bool quantized = !alone && size == ANY && maybe();
  projection_problem p = {.s = draw_sizes(quantized ? 32 : ONE_OF(1, 8, 64))};
  if (size == SPLIT)
    p.s = (sizes){random_in(2100, 4400), 1, 1, 8 * random_in(1, 4), p.s.inner, 1};
  if (size == MANY)
    p.s.hidden = 8 * random_in(1, 4), p.s.slots = 1500, p.s.experts += 6;
  const sizes s = p.s;
  const moelora_dtype dtype = p.dtype = random_in(0, 3) ? MOELORA_BF16 : MOELORA_F16;
  const int64_t n = p.n =
      size == SPLIT  ? 8 * random_in(1, 5) /* of which some kernel in each build takes vectors */
      : size == MANY ? random_in(1, 40)
                     : ONE_OF(random_in(1, 300), 64 * random_in(1, 6), 8 * random_in(1, 40));
  const int64_t rank = size != ANY ? random_in(1, 8) : draw_rank();
  p.of_factors = random_in(0, 3) ? dtype : MOELORA_F32;
  if (quantized)
    p.layout = draw_layout(n, MOELORA_ROWS_PLAIN, (moelora_x_format)random_in(0, 3));
  p.per_row = maybe();
  const int32_t most = n % 4 == 0 ? 4 : n % 3 == 0 ? 3 : n % 2 == 0 ? 2 : 1;
  p.args = (moelora_gemm_args){
      .x = random_tensor(dtype, 1, SIZES(p.per_row ? s.tokens * s.top_k : s.tokens, s.hidden)),
      .w = alone ? absent : draw_weights(dtype, s, n, s.hidden, &p.layout),
      .w_layout = p.layout,
      .bias = !alone && maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n)) : absent,
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .lora = alone || size != ANY || random_in(0, 5)
                  ? random_lora(s, p.of_factors, maybe() ? most : 1, rank, n, s.hidden)
                  : (moelora_lora){0},
      .mul_routed_weight = maybe(),
  };
  if (size == SPLIT) {
    p.args.routing.expert_map = p.args.adapters.adapter_enabled = absent;
    p.args.routing.topk_ids = random_ids(MOELORA_I32, 0, 0, SIZES(s.tokens, 1));
    p.args.adapters.token_lora_mapping = random_ids(MOELORA_I32, 0, 0, SIZES(s.tokens));
  }
  if (maybe())
    p.args.x = spread_rows(p.args.x, s.hidden + ONE_OF(1, 8, 64));
  return p;
}

static inline void describe_projection(uint64_t number, const projection_problem *p) {
  const moelora_lora *lora = &p->args.lora;
  describe(number, p->dtype, p->s);
  DESCRIBE(" N=%lld format=%d x=%d rank=%lld slices=%d of %s%s%s%s", (long long)p->n,
           p->layout.format, p->layout.x, (long long)rank_of(lora), lora->num_slices,
           dtype_name(p->of_factors), p->args.w.data ? "" : " alone", p->per_row ? " per row" : "",
           p->args.mul_routed_weight ? " weighted" : "");
}

/* The arguments for some tokens. */
static inline moelora_gemm_args tokens_of(const projection_problem *p, tokens t) {
  moelora_gemm_args some = p->args;
  some.x = part(&p->args.x, t, p->per_row ? p->s.top_k : 1);
  take_part(&some.routing, &some.adapters, t);
  return some;
}

/* Indices of some pairs of adapter and expert, 0 to `count` - 1; others are out of range. */
static inline moelora_tensor draw_pairs(sizes s, int64_t count) {
  moelora_tensor pairs = random_ids(MOELORA_I32, -1, -1, SIZES(s.slots, s.experts));
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = random_in(0, count_of(&pairs) - 1);
    if (read_value(pairs.data, MOELORA_I32, at) < 0)
      write_value(pairs.data, MOELORA_I32, at, (double)(random_in(0, 7) ? i : count + i));
  }
  return pairs;
}

/* Has gradients of factors of `experts` experts be those of `count` pairs. */
static inline void make_sparse(moelora_lora *grads, int64_t experts, int64_t count) {
  for (int32_t i = 0; i < grads->num_slices; i++) {
    moelora_tensor *const both[] = {&grads->a[i], &grads->b[i]};
    for (int j = 0; j < 2; j++)
      if (both[j]->data && both[j]->size[1] == experts)
        *both[j] =
            random_tensor(both[j]->dtype, 1, SIZES(1, count, both[j]->size[2], both[j]->size[3]));
  }
}

static void test_projection(uint64_t number) {
  seed(number + 9000);
  const projection_size size = number % 8 == 7 ? SPLIT : number % 8 == 3 ? MANY : ANY;
  const bool alone = size == SPLIT || random_in(0, 2) == 0;
  const projection_problem p = draw_projection(alone, size);
  const sizes s = p.s;
  const moelora_dtype dtype = p.dtype;
  const moelora_layout layout = p.layout;
  moelora_gemm_backward_args args = {
      .forward = p.args,
      .num_experts = alone ? (int32_t)s.experts : 0,
      .dout = random_tensor(dtype, 1, SIZES(s.tokens, s.top_k, p.n)),
      .accumulate = maybe(),
  };
  const moelora_gemm_args *forward = &args.forward;
  if (random_in(0, 2) == 0)
    args.dout = spread_tokens(args.dout);
  args.grads = (moelora_gemm_grads){
      .topk_weights = gradient_of(&forward->routing.topk_weights, MOELORA_F32),
      .lora = gradients_of_lora(&forward->lora, dtype),
      .bias = gradient_of(&forward->bias, maybe() ? dtype : MOELORA_F32),
  };
  const int64_t num_sparse = random_in(0, 2) ? 0 : random_in(1, s.slots * s.experts);
  if (num_sparse) {
    args.grads.pairs = draw_pairs(s, num_sparse);
    make_sparse(&args.grads.lora, s.experts, num_sparse);
  }
  if (random_in(0, 7))
    args.grads.x = random_tensor(dtype, 1, SIZES(forward->x.size[0], s.hidden));
  if (args.grads.x.data && maybe())
    args.grads.x = spread_rows(args.grads.x, s.hidden + ONE_OF(1, 8, 64));
  describe_projection(number, &p);
  DESCRIBE("%s", args.accumulate ? " accumulate" : "");
  if (num_sparse)
    DESCRIBE(" sparse=%lld", (long long)num_sparse);

  moelora_gemm_backward_args on_cpu = args;
  if (args.grads.x.data)
    on_cpu.grads.x = random_tensor(dtype, 1, SIZES(forward->x.size[0], s.hidden));
  const gradients got = gemm_gradients_of(&args.grads), want = gemm_gradients_of(&on_cpu.grads);
  copy_all(want);
  RUN_BOTH(gemm_backward, &args, &on_cpu, dtype, &layout);
  moelora_tensor dx = {0};
  if (args.grads.x.data) { /* without the space between rows */
    dx = new_tensor(dtype, SIZES(args.grads.x.size[0], s.hidden));
    for (int64_t i = 0; i < count_of(&dx); i++)
      write_value(dx.data, dtype, i,
                  read_value(args.grads.x.data, dtype,
                             i / s.hidden * args.grads.x.stride[0] + i % s.hidden));
    compare("dx", &dx, &on_cpu.grads.x, 6);
  }
  for (int i = 1; i < got.count; i++) /* terms of the routing weights' may cancel */
    check_given(got.names[i], got.all[i], want.all[i], i == 1 ? 60 : 6);

  /* A part of the tokens, by another kernel: its rows have the same bits. */
  const tokens t = draw_tokens(s);
  const int64_t rows = p.per_row ? s.top_k : 1;
  moelora_gemm_backward_args less = args;
  less.forward = tokens_of(&p, t);
  less.dout = part(&args.dout, t, 1);
  less.grads = (moelora_gemm_grads){
      .x = new_tensor(dtype, SIZES(t.count * rows, s.hidden)),
      .topk_weights = new_tensor(MOELORA_F32, SIZES(t.count, s.top_k)),
  };
  RUN_FORCED(gemm_backward, &less, dtype, &layout);
  if (dx.data)
    same_rows(&less.grads.x, &dx, t.first * rows);
  if (args.grads.topk_weights.data)
    same_rows(&less.grads.topk_weights, &args.grads.topk_weights, t.first);
  release_all();
}
