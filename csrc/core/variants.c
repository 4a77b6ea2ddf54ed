/* The kernels that there are, from the tables of both kinds of device. */
#include <string.h>

#include "core/plan.h"

/* Ids count from 0 in the order of each table. */
enum {
#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K) CPU_##NAME,
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM
};
enum {
#define MOELORA_CUDA_GEMM(NAME, DTYPE, FORMAT, FAMILY, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CLUSTER) \
  CUDA_##NAME,
#define MOELORA_CUDA_DECODE(NAME, DTYPE, FAMILY) CUDA_##NAME,
#include "cuda/variants.inc"
#undef MOELORA_CUDA_DECODE
#undef MOELORA_CUDA_GEMM
};

/* CUDA rows are here in CPU builds too, so that their plans can be tested without a GPU. */
static const moelora_variant variants[] = {
#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K)                              \
  {                                                                                                \
      .name = #NAME,                                                                               \
      .device = MOELORA_CPU,                                                                       \
      .dtype = MOELORA_##DTYPE,                                                                    \
      .needs = MOELORA_ISA_##ISA,                                                                  \
      .id = CPU_##NAME,                                                                            \
      .block_m = BLOCK_M,                                                                          \
      .block_n = BLOCK_N,                                                                          \
      .block_k = BLOCK_K,                                                                          \
      .stages = 1,                                                                                 \
      .cluster = 1,                                                                                \
  },
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM
#define MOELORA_CUDA_GEMM(NAME, DTYPE, FORMAT, FAMILY, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CLUSTER) \
  {                                                                                                \
      .name = #NAME,                                                                               \
      .device = MOELORA_CUDA,                                                                      \
      .dtype = MOELORA_##DTYPE,                                                                    \
      .format = MOELORA_##FORMAT,                                                                  \
      .needs = MOELORA_##FAMILY,                                                                   \
      .id = CUDA_##NAME,                                                                           \
      .block_m = BLOCK_M,                                                                          \
      .block_n = BLOCK_N,                                                                          \
      .block_k = BLOCK_K,                                                                          \
      .stages = STAGES,                                                                            \
      .cluster = CLUSTER,                                                                          \
  },
/* An item is 16 weight rows by 8 tokens; a warp has 256 of its depth in flight. */
#define MOELORA_CUDA_DECODE(NAME, DTYPE, FAMILY)                                                   \
  {                                                                                                \
      .name = #NAME,                                                                               \
      .device = MOELORA_CUDA,                                                                      \
      .dtype = MOELORA_##DTYPE,                                                                    \
      .needs = MOELORA_##FAMILY,                                                                   \
      .id = CUDA_##NAME,                                                                           \
      .block_m = MOELORA_DECODE_TOKENS,                                                            \
      .block_n = 16,                                                                               \
      .block_k = 256,                                                                              \
      .stages = 1,                                                                                 \
      .cluster = 1,                                                                                \
      .decode = true,                                                                              \
  },
#include "cuda/variants.inc"
#undef MOELORA_CUDA_DECODE
#undef MOELORA_CUDA_GEMM
};
enum { NUM_VARIANTS = sizeof variants / sizeof *variants };

const moelora_variant *moelora_variant_at(int32_t index) {
  return index >= 0 && index < NUM_VARIANTS ? &variants[index] : NULL;
}

const moelora_variant *moelora_find_variant(const char *name) {
  for (int32_t i = 0; i < NUM_VARIANTS; i++)
    if (strcmp(variants[i].name, name) == 0)
      return &variants[i];
  return NULL;
}
