/* `dequantise` and `dequantise_fp8` of kernels.h for one instruction set.
 *
 * The numbers of four bits of one row and group of quantised weights are the 16 entries of a table,
 * each of them (value - zero) scale, rounded to the dtype, so whatever the format is, a nibble is a
 * place in a table. Numbers of FP8 are computed.
 *
 * The including file defines, before it includes this,
 *   operand                what operand rows are made of
 *   table                  16 operands
 *   table_bf16(values, zero, scale, exact), table_f16     (values[i] - zero) * scale, i < 16,
 * rounded where they are not `exact` already
 *   look_up(format, words, low, high, to_low, to_high)     64 columns of two rows
 *   e4m3_bf16(first, second, scale, to), e4m3_f16  32 columns of an FP8 row, which are two chunks
 * of it: rounded value scale
 *
 * Once those of MXFP4 are nibbles, byte b of word (q, s) of `words` [4 q][4 s][4 bytes] is column
 * 16 s + 2 q + (b / 2) + 8 (b % 2): its low nibble of the first row, to be looked up in low[s / 2],
 * its high nibble of the other, in high[s / 2]. */
#include "core/format.h"
#include "cpu/convert.h"

/* What nibbles stand for: e2m1, and themselves. */
static const float nibble_values[2][16] = {
    {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
};

/* Times the float32 whose exponent is an MXFP4 scale of a tile: what the scale means. */
#define MXFP4_UNIT_bf16 0x1p-126f
#define MXFP4_UNIT_f16 0x1p98f

/* Whether all numbers of MXFP4 are numbers of the dtype. */
#define MXFP4_EXACT_bf16 true
#define MXFP4_EXACT_f16 false

#define DEQUANTISE(TYPE)                                                                           \
  static inline __attribute__((always_inline)) table group_##TYPE(                                 \
      const moelora_format format, const uint8_t *scale, const uint8_t *zero) {                    \
    uint16_t bits = 0;                                                                             \
    memcpy(&bits, scale, (size_t)moelora_scale_bytes(format));                                     \
    const float by = moelora_is_int4(format)                                                       \
                         ? moelora_##TYPE##_to_f32(bits)                                           \
                         : moelora_float((uint32_t)*scale << 23) * MXFP4_UNIT_##TYPE;              \
    const float from = moelora_has_zeros(format) ? *zero : moelora_is_int4(format) ? 8 : 0;        \
    return table_##TYPE(nibble_values[moelora_is_int4(format)], from, by,                          \
                        MXFP4_EXACT_##TYPE && format == MOELORA_MXFP4);                            \
  }                                                                                                \
                                                                                                   \
  static inline __attribute__((always_inline)) void dequantise_format_##TYPE(                      \
      const moelora_format format, const uint8_t *tile, int64_t stride, int64_t tiles, int32_t r,  \
      int64_t ahead, operand *low, operand *high) {                                                \
    const int groups = moelora_tile_groups(format), second = groups - 1;                           \
    const int64_t words = moelora_words_offset(r), place = moelora_scale_index(groups, r, 0);      \
    const int64_t scales = MOELORA_TILE_VALUES + place * moelora_scale_bytes(format);              \
    const int64_t zeros = MOELORA_TILE_VALUES + 64 * groups * moelora_scale_bytes(format) + place; \
    for (int64_t i = 0; i < tiles; i++, tile += stride, low += 64, high += 64) {                   \
      const uint8_t *scale = tile + scales, *zero = tile + zeros;                                  \
      table tables[2][2];                                                                          \
      __builtin_prefetch(tile + words + ahead, 0, 2);                                              \
      for (int row = 0; row < 2; row++) {                                                          \
        const int at = row * groups;                                                               \
        tables[row][0] =                                                                           \
            group_##TYPE(format, scale + at * moelora_scale_bytes(format), zero + at);             \
        tables[row][1] =                                                                           \
            second ? group_##TYPE(format, scale + (at + 1) * moelora_scale_bytes(format),          \
                                  zero + at + 1)                                                   \
                   : tables[row][0];                                                               \
      }                                                                                            \
      look_up(format, tile + words, tables[0], tables[1], low, high);                              \
    }                                                                                              \
  }                                                                                                \
                                                                                                   \
  static void dequantise_##TYPE(moelora_format format, const void *tile, int64_t stride,           \
                                int64_t tiles, int32_t r, int64_t ahead, void *low, void *high) {  \
    switch (format) {                                                                              \
      DEQUANTISE_CASE(TYPE, MOELORA_MXFP4)                                                         \
      DEQUANTISE_CASE(TYPE, MOELORA_INT4)                                                          \
      DEQUANTISE_CASE(TYPE, MOELORA_INT4_G32)                                                      \
      DEQUANTISE_CASE(TYPE, MOELORA_INT4_ZP)                                                       \
      DEQUANTISE_CASE(TYPE, MOELORA_INT4_ZP_G32)                                                   \
    default:                                                                                       \
      break;                                                                                       \
    }                                                                                              \
  }                                                                                                \
                                                                                                   \
  static void dequantise_fp8_##TYPE(const uint8_t *row, int32_t r, const float scale[2],           \
                                    void *to) {                                                    \
    const int32_t at = r & 7;                                                                      \
    for (int32_t c = 0; c < 8; c += 2)                                                             \
      e4m3_##TYPE(row + (c ^ at) * 16, row + ((c + 1) ^ at) * 16, scale[c / 4],                    \
                  (operand *)to + 16 * c);                                                         \
  }

#define DEQUANTISE_CASE(TYPE, FORMAT)                                                              \
  case FORMAT:                                                                                     \
    dequantise_format_##TYPE(FORMAT, tile, stride, tiles, r, ahead, low, high);                    \
    break;
