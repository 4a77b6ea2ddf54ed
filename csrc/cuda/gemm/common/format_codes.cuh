/* Dequantizes 4-bit codes of arbitrary numbers, with a float32 scale per group, to bf16 or fp16.
 *
 * Hopper's large tiles look up two codes at once in shared memory, see CodePairs. In other kernels,
 * prmt looks up four codes at once, one byte of their numbers at a time: the low three bits of a
 * code select one of eight entries, and bit 3 chooses between two such results. In bf16, codes q
 * and q + 8 have the same high byte (formats.inc), which is looked up once. Tiles store the eight
 * codes of a word in the order of the values of registers a0 to a3: one more prmt joins low and
 * high bytes to a register.
 *
 * A value is number * scale. The table holds the numbers in a unit that makes them nearly exact in
 * T. The scale, divided by the unit, is split into a sum of two values of T: the value is
 * the fma number * high + (number * low), whose addend is rounded to T first. */
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

/* Returns the entry of a table for the number 1, in units of the smallest normal number of T. For
 * NF4, it minimizes the sum of squared rounding errors; for FP4, 3/4 of a power of two makes all
 * entries exact. In bf16, it is small: entries that share a high byte with an entry for 0 must
 * have an exponent field of 0 or 1. */
template <class T> MOELORA_CONSTEXPR float code_unit(moelora_values values) {
  return Element<T>::is_bf16 ? (values == MOELORA_VALUES_BNB_FP4 ? 24 : 1.4370041f * 8)
                             : (values == MOELORA_VALUES_BNB_FP4 ? 0.75f : 1.6776886f) * (1 << 14);
}

/* Returns the bits in T of |number|, which is in units of the smallest normal number of T. */
template <class T> MOELORA_CONSTEXPR uint32_t bits_of(float number) {
  constexpr int MANTISSA = Element<T>::is_bf16 ? 7 : 10;
  double rest = number < 0 ? -(double)number : number;
  int exponent = 0;
  for (; rest >= 2; rest /= 2)
    exponent++;
  return ((uint32_t)exponent << MANTISSA) + (uint32_t)(rest * (1 << MANTISSA) + 0.5);
}

/* Returns the bits in T of the table's entry for a code. 0 gets the sign of the number of code + 8,
 * with which it shares a high byte. */
template <class T> MOELORA_CONSTEXPR uint32_t code_bits(moelora_values values, int code) {
  return (code_number(values, code | 8) < 0 ? 0x8000u : 0u) +
         bits_of<T>(code_number(values, code) * code_unit<T>(values));
}

/* Returns byte `byte` (0: low) of the table's entries for four codes, from code `first` on. */
template <class T>
MOELORA_CONSTEXPR uint32_t code_bytes(moelora_values values, int first, int byte) {
  uint32_t word = 0;
  for (int i = 0; i < 4; i++)
    word |= (code_bits<T>(values, first + i) >> 8 * byte & 0xff) << 8 * i;
  return word;
}

/* Returns whether codes q and q + 8 have the same high byte. */
template <class T> MOELORA_CONSTEXPR bool share_high_bytes(moelora_values values) {
  return code_bytes<T>(values, 0, 1) == code_bytes<T>(values, 8, 1) &&
         code_bytes<T>(values, 4, 1) == code_bytes<T>(values, 12, 1);
}

/* Numbers of each type of codes. They are global because an array in a function, indexed by a code,
 * would be written to local memory in each call. */
static __device__ const float code_numbers[][16] = {
#define MOELORA_CODES(VALUES, ...) {__VA_ARGS__},
#include "formats.inc"
};

/* The table of a format, and the scales of rows r and r + 8 in the halves of registers. */
template <class T> struct CodeScales {
  static constexpr moelora_values NF4 = MOELORA_VALUES_NF4, FP4 = MOELORA_VALUES_BNB_FP4;
  static constexpr bool SHARED = Element<T>::is_bf16; // q and q + 8 share a high byte
  static_assert(!SHARED || (share_high_bytes<T>(MOELORA_VALUES_NF4) &&
                            share_high_bytes<T>(MOELORA_VALUES_BNB_FP4)));

  uint32_t table[2][4]; // [byte], of codes 0 to 3, ..., 12 to 15
  uint32_t high, low;   // high + low is scale / unit / 2^DEFERRED
  float absmax[2];      // the scales
  bool is_fp4;

  /* Sets words I and higher of the table. */
  template <int I = 0> __device__ __forceinline__ void load_table() {
    if constexpr (I < 8) {
      constexpr uint32_t OF_NF4 = code_bytes<T>(NF4, I % 4 * 4, I / 4);
      constexpr uint32_t OF_FP4 = code_bytes<T>(FP4, I % 4 * 4, I / 4);
      table[I / 4][I % 4] = is_fp4 ? OF_FP4 : OF_NF4;
      load_table<I + 1>();
    }
  }

  __device__ __forceinline__ void load(uint32_t at, moelora_format format) {
    is_fp4 = format == MOELORA_BNB_FP4;
    load_table();
    // ONE / code_unit is 1 / unit, divided by the 2^DEFERRED that accumulators get later.
    constexpr float ONE = Element<T>::is_bf16 ? 0x1p102f : 0x1p14f;
    static_assert(FormatTraits<MOELORA_KERNEL_NF4>::DEFERRED_EXPONENT<T> ==
                  (Element<T>::is_bf16 ? 126 - 102 : 0));
    constexpr float OF_NF4 = ONE / code_unit<T>(NF4), OF_FP4 = ONE / code_unit<T>(FP4);
    const float unit = is_fp4 ? OF_FP4 : OF_NF4;
    const uint2 bits = load_shared_8(at);
    absmax[0] = __uint_as_float(bits.x), absmax[1] = __uint_as_float(bits.y);
    const float r = absmax[0] * unit, r8 = absmax[1] * unit;
    if constexpr (Element<T>::is_bf16) {
      high = __byte_perm(__float_as_uint(r), __float_as_uint(r8), 0x7632); // truncates
      low = pack2<T>(r - upper_half(r), r8 - upper_half(r8));
    } else {
      high = pack2<T>(r, r8);
      const T *parts = (const T *)&high;
      low = pack2<T>(r - Element<T>::to_float(parts[0]), r8 - Element<T>::to_float(parts[1]));
    }
  }

  /* Returns values I of both halves of a word. */
  template <int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    const uint32_t codes = (word & 0x77777777u) >> (I < 2 ? 0 : 16);
    const uint32_t upper = select_bytes < I<2 ? 0x9d8c : 0xbfae>(word, word << 4); // codes >= 8
    const uint32_t low_bytes =
        choose(look_up(codes, table[0]), look_up(codes, table[0] + 2), upper);
    uint32_t high_bytes = look_up(codes, table[1]);
    if constexpr (!SHARED)
      high_bytes = choose(high_bytes, look_up(codes, table[1] + 2), upper);
    const uint32_t code = __byte_perm(low_bytes, high_bytes, I % 2 == 0 ? 0x5140 : 0x7362);
    return scaled<I>(code);
  }

  /* Returns two table entries times the scale of values I. */
  template <int I> __device__ __forceinline__ uint32_t scaled(uint32_t code) const {
    return fma2<T>(code, both_halves<I % 2>(high), multiply2<T>(code, both_halves<I % 2>(low)));
  }

  /* Splits the scales at a shared memory address into `high` and `low` in place; load_parts() loads
   * these. */
  static __device__ __forceinline__ void split(uint32_t at, moelora_format format) {
    CodeScales scales;
    scales.load(at, format);
    store_shared_8(at, make_uint2(scales.high, scales.low));
  }
  __device__ __forceinline__ void load_parts(uint32_t at) {
    const uint2 parts = load_shared_8(at);
    high = parts.x, low = parts.y;
  }

  /* Computes value I of both halves of a word in float32, and rounds once. */
  template <int I> __device__ __forceinline__ uint32_t exact(uint32_t word) const {
    const uint32_t codes = word >> 8 * I;
    return pack2<T>(number(codes & 15) * absmax[I % 2], number(codes >> 4 & 15) * absmax[I % 2]);
  }

private:
  static __device__ __forceinline__ float upper_half(float number) {
    return __uint_as_float(__float_as_uint(number) & 0xffff0000u);
  }

  __device__ __forceinline__ float number(uint32_t code) const {
    constexpr int FIRST = MOELORA_VALUES_EIGHT_BITS + 1;
    return code_numbers[(is_fp4 ? MOELORA_VALUES_BNB_FP4 : MOELORA_VALUES_NF4) - FIRST][code];
  }

  static __device__ __forceinline__ uint32_t look_up(uint32_t codes, const uint32_t *eight) {
    return __byte_perm(eight[0], eight[1], codes);
  }
  static __device__ __forceinline__ uint32_t choose(uint32_t below, uint32_t above, uint32_t mask) {
    return (above & mask) | (below & ~mask);
  }
};

/* Table in shared memory that maps a byte, two 4-bit codes, to their two values, which are scaled
 * by 2^DEFERRED if WHOLE. Each lane of a warp reads its own copy, so look-ups have no bank
 * conflicts. */
template <class T, bool WHOLE> struct CodePairs {
  static constexpr int PAIRS = 256, COPIES = 32;

  uint32_t copy; // shared memory address of this lane's copy

  __device__ __forceinline__ explicit CodePairs(uint32_t pairs)
      : copy(pairs + (threadIdx.x & 31) * 4) {}

  /* Writes the table; THREADS threads call this. */
  template <int THREADS>
  static __device__ __forceinline__ void write(uint32_t pairs, int thread, moelora_format format) {
    CodeScales<T> one;
    one.is_fp4 = format == MOELORA_BNB_FP4;
    one.load_table();
    one.high =
        power_of_two<T, WHOLE ? FormatTraits<MOELORA_KERNEL_NF4>::DEFERRED_EXPONENT<T> : 0>();
    one.low = 0;
#pragma unroll 4
    for (int i = thread; i < PAIRS * COPIES; i += THREADS)
      store_shared_4(pairs + i * 4, one.template value<0>(i / COPIES));
  }

  /* Returns the two values of byte I of a word. */
  __device__ __forceinline__ uint32_t look_up(uint32_t word, int i) const {
    return load_shared_4(__dp4a(word, COPIES * 4u << 8 * i, copy));
  }
};

template <class T, bool ZEROS> struct GroupScales<MOELORA_KERNEL_NF4, T, ZEROS> : CodeScales<T> {
  __device__ __forceinline__ void load(uint32_t at, uint32_t, moelora_format format) {
    CodeScales<T>::load(at, format);
  }
  template <int SLAB, int I> __device__ __forceinline__ uint32_t value(uint32_t word) const {
    return CodeScales<T>::template value<I>(word);
  }
};

/* With `pairs`, load() expects scales that CodeScales::split() has split, and value() looks up
 * codes in shared memory. */
template <class T, bool ZEROS> struct SlabScales<MOELORA_KERNEL_NF4, T, ZEROS> : CodeScales<T> {
  __device__ __forceinline__ void load(uint32_t at, uint32_t, int, moelora_format format) {
    CodeScales<T>::load(at, format);
  }
  template <class Pairs>
  __device__ __forceinline__ void load(uint32_t at, uint32_t, int, moelora_format, const Pairs &) {
    CodeScales<T>::load_parts(at);
  }
  using CodeScales<T>::value;
  template <int I, class Pairs>
  __device__ __forceinline__ uint32_t value(uint32_t word, const Pairs &pairs) const {
    return CodeScales<T>::template scaled<I>(pairs.look_up(word, I));
  }
};

#endif
