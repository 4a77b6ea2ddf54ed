/* What an operator of ops.inc does once its arguments are unpacked: RUN(ctx, args) of each row. It
 * makes the outputs, and notes what fails in the context. */
#ifndef MOELORA_GLUE_OPS_H
#define MOELORA_GLUE_OPS_H

#include "glue/op_context.h"

/* Arguments of operators that have no struct in moelora.h; dtype: 0 is bfloat16, 1 float16. */
typedef struct op_prepack_args {
  moelora_tensor w;
} op_prepack_args;

typedef struct op_pack_args {
  moelora_quantized w;
  moelora_layout layout;
  int32_t dtype;
} op_pack_args;

typedef struct op_unpack_args {
  moelora_tensor tiles;
  moelora_layout layout;
  int32_t columns, dtype;
} op_unpack_args;

typedef struct op_backward_args {
  moelora_experts_backward_args args;
  int32_t wanted; /* bits, in the order of what is returned; both of w13's factors share theirs */
  bool float32;   /* gradients of factors and biases */
  int32_t w13_a, w13_b, w2_a, w2_b; /* gradients given for the slices of a factor */
} op_backward_args;

#define OP(NAME, ARGS, RUN) void RUN(moelora_op_context *ctx, ARGS *args);
#include "glue/ops.inc"

static inline int64_t op_size(const moelora_tensor *tensor, int32_t dim) {
  return dim < tensor->ndim ? tensor->size[dim] : 0;
}

/* ops.c: rows of output that w [E, N, K], packed [E, N/64, K/64, 64, 64], or in tiles stands for.
 */
int64_t op_weight_rows(const moelora_tensor *w, const moelora_layout *layout);

#endif
