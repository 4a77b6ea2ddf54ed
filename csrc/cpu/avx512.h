/* Horizontal sums and dequantization for the AVX-512 kernels. */
#pragma once

#include <immintrin.h>

#include "core/format.h"
#include "cpu/f16c.h"

/* 6 x 4 accumulators, 4 weight vectors and one token vector: 29 of 32 registers. */
#define DOT_ROWS 6
typedef __m512 sum;

static inline sum zero(void) {
  return _mm512_setzero_ps();
}

static inline __m128 fold(sum s) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Returns (values[i] - zero) * scale for 16 values. */
static inline __m512 products(const float *values, float zero, float scale) {
  return _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(values), _mm512_set1_ps(zero)),
                       _mm512_set1_ps(scale));
}

/* Dequantizes a chunk of an FP8 row. */
static inline __m512 e4m3_products(const uint8_t *chunk, float scale) {
  return _mm512_mul_ps(_mm512_cvtph_ps(e4m3_halves(chunk)), _mm512_set1_ps(scale * 0x1p8f));
}

/* Rounds to bf16, ties to even, in the upper 16 bits of each lane; the lower 16 bits are
 * unspecified. A NaN is kept: results of products are quiet NaNs, whose upper half is a NaN,
 * too. */
static inline __m512i rounded_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), odd = _mm512_srli_epi32(bits, 16);
  const __m512i half =
      _mm512_add_epi32(_mm512_and_si512(odd, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
  const __mmask16 numbers = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
  return _mm512_mask_add_epi32(bits, numbers, bits, half);
}

/* Orders the bytes of words [4 q][4 s][4 b] by their column, 16 s + 2 q + b / 2 + 8 (b % 2). */
static inline __m512i by_columns(moelora_format format, const void *words) {
  typedef uint32_t lanes __attribute__((vector_size(64)));
  const __m512i slabs = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i columns =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const lanes stored = (lanes)_mm512_loadu_si512(words);
  const __m512i bits = (__m512i)MOELORA_GATHER(format, stored);
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(slabs, bits), columns);
}
