/* NVFP4: e2m1 values times an e4m3 scale for every 16 columns, as bf16 or fp16 numbers, which are
 * exact. A tile holds scales as five bits of exponent, of which 22 is 2^0, and three of mantissa:
 * shifted, they are 16-bit floats. What exponents are short of in all is tile_scale_exponent, which
 * accumulators get with the scale of the tile. Values of a scale of 0 are zeros in the tile. */
#ifndef MOELORA_CUDA_FORMAT_NVFP4_CUH
#define MOELORA_CUDA_FORMAT_NVFP4_CUH

#include "cuda/gemm/common/e2m1.cuh"
#include "cuda/gemm/common/format.cuh"

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_NVFP4, T, ZEROS> {
  uint32_t scales[2][2]; // of r and r + 8: of k16 slabs 0 and 1, and 2 and 3

  __device__ __forceinline__ void load(uint32_t at, uint32_t, moelora_format) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      const uint32_t four = load_shared_4(at + 4 * row);
      scales[row][0] = to_floats(__byte_perm(four, 0, 0x4140));
      scales[row][1] = to_floats(__byte_perm(four, 0, 0x4342));
    }
  }

  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return multiply2<T>(e2m1<T, I>(word), both_halves<SLAB % 2>(scales[I % 2][SLAB / 2]));
  }

private:
  /* Two scales times 2^118 (bf16) or 2^7 (fp16). */
  static __device__ __forceinline__ uint32_t to_floats(uint32_t two) {
    constexpr uint32_t EXPONENT = (127 + 118 - 22) << 7;
    return Element<T>::is_bf16 ? (two << 4) + EXPONENT * 0x10001u : two << 7;
  }
};

#endif
