/* back_project.c: products of the backward with weights as they lie, y W instead of x W^T. Rows are
 * float32, rounded to the dtype of the call, in sorted order as in the forward. */
#ifndef MOELORA_CPU_BACK_PROJECT_H
#define MOELORA_CPU_BACK_PROJECT_H

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

/* Takes scratch for sums over up to `depth` rows or columns of weights, and `rank` of factors A. */
moelora_back_scratch *moelora_back_scratch_take(int64_t depth, int64_t rank,
                                                const moelora_exec *exec, moelora_arena *arena);

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
  const moelora_weights *w; /* data NULL: only factors */
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

#endif
