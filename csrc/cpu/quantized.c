/* Products with quantized weights: a few weight rows at a time are dequantized to operand rows.
 *
 * Rows r and r + 8 of a 4-bit tile share words and are dequantized together: eight such pairs at a
 * time for matrix registers, two for `dot`, whose products are then not adjacent in c. FP8 rows are
 * dequantized one by one. With 16-bit x, passes over K and operands are those of tile.c, so that
 * results are bit-identical to products with the unpacked weights.
 *
 * If x is e4m3, a pass covers one scale group of K: the sum of unscaled products is multiplied by
 * both scales and added to c, in the order of K, whatever the number of rows. */
#include <string.h>

#include "core/format.h"
#include "cpu/convert.h"
#include "cpu/cpu.h"

enum { PART_ROWS = 64 };

/* Rows [begin, end) of tiles; row begin + i is column `column` + i * `step` of c. */
typedef struct tile_rows {
  int64_t begin, end, column, step;
} tile_rows;

/* Maps rows [begin, end) of the weight to rows of the tiles: those of gate, and those of up. */
static void find_rows(const moelora_weights *w, int64_t begin, int64_t end, tile_rows rows[2]) {
  const int64_t half = w->n / 2, up = w->half_tiles * MOELORA_PACK;
  if (w->order == MOELORA_ROWS_INTERLEAVED) {
    const int64_t gate = (begin + 1) / 2, first = begin / 2;
    rows[0] = (tile_rows){gate, (end + 1) / 2, 2 * gate - begin, 2};
    rows[1] = (tile_rows){up + first, up + end / 2, 2 * first + 1 - begin, 2};
  } else if (w->order == MOELORA_ROWS_GATE_UP) {
    const int64_t first = moelora_max(begin, half);
    rows[0] = (tile_rows){begin, moelora_min(end, half), 0, 1};
    rows[1] = (tile_rows){up + first - half, up + end - half, first - begin, 1};
  } else {
    rows[0] = (tile_rows){begin, end, 0, 1};
    rows[1] = (tile_rows){0};
  }
}

/* Returns the tile that contains row `at` of the expert's tiles, and column k. */
static const char *tile_of(const moelora_weights *w, int64_t at, int64_t k) {
  return (const char *)w->data + at / MOELORA_PACK * w->stride_nt +
         k / moelora_tile_depth(w->format) * w->stride_kt;
}

/* A pass over K for the operand rows in `w`, `row_bytes` apart. The product of row j is added to
 * column columns[j] of c, or dropped if columns[j] is negative. */
typedef struct pass {
  int64_t depth, row_bytes;
  int64_t count; /* number of rows, at most rows_at_once() */
  const char *w;
  int64_t columns[MOELORA_MATRIX_ROWS];
  const char *panels; /* of x, on matrix registers */
  int64_t panel_bytes;
  /* scales of the weight rows (NULL: unscaled), and the K group of x's scales */
  const float *scales;
  int64_t group;
} pass;

static int64_t rows_at_once(const moelora_cpu_kernels *kernels) {
  return kernels->matrix ? MOELORA_MATRIX_ROWS : MOELORA_DOT_N;
}

/* Adds sums[j], times both scales, to c[columns[j]]; adjacent: MOELORA_DOT_N adjacent columns. */
static inline __attribute__((always_inline)) void add_sums(const pass *p, const float *sums,
                                                           float x_scale, bool adjacent, float *c) {
  for (int64_t j = 0; j < (adjacent ? MOELORA_DOT_N : p->count); j++) {
    const float sum = p->scales ? sums[j] * (p->scales[j] * x_scale) : sums[j];
    if (adjacent)
      c[p->columns[0] + j] += sum;
    else if (p->columns[j] >= 0)
      c[p->columns[j]] += sum;
  }
}

/* Whether the rows of a pass are `width` adjacent columns of c. */
static bool are_adjacent(const pass *p, int64_t width) {
  bool adjacent = p->count == width && p->columns[0] >= 0;
  for (int64_t j = 1; j < p->count; j++)
    adjacent = adjacent && p->columns[j] == p->columns[0] + j;
  return adjacent;
}

/* Adds the products of a pass, times both scales, to c[i, columns[j]] for i < m. */
static void multiply(const moelora_cpu_kernels *kernels, const pass *p, int64_t m, float *c,
                     int64_t ldc, moelora_scratch *scratch) {
  float part[PART_ROWS * MOELORA_MATRIX_ROWS];
  const moelora_product_scales scales = {p->scales, scratch->x_scales, p->group};
  const int64_t width = rows_at_once(kernels);
  const bool adjacent = are_adjacent(p, width);
  if (kernels->matrix && adjacent) {
    kernels->matrix->multiply(m, width, p->depth, p->panels, p->panel_bytes, p->w, p->row_bytes,
                              p->scales ? &scales : NULL, c + p->columns[0], ldc);
    return;
  }
  for (int64_t first = 0; first < m; first += PART_ROWS) {
    const int64_t rows = moelora_min(PART_ROWS, m - first);
    memset(part, 0, (size_t)(rows * width) * sizeof *part);
    if (kernels->matrix)
      kernels->matrix->multiply(rows, p->count, p->depth,
                                p->panels + first / MOELORA_MATRIX_ROWS * p->panel_bytes,
                                p->panel_bytes, p->w, p->row_bytes, NULL, part, width);
    else
      kernels->dot(rows, p->count, p->depth, scratch->x_pass + first, p->w, p->row_bytes, NULL,
                   part, width);
    for (int64_t i = 0; i < rows; i++) {
      const float x_scale = p->scales ? scratch->x_scales[first + i][p->group] : 1;
      const float *sums = part + i * width;
      if (adjacent)
        add_sums(p, sums, x_scale, true, c + (first + i) * ldc);
      else
        add_sums(p, sums, x_scale, false, c + (first + i) * ldc);
    }
  }
}

/* ---- 4-bit ---- */

/* Runs one pass over K, `depth` elements from k on. */
static void multiply_nibbles(const moelora_variant *variant, const moelora_weights *w,
                             const tile_rows *rows, int64_t k, int64_t depth, int64_t m, float *c,
                             int64_t ldc, moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int64_t tiles = moelora_divide_up(depth, MOELORA_PACK);
  const int64_t row_bytes = tiles * MOELORA_PACK * (int64_t)kernels->operand_bytes;
  const int32_t pairs = (int32_t)rows_at_once(kernels) / 2;
  for (int64_t base = rows->begin / 16 * 16; base < rows->end; base += 16) {
    const int32_t quarter = (int32_t)(base % MOELORA_PACK);
    const int64_t next_quarter = base + 16 < rows->end
                                     ? tile_of(w, base + 16, k) - tile_of(w, base, k) +
                                           moelora_words_offset((quarter + 16) % MOELORA_PACK) -
                                           moelora_words_offset(quarter + 6)
                                     : 0;
    for (int32_t r = 0; r < 8; r += pairs) {
      pass p = {.depth = depth,
                .row_bytes = row_bytes,
                .count = 2 * pairs,
                .w = scratch->w,
                .panels = scratch->panels,
                .panel_bytes = moelora_panel_bytes(depth)};
      bool any = false;
      for (int64_t j = 0; j < p.count; j++) {
        /* low and high rows alternate for `dot`, and are in order on matrix registers */
        const int64_t at = base + r + (kernels->matrix ? j : j / 2 + j % 2 * 8);
        const bool there = at >= rows->begin && at < rows->end;
        p.columns[j] = there ? rows->column + (at - rows->begin) * rows->step : -1;
        any = any || there;
      }
      if (!any)
        continue;
      for (int32_t pair = 0; pair < pairs; pair++) {
        char *low = scratch->w + pair * (kernels->matrix ? 1 : 2) * row_bytes;
        kernels->dequantize(w->format, tile_of(w, base, k), w->stride_kt, tiles, quarter + r + pair,
                            r + pair < 6 ? 2 * 64 : next_quarter, low,
                            low + (kernels->matrix ? 8 : 1) * row_bytes);
      }
      multiply(kernels, &p, m, c, ldc, scratch);
    }
  }
}

/* ---- FP8 ---- */

/* Returns the number of weight rows of the pass that begins at row `at`; all are in one tile. */
static int64_t rows_of_pass(const moelora_cpu_kernels *kernels, int64_t at, int64_t end) {
  const int64_t left = moelora_min(end - at, MOELORA_PACK - at % MOELORA_PACK);
  return moelora_min(rows_at_once(kernels), left);
}

static void columns_of_pass(pass *p, const tile_rows *rows, int64_t at) {
  for (int64_t j = 0; j < p->count; j++)
    p->columns[j] = rows->column + (at + j - rows->begin) * rows->step;
}

/* Reads the scales of row r of a tile, for both halves of its K extent. */
static void read_scales(const moelora_weights *w, const char *tile, int64_t r, float scale[2]) {
  const char *scales = tile + MOELORA_FP8_TILE_VALUES;
  if (moelora_has_row_scales(w->format)) {
    memcpy(scale, scales + r * (int64_t)sizeof *scale, sizeof *scale);
    scale[1] = scale[0];
  } else {
    memcpy(scale, scales, 2 * sizeof *scale);
  }
}

/* Prefetches a row of 128 bytes into L2. */
static void fetch_row(const char *row) {
  __builtin_prefetch(row, 0, 2);
  __builtin_prefetch(row + 64, 0, 2);
}

/* Prefetches the row that the next pass reads in place of row `at`. */
static void fetch_ahead(const moelora_cpu_kernels *kernels, const moelora_weights *w,
                        const tile_rows *rows, int64_t at, int64_t k) {
  const int64_t next = moelora_min(at + rows_at_once(kernels), rows->end - 1);
  fetch_row(tile_of(w, next, k) + next % MOELORA_PACK * 128);
}

void moelora_cpu_fp8_row(const moelora_cpu_kernels *kernels, const moelora_weights *w,
                         moelora_dtype dtype, const char *tile, int64_t r, void *to) {
  float scale[2];
  read_scales(w, tile, r, scale);
  for (int i = 0; i < 2; i++)
    scale[i] = dtype == MOELORA_BF16
                   ? moelora_bf16_to_f32(moelora_f32_to_bf16(scale[i]))
                   : moelora_f16_to_f32(moelora_f32_to_f16(scale[i] * 0x1p8f)) * 0x1p-8f;
  kernels->dequantize_fp8((const uint8_t *)tile + r * 128, (int32_t)(r % 8), scale, to);
}

/* Runs one pass over K, `depth` elements from k on, with weights rounded to the dtype. */
static void multiply_fp8(const moelora_variant *variant, const moelora_weights *w,
                         const tile_rows *rows, int64_t k, int64_t depth, int64_t m, float *c,
                         int64_t ldc, moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int64_t tile_bytes = 128 * (int64_t)kernels->operand_bytes;
  pass p = {.depth = depth,
            .w = scratch->w,
            .row_bytes = moelora_divide_up(depth, 128) * tile_bytes,
            .panels = scratch->panels,
            .panel_bytes = moelora_panel_bytes(depth)};
  for (int64_t at = rows->begin; at < rows->end; at += p.count) {
    p.count = rows_of_pass(kernels, at, rows->end);
    columns_of_pass(&p, rows, at);
    for (int64_t j = 0; j < p.count; j++) {
      char *to = scratch->w + j * p.row_bytes;
      for (int64_t i = 0; i < depth; i += 128, to += tile_bytes) {
        fetch_ahead(kernels, w, rows, at + j, k + i);
        moelora_cpu_fp8_row(kernels, w, variant->dtype, tile_of(w, at, k + i),
                            (at + j) % MOELORA_PACK, to);
      }
    }
    multiply(kernels, &p, m, c, ldc, scratch);
  }
}

/* Multiplies e4m3 x by the tiles at column k. */
static void multiply_e4m3(const moelora_variant *variant, const moelora_weights *w,
                          const tile_rows *rows, int64_t k, int64_t m, float *c, int64_t ldc,
                          moelora_scratch *scratch) {
  static const float ones[2] = {1, 1};
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int64_t operand = (int64_t)kernels->operand_bytes, group = moelora_x_group(w->format);
  const int64_t end = moelora_min(k + 128, w->k);
  pass p = {.row_bytes = 128 * operand, .panel_bytes = moelora_panel_bytes(end - k)};
  for (int64_t at = rows->begin; at < rows->end; at += p.count) {
    float scales[2][MOELORA_MATRIX_ROWS];
    p.count = rows_of_pass(kernels, at, rows->end);
    columns_of_pass(&p, rows, at);
    for (int64_t j = 0; j < p.count; j++) {
      const int64_t r = (at + j) % MOELORA_PACK;
      const char *tile = tile_of(w, at, k);
      float scale[2];
      read_scales(w, tile, r, scale);
      scales[0][j] = scale[0];
      scales[1][j] = scale[1];
      if (end < w->k) /* the next tile of K is too far for the hardware prefetcher */
        fetch_row(tile + w->stride_kt + r * 128);
      kernels->dequantize_fp8((const uint8_t *)tile + r * 128, (int32_t)(r % 8), ones,
                              scratch->w + j * p.row_bytes);
    }
    for (int64_t i = k; i < end; i += group) {
      for (int64_t row = 0; row < m; row++)
        scratch->x_pass[row] = (const char *)scratch->x[row] + i * operand;
      p.depth = moelora_min(group, end - i);
      p.w = scratch->w + (i - k) * operand;
      if (kernels->matrix)
        p.panels = scratch->panels + moelora_panel_bytes(i - k);
      p.scales = scales[(i - k) / 64];
      p.group = i / group;
      multiply(kernels, &p, m, c, ldc, scratch);
    }
  }
}

void moelora_cpu_quantized_tile(const moelora_variant *variant, const moelora_weights *w,
                                const moelora_columns_of *ranges, int num_ranges, int64_t m,
                                float *c, int64_t ldc, moelora_scratch *scratch) {
  const bool e4m3 = w->x != MOELORA_X_NATIVE;
  const int64_t step = e4m3 ? 128 : variant->block_k;
  tile_rows rows[2][2]; /* [range][gate or up] */
  for (int i = 0; i < num_ranges; i++)
    find_rows(w, ranges[i].begin, ranges[i].end, rows[i]);
  for (int64_t k = 0; k < w->k; k += step) {
    const int64_t depth = moelora_min(step, w->k - k);
    moelora_cpu_begin_pass(variant, k, depth, m, scratch);
    for (int i = 0; i < 2 * num_ranges; i++) {
      const tile_rows *half = &rows[i / 2][i % 2];
      float *to = c + ranges[i / 2].at;
      if (e4m3)
        multiply_e4m3(variant, w, half, k, m, to, ldc, scratch);
      else
        (moelora_is_fp8(w->format) ? multiply_fp8 : multiply_nibbles)(variant, w, half, k, depth, m,
                                                                      to, ldc, scratch);
    }
  }
}
