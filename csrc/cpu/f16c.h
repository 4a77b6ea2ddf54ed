/* Converts float16 rows with F16C, eight values at a time, and e4m3 by way of float16. */
#pragma once

#include <immintrin.h>

#include "cpu/convert.h"

/* Returns the 16 bytes of a chunk of an FP8 row in column order. */
static inline __m128i e4m3_columns(const uint8_t *chunk) {
  const __m128i columns = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)chunk), columns);
}

/* Returns the 16 columns of a chunk as float16, scaled by 2^-8, as the bias of float16 is larger by
 * 8. */
static inline __m256i e4m3_halves(const uint8_t *chunk) {
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(e4m3_columns(chunk)), 7);
  return _mm256_and_si256(shifted, _mm256_set1_epi16((short)0xbfff));
}

static inline __m128i narrow_8(const float *src) {
  return _mm256_cvtps_ph(_mm256_loadu_ps(src), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void load_f16(const void *src, float *dst, int64_t n) {
  const uint16_t *from = src;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
  for (; i < n; i++)
    dst[i] = moelora_f16_to_f32(from[i]);
}

static inline void store_f16(const float *src, void *dst, int64_t n) {
  uint16_t *to = dst;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i *)(to + i), narrow_8(src + i));
  for (; i < n; i++)
    to[i] = moelora_f32_to_f16(src[i]);
}

static inline void round_f16(const float *src, void *dst, int64_t n) {
  float *to = dst;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(narrow_8(src + i)));
  for (; i < n; i++)
    to[i] = moelora_f16_to_f32(moelora_f32_to_f16(src[i]));
}
