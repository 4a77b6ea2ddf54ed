/* Epilogue: applies bias, activation and routing weight to accumulators, and computes output
 * addresses. The accumulator layout is described in tile.cuh. */
#pragma once

#include "cuda/gemm/common/activation.cuh"
#include "cuda/gemm/common/tile.cuh"

template <class E>
__device__ __forceinline__ float routed_weight(const moelora_gemm_launch &g, int block, int t) {
  return g.epilogue.weighted && t < E::TOKENS
             ? g.schedule.blocks.weights[(int64_t)block * E::TOKENS + t]
             : 0.f;
}

/* Returns the offset of an output row, given its position and its flat row. */
__device__ __forceinline__ int64_t output_offset(const moelora_gemm_launch &g, int position,
                                                 int row) {
  if (g.epilogue.out_by_position)
    return position * g.epilogue.out_stride[0];
  return row / g.epilogue.top_k * g.epilogue.out_stride[0] +
         row % g.epilogue.top_k * g.epilogue.out_stride[1];
}

/* Compile-time mode of an epilogue. An epilogue is unrolled over all outputs of a thread, so a
 * run-time option would be tested once per output, and the code of all options would not fit the
 * instruction cache. */
enum class EpilogueMode {
  GENERAL, // all options
  GATED,   // bias, gated activation
  SILU,    // as GATED, for silu without a limit, the most common activation
  PLAIN,   // bias, relu^2
  DACT,    // backward: gradient of the activation
};

/* Per-thread state of an epilogue. bias[2 i + m8] belongs to row 16 warp + lane / 4 + 8 m8 of m64
 * tile i of the row group. */
template <class E, EpilogueMode MODE> struct Epilogue {
  float bias[4];
  Activation activation;

  template <class T>
  __device__ __forceinline__ Epilogue(const moelora_gemm_launch &g, const Tile &tile, int row_group,
                                      T)
      : activation(g.epilogue.activation) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    bias[0] = bias[1] = bias[2] = bias[3] = 0.f;
    if (!g.weights.w.bias)
      return;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int m64 = 2 * row_group + j / 2;
      const int output = first_output<E>(g, tile, m64) + warp * 16 + lane / 4 + 8 * (j % 2);
      if (output < g.weights.n_out)
        bias[j] = Element<T>::to_float(
            ((const T *)g.weights.w
                 .bias)[tile.expert * g.weights.w.bias_stride_e + weight_row(g, m64, output)]);
    }
  }

  /* Adds the bias, if there is one, and applies relu^2, if that is the activation, before
   * `apply_activation`. Here each takes one branch; there it would take one per output. */
  template <class T, int N>
  __device__ __forceinline__ void begin(float (&d)[2][N / 2], const moelora_gemm_launch &g) const {
    add_bias<T, N>(d, g);
    square<N>(d, g);
  }

  /* The two steps of `begin`. SAVES kernels save the values after add_bias, which also multiplies
   * by 2^DEFERRED_EXPONENT. */
  template <class T, int N>
  __device__ __forceinline__ void add_bias(float (&d)[2][N / 2],
                                           const moelora_gemm_launch &g) const {
    constexpr int DEFERRED = E::TRANSPOSED ? 0 : E::Format::template DEFERRED_EXPONENT<T>;
    if (DEFERRED > 0) {
#pragma unroll
      for (int i = 0; i < N; i++)
        d[i % 2][i / 2] =
            fmaf(d[i % 2][i / 2], (float)(1 << DEFERRED), bias[i % 2 * 2 + i / 2 % 4 / 2]);
    } else if (g.weights.w.bias) {
#pragma unroll
      for (int i = 0; i < N; i++)
        d[i % 2][i / 2] += bias[i % 2 * 2 + i / 2 % 4 / 2];
    }
  }
  template <int N>
  __device__ __forceinline__ void square(float (&d)[2][N / 2], const moelora_gemm_launch &g) const {
    if (MODE != EpilogueMode::GATED && MODE != EpilogueMode::SILU &&
        !moelora_is_gated(g.epilogue.activation.kind)) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        float &v = d[i % 2][i / 2];
        v = moelora_squared(nullptr, v, 0.f);
      }
    }
  }

  /* Multiplies the outputs of `block` by routing weights; GENERAL does so in apply_activation. */
  template <int N>
  __device__ __forceinline__ void weigh(float (&d)[2][N / 2], const moelora_gemm_launch &g,
                                        int block) const {
    if (!g.epilogue.weighted)
      return;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int first = 0; first < N; first += 32) {
      const float here = routed_weight<E>(g, block, first + lane);
#pragma unroll
      for (int i = 0; i < 8 && first + 4 * i < N; i++) { // two tokens in each of four n8 tiles
        const float weight = __shfl_sync(0xffffffffu, here, i / 2 * 8 + (lane & 3) * 2 + i % 2);
        const int at = (first / 8 + i / 2) * 4 + i % 2;
        d[0][at] *= weight, d[0][at + 2] *= weight;
        d[1][at] *= weight, d[1][at + 2] *= weight;
      }
    }
  }

  /* Applies a gated activation and, if GENERAL, routing weights in place to up to 32 tokens of
   * `block`, starting at `first`. The outputs of a gated projection end up in d[0]. */
  template <int N>
  __device__ __forceinline__ void
  apply_activation(float (&d)[2][N / 2], const moelora_gemm_launch &g, int block, int first) const {
    constexpr bool HAS_ACTIVATION = MODE == EpilogueMode::GATED || MODE == EpilogueMode::GENERAL;
    if constexpr (HAS_ACTIVATION)
      activation.with_form([&](auto form) __attribute__((always_inline)) {
        apply_to<decltype(form)::value, N>(d, g, block, first);
      });
    else
      apply_to<MOELORA_FORM_SILU, N>(d, g, block, first);
  }

private:
  template <moelora_activation_form FORM, int N>
  __device__ __forceinline__ void apply_to(float (&d)[2][N / 2], const moelora_gemm_launch &g,
                                           int block, int first) const {
    const int lane = threadIdx.x & 31;
    const float here =
        MODE == EpilogueMode::GENERAL ? routed_weight<E>(g, block, first + lane) : 1.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (first + 8 * i >= N)
        break;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int at = (first / 8 + i) * 4 + q;
        float v[2] = {d[0][at], d[1][at]};
        if (MODE == EpilogueMode::SILU)
          v[0] = activation.template apply<MOELORA_FORM_SILU>(v[0], v[1]);
        else if (MODE == EpilogueMode::GATED || (MODE == EpilogueMode::GENERAL && g.weights.gated))
          v[0] = activation.template apply<FORM>(v[0], v[1]);
        if (MODE == EpilogueMode::GENERAL && g.epilogue.weighted) {
          const float weight = __shfl_sync(0xffffffffu, here, i * 8 + (lane & 3) * 2 + q % 2);
          v[0] *= weight, v[1] *= weight;
        }
        d[0][at] = v[0], d[1][at] = v[1];
      }
    }
  }
};
