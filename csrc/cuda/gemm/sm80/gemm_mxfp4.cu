/* Portable GEMM: MXFP4 weights. */
#include "cuda/gemm/sm80/gemm.cuh"

moelora_status moelora_cuda_gemm_SM80_MXFP4(const moelora_gemm_launch *g,
                                            const moelora_variant *variant,
                                            const moelora_projection_plan *plan,
                                            const moelora_exec *exec) {
  return launch_variant<MOELORA_SM80, MOELORA_KERNEL_MXFP4, LaunchSm80>(g, variant, plan, exec);
}
