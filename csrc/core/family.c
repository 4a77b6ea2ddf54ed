/* Decides which kernels run on a device: GPU families, CPU instruction sets, and the limit on the
 * compute capability. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/format.h"
#include "core/plan_tile.h"

static pthread_once_t environment_once = PTHREAD_ONCE_INIT;
static _Atomic(int32_t) capability_limit; /* 0: none */
static _Atomic(bool) limit_unknown;       /* MOELORA_MAX_CC is invalid */
static char environment[64]; /* its value when it was read: a process may change the variable */

static bool is_capability(long value) {
  return value >= 80 && value < 1000;
}

static void read_environment(void) {
  const char *most = getenv("MOELORA_MAX_CC");
  if (most && *most) {
    char *end;
    const long value = strtol(most, &end, 10);
    snprintf(environment, sizeof environment, "%s", most);
    limit_unknown = *end != '\0' || !is_capability(value);
    capability_limit = limit_unknown ? 0 : (int32_t)value;
  }
}

moelora_status moelora_limit_capability(int32_t compute_capability) {
  moelora_clear_error();
  pthread_once(&environment_once, read_environment);
  MOELORA_REQUIRE(compute_capability == 0 || is_capability(compute_capability),
                  "compute_capability is %d, expected 80 or more, or 0", compute_capability);
  capability_limit = compute_capability;
  limit_unknown = false;
  return MOELORA_OK;
}

moelora_status moelora_check_limit(void) {
  pthread_once(&environment_once, read_environment);
  MOELORA_REQUIRE(!limit_unknown, "MOELORA_MAX_CC is '%s', expected a number such as 80",
                  environment);
  return MOELORA_OK;
}

/* Returns the maximum shared memory per CTA for a compute capability. Data-center GPUs and the
 * embedded ones derived from them have more. */
static int32_t shared_bytes_of(int32_t compute_capability) {
  bool large = compute_capability == 80 || compute_capability == 87;
  bool largest = compute_capability >= 90 && compute_capability < 120;
  return (largest ? 227 : large ? 163 : 99) * 1024;
}

moelora_device_info moelora_limited(const moelora_device_info *device) {
  pthread_once(&environment_once, read_environment);
  moelora_device_info seen = *device;
  const int32_t limit = capability_limit;
  if (device->device == MOELORA_CUDA && limit && limit < device->compute_capability) {
    seen.compute_capability = limit;
    if (shared_bytes_of(limit) < seen.shared_bytes)
      seen.shared_bytes = shared_bytes_of(limit);
  }
  return seen;
}

/* Returns the newest family whose kernels a GPU of this capability runs. */
static moelora_family family_of(int32_t compute_capability) {
  return compute_capability == 90 ? MOELORA_SM90 : MOELORA_SM80;
}

moelora_family moelora_family_of(const moelora_device_info *device) {
  const moelora_family own = family_of(device->compute_capability);
  return family_of(moelora_limited(device).compute_capability) == own ? own : MOELORA_SM80;
}

int32_t moelora_pipeline_bytes(const moelora_variant *v) {
  const int32_t tiles = v->block_n / MOELORA_PACK * (v->block_k / MOELORA_PACK);
  const int32_t weights = moelora_is_native_kernel(v->format)
                              ? v->block_n * v->block_k * 2
                              : tiles * moelora_step_bytes(v->format);
  return v->stages * (weights + v->block_m * v->block_k * 2);
}

static bool has_family(const moelora_variant *variant, const moelora_device_info *device) {
  if (device->compute_capability < 80)
    return false;
  if (variant->needs != MOELORA_SM80)
    return variant->needs == (int32_t)family_of(device->compute_capability);
  if (variant->role != MOELORA_ROLE_GEMM)
    return true; /* other kernels fit the shared memory of every GPU */
  return moelora_pipeline_bytes(variant) <= device->shared_bytes;
}

bool moelora_variant_runs_on(const moelora_variant *variant, const moelora_device_info *device) {
  if (variant->device != device->device)
    return false;
  if (variant->device == MOELORA_CPU)
    return (device->cpu_isa & (uint32_t)variant->needs) == (uint32_t)variant->needs;
  const moelora_device_info seen = moelora_limited(device);
  return has_family(variant, device) && has_family(variant, &seen);
}

moelora_status moelora_no_kernel_for(moelora_dtype dtype, const char *more,
                                     const moelora_device_info *device) {
  return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for %sCUDA compute capability %d.%d",
                      moelora_dtype_name(dtype), more, device->compute_capability / 10,
                      device->compute_capability % 10);
}
