/* The operators as torch sees them: one schema and one boxed function each, for both devices. */
#include <inttypes.h>

#include "core/backend.h"
#include "core/format.h"
#include "glue/op_context.h"

static int64_t size_of(const moelora_tensor *tensor, int32_t dim) {
  return dim < tensor->ndim ? tensor->size[dim] : 0;
}

/* Rows of output that `w` stands for: [E, N, K], packed [E, N/64, K/64, 64, 64], or tiles, which
 * cannot hold more than they have room for. */
static int64_t weight_rows(const moelora_tensor *w, const moelora_layout *layout) {
  const bool tiles = layout->format != MOELORA_NATIVE;
  const int64_t rows = size_of(w, 1) * (tiles || w->ndim == 5 ? MOELORA_PACK : 1);
  return tiles && layout->rows < rows ? layout->rows > 0 ? layout->rows : 0 : rows;
}

static int64_t num_blocks(const moelora_align_args *args) {
  const moelora_tensor *ids = &args->routing.topk_ids;
  int64_t rows;
  if (args->block_size < 1 || args->num_experts < 1 || args->max_loras < 0 ||
      __builtin_mul_overflow(size_of(ids, 0), size_of(ids, 1), &rows) || rows > INT32_MAX) {
    return 0; /* the core says what is wrong */
  }
  return moelora_align_max_blocks(args->mode, rows, args->num_experts, args->max_loras,
                                  args->block_size);
}

static void run_align(moelora_op_context *ctx, moelora_align_args *args) {
  if (!op_ready(ctx)) {
    return;
  }
  int64_t blocks = num_blocks(args), rows = blocks * args->block_size, one = 1;
  if (rows > INT32_MAX) { /* before they are allocated */
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "%" PRId64 " blocks of block_size, which is %d, are %" PRId64
            " rows, expected at most 2147483647",
            blocks, args->block_size, rows);
    return;
  }
  args->sorted_token_ids = op_output(ctx, MOELORA_I32, 1, &rows);
  if (args->mode == MOELORA_ALIGN_SORTING) {
    args->sorted_weights = op_output(ctx, MOELORA_F32, 1, &rows);
  }
  args->expert_ids = op_output(ctx, MOELORA_I32, 1, &blocks);
  if (args->mode == MOELORA_ALIGN_UNIFORM || args->mode == MOELORA_ALIGN_SEGMENTED) {
    args->lora_ids =
        op_output(ctx, MOELORA_I32, 1, args->mode == MOELORA_ALIGN_UNIFORM ? &blocks : &rows);
  }
  args->num_tokens_post_padded = op_output(ctx, MOELORA_I32, 1, &one);
  moelora_call call;
  if (op_check(ctx, moelora_prepare_align(args, &ctx->exec, &call))) {
    op_run(ctx, &call);
  }
}

#define MOE_ALIGN_BLOCK_SIZE                                                                       \
  "moe_align_block_size(Tensor topk_ids, int block_size, int num_experts, Tensor expert_map) -> "  \
  "(Tensor, Tensor, Tensor)"

static void moe_align_block_size(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "moe_align_block_size");
  moelora_align_args args = {.mode = MOELORA_ALIGN_BASE};
  args.routing.topk_ids = op_tensor(&ctx, "topk_ids", stack[0]);
  args.block_size = op_int(&ctx, "block_size", stack[1]);
  args.num_experts = op_int(&ctx, "num_experts", stack[2]);
  args.routing.expert_map = op_optional(&ctx, "expert_map", stack[3]);
  run_align(&ctx, &args);
  op_close(&ctx, stack);
}

#define MOE_LORA_ALIGN_BLOCK_SIZE                                                                  \
  "moe_lora_align_block_size(Tensor topk_ids, Tensor token_lora_mapping, int num_experts, int "    \
  "block_size, int max_loras, int mode, Tensor adapter_enabled, Tensor expert_map) -> "            \
  "(Tensor, Tensor, Tensor, Tensor)"

static void moe_lora_align_block_size(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "moe_lora_align_block_size");
  moelora_align_args args = {0};
  args.routing.topk_ids = op_tensor(&ctx, "topk_ids", stack[0]);
  args.adapters.token_lora_mapping = op_tensor(&ctx, "token_lora_mapping", stack[1]);
  args.num_experts = op_int(&ctx, "num_experts", stack[2]);
  args.block_size = op_int(&ctx, "block_size", stack[3]);
  args.max_loras = op_int(&ctx, "max_loras", stack[4]);
  args.mode = (moelora_align_mode)op_int(&ctx, "mode", stack[5]);
  if (args.mode != MOELORA_ALIGN_UNIFORM && args.mode != MOELORA_ALIGN_SEGMENTED) {
    op_fail(&ctx, MOELORA_INVALID_ARGUMENT, "mode is %d, must be %d (uniform) or %d (segmented)",
            (int)args.mode, MOELORA_ALIGN_UNIFORM, MOELORA_ALIGN_SEGMENTED);
  }
  args.adapters.adapter_enabled = op_optional(&ctx, "adapter_enabled", stack[6]);
  args.routing.expert_map = op_optional(&ctx, "expert_map", stack[7]);
  run_align(&ctx, &args);
  op_close(&ctx, stack);
}

#define MOE_SORTING                                                                                \
  "moe_sorting(Tensor topk_ids, Tensor topk_weights, int num_experts, int block_size, "            \
  "Tensor(a!) out_to_zero, Tensor expert_map) -> (Tensor, Tensor, Tensor, Tensor)"

static void moe_sorting(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "moe_sorting");
  moelora_align_args args = {.mode = MOELORA_ALIGN_SORTING};
  args.routing.topk_ids = op_tensor(&ctx, "topk_ids", stack[0]);
  args.routing.topk_weights = op_tensor(&ctx, "topk_weights", stack[1]);
  args.num_experts = op_int(&ctx, "num_experts", stack[2]);
  args.block_size = op_int(&ctx, "block_size", stack[3]);
  args.out_to_zero = op_optional(&ctx, "out_to_zero", stack[4]);
  args.routing.expert_map = op_optional(&ctx, "expert_map", stack[5]);
  run_align(&ctx, &args);
  op_close(&ctx, stack);
}

#define FUSED_MOE_LORA_GEMM_ARGS                                                                   \
  "Tensor x, Tensor w, Tensor topk_weights, Tensor topk_ids, Tensor token_lora_mapping, Tensor[] " \
  "lora_a, Tensor[] lora_b, Tensor lora_ranks, Tensor lora_scalings, Tensor adapter_enabled, "     \
  "Tensor bias, Tensor expert_map, bool mul_routed_weight"

static void run_gemm(const char *op, StableIValue *stack, bool has_out) {
  moelora_op_context ctx;
  op_open(&ctx, op);
  moelora_gemm_args args = {0};
  args.x = op_tensor(&ctx, "x", stack[0]);
  args.w = op_tensor(&ctx, "w", stack[1]);
  args.routing.topk_weights = op_tensor(&ctx, "topk_weights", stack[2]);
  args.routing.topk_ids = op_tensor(&ctx, "topk_ids", stack[3]);
  args.adapters.token_lora_mapping = op_optional(&ctx, "token_lora_mapping", stack[4]);
  args.lora = op_lora(&ctx, "lora_a", stack[5], "lora_b", stack[6]);
  op_need_mapping(&ctx, &args.routing.topk_ids, &args.adapters.token_lora_mapping, &args.lora,
                  "lora_a");
  args.adapters.lora_ranks = op_optional(&ctx, "lora_ranks", stack[7]);
  args.adapters.lora_scalings = op_optional(&ctx, "lora_scalings", stack[8]);
  args.adapters.adapter_enabled = op_optional(&ctx, "adapter_enabled", stack[9]);
  args.bias = op_optional(&ctx, "bias", stack[10]);
  args.routing.expert_map = op_optional(&ctx, "expert_map", stack[11]);
  args.mul_routed_weight = stack[12] != 0;
  if (has_out) {
    args.out = op_tensor(&ctx, "out", stack[13]);
  }
  static const char *const names[] = {"w_format", "w_order", "w_rows", "w_x_format"};
  const StableIValue *layout = &stack[has_out ? 14 : 13];
  args.w_layout = op_layout(&ctx, names, layout[0], layout[1], layout[2], layout[3], layout[4]);
  ctx.exec.batch_invariant = layout[5] != 0;
  if (op_ready(&ctx)) {
    const moelora_tensor *ids = &args.routing.topk_ids;
    int64_t sizes[3] = {size_of(ids, 0), size_of(ids, 1), weight_rows(&args.w, &args.w_layout)};
    if (!has_out) {
      args.out = op_output(&ctx, args.x.dtype, 3, sizes);
    }
    moelora_call call;
    if (op_check(&ctx, moelora_prepare_gemm(&args, &ctx.exec, &call))) {
      op_run(&ctx, &call);
    }
  }
  op_close(&ctx, stack);
}

/* What few calls say: the others cost less if they need not. */
#define W_LAYOUT                                                                                   \
  ", int w_format=0, int w_order=0, int w_rows=0, int w_x_format=0, float "                        \
  "w_x_scale=0.0" MOELORA_INVARIANT
#define FUSED_MOE_LORA_GEMM "fused_moe_lora_gemm(" FUSED_MOE_LORA_GEMM_ARGS W_LAYOUT ") -> Tensor"
#define FUSED_MOE_LORA_GEMM_OUT                                                                    \
  "fused_moe_lora_gemm_out(" FUSED_MOE_LORA_GEMM_ARGS ", Tensor(a!) out" W_LAYOUT ") -> ()"

static void fused_moe_lora_gemm(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  run_gemm("fused_moe_lora_gemm", stack, false);
}

static void fused_moe_lora_gemm_out(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  run_gemm("fused_moe_lora_gemm_out", stack, true);
}

void op_experts(moelora_op_context *ctx, moelora_experts_args *args, const StableIValue *stack,
                const StableIValue *layout) {
  args->hidden_states = op_tensor(ctx, "hidden_states", stack[0]);
  args->w13 = op_tensor(ctx, "w13", stack[1]);
  args->w2 = op_tensor(ctx, "w2", stack[2]);
  args->routing.topk_weights = op_tensor(ctx, "topk_weights", stack[3]);
  args->routing.topk_ids = op_tensor(ctx, "topk_ids", stack[4]);
  args->adapters.token_lora_mapping = op_optional(ctx, "token_lora_mapping", stack[5]);
  args->w13_lora = op_lora(ctx, "w13_lora_a", stack[6], "w13_lora_b", stack[7]);
  args->w2_lora = op_lora(ctx, "w2_lora_a", stack[8], "w2_lora_b", stack[9]);
  const moelora_tensor *ids = &args->routing.topk_ids, *map = &args->adapters.token_lora_mapping;
  op_need_mapping(ctx, ids, map, &args->w13_lora, "w13_lora_a");
  op_need_mapping(ctx, ids, map, &args->w2_lora, "w2_lora_a");
  args->adapters.lora_ranks = op_optional(ctx, "lora_ranks", stack[10]);
  args->adapters.lora_scalings = op_optional(ctx, "lora_scalings", stack[11]);
  args->adapters.adapter_enabled = op_optional(ctx, "adapter_enabled", stack[12]);
  args->w13_bias = op_optional(ctx, "w13_bias", stack[13]);
  args->w2_bias = op_optional(ctx, "w2_bias", stack[14]);
  args->activation = (moelora_activation)op_int(ctx, "activation", stack[15]);
  args->activation_alpha = op_float(stack[16]);
  args->activation_limit = op_float(stack[17]);
  args->routing.expert_map = op_optional(ctx, "expert_map", stack[18]);
  args->apply_router_weight_on_input = stack[19] != 0;
  static const char *const names13[] = {"w13_format", "w13_order", "w13_rows", "w13_x_format"};
  static const char *const names2[] = {"w2_format", "", "w2_rows", "w2_x_format"};
  const StableIValue *l13 = layout, *l2 = layout + 5;
  args->w13_layout = op_layout(ctx, names13, l13[0], l13[1], l13[2], l13[3], l13[4]);
  args->w2_layout = op_layout(ctx, names2, l2[0], MOELORA_ROWS_PLAIN, l2[1], l2[2], l2[3]);
  ctx->exec.batch_invariant = l2[4] != 0;
}

static void run_experts(const char *op, StableIValue *stack, bool has_out) {
  moelora_op_context ctx;
  op_open(&ctx, op);
  moelora_experts_args args = {0};
  op_experts(&ctx, &args, stack, stack + OP_EXPERTS_ARGS + (has_out ? 1 : 0));
  if (has_out) {
    args.out = op_tensor(&ctx, "out", stack[OP_EXPERTS_ARGS]);
  }
  if (op_ready(&ctx)) {
    int64_t sizes[2] = {size_of(&args.hidden_states, 0), size_of(&args.hidden_states, 1)};
    if (!has_out) {
      args.out = op_output(&ctx, args.hidden_states.dtype, 2, sizes);
    }
    moelora_call call;
    if (op_check(&ctx, moelora_prepare_experts(&args, &ctx.exec, &call))) {
      op_run(&ctx, &call);
    }
  }
  op_close(&ctx, stack);
}

#define FUSED_EXPERTS_LORA "fused_experts_lora(" FUSED_EXPERTS_LORA_ARGS LAYER_LAYOUT ") -> Tensor"
#define FUSED_EXPERTS_LORA_OUT                                                                     \
  "fused_experts_lora_out(" FUSED_EXPERTS_LORA_ARGS ", Tensor(a!) out" LAYER_LAYOUT ") -> ()"

static void fused_experts_lora(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  run_experts("fused_experts_lora", stack, false);
}

static void fused_experts_lora_out(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  run_experts("fused_experts_lora_out", stack, true);
}

#define PREPACK_WEIGHTS "prepack_weights(Tensor w) -> Tensor"

static void prepack_weights(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "prepack_weights");
  moelora_tensor w = op_tensor(&ctx, "w", stack[0]);
  if (op_ready(&ctx)) {
    int64_t sizes[5] = {size_of(&w, 0), size_of(&w, 1) / MOELORA_PACK,
                        size_of(&w, 2) / MOELORA_PACK, MOELORA_PACK, MOELORA_PACK};
    moelora_tensor out = op_output(&ctx, w.dtype, 5, sizes);
    moelora_pack_problem problem;
    if (op_check(&ctx, moelora_check_pack(&w, &out, &problem)) && op_workspace(&ctx, 0)) {
      op_check(&ctx, moelora_pack_weights(&w, &out, &ctx.exec));
    }
  }
  op_close(&ctx, stack);
}

/* 0: bfloat16, 1: float16 */
static moelora_dtype compute_dtype(moelora_op_context *ctx, StableIValue value) {
  const int32_t code = op_int(ctx, "dtype", value);
  if (code != 0 && code != 1) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "dtype is %d, must be 0 (bfloat16) or 1 (float16)",
            code);
  }
  return code == 1 ? MOELORA_F16 : MOELORA_BF16;
}

#define PACK_QUANTIZED                                                                             \
  "pack_quantized(Tensor values, Tensor scales, Tensor zeros, int format, int order, int dtype, "  \
  "int block_rows=0, int block_columns=0) -> Tensor"

static void pack_quantized(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "pack_quantized");
  moelora_quantized w = {0};
  w.values = op_tensor(&ctx, "values", stack[0]);
  w.scales = op_tensor(&ctx, "scales", stack[1]);
  w.zeros = op_optional(&ctx, "zeros", stack[2]);
  moelora_layout layout = {
      .format = (moelora_format)op_int(&ctx, "format", stack[3]),
      .order = (moelora_row_order)op_int(&ctx, "order", stack[4]),
      .rows = size_of(&w.values, 1),
  };
  const moelora_dtype dtype = compute_dtype(&ctx, stack[5]);
  w.block_rows = op_int(&ctx, "block_rows", stack[6]);
  w.block_columns = op_int(&ctx, "block_columns", stack[7]);
  if (op_ready(&ctx)) {
    const int64_t depth = size_of(&w.values, 2); /* half of K, of four bits */
    const int64_t side =
        moelora_tile_depth(layout.format) / (moelora_is_fp8(layout.format) ? 1 : 2);
    int64_t sizes[4] = {size_of(&w.values, 0), moelora_row_tiles(layout.order, layout.rows),
                        depth / side + (depth % side != 0), moelora_tile_bytes(layout.format)};
    moelora_tensor tiles = op_output(&ctx, MOELORA_U8, 4, sizes);
    moelora_quantized_problem problem;
    if (op_check(&ctx, moelora_check_pack_quantized(&w, &layout, dtype, &tiles, &problem)) &&
        op_workspace(&ctx, 0)) {
      op_check(&ctx, moelora_pack_quantized(&w, &layout, dtype, &tiles, &ctx.exec));
    }
  }
  op_close(&ctx, stack);
}

#define UNPACK_QUANTIZED                                                                           \
  "unpack_quantized(Tensor tiles, int format, int order, int rows, int columns, int dtype) -> "    \
  "Tensor"

static void unpack_quantized(StableIValue *stack, uint64_t inputs, uint64_t outputs) {
  (void)inputs, (void)outputs;
  moelora_op_context ctx;
  op_open(&ctx, "unpack_quantized");
  moelora_tensor tiles = op_tensor(&ctx, "tiles", stack[0]);
  static const char *const names[] = {"format", "order", "rows", ""};
  moelora_layout layout = op_layout(&ctx, names, stack[1], stack[2], stack[3], MOELORA_X_NATIVE, 0);
  const int64_t columns = op_int(&ctx, "columns", stack[4]);
  const moelora_dtype dtype = compute_dtype(&ctx, stack[5]);
  const int32_t side = moelora_tile_depth(layout.format);
  const int64_t most[] = {size_of(&tiles, 1) * MOELORA_PACK, size_of(&tiles, 2) * side};
  if (layout.rows < 1 || layout.rows > most[0]) { /* before they are allocated */
    op_fail(&ctx, MOELORA_INVALID_ARGUMENT,
            "rows is %" PRId64 ", expected 1 to tiles.size(1) * 64, which is %" PRId64, layout.rows,
            most[0]);
  }
  if (columns < 1 || columns > most[1]) {
    op_fail(&ctx, MOELORA_INVALID_ARGUMENT,
            "columns is %" PRId64 ", expected 1 to tiles.size(2) * %d, which is %" PRId64, columns,
            side, most[1]);
  }
  if (op_ready(&ctx)) {
    int64_t sizes[3] = {size_of(&tiles, 0), layout.rows, columns};
    moelora_tensor out = op_output(&ctx, dtype, 3, sizes);
    moelora_quantized_problem problem;
    if (op_check(&ctx, moelora_check_unpack_quantized(&tiles, &layout, &out, &problem)) &&
        op_workspace(&ctx, 0)) {
      op_check(&ctx, moelora_unpack_quantized(&tiles, &layout, &out, &ctx.exec));
    }
  }
  op_close(&ctx, stack);
}

static const moelora_op ops[] = {
    {"moe_align_block_size", MOE_ALIGN_BLOCK_SIZE, moe_align_block_size},
    {"moe_lora_align_block_size", MOE_LORA_ALIGN_BLOCK_SIZE, moe_lora_align_block_size},
    {"moe_sorting", MOE_SORTING, moe_sorting},
    {"fused_moe_lora_gemm", FUSED_MOE_LORA_GEMM, fused_moe_lora_gemm},
    {"fused_moe_lora_gemm_out", FUSED_MOE_LORA_GEMM_OUT, fused_moe_lora_gemm_out},
    {"fused_experts_lora", FUSED_EXPERTS_LORA, fused_experts_lora},
    {"fused_experts_lora_out", FUSED_EXPERTS_LORA_OUT, fused_experts_lora_out},
    {"prepack_weights", PREPACK_WEIGHTS, prepack_weights},
    {"pack_quantized", PACK_QUANTIZED, pack_quantized},
    {"unpack_quantized", UNPACK_QUANTIZED, unpack_quantized},
    {NULL, NULL, NULL},
};

const char *moelora_register_ops(void) {
  /* torch keeps the operators while these handles live, which is for good. */
  static TorchLibraryHandle definitions, cpu, cuda;
  /* The same again for meta tensors. Shape functions in Python, which understand symbolic sizes,
   * take the Meta key of the operators themselves, and call these to check. */
  static TorchLibraryHandle meta_definitions, meta;
  if (definitions) {
    return NULL;
  }
  if (aoti_torch_library_init_def("moelora", __FILE__, __LINE__, &definitions) ||
      aoti_torch_library_init_impl("moelora", "CPU", __FILE__, __LINE__, &cpu) ||
      aoti_torch_library_init_impl("moelora", "CUDA", __FILE__, __LINE__, &cuda) ||
      aoti_torch_library_init_def("moelora_meta", __FILE__, __LINE__, &meta_definitions) ||
      aoti_torch_library_init_impl("moelora_meta", "Meta", __FILE__, __LINE__, &meta)) {
    return "cannot create torch's operator library";
  }
  const moelora_op *const tables[] = {ops, moelora_delta_ops, moelora_training_ops};
  for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
    for (const moelora_op *op = tables[i]; op->name; op++) {
      if (aoti_torch_library_def(definitions, op->schema) ||
          torch_library_impl(cpu, op->name, op->function, MOELORA_TORCH_ABI_VERSION) ||
          torch_library_impl(cuda, op->name, op->function, MOELORA_TORCH_ABI_VERSION) ||
          aoti_torch_library_def(meta_definitions, op->schema) ||
          torch_library_impl(meta, op->name, op->function, MOELORA_TORCH_ABI_VERSION)) {
        return op->schema;
      }
    }
  }
  return NULL;
}
