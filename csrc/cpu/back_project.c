/* Products y W of the backward (the forward computes x W^T), without transposing the weights.
 *
 * A task is (expert, block of columns, part of the expert's rows). It copies its columns of W to a
 * float32 panel, which all rows of the part share:
 *
 *   panel [n, 64 columns]
 *   c [48, 64] = y panel                in passes over n of BACK_DEPTH
 *   c += yb A                           segment by segment, with a panel of A
 *   emit(row)
 *
 * Rows of weights of any layout and format are converted to float32, quantized ones after rounding
 * to the dtype. A row is summed in the order of n, whatever other rows its block has. */
#include <string.h>

#include "core/format.h"
#include "cpu/back.h"

/* ---- panels ---- */

/* Loads columns [k, k + count) of row n, all in one tile. */
static void load_row(const moelora_variant *variant, const moelora_weights *w, int64_t n, int64_t k,
                     int64_t count, float *to) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  if (!moelora_is_quantized(w->format)) {
    const int64_t column = w->packed ? k / MOELORA_PACK * w->stride_kt + k % MOELORA_PACK : k;
    kernels->load(moelora_row_at(w, variant->dtype, n) +
                      (size_t)column * moelora_dtype_bytes(variant->dtype),
                  to, count);
    return;
  }
  char operands[2 * MOELORA_PACK * sizeof(float)] __attribute__((aligned(64)));
  const size_t bytes = kernels->operand_bytes;
  const int64_t at = moelora_tile_row_of(w->order, w->n, n), depth = moelora_tile_depth(w->format);
  const char *tile =
      (const char *)w->data + at / MOELORA_PACK * w->stride_nt + k / depth * w->stride_kt;
  const int32_t r = (int32_t)(at % MOELORA_PACK);
  const char *from = operands;
  if (moelora_is_fp8(w->format)) {
    moelora_cpu_fp8_row(kernels, w, variant->dtype, tile, r, operands);
    from += (size_t)(k % depth) * bytes;
  } else {
    char *high = operands + MOELORA_PACK * bytes;
    kernels->dequantize(w->format, tile, 0, 1, r & ~8, 0, operands, high);
    from = r & 8 ? high : from;
  }
  moelora_operands_to_f32(kernels, from, to, count);
}

/* Fills a panel with columns [begin, begin + count) of all rows of w; begin is a multiple of
 * BACK_COLUMNS, so that they are in one tile. Copies are padded with zeros. */
static void fill_panel(const moelora_variant *variant, const moelora_weights *w, int64_t begin,
                       int64_t count, const moelora_panel *panel) {
  const int64_t width = moelora_row_width(count);
  const bool in_place = variant->dtype == MOELORA_F32 && !moelora_is_quantized(w->format) &&
                        !w->packed && width == count;
  for (int64_t n = 0; n < w->n; n++) {
    float *copy = panel->copy + n * width;
    panel->rows[n] = in_place ? (const float *)moelora_row_at(w, MOELORA_F32, n) + begin : copy;
    if (in_place)
      continue;
    load_row(variant, w, n, begin, count, copy);
    for (int64_t j = count; j < width; j++)
      copy[j] = 0;
  }
}

/* Computes c [m, width] += x panel over `depth`, and advances x. */
static void multiply(const moelora_variant *variant, int64_t m, int64_t width, int64_t depth,
                     const moelora_panel *panel, const float **x, float *c) {
  for (int64_t k = 0; k < depth; k += MOELORA_BACK_DEPTH) {
    const int64_t count = moelora_min(MOELORA_BACK_DEPTH, depth - k);
    moelora_cpu_kernels_of(variant)->add_rows(m, width, count, x, panel->rows + k, c, width);
    for (int64_t i = 0; i < m; i++)
      x[i] += count;
  }
}

/* ---- rows and factors ---- */

/* Returns y of sorted row `at`, from `column` on. */
static const float *y_row(const moelora_back_projection *p, int64_t at, int64_t column) {
  const int64_t row = p->y_by_token ? p->call->sorted.row[at] / p->call->routes->top_k : at;
  return p->y + row * p->y_stride + column;
}

static float *yb_row(const moelora_back_projection *p, int64_t at, int32_t slice) {
  return p->yb + (at * p->lora->num_slices + slice) * p->lora->max_rank;
}

/* ---- yb = s y B ---- */

static void back_shrink_part(void *context, int64_t index, int32_t worker) {
  const moelora_back_projection *p = context;
  const int32_t num_slices = p->lora->num_slices, slice = (int32_t)(index % num_slices);
  const int32_t *part = p->call->segments.part + 2 * (index / num_slices);
  moelora_back_scratch *scratch = &p->call->scratch[worker];
  const float *scalings = p->call->sorted.tables.scaling;
  const float scaling = scalings ? scalings[p->call->sorted.adapter[part[0]]] : 1.0f;
  const int64_t rank = moelora_rank_at(&p->call->sorted, part[0], p->lora->max_rank);
  const moelora_weights b = moelora_factor_matrix(
      p->call->variant, &p->lora->b[slice], &p->call->sorted, part[0], p->lora->slice_n, rank);
  for (int64_t i = 0; i < rank; i += MOELORA_BACK_COLUMNS) {
    const int64_t count = moelora_min(MOELORA_BACK_COLUMNS, rank - i);
    const int64_t width = moelora_row_width(count);
    fill_panel(p->call->variant, &b, i, count, &scratch->panel);
    for (int64_t at = part[0]; at < part[1]; at += MOELORA_BACK_ROWS) {
      const int64_t m = moelora_min(MOELORA_BACK_ROWS, part[1] - at);
      for (int64_t row = 0; row < m; row++)
        scratch->x[row] = y_row(p, at + row, slice * p->lora->slice_n);
      memset(scratch->c, 0, (size_t)(m * width) * sizeof(float));
      multiply(p->call->variant, m, width, b.n, &scratch->panel, scratch->x, scratch->c);
      for (int64_t row = 0; row < m; row++) {
        float *to = yb_row(p, at + row, slice) + i;
        for (int64_t j = 0; j < count; j++)
          to[j] = scratch->c[row * width + j] * scaling;
        moelora_round_floats(p->call->variant, to, count);
      }
    }
  }
}

void moelora_cpu_back_shrink(const moelora_back_projection *p) {
  const double rows = (double)p->call->sorted.num_rows;
  moelora_cpu_parallel(p->call->exec, p->call->segments.parts * p->lora->num_slices,
                       rows * p->lora->max_rank * (double)p->w->n, back_shrink_part, (void *)p);
}

/* ---- y W + yb A ---- */

typedef struct back_tasks {
  const moelora_back_projection *projection;
  int64_t column_blocks, row_chunks;
} back_tasks;

/* Computes c += yb A for sorted rows [first, first + m) of one expert. */
static void add_adapters(const moelora_back_projection *p, int64_t first, int64_t m, int64_t begin,
                         int64_t count, moelora_back_scratch *scratch) {
  const int64_t width = moelora_row_width(count);
  for (int64_t at = first, next; at < first + m; at = next) {
    next = moelora_segment_end(&p->call->sorted, at, first + m);
    for (int32_t slice = 0; p->call->sorted.adapter[at] >= 0 && slice < p->lora->num_slices;
         slice++) {
      const int32_t rank = moelora_rank_at(&p->call->sorted, at, p->lora->max_rank);
      const moelora_weights a = moelora_factor_matrix(p->call->variant, &p->lora->a[slice],
                                                      &p->call->sorted, at, rank, p->w->k);
      fill_panel(p->call->variant, &a, begin, count, &scratch->factor);
      for (int64_t i = at; i < next; i++)
        scratch->x[i - at] = yb_row(p, i, slice);
      multiply(p->call->variant, next - at, width, a.n, &scratch->factor, scratch->x,
               scratch->c + (at - first) * width);
    }
  }
}

static void back_task(void *context, int64_t index, int32_t worker) {
  const back_tasks *tasks = context;
  const moelora_back_projection *p = tasks->projection;
  const int64_t chunk = index % tasks->row_chunks;
  const int64_t begin = index / tasks->row_chunks % tasks->column_blocks * MOELORA_BACK_COLUMNS;
  const int32_t expert = (int32_t)(index / tasks->row_chunks / tasks->column_blocks);
  const int64_t count = moelora_min(MOELORA_BACK_COLUMNS, p->w->k - begin);
  const int64_t width = moelora_row_width(count);
  const int64_t first = p->call->sorted.offset[expert] + chunk * MOELORA_PART_ROWS;
  const int64_t end = moelora_min(p->call->sorted.offset[expert + 1], first + MOELORA_PART_ROWS);
  if (first >= end)
    return;
  moelora_back_scratch *scratch = &p->call->scratch[worker];
  if (p->w->data) {
    const moelora_weights w = moelora_expert_weights(p->w, p->call->variant->dtype, expert);
    fill_panel(p->call->variant, &w, begin, count, &scratch->panel);
  }
  for (int64_t at = first; at < end; at += MOELORA_BACK_ROWS) {
    const int64_t m = moelora_min(MOELORA_BACK_ROWS, end - at);
    memset(scratch->c, 0, (size_t)(m * width) * sizeof(float));
    for (int64_t i = 0; i < m && p->w->data; i++)
      scratch->x[i] = y_row(p, at + i, 0);
    if (p->w->data)
      multiply(p->call->variant, m, width, p->w->n, &scratch->panel, scratch->x, scratch->c);
    if (p->yb)
      add_adapters(p, at, m, begin, count, scratch);
    for (int64_t i = 0; i < m; i++) {
      const float *values = scratch->c + i * width;
      if (p->dz)
        memcpy(p->dz + p->call->sorted.row[at + i] * p->w->k + begin, values,
               (size_t)count * sizeof *values);
      else
        p->emit(p, at + i, begin, count, values);
    }
  }
}

void moelora_cpu_back_project(const moelora_back_projection *p) {
  const moelora_sorted *sorted = &p->call->sorted;
  back_tasks tasks = {
      .projection = p,
      .column_blocks = moelora_divide_up(p->w->k, MOELORA_BACK_COLUMNS),
      .row_chunks = moelora_divide_up(sorted->longest, MOELORA_PART_ROWS),
  };
  const int64_t passes = moelora_max(sorted->active, sorted->num_rows / 16);
  moelora_cpu_parallel(p->call->exec,
                       p->call->routes->num_experts * tasks.column_blocks * tasks.row_chunks,
                       (double)passes * (double)p->w->n * (double)p->w->k, back_task, &tasks);
}
