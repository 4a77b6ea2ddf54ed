/* Interfaces between the files of the backward. Rows are in sorted order, as in the forward.
 * Operands are float32, rounded to the dtype of the call. */
#ifndef MOELORA_CPU_BACKWARD_H
#define MOELORA_CPU_BACKWARD_H

#include "cpu/cpu.h"

/* ---- saved.c ---- */

/* saved->shrink[which] = projection->xa, by flat row in the dtype; zeros elsewhere. */
void moelora_cpu_save_shrink(const moelora_projection *projection, const moelora_saved_rows *saved,
                             int32_t which, const moelora_exec *exec);
/* The inverse: [P, slices, R] by sorted position for rows with an adapter, times weight[flat row]
 * if given. */
void moelora_cpu_load_shrink(const moelora_variant *variant, const moelora_sorted *sorted,
                             const moelora_factors *lora, const moelora_saved_rows *saved,
                             int32_t which, const float *weight, float *xa,
                             const moelora_exec *exec);
/* saved->gate_up = 0 in skipped rows. */
void moelora_cpu_save_skipped(const moelora_experts_problem *problem, const moelora_sorted *sorted);

/* ---- segments.c ---- */

/* Rows [first, end) of one expert and one adapter. */
typedef struct moelora_segment {
  int32_t first, end;
  int32_t next; /* the next one of the same adapter; -1: none */
} moelora_segment;

/* Segments of rows with an adapter, in sorted order, split into parts of at most PART_ROWS rows
 * for tasks with one result per row. */
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

/* ---- back_project.c: products with weights as they lie, y W instead of x W^T ---- */

/* Columns of a block, rows of a pass over depth. */
enum { MOELORA_BACK_COLUMNS = 64, MOELORA_BACK_ROWS = 48, MOELORA_BACK_DEPTH = 512 };

/* Columns of rows as add_rows takes them: in place, or in `copy` if they are not float32 or if
 * memory past their end may not be readable. */
typedef struct moelora_panel {
  const float **rows;
  float *copy; /* [rows, BACK_COLUMNS] */
} moelora_panel;

/* The private memory of one worker. */
typedef struct moelora_back_scratch {
  const float **x;      /* [BACK_COLUMNS] rows that multiply */
  float *c;             /* [BACK_COLUMNS, BACK_COLUMNS] accumulators */
  moelora_panel panel;  /* [depth, BACK_COLUMNS] columns of weights, or of rows */
  moelora_panel factor; /* [rank, BACK_COLUMNS] columns of a factor A */
  float *ranks;         /* [BACK_COLUMNS, PART_ROWS] columns of rank rows as rows */
} moelora_back_scratch;

/* depth, rank: maximum number of terms of a sum, and of one with a factor A. */
moelora_back_scratch *moelora_back_scratch_take(int64_t depth, int64_t rank,
                                                const moelora_exec *exec, moelora_arena *arena);

/* `columns` rounded up as add_rows requires. */
static inline int64_t moelora_row_width(int64_t columns) {
  return moelora_ceil_div(columns, MOELORA_ROW_STEP) * MOELORA_ROW_STEP;
}

/* Rounds float32 values to the dtype of a call. */
static inline void moelora_round_floats(const moelora_variant *variant, float *values, int64_t n) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  uint16_t rounded[256];
  for (int64_t i = 0; variant->dtype != MOELORA_F32 && i < n; i += 256) {
    const int64_t count = moelora_min(256, n - i);
    kernels->store(values + i, rounded, count);
    kernels->load(rounded, values + i, count);
  }
}

typedef struct moelora_back_projection moelora_back_projection;
struct moelora_back_projection {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_sorted *sorted;
  const moelora_segments *segments;
  moelora_back_scratch *scratch; /* [workers] */
  const float *y;                /* rows of w->n values, the gradient of x w^T */
  int64_t y_stride;
  bool y_by_token;          /* y is indexed by p / top_k; otherwise by sorted position */
  const moelora_weights *w; /* data NULL: adapters alone */
  const moelora_factors *lora;
  float *yb; /* [P, slices, R] by sorted position: s y B; NULL: no adapters */
  /* Receives the finished columns [begin, begin + count) of y W + yb A for sorted row `at`. */
  void (*emit)(const moelora_back_projection *projection, int64_t at, int64_t begin, int64_t count,
               const float *values);
  void *context;
};

/* projection->yb = rounded(s y B) for every row with an adapter */
void moelora_cpu_back_shrink(const moelora_back_projection *projection, const moelora_exec *exec);
void moelora_cpu_back_project(const moelora_back_projection *projection, const moelora_exec *exec);

/* ---- gradients.c ---- */

/* Columns of rows of a layer. */
typedef struct moelora_columns {
  const float *rows;
  int64_t stride;
  bool by_token; /* true: row p / top_k; false: row of the sorted position */
  int64_t count;
} moelora_columns;

/* gradient[l, e] (+)= sum over the rows of (l, e) of ranks^T wide, or its transpose. Only the
 * columns of `ranks` below the adapter's true rank are used. */
typedef struct moelora_grouped_product {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_sorted *sorted;
  const moelora_segments *segments;
  moelora_back_scratch *scratch; /* [workers] */
  moelora_columns ranks, wide;
  bool transposed; /* the gradient's columns are ranks: of B */
  const moelora_gradient *gradient;
  const int32_t *pairs; /* [max_loras, E] of a sparse gradient: its index or -1 */
  bool accumulate;
} moelora_grouped_product;

/* Copies the table of sparse gradients, which other threads may change, for products; indices that
 * no gradient has become -1. NULL: no gradient is sparse. */
int32_t *moelora_pairs_take(const moelora_gradient_pairs *pairs, moelora_arena *arena);
void moelora_cpu_read_pairs(const moelora_gradient_pairs *pairs, int32_t *to);
/* pairs: as of a product, `num_pairs` of them. */
void moelora_cpu_zero_gradient(const moelora_gradient *gradient, const int32_t *pairs,
                               int64_t num_pairs, const moelora_exec *exec);
/* The gradient must be zeroed, or is accumulated into. */
void moelora_cpu_grouped_product(const moelora_grouped_product *product, const moelora_exec *exec);

/* gradient[e] (+)= sum over the rows of expert e, times weight[flat row] if given */
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

/* ---- gemm_backward.c: the backward of a projection ---- */

size_t moelora_cpu_gemm_backward_workspace(const moelora_gemm_backward_problem *problem,
                                           const moelora_gemm_backward_plan *plan,
                                           const moelora_exec *exec);
moelora_status moelora_cpu_gemm_backward(const moelora_gemm_backward_problem *problem,
                                         const moelora_gemm_backward_plan *plan,
                                         const moelora_exec *exec);

/* ---- backward.c: the operator ---- */

/* sum over i < n of float32 a[i] times b[i] of the compute dtype */
float moelora_cpu_dot_with(const moelora_cpu_kernels *kernels, size_t bytes, const float *a,
                           const void *from, int64_t n);
/* The same for two rows of the compute dtype, with `bytes` per element. */
float moelora_cpu_row_dot(const moelora_cpu_kernels *kernels, size_t bytes, const char *a,
                          const char *b, int64_t n);

size_t moelora_cpu_experts_backward_workspace(const moelora_experts_backward_problem *problem,
                                              const moelora_backward_plan *plan,
                                              const moelora_exec *exec);
moelora_status moelora_cpu_experts_backward(const moelora_experts_backward_problem *problem,
                                            const moelora_backward_plan *plan,
                                            const moelora_exec *exec);

#endif
