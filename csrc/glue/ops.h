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

#define OP(NAME, ARGS, RUN) void RUN(moelora_op_context *ctx, ARGS *args);
#include "glue/ops.inc"

static inline int64_t op_size(const moelora_tensor *tensor, int32_t dim) {
  return dim < tensor->ndim ? tensor->size[dim] : 0;
}

#endif
