/* What plans are made of: the kernels that there are, and how each of a call's launches runs one.
 *
 * A plan depends on the problem's sizes, strides and alignment and on moelora_device_info alone,
 * and names every kernel that has another one beside it. Launchers decide nothing; only how many
 * CTAs or clusters of a kernel fit the GPU at once is asked of the driver, behind the plan. */
#ifndef MOELORA_CORE_PLANS_H
#define MOELORA_CORE_PLANS_H

#include "core/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a CUDA kernel is written for. An architecture is a name, not a number that grows: what runs
 * on one may run on no later one. */
typedef enum moelora_family {
  MOELORA_SM80, /* mma.sync and cp.async: every GPU from 8.0 on */
  MOELORA_SM90, /* wgmma and TMA: 9.0 alone */
} moelora_family;

typedef enum moelora_isa {
  MOELORA_ISA_SCALAR = 0, /* always there */
  MOELORA_ISA_AVX2 = 1,   /* with FMA and F16C */
  MOELORA_ISA_AVX512 = 2, /* F, BW, DQ, VL */
  MOELORA_ISA_AVX512_BF16 = 4,
} moelora_isa;

/* What a kernel is for. A plan has at most one forced row of each role. */
typedef enum moelora_role {
  MOELORA_ROLE_GEMM,   /* one grouped projection; on a CPU everything */
  MOELORA_ROLE_LAYER,  /* a whole layer of few tokens */
  MOELORA_ROLE_SORT,   /* routed rows by (expert, adapter) */
  MOELORA_ROLE_SHRINK, /* x A^T */
  MOELORA_ROLE_EXPAND, /* xa B^T, where no GEMM takes it along */
  MOELORA_ROLE_SUM,    /* over top_k */
  MOELORA_ROLES,
} moelora_role;

/* Kernels of one role that go about it differently. */
typedef enum moelora_method {
  MOELORA_ONLY_METHOD,
  MOELORA_SHRINK_BLOCKS,   /* items are found in blocks of a GEMM */
  MOELORA_SHRINK_WINDOWS,  /* in windows of routed rows */
  MOELORA_SHRINK_SEGMENTS, /* whole segments, as the sort lists them, shared out evenly */
  MOELORA_EXPAND_STAGED,   /* B and rows through shared memory */
  MOELORA_EXPAND_THIN,     /* B straight into registers, for few rows of a pair */
} moelora_method;

/* One row of a variants.inc: a compiled kernel. `id` indexes its backend's table of launchers. */
typedef struct moelora_variant {
  const char *name; /* e.g. "gemm_bf16_avx512bf16", "gemm_bf16_64x128x64_sm80" */
  moelora_device device;
  moelora_dtype dtype; /* int32: of ids, beside tensors of any dtype */
  moelora_role role;
  moelora_method method;
  moelora_kernel_format format; /* CUDA */
  int32_t needs;                /* CPU: one moelora_isa; CUDA: a moelora_family */
  int32_t id;
  /* Of one tile: rows (tokens; of a sort all that it takes), output columns (of a shrink ranks),
   * depth (of an expand ranks). */
  int32_t block_m, block_n, block_k;
  int32_t stages;
  int32_t cluster; /* CUDA: CTAs that share weight rows */
  int32_t warps;   /* CUDA: of a CTA; 0: nobody asks */
  int32_t ctas;    /* CUDA: of an SM, as registers allow */
  int32_t spans;   /* CUDA: warps of a CTA that share the depth */
  bool elements;   /* CUDA: takes what allows no 16-byte accesses */
  bool gated;      /* CUDA: an expand that ends in silu(gate) * up */
} moelora_variant;

/* What the kernel of a whole layer has room for. */
#define MOELORA_DECODE_TOKENS 8
#define MOELORA_DECODE_ROWS 64

/* What follows from the row of a Hopper GEMM; its kernels assert the same. Tiles of 128 weight rows
 * have one warpgroup of consumers, two or three CTAs of which share an SM; those of 256 have two,
 * and an SM to themselves. */
static MOELORA_CONSTEXPR bool moelora_shares_sm(int32_t block_n) {
  return block_n == 128;
}

/* Multiplies by mma.sync, as few tokens of four-bit weights are. */
static MOELORA_CONSTEXPR bool moelora_has_few_rows(moelora_kernel_format format, int32_t block_m) {
  return moelora_is_four_bits(moelora_format_of_kernel(format)) && block_m <= 16;
}

/* Tiles are assigned as CTAs become free, by a counter and the number of the one that follows each;
 * otherwise by a counter alone, or by place. */
static MOELORA_CONSTEXPR bool moelora_has_dynamic_schedule(int32_t block_n) {
  return !moelora_shares_sm(block_n);
}

/* The epilogue of a gated projection can leave its outputs in e4m3, for the next one: a tile has
 * 128 of them, a whole group. */
static MOELORA_CONSTEXPR bool moelora_stores_e4m3(moelora_kernel_format format, int32_t block_n) {
  return moelora_is_e4m3_kernel(format) && block_n == 256;
}

/* Tiles of a projection that become halves, at most; see TileScheduler. */
#define MOELORA_MOST_HALVED 128

/* Whether tokens are operand A of a Hopper GEMM's wgmma, which then takes 64 of them at a time, and
 * otherwise n8 tiles. */
static MOELORA_CONSTEXPR bool moelora_tokens_first(moelora_kernel_format format, int32_t block_m) {
  return moelora_is_e4m3_kernel(format) && block_m == 128;
}

/* Neighbouring blocks that have to be one expert's, the last of which may be empty, for a cluster
 * of CTAs that share its weights. Where tokens come 64 at a time they fill all blocks but an
 * expert's last one, which both CTAs take if it has no neighbour. */
static inline int32_t moelora_blocks_together(const moelora_variant *v) {
  return moelora_tokens_first(v->format, v->block_m) ? 1 : v->cluster;
}

/* Depth, of 128 bytes, that no kernel of adapters cuts. */
#define MOELORA_LINE 64

#define MOELORA_LONG_DEPTH 4096
/* Parts of the depth that every shrink of a row sums apart and then adds up in order, and the depth
 * of each but the last. `vectors`: x and A allow 16-byte accesses. */
static inline int32_t moelora_shrink_spans(int64_t depth, bool vectors) {
  return vectors && depth >= MOELORA_LONG_DEPTH ? 8 : 4;
}
static inline int32_t moelora_shrink_span(int64_t depth, bool vectors) {
  const int64_t spans = moelora_shrink_spans(depth, vectors);
  const int64_t lines = (depth + MOELORA_LINE - 1) / MOELORA_LINE;
  return (int32_t)((lines + spans - 1) / spans * MOELORA_LINE);
}

/* What the kernels of a sort have room for: items of a CTA at once, those that it ranks by
 * comparing them with each other, and keys whose counts fit the 99 KiB of shared memory that every
 * GPU gives a CTA: three bins of 4 bytes each, beside 5 KiB of static memory. */
#define MOELORA_SORT_THREADS 1024
#define MOELORA_SORT_GROUP 128
#define MOELORA_SORT_KEYS 7680

/* Above every rank of a layer or a projection on a GPU, so that adapter and true rank share a word:
 * a packed rank is adapter * MOELORA_RANKS + rank. */
#define MOELORA_RANKS 4096

/* Routed rows that windows sorted where they are loaded, and kernels of both halves, take at most,
 * and pairs that the smallest window has bins for, and one behind them. */
#define MOELORA_WINDOW_ROWS 512
#define MOELORA_WINDOW_PAIRS (6 * 256 - 1)

/* One sort. */
typedef struct moelora_sort_plan {
  const moelora_variant *variant;   /* NULL: none */
  uint32_t num_chunks, chunk_items; /* CTAs, and items that each places */
  uint32_t num_rows, row_chunks;    /* of the table between two launches */
  size_t table_bytes;
} moelora_sort_plan;

/* All of an alignment. */
typedef struct moelora_align_plan {
  moelora_sort_plan tokens; /* by adapter, before the rows by expert: keys of both are too many */
  moelora_sort_plan rows;
  int64_t segments; /* that it can list; 0: none */
} moelora_align_plan;

typedef struct moelora_shrink_plan {
  const moelora_variant *variant; /* NULL: nothing to shrink */
  int32_t part;                   /* tokens of an item, at most */
  int32_t shares;                 /* work units of a block, or CTAs that share a window */
  int32_t group;                  /* blocks that CTAs which run together work on */
  bool listed;                    /* CTAs share evenly what segments the sort has listed */
  bool few;                       /* of blocks: one look of all CTAs finds everything */
  int32_t window;                 /* rows */
  int32_t span;                   /* of whole segments: depth of each of the sums that are added */
  int64_t work;                   /* CTAs that there would be something for */
} moelora_shrink_plan;

typedef struct moelora_expand_plan {
  const moelora_variant *variant; /* NULL: nothing to expand */
  int32_t part;                   /* rows of an item, at most */
  int32_t tiles;                  /* of columns */
  int32_t shares, window;         /* as above */
  int32_t waves;                  /* times as many CTAs as the GPU holds share the work */
  int64_t work;
} moelora_expand_plan;

/* The epilogue that the kernel of a projection ends in. */
typedef enum moelora_epilogue_plan {
  MOELORA_EPILOGUE_GENERAL, /* any */
  MOELORA_EPILOGUE_PLAIN,   /* bias, relu2 or nothing; as all below without routing weights */
  MOELORA_EPILOGUE_GATED,   /* bias and a gated activation */
} moelora_epilogue_plan;

/* When CTAs start, where there are fewer than the GPU holds at once. */
typedef enum moelora_grid_plan {
  MOELORA_GRID_OVERLAPPED, /* as the kernel before leaves room for them */
  MOELORA_GRID_SPREAD,     /* behind the end of the kernel before, so that all SMs get some */
  MOELORA_GRID_EVEN,       /* at once, each with so much shared memory that an SM holds its share */
} moelora_grid_plan;

/* How the kernel of one projection is launched. */
typedef struct moelora_projection_plan {
  moelora_epilogue_plan epilogue;
  moelora_grid_plan grid;
  bool vectors;          /* x, w and out allow 16-byte accesses */
  bool a_vectors;        /* so do the factors A */
  bool b_vectors;        /* and the factors B, which are more depth of w */
  bool b_boxes;          /* and a tensor map covers each slice of these */
  bool quantizes_x;      /* a launch before it brings x to e4m3 */
  bool stores_e4m3;      /* its epilogue leaves outputs in e4m3, too, as the next projection's x, */
  bool stores_out;       /* and as they are, if somebody reads them */
  int64_t num_counters;  /* of its tile scheduler */
  int32_t near_elements; /* of x, that L2 keeps while weights stream by */
} moelora_projection_plan;

/* One grouped projection. Rows of out that no expert of this rank computes are zeroed by a launch
 * of their own before it. */
typedef struct moelora_gemm_plan {
  const moelora_variant *variant; /* its block_m: rows of an alignment block */
  /* CUDA */
  moelora_projection_plan projection;
  moelora_align_plan align;
  moelora_shrink_plan shrink;
} moelora_gemm_plan;

typedef struct moelora_experts_plan {
  const moelora_variant *variant; /* of w13, or of all */
  /* Of w2, which runs on the same alignment: its tile has as many rows, its family is the same.
   * Beside the kernel of a whole layer, as `staged`. */
  const moelora_variant *w2;
  /* Of a whole layer in one launch: what serves both projections where the context holds fewer of
   * its CTAs at once than the device, as under a green context. Its workspace is asked for, too. */
  const moelora_variant *staged;
  /* CUDA */
  moelora_projection_plan projection[2]; /* of w13, of w2; of `staged`, where there is one */
  bool scales_x;                         /* a launch multiplies x by routing weights */
  moelora_align_plan align;
  moelora_shrink_plan shrink[2]; /* of w13, of w2 */
  const moelora_variant *sum;
} moelora_experts_plan;

/* The backward of a layer. */
typedef struct moelora_backward_plan {
  const moelora_variant *variant; /* CPU: whose kernels */
} moelora_backward_plan;

/* Where the rows of adapters alone come from, in which order. */
typedef enum moelora_delta_order {
  MOELORA_BY_ROUTE, /* flat rows as they are */
  MOELORA_GROUPED,  /* flat rows, by expert, then adapter within each window */
  MOELORA_SORTED,   /* by expert, then adapter */
  MOELORA_LISTED,   /* by the caller's lists */
} moelora_delta_order;

/* Adapters alone: of one projection, or of the two of an adapter MLP. */
typedef struct moelora_delta_plan {
  const moelora_variant *variant; /* CPU: whose kernels; NULL on CUDA */
  /* CUDA */
  moelora_family family; /* whose kernels may be used */
  moelora_delta_order order;
  moelora_align_plan align; /* MOELORA_SORTED */
  moelora_shrink_plan shrink[2];
  moelora_expand_plan expand[2];
  const moelora_variant *sum;
} moelora_delta_plan;

#ifdef __cplusplus
}
#endif
#endif
