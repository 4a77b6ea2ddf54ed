/* Runs the forward of a layer that saves for its backward, and the backward of layers and of
 * projections (ops.inc). */
#include "glue/ops.h"

/* Returns the number of routed rows, or 0 if the core refuses it later. */
static int64_t num_rows(const moelora_experts_args *args) {
  const moelora_tensor *ids = &args->routing.topk_ids;
  int64_t rows;
  return __builtin_mul_overflow(op_size(ids, 0), op_size(ids, 1), &rows) || rows > INT32_MAX ? 0
                                                                                             : rows;
}

/* Returns an empty tensor in the place of an output. */
static moelora_tensor nothing(moelora_op_context *ctx, moelora_dtype dtype) {
  const int64_t none = 0;
  op_output(ctx, dtype, 1, &none);
  return (moelora_tensor){0};
}

static moelora_tensor shrink_output(moelora_op_context *ctx, const moelora_experts_args *args,
                                    const moelora_lora *lora, int32_t ndim) {
  const moelora_dtype dtype = args->hidden_states.dtype;
  if (lora->num_slices == 0) {
    return nothing(ctx, dtype);
  }
  const int64_t rows = num_rows(args), rank = op_size(&lora->a[0], 2);
  const int64_t sizes[3] = {rows, ndim == 3 ? lora->num_slices : rank, rank};
  return op_output(ctx, dtype, ndim, sizes);
}

void op_run_saving(moelora_op_context *ctx, moelora_experts_args *args) {
  const moelora_dtype dtype = args->hidden_states.dtype;
  const int64_t out[2] = {op_size(&args->hidden_states, 0), op_size(&args->hidden_states, 1)};
  const int64_t gate_up[2] = {num_rows(args), op_weight_rows(&args->w13, &args->w13_layout)};
  args->out = op_output(ctx, dtype, 2, out);
  args->saved.gate_up = op_output(ctx, dtype, 2, gate_up);
  args->saved.w13_shrink = shrink_output(ctx, args, &args->w13_lora, 3);
  args->saved.w2_shrink = shrink_output(ctx, args, &args->w2_lora, 2);
  op_call_experts(ctx, args);
}

/* Bits of `wanted`, in the order of the outputs. */
enum {
  WANT_HIDDEN_STATES = 1,
  WANT_TOPK_WEIGHTS = 2,
  WANT_W13_LORA_A = 4,
  WANT_W13_LORA_B = 8,
  WANT_W2_LORA_A = 16,
  WANT_W2_LORA_B = 32,
  WANT_W13_BIAS = 64,
  WANT_W2_BIAS = 128,
};

/* Allocates a gradient of `like`, or an empty placeholder. */
static moelora_tensor gradient(moelora_op_context *ctx, const moelora_tensor *like, bool wanted,
                               bool float32) {
  return wanted && like->ndim
             ? op_output(ctx, float32 ? MOELORA_F32 : like->dtype, like->ndim, like->size)
             : nothing(ctx, MOELORA_F32);
}

/* Allocates gradients of factors: those of all A, then those of all B. */
static moelora_lora factor_gradients(moelora_op_context *ctx, const moelora_lora *like,
                                     int32_t slices, bool wants_a, bool wants_b, bool float32) {
  moelora_lora grads = {.num_slices = like->num_slices};
  for (int32_t i = 0; i < slices; i++) {
    grads.a[i] = gradient(ctx, &like->a[i], wants_a, float32);
  }
  for (int32_t i = 0; i < slices; i++) {
    grads.b[i] = gradient(ctx, &like->b[i], wants_b, float32);
  }
  return grads;
}

/* Returns how many slices of a projection have gradients from the caller; 0: none is requested. */
static int32_t given_slices(moelora_op_context *ctx, const char *name_a, int32_t num_a,
                            const char *name_b, int32_t num_b) {
  if (num_a && num_b && num_a != num_b) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s has %d slices, %s has %d", name_a, num_a, name_b,
            num_b);
  }
  return num_a ? num_a : num_b;
}

/* Bits of `wanted` of a projection, in the order of the outputs. */
enum { WANT_X = 1, WANT_WEIGHTS = 2, WANT_LORA_A = 4, WANT_LORA_B = 8, WANT_BIAS = 16 };

void op_run_gemm_backward(moelora_op_context *ctx, op_gemm_backward_args *op) {
  const moelora_gemm_args *forward = &op->args.forward;
  moelora_gemm_grads *grads = &op->args.grads;
  const int32_t wanted = op->wanted;
  grads->x = gradient(ctx, &forward->x, wanted & WANT_X, false);
  grads->topk_weights = gradient(ctx, &forward->routing.topk_weights, wanted & WANT_WEIGHTS, false);
  grads->lora = factor_gradients(ctx, &forward->lora, MOELORA_MAX_SLICES, wanted & WANT_LORA_A,
                                 wanted & WANT_LORA_B, op->float32);
  grads->bias = gradient(ctx, &forward->bias, wanted & WANT_BIAS, op->float32);
  op_call_gemm_backward(ctx, &op->args);
}

void op_run_gemm_backward_out(moelora_op_context *ctx, op_gemm_backward_args *op) {
  op->args.grads.lora.num_slices =
      given_slices(ctx, "grad_lora_a", op->num_a, "grad_lora_b", op->num_b);
  if (ctx->status == MOELORA_OK) {
    op_call_gemm_backward(ctx, &op->args);
  }
}

void op_run_backward(moelora_op_context *ctx, op_backward_args *op) {
  const moelora_experts_args *forward = &op->args.forward;
  moelora_experts_grads *grads = &op->args.grads;
  const int32_t wanted = op->wanted;
  grads->hidden_states = gradient(ctx, &forward->hidden_states, wanted & WANT_HIDDEN_STATES, false);
  grads->topk_weights =
      gradient(ctx, &forward->routing.topk_weights, wanted & WANT_TOPK_WEIGHTS, false);
  grads->w13_lora = factor_gradients(ctx, &forward->w13_lora, 2, wanted & WANT_W13_LORA_A,
                                     wanted & WANT_W13_LORA_B, op->float32);
  grads->w2_lora = factor_gradients(ctx, &forward->w2_lora, 1, wanted & WANT_W2_LORA_A,
                                    wanted & WANT_W2_LORA_B, op->float32);
  grads->w13_bias = gradient(ctx, &forward->w13_bias, wanted & WANT_W13_BIAS, op->float32);
  grads->w2_bias = gradient(ctx, &forward->w2_bias, wanted & WANT_W2_BIAS, op->float32);
  op_call_experts_backward(ctx, &op->args);
}

/* Overwrites gate_up, and so takes less memory than op_run_backward. */
void op_run_backward_over(moelora_op_context *ctx, op_backward_args *op) {
  op->args.overwrites_gate_up = true;
  op_run_backward(ctx, op);
}

void op_run_backward_out(moelora_op_context *ctx, op_backward_args *op) {
  moelora_experts_grads *grads = &op->args.grads;
  grads->w13_lora.num_slices =
      given_slices(ctx, "grad_w13_lora_a", op->w13_a, "grad_w13_lora_b", op->w13_b);
  grads->w2_lora.num_slices =
      given_slices(ctx, "grad_w2_lora_a", op->w2_a, "grad_w2_lora_b", op->w2_b);
  if (ctx->status == MOELORA_OK) {
    op_call_experts_backward(ctx, &op->args);
  }
}
