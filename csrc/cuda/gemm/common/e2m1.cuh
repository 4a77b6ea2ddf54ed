/* e2m1 values as bf16 or fp16 numbers.
 *
 * Their bits go where a 16-bit float has its sign, the low end of its exponent and the high end of
 * its mantissa, so that each is a subnormal or a tiny number of the float's: too small by 2^126
 * (bf16) or 2^14 (fp16), which scales make up for. Words of a tile have the bits of three of four
 * values as far from each other as bf16 wants them, so that a shift and a mask are enough. */
#ifndef MOELORA_CUDA_E2M1_CUH
#define MOELORA_CUDA_E2M1_CUH

#include "cuda/ptx/arithmetic.cuh"

/* Numbers I of e2m1 of both halves of a word. */
template <class T, int I> __device__ __forceinline__ uint32_t e2m1(uint32_t word) {
  if constexpr (Element<T>::is_bf16) {
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

#endif
