/* A tile of one expert's product: c [m, columns] += x [m, K] w [columns, K]^T.
 *
 * Both operands are contiguous along K, so nothing is transposed. Loops, outermost first: passes
 * over K of block_k, groups of MOELORA_DOT_N weight rows (which stay in L1), and inside `dot` all m
 * token rows. Weights that are packed, or not operands yet, pass through scratch->w. */
#include <string.h>

#include "cpu/cpu.h"

moelora_scratch *moelora_scratch_take(const moelora_variant *variant, const moelora_exec *exec,
                                      moelora_arena *arena) {
  const size_t rows = (size_t)variant->block_m, columns = (size_t)variant->block_n;
  const int32_t workers = moelora_cpu_workers(exec);
  moelora_scratch *all = moelora_take(arena, (size_t)workers * sizeof *all);
  for (int32_t i = 0; i < workers; i++) {
    moelora_scratch one = {
        .x = moelora_take(arena, rows * sizeof(void *)),
        .x_pass = moelora_take(arena, rows * sizeof(void *)),
        .c = moelora_take(arena, rows * columns * sizeof(float)),
        .edge = moelora_take(arena, rows * MOELORA_DOT_N * sizeof(float)),
        .line = moelora_take(arena, columns * sizeof(float)),
        .w = moelora_take(arena, MOELORA_DOT_N * (size_t)variant->block_k * sizeof(float)),
    };
    if (all)
      all[i] = one;
  }
  return all;
}

static const char *row_at(const moelora_weights *w, size_t bytes, int64_t n) {
  int64_t at = n / MOELORA_PACK * w->stride_nt + n % MOELORA_PACK * w->stride_n;
  return (const char *)w->data + (size_t)at * bytes;
}

/* Columns [k, k + count) of a weight row as an operand row in `line`. Fetches the same columns of
 * the row at `ahead_bytes` into L2, unless that is 0. */
static void copy_operand(const moelora_cpu_kernels *kernels, size_t bytes, const moelora_weights *w,
                         const char *row, int64_t ahead_bytes, int64_t k, int64_t count,
                         char *line) {
  const int64_t run = w->packed ? MOELORA_PACK : count;
  for (int64_t i = 0; i < count; i += run) {
    int64_t length = moelora_min(run, count - i);
    const char *from = w->packed ? row + (size_t)((k + i) / MOELORA_PACK * w->stride_kt) * bytes
                                 : row + (size_t)k * bytes;
    char *to = line + (size_t)i * kernels->operand_bytes;
    for (size_t line_at = 0; ahead_bytes && line_at < (size_t)length * bytes; line_at += 64)
      __builtin_prefetch(from + line_at + ahead_bytes, 0, 2);
    if (kernels->widen)
      kernels->widen(from, to, length);
    else
      memcpy(to, from, (size_t)length * bytes);
  }
}

void moelora_cpu_tile(const moelora_variant *variant, const moelora_weights *w, int64_t begin,
                      int64_t end, int64_t m, int64_t next, float *c, int64_t ldc,
                      moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const size_t bytes = moelora_dtype_bytes(variant->dtype), operand = kernels->operand_bytes;
  const bool copy = w->packed || kernels->widen;

  for (int64_t k = 0; k < w->k; k += variant->block_k) {
    int64_t depth = moelora_min(variant->block_k, w->k - k);
    for (int64_t i = 0; i < m; i++)
      scratch->x_pass[i] = (const char *)scratch->x[i] + (size_t)k * operand;

    for (int64_t n = begin; n < end; n += MOELORA_DOT_N) {
      const int64_t columns = moelora_min(MOELORA_DOT_N, end - n);
      const int64_t after = n + MOELORA_DOT_N < end ? n + MOELORA_DOT_N : next;
      const bool fetch = after <= w->n - MOELORA_DOT_N;
      const int64_t ahead = fetch ? row_at(w, bytes, after) - row_at(w, bytes, n) : 0;
      const void *rows[MOELORA_DOT_N];
      for (int64_t j = 0; j < MOELORA_DOT_N; j++) {
        const char *row = row_at(w, bytes, n + moelora_min(j, columns - 1));
        char *line = scratch->w + (size_t)(j * depth) * operand;
        if (copy)
          copy_operand(kernels, bytes, w, row, ahead, k, depth, line);
        rows[j] = copy ? line : row + (size_t)k * bytes;
      }
      if (columns == MOELORA_DOT_N) {
        kernels->dot(m, depth, scratch->x_pass, rows, copy ? 0 : ahead, c + (n - begin), ldc);
        continue;
      }
      memset(scratch->edge, 0, (size_t)m * MOELORA_DOT_N * sizeof(float));
      kernels->dot(m, depth, scratch->x_pass, rows, 0, scratch->edge, MOELORA_DOT_N);
      for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < columns; j++)
          c[i * ldc + n - begin + j] += scratch->edge[i * MOELORA_DOT_N + j];
    }
  }
}
