/* Numbers of INT4: bf16 or fp16 values, each rounded once.
 *
 * A nibble n in the mantissa's lowest bits of 1024 is the fp16 number 1024 + n, in the next four
 * 1024 + 16 n; alone it is the subnormal bf16 number n 2^-133 or, for exponent 1 goes on where the
 * mantissa ends, n 2^-129. With a zero point of 8 that is all: n s - 8 s is one fma, whose addend
 * is exact. Others are subtracted first. */
#ifndef MOELORA_CUDA_FORMAT_INT4_CUH
#define MOELORA_CUDA_FORMAT_INT4_CUH

#include "cuda/gemm/common/format.cuh"

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_INT4, T, ZEROS> {
  using F = FormatTraits<MOELORA_KERNEL_INT4>;
  static constexpr bool IS_BF16 = Element<T>::is_bf16;
  static constexpr int MISSING = F::template MISSING_EXPONENT<T>;
  static_assert(ZEROS || IS_BF16, "numbers of fp16 go one way");

  uint32_t scales[2]; // of r and r + 8: low that of the first half of the depth, high of the second
  uint32_t zeros[2];  // what is added to nibbles, or without ZEROS to products

  /* Anything where there are no zero points. All formats go the same way, without a branch: which
   * bytes count is in the selectors, which are the same for all tiles. */
  __device__ __forceinline__ void load(uint32_t at, uint32_t behind, moelora_format format) {
    const bool halves = F::groups(format) == 2;
    [[maybe_unused]] const bool has_zeros = moelora_has_zeros(format);
    // Where a row has one scale, that of r + 8 is in the same word.
    const uint32_t low = load_shared_4(at), high = load_shared_4(at + (halves ? 4 : 0));
    scales[0] = __byte_perm(low, 0, halves ? 0x3210 : 0x1010);
    scales[1] = __byte_perm(high, 0, halves ? 0x3210 : 0x3232);
    if constexpr (ZEROS) {
      // -(1024 + z) and -(64 + z), or -z 2^-133 and -z 2^-129: of r + 8 four bits further up.
      constexpr uint32_t SIGN = IS_BF16 ? 0x80 : 0xe4, EIGHT = 0x0800u; // bytes 4 and 5
      const uint32_t z0 = load_shared_2(behind), z1 = load_shared_2(behind + (halves ? 2 : 0));
      zeros[0] = __byte_perm(z0, EIGHT | SIGN, !has_zeros ? 0x4545 : halves ? 0x4140 : 0x4040);
      zeros[1] = __byte_perm(z1, EIGHT, !has_zeros ? 0x4545 : halves ? 0x4140 : 0x4141);
      zeros[1] = (zeros[1] << 4) + (IS_BF16 ? 0x80008000u : 0xd400d400u);
    } else {
      zeros[0] = multiply2<T>(scales[0], power_of_two<T, 3 - MISSING, true>());
      zeros[1] = multiply2<T>(scales[1], power_of_two<T, 3 - MISSING, true>());
    }
    if constexpr (IS_BF16) {
      scales[0] = multiply2<T>(scales[0], power_of_two<T, 133 - MISSING>());
      scales[1] = multiply2<T>(scales[1], power_of_two<T, 129 - MISSING>());
    }
  }

  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    const uint32_t moved = I < 2 ? word : word >> 8;
    const uint32_t s = both_halves<SLAB / 2>(scales[I % 2]),
                   z = both_halves<SLAB / 2>(zeros[I % 2]);
    constexpr uint32_t NIBBLES = 0x000f000fu << I % 2 * 4;
    if constexpr (IS_BF16)
      return ZEROS ? multiply2<T>(fma2<T>(moved & NIBBLES, power_of_two<T, 0>(), z), s)
                   : fma2<T>(moved & NIBBLES, s, z);
    const uint32_t number = and_or(moved, NIBBLES, power_of_two<T, 10>());
    return multiply2<T>(fma2<T>(number, power_of_two<T, I % 2 * -4>(), z), s);
  }
};

#endif
