/* Gradients of routing weights, with one warp per kRows flat rows:
 *
 *   dt[p] = sum over the parts of <v, h>, or <dz[p], x[p]>, plus <dout[p], bias[e]>
 *
 * Each term may be absent; dt is 0 for skipped rows. Each lane adds every 32nd element of a term,
 * then the lanes are reduced, so the order of additions only depends on sizes. */
#include "cuda/backward/gradients.h"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/mma.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/* Returns this lane's part of the product of two rows. */
template <class T>
__device__ __forceinline__ float lane_product(const void *a, const void *b, int64_t count) {
  float sum = 0.f;
  for (int64_t i = threadIdx.x % 32; i < count; i += 32)
    sum += Element<T>::to_float(((const T *)a)[i]) * Element<T>::to_float(((const T *)b)[i]);
  return sum;
}

template <class T>
__device__ __forceinline__ const T *row_of(const moelora_divided_rows &rows, int64_t p) {
  return (const T *)rows.data + p / rows.divisor * rows.stride;
}

/* Rows that a warp sums at once, to overlap their latencies. */
constexpr int kRows = 4;

template <class T>
__global__ void __launch_bounds__(kThreads)
    weight_gradients(const __grid_constant__ moelora_weight_gradients s) {
  follow_previous_kernel();
  const int lane = threadIdx.x % 32;
  const int64_t step = (int64_t)gridDim.x * kWarps * kRows;
  for (int64_t first = ((int64_t)blockIdx.x * kWarps + threadIdx.x / 32) * kRows;
       first < s.num_rows; first += step) {
    int32_t expert[kRows];
    const float *dt[kRows];
    float sum[kRows] = {};
#pragma unroll
    for (int j = 0; j < kRows; j++)
      expert[j] = first + j < s.num_rows ? s.experts[first + j] : -1;
    if (s.dt) {
#pragma unroll
      for (int j = 0; j < kRows; j++)
        dt[j] = s.dt + (expert[j] >= 0 ? (int64_t)s.positions[first + j] * s.parts : 0);
      for (int i = lane; i < s.parts; i += 32)
#pragma unroll
        for (int j = 0; j < kRows; j++)
          sum[j] += expert[j] >= 0 ? dt[j][i] : 0.f;
    }
    if (s.dz || s.bias) {
#pragma unroll
      for (int j = 0; j < kRows; j++) {
        const int64_t p = first + j;
        if (expert[j] >= 0 && s.dz)
          sum[j] +=
              lane_product<T>((const T *)s.dz + p * s.x.columns, row_of<T>(s.x, p), s.x.columns);
        if (expert[j] >= 0 && s.bias)
          sum[j] +=
              lane_product<T>(row_of<T>(s.dout, p), (const T *)s.bias + expert[j] * s.bias_stride_e,
                              s.dout.columns);
      }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
#pragma unroll
      for (int j = 0; j < kRows; j++)
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], lanes);
#pragma unroll
    for (int j = 0; j < kRows; j++)
      if (lane == j && first + j < s.num_rows) {
        const uint32_t p = (uint32_t)(first + j), m = p / (uint32_t)s.top_k;
        s.out[m * s.out_stride[0] + (p - m * (uint32_t)s.top_k) * s.out_stride[1]] = sum[j];
      }
  }
}

} // namespace

moelora_status moelora_cuda_weight_gradients(const moelora_weight_gradients *s, moelora_dtype dtype,
                                             const moelora_exec *exec) {
  const int64_t work = (s->num_rows + kWarps * kRows - 1) / (kWarps * kRows);
  return dtype == MOELORA_BF16 ? launch_kernel<weight_gradients<__nv_bfloat16>>(
                                     "weight_gradients", work, kThreads, 0, exec, *s)
                               : launch_kernel<weight_gradients<__half>>("weight_gradients", work,
                                                                         kThreads, 0, exec, *s);
}
