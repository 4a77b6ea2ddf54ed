/* Random problems for compare.c, larger than those of tests/c; kernels to force for them; and
 * their calls. */
#pragma once

#include <setjmp.h>

#include "cases.h"

static const char *wanted = "";
static uint64_t hash = 14695981039346656037u;
static jmp_buf skip; /* target of a case that cannot run */
static const moelora_layout native;

static inline void hash_tensor(const moelora_tensor *t) {
  const unsigned char *bytes = t->data;
  for (size_t i = 0; i < (size_t)count_of(t) * dtype_bytes(t->dtype); i++)
    hash = (hash ^ bytes[i]) * 1099511628211u;
}

#define DESCRIBE(...) snprintf(drawn + strlen(drawn), sizeof drawn - strlen(drawn), __VA_ARGS__)

static inline moelora_exec gpu(void) {
  return (moelora_exec){.device = MOELORA_CUDA};
}

/* Whether a kernel supports the dtype and weight format of a case. */
static inline bool suits(const char *name, moelora_dtype dtype, const moelora_layout *layout) {
  static const char *words[] = {"mxfp4", "int4", "w8a16", "w8a8", "nvfp4", "nf4"};
  const moelora_format f = layout->format;
  const bool back = strncmp(name, "back", 4) == 0; /* gradients are never e4m3 */
  const char *word = f == MOELORA_NATIVE                     ? ""
                     : f == MOELORA_MXFP4                    ? "mxfp4"
                     : f == MOELORA_NVFP4                    ? "nvfp4"
                     : moelora_has_f32_scales(f)             ? "nf4"
                     : !moelora_is_fp8(f)                    ? "int4"
                     : layout->x == MOELORA_X_NATIVE || back ? "w8a16"
                                                             : "w8a8";
  if (!strstr(name, "_i32_") && dtype_of(name) != dtype)
    return false;
  if (strncmp(name, "gemm", 4) && strncmp(name, "decode", 6) && !back)
    return true;
  for (int i = 0; i < 6; i++)
    if (strstr(name, words[i]))
      return strcmp(words[i], word) == 0;
  return !*word;
}

/* Forces one or two kernels of different roles; none in one of four cases. */
static inline void force_any(moelora_dtype dtype, const moelora_layout *layout) {
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
  if (*wanted)
    longjmp(skip, 1);
}

/* The same for an output that the hash has. */
static inline void check_output(const char *what, const moelora_tensor *got,
                                const moelora_tensor *want, double slack) {
  compare(what, got, want, slack);
  hash_tensor(got);
}

#define RUN(NAME)                                                                                  \
  static inline void run_##NAME(const moelora_##NAME##_args *args, moelora_exec exec) {            \
    size_t bytes;                                                                                  \
    moelora_status status = NAME##_bytes(args, &exec, &bytes);                                     \
    if (status == MOELORA_UNSUPPORTED && strstr(moelora_error_message(), "is not built"))          \
      longjmp(skip, 1);                                                                            \
    if (status != MOELORA_OK)                                                                      \
      FAIL(#NAME "%s: %s", drawn, moelora_error_message());                                        \
    give_workspace(&exec, bytes);                                                                  \
    if (bytes)                                                                                     \
      memset(exec.workspace, 0xff, bytes);                                                         \
    CHECK_OK(call_##NAME(args, &exec));                                                            \
    check_guards();                                                                                \
  }
RUN(experts)
RUN(gemm)
RUN(delta)
RUN(mlp_delta)
RUN(align)
RUN(align_lists)

static char noted_plan[512]; /* of the last RUN_BOTH */

/* A call with a forced kernel. */
#define RUN_FORCED(NAME, ARGS, DTYPE, LAYOUT)                                                      \
  do {                                                                                             \
    force_any(DTYPE, LAYOUT);                                                                      \
    run_##NAME(ARGS, gpu());                                                                       \
  } while (0)

/* The call WANT on the CPU, then ARGS on the GPU with a forced kernel. */
#define RUN_BOTH(NAME, ARGS, WANT, DTYPE, LAYOUT)                                                  \
  do {                                                                                             \
    moelora_force_variant(NULL);                                                                   \
    run_##NAME(WANT, serial);                                                                      \
    RUN_FORCED(NAME, ARGS, DTYPE, LAYOUT);                                                         \
    snprintf(noted_plan, sizeof noted_plan, "%s", moelora_last_plan());                            \
  } while (0)

static inline int64_t one_of(const int64_t *values, int64_t count) {
  return values[random_in(0, count - 1)];
}
#define ONE_OF(...)                                                                                \
  one_of((int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static inline sizes draw_sizes(int64_t depth_of) {
  sizes s = {.experts = random_in(1, 6)};
  s.tokens = ONE_OF(1, random_in(2, 8), random_in(2, 8), random_in(9, 40), random_in(41, 120),
                    random_in(121, 300));
  s.top_k = random_in(1, s.experts < 4 ? s.experts : 4);
  const int64_t most = s.tokens > 100 ? 256 : ONE_OF(512, 512, 512, 1920);
  s.hidden = depth_of * random_in(1, most / depth_of);
  s.inner = depth_of * random_in(1, most / 2 / depth_of);
  s.slots = random_in(1, 4);
  return s;
}

static inline void describe(uint64_t number, moelora_dtype dtype, sizes s) {
  snprintf(drawn, sizeof drawn, " %llu: %s M=%lld k=%lld E=%lld K=%lld", (unsigned long long)number,
           dtype_name(dtype), (long long)s.tokens, (long long)s.top_k, (long long)s.experts,
           (long long)s.hidden);
}

static inline int64_t draw_rank(void) {
  return ONE_OF(random_in(1, 16), 8, 16, 32, 64, random_in(17, 128), 128);
}

static inline moelora_adapters draw_adapters(sizes s, int64_t max_rank) {
  moelora_adapters adapters = random_adapters(s, max_rank);
  if (random_in(0, 3) == 0) /* one for all */
    for (int64_t m = 0; m < s.tokens; m++)
      write_value(adapters.token_lora_mapping.data, adapters.token_lora_mapping.dtype, m, 0);
  return adapters;
}

static inline moelora_lora draw_lora(sizes s, moelora_dtype dtype, int32_t slices, int64_t n,
                                     int64_t k) {
  return random_lora(s, dtype, slices, draw_rank(), n, k);
}

static inline moelora_layout draw_layout(int64_t rows, moelora_row_order order,
                                         moelora_x_format x) {
  const int64_t kind = ONE_OF(0, 1, 2, 3, 3, 3);
  if (kind == 0)
    return (moelora_layout){0};
  moelora_layout layout = {.rows = rows, .order = order};
  layout.format = kind == 3 ? (moelora_format)random_in(MOELORA_FP8, MOELORA_FP8_ROWS)
                            : (moelora_format)ONE_OF(random_in(MOELORA_NVFP4, MOELORA_BNB_FP4),
                                                     random_in(MOELORA_MXFP4, MOELORA_INT4_ZP_G32));
  if (kind == 3) {
    layout.x = x;
    layout.x_scale = x == MOELORA_X_STATIC ? 0.01f : 0;
  }
  return layout;
}

static inline moelora_tensor draw_weights(moelora_dtype dtype, sizes s, int64_t n, int64_t k,
                                          moelora_layout *layout) {
  if (layout->format != MOELORA_NATIVE) {
    const moelora_quantized w = random_quantized(s.experts, k, layout, false);
    moelora_tensor tiles = new_tiles(s.experts, k, layout);
    CHECK_OK(moelora_pack_quantized(&w, layout, dtype, &tiles, &serial));
    return tiles;
  }
  return random_weights(s, dtype, n, k, n % 64 == 0 && k % 64 == 0 && maybe());
}

static inline double slack_of(const moelora_layout *layout) {
  return layout->x == MOELORA_X_NATIVE ? 2 : 10;
}

/* Some of the tokens, by number and first. */
typedef struct tokens {
  int64_t first, count;
} tokens;

static inline tokens draw_tokens(sizes s) {
  const int64_t count = random_in(1, s.tokens);
  const tokens t = {random_in(0, s.tokens - count), count};
  DESCRIBE(", %lld tokens from %lld", (long long)t.count, (long long)t.first);
  return t;
}

/* Rows of some tokens, of which each has `rows`. */
static inline moelora_tensor part(const moelora_tensor *t, tokens some, int64_t rows) {
  moelora_tensor p = *t;
  if (!t->data)
    return p;
  p.data = (char *)t->data + (size_t)(some.first * rows * t->stride[0]) * dtype_bytes(t->dtype);
  p.size[0] = some.count * rows;
  return p;
}

static inline void take_part(moelora_routing *routing, moelora_adapters *adapters, tokens some) {
  routing->topk_ids = part(&routing->topk_ids, some, 1);
  routing->topk_weights = part(&routing->topk_weights, some, 1);
  adapters->token_lora_mapping = part(&adapters->token_lora_mapping, some, 1);
}

/* ---- layers ---- */

/* A random layer, without what a training step saves. */
typedef struct layer_problem {
  sizes s;
  moelora_dtype dtype;
  int64_t n13;
  moelora_layout w13, w2;
  moelora_experts_args args;
} layer_problem;

static inline layer_problem draw_layer(moelora_dtype dtype, moelora_dtype of_factors) {
  const bool quantized = maybe();
  layer_problem p = {.s = draw_sizes(quantized ? 32 : ONE_OF(1, 8, 64, 64)), .dtype = dtype};
  const moelora_activation activation = (moelora_activation)random_in(0, NUM_ACTIVATIONS - 1);
  const bool gated = activation != MOELORA_RELU2;
  const moelora_row_order order = activation == MOELORA_SWIGLUOAI ? MOELORA_ROWS_INTERLEAVED
                                  : gated                         ? MOELORA_ROWS_GATE_UP
                                                                  : MOELORA_ROWS_PLAIN;
  const int64_t n13 = p.n13 = p.s.inner * (gated ? 2 : 1);
  if (quantized) {
    const moelora_x_format x = (moelora_x_format)random_in(0, 3);
    p.w13 = draw_layout(n13, order, x);
    p.w2 = random_in(0, 3) ? p.w13 : draw_layout(p.s.hidden, MOELORA_ROWS_PLAIN, x);
    p.w2.order = MOELORA_ROWS_PLAIN;
    p.w2.rows = p.w2.format ? p.s.hidden : 0;
  }
  if (random_in(0, 3) == 0)
    p.s.top_k = 1;
  const sizes s = p.s;
  p.args = (moelora_experts_args){
      .hidden_states = random_tensor(dtype, 1, SIZES(s.tokens, s.hidden)),
      .w13 = draw_weights(dtype, s, n13, s.hidden, &p.w13),
      .w2 = draw_weights(dtype, s, s.hidden, s.inner, &p.w2),
      .w13_layout = p.w13,
      .w2_layout = p.w2,
      .w13_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, n13)) : absent,
      .w2_bias = maybe() ? random_tensor(dtype, 1, SIZES(s.experts, s.hidden)) : absent,
      .routing = random_routing(s),
      .adapters = draw_adapters(s, 130),
      .w13_lora = random_in(0, 5)
                      ? draw_lora(s, of_factors, gated && maybe() ? 2 : 1, n13, s.hidden)
                      : (moelora_lora){0},
      .w2_lora =
          random_in(0, 5) ? draw_lora(s, of_factors, 1, s.hidden, s.inner) : (moelora_lora){0},
      .activation = activation,
      .activation_limit = takes_limit(activation) && maybe() ? 0.5 : 0,
      .apply_router_weight_on_input = s.top_k == 1 && maybe(),
      .out = new_tensor(dtype, SIZES(s.tokens, s.hidden)),
  };
  return p;
}

static inline int64_t rank_of(const moelora_lora *lora) {
  return lora->num_slices ? lora->a[0].size[2] : 0;
}

static inline void describe_layer(uint64_t number, const layer_problem *p,
                                  moelora_dtype of_factors) {
  const moelora_experts_args *a = &p->args;
  describe(number, p->dtype, p->s);
  DESCRIBE(" I=%lld act=%d formats=%d,%d x=%d,%d ranks=%lld,%lld of %s%s%s", (long long)p->s.inner,
           a->activation, p->w13.format, p->w2.format, p->w13.x, p->w2.x,
           (long long)rank_of(&a->w13_lora), (long long)rank_of(&a->w2_lora),
           dtype_name(of_factors), a->w13.ndim == 5 ? " packed" : "",
           a->apply_router_weight_on_input ? " early" : "");
}

/* Rows from `first` on have the bits of `whole`, which was computed by RUN_BOTH. */
static inline void same_rows(const moelora_tensor *got, const moelora_tensor *whole,
                             int64_t first) {
  const size_t row = (size_t)whole->stride[0] * dtype_bytes(whole->dtype);
  for (int64_t m = 0; m < got->size[0]; m++)
    if (memcmp((char *)got->data + (size_t)m * row, (char *)whole->data + (size_t)(first + m) * row,
               row))
      FAIL("%s: token %lld alone differs: %s and %s", drawn, (long long)(first + m), noted_plan,
           moelora_last_plan());
}
