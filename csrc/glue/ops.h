/* Implementations of the operators of ops.inc, called with unpacked arguments: RUN(ctx, args) of
 * each row. They create the outputs and record failures in the context. */
#ifndef MOELORA_GLUE_OPS_H
#define MOELORA_GLUE_OPS_H

#include "core/backend.h"
#include "glue/op_context.h"

/* Arguments of operators that need more than those of the core. */
typedef struct op_unpack_args {
  moelora_unpack_quantized_args args;
  int32_t columns, dtype; /* dtype: 0 is bfloat16, 1 float16 */
} op_unpack_args;

typedef struct op_backward_args {
  moelora_experts_backward_args args;
  int32_t wanted; /* bit mask in the order of the outputs; the two factors of w13 share a bit */
  bool float32;   /* gradients of factors and biases */
  int32_t w13_a, w13_b, w2_a,
      w2_b; /* number of gradients that the caller passes for the slices of each factor */
} op_backward_args;

typedef struct op_gemm_backward_args {
  moelora_gemm_backward_args args;
  int32_t wanted;       /* bit mask: x, topk_weights, lora_a, lora_b, bias */
  bool float32;         /* gradients of factors and the bias */
  int32_t num_a, num_b; /* number of gradients that the caller passes for slices */
} op_gemm_backward_args;

/* op_call_<NAME>: prepares and runs an operator of moelora.h. Without more to do, a row's RUN. */
#define OPERATOR(NAME, ...)                                                                        \
  void op_call_##NAME(moelora_op_context *ctx, moelora_##NAME##_args *args);
#include "core/operators.inc"

#define OP(NAME, ARGS, RUN) void RUN(moelora_op_context *ctx, ARGS *args);
#include "glue/ops.inc"

static inline int64_t op_size(const moelora_tensor *tensor, int32_t dim) {
  return dim < tensor->ndim ? tensor->size[dim] : 0;
}

/* ops.c: output rows of w: [E, N, K], packed [E, N/64, K/64, 64, 64], or tiles. */
int64_t op_weight_rows(const moelora_tensor *w, const moelora_layout *layout);

#endif
