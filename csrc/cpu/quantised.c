/* Products with quantised weights, whose tiles become operand rows a few at a time.
 *
 * Rows r and r + 8 of a tile share their words, so MOELORA_DOT_N rows are two such pairs, and their
 * products leave `dot` for columns of c that do not follow each other. What makes a sum is as in
 * tile.c: the same passes over K of the same operands, so these are the bits of the product with
 * the unpacked weights. */
#include <string.h>

#include "core/format.h"
#include "cpu/cpu.h"

enum { PART_ROWS = 64 };

/* Rows [begin, end) through all tiles; row begin + i gives column `column` + i * `step` of c. */
typedef struct tile_rows {
  int64_t begin, end, column, step;
} tile_rows;

/* Rows [begin, end) of the weight, as rows of tiles: of gate, and of up. */
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

/* The first of all tiles that row `at` is in, at depth k. */
static const char *tile_of(const moelora_weights *w, int64_t at, int64_t k) {
  return (const char *)w->data + at / MOELORA_PACK * w->stride_nt + k / MOELORA_PACK * w->stride_kt;
}

/* c[i, columns[j]] += x_pass[i] . the j-th row of scratch->w, for i < m; columns below 0 are none
 */
static void multiply(const moelora_cpu_kernels *kernels, int64_t m, int64_t depth,
                     int64_t row_bytes, const int64_t *columns, float *c, int64_t ldc,
                     moelora_scratch *scratch) {
  float part[PART_ROWS * MOELORA_DOT_N];
  for (int64_t first = 0; first < m; first += PART_ROWS) {
    const int64_t rows = moelora_min(PART_ROWS, m - first);
    memset(part, 0, (size_t)(rows * MOELORA_DOT_N) * sizeof *part);
    kernels->dot(rows, MOELORA_DOT_N, depth, scratch->x_pass + first, scratch->w, row_bytes, NULL,
                 part, MOELORA_DOT_N);
    for (int64_t i = 0; i < rows; i++)
      for (int j = 0; j < MOELORA_DOT_N; j++)
        if (columns[j] >= 0)
          c[(first + i) * ldc + columns[j]] += part[i * MOELORA_DOT_N + j];
  }
}

/* One pass over K, of `depth` from k on. */
static void multiply_rows(const moelora_variant *variant, const moelora_weights *w,
                          const tile_rows *rows, int64_t k, int64_t depth, int64_t m, float *c,
                          int64_t ldc, moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int64_t tiles = moelora_ceil_div(depth, MOELORA_PACK);
  const int64_t row_bytes = tiles * MOELORA_PACK * (int64_t)kernels->operand_bytes;
  for (int64_t base = rows->begin / 16 * 16; base < rows->end; base += 16) {
    const int32_t quarter = (int32_t)(base % MOELORA_PACK);
    const int64_t next_quarter = base + 16 < rows->end
                                     ? tile_of(w, base + 16, k) - tile_of(w, base, k) +
                                           moelora_words_offset((quarter + 16) % MOELORA_PACK) -
                                           moelora_words_offset(quarter + 6)
                                     : 0;
    for (int32_t r = 0; r < 8; r += 2) {
      int64_t columns[MOELORA_DOT_N];
      bool any = false;
      for (int j = 0; j < MOELORA_DOT_N; j++) {
        const int64_t at = base + r + j / 2 + j % 2 * 8;
        const bool there = at >= rows->begin && at < rows->end;
        columns[j] = there ? rows->column + (at - rows->begin) * rows->step : -1;
        any = any || there;
      }
      if (!any)
        continue;
      const int64_t ahead = r < 6 ? 2 * 64 : next_quarter;
      for (int32_t pair = 0; pair < MOELORA_DOT_N / 2; pair++) {
        char *low = scratch->w + 2 * pair * row_bytes;
        kernels->dequantise(w->format, tile_of(w, base, k), w->stride_kt, tiles, quarter + r + pair,
                            ahead, low, low + row_bytes);
      }
      multiply(kernels, m, depth, row_bytes, columns, c, ldc, scratch);
    }
  }
}

void moelora_cpu_quantised_tile(const moelora_variant *variant, const moelora_weights *w,
                                int64_t begin, int64_t end, int64_t m, float *c, int64_t ldc,
                                moelora_scratch *scratch) {
  const size_t operand = moelora_cpu_kernels_of(variant)->operand_bytes;
  tile_rows rows[2];
  find_rows(w, begin, end, rows);
  for (int64_t k = 0; k < w->k; k += variant->block_k) {
    const int64_t depth = moelora_min(variant->block_k, w->k - k);
    for (int64_t i = 0; i < m; i++)
      scratch->x_pass[i] = (const char *)scratch->x[i] + (size_t)k * operand;
    for (int half = 0; half < 2; half++)
      multiply_rows(variant, w, &rows[half], k, depth, m, c, ldc, scratch);
  }
}
