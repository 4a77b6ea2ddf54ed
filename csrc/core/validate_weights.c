/* Validates expert weights in all layouts, and the operators that convert between them. */
#include "core/check.h"
#include "core/format.h"

#include <math.h>

/* Checks row-major or packed weights. */
static moelora_status check_native(moelora_arg arg, moelora_weights *weights) {
  const moelora_tensor *w = arg.tensor;
  const bool packed = w->ndim == 5;
  MOELORA_REQUIRE(packed || w->ndim == 3 || moelora_is_absent(w),
                  "%s has %d dimensions, expected 3: [E, N, K], or 5: packed "
                  "[E, N/64, K/64, 64, 64]",
                  arg.name, w->ndim);
  MOELORA_TRY(moelora_check_view(arg, packed ? "[E, N/64, K/64, 64, 64]" : "[E, N, K]"));
  MOELORA_TRY(moelora_check_class(arg, MOELORA_CLASS_compute));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  if (!packed)
    MOELORA_TRY(moelora_check_rows(arg));
  for (int32_t dim = packed ? 3 : 5; dim < 5; dim++) {
    MOELORA_TRY(moelora_check_size(arg, dim, moelora_words(MOELORA_PACK, "the side of a tile")));
    MOELORA_REQUIRE_DIM(w->size[dim - 2] <= INT32_MAX / MOELORA_PACK, arg, size, dim - 2,
                        "expected at most %d tiles", INT32_MAX / MOELORA_PACK);
    MOELORA_REQUIRE(w->stride[3] == MOELORA_PACK && w->stride[4] == 1,
                    "%s has tiles of strides (%lld, %lld), expected (64, 1)", arg.name,
                    (long long)w->stride[3], (long long)w->stride[4]);
  }
  *weights = (moelora_weights){
      .data = w->data,
      .n = w->size[1] * (packed ? MOELORA_PACK : 1),
      .k = w->size[2] * (packed ? MOELORA_PACK : 1),
      .stride_e = moelora_stride(w, 0),
      .stride_nt = moelora_stride(w, 1) * (packed ? 1 : MOELORA_PACK),
      .stride_n = packed ? MOELORA_PACK : moelora_stride(w, 1),
      .stride_kt = packed ? moelora_stride(w, 2) : MOELORA_PACK,
      .packed = packed,
  };
  return MOELORA_OK;
}

/* ---- quantized ---- */

static moelora_status check_layout(const moelora_layout *layout, const char *name) {
  MOELORA_REQUIRE(moelora_is_format(layout->format), "%s.format is %d, expected a moelora_format",
                  name, (int)layout->format);
  MOELORA_REQUIRE(layout->order >= MOELORA_ROWS_PLAIN && layout->order <= MOELORA_ROWS_INTERLEAVED,
                  "%s.order is %d, expected a moelora_row_order", name, (int)layout->order);
  MOELORA_REQUIRE(layout->x >= MOELORA_X_NATIVE && layout->x <= MOELORA_X_STATIC,
                  "%s.x is %d, expected a moelora_x_format", name, (int)layout->x);
  MOELORA_REQUIRE(layout->x == MOELORA_X_NATIVE || moelora_takes_e4m3(layout->format),
                  "%s.x is %d, expected 0: x as it is, as its format is %s", name, (int)layout->x,
                  moelora_format_name(layout->format));
  if (layout->x == MOELORA_X_STATIC)
    MOELORA_REQUIRE(isnormal(layout->x_scale) && layout->x_scale > 0,
                    "%s.x_scale is %g, expected a normal float32 above 0", name,
                    (double)layout->x_scale);
  else
    MOELORA_REQUIRE(layout->x_scale == 0, "%s.x_scale is %g, expected 0, as x is not STATIC", name,
                    (double)layout->x_scale);
  if (!moelora_is_quantized(layout->format)) {
    MOELORA_REQUIRE(layout->order == MOELORA_ROWS_PLAIN && layout->rows == 0,
                    "%s has order %s and %lld rows, expected zeros, as its format is native", name,
                    moelora_order_name(layout->order), (long long)layout->rows);
    return MOELORA_OK;
  }
  MOELORA_REQUIRE(layout->rows >= 1 && layout->rows <= INT32_MAX,
                  "%s.rows is %lld, expected 1 to 2147483647", name, (long long)layout->rows);
  MOELORA_REQUIRE(layout->order == MOELORA_ROWS_PLAIN || layout->rows % 2 == 0,
                  "%s.rows is %lld, expected an even number: as many gate rows as up rows", name,
                  (long long)layout->rows);
  return MOELORA_OK;
}

/* Checks the tiles of a quantized weight. `rows` and `k`: its sizes, and their origins. */
static moelora_status check_tiles(moelora_arg arg, const moelora_layout *layout,
                                  moelora_extent rows, moelora_extent k, moelora_weights *weights) {
  const moelora_tensor *t = arg.tensor;
  const int64_t row_tiles = moelora_row_tiles(layout->order, layout->rows);
  const int64_t depth_tiles = moelora_depth_tiles(layout->format, k.value);
  const int32_t bytes = moelora_tile_size(layout->format);
  MOELORA_TRY(moelora_check_view(arg, "[E, tiles of rows, tiles of depth, bytes of a tile]"));
  MOELORA_TRY(moelora_check_class(arg, MOELORA_CLASS_bytes));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  MOELORA_REQUIRE_DIM(t->size[3] == bytes, arg, size, 3, "expected the %d bytes of a tile of %s",
                      bytes, moelora_format_name(layout->format));
  MOELORA_REQUIRE_DIM(t->size[1] == row_tiles, arg, size, 1,
                      "expected %lld tiles, as %s is %lld, in %s order", (long long)row_tiles,
                      moelora_label_extent(rows).text, (long long)rows.value,
                      moelora_order_name(layout->order));
  MOELORA_REQUIRE_DIM(t->size[2] == depth_tiles, arg, size, 2, "expected %lld tiles, as %s is %lld",
                      (long long)depth_tiles, moelora_label_extent(k).text, (long long)k.value);
  MOELORA_TRY(moelora_check_rows(arg));
  for (int32_t dim = 0; dim < 3; dim++)
    MOELORA_REQUIRE_DIM(t->size[dim] == 1 || t->stride[dim] % 16 == 0, arg, stride, dim,
                        "expected a multiple of 16");
  MOELORA_REQUIRE((uintptr_t)t->data % 16 == 0, "%s starts at %p, expected a multiple of 16 bytes",
                  arg.name, t->data);
  *weights = (moelora_weights){
      .data = t->data,
      .n = layout->rows,
      .k = k.value,
      .stride_e = moelora_stride(t, 0),
      .stride_nt = moelora_stride(t, 1),
      .stride_kt = moelora_stride(t, 2),
      .format = layout->format,
      .order = layout->order,
      .half_tiles = moelora_half_tiles(layout->order, layout->rows),
      .x = layout->x,
      .x_scale = layout->x_scale,
  };
  return MOELORA_OK;
}

/* Checks the row order. PLAIN is equivalent to GATE_UP if both halves fill whole tiles. */
static moelora_status check_order(const moelora_weights_arg *arg, moelora_weights *weights) {
  const moelora_layout *layout = arg->layout;
  if (layout->order == MOELORA_ROWS_PLAIN && arg->order == MOELORA_ROWS_GATE_UP &&
      layout->rows % (2 * MOELORA_PACK) == 0) {
    weights->order = MOELORA_ROWS_GATE_UP;
    weights->half_tiles = moelora_half_tiles(weights->order, layout->rows);
    return MOELORA_OK;
  }
  MOELORA_REQUIRE(layout->order == arg->order, "%s.order is %s, expected %s%s", arg->layout_name,
                  moelora_order_name(layout->order), moelora_order_name(arg->order),
                  arg->order == MOELORA_ROWS_PLAIN ? "" : ", as the activation wants");
  return MOELORA_OK;
}

moelora_status moelora_check_weights(moelora_weights_arg *arg, moelora_weights *weights,
                                     int32_t *num_experts) {
  const moelora_dtype dtype = arg->x.tensor->dtype;
  MOELORA_TRY(check_layout(arg->layout, arg->layout_name));
  if (!moelora_is_quantized(arg->layout->format)) {
    MOELORA_TRY(check_native(arg->tensor, weights));
    MOELORA_TRY(moelora_check_dtype(arg->tensor, arg->x));
    arg->n = moelora_size_of(arg->tensor, 1);
    arg->k = moelora_size_of(arg->tensor, 2);
    arg->n.value = weights->n;
    arg->k.value = weights->k;
    arg->n.scale = arg->k.scale = weights->packed ? " * 64" : NULL;
  } else {
    MOELORA_REQUIRE(dtype == MOELORA_BF16 || dtype == MOELORA_F16,
                    "%s has dtype %s, expected bfloat16 or float16, as %s is %s", arg->x.name,
                    moelora_dtype_name(dtype), arg->tensor.name,
                    moelora_format_name(arg->layout->format));
    arg->n = moelora_words(arg->layout->rows, arg->layout_name);
    arg->n.scale = ".rows";
    MOELORA_TRY(check_tiles(arg->tensor, arg->layout, arg->n, arg->k, weights));
    MOELORA_TRY(check_order(arg, weights));
  }
  *num_experts = (int32_t)arg->tensor.tensor->size[0];
  return MOELORA_OK;
}

moelora_factors_arg moelora_factors_of(const moelora_weights_arg *arg, int32_t most) {
  return (moelora_factors_arg){
      .like = moelora_is_quantized(arg->layout->format) ? arg->x : arg->tensor,
      .may_be_wide = true,
      .most = most,
      .experts = moelora_size_of(arg->tensor, 0),
      .n = arg->n,
      .k = arg->k,
  };
}

/* ---- packing ---- */

moelora_status moelora_check_pack_weights(const moelora_pack_weights_args *args,
                                          moelora_pack_problem *problem) {
  const moelora_arg w = MOELORA_ARG("w", &args->w);
  moelora_arguments all;
  *problem = (moelora_pack_problem){0};
  MOELORA_TRY(moelora_begin_pack_weights(args, &all));
  MOELORA_TRY(check_native(w, &problem->w));
  moelora_extent tiles[] = {moelora_size_of(w, 1), moelora_size_of(w, 2)};
  for (int32_t i = 0; i < 2; i++) {
    MOELORA_REQUIRE_DIM(tiles[i].value % MOELORA_PACK == 0, w, size, i + 1,
                        "expected a multiple of %d", MOELORA_PACK);
    tiles[i].value /= MOELORA_PACK;
    tiles[i].scale = " / 64";
    moelora_name_size(&all, i == 0 ? "N/64" : "K/64", tiles[i]);
  }
  moelora_name_size(&all, "64", moelora_words(MOELORA_PACK, "the side of a tile"));
  problem->num_experts = args->w.size[0];
  problem->element_bytes = (int32_t)moelora_dtype_bytes(args->w.dtype);
  problem->out = args->out.data;
  MOELORA_TRY(moelora_check_fit(&all));
  return moelora_check_contiguous(MOELORA_ARG("out", &args->out));
}

/* ---- packing of quantized weights ---- */

static moelora_status check_quantized_layout(const moelora_layout *layout) {
  MOELORA_REQUIRE(moelora_is_quantized(layout->format),
                  "layout.format is native, expected another");
  return check_layout(layout, "layout");
}

/* Checks the tiles to pack or unpack, which must be contiguous. */
static moelora_status check_packed(moelora_arguments *all, const moelora_tensor *tensor,
                                   const moelora_layout *layout, moelora_extent k,
                                   moelora_quantized_problem *problem) {
  const moelora_arg tiles = MOELORA_ARG("tiles", tensor);
  const moelora_extent rows = moelora_words(layout->rows, "layout.rows");
  moelora_name_size(all, "N", rows);
  MOELORA_TRY(check_tiles(tiles, layout, rows, k, &problem->tiles));
  problem->num_experts = tensor->size[0];
  return moelora_check_contiguous(tiles);
}

/* Returns the columns per scale, if a row of k columns has `groups` scales; 0: invalid. */
static int64_t group_of(moelora_format format, int64_t k, int64_t groups) {
  const int64_t columns = MOELORA_PACK / moelora_tile_groups(format), group = k / groups;
  const bool whole = group == k || group % MOELORA_PACK == 0;
  return k % groups == 0 && (columns < MOELORA_PACK ? group == columns : whole) ? group : 0;
}

/* Checks the scales of 4-bit formats, [E, N, K / group]. */
static moelora_status check_groups(moelora_arguments *all, const moelora_quantized *w,
                                   moelora_format format, moelora_extent k,
                                   moelora_quantized_problem *problem) {
  const moelora_arg scales = MOELORA_ARG("scales", &w->scales);
  const int64_t groups = w->scales.size[2];
  MOELORA_REQUIRE(w->block_rows == 0 && w->block_columns == 0,
                  "block_rows is %lld and block_columns %lld, expected 0: %s has groups",
                  (long long)w->block_rows, (long long)w->block_columns,
                  moelora_format_name(format));
  MOELORA_TRY(moelora_check_class(
      scales, moelora_scale_bytes(format) == 1 ? MOELORA_CLASS_bytes : MOELORA_CLASS_compute));
  MOELORA_TRY(moelora_check_at_least_one(scales));
  problem->group = group_of(format, k.value, groups);
  MOELORA_REQUIRE(problem->group, "%s.size(2) is %lld for K = %lld, expected a scale for %s",
                  scales.name, (long long)groups, (long long)k.value,
                  moelora_tile_groups(format) == 1 ? "every 64 columns, a multiple of them, or all"
                  : moelora_has_groups_of_32(format) ? "every 32 columns"
                                                     : "every 16 columns");
  moelora_name_size(all, "groups of rows", moelora_size_of(MOELORA_ARG("values", &w->values), 1));
  return MOELORA_OK;
}

/* Requires that the first and the last row of each tile are in the same block of scales. */
static moelora_status check_tile_rows(const moelora_layout *layout, int64_t block_rows) {
  const int64_t tiles = moelora_row_tiles(layout->order, layout->rows);
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t at = tile * MOELORA_PACK;
    int64_t last = -1;
    for (int64_t r = MOELORA_PACK - 1; last < 0; r--)
      last = moelora_row_of_tile(layout->order, layout->rows, at + r);
    MOELORA_REQUIRE(
        moelora_row_of_tile(layout->order, layout->rows, at) / block_rows == last / block_rows,
        "block_rows is %lld: tile %lld of rows has scales of several blocks, expected one, or %s",
        (long long)block_rows, (long long)tile, moelora_format_name(MOELORA_FP8_ROWS));
  }
  return MOELORA_OK;
}

/* Checks the scales of FP8, [E, N / block_rows, K / block_columns]. */
static moelora_status check_blocks(moelora_arguments *all, const moelora_quantized *w,
                                   const moelora_layout *layout, int64_t k,
                                   moelora_quantized_problem *problem) {
  const int64_t rows = w->block_rows, columns = w->block_columns;
  const int64_t part = moelora_x_group(layout->format);
  MOELORA_TRY(moelora_check_at_least("block_rows", rows, 1));
  MOELORA_REQUIRE(columns >= 1 && (columns % part == 0 || columns >= k),
                  "block_columns is %lld for K = %lld, expected a multiple of %lld, or all",
                  (long long)columns, (long long)k, (long long)part);
  MOELORA_TRY(moelora_check_class(MOELORA_ARG("scales", &w->scales), MOELORA_CLASS_f32));
  moelora_name_size(
      all, "groups of rows",
      moelora_words((layout->rows - 1) / rows + 1, "layout.rows / block_rows, rounded up,"));
  moelora_name_size(all, "groups of columns",
                    moelora_words((k - 1) / columns + 1, "K / block_columns, rounded up,"));
  problem->block_rows = rows;
  problem->block_columns = columns;
  return moelora_has_row_scales(layout->format) || rows == 1 ? MOELORA_OK
                                                             : check_tile_rows(layout, rows);
}

/* Requires a tensor if the format has it, and its absence otherwise. */
static moelora_status check_format_has(const moelora_arguments *all, const moelora_tensor *tensor,
                                       bool has, moelora_format format) {
  if (has)
    return moelora_check_present(all, tensor);
  MOELORA_REQUIRE(moelora_is_absent(tensor), "%s is there, but %s has none",
                  MOELORA_ARG(moelora_row_of(all, tensor)->name, tensor).name,
                  moelora_format_name(format));
  return MOELORA_OK;
}

moelora_status moelora_check_pack_quantized(const moelora_pack_quantized_args *args,
                                            moelora_quantized_problem *problem) {
  const moelora_quantized *w = &args->w;
  const moelora_layout *layout = &args->layout;
  const moelora_arg values = MOELORA_ARG("values", &w->values);
  const moelora_arg halves = MOELORA_ARG("tensor_scales", &w->tensor_scales);
  moelora_arguments all;
  *problem = (moelora_quantized_problem){.dtype = args->dtype};
  MOELORA_TRY(check_quantized_layout(layout));
  MOELORA_REQUIRE(args->dtype == MOELORA_BF16 || args->dtype == MOELORA_F16,
                  "dtype is %s, expected bfloat16 or float16", moelora_dtype_name(args->dtype));
  const bool fp8 = moelora_is_fp8(layout->format), gated = layout->order != MOELORA_ROWS_PLAIN;
  MOELORA_TRY(moelora_begin_pack_quantized(args, &all));
  MOELORA_TRY(moelora_check_at_least_one(values));
  moelora_extent k = moelora_size_of(values, 2);
  MOELORA_REQUIRE_DIM(fp8 || k.value <= INT32_MAX / 2, values, size, 2, "expected at most %d",
                      INT32_MAX / 2);
  k.value *= fp8 ? 1 : 2;
  k.scale = fp8 ? NULL : " * 2";
  MOELORA_TRY(fp8 ? check_blocks(&all, w, layout, k.value, problem)
                  : check_groups(&all, w, layout->format, k, problem));
  MOELORA_TRY(check_format_has(&all, &w->zeros, moelora_has_zeros(layout->format), layout->format));
  MOELORA_TRY(check_format_has(&all, &w->tensor_scales, moelora_has_tile_scale(layout->format),
                               layout->format));
  if (!moelora_is_absent(halves.tensor))
    MOELORA_REQUIRE_DIM(halves.tensor->size[1] == 1 || (gated && halves.tensor->size[1] == 2),
                        halves, size, 1, "expected 1%s", gated ? ", or 2 for gate and up" : "");
  MOELORA_TRY(check_packed(&all, &args->tiles, layout, k, problem));
  problem->values = moelora_take_view(&w->values, problem->values_stride, 2);
  problem->scales = moelora_take_view(&w->scales, problem->scales_stride, 2);
  problem->zeros = moelora_take_view(&w->zeros, problem->zeros_stride, 2);
  problem->tensor_scales = moelora_take_view(&w->tensor_scales, problem->tensor_scales_stride,
                                             halves.tensor->size[1] == 2 ? 2 : 1);
  problem->scale_dtype = w->scales.dtype;
  problem->packed = args->tiles.data;
  return moelora_check_fit(&all);
}

moelora_status moelora_check_unpack_quantized(const moelora_unpack_quantized_args *args,
                                              moelora_quantized_problem *problem) {
  moelora_arguments all;
  *problem = (moelora_quantized_problem){.dtype = args->out.dtype};
  MOELORA_TRY(check_quantized_layout(&args->layout));
  MOELORA_TRY(moelora_begin_unpack_quantized(args, &all));
  MOELORA_TRY(moelora_check_at_least_one(MOELORA_ARG("out", &args->out)));
  MOELORA_TRY(check_packed(&all, &args->tiles, &args->layout, moelora_words(args->out.size[2], "K"),
                           problem));
  problem->out = moelora_take_view(&args->out, problem->out_stride, 2);
  return moelora_check_fit(&all);
}
