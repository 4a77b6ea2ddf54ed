/* Gradients of biases: bias[e] (+)= sum over all rows of expert e, with and without adapters.
 *
 * A CTA sums kColumns columns of one expert with 16 teams (`lane`) of 16 threads; a thread has 8
 * columns. Team i % 16 adds row i of the expert, and the sums of the 16 teams are added in order,
 * so the order of additions only depends on the expert's rows. */
#include "cuda/align/align.cuh"
#include "cuda/backward/gradient_tile.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kThreads = 256, kLanes = kThreads / (kColumns / 8);

struct BiasLaunch {
  moelora_gradient_operand rows;
  moelora_gradient gradient;
  moelora_blocks blocks;
  const float *weights; // NULL: 1
  int64_t weights_stride[2];
  int32_t columns, column_tiles, num_rows, num_experts;
  moelora_divisor top_k;
  bool accumulate, vectors;
};

template <class T>
__device__ __forceinline__ void add_row(const BiasLaunch &s, int position, int column,
                                        float (&sum)[8]) {
  const int row = s.blocks.sorted_ids[position];
  if (row >= s.num_rows)
    return;
  const int token = (int)divide((uint32_t)row, s.top_k);
  const int64_t from = s.rows.index == MOELORA_ROW_POSITION ? position
                       : s.rows.index == MOELORA_ROW_FLAT   ? row
                                                            : token;
  const T *at = (const T *)s.rows.data + from * s.rows.stride + column;
  const uint4 v = s.vectors ? *(const uint4 *)at : load_elements(at, s.columns - column);
  const float weight = s.weights
                           ? s.weights[token * s.weights_stride[0] +
                                       (row - token * (int)s.top_k.value) * s.weights_stride[1]]
                           : 1.f;
  const T *values = (const T *)&v;
#pragma unroll
  for (int i = 0; i < 8; i++)
    sum[i] += weight * Element<T>::to_float(values[i]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) bias_gradient(const __grid_constant__ BiasLaunch s) {
  __shared__ float sums[kLanes][kColumns];
  follow_previous_kernel();
  const int lane = threadIdx.x / (kColumns / 8), own = threadIdx.x % (kColumns / 8) * 8;
  const int used = *s.blocks.num_post / s.blocks.rows;
  for (int64_t work = blockIdx.x; work < (int64_t)s.num_experts * s.column_tiles;
       work += gridDim.x) {
    const int expert = (int)(work / s.column_tiles);
    const int first = (int)(work % s.column_tiles) * kColumns;
    const int begin = lower_bound(used, [&](int b) { return s.blocks.expert_ids[b] < expert; });
    const int end = lower_bound(used, [&](int b) { return s.blocks.expert_ids[b] < expert + 1; });
    if (begin == end && s.accumulate)
      continue;
    float sum[8] = {};
    if (begin < end && first + own < s.columns) {
      const int share = s.blocks.counts[begin], rows = (end - begin) * share;
#pragma unroll 4
      for (int i = lane; i < rows; i += kLanes)
        add_row<T>(s, (begin + i / share) * s.blocks.rows + i % share, first + own, sum);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      sums[lane][own + i] = sum[i];
    __syncthreads();
    const int column = first + (int)threadIdx.x;
    if (threadIdx.x < kColumns && column < s.columns) {
      float all[1] = {0.f};
      for (int i = 0; i < kLanes; i++)
        all[0] += sums[i][threadIdx.x];
      const int64_t to = expert * s.gradient.stride_e + column;
      if (s.gradient.dtype == MOELORA_F32)
        put<1>((float *)s.gradient.data + to, all, 1, s.accumulate);
      else
        put<1>((T *)s.gradient.data + to, all, 1, s.accumulate);
    }
    __syncthreads();
  }
}

} // namespace

moelora_status moelora_cuda_bias_gradient(const moelora_bias_launch *b,
                                          const moelora_routes *routes,
                                          const moelora_blocks *blocks, const moelora_exec *exec) {
  BiasLaunch s = {};
  s.rows = b->rows;
  s.gradient = b->gradient;
  s.blocks = *blocks;
  s.weights = b->weighted ? routes->topk_weights : nullptr;
  s.weights_stride[0] = routes->topk_weights_stride[0];
  s.weights_stride[1] = routes->topk_weights_stride[1];
  s.columns = (int32_t)b->columns;
  s.column_tiles = (s.columns + kColumns - 1) / kColumns;
  s.num_rows = (int32_t)routes->num_rows;
  s.num_experts = routes->num_experts;
  s.top_k = moelora_divisor_of((uint32_t)routes->top_k);
  s.accumulate = b->accumulate;
  s.vectors = moelora_is_vector_row(b->rows.data, b->rows.stride, b->columns);
  const int64_t work = (int64_t)s.num_experts * s.column_tiles;
  if (b->dtype == MOELORA_BF16)
    return launch_kernel<bias_gradient<__nv_bfloat16>>("bias_gradient", work, kThreads, 0, exec, s);
  return launch_kernel<bias_gradient<__half>>("bias_gradient", work, kThreads, 0, exec, s);
}
