/* Runs the operators of deltas and vLLM's alignment (ops.inc). Most run one moelora_delta, which
 * writes to the first tensor. They differ in steps (shrink, expand) and in the source of rows. */
#include "glue/ops.h"

/* Without sorted_token_ids, expert_ids takes the place of topk_ids. */
void op_run_listed(moelora_op_context *ctx, moelora_delta_args *args) {
  if (!args->lists.sorted_token_ids.data) {
    args->routing.topk_ids = args->lists.expert_ids;
    args->lists.expert_ids = (moelora_tensor){0};
  }
  args->num_tokens = args->routing.topk_weights.size[0];
  op_call_delta(ctx, args);
}

/* Without add_inputs, zeroes `out` first, for rows without an adapter. */
void op_run_routed(moelora_op_context *ctx, moelora_delta_args *args) {
  moelora_call call;
  if (!op_check(ctx, moelora_prepare_delta(args, &ctx->exec, &call)) ||
      !op_workspace(ctx, call.workspace_bytes))
    return;
  if (!args->add_inputs && aoti_torch_zero_(ctx->handles[0])) {
    op_fail(ctx, MOELORA_DEVICE_ERROR, "cannot zero %s", args->out.name);
    return;
  }
  op_check(ctx, moelora_run(&call, &ctx->exec));
}

void op_run_gate_up_b(moelora_op_context *ctx, moelora_delta_args *args) {
  args->silu_and_mul = true;
  op_call_delta(ctx, args);
}

void op_run_combine(moelora_op_context *ctx, moelora_delta_args *args) {
  args->mul_routed_weight = args->add_inputs = true;
  op_call_delta(ctx, args);
}

void op_run_align_lists(moelora_op_context *ctx, moelora_align_lists_args *args) {
  args->lists.num_active = (int32_t)args->lists.lora_ids.size[0];
  op_call_align_lists(ctx, args);
}
