/* A stable counting sort in two passes: tokens by adapter, then their rows by expert. Its time is
 * linear in the numbers of rows, experts and adapter slots. */
#include "cpu/sort.h"

#include <string.h>

void moelora_sorted_take(const moelora_routes *routes, moelora_arena *arena,
                         moelora_sorted *sorted) {
  const size_t rows = (size_t)routes->num_rows;
  *sorted = (moelora_sorted){0};
  moelora_tables_take(routes, arena, &sorted->tables);
  sorted->row = moelora_take_array(arena, rows, sizeof(int32_t));
  sorted->expert = moelora_take_array(arena, rows, sizeof(int32_t));
  sorted->adapter = moelora_take_array(arena, rows, sizeof(int32_t));
  sorted->offset = moelora_take_array(arena, (size_t)routes->num_experts + 1, sizeof(int32_t));
  if (routes->token_lora_mapping.data) {
    sorted->by_adapter = moelora_take_array(arena, (size_t)routes->num_tokens, sizeof(int32_t));
    sorted->count = moelora_take_array(arena, (size_t)routes->max_loras + 1, sizeof(int32_t));
  }
}

static void sort_tokens_by_adapter(const moelora_routes *routes, moelora_sorted *sorted) {
  const int32_t *adapter = sorted->tables.adapter;
  int32_t *count = sorted->count; /* bucket 0: no adapter */
  memset(count, 0, ((size_t)routes->max_loras + 1) * sizeof *count);
  for (int64_t m = 0; m < routes->num_tokens; m++)
    count[adapter[m] + 1]++;
  int32_t start = 0;
  for (int32_t i = 0; i <= routes->max_loras; i++) {
    int32_t size = count[i];
    count[i] = start;
    start += size;
  }
  for (int64_t m = 0; m < routes->num_tokens; m++)
    sorted->by_adapter[count[adapter[m] + 1]++] = (int32_t)m;
}

void moelora_sort_rows(const moelora_routes *routes, moelora_sorted *sorted) {
  const moelora_tables *tables = &sorted->tables;
  const bool mapped = tables->adapter != NULL;
  int32_t *offset = sorted->offset, num_experts = routes->num_experts;

  moelora_tables_read(routes, &sorted->tables);
  memset(offset, 0, ((size_t)num_experts + 1) * sizeof *offset);
  for (int64_t p = 0; p < routes->num_rows; p++)
    if (tables->expert[p] >= 0)
      offset[tables->expert[p] + 1]++;
  sorted->active = 0, sorted->longest = 1;
  for (int32_t e = 0; e < num_experts; e++) {
    sorted->active += offset[e + 1] > 0;
    sorted->longest = offset[e + 1] > sorted->longest ? offset[e + 1] : sorted->longest;
    offset[e + 1] += offset[e];
  }
  sorted->num_rows = offset[num_experts];

  if (mapped)
    sort_tokens_by_adapter(routes, sorted);
  sorted->has_adapters = false;
  for (int64_t i = 0; i < routes->num_tokens; i++) {
    int64_t m = mapped ? sorted->by_adapter[i] : i;
    int32_t adapter = mapped ? tables->adapter[m] : -1;
    for (int64_t p = m * routes->top_k; p < (m + 1) * routes->top_k; p++) {
      int32_t expert = tables->expert[p];
      if (expert < 0)
        continue;
      int32_t at = offset[expert]++;
      sorted->row[at] = (int32_t)p;
      sorted->expert[at] = expert;
      sorted->adapter[at] = adapter;
      sorted->has_adapters |= adapter >= 0;
    }
  }
  /* offset[e] is now the end of expert e, which is the start of e + 1 */
  memmove(offset + 1, offset, (size_t)num_experts * sizeof *offset);
  offset[0] = 0;
}
