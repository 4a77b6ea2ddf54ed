/* The choice of a kernel for a projection or a layer: what it depends on, and every row of the
 * table beside that. */
#ifndef MOELORA_CORE_PLAN_TILE_H
#define MOELORA_CORE_PLAN_TILE_H

#include "core/plan.h"

/* What a problem lets a CUDA kernel do, from shapes, strides and pointers of everything but
 * adapters: 16-byte accesses, boxes of 64 weight rows by TMA, the whole layer in one launch. */
typedef struct moelora_access {
  bool vectors, tma, decode;
  bool few;       /* tokens and rows, so that one launch is better than several */
  bool layer;     /* a whole layer, whose results lie as its kernels like them */
  int64_t x_rows; /* of x, so far apart; FP8 ones lie in the workspace */
  int64_t x_stride, k;
  moelora_kernel_format format;
  moelora_kernel_format second; /* that of w2, where it is a layer */
  bool halves; /* some FP8 scales are of 64 of depth, for which Hopper has no kernel */
} moelora_access;

/* A row of the table beside a problem. */
typedef struct moelora_tile {
  const moelora_variant *variant;
  const char *why_not; /* it is not the one to run; NULL: it is */
  double ns;           /* of 1000 weights by the model of the device; 0: it does not serve */
} moelora_tile;

enum { MOELORA_MOST_TILES = 160 };

/* plan_tile.c: all rows of `dtype` that are projections or layers, of which at most one has no
 * reason against it, where an expert has `rows` rows on average; how many these are. */
int32_t moelora_list_tiles(int64_t rows, moelora_dtype dtype, const moelora_access *access,
                           const moelora_device_info *device,
                           moelora_tile tiles[MOELORA_MOST_TILES]);
/* That one; NULL: none serves. */
const moelora_variant *moelora_choose_tile(int64_t rows, moelora_dtype dtype,
                                           const moelora_access *access,
                                           const moelora_device_info *device);
/* Why a row cannot run a problem; NULL: it can. */
const char *moelora_tile_misfit(const moelora_variant *variant, const moelora_access *access,
                                const moelora_device_info *device);
/* The row that differs from `variant` in nothing but the weight format, and runs on the device;
 * NULL: there is none. */
const moelora_variant *moelora_tile_of_format(const moelora_variant *variant,
                                              moelora_kernel_format format,
                                              const moelora_device_info *device);

/* cost.c: the measured choices are those of this GPU. */
bool moelora_is_measured(const moelora_device_info *device);
/* cost.c: nanoseconds that 1000 weights of an expert of so many rows on average take, by a row of a
 * projection. */
double moelora_tile_ns(const moelora_variant *variant, double rows,
                       const moelora_device_info *device);

/* family.c: what the stages of a projection's kernel keep in shared memory. */
int32_t moelora_pipeline_bytes(const moelora_variant *variant);

#endif
