/* float16 rows with the F16C instructions, eight values at a time. */
#ifndef MOELORA_CPU_F16C_H
#define MOELORA_CPU_F16C_H

#include <immintrin.h>

#include "cpu/convert.h"

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

static inline void widen_f16(const void *src, void *dst, int64_t n) {
  load_f16(src, dst, n);
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

#endif
