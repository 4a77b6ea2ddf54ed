/* Validates expert weights in all layouts, and the operators that convert between them. */
#include "core/check.h"
#include "core/format.h"

#include <math.h>

/* Checks row-major or packed weights. */
static moelora_status check_native(moelora_arg arg, moelora_weights *weights) {
  const moelora_tensor *w = arg.tensor;
  bool packed = w->ndim == 5;
  MOELORA_REQUIRE(packed || w->ndim == 3 || moelora_is_absent(w),
                  "%s has %d dimensions, expected 3: [E, N, K], or 5: packed "
                  "[E, N/64, K/64, 64, 64]",
                  arg.name, w->ndim);
  MOELORA_TRY(
      moelora_check_view(arg, packed ? 5 : 3, packed ? "[E, N/64, K/64, 64, 64]" : "[E, N, K]"));
  MOELORA_TRY(moelora_check_compute_dtype(arg));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  if (packed) {
    for (int32_t dim = 3; dim < 5; dim++)
      MOELORA_TRY(moelora_check_size(arg, dim, MOELORA_PACK, moelora_words("the side of a tile")));
    MOELORA_REQUIRE(w->stride[3] == MOELORA_PACK && w->stride[4] == 1,
                    "%s has tiles of strides (%lld, %lld), expected (64, 1)", arg.name,
                    (long long)w->stride[3], (long long)w->stride[4]);
    for (int32_t dim = 1; dim < 3; dim++)
      MOELORA_REQUIRE(w->size[dim] <= INT32_MAX / MOELORA_PACK,
                      "%s.size(%d) is %lld, expected at most %d tiles", arg.name, dim,
                      (long long)w->size[dim], INT32_MAX / MOELORA_PACK);
  } else {
    MOELORA_TRY(moelora_check_rows(arg));
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

static const char *order_name(moelora_row_order order) {
  return order == MOELORA_ROWS_GATE_UP       ? "GATE_UP"
         : order == MOELORA_ROWS_INTERLEAVED ? "INTERLEAVED"
                                             : "PLAIN";
}

static moelora_status check_x_format(const moelora_layout *layout, const char *name) {
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
  return MOELORA_OK;
}

static moelora_status check_layout(const moelora_layout *layout, const char *name) {
  MOELORA_REQUIRE(moelora_is_format(layout->format), "%s.format is %d, expected a moelora_format",
                  name, (int)layout->format);
  MOELORA_REQUIRE(layout->order >= MOELORA_ROWS_PLAIN && layout->order <= MOELORA_ROWS_INTERLEAVED,
                  "%s.order is %d, expected a moelora_row_order", name, (int)layout->order);
  MOELORA_TRY(check_x_format(layout, name));
  if (!moelora_is_quantized(layout->format)) {
    MOELORA_REQUIRE(layout->order == MOELORA_ROWS_PLAIN && layout->rows == 0,
                    "%s has order %s and %lld rows, expected zeros, as its format is native", name,
                    order_name(layout->order), (long long)layout->rows);
    return MOELORA_OK;
  }
  MOELORA_REQUIRE(layout->rows >= 1 && layout->rows <= INT32_MAX,
                  "%s.rows is %lld, expected 1 to 2147483647", name, (long long)layout->rows);
  MOELORA_REQUIRE(layout->order == MOELORA_ROWS_PLAIN || layout->rows % 2 == 0,
                  "%s.rows is %lld, expected an even number: as many gate rows as up rows", name,
                  (long long)layout->rows);
  return MOELORA_OK;
}

/* Checks the tiles of a quantized weight with K = k. `of_rows` and `of_depth` are the origins of
 * its sizes. */
static moelora_status check_tiles(moelora_arg arg, const moelora_layout *layout, int64_t k,
                                  moelora_source of_rows, moelora_source of_depth,
                                  moelora_weights *weights) {
  static const char shape[] = "[E, tiles of rows, tiles of depth, bytes of a tile]";
  const moelora_tensor *t = arg.tensor;
  const int64_t half_tiles = moelora_half_tiles(layout->order, layout->rows);
  const int64_t row_tiles = moelora_row_tiles(layout->order, layout->rows);
  const int64_t depth_tiles = moelora_depth_tiles(layout->format, k);
  const char *format = moelora_format_name(layout->format);
  MOELORA_TRY(moelora_check_view(arg, 4, shape));
  MOELORA_TRY(moelora_check_dtype(arg, MOELORA_U8, NULL));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  MOELORA_REQUIRE(t->size[3] == moelora_tile_size(layout->format),
                  "%s.size(3) is %lld, expected the %d bytes of a tile of %s", arg.name,
                  (long long)t->size[3], moelora_tile_size(layout->format), format);
  MOELORA_REQUIRE(t->size[1] == row_tiles,
                  "%s.size(1) is %lld, expected %lld tiles, as %s is %lld, in %s order", arg.name,
                  (long long)t->size[1], (long long)row_tiles, moelora_label_source(of_rows).text,
                  (long long)layout->rows, order_name(layout->order));
  MOELORA_REQUIRE(t->size[2] == depth_tiles,
                  "%s.size(2) is %lld, expected %lld tiles, as %s is %lld", arg.name,
                  (long long)t->size[2], (long long)depth_tiles,
                  moelora_label_source(of_depth).text, (long long)k);
  MOELORA_TRY(moelora_check_rows(arg));
  for (int32_t dim = 0; dim < 3; dim++)
    MOELORA_REQUIRE(t->size[dim] == 1 || t->stride[dim] % 16 == 0,
                    "%s.stride(%d) is %lld, expected a multiple of 16", arg.name, dim,
                    (long long)t->stride[dim]);
  MOELORA_REQUIRE((uintptr_t)t->data % 16 == 0, "%s starts at %p, expected a multiple of 16 bytes",
                  arg.name, t->data);
  *weights = (moelora_weights){
      .data = t->data,
      .n = layout->rows,
      .k = k,
      .stride_e = moelora_stride(t, 0),
      .stride_nt = moelora_stride(t, 1),
      .stride_kt = moelora_stride(t, 2),
      .format = layout->format,
      .order = layout->order,
      .half_tiles = half_tiles,
      .x = layout->x,
      .x_scale = layout->x_scale,
  };
  return MOELORA_OK;
}

/* PLAIN order is equivalent to GATE_UP if both halves fill whole tiles. */
static moelora_status check_order(const moelora_weights_arg *arg, moelora_weights *weights) {
  const moelora_layout *layout = arg->layout;
  if (layout->order == MOELORA_ROWS_PLAIN && arg->order == MOELORA_ROWS_GATE_UP &&
      layout->rows % (2 * MOELORA_PACK) == 0) {
    weights->order = MOELORA_ROWS_GATE_UP;
    weights->half_tiles = moelora_half_tiles(weights->order, layout->rows);
    return MOELORA_OK;
  }
  MOELORA_REQUIRE(layout->order == arg->order, "%s.order is %s, expected %s%s", arg->layout_name,
                  order_name(layout->order), order_name(arg->order),
                  arg->order == MOELORA_ROWS_PLAIN ? "" : ", as the activation wants");
  return MOELORA_OK;
}

moelora_status moelora_check_weights(moelora_weights_arg *arg, moelora_weights *weights,
                                     int32_t *num_experts) {
  const moelora_tensor *t = arg->tensor.tensor, *x = arg->x.tensor;
  MOELORA_TRY(check_layout(arg->layout, arg->layout_name));
  if (!moelora_is_quantized(arg->layout->format)) {
    MOELORA_TRY(check_native(arg->tensor, weights));
    MOELORA_TRY(moelora_check_dtype(arg->tensor, x->dtype, arg->x.name));
    arg->n = moelora_size_of(arg->tensor, 1);
    arg->k = moelora_size_of(arg->tensor, 2);
    arg->n.scale = arg->k.scale = weights->packed ? " * 64" : NULL;
  } else {
    MOELORA_REQUIRE(x->dtype == MOELORA_BF16 || x->dtype == MOELORA_F16,
                    "%s has dtype %s, expected bfloat16 or float16, as %s is %s", arg->x.name,
                    moelora_dtype_name(x->dtype), arg->tensor.name,
                    moelora_format_name(arg->layout->format));
    arg->n = moelora_words(arg->layout_name);
    arg->n.scale = ".rows";
    MOELORA_TRY(check_tiles(arg->tensor, arg->layout, arg->depth, arg->n, arg->k, weights));
    MOELORA_TRY(check_order(arg, weights));
  }
  *num_experts = (int32_t)t->size[0];
  return MOELORA_OK;
}

moelora_arg moelora_dtype_source(const moelora_weights_arg *arg) {
  return !moelora_is_quantized(arg->layout->format) ? arg->tensor : arg->x;
}

/* ---- packing ---- */

moelora_status moelora_check_pack(const moelora_tensor *w, const moelora_tensor *out,
                                  moelora_pack_problem *problem) {
  const moelora_arg source = MOELORA_ARG("w", w), target = MOELORA_ARG("out", out);
  *problem = (moelora_pack_problem){0};
  MOELORA_TRY(moelora_check_view(source, 3, "[E, N, K]"));
  MOELORA_TRY(check_native(source, &problem->w));
  for (int32_t dim = 1; dim < 3; dim++)
    MOELORA_REQUIRE(w->size[dim] % MOELORA_PACK == 0,
                    "%s.size(%d) is %lld, expected a multiple of %d", source.name, dim,
                    (long long)w->size[dim], MOELORA_PACK);
  MOELORA_TRY(moelora_check_view(target, 5, "[E, N/64, K/64, 64, 64]"));
  MOELORA_TRY(moelora_check_dtype(target, w->dtype, source.name));
  MOELORA_TRY(moelora_check_size(target, 0, w->size[0], moelora_size_of(source, 0)));
  for (int32_t dim = 1; dim < 3; dim++) {
    moelora_source tiles = moelora_size_of(source, dim);
    tiles.scale = " / 64";
    MOELORA_TRY(moelora_check_size(target, dim, w->size[dim] / MOELORA_PACK, tiles));
  }
  for (int32_t dim = 3; dim < 5; dim++)
    MOELORA_TRY(moelora_check_size(target, dim, MOELORA_PACK, moelora_words("the side of a tile")));
  MOELORA_TRY(moelora_check_contiguous(target));
  MOELORA_TRY(moelora_check_disjoint(target, source));
  problem->num_experts = w->size[0];
  problem->element_bytes = (int32_t)moelora_dtype_bytes(w->dtype);
  problem->out = out->data;
  return MOELORA_OK;
}

/* ---- packing of quantized weights ---- */

static moelora_status check_quantized(const moelora_layout *layout, moelora_dtype dtype,
                                      const moelora_arg *tiles, int64_t k, moelora_source of_depth,
                                      moelora_quantized_problem *problem) {
  MOELORA_REQUIRE(dtype == MOELORA_BF16 || dtype == MOELORA_F16,
                  "dtype is %s, expected bfloat16 or float16", moelora_dtype_name(dtype));
  MOELORA_TRY(
      check_tiles(*tiles, layout, k, moelora_words("layout.rows"), of_depth, &problem->tiles));
  MOELORA_TRY(moelora_check_contiguous(*tiles));
  problem->num_experts = tiles->tensor->size[0];
  problem->dtype = dtype;
  return MOELORA_OK;
}

static moelora_status check_quantized_layout(const moelora_layout *layout) {
  MOELORA_REQUIRE(layout, "layout is NULL");
  MOELORA_REQUIRE(moelora_is_quantized(layout->format),
                  "layout.format is native, expected another");
  return check_layout(layout, "layout");
}

/* Group size for `groups` scales and k columns; 0: invalid. */
static int64_t group_of(const moelora_layout *layout, int64_t k, int64_t groups) {
  const int64_t columns = MOELORA_PACK / moelora_tile_groups(layout->format);
  if (k % groups != 0)
    return 0;
  const int64_t group = k / groups;
  const bool whole = group == k || group % MOELORA_PACK == 0;
  return (columns < MOELORA_PACK ? group == columns : whole) ? group : 0;
}

/* Checks scales and zeros: [E, N, K / group]. */
static moelora_status check_groups(moelora_arg arg, moelora_arg values, const int64_t *size,
                                   int64_t *strides) {
  MOELORA_TRY(moelora_check_view(arg, 3, "[E, N, K / group]"));
  for (int32_t dim = 0; dim < 2; dim++)
    MOELORA_TRY(moelora_check_size(arg, dim, size[dim], moelora_size_of(values, dim)));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  MOELORA_TRY(moelora_check_rows(arg));
  moelora_take_view(arg.tensor, strides, 2);
  return MOELORA_OK;
}

/* Checks scales, and zeros, of 4-bit formats. */
static moelora_status check_nibbles(const moelora_quantized *w, const moelora_layout *layout,
                                    moelora_arg values, moelora_quantized_problem *problem) {
  const moelora_arg scales = MOELORA_ARG("scales", &w->scales);
  const moelora_arg zeros = MOELORA_ARG("zeros", &w->zeros);
  MOELORA_REQUIRE(w->values.size[2] <= INT32_MAX / 2,
                  "%s.size(2) is %lld, expected at most 1073741823", values.name,
                  (long long)w->values.size[2]);
  MOELORA_REQUIRE(w->block_rows == 0 && w->block_columns == 0,
                  "block_rows is %lld and block_columns %lld, expected 0: %s has groups",
                  (long long)w->block_rows, (long long)w->block_columns,
                  moelora_format_name(layout->format));
  MOELORA_TRY(check_groups(scales, values, w->values.size, problem->scales_stride));
  if (moelora_scale_bytes(layout->format) == 1)
    MOELORA_TRY(moelora_check_dtype(scales, MOELORA_U8, NULL));
  else
    MOELORA_TRY(moelora_check_compute_dtype(scales));
  const int64_t k = 2 * w->values.size[2], groups = w->scales.size[2];
  problem->group = group_of(layout, k, groups);
  MOELORA_REQUIRE(problem->group, "%s.size(2) is %lld for K = %lld, expected a scale for %s",
                  scales.name, (long long)groups, (long long)k,
                  moelora_tile_groups(layout->format) == 1
                      ? "every 64 columns, a multiple of them, or all"
                  : moelora_has_groups_of_32(layout->format) ? "every 32 columns"
                                                             : "every 16 columns");
  if (moelora_has_zeros(layout->format)) {
    MOELORA_TRY(check_groups(zeros, values, w->values.size, problem->zeros_stride));
    MOELORA_TRY(moelora_check_dtype(zeros, MOELORA_U8, NULL));
    MOELORA_TRY(moelora_check_size(zeros, 2, groups, moelora_size_of(scales, 2)));
    problem->zeros = w->zeros.data;
  }
  return MOELORA_OK;
}

/* Scales of tensors, in formats that have them: [E, 1], or [E, 2] for gate and up. */
static moelora_status check_tensor_scales(const moelora_quantized *w, const moelora_layout *layout,
                                          moelora_arg values, moelora_quantized_problem *problem) {
  const moelora_arg scales = MOELORA_ARG("tensor_scales", &w->tensor_scales);
  const bool wanted = moelora_has_tile_scale(layout->format);
  MOELORA_REQUIRE(wanted || moelora_is_absent(scales.tensor), "%s is there, but %s has none",
                  scales.name, moelora_format_name(layout->format));
  if (!wanted)
    return MOELORA_OK;
  MOELORA_TRY(moelora_check_view(scales, 2, "[E, 1] or [E, 2]"));
  MOELORA_TRY(moelora_check_dtype(scales, MOELORA_F32, NULL));
  MOELORA_TRY(moelora_check_size(scales, 0, w->values.size[0], moelora_size_of(values, 0)));
  const int64_t halves = w->tensor_scales.size[1];
  MOELORA_REQUIRE(halves == 1 || (halves == 2 && layout->order != MOELORA_ROWS_PLAIN),
                  "%s.size(1) is %lld, expected 1%s", scales.name, (long long)halves,
                  layout->order == MOELORA_ROWS_PLAIN ? "" : ", or 2 for gate and up");
  problem->tensor_scales =
      moelora_take_view(&w->tensor_scales, problem->tensor_scales_stride, (int32_t)halves);
  return MOELORA_OK;
}

/* Within each tile, the first and the last row must be in the same block of scales. */
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

static moelora_status check_blocks(const moelora_quantized *w, const moelora_layout *layout,
                                   moelora_arg values, moelora_quantized_problem *problem) {
  const moelora_arg scales = MOELORA_ARG("scales", &w->scales);
  const int64_t rows = w->block_rows, columns = w->block_columns, k = w->values.size[2];
  const int64_t part = moelora_x_group(layout->format);
  MOELORA_REQUIRE(rows >= 1, "block_rows is %lld, expected at least 1", (long long)rows);
  MOELORA_REQUIRE(columns >= 1 && (columns % part == 0 || columns >= k),
                  "block_columns is %lld for K = %lld, expected a multiple of %lld, or all",
                  (long long)columns, (long long)k, (long long)part);
  MOELORA_TRY(moelora_check_view(scales, 3, "[E, N / block_rows, K / block_columns]"));
  MOELORA_TRY(moelora_check_dtype(scales, MOELORA_F32, NULL));
  MOELORA_TRY(moelora_check_rows(scales));
  MOELORA_TRY(moelora_check_size(scales, 0, w->values.size[0], moelora_size_of(values, 0)));
  MOELORA_TRY(moelora_check_size(scales, 1, (layout->rows - 1) / rows + 1,
                                 moelora_words("layout.rows / block_rows, rounded up,")));
  MOELORA_TRY(moelora_check_size(scales, 2, (k - 1) / columns + 1,
                                 moelora_words("K / block_columns, rounded up,")));
  if (!moelora_has_row_scales(layout->format) && rows > 1)
    MOELORA_TRY(check_tile_rows(layout, rows));
  moelora_take_view(&w->scales, problem->scales_stride, 2);
  problem->block_rows = rows;
  problem->block_columns = columns;
  return MOELORA_OK;
}

moelora_status moelora_check_pack_quantized(const moelora_quantized *w,
                                            const moelora_layout *layout, moelora_dtype dtype,
                                            const moelora_tensor *tiles,
                                            moelora_quantized_problem *problem) {
  const moelora_arg values = MOELORA_ARG("values", &w->values);
  const moelora_arg scales = MOELORA_ARG("scales", &w->scales);
  const moelora_arg zeros = MOELORA_ARG("zeros", &w->zeros);
  const moelora_arg out = MOELORA_ARG("tiles", tiles);
  *problem = (moelora_quantized_problem){0};
  MOELORA_TRY(check_quantized_layout(layout));
  const bool fp8 = moelora_is_fp8(layout->format);

  MOELORA_TRY(moelora_check_view(values, 3, fp8 ? "[E, N, K]" : "[E, N, K/2]"));
  MOELORA_TRY(moelora_check_dtype(values, MOELORA_U8, NULL));
  MOELORA_TRY(moelora_check_at_least_one(values));
  MOELORA_TRY(moelora_check_rows(values));
  MOELORA_TRY(moelora_check_size(values, 1, layout->rows, moelora_words("layout.rows")));
  MOELORA_REQUIRE(moelora_has_zeros(layout->format) || moelora_is_absent(&w->zeros),
                  "%s is there, but %s has none", zeros.name, moelora_format_name(layout->format));
  MOELORA_TRY((fp8 ? check_blocks : check_nibbles)(w, layout, values, problem));
  MOELORA_TRY(check_tensor_scales(w, layout, values, problem));

  moelora_source of_depth = moelora_size_of(values, 2);
  of_depth.scale = fp8 ? NULL : " * 2";
  MOELORA_TRY(
      check_quantized(layout, dtype, &out, w->values.size[2] * (fp8 ? 1 : 2), of_depth, problem));
  MOELORA_TRY(moelora_check_size(out, 0, w->values.size[0], moelora_size_of(values, 0)));
  const moelora_arg inputs[] = {values, scales, zeros,
                                MOELORA_ARG("tensor_scales", &w->tensor_scales)};
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
    MOELORA_TRY(moelora_check_disjoint(out, inputs[i]));
  problem->values = moelora_take_view(&w->values, problem->values_stride, 2);
  problem->scales = w->scales.data;
  problem->scale_dtype = w->scales.dtype;
  problem->packed = tiles->data;
  return MOELORA_OK;
}

moelora_status moelora_check_unpack_quantized(const moelora_tensor *tiles,
                                              const moelora_layout *layout,
                                              const moelora_tensor *out,
                                              moelora_quantized_problem *problem) {
  const moelora_arg source = MOELORA_ARG("tiles", tiles), target = MOELORA_ARG("out", out);
  *problem = (moelora_quantized_problem){0};
  MOELORA_TRY(check_quantized_layout(layout));
  MOELORA_TRY(moelora_check_view(target, 3, "[E, N, K]"));
  MOELORA_TRY(moelora_check_at_least_one(target));
  MOELORA_TRY(moelora_check_rows(target));
  MOELORA_TRY(moelora_check_size(target, 1, layout->rows, moelora_words("layout.rows")));
  MOELORA_TRY(
      check_quantized(layout, out->dtype, &source, out->size[2], moelora_words("K"), problem));
  MOELORA_TRY(moelora_check_size(target, 0, tiles->size[0], moelora_size_of(source, 0)));
  MOELORA_TRY(moelora_check_distinct(target));
  MOELORA_TRY(moelora_check_disjoint(target, source));
  problem->out = moelora_take_view(out, problem->out_stride, 2);
  return MOELORA_OK;
}
