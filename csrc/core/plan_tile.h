/* Selection of the kernel of a projection or a layer: its inputs and its candidates. */
#pragma once

#include "core/plan.h"

/* Inputs to the selection. `vectors`, `tma`, `decode`: whether the problem, except for its
 * adapters, permits 16-byte accesses, TMA or bulk copies of weights, and a single launch of a
 * layer. */
typedef struct moelora_access {
  bool vectors, tma, decode;
  bool few;       /* a single launch of the layer is faster than several */
  bool saves;     /* the layer also stores values for its backward */
  bool layer;     /* a whole layer, whose kernels choose the layout of h and z */
  int64_t x_rows; /* number of rows of x, which kernels index */
  int64_t x_stride, k;
  moelora_kernel_format format;
  moelora_kernel_format second; /* format of w2 in a layer */
  bool x_groups_of_64; /* FP8 x with scales of 64 elements of K, which Hopper kernels do not support
                        */
} moelora_access;

/* A row of the table as a candidate for a problem. */
typedef struct moelora_tile {
  const moelora_variant *variant;
  const char *why_not; /* reason to pass over the variant; NULL: none */
  double ns;           /* moelora_model_ns if the selection depends on it; otherwise 0 */
} moelora_tile;

/* variants.c asserts that the table has no more rows. */
enum { MOELORA_MAX_TILES = 384 };

/* plan_tile.c: fills `tiles` with all variants of `dtype` for projections and layers, and returns
 * their number. At most one has no why_not: the best for `rows` rows per expert on average. */
int32_t moelora_list_tiles(int64_t rows, moelora_dtype dtype, const moelora_access *access,
                           const moelora_device_info *device,
                           moelora_tile tiles[MOELORA_MAX_TILES]);
/* Returns the variant that is selected; NULL: none supports the problem. */
const moelora_variant *moelora_choose_tile(int64_t rows, moelora_dtype dtype,
                                           const moelora_access *access,
                                           const moelora_device_info *device);
/* Returns the estimated nanoseconds of `variant` per 1000 weights, with `rows` rows per expert on
 * average; for a layer, the mean of both projections. 0: not modeled. */
double moelora_model_ns(const moelora_variant *variant, int64_t rows, const moelora_access *access,
                        const moelora_device_info *device);
/* Returns why a variant does not support a problem; NULL: it does. */
const char *moelora_tile_misfit(const moelora_variant *variant, const moelora_access *access,
                                const moelora_device_info *device);
/* Returns the variant for weights of `format` with the role, dtype, family, block_m and cluster of
 * `variant` that runs on the device; NULL: there is none. On a CPU: `variant`. */
const moelora_variant *moelora_tile_of_format(const moelora_variant *variant,
                                              moelora_kernel_format format,
                                              const moelora_device_info *device);

/* Tokens per block of a CUDA kernel, and blocks per cluster. */
typedef struct moelora_shape {
  int32_t block, cluster;
} moelora_shape;

/* Shape for at most `rows` rows per expert on average; the last bound of a table is INT64_MAX. */
typedef struct moelora_shape_bound {
  int64_t rows;
  moelora_shape shape;
} moelora_shape_bound;

moelora_shape moelora_shape_for(const moelora_shape_bound *table, int64_t rows);
/* Whether `v` is nearer to `want` than `best`: by block size (the smallest sufficient one, else the
 * largest), then by cluster size. */
bool moelora_is_nearer(const moelora_variant *v, const moelora_variant *best, moelora_shape want);

/* cost.c: whether the measured tables apply to this GPU. */
bool moelora_is_measured(const moelora_device_info *device);
/* cost.c: returns the modeled time of one projection per 1000 weights. */
double moelora_tile_ns(const moelora_variant *variant, double rows,
                       const moelora_device_info *device);

/* family.c: returns the shared memory of all stages of a projection's kernel. */
int32_t moelora_pipeline_bytes(const moelora_variant *variant);
