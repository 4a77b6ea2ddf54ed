/* Internal interfaces between the files that compute plans. */
#ifndef MOELORA_CORE_PLAN_H
#define MOELORA_CORE_PLAN_H

#include "core/backend.h"

static inline int64_t moelora_divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* variants.c: enumerates all rows of both tables, NULL past the end; finds a row by name, or NULL.
 */
const moelora_variant *moelora_variant_at(int32_t index);
const moelora_variant *moelora_find_variant(const char *name, size_t length);
/* Finds the first row with this device, role, method, dtype, family and flags; 0 matches any. */
const moelora_variant *moelora_variant_like(const moelora_variant *like);
/* Whether a row for projections also has a kernel that stores values before the activation. */
bool moelora_variant_saves(const moelora_variant *variant);
/* Whether a Hopper row has a kernel whose PLAIN epilogue stores flat rows. */
bool moelora_stores_by_row(const moelora_variant *variant);

/* device.c: whether this build contains the kernels of the variant. Variants excluded by
 * MOELORA_VARIANTS are planned as usual, then rejected. */
bool moelora_is_built(const moelora_variant *variant);

/* family.c: checks the environment's limit of the compute capability; applies it to a device. */
moelora_status moelora_check_limit(void);
moelora_device_info moelora_limited(const moelora_device_info *device);
/* Whether the device supports the variant's instructions. */
bool moelora_variant_runs_on(const moelora_variant *variant, const moelora_device_info *device);
/* Returns the family whose kernels the device runs: its own, or the portable one. */
moelora_family moelora_family_of(const moelora_device_info *device);

/* forced.c: checks all environment variables that affect plans. */
moelora_status moelora_check_environment(void);
/* Returns the forced variant of a role, or NULL if it has another dtype or the device lacks it. */
const moelora_variant *moelora_forced(moelora_role role, moelora_dtype dtype,
                                      const moelora_device_info *device);
bool moelora_is_forced(const moelora_variant *variant);

/* family.c: refuses a device without kernels for the dtype; more: "" or "FP8 weights and ". */
moelora_status moelora_no_kernel_for(moelora_dtype dtype, const char *more,
                                     const moelora_device_info *device);

/* tuned.c: variant of this role that was measured to be best for the layer on such a device; NULL:
 * none. A whole-layer row counts as one of its projections. */
const moelora_variant *moelora_tuned_variant(const moelora_experts_problem *problem,
                                             const moelora_device_info *device, moelora_role role);

/* Returns how many routed rows a local expert has on average, at least 1. */
static inline int64_t moelora_rows_per_expert(const moelora_routes *routes) {
  const int64_t everywhere =
      routes->num_global > routes->num_experts ? routes->num_global : routes->num_experts;
  return routes->num_rows > everywhere ? moelora_divide_up(routes->num_rows, everywhere) : 1;
}

/* plan_gemm.c: the variant of a CPU. */
moelora_status moelora_plan_cpu(moelora_dtype dtype, const moelora_device_info *device,
                                const moelora_variant **picked);
/* plan_gemm.c: the variant that sums over top_k. vectors: the output allows 16-byte accesses. */
const moelora_variant *moelora_plan_sum(moelora_dtype dtype, bool vectors,
                                        const moelora_variant *tuned,
                                        const moelora_device_info *device);

/* plan_gemm.c: rejects problems that exceed the limits of the kernels of a layer or a projection,
 * or of the sort. */
moelora_status moelora_check_kernel_limits(const moelora_routes *routes,
                                           const moelora_factors *lora,
                                           const moelora_device_info *device);
/* plan_gemm.c: refuses rows that are too far apart for GPU kernels. */
moelora_status moelora_check_row_stride(const char *name, int64_t stride);
/* plan_gemm.c: whether one tensor map covers the weights of all experts. */
bool moelora_are_map_weights(const moelora_weights *w, int32_t num_experts);
/* plan_gemm.c: layout of float32 factors once rounded to the dtype of the call: contiguous, in the
 * workspace. Other factors keep theirs. */
moelora_factors moelora_rounded_layout(const moelora_factors *factors, int64_t depth,
                                       int32_t num_experts);

/* Inputs to the plan of a projection over an alignment, besides its kernel. */
typedef struct moelora_projection_load {
  const moelora_routes *routes;
  const moelora_weights *w;
  const moelora_factors *lora;
  const void *x; /* NULL: in the workspace */
  int64_t x_stride;
  int64_t x_rows_each; /* routed rows per row of x; 0: x is ordered by position */
  const void *out;     /* NULL: ordered by position, in the workspace */
  int64_t out_stride[2];
  int64_t n_out; /* outputs per row */
  bool gated, interleaved, weighted;
  const moelora_weights *next; /* weights of the projection whose x is `out`; NULL: none */
  bool next_reads_out;         /* its adapters read `out` unquantized */
  bool x_is_quantized;         /* by the previous projection */
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

/* cost.c: time in which the device's memory transfers `bytes`. */
double moelora_memory_ns(const moelora_device_info *device, double bytes);

/* plan_sort.c: plans a sort of rows into blocks of one expert; clusters of `cluster` blocks belong
 * together. tuned: row to use if it supports the problem; NULL: none. */
void moelora_plan_blocks(const moelora_routes *routes, int32_t rows, int32_t cluster,
                         const moelora_device_info *device, const moelora_variant *tuned,
                         moelora_align_plan *plan);

/* plan_sort.c: refuses more experts or adapters than a GPU can sort by. */
moelora_status moelora_check_sort(moelora_align_mode mode, const moelora_routes *routes);

/* Inputs of the plan of a shrink. */
typedef struct moelora_shrink_load {
  moelora_dtype dtype;
  moelora_family family; /* family of kernels to select from */
  int64_t rows;          /* P */
  int64_t segments;      /* number of pairs that may have rows */
  int64_t columns;       /* rows of A: all slices, each padded to 16 */
  int64_t depth;
  bool vectors;   /* x and A allow 16-byte accesses */
  bool boxes;     /* tensor maps can describe A, and offsets of rows of x fit 32 bits */
  int64_t listed; /* number of segments, including empty ones, that the sort lists for kernels over
                     whole segments; 0: none */
  const moelora_variant *tuned; /* row to use if it supports the problem; NULL: none */
  /* over blocks of a GEMM */
  int64_t max_blocks;
  int32_t block_rows;
  bool by_position; /* x is ordered by position */
  int64_t x_rows;   /* different rows of x, if it is not */
  /* over windows */
  moelora_delta_order order;
  const moelora_routes *routes;
  const moelora_list_blocks *lists;
} moelora_shrink_load;

/* plan_shrink.c */
moelora_shrink_plan moelora_plan_shrink_blocks(const moelora_shrink_load *load,
                                               const moelora_device_info *device);
moelora_shrink_plan moelora_plan_shrink_windows(const moelora_shrink_load *load,
                                                const moelora_device_info *device);
/* Value of `moelora_shrink_load.boxes`: tensor maps can describe A, and offsets of `rows` rows of
 * x, `stride` elements apart, fit 32 bits. */
bool moelora_are_boxes(const moelora_factors *lora, int64_t rows, int64_t stride);

/* Windows of routed rows, and their distribution over workers. */
typedef struct moelora_windows {
  int32_t rows;   /* maximum number of rows per window */
  int32_t shares; /* workers that share a window */
  int64_t count;  /* maximum number of windows */
} moelora_windows;

/* plan_windows.c: splits the rows into equal windows of at most `most` rows for `workers` workers.
 * A window has at most as many workers as items, which are `part` rows of a segment in each of
 * `columns` columns. */
moelora_windows moelora_cut_windows(const moelora_routes *routes, const moelora_list_blocks *lists,
                                    moelora_delta_order order, int64_t most, int64_t part,
                                    int64_t columns, int64_t workers);

/* plan_log.c: logs under MOELORA_LOG=plan why a forced or tuned row is not used. */
void moelora_log_passed_over(const moelora_variant *variant, const char *why);

/* plan_log.c: record an executed plan for moelora_last_plan, and log it under MOELORA_LOG=plan. */
#define OPERATOR(NAME, PROBLEM, PLAN, ...)                                                         \
  void moelora_note_##NAME(const moelora_##PROBLEM *problem, const moelora_device_info *device,    \
                           const moelora_##PLAN *plan);
#include "core/operators.inc"

/* device.c: finds the backend and the device of `exec`; `num_units` is the number of its CPU
 * threads. */
moelora_status moelora_find_device(const moelora_exec *exec, const moelora_backend **backend,
                                   moelora_device_info *info);

#endif
