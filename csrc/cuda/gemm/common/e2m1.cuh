/* Moves e2m1 bits to bf16 or fp16.
 *
 * They become the sign, the lowest exponent bits and the highest mantissa bits of a 16-bit float.
 * The result is too small by 2^126 (bf16) or 2^14 (fp16), which scales compensate. The tile layout
 * spaces the bits of three of four values as bf16 needs them, so that a shift and a mask suffice.
 */
#ifndef MOELORA_CUDA_E2M1_CUH
#define MOELORA_CUDA_E2M1_CUH

#include "cuda/ptx/arithmetic.cuh"

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

#endif
