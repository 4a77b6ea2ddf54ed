/* The backward of a layer on the GPU; see backward.cu. */
#pragma once

#include "cuda/launch/launch.h"

/* Operand of routing_weights.cu: row p / divisor belongs to flat row p. */
typedef struct moelora_divided_rows {
  const void *data;
  int64_t stride, columns;
  int32_t divisor;
} moelora_divided_rows;

typedef struct moelora_weight_gradients {
  const int32_t *experts; /* [P] -1: skipped */
  int64_t num_rows;       /* P */
  int32_t top_k;
  const float *dt;          /* [position, parts]; NULL: not a term */
  const int32_t *positions; /* [P] */
  int32_t parts;
  const void *bias; /* [E, columns of dout]; NULL: not a term */
  int64_t bias_stride_e;
  moelora_divided_rows dout;
  const void *dz; /* [P, columns of x]; NULL: not a term */
  moelora_divided_rows x;
  float *out; /* [M, top_k] */
  int64_t out_stride[2];
} moelora_weight_gradients;

moelora_status moelora_cuda_weight_gradients(const moelora_weight_gradients *s, moelora_dtype dtype,
                                             const moelora_exec *exec);

/* zero.cu: zeroes a gradient; of a sparse one, only the matrices whose index is in `pairs`. */
moelora_status moelora_cuda_zero_gradient(const moelora_gradient *gradient, const int32_t *pairs,
                                          int64_t num_pairs, const moelora_exec *exec);
