/* `dequantize` and `dequantize_fp8` of kernels.h for one instruction set and one TYPE, bf16 or
 * f16.
 *
 * 4-bit values are dequantized with a 16-entry table per row and group, whose entries are (value -
 * zero) scale, rounded to the dtype; for every format, a nibble indexes the table. FP8 values are
 * computed.
 *
 * The including file first defines
 *   TYPE
 *   operand                element type of operand rows
 *   table                  16 operands
 *   table_<TYPE>(values, zero, scale, tile_scale, exact)
 *                                  (values[i] - zero) * scale * tile_scale, i < 16, rounded unless
 *                                  `exact`, where products need no rounding
 *   look_up(format, words, low, high, to_low, to_high)     64 columns of two rows
 *   e4m3_<TYPE>(first, second, scale, to)          32 columns of an FP8 row, which are two chunks:
 *                                                  rounded value * scale
 *
 * After e2m1 words are reordered to nibbles, byte b of word (q, s) of `words` [4 q][4 s][4 bytes]
 * is column 16 s + 2 q + (b / 2) + 8 (b % 2): its low nibble belongs to the first row and indexes
 * low[s G / 4] for G groups per row, its high nibble to the second row and high[s G / 4]. */
#ifndef MOELORA_CPU_DEQUANTIZE_H
#define MOELORA_CPU_DEQUANTIZE_H

#include "core/format.h"
#include "cpu/convert.h"

/* Numbers of a 4-bit type's codes. */
static const float code_values[][16] = {
#define MOELORA_CODES(VALUES, ...) [MOELORA_VALUES_##VALUES] = {__VA_ARGS__},
#include "formats.inc"
};

/* A tile's e8m0 scale as the exponent of a float32, times this unit, is the scale's value. */
#define E8M0_UNIT_bf16 0x1p-126f
#define E8M0_UNIT_f16 0x1p98f

/* Whether all products of e2m1 and such a scale are representable in the dtype. */
#define E8M0_EXACT_bf16 true
#define E8M0_EXACT_f16 false

#define PASTE(NAME, TYPE) NAME##TYPE
#define NAME_FOR(NAME, TYPE) PASTE(NAME, TYPE)
#define OF_TYPE(NAME) NAME_FOR(NAME##_, TYPE)
#define TO_F32(BITS) NAME_FOR(moelora_, NAME_FOR(TYPE, _to_f32))(BITS)

#endif

/* Returns the scale of a group as float32. */
static inline __attribute__((always_inline)) float OF_TYPE(scale)(const moelora_format format,
                                                                  const uint8_t *scale) {
  if (moelora_has_e8m0_scales(format))
    return moelora_float((uint32_t)*scale << 23) * OF_TYPE(E8M0_UNIT);
  if (moelora_has_tile_scale(format)) /* e5m3 */
    return *scale ? moelora_float(((uint32_t)*scale + (127 - 22) * 8) << 20) : 0;
  if (moelora_has_f32_scales(format)) {
    float number;
    memcpy(&number, scale, sizeof number);
    return number;
  }
  uint16_t bits;
  memcpy(&bits, scale, sizeof bits);
  return TO_F32(bits);
}

/* Fills the table of a group's values from its scale and zero point. */
static inline __attribute__((always_inline)) table OF_TYPE(group)(const moelora_format format,
                                                                  const uint8_t *tile,
                                                                  const uint8_t *scale,
                                                                  const uint8_t *zero) {
  const float from = moelora_has_zeros(format) ? *zero : moelora_is_int4(format) ? 8 : 0;
  float tile_scale = 1;
  if (moelora_has_tile_scale(format))
    memcpy(&tile_scale, tile + moelora_tile_scale_offset(format), sizeof tile_scale);
  return OF_TYPE(table)(code_values[moelora_values_of(format)], from, OF_TYPE(scale)(format, scale),
                        tile_scale, moelora_has_e8m0_scales(format) && OF_TYPE(E8M0_EXACT));
}

/* Rows r and r + 8; `format` is a compile-time constant. */
static inline __attribute__((always_inline)) void
OF_TYPE(dequantize_format)(const moelora_format format, const uint8_t *tile, int64_t stride,
                           int64_t tiles, int32_t r, int64_t ahead, operand *low, operand *high) {
  const int groups = moelora_tile_groups(format), bytes = moelora_scale_bytes(format);
  const int64_t words = moelora_words_offset(r), place = moelora_scale_index(groups, r, 0);
  const int64_t scales = MOELORA_TILE_VALUES + place * bytes;
  const int64_t zeros = MOELORA_TILE_VALUES + 64 * groups * bytes + place;
  for (int64_t i = 0; i < tiles; i++, tile += stride, low += 64, high += 64) {
    table tables[2][4];
    __builtin_prefetch(tile + words + ahead, 0, 2);
    for (int at = 0; at < 2 * groups; at++)
      tables[at / groups][at % groups] =
          OF_TYPE(group)(format, tile, tile + scales + at * bytes, tile + zeros + at);
    look_up(format, tile + words, tables[0], tables[1], low, high);
  }
}

static void OF_TYPE(dequantize)(moelora_format format, const void *tile, int64_t stride,
                                int64_t tiles, int32_t r, int64_t ahead, void *low, void *high) {
  switch (format) {
#define MOELORA_FORMAT_OF(KERNEL, NAME, ...)                                                       \
  case MOELORA_##NAME:                                                                             \
    if (moelora_is_four_bits(MOELORA_##NAME))                                                      \
      OF_TYPE(dequantize_format)(MOELORA_##NAME, tile, stride, tiles, r, ahead, low, high);        \
    break;
#include "formats.inc"
  }
}

static void OF_TYPE(dequantize_fp8)(const uint8_t *row, int32_t r, const float scale[2], void *to) {
  const int32_t at = r & 7;
  for (int32_t c = 0; c < 8; c += 2)
    OF_TYPE(e4m3)(row + (c ^ at) * 16, row + ((c + 1) ^ at) * 16, scale[c / 4],
                  (operand *)to + 16 * c);
}

#undef TYPE
