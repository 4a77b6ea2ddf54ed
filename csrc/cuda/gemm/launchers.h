/* The launchers of the grouped GEMM kernels, one for each row of variants.inc that is built. C that
 * needs nothing of CUDA's headers. */
#ifndef MOELORA_CUDA_GEMM_LAUNCHERS_H
#define MOELORA_CUDA_GEMM_LAUNCHERS_H

#include "core/backend.h"
#include "cuda/variant_ids.h"

#ifdef __cplusplus
extern "C" {
#endif

struct moelora_gemm_launch;
typedef moelora_status moelora_gemm_launcher(const struct moelora_gemm_launch *g,
                                             const moelora_projection_plan *plan,
                                             const moelora_exec *exec);

/* In sources that rows.py makes of the rows. */
#define MOELORA_CUDA_GEMM(NAME, ...) moelora_gemm_launcher moelora_cuda_##NAME;
#include "cuda/variants.inc"

/* By id; NULL: not built (MOELORA_VARIANTS), or no GEMM. */
extern moelora_gemm_launcher *const moelora_cuda_gemm_launchers[MOELORA_CUDA_ROWS];

#ifdef __cplusplus
}
#endif
#endif
