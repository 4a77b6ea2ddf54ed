#pragma once

#include <cuda_runtime.h>

/* The compiler's _Float16 rounds like cvt.rn. */
struct alignas(2) __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __half2_raw {
  uint16_t x, y;
};
inline float __half2float(__half v) {
  _Float16 f;
  memcpy(&f, &v, 2);
  return (float)f;
}
inline __half __float2half_rn(float v) {
  if (v != v)
    return {0x7fff};
  const _Float16 f = (_Float16)v;
  __half h;
  memcpy(&h, &f, 2);
  return h;
}
inline uint16_t __half_as_ushort(__half v) {
  return v.bits;
}
inline float2 __half22float2(__half2 v) {
  return {__half2float(v.x), __half2float(v.y)};
}
