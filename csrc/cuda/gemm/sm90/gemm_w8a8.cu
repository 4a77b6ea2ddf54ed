/* Hopper GEMM: FP8 weights and FP8 tokens. */
#include "cuda/gemm/sm90/launch.cuh"

moelora_status moelora_cuda_gemm_SM90_W8A8(const moelora_gemm_launch *g,
                                           const moelora_variant *variant,
                                           const moelora_projection_plan *plan,
                                           const moelora_exec *exec) {
  return launch_variant<MOELORA_SM90, MOELORA_KERNEL_W8A8, LaunchSm90>(g, variant, plan, exec);
}
