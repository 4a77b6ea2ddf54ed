/* Dequantizes e4m3 to bf16 or fp16, rounding each value once. */
#ifndef MOELORA_CUDA_FORMAT_FP8_CUH
#define MOELORA_CUDA_FORMAT_FP8_CUH

#include "cuda/gemm/common/format.cuh"

/* Packs two scales, multiplied by the exponent correction of `e4m3`: an e4m3 bit pattern moved
 * into a 16-bit float, subnormal or not, is too small by 2^120 (bf16) or 2^8 (fp16). */
template <class T> __device__ __forceinline__ uint32_t e4m3_scales(float low, float high) {
  constexpr float UNIT = Element<T>::is_bf16 ? 0x1p120f : 0x1p8f;
  return pack2<T>(low * UNIT, high * UNIT);
}

/* Dequantizes bytes 2 HALF and 2 HALF + 1 of a word with scale SCALE, rounding once. */
template <class T, int HALF, int SCALE>
__device__ __forceinline__ uint32_t e4m3(uint32_t word, uint32_t scales) {
  constexpr bool IS_BF16 = Element<T>::is_bf16;
  // prmt with bit 3 of a selector replicates the sign: each half is the byte with its sign in all
  // upper bits. The shift moves exponent and mantissa into place, and a copy of the sign into
  // bit 15.
  const uint32_t bytes = __byte_perm(word, 0, HALF == 0 ? 0x9180 : 0xb3a2);
  const uint32_t moved = bytes << (IS_BF16 ? 4 : 7) & (IS_BF16 ? 0x87f087f0u : 0xbf80bf80u);
  return multiply2<T>(moved, both_halves<SCALE>(scales));
}

#endif
