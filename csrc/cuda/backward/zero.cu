/* Zeroes a gradient to which no row contributes; of a sparse one, the matrices whose index is in
 * `pairs`. A CTA zeroes a row. */
#include "cuda/backward/gradients.h"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/pdl.cuh"

namespace {

constexpr int kThreads = 128;

struct ZeroLaunch {
  moelora_gradient gradient;
  const int32_t *pairs; // of a sparse gradient
  int64_t rows;
};

template <class Word>
__global__ void __launch_bounds__(kThreads) zero_gradient(const __grid_constant__ ZeroLaunch s) {
  follow_previous_kernel();
  const moelora_gradient &g = s.gradient;
  for (int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
    const int64_t i = row % g.rows, group = row / g.rows;
    const int64_t l = g.sparse ? 0 : group / g.experts;
    const int64_t e = g.sparse ? s.pairs[group] : group % g.experts;
    if (e < 0 || e >= g.experts)
      continue;
    Word *to = (Word *)g.data + l * g.stride_l + e * g.stride_e + i * g.stride_i;
    for (int64_t column = threadIdx.x; column < g.columns; column += kThreads)
      to[column] = 0;
  }
}

} // namespace

moelora_status moelora_cuda_zero_gradient(const moelora_gradient *g, const int32_t *pairs,
                                          int64_t num_pairs, const moelora_exec *exec) {
  const int64_t rows = (g->sparse ? num_pairs : (int64_t)g->loras * g->experts) * g->rows;
  const ZeroLaunch s = {*g, pairs, rows};
  if (rows == 0 || g->columns == 0)
    return MOELORA_OK;
  return g->dtype == MOELORA_F32
             ? launch_kernel<zero_gradient<uint32_t>>("zero_gradient", rows, kThreads, 0, exec, s)
             : launch_kernel<zero_gradient<uint16_t>>("zero_gradient", rows, kThreads, 0, exec, s);
}
