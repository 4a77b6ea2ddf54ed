/* Internal interfaces between the files that compute plans. */
#pragma once

#include "core/backend.h"

/* variants.c: return a row of the tables by index or by name, NULL: there is none. */
const moelora_variant *moelora_variant_at(int32_t index);
const moelora_variant *moelora_find_variant(const char *name, size_t length);
/* Returns the first row with the device, role, method, dtype, family and flags of `like`, and with
 * its block_n, block_k, warps, ctas and spans; a 0 in these matches any value. */
const moelora_variant *moelora_variant_like(const moelora_variant *like);
/* Whether a projection row also has a kernel that stores the values before the activation. */
bool moelora_variant_saves(const moelora_variant *variant);
/* Whether the row is a Hopper kernel whose PLAIN epilogue can store outputs by flat row. */
bool moelora_stores_by_row(const moelora_variant *variant);

/* device.c: whether this build contains the kernels of the variant. Plans also choose variants that
 * MOELORA_VARIANTS excluded; run.c then rejects the call. */
bool moelora_is_built(const moelora_variant *variant);

/* family.c: checks MOELORA_MAX_CC; limits capability and shared memory of a device. */
moelora_status moelora_check_limit(void);
moelora_device_info moelora_limited(const moelora_device_info *device);
/* Whether the device, within the limit, has the instructions and shared memory of the variant. */
bool moelora_variant_runs_on(const moelora_variant *variant, const moelora_device_info *device);
/* Returns the newest family whose kernels the device runs, within the limit. */
moelora_family moelora_family_of(const moelora_device_info *device);

/* forced.c: checks all environment variables that affect plans. */
moelora_status moelora_check_environment(void);
/* Returns the forced variant of a role; NULL: none, of another dtype, or not for this device. */
const moelora_variant *moelora_forced(moelora_role role, moelora_dtype dtype,
                                      const moelora_device_info *device);
bool moelora_is_forced(const moelora_variant *variant);

/* family.c: reports that the device has no kernel for the dtype; more: "" or "FP8 weights and ". */
moelora_status moelora_no_kernel_for(moelora_dtype dtype, const char *more,
                                     const moelora_device_info *device);

/* tuned.c: returns the variant of this role that a tuned plan names for the layer on this device,
 * or NULL. A whole-layer variant has the role GEMM here. */
const moelora_variant *moelora_tuned_variant(const moelora_experts_problem *problem,
                                             const moelora_device_info *device, moelora_role role);

/* Returns how many routed rows a local expert has on average, at least 1. */
static inline int64_t moelora_rows_per_expert(const moelora_routes *routes) {
  const int64_t everywhere =
      routes->num_global > routes->num_experts ? routes->num_global : routes->num_experts;
  return routes->num_rows > everywhere ? moelora_divide_up(routes->num_rows, everywhere) : 1;
}

/* plan_gemm.c: picks the variant for a CPU. */
moelora_status moelora_plan_cpu(moelora_dtype dtype, const moelora_device_info *device,
                                const moelora_variant **picked);
/* plan_gemm.c: returns the variant that sums over top_k. vectors: out allows 16-byte accesses. */
const moelora_variant *moelora_plan_sum(moelora_dtype dtype, bool vectors,
                                        const moelora_variant *tuned,
                                        const moelora_device_info *device);

/* plan_gemm.c: rejects problems that exceed the limits of projection kernels or of the sort. */
moelora_status moelora_check_kernel_limits(const moelora_routes *routes,
                                           const moelora_factors *lora,
                                           const moelora_device_info *device);
/* plan_gemm.c: rejects a row stride that is too large for GPU kernels. */
moelora_status moelora_check_row_stride(const char *name, int64_t stride);
/* plan_gemm.c: whether one tensor map covers the weights of all experts. */
bool moelora_are_map_weights(const moelora_weights *w, int32_t num_experts);
/* Inputs to the plan of a projection over an alignment, besides its kernel. */
typedef struct moelora_projection_load {
  const moelora_routes *routes;
  const moelora_weights *w;
  const moelora_factors *lora;
  const void *x; /* NULL: in the workspace */
  int64_t x_stride;
  int64_t x_rows_each; /* routed rows per row of x; 0: x is in alignment order */
  const void *out;     /* NULL: in alignment order, in the workspace */
  int64_t out_stride[2];
  int64_t n_out; /* outputs per row */
  bool gated, interleaved, weighted;
  const moelora_weights *next; /* weights of the next projection, which reads `out`; NULL: none */
  bool next_reads_out;         /* adapters of the next projection read `out` unquantized */
  bool x_is_quantized;         /* the epilogue of the previous projection quantizes x */
} moelora_projection_load;

/* plan_projection.c */
moelora_projection_plan moelora_plan_projection(const moelora_projection_load *load,
                                                const moelora_variant *variant,
                                                const moelora_device_info *device);
moelora_shrink_plan moelora_plan_projection_shrink(const moelora_projection_load *load,
                                                   const moelora_variant *variant,
                                                   const moelora_align_plan *align,
                                                   const moelora_variant *tuned,
                                                   const moelora_device_info *device);

/* cost.c: returns the time in which the device's memory transfers `bytes`. */
double moelora_memory_ns(const moelora_device_info *device, double bytes);

/* plan_sort.c: plans a sort of routed rows into blocks of `rows` rows of one expert; all blocks of
 * a cluster have the same expert. tuned: variant to use if it supports the problem; NULL: none. */
void moelora_plan_blocks(const moelora_routes *routes, int32_t rows, int32_t cluster,
                         const moelora_device_info *device, const moelora_variant *tuned,
                         moelora_align_plan *plan);

/* plan_sort.c: rejects more experts or adapters than a GPU can sort by. */
moelora_status moelora_check_sort(moelora_align_mode mode, const moelora_routes *routes);

/* Inputs of the plan of a shrink. */
typedef struct moelora_shrink_load {
  moelora_dtype dtype;
  moelora_family family; /* family of kernels to select from */
  int64_t rows;          /* P */
  int64_t segments;      /* number of (expert, adapter) pairs that may have rows */
  int64_t columns;       /* rows of A: all slices, each padded to 16 */
  int64_t depth;
  bool vectors;   /* x and A allow 16-byte accesses */
  bool boxes;     /* tensor maps can describe A, and offsets of rows of x fit 32 bits */
  int64_t listed; /* segments that the sort lists, with empty ones; 0: no usable list */
  const moelora_variant *tuned; /* row to use if it supports the problem; NULL: none */
  /* only for a shrink over blocks of a GEMM */
  int64_t max_blocks;
  int32_t block_rows;
  bool by_position; /* x is in alignment order, not gathered */
  int64_t x_rows;   /* rows of x, if it is gathered */
  /* only for a shrink over windows */
  moelora_delta_order order;
  const moelora_routes *routes;
  const moelora_list_blocks *lists;
} moelora_shrink_load;

/* plan_shrink.c */
moelora_shrink_plan moelora_plan_shrink_blocks(const moelora_shrink_load *load,
                                               const moelora_device_info *device);
moelora_shrink_plan moelora_plan_shrink_windows(const moelora_shrink_load *load,
                                                const moelora_device_info *device);
/* Returns the value of moelora_shrink_load.boxes for `rows` rows of x that are `stride` elements
 * apart. */
bool moelora_are_boxes(const moelora_factors *lora, int64_t rows, int64_t stride);

/* Windows of routed rows, and their distribution over workers. */
typedef struct moelora_windows {
  int32_t rows;   /* maximum number of rows per window */
  int32_t shares; /* workers that share a window */
  int64_t count;  /* maximum number of windows */
} moelora_windows;

/* plan_shrink.c: splits the rows into equal windows of at most `most` rows for `workers` workers.
 * No window gets more workers than it can have items; an item is `part` rows of a segment in one of
 * `columns` column tiles. */
moelora_windows moelora_cut_windows(const moelora_routes *routes, const moelora_list_blocks *lists,
                                    moelora_delta_order order, int64_t most, int64_t part,
                                    int64_t columns, int64_t workers);

/* plan_log.c: logs under MOELORA_LOG=plan why a forced or tuned row is not used. */
void moelora_log_passed_over(const moelora_variant *variant, const char *why);

/* plan_log.c: records the plan of a call for moelora_last_plan; logs it under MOELORA_LOG=plan. */
#define OPERATOR(NAME, PROBLEM, PLAN, ...)                                                         \
  void moelora_note_##NAME(const moelora_##PROBLEM *problem, const moelora_device_info *device,    \
                           const moelora_##PLAN *plan);
#include "core/operators.inc"

/* device.c: finds the backend and the device of `exec`. On a CPU, info->num_units is the number of
 * threads of `exec`. */
moelora_status moelora_find_device(const moelora_exec *exec, const moelora_backend **backend,
                                   moelora_device_info *info);
