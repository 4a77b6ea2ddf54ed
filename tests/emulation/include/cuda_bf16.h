#pragma once

#include <cuda_runtime.h>

struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 v) {
  return __uint_as_float((uint32_t)v.bits << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t bits = __float_as_uint(v);
  if (v != v)
    return {0x7fff};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 v) {
  return v.bits;
}
