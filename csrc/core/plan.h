/* What the files about plans need of each other, beside the plans themselves. */
#ifndef MOELORA_CORE_PLAN_H
#define MOELORA_CORE_PLAN_H

#include "core/backend.h"

static inline int64_t moelora_divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* variants.c: all rows of both tables, NULL past the end; the one of a name, NULL: none. */
const moelora_variant *moelora_variant_at(int32_t index);
const moelora_variant *moelora_find_variant(const char *name, size_t length);
/* The first row of this device, role, method, dtype, family and of these flags; of its numbers
 * those count that are not 0. */
const moelora_variant *moelora_variant_like(const moelora_variant *like);

/* family.c: what the environment says about the device that plans are for can be understood; that
 * device. */
moelora_status moelora_check_limit(void);
moelora_device_info moelora_limited(const moelora_device_info *device);
/* The device has the instructions of the variant. */
bool moelora_variant_runs_on(const moelora_variant *variant, const moelora_device_info *device);
/* Whose kernels the device runs: its own family, or the portable one. */
moelora_family moelora_family_of(const moelora_device_info *device);

/* forced.c: all that the environment says about plans can be understood. */
moelora_status moelora_check_told(void);
/* The forced row of a role, if it is of this dtype and the device has its instructions. */
const moelora_variant *moelora_forced(moelora_role role, moelora_dtype dtype,
                                      const moelora_device_info *device);
bool moelora_is_forced(const moelora_variant *variant);

/* tuned.c: the variant of this role that was measured to be best for this layer on such a device;
 * NULL: none. A row of a whole layer counts as one of its projections. */
const moelora_variant *moelora_tuned_variant(const moelora_experts_problem *problem,
                                             const moelora_device_info *device, moelora_role role);

/* plan_gemm.c: the routed rows that an expert of this rank gets on average, at least 1; the pairs
 * that rows make on average if each is as likely to carry any of `adapters` as to go to any expert;
 * the row of a CPU; the row that sums over top_k, where `vectors` says that the output allows
 * 16-byte accesses.
 */
int64_t moelora_rows_per_expert(const moelora_routes *routes);
double moelora_expected_pairs(const moelora_routes *routes, int32_t adapters);
moelora_status moelora_plan_cpu(moelora_dtype dtype, const moelora_device_info *device,
                                const moelora_variant **picked);
const moelora_variant *moelora_plan_sum(moelora_dtype dtype, bool vectors,
                                        const moelora_variant *tuned,
                                        const moelora_device_info *device);

/* One projection over an alignment: what its plan depends on besides its kernel. */
typedef struct moelora_projection_load {
  const moelora_routes *routes;
  const moelora_weights *w;
  const moelora_factors *lora;
  const void *x; /* NULL: in the workspace */
  int64_t x_stride;
  int64_t x_rows_each; /* routed rows that share a row of x; 0: x lies by position */
  const void *out;     /* NULL: by position, in the workspace */
  int64_t out_stride[2];
  int64_t n_out; /* outputs of a row */
  bool gated, interleaved, weighted;
  const moelora_weights *next; /* of the projection that takes out as its x; NULL: none */
  bool next_reads_out;         /* and its adapters out as it is */
  bool x_is_quantized;         /* by the projection before */
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

/* cost.c: how long the device's memory takes to move `bytes`. */
double moelora_memory_ns(const moelora_device_info *device, double bytes);

/* plan_sort.c: how rows are sorted into blocks of one expert, of which `cluster` neighbours always
 * belong together. tuned: the row to take if it can serve; NULL: none. */
void moelora_plan_blocks(const moelora_routes *routes, int32_t rows, int32_t cluster,
                         const moelora_device_info *device, const moelora_variant *tuned,
                         moelora_align_plan *plan);

/* plan_sort.c: refuses more experts or adapters than a GPU sorts by. */
moelora_status moelora_check_sort(moelora_align_mode mode, const moelora_routes *routes);

/* What a shrink depends on. */
typedef struct moelora_shrink_load {
  moelora_dtype dtype;
  moelora_family family; /* whose kernels the table may choose */
  int64_t rows;          /* P */
  int64_t segments;      /* pairs that may have some of them */
  int64_t columns;       /* rows of A: of all slices, each padded to 16 */
  int64_t depth;
  bool vectors;   /* x and A allow 16-byte accesses */
  bool boxes;     /* and tensor maps cover A, 32 bits the offsets of rows of x */
  int64_t listed; /* segments, empty ones too, that the sort lists for kernels that can store what
                   * becomes of whole ones; 0: none */
  const moelora_variant *tuned; /* the row to take if it can serve; NULL: none */
  /* in blocks of a GEMM */
  int64_t max_blocks;
  bool by_position; /* x lies by position */
  /* in windows */
  moelora_delta_order order;
  const moelora_routes *routes;
  const moelora_list_blocks *lists;
} moelora_shrink_load;

/* plan_shrink.c */
moelora_shrink_plan moelora_plan_shrink_blocks(const moelora_shrink_load *load,
                                               const moelora_device_info *device);
moelora_shrink_plan moelora_plan_shrink_windows(const moelora_shrink_load *load,
                                                const moelora_device_info *device);
/* What boxes asks of factors A and of x: `rows` rows, `stride` elements apart. */
bool moelora_are_boxes(const moelora_factors *lora, int64_t rows, int64_t stride);

/* Windows of routed rows, and who works on them. */
typedef struct moelora_windows {
  int32_t rows;   /* of one, at most */
  int32_t shares; /* workers that take a window together */
  int64_t count;  /* at most so many windows */
} moelora_windows;

/* plan_windows.c: cuts the rows into windows of at most `most` rows for `workers` of them, each as
 * many rows as the others. No more workers share a window than it has items, which are `part` rows
 * of a segment in `columns`. */
moelora_windows moelora_cut_windows(const moelora_routes *routes, const moelora_list_blocks *lists,
                                    moelora_delta_order order, int64_t most, int64_t part,
                                    int64_t columns, int64_t workers);

/* plan_log.c: under MOELORA_LOG=plan, why a forced or tuned row is not taken. */
void moelora_log_passed_over(const moelora_variant *variant, const char *why);

/* plan_log.c: remember an executed plan for moelora_last_plan, and print it under MOELORA_LOG=plan.
 */
void moelora_note_align(const moelora_routes *routes, const moelora_device_info *device,
                        const moelora_align_plan *plan);
void moelora_note_gemm(const moelora_gemm_problem *problem, const moelora_device_info *device,
                       const moelora_gemm_plan *plan);
void moelora_note_experts(const moelora_experts_problem *problem, const moelora_device_info *device,
                          const moelora_experts_plan *plan);
void moelora_note_experts_backward(const moelora_experts_backward_problem *problem,
                                   const moelora_device_info *device,
                                   const moelora_backward_plan *plan);
void moelora_note_delta(const char *operator, const moelora_routes * routes, moelora_dtype dtype,
                        const moelora_device_info *device, const moelora_delta_plan *plan);

/* device.c: the backend and the device that `exec` names; `num_units` counts its CPU threads. */
moelora_status moelora_find_device(const moelora_exec *exec, const moelora_backend **backend,
                                   moelora_device_info *info);

#endif
