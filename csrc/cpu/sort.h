/* Routed rows sorted by (local expert, adapter with -1 first, flat row), without skipped rows. */
#pragma once

#include "cpu/tables.h"

typedef struct moelora_sorted {
  moelora_tables tables;
  int64_t num_rows;    /* rows that are not skipped */
  int64_t active;      /* experts with rows */
  int64_t longest;     /* most rows of an expert, at least 1 */
  bool has_adapters;   /* some row has an adapter */
  int32_t *row;        /* [P] flat row at each sorted position */
  int32_t *expert;     /* [P] local expert of that row */
  int32_t *adapter;    /* [P] adapter of that row, or -1 */
  int32_t *offset;     /* [E + 1] first position of each expert */
  int32_t *by_adapter; /* [M] scratch: tokens ordered by adapter */
  int32_t *count;      /* [max_loras + 1] scratch */
} moelora_sorted;

/* The first function allocates the arrays; the second reads the tables and sorts the rows. */
void moelora_sorted_take(const moelora_routes *routes, moelora_arena *arena,
                         moelora_sorted *sorted);
void moelora_sort_rows(const moelora_routes *routes, moelora_sorted *sorted);

/* Returns the end of the segment that starts at sorted row `at`, or `end` if that is less. */
static inline int64_t moelora_segment_end(const moelora_sorted *sorted, int64_t at, int64_t end) {
  int64_t next = at + 1;
  while (next < end && sorted->expert[next] == sorted->expert[at] &&
         sorted->adapter[next] == sorted->adapter[at])
    next++;
  return next;
}

/* Returns the rank of sorted row `at`; 0 without an adapter. */
static inline int32_t moelora_rank_at(const moelora_sorted *sorted, int64_t at, int32_t max_rank) {
  const int32_t adapter = sorted->adapter[at];
  return adapter < 0 ? 0 : moelora_rank_of(&sorted->tables, adapter, max_rank);
}
