/* Loads operand A of the portable backward: k16 slabs of transposed weights. */
#pragma once

#include "cuda/gemm/common/tile.cuh"
#include "cuda/gemm/common/transposed_tiles.cuh"

/* Native weights, which ldmatrix transposes. */
template <class E, class T, bool IS_NATIVE = E::Format::IS_NATIVE> struct TransposedFragments {
  uint32_t a[2][E::TILES][4];

  static __device__ __forceinline__ uint32_t offset() { return transposed_offset(); }

  template <int K>
  __device__ __forceinline__ void load(uint32_t stage, uint32_t offset, const moelora_weights &,
                                       int) {
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++)
      load_matrix_x4_trans(a[K % 2][m64], stage + offset + K * kSlabBytes + m64 * kM64Bytes);
  }
};

/* Quantized weights in the order of TransposedTileLoader, dequantized two slabs at a time. */
template <class E, class T> struct TransposedFragments<E, T, false> {
  uint32_t a[2][E::TILES][4];
  uint32_t next[E::TILES][4]; // the second slab of a pair

  static __device__ __forceinline__ uint32_t offset() { return 0; }

  template <int K>
  __device__ __forceinline__ void load(uint32_t stage, uint32_t, const moelora_weights &w, int) {
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++) {
      [[maybe_unused]] SlabPair<T> pair;
      if constexpr (K % 2 == 0)
        load_pair<K / 2>(pair, stage, m64, w);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (K % 2 == 0)
          a[0][m64][i] = pair.a[0][i], next[m64][i] = pair.a[1][i];
        else
          a[1][m64][i] = next[m64][i];
      }
    }
  }

  /* Loads slabs 2 PAIR and 2 PAIR + 1 of a stage. */
  template <int PAIR>
  static __device__ __forceinline__ void load_pair(SlabPair<T> &pair, uint32_t stage, int m64,
                                                   const moelora_weights &w) {
    const int lane = threadIdx.x & 31, slab = threadIdx.x >> 5 & 3, row = lane / 4;
    const bool interleaved = is_interleaved(w), is_up = interleaved && row % 2;
    const uint32_t tile = stage + m64 * E::TILE_BYTES;
    SlabPair<T> rows;
    if constexpr (E::Format::IS_FP8) {
      const bool has_rows = moelora_has_row_scales(w.format);
      const int from = interleaved ? 32 * (lane & 1) + 16 * PAIR + lane / 2 : 32 * PAIR + lane;
      const int scale = !has_rows     ? m64 % 2 + 32 * is_up
                        : interleaved ? 32 * is_up + 16 * PAIR + row / 2
                                      : 32 * PAIR + row;
      rows.load_fp8(tile + from * 64 + ((slab ^ from >> 1 & 3) << 4),
                    stage + E::ALL_VALUES + m64 * (E::ALL_SCALES / E::TILES) + 4 * scale,
                    !has_rows     ? 0
                    : interleaved ? 16
                                  : 32);
    } else {
      rows.template load<E::FORMAT>(
          tile, tile + E::Format::TILE_SCALE_OFFSET + (is_up ? MOELORA_TILE_SCALE_BYTES : 0),
          interleaved ? 16 * is_up + 8 * PAIR + row / 2 : 16 * PAIR + row, slab, interleaved,
          w.format);
    }
    pair.transpose(rows);
  }
};
