/* Dequantizes INT4 to bf16 or fp16, rounding each value once.
 *
 * fp16: a nibble n in the lowest mantissa bits of 1024 is the number 1024 + n; in the next four
 * bits, 1024 + 16 n. bf16: a nibble alone is the subnormal n 2^-133; four bits higher it is n
 * 2^-129, because exponent 1 continues the subnormals. In bf16, if all zero points are 8, n s - 8 s
 * is a single fma whose addend is exact. Otherwise the zero point is subtracted first. */
#pragma once

#include "cuda/gemm/common/format.cuh"

/* Dequantizes nibbles I of both halves of a word with half HALF of `scales` and `zeros`, which
 * `load` of GroupScales or SlabScales has converted. */
template <class T, bool ZEROS, int I, int HALF>
__device__ __forceinline__ uint32_t int4_values(uint32_t word, uint32_t scales, uint32_t zeros) {
  const uint32_t moved = I < 2 ? word : word >> 8;
  const uint32_t s = both_halves<HALF>(scales), z = both_halves<HALF>(zeros);
  constexpr uint32_t NIBBLES = 0x000f000fu << I % 2 * 4;
  if constexpr (Element<T>::is_bf16)
    return ZEROS ? multiply2<T>(fma2<T>(moved & NIBBLES, power_of_two<T, 0>(), z), s)
                 : fma2<T>(moved & NIBBLES, s, z);
  const uint32_t number = and_or(moved, NIBBLES, power_of_two<T, 10>());
  return multiply2<T>(fma2<T>(number, power_of_two<T, I % 2 * -4>(), z), s);
}

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_INT4, T, ZEROS> {
  using F = FormatTraits<MOELORA_KERNEL_INT4>;
  static constexpr bool IS_BF16 = Element<T>::is_bf16;
  static constexpr int DEFERRED = F::template DEFERRED_EXPONENT<T>;
  static_assert(ZEROS || IS_BF16, "fp16 has one path, that of zero points");

  uint32_t scales[2]; // of r and r + 8: low half for the first group of the tile, high half for the
                      // second
  uint32_t zeros[2];  // added to nibbles; without ZEROS, added to products

  /* For formats without zero points, `zero` may be any valid address. All formats take the
   * same branch-free path; byte selectors, which are the same for all tiles, pick the bytes. */
  __device__ __forceinline__ void load(uint32_t scale, uint32_t zero, moelora_format format) {
    const bool halves = F::groups(format) == 2;
    [[maybe_unused]] const bool has_zeros = moelora_has_zeros(format);
    // With one scale per row, the scale of r + 8 is in the same word.
    const uint32_t low = load_shared_4(scale), high = load_shared_4(scale + (halves ? 4 : 0));
    scales[0] = __byte_perm(low, 0, halves ? 0x3210 : 0x1010);
    scales[1] = __byte_perm(high, 0, halves ? 0x3210 : 0x3232);
    if constexpr (ZEROS) {
      // Row r: -(1024 + z) in fp16, -z 2^-133 in bf16. Row r + 8, where z is four bits higher:
      // -(64 + z), -z 2^-129.
      constexpr uint32_t SIGN = IS_BF16 ? 0x80 : 0xe4, EIGHT = 0x0800u; // bytes 4 and 5 below
      const uint32_t z0 = load_shared_2(zero), z1 = load_shared_2(zero + (halves ? 2 : 0));
      zeros[0] = __byte_perm(z0, EIGHT | SIGN, !has_zeros ? 0x4545 : halves ? 0x4140 : 0x4040);
      zeros[1] = __byte_perm(z1, EIGHT, !has_zeros ? 0x4545 : halves ? 0x4140 : 0x4141);
      zeros[1] = (zeros[1] << 4) + (IS_BF16 ? 0x80008000u : 0xd400d400u);
    } else {
      zeros[0] = multiply2<T>(scales[0], power_of_two<T, 3 - DEFERRED, true>());
      zeros[1] = multiply2<T>(scales[1], power_of_two<T, 3 - DEFERRED, true>());
    }
    if constexpr (IS_BF16) {
      scales[0] = multiply2<T>(scales[0], power_of_two<T, 133 - DEFERRED>());
      scales[1] = multiply2<T>(scales[1], power_of_two<T, 129 - DEFERRED>());
    }
  }

  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return int4_values<T, ZEROS, I, SLAB / 2>(word, scales[I % 2], zeros[I % 2]);
  }
};

template <class T, bool ZEROS> struct SlabScales<MOELORA_KERNEL_INT4, T, ZEROS> {
  using F = FormatTraits<MOELORA_KERNEL_INT4>;
  static constexpr bool IS_BF16 = Element<T>::is_bf16;
  static constexpr int DEFERRED = F::template DEFERRED_EXPONENT<T>;

  uint32_t scales, zeros; // low half for r, high half for r + 8

  __device__ __forceinline__ void load(uint32_t scale, uint32_t zero, int slab,
                                       moelora_format format) {
    const bool halves = F::groups(format) == 2; // a scale for slabs 0 and 1, one for 2 and 3
    const uint32_t two = __byte_perm(load_shared_4(scale), load_shared_4(scale + (halves ? 4 : 0)),
                                     !halves    ? 0x3210
                                     : slab < 2 ? 0x5410
                                                : 0x7632);
    if constexpr (ZEROS) {
      const uint32_t z0 = load_shared_2(zero), z1 = load_shared_2(zero + (halves ? 2 : 0));
      const uint32_t both = __byte_perm(z0, z1, !halves ? 0x1100 : slab < 2 ? 0x4400 : 0x5511);
      const uint32_t numbers = moelora_has_zeros(format) ? both & 0x00ff00ffu : 0x00080008u;
      zeros = (numbers & 0xffffu) + (numbers & 0xffff0000u) * 16 +
              (IS_BF16 ? 0x80008000u : 0xd400e400u);
    } else {
      zeros = multiply2<T>(two, power_of_two<T, 3 - DEFERRED, true>());
    }
    constexpr uint32_t LOW = power_of_two<T, IS_BF16 ? 133 - DEFERRED : 0>();
    constexpr uint32_t HIGH = power_of_two<T, IS_BF16 ? 129 - DEFERRED : 0>();
    scales = IS_BF16 ? multiply2<T>(two, (LOW & 0xffffu) | (HIGH & 0xffff0000u)) : two;
  }

  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return int4_values<T, ZEROS, I, I % 2>(word, scales, zeros);
  }
};
