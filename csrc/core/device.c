/* Finds devices, and the variants that this build and this machine support. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "core/check.h"
#include "core/plan.h"

/* Caches a query, which takes microseconds (in a driver, or on a CPU under a hypervisor). */
typedef struct cached_info {
  atomic_bool known;
  moelora_device_info info;
} cached_info;

static cached_info cache[2][MOELORA_MAX_DEVICES];
static pthread_mutex_t cache_lock = PTHREAD_MUTEX_INITIALIZER;

static const moelora_backend *backend_of(moelora_device device) {
  if (device == MOELORA_CPU)
    return &moelora_cpu_backend;
#ifdef MOELORA_WITH_CUDA
  if (device == MOELORA_CUDA)
    return &moelora_cuda_backend;
#endif
  return NULL;
}

static moelora_status query_device(const moelora_backend *backend, int32_t index,
                                   moelora_device_info *info) {
  int32_t count = 0, outer = 0;
  MOELORA_TRY(backend->count_devices(&count));
  MOELORA_REQUIRE(index < count, "exec.device_index is %d, there are %d devices", index, count);
  MOELORA_TRY(backend->enter(index, &outer));
  const moelora_status asked = backend->device_info(index, info);
  const moelora_status left = backend->leave(index, outer);
  MOELORA_TRY(asked);
  MOELORA_TRY(left);
  if (info->device == MOELORA_CUDA && info->compute_capability < 80)
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "device %d has compute capability %d.%d, moelora needs 8.0 or newer", index,
                        info->compute_capability / 10, info->compute_capability % 10);
  return MOELORA_OK;
}

static moelora_status device_info(const moelora_backend *backend, moelora_device device,
                                  int32_t index, moelora_device_info *info) {
  cached_info *slot = &cache[device][index];
  if (!atomic_load_explicit(&slot->known, memory_order_acquire)) {
    pthread_mutex_lock(&cache_lock);
    moelora_status status = MOELORA_OK;
    if (!slot->known) {
      status = query_device(backend, index, &slot->info);
      atomic_store_explicit(&slot->known, status == MOELORA_OK, memory_order_release);
    }
    pthread_mutex_unlock(&cache_lock);
    MOELORA_TRY(status);
  }
  *info = slot->info;
  return MOELORA_OK;
}

const moelora_device_info *moelora_known_device(moelora_device device, int32_t index) {
  return &cache[device][index].info;
}

int32_t moelora_workers(const moelora_exec *exec) {
  return exec->device == MOELORA_CPU && exec->parallel_for && exec->num_threads > 1
             ? exec->num_threads
             : 1;
}

moelora_status moelora_find_device(const moelora_exec *exec, const moelora_backend **backend,
                                   moelora_device_info *info) {
  MOELORA_REQUIRE(exec->device == MOELORA_CPU || exec->device == MOELORA_CUDA,
                  "exec.device is %d, expected a moelora_device", (int)exec->device);
  *backend = backend_of(exec->device);
  if (!*backend)
    return moelora_fail(MOELORA_UNSUPPORTED, "this build has no CUDA kernels: see docs/install.md");
  int32_t index = exec->device == MOELORA_CPU ? 0 : exec->device_index;
  MOELORA_REQUIRE(index >= 0 && index < MOELORA_MAX_DEVICES,
                  "exec.device_index is %d, expected 0 to %d", index, MOELORA_MAX_DEVICES - 1);
  MOELORA_TRY(device_info(*backend, exec->device, index, info));
  if (exec->device == MOELORA_CPU)
    info->num_units = moelora_workers(exec);
  return MOELORA_OK;
}

/* Finds device 0, which represents all devices of its kind. */
static bool first_device(moelora_device device, moelora_device_info *info) {
  const moelora_exec exec = {.device = device};
  const moelora_backend *backend;
  bool found = moelora_find_device(&exec, &backend, info) == MOELORA_OK;
  moelora_clear_error();
  return found;
}

bool moelora_has_device(moelora_device device) {
  moelora_device_info info;
  return first_device(device, &info);
}

const char *moelora_cpu_features(void) {
  static const struct {
    uint32_t isa;
    const char *names;
  } table[] = {
      {MOELORA_ISA_AVX2, "avx2 fma f16c"},
      {MOELORA_ISA_AVX512, "avx512f avx512bw avx512dq avx512vl"},
      {MOELORA_ISA_AVX512_BF16, "avx512_bf16"},
      {MOELORA_ISA_AMX_BF16, "amx_bf16"},
  };
  static _Thread_local char text[128];
  moelora_device_info info;
  size_t used = 0;
  text[0] = '\0';
  if (first_device(MOELORA_CPU, &info))
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
      if (info.cpu_isa & table[i].isa)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", used ? " " : "",
                                 table[i].names);
  return text;
}

bool moelora_is_built(const moelora_variant *variant) {
  const moelora_backend *backend = backend_of(variant->device);
  return backend && (!backend->is_built || backend->is_built(variant));
}

/* Returns the variant with this index among those in this build, or NULL. */
static const moelora_variant *compiled_variant(int32_t index) {
  const moelora_variant *variant;
  for (int32_t i = 0; index >= 0 && (variant = moelora_variant_at(i)); i++)
    if (moelora_is_built(variant) && index-- == 0)
      return variant;
  return NULL;
}

const char *moelora_variant_name(int32_t index) {
  const moelora_variant *variant = compiled_variant(index);
  return variant ? variant->name : NULL;
}

bool moelora_variant_usable(int32_t index) {
  const moelora_variant *variant = compiled_variant(index);
  moelora_device_info info;
  return variant && first_device(variant->device, &info) && moelora_variant_runs_on(variant, &info);
}
