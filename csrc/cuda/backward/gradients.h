/* Gradients of factors, biases and routing weights on the GPU. Those of factors and biases are sums
 * over the rows that share them:
 *
 *   A: gradient[l, e] (+)= ranks^T wide     over the rows of an (adapter, expert)
 *   B: gradient[l, e] (+)= wide^T ranks     over the rows of an (adapter, expert)
 *   gradient[l]       (+)= either product   over the rows of an adapter, if experts share factors
 *   bias[e]           (+)= sum of wide      over the rows of an expert
 *
 * A call runs, in this order on its stream:
 *
 *   moelora_cuda_list_gradient_rows   assigns rows to gradients, once for all products
 *   moelora_cuda_factor_gradients     computes the gradients of all factors
 *   moelora_cuda_bias_gradient        computes the gradient of one bias
 *
 * The products run after the kernels that write their operands; the list only needs the alignment.
 * Factors are summed in float32: within an adapter in the order of experts, within an expert in the
 * order of flat rows, in parts of MOELORA_GRADIENT_ROWS rows that are added in order. Results do
 * not depend on other adapters, on the position of rows, or on the grid. */
#pragma once

#include "cuda/launch/launch.h"

/* Maximum number of rows of a part, which one CTA processes for a tile of a gradient: a multiple of
 * the rows of a stage, and large enough that the float32 tiles of split sums take little memory. */
#define MOELORA_GRADIENT_ROWS 2048
/* Pairs with at most this many rows go to the kernel of gradients_few.cuh, which holds their rows
 * of `ranks` in shared memory, up to RANKS columns of each. */
#define MOELORA_GRADIENT_FEW(RANKS) ((RANKS) <= 16 ? 384 : (RANKS) <= 32 ? 320 : 128)

/* A part of the rows over which a gradient sums. */
typedef struct moelora_gradient_part {
  int32_t adapter, expert; /* expert is 0 if shared */
  int32_t to[2];           /* index of its gradient in the first two dimensions; -1: none */
  int32_t rank;            /* true rank; may exceed max_rank */
  int32_t first, count;    /* range in the list of rows; 0 rows: the gradient is zero */
  int32_t slot;            /* slot of its float32 tiles; -1: the gradient has one part */
} moelora_gradient_part;

/* A gradient with several parts: their tiles are in slots [slot, slot + parts). */
typedef struct moelora_gradient_split {
  int32_t to[2], rank;
  int32_t slot, parts;
} moelora_gradient_split;

/* Parts of all gradients of pairs, or of adapters, in the workspace. */
typedef struct moelora_gradient_parts {
  moelora_gradient_part *few;    /* [max_few] pairs of at most few_rows rows, not split */
  moelora_gradient_part *part;   /* [max_parts] all other parts */
  moelora_gradient_split *split; /* [max_splits] */
  int32_t *count;                /* [3] counts of `part`, `split`, `few` */
  uint64_t *few_counter;         /* tiles of `few` that CTAs have fetched */
  int64_t max_parts, max_splits, max_slots, max_few;
  int32_t few_rows; /* maximum rows of a pair in `few`; 0: `few` is NULL */
} moelora_gradient_parts;

/* Rows with an adapter, sorted by (adapter, expert, flat row). */
typedef struct moelora_gradient_rows {
  int32_t *position, *row, *token; /* [P] position in the blocks, flat row, flat row / top_k */
  float *weight;                   /* [P] routing weight; NULL: not requested */
  moelora_segment *segments;       /* [E * (max_loras + 1)] as in moelora_blocks */
  int32_t *begin;                  /* [max_loras * E + 1] first row of each (adapter, expert) */
  moelora_gradient_parts pairs;    /* of (adapter, expert) */
  moelora_gradient_parts adapters; /* of adapters; part is NULL if not requested */
  bool zeroes;                     /* gradients without rows get a part with 0 rows */
  const int32_t *given;            /* [max_loras * E] the caller's indices in sparse gradients */
  int32_t num_sparse;              /* indices outside 0 to num_sparse - 1 have no gradient */
  int32_t *sparse; /* [max_loras * E] copy of `given`; NULL: gradients are not sparse */
} moelora_gradient_rows;

/* Determines which members of moelora_gradient_rows a call fills. */
typedef struct moelora_gradient_uses {
  bool shared;          /* some factor has one gradient for all experts */
  bool weighted;        /* some product has weights */
  bool zeroes;          /* gradients are overwritten, not accumulated */
  const int32_t *pairs; /* [max_loras, E] indices in sparse gradients; NULL: none are sparse */
  int32_t num_sparse;
  int32_t few_rows; /* pairs with at most this many rows are listed apart; 0: none are, since
                     * moelora_is_few_gradient does not hold for all gradients */
} moelora_gradient_uses;

/* Returns whether units of 8 elements of a gradient allow 16-byte accesses. */
static inline bool moelora_is_vector_gradient(const moelora_gradient *g) {
  return (uintptr_t)g->data % 16 == 0 && g->columns % 8 == 0 && g->stride_i % 8 == 0 &&
         g->stride_e % 8 == 0 && g->stride_l % 8 == 0;
}
/* Returns whether the kernel for pairs with few rows can write a gradient: it is overwritten, has
 * the dtype of the call, and its row stride in bytes fits 32 bits. */
static inline bool moelora_is_few_gradient(const moelora_gradient *g, bool accumulate) {
  return !accumulate && g->dtype != MOELORA_F32 && g->stride_i < 1 << 30 &&
         moelora_is_vector_gradient(g);
}

moelora_gradient_rows moelora_cuda_take_gradient_rows(const moelora_routes *routes,
                                                      const moelora_gradient_uses *uses,
                                                      moelora_arena *arena);

/* Fills the list. Reads resolved routes: token_lora_mapping, lora_ranks, and topk_weights if
 * weighted. Reads of `blocks`, whose `rows` must exceed 1: sorted_ids, and `segments` or, if that
 * is NULL, expert_ids, counts, packed_ranks and num_post. */
moelora_status moelora_cuda_list_gradient_rows(const moelora_gradient_rows *list,
                                               const moelora_routes *routes,
                                               const moelora_blocks *blocks,
                                               const moelora_exec *exec);

/* Selects the row of an operand that belongs to a routed row. */
typedef enum moelora_row_index {
  MOELORA_ROW_POSITION, /* its position in the blocks */
  MOELORA_ROW_FLAT,     /* p */
  MOELORA_ROW_TOKEN,    /* p / top_k */
} moelora_row_index;

/* Rows in the dtype of the call; columns are contiguous. */
typedef struct moelora_gradient_operand {
  const void *data;
  int64_t stride;
  moelora_row_index index;
} moelora_gradient_operand;

/* Gradients of the A, or of the B, of `slices` slices that share `wide`: the two A of gate and up,
 * which both multiply x, are one product with two slices; their B are two products. */
typedef struct moelora_gradient_product {
  moelora_gradient_operand ranks; /* [, slices, max_rank] slices are ranks_slice apart */
  moelora_gradient_operand wide;  /* [, columns] */
  int64_t ranks_slice;
  int32_t slices; /* 1 or 2 */
  int32_t max_rank;
  int64_t columns;
  bool weighted;   /* ranks are first multiplied by the routing weight, and rounded */
  bool transposed; /* gradients of B, [columns, max_rank]; otherwise of A, [max_rank, columns] */
  moelora_gradient gradient[2]; /* data NULL: not requested for that slice */
} moelora_gradient_product;

#define MOELORA_GRADIENT_PRODUCTS 6

/* The gradients of all factors of a call. */
typedef struct moelora_gradients_launch {
  moelora_gradient_product product[MOELORA_GRADIENT_PRODUCTS];
  int32_t count;
  moelora_dtype dtype; /* of the operands: bf16 or fp16 */
  int32_t top_k;
  bool accumulate;
  float *slots; /* workspace: moelora_cuda_gradient_slot_bytes */
} moelora_gradients_launch;

/* Returns the bytes of the float32 tiles of split sums. Products need sizes and gradients, but no
 * operands. */
size_t moelora_cuda_gradient_slot_bytes(const moelora_gradients_launch *g,
                                        const moelora_gradient_rows *list);
moelora_status moelora_cuda_factor_gradients(const moelora_gradients_launch *g,
                                             const moelora_gradient_rows *list,
                                             const moelora_exec *exec);

/* bias[e] (+)= sum over all rows of e, with and without adapters, in a fixed order of positions. */
typedef struct moelora_bias_launch {
  moelora_gradient_operand rows; /* rows of `columns` values of `dtype` */
  int64_t columns;
  moelora_dtype dtype;
  bool weighted; /* multiplied by the routing weight */
  moelora_gradient gradient;
  bool accumulate;
} moelora_bias_launch;

/* Reads topk_weights of the resolved routes if weighted, and sorted_ids, expert_ids, counts and
 * num_post of `blocks`, whose `rows` must exceed 1. */
moelora_status moelora_cuda_bias_gradient(const moelora_bias_launch *b,
                                          const moelora_routes *routes,
                                          const moelora_blocks *blocks, const moelora_exec *exec);

/* Float32 factors of a call with a 16-bit dtype, and the copies that moelora_rounded() allocated.
 */
typedef struct moelora_rounding {
  const moelora_factors *from, *to;
} moelora_rounding;

/* Rounds the factors of all `count` projections in one launch; no launch if none is float32. */
moelora_status moelora_cuda_round_factors(const moelora_rounding *roundings, int32_t count,
                                          const moelora_routes *routes, moelora_dtype dtype,
                                          const moelora_exec *exec);

/* zero.cu: zeroes a gradient; of a sparse one, only the matrices whose index is in `pairs`. */
moelora_status moelora_cuda_zero_gradient(const moelora_gradient *gradient, const int32_t *pairs,
                                          int64_t num_pairs, const moelora_exec *exec);

/* ---- gradients of routing weights: routing_weights.cu ---- */

/* Rows of an operand: row p / divisor belongs to flat row p. */
typedef struct moelora_divided_rows {
  const void *data;
  int64_t stride, columns;
  int32_t divisor;
} moelora_divided_rows;

typedef struct moelora_weight_gradients {
  const int32_t *experts; /* [P] -1: skipped */
  int64_t num_rows;       /* P */
  int32_t top_k;
  const float *dt;          /* [position, parts]; NULL: not a term */
  const int32_t *positions; /* [P] */
  int32_t parts;
  const void *bias; /* [E, columns of dout]; NULL: not a term */
  int64_t bias_stride_e;
  moelora_divided_rows dout;
  const void *dz; /* [P, columns of x]; NULL: not a term */
  moelora_divided_rows x;
  float *out; /* [M, top_k] */
  int64_t out_stride[2];
} moelora_weight_gradients;

moelora_status moelora_cuda_weight_gradients(const moelora_weight_gradients *s, moelora_dtype dtype,
                                             const moelora_exec *exec);
