/* The forward of a layer that saves for its backward, and the backward. */
#include "glue/op_context.h"

static int64_t size_of(const moelora_tensor *tensor, int32_t dim) {
  return dim < tensor->ndim ? tensor->size[dim] : 0;
}

/* Routed rows, 0 where their number is refused later. */
static int64_t num_rows(const moelora_experts_args *args) {
  const moelora_tensor *ids = &args->routing.topk_ids;
  int64_t rows;
  return __builtin_mul_overflow(size_of(ids, 0), size_of(ids, 1), &rows) || rows > INT32_MAX ? 0
                                                                                             : rows;
}

/* Rows of w13 in any form: what gate_up has as columns. */
static int64_t rows_of_w13(const moelora_experts_args *args) {
  const moelora_tensor *w = &args->w13;
  const int64_t tiled = size_of(w, 1) * MOELORA_PACK;
  if (args->w13_layout.format == MOELORA_NATIVE) {
    return w->ndim == 5 ? tiled : size_of(w, 1);
  }
  const int64_t rows = args->w13_layout.rows; /* no more than tiles have room for */
  return rows < 0 ? 0 : rows < tiled ? rows : tiled;
}

/* A tensor of no elements: nothing. */
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
  const int64_t rows = num_rows(args), rank = size_of(&lora->a[0], 2);
  const int64_t sizes[3] = {rows, ndim == 3 ? lora->num_slices : rank, rank};
  return op_output(ctx, dtype, ndim, sizes);
}

#define FUSED_EXPERTS_LORA_SAVING                                                                  \
  "fused_experts_lora_saving(" FUSED_EXPERTS_LORA_ARGS LAYER_LAYOUT                                \
  ") -> (Tensor, Tensor, Tensor, Tensor)"

static void fused_experts_lora_saving(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "fused_experts_lora_saving");
  moelora_experts_args args = {0};
  op_experts(&ctx, &args, stack, stack + OP_EXPERTS_ARGS);
  if (op_ready(&ctx)) {
    const moelora_dtype dtype = args.hidden_states.dtype;
    const int64_t out[2] = {size_of(&args.hidden_states, 0), size_of(&args.hidden_states, 1)};
    const int64_t gate_up[2] = {num_rows(&args), rows_of_w13(&args)};
    args.out = op_output(&ctx, dtype, 2, out);
    args.saved.gate_up = op_output(&ctx, dtype, 2, gate_up);
    args.saved.w13_shrink = shrink_output(&ctx, &args, &args.w13_lora, 3);
    args.saved.w2_shrink = shrink_output(&ctx, &args, &args.w2_lora, 2);
    moelora_call call;
    if (op_check(&ctx, moelora_prepare_experts(&args, &ctx.exec, &call))) {
      op_run(&ctx, &call);
    }
  }
  op_close(&ctx, stack);
}

/* grad_out, what was saved, and all that the forward had. */
static void take_backward(moelora_op_context *ctx, moelora_experts_backward_args *args,
                          const StableIValue *stack, const StableIValue *layout) {
  ctx->check_storage = true;
  args->dout = op_tensor(ctx, "grad_out", stack[0]);
  args->forward.saved.gate_up = op_tensor(ctx, "gate_up", stack[1]);
  args->forward.saved.w13_shrink = op_optional(ctx, "w13_shrink", stack[2]);
  args->forward.saved.w2_shrink = op_optional(ctx, "w2_shrink", stack[3]);
  op_experts(ctx, &args->forward, stack + 4, layout);
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

/* A new gradient of `like`, or nothing. */
static moelora_tensor gradient(moelora_op_context *ctx, const moelora_tensor *like, bool wanted,
                               bool float32) {
  return wanted && like->ndim
             ? op_output(ctx, float32 ? MOELORA_F32 : like->dtype, like->ndim, like->size)
             : nothing(ctx, MOELORA_F32);
}

static void new_gradients(moelora_op_context *ctx, moelora_experts_backward_args *args,
                          int32_t wanted, bool float32) {
  const moelora_experts_args *forward = &args->forward;
  moelora_experts_grads *grads = &args->grads;
  grads->hidden_states = gradient(ctx, &forward->hidden_states, wanted & WANT_HIDDEN_STATES, false);
  grads->topk_weights =
      gradient(ctx, &forward->routing.topk_weights, wanted & WANT_TOPK_WEIGHTS, false);
  grads->w13_lora.num_slices = forward->w13_lora.num_slices;
  grads->w2_lora.num_slices = forward->w2_lora.num_slices;
  for (int32_t i = 0; i < 2; i++) {
    grads->w13_lora.a[i] =
        gradient(ctx, &forward->w13_lora.a[i], wanted & WANT_W13_LORA_A, float32);
  }
  for (int32_t i = 0; i < 2; i++) {
    grads->w13_lora.b[i] =
        gradient(ctx, &forward->w13_lora.b[i], wanted & WANT_W13_LORA_B, float32);
  }
  grads->w2_lora.a[0] = gradient(ctx, &forward->w2_lora.a[0], wanted & WANT_W2_LORA_A, float32);
  grads->w2_lora.b[0] = gradient(ctx, &forward->w2_lora.b[0], wanted & WANT_W2_LORA_B, float32);
  grads->w13_bias = gradient(ctx, &forward->w13_bias, wanted & WANT_W13_BIAS, float32);
  grads->w2_bias = gradient(ctx, &forward->w2_bias, wanted & WANT_W2_BIAS, float32);
}

static void run_backward(moelora_op_context *ctx, const moelora_experts_backward_args *args) {
  moelora_call call;
  if (op_check(ctx, moelora_prepare_experts_backward(args, &ctx->exec, &call))) {
    op_run(ctx, &call);
  }
}

#define BACKWARD_ARGS                                                                              \
  "Tensor grad_out, Tensor gate_up, Tensor w13_shrink, Tensor w2_shrink, " FUSED_EXPERTS_LORA_ARGS
enum { NUM_BACKWARD_ARGS = 4 + OP_EXPERTS_ARGS };

#define FUSED_EXPERTS_LORA_BACKWARD                                                                \
  "fused_experts_lora_backward(" BACKWARD_ARGS ", int wanted, bool float32" LAYER_LAYOUT           \
  ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"

static void fused_experts_lora_backward(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "fused_experts_lora_backward");
  moelora_experts_backward_args args = {0};
  const StableIValue *last = stack + NUM_BACKWARD_ARGS;
  take_backward(&ctx, &args, stack, last + 2);
  const int32_t wanted = op_int(&ctx, "wanted", last[0]);
  const bool float32 = last[1] != 0;
  if (op_ready(&ctx)) {
    new_gradients(&ctx, &args, wanted, float32);
    run_backward(&ctx, &args);
  }
  op_close(&ctx, stack);
}

/* Gradients of a projection's factors that a caller gives; a list of none: not wanted. */
static void given_gradients(moelora_op_context *ctx, const char *name_a, StableIValue a,
                            const char *name_b, StableIValue b, moelora_lora *grads) {
  const int32_t num_a = op_tensors(ctx, name_a, a, grads->a);
  const int32_t num_b = op_tensors(ctx, name_b, b, grads->b);
  if (num_a && num_b && num_a != num_b) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s has %d slices, %s has %d", name_a, num_a, name_b,
            num_b);
  }
  grads->num_slices = num_a ? num_a : num_b;
}

#define FUSED_EXPERTS_LORA_BACKWARD_OUT                                                            \
  "fused_experts_lora_backward_out(" BACKWARD_ARGS                                                 \
  ", Tensor(a!) grad_hidden_states, Tensor(b!) grad_topk_weights, Tensor(c!)[] grad_w13_lora_a, "  \
  "Tensor(d!)[] grad_w13_lora_b, Tensor(e!)[] grad_w2_lora_a, Tensor(f!)[] grad_w2_lora_b, "       \
  "Tensor(g!) grad_w13_bias, Tensor(h!) grad_w2_bias, bool accumulate" LAYER_LAYOUT ") -> ()"

static void fused_experts_lora_backward_out(StableIValue *stack, uint64_t inputs,
                                            uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "fused_experts_lora_backward_out");
  moelora_experts_backward_args args = {0};
  const StableIValue *last = stack + NUM_BACKWARD_ARGS;
  take_backward(&ctx, &args, stack, last + 9);
  args.grads.hidden_states = op_optional(&ctx, "grad_hidden_states", last[0]);
  args.grads.topk_weights = op_optional(&ctx, "grad_topk_weights", last[1]);
  given_gradients(&ctx, "grad_w13_lora_a", last[2], "grad_w13_lora_b", last[3],
                  &args.grads.w13_lora);
  given_gradients(&ctx, "grad_w2_lora_a", last[4], "grad_w2_lora_b", last[5], &args.grads.w2_lora);
  args.grads.w13_bias = op_optional(&ctx, "grad_w13_bias", last[6]);
  args.grads.w2_bias = op_optional(&ctx, "grad_w2_bias", last[7]);
  args.accumulate = last[8] != 0;
  if (op_ready(&ctx)) {
    run_backward(&ctx, &args);
  }
  op_close(&ctx, stack);
}

const moelora_op moelora_training_ops[] = {
    {"fused_experts_lora_saving", FUSED_EXPERTS_LORA_SAVING, fused_experts_lora_saving},
    {"fused_experts_lora_backward", FUSED_EXPERTS_LORA_BACKWARD, fused_experts_lora_backward},
    {"fused_experts_lora_backward_out", FUSED_EXPERTS_LORA_BACKWARD_OUT,
     fused_experts_lora_backward_out},
    {NULL, NULL, NULL},
};
