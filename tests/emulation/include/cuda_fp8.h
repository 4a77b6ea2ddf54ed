#pragma once

#include <cuda_fp16.h>

typedef uint16_t __nv_fp8x2_storage_t;
typedef enum { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

namespace emulation {
inline float from_e4m3(uint8_t v) {
  if ((v & 0x7f) == 0x7f)
    return __uint_as_float(0x7fffffff);
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float size =
      exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
  return v & 0x80 ? -size : size;
}
/* cvt.rn.satfinite */
inline uint8_t to_e4m3(float v) {
  const uint8_t sign = __float_as_uint(v) >> 31 ? 0x80 : 0;
  if (v != v)
    return 0x7f;
  const float size = fabsf(v);
  if (size >= 448.f)
    return sign | 0x7e;
  int exponent = -6; /* of zero, which frexpf gives 0 */
  if (size > 0)
    frexpf(size, &exponent); /* size < 2^exponent */
  exponent = exponent - 1 < -6 ? -6 : exponent - 1;
  const float units =
      rintf(ldexpf(size, 3 - exponent)); /* ties to even; 16 becomes 8 of the next exponent */
  const int code = (exponent + 6) * 8 + (int)units; /* 8 units are the start of exponent 1 */
  return sign | (uint8_t)(code > 0x7e ? 0x7e : code);
}
} // namespace emulation

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t,
                                                     __nv_fp8_interpretation_t) {
  return (uint16_t)(emulation::to_e4m3(v.x) | emulation::to_e4m3(v.y) << 8);
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t v, __nv_fp8_interpretation_t) {
  return {__float2half_rn(emulation::from_e4m3((uint8_t)v)).bits,
          __float2half_rn(emulation::from_e4m3((uint8_t)(v >> 8))).bits};
}
