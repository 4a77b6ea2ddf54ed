/* gradients.c: gradients of factors and biases. Rows are float32, rounded to the dtype of the call.
 */
#ifndef MOELORA_CPU_GRADIENTS_H
#define MOELORA_CPU_GRADIENTS_H

#include "cpu/back_project.h"

/* Says which columns of a layer's rows a product reads. */
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

#endif
