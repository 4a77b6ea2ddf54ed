/* Quantized weights in a backward, y W: dequantizes and transposes tiles in registers.
 *
 * Rows of W are K, its columns outputs. A tile is laid out for the forward's operand A: two
 * neighboring columns of a row share a register, where the transposed operand needs two neighboring
 * rows. movmatrix exchanges them, 8 x 8 elements at a time: no second copy of the weights, and none
 * in shared memory.
 *
 * K has the order of y's columns, which is that of the rows of W. Tiles of GATE_UP and INTERLEAVED
 * order hold gate rows or up rows. If these alternate in K, elements 2i and 2i + 1 are row i of a
 * gate tile and of an up tile: each lane reads the row that it needs of either. */
#ifndef MOELORA_CUDA_TRANSPOSED_TILES_CUH
#define MOELORA_CUDA_TRANSPOSED_TILES_CUH

#include "cuda/gemm/common/format.cuh"

/* Returns whether gate and up rows alternate in K. */
__device__ __forceinline__ bool is_interleaved(const moelora_weights &w) {
  return w.order == MOELORA_ROWS_INTERLEAVED;
}

/* Two k16 slabs of operand A of mma.m16n8k16 or wgmma: 16 outputs by 32 elements of K. They are
 * loaded as columns of rows, and then transposed. Each is loaded from a lane's rows i = lane / 4
 * and i + 8 (4-bit), or i, i + 8, i + 16 and i + 24 of K. */
template <class T> struct SlabPair {
  uint32_t a[2][4];

  /* Transposes what `load` or `load_fp8` has loaded into `rows`. */
  __device__ __forceinline__ void transpose(const SlabPair &rows) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      a[i / 4][i % 4] = transpose_8x8(rows.a[i / 4][i % 4]);
  }

  /* Loads from a 4-bit tile in shared memory. Its columns 16 SLAB to 16 SLAB + 15 are the outputs.
   * Interleaved, K is rows 16 j to 16 j + 15 of a gate tile and of an up tile, of which this lane
   * reads the one of lane / 4 % 2.
   *
   *   pair         index, in the tile, of the first pair of rows r, r + 8 that this lane reads
   *   tile_scale   address of the scale of its rows, if HAS_TILE_SCALE
   *
   * ZEROS: as in GroupScales. */
  template <moelora_kernel_format KERNEL, bool ZEROS = true>
  __device__ __forceinline__ void load(uint32_t tile, uint32_t tile_scale, int pair, int slab,
                                       bool interleaved, moelora_format format) {
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
      of_rows.load(scales + at * 2 * row_bytes, zeros + at * 2 * groups, slab, format);
      v[i][0] = whole<F>(of_rows.template value<0>(word), of_tile);
      v[i][1] = whole<F>(of_rows.template value<1>(word), of_tile);
      v[i][2] = whole<F>(of_rows.template value<2>(word), of_tile);
      v[i][3] = whole<F>(of_rows.template value<3>(word), of_tile);
    }
    // Values 0 and 2 are of r, 1 and 3 of r + 8; 0 and 1 of the first eight columns. A slab is both
    // halves of one pair; interleaved, it is the same half of both.
    set(0, v[0][0], v[0][2], interleaved ? v[1][0] : v[0][1], interleaved ? v[1][2] : v[0][3]);
    set(1, interleaved ? v[0][1] : v[1][0], interleaved ? v[0][3] : v[1][2], v[1][1], v[1][3]);
  }

  /* Loads from an FP8 tile. rows: address of 16 bytes of row `lane` of K, the outputs; scale: that
   * of this lane's row i; step: bytes to that of row i + 8, or 0 if all rows share one. */
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

  /* Applies the factors that the forward applies to accumulators: here accumulators have rows of
   * several tiles. */
  template <class F> static __device__ __forceinline__ uint32_t whole(uint32_t value, float scale) {
    constexpr int DEFERRED = F::template DEFERRED_EXPONENT<T>;
    if constexpr (F::HAS_TILE_SCALE) {
      const T *two = (const T *)&value;
      return pack2<T>(Element<T>::to_float(two[0]) * scale, Element<T>::to_float(two[1]) * scale);
    }
    return DEFERRED > 0 ? multiply2<T>(value, power_of_two<T, DEFERRED>()) : value;
  }
};

#endif
