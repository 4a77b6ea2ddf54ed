/* Conversions between float32, the 16-bit types and e4m3 in plain C, which compilers vectorize.
 * Conversions to 16 bits round to nearest even and make NaN quiet. */
#pragma once

#include <stdint.h>
#include <string.h>

static inline uint32_t moelora_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float moelora_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float moelora_bf16_to_f32(uint16_t x) {
  return moelora_float((uint32_t)x << 16);
}

static inline uint16_t moelora_f32_to_bf16(float x) {
  uint32_t bits = moelora_bits(x);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  uint32_t quiet = bits >> 16 | 0x40;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

static inline float moelora_f16_to_f32(uint16_t x) {
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, magnitude = x & 0x7fff;
  if (magnitude >= 0x7c00) /* infinity, or NaN made quiet */
    return moelora_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13 |
                         (magnitude > 0x7c00 ? 0x400000 : 0));
  /* Shifted to float32's fields, the bits are the value times 2^-112; the product is exact. */
  return moelora_float(sign | moelora_bits(moelora_float(magnitude << 13) * 0x1p112f));
}

static inline uint16_t moelora_f32_to_f16(float x) {
  uint32_t bits = moelora_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000)
    return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) /* 65520 and above round to infinity */
    return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x38800000) /* subnormal: adding 0.5 rounds to multiples of 2^-24 */
    return (uint16_t)(sign | (moelora_bits(moelora_float(magnitude) + 0.5f) - 0x3f000000));
  return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

/* ---- e4m3 ---- */

/* OCP 8-bit floating point, 1.0: 4 exponent bits with bias 7; no infinities; NaN if all bits but
 * the sign are set. */
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
