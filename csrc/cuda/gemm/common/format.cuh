/* What kernels ask about the weights that they are written for: the traits of a kernel format, from
 * its rows in formats.inc. A file of each format, format_<name>.cuh, has what its numbers are. */
#ifndef MOELORA_CUDA_FORMAT_CUH
#define MOELORA_CUDA_FORMAT_CUH

#include "core/format.h"
#include "cuda/ptx/arithmetic.cuh"

/* Those of kernel format KERNEL. Members that take a format are of one that such a kernel was
 * given, which it knows at run time; where it takes one format alone they are constants. */
template <moelora_kernel_format KERNEL> struct FormatTraits {
  static constexpr moelora_format FORMAT = moelora_format_of_kernel(KERNEL); // of its values
  // Weights are in the dtype of x, in rows, or in tiles of 64 x 64; else in tiles of moelora.h.
  static constexpr bool IS_NATIVE = !moelora_is_quantized(FORMAT);
  static constexpr bool IS_FOUR_BITS = moelora_is_four_bits(FORMAT);
  static constexpr bool IS_FP8 = moelora_is_fp8(FORMAT);
  // Weights and x are e4m3, with scales for partial accumulators.
  static constexpr bool IS_W8A8 = moelora_is_e4m3_kernel(KERNEL);
  // Warps make operands in the dtype of x of them.
  static constexpr bool IS_DEQUANTIZED = !IS_NATIVE && !IS_W8A8;
  static constexpr bool HAS_ZEROS = moelora_kernel_has_zeros(KERNEL); // some of its formats

  /* Bytes of an element of x, as tensor cores of FP8 take it, and elements of a row of 128 bytes.
   */
  static constexpr int X_BYTES = IS_W8A8 ? 1 : 2, X_ELEMENTS = 128 / X_BYTES;

  /* A tile of quantized weights: its depth, the bytes of its values, and at most of all of it. */
  static constexpr int TILE_DEPTH = moelora_tile_depth(FORMAT);
  static constexpr int TILE_VALUES = IS_FP8 ? MOELORA_FP8_TILE_VALUES : MOELORA_TILE_VALUES;
  static constexpr int MOST_TILE_BYTES = moelora_most_tile_bytes(KERNEL);
  static constexpr int SCALE_BYTES = moelora_scale_bytes(FORMAT);
  // At most of what belongs to rows: all but the scale of the tile.
  static constexpr int MOST_ROW_BYTES =
      MOST_TILE_BYTES - (moelora_has_tile_scale(FORMAT) ? MOELORA_TILE_SCALE_BYTES : 0);

  /* Exponent that sums lack up to the epilogue. */
  template <class T>
  static constexpr int MISSING_EXPONENT = moelora_missing_exponent(FORMAT, Element<T>::is_bf16);

  // Accumulators are multiplied by a float32 of the tile and by a power of two after the K loop.
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

  /* What accumulators are multiplied by, of a tile in shared memory or in global memory. */
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

/* What makes numbers of two rows' values of four bits, rows r and r + 8 of a lane: scales and zero
 * points. A format's file defines it, with
 *
 *   load(scale, zero, format)      from shared memory, where those of r begin
 *   value<SLAB, I>(word)           numbers I of both halves of a word of k16 slab SLAB, times the
 *                                  scale of row r + 8 (I % 2), rounded once to T
 *
 * ZEROS: there may be zero points. */
template <moelora_kernel_format KERNEL, class T, bool ZEROS> struct GroupScales;

/* a b, and -0 where one of both is 0 and the other negative. */
template <class T> __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  constexpr uint32_t NEGATIVE_ZEROS = 0x80008000u;
  return fma2<T>(a, b, NEGATIVE_ZEROS);
}

/* Exponent and sign of +-2^EXPONENT, twice. */
template <class T, int EXPONENT, bool NEGATIVE = false>
__device__ __forceinline__ uint32_t power_of_two() {
  constexpr bool IS_BF16 = Element<T>::is_bf16;
  constexpr uint32_t BITS = IS_BF16 ? (127 + EXPONENT) << 7 : (15 + EXPONENT) << 10;
  return (BITS | (NEGATIVE ? 0x8000u : 0u)) * 0x10001u;
}

#include "cuda/gemm/common/format_fp8.cuh"
#include "cuda/gemm/common/format_int4.cuh"
#include "cuda/gemm/common/format_mxfp4.cuh"
#include "cuda/gemm/common/format_nvfp4.cuh"

/* Where in a tile of four bits lie a lane's words, the scales of its rows, and their zeros, for
 * warp `warp` (0 to 3) of the four that share the tile's rows. */
struct LanePlaces {
  uint32_t values, scales, zeros;

  template <moelora_kernel_format KERNEL>
  static __device__ __forceinline__ LanePlaces find(int warp, moelora_format format) {
    using F = FormatTraits<KERNEL>;
    const int lane = threadIdx.x & 31, groups = F::groups(format);
    const int pair = warp * 8 + lane / 4; // of rows
    const uint32_t scales = MOELORA_TILE_VALUES;
    return {(warp * 32 + lane) * 16u, scales + pair * 2 * F::SCALE_BYTES * groups,
            scales + 64 * F::SCALE_BYTES * groups + pair * 2 * groups};
  }
};

/* What a lane has of a tile of four bits: rows r = 16 warp + lane / 4 and r + 8 of its warp's, as
 * registers of operand A of mma.m16n8k16 and of wgmma. */
template <moelora_kernel_format KERNEL, class T, bool ZEROS = true> struct TileFragment {
  using F = FormatTraits<KERNEL>;
  static constexpr int MISSING = F::template MISSING_EXPONENT<T>;

  uint32_t words[4]; // of k16 slabs
  GroupScales<KERNEL, T, ZEROS> scales;

  /* Of a tile in shared memory, for warp `warp` (0 to 3) of the four that share its rows. */
  __device__ __forceinline__ void load(uint32_t tile, int warp, moelora_format format) {
    const LanePlaces at = LanePlaces::find<KERNEL>(warp, format);
    load(tile + at.values, tile + at.scales, tile + at.zeros, format);
  }

  /* Of this lane's words, its rows' scales and their zeros, wherever these lie in shared memory. */
  __device__ __forceinline__ void load(uint32_t values, uint32_t scale, uint32_t zero,
                                       moelora_format format) {
    const uint4 v = load_shared_16(values);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    scales.load(scale, zero, format);
  }

  /* A register of them with what accumulators make up for; the tile is in shared memory. */
  static __device__ __forceinline__ uint32_t whole(uint32_t value, uint32_t tile) {
    if constexpr (F::HAS_TILE_SCALE) {
      const float by = F::template tile_scale<T>(tile);
      const T *two = (const T *)&value;
      return pack2<T>(Element<T>::to_float(two[0]) * by, Element<T>::to_float(two[1]) * by);
    }
    return MISSING > 0 ? multiply2<T>(value, power_of_two<T, MISSING>()) : value;
  }

  /* Registers of k16 slab SLAB. */
  template <int SLAB> __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
    a[0] = scales.template value<SLAB, 0>(words[SLAB]);
    a[1] = scales.template value<SLAB, 1>(words[SLAB]);
    a[2] = scales.template value<SLAB, 2>(words[SLAB]);
    a[3] = scales.template value<SLAB, 3>(words[SLAB]);
  }
};

#endif
