/* Segments: runs of sorted rows with one expert and one adapter. */
#include "cpu/back.h"

void moelora_segments_take(const moelora_routes *routes, moelora_arena *arena,
                           moelora_segments *segments) {
  const size_t rows = routes->token_lora_mapping.data ? (size_t)routes->num_rows : 0;
  *segments = (moelora_segments){
      .all = moelora_take_array(arena, rows, sizeof(moelora_segment)),
      .head = moelora_take_array(arena, (size_t)routes->max_loras, sizeof(int32_t)),
      .part = moelora_take_array(arena, rows, 2 * sizeof(int32_t)),
  };
}

void moelora_find_segments(const moelora_routes *routes, const moelora_sorted *sorted,
                           moelora_segments *segments) {
  for (int32_t l = 0; l < routes->max_loras; l++)
    segments->head[l] = -1;
  segments->count = segments->parts = 0;
  if (!sorted->has_adapters)
    return;
  for (int64_t at = 0, end; at < sorted->num_rows; at = end) {
    end = moelora_segment_end(sorted, at, sorted->num_rows);
    if (sorted->adapter[at] < 0)
      continue;
    segments->all[segments->count++] = (moelora_segment){(int32_t)at, (int32_t)end, -1};
    for (int64_t first = at; first < end; first += MOELORA_PART_ROWS) {
      int32_t *part = segments->part + 2 * segments->parts++;
      part[0] = (int32_t)first;
      part[1] = (int32_t)moelora_min(first + MOELORA_PART_ROWS, end);
    }
  }
  for (int64_t i = segments->count - 1; i >= 0; i--) {
    int32_t *head = &segments->head[sorted->adapter[segments->all[i].first]];
    segments->all[i].next = *head;
    *head = (int32_t)i;
  }
}
