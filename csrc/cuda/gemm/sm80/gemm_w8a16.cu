/* Portable GEMM: FP8 weights of all formats, 16-bit x. */
#include "cuda/gemm/sm80/gemm.cuh"

moelora_status moelora_cuda_gemm_SM80_FP8(const moelora_gemm_launch *g,
                                          const moelora_variant *variant,
                                          const moelora_projection_plan *plan,
                                          const moelora_exec *exec) {
  return launch_variant<MOELORA_SM80, MOELORA_KERNEL_FP8, LaunchSm80>(g, variant, plan, exec);
}
