/* Interface between the CPU operators (any C compiler) and the kernels of one instruction set.
 *
 * An operand row is K contiguous values in the representation that `dot` reads: the compute dtype,
 * or float32 if the instruction set cannot multiply that dtype. Values are rounded to the compute
 * dtype in both cases.
 *
 * Batch invariance: `dot` sums K in a fixed order that depends only on k, not on the number of
 * rows, a row's position or alignment, and all callers split K into the same passes. The result of
 * a row is therefore bit-identical whatever shares its tile. */
#pragma once

#include <string.h>

#include "core/backend.h"

/* Weight rows of a register tile. */
#define MOELORA_DOT_N 4
/* Rows of a matrix register, elements of K per step, and bytes of a step in a panel. */
enum { MOELORA_MATRIX_ROWS = 16, MOELORA_MATRIX_STEP = 32, MOELORA_PANEL_STEP = 1024 };
/* The number of columns of add_rows is a multiple of this. */
#define MOELORA_ROW_STEP 16

/* Scales of a product: the sum for row i and weight row j is multiplied by w[j] x[i][group]. */
typedef struct moelora_product_scales {
  const float *w;        /* [n] */
  const float *const *x; /* [m] rows */
  int64_t group;
} moelora_product_scales;

/* Products on matrix registers, for 16-bit operands. Operand rows of x are rearranged to panels:
 * ceil(m / 16) panels of ceil(k / 32) steps, each [16 pairs of K][16 rows][2], zero past m and k.
 * As with `dot`, the bits of a row depend only on k, but they differ from those of `dot`. */
typedef struct moelora_cpu_matrix {
  /* Each thread calls these before and after calls of `multiply`. */
  void (*enter)(void);
  void (*leave)(void);
  void (*pack)(int64_t m, int64_t k, const void *const *x /* [m] operand rows */, void *panels);
  /* c[i * ldc + j] += sum over q < k of x[i][q] * w_j[q], for i < m and j < n, where weight row w_j
   * is at w + j * w_stride bytes, and the panel of rows 16 i to 16 i + 15 at panels + i *
   * panel_bytes. Unless scales is NULL, the sum over q is scaled before it is added. */
  void (*multiply)(int64_t m, int64_t n, int64_t k, const void *panels, int64_t panel_bytes,
                   const void *w /* [n] operand rows */, int64_t w_stride,
                   const moelora_product_scales *scales, float *c /* [m, ldc] */, int64_t ldc);
} moelora_cpu_matrix;

typedef struct moelora_cpu_kernels {
  size_t operand_bytes;
  bool widens; /* operands are float32 for a 16-bit dtype; otherwise they have the dtype */
  /* Round float32 values to the dtype, and write operands (`round`) or the dtype (`store`). */
  void (*round)(const float *src, void *dst, int64_t n);
  void (*store)(const float *src, void *dst, int64_t n);
  /* Converts values of the dtype to float32. */
  void (*load)(const void *src, float *dst, int64_t n);
  /* c[i * ldc + j] += sum over q < k of x[i][q] * w_j[q], for i < m and j < n, where weight row w_j
   * is at w + j * w_stride bytes. May prefetch weight rows into L2, MOELORA_DOT_N rows ahead, and
   * after the last ones those at `next`, unless it is NULL. */
  void (*dot)(int64_t m, int64_t n, int64_t k, const void *const *x /* [m] operand rows */,
              const void *w /* [n] operand rows */, int64_t w_stride, const void *next,
              float *c /* [m, ldc] */, int64_t ldc);
  /* Multiplies x by weights; `dot` then only multiplies by factors. NULL: `dot` does both. */
  const moelora_cpu_matrix *matrix;
  /* c[i * ldc + j] += sum over q < k of x[i][q] * w[q][j], for i < m and j < n, in float32, in the
   * order of q; n is a multiple of MOELORA_ROW_STEP. */
  void (*add_rows)(int64_t m, int64_t n, int64_t k, const float *const *x /* [m] rows */,
                   const float *const *w /* [k] rows */, float *c /* [m, ldc] */, int64_t ldc);
  /* Dequantizes rows r and r + 8, for even r / 8, of `tiles` 4-bit tiles (moelora.h) that are
   * `stride` bytes apart, to operands in low and high, 64 per tile. Prefetches `ahead` bytes ahead
   * into L2. NULL: the dtype has no quantized weights. */
  void (*dequantize)(moelora_format format, const void *tile, int64_t stride, int64_t tiles,
                     int32_t r, int64_t ahead, void *low, void *high);
  /* Dequantizes the 128 columns of row r of an FP8 tile, whose bytes begin at `row`: scale[0]
   * applies to columns 0 to 63, scale[1] to the others. NULL: the dtype has no quantized weights.
   */
  void (*dequantize_fp8)(const uint8_t *row, int32_t r, const float scale[2], void *to);
  /* gate[i] = activation(gate[i], up[i]); see activation.h */
  void (*activate)(const moelora_activation_problem *activation, float *gate, const float *up,
                   int64_t n);
  /* h[i] = activation(gate[i], up[i]); replaces gate and up by their gradients, given the gradient
   * dh of h; see activation.h */
  void (*activate_backward)(const moelora_activation_problem *activation, float *gate, float *up,
                            const float *dh, float *h, int64_t n);
} moelora_cpu_kernels;

/* Returns the kernels of a row of variants.inc. */
const moelora_cpu_kernels *moelora_cpu_kernels_of(const moelora_variant *variant);

#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K)                              \
  extern const moelora_cpu_kernels moelora_##NAME;
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM

/* Converts n values of the dtype to operands. */
static inline void moelora_load_as_operands(const moelora_cpu_kernels *kernels, const void *from,
                                            void *to, int64_t n) {
  if (kernels->widens)
    kernels->load(from, to, n);
  else
    memcpy(to, from, (size_t)n * kernels->operand_bytes);
}

/* Converts n operands to the dtype. */
static inline void moelora_store_operands(const moelora_cpu_kernels *kernels, const void *from,
                                          void *to, int64_t n) {
  if (kernels->widens)
    kernels->store((const float *)from, to, n);
  else
    memcpy(to, from, (size_t)n * kernels->operand_bytes);
}

/* Converts n operands to float32. */
static inline void moelora_operands_to_f32(const moelora_cpu_kernels *kernels, const void *from,
                                           float *to, int64_t n) {
  if (kernels->widens)
    memcpy(to, from, (size_t)n * sizeof *to);
  else
    kernels->load(from, to, n);
}

#if defined(__x86_64__)
extern const moelora_cpu_matrix moelora_matrix_amx;
#endif
