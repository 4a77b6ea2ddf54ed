/* Quantizes to e4m3. A lane has 16 neighboring columns of a row, so that a scale group of 128 is in
 * eight lanes. e4m3_bytes orders 16 columns as weight tiles do: 2q, 2q + 1, 2q + 8, 2q + 9 for
 * q = 0..3. */
#pragma once

#include <cuda_fp8.h>

#include "cuda/ptx/mma.cuh"

constexpr float kMaxE4m3 = 448.f;
constexpr uint8_t kNanE4m3 = 0x7f;

/* Returns the position of column i in the order of weight tiles. */
__device__ __forceinline__ int quad_position(int i) {
  return (i & ~15) | (i >> 1 & 3) << 2 | (i >> 3 & 1) << 1 | (i & 1);
}

struct PackedColumns {
  uint32_t two[8]; // pairs of elements
};

struct FloatColumns {
  float v[16];
};

/* Converts to float32. Masks the upper element of a bf16 pair, to save an instruction. */
template <class T> __device__ __forceinline__ FloatColumns to_floats(const PackedColumns &c) {
  FloatColumns n;
  for (int i = 0; i < 16; i++) {
    const uint32_t two = c.two[i / 2];
    n.v[i] = Element<T>::is_bf16 && i % 2 ? __uint_as_float(two & 0xffff0000)
                                          : Element<T>::to_float(((const T *)&two)[i % 2]);
  }
  return n;
}

__device__ __forceinline__ float abs_max(float most, const FloatColumns &n) {
  for (int i = 0; i < 16; i++)
    most = fmaxf(most, fabsf(n.v[i]));
  return most;
}

/* Returns the maximum over LANES neighboring lanes. */
template <int LANES> __device__ __forceinline__ float max_over_lanes(float most) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2)
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  return most;
}

/* Returns v / by, correctly rounded, given inverse = 1 / by: a product and one correction step, as
 * in the compiler's division but without its special cases. Callers pass 0 for a `by` that is not
 * finite. */
__device__ __forceinline__ float divide_rounded(float v, float by, float inverse) {
  const float near = v * inverse;
  return fmaf(-fmaf(near, by, -v), inverse, near);
}

/* Returns the scale of a group with absolute maximum `most`. */
__device__ __forceinline__ float group_scale(float most) {
  return most < __builtin_inff() ? divide_rounded(most, kMaxE4m3, 1.f / kMaxE4m3) : most;
}

/* Returns the elements 2i and 2i + 1 in e4m3, in the low 16 bits. */
__device__ __forceinline__ uint32_t e4m3_pair(const FloatColumns &n, int i) {
  return __nv_cvt_float2_to_fp8x2(make_float2(n.v[2 * i], n.v[2 * i + 1]), __NV_SATFINITE,
                                  __NV_E4M3);
}

__device__ __forceinline__ uint4 e4m3_bytes(const FloatColumns &n) {
  return make_uint4(
      e4m3_pair(n, 0) | e4m3_pair(n, 4) << 16, e4m3_pair(n, 1) | e4m3_pair(n, 5) << 16,
      e4m3_pair(n, 2) | e4m3_pair(n, 6) << 16, e4m3_pair(n, 3) | e4m3_pair(n, 7) << 16);
}
