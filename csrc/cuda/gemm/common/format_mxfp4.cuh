/* Dequantizes MXFP4 to bf16 or fp16, rounding each value once. The stored scales include the
 * exponent correction of e2m1.cuh. */
#ifndef MOELORA_CUDA_FORMAT_MXFP4_CUH
#define MOELORA_CUDA_FORMAT_MXFP4_CUH

#include "cuda/gemm/common/e2m1.cuh"
#include "cuda/gemm/common/format.cuh"

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

#endif
