/* What the files about plans need of each other, beside the plans themselves. */
#ifndef MOELORA_CORE_PLAN_H
#define MOELORA_CORE_PLAN_H

#include "core/backend.h"

/* variants.c: all rows of both tables, NULL past the end; the one of a name, NULL: none. */
const moelora_variant *moelora_variant_at(int32_t index);
const moelora_variant *moelora_find_variant(const char *name);

/* The device has the instructions of the variant. */
bool moelora_variant_runs_on(const moelora_variant *variant, const moelora_device_info *device);

/* Whose kernels the device runs: its own family, or the portable one. */
moelora_family moelora_family_of(const moelora_device_info *device);

/* tuned.c: the variant that was measured to be best for this layer on such a device; NULL: none. */
const moelora_variant *moelora_tuned_variant(const moelora_experts_problem *problem,
                                             const moelora_device_info *device);

/* Remember an executed plan for moelora_last_plan, and print it under MOELORA_LOG=plan. */
void moelora_note_gemm(const moelora_gemm_problem *problem, const moelora_device_info *device,
                       const moelora_gemm_plan *plan);
void moelora_note_experts(const moelora_experts_problem *problem, const moelora_device_info *device,
                          const moelora_experts_plan *plan);
void moelora_note_delta(const char *operator, const moelora_routes * routes, moelora_dtype dtype,
                        const moelora_device_info *device, const moelora_delta_plan *plan);

/* device.c: the backend and the device that `exec` names; `num_units` counts its CPU threads. */
moelora_status moelora_find_device(const moelora_exec *exec, const moelora_backend **backend,
                                   moelora_device_info *info);

#endif
