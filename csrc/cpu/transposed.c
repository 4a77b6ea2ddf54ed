/* Products of the backward with weights as they lie: y W, where the forward has x W^T.
 *
 * `dot` takes operands that are contiguous along what it sums over, here the rows n of W. So a
 * block of columns of W is transposed into a panel first, which all rows of its expert then share:
 *
 *   panel [block_n columns][n]              operands
 *   c [block_m, block_n] = y panel^T        in passes over n of block_k, as in tile.c
 *   c += yb A                               segment by segment, of a panel of A
 *
 * Weights of every form and format become operands a few rows at a time, as the forward rounds
 * them. A row's sums depend on nothing but its own operands. */
#include <string.h>

#include "core/format.h"
#include "cpu/backward.h"

/* Columns of weights that are transposed at once, which divide a tile, and rows. */
enum { SIDE = MOELORA_PACK, ROWS = 16 };

moelora_back_scratch *moelora_back_scratch_take(const moelora_variant *variant, int64_t depth,
                                                int64_t rank, const moelora_exec *exec,
                                                moelora_arena *arena) {
  const size_t rows = (size_t)variant->block_m, columns = (size_t)variant->block_n;
  const size_t of_rows = (size_t)moelora_panel_pitch(variant, MOELORA_PART_ROWS);
  const size_t pitch = (size_t)moelora_panel_pitch(variant, moelora_max(depth, MOELORA_PART_ROWS));
  const int32_t workers = moelora_workers(exec);
  moelora_back_scratch *all = moelora_take_array(arena, (size_t)workers, sizeof *all);
  for (int32_t i = 0; i < workers; i++) {
    moelora_back_scratch one = {
        .x = moelora_take(arena, rows * sizeof(void *)),
        .c = moelora_take(arena, rows * columns * sizeof(float)),
        .panel = moelora_take_array(arena, columns, pitch),
        .factor = moelora_take_array(arena, columns, (size_t)moelora_panel_pitch(variant, rank)),
        .left = moelora_take_array(arena, rows, of_rows),
    };
    if (all)
      all[i] = one;
  }
  return all;
}

/* ---- panels ---- */

/* Columns [k, k + count), of one tile, of row n as operands in `to`, which has room for 128. */
static const char *load_piece(const moelora_variant *variant, const moelora_weights *w, int64_t n,
                              int64_t k, int64_t count, char *to) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  if (w->format == MOELORA_NATIVE) {
    const int64_t column = w->packed ? k / SIDE * w->stride_kt + k % SIDE : k;
    const size_t bytes = moelora_dtype_bytes(variant->dtype);
    const char *from = moelora_row_at(w, variant->dtype, n) + (size_t)column * bytes;
    if (!kernels->widen)
      return from;
    kernels->widen(from, to, count);
    return to;
  }
  const int64_t at = moelora_tile_row_of(w->order, w->n, n), depth = moelora_tile_depth(w->format);
  const char *tile =
      (const char *)w->data + at / MOELORA_PACK * w->stride_nt + k / depth * w->stride_kt;
  const int32_t r = (int32_t)(at % MOELORA_PACK);
  if (moelora_is_fp8(w->format)) {
    moelora_cpu_fp8_row(kernels, w, variant->dtype, tile, r, to);
    return to + (size_t)(k % depth) * kernels->operand_bytes;
  }
  char *high = to + SIDE * kernels->operand_bytes;
  kernels->dequantise(w->format, tile, 0, 1, r & ~8, 0, to, high);
  return r & 8 ? high : to;
}

/* The same of operands of one size, in blocks whose rows are read and written whole. */
#define TRANSPOSE(TYPE)                                                                            \
  static void transpose_##TYPE(const char *const *from, int64_t rows, int64_t columns, char *to,   \
                               int64_t pitch) {                                                    \
    enum { SIDE_OF_BLOCK = 8 };                                                                    \
    int64_t r = 0;                                                                                 \
    for (; r + SIDE_OF_BLOCK <= rows; r += SIDE_OF_BLOCK) {                                        \
      const TYPE *row[SIDE_OF_BLOCK];                                                              \
      for (int i = 0; i < SIDE_OF_BLOCK; i++)                                                      \
        row[i] = (const TYPE *)from[r + i];                                                        \
      for (int64_t c = 0; c < columns; c++) {                                                      \
        TYPE *out = (TYPE *)(to + c * pitch) + r;                                                  \
        for (int i = 0; i < SIDE_OF_BLOCK; i++)                                                    \
          out[i] = row[i][c];                                                                      \
      }                                                                                            \
    }                                                                                              \
    for (; r < rows; r++)                                                                          \
      for (int64_t c = 0; c < columns; c++)                                                        \
        ((TYPE *)(to + c * pitch))[r] = ((const TYPE *)from[r])[c];                                \
  }

TRANSPOSE(uint32_t)
TRANSPOSE(uint16_t)

void moelora_cpu_transpose(const moelora_variant *variant, const char *const *from, int64_t rows,
                           int64_t columns, char *to, int64_t pitch) {
  if (moelora_cpu_kernels_of(variant)->operand_bytes == sizeof(uint32_t))
    transpose_uint32_t(from, rows, columns, to, pitch);
  else
    transpose_uint16_t(from, rows, columns, to, pitch);
}

/* Columns [begin, end) of w, where begin is a multiple of SIDE if it is in tiles, as operand rows
 * of w->n numbers. Returns their distance. */
static int64_t make_panel(const moelora_variant *variant, const moelora_weights *w, int64_t begin,
                          int64_t end, char *panel) {
  const size_t bytes = moelora_cpu_kernels_of(variant)->operand_bytes;
  const int64_t pitch = moelora_panel_pitch(variant, w->n);
  char pieces[ROWS][2 * SIDE * sizeof(float)] __attribute__((aligned(64)));
  const char *from[ROWS];
  for (int64_t k = begin; k < end; k += SIDE) {
    const int64_t columns = moelora_min(SIDE, end - k);
    for (int64_t n = 0; n < w->n; n += ROWS) {
      const int64_t rows = moelora_min(ROWS, w->n - n);
      for (int64_t r = 0; r < rows; r++)
        from[r] = load_piece(variant, w, n + r, k, columns, pieces[r]);
      moelora_cpu_transpose(variant, from, rows, columns,
                            panel + (k - begin) * pitch + (size_t)n * bytes, pitch);
    }
  }
  return pitch;
}

/* c[i * columns + j] += x[i] . panel[j] over depth; x is advanced to its end. */
static void multiply(const moelora_variant *variant, int64_t m, int64_t columns, int64_t depth,
                     const char *panel, int64_t pitch, moelora_back_scratch *scratch) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  for (int64_t k = 0; k < depth; k += variant->block_k) {
    const int64_t count = moelora_min(variant->block_k, depth - k);
    const size_t bytes = kernels->operand_bytes;
    kernels->dot(m, columns, count, scratch->x, panel + (size_t)k * bytes, pitch, NULL, scratch->c,
                 columns);
    for (int64_t i = 0; i < m; i++)
      scratch->x[i] = (const char *)scratch->x[i] + (size_t)count * bytes;
  }
}

/* ---- rows and factors ---- */

/* The operand row of y from `column` on that belongs to sorted row `at`. */
static const char *y_row(const moelora_back_projection *p, int64_t at, int64_t column) {
  const int64_t row = p->y_by_token ? p->sorted->row[at] / p->routes->top_k : at;
  return (const char *)p->y +
         (size_t)(row * p->y_stride + column) * moelora_cpu_kernels_of(p->variant)->operand_bytes;
}

static char *yb_row(const moelora_back_projection *p, int64_t at, int32_t slice) {
  return (char *)p->yb + (size_t)((at * p->lora->num_slices + slice) * p->lora->max_rank) *
                             moelora_cpu_kernels_of(p->variant)->operand_bytes;
}

/* The factor of sorted row `at` as n rows of k numbers. */
static moelora_weights factor_at(const moelora_back_projection *p, const moelora_factor *factor,
                                 int64_t at, int64_t n, int64_t k) {
  const int64_t l = p->sorted->adapter[at], e = p->sorted->expert[at];
  const int64_t first = l * factor->stride_l + e * factor->stride_e;
  return (moelora_weights){
      .data = (const char *)factor->data + (size_t)first * moelora_dtype_bytes(p->variant->dtype),
      .n = n,
      .k = k,
      .stride_n = factor->stride_i,
  };
}

static int32_t rank_at(const moelora_back_projection *p, int64_t at) {
  return moelora_rank_of(&p->sorted->tables, p->sorted->adapter[at], p->lora->max_rank);
}

/* ---- yb = s y B ---- */

static void back_shrink_part(void *context, int64_t index, int32_t worker) {
  const moelora_back_projection *p = context;
  const moelora_variant *variant = p->variant;
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  const int32_t num_slices = p->lora->num_slices, slice = (int32_t)(index % num_slices);
  const int32_t *part = p->segments->part + 2 * (index / num_slices);
  moelora_back_scratch *scratch = &p->scratch[worker];
  const float *scalings = p->sorted->tables.scaling;
  const float scaling = scalings ? scalings[p->sorted->adapter[part[0]]] : 1.0f;
  const int64_t rank = rank_at(p, part[0]);
  const moelora_weights b = factor_at(p, &p->lora->b[slice], part[0], p->lora->slice_n, rank);
  for (int64_t i = 0; i < rank; i += variant->block_n) {
    const int64_t count = moelora_min(variant->block_n, rank - i);
    const int64_t pitch = make_panel(variant, &b, i, i + count, scratch->panel);
    for (int64_t at = part[0]; at < part[1]; at += variant->block_m) {
      const int64_t m = moelora_min(variant->block_m, part[1] - at);
      for (int64_t row = 0; row < m; row++)
        scratch->x[row] = y_row(p, at + row, slice * p->lora->slice_n);
      memset(scratch->c, 0, (size_t)(m * count) * sizeof(float));
      multiply(variant, m, count, b.n, scratch->panel, pitch, scratch);
      for (int64_t j = 0; j < m * count; j++)
        scratch->c[j] *= scaling;
      for (int64_t row = 0; row < m; row++)
        kernels->round(scratch->c + row * count,
                       yb_row(p, at + row, slice) + (size_t)i * kernels->operand_bytes, count);
    }
  }
}

void moelora_cpu_back_shrink(const moelora_back_projection *projection, const moelora_exec *exec) {
  moelora_back_projection copy = *projection;
  const double rows = (double)projection->sorted->num_rows;
  moelora_cpu_parallel(exec, projection->segments->parts * projection->lora->num_slices,
                       rows * projection->lora->max_rank * (double)projection->w->n,
                       back_shrink_part, &copy);
}

/* ---- y W + yb A ---- */

typedef struct back_tasks {
  const moelora_back_projection *projection;
  int64_t column_blocks, row_chunks;
} back_tasks;

/* c += yb A for sorted rows [first, first + m) of one expert. */
static void add_adapters(const moelora_back_projection *p, int64_t first, int64_t m, int64_t begin,
                         int64_t count, moelora_back_scratch *scratch) {
  moelora_back_scratch part = *scratch;
  for (int64_t at = first, next; at < first + m; at = next) {
    next = moelora_segment_end(p->sorted, at, first + m);
    part.c = scratch->c + (at - first) * count;
    for (int32_t slice = 0; p->sorted->adapter[at] >= 0 && slice < p->lora->num_slices; slice++) {
      const moelora_weights a = factor_at(p, &p->lora->a[slice], at, rank_at(p, at), p->w->k);
      const int64_t pitch = make_panel(p->variant, &a, begin, begin + count, part.factor);
      for (int64_t i = at; i < next; i++)
        part.x[i - at] = yb_row(p, i, slice);
      multiply(p->variant, next - at, count, a.n, part.factor, pitch, &part);
    }
  }
}

static void back_task(void *context, int64_t index, int32_t worker) {
  const back_tasks *tasks = context;
  const moelora_back_projection *p = tasks->projection;
  const moelora_variant *variant = p->variant;
  const int64_t chunk = index % tasks->row_chunks;
  const int64_t begin = index / tasks->row_chunks % tasks->column_blocks * variant->block_n;
  const int32_t expert = (int32_t)(index / tasks->row_chunks / tasks->column_blocks);
  const int64_t count = moelora_min(variant->block_n, p->w->k - begin);
  const int64_t first = p->sorted->offset[expert] + chunk * MOELORA_PART_ROWS;
  const int64_t end = moelora_min(p->sorted->offset[expert + 1], first + MOELORA_PART_ROWS);
  if (first >= end)
    return;
  moelora_back_scratch *scratch = &p->scratch[worker];
  const moelora_weights w = moelora_expert_weights(p->w, variant->dtype, expert);
  const int64_t pitch = make_panel(variant, &w, begin, begin + count, scratch->panel);
  for (int64_t at = first; at < end; at += variant->block_m) {
    const int64_t m = moelora_min(variant->block_m, end - at);
    memset(scratch->c, 0, (size_t)(m * count) * sizeof(float));
    for (int64_t i = 0; i < m; i++)
      scratch->x[i] = y_row(p, at + i, 0);
    multiply(variant, m, count, w.n, scratch->panel, pitch, scratch);
    if (p->yb)
      add_adapters(p, at, m, begin, count, scratch);
    for (int64_t i = 0; i < m; i++)
      p->emit(p, at + i, begin, count, scratch->c + i * count);
  }
}

void moelora_cpu_back_project(const moelora_back_projection *projection, const moelora_exec *exec) {
  const int32_t *offset = projection->sorted->offset;
  const int32_t num_experts = projection->routes->num_experts;
  int64_t longest = 1, active = 0;
  for (int32_t e = 0; e < num_experts; e++) {
    longest = moelora_max(longest, offset[e + 1] - offset[e]);
    active += offset[e + 1] > offset[e];
  }
  back_tasks tasks = {
      .projection = projection,
      .column_blocks = moelora_ceil_div(projection->w->k, projection->variant->block_n),
      .row_chunks = moelora_ceil_div(longest, MOELORA_PART_ROWS),
  };
  const int64_t passes = moelora_max(active, projection->sorted->num_rows / 16);
  moelora_cpu_parallel(exec, num_experts * tasks.column_blocks * tasks.row_chunks,
                       (double)passes * (double)projection->w->n * (double)projection->w->k,
                       back_task, &tasks);
}
