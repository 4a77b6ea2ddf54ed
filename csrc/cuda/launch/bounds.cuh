/* Launch bounds of small kernels. */
#ifndef MOELORA_CUDA_BOUNDS_CUH
#define MOELORA_CUDA_BOUNDS_CUH

/* CTAs of 256 threads per SM for kernels that need little more than 32 registers: by itself, ptxas
 * for sm_100 limits them to 32 and spills. 0: ptxas chooses. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kLightResident = 6;
#else
constexpr int kLightResident = 0;
#endif

#endif
