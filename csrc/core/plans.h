/* A plan: the kernel of each launch of a call, and its launch parameters.
 *
 * A plan depends on the problem, except for the contents of its tensors, on moelora_device_info, on
 * forced and tuned variants, and on the limit of the compute capability. It names a kernel wherever
 * there are several. Launchers only query the driver for the CTAs or clusters that are resident at
 * once, and run `staged` if a kernel of a whole layer does not fit. */
#pragma once

#include "core/format.h"

MOELORA_BEGIN_C

/* GPU architecture that a kernel is written for. Later architectures need not run its kernels. */
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

/* Operation of a kernel. At most one variant of each role can be forced. */
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
  MOELORA_SHRINK_BLOCKS,   /* CTAs find work items in the blocks of a GEMM */
  MOELORA_SHRINK_WINDOWS,  /* CTAs find work items in windows of routed rows */
  MOELORA_SHRINK_SEGMENTS, /* whole segments, which the sort lists, distributed evenly */
  MOELORA_EXPAND_STAGED,   /* stages B and rows of xa in shared memory */
  MOELORA_EXPAND_THIN,     /* loads B to registers; for few rows per (expert, adapter) */
} moelora_method;

/* A compiled kernel, a row of a variants.inc. `id` indexes the launchers of its backend. */
typedef struct moelora_variant {
  const char *name; /* e.g. "gemm_bf16_avx512bf16", "gemm_bf16_64x128x64_sm80" */
  moelora_device device;
  moelora_dtype dtype; /* int32: independent of the dtype of tensors */
  moelora_role role;
  moelora_method method;
  moelora_kernel_format format; /* CUDA */
  int32_t needs;                /* CPU: a moelora_isa; CUDA: a moelora_family */
  int32_t id;
  /* Tile extents: tokens (for a sort, its maximum number of items), output columns (for a shrink,
   * ranks), and K (for an expand, ranks). */
  int32_t block_m, block_n, block_k;
  int32_t stages;
  int32_t cluster; /* CUDA: CTAs of a cluster, which multicast weight rows */
  int32_t warps;   /* CUDA: warps per CTA; 0: not used */
  int32_t ctas;    /* CUDA: CTAs per SM of the launch bounds; 0: not used */
  int32_t spans;   /* CUDA: parts of K that different warps sum; 0: not used */
  bool elements;   /* CUDA: supports operands without 16-byte alignment */
  bool gated;      /* CUDA: expand with silu(gate) * up */
} moelora_variant;

/* Limits of the whole-layer kernel. */
#define MOELORA_DECODE_TOKENS 8
#define MOELORA_DECODE_ROWS 64

/* CUDA: maximum block_m of portable kernels without 16-byte alignment; larger tiles would spill
 * registers. */
#define MOELORA_ELEMENT_ROWS 32

/* Whether several CTAs of a Hopper GEMM share an SM (kernels assert this). With 128 weight rows, a
 * CTA has one consumer warpgroup, and two or three CTAs share an SM; their schedule of tiles is
 * static. With 256, a CTA has two consumer warpgroups and an SM of its own; its tile scheduler is
 * dynamic (sm90/tile_scheduler.cuh). */
static MOELORA_CONSTEXPR bool moelora_shares_sm(int32_t block_n) {
  return block_n == 128;
}

/* Whether a Hopper GEMM uses mma.sync: dequantized weights, at most 16 tokens per block. */
static MOELORA_CONSTEXPR bool moelora_uses_mma_sync(moelora_kernel_format format, int32_t block_m) {
  return moelora_is_dequantized_kernel(format) && block_m <= 16;
}

/* Whether the epilogue of a gated projection can store e4m3 x of the next projection: a tile has
 * 128 outputs, a whole scale group. */
static MOELORA_CONSTEXPR bool moelora_stores_e4m3(moelora_kernel_format format, int32_t block_n) {
  return moelora_is_e4m3_kernel(format) && block_n == 256;
}

/* Whether tokens are operand A of wgmma, in m64 tiles; otherwise operand B, in n8 tiles. */
static MOELORA_CONSTEXPR bool moelora_is_token_major(moelora_kernel_format format,
                                                     int32_t block_m) {
  return moelora_is_e4m3_kernel(format) && block_m == 128;
}

/* Number of consecutive blocks that must belong to one expert, since a cluster of CTAs multicasts
 * its weights; the last of them may be empty. 1 for token-major tiles: the sort pairs the blocks of
 * an expert, and both CTAs of a cluster process an unpaired last block. */
static inline int32_t moelora_cluster_blocks(const moelora_variant *v) {
  return moelora_is_token_major(v->format, v->block_m) ? 1 : v->cluster;
}

/* Whether an average expert has more rows than the blocks of one cluster, so that several clusters
 * read its weights. A cluster of token-major tiles also has `cluster` blocks: it pairs them. */
static inline bool moelora_reads_weights_again(const moelora_variant *v, int64_t rows_per_expert) {
  return rows_per_expert > (int64_t)v->block_m * v->cluster;
}

/* The length of a span of K is a multiple of this: a cache line of 16-bit values. */
#define MOELORA_LINE 64

/* Every shrink splits K into spans and adds their sums in order. The functions return the number of
 * spans, and the length of all but the last. `vectors`: x and A are 16-byte aligned. */
#define MOELORA_LONG_DEPTH 4096
static inline int32_t moelora_shrink_spans(int64_t depth, bool vectors) {
  return vectors && depth >= MOELORA_LONG_DEPTH ? 8 : 4;
}
static inline int32_t moelora_shrink_span(int64_t depth, bool vectors) {
  const int64_t spans = moelora_shrink_spans(depth, vectors);
  const int64_t lines = (depth + MOELORA_LINE - 1) / MOELORA_LINE;
  return (int32_t)((lines + spans - 1) / spans * MOELORA_LINE);
}

/* Limits of sort kernels: items that a CTA processes at once, items that it ranks by pairwise
 * comparison, and keys. A key has three bins of 4 bytes: with 5 KiB of static memory, they fit 99
 * KiB of shared memory, which every GPU allows. */
#define MOELORA_SORT_THREADS 1024
#define MOELORA_SORT_GROUP 128
#define MOELORA_SORT_KEYS 7680

/* On a GPU, ranks of a layer or a projection must be less than this, so that adapter and true rank
 * fit a word: a packed rank is adapter * MOELORA_RANKS + rank. */
#define MOELORA_RANKS 4096

/* Limits of MOELORA_GROUPED: routed rows, and (expert, adapter) pairs. The smallest window has 256
 * rows and six bins per row: one for each pair, and one more. */
#define MOELORA_WINDOW_ROWS 512
#define MOELORA_WINDOW_PAIRS (6 * 256 - 1)

typedef struct moelora_sort_plan {
  const moelora_variant *variant;   /* NULL: none */
  uint32_t num_chunks, chunk_items; /* CTAs, and items per CTA; unused by align/tiny.cu */
  uint32_t num_rows, row_chunks;    /* rows of the table of counts, and chunks per row */
  size_t table_bytes;
} moelora_sort_plan;

/* The sorts of an alignment, and the launches around them. */
typedef struct moelora_align_plan {
  moelora_sort_plan tokens; /* tokens by adapter, before the sort of rows by expert; only if one
                               sort would have too many keys */
  moelora_sort_plan rows;
  int64_t segments;   /* maximum number of segments that the sort lists; 0: none */
  bool resolves;      /* a separate launch resolves the caller's tables; otherwise the sort does */
  int32_t list_parts; /* for lists: CTAs per list */
} moelora_align_plan;

typedef struct moelora_shrink_plan {
  const moelora_variant *variant; /* NULL: no shrink */
  int32_t part;                   /* maximum tokens of a work item per team of warps */
  int32_t shares;                 /* work units per block, or CTAs that share a window */
  int32_t group;                  /* adjacent blocks that concurrent CTAs work on */
  bool listed;                    /* the items of listed segments are distributed evenly */
  bool few;                       /* one pass of all CTAs over the blocks finds all items */
  bool by_adapter;                /* listed segments are processed adapter by adapter */
  int32_t window;                 /* rows */
  int32_t span;                   /* whole segments: K extent of each partial sum */
  int64_t work;                   /* upper bound of useful CTAs */
} moelora_shrink_plan;

typedef struct moelora_expand_plan {
  const moelora_variant *variant; /* NULL: no expand */
  int32_t part;                   /* maximum number of rows per work item */
  int32_t tiles;                  /* column tiles */
  int32_t shares, window;         /* as in moelora_shrink_plan */
  int32_t waves;                  /* CTAs to launch, as a multiple of those resident at once */
  int64_t work;
} moelora_expand_plan;

/* Epilogue of a projection's kernel. */
typedef enum moelora_epilogue_plan {
  MOELORA_EPILOGUE_GENERAL, /* any */
  /* bias, and relu2 or no activation; Hopper: also outputs by flat row, with or without weights */
  MOELORA_EPILOGUE_PLAIN,
  MOELORA_EPILOGUE_GATED, /* bias and a gated activation */
} moelora_epilogue_plan;

/* Launch mode; it matters for grids with fewer CTAs than are resident at once. */
typedef enum moelora_grid_plan {
  MOELORA_GRID_OVERLAPPED, /* PDL: CTAs start when the previous kernel frees resources */
  MOELORA_GRID_SPREAD,     /* no PDL, so that CTAs are spread over all SMs */
} moelora_grid_plan;

/* Launch of one projection. */
typedef struct moelora_projection_plan {
  moelora_epilogue_plan epilogue;
  moelora_grid_plan grid;
  bool vectors;           /* x, w and out allow 16-byte accesses */
  bool a_vectors;         /* the factors A allow 16-byte accesses */
  bool b_vectors;         /* the factors B, appended along K of w, allow 16-byte accesses */
  bool b_boxes;           /* one tensor map covers each slice of B */
  bool quantizes_x;       /* a preceding launch quantizes x to e4m3 */
  bool quantizes_vectors; /* that launch uses 16-byte accesses */
  bool stores_e4m3;       /* the epilogue quantizes outputs to e4m3 x of the next projection */
  bool stores_out;        /* the epilogue stores 16-bit outputs */
  int64_t num_counters;   /* of the tile scheduler */
  int32_t l2_elements;    /* elements of x that stay in L2 while weights are streamed */
  bool weights_again;     /* several clusters read the weights of an average expert */
  int32_t run;            /* consecutive tiles that the tile scheduler hands out at once */
} moelora_projection_plan;

/* One grouped projection. A separate launch first zeroes rows of out whose expert is not local. */
typedef struct moelora_gemm_plan {
  const moelora_variant *variant; /* block_m is the number of rows of an alignment block */
  /* CUDA */
  moelora_projection_plan projection;
  moelora_align_plan align;
  moelora_shrink_plan shrink;
} moelora_gemm_plan;

typedef struct moelora_experts_plan {
  const moelora_variant *variant; /* of w13, or of the whole layer */
  /* Kernel of w2. It uses the same alignment, hence the same family and block_m. Beside a
   * whole-layer kernel, it belongs to `staged`. */
  const moelora_variant *w2;
  /* Beside a whole-layer kernel: kernel of w13 in separate launches, which run if fewer CTAs than
   * on the whole device are resident at once, as in a green context. The workspace suffices for
   * both. */
  const moelora_variant *staged;
  /* CUDA */
  moelora_projection_plan projection[2]; /* of w13 and w2; for `staged` if present */
  bool scales_x;                         /* a launch multiplies x by routing weights */
  moelora_align_plan align;
  moelora_shrink_plan shrink[2]; /* of w13, of w2 */
  bool z_by_row;                 /* z is ordered by flat row, without the padding of blocks */
  const moelora_variant *sum;
} moelora_experts_plan;

/* One product y w of a backward, and the shrink y B that precedes it. */
typedef struct moelora_back_product_plan {
  const moelora_variant *variant;
  bool vectors;         /* y, w and the outputs allow 16-byte accesses */
  bool a_vectors;       /* the factors A allow 16-byte accesses */
  bool shrinks_vectors; /* y and the factors B allow 16-byte accesses */
  int64_t num_counters; /* of the tile scheduler */
  int32_t l2_elements;
  bool weights_again; /* as in moelora_projection_plan */
} moelora_back_product_plan;

/* Intermediate results that a requested gradient depends on, named as in cpu/backward.c. */
typedef struct moelora_backward_needs {
  bool v; /* also dgu, h, dt */
  bool dz;
  bool yb2, yb13, xa13, xa2;
} moelora_backward_needs;

/* The backward of a layer. */
typedef struct moelora_backward_plan {
  moelora_backward_needs needs;
  const moelora_variant *variant; /* CPU: all kernels; CUDA: of the product with w13 */
  /* CUDA */
  moelora_back_product_plan
      product[2]; /* [0] with w2, fused with the gradient of the activation; [1] with w13 */
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

/* Intermediate results that a requested gradient depends on, named as in cpu/gemm_backward.c. */
typedef struct moelora_gemm_backward_needs {
  bool dz, yb, xa;
} moelora_gemm_backward_needs;

/* The backward of a projection, or of a delta, which has no weights. */
typedef struct moelora_gemm_backward_plan {
  moelora_gemm_backward_needs needs;
  const moelora_variant *variant; /* CPU: selects all kernels; CUDA: kernel of the product */
  /* CUDA */
  moelora_back_product_plan product;
  moelora_align_plan align;
  moelora_shrink_plan shrink; /* recomputes x A^T */
  bool copies_dout;           /* flat rows of dout are not equally spaced */
  int64_t dout_stride;        /* between flat rows, of the copy if there is one */
  const moelora_variant *sum; /* sums dz over top_k to dx; NULL: not needed */
} moelora_gemm_backward_plan;

/* A delta, LoRA without a base product: one projection, or the two of an adapter MLP. */
typedef struct moelora_delta_plan {
  const moelora_variant *variant; /* CPU: selects all kernels; CUDA: NULL */
  /* CUDA */
  moelora_family family; /* family of the kernels */
  moelora_delta_order order;
  bool xa_vectors;          /* x A^T allows 16-byte accesses */
  moelora_align_plan align; /* only for MOELORA_SORTED */
  moelora_shrink_plan shrink[2];
  moelora_expand_plan expand[2];
  const moelora_variant *sum;
} moelora_delta_plan;

MOELORA_END_C
