/* The operators that add adapters alone. Each writes to its first tensor; all but two are one
 * moelora_delta, and differ in which halves of an adapter they run and in who says where rows go.
 */
#include "glue/op_context.h"

/* vLLM's words: without sorted_token_ids, expert_ids is [M, top_k]. */
#define LISTS(BLOCK_SIZE)                                                                          \
  "Tensor topk_weights, Tensor sorted_token_ids, Tensor expert_ids, Tensor "                       \
  "num_tokens_post_padded, Tensor token_lora_mapping, int top_k_num, Tensor lora_ids, Tensor "     \
  "num_active_loras, Tensor adapter_enabled, int num_experts, int " BLOCK_SIZE
/* moelora's. */
#define ROUTING                                                                                    \
  "Tensor topk_weights, Tensor topk_ids, Tensor token_lora_mapping, Tensor lora_ranks, Tensor "    \
  "lora_scalings, Tensor adapter_enabled, Tensor expert_map, int num_experts"
/* SGLang's, for a stage without and with weights. */
#define STAGE                                                                                      \
  "Tensor expert_ids, Tensor weight_indices, Tensor lora_ranks, Tensor adapter_enabled, int "      \
  "num_experts" MOELORA_INVARIANT ") -> ()"
#define COMBINE                                                                                    \
  "Tensor expert_ids, Tensor routing_weights, Tensor weight_indices, Tensor lora_ranks, Tensor "   \
  "scalings, Tensor adapter_enabled, int num_experts" MOELORA_INVARIANT ") -> ()"
#define FINISH ", bool mul_routed_weight, bool add_inputs"

typedef enum words { LISTED, ROUTED, STAGED } words;

/* What one of these operators is made of. */
typedef struct delta_form {
  const char *op;
  const char *written, *read, *lora_a, *lora_b; /* as the schema calls them */
  words words;
  bool shrink, expand; /* with both, h stays inside */
  bool silu_and_mul;
  bool combine; /* weighted and added */
  bool whole;   /* without add_inputs, rows without an adapter become 0 */
} delta_form;

/* These take `at`, the place of the first of their arguments, and return the place after them. */
static int take_lists(moelora_op_context *ctx, const StableIValue *stack, int at,
                      moelora_delta_args *args) {
  moelora_lists *lists = &args->lists;
  args->routing.topk_weights = op_tensor(ctx, "topk_weights", stack[at++]);
  lists->sorted_token_ids = op_optional(ctx, "sorted_token_ids", stack[at++]);
  const bool naive = lists->sorted_token_ids.data == NULL;
  *(naive ? &args->routing.topk_ids : &lists->expert_ids) =
      op_tensor(ctx, "expert_ids", stack[at++]);
  lists->num_tokens_post_padded = op_optional(ctx, "num_tokens_post_padded", stack[at++]);
  args->adapters.token_lora_mapping = op_optional(ctx, "token_lora_mapping", stack[at++]);
  args->top_k = op_int(ctx, "top_k_num", stack[at++]);
  args->num_tokens = args->routing.topk_weights.ndim ? args->routing.topk_weights.size[0] : 0;
  lists->lora_ids = op_optional(ctx, "lora_ids", stack[at++]);
  lists->num_active = op_host_int(ctx, "num_active_loras", stack[at++]);
  args->adapters.adapter_enabled = op_optional(ctx, "adapter_enabled", stack[at++]);
  args->num_experts = op_int(ctx, "num_experts", stack[at++]);
  lists->block_size = op_int(ctx, "block_size", stack[at++]);
  return at;
}

static int take_routing(moelora_op_context *ctx, const StableIValue *stack, int at,
                        moelora_delta_args *args) {
  args->routing.topk_weights = op_optional(ctx, "topk_weights", stack[at++]);
  args->routing.topk_ids = op_tensor(ctx, "topk_ids", stack[at++]);
  args->adapters.token_lora_mapping = op_optional(ctx, "token_lora_mapping", stack[at++]);
  args->adapters.lora_ranks = op_optional(ctx, "lora_ranks", stack[at++]);
  args->adapters.lora_scalings = op_optional(ctx, "lora_scalings", stack[at++]);
  args->adapters.adapter_enabled = op_optional(ctx, "adapter_enabled", stack[at++]);
  args->routing.expert_map = op_optional(ctx, "expert_map", stack[at++]);
  args->num_experts = op_int(ctx, "num_experts", stack[at++]);
  return at;
}

static int take_stage(moelora_op_context *ctx, const StableIValue *stack, int at, bool combine,
                      moelora_routing *routing, moelora_adapters *adapters, int32_t *num_experts) {
  routing->topk_ids = op_tensor(ctx, "expert_ids", stack[at++]);
  if (combine) {
    routing->topk_weights = op_tensor(ctx, "routing_weights", stack[at++]);
  }
  adapters->token_lora_mapping = op_tensor(ctx, "weight_indices", stack[at++]);
  adapters->lora_ranks = op_optional(ctx, "lora_ranks", stack[at++]);
  if (combine) {
    adapters->lora_scalings = op_optional(ctx, "scalings", stack[at++]);
  }
  adapters->adapter_enabled = op_optional(ctx, "adapter_enabled", stack[at++]);
  *num_experts = op_int(ctx, "num_experts", stack[at++]);
  return at;
}

static void take_arguments(const delta_form *form, moelora_op_context *ctx,
                           const StableIValue *stack, moelora_delta_args *args) {
  int at = 0;
  *(form->expand ? &args->out : &args->h) = op_tensor(ctx, form->written, stack[at++]);
  *(form->shrink ? &args->x : &args->h) = op_tensor(ctx, form->read, stack[at++]);
  if (form->shrink && form->expand) {
    args->lora = op_lora(ctx, form->lora_a, stack[at], form->lora_b, stack[at + 1]);
    at += 2;
  } else {
    args->lora.num_slices = op_tensors(ctx, form->shrink ? form->lora_a : form->lora_b, stack[at++],
                                       form->shrink ? args->lora.a : args->lora.b);
  }
  if (form->words == STAGED) {
    at = take_stage(ctx, stack, at, form->combine, &args->routing, &args->adapters,
                    &args->num_experts);
    args->mul_routed_weight = args->add_inputs = form->combine;
  } else {
    at = form->words == LISTED ? take_lists(ctx, stack, at, args)
                               : take_routing(ctx, stack, at, args);
    if (form->expand) {
      args->mul_routed_weight = stack[at++] != 0;
      args->add_inputs = stack[at++] != 0;
      args->out_offset = form->words == LISTED ? (int64_t)stack[at++] : 0;
    }
  }
  ctx->exec.batch_invariant = stack[at] != 0;
}

static void run_delta(delta_form form, StableIValue *stack) {
  moelora_op_context ctx;
  op_open(&ctx, form.op);
  moelora_delta_args args = {.silu_and_mul = form.silu_and_mul};
  take_arguments(&form, &ctx, stack, &args);
  if (form.words == ROUTED) {
    op_need_mapping(&ctx, &args.routing.topk_ids, &args.adapters.token_lora_mapping, &args.lora,
                    form.lora_a);
  }
  moelora_call call;
  if (op_ready(&ctx) && op_check(&ctx, moelora_prepare_delta(&args, &ctx.exec, &call)) &&
      op_workspace(&ctx, call.workspace_bytes)) {
    if (form.whole && !args.add_inputs && aoti_torch_zero_(ctx.handles[0])) {
      op_fail(&ctx, MOELORA_DEVICE_ERROR, "cannot zero %s", form.written);
    } else {
      op_check(&ctx, moelora_run(&call, &ctx.exec));
    }
  }
  op_close(&ctx, stack);
}

#define DELTA_OP(NAME, WRITTEN, READ, A, B, ...)                                                   \
  static void NAME(StableIValue *stack, uint64_t inputs, uint64_t outputs) {                       \
    (void)inputs, (void)outputs;                                                                   \
    run_delta((delta_form){#NAME, WRITTEN, READ, A, B, __VA_ARGS__}, stack);                       \
  }

#define VLLM_H "a_intermediate_cache1"
#define VLLM_X "qcurr_hidden_states"
DELTA_OP(fused_moe_lora, "output", VLLM_X, "lora_a_stacked", "lora_b_stacked", LISTED,
         .shrink = true, .expand = true)
DELTA_OP(fused_moe_lora_shrink, VLLM_H, VLLM_X, "lora_a_stacked", "", LISTED, .shrink = true)
DELTA_OP(fused_moe_lora_expand, "output", VLLM_H, "", "lora_b_stacked", LISTED, .expand = true)
DELTA_OP(moe_lora_gate_up_delta, "out", "x", "lora_a", "lora_b", ROUTED, .shrink = true,
         .expand = true, .whole = true)
DELTA_OP(moe_lora_down_delta, "out", "x", "lora_a", "lora_b", ROUTED, .shrink = true,
         .expand = true, .whole = true)
DELTA_OP(moe_lora_a, "out", "x", "lora_a", "", STAGED, .shrink = true)
DELTA_OP(moe_lora_gate_up_b, "out", "intermediate_a", "", "gate_up_b", STAGED, .expand = true,
         .silu_and_mul = true)
DELTA_OP(moe_lora_down_combine, "output", "activated", "down_a", "down_b", STAGED, .shrink = true,
         .expand = true, .combine = true)

static void moe_lora_fused(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "moe_lora_fused");
  moelora_mlp_delta_args args = {0};
  args.out = op_tensor(&ctx, "output", stack[0]);
  args.hidden_states = op_tensor(&ctx, "x", stack[1]);
  args.gate_up = op_lora(&ctx, "gate_up_a", stack[2], "gate_up_b", stack[3]);
  args.down = op_lora(&ctx, "down_a", stack[4], "down_b", stack[5]);
  const int at = take_stage(&ctx, stack, 6, true, &args.routing, &args.adapters, &args.num_experts);
  ctx.exec.batch_invariant = stack[at] != 0;
  moelora_call call;
  if (op_ready(&ctx) && op_check(&ctx, moelora_prepare_mlp_delta(&args, &ctx.exec, &call))) {
    op_run(&ctx, &call);
  }
  op_close(&ctx, stack);
}

static void moe_lora_align_block_size_out(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "moe_lora_align_block_size");
  moelora_align_lists_args args = {0};
  args.lists.sorted_token_ids = op_tensor(&ctx, "sorted_token_ids", stack[0]);
  args.lists.expert_ids = op_tensor(&ctx, "expert_ids", stack[1]);
  args.lists.num_tokens_post_padded = op_tensor(&ctx, "num_tokens_post_pad", stack[2]);
  args.routing.topk_ids = op_tensor(&ctx, "topk_ids", stack[3]);
  args.adapters.token_lora_mapping = op_tensor(&ctx, "token_lora_mapping", stack[4]);
  args.num_experts = op_int(&ctx, "num_experts", stack[5]);
  args.lists.block_size = op_int(&ctx, "block_size", stack[6]);
  args.max_loras = op_int(&ctx, "max_loras", stack[7]);
  args.adapters.adapter_enabled = op_optional(&ctx, "adapter_enabled", stack[8]);
  args.lists.lora_ids = op_tensor(&ctx, "lora_ids", stack[9]);
  args.routing.expert_map = op_optional(&ctx, "expert_map", stack[10]);
  args.lists.num_active = (int32_t)args.lists.lora_ids.size[0];
  moelora_call call;
  if (op_ready(&ctx) && op_check(&ctx, moelora_prepare_align_lists(&args, &ctx.exec, &call))) {
    op_run(&ctx, &call);
  }
  op_close(&ctx, stack);
}

#define ROW(NAME, SCHEMA) {#NAME, #NAME "(Tensor(a!) " SCHEMA, NAME}

const moelora_op moelora_delta_ops[] = {
    ROW(fused_moe_lora, "output, Tensor qcurr_hidden_states, Tensor[] lora_a_stacked, Tensor[] "
                        "lora_b_stacked, " LISTS("shrink_block_size_m") FINISH
        ", int offset" MOELORA_INVARIANT ") -> ()"),
    ROW(fused_moe_lora_shrink,
        "a_intermediate_cache1, Tensor qcurr_hidden_states, Tensor[] lora_a_stacked, " LISTS(
            "block_size_m") MOELORA_INVARIANT ") -> ()"),
    ROW(fused_moe_lora_expand,
        "output, Tensor a_intermediate_cache1, Tensor[] lora_b_stacked, " LISTS("block_size_m")
            FINISH ", int offset" MOELORA_INVARIANT ") -> ()"),
    ROW(moe_lora_gate_up_delta,
        "out, Tensor x, Tensor[] lora_a, Tensor[] lora_b, " ROUTING FINISH MOELORA_INVARIANT
        ") -> ()"),
    ROW(moe_lora_down_delta,
        "out, Tensor x, Tensor[] lora_a, Tensor[] lora_b, " ROUTING FINISH MOELORA_INVARIANT
        ") -> ()"),
    ROW(moe_lora_a, "out, Tensor x, Tensor[] lora_a, " STAGE),
    ROW(moe_lora_gate_up_b, "out, Tensor intermediate_a, Tensor[] gate_up_b, " STAGE),
    ROW(moe_lora_down_combine,
        "output, Tensor activated, Tensor[] down_a, Tensor[] down_b, " COMBINE),
    ROW(moe_lora_fused, "output, Tensor x, Tensor[] gate_up_a, Tensor[] gate_up_b, Tensor[] "
                        "down_a, Tensor[] down_b, " COMBINE),
    {"moe_lora_align_block_size_out",
     "moe_lora_align_block_size_out(Tensor(a!) sorted_token_ids, Tensor(b!) expert_ids, Tensor(c!) "
     "num_tokens_post_pad, Tensor topk_ids, Tensor token_lora_mapping, int num_experts, int "
     "block_size, int max_loras, Tensor adapter_enabled, Tensor lora_ids, Tensor expert_map) -> ()",
     moe_lora_align_block_size_out},
    {NULL, NULL, NULL},
};
