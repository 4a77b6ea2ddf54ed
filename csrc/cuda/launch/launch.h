/* Interfaces between the CUDA files of a layer. Functions that take an exec and return a status
 * enqueue work on its stream. Pointers are device pointers unless noted otherwise; strides count
 * elements. */
#pragma once

#include <cuda_runtime.h>

#include "core/backend.h"
#include "cuda/gemm/launchers.h"
#include "cuda/launch/divisor.h"

/* Functions of the backend's table. */
#define OPERATOR(NAME, ...) moelora_##NAME##_function moelora_cuda_##NAME;
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"

/* A packed rank is adapter * kRanks + rank. */
constexpr int32_t kRanks = MOELORA_RANKS;
static_assert(MOELORA_SORT_KEYS <= INT32_MAX / kRanks, "every adapter that a sort knows has one");

/* Allocates an array of `count` elements. */
template <class T> void take_array(moelora_arena *arena, T **array, size_t count) {
  *array = (T *)moelora_take_array(arena, count, sizeof(T));
}

/* Returns the columns of a slice of the shrink output: the rank, rounded up to a multiple of 16, so
 * that a k16 step never covers two slices. */
static inline __host__ __device__ int32_t moelora_padded_rank(int32_t rank) {
  return (rank + 15) / 16 * 16;
}

/* Rows of one expert that carry one adapter: `count` rows from `position` on, not counting padding.
 * Each block of the expert holds `share` rows, until the last row; if rows are not padded, `share`
 * is the number of rows of the expert. */
typedef struct moelora_segment {
  int32_t packed; /* adapter * kRanks + true rank; -1: nothing to add */
  int32_t position, count, share;
} moelora_segment;

/* Maximum number of projections over one alignment. */
#define MOELORA_PROJECTIONS 2

/* Routed rows in blocks of one expert each, sorted by adapter within an expert. Block b holds
 * counts[b] rows from position b * rows on; the rest up to (b + 1) * rows is padding. The rows of
 * an expert are distributed evenly over the smallest sufficient number of blocks, in multiples of
 * `grain`. The blocks of a `cluster` belong to one expert; the last of them may be empty. */
typedef struct moelora_blocks {
  int32_t rows; /* rows per block; if 1, with a cluster of 1, rows are not padded */
  int16_t cluster;
  int16_t grain;
  int64_t max_blocks;
  int32_t *sorted_ids; /* [max_blocks * rows] flat row p; P in padding */
  int32_t *expert_ids; /* [max_blocks] */
  int32_t *counts;     /* [max_blocks] */
  int32_t *pairs; /* [max_blocks] Two consecutive blocks of an expert are a pair: the entry of the
                     first is the count of the second, the entry of the second is minus the count of
                     the first. 0: a last block without a partner. NULL: not requested */
  int32_t *packed_ranks; /* [max_blocks * rows] -1: nothing to add, or padding; NULL: no adapters */
  int32_t *positions;    /* [P] position of each flat row, -1 if skipped; NULL: not requested */
  float *weights;        /* [max_blocks * rows] routing weights; NULL: not requested */
  /* [num_experts * (max_loras + 1)] adapter l of expert e at e * (max_loras + 1) + 1 + l, preceded
   * by the expert's rows without an adapter; NULL: not requested */
  moelora_segment *segments;
  int32_t *num_post;      /* [1] number of positions in use */
  int32_t *tile_counters; /* [num_counters] set to zero; NULL: not requested */
  int64_t num_counters;
} moelora_blocks;

/* Parts of a launch over blocks of rows. Kernels take them by value. The largest tiles are at their
 * register limit, where the order of members decides whether ptxas spills. */

/* The rows, and the schedule of their tiles. */
typedef struct moelora_schedule {
  moelora_blocks blocks;
  int32_t *tile_counter; /* counters of the dynamic TileScheduler, initially zero */
  int32_t num_rows;      /* P */
  int32_t num_experts;
  int32_t max_loras;
  int32_t l2_elements; /* elements of tokens that stay in L2 while weights stream through */
  int32_t run;         /* tiles of a run; see TileScheduler */
} moelora_schedule;

/* Token rows of a main loop; `stride` and `k` count elements of x. With x as the first member, the
 * 128 x 256 tile of sm_80 would spill. For W8A8, moelora_quantize_launch describes x. */
typedef struct moelora_tokens {
  moelora_divisor divisor; /* value 0: x is ordered by position */
  int64_t stride;
  const void *x; /* [P / divisor, K], or by position */
  int32_t k;
  /* W8A8: scale of row r and K group i at i * scales_stride + r; otherwise NULL */
  const float *scales;
  int64_t scales_stride;
} moelora_tokens;

/* Weights of a main loop. */
typedef struct moelora_weight_rows {
  moelora_weights w;
  int32_t n_out; /* outputs per row: I of a gated projection, else N */
  bool gated;
  bool interleaved;     /* gate and up rows alternate */
  bool vectors;         /* x, w and out allow 16-byte accesses */
  bool factors_vectors; /* factors B allow 16-byte accesses */
  bool factors_boxes;   /* each slice of B has a tensor map */
  bool read_again;      /* weights_again of the plan: other clusters read the same w */
} moelora_weight_rows;

/* Adapters of a projection, and the shrink output between A and B. */
typedef struct moelora_lora_operands {
  const void *xa;              /* [position, num_slices * xa_slice] scaled shrink output */
  int64_t xa_stride, xa_slice; /* xa_slice: max_rank, rounded up to a multiple of 16 */
  moelora_factors lora;        /* num_slices == 0: none */
  const int32_t *one_a; /* [max_loras] nonzero: both slices use A of slice 0; NULL: none does */
} moelora_lora_operands;

/* Rows of x or h, quantized to e4m3 for W8A8 kernels. moelora_quantize_launch describes `values`
 * and `scales`. */
typedef struct moelora_quantized_rows {
  void *values; /* [, stride] NULL: not requested */
  int64_t stride;
  float *scales; /* [groups, scales_stride] */
  int64_t scales_stride;
  moelora_x_format rule; /* how scales are computed */
  float scale;           /* the scale of all rows, unless `rule` computes scales */
} moelora_quantized_rows;

/* Epilogue of a projection. */
typedef struct moelora_epilogue {
  int32_t top_k;
  moelora_activation_problem activation; /* gated projections, or relu2; otherwise none */
  bool plain_silu;                       /* silu without a limit, tested once instead of per tile */
  bool weighted;
  bool out_by_position; /* out is [position, n_out]; otherwise [M, top_k, n_out] */
  void *out;
  int64_t out_stride[2];
  /* W8A8 kernels of Hopper with tiles of 256 weight rows also store h quantized, unless e4m3.values
   * is NULL; out_unread: they do not store `out` */
  moelora_quantized_rows e4m3;
  bool out_unread;
} moelora_epilogue;

/* Outputs of w before the activation, which a forward saves for the backward, by flat row. */
typedef struct moelora_before_activation {
  void *rows; /* [P, N]; NULL: not saved */
  int64_t stride;
} moelora_before_activation;

/* One grouped projection, of flat row p at position i:
 *   out[p] = act(x[p / divisor] w[e]^T + xa[i] B[l, e]^T + bias[e]) * weight
 * If divisor is 0, x[i] replaces x[p / divisor]; if out_by_position, out[i] replaces out[p]. */
typedef struct moelora_gemm_launch {
  moelora_schedule schedule;
  moelora_tokens tokens;
  moelora_weight_rows weights;
  moelora_lora_operands adapters;
  moelora_epilogue epilogue;
  moelora_before_activation before; /* used by the saving launchers only */
} moelora_gemm_launch;

/* Shrink of the same rows, with zeros from the true rank to the next multiple of 16:
 *   xa[position, slice * xa_slice + r] = round(unit * scaling[l] * x A[l, e]^T)
 * Rows without an adapter are not written. */
typedef struct moelora_shrink_launch {
  moelora_schedule schedule;
  moelora_tokens tokens;
  moelora_lora_operands adapters;
  const float *scalings; /* [max_loras] or NULL */
  float unit;            /* multiplies all of xa */
  void *xa;              /* output: adapters.xa of the projection */
  bool by_row;           /* xa is ordered by flat row; only deltas over whole segments set this */
  bool by_adapter;       /* CTAs process listed segments adapter by adapter */
} moelora_shrink_launch;

/* Sum over top_k:
 *   out[m] = round([out[m] +] sum over j of weight z[row of (m, j)]) */
typedef struct moelora_sum_launch {
  moelora_routes routes; /* of moelora_cuda_take_routes: ids are mapped, -1 if skipped */
  const void *z;         /* [, z_stride] */
  int64_t z_stride;
  /* Layers: position in z of each flat row. */
  const int32_t *positions; /* [P] -1: skipped; NULL: a delta, z is [P] */
  bool by_row;              /* z is ordered by flat row; positions only mark the skipped rows */
  const float *weights;     /* [M, top_k]; NULL: 1 */
  int64_t weights_stride[2];
  /* Deltas: nonzero for flat rows that the expand wrote. Tokens without one are not stored. */
  const uint8_t *written; /* [P]; NULL: those with an expert and an adapter of nonzero rank */
  int32_t max_rank;
  bool add;  /* accumulate into out */
  void *out; /* [M, columns] */
  int64_t out_stride;
  int32_t columns;
} moelora_sum_launch;

/* align/resolve.cu: copies the caller's tables into the workspace, because another stream may
 * change the originals during the call (e.g. disable an adapter), and kernels must not see both
 * states. The take functions allocate the copies: dense ids of local experts and of enabled
 * adapters, -1 if skipped. The ids are already mapped; expert_map is kept only if `with_map`, to
 * mark the local experts. */
moelora_routes moelora_cuda_take_routes(const moelora_routes *routes, bool with_map,
                                        moelora_arena *arena);
moelora_list_blocks moelora_cuda_take_lists(const moelora_list_blocks *lists, int32_t max_loras,
                                            bool with_counts, moelora_arena *arena);
/* Writes the tables of `to` and, unless NULL, of `to_lists` from the caller's. overlaps: the kernel
 * may start before the previous one has finished. */
moelora_status moelora_cuda_resolve(const moelora_routes *from, const moelora_routes *to,
                                    const moelora_list_blocks *from_lists,
                                    const moelora_list_blocks *to_lists, bool overlaps,
                                    const moelora_exec *exec);

/* Scratch memory that an alignment needs to sort; members are NULL if not needed. */
typedef struct moelora_sort_scratch {
  uint32_t *table;
  int32_t *order;                          /* [M] */
  int32_t *row, *expert, *adapter, *count; /* [P], [P], [P], [1] */
} moelora_sort_scratch;

/* align/align.cu: take_scratch allocates the scratch memory, align_rows fills `blocks`. Unless
 * `from` is NULL, align_rows first waits for the previous kernel and resolves `from` to `routes`.
 */
moelora_sort_scratch moelora_cuda_take_scratch(const moelora_routes *routes,
                                               moelora_align_mode mode,
                                               const moelora_align_plan *plan,
                                               moelora_arena *arena);
moelora_status moelora_cuda_align_rows(const moelora_routes *from, const moelora_routes *routes,
                                       const moelora_blocks *blocks, const moelora_align_plan *plan,
                                       const moelora_sort_scratch *scratch,
                                       const moelora_exec *exec);

/* Unpadded routed rows, sorted by expert, then adapter; `count` of P entries are valid. */
typedef struct moelora_sorted_rows {
  int32_t *row, *expert, *adapter; /* [P]; adapter -1: none */
  int32_t *count;                  /* [1] */
  moelora_segment *segments;       /* as in moelora_blocks; NULL: not listed */
  moelora_sort_scratch scratch;
} moelora_sorted_rows;
/* align/align.cu: take_sorted allocates sorted rows, sort_rows fills them. */
moelora_sorted_rows moelora_cuda_take_sorted(const moelora_routes *routes,
                                             const moelora_align_plan *plan, moelora_arena *arena);
moelora_status moelora_cuda_sort_rows(const moelora_routes *routes,
                                      const moelora_sorted_rows *sorted,
                                      const moelora_align_plan *plan, const moelora_exec *exec);

/* shrink/blocks.cu: shrinks over blocks or whole segments, as planned. */
moelora_status moelora_cuda_shrink(const moelora_shrink_launch *s, const moelora_shrink_plan *plan,
                                   const moelora_exec *exec);
/* shrink/segments.cu, segments_sm90.cu: shrink over whole segments, which the blocks must list. */
moelora_status moelora_cuda_shrink_segments(const moelora_shrink_launch *s,
                                            const moelora_shrink_plan *plan,
                                            const moelora_exec *exec);
moelora_status moelora_cuda_shrink_sm90(const moelora_shrink_launch *s,
                                        const moelora_shrink_plan *plan, const moelora_exec *exec);

/* Quantizes rows of x to e4m3 for FP8 weights (moelora_x_format). For Hopper kernels: bytes, in the
 * column order of weight tiles, zero-padded to a multiple of 128. For portable kernels: e4m3 values
 * in the dtype of x. */
typedef struct moelora_quantize_launch {
  const void *x; /* [rows, k] */
  int64_t x_stride, rows;
  /* As in moelora_blocks, if x is ordered by position; complete before the previous kernel starts.
   * NULL: all rows are used. */
  const int32_t *num_post, *counts;
  moelora_divisor block; /* divides by the rows of a block */
  bool early; /* inputs are complete before the previous kernel starts: read without waiting */
  int32_t k;
  moelora_dtype dtype;
  bool bytes;
  bool vectors;          /* x allows 16-byte accesses */
  moelora_format format; /* of the weights: FP8_G64 has groups of 64 */
  moelora_x_format rule;
  float x_scale;
  void *values;          /* [rows, values_stride] bytes or elements */
  int64_t values_stride; /* a multiple of 128 */
  float *scales;         /* [groups, rows] */
} moelora_quantize_launch;

/* layer/quantize.cu */
moelora_status moelora_cuda_quantize_rows(const moelora_quantize_launch *q,
                                          const moelora_exec *exec);

/* layer/sum.cu */
moelora_status moelora_cuda_sum(const moelora_sum_launch *s, const moelora_variant *variant,
                                const moelora_exec *exec);

/* decode/decode.cu: runs the whole layer in one launch. */
size_t moelora_cuda_decode_workspace(const moelora_experts_problem *problem,
                                     const moelora_exec *exec);
/* Sets `fits` to false, and launches nothing, if the CTAs cannot all be resident. */
moelora_status moelora_cuda_decode(const moelora_experts_problem *problem,
                                   const moelora_experts_plan *plan, const moelora_exec *exec,
                                   bool *fits);

/* backend.cu: returns MOELORA_OK, or a failure that names the CUDA call `what`. Clears the error,
 * so that later calls do not report it again. */
moelora_status moelora_cuda_check(cudaError_t error, const char *what);
int32_t moelora_cuda_num_sms(int32_t device_index);
/* Returns whether the code loaded on the device supports programmatic dependent launch. */
bool moelora_cuda_can_overlap(int32_t device_index);
