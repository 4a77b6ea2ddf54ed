/* saved.c: the tensors that a layer's forward saves for its backward. */
#ifndef MOELORA_CPU_SAVED_H
#define MOELORA_CPU_SAVED_H

#include "cpu/cpu.h"

/* saved->shrink[which] = projection->xa, by flat row in the dtype; zeros elsewhere. */
void moelora_cpu_save_shrink(const moelora_projection *projection, const moelora_saved_rows *saved,
                             int32_t which, const moelora_exec *exec);
/* The inverse: [P, slices, R] by sorted position for rows with an adapter, times weight[flat row]
 * if given. */
void moelora_cpu_load_shrink(const moelora_variant *variant, const moelora_sorted *sorted,
                             const moelora_factors *lora, const moelora_saved_rows *saved,
                             int32_t which, const float *weight, float *xa,
                             const moelora_exec *exec);
/* saved->gate_up = 0 in skipped rows. */
void moelora_cpu_save_skipped(const moelora_experts_problem *problem, const moelora_sorted *sorted);

#endif
