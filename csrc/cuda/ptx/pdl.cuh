/* Programmatic dependent launch (PDL): no-ops before sm_90 and in launches without PDL. */
#ifndef MOELORA_CUDA_PTX_PDL_CUH
#define MOELORA_CUDA_PTX_PDL_CUH

/* Lets the next kernel of the stream start, once all CTAs have called this or exited. That kernel
 * must call wait_for_previous_kernel() before it reads what this one writes, or overwrites what
 * this one accesses. */
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the previous kernel has completed and its writes are visible. */
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Waits for the previous kernel, then lets the next one start. PDL is not transitive: without the
 * wait, the next kernel could run before kernels earlier than this one have ended. */
__device__ __forceinline__ void follow_previous_kernel() {
  wait_for_previous_kernel();
  start_next_kernel();
}

#endif
