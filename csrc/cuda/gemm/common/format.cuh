/* From a tile of quantised weights (moelora.h has its layout) to registers of operand A of
 * mma.m16n8k16 and of wgmma: bf16 or fp16 values, each rounded once.
 *
 * A nibble becomes a number by its bits alone. e2m1 has sign, exponent and mantissa where those of
 * a 16-bit float are, so that it is a subnormal or a tiny number of the float's: too small by 2^126
 * (bf16) or 2^14 (fp16), which the stored scales make up for. A nibble of INT4 at the low end of
 * the mantissa of 128 (bf16) or 1024 (fp16) is that number more, which goes with the zero point. */
#ifndef MOELORA_CUDA_FORMAT_CUH
#define MOELORA_CUDA_FORMAT_CUH

#include "core/format.h"
#include "cuda/ptx/mma.cuh"

/* a b + c of two elements each, rounded once. */
template <class T> __device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (Element<T>::is_bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/* value << by, or >> -by. */
template <int BY> __device__ __forceinline__ uint32_t shifted(uint32_t value) {
  return BY >= 0 ? value << (BY & 31) : value >> (-BY & 31);
}

/* Bytes of a tile of what a kernel of FORMAT was given. */
template <moelora_format FORMAT>
__device__ __forceinline__ uint32_t tile_bytes(moelora_format format) {
  return moelora_tile_size(FORMAT == MOELORA_INT4 ? format : FORMAT);
}

/* What a lane has of a tile: rows r = 16 warp + lane / 4 and r + 8 of its warp's. */
template <moelora_format FORMAT, class T> struct TileFragment {
  static constexpr bool IS_BF16 = Element<T>::is_bf16;
  static constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
  static constexpr uint32_t ONES = Element<T>::is_bf16 ? 0x3f803f80u : 0x3c003c00u;

  uint32_t words[4];     // of k16 slabs
  uint32_t scales[2][2]; // of r and r + 8, of the halves of the depth; twice in a register
  uint32_t zeros[2][2];  // INT4: -(128 or 1024, and the zero point), likewise

  /* Of a tile in shared memory, for warp `warp` (0 to 3) of the four that share its rows. */
  __device__ __forceinline__ void load(uint32_t tile, int warp, moelora_format format) {
    const int lane = threadIdx.x & 31;
    const uint4 v = load_shared_16(tile + (warp * 32 + lane) * 16);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    const int place = warp * 8 + lane / 4; // of both rows' scales
    const uint32_t at = tile + MOELORA_TILE_VALUES;
    if constexpr (FORMAT == MOELORA_MXFP4) {
      const uint32_t exponents = load_shared_4(at + place * 4);
#pragma unroll
      for (int i = 0; i < 4; i++)
        scales[i / 2][i % 2] = twice(exponents, i) << (Element<T>::is_bf16 ? 7 : 10);
    } else if (format == MOELORA_INT4 || format == MOELORA_INT4_ZP) {
      load_groups<1>(at, place, format);
    } else {
      load_groups<2>(at, place, format);
    }
  }

  template <int GROUPS>
  __device__ __forceinline__ void load_groups(uint32_t at, int place, moelora_format format) {
    const uint32_t behind = at + 64 * GROUPS * 2 + place * 2 * GROUPS;
    const bool has_zeros = moelora_has_zeros(format);
    uint32_t both[2], bytes = 0x08080808u; // of row r, of row r + 8
    if constexpr (GROUPS == 2) {
      const uint2 v = load_shared_8(at + place * 8);
      both[0] = v.x, both[1] = v.y;
      if (has_zeros)
        bytes = load_shared_4(behind);
    } else {
      const uint32_t v = load_shared_4(at + place * 4);
      both[0] = __byte_perm(v, 0, 0x1010), both[1] = __byte_perm(v, 0, 0x3232);
      if (has_zeros)
        bytes = __byte_perm(load_shared_2(behind), 0, 0x1100);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      scales[i / 2][i % 2] = __byte_perm(both[i / 2], 0, i % 2 ? 0x3232 : 0x1010);
      zeros[i / 2][i % 2] = twice(bytes, i) | (Element<T>::is_bf16 ? 0xc300c300u : 0xe400e400u);
    }
  }

  /* Byte i, in the low half and in the high half. */
  static __device__ __forceinline__ uint32_t twice(uint32_t bytes, int i) {
    return __byte_perm(bytes, 0, 0x4040 + 0x0101 * i);
  }

  /* Registers of k16 slab SLAB. */
  template <int SLAB> __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
    a[0] = value<0>(words[SLAB], scales[0][SLAB / 2], zeros[0][SLAB / 2]);
    a[1] = value<1>(words[SLAB], scales[1][SLAB / 2], zeros[1][SLAB / 2]);
    a[2] = value<2>(words[SLAB], scales[0][SLAB / 2], zeros[0][SLAB / 2]);
    a[3] = value<3>(words[SLAB], scales[1][SLAB / 2], zeros[1][SLAB / 2]);
  }

  /* Nibbles I and I + 4. */
  template <int I>
  static __device__ __forceinline__ uint32_t value(uint32_t word, uint32_t scale, uint32_t zero) {
    if constexpr (FORMAT == MOELORA_MXFP4) {
      constexpr int PLACE = Element<T>::is_bf16 ? 6 : 9; // of the mantissa's bit
      const uint32_t magnitude = shifted<PLACE - 4 * I>(word) & 0x00070007u << PLACE;
      const uint32_t sign = shifted<12 - 4 * I>(word) & 0x80008000u;
      return fma2<T>(magnitude | sign, scale, NEGATIVE_ZEROS);
    } else {
      const uint32_t number =
          (word >> 4 * I & 0x000f000fu) | (Element<T>::is_bf16 ? 0x43004300u : 0x64006400u);
      return fma2<T>(fma2<T>(number, ONES, zero), scale, NEGATIVE_ZEROS);
    }
  }
};

#endif
