/* Grids run sequentially. */
#pragma once

#include <cuda_runtime.h>

inline void start_next_kernel() {}
inline void wait_for_previous_kernel() {}
inline void follow_previous_kernel() {}
