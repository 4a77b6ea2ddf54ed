/* moelora: mixture-of-experts operators with LoRA adapters applied inside the grouped GEMM.
 *
 * A plain C11 interface that knows neither Python nor torch. Every operator takes one struct of
 * arguments (tensor views, outputs included) and one `moelora_exec` that says where to run. The
 * library never allocates and never synchronises: outputs and workspace come from the caller,
 * CUDA work is queued on the caller's stream, and every call can be captured in a CUDA graph.
 *
 * Names: M tokens, top_k experts chosen per token, P = M * top_k routed rows (flat index
 * p = m * top_k + j), E experts on this rank, K hidden size, I intermediate size of one expert,
 * R maximum rank of a stack of adapters, max_loras adapter slots.
 *
 * The exact function of a layer, for routed row (m, j) with local expert e and adapter l:
 *
 *   g = x[m] Wg[e]^T + s[l] (x[m] Ag[l,e]^T) Bg[l,e]^T + bias       (u likewise)
 *   h = activation(g, u)
 *   z = h W2[e]^T + s[l] (h A2[l,e]^T) B2[l,e]^T + bias
 *   out[m] = sum over j of topk_weights[m,j] * z
 *
 * Expert or adapter ids outside their range are never used as an address: a row whose expert is out
 * of range (or lives on another rank) is skipped, a row whose adapter is out of range or disabled
 * is a base row. A base row gets the same bits whatever the other rows carry.
 *
 * Routing, adapters and lists may be written to while a call reads them: each element then counts,
 * for all of the call, as it was before or after the write. On CUDA that holds for ids, maps,
 * switches, ranks, scalings and lora_ids; routing weights and the rows of lists are read by every
 * kernel that needs them, so a write meanwhile mixes old and new in the rows concerned, and in no
 * others. Nothing that is written is ever an address.
 */
#ifndef MOELORA_H
#define MOELORA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOELORA_VERSION "0.1.0"
#define MOELORA_MAX_DIMS 5
#define MOELORA_MAX_SLICES 4
/* Side of a tile of packed weights, see moelora_pack_weights. */
#define MOELORA_PACK 64

typedef enum moelora_status {
  MOELORA_OK = 0,
  MOELORA_INVALID_ARGUMENT, /* a shape, dtype, stride or value that the contract excludes */
  MOELORA_UNSUPPORTED,      /* valid, but this build or this device has no kernel for it */
  MOELORA_WORKSPACE_TOO_SMALL,
  MOELORA_DEVICE_ERROR, /* a CUDA call failed; the message carries its name */
} moelora_status;

/* The text of the last failure on this thread, "" if none. Valid until the thread's next call. */
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

/* A view of memory on the device of the call; strides count elements. `data == NULL` with
 * `ndim == 0` says that an optional tensor is absent; otherwise only a tensor without elements may
 * have no data. */
typedef struct moelora_tensor {
  void *data;
  moelora_dtype dtype;
  int32_t ndim;
  int64_t size[MOELORA_MAX_DIMS];
  int64_t stride[MOELORA_MAX_DIMS];
  const char *name; /* what messages call it; NULL: as its field */
} moelora_tensor;

typedef void (*moelora_task)(void *context, int64_t begin, int64_t end);

/* Where and with what an operator runs. */
typedef struct moelora_exec {
  moelora_device device;
  int32_t device_index; /* CUDA ordinal, current or not; unused on the CPU */
  void *stream;         /* cudaStream_t of that device; NULL is its default stream */
  void *workspace;      /* 256-byte aligned, at least moelora_call.workspace_bytes; on `device` */
  size_t workspace_bytes;
  /* CPU only: runs `task` over [0, count), split at will over threads, and returns when all of it
   * is done. NULL runs serially. Each thread has scratch of its own in the workspace. */
  void (*parallel_for)(int64_t count, moelora_task task, void *context);
  int32_t num_threads; /* how many threads parallel_for spreads over; 0 counts as 1 */
  /* Ignored, and to be removed in the next release: the bits of a row depend on nothing else in the
   * batch, nor on how many rows there are, in every call. */
  bool batch_invariant;
} moelora_exec;

/* A call of an operator, checked and planned once: moelora_prepare_* fill it, moelora_run runs it.
 * It holds the pointers of its arguments and the plan, so it may run again, on another stream or in
 * a graph, as long as the tensors are where they were; a plan that is forced or tuned later changes
 * nothing. A plain value: copy it, keep it, drop it. */
#define MOELORA_CALL_BYTES 2048
typedef struct moelora_call {
  size_t workspace_bytes; /* exec.workspace of moelora_run must have so many */
  uint64_t state[MOELORA_CALL_BYTES / sizeof(uint64_t)];
} moelora_call;

/* Runs a prepared call, or queues it. `exec` names the device that it was prepared for, at most as
 * many threads (1 without a parallel_for), and the workspace. A call that moelora_prepare_* refused
 * is an error; one that has nothing to do is not. Where device_index is not the calling thread's
 * current device, it is made current by cudaSetDevice, and the other one again before the return.
 * Fails with MOELORA_WORKSPACE_TOO_SMALL, MOELORA_INVALID_ARGUMENT or MOELORA_DEVICE_ERROR. */
moelora_status moelora_run(const moelora_call *call, const moelora_exec *exec);

/* Stacked LoRA factors of one projection. Slice i covers output columns [i*N, (i+1)*N) in memory
 * order; `num_slices == 0` says that the projection has no adapters. An expert dimension of 1 is
 * one factor shared by all experts. */
typedef struct moelora_lora {
  int32_t num_slices;
  moelora_tensor a[MOELORA_MAX_SLICES]; /* each [max_loras, E or 1, R, K] */
  moelora_tensor b[MOELORA_MAX_SLICES]; /* each [max_loras, E or 1, N, R] */
} moelora_lora;

/* Which token carries which adapter. All of it is read on the device, so that a captured graph can
 * be replayed with other adapters. */
typedef struct moelora_adapters {
  moelora_tensor token_lora_mapping; /* [M] int32 or int64, -1 = none; absent: no adapters at all */
  moelora_tensor lora_ranks;         /* [max_loras] int32, true ranks; absent: R */
  moelora_tensor lora_scalings;      /* [max_loras] float32; absent: 1 (folded into B) */
  moelora_tensor adapter_enabled; /* [max_loras] or [max_loras + 1], bool or int32; absent: all */
} moelora_adapters;

/* Which token goes to which experts. top_k is at least 1 and may exceed the number of experts, as
 * experts may repeat; M * top_k fits int32. */
typedef struct moelora_routing {
  moelora_tensor topk_ids;     /* [M, top_k] int32 or int64 */
  moelora_tensor topk_weights; /* [M, top_k] float32 */
  moelora_tensor expert_map;   /* [E_global] int32: local expert or -1; absent: ids are local */
} moelora_routing;

/* ---- alignment: sort routed rows by (expert, adapter) and pad to blocks ---- */

typedef enum moelora_align_mode {
  MOELORA_ALIGN_BASE = 0,  /* by expert; a block holds one expert */
  MOELORA_ALIGN_UNIFORM,   /* by (expert, adapter); a block holds one pair */
  MOELORA_ALIGN_SEGMENTED, /* by expert, rows inside ordered by adapter; padding per expert only */
  MOELORA_ALIGN_SORTING, /* CK-tile's moe_sorting: token ids, weights, empty experts get a block */
} moelora_align_mode;

/* Order: local expert, then adapter (-1 first), then flat row index. Sizes: `blocks` is at least
 * moelora_align_max_blocks(), rows = blocks * block_size. */
typedef struct moelora_align_args {
  moelora_align_mode mode;
  int32_t num_experts; /* with expert_map: the number of global experts, expert_map.size(0) */
  int32_t block_size;
  int32_t max_loras;         /* UNIFORM and SEGMENTED */
  moelora_routing routing;   /* topk_weights: SORTING only */
  moelora_adapters adapters; /* token_lora_mapping and adapter_enabled; UNIFORM and SEGMENTED */
  /* outputs */
  moelora_tensor sorted_token_ids; /* [rows] int32: flat row (SORTING: token); padding M * top_k */
  moelora_tensor expert_ids;       /* [blocks] int32: local expert; -1 past the end */
  moelora_tensor lora_ids; /* UNIFORM: [blocks]; SEGMENTED: [rows]; int32, -1 = base or padding */
  moelora_tensor num_tokens_post_padded; /* [1] int32 */
  moelora_tensor sorted_weights;         /* SORTING: [rows] float32, 0 in padding */
  moelora_tensor out_to_zero; /* SORTING: any contiguous float tensor, zeroed; may be absent */
} moelora_align_args;

/* Upper bound of the number of blocks: what the outputs must hold. */
int64_t moelora_align_max_blocks(moelora_align_mode mode, int64_t num_rows, int32_t num_experts,
                                 int32_t max_loras, int32_t block_size);
moelora_status moelora_prepare_align(const moelora_align_args *args, const moelora_exec *exec,
                                     moelora_call *call);

/* ---- quantised weights ---- */

/* How the numbers of a weight are stored: MOELORA_NATIVE, which is 0, MOELORA_MXFP4, MOELORA_INT4
 * and so on. formats.inc has a row for each, which says what it is. */
typedef enum moelora_format {
#define MOELORA_FORMAT_OF(KERNEL, NAME, ...) MOELORA_##NAME,
#include "formats.inc"
} moelora_format;

/* What multiplies FP8 weights. Adapters always take x, and h, as they are. */
typedef enum moelora_x_format {
  /* x as it is (W8A16), by numbers that are rounded once; the only one of all other formats */
  MOELORA_X_NATIVE = 0,
  /* W8A8: q = e4m3(x (1/s)) or e4m3(x / s), as below, for a float32 scale s and a float32 1/s; to
   * nearest even; what is beyond 448 becomes 448, a NaN stays one and counts in no maximum. The sum
   * of every 128 of depth (64 of FP8_G64) of products of e4m3 is multiplied by both scales. h is
   * rounded to its dtype first. */
  MOELORA_X_GROUP, /* s of every 128 (64) of depth of a token: max(|x|, 1e-10) / 448; q = x (1/s) */
  MOELORA_X_TOKEN, /* s of every token: max|x| / 448, at least 1 / (448 * 512); q = x / s */
  MOELORA_X_STATIC, /* s is the layout's x_scale; q = x (1/s) */
} moelora_x_format;

/* Which rows of tiles hold which rows of a weight. */
typedef enum moelora_row_order {
  MOELORA_ROWS_PLAIN = 0,
  MOELORA_ROWS_GATE_UP,     /* gate rows come first; they and the up rows fill tiles of their own */
  MOELORA_ROWS_INTERLEAVED, /* gate and up rows alternate; tiles are those of GATE_UP */
} moelora_row_order;

/* Quantised weights lie in tiles, [E, tiles of rows, tiles of depth, bytes of a tile] uint8. Rows
 * and depth behind the last are zeros. Those of four bits are 64 rows by 64 of depth, in the order
 * of operand A of mma.m16n8k16 and of wgmma:
 *
 *   values [4 warps][32 lanes][4 slabs of k16] uint32
 *   scales [4 warps][8][2 rows][G]              uint8 (MXFP4) or 16 bits (INT4)
 *   zeros  [4 warps][8][2 rows][G]              uint8 (ZP)
 *
 * Lane t of warp w has rows r = 16 w + t / 4 and r + 8. Of its word for slab s, numbers i of the
 * low and of the high half are register a_i of that instruction: columns c and c + 1 = 16 s + 2
 * (t % 4) of r (i = 0) and of r + 8 (i = 1), columns c + 8 and c + 9 of r (i = 2) and of r + 8 (i =
 * 3). Number i of INT4 is nibble i of its half; sign, exponent and mantissa of those of MXFP4 are
 * bits 15, 8, 7, 6 (i = 0); 12, 5, 4, 3; 9, 2, 1, 0; 13, 11, 10, 14 (i = 3). Scales of r and r + 8
 * are at [w][r % 8]; G is 2 for groups of 32, else 1. What a scale means depends on the dtype of
 * the activations: for bf16 an MXFP4 scale 2^(s - 127) is the byte s + 126, for fp16 s - 98, 0 if s
 * is less; an INT4 scale is rounded to it.
 *
 * Tiles of FP8 are 64 rows by 128 of depth, rows of 128 bytes as TMA's 128-byte swizzle lays them:
 *
 *   values [64 rows][8] 16 bytes   chunk c, columns 16 c to 16 c + 15, of row r at c ^ (r & 7)
 *   scales [4] float32             of columns 0 to 63, of columns 64 to 127, 0, 0; ROWS: [64], of
 * rows
 *
 * In a chunk byte 4 q + i is column {2 q, 2 q + 1, 2 q + 8, 2 q + 9}[i], so that the word that
 * ldmatrix gives a lane is what it has of a row in two k16 operands, or in one of k32 if x lies in
 * the same order. Nothing in them depends on the dtype of the activations. */
typedef struct moelora_layout {
  moelora_format format;
  moelora_row_order order;
  int64_t rows;       /* N; K is that of the activations */
  moelora_x_format x; /* NATIVE but of FP8 */
  float x_scale;      /* STATIC: finite, above 0; else 0 */
} moelora_layout;

/* Bytes of a tile; 0 for MOELORA_NATIVE. */
int32_t moelora_tile_bytes(moelora_format format);

/* Quantised numbers as checkpoints have them: values [E, N, K/2] uint8, the even column in the low
 * nibble; scales [E, N, K/group], uint8 e8m0 (MXFP4) or float32, bf16 or fp16 (INT4); zeros,
 * of the ZP formats, [E, N, K/group] uint8. A group is 32 (MXFP4 and G32), a multiple of 64, or K.
 *
 * Of FP8: values [E, N, K] uint8 of e4m3; scales [E, N/block_rows, K/block_columns] float32, both
 * rounded up: that of number (n, k) is [n / block_rows, k / block_columns]. Columns of a block are
 * a multiple of 128 (of 64 for G64), or K and more; rows of a tile are of one block, but for ROWS;
 * where block_rows is 1, they have equal scales, of which the first counts.
 */
typedef struct moelora_quantized {
  moelora_tensor values, scales, zeros;
  int64_t block_rows, block_columns; /* of FP8; else 0 */
} moelora_quantized;

/* Brings them into tiles [E, tiles of rows, tiles of depth, bytes of a tile] uint8, for activations
 * of `dtype`, bf16 or fp16. Nobody looks here for what must not be there: MXFP4 scales above 2, NaN
 * among them; INT4 scales that are not finite or beyond 65504 of either sign; of FP8 a NaN, or a
 * scale that is not finite or beyond 255 of either sign. */
moelora_status moelora_pack_quantized(const moelora_quantized *w, const moelora_layout *layout,
                                      moelora_dtype dtype, const moelora_tensor *tiles,
                                      const moelora_exec *exec);
/* Tiles to out [E, N, K] of the dtype they were packed for: each number rounded once. FP8 scales
 * are those of the dtype (fp16: of 256 times the scale), as in products with x as it is. */
moelora_status moelora_unpack_quantized(const moelora_tensor *tiles, const moelora_layout *layout,
                                        const moelora_tensor *out, const moelora_exec *exec);

/* ---- one projection: base product + LoRA in one pass ---- */

typedef struct moelora_gemm_args {
  moelora_tensor x;        /* [M, K] or [P, K] */
  moelora_tensor w;        /* [E, N, K], packed [E, N/64, K/64, 64, 64], or as w_layout says */
  moelora_layout w_layout; /* of PLAIN order */
  moelora_tensor bias;     /* [E, N]; may be absent */
  moelora_routing routing;
  moelora_adapters adapters;
  moelora_lora lora;
  bool mul_routed_weight;
  moelora_tensor out; /* [M, top_k, N]; rows of skipped experts become 0 */
} moelora_gemm_args;

moelora_status moelora_prepare_gemm(const moelora_gemm_args *args, const moelora_exec *exec,
                                    moelora_call *call);

/* ---- the whole layer ---- */

typedef enum moelora_activation {
  MOELORA_SILU = 0,               /* silu(g) * u; gate rows then up rows */
  MOELORA_GELU,                   /* gelu_tanh(g) * u */
  MOELORA_SWIGLUOAI,              /* g sigmoid(alpha g) (u + 1), clamped; rows alternate gate, up */
  MOELORA_RELU2,                  /* relu(x)^2, not gated: w13 is [E, I, K] */
  MOELORA_SWIGLUOAI_UNINTERLEAVE, /* the same as SWIGLUOAI; gate rows then up rows */
} moelora_activation;

/* What the forward of a layer saves for its backward, beside its arguments. Rows are flat rows p,
 * whatever order kernels sort them into. All are in the dtype of hidden_states. */
typedef struct moelora_saved {
  /* [P, 2I] ([P, I] if not gated): x w13^T + adapter + bias before the activation, columns in the
   * order of the rows of w13; 0 in skipped rows. Absent: nothing is saved. */
  moelora_tensor gate_up;
  /* [P, slices, R] and [P, R]: s x A13^T and s h A2^T; 0 from the true rank on, in base rows and in
   * skipped rows. Absent where the projection has no adapters. */
  moelora_tensor w13_shrink, w2_shrink;
} moelora_saved;

typedef struct moelora_experts_args {
  moelora_tensor hidden_states; /* [M, K] */
  moelora_tensor w13;           /* [E, 2I, K] ([E, I, K] if not gated), packed, or quantised */
  moelora_tensor w2;            /* [E, K, I], packed, or quantised */
  /* All zeros, or of w13 in the order that the activation wants and of w2 in PLAIN order. Tiles of
   * a gated w13 in PLAIN order serve where I is a multiple of 64 and gate rows come first. */
  moelora_layout w13_layout, w2_layout;
  moelora_tensor w13_bias; /* [E, 2I]; may be absent */
  moelora_tensor w2_bias;  /* [E, K]; may be absent */
  moelora_routing routing;
  moelora_adapters adapters;
  /* In the dtype of hidden_states; those of a projection may be float32, and are rounded to it. */
  moelora_lora w13_lora; /* 1 slice of 2I columns, or 2 of I columns each */
  moelora_lora w2_lora;  /* 1 slice of K columns */
  moelora_activation activation;
  /* Normal float32 above 0; 0: the activation's own. The two of swigluoai take an alpha, by itself
   * 1.702. They and silu take a limit, by itself 7 and none: g becomes min(g, limit) and u becomes
   * min(max(u, -limit), limit) before anything else. */
  double activation_alpha, activation_limit;
  bool apply_router_weight_on_input; /* top_k must be 1 */
  moelora_tensor out;                /* [M, K]; may be the memory of hidden_states, unless saving */
  moelora_saved saved;               /* outputs; `out` has the same bits with and without them */
} moelora_experts_args;

moelora_status moelora_prepare_experts(const moelora_experts_args *args, const moelora_exec *exec,
                                       moelora_call *call);

/* ---- the backward of the layer ---- */

/* Gradients of a layer; those that are absent are not computed. w13 and w2 are frozen and have
 * none. */
typedef struct moelora_experts_grads {
  moelora_tensor hidden_states; /* [M, K], in its dtype */
  moelora_tensor topk_weights;  /* [M, top_k] float32 */
  /* Of the shapes of the factors and biases, each in the dtype of hidden_states or in float32.
   * num_slices is 0, or that of the factors. */
  moelora_lora w13_lora, w2_lora;
  moelora_tensor w13_bias, w2_bias; /* [E, 2I] and [E, K] */
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
 * With apply_router_weight_on_input t x takes the place of x, t is 1 in all of the above, and
 * dt = <dgu W13eff, x>. What multiplies is rounded to the dtype of hidden_states once, and every
 * sum is float32: over the rows of an (expert, adapter) in the order of p, and for a factor that
 * experts share over these in the order of experts. So gradients are the same in every run, and
 * those of an adapter do not depend on which other adapters have rows in the call. Rows of base
 * tokens have the bits of dx that they have without adapters. Nothing crosses from the rows and
 * factors of an adapter to other rows or other adapters' gradients, NaN included, but biases, whose
 * gradients sum over the rows of all.
 *
 * Weights in e4m3 or of four bits multiply as they dequantize to the dtype of hidden_states; where
 * the forward rounds activations to e4m3, the backward takes that rounding for the identity. */
typedef struct moelora_experts_backward_args {
  moelora_experts_args forward; /* as the forward had it, `saved` included; `out` is not read */
  moelora_tensor dout;          /* [M, K], in the dtype of hidden_states */
  moelora_experts_grads grads;  /* outputs */
  /* Adds to the gradients of factors and biases, which then must be initialized. Else they are
   * written, zeros where nothing contributes. The other two are always written. */
  bool accumulate;
} moelora_experts_backward_args;

moelora_status moelora_prepare_experts_backward(const moelora_experts_backward_args *args,
                                                const moelora_exec *exec, moelora_call *call);

/* ---- adapters alone: the delta that an engine adds to a base product made elsewhere ---- */

/* vLLM's alignment: one list of blocks for each adapter slot. Block b of list l holds rows
 * [b * block_size, (b + 1) * block_size) of sorted_token_ids[l], all of expert expert_ids[l, b].
 * Only the lists that lora_ids[0 .. num_active) name count, each of them once; an id that is
 * negative, not below max_loras, or disabled is skipped. */
typedef struct moelora_lists {
  moelora_tensor sorted_token_ids; /* [max_loras, rows] int32: flat row p; others are padding */
  moelora_tensor expert_ids;       /* [max_loras, blocks] int32: local expert, -1 = skip */
  moelora_tensor num_tokens_post_padded; /* [max_loras] int32: rows in use, padding included */
  moelora_tensor lora_ids;               /* [any] int32 */
  int32_t num_active;                    /* 0 to lora_ids.size(0) */
  int32_t block_size;
} moelora_lists;

/* Fills the lists of the adapters that `lists.lora_ids` names: rows ordered by local expert, each
 * expert padded to whole blocks with M * top_k, expert_ids -1 past the end. Lists of other adapters
 * are left as they are. A list holds at least the blocks of an adapter that all tokens carry,
 * moelora_align_max_blocks(MOELORA_ALIGN_BASE, ...), and as many rows as these. */
typedef struct moelora_align_lists_args {
  int32_t num_experts; /* with expert_map: the number of global experts */
  int32_t max_loras;
  moelora_routing routing;
  moelora_adapters adapters; /* token_lora_mapping and adapter_enabled */
  moelora_lists lists;       /* outputs but for lora_ids */
} moelora_align_lists_args;

moelora_status moelora_prepare_align_lists(const moelora_align_lists_args *args,
                                           const moelora_exec *exec, moelora_call *call);

/* For every routed row p that has an adapter l and an expert e on this rank:
 *
 *   h[slice, p] = s[l] x A[slice][l,e]^T      rounded to the dtype of x; 0 from the true rank on
 *   z           = h[slice, p] B[slice][l,e]^T   in columns slice * N to (slice + 1) * N
 *
 * x and h given: the shrink alone. h and out: the expand alone, which uses no scaling. x and out:
 * both, h stays inside. Rows that have no adapter (none, disabled, of rank 0) or whose expert is
 * skipped keep their bits in h and in out, whatever the flags say.
 *
 * What becomes of z: with `silu_and_mul` the first half of the columns is gate, the second up, and
 * silu(gate) * up takes their place (then not add_inputs, not mul_routed_weight, out_offset 0).
 * With mul_routed_weight it is multiplied by topk_weights. A 3-D out takes each row's z; a 2-D out
 * takes the sum over the rows of a token, in float32. All of it is rounded once. */
typedef struct moelora_delta_args {
  int32_t num_experts;     /* E on this rank */
  moelora_routing routing; /* topk_ids absent: `lists` say where rows go */
  moelora_lists lists;     /* sorted_token_ids absent: `routing` and `adapters` say it */
  int64_t num_tokens;      /* M and top_k of lists; topk_ids has them otherwise */
  int32_t top_k;
  moelora_adapters adapters;
  moelora_lora lora; /* a is absent in an expand, b in a shrink */
  moelora_tensor x;  /* [M, K] or [P, K] */
  moelora_tensor h;  /* [slices, M, top_k, R] */
  bool silu_and_mul, mul_routed_weight;
  bool add_inputs;    /* out += z, else out = z */
  moelora_tensor out; /* [M, top_k, >= out_offset + columns], or [M, the same] */
  int64_t out_offset; /* first column */
} moelora_delta_args;

moelora_status moelora_prepare_delta(const moelora_delta_args *args, const moelora_exec *exec,
                                     moelora_call *call);

/* SGLang's all-in-one: a whole adapter MLP beside the base layer,
 *
 *   out[m] += sum over j of topk_weights[m,j] * s[l] * B2 A2 (silu(Bg Ag x[m]) * (Bu Au x[m]))
 *
 * This is not the LoRA of the layer above: its activation sees nothing of the base product.
 * Scalings count once, in the second half. Tokens without an adapter keep their bits. */
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

/* ---- weights in tiles ---- */

/* Copies w [E, N, K] to out [E, N/64, K/64, 64, 64]: tile (i, j) of an expert is one contiguous
 * burst of 64 rows by 64 columns. N and K must be multiples of 64. */
moelora_status moelora_pack_weights(const moelora_tensor *w, const moelora_tensor *out,
                                    const moelora_exec *exec);

/* ---- what is there, and what was chosen ---- */

/* True if this build and this machine can run on `device`. */
bool moelora_has_device(moelora_device device);
/* Space-separated CPU features that dispatch looks at, e.g. "avx2 fma f16c avx512f avx512_bf16". */
const char *moelora_cpu_features(void);
/* Kernel variants compiled in, usable or not; NULL past the end. */
const char *moelora_variant_name(int32_t index);
/* True if the variant can run on this machine. */
bool moelora_variant_usable(int32_t index);
/* From now on every plan that can use the variants of these names does: of each role (projection,
 * whole layer, sort, shrink, expand, delta, mlp, sum) at most one, with commas between them; NULL
 * goes back to the table. The environment variable MOELORA_FORCE_VARIANT sets them at start; a name
 * that does not exist, or two of one role, then fail every operator. */
moelora_status moelora_force_variant(const char *names);
/* From now on a GPU newer than this compute capability (80, 90, ...) gets the plans of one that has
 * it, of kernels that both can run; 0 lifts the limit. The environment variable MOELORA_MAX_CC sets
 * it at start; what is no such number then fails every gemm and layer. */
moelora_status moelora_limit_capability(int32_t compute_capability);
/* Every call is batch invariant, see moelora_exec: the first does nothing, the second returns true.
 * Both are to be removed in the next release, as is the environment variable
 * MOELORA_BATCH_INVARIANT, which nobody reads. */
void moelora_set_batch_invariant(bool on);
bool moelora_is_batch_invariant(void);
/* A measured choice: on such a device, layers of these sizes run `variant` when they have at most
 * `tokens` tokens and no plan of theirs with fewer is enough; the plan with most tokens also serves
 * larger batches. Where the variant cannot run the built-in table decides, as for other layers.
 * Variants of different roles, as a projection and a shrink, have plans of their own. */
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

/* Adds one; a newer plan for the same layer and tokens takes over, in calls prepared from then on.
 */
moelora_status moelora_add_tuned_plan(const moelora_tuned_plan *plan);
/* Forgets all of them. Not while operators run on other threads. */
void moelora_clear_tuned_plans(void);
/* What the last call on this thread ran: "w=gemm_bf16_avx2", for a layer
 * "w13=gemm_bf16_avx512bf16 w2=gemm_bf16_avx512bf16", for adapters alone "delta=gemm_bf16_avx2" or,
 * on a GPU, "delta=adapters_sm90", or the kernel that does all of it. On a GPU the kernels around
 * them follow, as in " shrink13=... shrink2=... sort=... sum=...". The environment variable
 * MOELORA_LOG=plan prints every choice and its reasons to stderr. */
const char *moelora_last_plan(void);

#ifdef __cplusplus
}
#endif
#endif
