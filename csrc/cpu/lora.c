/* Shrink and expand of an adapter, for sorted rows:
 *
 *   shrink:  xa[at, slice, i] = rounded(s * sum over k of x[at, k] A[l, e, i, k]),  i < rank
 *   expand:  c[at, n] += sum over i of xa[at, slice, i] B[l, e, n, i]
 *
 * Both are tile products with a factor as the weights. Rows without an adapter are not read,
 * written or multiplied, so an adapter's values cannot affect them. */
#include <string.h>

#include "cpu/cpu.h"

void *moelora_take_xa(const moelora_variant *variant, const moelora_routes *routes,
                      const moelora_factors *lora, moelora_arena *arena) {
  const int64_t columns = (int64_t)lora->num_slices * lora->max_rank;
  return moelora_take_operands(variant, routes->num_rows, columns, arena);
}

static char *xa_row(const moelora_projection *p, int64_t at, int32_t slice) {
  const moelora_factors *lora = p->lora;
  return (char *)p->xa + (size_t)((at * lora->num_slices + slice) * lora->max_rank) *
                             moelora_cpu_kernels_of(p->variant)->operand_bytes;
}

static moelora_weights factor_a(const moelora_projection *p, int64_t at, int32_t slice) {
  const int32_t rank = moelora_rank_at(p->sorted, at, p->lora->max_rank);
  return moelora_factor_matrix(p->variant, &p->lora->a[slice], p->sorted, at, rank, p->w->k);
}

/* Whether slice 1 of the adapter has the same A as slice 0. */
static bool has_one_a(const moelora_projection *p, int32_t adapter) {
  const int32_t *one_a = p->sorted->tables.one_a;
  return p->lora->num_slices == 2 && one_a && one_a[adapter];
}

/* Shrinks sorted rows [first, first + m) of one segment for one slice. Prefetches A at `next`. */
static void shrink_segment(const moelora_projection *p, int64_t first, int64_t m, int32_t slice,
                           const void *next, moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const int32_t adapter = p->sorted->adapter[first];
  const float *scalings = p->sorted->tables.scaling, scaling = scalings ? scalings[adapter] : 1.0f;
  const int64_t block = p->variant->block_n;
  const moelora_weights a = factor_a(p, first, slice);
  moelora_cpu_rows(p, first, m, scratch->x);
  for (int64_t i = 0; i < a.n; i += block) {
    const int64_t count = moelora_min(block, a.n - i);
    const void *after = i + count < a.n ? moelora_row_at(&a, p->variant->dtype, i + count) : next;
    memset(scratch->c, 0, (size_t)(m * count) * sizeof(float));
    moelora_cpu_tile(p->variant, &a, i, i + count, m, after, scratch->c, count, scratch);
    for (int64_t j = 0; j < m * count; j++)
      scratch->c[j] *= scaling;
    const size_t at = (size_t)i * kernels->operand_bytes;
    for (int64_t row = 0; row < m; row++) {
      char *xa = xa_row(p, first + row, slice) + at;
      kernels->round(scratch->c + row * count, xa, count);
      if (has_one_a(p, adapter))
        memcpy(xa_row(p, first + row, 1) + at, xa, (size_t)count * kernels->operand_bytes);
    }
  }
}

typedef struct shrink_tasks {
  const moelora_projection *projection;
  int64_t chunk; /* sorted rows per task */
} shrink_tasks;

static void shrink_chunk(void *context, int64_t index, int32_t worker) {
  const shrink_tasks *tasks = context;
  const moelora_projection *p = tasks->projection;
  const int32_t num_slices = p->lora->num_slices, slice = (int32_t)(index % num_slices);
  int64_t at = index / num_slices * tasks->chunk, next;
  const int64_t end = moelora_min(at + tasks->chunk, p->sorted->num_rows);
  for (; at < end; at = next) {
    next = moelora_segment_end(p->sorted, at, end);
    if (p->sorted->adapter[at] < 0 || (slice == 1 && has_one_a(p, p->sorted->adapter[at])))
      continue;
    const bool more = next < end && p->sorted->adapter[next] >= 0;
    const void *ahead = more ? factor_a(p, next, slice).data : NULL;
    shrink_segment(p, at, next - at, slice, ahead, &p->scratch[worker]);
  }
}

void moelora_cpu_shrink(const moelora_projection *projection, const moelora_exec *exec) {
  const moelora_factors *lora = projection->lora;
  const int64_t rows = projection->sorted->num_rows;
  /* Aims at four tasks per worker and slice, of at most block_m rows each. */
  int64_t chunk = moelora_divide_up(rows, 4 * (int64_t)moelora_workers(exec));
  chunk = moelora_max(1, moelora_min(chunk, projection->variant->block_m));
  shrink_tasks tasks = {projection, chunk};
  moelora_cpu_parallel(exec, moelora_divide_up(rows, chunk) * lora->num_slices,
                       (double)rows * lora->num_slices * lora->max_rank * (double)projection->w->k,
                       shrink_chunk, &tasks);
}

/* A factor B, and its rows [from, to), which belong to given output columns of the projection. */
typedef struct factor_b_part {
  moelora_weights b;
  int64_t from, to;
} factor_b_part;

static factor_b_part factor_b(const moelora_projection *p, int64_t at, int32_t slice, int64_t begin,
                              int64_t end) {
  const moelora_factors *lora = p->lora;
  const int32_t rank = moelora_rank_at(p->sorted, at, lora->max_rank);
  const int64_t base = lora->column[slice], n = moelora_slice_columns(lora, slice);
  return (factor_b_part){
      .b = moelora_factor_matrix(p->variant, &lora->b[slice], p->sorted, at, n, rank),
      .from = moelora_max(begin, base) - base,
      .to = moelora_min(end, base + n) - base,
  };
}

void moelora_cpu_expand_ahead(const moelora_projection *p, int64_t first, int64_t m, int64_t begin,
                              int64_t end) {
  for (int64_t at = first, next; at < first + m; at = next) {
    next = moelora_segment_end(p->sorted, at, first + m);
    for (int32_t slice = 0; p->sorted->adapter[at] >= 0 && slice < p->lora->num_slices; slice++) {
      const factor_b_part part = factor_b(p, at, slice, begin, end);
      const int64_t bytes = part.b.k * (int64_t)moelora_dtype_bytes(p->variant->dtype);
      for (int64_t n = part.from; n < part.to; n++)
        for (int64_t i = 0; i < bytes; i += 64)
          __builtin_prefetch(moelora_row_at(&part.b, p->variant->dtype, n) + i, 0, 2);
    }
  }
}

void moelora_cpu_expand(const moelora_projection *p, int64_t first, int64_t m, int64_t begin,
                        int64_t end, float *c, int64_t ldc, moelora_scratch *scratch) {
  for (int64_t at = first, next; at < first + m; at = next) {
    next = moelora_segment_end(p->sorted, at, first + m);
    for (int32_t slice = 0; p->sorted->adapter[at] >= 0 && slice < p->lora->num_slices; slice++) {
      const factor_b_part part = factor_b(p, at, slice, begin, end);
      if (part.from >= part.to)
        continue;
      for (int64_t i = at; i < next; i++)
        scratch->x[i - at] = xa_row(p, i, slice);
      const int64_t column = p->lora->column[slice] + part.from - begin;
      moelora_cpu_tile(p->variant, &part.b, part.from, part.to, next - at, NULL,
                       c + (at - first) * ldc + column, ldc, scratch);
    }
  }
}
