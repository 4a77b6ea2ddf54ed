/* AVX-512 (F, BW, DQ, VL): float32 products; 16-bit operands are widened row by row. */
#if defined(__x86_64__)
#include "cpu/avx512.h"
#include "cpu/f16c.h"
#include "cpu/f32_operands.h"

#define DOT_STEP 16
typedef float element;
typedef __m512 vector;

static inline vector load(const element *p) {
  return _mm512_loadu_ps(p);
}

static inline vector load_part(const element *p, int64_t count) {
  return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}

static inline sum multiply_add(vector a, vector b, sum s) {
  return _mm512_fmadd_ps(a, b, s);
}

#include "cpu/dot.h"

const moelora_cpu_kernels moelora_gemm_f32_avx512 = F32_OPERANDS(f32, NULL);
const moelora_cpu_kernels moelora_gemm_bf16_avx512 = F32_OPERANDS(bf16, widen_bf16);
const moelora_cpu_kernels moelora_gemm_f16_avx512 = F32_OPERANDS(f16, widen_f16);
#endif
