/* Small kernels over rows of a layer, whose inputs and outputs do not fit into a projection. */
#ifndef MOELORA_CUDA_ROWS_H
#define MOELORA_CUDA_ROWS_H

#include "cuda/launch/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[m] = round(weight[m, 0] x[m]), for contiguous rows of `k` elements. */
moelora_status moelora_cuda_scale_rows(const void *x, int64_t x_stride,
                                       const moelora_routes *routes, int64_t k, moelora_dtype dtype,
                                       void *out, const moelora_exec *exec);

/* Copies a projection's shrink outputs from positions to flat rows. */
typedef struct moelora_saved_shrink {
  int32_t slices, max_rank;
  const void *xa; /* [position, slices, xa_slice] */
  int64_t xa_slice;
  int32_t missing; /* bf16: xa is too small by 2^missing (INT4); otherwise 0 */
  void *to;        /* [P, slices, max_rank]; NULL: none */
  int64_t stride[2];
} moelora_saved_shrink;

/* Tensors that a forward saves besides w13's outputs: shrink outputs, zero beyond an adapter's
 * true rank and in rows without an adapter; and zeros in all tensors for skipped rows. */
typedef struct moelora_save_launch {
  moelora_blocks blocks; /* positions, packed_ranks */
  int64_t num_rows;      /* P */
  moelora_before_activation gate_up;
  int64_t columns; /* columns of gate_up */
  moelora_saved_shrink projection[2];
} moelora_save_launch;

moelora_status moelora_cuda_save_rows(const moelora_save_launch *s, const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
