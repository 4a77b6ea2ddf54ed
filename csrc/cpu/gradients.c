/* Gradients of factors and biases: sums over the rows that share them.
 *
 *   gradient[l, e] (+)= left^T right        over the rows of an (adapter, expert)
 *
 * where one side has as many columns as the adapter has ranks. A task is a tile of one gradient. It
 * brings up to MOELORA_PART_ROWS rows at a time into columns, so that `dot` sums over rows:
 *
 *   left [block_m columns][rows], panel [block_n columns][rows]     operands
 *   c [block_m, block_n] += left panel^T
 *
 * Rows are counted from the start of their segment, and segments of a shared factor follow each
 * other by expert, so no sum depends on other adapters, on threads or on where a segment lies. */
#include <string.h>

#include "cpu/backward.h"

/* ---- gradients as memory ---- */

static char *gradient_row(const moelora_gradient *g, int64_t l, int64_t e, int64_t i) {
  return (char *)g->data + (size_t)(l * g->stride_l + e * g->stride_e + i * g->stride_i) *
                               moelora_dtype_bytes(g->dtype);
}

static void zero_row(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const moelora_gradient *g = context;
  const int64_t i = index % g->rows, e = index / g->rows % g->experts;
  memset(gradient_row(g, index / g->rows / g->experts, e, i), 0,
         (size_t)g->columns * moelora_dtype_bytes(g->dtype));
}

void moelora_cpu_zero_gradient(const moelora_gradient *gradient, const moelora_exec *exec) {
  moelora_gradient copy = *gradient;
  const int64_t rows = (int64_t)copy.loras * copy.experts * copy.rows;
  moelora_cpu_parallel(exec, rows, (double)rows * (double)copy.columns, zero_row, &copy);
}

/* to[i] = (or +=) values[i], rounded to the dtype of the gradient. */
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

static const char *row_of(const moelora_routes *routes, const moelora_sorted *sorted,
                          const moelora_variant *variant, const moelora_columns *columns,
                          int64_t at, int64_t column) {
  const int64_t row = columns->by_token ? sorted->row[at] / routes->top_k : at;
  return (const char *)columns->rows +
         (size_t)(row * columns->stride + column) * moelora_cpu_kernels_of(variant)->operand_bytes;
}

/* Columns [begin, begin + count) of rows [first, first + rows) as operand rows. */
static int64_t gather(const moelora_grouped_product *p, const moelora_columns *columns,
                      int64_t first, int64_t rows, int64_t begin, int64_t count, char *to) {
  enum { ROWS = 16 };
  const int64_t pitch = moelora_panel_pitch(p->variant, MOELORA_PART_ROWS);
  const size_t bytes = moelora_cpu_kernels_of(p->variant)->operand_bytes;
  const char *from[ROWS];
  for (int64_t at = 0; at < rows; at += ROWS) {
    const int64_t some = moelora_min(ROWS, rows - at);
    for (int64_t r = 0; r < some; r++)
      from[r] = row_of(p->routes, p->sorted, p->variant, columns, first + at + r, begin);
    moelora_cpu_transpose(p->variant, from, some, count, to + (size_t)at * bytes, pitch);
  }
  return pitch;
}

typedef struct product_tasks {
  const moelora_grouped_product *product;
  int64_t left_tiles, right_tiles;
  bool shared;
} product_tasks;

static int64_t columns_of(const moelora_columns *columns, int64_t rank) {
  return columns->ranks ? moelora_min(rank, columns->count) : columns->count;
}

static void product_tile(void *context, int64_t index, int32_t worker) {
  const product_tasks *tasks = context;
  const moelora_grouped_product *p = tasks->product;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(p->variant);
  const moelora_segments *segments = p->segments;
  const int64_t right = index % tasks->right_tiles * p->variant->block_n;
  const int64_t left = index / tasks->right_tiles % tasks->left_tiles * p->variant->block_m;
  const int64_t group = index / tasks->right_tiles / tasks->left_tiles;
  int32_t at = tasks->shared ? segments->head[group] : (int32_t)group;
  if (at < 0)
    return;
  const int32_t adapter = p->sorted->adapter[segments->all[at].first];
  const int32_t expert = p->sorted->expert[segments->all[at].first];
  const int64_t rank = moelora_rank_of(&p->sorted->tables, adapter, INT32_MAX);
  const int64_t m = moelora_min(p->variant->block_m, columns_of(&p->left, rank) - left);
  const int64_t n = moelora_min(p->variant->block_n, columns_of(&p->right, rank) - right);
  if (m <= 0 || n <= 0)
    return;
  moelora_back_scratch *scratch = &p->scratch[worker];
  memset(scratch->c, 0, (size_t)(m * n) * sizeof(float));
  for (; at >= 0; at = tasks->shared ? segments->all[at].next : -1) {
    const moelora_segment *segment = &segments->all[at];
    for (int64_t first = segment->first; first < segment->end; first += MOELORA_PART_ROWS) {
      const int64_t rows = moelora_min(MOELORA_PART_ROWS, segment->end - first);
      int64_t pitch = gather(p, &p->left, first, rows, left, m, scratch->left);
      for (int64_t i = 0; i < m; i++)
        scratch->x[i] = scratch->left + i * pitch;
      pitch = gather(p, &p->right, first, rows, right, n, scratch->panel);
      kernels->dot(m, n, rows, scratch->x, scratch->panel, pitch, NULL, scratch->c, n);
    }
  }
  for (int64_t i = 0; i < m; i++)
    put(p->variant, p->gradient->dtype, p->accumulate, scratch->c + i * n, n,
        gradient_row(p->gradient, adapter, tasks->shared ? 0 : expert, left + i) +
            (size_t)right * moelora_dtype_bytes(p->gradient->dtype));
}

void moelora_cpu_grouped_product(const moelora_grouped_product *product, const moelora_exec *exec) {
  const moelora_routes *routes = product->routes;
  product_tasks tasks = {
      .product = product,
      .left_tiles = moelora_ceil_div(product->left.count, product->variant->block_m),
      .right_tiles = moelora_ceil_div(product->right.count, product->variant->block_n),
      .shared = product->gradient->experts == 1 && routes->num_experts > 1,
  };
  const int64_t groups = tasks.shared ? routes->max_loras : product->segments->count;
  moelora_cpu_parallel(exec,
                       product->segments->count ? groups * tasks.left_tiles * tasks.right_tiles : 0,
                       (double)product->sorted->num_rows * (double)product->left.count *
                           (double)product->right.count,
                       product_tile, &tasks);
}

/* ---- biases ---- */

static void sum_columns(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const moelora_row_sum *s = context;
  enum { COLUMNS = MOELORA_CPU_MAX_BLOCK_N };
  const int64_t blocks = moelora_ceil_div(s->rows.count, COLUMNS);
  const int64_t begin = index % blocks * COLUMNS, expert = index / blocks;
  const int64_t count = moelora_min(COLUMNS, s->rows.count - begin);
  const int64_t first = s->sorted->offset[expert], end = s->sorted->offset[expert + 1];
  float sum[COLUMNS] = {0}, line[COLUMNS];
  if (s->accumulate && first == end)
    return;
  for (int64_t at = first; at < end; at++) {
    const float weight = s->weight ? s->weight[s->sorted->row[at]] : 1.0f;
    moelora_load_operands(moelora_cpu_kernels_of(s->variant),
                          row_of(s->routes, s->sorted, s->variant, &s->rows, at, begin), line,
                          count);
    for (int64_t i = 0; i < count; i++)
      sum[i] += weight * line[i];
  }
  put(s->variant, s->gradient->dtype, s->accumulate, sum, count,
      gradient_row(s->gradient, 0, expert, 0) +
          (size_t)begin * moelora_dtype_bytes(s->gradient->dtype));
}

void moelora_cpu_row_sum(const moelora_row_sum *sum, const moelora_exec *exec) {
  moelora_row_sum copy = *sum;
  moelora_cpu_parallel(
      exec, sum->routes->num_experts * moelora_ceil_div(sum->rows.count, MOELORA_CPU_MAX_BLOCK_N),
      (double)sum->sorted->num_rows * (double)sum->rows.count, sum_columns, &copy);
}
