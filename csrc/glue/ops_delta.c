/* The operators that add adapters alone. Each writes to its first tensor; all but two are one
 * moelora_delta, and differ in which halves of an adapter they run and in who says where rows go.
 */
#include "glue/box.h"

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
  "num_experts) -> ()"
#define COMBINE                                                                                    \
  "Tensor expert_ids, Tensor routing_weights, Tensor weight_indices, Tensor lora_ranks, Tensor "   \
  "scalings, Tensor adapter_enabled, int num_experts) -> ()"
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
static int take_lists(moelora_box *box, const StableIValue *stack, int at,
                      moelora_delta_args *args) {
  moelora_lists *lists = &args->lists;
  args->routing.topk_weights = box_tensor(box, "topk_weights", stack[at++]);
  lists->sorted_token_ids = box_optional(box, "sorted_token_ids", stack[at++]);
  const bool naive = lists->sorted_token_ids.data == NULL;
  *(naive ? &args->routing.topk_ids : &lists->expert_ids) =
      box_tensor(box, "expert_ids", stack[at++]);
  lists->num_tokens_post_padded = box_optional(box, "num_tokens_post_padded", stack[at++]);
  args->adapters.token_lora_mapping = box_optional(box, "token_lora_mapping", stack[at++]);
  args->top_k = box_int(box, "top_k_num", stack[at++]);
  args->num_tokens = args->routing.topk_weights.ndim ? args->routing.topk_weights.size[0] : 0;
  lists->lora_ids = box_optional(box, "lora_ids", stack[at++]);
  lists->num_active = box_host_int(box, "num_active_loras", stack[at++]);
  args->adapters.adapter_enabled = box_optional(box, "adapter_enabled", stack[at++]);
  args->num_experts = box_int(box, "num_experts", stack[at++]);
  lists->block_size = box_int(box, "block_size", stack[at++]);
  return at;
}

static int take_routing(moelora_box *box, const StableIValue *stack, int at,
                        moelora_delta_args *args) {
  args->routing.topk_weights = box_optional(box, "topk_weights", stack[at++]);
  args->routing.topk_ids = box_tensor(box, "topk_ids", stack[at++]);
  args->adapters.token_lora_mapping = box_optional(box, "token_lora_mapping", stack[at++]);
  args->adapters.lora_ranks = box_optional(box, "lora_ranks", stack[at++]);
  args->adapters.lora_scalings = box_optional(box, "lora_scalings", stack[at++]);
  args->adapters.adapter_enabled = box_optional(box, "adapter_enabled", stack[at++]);
  args->routing.expert_map = box_optional(box, "expert_map", stack[at++]);
  args->num_experts = box_int(box, "num_experts", stack[at++]);
  return at;
}

static int take_stage(moelora_box *box, const StableIValue *stack, int at, bool combine,
                      moelora_routing *routing, moelora_adapters *adapters, int32_t *num_experts) {
  routing->topk_ids = box_tensor(box, "expert_ids", stack[at++]);
  if (combine) {
    routing->topk_weights = box_tensor(box, "routing_weights", stack[at++]);
  }
  adapters->token_lora_mapping = box_tensor(box, "weight_indices", stack[at++]);
  adapters->lora_ranks = box_optional(box, "lora_ranks", stack[at++]);
  if (combine) {
    adapters->lora_scalings = box_optional(box, "scalings", stack[at++]);
  }
  adapters->adapter_enabled = box_optional(box, "adapter_enabled", stack[at++]);
  *num_experts = box_int(box, "num_experts", stack[at++]);
  return at;
}

static void take_arguments(const delta_form *form, moelora_box *box, const StableIValue *stack,
                           moelora_delta_args *args) {
  int at = 0;
  *(form->expand ? &args->out : &args->h) = box_tensor(box, form->written, stack[at++]);
  *(form->shrink ? &args->x : &args->h) = box_tensor(box, form->read, stack[at++]);
  if (form->shrink && form->expand) {
    args->lora = box_lora(box, form->lora_a, stack[at], form->lora_b, stack[at + 1]);
    at += 2;
  } else {
    args->lora.num_slices = box_tensors(box, form->shrink ? form->lora_a : form->lora_b,
                                        stack[at++], form->shrink ? args->lora.a : args->lora.b);
  }
  if (form->words == STAGED) {
    take_stage(box, stack, at, form->combine, &args->routing, &args->adapters, &args->num_experts);
    args->mul_routed_weight = args->add_inputs = form->combine;
    return;
  }
  at =
      form->words == LISTED ? take_lists(box, stack, at, args) : take_routing(box, stack, at, args);
  if (form->expand) {
    args->mul_routed_weight = stack[at++] != 0;
    args->add_inputs = stack[at++] != 0;
    args->out_offset = form->words == LISTED ? (int64_t)stack[at++] : 0;
  }
}

static void run_delta(delta_form form, StableIValue *stack) {
  moelora_box box;
  box_open(&box, form.op);
  moelora_delta_args args = {.silu_and_mul = form.silu_and_mul};
  take_arguments(&form, &box, stack, &args);
  if (form.words == ROUTED) {
    box_need_mapping(&box, &args.routing.topk_ids, &args.adapters.token_lora_mapping, &args.lora,
                     form.lora_a);
  }
  moelora_call call;
  if (box_ready(&box) && box_check(&box, moelora_prepare_delta(&args, &box.exec, &call)) &&
      box_workspace(&box, call.workspace_bytes)) {
    if (form.whole && !args.add_inputs && aoti_torch_zero_(box.handles[0])) {
      box_fail(&box, MOELORA_DEVICE_ERROR, "cannot zero %s", form.written);
    } else {
      box_check(&box, moelora_run(&call, &box.exec));
    }
  }
  box_close(&box, stack);
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
  moelora_box box;
  box_open(&box, "moe_lora_fused");
  moelora_mlp_delta_args args = {0};
  args.out = box_tensor(&box, "output", stack[0]);
  args.hidden_states = box_tensor(&box, "x", stack[1]);
  args.gate_up = box_lora(&box, "gate_up_a", stack[2], "gate_up_b", stack[3]);
  args.down = box_lora(&box, "down_a", stack[4], "down_b", stack[5]);
  take_stage(&box, stack, 6, true, &args.routing, &args.adapters, &args.num_experts);
  moelora_call call;
  if (box_ready(&box) && box_check(&box, moelora_prepare_mlp_delta(&args, &box.exec, &call))) {
    box_run(&box, &call);
  }
  box_close(&box, stack);
}

static void moe_lora_align_block_size_out(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_box box;
  box_open(&box, "moe_lora_align_block_size");
  moelora_align_lists_args args = {0};
  args.lists.sorted_token_ids = box_tensor(&box, "sorted_token_ids", stack[0]);
  args.lists.expert_ids = box_tensor(&box, "expert_ids", stack[1]);
  args.lists.num_tokens_post_padded = box_tensor(&box, "num_tokens_post_pad", stack[2]);
  args.routing.topk_ids = box_tensor(&box, "topk_ids", stack[3]);
  args.adapters.token_lora_mapping = box_tensor(&box, "token_lora_mapping", stack[4]);
  args.num_experts = box_int(&box, "num_experts", stack[5]);
  args.lists.block_size = box_int(&box, "block_size", stack[6]);
  args.max_loras = box_int(&box, "max_loras", stack[7]);
  args.adapters.adapter_enabled = box_optional(&box, "adapter_enabled", stack[8]);
  args.lists.lora_ids = box_tensor(&box, "lora_ids", stack[9]);
  args.routing.expert_map = box_optional(&box, "expert_map", stack[10]);
  args.lists.num_active = (int32_t)args.lists.lora_ids.size[0];
  moelora_call call;
  if (box_ready(&box) && box_check(&box, moelora_prepare_align_lists(&args, &box.exec, &call))) {
    box_run(&box, &call);
  }
  box_close(&box, stack);
}

#define ROW(NAME, SCHEMA) {#NAME, #NAME "(Tensor(a!) " SCHEMA, NAME}

const moelora_op moelora_delta_ops[] = {
    ROW(fused_moe_lora,
        "output, Tensor qcurr_hidden_states, Tensor[] lora_a_stacked, Tensor[] "
        "lora_b_stacked, " LISTS("shrink_block_size_m") FINISH ", int offset) -> ()"),
    ROW(fused_moe_lora_shrink,
        "a_intermediate_cache1, Tensor qcurr_hidden_states, Tensor[] lora_a_stacked, " LISTS(
            "block_size_m") ") -> ()"),
    ROW(fused_moe_lora_expand,
        "output, Tensor a_intermediate_cache1, Tensor[] lora_b_stacked, " LISTS("block_size_m")
            FINISH ", int offset) -> ()"),
    ROW(moe_lora_gate_up_delta,
        "out, Tensor x, Tensor[] lora_a, Tensor[] lora_b, " ROUTING FINISH ") -> ()"),
    ROW(moe_lora_down_delta,
        "out, Tensor x, Tensor[] lora_a, Tensor[] lora_b, " ROUTING FINISH ") -> ()"),
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
