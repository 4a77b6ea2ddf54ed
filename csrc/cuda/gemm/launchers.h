/* Launchers of the grouped GEMM kernels, one for each row of variants.inc that is built. Plain C,
 * without CUDA's headers. */
#ifndef MOELORA_CUDA_GEMM_LAUNCHERS_H
#define MOELORA_CUDA_GEMM_LAUNCHERS_H

#include "core/backend.h"
#include "cuda/variant_ids.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moelora_gemm_launch;
struct moelora_back_launch;
typedef moelora_status moelora_gemm_launcher(const struct moelora_gemm_launch *g,
                                             const moelora_projection_plan *plan,
                                             const moelora_exec *exec);
typedef moelora_status moelora_back_launcher(const struct moelora_back_launch *g,
                                             const moelora_back_product_plan *plan,
                                             const moelora_exec *exec);

/* Defined in sources that rows.py generates. */
#define MOELORA_CUDA_GEMM(NAME, ...)                                                               \
  moelora_gemm_launcher moelora_cuda_##NAME, moelora_cuda_saving_##NAME;
#define MOELORA_CUDA_BACK(NAME, ...) moelora_back_launcher moelora_cuda_##NAME;
#include "cuda/variants.inc"

/* By variant id, NULL if it is not built (MOELORA_VARIANTS) or has another role. Saving ones store
 * what is before the activation, too: native weights, activated projections. */
extern moelora_gemm_launcher *const moelora_cuda_gemm_launchers[MOELORA_CUDA_ROWS];
extern moelora_gemm_launcher *const moelora_cuda_saving_launchers[MOELORA_CUDA_ROWS];
extern moelora_back_launcher *const moelora_cuda_back_launchers[MOELORA_CUDA_ROWS];

#ifdef __cplusplus
}
#endif
#endif
