/* Slots of the backend's table that no other CUDA file calls. */
#ifndef MOELORA_CUDA_BACKEND_H
#define MOELORA_CUDA_BACKEND_H

#include "core/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* align.cu */
size_t moelora_cuda_align_workspace(const moelora_align_problem *problem);
moelora_status moelora_cuda_align(const moelora_align_problem *problem, const moelora_exec *exec);

/* pack.cu */
moelora_status moelora_cuda_pack(const moelora_pack_problem *problem, const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
