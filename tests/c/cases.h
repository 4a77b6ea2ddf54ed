/* Random problems, a thread pool, and error bounds of results. */
#pragma once

#include <pthread.h>

#include "core/format.h"
#include "naive.h"

/* A pool of three threads that starts with the last share. */
enum { THREADS = 3 };

typedef struct share {
  moelora_task task;
  void *context;
  int64_t begin, end;
} share;

static inline void *run_share(void *argument) {
  share *s = argument;
  if (s->begin < s->end)
    s->task(s->context, s->begin, s->end);
  return NULL;
}

static inline void parallel_for(int64_t count, moelora_task task, void *context) {
  pthread_t threads[THREADS];
  share shares[THREADS];
  for (int64_t i = THREADS - 1; i >= 0; i--) {
    shares[i] = (share){task, context, count * i / THREADS, count * (i + 1) / THREADS};
    CHECK(pthread_create(&threads[i], NULL, run_share, &shares[i]) == 0);
  }
  for (int64_t i = 0; i < THREADS; i++)
    pthread_join(threads[i], NULL);
}

static const moelora_exec threaded = {
    .device = MOELORA_CPU, .parallel_for = parallel_for, .num_threads = THREADS};

/* ---- random cases ---- */

typedef struct sizes {
  int64_t tokens, top_k, experts, hidden, inner, slots;
} sizes;

static inline int64_t pick(int64_t a, int64_t b, int64_t c) {
  const int64_t values[] = {a, b, c};
  return values[random_in(0, 2)];
}

static inline sizes random_sizes(void) {
  sizes s = {.tokens = pick(1, random_in(2, 9), 70), .experts = random_in(1, 7)};
  s.top_k = random_in(1, s.experts < 4 ? s.experts : 4);
  s.slots = random_in(1, 4);
  return s;
}

static inline bool maybe(void) {
  return random_in(0, 1);
}

static inline moelora_dtype id_dtype(void) {
  return maybe() ? MOELORA_I32 : MOELORA_I64;
}

static inline moelora_routing random_routing(sizes s) {
  moelora_routing routing = {
      .topk_weights = random_tensor(MOELORA_F32, 1, SIZES(s.tokens, s.top_k)),
  };
  int64_t known = s.experts;
  if (maybe()) {
    known = s.experts + 3;
    routing.expert_map = random_ids(MOELORA_I32, -1, s.experts, 1, &known);
  }
  /* a few ids are out of range */
  routing.topk_ids = random_ids(id_dtype(), -1, known, SIZES(s.tokens, s.top_k));
  if (s.tokens > 1)
    write_value(routing.topk_ids.data, routing.topk_ids.dtype, 0, 2147483647.0);
  return routing;
}

static inline moelora_adapters random_adapters(sizes s, int64_t max_rank) {
  moelora_adapters adapters = {
      .token_lora_mapping = random_ids(id_dtype(), -2, s.slots, 1, &s.tokens),
  };
  if (maybe())
    adapters.lora_ranks = random_ids(MOELORA_I32, 0, max_rank, 1, &s.slots);
  if (maybe())
    adapters.lora_scalings = random_tensor(MOELORA_F32, 2, 1, &s.slots);
  if (maybe())
    adapters.adapter_enabled =
        random_ids(maybe() ? MOELORA_BOOL : MOELORA_I32, 0, 1, SIZES(s.slots + random_in(0, 1)));
  return adapters;
}

static inline moelora_lora random_lora(sizes s, moelora_dtype dtype, int32_t slices, int64_t rank,
                                       int64_t n, int64_t k) {
  moelora_lora lora = {.num_slices = slices};
  double scale_a = 1 / sqrt((double)k), scale_b = 1 / sqrt((double)rank);
  for (int32_t i = 0; i < slices; i++) {
    lora.a[i] = random_tensor(dtype, scale_a, SIZES(s.slots, maybe() ? 1 : s.experts, rank, k));
    lora.b[i] =
        random_tensor(dtype, scale_b, SIZES(s.slots, maybe() ? 1 : s.experts, n / slices, rank));
  }
  return lora;
}

/* Allocates the outputs of an alignment of `rows` rows; its other arguments are set. */
static inline void new_alignment(moelora_align_args *a, int64_t rows) {
  const int64_t blocks =
      moelora_align_max_blocks(a->mode, rows, a->num_experts, a->max_loras, a->block_size);
  const int64_t ids = blocks * a->block_size;
  a->sorted_token_ids = new_tensor(MOELORA_I32, SIZES(ids));
  a->expert_ids = new_tensor(MOELORA_I32, SIZES(blocks));
  a->num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(1));
  if (a->mode == MOELORA_ALIGN_UNIFORM || a->mode == MOELORA_ALIGN_SEGMENTED)
    a->lora_ids = new_tensor(MOELORA_I32, SIZES(a->mode == MOELORA_ALIGN_UNIFORM ? blocks : ids));
  if (a->mode == MOELORA_ALIGN_SORTING)
    a->sorted_weights = new_tensor(MOELORA_F32, SIZES(ids));
}

/* Row-major weights, or the same, packed by the library. */
static inline moelora_tensor random_weights(sizes s, moelora_dtype dtype, int64_t n, int64_t k,
                                            bool packed) {
  moelora_tensor w = random_tensor(dtype, 1 / sqrt((double)k), SIZES(s.experts, n, k));
  if (!packed)
    return w;
  moelora_tensor tiles = new_tensor(dtype, SIZES(s.experts, n / 64, k / 64, 64, 64));
  CHECK_OK(moelora_pack_weights(&w, &tiles, maybe() ? &serial : &threaded));
  for (int64_t e = 0; e < s.experts; e++)
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = 0; j < k; j++)
        CHECK(weight_at(&tiles, e, i, j) == weight_at(&w, e, i, j));
  return tiles;
}

/* Memory for the tiles of quantized weights [experts, layout->rows, k]. */
static inline moelora_tensor new_tiles(int64_t experts, int64_t k, const moelora_layout *layout) {
  return new_tensor(MOELORA_U8, SIZES(experts, moelora_row_tiles(layout->order, layout->rows),
                                      moelora_depth_tiles(layout->format, k),
                                      moelora_tile_bytes(layout->format)));
}

/* Compares |out - exact| with the error of a chain of roundings to the dtype. */
static inline void check_close(const char *what, const moelora_tensor *out, const double *exact,
                               const double *rounded, int64_t count) {
  double error = 0, largest = 0;
  int64_t cols = out->size[out->ndim - 1];
  for (int64_t i = 0; i < count; i++) {
    int64_t row = i / cols;
    double got = out->ndim == 2 ? at(out, row, i % cols, 0, 0)
                                : at(out, row / out->size[1], row % out->size[1], i % cols, 0);
    if (!isfinite(got))
      FAIL("%s: element %lld is %g", what, (long long)i, got);
    error = fmax(error, fabs(got - exact[i]));
    largest = fmax(largest, fabs(exact[i]));
  }
  /* The second term is one rounding of the largest output, for chains that happen to be exact. */
  double unit = out->dtype == MOELORA_F32 ? 0x1p-22 : out->dtype == MOELORA_F16 ? 0x1p-11 : 0x1p-8;
  double limit = 1.5 * max_difference(exact, rounded, count) + unit * largest;
  if (error > limit)
    FAIL("%s: error %g, expected at most %g (%s)", what, error, limit, moelora_last_plan());
}

static inline moelora_dtype dtype_of(const char *variant) {
  return strstr(variant, "_bf16_")  ? MOELORA_BF16
         : strstr(variant, "_f16_") ? MOELORA_F16
                                    : MOELORA_F32;
}
