/* Sums of 16 lanes, for the AVX-512 kernels. */
#ifndef MOELORA_CPU_AVX512_H
#define MOELORA_CPU_AVX512_H

#include <immintrin.h>

/* 6 x 4 sums, 4 weight vectors and one token vector: 29 of 32 registers. */
#define DOT_ROWS 6
typedef __m512 sum;

static inline sum zero(void) {
  return _mm512_setzero_ps();
}

static inline __m128 quarter(__m512 s) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

static inline __m128 add_lanes(sum s0, sum s1, sum s2, sum s3) {
  __m128 a = quarter(s0), b = quarter(s1), c = quarter(s2), d = quarter(s3);
  __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}

#endif
