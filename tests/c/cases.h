/* Random problems, a thread pool, and the comparison of results. */
#pragma once

#include <pthread.h>

#include "core/format.h"
#include "harness.h"

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

/* The same for lists of `rows` rows, one of each adapter. */
static inline void new_lists(moelora_align_lists_args *a, int64_t rows) {
  moelora_lists *l = &a->lists;
  const int64_t blocks =
      moelora_align_max_blocks(MOELORA_ALIGN_BASE, rows, a->num_experts, 0, l->block_size);
  l->sorted_token_ids = new_tensor(MOELORA_I32, SIZES(a->max_loras, blocks * l->block_size));
  l->expert_ids = new_tensor(MOELORA_I32, SIZES(a->max_loras, blocks));
  l->num_tokens_post_padded = new_tensor(MOELORA_I32, SIZES(a->max_loras));
}

/* Row-major weights, or the same, packed by the library. */
static inline moelora_tensor random_weights(sizes s, moelora_dtype dtype, int64_t n, int64_t k,
                                            bool packed) {
  moelora_tensor w = random_tensor(dtype, 1 / sqrt((double)k), SIZES(s.experts, n, k));
  if (!packed)
    return w;
  moelora_tensor tiles = new_tensor(dtype, SIZES(s.experts, n / 64, k / 64, 64, 64));
  CHECK_OK(moelora_pack_weights(&w, &tiles, maybe() ? &serial : &threaded));
  return tiles;
}

/* Random values of weights [experts, layout->rows, k] as a checkpoint has them, none of them NaN,
 * with scales that keep products near 1; `exact`: those of FP8 are powers of two. */
static inline moelora_quantized random_quantized(int64_t experts, int64_t k,
                                                 const moelora_layout *layout, bool exact) {
  const moelora_format f = layout->format;
  const int64_t n = layout->rows;
  const bool plain = layout->order == MOELORA_ROWS_PLAIN;
  const double scale = 1 / sqrt((double)k);
  moelora_quantized w = {0};
  if (moelora_is_fp8(f)) {
    w.block_rows = f == MOELORA_FP8_ROWS ? random_in(1, n) : plain ? 64 * random_in(1, 3) : n;
    w.block_columns = maybe() ? (f == MOELORA_FP8_G64 ? 64 : 128) * random_in(1, 2) : k;
    w.values = random_ids(MOELORA_U8, 0, 253, SIZES(experts, n, k));
    for (int64_t i = 0; i < count_of(&w.values); i++)
      ((uint8_t *)w.values.data)[i] += ((uint8_t *)w.values.data)[i] >= 127;
    w.scales = new_tensor(
        MOELORA_F32, SIZES(experts, (n - 1) / w.block_rows + 1, (k - 1) / w.block_columns + 1));
    for (int64_t i = 0; i < count_of(&w.scales); i++)
      ((float *)w.scales.data)[i] =
          exact ? ldexpf(1, -(int)random_in(8, 12)) : (float)(scale / 100 * (1.5 + random_unit()));
    return w;
  }
  const int64_t columns = 64 / moelora_tile_groups(f);
  const int64_t groups = columns < 64 ? k / columns : k % 64 == 0 && maybe() ? k / 64 : 1;
  w.values = random_ids(MOELORA_U8, 0, 255, SIZES(experts, n, k / 2));
  w.scales = f == MOELORA_MXFP4   ? random_ids(MOELORA_U8, 118, 124, SIZES(experts, n, groups))
             : f == MOELORA_NVFP4 ? random_ids(MOELORA_U8, 0, 60, SIZES(experts, n, groups))
                                  : random_tensor((moelora_dtype)random_in(0, MOELORA_F16),
                                                  scale / 4, SIZES(experts, n, groups));
  if (f == MOELORA_NVFP4)
    w.tensor_scales = random_tensor(MOELORA_F32, scale, SIZES(experts, plain ? 1 : 2));
  if (moelora_has_zeros(f))
    w.zeros = random_ids(MOELORA_U8, 0, 16, SIZES(experts, n, groups));
  return w;
}

/* Memory for the tiles of quantized weights [experts, layout->rows, k]. */
static inline moelora_tensor new_tiles(int64_t experts, int64_t k, const moelora_layout *layout) {
  return new_tensor(MOELORA_U8, SIZES(experts, moelora_row_tiles(layout->order, layout->rows),
                                      moelora_depth_tiles(layout->format, k),
                                      moelora_tile_bytes(layout->format)));
}

static char drawn[512]; /* describes the current case in messages */

/* Compares rows. `slack`: allowed deviation of a row, beyond one rounding. */
static inline void compare(const char *what, const moelora_tensor *got, const moelora_tensor *want,
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

static inline moelora_dtype dtype_of(const char *variant) {
  return strstr(variant, "_bf16_")  ? MOELORA_BF16
         : strstr(variant, "_f16_") ? MOELORA_F16
                                    : MOELORA_F32;
}
