/* Problems: validated arguments of a call, reduced to pointers, extents and strides. Strides count
 * elements. */
#pragma once

#include <stdbool.h>

#include "core/activation.h"

MOELORA_BEGIN_C

static inline int64_t moelora_divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/* Integer ids, 32-bit or 64-bit. */
typedef struct moelora_ids {
  const void *data;
  int64_t stride[2];
  bool is_64;
} moelora_ids;

/* Expert and adapter of each routed row. */
typedef struct moelora_routes {
  int64_t num_tokens; /* M */
  int32_t top_k;
  int64_t num_rows;          /* P */
  int32_t num_experts;       /* E, local */
  moelora_ids topk_ids;      /* [M, top_k] */
  const float *topk_weights; /* [M, top_k]; NULL if the operator needs none */
  int64_t topk_weights_stride[2];
  const int32_t *expert_map; /* [num_global]; NULL: ids are local */
  int32_t num_global;
  /* adapters; if token_lora_mapping.data is NULL, rows are base rows, or lists define adapters */
  int32_t max_loras;
  moelora_ids token_lora_mapping; /* [M] */
  const int32_t *lora_ranks;      /* [max_loras]; NULL: the stack's R */
  const float *lora_scalings;     /* [max_loras]; NULL: 1 */
  const int32_t *w13_one_a;       /* [max_loras]; nonzero: both A of w13 are equal; NULL: none */
  const void *adapter_enabled;    /* [max_loras], 1 or 4 bytes each; NULL: all enabled */
  int32_t adapter_enabled_bytes;
} moelora_routes;

/* Expert weights, row-major or packed. Element (e, n, k) is at
 *   e*stride_e + (n/64)*stride_nt + (n%64)*stride_n + (k/64)*stride_kt + k%64,
 * so row-major weights have stride_nt = 64*stride_n and stride_kt = 64. For formats other than
 * MOELORA_NATIVE, tile (e, i, j) is at e*stride_e + i*stride_nt + j*stride_kt bytes, in the row
 * order of moelora_layout; the first `half_tiles` row tiles hold gate rows. */
typedef struct moelora_weights {
  const void *data; /* [E, n, k] */
  int64_t n, k;
  int64_t stride_e, stride_nt, stride_n, stride_kt;
  const void *bias; /* [E, n], rows contiguous; NULL: none */
  int64_t bias_stride_e;
  bool packed;
  moelora_format format;
  moelora_row_order order;
  int64_t half_tiles; /* 0 for PLAIN order */
  moelora_x_format x; /* format of x in the product */
  float x_scale;      /* STATIC only */
} moelora_weights;

/* One LoRA factor: element (l, e, i, j) at l*stride_l + e*stride_e + i*stride_i + j. A shared
 * expert dimension has stride_e = 0. */
typedef struct moelora_factor {
  const void *data;
  int64_t stride_l, stride_e, stride_i;
} moelora_factor;

typedef struct moelora_factors {
  int32_t num_slices; /* 0: no adapters */
  int32_t max_rank;   /* R */
  int64_t slice_n;    /* output columns of one slice; of the widest, if a delta's differ */
  int64_t column[MOELORA_MAX_SLICES + 1]; /* first output column of each slice; [num_slices]: all */
  bool wide; /* float32, to be rounded to the 16-bit compute dtype first */
  moelora_factor a[MOELORA_MAX_SLICES]; /* [max_loras, E, R, K] */
  moelora_factor b[MOELORA_MAX_SLICES]; /* [max_loras, E, columns of the slice, R] */
} moelora_factors;

static inline int64_t moelora_slice_columns(const moelora_factors *factors, int32_t slice) {
  return factors->column[slice + 1] - factors->column[slice];
}

/* Returns the number of columns of the shrink output: the ranks of all slices, each padded to
 * 16. */
static inline int64_t moelora_padded_columns(const moelora_factors *factors) {
  return factors->num_slices * (((int64_t)factors->max_rank + 15) / 16 * 16);
}

typedef struct moelora_align_problem {
  moelora_align_mode mode;
  moelora_routes routes;
  int32_t block_size;
  int64_t max_blocks;
  int32_t *sorted_token_ids; /* [max_blocks * block_size] */
  int32_t *expert_ids;       /* [max_blocks] */
  int32_t *lora_ids;         /* [max_blocks] or [max_blocks * block_size]; NULL: not requested */
  int32_t *num_tokens_post_padded; /* [1] */
  float *sorted_weights;           /* [max_blocks * block_size]; NULL unless SORTING */
  void *out_to_zero;
  size_t out_to_zero_bytes;
} moelora_align_problem;

/* out[p] = (x w[e]^T + LoRA + bias) * weight, for every routed row p; the weight is 1 without
 * mul_routed_weight. */
typedef struct moelora_gemm_problem {
  moelora_routes routes;
  moelora_dtype dtype;
  const void *x; /* [M, K] or [P, K] */
  int64_t x_stride;
  bool x_per_row; /* x has P rows: row p is x[p]; otherwise x[p / top_k] */
  moelora_weights w;
  moelora_factors lora;
  bool mul_routed_weight;
  void *out; /* [M, top_k, N] */
  int64_t out_stride[2];
} moelora_gemm_problem;

/* The tensors of moelora_saved, as kernels write and read them; gate_up == NULL: none. */
typedef struct moelora_saved_rows {
  void *gate_up;   /* [P, rows of w13] */
  void *shrink[2]; /* of w13 [P, slices, R], of w2 [P, 1, R]; NULL: no adapters */
  int64_t gate_up_stride;
  int64_t shrink_stride[2][2];
} moelora_saved_rows;

typedef struct moelora_experts_problem {
  moelora_routes routes;
  moelora_dtype dtype;
  int64_t hidden;       /* K */
  int64_t intermediate; /* I */
  const void *x;        /* [M, K] */
  int64_t x_stride;
  moelora_weights w13, w2;
  moelora_factors w13_lora, w2_lora;
  moelora_activation_problem activation;
  bool apply_router_weight_on_input;
  void *out; /* [M, K] */
  int64_t out_stride;
  moelora_saved_rows saved;
} moelora_experts_problem;

/* Gradient of a factor [max_loras, experts, rows, columns], or of a bias [1, E, 1, N], with
 * contiguous columns. `experts` is 1 if all experts share the factor. A sparse gradient is [1, S,
 * rows, columns]; moelora_gradient_pairs maps (adapter, expert) to an index below S. */
typedef struct moelora_gradient {
  void *data; /* NULL: not requested */
  moelora_dtype dtype;
  int32_t loras, experts;
  int64_t rows, columns;
  int64_t stride_l, stride_e, stride_i;
  bool sparse;
} moelora_gradient;

/* Maps (adapter, expert) to a matrix of sparse gradients. */
typedef struct moelora_gradient_pairs {
  const int32_t *index; /* [max_loras, E] indices in sparse gradients; NULL: none are sparse */
  int64_t count;        /* entries of `index`, also if no token has an adapter */
  int32_t num_sparse;   /* S; an index outside 0 to S - 1: no gradient */
} moelora_gradient_pairs;

typedef struct moelora_experts_backward_problem {
  moelora_experts_problem forward;
  const void *dout; /* [M, K] */
  int64_t dout_stride;
  void *dx; /* [M, K]; NULL: not requested, as for all gradients below */
  int64_t dx_stride;
  float *dtopk_weights; /* [M, top_k] */
  int64_t dtopk_weights_stride[2];
  moelora_gradient a13[2], b13[2], a2, b2, bias13, bias2;
  moelora_gradient_pairs pairs;
  bool accumulate;
  bool overwrites_gate_up; /* of forward.saved */
} moelora_experts_backward_problem;

/* The backward of a projection or of a delta. */
typedef struct moelora_gemm_backward_problem {
  moelora_gemm_problem forward; /* w.data NULL: a delta; `out` is not used */
  const void *dout;             /* [M, top_k, N] */
  int64_t dout_stride[2];
  void *dx; /* same rows as x; NULL: not requested, as for all gradients below */
  int64_t dx_stride;
  float *dtopk_weights; /* [M, top_k] */
  int64_t dtopk_weights_stride[2];
  moelora_gradient a[MOELORA_MAX_SLICES], b[MOELORA_MAX_SLICES], bias;
  moelora_gradient_pairs pairs;
  bool accumulate;
} moelora_gemm_backward_problem;

/* vLLM's lists, as kernels read them. */
typedef struct moelora_list_blocks {
  int32_t *sorted_token_ids; /* [max_loras, rows]; NULL: rows come from moelora_routes */
  int64_t rows, sorted_stride;
  int32_t *expert_ids; /* [max_loras, blocks] */
  int64_t blocks, expert_stride;
  int32_t *num_tokens_post_padded; /* [max_loras] */
  const int32_t *lora_ids;         /* [num_active] */
  int32_t num_active;
  int32_t block_size;
} moelora_list_blocks;

typedef struct moelora_align_lists_problem {
  moelora_routes routes;
  moelora_list_blocks lists;
} moelora_align_lists_problem;

/* LoRA without a base product: x -> x A^T -> out, or one of the two steps. With lists,
 * routes.topk_ids and routes.token_lora_mapping are NULL; all other members of routes are valid. */
typedef struct moelora_delta_problem {
  moelora_routes routes;
  moelora_list_blocks lists;
  moelora_dtype dtype;
  moelora_factors lora; /* a[] in a shrink, b[] in an expand; stride_e = 0 if shared */
  int64_t k;            /* columns of x; 0: expand only */
  int64_t columns;      /* columns of z, of all slices; 0: shrink only */
  const void *x;        /* [M, k] or [P, k] */
  int64_t x_stride;
  bool x_per_row;
  void *xa; /* x A^T, `h` in public arguments: [num_slices, M, top_k, R]; NULL: in the workspace */
  int64_t xa_stride[3];
  bool silu_and_mul; /* columns [0, columns / 2) are gate, the rest up; out has `columns / 2` */
  bool mul_routed_weight;
  bool add_inputs;
  bool sum_top_k; /* out is [M, columns], the sum over j */
  void *out;      /* [M, top_k, columns], from out_offset on */
  int64_t out_stride[2];
} moelora_delta_problem;

/* Whether the call has nothing to do: it has no rows or no adapters. */
static inline bool moelora_is_idle_delta(const moelora_delta_problem *problem) {
  const bool any = problem->lists.sorted_token_ids
                       ? problem->lists.num_active > 0
                       : problem->routes.token_lora_mapping.data != NULL;
  return !any || problem->routes.num_rows == 0;
}

/* An adapter MLP: of[0], gate and up, writes silu(gate) * up to the workspace, where of[1], down,
 * reads it. Only of[1] has the scalings. */
typedef struct moelora_mlp_delta_problem {
  moelora_delta_problem of[2]; /* gate and up: out is NULL; down: x is NULL */
} moelora_mlp_delta_problem;

typedef struct moelora_pack_problem {
  moelora_weights w; /* row-major source */
  int64_t num_experts;
  int32_t element_bytes;
  void *out; /* [E, N/64, K/64, 64, 64] */
} moelora_pack_problem;

/* Packs quantized weights into tiles, or dequantizes tiles. */
typedef struct moelora_quantized_problem {
  moelora_weights tiles; /* contiguous; n, k, format and order are those of the weight */
  int64_t num_experts;
  moelora_dtype dtype; /* of the activations */
  /* packing */
  const uint8_t *values; /* [E, n, k / 2], rows contiguous */
  const void *scales;    /* [E, n, k / group] of scale_dtype, rows contiguous */
  const uint8_t *zeros;  /* as scales; NULL: none */
  const float
      *tensor_scales; /* [E, 2]: of the first half_tiles row tiles, of the others; NULL: none */
  int64_t values_stride[2], scales_stride[2], zeros_stride[2], tensor_scales_stride[2];
  moelora_dtype scale_dtype;
  int64_t group;
  /* FP8: values [E, n, k]; scales [E, n / block_rows, k / block_columns] float32 */
  int64_t block_rows, block_columns;
  void *packed; /* tiles.data, writable */
  /* unpacking */
  void *out; /* [E, n, k] of dtype, rows contiguous */
  int64_t out_stride[2];
} moelora_quantized_problem;

/* ---- alignment and strides that kernels require ---- */

static inline size_t moelora_dtype_bytes(moelora_dtype dtype) {
  return dtype == MOELORA_I64                            ? 8
         : dtype == MOELORA_F32 || dtype == MOELORA_I32  ? 4
         : dtype == MOELORA_BF16 || dtype == MOELORA_F16 ? 2
                                                         : 1;
}

/* Whether rows of `length` 16-bit elements, `stride` apart, can be accessed in 16-byte vectors. */
static inline bool moelora_is_vector_row(const void *data, int64_t stride, int64_t length) {
  return (uintptr_t)data % 16 == 0 && stride % 8 == 0 && length % 8 == 0;
}

static inline bool moelora_is_vector_weights(const moelora_weights *w) {
  return moelora_is_vector_row(w->data, w->stride_n, w->k) && w->stride_e % 8 == 0 &&
         w->stride_nt % 8 == 0 && w->stride_kt % 8 == 0 && w->n % 8 == 0;
}

/* Whether a tensor map supports the stride, in 16-bit elements: less than 2^40 bytes. */
static inline bool moelora_is_map_stride(int64_t stride) {
  return stride < (int64_t)1 << 39;
}

/* Whether the strides of factors that allow 16-byte accesses fit a tensor map. `rows`: maximum
 * number of rows that one of its strides spans. */
static inline bool moelora_are_map_factors(const moelora_factor *factors, int32_t count,
                                           int64_t rows) {
  bool all = true;
  for (int32_t i = 0; i < count; i++)
    all = all && factors[i].stride_i > 0 && moelora_is_map_stride(factors[i].stride_i * rows) &&
          moelora_is_map_stride(factors[i].stride_e) && moelora_is_map_stride(factors[i].stride_l);
  return all;
}

static inline bool moelora_are_vector_factors(const moelora_factor *factors, int32_t count) {
  bool all = true;
  for (int32_t i = 0; i < count; i++)
    all = all && (uintptr_t)factors[i].data % 16 == 0 && factors[i].stride_l % 8 == 0 &&
          factors[i].stride_e % 8 == 0 && factors[i].stride_i % 8 == 0;
  return all;
}

MOELORA_END_C
