/* Arguments of the delta kernels. Strides count elements. */
#pragma once

#include "cuda/launch/launch.h"

/* Routed rows with their expert and adapter. Kernels process them in this order, in windows of
 * `window` rows. Each block of a list is cut into windows separately, so that a window has one
 * (expert, adapter) pair. */
typedef struct delta_rows {
  moelora_delta_order order;
  int32_t window;
  int32_t max_rank;
  moelora_routes routes; /* of moelora_cuda_take_routes: ids are mapped, -1 if skipped */
  moelora_list_blocks lists;
  /* MOELORA_SORTED: from moelora_sorted_rows */
  const int32_t *row, *expert, *adapter;
  const int32_t *count;
  const moelora_segment *segments; /* NULL: too few rows to list segments */
} delta_rows;

/* xa[p, slice] = round(s x[p / x_divisor] A[l, e]^T), zero from the true rank to max_rank. */
typedef struct delta_shrink {
  delta_rows rows;
  const void *x; /* [P / x_divisor, k] */
  int64_t x_stride;
  int32_t x_divisor;
  int32_t k;
  moelora_factors lora;
  const float *scalings; /* [max_loras]; NULL: 1 */
  bool xa_vectors;       /* xa allows 16-byte accesses */
  void *xa;
  int64_t xa_stride[3]; /* slice, token, choice */
} delta_shrink;

/* z[p] = xa[p, slice] B[l, e]^T from the first column of its slice; then silu, weight, addition. */
typedef struct delta_expand {
  delta_rows rows;
  const void *xa;
  int64_t xa_stride[3]; /* slice, token, choice */
  moelora_factors lora;
  bool silu_and_mul;
  const float *topk_weights; /* NULL: rows are not weighted */
  bool add;                  /* out += z */
  void *out;
  int64_t out_stride[2]; /* token, choice */
  uint8_t *written;      /* [P], set to 1 for the rows written, or NULL */
  bool after_shrink;     /* launched directly after the shrink of the same rows: only xa may be
                            unfinished */
} delta_expand;

/* Defined in windows.cu and expand.cu, which set the window of `rows`. */
moelora_status delta_launch_shrink(const delta_shrink *shrink, const moelora_shrink_plan *plan,
                                   const moelora_exec *exec);
moelora_status delta_launch_expand(const delta_expand *expand, const moelora_expand_plan *plan,
                                   const moelora_exec *exec);
