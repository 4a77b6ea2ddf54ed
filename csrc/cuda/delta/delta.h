/* What the host side of the adapters' delta hands to its kernels. Strides count elements. */
#ifndef MOELORA_CUDA_DELTA_H
#define MOELORA_CUDA_DELTA_H

#include "cuda/launch/launch.h"

/* Routed rows and what each of them carries. Kernels go over windows of `window` rows in this
 * order; a list is cut into windows block by block, so that each of these knows one pair. */
typedef struct delta_rows {
  moelora_delta_order order;
  int32_t window;
  int32_t max_rank;
  moelora_routes routes; /* resolved */
  moelora_list_blocks lists;
  /* MOELORA_SORTED: of moelora_sorted_rows */
  const int32_t *row, *expert, *adapter;
  const int32_t *count;
  const moelora_segment *segments; /* NULL: not listed, too short */
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

/* z[p] = xa[p, slice] B[l, e]^T in columns slice * slice_n on; then silu, weight and sum. */
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
  uint8_t *written;      /* [P], set to 1 for rows that are; NULL: not wanted */
  bool after_shrink;     /* queued right behind the shrink of the same rows: all but xa is there */
} delta_expand;

#ifdef __cplusplus
extern "C" {
#endif

/* windows.cu, expand.cu; both set the window of `rows`. */
moelora_status delta_launch_shrink(const delta_shrink *shrink, const moelora_shrink_plan *plan,
                                   const moelora_exec *exec);
moelora_status delta_launch_expand(const delta_expand *expand, const moelora_expand_plan *plan,
                                   const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
