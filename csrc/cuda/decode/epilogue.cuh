/* Epilogues of the decode kernel's work items. Results are bitwise equal to those of the separate
 * kernels. */
#ifndef MOELORA_CUDA_DECODE_EPILOGUE_CUH
#define MOELORA_CUDA_DECODE_EPILOGUE_CUH

#include "cuda/decode/scheduler.cuh"
#include "cuda/gemm/common/epilogue.cuh"

namespace decode {

/* Strides in floats between tokens and between warps. kTokenPitch avoids bank conflicts in
 * store_partial(). */
constexpr int kTokenPitch = 20, kWarpPitch = 164;

/* Shrinks and W13: the accumulators of each warp. W2: the rounded rows of an item, kTokenPitch
 * apart. Double-buffered, so that an item can be stored while the previous one is read. */
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

/* Adds the partial sums of a shrink item in the order of K. Warp i stores the 16 ranks of token i
 * to xa, multiplied by the adapter's scaling and 2^-DEFERRED. */
template <class T, int DEFERRED>
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
  const float scaling = t.routing.scaling[token] * (1.f / (1 << DEFERRED));
  to[lane] = Element<T>::round(r.first + lane < r.rank ? scaling * sum : 0.f);
}

/* Scales the product of a W2 item and one active expert by 2^DEFERRED, adds the bias, rounds the
 * result, and stores it by flat row. */
template <class T, int DEFERRED>
__device__ __forceinline__ void store_rows(const DecodeParams &p, const Tables &t,
                                           const WorkItem &item, const float (&d)[4], float *rows) {
  const moelora_weights &w2 = p.p.w2;
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int output = item.tile * 16 + g + 8 * half;
    float bias = 0.f;
    if (w2.bias && output < outputs_of(p, W2))
      bias = to_float<T>(w2.bias, t.expert[item.active] * w2.bias_stride_e + output);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = t.row[item.active][lane % 4 * 2 + i];
      const float v = fmaf(d[2 * half + i], (float)(1 << DEFERRED), bias);
      if (row >= 0)
        rows[row * kTokenPitch + g + 8 * half] = Element<T>::to_float(Element<T>::round(v));
    }
  }
}

/* Stores the outputs of a W2 item. Warp i sums the rows of token i as layer/sum.cu does. */
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
    const int first_row = t.first_row[token * top_k + j];
    if (first_row >= 0)
      sum += t.row_weight[token * top_k + j] * rows[first_row * kTokenPitch + lane];
  }
  ((T *)problem.out)[token * problem.out_stride + output] = Element<T>::round(sum);
}

/* Applies the activation, of `gate` alone if ungated, and stores one element of h. */
template <class T>
__device__ __forceinline__ void store_h(const DecodeParams &p, int64_t row, int output, float gate,
                                        float up) {
  const float h =
      p.gated ? Activation(p.p.activation)(gate, up) : moelora_squared(nullptr, gate, 0.f);
  ((T *)p.h)[row * p.p.intermediate + output] = Element<T>::round(h);
}

/* Scales the products of a W13 item by 2^DEFERRED and applies bias and activation; warp i stores
 * the outputs of token i. If gated, the first half of the warps has multiplied gate rows. */
template <class T, int DEFERRED>
__device__ __forceinline__ void epilogue_w13(const DecodeParams &p, const Tables &t, int active,
                                             int first, const float *partial) {
  const moelora_weights &w13 = p.p.w13;
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, warps = warps_of_half(p);
  const int64_t row = t.row[active][token], bias = t.expert[active] * w13.bias_stride_e;
  const auto value = [&](int at, int half) {
    const float v = partial[(half * warps + at / 16) * kWarpPitch + token * kTokenPitch + at % 16];
    const float add =
        w13.bias ? to_float<T>(w13.bias, bias + weight_row(p, W13, first + at, half)) : 0.f;
    return fmaf(v, (float)(1 << DEFERRED), add);
  };
#pragma unroll 1
  for (int at = lane; at < 16 * warps; at += 32)
    if (row >= 0 && first + at < outputs_of(p, W13))
      store_h<T>(p, row, first + at, value(at, 0), p.gated ? value(at, 1) : 0.f);
}

} // namespace decode

#endif
