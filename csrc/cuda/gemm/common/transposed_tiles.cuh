/* Dequantizes and transposes tiles of quantized weights in registers, for the backward's y W.
 *
 * The rows of W are K, its columns the outputs. Tiles have the layout of the forward's operand A: a
 * register holds two neighboring columns of a row, but the transposed operand needs two neighboring
 * rows. movmatrix transposes 8 x 8 elements at a time, so no transposed copy of W is needed.
 *
 * K is in the order of the columns of y, which is that of the rows of W. In order GATE_UP or
 * INTERLEAVED, a tile holds only gate rows or only up rows. If gate and up rows alternate in K,
 * elements 2i and 2i + 1 of K are row i of a gate tile and row i of an up tile. */
#ifndef MOELORA_CUDA_TRANSPOSED_TILES_CUH
#define MOELORA_CUDA_TRANSPOSED_TILES_CUH

#include "cuda/gemm/common/format.cuh"

/* Returns whether gate and up rows alternate in K. */
__device__ __forceinline__ bool is_interleaved(const moelora_weights &w) {
  return w.order == MOELORA_ROWS_INTERLEAVED;
}

/* Two k16 slabs of operand A of mma.m16n8k16 or wgmma: 16 outputs by 32 elements of K. They are
 * loaded untransposed, and then transposed: a lane loads rows i, i + 8, i + 16 and i + 24 of K,
 * with i = lane / 4. */
template <class T> struct SlabPair {
  uint32_t a[2][4];

  /* Stores the transpose of `rows`, which `load` or `load_fp8` has loaded. */
  __device__ __forceinline__ void transpose(const SlabPair &rows) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      a[i / 4][i % 4] = transpose_8x8(rows.a[i / 4][i % 4]);
  }

  /* Loads columns 16 slab to 16 slab + 15, the outputs, of a 4-bit tile in shared memory. If
   * `interleaved`, K alternates between 16 rows of a gate tile and 16 rows of an up tile: this lane
   * reads gate rows if lane / 4 is even, up rows if it is odd.
   *
   *   pair         index in the tile of the first of the lane's two pairs of rows r and r + 8
   *   tile_scale   address of the scale of the lane's rows, if HAS_TILE_SCALE
   *   pairs        CodePairs, which include 2^DEFERRED, if codes are looked up there
   *
   * ZEROS: as in GroupScales. */
  template <moelora_kernel_format KERNEL, bool ZEROS = true, class... Pairs>
  __device__ __forceinline__ void load(uint32_t tile, uint32_t tile_scale, int pair, int slab,
                                       bool interleaved, moelora_format format,
                                       const Pairs &...pairs) {
    using F = FormatTraits<KERNEL>;
    const int groups = F::groups(format), row_bytes = F::SCALE_BYTES * groups;
    const uint32_t values = tile + (threadIdx.x & 3) * 16 + slab * 4;
    const uint32_t scales = tile + MOELORA_TILE_VALUES, zeros = scales + 64 * row_bytes;
    [[maybe_unused]] const float of_tile =
        F::HAS_TILE_SCALE ? F::template tile_scale<T>(tile_scale - F::TILE_SCALE_OFFSET) : 1.f;
    uint32_t v[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = pair + i * (interleaved ? 4 : 8);
      const uint32_t word = load_shared_4(values + at * 64);
      SlabScales<KERNEL, T, ZEROS> of_rows;
      of_rows.load(scales + at * 2 * row_bytes, zeros + at * 2 * groups, slab, format, pairs...);
      v[i][0] = whole<F, Pairs...>(of_rows.template value<0>(word, pairs...), of_tile);
      v[i][1] = whole<F, Pairs...>(of_rows.template value<1>(word, pairs...), of_tile);
      v[i][2] = whole<F, Pairs...>(of_rows.template value<2>(word, pairs...), of_tile);
      v[i][3] = whole<F, Pairs...>(of_rows.template value<3>(word, pairs...), of_tile);
    }
    // Values 0 and 2 belong to row r, 1 and 3 to row r + 8; 0 and 1 belong to the first eight
    // columns. A slab has both rows of one pair or, if interleaved, the same row of both pairs.
    set(0, v[0][0], v[0][2], interleaved ? v[1][0] : v[0][1], interleaved ? v[1][2] : v[0][3]);
    set(1, interleaved ? v[0][1] : v[1][0], interleaved ? v[0][3] : v[1][2], v[1][1], v[1][3]);
  }

  /* Loads from an FP8 tile. rows: address of the 16 outputs of row `lane` of K; scale: address of
   * the scale of row lane / 4; step: bytes to the scale of the row 8 further on, 0 if all rows
   * share one. */
  __device__ __forceinline__ void load_fp8(uint32_t rows, uint32_t scale, uint32_t step) {
    uint32_t words[4];
    load_matrix_x4(words, rows);
    float of_rows[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      of_rows[i] = __uint_as_float(load_shared_4(scale + i * step));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t scales = e4m3_scales<T>(of_rows[2 * i], of_rows[2 * i + 1]);
      set(i, e4m3<T, 0, 0>(words[2 * i], scales), e4m3<T, 1, 0>(words[2 * i], scales),
          e4m3<T, 0, 1>(words[2 * i + 1], scales), e4m3<T, 1, 1>(words[2 * i + 1], scales));
    }
  }

private:
  __device__ __forceinline__ void set(int slab, uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3) {
    a[slab][0] = a0, a[slab][1] = a1, a[slab][2] = a2, a[slab][3] = a3;
  }

  /* Applies the factors that the forward applies to accumulators. In the backward, an accumulator
   * may sum over tiles with different factors. */
  template <class F, class... Pairs>
  static __device__ __forceinline__ uint32_t whole(uint32_t value, float scale) {
    constexpr int DEFERRED = F::template DEFERRED_EXPONENT<T>;
    if constexpr (F::HAS_TILE_SCALE) {
      const T *two = (const T *)&value;
      return pack2<T>(Element<T>::to_float(two[0]) * scale, Element<T>::to_float(two[1]) * scale);
    }
    return DEFERRED > 0 && sizeof...(Pairs) == 0 ? multiply2<T>(value, power_of_two<T, DEFERRED>())
                                                 : value;
  }
};

#endif
