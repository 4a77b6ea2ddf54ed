/* Dequantizes MXFP4 to bf16 or fp16, rounding each value once.
 *
 * The e2m1 bits are moved to the sign, the lowest exponent bits and the highest mantissa bits of a
 * 16-bit float. The result is too small by 2^126 (bf16) or 2^14 (fp16), which the stored scales
 * compensate. The tile layout spaces the bits of three of four values as bf16 needs them, so that
 * a shift and a mask suffice. */
#ifndef MOELORA_CUDA_FORMAT_MXFP4_CUH
#define MOELORA_CUDA_FORMAT_MXFP4_CUH

#include "cuda/gemm/common/format.cuh"

/* Extracts e2m1 values I of both halves of a word. */
template <class T, int I> __device__ __forceinline__ uint32_t e2m1(uint32_t word) {
  if constexpr (Element<T>::is_bf16) {
    // The last value's bits are spread: the copies shifted by 2, 7 and 12 do not overlap.
    constexpr uint32_t COPIES = 1 << 12 | 1 << 7 | 1 << 2;
    const uint32_t moved = I < 3 ? word << 3 * I : (word >> 10 & 0x001b001bu) * COPIES;
    return moved & 0x81c081c0u;
  } else if constexpr (I < 3) {
    return (word << 3 * I & 0x80008000u) | (word << 3 * I + 3 & 0x0e000e00u);
  } else {
    return (word << 2 & 0x80008000u) | (word & 0x0c000c00u) | (word >> 5 & 0x02000200u);
  }
}

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

#endif
