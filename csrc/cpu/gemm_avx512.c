/* AVX-512 (F, BW, DQ, VL): float32 products; 16-bit rows are converted to float32 operands. */
#if defined(__x86_64__)
#include "cpu/avx512.h"
#include "cpu/f32_operands.h"

#define DOT_STEP 16
typedef float element;
typedef __m512 vector;

static inline vector load(const element *p) {
  return _mm512_loadu_ps(p);
}

static inline vector load_part(const element *p, int64_t count) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}

static inline sum multiply_add(vector a, vector b, sum s) {
  return _mm512_fmadd_ps(a, b, s);
}

#include "cpu/dot.h"

typedef float operand;
typedef __m512 table;

static inline __m512 rounded(bool bf16, __m512 x) {
  return bf16 ? _mm512_castsi512_ps(
                    _mm512_and_si512(rounded_bf16(x), _mm512_set1_epi32((int)0xffff0000)))
              : _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline table make_table(bool bf16, const float *values, float zero, float scale,
                               float tile_scale, bool exact) {
  const __m512 numbers = _mm512_mul_ps(products(values, zero, scale), _mm512_set1_ps(tile_scale));
  return exact ? numbers : rounded(bf16, numbers);
}

static inline void dequantize_e4m3(bool bf16, const uint8_t *first, const uint8_t *second,
                                   float scale, operand *to) {
  _mm512_storeu_ps(to, rounded(bf16, e4m3_products(first, scale)));
  _mm512_storeu_ps(to + 16, rounded(bf16, e4m3_products(second, scale)));
}

static inline void look_up_16(__m128i bytes, table low, table high, operand *to_low,
                              operand *to_high) {
  const __m512i place = _mm512_cvtepu8_epi32(bytes); /* indices; lookups use the low four bits */
  _mm512_storeu_ps(to_low, _mm512_permutexvar_ps(place, low));
  _mm512_storeu_ps(to_high, _mm512_permutexvar_ps(_mm512_srli_epi32(place, 4), high));
}

static inline void look_up(moelora_format format, const uint8_t *words, const table *low,
                           const table *high, operand *to_low, operand *to_high) {
  const __m512i bytes = by_columns(format, words);
  const int groups = moelora_tile_groups(format), b = groups / 4, c = groups / 2,
            d = 3 * groups / 4;
  look_up_16(_mm512_castsi512_si128(bytes), low[0], high[0], to_low, to_high);
  look_up_16(_mm512_extracti32x4_epi32(bytes, 1), low[b], high[b], to_low + 16, to_high + 16);
  look_up_16(_mm512_extracti32x4_epi32(bytes, 2), low[c], high[c], to_low + 32, to_high + 32);
  look_up_16(_mm512_extracti32x4_epi32(bytes, 3), low[d], high[d], to_low + 48, to_high + 48);
}

#include "cpu/dequantize.h"

F32_KERNELS(avx512)
#endif
