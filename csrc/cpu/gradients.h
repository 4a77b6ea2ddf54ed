/* gradients.c: gradients of factors and biases. */
#pragma once

#include "cpu/back_steps.h"

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
