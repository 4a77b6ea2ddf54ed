/* Conversions of e4m3 (OCP 8-bit floating point, 1.0): 4 exponent bits with bias 7; no infinities;
 * NaN if all bits but the sign are set. */
#pragma once

#include "cpu/convert.h"

#define MOELORA_E4M3_MAX 448.0f

/* Converts e4m3 to float32; `byte` must not be NaN. */
static inline float moelora_e4m3_to_f32(uint8_t byte) {
  const uint32_t sign = (uint32_t)(byte & 0x80) << 24, magnitude = byte & 0x7f;
  /* Shifted to float32's fields, the bits are the value times 2^-120; the product is exact. */
  return moelora_float(sign | moelora_bits(moelora_float(magnitude << 20) * 0x1p120f));
}

/* Rounds to the nearest e4m3 value, ties to even; saturates at 448; NaN stays NaN. */
static inline float moelora_round_e4m3(float x) {
  const uint32_t sign = moelora_bits(x) & 0x80000000;
  const float size = moelora_float(moelora_bits(x) ^ sign);
  const float most = size > MOELORA_E4M3_MAX ? MOELORA_E4M3_MAX : size;
  const uint32_t bits = moelora_bits(most);
  const float normal = moelora_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000);
  const float subnormal =
      (most + 0x1p14f) - 0x1p14f; /* rounds to multiples of 2^-9, the last place of the sum */
  const float rounded = most < 0x1p-6f ? subnormal : size != size ? size : normal;
  return moelora_float(moelora_bits(rounded) | sign);
}
