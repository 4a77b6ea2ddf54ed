/* Zeros a gradient that no row contributes to: one CTA per row. */
#include "cuda/backward/backward.h"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace {

constexpr int kThreads = 128;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    zero_gradient(const __grid_constant__ moelora_gradient g) {
  wait_for_previous_kernel();
  start_next_kernel();
  const int64_t rows = (int64_t)g.loras * g.experts * g.rows;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t i = row % g.rows, e = row / g.rows % g.experts, l = row / g.rows / g.experts;
    Word *to = (Word *)g.data + l * g.stride_l + e * g.stride_e + i * g.stride_i;
    for (int64_t column = threadIdx.x; column < g.columns; column += kThreads)
      to[column] = 0;
  }
}

} // namespace

extern "C" moelora_status moelora_cuda_zero_gradient(const moelora_gradient *g,
                                                     const moelora_exec *exec) {
  const int64_t rows = (int64_t)g->loras * g->experts * g->rows;
  if (rows == 0 || g->columns == 0)
    return MOELORA_OK;
  return g->dtype == MOELORA_F32
             ? launch_kernel<zero_gradient<uint32_t>>("zero_gradient", rows, kThreads, 0, exec, *g)
             : launch_kernel<zero_gradient<uint16_t>>("zero_gradient", rows, kThreads, 0, exec, *g);
}
