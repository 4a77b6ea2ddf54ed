/* Products with quantized weights, which are dequantized to operand rows a few at a time.
 *
 * Rows r and r + 8 of a 4-bit tile share words and are dequantized together. A pass has two such
 * pairs for `dot`, whose products are non-adjacent columns of c. FP8 rows are separate. Sums are
 * formed as in tile.c, with the same passes over K of the same operands: results are bit-identical
 * to products with the unpacked weights.
 *
 * On matrix registers, a pass has a block of weight rows. Its operands exceed L1, so that few token
 * rows would wait for L2: for them K is dequantized and multiplied in parts that stay in L1. Sums
 * continue from part to part, with the same bits.
 *
 * If x is e4m3, a pass covers a scale group of K. Its sum of unscaled products is multiplied by
 * both scales and added to c, in the order of K, for any number of rows. */
#include <string.h>

#include "core/format.h"
#include "cpu/convert.h"
#include "cpu/cpu.h"

enum {
  DOT_ROWS_AT_ONCE = 64, /* rows whose products are scattered to c together */
  PART_DEPTH = 256, /* 16 KiB of operands, a third of L1; a multiple of the depth of all tiles */
};

/* Rows [begin, end) of tiles; row begin + i is column `column` + i * `step` of c. */
typedef struct tile_rows {
  int64_t begin, end, column, step;
} tile_rows;

/* Maps rows [begin, end) of the weight to rows of tiles: of gate, and of up. */
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

/* The expert's tile that contains row `at` of all tiles, at column k. */
static const char *tile_of(const moelora_weights *w, int64_t at, int64_t k) {
  return (const char *)w->data + at / MOELORA_PACK * w->stride_nt +
         k / moelora_tile_depth(w->format) * w->stride_kt;
}

/* A pass over weight rows in `w`, operands `row_bytes` apart; row j is column columns[j] of c, or
 * none if negative. */
typedef struct pass {
  int64_t depth, row_bytes;
  int64_t count; /* of rows, at most rows_at_once() */
  const char *w;
  int64_t columns[MOELORA_MATRIX_BLOCK];
  /* On matrix registers: panels of x, and sums of the parts of K before this one, unless it is the
   * first; c receives them after the last. Only a block of token rows has several parts. */
  const char *panels;
  int64_t panel_bytes;
  float *sums;
  bool first, last;
  /* scales of the weight rows, and the index of x's scale; NULL: unscaled */
  const float *scales;
  int64_t group;
} pass;

static int64_t rows_at_once(const moelora_cpu_kernels *kernels) {
  return kernels->matrix ? MOELORA_MATRIX_BLOCK : MOELORA_DOT_N;
}

/* Maps the rows of a pass, from `at` on, to columns. */
static void columns_of_pass(pass *p, const tile_rows *rows, int64_t at) {
  for (int64_t j = 0; j < p->count; j++) {
    const bool there = at + j >= rows->begin && at + j < rows->end;
    p->columns[j] = there ? rows->column + (at + j - rows->begin) * rows->step : -1;
  }
}

/* First row of the next pass, which this one prefetches; its own after the last. */
static int64_t next_rows(const tile_rows *rows, int64_t at, int64_t count) {
  return at + count < rows->end ? at + count : at;
}

/* Whether the rows of a pass are adjacent columns of c. */
static bool are_adjacent(const pass *p) {
  bool adjacent = p->columns[0] >= 0;
  for (int64_t j = 1; j < p->count; j++)
    adjacent = adjacent && p->columns[j] == p->columns[0] + j;
  return adjacent;
}

/* c[columns[j]] += sums[j] times both scales; adjacent: MOELORA_DOT_N columns. */
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

/* multiply() by `dot` */
static void multiply_dot(const moelora_cpu_kernels *kernels, const pass *p, int64_t m, float *c,
                         int64_t ldc, moelora_scratch *scratch) {
  float part[DOT_ROWS_AT_ONCE * MOELORA_DOT_N];
  const bool adjacent = p->count == MOELORA_DOT_N && are_adjacent(p);
  for (int64_t first = 0; first < m; first += DOT_ROWS_AT_ONCE) {
    const int64_t rows = moelora_min(DOT_ROWS_AT_ONCE, m - first);
    memset(part, 0, (size_t)(rows * MOELORA_DOT_N) * sizeof *part);
    kernels->dot(rows, p->count, p->depth, scratch->x_pass + first, p->w, p->row_bytes, NULL, part,
                 MOELORA_DOT_N);
    for (int64_t i = 0; i < rows; i++) {
      const float x_scale = p->scales ? scratch->x_scales[first + i][p->group] : 1;
      const float *sums = part + i * MOELORA_DOT_N;
      if (adjacent)
        add_sums(p, sums, x_scale, true, c + (first + i) * ldc);
      else
        add_sums(p, sums, x_scale, false, c + (first + i) * ldc);
    }
  }
}

/* c[i, columns[j]] += the sums of a block, scaled, for i < m */
static void add_block(const moelora_cpu_matrix *matrix, const pass *p, int64_t m,
                      const moelora_product_scales *scales, float *c, int64_t ldc) {
  float part[MOELORA_MATRIX_BLOCK * MOELORA_MATRIX_BLOCK];
  if (are_adjacent(p)) {
    matrix->add(m, p->count, p->sums, scales, c + p->columns[0], ldc);
    return;
  }
  memset(part, 0, (size_t)(m * MOELORA_MATRIX_BLOCK) * sizeof *part);
  matrix->add(m, p->count, p->sums, scales, part, MOELORA_MATRIX_BLOCK);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < p->count; j++)
      if (p->columns[j] >= 0)
        c[i * ldc + p->columns[j]] += part[i * MOELORA_MATRIX_BLOCK + j];
}

/* c[i, columns[j]] += x_pass[i] . w[j] times both scales, for i < m */
static void multiply(const moelora_cpu_kernels *kernels, const pass *p, int64_t m, float *c,
                     int64_t ldc, moelora_scratch *scratch) {
  const moelora_cpu_matrix *matrix = kernels->matrix;
  if (!matrix) {
    multiply_dot(kernels, p, m, c, ldc, scratch);
    return;
  }
  for (int64_t i = 0; i < m; i += MOELORA_MATRIX_BLOCK) {
    const int64_t rows = moelora_min(MOELORA_MATRIX_BLOCK, m - i);
    const moelora_product_scales scales = {p->scales, scratch->x_scales + i, p->group};
    matrix->accumulate(p->first, rows, p->count, p->depth,
                       p->panels + i / MOELORA_MATRIX_ROWS * p->panel_bytes, p->panel_bytes, p->w,
                       p->row_bytes, p->sums);
    if (p->last)
      add_block(matrix, p, rows, p->scales ? &scales : NULL, c + i * ldc, ldc);
  }
}

/* ---- 4-bit ---- */

/* Words of row `at` of all tiles, at column k. */
static const char *words_of(const moelora_weights *w, int64_t at, int64_t k) {
  return tile_of(w, at, k) + moelora_words_offset((int32_t)(at % MOELORA_PACK));
}

/* One pass over K, `depth` elements from k on, by `dot`. */
static void multiply_nibbles(const moelora_variant *variant, const moelora_weights *w,
                             const tile_rows *rows, int64_t k, int64_t depth, int64_t m, float *c,
                             int64_t ldc, moelora_scratch *scratch) {
  enum { PAIRS = MOELORA_DOT_N / 2 };
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int64_t tiles = moelora_ceil_div(depth, MOELORA_PACK);
  const int64_t row_bytes = tiles * MOELORA_PACK * (int64_t)kernels->operand_bytes;
  for (int64_t base = rows->begin / 16 * 16; base < rows->end; base += 16) {
    const int32_t quarter = (int32_t)(base % MOELORA_PACK);
    const int64_t next_quarter =
        base + 16 < rows->end ? words_of(w, base + 16, k) - words_of(w, base + 6, k) : 0;
    for (int32_t r = 0; r < 8; r += PAIRS) {
      pass p = {.depth = depth, .row_bytes = row_bytes, .count = 2 * PAIRS, .w = scratch->w};
      bool any = false;
      for (int64_t j = 0; j < p.count; j++) {
        const int64_t at = base + r + j / 2 + j % 2 * 8; /* low and high rows alternate */
        const bool there = at >= rows->begin && at < rows->end;
        p.columns[j] = there ? rows->column + (at - rows->begin) * rows->step : -1;
        any = any || there;
      }
      if (!any)
        continue;
      for (int32_t pair = 0; pair < PAIRS; pair++) {
        char *low = scratch->w + pair * 2 * row_bytes;
        kernels->dequantize(w->format, tile_of(w, base, k), w->stride_kt, tiles, quarter + r + pair,
                            r + pair < 6 ? 2 * 64 : next_quarter, low, low + row_bytes);
      }
      multiply(kernels, &p, m, c, ldc, scratch);
    }
  }
}

/* Prefetches the scales and zero points of 4-bit tiles into L2. */
static void fetch_scales(const moelora_weights *w, const char *tile, int64_t tiles) {
  for (; tiles > 0; tiles--, tile += w->stride_kt)
    for (int64_t at = MOELORA_TILE_VALUES; at < moelora_tile_size(w->format); at += 64)
      __builtin_prefetch(tile + at, 0, 2);
}

/* Dequantizes columns [k, k + depth) of whole groups of 16 rows from `at` on; prefetches as many
 * from (next, next_k) on. */
static void dequantize_nibbles(const moelora_cpu_kernels *kernels, const moelora_weights *w,
                               const pass *p, int64_t at, int64_t k, int64_t next, int64_t next_k,
                               char *to) {
  const int64_t tiles = moelora_ceil_div(p->depth, MOELORA_PACK);
  fetch_scales(w, tile_of(w, next, next_k), tiles);
  for (int64_t j = 0; j < p->count; j += 16) {
    const int64_t ahead = words_of(w, next + j, next_k) - words_of(w, at + j, k);
    for (int32_t r = 0; r < 8; r++) {
      char *low = to + (j + r) * p->row_bytes;
      kernels->dequantize(w->format, tile_of(w, at + j, k), w->stride_kt, tiles,
                          (int32_t)((at + j) % MOELORA_PACK) + r, ahead, low,
                          low + 8 * p->row_bytes);
    }
  }
}

/* ---- FP8 ---- */

/* Number of weight rows that one pass processes, starting at `at`: all in one tile. */
static int64_t rows_of_pass(const moelora_cpu_kernels *kernels, int64_t at, int64_t end) {
  const int64_t left = moelora_min(end - at, MOELORA_PACK - at % MOELORA_PACK);
  return moelora_min(rows_at_once(kernels), left);
}

/* Scales of row r of a tile, for both halves of its K extent. */
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

/* Dequantizes columns [k, k + depth) of rows from `at` on, rounded to the dtype; prefetches as many
 * from (next, next_k) on. */
static void dequantize_fp8(const moelora_variant *variant, const moelora_weights *w, const pass *p,
                           int64_t at, int64_t k, int64_t next, int64_t next_k, char *to) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  for (int64_t j = 0; j < p->count; j++)
    for (int64_t i = 0; i < p->depth; i += 128) {
      fetch_row(tile_of(w, next + j, next_k + i) + (next + j) % MOELORA_PACK * 128);
      moelora_cpu_fp8_row(kernels, w, variant->dtype, tile_of(w, at, k + i),
                          (at + j) % MOELORA_PACK,
                          to + j * p->row_bytes + i * (int64_t)kernels->operand_bytes);
    }
}

/* One pass over K, `depth` elements from k on, by `dot`. */
static void multiply_fp8(const moelora_variant *variant, const moelora_weights *w,
                         const tile_rows *rows, int64_t k, int64_t depth, int64_t m, float *c,
                         int64_t ldc, moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  pass p = {.depth = depth,
            .w = scratch->w,
            .row_bytes = moelora_ceil_div(depth, 128) * 128 * (int64_t)kernels->operand_bytes};
  for (int64_t at = rows->begin; at < rows->end; at += p.count) {
    p.count = rows_of_pass(kernels, at, rows->end);
    columns_of_pass(&p, rows, at);
    dequantize_fp8(variant, w, &p, at, k, next_rows(rows, at, p.count), k, scratch->w);
    multiply(kernels, &p, m, c, ldc, scratch);
  }
}

/* The tiles at column k, with e4m3 x. */
static void multiply_e4m3(const moelora_variant *variant, const moelora_weights *w,
                          const tile_rows *rows, int64_t k, int64_t m, float *c, int64_t ldc,
                          moelora_scratch *scratch) {
  static const float ones[2] = {1, 1};
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int64_t operand = (int64_t)kernels->operand_bytes, group = moelora_x_group(w->format);
  const int64_t end = moelora_min(k + 128, w->k);
  MOELORA_MATRIX_SUMS(sums);
  pass p = {.row_bytes = 128 * operand,
            .panel_bytes = moelora_panel_bytes(end - k),
            .sums = sums,
            .first = true,
            .last = true};
  for (int64_t at = rows->begin; at < rows->end; at += p.count) {
    float scales[2][MOELORA_MATRIX_BLOCK];
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

/* ---- matrix registers ---- */

/* One pass over K, `depth` elements from k on: blocks of weight rows, each in parts of K. */
static void multiply_matrix(const moelora_variant *variant, const moelora_weights *w,
                            const tile_rows *rows, int64_t k, int64_t depth, int64_t m, float *c,
                            int64_t ldc, moelora_scratch *scratch) {
  MOELORA_MATRIX_SUMS(sums);
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const bool fp8 = moelora_is_fp8(w->format);
  const int64_t tile = moelora_tile_depth(w->format);
  const int64_t part = m > MOELORA_MATRIX_BLOCK ? depth : moelora_min(PART_DEPTH, depth);
  pass p = {
      .row_bytes = moelora_ceil_div(part, tile) * tile * (int64_t)kernels->operand_bytes,
      .w = scratch->w,
      .panel_bytes = moelora_panel_bytes(depth),
      .sums = sums,
  };
  /* pairs of 4-bit rows begin at a multiple of 16 */
  for (int64_t at = fp8 ? rows->begin : rows->begin / 16 * 16; at < rows->end; at += p.count) {
    p.count = fp8 ? rows_of_pass(kernels, at, rows->end)
                  : moelora_min(MOELORA_MATRIX_BLOCK, moelora_ceil_div(rows->end - at, 16) * 16);
    columns_of_pass(&p, rows, at);
    for (int64_t i = 0; i < depth; i += part) {
      p.depth = moelora_min(part, depth - i);
      p.panels = scratch->panels + moelora_panel_bytes(i);
      p.first = i == 0;
      p.last = i + part >= depth;
      const int64_t next = p.last ? next_rows(rows, at, p.count) : at;
      const int64_t next_k = p.last ? k : k + i + part;
      if (fp8)
        dequantize_fp8(variant, w, &p, at, k + i, next, next_k, scratch->w);
      else
        dequantize_nibbles(kernels, w, &p, at, k + i, next, next_k, scratch->w);
      multiply(kernels, &p, m, c, ldc, scratch);
    }
  }
}

void moelora_cpu_quantized_tile(const moelora_variant *variant, const moelora_weights *w,
                                const moelora_columns_of *ranges, int num_ranges, int64_t m,
                                float *c, int64_t ldc, moelora_scratch *scratch) {
  const bool e4m3 = w->x != MOELORA_X_NATIVE;
  const int64_t step = e4m3 ? 128 : variant->block_k;
  void (*const product)(const moelora_variant *, const moelora_weights *, const tile_rows *,
                        int64_t, int64_t, int64_t, float *, int64_t, moelora_scratch *) =
      moelora_cpu_kernels_of(variant)->matrix ? multiply_matrix
      : moelora_is_fp8(w->format)             ? multiply_fp8
                                              : multiply_nibbles;
  tile_rows rows[2][2]; /* of up to two ranges */
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
        product(variant, w, half, k, depth, m, to, ldc, scratch);
    }
  }
}
