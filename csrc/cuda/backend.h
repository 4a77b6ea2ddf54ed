/* Functions of the backend's table that no other CUDA file calls. */
#ifndef MOELORA_CUDA_BACKEND_H
#define MOELORA_CUDA_BACKEND_H

#include "core/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* align/align.cu */
size_t moelora_cuda_align_workspace(const moelora_align_problem *problem,
                                    const moelora_align_plan *plan, const moelora_exec *exec);
moelora_status moelora_cuda_align(const moelora_align_problem *problem,
                                  const moelora_align_plan *plan, const moelora_exec *exec);

/* delta/delta.cu */
size_t moelora_cuda_delta_workspace(const moelora_delta_problem *problem,
                                    const moelora_delta_plan *plan, const moelora_exec *exec);
moelora_status moelora_cuda_delta(const moelora_delta_problem *problem,
                                  const moelora_delta_plan *plan, const moelora_exec *exec);
size_t moelora_cuda_mlp_delta_workspace(const moelora_mlp_delta_problem *problem,
                                        const moelora_delta_plan *plan, const moelora_exec *exec);
moelora_status moelora_cuda_mlp_delta(const moelora_mlp_delta_problem *problem,
                                      const moelora_delta_plan *plan, const moelora_exec *exec);

/* align/lists.cu */
size_t moelora_cuda_align_lists_workspace(const moelora_align_lists_problem *problem,
                                          const moelora_align_plan *plan, const moelora_exec *exec);
moelora_status moelora_cuda_align_lists(const moelora_align_lists_problem *problem,
                                        const moelora_align_plan *plan, const moelora_exec *exec);

/* layer/pack.cu */
moelora_status moelora_cuda_pack(const moelora_pack_problem *problem, const moelora_exec *exec);

/* layer/quantized.cu */
moelora_status moelora_cuda_pack_quantized(const moelora_quantized_problem *problem,
                                           const moelora_exec *exec);
moelora_status moelora_cuda_unpack_quantized(const moelora_quantized_problem *problem,
                                             const moelora_exec *exec);

/* layer/quantized_fp8.cu */
moelora_status moelora_cuda_pack_fp8(const moelora_quantized_problem *problem,
                                     const moelora_exec *exec);
moelora_status moelora_cuda_unpack_fp8(const moelora_quantized_problem *problem,
                                       const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
