/* Tiles of one expert's product: c [m, columns] += x [m, K] w [columns, K]^T.
 *
 * Both operands are contiguous along K, so nothing is transposed. The loops, from the outermost,
 * are over passes of block_k elements of K, over MOELORA_DOT_N weight rows at a time, which stay in
 * L1, and (in `dot`) over all m token rows. Weights that are packed, or must be converted to
 * operands, are copied to scratch->w. For matrix registers, a pass packs x into panels. */

#include "cpu/cpu.h"

moelora_scratch *moelora_scratch_take(const moelora_variant *variant, const moelora_exec *exec,
                                      moelora_arena *arena) {
  const size_t rows = (size_t)variant->block_m, columns = (size_t)variant->block_n;
  const bool matrix = moelora_cpu_kernels_of(variant)->matrix;
  const size_t w_rows = matrix ? MOELORA_MATRIX_ROWS : MOELORA_DOT_N;
  const int32_t workers = moelora_workers(exec);
  moelora_scratch *all = moelora_take_array(arena, (size_t)workers, sizeof *all);
  for (int32_t i = 0; i < workers; i++) {
    moelora_scratch one = {
        .x = moelora_take(arena, rows * sizeof(void *)),
        .x_pass = moelora_take(arena, rows * sizeof(void *)),
        .x_scales = moelora_take(arena, rows * sizeof(float *)),
        .c = moelora_take(arena, rows * columns * sizeof(float)),
        .line = moelora_take(arena, columns * sizeof(float)),
        .w = moelora_take(arena, w_rows * (size_t)variant->block_k * sizeof(float)),
    };
    if (matrix)
      one.panels = moelora_take(arena, rows * (size_t)variant->block_k * sizeof(uint16_t));
    if (all)
      all[i] = one;
  }
  return all;
}

/* Copies columns [k, k + depth) of weight rows [n, n + count) to `to` as operand rows. Unless
 * `ahead` is 0, prefetches into L2 the same columns of the rows `ahead` bytes after them. */
static void copy_operands(const moelora_variant *variant, const moelora_weights *w, int64_t n,
                          int64_t count, int64_t k, int64_t depth, int64_t ahead, char *to) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const size_t bytes = moelora_dtype_bytes(variant->dtype);
  const int64_t run = w->packed ? MOELORA_PACK : depth;
  for (int64_t row = n; row < n + count; row++) {
    const char *from = moelora_row_at(w, variant->dtype, row);
    for (int64_t i = 0; i < depth; i += run) {
      const int64_t length = moelora_min(run, depth - i);
      const int64_t column = w->packed ? (k + i) / MOELORA_PACK * w->stride_kt : k + i;
      const char *piece = from + (size_t)column * bytes;
      for (size_t at = 0; ahead && at < (size_t)length * bytes; at += 64)
        __builtin_prefetch(piece + at + ahead, 0, 2);
      moelora_load_as_operands(kernels, piece, to, length);
      to += (size_t)length * kernels->operand_bytes;
    }
  }
}

static void advance_rows(const moelora_variant *variant, int64_t k, int64_t m,
                         moelora_scratch *scratch) {
  const size_t offset = (size_t)k * moelora_cpu_kernels_of(variant)->operand_bytes;
  for (int64_t i = 0; i < m; i++)
    scratch->x_pass[i] = (const char *)scratch->x[i] + offset;
}

void moelora_cpu_begin_pass(const moelora_variant *variant, int64_t k, int64_t depth, int64_t m,
                            moelora_scratch *scratch) {
  const moelora_cpu_matrix *matrix = moelora_cpu_kernels_of(variant)->matrix;
  advance_rows(variant, k, m, scratch);
  if (matrix)
    matrix->pack(m, depth, scratch->x_pass, scratch->panels);
}

void moelora_cpu_tile(const moelora_variant *variant, const moelora_weights *w, int64_t begin,
                      int64_t end, int64_t m, const void *next, float *c, int64_t ldc,
                      moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const moelora_dtype dtype = variant->dtype;
  const size_t bytes = moelora_dtype_bytes(dtype), operand = kernels->operand_bytes;
  for (int64_t k = 0; k < w->k; k += variant->block_k) {
    const int64_t depth = moelora_min(variant->block_k, w->k - k);
    advance_rows(variant, k, m, scratch);
    if (!w->packed && !kernels->widens) {
      const size_t offset = (size_t)k * bytes;
      kernels->dot(m, end - begin, depth, scratch->x_pass, moelora_row_at(w, dtype, begin) + offset,
                   w->stride_n * (int64_t)bytes, next ? (const char *)next + offset : NULL, c, ldc);
      continue;
    }
    for (int64_t n = begin; n < end; n += MOELORA_DOT_N) {
      const int64_t columns = moelora_min(MOELORA_DOT_N, end - n);
      const char *after =
          n + MOELORA_DOT_N < end ? moelora_row_at(w, dtype, n + MOELORA_DOT_N) : next;
      const intptr_t ahead = after ? (intptr_t)after - (intptr_t)moelora_row_at(w, dtype, n) : 0;
      copy_operands(variant, w, n, columns, k, depth, ahead, scratch->w);
      kernels->dot(m, columns, depth, scratch->x_pass, scratch->w, depth * (int64_t)operand, NULL,
                   c + (n - begin), ldc);
    }
  }
}

/* Runs a pass over a range of weight rows on matrix registers. */
static void matrix_pass(const moelora_variant *variant, const moelora_weights *w,
                        const moelora_columns_of *range, int64_t k, int64_t depth, int64_t m,
                        float *c, int64_t ldc, moelora_scratch *scratch) {
  const moelora_cpu_matrix *matrix = moelora_cpu_kernels_of(variant)->matrix;
  const int64_t bytes = (int64_t)moelora_dtype_bytes(variant->dtype);
  const int64_t panel = moelora_panel_bytes(depth);
  if (!w->packed) {
    matrix->multiply(m, range->end - range->begin, depth, scratch->panels, panel,
                     moelora_row_at(w, variant->dtype, range->begin) + k * bytes,
                     w->stride_n * bytes, NULL, c + range->at, ldc);
    return;
  }
  for (int64_t n = range->begin; n < range->end; n += MOELORA_MATRIX_ROWS) {
    const int64_t rows = moelora_min(MOELORA_MATRIX_ROWS, range->end - n);
    copy_operands(variant, w, n, rows, k, depth, 0, scratch->w);
    matrix->multiply(m, rows, depth, scratch->panels, panel, scratch->w, depth * bytes, NULL,
                     c + range->at + n - range->begin, ldc);
  }
}

void moelora_cpu_weights_tile(const moelora_variant *variant, const moelora_weights *w,
                              const moelora_columns_of *ranges, int num_ranges, int64_t m, float *c,
                              int64_t ldc, moelora_scratch *scratch) {
  if (!moelora_cpu_kernels_of(variant)->matrix) {
    for (int i = 0; i < num_ranges; i++)
      moelora_cpu_tile(variant, w, ranges[i].begin, ranges[i].end, m,
                       i + 1 < num_ranges ? moelora_row_at(w, variant->dtype, ranges[i + 1].begin)
                                          : NULL,
                       c + ranges[i].at, ldc, scratch);
    return;
  }
  for (int64_t k = 0; k < w->k; k += variant->block_k) {
    const int64_t depth = moelora_min(variant->block_k, w->k - k);
    moelora_cpu_begin_pass(variant, k, depth, m, scratch);
    for (int i = 0; i < num_ranges; i++)
      matrix_pass(variant, w, &ranges[i], k, depth, m, c, ldc, scratch);
  }
}

/* Returns the row index in x of sorted row `at`. */
static int64_t row_of_x(const moelora_projection *p, int64_t at) {
  const int64_t row = p->sorted->row[at];
  return p->x_index == MOELORA_BY_SORTED ? at
         : p->x_index == MOELORA_BY_ROW  ? row
                                         : row / p->routes->top_k;
}

void moelora_cpu_rows(const moelora_projection *p, int64_t first, int64_t m, const void **x) {
  const size_t stride = (size_t)p->x_stride * moelora_cpu_kernels_of(p->variant)->operand_bytes;
  for (int64_t i = 0; i < m; i++)
    x[i] = (const char *)p->x + (size_t)row_of_x(p, first + i) * stride;
}

void moelora_cpu_base_rows(const moelora_projection *p, int64_t first, int64_t m,
                           moelora_scratch *scratch) {
  const moelora_quantized_rows *rows = &p->x_e4m3;
  if (!rows->values) {
    moelora_cpu_rows(p, first, m, scratch->x);
    return;
  }
  const size_t stride = (size_t)p->w->k * moelora_cpu_kernels_of(p->variant)->operand_bytes;
  for (int64_t i = 0; i < m; i++) {
    const int64_t row = row_of_x(p, first + i);
    scratch->x[i] = (const char *)rows->values + (size_t)row * stride;
    scratch->x_scales[i] = rows->scales + row * rows->groups;
  }
}
