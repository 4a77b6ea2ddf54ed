/* Runs the operators of alignment, projections, layers and weights (ops.inc). */
#include <inttypes.h>

#include "core/backend.h"
#include "core/format.h"
#include "glue/ops.h"

#define OPERATOR(NAME, ...)                                                                        \
  void op_call_##NAME(moelora_op_context *ctx, moelora_##NAME##_args *args) {                      \
    moelora_call call;                                                                             \
    if (op_check(ctx, moelora_prepare_##NAME(args, &ctx->exec, &call)))                            \
      op_run(ctx, &call);                                                                          \
  }
#define CONVERSION(NAME, PROBLEM)                                                                  \
  static void op_call_##NAME(moelora_op_context *ctx, const moelora_##NAME##_args *args) {         \
    moelora_##PROBLEM problem;                                                                     \
    if (op_check(ctx, moelora_check_##NAME(args, &problem)) && op_workspace(ctx, 0))               \
      op_check(ctx, moelora_run_##NAME(args, &ctx->exec));                                         \
  }
#include "core/operators.inc"

/* Ignores rows of a layout beyond those of the tiles; the core refuses such a call later. */
int64_t op_weight_rows(const moelora_tensor *w, const moelora_layout *layout) {
  const bool tiles = moelora_is_quantized(layout->format);
  const int64_t rows = w->size[1] * (tiles || w->ndim == 5 ? MOELORA_PACK : 1);
  return tiles && layout->rows < rows ? layout->rows > 0 ? layout->rows : 0 : rows;
}

static int64_t num_blocks(const moelora_align_args *args) {
  if (args->block_size < 1 || args->num_experts < 1 || args->max_loras < 0)
    return 0; /* the core refuses these numbers */
  return moelora_align_max_blocks(args->mode, op_num_rows(&args->routing.topk_ids),
                                  args->num_experts, args->max_loras, args->block_size);
}

void op_run_align(moelora_op_context *ctx, moelora_align_args *args) {
  int64_t blocks = num_blocks(args), rows = blocks * args->block_size, one = 1;
  if (rows > INT32_MAX) { /* checked before the outputs are allocated */
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "%" PRId64 " blocks of block_size, which is %d, are %" PRId64
            " rows, expected at most 2147483647",
            blocks, args->block_size, rows);
    return;
  }
  args->sorted_token_ids = op_output(ctx, MOELORA_I32, 1, &rows);
  if (args->mode == MOELORA_ALIGN_SORTING)
    args->sorted_weights = op_output(ctx, MOELORA_F32, 1, &rows);
  args->expert_ids = op_output(ctx, MOELORA_I32, 1, &blocks);
  if (args->mode == MOELORA_ALIGN_UNIFORM || args->mode == MOELORA_ALIGN_SEGMENTED)
    args->lora_ids =
        op_output(ctx, MOELORA_I32, 1, args->mode == MOELORA_ALIGN_UNIFORM ? &blocks : &rows);
  args->num_tokens_post_padded = op_output(ctx, MOELORA_I32, 1, &one);
  op_call_align(ctx, args);
}

void op_run_lora_align(moelora_op_context *ctx, moelora_align_args *args) {
  if (args->mode != MOELORA_ALIGN_UNIFORM && args->mode != MOELORA_ALIGN_SEGMENTED) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "mode is %d, must be %d (uniform) or %d (segmented)",
            (int)args->mode, MOELORA_ALIGN_UNIFORM, MOELORA_ALIGN_SEGMENTED);
    return;
  }
  op_run_align(ctx, args);
}

void op_run_sorting(moelora_op_context *ctx, moelora_align_args *args) {
  args->mode = MOELORA_ALIGN_SORTING;
  op_run_align(ctx, args);
}

void op_run_gemm(moelora_op_context *ctx, moelora_gemm_args *args) {
  if (!args->out.data) {
    const moelora_tensor *ids = &args->routing.topk_ids;
    const int64_t sizes[3] = {ids->size[0], ids->size[1],
                              op_weight_rows(&args->w, &args->w_layout)};
    args->out = op_output(ctx, args->x.dtype, 3, sizes);
  }
  op_call_gemm(ctx, args);
}

void op_run_experts(moelora_op_context *ctx, moelora_experts_args *args) {
  const moelora_tensor *x = &args->hidden_states;
  if (!args->out.data)
    args->out = op_output(ctx, x->dtype, 2, x->size);
  op_call_experts(ctx, args);
}

void op_run_prepack(moelora_op_context *ctx, moelora_pack_weights_args *args) {
  const moelora_tensor *w = &args->w;
  const int64_t sizes[5] = {w->size[0], w->size[1] / MOELORA_PACK, w->size[2] / MOELORA_PACK,
                            MOELORA_PACK, MOELORA_PACK};
  args->out = op_output(ctx, w->dtype, 5, sizes);
  op_call_pack_weights(ctx, args);
}

/* Returns the dtype with this code: 0 is bfloat16, 1 float16. */
static moelora_dtype compute_dtype(moelora_op_context *ctx, int32_t code) {
  if (code != 0 && code != 1)
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "dtype is %d, must be 0 (bfloat16) or 1 (float16)",
            code);
  return code == 1 ? MOELORA_F16 : MOELORA_BF16;
}

void op_run_pack(moelora_op_context *ctx, moelora_pack_quantized_args *args) {
  const moelora_tensor *values = &args->w.values;
  moelora_layout *layout = &args->layout;
  args->dtype = compute_dtype(ctx, args->dtype);
  if (ctx->status != MOELORA_OK)
    return;
  layout->rows = values->size[1];
  const int64_t depth = values->size[2]; /* 4-bit values: half of K */
  const int64_t side =
      moelora_tile_depth(layout->format) / (moelora_is_fp8(layout->format) ? 1 : 2);
  const int64_t sizes[4] = {values->size[0], moelora_row_tiles(layout->order, layout->rows),
                            depth / side + (depth % side != 0), moelora_tile_bytes(layout->format)};
  args->tiles = op_output(ctx, MOELORA_U8, 4, sizes);
  op_call_pack_quantized(ctx, args);
}

void op_run_unpack(moelora_op_context *ctx, op_unpack_args *op) {
  moelora_unpack_quantized_args *args = &op->args;
  const moelora_tensor *tiles = &args->tiles;
  const int64_t rows = args->layout.rows;
  const moelora_dtype dtype = compute_dtype(ctx, op->dtype);
  const int32_t side = moelora_tile_depth(args->layout.format);
  const int64_t most[] = {tiles->size[1] * MOELORA_PACK, tiles->size[2] * side};
  if (rows < 1 || rows > most[0]) /* checked before the output is allocated */
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "rows is %" PRId64 ", expected 1 to tiles.size(1) * 64, which is %" PRId64, rows,
            most[0]);
  if (op->columns < 1 || op->columns > most[1])
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "columns is %d, expected 1 to tiles.size(2) * %d, which is %" PRId64, op->columns, side,
            most[1]);
  if (ctx->status != MOELORA_OK)
    return;
  const int64_t sizes[3] = {tiles->size[0], rows, op->columns};
  args->out = op_output(ctx, dtype, 3, sizes);
  op_call_unpack_quantized(ctx, args);
}
