/* Addresses of the rows of LoRA factors. */
#ifndef MOELORA_CUDA_FACTORS_CUH
#define MOELORA_CUDA_FACTORS_CUH

#include "core/backend.h"

/* Returns the address of row i of a factor. */
template <class T>
__device__ __forceinline__ const T *factor_row(const moelora_factor &f, int64_t adapter,
                                               int64_t expert, int64_t i) {
  return (const T *)f.data + adapter * f.stride_l + expert * f.stride_e + i * f.stride_i;
}

#endif
