/* Grids run sequentially. */
#ifndef MOELORA_CUDA_PTX_PDL_CUH
#define MOELORA_CUDA_PTX_PDL_CUH

#include <cuda_runtime.h>

inline void start_next_kernel() {}
inline void wait_for_previous_kernel() {}
inline void follow_previous_kernel() {}

#endif
