/* The seam between the CPU operators (any C compiler) and the kernels of one instruction set.
 *
 * An operand row is K contiguous values in the form that `dot` reads: the compute dtype itself, or
 * float32 where the instruction set cannot multiply that dtype. Values are always rounded to the
 * compute dtype, whatever form holds them.
 *
 * Neutrality: `dot` sums K in a fixed order that depends on k alone, never on the number of rows,
 * on the position of a row or on alignment. Whatever shares a tile with a row cannot change its
 * bits; all callers split K in the same passes. */
#ifndef MOELORA_CPU_KERNELS_H
#define MOELORA_CPU_KERNELS_H

#include "core/backend.h"

/* Weight rows of a micro tile. */
#define MOELORA_DOT_N 4
/* What the columns of add_rows are a multiple of. */
#define MOELORA_ROW_STEP 16

typedef struct moelora_cpu_kernels {
  size_t operand_bytes;
  /* dtype -> operand, n values; NULL: the operand is the dtype */
  void (*widen)(const void *src, void *dst, int64_t n);
  /* float32 -> rounded to the dtype, as operand (`round`) or as the dtype itself (`store`) */
  void (*round)(const float *src, void *dst, int64_t n);
  void (*store)(const float *src, void *dst, int64_t n);
  /* dtype -> float32 */
  void (*load)(const void *src, float *dst, int64_t n);
  /* c[i * ldc + j] += sum over q < k of x[i][q] * w_j[q], for i < m and j < n, where weight row w_j
   * is at w + j * w_stride bytes. Fetches weights MOELORA_DOT_N rows ahead into L2, and the rows at
   * `next` after the last ones, unless `next` is NULL. */
  void (*dot)(int64_t m, int64_t n, int64_t k, const void *const *x /* [m] operand rows */,
              const void *w /* [n] operand rows */, int64_t w_stride, const void *next,
              float *c /* [m, ldc] */, int64_t ldc);
  /* c[i * ldc + j] += sum over q < k of x[i][q] * w[q][j], for i < m and j < n, all float32, where
   * n is a multiple of MOELORA_ROW_STEP. Sums add in the order of q alone. */
  void (*add_rows)(int64_t m, int64_t n, int64_t k, const float *const *x /* [m] rows */,
                   const float *const *w /* [k] rows */, float *c /* [m, ldc] */, int64_t ldc);
  /* Columns of rows r and r + 8, r / 8 even, of `tiles` tiles of quantised weights (moelora.h) that
   * lie `stride` bytes apart: operands to low and high, 64 for each tile. Fetches what lies `ahead`
   * bytes ahead of these rows into L2. NULL: the dtype has no such weights. */
  void (*dequantise)(moelora_format format, const void *tile, int64_t stride, int64_t tiles,
                     int32_t r, int64_t ahead, void *low, void *high);
  /* The 128 columns of row r of an FP8 tile, whose bytes begin at `row`: numbers times scale[0],
   * and from column 64 on times scale[1], as operands. NULL: the dtype has no such weights. */
  void (*dequantise_fp8)(const uint8_t *row, int32_t r, const float scale[2], void *to);
  /* gate[i] = activation(gate[i], up[i]); see activation.h */
  void (*activate)(const moelora_activation_problem *activation, float *gate, const float *up,
                   int64_t n);
  /* h[i] = activation(gate[i], up[i]); gate and up become their gradients, where dh is that of h;
   * see activation_backward.h */
  void (*activate_backward)(const moelora_activation_problem *activation, float *gate, float *up,
                            const float *dh, float *h, int64_t n);
} moelora_cpu_kernels;

/* The kernels of a row of variants.inc. */
const moelora_cpu_kernels *moelora_cpu_kernels_of(const moelora_variant *variant);

#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K)                              \
  extern const moelora_cpu_kernels moelora_##NAME;
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM

#endif
