/* Dequantizes NVFP4 to bf16 or fp16; exact, without the scale of the tensor.
 *
 * A tile stores scales with a five-bit exponent (bias 22) and a three-bit mantissa, so that a
 * shift converts them to 16-bit floats. The product of a value and its scale is too small by
 * 2^TILE_SCALE_EXPONENT; the accumulators are multiplied by that and by the scale of the tensor. */
#ifndef MOELORA_CUDA_FORMAT_NVFP4_CUH
#define MOELORA_CUDA_FORMAT_NVFP4_CUH

#include "cuda/gemm/common/e2m1.cuh"
#include "cuda/gemm/common/format.cuh"

/* Converts two scales, too large by 2^118 (bf16) or 2^7 (fp16). Zero becomes 2^96 in bf16, which is
 * harmless since the values are zero. */
template <class T> __device__ __forceinline__ uint32_t nvfp4_scales(uint32_t two) {
  constexpr uint32_t EXPONENT = (127 + 118 - 22) << 7;
  return Element<T>::is_bf16 ? (two << 4) + EXPONENT * 0x10001u : two << 7;
}

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_NVFP4, T, ZEROS> {
  uint32_t scales[2][2]; // of r and r + 8: k16 slabs 0 and 1, then 2 and 3

  __device__ __forceinline__ void load(uint32_t at, uint32_t, moelora_format) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint32_t four = load_shared_4(at + 4 * row);
      scales[row][0] = nvfp4_scales<T>(__byte_perm(four, 0, 0x4140));
      scales[row][1] = nvfp4_scales<T>(__byte_perm(four, 0, 0x4342));
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
    scales = nvfp4_scales<T>(two & 0x00ff00ffu);
  }

  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return multiply2<T>(e2m1<T, I>(word), both_halves<I % 2>(scales));
  }
};

#endif
