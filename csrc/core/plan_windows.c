/* Splits routed rows into windows, which the kernels of deltas iterate over. */
#include "core/plan.h"

moelora_windows moelora_cut_windows(const moelora_routes *routes, const moelora_list_blocks *lists,
                                    moelora_delta_order order, int64_t most, int64_t part,
                                    int64_t columns, int64_t workers) {
  const int64_t rows = routes->num_rows;
  moelora_windows w = {1, 1, 0};
  int64_t used, items;
  if (rows == 0)
    return w;
  if (order == MOELORA_LISTED) {
    const int64_t size = lists->block_size, per_block = moelora_divide_up(size, most);
    const int64_t pairs = (int64_t)routes->num_experts * routes->max_loras;
    w.rows = (int32_t)moelora_divide_up(size, per_block);
    w.count = lists->num_active * lists->blocks * per_block;
    used = (rows < pairs ? rows : pairs) + rows / w.rows;
    items = moelora_divide_up(w.rows, part) * columns; /* all rows of a block belong to one pair */
  } else {
    w.count = moelora_divide_up(rows, most);
    if (rows > most * workers)
      w.count = moelora_divide_up(w.count, workers) * workers;
    else if (w.count < workers / (most * workers / rows))
      w.count = workers / (most * workers / rows);
    w.rows = (int32_t)moelora_divide_up(rows, w.count);
    used = w.count = moelora_divide_up(rows, w.rows);
    items = w.rows * columns;
  }
  const int64_t each = workers > used ? workers / used : 1;
  w.shares = (int32_t)(each < items ? each : items);
  return w;
}
