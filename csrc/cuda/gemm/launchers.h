/* Launchers of the grouped GEMM kernels in variants.inc. This header is plain C and includes none
 * of CUDA's headers. */
#pragma once

#include "core/backend.h"
#include "cuda/variant_ids.h"

MOELORA_BEGIN_C

struct moelora_gemm_launch;
struct moelora_back_launch;
typedef moelora_status moelora_gemm_launcher(const struct moelora_gemm_launch *g,
                                             const moelora_projection_plan *plan,
                                             const moelora_exec *exec);
typedef moelora_status moelora_back_launcher(const struct moelora_back_launch *g,
                                             const moelora_back_product_plan *plan,
                                             const moelora_exec *exec);

/* Launchers of all variants; rows.py generates the sources that define those that are built. */
#define MOELORA_CUDA_GEMM(STEM, ...)                                                               \
  moelora_gemm_launcher moelora_cuda_gemm_bf16_##STEM, moelora_cuda_saving_gemm_bf16_##STEM,       \
      moelora_cuda_gemm_f16_##STEM, moelora_cuda_saving_gemm_f16_##STEM;
#define MOELORA_CUDA_BACK(STEM, ...)                                                               \
  moelora_back_launcher moelora_cuda_back_bf16_##STEM, moelora_cuda_back_f16_##STEM;
#include "cuda/variants.inc"

/* Launchers by variant id; NULL if the variant is not built (MOELORA_VARIANTS) or has no such
 * kernel. A saving launcher also stores the values before the activation in g->before. On Hopper,
 * it instead stores the outputs of a PLAIN epilogue by flat row if g->before.rows is NULL. */
extern moelora_gemm_launcher *const moelora_cuda_gemm_launchers[MOELORA_CUDA_ROWS];
extern moelora_gemm_launcher *const moelora_cuda_saving_launchers[MOELORA_CUDA_ROWS];
extern moelora_back_launcher *const moelora_cuda_back_launchers[MOELORA_CUDA_ROWS];

MOELORA_END_C
