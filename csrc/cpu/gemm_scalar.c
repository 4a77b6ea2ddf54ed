/* Kernels in plain C: the specification of all others, and the fallback. Operands are float32;
 * `dot` keeps 8 partial sums along K, so that compilers can vectorize it. */
#include "core/format.h"
#include "cpu/f32_operands.h"

enum { LANES = 8 };

static void dot(int64_t m, int64_t n, int64_t k, const void *const *x, const void *w,
                int64_t w_stride, const void *next, float *c, int64_t ldc) {
  (void)next;
  for (int64_t j = 0; j < n; j++) {
    const float *restrict b = (const float *)((const char *)w + j * w_stride);
    for (int64_t i = 0; i < m; i++) {
      const float *restrict a = x[i];
      float sum[LANES] = {0};
      int64_t at = 0;
      for (; at + LANES <= k; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
          sum[lane] += a[at + lane] * b[at + lane];
      for (int lane = 0; at + lane < k; lane++)
        sum[lane] += a[at + lane] * b[at + lane];
      for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
          sum[lane] += sum[lane + half];
      c[i * ldc + j] += sum[0];
    }
  }
}

CONVERSIONS(f16)

typedef float operand;
typedef struct table {
  operand of[16];
} table;

static inline void round_operands(bool bf16, operand *values, int64_t n) {
  (bf16 ? round_bf16 : round_f16)(values, values, n);
}

static inline table make_table(bool bf16, const float *values, float zero, float scale,
                               float tile_scale, bool exact) {
  table made;
  for (int i = 0; i < 16; i++)
    made.of[i] = (values[i] - zero) * scale * tile_scale;
  if (!exact)
    round_operands(bf16, made.of, 16);
  return made;
}

static inline void look_up_word(moelora_format format, const uint8_t *bytes, const operand *low,
                                const operand *high, operand *restrict to_low,
                                operand *restrict to_high) {
  static const int columns[] = {0, 8, 1, 9};
  uint32_t word;
  memcpy(&word, bytes, sizeof word);
  word = MOELORA_GATHER(format, word);
  for (int b = 0; b < 4; b++, word >>= 8) {
    to_low[columns[b]] = low[word & 15];
    to_high[columns[b]] = high[word >> 4 & 15];
  }
}

static inline void look_up(moelora_format format, const uint8_t *words, const table *low,
                           const table *high, operand *to_low, operand *to_high) {
  const int groups = moelora_tile_groups(format);
  for (int s = 0; s < 4; s++)
    for (int q = 0; q < 4; q++) {
      const int column = 16 * s + 2 * q, group = s * groups / 4;
      look_up_word(format, words + 16 * q + 4 * s, low[group].of, high[group].of, to_low + column,
                   to_high + column);
    }
}

static inline void dequantize_e4m3(bool bf16, const uint8_t *first, const uint8_t *second,
                                   float scale, operand *to) {
  for (int32_t c = 0; c < 32; c++)
    to[c] = moelora_e4m3_to_f32((c < 16 ? first : second)[moelora_fp8_offset(0, c % 16)]) * scale;
  round_operands(bf16, to, 32);
}

#include "cpu/dequantize.h"

F32_KERNELS(scalar)
