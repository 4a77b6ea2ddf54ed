/* Runs the forward of a layer that saves tensors for its backward, and the backwards of layers and
 * projections (ops.inc). */
#include "glue/ops.h"

/* Creates an empty tensor in place of an output; returns an absent tensor. */
static moelora_tensor nothing(moelora_op_context *ctx, moelora_dtype dtype) {
  const int64_t none = 0;
  op_output(ctx, dtype, 1, &none);
  return (moelora_tensor){0};
}

static moelora_tensor shrink_output(moelora_op_context *ctx, const moelora_experts_args *args,
                                    const moelora_lora *lora, int32_t ndim) {
  const moelora_dtype dtype = args->hidden_states.dtype;
  if (lora->num_slices == 0)
    return nothing(ctx, dtype);
  const int64_t rows = op_num_rows(&args->routing.topk_ids), rank = lora->a[0].size[2];
  const int64_t sizes[3] = {rows, ndim == 3 ? lora->num_slices : rank, rank};
  return op_output(ctx, dtype, ndim, sizes);
}

void op_run_saving(moelora_op_context *ctx, moelora_experts_args *args) {
  const moelora_dtype dtype = args->hidden_states.dtype;
  const int64_t gate_up[2] = {op_num_rows(&args->routing.topk_ids),
                              op_weight_rows(&args->w13, &args->w13_layout)};
  args->out = op_output(ctx, dtype, 2, args->hidden_states.size);
  args->saved.gate_up = op_output(ctx, dtype, 2, gate_up);
  args->saved.w13_shrink = shrink_output(ctx, args, &args->w13_lora, 3);
  args->saved.w2_shrink = shrink_output(ctx, args, &args->w2_lora, 2);
  op_call_experts(ctx, args);
}

/* Allocates the gradient of `like`, or an empty output if `like` is absent or its bit is 0. */
static moelora_tensor gradient(moelora_op_context *ctx, op_returned *returned,
                               const moelora_tensor *like, bool float32) {
  const bool wanted = returned->wanted & 1;
  returned->wanted >>= 1;
  return wanted && like->ndim
             ? op_output(ctx, float32 ? MOELORA_F32 : like->dtype, like->ndim, like->size)
             : nothing(ctx, MOELORA_F32);
}

/* Allocates gradients of factors: those of A of all slices, then those of B. */
static moelora_lora factor_gradients(moelora_op_context *ctx, op_returned *returned,
                                     const moelora_lora *like, int32_t slices) {
  moelora_lora grads = {.num_slices = like->num_slices};
  for (int32_t of_b = 0; of_b < 2; of_b++) {
    const op_returned both = *returned;
    for (int32_t i = 0; i < slices; i++) {
      *returned = both; /* one bit for all slices */
      (of_b ? grads.b : grads.a)[i] =
          gradient(ctx, returned, of_b ? &like->b[i] : &like->a[i], both.float32);
    }
  }
  return grads;
}

void op_run_gemm_backward(moelora_op_context *ctx, op_gemm_backward_args *op) {
  const moelora_gemm_args *forward = &op->args.forward;
  moelora_gemm_grads *grads = &op->args.grads;
  op_returned *returned = &op->returned;
  grads->x = gradient(ctx, returned, &forward->x, false);
  grads->topk_weights = gradient(ctx, returned, &forward->routing.topk_weights, false);
  grads->lora = factor_gradients(ctx, returned, &forward->lora, MOELORA_MAX_SLICES);
  grads->bias = gradient(ctx, returned, &forward->bias, returned->float32);
  op_call_gemm_backward(ctx, &op->args);
}

void op_run_backward(moelora_op_context *ctx, op_backward_args *op) {
  const moelora_experts_args *forward = &op->args.forward;
  moelora_experts_grads *grads = &op->args.grads;
  op_returned *returned = &op->returned;
  grads->hidden_states = gradient(ctx, returned, &forward->hidden_states, false);
  grads->topk_weights = gradient(ctx, returned, &forward->routing.topk_weights, false);
  grads->w13_lora = factor_gradients(ctx, returned, &forward->w13_lora, 2);
  grads->w2_lora = factor_gradients(ctx, returned, &forward->w2_lora, 1);
  grads->w13_bias = gradient(ctx, returned, &forward->w13_bias, returned->float32);
  grads->w2_bias = gradient(ctx, returned, &forward->w2_bias, returned->float32);
  op_call_experts_backward(ctx, &op->args);
}

/* Overwrites gate_up, and therefore needs less memory than op_run_backward. */
void op_run_backward_over(moelora_op_context *ctx, op_backward_args *op) {
  op->args.overwrites_gate_up = true;
  op_run_backward(ctx, op);
}
