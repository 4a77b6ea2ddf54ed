/* Dequantizes e2m1 to bf16 or fp16: MXFP4 with one rounding; NVFP4 exactly, but without the scale
 * of the tensor.
 *
 * The bits of a value become the sign, the lowest exponent bits and the highest mantissa bit of a
 * 16-bit float. The result is too small by 2^126 (bf16) or 2^14 (fp16), which scales compensate.
 * The tile layout spaces the bits of three of four values as bf16 needs them, so that a shift and a
 * mask suffice. */
#pragma once

#include "cuda/gemm/common/format.cuh"

/* Extracts e2m1 values I of both halves of a word. */
template <class T, int I> __device__ __forceinline__ uint32_t e2m1(uint32_t word) {
  if constexpr (Element<T>::is_bf16) {
    // Value 3 has its exponent in bits 10 and 11, its sign in bit 13, its mantissa in bit 14.
    // COPIES moves them to bits 7 and 8, 15, and 6; the shifted copies do not overlap.
    constexpr uint32_t COPIES = 1 << 12 | 1 << 7 | 1 << 2;
    const uint32_t moved = I < 3 ? word << 3 * I : (word >> 10 & 0x001b001bu) * COPIES;
    return moved & 0x81c081c0u;
  } else if constexpr (I < 3) {
    return (word << 3 * I & 0x80008000u) | (word << 3 * I + 3 & 0x0e000e00u);
  } else {
    return (word << 2 & 0x80008000u) | (word & 0x0c000c00u) | (word >> 5 & 0x02000200u);
  }
}

/* ---- power-of-two scales for 32 columns ---- */

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_MXFP4, T, ZEROS> {
  uint32_t scales[2]; // of r and r + 8: low half for the first group of the tile, high half for the
                      // second

  __device__ __forceinline__ void load(uint32_t scale, uint32_t, moelora_format) {
    constexpr int EXPONENT = Element<T>::is_bf16 ? 7 : 10; // position of the exponent in the dtype
    const uint32_t exponents = load_shared_4(scale);
    scales[0] = __byte_perm(exponents, 0, 0x4140) << EXPONENT;
    scales[1] = __byte_perm(exponents, 0, 0x4342) << EXPONENT;
  }

  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return multiply2<T>(e2m1<T, I>(word), both_halves<SLAB / 2>(scales[I % 2]));
  }
};

template <class T, bool ZEROS> struct SlabScales<MOELORA_KERNEL_MXFP4, T, ZEROS> {
  uint32_t scales; // of r and of r + 8

  __device__ __forceinline__ void load(uint32_t scale, uint32_t, int slab, moelora_format) {
    constexpr int EXPONENT = Element<T>::is_bf16 ? 7 : 10;
    scales = __byte_perm(load_shared_4(scale), 0, slab < 2 ? 0x4240 : 0x4341) << EXPONENT;
  }

  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return multiply2<T>(e2m1<T, I>(word), both_halves<I % 2>(scales));
  }
};

/* ---- e4m3 scales for 16 columns, and one for the tensor ----
 *
 * A tile stores scales with a five-bit exponent (bias 22) and a three-bit mantissa, so that a shift
 * (bf16: and an addition) converts them to 16-bit floats. The product of a value and its scale is
 * too small by 2^TILE_SCALE_EXPONENT; tile_scale() includes this factor. */

/* Converts two scales; the results are too large by 2^118 (bf16) or 2^7 (fp16). Zero becomes 2^96
 * in bf16, which is harmless since the values are zero. */
template <class T> __device__ __forceinline__ uint32_t e4m3_group_scales(uint32_t two) {
  constexpr uint32_t EXPONENT = (127 + 118 - 22) << 7;
  return Element<T>::is_bf16 ? (two << 4) + EXPONENT * 0x10001u : two << 7;
}

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_NVFP4, T, ZEROS> {
  uint32_t scales[2][2]; // of r and r + 8: k16 slabs 0 and 1, then 2 and 3

  __device__ __forceinline__ void load(uint32_t at, uint32_t, moelora_format) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint32_t four = load_shared_4(at + 4 * row);
      scales[row][0] = e4m3_group_scales<T>(__byte_perm(four, 0, 0x4140));
      scales[row][1] = e4m3_group_scales<T>(__byte_perm(four, 0, 0x4342));
    }
  }

  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return multiply2<T>(e2m1<T, I>(word), both_halves<SLAB % 2>(scales[I % 2][SLAB / 2]));
  }
};

template <class T, bool ZEROS> struct SlabScales<MOELORA_KERNEL_NVFP4, T, ZEROS> {
  uint32_t scales; // of r and of r + 8

  __device__ __forceinline__ void load(uint32_t at, uint32_t, int slab, moelora_format) {
    const uint32_t two =
        __byte_perm(load_shared_4(at), load_shared_4(at + 4), 0x4400 + slab * 0x1111);
    scales = e4m3_group_scales<T>(two & 0x00ff00ffu);
  }

  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return multiply2<T>(e2m1<T, I>(word), both_halves<I % 2>(scales));
  }
};
