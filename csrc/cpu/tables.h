/* Copies of the caller's tables for one call; decides which rows are skipped and which are base
 * rows.
 *
 * Other threads may write to routing and adapters while a call reads them: a pool may enable and
 * disable adapters at any time. Each element is therefore copied once, first of all, and all
 * indices, counts, sizes and scalings derive from the copy. A concurrent change may affect some
 * rows and not others, but it cannot occur between the steps that count a row and place it. */
#pragma once

#include "core/backend.h"

typedef struct moelora_tables {
  int32_t *expert;  /* [P] local expert or -1: the row is skipped; NULL: lists define experts */
  int32_t *adapter; /* [M] slot or -1: base row; NULL: all base rows, or lists define adapters */
  int32_t *rank;    /* [max_loras] true rank, -1: disabled; NULL: all enabled, with the stack's R */
  float *scaling;   /* [max_loras]; NULL: 1 */
  int32_t *one_a;   /* [max_loras] nonzero: both A of w13 are equal; NULL: none */
  float *weight;    /* [P]; NULL if the operator needs none */
  int32_t *expert_map; /* [num_global] local expert or -1; NULL: ids are local */
} moelora_tables;

/* The first function allocates the arrays, the second fills them. */
void moelora_tables_take(const moelora_routes *routes, moelora_arena *arena,
                         moelora_tables *tables);
void moelora_tables_read(const moelora_routes *routes, moelora_tables *tables);

/* Loads a value once: the compiler must not repeat or split the load. */
static inline int32_t moelora_read_i32(const int32_t *from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}

/* Returns the slot of an adapter id; -1 if it does not exist or is disabled. */
static inline int32_t moelora_active_adapter(const moelora_routes *routes,
                                             const moelora_tables *tables, int64_t id) {
  const bool exists = id >= 0 && id < routes->max_loras;
  return exists && (!tables->rank || tables->rank[id] >= 0) ? (int32_t)id : -1;
}

/* Returns the number of rows of A and columns of B in use: the true rank, at most max_rank. */
static inline int32_t moelora_rank_of(const moelora_tables *tables, int32_t adapter,
                                      int32_t max_rank) {
  const int32_t rank = tables->rank ? tables->rank[adapter] : max_rank;
  return rank < 0 ? 0 : rank < max_rank ? rank : max_rank;
}

/* Allocates [rows, columns] float32. */
static inline float *moelora_take_floats(moelora_arena *arena, int64_t rows, int64_t columns) {
  return moelora_take_array(arena, moelora_times((size_t)rows, (size_t)columns), sizeof(float));
}
