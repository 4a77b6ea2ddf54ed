/* AVX-512 BF16: vdpbf16ps multiplies pairs of bf16 and accumulates in float32. Operands are bf16.
 * gemm_bf16_amx only differs in products with weights, which use AMX tiles (matrix_amx.c). */
#if defined(__x86_64__)
#include "cpu/avx512.h"
#include "cpu/f32_operands.h"

#define DOT_STEP 32
typedef uint16_t element;
typedef __m512i vector;

static inline vector load(const element *p) {
  return _mm512_loadu_si512(p);
}

static inline vector load_part(const element *p, int64_t count) {
  return _mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), p);
}

static inline sum multiply_add(vector a, vector b, sum s) {
  return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
}

#include "cpu/dot.h"

typedef uint16_t operand;
typedef __m512i table; /* bf16 in the upper 16 bits of each lane; the lower 16 are unspecified */

static inline table make_table(bool bf16, const float *values, float zero, float scale,
                               float tile_scale, bool exact) {
  (void)bf16; /* the only dtype here */
  const __m512 numbers = _mm512_mul_ps(products(values, zero, scale), _mm512_set1_ps(tile_scale));
  return exact ? _mm512_castps_si512(numbers) : rounded_bf16(numbers);
}

/* Combines the tables of two groups: halves 2 n are from `first`, halves 2 n + 1 from `second`. */
static inline table both(table first, table second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(first, 16), second);
}

/* Looks up 32 columns. Entry n is 16-bit half 2 n + 1 of a table, or half 2 n in lanes where
 * `halves` is 0; only the low five bits of an index are used. */
static inline void look_up_32(__m256i bytes, __m512i halves, table low, table high, operand *to_low,
                              operand *to_high) {
  const __m512i place = _mm512_cvtepu8_epi16(bytes);
  const __m512i first = _mm512_or_si512(_mm512_slli_epi16(place, 1), halves);
  const __m512i mask = _mm512_set1_epi16(0x1e);
  const __m512i second =
      _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(place, 3), mask), halves);
  _mm512_storeu_si512(to_low, _mm512_permutexvar_epi16(first, low));
  _mm512_storeu_si512(to_high, _mm512_permutexvar_epi16(second, high));
}

static inline void look_up(moelora_format format, const uint8_t *words, const table *low,
                           const table *high, operand *to_low, operand *to_high) {
  const __m512i bytes = by_columns(format, words);
  const __m256i ends[2] = {_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64(bytes, 1)};
  const int groups = moelora_tile_groups(format);
  for (int i = 0; i < 2; i++) {
    const int group = i * groups / 2;
    if (groups == 4)
      look_up_32(ends[i], _mm512_maskz_set1_epi16(0xffff0000u, 1), both(low[group], low[group + 1]),
                 both(high[group], high[group + 1]), to_low + 32 * i, to_high + 32 * i);
    else
      look_up_32(ends[i], _mm512_set1_epi16(1), low[group], high[group], to_low + 32 * i,
                 to_high + 32 * i);
  }
}

/* The rounding instruction flushes values below 2^-126 to zero. Products of small scales, which may
 * be that small, are therefore rounded without it. */
static inline void dequantize_e4m3(bool bf16, const uint8_t *first, const uint8_t *second,
                                   float scale, operand *to) {
  (void)bf16;
  const __m512 low = e4m3_products(first, scale), high = e4m3_products(second, scale);
  if (__builtin_fabsf(scale) >= 0x1p-100f) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    return;
  }
  const __m512i bits[2] = {rounded_bf16(low), rounded_bf16(high)};
  for (int i = 0; i < 2; i++)
    _mm256_storeu_si256((__m256i *)(to + 16 * i),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits[i], 16)));
}

#include "cpu/dequantize.h"

DEQUANTIZE(bf16, true)

#define BF16_OPERANDS                                                                              \
  .operand_bytes = sizeof(uint16_t), .round = store_bf16, .store = store_bf16, .load = load_bf16,  \
  .dot = dot, .add_rows = add_rows, .dequantize = dequantize_bf16,                                 \
  .dequantize_fp8 = dequantize_fp8_bf16, .activate = moelora_activate,                             \
  .activate_backward = moelora_activate_backward

const moelora_cpu_kernels moelora_gemm_bf16_avx512bf16 = {BF16_OPERANDS};
const moelora_cpu_kernels moelora_gemm_bf16_amx = {BF16_OPERANDS, .matrix = &moelora_matrix_amx};
#endif
