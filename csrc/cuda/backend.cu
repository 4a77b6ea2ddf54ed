/* The CUDA backend's table, and what its files ask of the device. */
#include <atomic>

#include "cuda/backend.h"
#include "cuda/adapters/delta.h"
#include "cuda/launch/launch.h"

constexpr int MAX_DEVICES = 64;

extern "C" moelora_status moelora_cuda_check(cudaError_t error, const char *what) {
  if (error == cudaSuccess)
    return MOELORA_OK;
  cudaGetLastError(); /* forget it: the next call must not report this one */
  return moelora_fail(MOELORA_DEVICE_ERROR, "%s: %s (%s)", what, cudaGetErrorName(error),
                      cudaGetErrorString(error));
}

static moelora_status attribute(cudaDeviceAttr name, int32_t device, int *value) {
  return moelora_cuda_check(cudaDeviceGetAttribute(value, name, device), "cudaDeviceGetAttribute");
}

static moelora_status device_info(int32_t device_index, moelora_device_info *info) {
  int count = 0, major = 0, minor = 0, sms = 0;
  moelora_status status = moelora_cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (status != MOELORA_OK)
    return status;
  if (device_index < 0 || device_index >= count)
    return moelora_fail(MOELORA_INVALID_ARGUMENT, "exec.device_index is %d, there are %d devices",
                        device_index, count);
  if ((status = attribute(cudaDevAttrComputeCapabilityMajor, device_index, &major)) ||
      (status = attribute(cudaDevAttrComputeCapabilityMinor, device_index, &minor)) ||
      (status = attribute(cudaDevAttrMultiProcessorCount, device_index, &sms)))
    return status;
  if (major < 8)
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "device %d has compute capability %d.%d, moelora needs 8.0 or newer",
                        device_index, major, minor);
  *info = {};
  info->device = MOELORA_CUDA;
  info->compute_capability = major * 10 + minor;
  info->num_units = sms;
  return MOELORA_OK;
}

/* Asked on every launch: found once per device. 0 is not yet known. */
static std::atomic<int32_t> sms_of[MAX_DEVICES], overlap_of[MAX_DEVICES];

static int32_t known_attribute(std::atomic<int32_t> *of, cudaDeviceAttr name, int32_t device) {
  if (device < 0 || device >= MAX_DEVICES)
    return 1;
  int32_t known = of[device].load(std::memory_order_relaxed);
  if (known)
    return known;
  int value = 0;
  if (cudaDeviceGetAttribute(&value, name, device) != cudaSuccess)
    return 1;
  of[device].store(value, std::memory_order_relaxed);
  return value;
}

extern "C" int32_t moelora_cuda_num_sms(int32_t device_index) {
  return known_attribute(sms_of, cudaDevAttrMultiProcessorCount, device_index);
}

static __global__ void loaded_code() {}

/* The device may be new enough while the code it runs is not: portable code on a GPU newer than
 * this build has no griddepcontrol.wait in it, and must never be started early. */
extern "C" bool moelora_cuda_can_overlap(void) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= MAX_DEVICES)
    return false;
  int32_t known = overlap_of[device].load(std::memory_order_relaxed);
  if (!known) {
    cudaFuncAttributes code;
    if (cudaFuncGetAttributes(&code, loaded_code) != cudaSuccess)
      return false;
    known = code.ptxVersion >= 90 ? 1 : -1;
    overlap_of[device].store(known, std::memory_order_relaxed);
  }
  return known > 0;
}

extern "C" const moelora_backend moelora_cuda_backend = {
    "cuda",
    device_info,
    moelora_cuda_align_workspace,
    moelora_cuda_align,
    moelora_cuda_gemm_workspace,
    moelora_cuda_gemm,
    moelora_cuda_experts_workspace,
    moelora_cuda_experts,
    moelora_cuda_pack,
    moelora_cuda_align_lists_workspace,
    moelora_cuda_align_lists,
    moelora_cuda_delta_workspace,
    moelora_cuda_delta,
    moelora_cuda_mlp_delta_workspace,
    moelora_cuda_mlp_delta,
};
