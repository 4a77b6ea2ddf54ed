/* Interface between the host side of alignment and its kernels. */
#pragma once

#include <cuda_runtime.h>

#include "cuda/launch/launch.h"

constexpr int ALIGN_THREADS = MOELORA_SORT_THREADS;
/* Items per CTA of a small sort, and per thread group of a large one: at most 255, so that a count
 * fits a byte, and few enough that comparing their keys takes no longer than a barrier. */
constexpr int ALIGN_GROUP = MOELORA_SORT_GROUP;
/* Largest number of items for which each is compared with all others. */
constexpr int ALIGN_TINY_ITEMS = 64;
constexpr int ALIGN_MAX_KEYS = MOELORA_SORT_KEYS;

/* Parameters of a stable counting sort; align.cuh defines keys, ways and groups. */
struct align_sort {
  moelora_routes routes; /* resolved; expert_map only marks the local experts */
  const int32_t *order;  /* [M] order in which tokens are read; NULL: 0 .. M - 1 */
  uint32_t num_items;
  bool by_expert, by_adapter; /* components of a key */
  bool emit_tokens;           /* sorted_ids are tokens instead of rows */
  bool empty_blocks;          /* local experts without items get a block */
  int32_t grain;    /* distribute a group's items evenly over its blocks, in multiples of `grain`, a
                       power of 2; 0: fill blocks in order */
  uint32_t cluster; /* 2: each group has an even number of blocks */
  moelora_divisor top_k;        /* items per token */
  moelora_divisor adapter_keys; /* max_loras + 1, or 1 */
  moelora_divisor block_size;
  uint32_t num_keys, num_groups, ways;
  uint32_t num_chunks, chunk_items;
  uint32_t scan_shift, scan_ways, scan_groups; /* see lay_out() */
  uint32_t around_shift;                       /* see write_around_items() */
  /* large sorts only */
  uint32_t *table; /* [num_rows, ceil(num_keys / 2)] two 16-bit counts per word */
  uint32_t num_rows, row_chunks;
  moelora_divisor words;     /* words per row */
  uint32_t teams, team_rows; /* see sum_table() */
  uint32_t tile;             /* items placed at a time */
  /* outputs; all but sorted_ids may be NULL */
  int32_t *sorted_ids;       /* [max_blocks * block_size] */
  int32_t *expert_ids;       /* [max_blocks] */
  int32_t *block_loras;      /* [max_blocks] */
  int32_t *block_counts;     /* [max_blocks] items per block */
  int32_t *block_pairs;      /* [max_blocks] as in moelora_blocks */
  int32_t *row_loras;        /* [max_blocks * block_size] */
  bool packs_ranks;          /* row_loras are packed ranks */
  moelora_segment *segments; /* [num_keys]; NULL unless groups have several keys */
  int32_t *positions;        /* [P] position of each flat row, -1 if skipped */
  float *sorted_weights;     /* [max_blocks * block_size] */
  int32_t *num_post;         /* [1] */
  int32_t *tile_counters;    /* [num_counters] set to zero */
  int64_t num_counters;
  int64_t max_blocks;
  int32_t padding; /* value of sorted_ids in padding */
  void *zero;
  size_t zero_bytes;
};

/* Parameters of a kernel that pads rows sorted by (expert, adapter) into blocks of one pair each,
 * for key spaces whose counts exceed shared memory. */
struct align_pad {
  const int32_t *row, *expert, *adapter; /* [*count] */
  const int32_t *count;                  /* [1] */
  align_sort out;                        /* block size and outputs */
};

/* Unless `from` is NULL, first resolves it to sort.routes, after the previous kernel completed. */
moelora_status align_launch_tiny(const align_sort &sort, const moelora_routes *from,
                                 const moelora_exec *exec);
/* The suffix is the number of loads in flight per thread. */
moelora_status align_launch_small_2(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_small_8(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_count(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_place(const align_sort &sort, const moelora_exec *exec);
moelora_status align_launch_pad(const align_pad &pad, const moelora_exec *exec);

static inline uint32_t align_zero_ctas(const align_sort &sort) {
  size_t bytes_per_cta = 64 << 10, ctas = (sort.zero_bytes + bytes_per_cta - 1) / bytes_per_cta;
  return (uint32_t)(ctas < 256 ? ctas : 256);
}
