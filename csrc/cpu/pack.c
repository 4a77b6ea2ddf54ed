/* Packs weights into tiles, [E, N/64, K/64, 64, 64]. A task copies the tiles of 64 weight rows. */
#include <string.h>

#include "cpu/cpu.h"

static void pack_rows(void *context, int64_t index, int32_t worker) {
  (void)worker;
  const moelora_pack_problem *problem = context;
  const moelora_weights *w = &problem->w;
  const size_t bytes = (size_t)problem->element_bytes, line = MOELORA_PACK * bytes;
  int64_t row_tiles = w->n / MOELORA_PACK, k_tiles = w->k / MOELORA_PACK;
  const char *from =
      (const char *)w->data +
      (size_t)(index / row_tiles * w->stride_e + index % row_tiles * w->stride_nt) * bytes;
  char *to = (char *)problem->out + (size_t)(index * k_tiles) * MOELORA_PACK * line;
  for (int64_t kt = 0; kt < k_tiles; kt++)
    for (int64_t n = 0; n < MOELORA_PACK; n++, to += line)
      memcpy(to, from + (size_t)(n * w->stride_n + kt * MOELORA_PACK) * bytes, line);
}

moelora_status moelora_cpu_pack_weights(const moelora_pack_problem *problem,
                                        const moelora_exec *exec) {
  int64_t row_tiles = problem->w.n / MOELORA_PACK;
  moelora_cpu_parallel(exec, problem->num_experts * row_tiles,
                       (double)problem->num_experts * (double)problem->w.n * (double)problem->w.k,
                       pack_rows, (void *)problem);
  return MOELORA_OK;
}
