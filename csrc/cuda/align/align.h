/* What the host side of alignment hands to its kernels. */
#ifndef MOELORA_CUDA_ALIGN_H
#define MOELORA_CUDA_ALIGN_H

#include <cuda_runtime.h>

#include "cuda/launch/launch.h"

constexpr int ALIGN_THREADS = MOELORA_SORT_THREADS;
/* Items that are ranked by comparing them with each other: at most 255, so that a byte counts them,
 * and few enough for the compares to take no longer than a barrier. */
constexpr int ALIGN_GROUP = MOELORA_SORT_GROUP;
/* Items up to which each is compared with all others. */
constexpr int ALIGN_TINY_ITEMS = 64;
constexpr int ALIGN_MAX_KEYS = MOELORA_SORT_KEYS;

/* One stable counting sort; align.cuh says what keys, ways and groups are. */
struct align_sort {
  moelora_routes routes; /* resolved; expert_map says which experts are here */
  const int32_t *order;  /* [M] tokens in the order in which they come; NULL: as they are */
  uint32_t num_items;
  bool by_expert, by_adapter; /* what makes up a key */
  bool emit_tokens;           /* sorted_ids get tokens, not rows */
  bool empty_blocks;          /* experts without items get a block */
  int32_t grain;              /* items of a group are dealt out evenly over its blocks, so many at a
                               * time, a power of 2; 0: they are not */
  uint32_t cluster;           /* 2: every group has an even number of blocks */
  moelora_divisor top_k;      /* items per token */
  moelora_divisor adapter_keys; /* max_loras + 1, or 1 */
  moelora_divisor block_size;
  uint32_t num_keys, num_groups, ways;
  uint32_t num_chunks, chunk_items;
  uint32_t scan_shift, scan_ways, scan_groups; /* see lay_out() */
  uint32_t around_shift;                       /* see write_around_items() */
  /* large sorts only */
  uint32_t *table; /* [num_rows, ceil(num_keys / 2)] two 16-bit counts to a word */
  uint32_t num_rows, row_chunks;
  moelora_divisor words;     /* of a row */
  uint32_t teams, team_rows; /* see sum_table() */
  uint32_t tile;             /* items placed at a time */
  /* outputs; all but sorted_ids may be NULL */
  int32_t *sorted_ids;       /* [max_blocks * block_size] */
  int32_t *expert_ids;       /* [max_blocks] */
  int32_t *block_loras;      /* [max_blocks] */
  int32_t *block_counts;     /* [max_blocks] items of a block; only of even groups */
  int32_t *block_pairs;      /* [max_blocks] as in moelora_blocks */
  int32_t *row_loras;        /* [max_blocks * block_size] */
  bool packs_ranks;          /* row_loras get packed ranks */
  moelora_segment *segments; /* [num_keys]; several keys to a group */
  int32_t *positions;        /* [num_items] where item i went, -1 if it is skipped */
  float *sorted_weights;     /* [max_blocks * block_size] */
  int32_t *num_post;         /* [1] */
  int32_t *tile_counters;    /* [num_counters] get zeros */
  int64_t num_counters;
  int64_t max_blocks;
  int32_t padding; /* sorted_ids of rows that are none */
  void *zero;
  size_t zero_bytes;
};

/* Pads what was sorted by (expert, adapter) into blocks of one pair: `row`, `expert`, `adapter`
 * [*count]. For key spaces whose counts fit no shared memory. */
struct align_pad {
  const int32_t *row, *expert, *adapter; /* [*count] */
  const int32_t *count;                  /* [1] */
  align_sort out;                        /* block size and outputs */
};

/* from: routes to resolve first, behind the end of the kernel before; NULL: they are resolved. */
moelora_status align_launch_tiny(const align_sort &sort, const moelora_routes *from,
                                 const moelora_exec *exec);
/* With 2 or 8 loads of a thread in flight. */
moelora_status align_launch_small_2(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_small_8(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_count(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_place(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_pad(const align_pad &pad, const moelora_exec *exec);

static inline uint32_t align_zero_ctas(const align_sort &sort) {
  size_t bytes_per_cta = 64 << 10, ctas = (sort.zero_bytes + bytes_per_cta - 1) / bytes_per_cta;
  return (uint32_t)(ctas < 256 ? ctas : 256);
}

#endif
