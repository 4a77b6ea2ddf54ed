/* Implements `dequantize` and `dequantize_fp8` of kernels.h for one instruction set.
 *
 * 4-bit formats: nibbles index a table of 16 entries per row and group, which make_table() fills.
 * FP8 values are computed.
 *
 * The including file first defines, where the constant `bf16` selects the dtype:
 *   operand                element type of operand rows
 *   table                  16 operands
 *   make_table(bf16, values, zero, scale, tile_scale, exact)
 *                                  (values[i] - zero) * scale * tile_scale, i < 16, rounded unless
 *                                  `exact`, where products need no rounding
 *   look_up(format, words, low, high, to_low, to_high)     64 columns of two rows
 *   dequantize_e4m3(bf16, first, second, scale, to)        32 columns of an FP8 row, which are two
 *                                                          chunks: rounded value * scale
 *
 * After MOELORA_GATHER reorders the words, byte b of word (q, s) of `words` [4 q][4 s][4 bytes] is
 * column 16 s + 2 q + (b / 2) + 8 (b % 2): its low nibble belongs to the first row and indexes
 * low[s G / 4] for G groups per row, its high nibble to the second row and high[s G / 4]. */
#pragma once

#include "core/format.h"
#include "cpu/convert.h"

#define INLINE static inline __attribute__((always_inline))

/* The value that each 4-bit code stands for, by type. */
static const float code_values[][16] = {
#define MOELORA_CODES(VALUES, ...) [MOELORA_VALUES_##VALUES] = {__VA_ARGS__},
#include "formats.inc"
};

/* Returns the scale of a group as float32. */
INLINE float scale_of(const bool bf16, const moelora_format format, const uint8_t *scale) {
  if (moelora_has_e8m0_scales(format)) /* exponent of a float32, times a power of two */
    return moelora_float((uint32_t)*scale << 23) * (bf16 ? 0x1p-126f : 0x1p98f);
  if (moelora_has_tile_scale(format)) /* e5m3 */
    return *scale ? moelora_float(((uint32_t)*scale + (127 - 22) * 8) << 20) : 0;
  if (moelora_has_f32_scales(format)) {
    float number;
    memcpy(&number, scale, sizeof number);
    return number;
  }
  uint16_t bits;
  memcpy(&bits, scale, sizeof bits);
  return bf16 ? moelora_bf16_to_f32(bits) : moelora_f16_to_f32(bits);
}

/* Fills the table of a group's values from its scale and zero point. */
INLINE table group_table(const bool bf16, const moelora_format format, const uint8_t *tile,
                         const uint8_t *scale, const uint8_t *zero) {
  const float from = moelora_has_zeros(format) ? *zero : moelora_is_int4(format) ? 8 : 0;
  const bool exact = bf16 && moelora_has_e8m0_scales(format); /* e2m1 times a power of two */
  float tile_scale = 1;
  if (moelora_has_tile_scale(format))
    memcpy(&tile_scale, tile + moelora_tile_scale_offset(format), sizeof tile_scale);
  return make_table(bf16, code_values[moelora_values_of(format)], from,
                    scale_of(bf16, format, scale), tile_scale, exact);
}

/* Dequantizes rows r and r + 8; `bf16` and `format` are compile-time constants. */
INLINE void dequantize_format(const bool bf16, const moelora_format format, const uint8_t *tile,
                              int64_t stride, int64_t tiles, int32_t r, int64_t ahead, operand *low,
                              operand *high) {
  const int groups = moelora_tile_groups(format), bytes = moelora_scale_bytes(format);
  const int64_t words = moelora_words_offset(r), place = moelora_scale_index(groups, r, 0);
  const int64_t scales = MOELORA_TILE_VALUES + place * bytes;
  const int64_t zeros = MOELORA_TILE_VALUES + 64 * groups * bytes + place;
  for (int64_t i = 0; i < tiles; i++, tile += stride, low += 64, high += 64) {
    table tables[2][4];
    __builtin_prefetch(tile + words + ahead, 0, 2);
    for (int at = 0; at < 2 * groups; at++)
      tables[at / groups][at % groups] =
          group_table(bf16, format, tile, tile + scales + at * bytes, tile + zeros + at);
    look_up(format, tile + words, tables[0], tables[1], low, high);
  }
}

INLINE void dequantize(const bool bf16, moelora_format format, const void *tile, int64_t stride,
                       int64_t tiles, int32_t r, int64_t ahead, void *low, void *high) {
  switch (format) {
#define MOELORA_FORMAT_OF(KERNEL, NAME, ...)                                                       \
  case MOELORA_##NAME:                                                                             \
    if (moelora_is_four_bits(MOELORA_##NAME))                                                      \
      dequantize_format(bf16, MOELORA_##NAME, tile, stride, tiles, r, ahead, low, high);           \
    break;
#include "formats.inc"
  }
}

INLINE void dequantize_fp8(const bool bf16, const uint8_t *row, int32_t r, const float scale[2],
                           void *to) {
  const int32_t at = r & 7;
  for (int32_t c = 0; c < 8; c += 2)
    dequantize_e4m3(bf16, row + (c ^ at) * 16, row + ((c + 1) ^ at) * 16, scale[c / 4],
                    (operand *)to + 16 * c);
}

/* Defines `dequantize` and `dequantize_fp8` of kernels.h for a dtype. */
#define DEQUANTIZE(TYPE, BF16)                                                                     \
  static void dequantize_##TYPE(moelora_format format, const void *tile, int64_t stride,           \
                                int64_t tiles, int32_t r, int64_t ahead, void *low, void *high) {  \
    dequantize(BF16, format, tile, stride, tiles, r, ahead, low, high);                            \
  }                                                                                                \
  static void dequantize_fp8_##TYPE(const uint8_t *row, int32_t r, const float scale[2],           \
                                    void *to) {                                                    \
    dequantize_fp8(BF16, row, r, scale, to);                                                       \
  }
