/* moelora: mixture-of-experts operators with LoRA adapters fused into the grouped GEMM.
 *
 * A plain C11 interface, independent of Python and torch. Every operator takes a struct of
 * arguments (tensor views, including outputs) and a `moelora_exec` that describes where to run.
 * The library never allocates and never synchronizes: the caller provides outputs and workspace,
 * CUDA work is enqueued on the caller's stream, and every call can be captured in a CUDA graph.
 *
 * Notation: M tokens, top_k experts per token, P = M * top_k routed rows (flat index p = m * top_k
 * + j), E experts on this rank, K hidden size, I intermediate size of an expert, R maximum rank of
 * a stack of adapters, max_loras adapter slots.
 *
 * A layer computes, for routed row (m, j) with local expert e and adapter l:
 *
 *   g = x[m] Wg[e]^T + s[l] (x[m] Ag[l,e]^T) Bg[l,e]^T + bias       (u likewise)
 *   h = activation(g, u)
 *   z = h W2[e]^T + s[l] (h A2[l,e]^T) B2[l,e]^T + bias
 *   out[m] = sum over j of topk_weights[m,j] * z
 *
 * Expert and adapter ids out of range are never used as an address: a row whose expert is out of
 * range (or on another rank) is skipped, and a row whose adapter is out of range or disabled is a
 * base row, without adapter. Every call is batch invariant: the bits of a row do not depend on the
 * other rows, their number or their adapters.
 *
 * Routing, adapters and lists may be written while a call reads them. The call then uses either the
 * old or the new value of each element throughout. On CUDA this holds for ids, maps, enable flags,
 * ranks, scalings and lora_ids. Every kernel that needs routing weights or the rows of lists reads
 * them again, so a concurrent write may mix old and new values in the rows that it changes, but in
 * no others. No value that may change is used as an address. */
#ifndef MOELORA_H
#define MOELORA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Declarations between these macros have C linkage in C++, too. */
#ifdef __cplusplus
#define MOELORA_BEGIN_C extern "C" {
#define MOELORA_END_C }
#else
#define MOELORA_BEGIN_C
#define MOELORA_END_C
#endif

MOELORA_BEGIN_C

#define MOELORA_VERSION "0.1.0"
#define MOELORA_MAX_DIMS 5
#define MOELORA_MAX_SLICES 4
/* Tile size of packed weights, see moelora_pack_weights. */
#define MOELORA_PACK 64

typedef enum moelora_status {
  MOELORA_OK = 0,
  MOELORA_INVALID_ARGUMENT, /* a shape, dtype, stride or value violates the contract */
  MOELORA_UNSUPPORTED,      /* valid, but this build or this device has no kernel for it */
  MOELORA_WORKSPACE_TOO_SMALL,
  MOELORA_DEVICE_ERROR, /* a CUDA call failed; the message names it */
} moelora_status;

/* Returns the message of this thread's last failure, or "". Valid until the thread's next call. */
const char *moelora_error_message(void);

typedef enum moelora_dtype {
  MOELORA_F32 = 0,
  MOELORA_BF16,
  MOELORA_F16,
  MOELORA_I32,
  MOELORA_I64,
  MOELORA_BOOL,
  MOELORA_U8,
} moelora_dtype;

typedef enum moelora_device { MOELORA_CPU = 0, MOELORA_CUDA } moelora_device;

/* View of memory on the device of the call; strides count elements. `data == NULL` with `ndim ==
 * 0` marks an absent optional tensor; otherwise only a tensor without elements may have NULL data.
 */
typedef struct moelora_tensor {
  void *data;
  moelora_dtype dtype;
  int32_t ndim;
  int64_t size[MOELORA_MAX_DIMS];
  int64_t stride[MOELORA_MAX_DIMS];
  const char *name; /* name in messages; NULL: the name of its field */
} moelora_tensor;

typedef void (*moelora_task)(void *context, int64_t begin, int64_t end);

/* Where an operator runs, and the resources that it uses. */
typedef struct moelora_exec {
  moelora_device device;
  int32_t device_index; /* CUDA ordinal, not necessarily the current device; unused on the CPU */
  void *stream;         /* cudaStream_t of that device; NULL: its default stream */
  void *workspace;      /* 256-byte aligned, at least moelora_call.workspace_bytes, on `device` */
  size_t workspace_bytes;
  /* CPU only: runs `task` over [0, count), split arbitrarily over threads, and returns when all
   * parts are done. NULL runs serially. The workspace has scratch memory for each thread. */
  void (*parallel_for)(int64_t count, moelora_task task, void *context);
  int32_t num_threads; /* number of threads that parallel_for uses; 0 counts as 1 */
} moelora_exec;

/* A validated and planned call of an operator: moelora_prepare_* fill it, moelora_run runs it. It
 * holds the argument pointers and the plan, so it may run repeatedly, on another stream or in a
 * graph, as long as the tensors stay where they are; variants forced or tuned later do not affect
 * it. Plain data: may be copied and discarded. */
#define MOELORA_CALL_BYTES 2304
typedef struct moelora_call {
  size_t workspace_bytes; /* required size of exec.workspace in moelora_run */
  uint64_t state[MOELORA_CALL_BYTES / sizeof(uint64_t)];
} moelora_call;

/* Runs a prepared call, or enqueues it. `exec` must name the device that the call was prepared
 * for, at most as many threads (1 without a parallel_for), and the workspace. Running a call that
 * moelora_prepare_* refused is an error; a call with nothing to do succeeds. If device_index is
 * not the current device of the thread, it is made current and the previous one restored before
 * the return. Fails with MOELORA_WORKSPACE_TOO_SMALL, MOELORA_INVALID_ARGUMENT or
 * MOELORA_DEVICE_ERROR. */
moelora_status moelora_run(const moelora_call *call, const moelora_exec *exec);

/* Stacked LoRA factors of a projection. Slice i covers output columns [i*N, (i+1)*N) in memory
 * order; in a delta by routing, N may differ between slices; `num_slices == 0`: the projection has
 * no adapters. An expert dimension of 1 means that all experts share the factor. */
typedef struct moelora_lora {
  int32_t num_slices;
  moelora_tensor a[MOELORA_MAX_SLICES]; /* each [max_loras, E or 1, R, K] */
  moelora_tensor b[MOELORA_MAX_SLICES]; /* each [max_loras, E or 1, N, R] */
} moelora_lora;

/* Assignment of adapters to tokens. Read on the device, so that a captured graph can be replayed
 * with other adapters. */
typedef struct moelora_adapters {
  moelora_tensor token_lora_mapping; /* [M] int32 or int64, -1 = none; absent: no adapters */
  moelora_tensor lora_ranks;         /* [max_loras] int32, true ranks; absent: R */
  moelora_tensor lora_scalings;      /* [max_loras] float32; absent: 1, as if folded into B */
  moelora_tensor
      adapter_enabled; /* [max_loras] or [max_loras + 1], bool or int32; absent: all enabled */
} moelora_adapters;

/* Assignment of experts to tokens. top_k is at least 1 and may exceed the number of experts, since
 * experts may repeat; M * top_k must fit int32. */
typedef struct moelora_routing {
  moelora_tensor topk_ids;     /* [M, top_k] int32 or int64 */
  moelora_tensor topk_weights; /* [M, top_k] float32 */
  moelora_tensor expert_map;   /* [E_global] int32: local expert or -1; absent: ids are local */
} moelora_routing;

/* ---- alignment: sorts routed rows by (expert, adapter) and pads them to blocks ---- */

typedef enum moelora_align_mode {
  MOELORA_ALIGN_BASE = 0,  /* by expert; a block holds one expert */
  MOELORA_ALIGN_UNIFORM,   /* by (expert, adapter); a block holds one pair */
  MOELORA_ALIGN_SEGMENTED, /* by expert, then adapter; only experts are padded to blocks */
  MOELORA_ALIGN_SORTING,   /* as CK-tile's moe_sorting; empty local experts get a block, too */
} moelora_align_mode;

/* Rows are sorted by local expert, then (UNIFORM and SEGMENTED) adapter, -1 first, then flat row
 * index. The caller chooses `blocks`, at least moelora_align_max_blocks(); rows = blocks *
 * block_size. */
typedef struct moelora_align_args {
  moelora_align_mode mode;
  int32_t num_experts; /* with expert_map: the number of global experts, expert_map.size(0) */
  int32_t block_size;
  int32_t max_loras;         /* UNIFORM and SEGMENTED */
  moelora_routing routing;   /* topk_weights: SORTING only */
  moelora_adapters adapters; /* token_lora_mapping and adapter_enabled; UNIFORM and SEGMENTED */
  /* outputs */
  moelora_tensor sorted_token_ids; /* [rows] int32: flat row (SORTING: token); padding: M * top_k */
  moelora_tensor expert_ids;       /* [blocks] int32: local expert; -1 past the end */
  moelora_tensor lora_ids; /* UNIFORM: [blocks]; SEGMENTED: [rows]; int32, -1 = base or padding */
  moelora_tensor num_tokens_post_padded; /* [1] int32 */
  moelora_tensor sorted_weights;         /* SORTING: [rows] float32, 0 in padding */
  moelora_tensor out_to_zero; /* SORTING: contiguous float tensor to zero; may be absent */
} moelora_align_args;

/* Returns an upper bound of the number of blocks; the outputs must have room for it. */
int64_t moelora_align_max_blocks(moelora_align_mode mode, int64_t num_rows, int32_t num_experts,
                                 int32_t max_loras, int32_t block_size);
moelora_status moelora_prepare_align(const moelora_align_args *args, const moelora_exec *exec,
                                     moelora_call *call);

/* ---- quantized weights ---- */

/* Storage format of a weight: MOELORA_NATIVE (0), MOELORA_MXFP4, MOELORA_INT4 and so on, one for
 * each row of formats.inc. */
typedef enum moelora_format {
#define MOELORA_FORMAT_OF(KERNEL, NAME, ...) MOELORA_##NAME,
#include "formats.inc"
} moelora_format;

/* Format of x or h in the base product with FP8 weights. Adapters always use the unquantized
 * values. */
typedef enum moelora_x_format {
  /* 16-bit x (W8A16): kernels dequantize the weights, with one rounding. The only choice for other
   * weight formats. */
  MOELORA_X_NATIVE = 0,
  /* W8A8: q = e4m3(x (1/s)) or e4m3(x / s), as stated below, with s and 1/s in float32. e4m3()
   * rounds to nearest even and saturates at 448. A NaN stays NaN, and maxima ignore it. Each 128
   * elements of K (64 for FP8_G64) are accumulated separately and multiplied by both scales. h is
   * rounded to its dtype first. */
  MOELORA_X_GROUP,  /* s per token and K group: max(|x|, 1e-10) / 448; q = x (1/s) */
  MOELORA_X_TOKEN,  /* s per token: max|x| / 448, at least 1 / (448 * 512); q = x / s */
  MOELORA_X_STATIC, /* s is x_scale of the layout; q = x (1/s) */
} moelora_x_format;

/* Order of the rows of a weight in its tiles. */
typedef enum moelora_row_order {
  MOELORA_ROWS_PLAIN = 0,
  MOELORA_ROWS_GATE_UP,     /* gate rows precede up rows; each half is padded to whole tiles */
  MOELORA_ROWS_INTERLEAVED, /* gate and up rows alternate; tiles are those of GATE_UP */
} moelora_row_order;

/* Quantized weights are stored in tiles, [E, row tiles, K tiles, bytes per tile] uint8. Rows and
 * columns past the end of the weight are zero. 4-bit tiles have 64 rows by 64 columns, in the
 * operand A layout of mma.m16n8k16 and wgmma:
 *
 *   values [4 warps][32 lanes][4 slabs of k16] uint32
 *   scales [4 warps][8][2 rows][G]              uint8 (MXFP4, NVFP4), 16 bits (INT4) or float32
 *                                               (NF4, BNB_FP4)
 *   zeros  [4 warps][8][2 rows][G]              uint8 (ZP)
 *   scale  [4] float32                          of the tile, 0, 0, 0 (NVFP4)
 *
 * Lane t of warp w holds rows r = 16 w + t / 4 and r + 8. In its word of slab s, values i of the
 * low and the high half are register a_i of the instruction: columns c and c + 1 = 16 s + 2 (t % 4)
 * of r (i = 0) and of r + 8 (i = 1), columns c + 8 and c + 9 of r (i = 2) and of r + 8 (i = 3). For
 * INT4, value i is nibble i of its half. For NF4 and BNB_FP4, it is nibble 2 i (low half) or 2 i +
 * 1 (high half) of the word, an index into the numbers in formats.inc. For e2m1, sign,
 * exponent and mantissa of value i are bits 15, 8, 7, 6 (i = 0); 12, 5, 4, 3 (i = 1); 9, 2, 1, 0 (i
 * = 2); 13, 11, 10, 14 (i = 3). Scales of r and r + 8 are at [w][r % 8]; G is 4 for groups of 16, 2
 * for groups of 32, else 1. The representation of a scale depends on the dtype of the activations:
 * an MXFP4 scale 2^(s - 127) is stored as the byte s + 126 for bf16 and max(s - 98, 0) for fp16; an
 * INT4 scale is rounded to that dtype. An NVFP4 scale has a five-bit exponent with bias 22 and a
 * three-bit mantissa for both; the values of a group whose scale is 0 are 0.
 *
 * FP8 tiles have 64 rows by 128 columns, stored as rows of 128 bytes in TMA's 128-byte swizzle:
 *
 *   values [64 rows][8] 16 bytes   chunk c, columns 16 c to 16 c + 15, of row r at c ^ (r & 7)
 *   scales [32] float32            of columns 0 to 63, of columns 64 to 127, zeros;
 *                                  ROWS: [64], one per row
 *
 * Within a chunk, byte 4 q + i is column {2 q, 2 q + 1, 2 q + 8, 2 q + 9}[i]: a word loaded by
 * ldmatrix then holds a lane's part of two k16 operands, or of one k32 operand if x has the same
 * column order. FP8 tiles do not depend on the dtype of the activations. */
typedef struct moelora_layout {
  moelora_format format;
  moelora_row_order order;
  int64_t rows;       /* N; K is that of the activations */
  moelora_x_format x; /* NATIVE unless the weights are FP8 */
  float x_scale;      /* STATIC: a positive normal number; otherwise 0 */
} moelora_layout;

/* Returns the bytes per tile; 0 for MOELORA_NATIVE. */
int32_t moelora_tile_bytes(moelora_format format);

/* Quantized weights as stored in checkpoints: values [E, N, K/2] uint8, the even column in the low
 * nibble; scales [E, N, K/group], uint8 e8m0 (MXFP4) or e4m3 (NVFP4), or float32, bf16 or fp16
 * (INT4, NF4, BNB_FP4); for ZP formats zeros [E, N, K/group] uint8; for NVFP4 tensor_scales [E, 1]
 * float32, or [E, 2] for gate and up. A group is 16 (NVFP4), 32 (MXFP4 and G32), a multiple of 64,
 * or K.
 *
 * FP8: values [E, N, K], e4m3 as uint8; scales [E, N/block_rows, K/block_columns] float32, both
 * sizes rounded up; element (n, k) has scale [n / block_rows, k / block_columns]. block_columns is
 * a multiple of 128 (64 for G64), or at least K. Except for ROWS, all rows of a tile must be in one
 * block; if block_rows is 1, their scales must be equal, and that of the first row is used. */
typedef struct moelora_quantized {
  moelora_tensor values, scales, zeros, tensor_scales;
  int64_t block_rows, block_columns; /* FP8; otherwise 0 */
} moelora_quantized;

/* Packs quantized weights into tiles [E, row tiles, K tiles, bytes per tile] uint8, for
 * activations of `dtype`, bf16 or fp16. The caller must rule out values that tiles cannot
 * represent: MXFP4 scales above 2, or NaN; NVFP4 scales that are negative or NaN, and tensor_scales
 * that are not finite; scales of INT4, NF4 and BNB_FP4 that are not finite or exceed 65504 in
 * magnitude; FP8 values that are NaN, and scales that are not finite or exceed 255 in magnitude. */
moelora_status moelora_pack_quantized(const moelora_quantized *w, const moelora_layout *layout,
                                      moelora_dtype dtype, const moelora_tensor *tiles,
                                      const moelora_exec *exec);
/* Dequantizes tiles to out [E, N, K] of the dtype they were packed for, rounding each value once.
 * FP8 scales are rounded to it first (fp16: 256 times the scale), as in products with 16-bit x. */
moelora_status moelora_unpack_quantized(const moelora_tensor *tiles, const moelora_layout *layout,
                                        const moelora_tensor *out, const moelora_exec *exec);

/* ---- one projection: base product + LoRA in one pass ---- */

typedef struct moelora_gemm_args {
  moelora_tensor x;        /* [M, K] or [P, K] */
  moelora_tensor w;        /* [E, N, K], packed [E, N/64, K/64, 64, 64], or tiles as in w_layout */
  moelora_layout w_layout; /* of PLAIN order */
  moelora_tensor bias;     /* [E, N]; may be absent */
  moelora_routing routing;
  moelora_adapters adapters;
  moelora_lora lora; /* in the dtype of x, or in float32 and rounded to that dtype */
  bool mul_routed_weight;
  moelora_tensor out; /* [M, top_k, N]; rows of skipped experts are zeroed */
} moelora_gemm_args;

moelora_status moelora_prepare_gemm(const moelora_gemm_args *args, const moelora_exec *exec,
                                    moelora_call *call);

/* Gradients of a projection; absent ones are not computed. w is frozen and has none. */
typedef struct moelora_gemm_grads {
  moelora_tensor x;            /* in the shape and dtype of forward.x */
  moelora_tensor topk_weights; /* [M, top_k] float32 */
  /* Gradients have the shapes of the factors and the bias, and the dtype of x or float32.
   * num_slices is 0, or that of the factors. */
  moelora_lora lora;
  moelora_tensor bias;  /* [E, N] */
  moelora_tensor pairs; /* present: factor gradients are sparse, see moelora_experts_grads */
} moelora_gemm_grads;

/* For row p with expert e and adapter l, and t its routing weight with mul_routed_weight, else 1:
 *
 *   v         = dout[p] W[e] + s (dout[p] B) A
 *   dx       += t v                        summed over the rows that share a row of x
 *   dt        = <v, x> + <dout[p], bias[e]>      zero without mul_routed_weight
 *   dB[l,e]  += dout[p]^T (t s x A^T)            dA[l,e] += (t s dout[p] B)^T x
 *   dbias[e] += t dout[p]
 *
 * Without w (for a delta), W and the bias count as zero. Rounding, the order of sums, and the
 * isolation of adapters are those of moelora_experts_backward_args. s x A^T is recomputed. */
typedef struct moelora_gemm_backward_args {
  moelora_gemm_args forward; /* as in the forward; w may be absent; `out` is not read */
  int32_t num_experts;       /* without w: experts on this rank */
  moelora_tensor dout;       /* [M, top_k, N], in the dtype of x */
  moelora_gemm_grads grads;  /* outputs */
  bool accumulate;           /* as in moelora_experts_backward_args */
} moelora_gemm_backward_args;

moelora_status moelora_prepare_gemm_backward(const moelora_gemm_backward_args *args,
                                             const moelora_exec *exec, moelora_call *call);

/* ---- the whole layer ---- */

typedef enum moelora_activation {
  MOELORA_SILU = 0,  /* silu(g) * u; gate rows before up rows */
  MOELORA_GELU,      /* gelu_tanh(g) * u */
  MOELORA_SWIGLUOAI, /* g sigmoid(alpha g) (u + 1), clamped; gate and up rows alternate */
  MOELORA_RELU2,     /* relu(x)^2, not gated: w13 is [E, I, K] */
  MOELORA_SWIGLUOAI_UNINTERLEAVE, /* SWIGLUOAI with gate rows before up rows */
  MOELORA_SITU,                   /* alpha tanh(g / alpha) sigmoid(g) * limit tanh(u / limit) */
  MOELORA_SWIGLUSTEP,             /* min(silu(g), limit) * u, clamped */
} moelora_activation;

/* Tensors that the forward of a layer saves for its backward, which also needs the arguments of the
 * forward. Rows are flat rows p; all tensors have the dtype of hidden_states. */
typedef struct moelora_saved {
  /* [P, 2I] ([P, I] if not gated): x w13^T + adapter + bias before the activation, columns in the
   * row order of w13; 0 in skipped rows. Absent: nothing is saved. */
  moelora_tensor gate_up;
  /* [P, slices, R] and [P, R]: s x A13^T and s h A2^T; 0 beyond the true rank, in base rows and in
   * skipped rows. Absent if the projection has no adapters. */
  moelora_tensor w13_shrink, w2_shrink;
} moelora_saved;

typedef struct moelora_experts_args {
  moelora_tensor hidden_states; /* [M, K] */
  moelora_tensor w13;           /* [E, 2I, K] ([E, I, K] if not gated), packed, or quantized */
  moelora_tensor w2;            /* [E, K, I], packed, or quantized */
  /* Zeros for native weights; otherwise w13 is in the row order of the activation, and w2 in PLAIN
   * order. Tiles of a gated w13 in PLAIN order are accepted if I is a multiple of 64 and gate rows
   * come first. */
  moelora_layout w13_layout, w2_layout;
  moelora_tensor w13_bias; /* [E, 2I]; may be absent */
  moelora_tensor w2_bias;  /* [E, K]; may be absent */
  moelora_routing routing;
  moelora_adapters adapters;
  /* In the dtype of hidden_states, or per projection in float32 and rounded to that dtype. */
  moelora_lora w13_lora; /* 1 slice of 2I columns, or 2 of I columns each */
  moelora_lora w2_lora;  /* 1 slice of K columns */
  /* [max_loras] int32; nonzero: both A of w13 of this adapter are equal up to its true rank, so the
   * second need not be read. Not checked. Ignored with one slice. Absent: none are equal. */
  moelora_tensor w13_one_a;
  moelora_activation activation;
  /* Positive normal float32 values; 0 selects the activation's default. swigluoai takes an alpha,
   * 1.702 by default, and situ, 1 by default. silu, swigluoai and swiglustep take a limit, by
   * default none, 7 and 7: g (for swiglustep, silu(g)) is clamped to min(g, limit), and u to
   * min(max(u, -limit), limit). situ takes the cap of u as limit, by default none. */
  double activation_alpha, activation_limit;
  bool apply_router_weight_on_input; /* requires top_k == 1 */
  moelora_tensor out;  /* [M, K]; may be hidden_states itself, unless `saved` is present */
  moelora_saved saved; /* outputs; `out` has the same bits with and without them */
} moelora_experts_args;

moelora_status moelora_prepare_experts(const moelora_experts_args *args, const moelora_exec *exec,
                                       moelora_call *call);

/* ---- the backward of the layer ---- */

/* Gradients of a layer; absent ones are not computed. w13 and w2 are frozen and have none. */
typedef struct moelora_experts_grads {
  moelora_tensor hidden_states; /* [M, K], in the dtype of forward.hidden_states */
  moelora_tensor topk_weights;  /* [M, top_k] float32 */
  /* Gradients have the shapes of the factors and biases, and the dtype of hidden_states or float32.
   * num_slices is 0, or that of the factors. */
  moelora_lora w13_lora, w2_lora;
  moelora_tensor w13_bias, w2_bias; /* [E, 2I] and [E, K] */
  /* Present: gradients of factors are sparse. The gradient of a factor is [1, S, *, *], with the
   * same S for all factors; pairs [max_loras, E] int32 maps (adapter, local expert) to an index
   * below S. No two may map to the same index. An entry outside 0 to S - 1 means that no gradient
   * is computed, and matrices that no entry maps to are not written. Gradients of factors that
   * experts share keep the shape of the factor. */
  moelora_tensor pairs;
} moelora_experts_grads;

/* For row p of token m, with expert e, adapter l, routing weight t, and gate_up as saved:
 *
 *   v           = dout[m] W2[e] + s (dout[m] B2) A2
 *   dt          = <v, h> + <dout[m], w2_bias[e]>             h = activation(gate_up)
 *   dgu         = activation'(gate_up) (t v)
 *   dx[m]       = sum over j of dgu W13[e] + s (dgu B13) A13
 *   dB2[l,e]   += (t dout[m])^T (s h A2^T)         dA2[l,e]  += s (t dout[m] B2)^T h
 *   dB13[l,e]  += dgu^T (s x A13^T)                dA13[l,e] += s (dgu B13)^T x
 *   dw13_bias[e] += dgu                            dw2_bias[e] += t dout[m]
 *
 * With apply_router_weight_on_input, t x replaces x and 1 replaces t above, dx is multiplied by t,
 * and dt = <dgu (W13[e] + s B13 A13), x>. Operands of products are rounded once, to the dtype of
 * hidden_states. Sums are float32, in an order that depends only on p and, for a factor that
 * experts share, on the experts. Gradients are therefore deterministic, and those of an adapter do
 * not depend on which other adapters have rows in the call. dx of base rows is bit-identical to dx
 * without adapters. Values of an adapter's rows and factors, NaN included, never reach other rows
 * or other adapters' gradients, except for biases, whose gradients sum over all rows of an expert.
 *
 * Quantized weights are dequantized to the dtype of hidden_states; if the forward rounds
 * activations to e4m3, the backward treats that rounding as the identity. */
typedef struct moelora_experts_backward_args {
  moelora_experts_args forward; /* as in the forward, including `saved`; `out` is not read */
  moelora_tensor dout;          /* [M, K], in the dtype of hidden_states */
  moelora_experts_grads grads;  /* outputs */
  /* Accumulate into the gradients of factors and biases, which must be initialized. Otherwise they
   * are overwritten, with zeros where nothing contributes. Gradients of hidden_states and
   * topk_weights are always overwritten. */
  bool accumulate;
  /* May overwrite saved.gate_up, so that a GPU needs less workspace. */
  bool overwrites_gate_up;
} moelora_experts_backward_args;

moelora_status moelora_prepare_experts_backward(const moelora_experts_backward_args *args,
                                                const moelora_exec *exec, moelora_call *call);

/* ---- deltas: LoRA for a base product that an engine computes ---- */

/* vLLM's alignment: a list of blocks per adapter slot. Block b of list l holds entries [b *
 * block_size, (b + 1) * block_size) of sorted_token_ids[l], all rows of expert expert_ids[l, b].
 * Only the lists in lora_ids[0 .. num_active) are used, each of them once; ids out of range and
 * disabled ones are skipped. */
typedef struct moelora_lists {
  moelora_tensor
      sorted_token_ids;      /* [max_loras, rows] int32: flat row p; other values are padding */
  moelora_tensor expert_ids; /* [max_loras, blocks] int32: local expert, -1 = skip */
  moelora_tensor num_tokens_post_padded; /* [max_loras] int32: rows in use, including padding */
  moelora_tensor lora_ids;               /* [any] int32 */
  int32_t num_active;                    /* 0 to lora_ids.size(0) */
  int32_t block_size;
} moelora_lists;

/* Fills the lists of the adapters in `lists.lora_ids`. Rows are ordered by local expert, and each
 * expert is padded to whole blocks with M * top_k; expert_ids is -1 past the last block. Other
 * lists are left unchanged. A list must have room for an adapter that all tokens carry:
 * moelora_align_max_blocks(MOELORA_ALIGN_BASE, ...) blocks and their rows. */
typedef struct moelora_align_lists_args {
  int32_t num_experts; /* with expert_map: the number of global experts */
  int32_t max_loras;
  moelora_routing routing;
  moelora_adapters adapters; /* token_lora_mapping and adapter_enabled */
  moelora_lists lists;       /* outputs, except for lora_ids */
} moelora_align_lists_args;

moelora_status moelora_prepare_align_lists(const moelora_align_lists_args *args,
                                           const moelora_exec *exec, moelora_call *call);

/* For every routed row p with an adapter l and an expert e on this rank:
 *
 *   h[slice, p] = s[l] x A[slice][l,e]^T      rounded to the dtype of x; 0 beyond the true rank
 *   z           = h[slice, p] B[slice][l,e]^T   in columns slice * N to (slice + 1) * N
 *
 * With x and h, the call only shrinks; with h and out, it only expands, without scaling; with x and
 * out, it does both, and h is not returned. Rows without an adapter (none, disabled, of rank 0) or
 * with a skipped expert are left unchanged in h and out, whatever the flags.
 *
 * With `silu_and_mul` the first half of the columns of z is gate, the second up, and z is replaced
 * by silu(gate) * up (excludes add_inputs and mul_routed_weight, requires out_offset 0). With
 * mul_routed_weight, z is multiplied by topk_weights. A 3-D out receives z of each row; a 2-D out
 * receives the sum over the rows of a token, in float32. Results are rounded once. */
typedef struct moelora_delta_args {
  int32_t num_experts;     /* E on this rank */
  moelora_routing routing; /* topk_ids absent: `lists` define the rows */
  moelora_lists lists;     /* sorted_token_ids absent: `routing` and `adapters` define them */
  int64_t num_tokens;      /* M and top_k of lists; otherwise taken from topk_ids */
  int32_t top_k;
  moelora_adapters adapters;
  /* An expand does not read a, a shrink does not read b. Factors have the dtype of x or h; with x,
   * out and topk_ids they may also be float32, which the call rounds to that dtype. */
  moelora_lora lora;
  moelora_tensor x; /* [M, K] or [P, K] */
  moelora_tensor h; /* [slices, M, top_k, R] */
  bool silu_and_mul, mul_routed_weight;
  bool add_inputs;    /* out += z, otherwise out = z */
  moelora_tensor out; /* [M, top_k, >= out_offset + columns], or [M, the same] */
  int64_t out_offset; /* first column */
} moelora_delta_args;

moelora_status moelora_prepare_delta(const moelora_delta_args *args, const moelora_exec *exec,
                                     moelora_call *call);

/* SGLang's adapter MLP, added to the base layer's output:
 *
 *   out[m] += sum over j of topk_weights[m,j] * s[l] * B2 A2 (silu(Bg Ag x[m]) * (Bu Au x[m]))
 *
 * This differs from the LoRA of a layer: the activation does not see the base product. Scalings
 * apply once, to the down projection. Tokens without an adapter are left unchanged. */
typedef struct moelora_mlp_delta_args {
  int32_t num_experts;
  moelora_tensor hidden_states; /* [M, K] */
  moelora_routing routing;
  moelora_adapters adapters;
  moelora_lora gate_up; /* 1 slice of 2I columns, or 2 of I columns each */
  moelora_lora down;    /* 1 slice of K columns */
  moelora_tensor out;   /* [M, K] */
} moelora_mlp_delta_args;

moelora_status moelora_prepare_mlp_delta(const moelora_mlp_delta_args *args,
                                         const moelora_exec *exec, moelora_call *call);

/* ---- packed weights ---- */

/* Copies w [E, N, K] to out [E, N/64, K/64, 64, 64], in which each tile of 64 rows by 64 columns is
 * contiguous. N and K must be multiples of 64. */
moelora_status moelora_pack_weights(const moelora_tensor *w, const moelora_tensor *out,
                                    const moelora_exec *exec);

/* ---- devices, variants and plans ---- */

/* Returns whether this build and this machine can run on `device`. */
bool moelora_has_device(moelora_device device);
/* Returns the CPU features in use that dispatch depends on, such as "avx2 fma f16c"; "": none. */
const char *moelora_cpu_features(void);
/* Returns the name of a compiled kernel variant, usable or not; NULL past the end. */
const char *moelora_variant_name(int32_t index);
/* Returns whether the variant can run on this machine. */
bool moelora_variant_usable(int32_t index);
/* Forces variants: from now on, every plan uses them wherever they support the problem. FP8
 * products on a GPU use a forced variant only if it runs on the same instruction, mma.sync or
 * wgmma, as the variant that it replaces, since their bits differ. `names` is a comma-separated
 * list with at most one variant per role (projection, whole layer, sort, shrink, expand, sum,
 * product of the backward); NULL clears it. The environment variable MOELORA_FORCE_VARIANT sets the
 * initial list; if it names an unknown variant, or two of one role, operators fail. */
moelora_status moelora_force_variant(const char *names);
/* Limits the compute capability (80, 90, ...): from now on, newer GPUs only run kernels that GPUs
 * of this capability also run; 0 removes the limit. The environment variable MOELORA_MAX_CC sets
 * the initial limit; if it is not a valid number, operators fail. */
moelora_status moelora_limit_capability(int32_t compute_capability);
/* A measured plan: on such a device, a layer of these sizes with at most `tokens` tokens runs
 * `variant`, unless a plan with fewer tokens suffices; the plan with most tokens also serves
 * larger batches. If the variant cannot run, the built-in selection decides. Variants of different
 * roles (e.g. projection and shrink) are independent plans. */
typedef struct moelora_tuned_plan {
  moelora_device device;
  int32_t compute_capability; /* CUDA: 80, 90, ...; unused on the CPU */
  int32_t num_units;          /* CUDA: SMs; unused on the CPU */
  moelora_dtype dtype;
  int32_t num_experts; /* on this rank */
  int32_t top_k;
  int64_t hidden;       /* K */
  int64_t intermediate; /* I */
  int64_t tokens;       /* M */
  const char *variant;
} moelora_tuned_plan;

/* Adds a plan for calls prepared from now on. It replaces an earlier one for the same device,
 * layer, tokens and role of the variant. */
moelora_status moelora_add_tuned_plan(const moelora_tuned_plan *plan);
/* Removes all plans. Must not be called while operators run on other threads. */
void moelora_clear_tuned_plans(void);
/* Returns the kernels of this thread's last call, other than packing or alignment on a CPU:
 * "w=gemm_bf16_avx2"; for a layer "w13=gemm_bf16_avx512bf16 w2=gemm_bf16_avx512bf16"; for a delta
 * "delta=gemm_bf16_avx2" or, on a GPU, the family of its kernels, "delta=adapters_sm90"; for a
 * backward "backward=...". On a GPU, "shrink13=... shrink2=... sort=... sum=..." follow. With
 * MOELORA_LOG=plan in the environment, kernels and launch parameters are printed to stderr. */
const char *moelora_last_plan(void);

MOELORA_END_C
#endif
