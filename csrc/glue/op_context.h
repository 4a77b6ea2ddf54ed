/* Converts between torch's boxed calls and moelora's structs. A moelora_op_context lives for one
 * call of an operator: it owns every handle of the call and records the first failure. op_close
 * releases everything, and is the only function that may raise.
 *
 * An absent optional tensor is None, or a 1-D tensor without elements of any dtype and device.
 *
 * Tensors on torch's meta device have sizes but no memory. A call on them performs all checks of a
 * CPU call, computes nothing, and returns meta tensors. */
#pragma once

#include "glue/abi.h"
#include "moelora.h"

/* fused_experts_lora_backward_out has 22 tensors, 8 lists and a workspace. */
#define OP_MAX_HANDLES (24 + 8 * MOELORA_MAX_SLICES)
#define OP_MAX_OUTPUTS 11

typedef struct moelora_op_context {
  const char *op;
  moelora_exec exec;
  int32_t device_type; /* torch's code, of the first tensor; -1: no tensor yet */
  int32_t num_handles;
  AtenTensorHandle handles[OP_MAX_HANDLES];
  int32_t num_outputs;
  AtenTensorHandle outputs[OP_MAX_OUTPUTS];
  CUDAGuardHandle guard;
  moelora_status status;
} moelora_op_context;

void op_open(moelora_op_context *ctx, const char *op);

/* Convert arguments; each call takes ownership of its handle, also after a failure. */
moelora_tensor op_tensor(moelora_op_context *ctx, const char *name, StableIValue value);
moelora_tensor op_optional(moelora_op_context *ctx, const char *name, StableIValue value);
/* Requires lists of equal length; either: one of them may be empty. */
moelora_lora op_lora(moelora_op_context *ctx, const char *name_a, StableIValue a,
                     const char *name_b, StableIValue b, bool either);
/* Unpacks a list of at most MOELORA_MAX_SLICES tensors and returns its length. */
int32_t op_tensors(moelora_op_context *ctx, const char *name, StableIValue value,
                   moelora_tensor *out);
int32_t op_int(moelora_op_context *ctx, const char *name, StableIValue value);
double op_float(StableIValue value);
/* Reads an integer tensor with one element in host memory; returns 0 if it is absent, and in a meta
 * call. */
int32_t op_host_int(moelora_op_context *ctx, const char *name, StableIValue value);
/* Fails if there are tokens and factors but no mapping from tokens to adapters: the core would run
 * such a call without adapters. */
void op_need_mapping(moelora_op_context *ctx, const moelora_tensor *topk_ids,
                     const moelora_tensor *token_lora_mapping, const moelora_lora *lora,
                     const char *name_a);

/* Selects stream and threads, after the last argument. Returns false if anything has failed. */
bool op_ready(moelora_op_context *ctx);
/* Allocates a contiguous tensor, which the operator returns if it succeeds. */
moelora_tensor op_output(moelora_op_context *ctx, moelora_dtype dtype, int32_t ndim,
                         const int64_t *sizes);
/* Allocates a workspace. Returns false after a failure and in a meta call: do not compute then. */
bool op_workspace(moelora_op_context *ctx, size_t bytes);
/* Allocates the workspace of a prepared call and runs it. */
void op_run(moelora_op_context *ctx, const moelora_call *call);
bool op_is_meta(const moelora_op_context *ctx);
/* Records a failure, unless there was one: later failures are usually consequences of the first. */
void op_fail(moelora_op_context *ctx, moelora_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Records a status of the core; returns whether it is MOELORA_OK. */
bool op_check(moelora_op_context *ctx, moelora_status status);

/* Releases what the context owns; writes the outputs to `stack`, or raises the first failure. */
void op_close(moelora_op_context *ctx, StableIValue *stack);

/* This thread's last failure, as it was raised. A caller compares `number` before and after a call
 * to find out whether the call raised it. */
typedef struct op_error {
  uint64_t number; /* failures so far; 0: none */
  moelora_status status;
  char text[1024];
} op_error;

const op_error *op_last_error(void);

enum { MOELORA_NAMESPACE_BYTES = 128 };

/* register.c: defines and registers the operators of ops.inc in torch's namespace of this name, and
 * in NAME_meta. Returns NULL, or what went wrong. */
const char *moelora_register_ops(const char *name);
