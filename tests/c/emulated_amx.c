/* Linked with a test program by --wrap: the CPU has AMX and nothing else, and gemm_bf16_amx runs
 * with emulated tiles and the scalar kernels of bf16, whose operands are rounded to bf16. */
#include <stdlib.h>

#include "amx_emulated.h"

#define moelora_matrix_amx emulated
#include "cpu/cpu.h"
#include "cpu/matrix_amx.c"

uint32_t __wrap_moelora_cpu_isa(void);
const moelora_cpu_kernels *__real_moelora_cpu_kernels_of(const moelora_variant *variant);
const moelora_cpu_kernels *__wrap_moelora_cpu_kernels_of(const moelora_variant *variant);

static const moelora_cpu_kernels *const scalar = &moelora_gemm_bf16_scalar;

static void dot(int64_t m, int64_t n, int64_t k, const void *const *x, const void *w,
                int64_t w_stride, const void *next, float *c, int64_t ldc) {
  (void)next;
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      const uint16_t *a = x[i], *b = (const uint16_t *)((const char *)w + j * w_stride);
      float sum = 0;
      for (int64_t q = 0; q < k; q++)
        sum += amx_bf16(a[q]) * amx_bf16(b[q]);
      c[i * ldc + j] += sum;
    }
}

static void dequantize(moelora_format format, const void *tile, int64_t stride, int64_t tiles,
                       int32_t r, int64_t ahead, void *low, void *high) {
  const int64_t n = 64 * tiles;
  float *values = malloc(2 * (size_t)n * sizeof *values);
  scalar->dequantize(format, tile, stride, tiles, r, ahead, values, values + n);
  scalar->store(values, low, n);
  scalar->store(values + n, high, n);
  free(values);
}

static void dequantize_fp8(const uint8_t *row, int32_t r, const float scale[2], void *to) {
  float values[128];
  scalar->dequantize_fp8(row, r, scale, values);
  scalar->store(values, to, 128);
}

uint32_t __wrap_moelora_cpu_isa(void) {
  return MOELORA_ISA_AMX_BF16;
}

const moelora_cpu_kernels *__wrap_moelora_cpu_kernels_of(const moelora_variant *variant) {
  static _Thread_local moelora_cpu_kernels amx;
  if (strcmp(variant->name, "gemm_bf16_amx") != 0)
    return __real_moelora_cpu_kernels_of(variant);
  amx = (moelora_cpu_kernels){
      .operand_bytes = sizeof(uint16_t),
      .round = scalar->store,
      .store = scalar->store,
      .load = scalar->load,
      .dot = dot,
      .matrix = &emulated,
      .add_rows = scalar->add_rows,
      .dequantize = dequantize,
      .dequantize_fp8 = dequantize_fp8,
      .activate = scalar->activate,
      .activate_backward = scalar->activate_backward,
  };
  return &amx;
}
