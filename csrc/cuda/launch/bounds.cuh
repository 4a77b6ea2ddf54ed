/* What ptxas is told about kernels. */
#ifndef MOELORA_CUDA_BOUNDS_CUH
#define MOELORA_CUDA_BOUNDS_CUH

/* CTAs of 256 threads that an SM should hold of kernels that need little more than 32 registers:
 * ptxas for sm_100 stops at 32 by itself, and spills. 0 leaves it the choice. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kLightResident = 6;
#else
constexpr int kLightResident = 0;
#endif

#endif
