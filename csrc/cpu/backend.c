/* The function table of the CPU backend, and its kernels in the order of variants.inc. */
#include "cpu/cpu.h"

const moelora_cpu_kernels *moelora_cpu_kernels_of(const moelora_variant *variant) {
  static const moelora_cpu_kernels *const kernels[] = {
#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K) &moelora_##NAME,
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM
  };
  return kernels[variant->id];
}

static moelora_status count_devices(int32_t *count) {
  *count = 1;
  return MOELORA_OK;
}

static moelora_status enter(int32_t device_index, int32_t *outer) {
  *outer = device_index;
  return MOELORA_OK;
}

static moelora_status leave(int32_t device_index, int32_t outer) {
  (void)device_index, (void)outer;
  return MOELORA_OK;
}

static moelora_status device_info(int32_t device_index, moelora_device_info *info) {
  (void)device_index;
  *info = (moelora_device_info){
      .device = MOELORA_CPU,
      .num_units = 1,
      .cpu_isa = moelora_cpu_isa(),
  };
  return MOELORA_OK;
}

const moelora_backend moelora_cpu_backend = {
    .name = "cpu",
    .count_devices = count_devices,
    .enter = enter,
    .leave = leave,
    .device_info = device_info,
#define OPERATOR(NAME, ...) .NAME = moelora_cpu_##NAME,
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"
};
