/* Loads and stores gate and up before the activation, which a forward saves by flat row and its
 * backward reads. Memory has the outputs of a row side by side, accumulators have the outputs of a
 * token in different lanes. movmatrix transposes 8 x 8 tiles: a lane then has outputs 2 (lane % 4)
 * and 2 (lane % 4) + 1 of token lane / 4. */
#pragma once

#include "cuda/gemm/common/tile.cuh"

/* Layout of a row: all gates before all ups, interleaved, or a projection without a gate. */
enum class GateUp { HALVES, INTERLEAVED, ONE };

__device__ __forceinline__ GateUp gate_up_form(const moelora_activation_problem &p) {
  return !moelora_is_gated(p.kind)        ? GateUp::ONE
         : moelora_is_interleaved(p.kind) ? GateUp::INTERLEAVED
                                          : GateUp::HALVES;
}

/* Load or store two neighboring elements of a row with `columns` columns. */
template <bool VECTORS>
__device__ __forceinline__ uint32_t load_two(const uint16_t *row, int column, int columns,
                                             bool valid) {
  if (VECTORS)
    return load_4(row + column, valid && column < columns);
  uint32_t v = valid && column < columns ? row[column] : 0;
  if (valid && column + 1 < columns)
    v |= (uint32_t)row[column + 1] << 16;
  return v;
}
template <bool VECTORS>
__device__ __forceinline__ void store_two(uint16_t *row, int column, int columns, bool valid,
                                          uint32_t v) {
  if (!valid || column >= columns)
    return;
  if (VECTORS) {
    *(uint32_t *)(row + column) = v;
  } else {
    row[column] = (uint16_t)v;
    if (column + 1 < columns)
      row[column + 1] = (uint16_t)(v >> 16);
  }
}

/* Gate and up of outputs `column` and `column` + 1 of a row with `inter` outputs. */
template <bool VECTORS> struct GateUpPair {
  uint32_t gate, up;

  __device__ __forceinline__ void load(const uint16_t *row, GateUp form, int column, int inter,
                                       bool valid) {
    if (form == GateUp::INTERLEAVED) {
      const uint32_t first = load_two<VECTORS>(row, 2 * column, 2 * inter, valid);
      const uint32_t second = load_two<VECTORS>(row, 2 * column + 2, 2 * inter, valid);
      gate = __byte_perm(first, second, 0x5410);
      up = __byte_perm(first, second, 0x7632);
      return;
    }
    gate = load_two<VECTORS>(row, column, inter, valid);
    up = form == GateUp::HALVES ? load_two<VECTORS>(row + inter, column, inter, valid) : 0;
  }
  __device__ __forceinline__ void store(uint16_t *row, GateUp form, int column, int inter,
                                        bool valid) const {
    if (form == GateUp::INTERLEAVED) {
      store_two<VECTORS>(row, 2 * column, 2 * inter, valid, __byte_perm(gate, up, 0x5410));
      store_two<VECTORS>(row, 2 * column + 2, 2 * inter, valid, __byte_perm(gate, up, 0x7632));
      return;
    }
    store_two<VECTORS>(row, column, inter, valid, gate);
    if (form == GateUp::HALVES)
      store_two<VECTORS>(row + inter, column, inter, valid, up);
  }
};

/* Saves the accumulators of eight tokens before the activation: d0 and d1 belong to the two m64
 * tiles of `row_group`. `row` is the flat row of token lane / 4. */
template <class E, class T, bool VECTORS>
__device__ __forceinline__ void save_before(const float *d0, const float *d1,
                                            const moelora_gemm_launch &g, const Tile &tile,
                                            int row_group, int32_t row, bool valid) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, inter = g.weights.n_out;
  uint16_t *const to = (uint16_t *)g.before.rows + (int64_t)row * g.before.stride;
#pragma unroll
  for (int m8 = 0; m8 < 2; m8++) {
    const GateUpPair<VECTORS> pair = {transpose_8x8(pack2<T>(d0[2 * m8], d0[2 * m8 + 1])),
                                      transpose_8x8(pack2<T>(d1[2 * m8], d1[2 * m8 + 1]))};
    const int ahead = warp * 16 + 8 * m8 + 2 * (lane & 3);
    const int column = first_output<E>(g, tile, 2 * row_group) + ahead;
    if (g.weights.gated) {
      pair.store(to, g.weights.interleaved ? GateUp::INTERLEAVED : GateUp::HALVES, column, inter,
                 valid);
      continue;
    }
    store_two<VECTORS>(to, column, inter, valid, pair.gate);
    store_two<VECTORS>(to, first_output<E>(g, tile, 2 * row_group + 1) + ahead, inter, valid,
                       pair.up);
  }
}
