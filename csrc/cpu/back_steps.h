/* back_steps.c: what the steps of a backward share, that of a layer or of a projection. Rows are
 * float32, rounded to the dtype of the call, in sorted order as in the forward. */
#ifndef MOELORA_CPU_BACK_STEPS_H
#define MOELORA_CPU_BACK_STEPS_H

#include "cpu/segments.h"

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

/* Allocates the arrays, for sums over up to `depth` rows or columns of weights, and `rank` of
 * factors A. */
void moelora_back_call_take(moelora_back_call *call, const moelora_gradient_pairs *pairs,
                            int64_t depth, int64_t rank, moelora_arena *arena);
/* Sorts the rows, finds their segments, and copies the table of sparse gradients, which other
 * threads may change; indices that no gradient has become -1. weighted: sets `weight`. */
void moelora_cpu_back_begin(moelora_back_call *call, const moelora_gradient_pairs *pairs,
                            bool weighted);

/* Rows of the dtype to load: flat row p is at (p / top_k) * stride[0] + (p % top_k) * stride[1]. */
typedef struct moelora_loaded_rows {
  const void *from;
  int64_t stride[2], columns;
  bool by_token;       /* to [M, columns], the first row of each token; otherwise in sorted order */
  const float *weight; /* [M], with which rows by token are multiplied, and rounded; NULL: 1 */
} moelora_loaded_rows;

void moelora_cpu_load_rows(const moelora_back_call *call, const moelora_loaded_rows *rows,
                           float *to);
/* Multiplies rank rows [P, slices, R] of rows with an adapter by call->weight, and rounds them. */
void moelora_cpu_weigh_ranks(const moelora_back_call *call, const moelora_factors *lora,
                             float *rows);

#endif
