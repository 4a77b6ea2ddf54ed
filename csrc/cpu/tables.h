/* The caller's tables as one call found them: the one place that decides which rows are skipped and
 * which are base.
 *
 * Other threads may write to routing and adapters while a call reads them; a pool turns adapters on
 * and off at any time. So each element is read once, before anything else, and whatever becomes a
 * place, a count, a size or a factor comes from this copy. A change during a call then reaches some
 * rows and misses others, and never falls between the counting and the placing of a row. */
#ifndef MOELORA_CPU_TABLES_H
#define MOELORA_CPU_TABLES_H

#include "core/backend.h"

typedef struct moelora_tables {
  int32_t *expert;     /* [P] local expert or -1: the row is skipped; NULL: lists name experts */
  int32_t *adapter;    /* [M] slot or -1: base rows; NULL: all are, or lists name adapters */
  int32_t *rank;       /* [max_loras] true rank, -1: turned off; NULL: all on, of the stack's R */
  float *scaling;      /* [max_loras]; NULL: 1 */
  float *weight;       /* [P]; NULL where the operator needs none */
  int32_t *expert_map; /* [num_global] local expert or -1; NULL: ids are local */
} moelora_tables;

/* Carves the arrays; then fills them. */
void moelora_tables_take(const moelora_routes *routes, moelora_arena *arena,
                         moelora_tables *tables);
void moelora_tables_read(const moelora_routes *routes, moelora_tables *tables);

/* One load that the compiler may neither repeat nor split. */
static inline int32_t moelora_read_i32(const int32_t *from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}

/* The slot that an id of an adapter names, -1 where there is none or it is turned off. */
static inline int32_t moelora_active_adapter(const moelora_routes *routes,
                                             const moelora_tables *tables, int64_t id) {
  const bool exists = id >= 0 && id < routes->max_loras;
  return exists && (!tables->rank || tables->rank[id] >= 0) ? (int32_t)id : -1;
}

/* Rows of A and columns of B that take part: the true rank, at most the stack's. */
static inline int32_t moelora_rank_of(const moelora_tables *tables, int32_t adapter,
                                      int32_t max_rank) {
  const int32_t rank = tables->rank ? tables->rank[adapter] : max_rank;
  return rank < 0 ? 0 : rank < max_rank ? rank : max_rank;
}

#endif
