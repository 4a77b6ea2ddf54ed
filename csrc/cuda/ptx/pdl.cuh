/* Programmatic dependent launch. Nothing happens before sm_90, or after an ordinary launch. */
#ifndef MOELORA_CUDA_PTX_PDL_CUH
#define MOELORA_CUDA_PTX_PDL_CUH

/* The next kernel of the stream may start, and must wait before it touches memory that this one
 * writes or reads. */
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Until all of the previous kernel's writes are visible. */
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
