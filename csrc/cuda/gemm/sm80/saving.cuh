/* Launches activated projections that also store the values before the activation, on sm_80 and up.
 */
#ifndef MOELORA_CUDA_SM80_SAVING_CUH
#define MOELORA_CUDA_SM80_SAVING_CUH

#include "cuda/gemm/sm80/gemm.cuh"

namespace {

template <class E> struct Saving : E {
  static constexpr bool SAVES = true;
};

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
struct LaunchSaving {
  using E = Saving<StageExtent<BLOCK_M, BLOCK_N / 64, FORMAT>>;

  static moelora_status run(const moelora_gemm_launch *g, const moelora_projection_plan *plan,
                            const moelora_exec *exec) {
    return KernelSm80<E, T, STAGES>::run(g, plan->vectors, exec);
  }
};

} // namespace

#endif
