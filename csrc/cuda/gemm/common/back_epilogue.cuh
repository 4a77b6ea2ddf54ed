/* Epilogue of the backward's first product, v = dout W2 + yb2 A2: applies the gradient of the
 * activation.
 *
 *   h = act(gate_up)   dgu = act'(gate_up) t v   dt[position, i] = sum over 16 outputs of v h
 *
 * t is the routing weight. Rows are read and written as in gate_up.cuh. */
#pragma once

#include "cuda/backward/products.h"
#include "cuda/gemm/common/epilogue.cuh"
#include "cuda/gemm/common/gate_up.cuh"
#include "cuda/ptx/opaque.cuh"

/* Returns element HALF of a pair as float32. */
template <class T, int HALF> __device__ __forceinline__ float element_of(uint32_t pair) {
  const uint16_t bits = (uint16_t)(pair >> 16 * HALF);
  T value;
  memcpy(&value, &bits, sizeof value);
  return Element<T>::to_float(value);
}

/* 16 outputs of eight tokens in the layout of accumulators: a register holds one output, lane / 4
 * or lane / 4 + 8, of this lane's two tokens. */
template <class T> struct BackOutputs {
  uint32_t gate[2], up[2]; // of the forward; `apply` replaces them by their gradients
  uint32_t h[2];
  float dt[2] = {0.f, 0.f};

  /* Applies `gradient` (see with_gradient) to v, the accumulators of an m16n8 tile; adds to dt. */
  template <class Gradient>
  __device__ __forceinline__ void apply(const float *v, float2 weight, Gradient gradient) {
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++) {
      float g[2] = {element_of<T, 0>(gate[m8]), element_of<T, 1>(gate[m8])};
      float u[2] = {element_of<T, 0>(up[m8]), element_of<T, 1>(up[m8])}, outputs[2];
#pragma unroll
      for (int q = 0; q < 2; q++)
        outputs[q] = gradient(&g[q], &u[q], (q ? weight.y : weight.x) * v[2 * m8 + q]);
      gate[m8] = pack2<T>(g[0], g[1]);
      up[m8] = pack2<T>(u[0], u[1]);
      h[m8] = opaque(
          pack2<T>(outputs[0], outputs[1])); // otherwise the compiler rounds each half separately
      dt[0] += v[2 * m8] * element_of<T, 0>(h[m8]);
      dt[1] += v[2 * m8 + 1] * element_of<T, 1>(h[m8]);
    }
  }

  /* Returns dt of the lane's two tokens, summed over the eight lanes that hold their outputs. */
  __device__ __forceinline__ float2 sum() {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
      for (int q = 0; q < 2; q++)
        dt[q] += __shfl_xor_sync(0xffffffffu, dt[q], lanes);
    return {dt[0], dt[1]};
  }
};

/* Applies the gradient of the activation to N tiles of outputs, with at most one branch for all. */
template <GradientKind KIND, class T, int N>
__device__ __forceinline__ void apply_back(BackOutputs<T> (&outputs)[N], const float (&v)[N][4],
                                           const moelora_activation_terms &p, float2 weight) {
  with_gradient<KIND>(p, [&](auto gradient) __attribute__((always_inline)) {
#pragma unroll
    for (int n = 0; n < N; n++)
      outputs[n].apply(v[n], weight, gradient);
  });
}

/* Global addresses of the rows of a lane's token. */
struct BackRow {
  const uint16_t *gate_up;
  uint16_t *h, *dgu;
  bool valid;

  __device__ __forceinline__ BackRow(const moelora_back_launch &g, int64_t position, bool valid_)
      : valid(valid_) {
    const moelora_dact_epilogue &to = g.dact;
    const int64_t row = valid ? g.schedule.blocks.sorted_ids[position] : 0;
    gate_up = (const uint16_t *)to.gate_up + row * to.gate_up_stride;
    h = (uint16_t *)to.h + row * g.weights.n_out;
    dgu = (uint16_t *)to.dgu + row * to.dgu_stride;
  }
};

/* 16 outputs of eight tokens, from output `first` on. `finish` takes the accumulators v[4] of an
 * m16n8 tile and the routing weights of this lane's two tokens, and stores the gradients and, if
 * `wants_h`, h. It returns dt of the two tokens, summed over the 16 outputs. */
template <class T, bool VECTORS> struct BackTile {
  GateUpPair<VECTORS> pairs[2]; // of outputs 0 to 7, 8 to 15

  __device__ __forceinline__ void load(const BackRow &row, GateUp form, int first, int inter) {
    const int column = first + 2 * (threadIdx.x & 3);
    pairs[0].load(row.gate_up, form, column, inter, row.valid);
    pairs[1].load(row.gate_up, form, column + 8, inter, row.valid);
  }

  __device__ __forceinline__ float2 finish(const float *v,
                                           const moelora_activation_terms &activation,
                                           const BackRow &row, GateUp form, int first, int inter,
                                           float2 weight, bool wants_h) {
    BackOutputs<T> tile[1], &outputs = tile[0];
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++) {
      outputs.gate[m8] = transpose_8x8(pairs[m8].gate);
      outputs.up[m8] = form == GateUp::ONE ? 0 : transpose_8x8(pairs[m8].up);
    }
    const float values[1][4] = {{v[0], v[1], v[2], v[3]}};
    if (has_gated_gradient(activation))
      apply_back<GradientKind::GATED>(tile, values, activation, weight);
    else
      apply_back<GradientKind::OTHER>(tile, values, activation, weight);
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++) {
      const int column = first + 8 * m8 + 2 * (threadIdx.x & 3);
      const GateUpPair<VECTORS> gradient = {
          transpose_8x8(outputs.gate[m8]), form == GateUp::ONE ? 0 : transpose_8x8(outputs.up[m8])};
      gradient.store(row.dgu, form, column, inter, row.valid);
      if (wants_h)
        store_two<VECTORS>(row.h, column, inter, row.valid, transpose_8x8(outputs.h[m8]));
    }
    return outputs.sum();
  }
};

/* Applies the gradient to accumulators d of eight tokens from `position` on and of the m64 tile
 * that begins at output `first`. Stores the results of the first `count` tokens. */
template <class T, bool VECTORS>
__device__ __forceinline__ void store_through(const float *d, const moelora_back_launch &g,
                                              int first, int64_t position, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, inter = g.weights.n_out;
  const int output = first + warp * 16, mine = 2 * (lane & 3);
  if (output >= inter)
    return;
  const BackRow row(g, position + lane / 4, lane / 4 < count);
  const GateUp form = gate_up_form(g.epilogue.activation);
  const float *weights = g.schedule.blocks.weights;
  float2 weight = {1.f, 1.f};
  if (weights && mine < count)
    weight.x = weights[position + mine];
  if (weights && mine + 1 < count)
    weight.y = weights[position + mine + 1];
  BackTile<T, VECTORS> tile;
  tile.load(row, form, output, inter);
  const float2 dt =
      tile.finish(d, g.dact.activation, row, form, output, inter, weight, g.dact.h != nullptr);
  float *to = g.dact.dt + position * g.dact.dt_parts + output / MOELORA_DT_OUTPUTS;
  if (lane < 4 && mine < count)
    to[mine * g.dact.dt_parts] = dt.x;
  if (lane < 4 && mine + 1 < count)
    to[(mine + 1) * g.dact.dt_parts] = dt.y;
}
