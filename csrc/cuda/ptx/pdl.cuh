/* Programmatic dependent launch (PDL). No-ops before sm_90, and after an ordinary launch. */
#ifndef MOELORA_CUDA_PTX_PDL_CUH
#define MOELORA_CUDA_PTX_PDL_CUH

/* Lets the next kernel of the stream start. It must call wait_for_previous_kernel() before it
 * accesses memory that this kernel reads or writes. */
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until all writes of the previous kernel are visible. */
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
