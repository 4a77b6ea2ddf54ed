/* Small kernels that copy or zero rows of a layer where the kernel of a projection cannot. */
#pragma once

#include "cuda/launch/launch.h"

/* Describes to[p] = from[p], times its routing weight if `weighted`, rounded; 0 in skipped rows. */
typedef struct moelora_row_copy {
  const void *from; /* [M, top_k, columns] */
  int64_t from_stride[2];
  bool weighted;
  void *to; /* [P, columns] */
  int64_t to_stride;
  int64_t columns;
} moelora_row_copy;

/* Copies rows; `routes` must be resolved. */
moelora_status moelora_cuda_copy_rows(const moelora_row_copy *c, const moelora_routes *routes,
                                      moelora_dtype dtype, const moelora_exec *exec);
/* Zeroes the skipped rows of `out` [M, top_k, columns], which has 16-bit elements. */
moelora_status moelora_cuda_zero_skipped(const moelora_routes *routes, void *out,
                                         const int64_t stride[2], int64_t columns,
                                         const moelora_exec *exec);

/* Describes a copy of a projection's shrink outputs from positions to flat rows. */
typedef struct moelora_saved_shrink {
  int32_t slices, max_rank;
  const void *xa; /* [position, slices, xa_slice] */
  int64_t xa_slice;
  int32_t deferred_exponent; /* d: the copy is 2^d times xa; see moelora_deferred_exponent() */
  void *to;                  /* [P, slices, max_rank]; NULL: none */
  int64_t stride[2];
} moelora_saved_shrink;

/* Tensors that a forward saves besides w13's outputs: shrink outputs, zero beyond an adapter's true
 * rank and in rows without an adapter. Skipped rows are zero in all saved tensors. */
typedef struct moelora_save_launch {
  moelora_blocks blocks; /* positions, packed_ranks */
  int64_t num_rows;      /* P */
  moelora_before_activation gate_up;
  int64_t columns; /* columns of gate_up */
  moelora_saved_shrink projection[2];
} moelora_save_launch;

moelora_status moelora_cuda_save_rows(const moelora_save_launch *s, const moelora_exec *exec);
