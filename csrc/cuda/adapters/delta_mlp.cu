/* An adapter MLP beside its layer, all of it in one launch:
 *
 *   out[m] += sum over j of w[m, j] B2 round(s A2 round(silu(Bg round(Ag x[m])) * (Bu round(Au
 * x[m]))))
 *
 * A CTA takes a token, and all of the token's experts in step: what is one launch elsewhere is one
 * phase between barriers here. Factors go straight from memory into float32 dot products. One SM
 * reads the factors of a token, so this is for batches whose launches cost more than their bytes.
 */
#include "cuda/adapters/factors.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/launch/routes.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/variant_ids.h"

namespace {

constexpr int kThreads = 512;

/* Of one token, in shared memory. */
struct MlpShared {
  int32_t x, xa1, act, xa2, experts, bytes; // offsets
};

__host__ __device__ inline MlpShared lay_out(const moelora_mlp_delta_problem &p) {
  const int64_t top_k = p.routes.top_k, sides = p.gate_up.num_slices;
  const int64_t x = 0, act = (x + 2 * p.hidden + 15) / 16 * 16;
  const int64_t xa1 = (act + 2 * top_k * p.intermediate + 15) / 16 * 16;
  const int64_t xa2 = xa1 + 4 * top_k * sides * p.gate_up.max_rank;
  const int64_t experts = xa2 + 4 * top_k * p.down.max_rank, bytes = experts + 4 * top_k;
  return {(int32_t)x, (int32_t)xa1, (int32_t)act, (int32_t)xa2, (int32_t)experts, (int32_t)bytes};
}

/* Sum over i of a[i] b[i], by the lanes of a warp; all of them get it. b is in shared memory. */
template <class T, bool VECTORS>
__device__ __forceinline__ float warp_dot(const T *a, const T *b, int count) {
  float sum = 0.f;
  if constexpr (VECTORS) {
#pragma unroll 4
    for (int i = threadIdx.x % 32 * 8; i < count; i += 256) {
      const uint4 left = *(const uint4 *)(a + i), right = *(const uint4 *)(b + i);
      const T *u = (const T *)&left, *v = (const T *)&right;
#pragma unroll
      for (int c = 0; c < 8; c++)
        sum += Element<T>::to_float(u[c]) * Element<T>::to_float(v[c]);
    }
  } else {
    for (int i = threadIdx.x % 32; i < count; i += 32)
      sum += Element<T>::to_float(a[i]) * Element<T>::to_float(b[i]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

/* Sum over r of row[r] xa[r]; xa is in shared memory. */
template <class T, bool VECTORS>
__device__ __forceinline__ float rank_dot(const T *row, const float *xa, int rank) {
  float sum = 0.f;
  int r = 0;
  if constexpr (VECTORS) {
#pragma unroll 2
    for (; r + 8 <= rank; r += 8) {
      const uint4 vector = *(const uint4 *)(row + r);
      const T *v = (const T *)&vector;
#pragma unroll
      for (int c = 0; c < 8; c++)
        sum += Element<T>::to_float(v[c]) * xa[r + c];
    }
  }
  for (; r < rank; r++)
    sum += Element<T>::to_float(row[r]) * xa[r];
  return sum;
}

template <class T> __device__ __forceinline__ float rounded(float v) {
  return Element<T>::to_float(Element<T>::round(v));
}

/* What a token carries, read once by one thread: all others agree, whatever becomes of the tables.
 */
struct Carried {
  int32_t adapter, rank; // as told; 0: nothing
  float scaling;

  __device__ __forceinline__ void read(const moelora_routes &r, int64_t token) {
    int64_t id[1] = {load_id(r.token_lora_mapping, token * r.token_lora_mapping.stride[0])};
    active_adapters(r, id);
    adapter = (int32_t)id[0];
    rank = adapter < 0 ? 0 : true_rank(r, adapter, INT32_MAX);
    scaling = adapter >= 0 && r.lora_scalings ? r.lora_scalings[adapter] : 1.f;
  }
};

__device__ __forceinline__ int32_t expert_of(const moelora_routes &r, int64_t token, int choice) {
  int64_t id[1] = {
      load_id(r.topk_ids, token * r.topk_ids.stride[0] + choice * r.topk_ids.stride[1])};
  local_experts(r, id);
  return (int32_t)id[0];
}

template <class T, bool VECTORS>
__global__ void __launch_bounds__(kThreads, 2)
    mlp_tokens(const __grid_constant__ moelora_mlp_delta_problem p) {
  extern __shared__ __align__(16) char memory[];
  const MlpShared l = lay_out(p);
  T *x = (T *)(memory + l.x), *act = (T *)(memory + l.act);
  float *xa1 = (float *)(memory + l.xa1), *xa2 = (float *)(memory + l.xa2);
  int32_t *experts = (int32_t *)(memory + l.experts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const moelora_routes &routes = p.routes;
  const int top_k = routes.top_k, sides = p.gate_up.num_slices;
  const int hidden = (int)p.hidden, intermediate = (int)p.intermediate;
  const int r1 = p.gate_up.max_rank, r2 = p.down.max_rank;
  __shared__ Carried carried;
  wait_for_previous_kernel();
  start_next_kernel();

  for (int64_t token = blockIdx.x; token < routes.num_tokens; token += gridDim.x) {
    __syncthreads(); // the token before is done
    if (threadIdx.x == 0)
      carried.read(routes, token);
    __syncthreads();
    const int64_t adapter = carried.adapter;
    const int rank1 = min(carried.rank, r1), rank2 = min(carried.rank, r2);
    if (rank1 == 0 || rank2 == 0)
      continue;
    const float scaling = carried.scaling;
    for (int i = threadIdx.x; i < hidden; i += kThreads)
      x[i] = ((const T *)p.x)[token * p.x_stride + i];
    for (int j = threadIdx.x; j < top_k; j += kThreads)
      experts[j] = expert_of(routes, token, j);
    __syncthreads();

    for (int i = warp; i < top_k * sides * rank1; i += kThreads / 32) {
      const int j = i / (sides * rank1), side = i / rank1 % sides, r = i % rank1;
      if (experts[j] < 0)
        continue;
      const float dot =
          warp_dot<T, VECTORS>(factor_row<T>(p.gate_up.a[side], adapter, experts[j], r), x, hidden);
      if (lane == 0)
        xa1[(j * sides + side) * r1 + r] = rounded<T>(dot);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < top_k * intermediate; i += kThreads) {
      const int j = i / intermediate, n = i - j * intermediate;
      if (experts[j] < 0)
        continue;
      const int up_row = sides == 1 ? intermediate + n : n;
      const float gate = rank_dot<T, VECTORS>(factor_row<T>(p.gate_up.b[0], adapter, experts[j], n),
                                              xa1 + j * sides * r1, rank1);
      const float up =
          rank_dot<T, VECTORS>(factor_row<T>(p.gate_up.b[sides - 1], adapter, experts[j], up_row),
                               xa1 + (j * sides + sides - 1) * r1, rank1);
      act[i] = Element<T>::round(__fdividef(gate * up, 1.f + __expf(-gate)));
    }
    __syncthreads();

    for (int i = warp; i < top_k * rank2; i += kThreads / 32) {
      const int j = i / rank2, r = i - j * rank2;
      if (experts[j] < 0)
        continue;
      const float dot = warp_dot<T, VECTORS>(factor_row<T>(p.down.a[0], adapter, experts[j], r),
                                             act + (int64_t)j * intermediate, intermediate);
      if (lane == 0)
        xa2[j * r2 + r] = rounded<T>(scaling * dot);
    }
    __syncthreads();

    for (int n = threadIdx.x; n < hidden; n += kThreads) {
      float sum = 0.f;
      bool any = false;
      for (int j = 0; j < top_k; j++) {
        if (experts[j] < 0)
          continue;
        any = true;
        sum += routes.topk_weights[token * routes.topk_weights_stride[0] +
                                   j * routes.topk_weights_stride[1]] *
               rank_dot<T, VECTORS>(factor_row<T>(p.down.b[0], adapter, experts[j], n),
                                    xa2 + j * r2, rank2);
      }
      T *to = (T *)p.out + token * p.out_stride + n;
      if (any)
        *to = Element<T>::round(Element<T>::to_float(*to) + sum);
    }
  }
}

template <class T, bool VECTORS>
moelora_status launch(const moelora_mlp_delta_problem &p, const moelora_exec *exec) {
  // the limit of a kernel's shared memory is set once, for the largest problem that fits
  return launch_kernel<mlp_tokens<T, VECTORS>>("delta_mlp", p.routes.num_tokens, kThreads,
                                               lay_out(p).bytes, exec, p);
}

} // namespace

extern "C" moelora_status delta_launch_mlp(const moelora_mlp_delta_problem *p,
                                           const moelora_variant *variant,
                                           const moelora_exec *exec) {
  switch (variant->id) {
#define LAUNCH(NAME, T, ELEMENTS)                                                                  \
  case CUDA_##NAME:                                                                                \
    return launch<T, !ELEMENTS>(*p, exec);
#define MOELORA_CUDA_MLP(STEM, ...)                                                                \
  LAUNCH(mlp_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                              \
  LAUNCH(mlp_f16_##STEM, __half, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH
  }
  return moelora_no_kernel(variant->name, "is no MLP");
}
