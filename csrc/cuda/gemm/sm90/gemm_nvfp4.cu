/* Hopper: NVFP4 weights. */
#include "cuda/gemm/sm90/launch.cuh"

moelora_status moelora_cuda_gemm_SM90_NVFP4(const moelora_gemm_launch *g,
                                            const moelora_variant *variant,
                                            const moelora_projection_plan *plan,
                                            const moelora_exec *exec) {
  return launch_variant<MOELORA_SM90, MOELORA_KERNEL_NVFP4, LaunchSm90>(g, variant, plan, exec);
}
