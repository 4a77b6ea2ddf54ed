/* What the decode kernels do with the sums of an item: partial sums of a CTA's warps, biases,
 * activation, rounding. */
#ifndef MOELORA_CUDA_DECODE_EPILOGUE_CUH
#define MOELORA_CUDA_DECODE_EPILOGUE_CUH

#include "cuda/decode/scheduler.cuh"
#include "cuda/gemm/common/epilogue.cuh"

namespace decode {

/* Floats between tokens and between warps of the partial sums: writes and reads of a warp cover all
 * banks. */
constexpr int kTokenPitch = 20, kWarpPitch = 164;

/* Of the warps' sums. Two, so that an item need not wait until those before it have been read. */
struct Partials {
  float sums[2][kWarps * kWarpPitch];
};

__device__ __forceinline__ void store_partial(float *partial, const float (&total)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int q = 0; q < 4; q++)
    partial[warp * kWarpPitch + (lane % 4 * 2 + q % 2) * kTokenPitch + lane / 4 + 8 * (q / 2)] =
        total[q];
}

template <class T> __device__ __forceinline__ float to_float(const void *data, int64_t at) {
  return Element<T>::to_float(((const T *)data)[at]);
}

/* Adds the warps' sums up and writes the results of token `warp`, four lanes to two rows, of an
 * item that is not of W13. */
template <class T>
__device__ __forceinline__ void epilogue_shared(const DecodeParams &p, const Tables &t,
                                                const WorkItem &item, const float *partial) {
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, g = lane / 4, quarter = lane % 4;
  const int kind = item.kind;
  const moelora_experts_problem &problem = p.p;
  float sum[2];
  int output[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float *from = partial + 2 * quarter * kWarpPitch + token * kTokenPitch + g + 8 * half;
    sum[half] = from[0] + from[kWarpPitch];
    output[half] = output_of(p, item, g, half);
  }
  if (kind == W2 && problem.w2.bias)
#pragma unroll 1
    for (int u = quarter; u < t.active_experts; u += 4)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (t.row[u][token] >= 0 && output[half] < outputs_of(p, W2))
          sum[half] +=
              t.weight[u][token] *
              to_float<T>(problem.w2.bias, t.expert[u] * problem.w2.bias_stride_e + output[half]);
#pragma unroll
  for (int half = 0; half < 2; half++)
    sum[half] = quad_sum(sum[half]);
  if (is_shrink(kind)) {
    const RankTile r = ranks_of(p, t, kind, item.tile);
    const moelora_factors &f = factors_of(p, kind);
    if (quarter || !(t.segment_tokens[r.segment] >> token & 1))
      return;
    const int64_t row = t.row[t.segment_active[r.segment]][token];
    T *to = (T *)p.xa[kind == SHRINK2] +
            (row * f.num_slices + r.slice) * moelora_padded_rank(f.max_rank) + r.first + g;
#pragma unroll
    for (int half = 0; half < 2; half++)
      to[8 * half] = Element<T>::round(
          r.first + 8 * half + g < r.rank ? t.own.scaling[token] * sum[half] : 0.f);
    return;
  }
  if (quarter || token >= problem.routes.num_tokens)
    return;
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (output[half] < outputs_of(p, W2))
      ((T *)problem.out)[token * problem.out_stride + output[half]] = Element<T>::round(sum[half]);
}

/* Writes the outputs of a W13 item from the registers of its warp. */
template <class T>
__device__ __forceinline__ void epilogue_w13(const DecodeParams &p, const Tables &t,
                                             const WorkItem &item, const float (&total)[4]) {
  const moelora_experts_problem &problem = p.p;
  const int lane = threadIdx.x % 32, active = item.active;
  float bias[2] = {};
  int output[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    output[half] = output_of(p, item, lane / 4, half);
    if (problem.w13.bias && output[half] < outputs_of(p, W13))
      bias[half] = to_float<T>(problem.w13.bias, t.expert[active] * problem.w13.bias_stride_e +
                                                     weight_row(p, W13, output[half], half));
  }
  const Activation activate(problem.activation);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64_t row = t.row[active][lane % 4 * 2 + i];
    if (row < 0)
      continue;
    const float sum[2] = {total[i] + bias[0], total[2 + i] + bias[1]};
    T *to = (T *)p.h + row * problem.intermediate;
    if (p.gated) {
      if (output[0] < outputs_of(p, W13))
        to[output[0]] = Element<T>::round(activate(sum[0], sum[1]));
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (output[half] < outputs_of(p, W13))
        to[output[half]] = Element<T>::round(sum[half] < 0.f ? 0.f : sum[half] * sum[half]);
  }
}

/* Adds the warps' sums up and writes the outputs of token `warp` of a W13 item of weights in tiles:
 * warps 0 to 3 have gate and 4 to 7 up, ungated shares of the same rows. */
template <class T>
__device__ __forceinline__ void epilogue_w13_shared(const DecodeParams &p, const Tables &t,
                                                    const WorkItem &item, const float *partial) {
  const moelora_experts_problem &problem = p.p;
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, g = lane / 4, quarter = lane % 4;
  float sum[2][2]; // of a half of the rows: its first four warps', its last four warps'
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float *from = partial + 2 * quarter * kWarpPitch + token * kTokenPitch + g + 8 * half;
    sum[half][0] = from[0] + from[kWarpPitch];
    sum[half][0] += __shfl_xor_sync(~0u, sum[half][0], 1);
    sum[half][1] = __shfl_xor_sync(~0u, sum[half][0], 2);
  }
  const int64_t row = t.row[item.active][token];
  const int half = quarter, output = item.tile * 16 + g + 8 * half;
  if (half >= 2 || row < 0 || output >= outputs_of(p, W13))
    return;
  float gate = half ? sum[1][0] : sum[0][0], up = half ? sum[1][1] : sum[0][1];
  if (problem.w13.bias) {
    const int64_t bias = t.expert[item.active] * problem.w13.bias_stride_e;
    gate += to_float<T>(problem.w13.bias, bias + weight_row(p, W13, output, 0));
    if (p.gated)
      up += to_float<T>(problem.w13.bias, bias + weight_row(p, W13, output, 1));
  }
  T *to = (T *)p.h + row * problem.intermediate + output;
  if (p.gated) {
    *to = Element<T>::round(Activation(problem.activation)(gate, up));
  } else {
    const float whole = gate + up;
    *to = Element<T>::round(whole < 0.f ? 0.f : whole * whole);
  }
}

} // namespace decode

#endif
