/* Selection of a kernel for a projection or a layer: its inputs, and the verdict on every row of
 * the table. */
#ifndef MOELORA_CORE_PLAN_TILE_H
#define MOELORA_CORE_PLAN_TILE_H

#include "core/plan.h"

/* Kernel features that a problem allows, from shapes, strides and pointers of everything but
 * adapters: 16-byte accesses, TMA boxes of 64 weight rows, the whole layer in a single launch. */
typedef struct moelora_access {
  bool vectors, tma, decode;
  bool few;       /* few enough tokens and rows that a single launch is faster */
  bool layer;     /* a whole layer, whose results have the layout of its kernels */
  int64_t x_rows; /* maximum offset of rows of x; FP8 x is in the workspace */
  int64_t x_stride, k;
  moelora_kernel_format format;
  moelora_kernel_format second; /* format of w2 in a layer */
  bool halves; /* FP8 scales of 64 elements of K, which Hopper kernels do not support */
} moelora_access;

/* Verdict on a row of the table. */
typedef struct moelora_tile {
  const moelora_variant *variant;
  const char *why_not; /* why it is not selected; NULL: selected */
  double ns;           /* per 1000 weights by the cost model; 0: not supported */
} moelora_tile;

enum { MOELORA_MOST_TILES = 160 };

/* plan_tile.c: lists all projection and layer rows of `dtype`, for `rows` rows per expert on
 * average; at most one has no reason against it. Returns their number. */
int32_t moelora_list_tiles(int64_t rows, moelora_dtype dtype, const moelora_access *access,
                           const moelora_device_info *device,
                           moelora_tile tiles[MOELORA_MOST_TILES]);
/* The selected row, or NULL. */
const moelora_variant *moelora_choose_tile(int64_t rows, moelora_dtype dtype,
                                           const moelora_access *access,
                                           const moelora_device_info *device);
/* Why a row does not support a problem; NULL: it does. */
const char *moelora_tile_misfit(const moelora_variant *variant, const moelora_access *access,
                                const moelora_device_info *device);
/* Row that differs from `variant` only in the weight format and runs on the device, or NULL. */
const moelora_variant *moelora_tile_of_format(const moelora_variant *variant,
                                              moelora_kernel_format format,
                                              const moelora_device_info *device);

/* cost.c: whether the measured choices apply to this GPU. */
bool moelora_is_measured(const moelora_device_info *device);
/* cost.c: nanoseconds per 1000 weights, by a projection's row, for experts with this many rows on
 * average. */
double moelora_tile_ns(const moelora_variant *variant, double rows,
                       const moelora_device_info *device);

/* family.c: shared memory of the stages of a projection's kernel. */
int32_t moelora_pipeline_bytes(const moelora_variant *variant);

#endif
