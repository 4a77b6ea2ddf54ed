/* Interfaces between the files of the backward. Rows are float32, rounded to the dtype of the call,
 * in the sorted order of the forward. */
#pragma once

#include "cpu/cpu.h"

/* ---- rows ---- */

/* Rounds `columns` up to a multiple of MOELORA_ROW_STEP. */
static inline int64_t moelora_row_width(int64_t columns) {
  return moelora_divide_up(columns, MOELORA_ROW_STEP) * MOELORA_ROW_STEP;
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

/* Returns the sum over i < n of a[i] b[i]; b has the compute dtype, of `bytes` per element. */
static inline float moelora_dot_with(const moelora_cpu_kernels *kernels, size_t bytes,
                                     const float *a, const char *b, int64_t n) {
  float line[256], sum = 0;
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t count = moelora_min(256, n - i);
    kernels->load(b + (size_t)i * bytes, line, count);
    for (int64_t j = 0; j < count; j++)
      sum += a[i + j] * line[j];
  }
  return sum;
}

/* Returns the same sum for two rows of the compute dtype. */
static inline float moelora_row_dot(const moelora_cpu_kernels *kernels, size_t bytes, const char *a,
                                    const char *b, int64_t n) {
  float line[256], sum = 0;
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t count = moelora_min(256, n - i);
    kernels->load(a + (size_t)i * bytes, line, count);
    sum += moelora_dot_with(kernels, bytes, line, b + (size_t)i * bytes, count);
  }
  return sum;
}

/* ---- segments.c: runs of sorted rows with one expert and one adapter ---- */

/* Rows [first, end) of one expert and one adapter. */
typedef struct moelora_segment {
  int32_t first, end;
  int32_t next; /* index of the next segment of the adapter; -1: none */
} moelora_segment;

/* Segments of rows with an adapter, in sorted order. Tasks whose results are rows process parts of
 * segments, of at most PART_ROWS rows. */
enum { MOELORA_PART_ROWS = 512 };
typedef struct moelora_segments {
  moelora_segment *all; /* [P] */
  int32_t *head;        /* [max_loras] first segment of each adapter; -1: none */
  int32_t *part;        /* [P, 2] first and end row of each part */
  int64_t count, parts;
} moelora_segments;

void moelora_segments_take(const moelora_routes *routes, moelora_arena *arena,
                           moelora_segments *segments);
void moelora_find_segments(const moelora_routes *routes, const moelora_sorted *sorted,
                           moelora_segments *segments);

/* ---- back_steps.c: steps that the backwards of a layer and of a projection share ---- */

/* Columns of a block, rows that are multiplied at once, and depth of a pass. */
enum { MOELORA_BACK_COLUMNS = 64, MOELORA_BACK_ROWS = 48, MOELORA_BACK_DEPTH = 512 };

/* Some columns of several rows, as add_rows reads them: in place, or from `copy` if the rows are
 * not float32 or the columns must be padded to a multiple of MOELORA_ROW_STEP. */
typedef struct moelora_panel {
  const float **rows;
  float *copy; /* [rows, BACK_COLUMNS] */
} moelora_panel;

/* The private memory of one worker. */
typedef struct moelora_back_scratch {
  const float **x;      /* [BACK_COLUMNS] rows of the left operand */
  float *c;             /* [BACK_COLUMNS, BACK_COLUMNS] accumulators */
  moelora_panel panel;  /* [depth, BACK_COLUMNS] columns of weights, or of rows */
  moelora_panel factor; /* [rank, BACK_COLUMNS] columns of a factor A */
  float *ranks;         /* [BACK_COLUMNS, PART_ROWS] columns of xa or yb, transposed */
} moelora_back_scratch;

typedef struct moelora_back_call {
  const moelora_variant *variant;
  const moelora_routes *routes;
  const moelora_exec *exec;
  bool accumulate; /* into gradients of factors and biases */
  moelora_sorted sorted;
  moelora_segments segments;
  moelora_back_scratch *scratch; /* [workers] */
  int32_t *pairs;      /* [max_loras, E] index in sparse gradients or -1; NULL: none are sparse */
  const float *weight; /* [P] routing weights t of the outputs; NULL: 1 */
} moelora_back_call;

/* Allocates the arrays. `depth`, `rank`: maximum rows of a panel of weights, and of one of A. */
void moelora_back_call_take(moelora_back_call *call, const moelora_gradient_pairs *pairs,
                            int64_t depth, int64_t rank, moelora_arena *arena);
/* Sorts the rows, finds their segments, and copies the table of sparse gradients, which other
 * threads may change; indices out of range become -1. weighted: sets `weight`, else it is NULL. */
void moelora_cpu_back_begin(moelora_back_call *call, const moelora_gradient_pairs *pairs,
                            bool weighted);

/* Rows to load. Flat row p is at (p / top_k) * stride[0] + (p % top_k) * stride[1]. */
typedef struct moelora_loaded_rows {
  const void *from;
  int64_t stride[2], columns;
  bool by_token;       /* the first row of each token; otherwise all rows, sorted */
  const float *weight; /* [M] factors, only if by_token; products are rounded; NULL: 1 */
} moelora_loaded_rows;

void moelora_cpu_load_rows(const moelora_back_call *call, const moelora_loaded_rows *rows,
                           float *to);
/* In rows with an adapter, multiplies xa or yb [P, slices, R] by call->weight, and rounds it. */
void moelora_cpu_weigh_ranks(const moelora_back_call *call, const moelora_factors *lora,
                             float *rows);

/* ---- back_project.c: products y W, with the weights as the forward stores them ---- */

typedef struct moelora_back_projection moelora_back_projection;
struct moelora_back_projection {
  const moelora_back_call *call;
  const float *y; /* rows of w->n values, the gradient of x w^T */
  int64_t y_stride;
  bool y_by_token;          /* y has a row per token; otherwise by sorted position */
  const moelora_weights *w; /* data NULL: only factors */
  const moelora_factors *lora;
  float *yb; /* [P, slices, R] by sorted position: s y B; NULL: no adapters */
  float *dz; /* [P, w->k] by flat row: y W + yb A; NULL: `emit` receives it */
  /* Receives the finished columns [begin, begin + count) of sorted row `at`. */
  void (*emit)(const moelora_back_projection *projection, int64_t at, int64_t begin, int64_t count,
               const float *values);
  void *context;
};

/* Computes projection->yb = rounded(s y B) for every row with an adapter. */
void moelora_cpu_back_shrink(const moelora_back_projection *projection);
void moelora_cpu_back_project(const moelora_back_projection *projection);

/* ---- gradients.c: gradients of factors and biases ---- */

/* Columns of workspace rows that a product reads. */
typedef struct moelora_columns {
  const float *rows;
  int64_t stride;
  bool by_token; /* one row per token, p / top_k; otherwise in sorted order */
  int64_t count;
} moelora_columns;

static inline moelora_columns moelora_token_columns(const float *rows, int64_t stride,
                                                    int64_t count) {
  return (moelora_columns){.rows = rows, .stride = stride, .by_token = true, .count = count};
}

/* Returns columns [begin, begin + count) of rows of `width` values in sorted order. */
static inline moelora_columns moelora_sorted_columns(const float *rows, int64_t width,
                                                     int64_t begin, int64_t count) {
  return (moelora_columns){.rows = rows + begin, .stride = width, .count = count};
}

/* Returns one slice of a shrink output. */
static inline moelora_columns moelora_rank_columns(const float *rows, const moelora_factors *lora,
                                                   int32_t slice) {
  const int64_t rank = lora->max_rank;
  return moelora_sorted_columns(rows, lora->num_slices * rank, slice * rank, rank);
}

/* gradient[l, e] (+)= sum over the rows of (l, e) of ranks^T wide, or its transpose. Only the
 * columns of `ranks` below the adapter's true rank are used. */
typedef struct moelora_grouped_product {
  const moelora_back_call *call;
  moelora_columns ranks, wide;
  bool transposed; /* gradient of B: its columns are ranks */
  const moelora_gradient *gradient;
} moelora_grouped_product;

/* Zeroes `count` gradients, unless they have no data or the call accumulates. num_pairs: number of
 * entries of call->pairs. */
void moelora_cpu_zero_gradients(const moelora_back_call *call, const moelora_gradient *gradients,
                                int32_t count, int64_t num_pairs);
/* Computes a product if its gradient has data; without accumulation, it must have been zeroed. */
void moelora_cpu_grouped_product(const moelora_grouped_product *product);

/* gradient[e] (+)= sum over the rows of expert e, each times weight[flat row], or 1 if NULL; does
 * nothing if the gradient has no data */
typedef struct moelora_row_sum {
  const moelora_back_call *call;
  moelora_columns rows;
  const float *weight;
  const moelora_gradient *gradient;
} moelora_row_sum;

void moelora_cpu_row_sum(const moelora_row_sum *sum);

/* ---- saved.c: the tensors that a layer's forward saves for its backward ---- */

/* Stores projection->xa to saved->shrink[which], by flat row in the dtype; zeros elsewhere. */
void moelora_cpu_save_shrink(const moelora_projection *projection, const moelora_saved_rows *saved,
                             int32_t which, const moelora_exec *exec);
/* Loads saved->shrink[which] to xa [P, slices, R], float32, by sorted position. */
void moelora_cpu_load_shrink(const moelora_back_call *call, const moelora_factors *lora,
                             const moelora_saved_rows *saved, int32_t which, float *xa);
/* Zeroes gate_up in skipped rows. */
void moelora_cpu_save_skipped(const moelora_experts_problem *problem, const moelora_sorted *sorted);
