/* AVX2 with FMA and F16C: float32 products; 16-bit operands are widened row by row. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/f16c.h"
#include "cpu/f32_operands.h"

/* 3 x 4 sums, 3 token vectors and one weight vector fill the 16 registers. */
#define DOT_ROWS 3
#define DOT_STEP 8
typedef float element;
typedef __m256 vector;
typedef __m256 sum;

static inline vector load(const element *p) {
  return _mm256_loadu_ps(p);
}

static inline vector load_part(const element *p, int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane));
}

static inline sum zero(void) {
  return _mm256_setzero_ps();
}

static inline sum multiply_add(vector a, vector b, sum s) {
  return _mm256_fmadd_ps(a, b, s);
}

static inline __m128 halve(__m256 s) {
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

static inline __m128 add_lanes(sum s0, sum s1, sum s2, sum s3) {
  __m128 a = halve(s0), b = halve(s1), c = halve(s2), d = halve(s3);
  __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}

#include "cpu/dot.h"

const moelora_cpu_kernels moelora_gemm_f32_avx2 = F32_OPERANDS(f32, NULL);
const moelora_cpu_kernels moelora_gemm_bf16_avx2 = F32_OPERANDS(bf16, widen_bf16);
const moelora_cpu_kernels moelora_gemm_f16_avx2 = F32_OPERANDS(f16, widen_f16);
#endif
