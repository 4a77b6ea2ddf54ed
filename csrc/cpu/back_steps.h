/* back_steps.c: steps that the backwards of a layer and of a projection share. Rows are float32,
 * rounded to the dtype of the call, in the sorted order of the forward. */
#pragma once

#include "cpu/segments.h"

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
