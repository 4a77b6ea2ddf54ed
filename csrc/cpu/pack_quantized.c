/* Packs quantized weights into tiles and unpacks them (moelora.h describes the layout of a tile). A
 * task packs or unpacks the tiles of 64 rows. */
#include <string.h>

#include "core/format.h"
#include "core/plan.h"
#include "cpu/convert.h"
#include "cpu/cpu.h"

/* ---- packing ---- */

/* Loads the values of rows r and r + 8, as zeros in padding and in groups whose e4m3 scale is 0. */
static void load_rows(const uint8_t *const *from, int64_t bytes, moelora_format format,
                      const uint8_t *tile, int32_t r, uint8_t rows[2][32]) {
  memset(rows, 0, 2 * sizeof *rows);
  for (int i = 0; i < 2; i++) {
    if (from[r + 8 * i])
      memcpy(rows[i], from[r + 8 * i], (size_t)bytes);
    for (int g = 0; g < 4 && moelora_has_tile_scale(format); g++)
      if (tile[MOELORA_TILE_VALUES + moelora_scale_index(4, r + 8 * i, g)] == 0)
        memset(rows[i] + 8 * g, 0, 8);
  }
}

/* Packs two rows, 8 apart, into the 64 bytes that they share. */
static void pack_words(uint8_t rows[2][32], uint8_t *words) {
  for (int q = 0; q < 4; q++)
    for (int s = 0; s < 4; s++, words += 4)
      for (int i = 0; i < 2; i++) { /* columns c and c + 1, then c + 8 and c + 9 */
        const uint8_t x = rows[0][8 * s + q + 4 * i], y = rows[1][8 * s + q + 4 * i];
        words[i] = (uint8_t)((x & 15) | y << 4);
        words[i + 2] = (uint8_t)(x >> 4 | (y & 0xf0));
      }
}

static float read_scale(const moelora_quantized_problem *p, int64_t at) {
  return p->scale_dtype == MOELORA_F32    ? ((const float *)p->scales)[at]
         : p->scale_dtype == MOELORA_BF16 ? moelora_bf16_to_f32(((const uint16_t *)p->scales)[at])
                                          : moelora_f16_to_f32(((const uint16_t *)p->scales)[at]);
}

static void pack_scale(const moelora_quantized_problem *p, int64_t at, uint8_t *to) {
  const bool bf16 = p->dtype == MOELORA_BF16;
  if (moelora_has_e8m0_scales(p->tiles.format)) {
    const int scale = ((const uint8_t *)p->scales)[at] + (bf16 ? 126 : -98);
    *to = (uint8_t)(scale > 0 ? scale : 0);
    return;
  }
  if (moelora_has_tile_scale(p->tiles.format)) {
    *to = moelora_e5m3_of_e4m3(((const uint8_t *)p->scales)[at]);
    return;
  }
  const float scale = read_scale(p, at);
  if (moelora_has_f32_scales(p->tiles.format)) {
    memcpy(to, &scale, sizeof scale);
    return;
  }
  const uint16_t bits = bf16 ? moelora_f32_to_bf16(scale) : moelora_f32_to_f16(scale);
  memcpy(to, &bits, sizeof bits);
}

/* Packs the scales and zeros of row n of the weight (row r of the tile), from column k on. */
static void pack_groups(const moelora_quantized_problem *p, int64_t expert, int64_t n, int32_t r,
                        int64_t k, uint8_t *tile) {
  const int32_t groups = moelora_tile_groups(p->tiles.format);
  const int32_t bytes = moelora_scale_bytes(p->tiles.format);
  const int32_t columns = MOELORA_PACK / groups;
  uint8_t *scales = tile + MOELORA_TILE_VALUES, *zeros = scales + 64 * groups * bytes;
  for (int32_t g = 0; g < groups && k + columns * g < p->tiles.k; g++) {
    const int64_t group = (k + columns * g) / p->group;
    const int32_t place = moelora_scale_index(groups, r, g);
    pack_scale(p, expert * p->scales_stride[0] + n * p->scales_stride[1] + group,
               scales + place * bytes);
    if (p->zeros)
      zeros[place] = p->zeros[expert * p->zeros_stride[0] + n * p->zeros_stride[1] + group];
  }
}

static void pack_nibbles(const moelora_quantized_problem *p, int64_t expert, int64_t first,
                         int64_t k, uint8_t *tile) {
  const moelora_weights *w = &p->tiles;
  const int64_t bytes = moelora_min(MOELORA_PACK, w->k - k) / 2;
  const uint8_t *rows[MOELORA_PACK];
  for (int32_t r = 0; r < MOELORA_PACK; r++) {
    const int64_t n = moelora_row_of_tile(w->order, w->n, first + r);
    rows[r] =
        n < 0 ? NULL : p->values + expert * p->values_stride[0] + n * p->values_stride[1] + k / 2;
    if (n >= 0)
      pack_groups(p, expert, n, r, k, tile);
  }
  for (int32_t r = 0; r < MOELORA_PACK; r += r % 16 == 7 ? 9 : 1) {
    uint32_t words[16];
    uint8_t both[2][32];
    load_rows(rows, bytes, w->format, tile, r, both);
    pack_words(both, (uint8_t *)words);
    for (int i = 0; i < 16; i++)
      words[i] = moelora_spread(moelora_values_of(w->format), words[i]);
    memcpy(tile + moelora_words_offset(r), words, sizeof words);
  }
}

/* Copies the tensor scale to the tile, for formats whose tiles have one. */
static void pack_tile_scale(const moelora_quantized_problem *p, int64_t expert, int64_t first,
                            uint8_t *tile) {
  const int64_t half = p->tiles.half_tiles && first / MOELORA_PACK >= p->tiles.half_tiles;
  const float *scale =
      p->tensor_scales + expert * p->tensor_scales_stride[0] + half * p->tensor_scales_stride[1];
  memcpy(tile + moelora_tile_scale_offset(p->tiles.format), scale, sizeof *scale);
}

static void pack_fp8(const moelora_quantized_problem *p, int64_t expert, int64_t first, int64_t k,
                     uint8_t *tile) {
  const moelora_weights *w = &p->tiles;
  const bool of_rows = moelora_has_row_scales(w->format);
  const float *scales = (const float *)p->scales + expert * p->scales_stride[0];
  float *to = (float *)(tile + MOELORA_FP8_TILE_VALUES); /* per row, or per 64 columns */
  for (int32_t r = 0; r < MOELORA_PACK; r++) {
    const int64_t n = moelora_row_of_tile(w->order, w->n, first + r);
    if (n < 0)
      continue;
    const uint8_t *row = p->values + expert * p->values_stride[0] + n * p->values_stride[1] + k;
    for (int32_t c = 0; c < moelora_min(128, w->k - k); c++)
      tile[moelora_fp8_offset(r, c)] = row[c];
    if (r > 0 && !of_rows)
      continue;
    const float *of_row = scales + n / p->block_rows * p->scales_stride[1];
    for (int32_t half = 0; half < (of_rows ? 1 : 2) && k + 64 * half < w->k; half++)
      to[of_rows ? r : half] = of_row[(k + 64 * half) / p->block_columns];
  }
}

static void pack_rows(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const moelora_quantized_problem *p = context;
  const moelora_weights *w = &p->tiles;
  const int64_t row_tiles = moelora_row_tiles(w->order, w->n);
  const int64_t expert = index / row_tiles, first = index % row_tiles * MOELORA_PACK;
  uint8_t *tile = (uint8_t *)p->packed + expert * w->stride_e + index % row_tiles * w->stride_nt;
  for (int64_t k = 0; k < w->k; k += moelora_tile_depth(w->format), tile += w->stride_kt) {
    memset(tile, 0, (size_t)moelora_tile_size(w->format));
    (moelora_is_fp8(w->format) ? pack_fp8 : pack_nibbles)(p, expert, first, k, tile);
    if (p->tensor_scales)
      pack_tile_scale(p, expert, first, tile);
  }
}

static void for_rows(const moelora_quantized_problem *problem, const moelora_exec *exec,
                     moelora_cpu_task task, void *context) {
  const moelora_weights *w = &problem->tiles;
  moelora_cpu_parallel(exec, problem->num_experts * moelora_row_tiles(w->order, w->n),
                       (double)problem->num_experts * (double)w->n * (double)w->k, task, context);
}

moelora_status moelora_cpu_pack_quantized(const moelora_quantized_problem *problem,
                                          const moelora_exec *exec) {
  for_rows(problem, exec, pack_rows, (void *)problem);
  return MOELORA_OK;
}

/* ---- unpacking ---- */

typedef struct unpack_tasks {
  const moelora_quantized_problem *problem;
  const moelora_cpu_kernels *kernels;
} unpack_tasks;

/* Stores the operands of row `at` of the tiles to its row of the output, unless it is padding. */
static void store_row(const unpack_tasks *tasks, int64_t expert, int64_t at, int64_t k,
                      int64_t count, const void *operands) {
  const moelora_quantized_problem *p = tasks->problem;
  const int64_t n = moelora_row_of_tile(p->tiles.order, p->tiles.n, at);
  if (n < 0)
    return;
  uint16_t *to = (uint16_t *)p->out + expert * p->out_stride[0] + n * p->out_stride[1] + k;
  moelora_store_operands(tasks->kernels, operands, to, count);
}

/* Unpacks a tile: rows first to first + 63, columns [k, k + count). */
static void unpack_nibbles(const unpack_tasks *tasks, int64_t expert, int64_t first, int64_t k,
                           int64_t count, const char *tile) {
  const moelora_weights *w = &tasks->problem->tiles;
  float low[MOELORA_PACK], high[MOELORA_PACK]; /* or 16-bit operands */
  for (int32_t r = 0; r < MOELORA_PACK; r += r % 16 == 7 ? 9 : 1) {
    tasks->kernels->dequantize(w->format, tile, w->stride_kt, 1, r, 0, low, high);
    store_row(tasks, expert, first + r, k, count, low);
    store_row(tasks, expert, first + r + 8, k, count, high);
  }
}

static void unpack_fp8(const unpack_tasks *tasks, int64_t expert, int64_t first, int64_t k,
                       int64_t count, const char *tile) {
  const moelora_quantized_problem *p = tasks->problem;
  float row[128]; /* or 16-bit operands */
  for (int32_t r = 0; r < MOELORA_PACK; r++) {
    moelora_cpu_fp8_row(tasks->kernels, &p->tiles, p->dtype, tile, r, row);
    store_row(tasks, expert, first + r, k, count, row);
  }
}

static void unpack_rows(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const unpack_tasks *tasks = context;
  const moelora_weights *w = &tasks->problem->tiles;
  const int64_t row_tiles = moelora_row_tiles(w->order, w->n);
  const int64_t expert = index / row_tiles, first = index % row_tiles * MOELORA_PACK;
  const int32_t depth = moelora_tile_depth(w->format);
  const char *tile =
      (const char *)w->data + expert * w->stride_e + index % row_tiles * w->stride_nt;
  for (int64_t k = 0; k < w->k; k += depth, tile += w->stride_kt)
    (moelora_is_fp8(w->format) ? unpack_fp8 : unpack_nibbles)(tasks, expert, first, k,
                                                              moelora_min(depth, w->k - k), tile);
}

/* Returns the best kernels of this machine; all kernels unpack to the same bits. */
static const moelora_cpu_kernels *best_kernels(moelora_dtype dtype) {
  const moelora_device_info *device = moelora_known_device(MOELORA_CPU, 0);
  const moelora_variant *best = NULL, *v;
  for (int32_t i = 0; (v = moelora_variant_at(i)); i++)
    if (v->dtype == dtype && moelora_variant_runs_on(v, device))
      best = v;
  return moelora_cpu_kernels_of(best);
}

moelora_status moelora_cpu_unpack_quantized(const moelora_quantized_problem *problem,
                                            const moelora_exec *exec) {
  unpack_tasks tasks = {problem, best_kernels(problem->dtype)};
  for_rows(problem, exec, unpack_rows, &tasks);
  return MOELORA_OK;
}
