/* `dequantise` and `dequantise_fp8` of kernels.h for one instruction set and one TYPE, bf16 or f16.
 *
 * The numbers of four bits of one row and group of quantised weights are the 16 entries of a table,
 * each of them (value - zero) scale, rounded to the dtype, so whatever the format is, a nibble is a
 * place in a table. Numbers of FP8 are computed.
 *
 * The including file defines, before it includes this,
 *   TYPE
 *   operand                what operand rows are made of
 *   table                  16 operands
 *   table_<TYPE>(values, zero, scale, of_tile, exact)    (values[i] - zero) * scale * of_tile for
 *                          i < 16, rounded where they are not `exact` already
 *   look_up(format, words, low, high, to_low, to_high)    64 columns of two rows
 *   e4m3_<TYPE>(first, second, scale, to)    32 columns of an FP8 row, two chunks of it: value times
 *                          scale, rounded
 *
 * Once those of MXFP4 are nibbles, byte b of word (q, s) of `words` [4 q][4 s][4 bytes] is column
 * 16 s + 2 q + (b / 2) + 8 (b % 2): its low nibble of the first row, to be looked up in
 * low[s G / 4] for G groups of a row, its high nibble of the other, in high[s G / 4]. */
#ifndef MOELORA_CPU_DEQUANTISE_H
#define MOELORA_CPU_DEQUANTISE_H

#include "core/format.h"
#include "cpu/convert.h"

/* What nibbles stand for: e2m1, and themselves. */
static const float nibble_values[2][16] = {
    {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
};

/* The float32 whose exponent is an e8m0 scale of a tile, times that, is what the scale means. */
#define E8M0_UNIT_bf16 0x1p-126f
#define E8M0_UNIT_f16 0x1p98f

/* Whether all products of e2m1 and such a scale are numbers of the dtype. */
#define E8M0_EXACT_bf16 true
#define E8M0_EXACT_f16 false

#define PASTE(NAME, TYPE) NAME##TYPE
#define NAME_FOR(NAME, TYPE) PASTE(NAME, TYPE)
#define OF_TYPE(NAME) NAME_FOR(NAME##_, TYPE)
#define TO_F32(BITS) NAME_FOR(moelora_, NAME_FOR(TYPE, _to_f32))(BITS)

#endif

/* What the scale of a group means. */
static inline __attribute__((always_inline)) float OF_TYPE(scale)(const moelora_format format,
                                                                  const uint8_t *scale) {
  if (moelora_has_e8m0_scales(format))
    return moelora_float((uint32_t)*scale << 23) * OF_TYPE(E8M0_UNIT);
  if (moelora_has_tile_scale(format)) /* e5m3 */
    return *scale ? moelora_float(((uint32_t)*scale + (127 - 22) * 8) << 20) : 0;
  uint16_t bits;
  memcpy(&bits, scale, sizeof bits);
  return TO_F32(bits);
}

/* The table of a group of a tile whose scale and zero point these are. */
static inline __attribute__((always_inline)) table OF_TYPE(group)(const moelora_format format,
                                                                  const uint8_t *tile,
                                                                  const uint8_t *scale,
                                                                  const uint8_t *zero) {
  const float from = moelora_has_zeros(format) ? *zero : moelora_is_int4(format) ? 8 : 0;
  float of_tile = 1;
  if (moelora_has_tile_scale(format))
    memcpy(&of_tile, tile + moelora_tile_scale_offset(format), sizeof of_tile);
  return OF_TYPE(table)(nibble_values[moelora_is_int4(format)], from, OF_TYPE(scale)(format, scale),
                        of_tile, moelora_has_e8m0_scales(format) && OF_TYPE(E8M0_EXACT));
}

/* Rows r and r + 8, of a format that the compiler knows. */
static inline __attribute__((always_inline)) void
OF_TYPE(dequantise_format)(const moelora_format format, const uint8_t *tile, int64_t stride,
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

static void OF_TYPE(dequantise)(moelora_format format, const void *tile, int64_t stride,
                                int64_t tiles, int32_t r, int64_t ahead, void *low, void *high) {
  switch (format) {
#define MOELORA_FORMAT_OF(KERNEL, NAME, ...)                                                       \
  case MOELORA_##NAME:                                                                             \
    if (moelora_is_four_bits(MOELORA_##NAME))                                                      \
      OF_TYPE(dequantise_format)(MOELORA_##NAME, tile, stride, tiles, r, ahead, low, high);        \
    break;
#include "formats.inc"
  }
}

static void OF_TYPE(dequantise_fp8)(const uint8_t *row, int32_t r, const float scale[2], void *to) {
  const int32_t at = r & 7;
  for (int32_t c = 0; c < 8; c += 2)
    OF_TYPE(e4m3)(row + (c ^ at) * 16, row + ((c + 1) ^ at) * 16, scale[c / 4],
                  (operand *)to + 16 * c);
}

#undef TYPE
