/* Hopper GEMM: INT4 weights of all formats. */
#include "cuda/gemm/sm90/launch.cuh"

moelora_status moelora_cuda_gemm_SM90_INT4(const moelora_gemm_launch *g,
                                           const moelora_variant *variant,
                                           const moelora_projection_plan *plan,
                                           const moelora_exec *exec) {
  return launch_variant<MOELORA_SM90, MOELORA_KERNEL_INT4, LaunchSm90>(g, variant, plan, exec);
}
