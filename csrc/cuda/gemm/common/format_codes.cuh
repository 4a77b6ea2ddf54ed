/* Dequantizes codes that stand for any 16 numbers, with a float32 scale for a group, to bf16 or
 * fp16.
 *
 * prmt looks up four codes at once, a byte of their numbers at a time: it selects from eight
 * entries by the low three bits of a code, twice, and the fourth bit chooses between both. Tiles
 * have the eight codes of a word in the order of the values of registers a0 to a3, so that one more
 * prmt joins low and high bytes to a register.
 *
 * The number is code scale, rounded once, but for the code, which has the precision of T: numbers
 * are tabulated in a unit in which they nearly are numbers of T. The scale, divided by the unit, is
 * the sum of two numbers of T: code high + (code low). */
#ifndef MOELORA_CUDA_FORMAT_CODES_CUH
#define MOELORA_CUDA_FORMAT_CODES_CUH

#include "cuda/gemm/common/format.cuh"

static MOELORA_CONSTEXPR float code_number(moelora_values values, int code) {
#define MOELORA_CODES(VALUES, ...)                                                                 \
  if (values == MOELORA_VALUES_##VALUES) {                                                         \
    constexpr float numbers[] = {__VA_ARGS__};                                                     \
    return numbers[code];                                                                          \
  }
#include "formats.inc"
  return 0;
}

/* The unit of a table. Of NF4 it is the one with the least sum of squared rounding errors, which is
 * 0.35 (bf16) and 0.16 (fp16) of that of unit 1; in units of 4/3 FP4 is exact. */
template <class T> MOELORA_CONSTEXPR float code_unit(moelora_values values) {
  return values == MOELORA_VALUES_BNB_FP4 ? 0.75f : Element<T>::is_bf16 ? 1.4370041f : 1.6776886f;
}

/* Bits of a number in T, which is normal or 0. */
template <class T> MOELORA_CONSTEXPR uint32_t bits_of(float number) {
  constexpr int MANTISSA = Element<T>::is_bf16 ? 7 : 10, BIAS = Element<T>::is_bf16 ? 127 : 15;
  double rest = number < 0 ? -(double)number : number;
  int exponent = 0;
  if (rest == 0)
    return 0;
  for (; rest >= 2; rest /= 2)
    exponent++;
  for (; rest < 1; rest *= 2)
    exponent--;
  const uint32_t mantissa = (uint32_t)(rest * (1 << MANTISSA) + 0.5); // may carry
  return (number < 0 ? 0x8000u : 0u) + ((uint32_t)(exponent + BIAS - 1) << MANTISSA) + mantissa;
}

/* Bytes BYTE (0: low) of four numbers in T, from code `first` on. */
template <class T>
MOELORA_CONSTEXPR uint32_t code_bytes(moelora_values values, int first, int byte) {
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t bits = bits_of<T>(code_number(values, first + i) * code_unit<T>(values));
    word |= (bits >> 8 * byte & 0xff) << 8 * i;
  }
  return word;
}

/* Holds the numbers of each type of codes in one cache line: a load by code is one access, where an
 * array in a function would be written to local memory by each call. */
static __device__ const float code_numbers[][16] = {
#define MOELORA_CODES(VALUES, ...) {__VA_ARGS__},
#include "formats.inc"
};

/* The table of a format, and the scales of rows r and r + 8 in the halves of registers. */
template <class T> struct CodeScales {
  uint32_t table[2][4]; // [byte], of codes 0 to 3, ..., 12 to 15
  uint32_t high, low;   // parts of the scales
  float absmax[2];      // the scales
  bool is_fp4;

  __device__ __forceinline__ void load(uint32_t at, moelora_format format) {
    constexpr moelora_values NF4 = MOELORA_VALUES_NF4, FP4 = MOELORA_VALUES_BNB_FP4;
    is_fp4 = moelora_values_of(format) == FP4;
#define MOELORA_ENTRY(BYTE, I)                                                                     \
  {                                                                                                \
    constexpr uint32_t OF_NF4 = code_bytes<T>(NF4, 4 * I, BYTE);                                   \
    constexpr uint32_t OF_FP4 = code_bytes<T>(FP4, 4 * I, BYTE);                                   \
    table[BYTE][I] = is_fp4 ? OF_FP4 : OF_NF4;                                                     \
  }
    MOELORA_ENTRY(0, 0)
    MOELORA_ENTRY(0, 1)
    MOELORA_ENTRY(0, 2)
    MOELORA_ENTRY(0, 3)
    MOELORA_ENTRY(1, 0)
    MOELORA_ENTRY(1, 1)
    MOELORA_ENTRY(1, 2)
    MOELORA_ENTRY(1, 3)
#undef MOELORA_ENTRY
    constexpr float NF4_UNIT = 1 / code_unit<T>(NF4), FP4_UNIT = 1 / code_unit<T>(FP4);
    const float unit = is_fp4 ? FP4_UNIT : NF4_UNIT;
    absmax[0] = __uint_as_float(load_shared_4(at));
    absmax[1] = __uint_as_float(load_shared_4(at + 4));
    const float r = absmax[0] * unit, r8 = absmax[1] * unit;
    high = pack2<T>(r, r8);
    const T *parts = (const T *)&high;
    low = pack2<T>(r - Element<T>::to_float(parts[0]), r8 - Element<T>::to_float(parts[1]));
  }

  /* Returns values I of both halves of a word. */
  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    const uint32_t codes = I < 2 ? word : word >> 16;
    const uint32_t upper = select_bytes < I<2 ? 0x9d8c : 0xbfae>(word, word << 4); // bit 3 of each
    const uint32_t low_bytes = look_up<0>(codes, upper), high_bytes = look_up<1>(codes, upper);
    const uint32_t code = __byte_perm(low_bytes, high_bytes, I % 2 == 0 ? 0x5140 : 0x7362);
    return fma2<T>(code, both_halves<I % 2>(high), multiply2<T>(code, both_halves<I % 2>(low)));
  }

  /* Computes value I of both halves of a word in float32, and rounds once. */
  template <int I> __device__ __forceinline__ uint32_t exact(uint32_t word) const {
    const uint32_t codes = word >> 8 * I;
    return pack2<T>(number(codes & 15) * absmax[I % 2], number(codes >> 4 & 15) * absmax[I % 2]);
  }

private:
  __device__ __forceinline__ float number(uint32_t code) const {
    constexpr int FIRST = MOELORA_VALUES_EIGHT_BITS + 1;
    return code_numbers[(is_fp4 ? MOELORA_VALUES_BNB_FP4 : MOELORA_VALUES_NF4) - FIRST][code];
  }

  template <int BYTE>
  __device__ __forceinline__ uint32_t look_up(uint32_t codes, uint32_t upper) const {
    const uint32_t below = __byte_perm(table[BYTE][0], table[BYTE][1], codes);
    const uint32_t above = __byte_perm(table[BYTE][2], table[BYTE][3], codes);
    return (above & upper) | (below & ~upper);
  }
};

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_NF4, T, ZEROS> {
  CodeScales<T> scales;

  __device__ __forceinline__ void load(uint32_t at, uint32_t, moelora_format format) {
    scales.load(at, format);
  }
  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return scales.template value<I>(word);
  }
  template <int I> __device__ __forceinline__ uint32_t exact(uint32_t word) const {
    return scales.template exact<I>(word);
  }
};

template <class T, bool ZEROS> struct SlabScales<MOELORA_KERNEL_NF4, T, ZEROS> {
  CodeScales<T> scales;

  __device__ __forceinline__ void load(uint32_t at, uint32_t, int, moelora_format format) {
    scales.load(at, format);
  }
  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return scales.template value<I>(word);
  }
};

#endif
