/* Launches kernels, with dynamic shared memory, clusters, programmatic dependent launch (PDL). */
#pragma once

#include "cuda/launch/launch.h"

/* Bytes of shared memory per CTA that all GPUs from sm_80 on support. */
constexpr size_t kPortableShared = 99 * 1024;

/* Minimum CTAs per SM, for the __launch_bounds__ of 256-thread kernels that need slightly more than
 * 32 registers; 0: ptxas chooses. For sm_100, it would choose 32 registers and spill. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kLightResident = 6;
#else
constexpr int kLightResident = 0;
#endif

inline cudaLaunchAttribute cluster_of(unsigned blocks) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  return attribute;
}

inline cudaLaunchConfig_t config_of(int64_t blocks, int threads, size_t shared_bytes,
                                    const moelora_exec *exec, cudaLaunchAttribute *attributes,
                                    unsigned num_attributes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = (cudaStream_t)exec->stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  return config;
}

/* Allows KERNEL the maximum dynamic shared memory of a CTA. The limit is set once per device,
 * independent of the launch, because another thread may be about to launch with more. */
template <auto KERNEL> cudaError_t allow_all_shared(const moelora_exec *exec) {
  static bool allowed[MOELORA_MAX_DEVICES];
  bool *done = &allowed[exec->device_index];
  if (__atomic_load_n(done, __ATOMIC_ACQUIRE))
    return cudaSuccess;
  int most = 0;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, KERNEL);
  if (error == cudaSuccess)
    error =
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, exec->device_index);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - (int)attributes.sharedSizeBytes);
  __atomic_store_n(done, error == cudaSuccess, __ATOMIC_RELEASE);
  return error;
}

/* Sets `blocks` to the number of blocks of KERNEL, in clusters of CLUSTER, that are resident at
 * once on the device of `exec`. Asks the driver, since clusters may not fill a GPC. One query per
 * device suffices, since all launches of a kernel on a device have the same threads and shared
 * memory; concurrent calls write the same values. */
template <auto KERNEL, int CLUSTER = 1>
cudaError_t resident_blocks(int threads, size_t shared_bytes, const moelora_exec *exec,
                            int64_t *blocks) {
  static int32_t cache[MOELORA_MAX_DEVICES];
  int32_t *known = &cache[exec->device_index];
  *blocks = __atomic_load_n(known, __ATOMIC_ACQUIRE);
  if (*blocks == 0) {
    cudaError_t error = allow_all_shared<KERNEL>(exec);
    int count = 0;
    if (error == cudaSuccess && CLUSTER > 1) {
      cudaLaunchAttribute cluster = cluster_of(CLUSTER);
      const cudaLaunchConfig_t config =
          config_of(CLUSTER, threads, shared_bytes, exec, &cluster, 1);
      error = cudaOccupancyMaxActiveClusters(&count, KERNEL, &config);
    } else if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, KERNEL, threads, shared_bytes);
      count *= moelora_cuda_num_sms(exec->device_index);
    }
    if (error != cudaSuccess)
      return error;
    *blocks = (count > 0 ? count : 1) * CLUSTER;
    __atomic_store_n(known, (int32_t)*blocks, __ATOMIC_RELEASE);
  }
  return cudaSuccess;
}

/* Launches KERNEL(args...) with `blocks` blocks, in clusters of CLUSTER. With OVERLAPS (PDL), the
 * kernel may start while the previous kernel drains. Then it must call wait_for_previous_kernel()
 * before it reads what that kernel writes, or writes what that kernel accesses. */
template <auto KERNEL, int CLUSTER = 1, bool OVERLAPS = true, class... Args>
moelora_status launch_blocks(const char *name, int64_t blocks, int threads, size_t shared_bytes,
                             const moelora_exec *exec, Args... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (OVERLAPS && moelora_cuda_can_overlap(exec->device_index)) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (CLUSTER > 1)
    attributes[count++] = cluster_of(CLUSTER);
  const cudaLaunchConfig_t config =
      config_of(blocks, threads, shared_bytes, exec, attributes, count);
  return moelora_cuda_check(cudaLaunchKernelEx(&config, KERNEL, args...), name);
}

/* Launches `work` blocks, or the most that a grid allows, without PDL. */
template <auto KERNEL, class... Args>
moelora_status launch_grid(const char *name, int64_t work, int threads, const moelora_exec *exec,
                           Args... args) {
  if (work == 0)
    return MOELORA_OK;
  return launch_blocks<KERNEL, 1, false>(name, work < INT32_MAX ? work : INT32_MAX, threads, 0,
                                         exec, args...);
}

/* Bytes of dynamic shared memory that need no opt-in: 48 KiB, less 8 KiB for static memory. */
constexpr size_t kDefaultShared = (48 - 8) << 10;

/* Calls launch_blocks(), after an opt-in if shared memory exceeds kDefaultShared. */
template <auto KERNEL, class... Args>
moelora_status launch_sized(const char *name, int64_t blocks, int threads, size_t shared_bytes,
                            const moelora_exec *exec, Args... args) {
  if (shared_bytes > kDefaultShared)
    MOELORA_TRY(moelora_cuda_check(allow_all_shared<KERNEL>(exec), name));
  return launch_blocks<KERNEL>(name, blocks, threads, shared_bytes, exec, args...);
}

/* Launches `work` blocks, but at most `waves` times as many as are resident at once. The blocks
 * must loop over all of `work`. */
template <auto KERNEL, int CLUSTER = 1, class... Args>
moelora_status launch_waves(int waves, const char *name, int64_t work, int threads,
                            size_t shared_bytes, const moelora_exec *exec, Args... args) {
  if (work == 0)
    return MOELORA_OK;
  int64_t resident = 0;
  MOELORA_TRY(moelora_cuda_check(
      resident_blocks<KERNEL, CLUSTER>(threads, shared_bytes, exec, &resident), name));
  const int64_t blocks = (work < waves * resident ? work : waves * resident) / CLUSTER * CLUSTER;
  return launch_blocks<KERNEL, CLUSTER>(name, blocks, threads, shared_bytes, exec, args...);
}

/* Launches one wave: all blocks are resident at once. */
template <auto KERNEL, int CLUSTER = 1, class... Args>
moelora_status launch_kernel(const char *name, int64_t work, int threads, size_t shared_bytes,
                             const moelora_exec *exec, Args... args) {
  return launch_waves<KERNEL, CLUSTER>(1, name, work, threads, shared_bytes, exec, args...);
}

/* Launches like launch_kernel(), but with MOELORA_GRID_SPREAD without PDL if `work` does not fill
 * the GPU. With PDL, the SMs that the previous kernel frees first could get all blocks, and the
 * other SMs none. */
template <auto KERNEL, class... Args>
moelora_status launch_planned(moelora_grid_plan grid, const char *name, int64_t work, int threads,
                              size_t shared_bytes, const moelora_exec *exec, Args... args) {
  int64_t resident = 0;
  if (grid == MOELORA_GRID_SPREAD)
    MOELORA_TRY(
        moelora_cuda_check(resident_blocks<KERNEL>(threads, shared_bytes, exec, &resident), name));
  if (work > 0 && work < resident)
    return launch_blocks<KERNEL, 1, false>(name, work, threads, shared_bytes, exec, args...);
  return launch_kernel<KERNEL>(name, work, threads, shared_bytes, exec, args...);
}

/* Launches KERNEL(args...) cooperatively, with at most `per_sm` blocks per SM and at most `work`
 * blocks, without PDL. Sets `fits` to false, and launches nothing, if not all blocks can be
 * resident: a green context has fewer SMs than the device. */
template <auto KERNEL, class... Args>
moelora_status launch_cooperative(const char *name, int64_t work, int threads, size_t shared_bytes,
                                  int per_sm, const moelora_exec *exec, bool *fits, Args... args) {
  int64_t resident = 0;
  MOELORA_TRY(
      moelora_cuda_check(resident_blocks<KERNEL>(threads, shared_bytes, exec, &resident), name));
  const int64_t most = (int64_t)per_sm * moelora_cuda_num_sms(exec->device_index);
  resident = resident < most ? resident : most;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  const cudaLaunchConfig_t config =
      config_of(work < resident ? work : resident, threads, shared_bytes, exec, &attribute, 1);
  const cudaError_t error = cudaLaunchKernelEx(&config, KERNEL, args...);
  *fits = error != cudaErrorCooperativeLaunchTooLarge;
  if (!*fits) {
    cudaGetLastError(); /* clear the error */
    return MOELORA_OK;
  }
  return moelora_cuda_check(error, name);
}
