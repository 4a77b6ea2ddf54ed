/* Compile-time traits of weight formats, derived from formats.inc, and the part of a weight tile
 * that a lane dequantizes. The files format_*.cuh convert its values. */
#ifndef MOELORA_CUDA_FORMAT_CUH
#define MOELORA_CUDA_FORMAT_CUH

#include "core/format.h"
#include "cuda/ptx/arithmetic.cuh"

/* Traits of kernel format KERNEL. Several storage formats may share a kernel format; members with a
 * `format` argument depend on the storage format, and are constants if there is only one. */
template <moelora_kernel_format KERNEL> struct FormatTraits {
  static constexpr moelora_format FORMAT = moelora_format_of_kernel(KERNEL); // one of its formats
  // Weights have the dtype of x, in rows or packed tiles of 64 x 64. Otherwise they are quantized,
  // in the tiles described in moelora.h.
  static constexpr bool IS_NATIVE = !moelora_is_quantized(FORMAT);
  static constexpr bool IS_FOUR_BITS = moelora_is_four_bits(FORMAT);
  static constexpr bool IS_FP8 = moelora_is_fp8(FORMAT);
  // Weights and x are e4m3; scales apply to partial accumulators.
  static constexpr bool IS_W8A8 = moelora_is_e4m3_kernel(KERNEL);
  // Weights are dequantized to the dtype of x.
  static constexpr bool IS_DEQUANTIZED = moelora_is_dequantized_kernel(KERNEL);
  static constexpr bool HAS_ZEROS = moelora_kernel_has_zeros(KERNEL); // in some of its formats

  /* Hopper: bytes per element of x, elements per 128-byte row. Portable kernels: x is 16-bit. */
  static constexpr int X_BYTES = IS_W8A8 ? 1 : 2, X_ELEMENTS = 128 / X_BYTES;

  /* Quantized tile: K extent, bytes of values, maximum total bytes. */
  static constexpr int TILE_DEPTH = moelora_tile_depth(FORMAT);
  static constexpr int TILE_VALUES = IS_FP8 ? MOELORA_FP8_TILE_VALUES : MOELORA_TILE_VALUES;
  static constexpr int MAX_TILE_BYTES = moelora_max_tile_bytes(KERNEL);
  static constexpr int SCALE_BYTES = moelora_scale_bytes(FORMAT);
  // Maximum bytes of a tile without its tile scale.
  static constexpr int MAX_ROW_BYTES =
      MAX_TILE_BYTES - (moelora_has_tile_scale(FORMAT) ? MOELORA_TILE_SCALE_BYTES : 0);

  /* The epilogue multiplies accumulators by 2^DEFERRED_EXPONENT. */
  template <class T>
  static constexpr int DEFERRED_EXPONENT = moelora_deferred_exponent(FORMAT, Element<T>::is_bf16);

  // A table maps codes to numbers in the precision of x; scales are float32.
  static constexpr bool IS_LOOKED_UP = moelora_is_looked_up(moelora_values_of(FORMAT));

  // Tiles have a float32 scale. The forward applies it to accumulators, after the K loop.
  static constexpr bool HAS_TILE_SCALE = moelora_has_tile_scale(FORMAT);
  static constexpr int TILE_SCALE_OFFSET = moelora_tile_scale_offset(FORMAT);
  template <class T>
  static constexpr int TILE_SCALE_EXPONENT = moelora_tile_scale_exponent(Element<T>::is_bf16);

  static __device__ __forceinline__ uint32_t tile_bytes(moelora_format format) {
    return moelora_tile_size(is_one_format() ? FORMAT : format);
  }
  static __device__ __forceinline__ int groups(moelora_format format) {
    return moelora_tile_groups(is_one_format() ? FORMAT : format);
  }

  /* Returns the tile's scale times 2^TILE_SCALE_EXPONENT; `tile` is in shared or global memory. */
  template <class T> static __device__ __forceinline__ float tile_scale(uint32_t tile) {
    return with_exponent<T>(__uint_as_float(load_shared_4(tile + TILE_SCALE_OFFSET)));
  }
  template <class T> static __device__ __forceinline__ float tile_scale(const char *tile) {
    return with_exponent<T>(*(const float *)(tile + TILE_SCALE_OFFSET));
  }

private:
  template <class T> static __device__ __forceinline__ float with_exponent(float scale) {
    return scale * (float)(1 << TILE_SCALE_EXPONENT<T>);
  }
  static __device__ constexpr bool is_one_format() { return moelora_formats_of(KERNEL) == 1; }
};

/* Scales and zero points of a lane's rows r and r + 8, for 4-bit formats. The files
 * format_*.cuh specialize it, with the members
 *
 *   load(scale, zero, format)   loads from shared memory; the addresses are those of row r
 *   value<SLAB, I>(word)        dequantizes values I of both halves of a word of k16 slab SLAB,
 *                               with the scale of row r + 8 * (I % 2), rounded once to T;
 *                               without 2^DEFERRED_EXPONENT and the tile's scale
 *
 * ZEROS: the format may have zero points. */
template <moelora_kernel_format KERNEL, class T, bool ZEROS> struct GroupScales;

/* Scales and zero points of a lane's rows r and r + 8 for a single k16 slab:
 *
 *   load(scale, zero, slab, format)
 *   value<I>(word) */
template <moelora_kernel_format KERNEL, class T, bool ZEROS> struct SlabScales;

/* Returns the packed product a * b. The addend -0 preserves the sign of a product that is 0. */
template <class T> __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
  return fma2<T>(a, b, NEGATIVE_ZEROS);
}

/* Returns 2^EXPONENT, or its negative if NEGATIVE, in both halves. */
template <class T, int EXPONENT, bool NEGATIVE = false>
__device__ __forceinline__ constexpr uint32_t power_of_two() {
  constexpr bool IS_BF16 = Element<T>::is_bf16;
  constexpr uint32_t BITS = IS_BF16 ? (127 + EXPONENT) << 7 : (15 + EXPONENT) << 10;
  return (BITS | (NEGATIVE ? 0x8000u : 0u)) * 0x10001u;
}

#include "cuda/gemm/common/format_codes.cuh"
#include "cuda/gemm/common/format_e2m1.cuh"
#include "cuda/gemm/common/format_fp8.cuh"
#include "cuda/gemm/common/format_int4.cuh"

/* Offsets, within a tile, of a lane's words and of its rows' scales and zero points. `warp` (0 to
 * 3) is the warp's index among the four that share the tile's rows. */
struct LaneOffsets {
  uint32_t values, scales, zeros;

  template <moelora_kernel_format KERNEL>
  static __device__ __forceinline__ LaneOffsets find(int warp, moelora_format format) {
    using F = FormatTraits<KERNEL>;
    if constexpr (F::IS_FP8)
      return fp8_offsets(warp, format);
    const int lane = threadIdx.x & 31, groups = F::groups(format);
    const int pair = warp * 8 + lane / 4; // index of the pair of rows r and r + 8
    const uint32_t scales = MOELORA_TILE_VALUES;
    return {(warp * 32 + lane) * 16u, scales + pair * 2 * F::SCALE_BYTES * groups,
            scales + 64 * F::SCALE_BYTES * groups + pair * 2 * groups};
  }

private:
  /* `values` is this lane's offset for ldmatrix.x4: row lane % 16 of the warp's rows, k16 slab lane
   * / 16 (see moelora_fp8_offset). */
  static __device__ __forceinline__ LaneOffsets fp8_offsets(int warp, moelora_format format) {
    const int lane = threadIdx.x & 31, row = warp * 16 + (lane & 15);
    const int of_row = moelora_has_row_scales(format) ? warp * 16 + lane / 4 : 0;
    return {(uint32_t)(row * 128 + ((lane >> 4 ^ row & 7) << 4)),
            (uint32_t)(MOELORA_FP8_TILE_VALUES + 4 * of_row), 0};
  }
};

/* A lane's part of a 4-bit tile: rows r = 16 warp + lane / 4 and r + 8. It is dequantized to the
 * operand A layout of mma.m16n8k16 and wgmma. */
template <moelora_kernel_format KERNEL, class T, bool ZEROS = true> struct TileFragment {
  using F = FormatTraits<KERNEL>;
  static constexpr int DEFERRED = F::template DEFERRED_EXPONENT<T>;

  uint32_t words[4]; // one per k16 slab
  GroupScales<KERNEL, T, ZEROS> scales;

  /* Loads from a tile in shared memory. `warp` (0 to 3) is the warp's index among the four that
   * share its rows. */
  __device__ __forceinline__ void load(uint32_t tile, int warp, moelora_format format) {
    const LaneOffsets at = LaneOffsets::find<KERNEL>(warp, format);
    load(tile + at.values, tile + at.scales, tile + at.zeros, format);
  }

  /* Loads tile `span` of those that begin at `tiles` in shared memory. */
  __device__ __forceinline__ void load_span(uint32_t tiles, int span, const LaneOffsets &at,
                                            moelora_format format) {
    const uint32_t tile = tiles + span * F::tile_bytes(format);
    load(tile + at.values, tile + at.scales, tile + at.zeros, format);
  }

  /* Loads from the shared memory addresses of this lane's words, scales and zero points. */
  __device__ __forceinline__ void load(uint32_t values, uint32_t scale, uint32_t zero,
                                       moelora_format format) {
    const uint4 v = load_shared_16(values);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    scales.load(scale, zero, format);
  }

  /* Dequantizes k16 slab SLAB, rounding once, and applies the factors that accumulators otherwise
   * get after the K loop. `tile` is in shared memory. */
  template <int SLAB>
  __device__ __forceinline__ void unpack(uint32_t (&a)[4], uint32_t tile) const {
    if constexpr (F::IS_LOOKED_UP) {
      a[0] = scales.template exact<0>(words[SLAB]);
      a[1] = scales.template exact<1>(words[SLAB]);
      a[2] = scales.template exact<2>(words[SLAB]);
      a[3] = scales.template exact<3>(words[SLAB]);
    } else {
      dequantize<SLAB>(a);
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = whole(a[i], tile);
    }
  }

  /* Applies the factors that accumulators otherwise get after the K loop. */
  static __device__ __forceinline__ uint32_t whole(uint32_t value, uint32_t tile) {
    if constexpr (F::HAS_TILE_SCALE) {
      const float by = F::template tile_scale<T>(tile);
      const T *two = (const T *)&value;
      return pack2<T>(Element<T>::to_float(two[0]) * by, Element<T>::to_float(two[1]) * by);
    }
    return DEFERRED > 0 ? multiply2<T>(value, power_of_two<T, DEFERRED>()) : value;
  }

  /* Multiplies the values of a k16 slab, looked up in CodePairs, by their scales. */
  __device__ __forceinline__ void scale(uint32_t (&a)[4], const uint32_t (&codes)[4]) const {
    a[0] = scales.template scaled<0>(codes[0]);
    a[1] = scales.template scaled<1>(codes[1]);
    a[2] = scales.template scaled<2>(codes[2]);
    a[3] = scales.template scaled<3>(codes[3]);
  }

  /* Dequantizes k16 slab SLAB. */
  template <int SLAB> __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
    a[0] = scales.template value<SLAB, 0>(words[SLAB]);
    a[1] = scales.template value<SLAB, 1>(words[SLAB]);
    a[2] = scales.template value<SLAB, 2>(words[SLAB]);
    a[3] = scales.template value<SLAB, 3>(words[SLAB]);
  }
};

/* Fragment of half of an FP8 tile, 64 elements of K. Its k16 slabs must be dequantized in order. */
template <class T, bool ZEROS> struct TileFragment<MOELORA_KERNEL_FP8, T, ZEROS> {
  uint32_t words[4]; // rows r and r + 8 of an even slab, then of the next slab
  uint32_t values;   // shared memory address for ldmatrix of slabs 0 and 1
  uint32_t scales;   // packed: of r and of r + 8

  /* Loads from half `span` of a tile in shared memory. The swizzle is applied to addresses by xor:
   * `tile` must be a multiple of 128. */
  __device__ __forceinline__ void load_span(uint32_t tile, int span, const LaneOffsets &at,
                                            moelora_format format) {
    values = tile + at.values ^ span * 64;
    load_matrix_x4(words, values);
    const bool rows = moelora_has_row_scales(format);
    const uint32_t scale = tile + at.scales + (rows ? 0 : 4 * span);
    scales = e4m3_scales<T>(__uint_as_float(load_shared_4(scale)),
                            __uint_as_float(load_shared_4(scale + (rows ? 32 : 0))));
  }

  /* Dequantizes k16 slab SLAB. dequantize<1> then loads slabs 2 and 3: the words of all four slabs
   * would take registers that the accumulators need. */
  template <int SLAB> __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) {
    const uint32_t low = words[SLAB % 2 * 2], high = words[SLAB % 2 * 2 + 1];
    a[0] = e4m3<T, 0, 0>(low, scales);
    a[1] = e4m3<T, 0, 1>(high, scales);
    a[2] = e4m3<T, 1, 0>(low, scales);
    a[3] = e4m3<T, 1, 1>(high, scales);
    if constexpr (SLAB == 1)
      load_matrix_x4(words, values ^ 32);
  }
};

#endif
