/* AVX-512 BF16: products of bf16 pairs, added in float32 by vdpbf16ps. Operands are bf16. */
#if defined(__x86_64__)
#include "cpu/avx512.h"
#include "cpu/f32_operands.h"

#define DOT_STEP 32
typedef uint16_t element;
typedef __m512i vector;

static inline vector load(const element *p) {
  return _mm512_loadu_si512(p);
}

static inline vector load_part(const element *p, int64_t count) {
  return _mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), p);
}

static inline sum multiply_add(vector a, vector b, sum s) {
  return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b);
}

#include "cpu/dot.h"

const moelora_cpu_kernels moelora_gemm_bf16_avx512bf16 = {
    .operand_bytes = sizeof(uint16_t),
    .round = store_bf16,
    .store = store_bf16,
    .load = load_bf16,
    .dot = dot,
    .activate = moelora_activate,
};
#endif
