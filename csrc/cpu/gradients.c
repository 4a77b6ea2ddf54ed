/* Computes gradients of factors and biases, each a sum over rows.
 *
 *   A: gradient[l, e] (+)= ranks^T wide     over the rows of an (adapter, expert)
 *   B: gradient[l, e] (+)= wide^T ranks     over the same rows
 *
 * A sparse gradient only has matrices of some (l, e), at gradient[0, pairs[l, e]].
 *
 * A task is a tile of one gradient. It processes up to MOELORA_PART_ROWS rows at a time:
 *
 *   ranks [64 ranks][rows], panel [rows][64 columns]      float32
 *   c [64, 64] += ranks panel
 *
 * Rows are added in the order of their segment, and segments of a shared factor in the order of
 * experts, so that no sum depends on other adapters, on threads or on the position of a segment. */
#include <string.h>

#include "cpu/back.h"

/* ---- access to gradients ---- */

static char *gradient_row(const moelora_gradient *g, int64_t l, int64_t e, int64_t i) {
  return (char *)g->data + (size_t)(l * g->stride_l + e * g->stride_e + i * g->stride_i) *
                               moelora_dtype_bytes(g->dtype);
}

typedef struct zero_tasks {
  const moelora_gradient *gradient;
  const int32_t *pairs;
} zero_tasks;

static void zero_row(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const zero_tasks *tasks = context;
  const moelora_gradient *g = tasks->gradient;
  const int64_t i = index % g->rows, group = index / g->rows;
  const int64_t l = g->sparse ? 0 : group / g->experts;
  const int64_t e = g->sparse ? tasks->pairs[group] : group % g->experts;
  if (e >= 0)
    memset(gradient_row(g, l, e, i), 0, (size_t)g->columns * moelora_dtype_bytes(g->dtype));
}

void moelora_cpu_zero_gradients(const moelora_back_call *call, const moelora_gradient *gradients,
                                int32_t count, int64_t num_pairs) {
  for (const moelora_gradient *g = gradients; g < gradients + count && !call->accumulate; g++) {
    zero_tasks tasks = {g, call->pairs};
    const int64_t rows = (g->sparse ? num_pairs : (int64_t)g->loras * g->experts) * g->rows;
    if (g->data)
      moelora_cpu_parallel(call->exec, rows, (double)rows * (double)g->columns, zero_row, &tasks);
  }
}

/* Stores values to `to`, or adds them, rounded to the gradient's dtype. May overwrite `values`. */
static void put(const moelora_variant *variant, moelora_dtype dtype, bool add, float *values,
                int64_t count, char *to) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  if (dtype == MOELORA_F32) {
    float *out = (float *)to;
    for (int64_t i = 0; i < count; i++)
      out[i] = add ? out[i] + values[i] : values[i];
    return;
  }
  float before[MOELORA_CPU_MAX_BLOCK_N];
  if (add) {
    kernels->load(to, before, count);
    for (int64_t i = 0; i < count; i++)
      values[i] += before[i];
  }
  kernels->store(values, to, count);
}

/* ---- factors ---- */

static const float *row_of(const moelora_back_call *call, const moelora_columns *columns,
                           int64_t at) {
  const int64_t row = columns->by_token ? call->sorted.row[at] / call->routes->top_k : at;
  return columns->rows + row * columns->stride;
}

typedef struct product_tasks {
  const moelora_grouped_product *product;
  int64_t rank_tiles, wide_tiles;
  bool shared;
} product_tasks;

/* Adds the product of ranks [rank, rank + m) and columns [begin, begin + n), summed over `rows`
 * sorted rows from `first` on, to c [m, width]. */
static void add_rows(const moelora_grouped_product *p, int64_t first, int64_t rows, int64_t rank,
                     int64_t m, int64_t begin, int64_t n, moelora_back_scratch *scratch) {
  const int64_t width = moelora_row_width(n);
  for (int64_t r = 0; r < rows; r++) {
    const float *ranks = row_of(p->call, &p->ranks, first + r) + rank;
    const float *wide = row_of(p->call, &p->wide, first + r) + begin;
    for (int64_t i = 0; i < m; i++)
      scratch->ranks[i * MOELORA_PART_ROWS + r] = ranks[i];
    scratch->panel.rows[r] = wide;
    if (width > n) {
      float *copy = scratch->panel.copy + r * width;
      memcpy(copy, wide, (size_t)n * sizeof *copy);
      memset(copy + n, 0, (size_t)(width - n) * sizeof *copy);
      scratch->panel.rows[r] = copy;
    }
  }
  for (int64_t i = 0; i < m; i++)
    scratch->x[i] = scratch->ranks + i * MOELORA_PART_ROWS;
  moelora_cpu_kernels_of(p->call->variant)
      ->add_rows(m, width, rows, scratch->x, scratch->panel.rows, scratch->c, width);
}

/* Stores c to ranks [rank, rank + m), columns [begin, begin + n) of gradient [l, e]. */
static void put_tile(const moelora_grouped_product *p, int32_t l, int64_t e, int64_t rank,
                     int64_t m, int64_t begin, int64_t n, const moelora_back_scratch *scratch) {
  const moelora_gradient *g = p->gradient;
  const size_t bytes = moelora_dtype_bytes(g->dtype);
  const int64_t width = moelora_row_width(n);
  float line[MOELORA_BACK_COLUMNS];
  for (int64_t i = 0; i < m && !p->transposed; i++)
    put(p->call->variant, g->dtype, p->call->accumulate, scratch->c + i * width, n,
        gradient_row(g, l, e, rank + i) + (size_t)begin * bytes);
  for (int64_t j = 0; j < n && p->transposed; j++) {
    for (int64_t i = 0; i < m; i++)
      line[i] = scratch->c[i * width + j];
    put(p->call->variant, g->dtype, p->call->accumulate, line, m,
        gradient_row(g, l, e, begin + j) + (size_t)rank * bytes);
  }
}

static void product_tile(void *context, int64_t index, int32_t worker) {
  const product_tasks *tasks = context;
  const moelora_grouped_product *p = tasks->product;
  const moelora_segments *segments = &p->call->segments;
  const int64_t begin = index % tasks->wide_tiles * MOELORA_BACK_COLUMNS;
  const int64_t rank = index / tasks->wide_tiles % tasks->rank_tiles * MOELORA_BACK_COLUMNS;
  const int64_t group = index / tasks->wide_tiles / tasks->rank_tiles;
  int32_t at = tasks->shared ? segments->head[group] : (int32_t)group;
  if (at < 0)
    return;
  const int32_t adapter = p->call->sorted.adapter[segments->all[at].first];
  const int32_t expert = p->call->sorted.expert[segments->all[at].first];
  const int64_t ranks = moelora_rank_of(&p->call->sorted.tables, adapter, (int32_t)p->ranks.count);
  const int64_t m = moelora_min(MOELORA_BACK_COLUMNS, ranks - rank);
  const int64_t n = moelora_min(MOELORA_BACK_COLUMNS, p->wide.count - begin);
  const int64_t pair = (int64_t)adapter * p->call->routes->num_experts + expert;
  const int32_t l = p->gradient->sparse ? 0 : adapter;
  const int32_t e = p->gradient->sparse ? p->call->pairs[pair] : tasks->shared ? 0 : expert;
  if (m <= 0 || e < 0)
    return;
  moelora_back_scratch *scratch = &p->call->scratch[worker];
  memset(scratch->c, 0, (size_t)(m * moelora_row_width(n)) * sizeof(float));
  for (; at >= 0; at = tasks->shared ? segments->all[at].next : -1) {
    const moelora_segment *segment = &segments->all[at];
    for (int64_t first = segment->first; first < segment->end; first += MOELORA_PART_ROWS)
      add_rows(p, first, moelora_min(MOELORA_PART_ROWS, segment->end - first), rank, m, begin, n,
               scratch);
  }
  put_tile(p, l, e, rank, m, begin, n, scratch);
}

void moelora_cpu_grouped_product(const moelora_grouped_product *product) {
  const moelora_back_call *call = product->call;
  product_tasks tasks = {
      .product = product,
      .rank_tiles = moelora_divide_up(product->ranks.count, MOELORA_BACK_COLUMNS),
      .wide_tiles = moelora_divide_up(product->wide.count, MOELORA_BACK_COLUMNS),
      .shared = !product->gradient->sparse && product->gradient->experts == 1 &&
                call->routes->num_experts > 1,
  };
  if (!product->gradient->data)
    return;
  const int64_t groups = tasks.shared ? call->routes->max_loras : call->segments.count;
  moelora_cpu_parallel(
      call->exec, call->segments.count ? groups * tasks.rank_tiles * tasks.wide_tiles : 0,
      (double)call->sorted.num_rows * (double)product->ranks.count * (double)product->wide.count,
      product_tile, &tasks);
}

/* ---- biases ---- */

static void sum_columns(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const moelora_row_sum *s = context;
  enum { COLUMNS = MOELORA_CPU_MAX_BLOCK_N };
  const int64_t blocks = moelora_divide_up(s->rows.count, COLUMNS);
  const int64_t begin = index % blocks * COLUMNS, expert = index / blocks;
  const int64_t count = moelora_min(COLUMNS, s->rows.count - begin);
  const int64_t first = s->call->sorted.offset[expert], end = s->call->sorted.offset[expert + 1];
  float sum[COLUMNS] = {0};
  if (s->call->accumulate && first == end)
    return;
  for (int64_t at = first; at < end; at++) {
    const float weight = s->weight ? s->weight[s->call->sorted.row[at]] : 1.0f;
    const float *row = row_of(s->call, &s->rows, at) + begin;
    for (int64_t i = 0; i < count; i++)
      sum[i] += weight * row[i];
  }
  put(s->call->variant, s->gradient->dtype, s->call->accumulate, sum, count,
      gradient_row(s->gradient, 0, expert, 0) +
          (size_t)begin * moelora_dtype_bytes(s->gradient->dtype));
}

void moelora_cpu_row_sum(const moelora_row_sum *sum) {
  const moelora_back_call *call = sum->call;
  const int64_t blocks = moelora_divide_up(sum->rows.count, MOELORA_CPU_MAX_BLOCK_N);
  const double elements = (double)call->sorted.num_rows * (double)sum->rows.count;
  if (sum->gradient->data)
    moelora_cpu_parallel(call->exec, call->routes->num_experts * blocks, elements, sum_columns,
                         (void *)sum);
}
