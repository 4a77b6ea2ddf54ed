/* The two halves of an adapter, for sorted rows:
 *
 *   shrink:  shrunk[at, slice, i] = rounded(s * sum over k of x[at, k] A[l, e, i, k]),  i < rank
 *   expand:  c[at, n] += sum over i of shrunk[at, slice, i] B[l, e, n, i]
 *
 * Both are tile products whose weights are a factor. Rows without an adapter are not read, written
 * or multiplied: whatever an adapter holds cannot reach them. */
#include <string.h>

#include "cpu/cpu.h"
#include "cpu/routes.h"

size_t moelora_shrunk_bytes(const moelora_variant *variant, const moelora_routes *routes,
                            const moelora_factors *lora) {
  return (size_t)(routes->num_rows * lora->num_slices * lora->max_rank) *
         moelora_cpu_kernels_of(variant)->operand_bytes;
}

/* The factor of one (adapter, expert) as a weight matrix. */
static moelora_weights factor_matrix(const moelora_variant *variant, const moelora_factor *factor,
                                     int32_t adapter, int32_t expert, int64_t n, int64_t k) {
  int64_t at = adapter * factor->stride_l + expert * factor->stride_e;
  return (moelora_weights){
      .data = (const char *)factor->data + (size_t)at * moelora_dtype_bytes(variant->dtype),
      .n = n,
      .k = k,
      .stride_nt = MOELORA_PACK * factor->stride_i,
      .stride_n = factor->stride_i,
      .stride_kt = MOELORA_PACK,
  };
}

static char *shrunk_row(const moelora_projection *p, int64_t at, int32_t slice) {
  const moelora_factors *lora = p->lora;
  return (char *)p->shrunk + (size_t)((at * lora->num_slices + slice) * lora->max_rank) *
                                 moelora_cpu_kernels_of(p->variant)->operand_bytes;
}

/* Shrinks sorted rows [first, first + m), which share expert and adapter, for one slice. */
static void shrink_segment(const moelora_projection *p, int64_t first, int64_t m, int32_t slice,
                           moelora_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const int32_t adapter = p->sorted->adapter[first], expert = p->sorted->expert[first];
  const int32_t rank = moelora_rank_of(p->routes, adapter, p->lora->max_rank);
  const float scaling = p->routes->lora_scalings ? p->routes->lora_scalings[adapter] : 1.0f;
  const int64_t block = p->variant->block_n;
  moelora_weights a = factor_matrix(p->variant, &p->lora->a[slice], adapter, expert, rank, p->w->k);
  moelora_cpu_rows(p, first, m, scratch->x);
  for (int64_t i = 0; i < rank; i += block) {
    int64_t count = moelora_min(block, rank - i);
    memset(scratch->c, 0, (size_t)(m * count) * sizeof(float));
    moelora_cpu_tile(p->variant, &a, i, i + count, m, i + count, scratch->c, count, scratch);
    for (int64_t j = 0; j < m * count; j++)
      scratch->c[j] *= scaling;
    for (int64_t row = 0; row < m; row++)
      kernels->round(scratch->c + row * count,
                     shrunk_row(p, first + row, slice) + (size_t)i * kernels->operand_bytes, count);
  }
}

typedef struct shrink_tasks {
  const moelora_projection *projection;
  int64_t chunk; /* sorted rows of a task */
} shrink_tasks;

static void shrink_chunk(void *context, int64_t index, int32_t worker) {
  const shrink_tasks *tasks = context;
  const moelora_projection *p = tasks->projection;
  const moelora_sorted *sorted = p->sorted;
  const int32_t num_slices = p->lora->num_slices;
  int64_t at = index / num_slices * tasks->chunk;
  const int64_t end = moelora_min(at + tasks->chunk, sorted->num_rows);
  while (at < end) {
    int64_t next = at + 1;
    while (next < end && sorted->expert[next] == sorted->expert[at] &&
           sorted->adapter[next] == sorted->adapter[at])
      next++;
    if (sorted->adapter[at] >= 0)
      shrink_segment(p, at, next - at, (int32_t)(index % num_slices), &p->scratch[worker]);
    at = next;
  }
}

void moelora_cpu_shrink(const moelora_projection *projection, const moelora_exec *exec) {
  const int64_t rows = projection->sorted->num_rows;
  /* A few tasks per worker, and never more rows than a tile. */
  int64_t chunk = moelora_ceil_div(rows, 4 * moelora_cpu_workers(exec));
  chunk = moelora_max(1, moelora_min(chunk, projection->variant->block_m));
  shrink_tasks tasks = {projection, chunk};
  moelora_cpu_parallel(exec, moelora_ceil_div(rows, chunk) * projection->lora->num_slices,
                       shrink_chunk, &tasks);
}

/* One segment's part of moelora_cpu_expand: rows [first, first + m) share the adapter. */
static void expand_segment(const moelora_projection *p, int64_t first, int64_t m, int64_t begin,
                           int64_t end, float *c, int64_t ldc, moelora_scratch *scratch) {
  const moelora_factors *lora = p->lora;
  const int32_t adapter = p->sorted->adapter[first], expert = p->sorted->expert[first];
  const int32_t rank = moelora_rank_of(p->routes, adapter, lora->max_rank);
  for (int32_t slice = 0; slice < lora->num_slices; slice++) {
    const int64_t base = slice * lora->slice_n;
    const int64_t from = moelora_max(begin, base);
    const int64_t to = moelora_min(end, base + lora->slice_n);
    if (from >= to)
      continue;
    moelora_weights b =
        factor_matrix(p->variant, &lora->b[slice], adapter, expert, lora->slice_n, rank);
    for (int64_t i = 0; i < m; i++)
      scratch->x[i] = shrunk_row(p, first + i, slice);
    moelora_cpu_tile(p->variant, &b, from - base, to - base, m, b.n, c + (from - begin), ldc,
                     scratch);
  }
}

void moelora_cpu_expand(const moelora_projection *projection, int64_t first, int64_t m,
                        int64_t begin, int64_t end, float *c, int64_t ldc,
                        moelora_scratch *scratch) {
  const int32_t *adapter = projection->sorted->adapter + first;
  for (int64_t at = 0, next; at < m; at = next) {
    for (next = at + 1; next < m && adapter[next] == adapter[at]; next++)
      ;
    if (adapter[at] >= 0)
      expand_segment(projection, first + at, next - at, begin, end, c + at * ldc, ldc, scratch);
  }
}
