/* Plans: the kernel of each launch of a call, and its parameters.
 *
 * A plan depends only on the problem's sizes, strides and alignment and on moelora_device_info,
 * and names every kernel that is chosen among several. Launchers make no choices; only the number
 * of CTAs or clusters that are resident at once is queried from the driver afterwards. */
#ifndef MOELORA_CORE_PLANS_H
#define MOELORA_CORE_PLANS_H

#include "core/format.h"

MOELORA_BEGIN_C

/* GPU architecture that a kernel is written for. Not ordered: kernels of one family need not run
 * on later architectures. */
typedef enum moelora_family {
  MOELORA_SM80, /* mma.sync and cp.async: all GPUs from 8.0 on */
  MOELORA_SM90, /* wgmma and TMA: 9.0 only */
} moelora_family;

typedef enum moelora_isa {
  MOELORA_ISA_SCALAR = 0, /* always available */
  MOELORA_ISA_AVX2 = 1,   /* with FMA and F16C */
  MOELORA_ISA_AVX512 = 2, /* F, BW, DQ, VL */
  MOELORA_ISA_AVX512_BF16 = 4,
  MOELORA_ISA_AMX_BF16 = 8, /* with AVX512_BF16 */
} moelora_isa;

/* Operation of a kernel. At most one row of each role can be forced. */
typedef enum moelora_role {
  MOELORA_ROLE_GEMM,   /* one grouped projection; on a CPU, all operators */
  MOELORA_ROLE_LAYER,  /* a whole layer for few tokens */
  MOELORA_ROLE_SORT,   /* sort of routed rows by (expert, adapter) */
  MOELORA_ROLE_SHRINK, /* x A^T */
  MOELORA_ROLE_EXPAND, /* xa B^T, unless fused into a GEMM */
  MOELORA_ROLE_SUM,    /* over top_k */
  MOELORA_ROLE_BACK,   /* a grouped product of the backward */
  MOELORA_ROLES,
} moelora_role;

/* Alternative algorithms of one role. */
typedef enum moelora_method {
  MOELORA_ONLY_METHOD,
  MOELORA_SHRINK_BLOCKS,   /* work items are found in the blocks of a GEMM */
  MOELORA_SHRINK_WINDOWS,  /* work items are found in windows of routed rows */
  MOELORA_SHRINK_SEGMENTS, /* whole segments listed by the sort, distributed evenly */
  MOELORA_EXPAND_STAGED,   /* B and rows staged in shared memory */
  MOELORA_EXPAND_THIN,     /* B loaded directly to registers, for few rows per pair */
} moelora_method;

/* Row of a variants.inc: a compiled kernel. `id` indexes its backend's table of launchers. */
typedef struct moelora_variant {
  const char *name; /* e.g. "gemm_bf16_avx512bf16", "gemm_bf16_64x128x64_sm80" */
  moelora_device device;
  moelora_dtype dtype; /* int32: independent of the dtype of tensors */
  moelora_role role;
  moelora_method method;
  moelora_kernel_format format; /* CUDA */
  int32_t needs;                /* CPU: a moelora_isa; CUDA: a moelora_family */
  int32_t id;
  /* Tile extents: rows (tokens; for a sort, its maximum), output columns (for a shrink, ranks), K
   * (for an expand, ranks). */
  int32_t block_m, block_n, block_k;
  int32_t stages;
  int32_t cluster; /* CUDA: CTAs that multicast weight rows */
  int32_t warps;   /* CUDA: warps per CTA; 0: not used */
  int32_t ctas;    /* CUDA: CTAs per SM, limited by registers */
  int32_t spans;   /* CUDA: warps of a CTA that split K */
  bool elements;   /* CUDA: supports operands without 16-byte alignment */
  bool gated;      /* CUDA: expand with silu(gate) * up */
} moelora_variant;

/* Limits of the whole-layer kernel. */
#define MOELORA_DECODE_TOKENS 8
#define MOELORA_DECODE_ROWS 64

/* CUDA: maximum rows of a block for portable kernels without 16-byte alignment; larger tiles would
 * spill registers. */
#define MOELORA_ELEMENT_ROWS 32

/* Properties of a Hopper GEMM that follow from its row; kernels assert them. Tiles of 128 weight
 * rows have one consumer warpgroup and two or three CTAs per SM; tiles of 256 have two and one. */
static MOELORA_CONSTEXPR bool moelora_shares_sm(int32_t block_n) {
  return block_n == 128;
}

/* Uses mma.sync, for few tokens and weights that are dequantized. */
static MOELORA_CONSTEXPR bool moelora_uses_mma_sync(moelora_kernel_format format, int32_t block_m) {
  return moelora_is_dequantized_kernel(format) && block_m <= 16;
}

/* Dynamic tile scheduler that publishes each tile's successor; otherwise a plain atomic counter,
 * or a static schedule. */
static MOELORA_CONSTEXPR bool moelora_has_dynamic_schedule(int32_t block_n) {
  return !moelora_shares_sm(block_n);
}

/* The epilogue of a gated projection can store e4m3 outputs for the next one: a tile has 128
 * outputs, a whole scale group. */
static MOELORA_CONSTEXPR bool moelora_stores_e4m3(moelora_kernel_format format, int32_t block_n) {
  return moelora_is_e4m3_kernel(format) && block_n == 256;
}

/* Maximum number of tiles that are split into halves; see TileScheduler. */
#define MOELORA_MAX_HALF_TILES 128

/* Tokens are operand A of wgmma (token-major), in units of 64; otherwise operand B, in n8 tiles. */
static MOELORA_CONSTEXPR bool moelora_is_token_major(moelora_kernel_format format,
                                                     int32_t block_m) {
  return moelora_is_e4m3_kernel(format) && block_m == 128;
}

/* Number of neighboring blocks that must belong to one expert, the last of which may be empty, for
 * a cluster of CTAs that multicast weights. 1 for token-major tiles, which pair blocks dynamically:
 * both CTAs of a cluster process an expert's unpaired last block. */
static inline int32_t moelora_cluster_blocks(const moelora_variant *v) {
  return moelora_is_token_major(v->format, v->block_m) ? 1 : v->cluster;
}

/* Whether the average expert has more rows than the blocks of a cluster, so that other clusters
 * read its weights again. Token-major clusters pair blocks, too. */
static inline bool moelora_reads_weights_again(const moelora_variant *v, int64_t rows_per_expert) {
  return rows_per_expert > (int64_t)v->block_m * v->cluster;
}

/* Spans of K are multiples of this, as of a cache line of 16-bit values. */
#define MOELORA_LINE 64

/* Number of K spans that every shrink sums separately and adds in order, and the length of each
 * but the last. `vectors`: x and A are 16-byte aligned. */
#define MOELORA_LONG_DEPTH 4096
static inline int32_t moelora_shrink_spans(int64_t depth, bool vectors) {
  return vectors && depth >= MOELORA_LONG_DEPTH ? 8 : 4;
}
static inline int32_t moelora_shrink_span(int64_t depth, bool vectors) {
  const int64_t spans = moelora_shrink_spans(depth, vectors);
  const int64_t lines = (depth + MOELORA_LINE - 1) / MOELORA_LINE;
  return (int32_t)((lines + spans - 1) / spans * MOELORA_LINE);
}

/* Limits of sort kernels: items per CTA at once, items ranked by pairwise comparison, and keys
 * whose counts fit 99 KiB of shared memory, which every GPU allows: three bins of 4 bytes each, in
 * addition to 5 KiB of static memory. */
#define MOELORA_SORT_THREADS 1024
#define MOELORA_SORT_GROUP 128
#define MOELORA_SORT_KEYS 7680

/* Exceeds every rank of a layer or a projection on a GPU, so that adapter and true rank fit a
 * word: a packed rank is adapter * MOELORA_RANKS + rank. */
#define MOELORA_RANKS 4096

/* Limits of windows that are sorted as they are loaded, and of kernels that run A and B of an
 * adapter: routed rows, and pairs (expert, adapter), each with a bin in the smallest window. */
#define MOELORA_WINDOW_ROWS 512
#define MOELORA_WINDOW_PAIRS (6 * 256 - 1)

/* One sort. */
typedef struct moelora_sort_plan {
  const moelora_variant *variant;   /* NULL: none */
  uint32_t num_chunks, chunk_items; /* CTAs, and items that each one places */
  uint32_t num_rows, row_chunks;    /* rows of the table between two launches */
  size_t table_bytes;
} moelora_sort_plan;

/* All of an alignment. */
typedef struct moelora_align_plan {
  moelora_sort_plan tokens; /* sort of tokens by adapter, which precedes the rows by expert if there
                               are too many keys for one sort */
  moelora_sort_plan rows;
  int64_t segments; /* maximum number it can list; 0: none */
  bool resolves;    /* a separate launch resolves the caller's tables; otherwise the sort of blocks
                       does */
  int32_t list_parts; /* for lists: CTAs per list */
} moelora_align_plan;

typedef struct moelora_shrink_plan {
  const moelora_variant *variant; /* NULL: no shrink */
  int32_t part;                   /* maximum number of tokens per work item */
  int32_t shares;                 /* work units per block, or CTAs that share a window */
  int32_t group;                  /* blocks that concurrent CTAs work on */
  bool listed;                    /* segments listed by the sort are distributed evenly over CTAs */
  bool few;        /* so few blocks that one pass of all CTAs over them finds all items */
  bool by_adapter; /* listed segments are taken adapter by adapter */
  int32_t window;  /* rows */
  int32_t span;    /* over whole segments: K extent of each partial sum */
  int64_t work;    /* upper bound of useful CTAs */
} moelora_shrink_plan;

typedef struct moelora_expand_plan {
  const moelora_variant *variant; /* NULL: no expand */
  int32_t part;                   /* maximum number of rows per work item */
  int32_t tiles;                  /* column tiles */
  int32_t shares, window;         /* as in moelora_shrink_plan */
  int32_t waves;                  /* CTAs launched, as a multiple of those resident at once */
  int64_t work;
} moelora_expand_plan;

/* Epilogue of a projection's kernel. */
typedef enum moelora_epilogue_plan {
  MOELORA_EPILOGUE_GENERAL, /* any */
  /* bias; relu2 or no activation; on Hopper also routing weights, of rows stored as flat rows */
  MOELORA_EPILOGUE_PLAIN,
  MOELORA_EPILOGUE_GATED, /* bias and a gated activation */
} moelora_epilogue_plan;

/* Launch mode for grids with fewer CTAs than the GPU holds at once. */
typedef enum moelora_grid_plan {
  MOELORA_GRID_OVERLAPPED, /* PDL: CTAs start as the previous kernel frees resources */
  MOELORA_GRID_SPREAD,     /* no PDL, so that CTAs are spread over all SMs */
} moelora_grid_plan;

/* Launch of one projection. */
typedef struct moelora_projection_plan {
  moelora_epilogue_plan epilogue;
  moelora_grid_plan grid;
  bool vectors;           /* x, w and out allow 16-byte accesses */
  bool a_vectors;         /* the factors A allow 16-byte accesses */
  bool b_vectors;         /* the factors B, which extend K of w, allow them */
  bool b_boxes;           /* each slice of B is covered by a tensor map */
  bool quantizes_x;       /* a launch before it quantizes x to e4m3 */
  bool quantizes_vectors; /* with 16-byte accesses */
  bool stores_e4m3;       /* the epilogue also stores quantized outputs, x of the next projection */
  bool stores_out;        /* the epilogue stores unquantized outputs, if they are read */
  int64_t num_counters;   /* of the tile scheduler */
  int32_t l2_elements;    /* elements of x that stay in L2 while weights are streamed */
  bool weights_again;     /* several clusters read the weights of an average expert */
  int32_t run;            /* tiles of a run of the tile scheduler */
} moelora_projection_plan;

/* One grouped projection. A separate launch first zeros rows of out whose expert is not local. */
typedef struct moelora_gemm_plan {
  const moelora_variant *variant; /* block_m is the number of rows of an alignment block */
  /* CUDA */
  moelora_projection_plan projection;
  moelora_align_plan align;
  moelora_shrink_plan shrink;
} moelora_gemm_plan;

typedef struct moelora_experts_plan {
  const moelora_variant *variant; /* of w13, or of the whole layer */
  /* Kernel of w2, which uses the same alignment: same family, same block_m. For a whole-layer
   * kernel, that of `staged`. */
  const moelora_variant *w2;
  /* For a whole-layer kernel: the plan of separate launches, in case fewer of its CTAs are
   * resident at once than on the whole device, as under a green context. The workspace covers
   * both. */
  const moelora_variant *staged;
  /* CUDA */
  moelora_projection_plan projection[2]; /* of w13, of w2; those of `staged` if present */
  bool scales_x;                         /* a launch multiplies x by routing weights */
  moelora_align_plan align;
  moelora_shrink_plan shrink[2]; /* of w13, of w2 */
  bool z_by_row;                 /* z is ordered by flat row, without the padding of blocks */
  const moelora_variant *sum;
} moelora_experts_plan;

/* One product with transposed weights, and the shrink before it. */
typedef struct moelora_back_product_plan {
  const moelora_variant *variant;
  bool vectors;         /* y, w and the outputs allow 16-byte accesses */
  bool a_vectors;       /* the factors A allow 16-byte accesses */
  bool shrinks_vectors; /* y and the factors B allow 16-byte accesses */
  int64_t num_counters; /* of the tile scheduler */
  int32_t l2_elements;
  bool weights_again; /* as of a projection */
} moelora_back_product_plan;

/* Intermediate results that a requested gradient depends on. */
typedef struct moelora_backward_needs {
  bool v; /* also dgu, h, dt */
  bool dz;
  bool yb2, yb13, xa13, xa2;
} moelora_backward_needs;

/* The backward of a layer. */
typedef struct moelora_backward_plan {
  moelora_backward_needs needs;
  const moelora_variant *variant; /* CPU: selects the kernels; CUDA: of the product with w13 */
  /* CUDA */
  moelora_back_product_plan
      product[2]; /* with w2, fused with the gradient of the activation; with w13 */
  moelora_align_plan align;
  const moelora_variant *sum;
} moelora_backward_plan;

/* Source and order of the rows of a delta. */
typedef enum moelora_delta_order {
  MOELORA_BY_ROUTE, /* flat rows, in their order */
  MOELORA_GROUPED,  /* flat rows, sorted by expert, then adapter, within each window */
  MOELORA_SORTED,   /* by expert, then adapter */
  MOELORA_LISTED,   /* by the caller's lists */
} moelora_delta_order;

/* Intermediate results that a requested gradient of a projection depends on. */
typedef struct moelora_gemm_backward_needs {
  bool dz, yb, xa;
} moelora_gemm_backward_needs;

/* The backward of a projection, or of a delta, which has no weights. */
typedef struct moelora_gemm_backward_plan {
  moelora_gemm_backward_needs needs;
  const moelora_variant *variant; /* that of the kernels; CUDA: that of the product */
  /* CUDA */
  moelora_back_product_plan product;
  moelora_align_plan align;
  moelora_shrink_plan shrink; /* x A^T again */
  bool copies_dout;           /* flat rows of dout are not equally spaced */
  int64_t dout_stride;        /* of flat rows, of the copy if there is one */
  const moelora_variant *sum; /* NULL: every routed row has a row of x */
} moelora_gemm_backward_plan;

/* A delta, LoRA without a base product: one projection, or the two of an adapter MLP. */
typedef struct moelora_delta_plan {
  const moelora_variant *variant; /* CPU: the kernels to use; NULL on CUDA */
  /* CUDA */
  moelora_family family; /* family of kernels that may be used */
  moelora_delta_order order;
  bool xa_vectors;          /* x A^T allows 16-byte accesses */
  moelora_align_plan align; /* MOELORA_SORTED */
  moelora_shrink_plan shrink[2];
  moelora_expand_plan expand[2];
  const moelora_variant *sum;
} moelora_delta_plan;

MOELORA_END_C
#endif
