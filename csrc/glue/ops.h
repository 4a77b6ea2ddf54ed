/* Implementations of the operators of ops.inc, RUN(ctx, args) of each row, for unpacked arguments.
 * They create the outputs and record failures in the context. */
#pragma once

#include "core/backend.h"
#include "glue/op_context.h"

/* Arguments of operators that have more arguments than their function in moelora.h. */
typedef struct op_unpack_args {
  moelora_unpack_quantized_args args;
  int32_t columns, dtype; /* dtype: 0 is bfloat16, 1 float16 */
} op_unpack_args;

/* Which gradients a backward returns. */
typedef struct op_returned {
  int32_t wanted; /* bit mask, in the order of outputs; all slices of a factor share a bit */
  bool float32;   /* gradients of factors and biases are float32 */
} op_returned;

typedef struct op_backward_args {
  moelora_experts_backward_args args;
  op_returned returned;
} op_backward_args;

typedef struct op_gemm_backward_args {
  moelora_gemm_backward_args args;
  op_returned returned;
} op_gemm_backward_args;

/* op_call_<NAME> prepares and runs an operator of moelora.h; also the RUN of some rows. */
#define OPERATOR(NAME, ...)                                                                        \
  void op_call_##NAME(moelora_op_context *ctx, moelora_##NAME##_args *args);
#include "core/operators.inc"

#define OP(NAME, ARGS, RUN) void RUN(moelora_op_context *ctx, ARGS *args);
#include "glue/ops.inc"

/* Returns the number of routed rows, or 0 for a number that the core will refuse. */
static inline int64_t op_num_rows(const moelora_tensor *topk_ids) {
  int64_t rows;
  const bool overflows = __builtin_mul_overflow(topk_ids->size[0], topk_ids->size[1], &rows);
  return overflows || rows > INT32_MAX ? 0 : rows;
}

/* ops.c: returns N of w: [E, N, K], packed [E, N/64, K/64, 64, 64], or tiles. */
int64_t op_weight_rows(const moelora_tensor *w, const moelora_layout *layout);
