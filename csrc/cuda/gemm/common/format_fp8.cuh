/* Dequantizes e4m3 to bf16 or fp16: rounds the scale, then its product with the value. */
#pragma once

#include "cuda/gemm/common/format.cuh"

/* Packs two scales, multiplied by the exponent correction of `e4m3`: an e4m3 bit pattern moved
 * into a 16-bit float, subnormal or not, is too small by 2^120 (bf16) or 2^8 (fp16). */
template <class T> __device__ __forceinline__ uint32_t e4m3_scales(float low, float high) {
  constexpr float UNIT = Element<T>::is_bf16 ? 0x1p120f : 0x1p8f;
  return pack2<T>(low * UNIT, high * UNIT);
}

/* Dequantizes bytes 2 HALF and 2 HALF + 1 of a word with scale SCALE of `scales`, rounding once.
 * prmt puts each byte below eight copies of its sign bit: a shift then aligns exponent and
 * mantissa, and the mask keeps one sign bit. */
template <class T, int HALF, int SCALE>
__device__ __forceinline__ uint32_t e4m3(uint32_t word, uint32_t scales) {
  constexpr bool IS_BF16 = Element<T>::is_bf16;
  const uint32_t bytes = select_bytes<HALF == 0 ? 0x9180 : 0xb3a2>(word);
  const uint32_t value = bytes << (IS_BF16 ? 4 : 7) & (IS_BF16 ? 0x87f087f0u : 0xbf80bf80u);
  return multiply2<T>(value, both_halves<SCALE>(scales));
}
