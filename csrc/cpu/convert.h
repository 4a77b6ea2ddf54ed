/* Conversions between float32 and the 16-bit types in plain C, which compilers vectorize.
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
