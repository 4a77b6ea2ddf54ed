/* Projections, deltas and their backward with float32 factors beside 16 bits: the bits of factors
 * that are rounded before; and sparse gradients, those of dense ones. With guard bands, threads and
 * error messages. */
#include "cases.h"

enum { RANK = 5, SLOTS = 3 };

/* ---- problems ---- */

static moelora_tensor rounded(const moelora_tensor *t, moelora_dtype dtype) {
  moelora_tensor r = new_tensor(dtype, t->ndim, t->size);
  for (int64_t i = 0; i < count_of(t); i++)
    write_value(r.data, dtype, i, read_value(t->data, t->dtype, i));
  return r;
}

static moelora_lora rounded_lora(const moelora_lora *lora, moelora_dtype dtype) {
  moelora_lora r = {.num_slices = lora->num_slices};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    r.a[i] = rounded(&lora->a[i], dtype);
    r.b[i] = rounded(&lora->b[i], dtype);
  }
  return r;
}

typedef struct problem {
  sizes s;
  int64_t n;
  moelora_dtype dtype;
  moelora_gemm_backward_args args; /* without w: of adapters alone */
} problem;

static problem draw(bool alone) {
  problem p = {.s = {.tokens = random_in(1, 12),
                     .top_k = random_in(1, 3),
                     .experts = random_in(1, 4),
                     .hidden = random_in(1, 70),
                     .slots = SLOTS},
               .dtype = maybe() ? MOELORA_BF16 : MOELORA_F16};
  const sizes s = p.s;
  const int32_t slices = (int32_t)random_in(1, 4);
  p.n = slices * random_in(1, 40);
  const int64_t rows = maybe() ? s.tokens * s.top_k : s.tokens;
  p.args = (moelora_gemm_backward_args){
      .forward =
          {
              .x = random_tensor(p.dtype, 1, SIZES(rows, s.hidden)),
              .w = alone ? absent : random_weights(s, p.dtype, p.n, s.hidden, false),
              .bias = alone ? absent : random_tensor(p.dtype, 1, SIZES(s.experts, p.n)),
              .routing = random_routing(s),
              .adapters = random_adapters(s, RANK),
              .lora = random_lora(s, MOELORA_F32, slices, RANK, p.n, s.hidden),
              .mul_routed_weight = maybe(),
          },
      .num_experts = alone ? (int32_t)s.experts : 0,
      .dout = random_tensor(p.dtype, 1, SIZES(s.tokens, s.top_k, p.n)),
  };
  return p;
}

static moelora_gemm_grads new_grads(const problem *p, moelora_dtype dtype) {
  const moelora_gemm_args *forward = &p->args.forward;
  moelora_gemm_grads grads = {
      .x = new_tensor(p->dtype, 2, forward->x.size),
      .topk_weights = new_tensor(MOELORA_F32, 2, forward->routing.topk_weights.size),
      .lora = {.num_slices = forward->lora.num_slices},
  };
  if (forward->bias.data)
    grads.bias = new_tensor(dtype, 2, forward->bias.size);
  for (int32_t i = 0; i < forward->lora.num_slices; i++) {
    grads.lora.a[i] = new_tensor(dtype, 4, forward->lora.a[i].size);
    grads.lora.b[i] = new_tensor(dtype, 4, forward->lora.b[i].size);
  }
  return grads;
}

/* ---- calls ---- */

/* out of the projection, or of the delta added to ones. */
static moelora_tensor run_forward(const problem *p, const moelora_lora *lora, moelora_exec exec) {
  const moelora_gemm_args *from = &p->args.forward;
  moelora_tensor out = new_tensor(p->dtype, SIZES(p->s.tokens, p->s.top_k, p->n));
  for (int64_t i = 0; i < count_of(&out); i++)
    write_value(out.data, p->dtype, i, 1);
  if (from->w.data) {
    moelora_gemm_args args = *from;
    args.lora = *lora;
    args.out = out;
    CHECK_RUN(gemm, &args, exec);
    return out;
  }
  const moelora_delta_args args = {
      .num_experts = p->args.num_experts,
      .routing = from->routing,
      .adapters = from->adapters,
      .lora = *lora,
      .x = from->x,
      .mul_routed_weight = from->mul_routed_weight,
      .add_inputs = true,
      .out = out,
  };
  CHECK_RUN(delta, &args, exec);
  return out;
}

/* ---- tests ---- */

static void check_same_grads(const moelora_gemm_grads *a, const moelora_gemm_grads *b) {
  CHECK(same_bytes(&a->x, &b->x));
  CHECK(same_bytes(&a->topk_weights, &b->topk_weights));
  CHECK(!a->bias.data || same_bytes(&a->bias, &b->bias));
  for (int32_t i = 0; i < a->lora.num_slices; i++) {
    CHECK(same_bytes(&a->lora.a[i], &b->lora.a[i]));
    CHECK(same_bytes(&a->lora.b[i], &b->lora.b[i]));
  }
}

/* Sparse gradients of B in an order of their own, without the last pair. */
static void check_sparse(const problem *p, const moelora_gemm_grads *dense) {
  const int64_t pairs = SLOTS * p->s.experts;
  moelora_gemm_backward_args args = p->args;
  args.grads = (moelora_gemm_grads){.lora = {.num_slices = dense->lora.num_slices}};
  args.grads.pairs = new_tensor(MOELORA_I32, SIZES(SLOTS, p->s.experts));
  for (int64_t i = 0; i < pairs; i++)
    ((int32_t *)args.grads.pairs.data)[i] = (int32_t)(pairs - 2 - i); /* -1 of the last */
  for (int32_t i = 0; i < dense->lora.num_slices; i++) {
    const moelora_tensor *whole = &dense->lora.b[i];
    if (whole->size[1] == p->s.experts)
      args.grads.lora.b[i] =
          new_tensor(whole->dtype, SIZES(1, pairs - 1, whole->size[2], whole->size[3]));
  }
  CHECK_RUN(gemm_backward, &args, threaded);
  for (int32_t i = 0; i < dense->lora.num_slices; i++) {
    const moelora_tensor *whole = &dense->lora.b[i], *sparse = &args.grads.lora.b[i];
    const size_t bytes = (size_t)(whole->size[2] * whole->size[3]) * dtype_bytes(whole->dtype);
    for (int64_t j = 0; j < pairs - 1 && sparse->data; j++)
      CHECK(memcmp((char *)whole->data + (size_t)j * bytes,
                   (char *)sparse->data + (size_t)(pairs - 2 - j) * bytes, bytes) == 0);
  }
}

static void test_problem(uint64_t number) {
  seed(number);
  const problem p = draw(number % 2);
  const moelora_lora *wide = &p.args.forward.lora;
  const moelora_lora narrow = rounded_lora(wide, p.dtype);
  const moelora_tensor got = run_forward(&p, wide, threaded);
  const moelora_tensor want = run_forward(&p, &narrow, serial);
  CHECK(same_bytes(&got, &want));

  const moelora_dtype dtype = maybe() ? MOELORA_F32 : p.dtype;
  moelora_gemm_backward_args of_wide = p.args, of_narrow = p.args;
  of_narrow.forward.lora = narrow;
  of_wide.grads = new_grads(&p, dtype);
  of_narrow.grads = new_grads(&p, dtype);
  CHECK_RUN(gemm_backward, &of_wide, threaded);
  CHECK_RUN(gemm_backward, &of_narrow, serial);
  check_same_grads(&of_wide.grads, &of_narrow.grads);
  if (SLOTS * p.s.experts > 1)
    check_sparse(&p, &of_wide.grads);
  check_guards();
  release_all();
}

static void test_refusals(void) {
  seed(5);
  problem p = draw(true);
  size_t bytes;
  moelora_gemm_backward_args bad = p.args;
  bad.grads.lora.num_slices = bad.forward.lora.num_slices;
  bad.grads.pairs = new_tensor(MOELORA_I32, SIZES(SLOTS, p.s.experts + 1));
  char message[128];
  snprintf(message, sizeof message, "grads.pairs.size(1) is %d, %s is %d", (int)p.s.experts + 1,
           bad.forward.w.data ? "w.size(0)" : "num_experts", (int)p.s.experts);
  CHECK_FAILS(gemm_backward_bytes(&bad, &serial, &bytes), MOELORA_INVALID_ARGUMENT, message);
  moelora_delta_args half = {
      .num_experts = (int32_t)p.s.experts,
      .routing = p.args.forward.routing,
      .adapters = p.args.forward.adapters,
      .lora = p.args.forward.lora,
      .x = p.args.forward.x,
      .h = new_tensor(p.dtype, SIZES(p.args.forward.lora.num_slices, p.s.tokens, p.s.top_k, RANK)),
  };
  snprintf(message, sizeof message, "lora_a[0] has dtype float32, expected %s as x",
           p.dtype == MOELORA_BF16 ? "bfloat16" : "float16");
  CHECK_FAILS(delta_bytes(&half, &serial, &bytes), MOELORA_INVALID_ARGUMENT, message);
  release_all();
}

int main(void) {
  const int problems = 60;
  for (int number = 1; number <= problems; number++)
    test_problem((uint64_t)number);
  test_refusals();
  printf("test_projection: %d problems\n", problems);
  return 0;
}
