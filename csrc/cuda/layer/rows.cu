/* Copies and zeroes rows, with a warp per row; see rows.h. */
#include "cuda/layer/rows.h"

#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/mma.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct CopyParams {
  moelora_row_copy copy;
  const int32_t *experts; // [P] -1: skipped
  const float *weights;   // NULL: 1
  int64_t weights_stride[2], rows;
  int32_t top_k;
};

/* A warp copies a row; a lane copies WIDTH elements at a time, 16 bytes or one element. */
template <class T, int WIDTH>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ CopyParams s) {
  follow_previous_kernel();
  const moelora_row_copy &c = s.copy;
  for (int64_t p = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32; p < s.rows;
       p += (int64_t)gridDim.x * kWarps) {
    const int64_t m = p / s.top_k, j = p % s.top_k;
    const bool valid = s.experts[p] >= 0;
    const float weight =
        valid && s.weights ? s.weights[m * s.weights_stride[0] + j * s.weights_stride[1]] : 1.f;
    const T *from = (const T *)c.from + m * c.from_stride[0] + j * c.from_stride[1];
    T *to = (T *)c.to + p * c.to_stride;
    for (int64_t i = threadIdx.x % 32 * WIDTH; i < c.columns; i += 32 * WIDTH) {
      __align__(16) T values[WIDTH];
      if constexpr (WIDTH > 1)
        *(uint4 *)values = valid ? *(const uint4 *)(from + i) : make_uint4(0, 0, 0, 0);
      else
        values[0] = valid ? from[i] : Element<T>::round(0.f);
      if (valid && s.weights)
#pragma unroll
        for (int q = 0; q < WIDTH; q++)
          values[q] = Element<T>::round(weight * Element<T>::to_float(values[q]));
      if constexpr (WIDTH > 1)
        store_global_16(to + i, *(const uint4 *)values);
      else
        to[i] = values[0];
    }
  }
}

/* Zeroes the skipped rows, with one warp per flat row. */
__global__ void __launch_bounds__(kThreads)
    zero_skipped(const int32_t *experts, int32_t rows, int32_t top_k, uint16_t *out,
                 int64_t stride_m, int64_t stride_j, int64_t n) {
  follow_previous_kernel();
  const int64_t warps = (int64_t)gridDim.x * kWarps;
  for (int64_t p = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32; p < rows; p += warps) {
    if (experts[p] >= 0)
      continue;
    uint16_t *row = out + p / top_k * stride_m + p % top_k * stride_j;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32)
      row[i] = 0;
  }
}

/* Saves shrink outputs, and zeroes skipped rows, with one warp per flat row. */
__global__ void __launch_bounds__(kThreads)
    save_rows(const __grid_constant__ moelora_save_launch s) {
  follow_previous_kernel();
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
        const float unit = (float)(1 << of.deferred_exponent);
        for (int r = lane; r < of.max_rank; r += 32) {
          const uint16_t bits = r < rank ? from[r] : (uint16_t)0;
          to[r] =
              of.deferred_exponent == 0
                  ? bits
                  : (uint16_t)(__float_as_uint(__uint_as_float((uint32_t)bits << 16) * unit) >> 16);
        }
      }
    }
  }
}

int64_t blocks_for(int64_t rows) {
  return (rows + kWarps - 1) / kWarps;
}

template <class T> moelora_status copy(const CopyParams &s, const moelora_exec *exec) {
  const moelora_row_copy &c = s.copy;
  const bool vectors = moelora_is_vector_row(c.from, c.from_stride[0], c.columns) &&
                       c.from_stride[1] % 8 == 0 &&
                       moelora_is_vector_row(c.to, c.to_stride, c.columns);
  return vectors
             ? launch_kernel<copy_rows<T, 8>>("copy_rows", blocks_for(s.rows), kThreads, 0, exec, s)
             : launch_kernel<copy_rows<T, 1>>("copy_rows", blocks_for(s.rows), kThreads, 0, exec,
                                              s);
}

} // namespace

moelora_status moelora_cuda_copy_rows(const moelora_row_copy *c, const moelora_routes *routes,
                                      moelora_dtype dtype, const moelora_exec *exec) {
  const CopyParams s = {*c,
                        (const int32_t *)routes->topk_ids.data,
                        c->weighted ? routes->topk_weights : nullptr,
                        {routes->topk_weights_stride[0], routes->topk_weights_stride[1]},
                        routes->num_rows,
                        routes->top_k};
  return dtype == MOELORA_BF16 ? copy<__nv_bfloat16>(s, exec) : copy<__half>(s, exec);
}

moelora_status moelora_cuda_zero_skipped(const moelora_routes *routes, void *out,
                                         const int64_t stride[2], int64_t columns,
                                         const moelora_exec *exec) {
  return launch_kernel<zero_skipped>("zero_skipped", blocks_for(routes->num_rows), kThreads, 0,
                                     exec, (const int32_t *)routes->topk_ids.data,
                                     (int32_t)routes->num_rows, routes->top_k, (uint16_t *)out,
                                     stride[0], stride[1], columns);
}

moelora_status moelora_cuda_save_rows(const moelora_save_launch *s, const moelora_exec *exec) {
  return launch_kernel<save_rows>("save_rows", blocks_for(s->num_rows), kThreads, 0, exec, *s);
}
