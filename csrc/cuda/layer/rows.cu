#include "cuda/layer/rows.h"

#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/mma.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_rows(const T *x, int64_t x_stride, const float *weights, int64_t weights_stride, T *out,
               int64_t rows, int64_t k) {
  wait_for_previous_kernel();
  start_next_kernel();
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < rows * k;
       i += (int64_t)gridDim.x * kThreads)
    out[i] = Element<T>::round(weights[i / k * weights_stride] *
                               Element<T>::to_float(x[i / k * x_stride + i % k]));
}

/* One warp per flat row. */
__global__ void __launch_bounds__(kThreads)
    save_rows(const __grid_constant__ moelora_save_launch s) {
  wait_for_previous_kernel();
  start_next_kernel();
  const int lane = threadIdx.x % 32;
  for (int64_t p = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32; p < s.num_rows;
       p += (int64_t)gridDim.x * kWarps) {
    const int32_t position = s.blocks.positions[p];
    const int32_t packed =
        position >= 0 && s.blocks.packed_ranks ? s.blocks.packed_ranks[position] : -1;
    uint16_t *gate_up = (uint16_t *)s.gate_up.rows + p * s.gate_up.stride;
    for (int64_t i = lane; position < 0 && i < s.columns; i += 32)
      gate_up[i] = 0;
    for (int which = 0; which < 2; which++) {
      const moelora_saved_shrink &of = s.projection[which];
      const int rank = packed < 0 ? 0 : min(packed % kRanks, of.max_rank);
      for (int slice = 0; of.to && slice < of.slices; slice++) {
        const uint16_t *from =
            (const uint16_t *)of.xa + ((int64_t)position * of.slices + slice) * of.xa_slice;
        uint16_t *to = (uint16_t *)of.to + p * of.stride[0] + slice * of.stride[1];
        const float unit = (float)(1 << of.missing);
        for (int r = lane; r < of.max_rank; r += 32) {
          const uint16_t bits = r < rank ? from[r] : (uint16_t)0;
          to[r] =
              of.missing == 0
                  ? bits
                  : (uint16_t)(__float_as_uint(__uint_as_float((uint32_t)bits << 16) * unit) >> 16);
        }
      }
    }
  }
}

template <class T>
moelora_status scale(const void *x, int64_t x_stride, const moelora_routes *routes, int64_t k,
                     void *out, const moelora_exec *exec) {
  return launch_kernel<scale_rows<T>>(
      "scale_rows", (routes->num_tokens * k + kThreads - 1) / kThreads, kThreads, 0, exec,
      (const T *)x, x_stride, routes->topk_weights, routes->topk_weights_stride[0], (T *)out,
      routes->num_tokens, k);
}

} // namespace

extern "C" moelora_status moelora_cuda_scale_rows(const void *x, int64_t x_stride,
                                                  const moelora_routes *routes, int64_t k,
                                                  moelora_dtype dtype, void *out,
                                                  const moelora_exec *exec) {
  return dtype == MOELORA_BF16 ? scale<__nv_bfloat16>(x, x_stride, routes, k, out, exec)
                               : scale<__half>(x, x_stride, routes, k, out, exec);
}

extern "C" moelora_status moelora_cuda_save_rows(const moelora_save_launch *s,
                                                 const moelora_exec *exec) {
  return launch_kernel<save_rows>("save_rows", (s->num_rows + kWarps - 1) / kWarps, kThreads, 0,
                                  exec, *s);
}
