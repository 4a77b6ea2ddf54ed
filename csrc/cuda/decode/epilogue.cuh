/* What the decode kernels do with the sums of an item: biases, activation, rounding, and what warps
 * leave for each other. Each of these as the kernels of several launches do it, to the bit. */
#ifndef MOELORA_CUDA_DECODE_EPILOGUE_CUH
#define MOELORA_CUDA_DECODE_EPILOGUE_CUH

#include "cuda/decode/scheduler.cuh"
#include "cuda/gemm/common/epilogue.cuh"

namespace decode {

/* Floats between tokens and between warps of what warps leave for each other: writes and reads of a
 * warp cover all banks. */
constexpr int kTokenPitch = 20, kWarpPitch = 164;

/* What warps found, or of W2 the rows of an item: flat rows kTokenPitch apart. Two, so that an item
 * need not wait until those before it have been read. */
struct Partials {
  float sums[2][kWarps * kWarpPitch];
};
static_assert(kRows * kTokenPitch <= kWarps * kWarpPitch, "room for all rows");

__device__ __forceinline__ void store_partial(float *partial, const float (&d)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int q = 0; q < 4; q++)
    partial[warp * kWarpPitch + (lane % 4 * 2 + q % 2) * kTokenPitch + lane / 4 + 8 * (q / 2)] =
        d[q];
}

template <class T> __device__ __forceinline__ float to_float(const void *data, int64_t at) {
  return Element<T>::to_float(((const T *)data)[at]);
}

/* Adds up what the warps of a shrink found, in the order of the depth, and writes the ranks of
 * token `warp`, times 2^-MISSING. */
template <class T, int MISSING>
__device__ __forceinline__ void epilogue_shrink(const DecodeParams &p, const Tables &t,
                                                const WorkItem &item, const float *partial) {
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, kind = item.kind;
  const RankTile r = ranks_of(p, t, kind, item.tile);
  if (lane >= 16 || !(t.segment_tokens[r.segment] >> token & 1))
    return;
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++)
    sum += partial[warp * kWarpPitch + token * kTokenPitch + lane];
  const moelora_factors &f = factors_of(p, kind);
  const int64_t row = t.row[t.segment_active[r.segment]][token];
  T *to = (T *)p.xa[kind == SHRINK2] +
          (row * f.num_slices + r.slice) * moelora_padded_rank(f.max_rank) + r.first;
  const float scaling = t.own.scaling[token] * (1.f / (1 << MISSING));
  to[lane] = Element<T>::round(r.first + lane < r.rank ? scaling * sum : 0.f);
}

/* Rounds the product of a W2 item with an active expert, times 2^MISSING, for its rows. */
template <class T, int MISSING>
__device__ __forceinline__ void store_rows(const DecodeParams &p, const Tables &t,
                                           const WorkItem &item, const float (&d)[4], float *rows) {
  const moelora_weights &w2 = p.p.w2;
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int output = output_of(p, item, g, half);
    float bias = 0.f;
    if (w2.bias && output < outputs_of(p, W2))
      bias = to_float<T>(w2.bias, t.expert[item.active] * w2.bias_stride_e + output);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = t.row[item.active][lane % 4 * 2 + i];
      const float v = fmaf(d[2 * half + i], (float)(1 << MISSING), bias);
      if (row >= 0)
        rows[row * kTokenPitch + g + 8 * half] = Element<T>::to_float(Element<T>::round(v));
    }
  }
}

/* Sums a W2 item over the rows of token `warp`, as layer/sum.cu does. */
template <class T>
__device__ __forceinline__ void epilogue_sum(const DecodeParams &p, const Tables &t,
                                             const WorkItem &item, const float *rows) {
  const moelora_experts_problem &problem = p.p;
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, top_k = problem.routes.top_k;
  const int output = item.tile * 16 + lane;
  if (lane >= 16 || token >= problem.routes.num_tokens || output >= outputs_of(p, W2))
    return;
  float sum = 0.f;
#pragma unroll 4
  for (int j = 0; j < top_k; j++) {
    const int lead = t.lead[token * top_k + j];
    if (lead >= 0)
      sum += t.row_weight[token * top_k + j] * rows[lead * kTokenPitch + lane];
  }
  ((T *)problem.out)[token * problem.out_stride + output] = Element<T>::round(sum);
}

/* An output of W13 of a row: gate and up, ungated the first alone. */
template <class T>
__device__ __forceinline__ void store_h(const DecodeParams &p, int64_t row, int output, float gate,
                                        float up) {
  const float h = p.gated      ? Activation(p.p.activation)(gate, up)
                  : gate < 0.f ? 0.f
                               : gate * gate;
  ((T *)p.h)[row * p.p.intermediate + output] = Element<T>::round(h);
}

/* Writes the outputs of a W13 item from the registers of its warp. */
template <class T>
__device__ __forceinline__ void epilogue_w13(const DecodeParams &p, const Tables &t,
                                             const WorkItem &item, const float (&d)[4]) {
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
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int64_t row = t.row[active][lane % 4 * 2 + i];
    if (row < 0)
      continue;
    const float sum[2] = {d[i] + bias[0], d[2 + i] + bias[1]};
#pragma unroll
    for (int half = 0; half < (p.gated ? 1 : 2); half++)
      if (output[half] < outputs_of(p, W13))
        store_h<T>(p, row, output[half], sum[half], sum[1]);
  }
}

/* Writes the outputs of token `warp` of a W13 item of weights in tiles: gated, the first half of the
 * warps has gate, the other up. Products lack 2^MISSING. */
template <class T, int MISSING>
__device__ __forceinline__ void epilogue_w13_shared(const DecodeParams &p, const Tables &t,
                                                    int active, int first, const float *partial) {
  const moelora_weights &w13 = p.p.w13;
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, warps = warps_of_half(p);
  const int64_t row = t.row[active][token], bias = t.expert[active] * w13.bias_stride_e;
  const auto value = [&](int at, int half) {
    const float v = partial[(half * warps + at / 16) * kWarpPitch + token * kTokenPitch + at % 16];
    const float add = w13.bias ? to_float<T>(w13.bias, bias + weight_row(p, W13, first + at, half))
                               : 0.f;
    return fmaf(v, (float)(1 << MISSING), add);
  };
#pragma unroll 1
  for (int at = lane; at < 16 * warps; at += 32)
    if (row >= 0 && first + at < outputs_of(p, W13))
      store_h<T>(p, row, first + at, value(at, 0), p.gated ? value(at, 1) : 0.f);
}

} // namespace decode

#endif
