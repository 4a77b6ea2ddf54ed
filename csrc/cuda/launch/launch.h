/* What the CUDA files of a layer ask of each other. Every function queues work on `stream` and
 * returns a status; pointers are device memory unless said otherwise; strides count elements. */
#ifndef MOELORA_CUDA_LAUNCH_H
#define MOELORA_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include "core/backend.h"
#include "cuda/launch/divisor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A packed rank is adapter * kRanks + rank. */
constexpr int32_t kRanks = MOELORA_RANKS;
static_assert(MOELORA_SORT_KEYS <= INT32_MAX / kRanks, "every adapter that a sort knows has one");

/* Ranks that a slice of shrink results takes: 16 of them never belong to two slices. */
static inline __host__ __device__ int32_t moelora_padded_rank(int32_t rank) {
  return (rank + 15) / 16 * 16;
}

/* The rows of one expert that carry one adapter. They follow each other by position, `share` to a
 * block. */
typedef struct moelora_segment {
  int32_t packed; /* adapter * kRanks + true rank; -1: nothing to add */
  int32_t position, count, share;
} moelora_segment;

/* Projections over one alignment, at most. */
#define MOELORA_PROJECTIONS 2

/* Routed rows dealt to blocks of one expert each, in the order of their adapters. Block b holds
 * counts[b] rows from position b * rows on; what follows up to (b + 1) * rows is padding. The rows
 * of an expert are spread evenly, in n8 tiles, over the fewest blocks that hold them. `cluster`
 * neighbouring blocks always belong to one expert; the last of them may be empty. */
typedef struct moelora_blocks {
  int32_t rows; /* 1, and a cluster of 1: rows lie one after the other */
  int16_t cluster;
  int16_t grain; /* rows of an expert are dealt out evenly over its blocks, so many at a time */
  int64_t max_blocks;
  int32_t *sorted_ids;   /* [max_blocks * rows] flat row p; P in padding */
  int32_t *expert_ids;   /* [max_blocks] */
  int32_t *counts;       /* [max_blocks] */
  int32_t *pairs;        /* [max_blocks] an expert's blocks are pairs, but for the last one if they
                          * are odd: the rows of the block behind that is this one's pair, or those
                          * of the block before, negative; 0: there is none; NULL: nobody asks */
  int32_t *packed_ranks; /* [max_blocks * rows], -1 = base or padding; NULL: no adapters. Adapters
                          * alone in blocks of one row */
  int32_t *positions;    /* [P] of each flat row, -1 if it is skipped; NULL: not asked for */
  float *weights;        /* [max_blocks * rows] routing weights; NULL: not asked for */
  /* [num_experts * (max_loras + 1)], adapter l of expert e at e * (max_loras + 1) + 1 + l, rows
   * without an adapter before them; NULL: not asked for */
  moelora_segment *segments;
  int32_t *num_post;      /* [1], positions in use */
  int32_t *tile_counters; /* [num_counters], zeros; NULL: not asked for */
  int64_t num_counters;
} moelora_blocks;

/* What a launch over blocks of rows is made of. Kernels take these parts, and the launches made of
 * them, by value. The largest tiles are at the limit of their registers: where members of a launch
 * lie decides whether ptxas spills. */

/* Which rows there are, and in which order tiles of them come. */
typedef struct moelora_schedule {
  moelora_blocks blocks;
  int32_t *tile_counter; /* zeros: from the first CTAs draw tiles; see TileScheduler */
  int32_t num_rows;      /* P */
  int32_t num_experts;
  int32_t max_loras;
  int32_t near_elements; /* of tokens that L2 keeps while weights stream by */
} moelora_schedule;

/* What a main loop reads of rows; `stride` and `k` count elements of x. With x
 * first, the 128 x 256 tile of sm_80 would spill. Where both operands are FP8,
 * moelora_cuda_quantize_rows says what x holds. */
typedef struct moelora_tokens {
  moelora_divisor divisor; /* of value 0: x is by position */
  int64_t stride;
  const void *x; /* [P / divisor, K], or by position */
  int32_t k;
  /* FP8: that of row r for group i of depth is at i * scales_stride + r; else NULL */
  const float *scales;
  int64_t scales_stride;
} moelora_tokens;

/* And of experts. */
typedef struct moelora_weight_rows {
  moelora_weights w;
  int32_t n_out; /* outputs per row: I of a gated projection, else N */
  bool gated;
  bool interleaved;     /* gate and up rows alternate */
  bool vectors;         /* x, w and out allow 16-byte accesses */
  bool factors_vectors; /* the factors B, which are more depth of w, do */
  bool factors_boxes;   /* and a tensor map covers each slice of them */
} moelora_weight_rows;

/* The adapters of both halves, and the shrink results between these. */
typedef struct moelora_lora_operands {
  const void *xa;              /* [position, num_slices * xa_slice] scaled shrink result */
  int64_t xa_stride, xa_slice; /* xa_slice: max_rank rounded up to 16 */
  moelora_factors lora;        /* num_slices == 0: none */
} moelora_lora_operands;

/* Rows by position in e4m3, for Hopper's kernels of FP8; moelora_quantize_launch has the layout. */
typedef struct moelora_e4m3_rows {
  void *values; /* [, stride] bytes; NULL: none are wanted */
  int64_t stride;
  float *scales; /* [groups of 128, scales_stride] */
  int64_t scales_stride;
  moelora_x_format rule; /* of groups, or */
  float scale;           /* this one */
} moelora_e4m3_rows;

/* What becomes of an accumulator. */
typedef struct moelora_epilogue {
  int32_t top_k;
  moelora_activation_problem activation; /* counts where gated, or relu2; else there is none */
  bool plain_silu; /* it is silu without a limit, known once instead of for every tile */
  bool weighted;
  bool out_by_position; /* rows out_stride[0] apart */
  void *out; /* else row p at (p / top_k) * out_stride[0] + (p % top_k) * out_stride[1] */
  int64_t out_stride[2];
  /* out as the next projection wants it, from Hopper's kernels of FP8 with 256 weight rows; out
   * itself is written if somebody reads it */
  moelora_e4m3_rows e4m3;
  bool out_unread;
} moelora_epilogue;

/* One grouped projection:
 *   out[p] = act(x[p / divisor] w[e]^T + xa[p] B[l, e]^T + bias[e]) * weight */
typedef struct moelora_gemm_launch {
  moelora_schedule schedule;
  moelora_tokens tokens;
  moelora_weight_rows weights;
  moelora_lora_operands adapters;
  moelora_epilogue epilogue;
} moelora_gemm_launch;

/* The shrink of the same rows:
 *   xa[position, slice * xa_slice + r] = round(scaling[l] * x A[l, e]^T), zero from the true rank
 * to the next multiple of 16. Base rows are not written. */
typedef struct moelora_shrink_launch {
  moelora_schedule schedule;
  moelora_tokens tokens;
  moelora_lora_operands adapters;
  const float *scalings; /* [max_loras] or NULL */
  float unit;            /* all of xa times that */
  void *xa;              /* what adapters.xa becomes */
  bool by_row;           /* flat row, with any strides: only shrinks of whole segments */
} moelora_shrink_launch;

/* The sum over top_k:
 *   out[m] = round([out[m] +] sum over j of weight z[row of (m, j)]) */
typedef struct moelora_sum_launch {
  moelora_routes routes; /* resolved */
  const void *z;         /* [, z_stride] */
  int64_t z_stride;
  /* of a layer: where the rows of z are that weights belong to */
  const int32_t *positions; /* [P] of each flat row, -1: skipped; NULL: z is [P], of adapters */
  const float *weights;     /* [M, top_k]; NULL: 1 */
  int64_t weights_stride[2];
  /* of adapters alone: which flat rows there are; tokens without one are left as they are */
  const uint8_t *written; /* [P]; NULL: those that have an expert and an adapter */
  int32_t max_rank;
  bool add;  /* to what is in out */
  void *out; /* [M, columns] */
  int64_t out_stride;
  int32_t columns;
} moelora_sum_launch;

/* resolve.cu: the caller's tables read once, into the workspace. They may change while kernels run,
 * as an adapter is disabled from another stream; kernels that asked again would disagree about
 * rows. `take` returns the routes (the lists) whose tables lie in the arena: dense local experts,
 * adapters that are there and enabled, -1 for what is skipped. expert_map is kept only if asked
 * for, and says which experts are here; ids no longer go through it. */
moelora_routes moelora_cuda_take_routes(const moelora_routes *routes, bool with_map,
                                        moelora_arena *arena);
moelora_list_blocks moelora_cuda_take_lists(const moelora_list_blocks *lists, int32_t max_loras,
                                            bool with_counts, moelora_arena *arena);
/* Fills them; `overlaps`: may start while the kernel before drains. Lists may be NULL. */
moelora_status moelora_cuda_resolve(const moelora_routes *from, const moelora_routes *to,
                                    const moelora_list_blocks *from_lists,
                                    const moelora_list_blocks *to_lists, bool overlaps,
                                    const moelora_exec *exec);

/* align.cu: fills the blocks. `routes` are resolved; of `from`, where that is not NULL, behind the
 * end of the kernel before. */
size_t moelora_cuda_align_rows_workspace(const moelora_routes *routes,
                                         const moelora_align_plan *plan);
moelora_status moelora_cuda_align_rows(const moelora_routes *from, const moelora_routes *routes,
                                       const moelora_blocks *blocks, const moelora_align_plan *plan,
                                       void *workspace, const moelora_exec *exec);

/* Routed rows one after the other, by expert, then adapter; `count` of P entries are rows. */
typedef struct moelora_sorted_rows {
  int32_t *row, *expert, *adapter; /* [P]; adapter -1: none */
  int32_t *count;                  /* [1] */
  moelora_segment *segments;       /* as in moelora_blocks; NULL: not listed */
  void *scratch;
} moelora_sorted_rows;
/* align.cu: takes, and fills them. */
moelora_sorted_rows moelora_cuda_take_sorted(const moelora_routes *routes,
                                             const moelora_align_plan *plan, moelora_arena *arena);
moelora_status moelora_cuda_sort_rows(const moelora_routes *routes,
                                      const moelora_sorted_rows *sorted,
                                      const moelora_align_plan *plan, const moelora_exec *exec);

/* shrink/blocks.cu: as planned, in blocks or of whole segments. */
moelora_status moelora_cuda_shrink(const moelora_shrink_launch *s, const moelora_shrink_plan *plan,
                                   const moelora_exec *exec);
/* segments.cu, segments_sm90.cu: of whole segments, which the blocks must list. */
moelora_status moelora_cuda_shrink_segments(const moelora_shrink_launch *s,
                                            const moelora_shrink_plan *plan,
                                            const moelora_exec *exec);
moelora_status moelora_cuda_shrink_sm90(const moelora_shrink_launch *s,
                                        const moelora_shrink_plan *plan, const moelora_exec *exec);

/* Rows of x in e4m3, as weights of FP8 want them (moelora_x_format): for Hopper's kernels
 * bytes, in chunks of 16 columns as those of a tile, zeros up to a multiple of 128; for portable
 * ones e4m3 numbers in the elements of x. */
typedef struct moelora_quantize_launch {
  const void *x; /* [rows, k] */
  int64_t x_stride, rows;
  /* Rows by position, of which blocks use some, as in moelora_blocks, which is older than the
   * kernel before; NULL: all rows are used. */
  const int32_t *num_post, *counts;
  moelora_divisor block; /* by its rows */
  bool early;            /* all this is older than the kernel before, beside which rows are read */
  int32_t k;
  moelora_dtype dtype;
  bool bytes;
  moelora_format format; /* of the weights: FP8_G64 has groups of 64 */
  moelora_x_format rule;
  float x_scale;
  void *values;          /* [rows, values_stride] of bytes or elements */
  int64_t values_stride; /* a multiple of 128 */
  float *scales;         /* [groups, rows] */
} moelora_quantize_launch;

/* quantize.cu */
moelora_status moelora_cuda_quantize_rows(const moelora_quantize_launch *q,
                                          const moelora_exec *exec);

/* layer/sum.cu */
moelora_status moelora_cuda_sum(const moelora_sum_launch *s, const moelora_variant *variant,
                                const moelora_exec *exec);

/* gemm/sm80, gemm/sm90: moelora_cuda_gemm_<FAMILY>_<FORMAT>, a file for each kernel format that has
 * rows of the family in variants.inc. */
#define MOELORA_CUDA_GEMM(NAME, DTYPE, FORMAT, FAMILY, ...)                                        \
  moelora_status moelora_cuda_gemm_##FAMILY##_##FORMAT(                                            \
      const moelora_gemm_launch *g, const moelora_variant *variant,                                \
      const moelora_projection_plan *plan, const moelora_exec *exec);
#include "cuda/variants.inc"

/* decode.cu: the whole layer in one launch. */
size_t moelora_cuda_decode_workspace(const moelora_experts_problem *problem,
                                     const moelora_exec *exec);
/* fits: false, and nothing is queued, where its CTAs cannot all be resident. */
moelora_status moelora_cuda_decode(const moelora_experts_problem *problem,
                                   const moelora_experts_plan *plan, const moelora_exec *exec,
                                   bool *fits);

/* experts.cu: slots of the backend's table */
size_t moelora_cuda_gemm_workspace(const moelora_gemm_problem *problem,
                                   const moelora_gemm_plan *plan, const moelora_exec *exec);
moelora_status moelora_cuda_gemm(const moelora_gemm_problem *problem, const moelora_gemm_plan *plan,
                                 const moelora_exec *exec);
size_t moelora_cuda_experts_workspace(const moelora_experts_problem *problem,
                                      const moelora_experts_plan *plan, const moelora_exec *exec);
moelora_status moelora_cuda_experts(const moelora_experts_problem *problem,
                                    const moelora_experts_plan *plan, const moelora_exec *exec);

/* backend.cu: MOELORA_OK, or the failure of a CUDA call with its name, on which the error is
 * cleared so that the next call works. */
moelora_status moelora_cuda_check(cudaError_t error, const char *what);
int32_t moelora_cuda_num_sms(int32_t device_index);
/* True if the code that is loaded there knows programmatic dependent launch. */
bool moelora_cuda_can_overlap(int32_t device_index);

#ifdef __cplusplus
}
#endif
#endif
