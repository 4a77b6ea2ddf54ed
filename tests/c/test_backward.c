/* The backward of the layer against central differences of its forward, independent of any
 * reference: values, guard bands, threads, absent gradients, accumulation, and error messages. */
#include "valid.h"

enum { TOKENS = 9, TOP_K = 2, EXPERTS = 3, HIDDEN = 20, INNER = 12, RANK = 5, SLOTS = 2 };

static moelora_experts_backward_args make(moelora_activation activation, bool early,
                                          int32_t slices) {
  sizes s = {.tokens = TOKENS,
             .top_k = early ? 1 : TOP_K,
             .experts = EXPERTS,
             .hidden = HIDDEN,
             .inner = INNER,
             .slots = SLOTS};
  const int64_t n13 = activation == MOELORA_RELU2 ? INNER : 2 * INNER, p = s.tokens * s.top_k;
  moelora_experts_backward_args args = {
      .forward =
          {
              .hidden_states = random_tensor(MOELORA_F32, 1, SIZES(TOKENS, HIDDEN)),
              .w13 = random_weights(s, MOELORA_F32, n13, HIDDEN, false),
              .w2 = random_weights(s, MOELORA_F32, HIDDEN, INNER, false),
              .w13_bias = random_tensor(MOELORA_F32, 1, SIZES(EXPERTS, n13)),
              .w2_bias = random_tensor(MOELORA_F32, 1, SIZES(EXPERTS, HIDDEN)),
              .routing = random_routing(s),
              .adapters = random_adapters(s, RANK),
              .w13_lora = random_lora(s, MOELORA_F32, slices, RANK, n13, HIDDEN),
              .w2_lora = random_lora(s, MOELORA_F32, 1, RANK, HIDDEN, INNER),
              .activation = activation,
              .activation_alpha = activation == MOELORA_SITU ? 0.75 : 0,
              .activation_limit = activation == MOELORA_SITU ? 1.5 : 0,
              .apply_router_weight_on_input = early,
              .out = new_tensor(MOELORA_F32, SIZES(TOKENS, HIDDEN)),
          },
      .dout = random_tensor(MOELORA_F32, 1, SIZES(TOKENS, HIDDEN)),
  };
  const bool mapped = !!args.forward.adapters.token_lora_mapping.data;
  args.forward.saved.gate_up = new_tensor(MOELORA_F32, SIZES(p, n13));
  if (mapped && slices)
    args.forward.saved.w13_shrink = new_tensor(MOELORA_F32, SIZES(p, slices, RANK));
  if (mapped)
    args.forward.saved.w2_shrink = new_tensor(MOELORA_F32, SIZES(p, RANK));
  return args;
}

static moelora_tensor like(const moelora_tensor *t) {
  return new_tensor(MOELORA_F32, t->ndim, t->size);
}

static moelora_lora like_lora(const moelora_lora *lora) {
  moelora_lora grads = {.num_slices = lora->num_slices};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    grads.a[i] = like(&lora->a[i]);
    grads.b[i] = like(&lora->b[i]);
  }
  return grads;
}

static moelora_experts_grads all_grads(const moelora_experts_args *args) {
  return (moelora_experts_grads){
      .hidden_states = like(&args->hidden_states),
      .topk_weights = like(&args->routing.topk_weights),
      .w13_lora = like_lora(&args->w13_lora),
      .w2_lora = like_lora(&args->w2_lora),
      .w13_bias = like(&args->w13_bias),
      .w2_bias = like(&args->w2_bias),
  };
}

/* Trained tensors and their gradients. */
typedef struct pair {
  const char *name;
  moelora_tensor *value, *grad;
} pair;

static int pairs_of(moelora_experts_backward_args *args, pair *pairs) {
  moelora_experts_args *f = &args->forward;
  moelora_experts_grads *g = &args->grads;
  int count = 0;
  pairs[count++] = (pair){"x", &f->hidden_states, &g->hidden_states};
  pairs[count++] = (pair){"topk_weights", &f->routing.topk_weights, &g->topk_weights};
  for (int32_t i = 0; i < f->w13_lora.num_slices; i++) {
    pairs[count++] = (pair){"w13_lora.a", &f->w13_lora.a[i], &g->w13_lora.a[i]};
    pairs[count++] = (pair){"w13_lora.b", &f->w13_lora.b[i], &g->w13_lora.b[i]};
  }
  pairs[count++] = (pair){"w2_lora.a", &f->w2_lora.a[0], &g->w2_lora.a[0]};
  pairs[count++] = (pair){"w2_lora.b", &f->w2_lora.b[0], &g->w2_lora.b[0]};
  pairs[count++] = (pair){"w13_bias", &f->w13_bias, &g->w13_bias};
  pairs[count++] = (pair){"w2_bias", &f->w2_bias, &g->w2_bias};
  return count;
}

static double loss(const moelora_experts_backward_args *args) {
  moelora_experts_args forward = args->forward;
  forward.saved = (moelora_saved){0};
  CHECK_RUN(experts, &forward, serial);
  double sum = 0;
  for (int64_t i = 0; i < TOKENS * HIDDEN; i++)
    sum += (double)((float *)forward.out.data)[i] * ((float *)args->dout.data)[i];
  return sum;
}

static void check_slopes(moelora_experts_backward_args *args, const pair *pairs, int count) {
  for (int i = 0; i < count; i++) {
    float *value = pairs[i].value->data, *grad = pairs[i].grad->data;
    const int64_t n = count_of(pairs[i].grad);
    float *way = allocate((size_t)n * sizeof *way), *kept = allocate((size_t)n * sizeof *way);
    const float step = 1.0f / 256;
    double along = 0, slopes[2];
    if (count_of(pairs[i].value) != n || pairs[i].value->stride[0] != pairs[i].grad->stride[0])
      continue; /* other strides: tested elsewhere */
    memcpy(kept, value, (size_t)n * sizeof *value);
    for (int64_t j = 0; j < n; j++) {
      way[j] = (float)random_unit();
      along += isfinite(kept[j]) ? (double)way[j] * grad[j] : 0;
    }
    for (int sign = 0; sign < 2; sign++) {
      for (int64_t j = 0; j < n; j++)
        value[j] = kept[j] + (sign ? -step : step) * way[j];
      slopes[sign] = loss(args);
    }
    memcpy(value, kept, (size_t)n * sizeof *value);
    const double slope = (slopes[0] - slopes[1]) / (2 * step);
    if (fabs(slope - along) > 0.03 * fmax(1, fabs(along)))
      FAIL("%s: slope %g, gradient %g", pairs[i].name, slope, along);
  }
}

/* Sparse gradients have the same bits, in an order of their own and without the last pair. */
static void check_sparse(const moelora_experts_backward_args *args) {
  const int32_t pairs = SLOTS * EXPERTS;
  const moelora_tensor *whole = &args->grads.w2_lora.b[0];
  moelora_experts_backward_args sparse = *args;
  if (whole->size[1] != EXPERTS)
    return; /* experts share the factor */
  sparse.grads = (moelora_experts_grads){.w2_lora = {.num_slices = 1}};
  sparse.grads.pairs = new_tensor(MOELORA_I32, SIZES(SLOTS, EXPERTS));
  sparse.grads.w2_lora.b[0] =
      new_tensor(MOELORA_F32, SIZES(1, pairs - 1, whole->size[2], whole->size[3]));
  for (int32_t i = 0; i < pairs; i++)
    ((int32_t *)sparse.grads.pairs.data)[i] = pairs - 2 - i; /* -1 of the last */
  CHECK_RUN(experts_backward, &sparse, serial);
  const size_t bytes = (size_t)(whole->size[2] * whole->size[3]) * sizeof(float);
  for (int32_t i = 0; i < pairs - 1; i++)
    CHECK(memcmp((char *)whole->data + i * bytes,
                 (char *)sparse.grads.w2_lora.b[0].data + (pairs - 2 - i) * bytes, bytes) == 0);
}

static void test_gradients(moelora_activation activation, bool early, int32_t slices,
                           uint64_t number) {
  seed(number);
  moelora_experts_backward_args args = make(activation, early, slices);
  pair pairs[16];
  args.grads = all_grads(&args.forward);
  CHECK_RUN(experts, &args.forward, serial);
  CHECK_RUN(experts_backward, &args, serial);
  CHECK(strncmp(moelora_last_plan(), "backward=gemm_f32_", 18) == 0);
  check_slopes(&args, pairs, pairs_of(&args, pairs));

  /* The same bits with threads, into other memory. */
  moelora_experts_backward_args again = args;
  pair others[16];
  again.grads = all_grads(&args.forward);
  CHECK_RUN(experts, &args.forward, threaded);
  CHECK_RUN(experts_backward, &again, threaded);
  const int count = pairs_of(&again, others);
  for (int i = 0; i < count; i++)
    CHECK(same_bytes(pairs[i].grad, others[i].grad));

  /* Accumulate factors and biases once more, which doubles them. */
  again.accumulate = true;
  CHECK_RUN(experts_backward, &again, serial);
  for (int i = 2; i < count; i++)
    for (int64_t j = 0; j < count_of(pairs[i].grad); j++)
      CHECK(((float *)others[i].grad->data)[j] == 2 * ((float *)pairs[i].grad->data)[j]);

  /* A single gradient. */
  moelora_experts_backward_args one = args;
  one.grads = (moelora_experts_grads){.w2_lora = {.num_slices = 1}};
  one.grads.w2_lora.b[0] = like(&args.forward.w2_lora.b[0]);
  CHECK_RUN(experts_backward, &one, serial);
  CHECK(same_bytes(&one.grads.w2_lora.b[0], &args.grads.w2_lora.b[0]));
  check_sparse(&args);
  release_all();
}

static void test_refusals(void) {
  seed(77);
  moelora_experts_backward_args good = make(MOELORA_SILU, false, 2), a;
  good.grads = all_grads(&good.forward);
  size_t bytes;
#define run(A) experts_backward_bytes(A, &serial, &bytes)
  REFUSED(good, "dout is absent, expected a tensor [M, K]", a.dout = absent);
  REFUSED(good, "dout.size(1) is 3, hidden_states.size(1) is 20", a.dout.size[1] = 3);
  REFUSED(good, "saved.gate_up is absent, expected a tensor [M * top_k, 2 I]",
          a.forward.saved.gate_up = absent);
  REFUSED(good, "saved.gate_up.size(1) is 7, w13.size(1) is 24",
          a.forward.saved.gate_up.size[1] = 7);
  REFUSED(good, "saved.w13_shrink is absent, expected a tensor [M * top_k, slices, R]",
          a.forward.saved.w13_shrink = absent);
  REFUSED(good, "saved.w13_shrink.size(1) is 1, the number of slices of the factors is 2",
          a.forward.saved.w13_shrink.size[1] = 1);
  REFUSED(good,
          "saved.w13_shrink.stride(2) is 2, expected 1: the last dimension must be contiguous",
          a.forward.saved.w13_shrink.stride[2] = 2);
  REFUSED(good, "saved.w2_shrink.size(1) is 1, the maximum rank of the factors is 5",
          a.forward.saved.w2_shrink.size[1] = 1);
  REFUSED(good, "saved.w2_shrink has dtype float16, expected float32 as hidden_states",
          a.forward.saved.w2_shrink.dtype = MOELORA_F16);
  REFUSED(good, "grads.w2_lora_a[0] has dtype float16, expected float32",
          a.grads.w2_lora.a[0].dtype = MOELORA_F16);
  REFUSED(good, "grads.w13_lora_a has 1 slices, w13_lora_a has 2", a.grads.w13_lora.num_slices = 1);
  REFUSED(good, "grads.hidden_states shares memory with dout", a.grads.hidden_states = a.dout);
  REFUSED(good, "grads.w2_bias.size(0) is 9, w2_bias.size(0) is 3",
          a.grads.w2_bias = a.grads.hidden_states);
  const moelora_tensor pairs = new_tensor(MOELORA_I32, SIZES(SLOTS, EXPERTS + 1));
  REFUSED(good, "grads.pairs.size(1) is 4, w13.size(0) is 3", a.grads.pairs = pairs);
  REFUSED(good, "grads.w2_bias is given, but w2_bias is absent", a.forward.w2_bias = absent);
  moelora_experts_args forward = good.forward;
  forward.saved.gate_up = absent;
  if (forward.saved.w2_shrink.data)
    CHECK_FAILS(experts_bytes(&forward, &serial, &bytes), MOELORA_INVALID_ARGUMENT,
                forward.saved.w13_shrink.data
                    ? "saved.w13_shrink is given, but saved.gate_up is absent"
                    : "saved.w2_shrink is given, but saved.gate_up is absent");
  forward = good.forward;
  forward.out = forward.hidden_states;
  CHECK_FAILS(experts_bytes(&forward, &serial, &bytes), MOELORA_INVALID_ARGUMENT,
              "out shares memory with hidden_states");
  release_all();
}

int main(void) {
  int cases = 0;
  for (int activation = MOELORA_SILU; activation < NUM_ACTIVATIONS; activation++)
    for (uint64_t number = 1; number <= 6; number++, cases++)
      test_gradients((moelora_activation)activation, number % 3 == 0,
                     activation == MOELORA_RELU2 ? 1 : 1 + (int32_t)(number % 2), number);
  test_refusals();
  printf("test_backward: %d layers\n", cases);
  return 0;
}
