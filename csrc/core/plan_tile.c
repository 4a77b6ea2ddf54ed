/* Selects the kernel of a projection or a layer. Every variant is a candidate; each one that is not
 * selected gets a reason:
 *
 *   it does not support the problem or the device     moelora_tile_misfit, moelora_variant_runs_on
 *   one launch for the whole layer is faster, or several are       keep_layer
 *   the device has newer instructions                              keep_newest
 *   measured GPU: another tile was fastest                         keep_measured
 *   other GPUs: another tile is faster by the model (cost.c)       keep_fastest
 *
 * Nothing here depends on adapters: a base row runs the same kernel with and without them. */
#include "core/plan_tile.h"

#include <math.h>
#include <stdio.h>

#include "core/format.h"
#include "core/log.h"

/* ---- measured on an H200; used for GPUs with the same chip ---- */

/* Routing is uneven: a block, or a cluster of blocks, must be larger than the average to hold
 * nearly every expert, whose weights are then read once. At a bound, the times of two adjacent
 * shapes are equal on an H200 (Qwen3-30B-A3B, Mixtral-8x7B, DeepSeek-V2-Lite; `python -m moelora
 * tune` measures another GPU). */
static const moelora_shape_bound native_shapes[] = {
    {8, {16, 1}},    /* bound by reading the weights */
    {26, {32, 1}},   /* rereading a few experts' weights costs less than a wider mma */
    {44, {64, 1}},   /* Hopper has no native tile of 64: 96 is faster than two CTAs of 64 per SM */
    {80, {96, 1}},   /* the largest tile with two CTAs per SM */
    {116, {128, 1}}, /* tensor cores begin to limit: x is read once per 256 weight rows */
    {INT64_MAX, {144, 2}}, /* bound by tensor cores: multicast shares the weights */
};

/* Each block dequantizes its weights again: for an expert in two blocks, that costs more than one
 * block with a wider mma (gpt-oss-20b, Qwen3-30B-A3B, Mixtral-8x7B). With 144 tokens nearly every
 * expert fits one block at 128 rows on average, two at 256. */
static const moelora_shape_bound quantized_shapes[] = {
    {8, {16, 1}},  {26, {32, 1}},   {44, {64, 1}},
    {82, {96, 1}}, {112, {128, 1}}, {INT64_MAX, {144, 1}},
};

/* FP8 weights and tokens (Qwen3-30B-A3B, Mixtral): weight-major tiles have registers for at most 96
 * tokens, because of the second accumulator and the scales. Token-major tiles of 128 are faster,
 * but process tokens 64 at a time and have a longer epilogue: they pay off if one tile holds most
 * experts, or if two tiles of 96 no longer hold nearly every expert. In a cluster, two tiles of 96
 * multicast weights. */
static const moelora_shape_bound w8a8_shapes[] = {
    {8, {16, 1}},    {26, {32, 1}},  {44, {64, 1}},         {80, {96, 1}},
    {108, {128, 2}}, {176, {96, 2}}, {INT64_MAX, {128, 2}},
};

moelora_shape moelora_shape_for(const moelora_shape_bound *bound, int64_t rows) {
  while (rows > bound->rows)
    bound++;
  return bound->shape;
}

static moelora_shape measured_shape(int64_t rows, const moelora_access *access) {
  const bool native =
      moelora_is_native_kernel(access->format) && moelora_is_native_kernel(access->second);
  return moelora_shape_for(native                                   ? native_shapes
                           : moelora_is_e4m3_kernel(access->format) ? w8a8_shapes
                                                                    : quantized_shapes,
                           rows);
}

bool moelora_is_nearer(const moelora_variant *v, const moelora_variant *best, moelora_shape want) {
  const int32_t candidate = v->block_m, known = best->block_m;
  if (candidate == known)
    return v->cluster == want.cluster && best->cluster != want.cluster;
  if ((candidate >= want.block) != (known >= want.block))
    return candidate >= want.block;
  return candidate >= want.block ? candidate < known : candidate > known;
}

/* ---- what a row supports ---- */

const moelora_variant *moelora_tile_of_format(const moelora_variant *v,
                                              moelora_kernel_format format,
                                              const moelora_device_info *device) {
  const moelora_variant *other;
  if (v->device == MOELORA_CPU || v->format == format)
    return v;
  for (int32_t i = 0; (other = moelora_variant_at(i)); i++)
    if (other->role == v->role && other->format == format && other->dtype == v->dtype &&
        other->needs == v->needs && other->block_m == v->block_m && other->cluster == v->cluster &&
        moelora_variant_runs_on(other, device))
      return other;
  return NULL;
}

/* Whether a Hopper kernel can store outputs by flat row, which a single projection returns: by the
 * PLAIN epilogue (moelora_stores_by_row), or by the GENERAL one with 128 weight rows. */
static bool stores_flat_rows(const moelora_variant *v) {
  return moelora_stores_by_row(v) || (v->cluster == 1 && v->block_n == 128);
}

/* A forward must return the same bits whether or not it saves values for a backward, but mma.sync
 * and wgmma accumulate FP8 products differently. If w13 is dequantized and x of w2 is FP8, no
 * Hopper kernels save these values: such a layer always runs portable kernels. */
static bool trains_on_hopper(const moelora_access *access) {
  return !(access->layer && moelora_is_dequantized_kernel(access->format) &&
           moelora_is_e4m3_kernel(access->second));
}

/* Whether the kernel can address all rows of x. Hopper kernels gather rows by 32-bit offsets in
 * units of 16 bytes; portable kernels store the row stride in an int32. */
static bool reaches_rows(const moelora_variant *v, const moelora_access *access) {
  const bool sm90 = v->needs == MOELORA_SM90;
  int64_t stride = access->x_stride;
  if (moelora_is_e4m3_kernel(v->format))
    stride = moelora_divide_up(access->k, 128) * (sm90 ? 64 : 128);
  return sm90 ? access->x_rows * (stride / 8) <= UINT32_MAX : stride <= INT32_MAX;
}

const char *moelora_tile_misfit(const moelora_variant *v, const moelora_access *access,
                                const moelora_device_info *device) {
  if (v->device == MOELORA_CPU)
    return NULL;
  if (v->format != access->format)
    return "it is for weights of another format";
  if (access->layer && !moelora_tile_of_format(v, access->second, device))
    return "no row like it is for the format of w2";
  if (access->saves && v->role == MOELORA_ROLE_GEMM && !moelora_variant_saves(v))
    return "it does not store what a backward needs";
  if (v->role == MOELORA_ROLE_LAYER)
    return access->decode ? NULL : "it only takes a few tokens of a whole layer";
  if (!reaches_rows(v, access))
    return "its offsets do not reach all rows of x";
  if (v->needs == MOELORA_SM90) {
    if (!access->tma)
      return "no tensor map covers the weights, or something allows no 16-byte accesses";
    if (access->x_groups_of_64)
      return "it takes no FP8 x with scales of 64 columns";
    if (!trains_on_hopper(access))
      return "FP8 products of w2 would be summed in another order than in training";
    return access->layer || stores_flat_rows(v) ? NULL : "it only stores outputs of whole layers";
  }
  /* Larger tiles would spill with element-wise copies. */
  return access->vectors || v->block_m <= MOELORA_ELEMENT_ROWS
             ? NULL
             : "something allows no 16-byte accesses";
}

/* ---- selection ---- */

typedef struct tile_list {
  moelora_tile *tiles;
  int32_t count;
} tile_list;

/* Rejects all tiles but `best`, if there is one. */
static void keep(tile_list list, const moelora_tile *best, const char *why_not) {
  for (moelora_tile *t = list.tiles; best && t < list.tiles + list.count; t++)
    if (!t->why_not && t != best)
      t->why_not = why_not;
}

/* For few tokens, keeps the first whole-layer kernel; otherwise rejects all of them. */
static void keep_layer(tile_list list, bool few) {
  const moelora_tile *layer = NULL;
  for (moelora_tile *t = list.tiles; t < list.tiles + list.count; t++) {
    if (t->why_not || t->variant->role != MOELORA_ROLE_LAYER)
      continue;
    if (!few)
      t->why_not = "several launches are faster";
    else if (!layer)
      layer = t;
  }
  keep(list, layer, "one launch for the whole layer is faster");
}

/* Keeps the tiles of the newest instruction set or GPU family. */
static void keep_newest(tile_list list) {
  int32_t newest = -1;
  for (const moelora_tile *t = list.tiles; t < list.tiles + list.count; t++)
    if (!t->why_not && t->variant->needs > newest)
      newest = t->variant->needs;
  for (moelora_tile *t = list.tiles; t < list.tiles + list.count; t++)
    if (!t->why_not && t->variant->needs < newest)
      t->why_not = "newer instructions of the device serve";
}

/* Keeps the tile nearest to the one that was measured fastest. */
static void keep_measured(tile_list list, moelora_shape want) {
  const moelora_tile *best = NULL;
  for (const moelora_tile *t = list.tiles; t < list.tiles + list.count; t++)
    if (!t->why_not && (!best || moelora_is_nearer(t->variant, best->variant, want)))
      best = t;
  keep(list, best, "another tile was measured faster");
}

/* The model cannot rank tiles whose times are within this factor. keep_fastest() takes the smallest
 * of them that holds an average expert (least padding), or else the largest (fewest reads). */
#define TIE_FACTOR 1.01

static void keep_fastest(tile_list list, int64_t rows) {
  double least = INFINITY;
  const moelora_tile *best = NULL;
  for (const moelora_tile *t = list.tiles; t < list.tiles + list.count; t++)
    if (!t->why_not && t->ns < least)
      least = t->ns;
  for (const moelora_tile *t = list.tiles; t < list.tiles + list.count; t++) {
    if (t->why_not || t->ns > TIE_FACTOR * least)
      continue;
    const moelora_shape average = {rows <= INT32_MAX ? (int32_t)rows : INT32_MAX, 0};
    if (!best || moelora_is_nearer(t->variant, best->variant, average))
      best = t;
  }
  keep(list, best, "another tile is faster by the model of the device");
}

double moelora_model_ns(const moelora_variant *v, int64_t rows, const moelora_access *access,
                        const moelora_device_info *device) {
  if (v->device == MOELORA_CPU || v->role != MOELORA_ROLE_GEMM)
    return 0;
  const double ns = moelora_tile_ns(v, (double)rows, device);
  if (!access->layer)
    return ns;
  const moelora_variant *w2 = moelora_tile_of_format(v, access->second, device);
  return (ns + moelora_tile_ns(w2, (double)rows, device)) / 2;
}

int32_t moelora_list_tiles(int64_t rows, moelora_dtype dtype, const moelora_access *access,
                           const moelora_device_info *device,
                           moelora_tile tiles[MOELORA_MAX_TILES]) {
  tile_list list = {tiles, 0};
  const moelora_variant *v;
  for (int32_t i = 0; (v = moelora_variant_at(i)); i++) {
    if (v->dtype != dtype || v->device != device->device ||
        (v->role != MOELORA_ROLE_LAYER && v->role != MOELORA_ROLE_GEMM))
      continue;
    moelora_tile *t = &tiles[list.count++];
    *t = (moelora_tile){v, moelora_tile_misfit(v, access, device), 0};
    if (!t->why_not && !moelora_variant_runs_on(v, device))
      t->why_not = "it does not run on this device";
  }
  keep_layer(list, access->few);
  keep_newest(list);
  if (device->device == MOELORA_CPU)
    return list.count; /* one variant for each instruction set */
  if (moelora_is_measured(device)) {
    keep_measured(list, measured_shape(rows, access));
    return list.count;
  }
  for (moelora_tile *t = tiles; t < tiles + list.count; t++)
    if (!t->why_not)
      t->ns = moelora_model_ns(t->variant, rows, access, device);
  keep_fastest(list, rows);
  return list.count;
}

const moelora_variant *moelora_choose_tile(int64_t rows, moelora_dtype dtype,
                                           const moelora_access *access,
                                           const moelora_device_info *device) {
  moelora_tile tiles[MOELORA_MAX_TILES];
  const int32_t count = moelora_list_tiles(rows, dtype, access, device, tiles);
  const moelora_variant *chosen = NULL;
  for (int32_t i = 0; i < count; i++) {
    if (!tiles[i].why_not)
      chosen = tiles[i].variant;
    if (tiles[i].ns > 0 && moelora_log() >= MOELORA_LOG_PLAN)
      fprintf(stderr, "moelora:   tile %s: %.4f ns for 1000 weights%s%s\n", tiles[i].variant->name,
              tiles[i].ns, tiles[i].why_not ? ", " : "", tiles[i].why_not ? tiles[i].why_not : "");
  }
  return chosen;
}
