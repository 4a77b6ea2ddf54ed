/* Enumerates the kernels in the tables of both backends. */
#include <string.h>

#include "core/format.h"
#include "core/plan_tile.h"
#include "cuda/variant_ids.h"

/* Ids are consecutive from 0, in the order of each table. */
enum {
#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K) CPU_##NAME,
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM
};

#define ROW(NAME, DTYPE, FAMILY, ROLE, STAGES, ...)                                                \
  {.name = #NAME,                                                                                  \
   .device = MOELORA_CUDA,                                                                         \
   .dtype = MOELORA_##DTYPE,                                                                       \
   .role = MOELORA_ROLE_##ROLE,                                                                    \
   .needs = MOELORA_##FAMILY,                                                                      \
   .id = CUDA_##NAME,                                                                              \
   .stages = STAGES,                                                                               \
   __VA_ARGS__}
#define ROWS(ROLE, NAME, STEM, FAMILY, ...)                                                        \
  ROW(NAME##_bf16_##STEM, BF16, FAMILY, ROLE, __VA_ARGS__),                                        \
      ROW(NAME##_f16_##STEM, F16, FAMILY, ROLE, __VA_ARGS__)

/* CPU builds also contain the CUDA rows, so that plans can be tested without a GPU. */
static const moelora_variant variants[] = {
#define MOELORA_CPU_GEMM(NAME, DTYPE, ISA, BLOCK_M, BLOCK_N, BLOCK_K)                              \
  {.name = #NAME,                                                                                  \
   .device = MOELORA_CPU,                                                                          \
   .dtype = MOELORA_##DTYPE,                                                                       \
   .role = MOELORA_ROLE_GEMM,                                                                      \
   .needs = MOELORA_ISA_##ISA,                                                                     \
   .id = CPU_##NAME,                                                                               \
   .block_m = BLOCK_M,                                                                             \
   .block_n = BLOCK_N,                                                                             \
   .block_k = BLOCK_K,                                                                             \
   .stages = 1,                                                                                    \
   .cluster = 1},
#include "cpu/variants.inc"
#undef MOELORA_CPU_GEMM
#define TILE_ROWS(NAME, STEM, ROLE, FORMAT, FAMILY, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CLUSTER)    \
  ROWS(ROLE, NAME, STEM, FAMILY, STAGES, .format = MOELORA_KERNEL_##FORMAT, .block_m = BLOCK_M,    \
       .block_n = BLOCK_N, .block_k = BLOCK_K, .cluster = CLUSTER),
#define MOELORA_CUDA_GEMM(STEM, ...) TILE_ROWS(gemm, STEM, GEMM, __VA_ARGS__)
#define MOELORA_CUDA_BACK(STEM, ...) TILE_ROWS(back, STEM, BACK, __VA_ARGS__)
/* A warp multiplies 16 weight rows by 8 tokens, with 768 elements of K in flight. */
#define MOELORA_CUDA_DECODE(STEM, FORMAT, FAMILY)                                                  \
  ROWS(LAYER, decode, STEM, FAMILY, 1, .format = MOELORA_KERNEL_##FORMAT,                          \
       .block_m = MOELORA_DECODE_TOKENS, .block_n = 16, .block_k = 768, .cluster = 1),
#define MOELORA_CUDA_SORT(STEM, ITEMS)                                                             \
  ROW(sort_i32_##STEM, I32, SM80, SORT, 1, .block_m = ITEMS, .cluster = 1),
#define MOELORA_CUDA_SHRINK(STEM, METHOD, TILES, TEAMS, SPANS, TOKENS, CTAS, ELEMENTS)             \
  ROWS(SHRINK, shrink, STEM, SM80, 1, .method = MOELORA_SHRINK_##METHOD, .block_m = TOKENS,        \
       .block_n = 16 * TILES * TEAMS, .cluster = 1, .warps = TEAMS * SPANS, .ctas = CTAS,          \
       .spans = SPANS, .elements = ELEMENTS),
#define MOELORA_CUDA_SHRINK_SEGMENTS(STEM, FAMILY, TOKENS, RANKS, CTAS)                            \
  ROWS(SHRINK, shrink, STEM, FAMILY, 1, .method = MOELORA_SHRINK_SEGMENTS, .block_m = TOKENS,      \
       .block_n = RANKS, .cluster = 1, .ctas = CTAS, .spans = 1),
#define MOELORA_CUDA_EXPAND(STEM, STEPS, GATED, ELEMENTS, CTAS)                                    \
  ROWS(EXPAND, expand, STEM, SM80, 1, .method = MOELORA_EXPAND_STAGED, .block_m = 256,             \
       .block_n = GATED ? 32 : 64, .block_k = 16 * STEPS, .cluster = 1,                            \
       .warps = STEPS <= 2 ? 8 : 4, .ctas = CTAS, .elements = ELEMENTS, .gated = GATED),
#define MOELORA_CUDA_EXPAND_THIN(STEM, STEPS, CTAS)                                                \
  ROWS(EXPAND, expand, STEM, SM80, 1, .method = MOELORA_EXPAND_THIN, .block_m = 32,                \
       .block_n = STEPS == 1 ? 64 : 32, .block_k = 16 * STEPS, .cluster = 1, .warps = 8,           \
       .ctas = CTAS),
#define MOELORA_CUDA_SUM(STEM, WIDTH)                                                              \
  ROWS(SUM, sum, STEM, SM80, 1, .block_m = 1, .block_n = WIDTH, .cluster = 1, .warps = 8,          \
       .elements = WIDTH == 1),
#include "cuda/variants.inc"
};
enum { NUM_VARIANTS = sizeof variants / sizeof *variants };
_Static_assert(sizeof variants / sizeof *variants <= MOELORA_MAX_TILES,
               "a list of tiles holds every row");

const moelora_variant *moelora_variant_at(int32_t index) {
  return index >= 0 && index < NUM_VARIANTS ? &variants[index] : NULL;
}

const moelora_variant *moelora_find_variant(const char *name, size_t length) {
  for (int32_t i = 0; i < NUM_VARIANTS; i++)
    if (strncmp(variants[i].name, name, length) == 0 && variants[i].name[length] == '\0')
      return &variants[i];
  return NULL;
}

/* By CUDA id: whether a row for quantized weights also has a kernel that saves gate_up. */
static const bool saving_rows[MOELORA_CUDA_ROWS] = {
#define MOELORA_CUDA_SAVING_BF16(STEM) [CUDA_gemm_bf16_##STEM] = true,
#define MOELORA_CUDA_SAVING(STEM) MOELORA_CUDA_SAVING_BF16(STEM)[CUDA_gemm_f16_##STEM] = true,
#include "cuda/variants.inc"
};

bool moelora_variant_saves(const moelora_variant *v) {
  return v->device == MOELORA_CPU || moelora_is_native_kernel(v->format) || saving_rows[v->id];
}

bool moelora_stores_by_row(const moelora_variant *v) {
  return v->role == MOELORA_ROLE_GEMM && v->device == MOELORA_CUDA && v->needs == MOELORA_SM90 &&
         moelora_variant_saves(v) && !moelora_is_e4m3_kernel(v->format);
}

static bool agrees(int32_t value, int32_t wanted) {
  return wanted == 0 || value == wanted;
}

const moelora_variant *moelora_variant_like(const moelora_variant *like) {
  for (const moelora_variant *v = variants; v < variants + NUM_VARIANTS; v++)
    if (v->role == like->role && v->method == like->method && v->dtype == like->dtype &&
        v->needs == like->needs && v->elements == like->elements && v->gated == like->gated &&
        v->device == like->device && agrees(v->block_n, like->block_n) &&
        agrees(v->block_k, like->block_k) && agrees(v->warps, like->warps) &&
        agrees(v->ctas, like->ctas) && agrees(v->spans, like->spans))
      return v;
  return NULL;
}
