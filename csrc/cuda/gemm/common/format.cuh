/* From a tile of quantised weights (moelora.h has its layout) to registers of operand A of
 * mma.m16n8k16 and of wgmma: bf16 or fp16 values, each rounded once.
 *
 * Four bits become a number by themselves. Those of e2m1 go where a 16-bit float has its sign, the
 * end of its exponent and the begin of its mantissa, so that it is a subnormal or a tiny number of
 * the float's: too small by 2^126 (bf16) or 2^14 (fp16), which the stored scales make up for. Words
 * of MXFP4 have the bits of three of four numbers as far from each other as bf16 wants them, so
 * that a shift and a mask are enough.
 *
 * Nibble n of INT4 in the mantissa's lowest bits of 1024 is the fp16 number 1024 + n, in the next
 * four 1024 + 16 n; alone it is the subnormal bf16 number n 2^-133 or, for exponent 1 goes on where
 * the mantissa ends, n 2^-129. With a zero point of 8 that is all: n s - 8 s is one fma, whose
 * addend is exact. Others are subtracted first. */
#ifndef MOELORA_CUDA_FORMAT_CUH
#define MOELORA_CUDA_FORMAT_CUH

#include "core/format.h"
#include "cuda/ptx/arithmetic.cuh"

/* Bytes of a tile of what a kernel of FORMAT was given. */
template <moelora_format FORMAT>
__device__ __forceinline__ uint32_t tile_bytes(moelora_format format) {
  return moelora_tile_size(FORMAT >= MOELORA_INT4 ? format : FORMAT);
}

/* Two scales of numbers of e4m3, with what these are too small by, each in its half: by their bits
 * alone, sign to sign, exponent and mantissa behind it, they are 2^120 (bf16) or 2^8 (fp16) too
 * small, subnormals as well. */
template <class T> __device__ __forceinline__ uint32_t e4m3_scales(float low, float high) {
  constexpr float UNIT = Element<T>::is_bf16 ? 0x1p120f : 0x1p8f;
  return pack2<T>(low * UNIT, high * UNIT);
}

/* Bytes 2 HALF and 2 HALF + 1 of a word of e4m3, times scale SCALE, rounded once. */
template <class T, int HALF, int SCALE>
__device__ __forceinline__ uint32_t e4m3(uint32_t word, uint32_t scales) {
  constexpr bool IS_BF16 = Element<T>::is_bf16;
  constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
  const uint32_t bytes = __byte_perm(word, 0, HALF == 0 ? 0x1404 : 0x3424);
  const uint32_t magnitude = bytes >> (IS_BF16 ? 4 : 1) & (IS_BF16 ? 0x07f007f0u : 0x3f803f80u);
  return fma2<T>(and_or(bytes, 0x80008000u, magnitude), both_halves<SCALE>(scales), NEGATIVE_ZEROS);
}

/* Exponent and sign of +-2^EXPONENT, twice. */
template <class T, int EXPONENT, bool NEGATIVE = false>
__device__ __forceinline__ uint32_t power_of_two() {
  constexpr bool IS_BF16 = Element<T>::is_bf16;
  constexpr uint32_t BITS = IS_BF16 ? (127 + EXPONENT) << 7 : (15 + EXPONENT) << 10;
  return (BITS | (NEGATIVE ? 0x8000u : 0u)) * 0x10001u;
}

/* Where in a tile lie a lane's words, the scales of its rows, and their zeros, for warp `warp` (0
 * to 3) of the four that share the tile's rows. */
struct LanePlaces {
  uint32_t values, scales, zeros;

  template <moelora_format FORMAT>
  static __device__ __forceinline__ LanePlaces find(int warp, moelora_format format) {
    const int lane = threadIdx.x & 31, groups = moelora_tile_groups(format);
    const int pair = warp * 8 + lane / 4; // of rows
    const uint32_t scales = MOELORA_TILE_VALUES;
    return {(warp * 32 + lane) * 16u, scales + pair * (FORMAT == MOELORA_MXFP4 ? 4 : 4 * groups),
            scales + 128 * groups + pair * 2 * groups};
  }
};

/* What a lane has of a tile: rows r = 16 warp + lane / 4 and r + 8 of its warp's. ZEROS: there may
 * be zero points. */
template <moelora_format FORMAT, class T, bool ZEROS = true> struct TileFragment {
  static constexpr bool IS_BF16 = Element<T>::is_bf16;
  static constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
  static constexpr int MISSING = moelora_missing_exponent(FORMAT, IS_BF16);
  static_assert(ZEROS || FORMAT == MOELORA_MXFP4 || IS_BF16, "numbers of fp16 go one way");

  uint32_t words[4];  // of k16 slabs
  uint32_t scales[2]; // of r and r + 8: low that of the first half of the depth, high of the second
  uint32_t zeros[2];  // INT4: what is added to nibbles, or without ZEROS to products

  /* Of a tile in shared memory, for warp `warp` (0 to 3) of the four that share its rows. */
  __device__ __forceinline__ void load(uint32_t tile, int warp, moelora_format format) {
    const LanePlaces at = LanePlaces::find<FORMAT>(warp, format);
    load(tile + at.values, tile + at.scales, tile + at.zeros, format);
  }

  /* Of this lane's words, its rows' scales and their zeros, wherever these lie in shared memory. */
  __device__ __forceinline__ void load(uint32_t values, uint32_t scale, uint32_t zero,
                                       moelora_format format) {
    const uint4 v = load_shared_16(values);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    if constexpr (FORMAT == MOELORA_MXFP4) {
      const uint32_t exponents = load_shared_4(scale);
      scales[0] = __byte_perm(exponents, 0, 0x4140) << (IS_BF16 ? 7 : 10);
      scales[1] = __byte_perm(exponents, 0, 0x4342) << (IS_BF16 ? 7 : 10);
    } else {
      load_groups(scale, zero, format);
    }
  }

  /* Scales and zero points of INT4, anything where there are none. All its formats go the same way,
   * without a branch: which bytes count is in the selectors, which are the same for all tiles. */
  __device__ __forceinline__ void load_groups(uint32_t at, uint32_t behind, moelora_format format) {
    const bool halves = moelora_tile_groups(format) == 2;
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
      zeros[0] = multiply2(scales[0], power_of_two<T, 3 - MISSING, true>());
      zeros[1] = multiply2(scales[1], power_of_two<T, 3 - MISSING, true>());
    }
    if constexpr (IS_BF16) {
      scales[0] = multiply2(scales[0], power_of_two<T, 133 - MISSING>());
      scales[1] = multiply2(scales[1], power_of_two<T, 129 - MISSING>());
    }
  }

  static __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
    return fma2<T>(a, b, NEGATIVE_ZEROS);
  }

  /* A register of them with the exponent that is missing. */
  static __device__ __forceinline__ uint32_t whole(uint32_t value) {
    return MISSING > 0 ? multiply2(value, power_of_two<T, MISSING>()) : value;
  }

  /* Registers of k16 slab SLAB. */
  template <int SLAB> __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
    constexpr int HALF = SLAB / 2;
    a[0] = value<0, HALF>(words[SLAB], scales[0], zeros[0]);
    a[1] = value<1, HALF>(words[SLAB], scales[1], zeros[1]);
    a[2] = value<2, HALF>(words[SLAB], scales[0], zeros[0]);
    a[3] = value<3, HALF>(words[SLAB], scales[1], zeros[1]);
  }

  /* Numbers I of both halves of a word. */
  template <int I, int HALF>
  static __device__ __forceinline__ uint32_t value(uint32_t word, uint32_t scale, uint32_t zero) {
    const uint32_t s = both_halves<HALF>(scale);
    if constexpr (FORMAT == MOELORA_MXFP4)
      return multiply2(e2m1<I>(word), s);
    const uint32_t moved = I < 2 ? word : word >> 8, z = both_halves<HALF>(zero);
    constexpr uint32_t NIBBLES = 0x000f000fu << I % 2 * 4;
    if constexpr (IS_BF16)
      return ZEROS ? multiply2(fma2<T>(moved & NIBBLES, power_of_two<T, 0>(), z), s)
                   : fma2<T>(moved & NIBBLES, s, z);
    const uint32_t number = and_or(moved, NIBBLES, power_of_two<T, 10>());
    return multiply2(fma2<T>(number, power_of_two<T, I % 2 * -4>(), z), s);
  }

  /* Number I of each half of a word: sign to sign, and the mantissa's bit to the highest of the
   * mantissa. */
  template <int I> static __device__ __forceinline__ uint32_t e2m1(uint32_t word) {
    if constexpr (IS_BF16) {
      // Copies of the last, by 2, 7 and 12 bits up, are in no other's way.
      constexpr uint32_t COPIES = 1 << 12 | 1 << 7 | 1 << 2;
      const uint32_t moved = I < 3 ? word << 3 * I : (word >> 10 & 0x001b001bu) * COPIES;
      return moved & 0x81c081c0u;
    } else if constexpr (I < 3) {
      return (word << 3 * I & 0x80008000u) | (word << 3 * I + 3 & 0x0e000e00u);
    } else {
      return (word << 2 & 0x80008000u) | (word & 0x0c000c00u) | (word >> 5 & 0x02000200u);
    }
  }
};

#endif
