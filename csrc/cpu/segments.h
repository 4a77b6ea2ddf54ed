/* segments.c: runs of sorted rows with one expert and one adapter. */
#pragma once

#include "cpu/cpu.h"

/* Rows [first, end) of one expert and one adapter. */
typedef struct moelora_segment {
  int32_t first, end;
  int32_t next; /* index of the next segment of the adapter; -1: none */
} moelora_segment;

/* Segments of rows with an adapter, in sorted order. Tasks whose results are rows process parts of
 * segments, of at most PART_ROWS rows. */
enum { MOELORA_PART_ROWS = 512 };
typedef struct moelora_segments {
  moelora_segment *all; /* [P] */
  int32_t *head;        /* [max_loras] first segment of each adapter; -1: none */
  int32_t *part;        /* [P, 2] first and end row of each part */
  int64_t count, parts;
} moelora_segments;

void moelora_segments_take(const moelora_routes *routes, moelora_arena *arena,
                           moelora_segments *segments);
void moelora_find_segments(const moelora_routes *routes, const moelora_sorted *sorted,
                           moelora_segments *segments);
