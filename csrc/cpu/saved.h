/* saved.c: the tensors that a layer's forward saves for its backward. */
#pragma once

#include "cpu/back_steps.h"

/* Stores projection->xa to saved->shrink[which], by flat row in the dtype; zeros elsewhere. */
void moelora_cpu_save_shrink(const moelora_projection *projection, const moelora_saved_rows *saved,
                             int32_t which, const moelora_exec *exec);
/* Loads saved->shrink[which] to xa [P, slices, R], float32, by sorted position. */
void moelora_cpu_load_shrink(const moelora_back_call *call, const moelora_factors *lora,
                             const moelora_saved_rows *saved, int32_t which, float *xa);
/* Zeroes gate_up in skipped rows. */
void moelora_cpu_save_skipped(const moelora_experts_problem *problem, const moelora_sorted *sorted);
