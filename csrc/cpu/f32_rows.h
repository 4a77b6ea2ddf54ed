/* Rows of a backward: float32 values, rounded to the dtype of the call. */
#pragma once

#include "cpu/cpu.h"

/* Rounds `columns` up to a multiple of MOELORA_ROW_STEP. */
static inline int64_t moelora_row_width(int64_t columns) {
  return moelora_divide_up(columns, MOELORA_ROW_STEP) * MOELORA_ROW_STEP;
}

/* Rounds float32 values to the dtype of a call. */
static inline void moelora_round_floats(const moelora_variant *variant, float *values, int64_t n) {
  const moelora_cpu_kernels *kernels = moelora_cpu_kernels_of(variant);
  uint16_t rounded[256];
  for (int64_t i = 0; variant->dtype != MOELORA_F32 && i < n; i += 256) {
    const int64_t count = moelora_min(256, n - i);
    kernels->store(values + i, rounded, count);
    kernels->load(rounded, values + i, count);
  }
}

/* Returns the sum over i < n of a[i] b[i]; b has the compute dtype, of `bytes` per element. */
static inline float moelora_dot_with(const moelora_cpu_kernels *kernels, size_t bytes,
                                     const float *a, const char *b, int64_t n) {
  float line[256], sum = 0;
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t count = moelora_min(256, n - i);
    kernels->load(b + (size_t)i * bytes, line, count);
    for (int64_t j = 0; j < count; j++)
      sum += a[i + j] * line[j];
  }
  return sum;
}

/* Returns the same sum for two rows of the compute dtype. */
static inline float moelora_row_dot(const moelora_cpu_kernels *kernels, size_t bytes, const char *a,
                                    const char *b, int64_t n) {
  float line[256], sum = 0;
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t count = moelora_min(256, n - i);
    kernels->load(a + (size_t)i * bytes, line, count);
    sum += moelora_dot_with(kernels, bytes, line, b + (size_t)i * bytes, count);
  }
  return sum;
}
