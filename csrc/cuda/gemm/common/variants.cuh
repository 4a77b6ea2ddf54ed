/* Maps a variant id to a kernel of one family and weight format: launch_variant<FAMILY, FORMAT,
 * Launch> calls Launch<FORMAT, T, BLOCK_M, BLOCK_N, STAGES, CLUSTER>::run(g, plan, exec). */
#ifndef MOELORA_CUDA_VARIANTS_CUH
#define MOELORA_CUDA_VARIANTS_CUH

#include "cuda/launch/launch.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/variant_ids.h"

namespace {

using BF16 = __nv_bfloat16;
using F16 = __half;

template <moelora_family FAMILY, moelora_kernel_format FORMAT,
          template <moelora_kernel_format, class, int, int, int, int> class Launch>
moelora_status launch_variant(const moelora_gemm_launch *g, const moelora_variant *variant,
                              const moelora_projection_plan *plan, const moelora_exec *exec) {
  switch (variant->id) {
#define MOELORA_CUDA_GEMM(NAME, DTYPE, ROW_FORMAT, ROW_FAMILY, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,  \
                          CLUSTER)                                                                 \
  case CUDA_##NAME:                                                                                \
    if constexpr (FAMILY == MOELORA_##ROW_FAMILY && FORMAT == MOELORA_KERNEL_##ROW_FORMAT)         \
      return Launch<FORMAT, DTYPE, BLOCK_M, BLOCK_N, STAGES, CLUSTER>::run(g, plan, exec);         \
    break;
#include "cuda/variants.inc"
  }
  return moelora_no_kernel(variant->name, "is not of this family and weight format");
}

} // namespace

#endif
