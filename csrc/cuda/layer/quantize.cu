/* Rows of x, or of h, in e4m3 (moelora_x_format in moelora.h has the rule; the quotients are those
 * of vLLM's kernels, bit for bit):
 *
 *   s = the scale of a group of depth, of a row, or given
 *   values[row] = e4m3(x[row] / s), scales[group, row] = s
 *
 * A warp takes GROUPS tiles of 128 columns of a row. Of 16 columns a lane has the four that it is
 * to have of a tile of weights: 2q, 2q + 1, 2q + 8 and 2q + 9, q = lane % 4. What is left over of
 * the last 128 columns is zero. */
#include <cuda_fp8.h>

#include "core/format.h"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/mma.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int GROUPS = 4; // tiles that a warp has on their way at once
constexpr float MOST = 448.f;

/* Elements `at` and at + 1 of a row. */
template <class T, bool PAIRS>
__device__ __forceinline__ float2 load_two(const T *row, int at, int k) {
  if (PAIRS && at < k) {
    const uint32_t two = *(const uint32_t *)(row + at);
    const T *v = (const T *)&two;
    return make_float2(Element<T>::to_float(v[0]), Element<T>::to_float(v[1]));
  }
  return make_float2(at < k ? Element<T>::to_float(row[at]) : 0.f,
                     at + 1 < k ? Element<T>::to_float(row[at + 1]) : 0.f);
}

__device__ __forceinline__ float largest(float most, float4 v) {
  return fmaxf(fmaxf(fmaxf(most, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
}

/* Of LANES neighbouring lanes. */
template <int LANES> __device__ __forceinline__ float largest_of(float most) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2)
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  return most;
}

__device__ __forceinline__ uint32_t e4m3_of(float4 v) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v.x, v.y), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v.z, v.w), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

/* Two e4m3 numbers as elements. */
template <class T> __device__ __forceinline__ uint32_t elements_of(uint32_t two) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3);
  const float2 v = __half22float2(*(const __half2 *)&raw);
  return pack2<T>(v.x, v.y);
}

/* The four columns of this lane in tile `tile` of a row. */
template <class T, bool PAIRS>
__device__ __forceinline__ float4 load_columns(const T *row, int tile, int k) {
  const int lane = threadIdx.x & 31, at = tile * 128 + lane / 4 * 16 + lane % 4 * 2;
  const float2 low = load_two<T, PAIRS>(row, at, k), high = load_two<T, PAIRS>(row, at + 8, k);
  return make_float4(low.x, low.y, high.x, high.y);
}

template <class T, bool BYTES, bool PAIRS>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(const __grid_constant__ moelora_quantize_launch q) {
  wait_for_previous_kernel();
  start_next_kernel();
  const int lane = threadIdx.x & 31, tiles = (q.k + 127) / 128;
  const bool halves = moelora_x_group(q.format) == 64, by_token = q.rule == MOELORA_X_TOKEN;
  const int64_t rows = q.num_rows ? *q.num_rows : q.rows;
  const int spans = by_token ? 1 : (tiles + GROUPS - 1) / GROUPS;
  const int64_t warps = (int64_t)gridDim.x * (kThreads / 32);
  for (int64_t i = (int64_t)blockIdx.x * (kThreads / 32) + threadIdx.x / 32; i < rows * spans;
       i += warps) {
    const int64_t row = i / spans;
    const T *x = (const T *)q.x + row * q.x_stride;
    float scale = q.x_scale;
    if (by_token) {
      float most = 0.f;
#pragma unroll 4
      for (int tile = 0; tile < tiles; tile++)
        most = largest(most, load_columns<T, PAIRS>(x, tile, q.k));
      scale = fmaxf(largest_of<32>(most) / MOST, 1.f / (MOST * 512.f));
    }
    const int begin = i % spans * GROUPS, end = by_token ? tiles : min(begin + GROUPS, tiles);
    for (int first = begin; first < end; first += GROUPS) {
      float4 v[GROUPS];
#pragma unroll
      for (int j = 0; j < GROUPS; j++)
        v[j] = first + j < end ? load_columns<T, PAIRS>(x, first + j, q.k) : float4{};
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        const int tile = first + j;
        if (tile >= end)
          break;
        if (q.rule == MOELORA_X_GROUP) {
          float most = largest_of<16>(largest(1e-10f, v[j]));
          if (!halves)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 16));
          scale = most / MOST;
        }
        if (by_token) {
          v[j].x /= scale, v[j].y /= scale, v[j].z /= scale, v[j].w /= scale;
        } else {
          const float inverse = 1.f / scale;
          v[j].x *= inverse, v[j].y *= inverse, v[j].z *= inverse, v[j].w *= inverse;
        }
        const uint32_t word = e4m3_of(v[j]);
        if (BYTES) {
          ((uint32_t *)((uint8_t *)q.values + row * q.values_stride))[tile * 32 + lane] = word;
        } else {
          T *to = (T *)q.values + row * q.values_stride + tile * 128 + lane / 4 * 16 + lane % 4 * 2;
          *(uint32_t *)to = elements_of<T>(word & 0xffff);
          *(uint32_t *)(to + 8) = elements_of<T>(word >> 16);
        }
        const int groups = halves ? 2 : 1;
        if (lane % (32 / groups) == 0)
          q.scales[(tile * groups + lane / 16) * q.rows + row] = scale;
      }
    }
  }
}

template <class T, bool BYTES>
moelora_status launch(const moelora_quantize_launch *q, const moelora_exec *exec) {
  const bool pairs = (uintptr_t)q->x % 4 == 0 && q->x_stride % 2 == 0 && q->k % 2 == 0;
  const int64_t spans = q->rule == MOELORA_X_TOKEN ? 1 : (q->k + 128 * GROUPS - 1) / (128 * GROUPS);
  const int64_t work = (q->rows * spans + kThreads / 32 - 1) / (kThreads / 32);
  return pairs ? launch_kernel<quantize_rows<T, BYTES, true>>("quantize_rows", work, kThreads, 0,
                                                              exec, *q)
               : launch_kernel<quantize_rows<T, BYTES, false>>("quantize_rows", work, kThreads, 0,
                                                               exec, *q);
}

} // namespace

moelora_status moelora_cuda_quantize_rows(const moelora_quantize_launch *q,
                                          const moelora_exec *exec) {
  if (q->dtype == MOELORA_BF16)
    return q->bytes ? launch<__nv_bfloat16, true>(q, exec) : launch<__nv_bfloat16, false>(q, exec);
  return q->bytes ? launch<__half, true>(q, exec) : launch<__half, false>(q, exec);
}
