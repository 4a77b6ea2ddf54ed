/* Enumerates the rows of variants.inc. */
#pragma once

enum {
#define MOELORA_CUDA_GEMM(STEM, ...) CUDA_gemm_bf16_##STEM, CUDA_gemm_f16_##STEM,
#define MOELORA_CUDA_BACK(STEM, ...) CUDA_back_bf16_##STEM, CUDA_back_f16_##STEM,
#define MOELORA_CUDA_DECODE(STEM, ...) CUDA_decode_bf16_##STEM, CUDA_decode_f16_##STEM,
#define MOELORA_CUDA_SORT(STEM, ...) CUDA_sort_i32_##STEM,
#define MOELORA_CUDA_SHRINK(STEM, ...) CUDA_shrink_bf16_##STEM, CUDA_shrink_f16_##STEM,
#define MOELORA_CUDA_SHRINK_SEGMENTS(STEM, ...) CUDA_shrink_bf16_##STEM, CUDA_shrink_f16_##STEM,
#define MOELORA_CUDA_EXPAND(STEM, ...) CUDA_expand_bf16_##STEM, CUDA_expand_f16_##STEM,
#define MOELORA_CUDA_EXPAND_THIN(STEM, ...) CUDA_expand_bf16_##STEM, CUDA_expand_f16_##STEM,
#define MOELORA_CUDA_SUM(STEM, ...) CUDA_sum_bf16_##STEM, CUDA_sum_f16_##STEM,
#include "cuda/variants.inc"
  MOELORA_CUDA_ROWS
};

/* Expands LAUNCH(NAME, T, ...) for both variants of a row. */
#define MOELORA_BOTH_DTYPES(LAUNCH, ROLE, STEM, ...)                                               \
  LAUNCH(ROLE##_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                           \
  LAUNCH(ROLE##_f16_##STEM, __half, __VA_ARGS__)
