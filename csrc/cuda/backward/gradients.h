/* Gradients of factors and biases on the GPU: sums over the rows that share them.
 *
 *   gradient[l, e] (+)= ranks^T wide        over the rows of an (adapter, expert): of A
 *   gradient[l, e] (+)= wide^T ranks        the same: of B
 *   gradient[l]    (+)= the same            over the rows of an adapter: of a factor that experts
 *                                           share
 *   bias[e]        (+)= sum of wide         over the rows of an expert
 *
 * A call makes three things, in this order on its stream:
 *
 *   moelora_cuda_list_gradient_rows   which rows belong to which gradient, once for all products
 *   moelora_cuda_factor_gradients     all factors of the call
 *   moelora_cuda_bias_gradient        one bias
 *
 * The products run after the kernels that write their operands; the list needs the alignment alone.
 * Sums are float32, in the order of flat rows within an expert and of experts within an adapter,
 * in parts of MOELORA_GRADIENT_ROWS rows that are added up in order: no bit depends on other
 * adapters, on where rows lie, or on the grid. */
#ifndef MOELORA_CUDA_GRADIENTS_H
#define MOELORA_CUDA_GRADIENTS_H

#include "cuda/launch/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a part, the work of one CTA for a tile of a gradient. A multiple of the rows of a stage;
 * large enough that the float32 tiles of split sums take little memory. */
#define MOELORA_GRADIENT_ROWS 2048

/* Some of the rows that a gradient sums over. */
typedef struct moelora_gradient_part {
  int32_t adapter, expert; /* expert 0 where it is shared */
  int32_t rank;            /* true rank, or more than the stack has */
  int32_t first, count;    /* in the list of rows; 0 rows: the gradient is zero */
  int32_t slot;            /* of its float32 tiles; -1: there is one part */
} moelora_gradient_part;

/* The slots of a gradient of several parts. */
typedef struct moelora_gradient_split {
  int32_t adapter, expert, rank;
  int32_t slot, parts;
} moelora_gradient_split;

/* Parts of the gradients of one kind, in the workspace. */
typedef struct moelora_gradient_parts {
  moelora_gradient_part *part;   /* [most_parts] */
  moelora_gradient_split *split; /* [most_splits] */
  int32_t *count;                /* [2] parts and splits */
  int64_t most_parts, most_splits, most_slots;
} moelora_gradient_parts;

/* The rows with an adapter by (adapter, expert, flat row). */
typedef struct moelora_gradient_rows {
  int32_t *position, *row;         /* [P] by position of the blocks, flat row */
  float *weight;                   /* [P] routing weight; NULL: not asked for */
  moelora_segment *segments;       /* [E * (max_loras + 1)] as in moelora_blocks */
  int32_t *begin;                  /* [max_loras * E + 1] first row of each (adapter, expert) */
  moelora_gradient_parts pairs;    /* of (adapter, expert) */
  moelora_gradient_parts adapters; /* of adapters; part is NULL if not asked for */
  bool zeroes;                     /* what has no rows is a part of 0 rows */
} moelora_gradient_rows;

/* Takes the list from an arena. shared: some factor has one gradient for all experts; weighted:
 * some product has weights; zeroes: gradients are written, not accumulated. */
moelora_gradient_rows moelora_cuda_take_gradient_rows(const moelora_routes *routes, bool shared,
                                                      bool weighted, bool zeroes,
                                                      moelora_arena *arena);

/* Fills it. Reads resolved routes (token_lora_mapping, topk_weights if weighted) and, of blocks of
 * more than one row, sorted_ids, expert_ids, counts, packed_ranks and num_post; and `segments`
 * instead of searching for them, where the sort has listed them. */
moelora_status moelora_cuda_list_gradient_rows(const moelora_gradient_rows *list,
                                               const moelora_routes *routes,
                                               const moelora_blocks *blocks,
                                               const moelora_exec *exec);

/* Which row of an operand belongs to a routed row. */
typedef enum moelora_row_index {
  MOELORA_ROW_POSITION, /* its position in the blocks */
  MOELORA_ROW_FLAT,     /* p */
  MOELORA_ROW_TOKEN,    /* p / top_k */
} moelora_row_index;

/* Rows of the dtype of the call; columns are contiguous. */
typedef struct moelora_gradient_operand {
  const void *data;
  int64_t stride;
  moelora_row_index index;
} moelora_gradient_operand;

/* The gradients of one factor of each of `slices` slices, which have the same `wide`: the two A of
 * gate and up, which both multiply x, are one product of two slices; their B are two products. */
typedef struct moelora_gradient_product {
  moelora_gradient_operand ranks; /* [, slices, max_rank] slices ranks_slice apart */
  moelora_gradient_operand wide;  /* [, columns] */
  int64_t ranks_slice;
  int32_t slices; /* 1 or 2 */
  int32_t max_rank;
  int64_t columns;
  bool weighted;   /* ranks are multiplied by the routing weight, and rounded, first */
  bool transposed; /* gradients are [columns, max_rank]: of B; else [max_rank, columns]: of A */
  moelora_gradient gradient[2]; /* data NULL: that slice is not wanted */
} moelora_gradient_product;

#define MOELORA_GRADIENT_PRODUCTS 6

/* All factors of a call. */
typedef struct moelora_gradients_launch {
  moelora_gradient_product product[MOELORA_GRADIENT_PRODUCTS];
  int32_t count;
  moelora_dtype dtype; /* of the operands: bf16 or fp16 */
  int32_t top_k;
  bool accumulate;
  float *slots; /* workspace: moelora_cuda_gradient_slot_bytes */
} moelora_gradients_launch;

/* Of the float32 tiles of split sums; products need sizes and gradients, not operands. */
size_t moelora_cuda_gradient_slot_bytes(const moelora_gradients_launch *g,
                                        const moelora_gradient_rows *list);
moelora_status moelora_cuda_factor_gradients(const moelora_gradients_launch *g,
                                             const moelora_gradient_rows *list,
                                             const moelora_exec *exec);

/* bias[e] (+)= sum over the rows of e, base rows included, in the order of positions. */
typedef struct moelora_bias_launch {
  moelora_gradient_operand rows; /* [, columns] of `dtype` */
  int64_t columns;
  moelora_dtype dtype;
  bool weighted; /* times the routing weight */
  moelora_gradient gradient;
  bool accumulate;
} moelora_bias_launch;

/* Reads resolved routes (topk_weights if weighted) and of blocks what the list does, but for
 * adapters. */
moelora_status moelora_cuda_bias_gradient(const moelora_bias_launch *b,
                                          const moelora_routes *routes,
                                          const moelora_blocks *blocks, const moelora_exec *exec);

/* Float32 factors beside a 16-bit dtype: each of `factors` with `wide` gets a copy, rounded to
 * `dtype`, in the arena, and refers to that one afterwards. `depth` is the K of A. With an arena
 * without memory it only counts. */
typedef struct moelora_rounded_factors {
  moelora_factors from, to; /* `to` has wide false */
  int64_t depth;
} moelora_rounded_factors;

/* Factors that are not wide stay as they are and take nothing. */
moelora_rounded_factors moelora_cuda_take_rounded(const moelora_factors *factors, int64_t depth,
                                                  const moelora_routes *routes, moelora_dtype dtype,
                                                  moelora_arena *arena);
/* One launch for all of `count` projections; none if nothing is wide. */
moelora_status moelora_cuda_round_factors(const moelora_rounded_factors *rounded, int32_t count,
                                          const moelora_routes *routes, moelora_dtype dtype,
                                          const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
