/* Code that the kernels of all instruction sets include, and compile with their own flags:
 * conversions of whole rows, and kernel tables for float32 operands. */
#pragma once

#include <string.h>

#include "cpu/activation.h"
#include "cpu/add_rows.h"
#include "cpu/convert.h"
#include "cpu/kernels.h"

/* Defines the three row conversions of a 16-bit type by its two conversions of a value. */
#define CONVERSIONS(TYPE)                                                                          \
  static inline void load_##TYPE(const void *src, float *dst, int64_t n) {                         \
    const uint16_t *from = src;                                                                    \
    for (int64_t i = 0; i < n; i++)                                                                \
      dst[i] = moelora_##TYPE##_to_f32(from[i]);                                                   \
  }                                                                                                \
  static inline void store_##TYPE(const float *src, void *dst, int64_t n) {                        \
    uint16_t *to = dst;                                                                            \
    for (int64_t i = 0; i < n; i++)                                                                \
      to[i] = moelora_f32_to_##TYPE(src[i]);                                                       \
  }                                                                                                \
  static inline void round_##TYPE(const float *src, void *dst, int64_t n) {                        \
    float *to = dst;                                                                               \
    for (int64_t i = 0; i < n; i++)                                                                \
      to[i] = moelora_##TYPE##_to_f32(moelora_f32_to_##TYPE(src[i]));                              \
  }

CONVERSIONS(bf16)

static inline void load_f32(const void *src, float *dst, int64_t n) {
  memcpy(dst, src, (size_t)n * sizeof(float));
}

static inline void store_f32(const float *src, void *dst, int64_t n) {
  memcpy(dst, src, (size_t)n * sizeof(float));
}

static inline void round_f32(const float *src, void *dst, int64_t n) {
  store_f32(src, dst, n);
}

#define F32_OPERANDS(TYPE, ...)                                                                    \
  {.operand_bytes = sizeof(float),                                                                 \
   .round = round_##TYPE,                                                                          \
   .store = store_##TYPE,                                                                          \
   .load = load_##TYPE,                                                                            \
   .dot = dot,                                                                                     \
   .add_rows = add_rows,                                                                           \
   .activate = moelora_activate,                                                                   \
   .activate_backward = moelora_activate_backward,                                                 \
   __VA_ARGS__}

/* Defines the kernels of all dtypes for ISA. The including file defines `dot` for float32 operands,
 * and includes dequantize.h. */
#define F32_KERNELS(ISA)                                                                           \
  DEQUANTIZE(bf16, true)                                                                           \
  DEQUANTIZE(f16, false)                                                                           \
  const moelora_cpu_kernels moelora_gemm_f32_##ISA = F32_OPERANDS(f32, .widens = false);           \
  const moelora_cpu_kernels moelora_gemm_bf16_##ISA = F32_OPERANDS(                                \
      bf16, .widens = true, .dequantize = dequantize_bf16, .dequantize_fp8 = dequantize_fp8_bf16); \
  const moelora_cpu_kernels moelora_gemm_f16_##ISA = F32_OPERANDS(                                 \
      f16, .widens = true, .dequantize = dequantize_f16, .dequantize_fp8 = dequantize_fp8_f16);
