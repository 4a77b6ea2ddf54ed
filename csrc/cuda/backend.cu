/* Function table of the CUDA backend, and device queries. */
#include "cuda/launch/launch.h"

moelora_status moelora_cuda_check(cudaError_t error, const char *what) {
  if (error == cudaSuccess)
    return MOELORA_OK;
  cudaGetLastError(); /* clear the error: the next call must not report it */
  return moelora_fail(MOELORA_DEVICE_ERROR, "%s: %s (%s)", what, cudaGetErrorName(error),
                      cudaGetErrorString(error));
}

static moelora_status attribute(cudaDeviceAttr name, int32_t device, int *value) {
  return moelora_cuda_check(cudaDeviceGetAttribute(value, name, device), "cudaDeviceGetAttribute");
}

static __global__ void loaded_code() {}

/* Tests the loaded code, not the compute capability: a GPU newer than this build may run
 * portable code, which has no griddepcontrol.wait and must never start early. */
static moelora_status query_overlap(bool *overlaps) {
  cudaFuncAttributes code = {};
  const cudaError_t error = cudaFuncGetAttributes(&code, loaded_code);
  *overlaps = code.ptxVersion >= 90;
  return moelora_cuda_check(error, "cudaFuncGetAttributes");
}

static moelora_status count_devices(int32_t *count) {
  int devices = 0;
  MOELORA_TRY(moelora_cuda_check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount"));
  *count = devices;
  return MOELORA_OK;
}

/* Kernel launches and function attributes use the current device, not the stream's. */
static moelora_status enter(int32_t device_index, int32_t *outer) {
  int current = 0;
  MOELORA_TRY(moelora_cuda_check(cudaGetDevice(&current), "cudaGetDevice"));
  *outer = current;
  return current == device_index ? MOELORA_OK
                                 : moelora_cuda_check(cudaSetDevice(device_index), "cudaSetDevice");
}

static moelora_status leave(int32_t device_index, int32_t outer) {
  return outer == device_index ? MOELORA_OK
                               : moelora_cuda_check(cudaSetDevice(outer), "cudaSetDevice");
}

static moelora_status device_info(int32_t device_index, moelora_device_info *info) {
  int major = 0, minor = 0, sms = 0, l2 = 0, shared = 0, clock = 0, khz = 0, bits = 0;
  MOELORA_TRY(attribute(cudaDevAttrComputeCapabilityMajor, device_index, &major));
  MOELORA_TRY(attribute(cudaDevAttrComputeCapabilityMinor, device_index, &minor));
  MOELORA_TRY(attribute(cudaDevAttrMultiProcessorCount, device_index, &sms));
  MOELORA_TRY(attribute(cudaDevAttrL2CacheSize, device_index, &l2));
  MOELORA_TRY(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index, &shared));
  MOELORA_TRY(attribute(cudaDevAttrClockRate, device_index, &clock));
  MOELORA_TRY(attribute(cudaDevAttrMemoryClockRate, device_index, &khz));
  MOELORA_TRY(attribute(cudaDevAttrGlobalMemoryBusWidth, device_index, &bits));
  *info = {};
  info->device = MOELORA_CUDA;
  info->compute_capability = major * 10 + minor;
  info->num_units = sms;
  info->l2_bytes = l2;
  info->shared_bytes = shared;
  info->clock_mhz = clock / 1000;
  info->memory_bytes_per_us = (int64_t)khz * 2 * bits / 8 / 1000; // two transfers per clock
  return query_overlap(&info->overlaps);
}

static bool is_built(const moelora_variant *variant) {
  return variant->role == MOELORA_ROLE_GEMM   ? moelora_cuda_gemm_launchers[variant->id] != nullptr
         : variant->role == MOELORA_ROLE_BACK ? moelora_cuda_back_launchers[variant->id] != nullptr
                                              : true;
}

int32_t moelora_cuda_num_sms(int32_t device_index) {
  return moelora_known_device(MOELORA_CUDA, device_index)->num_units;
}

bool moelora_cuda_can_overlap(int32_t device_index) {
  return moelora_known_device(MOELORA_CUDA, device_index)->overlaps;
}

extern "C" const moelora_backend moelora_cuda_backend = {
    .name = "cuda",
    .count_devices = count_devices,
    .enter = enter,
    .leave = leave,
    .device_info = device_info,
#define OPERATOR(NAME, ...) .NAME = moelora_cuda_##NAME,
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"
    .is_built = is_built,
};
