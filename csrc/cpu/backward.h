/* What the files of the backward share. Rows of a layer are in sorted order, as in its forward. */
#ifndef MOELORA_CPU_BACKWARD_H
#define MOELORA_CPU_BACKWARD_H

#include "cpu/cpu.h"

/* ---- saved.c ---- */

/* saved->shrink[which] = projection->xa, by flat row in the dtype; zeros elsewhere. */
void moelora_cpu_save_shrink(const moelora_projection *projection, const moelora_saved_rows *saved,
                             int32_t which, const moelora_exec *exec);
/* The other way: operands [P, slices, R] by sorted position of rows with an adapter, each times
 * weight[flat row] if that is given. */
void moelora_cpu_load_shrink(const moelora_variant *variant, const moelora_sorted *sorted,
                             const moelora_factors *lora, const moelora_saved_rows *saved,
                             int32_t which, const float *weight, void *xa,
                             const moelora_exec *exec);
/* saved->gate_up = 0 in skipped rows. */
void moelora_cpu_save_skipped(const moelora_experts_problem *problem, const moelora_sorted *sorted);

/* Float32 factors, rounded to the dtype of a call. */
typedef struct moelora_rounded {
  void *a[MOELORA_MAX_SLICES], *b[MOELORA_MAX_SLICES];
} moelora_rounded;

/* Room for those of a projection; none where they are in the dtype. */
void moelora_rounded_take(const moelora_experts_problem *problem, const moelora_factors *lora,
                          int64_t depth, moelora_arena *arena, moelora_rounded *rounded);
/* Fills it. `lora` then refers to what is rounded. */
void moelora_cpu_round_factors(const moelora_variant *variant,
                               const moelora_experts_problem *problem, int64_t depth,
                               const moelora_rounded *rounded, moelora_factors *lora,
                               const moelora_exec *exec);

/* ---- segments.c ---- */

/* Rows [first, end) of one expert and one adapter. */
typedef struct moelora_segment {
  int32_t first, end;
  int32_t next; /* the next one of the same adapter; -1: none */
} moelora_segment;

/* Segments of rows with an adapter, in sorted order, and parts of them of at most PART_ROWS rows
 * for tasks whose results are rows. */
enum { MOELORA_PART_ROWS = 512 };
typedef struct moelora_segments {
  moelora_segment *all; /* [P] */
  int32_t *head;        /* [max_loras] the first of each adapter; -1: none */
  int32_t *part;        /* [P, 2] first and end */
  int64_t count, parts;
} moelora_segments;

void moelora_segments_take(const moelora_routes *routes, moelora_arena *arena,
                           moelora_segments *segments);
void moelora_find_segments(const moelora_routes *routes, const moelora_sorted *sorted,
                           moelora_segments *segments);

/* ---- transposed.c: products with weights as they lie, y W instead of x W^T ---- */

/* The private memory of one worker. */
typedef struct moelora_back_scratch {
  const void **x; /* [block_m] operand rows */
  float *c;       /* [block_m, block_n] sums */
  char *panel;    /* [block_n] columns of weights, or of rows, as operand rows of their n */
  char *factor;   /* [block_n] columns of a factor A as operand rows of its ranks */
  char *left;     /* [block_m] columns of rows as operand rows */
} moelora_back_scratch;

/* Products sum over at most `depth` and, of factors A, over at most `rank`. */
moelora_back_scratch *moelora_back_scratch_take(const moelora_variant *variant, int64_t depth,
                                                int64_t rank, const moelora_exec *exec,
                                                moelora_arena *arena);

/* Bytes between operand rows of a panel: whole lines, and not a power of two, as rows of a panel
 * are written side by side. */
static inline int64_t moelora_panel_pitch(const moelora_variant *variant, int64_t depth) {
  const int64_t bytes = depth * (int64_t)moelora_cpu_kernels_of(variant)->operand_bytes;
  return moelora_ceil_div(bytes, 64) * 64 + 64;
}

/* to[c][r] = from[r][c] of operands, where rows of `to` are `pitch` bytes apart. */
void moelora_cpu_transpose(const moelora_variant *variant, const char *const *from, int64_t rows,
                           int64_t columns, char *to, int64_t pitch);

typedef struct moelora_back_projection moelora_back_projection;
struct moelora_back_projection {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_sorted *sorted;
  const moelora_segments *segments;
  moelora_back_scratch *scratch; /* [workers] */
  const void *y;                 /* operand rows of w->n values, the gradient of x w^T */
  int64_t y_stride;
  bool y_by_token; /* row p / top_k; else the sorted position */
  const moelora_weights *w;
  const moelora_factors *lora;
  void *yb; /* [P, slices, R] operands by sorted position: s y B; NULL: no adapters */
  /* Takes the finished columns [begin, begin + count) of y W + yb A of sorted row `at`. */
  void (*emit)(const moelora_back_projection *projection, int64_t at, int64_t begin, int64_t count,
               const float *values);
  void *context;
};

/* projection->yb = rounded(s y B) for every row with an adapter */
void moelora_cpu_back_shrink(const moelora_back_projection *projection, const moelora_exec *exec);
void moelora_cpu_back_project(const moelora_back_projection *projection, const moelora_exec *exec);

/* ---- gradients.c ---- */

/* One side of a grouped product: columns of operand rows. */
typedef struct moelora_columns {
  const void *rows;
  int64_t stride;
  bool by_token; /* row p / top_k; else the sorted position */
  bool ranks;    /* as many columns as the adapter has ranks, at most `count` */
  int64_t count;
} moelora_columns;

/* gradient[l, e] (+)= sum over the rows of (l, e) of left^T right */
typedef struct moelora_grouped_product {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_sorted *sorted;
  const moelora_segments *segments;
  moelora_back_scratch *scratch; /* [workers] */
  moelora_columns left, right;
  const moelora_gradient *gradient;
  bool accumulate;
} moelora_grouped_product;

void moelora_cpu_zero_gradient(const moelora_gradient *gradient, const moelora_exec *exec);
/* Of a gradient that is zeroed, or accumulates. */
void moelora_cpu_grouped_product(const moelora_grouped_product *product, const moelora_exec *exec);

/* gradient[e] (+)= sum over the rows of expert e, times weight[flat row] if that is given */
typedef struct moelora_row_sum {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_sorted *sorted;
  moelora_columns rows;
  const float *weight;
  const moelora_gradient *gradient;
  bool accumulate;
} moelora_row_sum;

void moelora_cpu_row_sum(const moelora_row_sum *sum, const moelora_exec *exec);

/* n operands as float32. */
static inline void moelora_load_operands(const moelora_cpu_kernels *kernels, const void *from,
                                         float *to, int64_t n) {
  if (kernels->widen) /* operands are float32 */
    __builtin_memcpy(to, from, (size_t)n * sizeof *to);
  else
    kernels->load(from, to, n);
}

/* ---- backward.c: the operator ---- */

size_t moelora_cpu_experts_backward_workspace(const moelora_experts_backward_problem *problem,
                                              const moelora_backward_plan *plan,
                                              const moelora_exec *exec);
moelora_status moelora_cpu_experts_backward(const moelora_experts_backward_problem *problem,
                                            const moelora_backward_plan *plan,
                                            const moelora_exec *exec);

#endif
