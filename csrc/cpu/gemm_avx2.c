/* AVX2 with FMA and F16C: float32 products; 16-bit rows are converted to float32 operands. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "core/format.h"
#include "cpu/f16c.h"
#include "cpu/f32_operands.h"

/* 3 x 4 accumulators take 12 of the 16 registers. */
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

static inline __m128 fold(sum s) {
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

#include "cpu/dot.h"

typedef float operand;
typedef struct table {
  __m256 first, second; /* 8 entries each */
} table;

static inline __m256 products(const float *values, float zero, float scale) {
  return _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(values), _mm256_set1_ps(zero)),
                       _mm256_set1_ps(scale));
}

/* Rounds to nearest even. A NaN, which is quiet as the result of a product, keeps its high half. */
static inline __m256 rounded_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_srli_epi32(bits, 16);
  const __m256i half =
      _mm256_add_epi32(_mm256_and_si256(odd, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256 nearest = _mm256_castsi256_ps(_mm256_add_epi32(bits, half));
  const __m256 kept = _mm256_blendv_ps(nearest, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_and_ps(kept, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
}

static inline __m256 rounded_f16(__m256 x) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline __m256 rounded(bool bf16, __m256 x) {
  return bf16 ? rounded_bf16(x) : rounded_f16(x);
}

static inline table make_table(bool bf16, const float *values, float zero, float scale,
                               float tile_scale, bool exact) {
  const __m256 by = _mm256_set1_ps(tile_scale);
  const __m256 first = _mm256_mul_ps(products(values, zero, scale), by);
  const __m256 second = _mm256_mul_ps(products(values + 8, zero, scale), by);
  return exact ? (table){first, second} : (table){rounded(bf16, first), rounded(bf16, second)};
}

static inline void dequantize_e4m3(bool bf16, const uint8_t *first, const uint8_t *second,
                                   float scale, operand *to) {
  const __m256i halves[2] = {e4m3_halves(first), e4m3_halves(second)};
  const __m256 by = _mm256_set1_ps(scale * 0x1p8f);
  for (int i = 0; i < 2; i++, to += 16) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves[i]));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves[i], 1));
    _mm256_storeu_ps(to, rounded(bf16, _mm256_mul_ps(low, by)));
    _mm256_storeu_ps(to + 8, rounded(bf16, _mm256_mul_ps(high, by)));
  }
}

/* Looks up an entry of the table for the low four bits of each lane. */
static inline __m256 entries(const table *t, __m256i place) {
  const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28)); /* bit 3 as the sign */
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t->first, place),
                          _mm256_permutevar8x32_ps(t->second, place), high);
}

static inline void look_up_8(__m128i bytes, const table *low, const table *high, operand *to_low,
                             operand *to_high) {
  const __m256i place = _mm256_cvtepu8_epi32(bytes);
  _mm256_storeu_ps(to_low, entries(low, place));
  _mm256_storeu_ps(to_high, entries(high, _mm256_srli_epi32(place, 4)));
}

static inline void look_up(moelora_format format, const uint8_t *words, const table *low,
                           const table *high, operand *to_low, operand *to_high) {
  typedef uint32_t lanes __attribute__((vector_size(32)));
  __m256i bits[2] = {_mm256_loadu_si256((const __m256i *)words),
                     _mm256_loadu_si256((const __m256i *)words + 1)};
  for (int i = 0; i < 2; i++)
    bits[i] = (__m256i)MOELORA_GATHER(format, (lanes)bits[i]);
  const __m128i columns = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m128i q0 = _mm256_castsi256_si128(bits[0]), q1 = _mm256_extracti128_si256(bits[0], 1);
  const __m128i q2 = _mm256_castsi256_si128(bits[1]), q3 = _mm256_extracti128_si256(bits[1], 1);
  const __m128i a = _mm_unpacklo_epi32(q0, q1), b = _mm_unpackhi_epi32(q0, q1);
  const __m128i c = _mm_unpacklo_epi32(q2, q3), d = _mm_unpackhi_epi32(q2, q3);
  const __m128i slabs[4] = {_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c),
                            _mm_unpacklo_epi64(b, d), _mm_unpackhi_epi64(b, d)};
  for (int s = 0; s < 4; s++) {
    const __m128i bytes = _mm_shuffle_epi8(slabs[s], columns);
    const int group = s * moelora_tile_groups(format) / 4;
    const table *l = &low[group], *h = &high[group];
    look_up_8(bytes, l, h, to_low + 16 * s, to_high + 16 * s);
    look_up_8(_mm_srli_si128(bytes, 8), l, h, to_low + 16 * s + 8, to_high + 16 * s + 8);
  }
}

#include "cpu/dequantize.h"

F32_KERNELS(avx2)
#endif
