/* The operators that add adapters alone. Each writes to its first tensor; all but two are one
 * moelora_delta, and differ in which halves of an adapter they run and in who says where rows go.
 */
#include "glue/box.h"

/* vLLM's words: without sorted_token_ids, expert_ids is [M, top_k]. */
#define LISTS                                                                                      \
  "Tensor topk_weights, Tensor sorted_token_ids, Tensor expert_ids, Tensor "                       \
  "num_tokens_post_padded, Tensor token_lora_mapping, int top_k_num, Tensor lora_ids, Tensor "     \
  "num_active_loras, Tensor adapter_enabled, int num_experts, int block_size"
#define ROUTING                                                                                    \
  "Tensor topk_weights, Tensor topk_ids, Tensor token_lora_mapping, Tensor lora_ranks, Tensor "    \
  "lora_scalings, Tensor adapter_enabled, Tensor expert_map, int num_experts"
#define BOTH "Tensor x, Tensor[] lora_a, Tensor[] lora_b, "
#define FINISH ", bool mul_routed_weight, bool add_inputs, int offset) -> ()"

/* What one of these operators is made of. */
typedef struct delta_form {
  const char *op;
  bool shrink, expand; /* with both, h stays inside */
  bool listed;         /* LISTS, else ROUTING */
  bool finish;         /* FINISH follows */
  bool silu_and_mul;
  bool combine; /* weighted and added */
  bool whole;   /* without add_inputs, rows without an adapter become 0 */
} delta_form;

/* Both take `at`, the place of the first of their arguments, and return the place after them. */
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
                        moelora_routing *routing, moelora_adapters *adapters,
                        int32_t *num_experts) {
  routing->topk_weights = box_optional(box, "topk_weights", stack[at++]);
  routing->topk_ids = box_tensor(box, "topk_ids", stack[at++]);
  adapters->token_lora_mapping = box_optional(box, "token_lora_mapping", stack[at++]);
  adapters->lora_ranks = box_optional(box, "lora_ranks", stack[at++]);
  adapters->lora_scalings = box_optional(box, "lora_scalings", stack[at++]);
  adapters->adapter_enabled = box_optional(box, "adapter_enabled", stack[at++]);
  routing->expert_map = box_optional(box, "expert_map", stack[at++]);
  *num_experts = box_int(box, "num_experts", stack[at++]);
  return at;
}

static void run_delta(delta_form form, StableIValue *stack) {
  moelora_box box;
  box_open(&box, form.op);
  moelora_delta_args args = {.silu_and_mul = form.silu_and_mul};
  int at = 0;
  *(form.expand ? &args.out : &args.h) = box_tensor(&box, form.expand ? "out" : "h", stack[at++]);
  *(form.shrink ? &args.x : &args.h) = box_tensor(&box, form.shrink ? "x" : "h", stack[at++]);
  if (form.shrink && form.expand) {
    args.lora = box_lora(&box, "lora_a", stack[at], "lora_b", stack[at + 1]);
    at += 2;
  } else {
    args.lora.num_slices = box_tensors(&box, form.shrink ? "lora_a" : "lora_b", stack[at++],
                                       form.shrink ? args.lora.a : args.lora.b);
  }
  at = form.listed
           ? take_lists(&box, stack, at, &args)
           : take_routing(&box, stack, at, &args.routing, &args.adapters, &args.num_experts);
  args.mul_routed_weight = form.combine || (form.finish && stack[at] != 0);
  args.add_inputs = form.combine || (form.finish && stack[at + 1] != 0);
  args.out_offset = form.finish ? (int64_t)stack[at + 2] : 0;
  size_t bytes = 0;
  if (box_ready(&box) && box_check(&box, moelora_delta_workspace_size(&args, &box.exec, &bytes)) &&
      box_workspace(&box, bytes)) {
    if (form.whole && !args.add_inputs && aoti_torch_zero_(box.handles[0])) {
      box_fail(&box, MOELORA_DEVICE_ERROR, "cannot zero out");
    } else {
      box_check(&box, moelora_delta(&args, &box.exec));
    }
  }
  box_close(&box, stack);
}

#define DELTA_OP(NAME, ...)                                                                        \
  static void NAME(StableIValue *stack, uint64_t inputs, uint64_t outputs) {                       \
    (void)inputs, (void)outputs;                                                                   \
    run_delta((delta_form){.op = #NAME, __VA_ARGS__}, stack);                                      \
  }

DELTA_OP(fused_moe_lora, .shrink = true, .expand = true, .listed = true, .finish = true)
DELTA_OP(fused_moe_lora_shrink, .shrink = true, .listed = true)
DELTA_OP(fused_moe_lora_expand, .expand = true, .listed = true, .finish = true)
DELTA_OP(moe_lora_gate_up_delta, .shrink = true, .expand = true, .finish = true, .whole = true)
DELTA_OP(moe_lora_down_delta, .shrink = true, .expand = true, .finish = true, .whole = true)
DELTA_OP(moe_lora_a, .shrink = true)
DELTA_OP(moe_lora_gate_up_b, .expand = true, .silu_and_mul = true)
DELTA_OP(moe_lora_down_combine, .shrink = true, .expand = true, .combine = true)

static void moe_lora_fused(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_box box;
  box_open(&box, "moe_lora_fused");
  moelora_mlp_delta_args args = {0};
  args.out = box_tensor(&box, "output", stack[0]);
  args.hidden_states = box_tensor(&box, "hidden_states", stack[1]);
  args.gate_up = box_lora(&box, "gate_up_a", stack[2], "gate_up_b", stack[3]);
  args.down = box_lora(&box, "down_a", stack[4], "down_b", stack[5]);
  take_routing(&box, stack, 6, &args.routing, &args.adapters, &args.num_experts);
  size_t bytes = 0;
  if (box_ready(&box) &&
      box_check(&box, moelora_mlp_delta_workspace_size(&args, &box.exec, &bytes)) &&
      box_workspace(&box, bytes)) {
    box_check(&box, moelora_mlp_delta(&args, &box.exec));
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
  size_t bytes = 0;
  if (box_ready(&box) &&
      box_check(&box, moelora_align_lists_workspace_size(&args, &box.exec, &bytes)) &&
      box_workspace(&box, bytes)) {
    box_check(&box, moelora_align_lists(&args, &box.exec));
  }
  box_close(&box, stack);
}

#define ROW(NAME, SCHEMA) {#NAME, #NAME "(Tensor(a!) out, " SCHEMA, NAME}

const moelora_op moelora_delta_ops[] = {
    ROW(fused_moe_lora, BOTH LISTS FINISH),
    ROW(fused_moe_lora_shrink, "Tensor x, Tensor[] lora_a, " LISTS ") -> ()"),
    ROW(fused_moe_lora_expand, "Tensor h, Tensor[] lora_b, " LISTS FINISH),
    ROW(moe_lora_gate_up_delta, BOTH ROUTING FINISH),
    ROW(moe_lora_down_delta, BOTH ROUTING FINISH),
    ROW(moe_lora_a, "Tensor x, Tensor[] lora_a, " ROUTING ") -> ()"),
    ROW(moe_lora_gate_up_b, "Tensor h, Tensor[] lora_b, " ROUTING ") -> ()"),
    ROW(moe_lora_down_combine, BOTH ROUTING ") -> ()"),
    ROW(moe_lora_fused, "Tensor hidden_states, Tensor[] gate_up_a, Tensor[] gate_up_b, Tensor[] "
                        "down_a, Tensor[] down_b, " ROUTING ") -> ()"),
    {"moe_lora_align_block_size_out",
     "moe_lora_align_block_size_out(Tensor(a!) sorted_token_ids, Tensor(b!) expert_ids, Tensor(c!) "
     "num_tokens_post_pad, Tensor topk_ids, Tensor token_lora_mapping, int num_experts, int "
     "block_size, int max_loras, Tensor adapter_enabled, Tensor lora_ids, Tensor expert_map) -> ()",
     moe_lora_align_block_size_out},
    {NULL, NULL, NULL},
};
