/* Aligns the rows of a layer, forward or backward, in its workspace. */
#pragma once

#include "cuda/launch/launch.h"
#include "cuda/layer/rows.h"

namespace {

struct Alignment {
  moelora_routes routes; // resolved
  moelora_blocks blocks;
  int64_t counters; // tile counters per product
  moelora_sort_scratch scratch;
};

/* Allocates the blocks of `variant`, for `count` products whose tile schedulers need `counters`
 * counters each; if `summed`, also positions; if `weighted`, also weights. */
inline Alignment take_alignment(moelora_arena *arena, const moelora_routes *from,
                                const moelora_variant *variant, int64_t counters, int count,
                                const moelora_align_plan *plan, bool summed, bool weighted) {
  Alignment a = {};
  a.routes = moelora_cuda_take_routes(from, false, arena);
  const moelora_routes *routes = &a.routes;
  moelora_blocks *blocks = &a.blocks;
  blocks->rows = variant->block_m;
  blocks->cluster = (int16_t)moelora_cluster_blocks(variant);
  blocks->grain = moelora_is_token_major(variant->format, variant->block_m) ? 64 : 8;
  blocks->max_blocks = moelora_max_blocks(routes, blocks->rows, blocks->cluster);
  const size_t most = (size_t)blocks->max_blocks, rows = most * blocks->rows;
  take_array(arena, &blocks->sorted_ids, rows);
  take_array(arena, &blocks->expert_ids, most);
  take_array(arena, &blocks->counts, most);
  if (blocks->cluster < variant->cluster)
    take_array(arena, &blocks->pairs, most);
  if (routes->token_lora_mapping.data)
    take_array(arena, &blocks->packed_ranks, rows);
  if (summed)
    take_array(arena, &blocks->positions, (size_t)routes->num_rows);
  if (weighted)
    take_array(arena, &blocks->weights, rows);
  take_array(arena, &blocks->num_post, 1);
  blocks->num_counters = (int64_t)moelora_times((size_t)count, (size_t)counters);
  take_array(arena, &blocks->tile_counters, (size_t)blocks->num_counters);
  a.counters = counters;
  if (plan->segments)
    take_array(arena, &blocks->segments, (size_t)plan->segments);
  a.scratch = moelora_cuda_take_scratch(routes, MOELORA_ALIGN_SEGMENTED, plan, arena);
  return a;
}

/* Aligns the rows. The first launch waits for all previous work (no PDL): otherwise, later kernels
 * would start while another layer still occupies some SMs, and would be spread unevenly. */
inline moelora_status align(const Alignment *a, const moelora_routes *from,
                            const moelora_align_plan *plan, const moelora_exec *exec) {
  return moelora_cuda_align_rows(from, &a->routes, &a->blocks, plan, &a->scratch, exec);
}

/* Computes `to` [M, K] = x times routing weights (top_k is 1). */
inline moelora_status weigh_tokens(const moelora_experts_problem *p, const moelora_routes *routes,
                                   void *to, const moelora_exec *exec) {
  const moelora_row_copy c = {p->x, {p->x_stride, 0}, true, to, p->hidden, p->hidden};
  return moelora_cuda_copy_rows(&c, routes, p->dtype, exec);
}

/* Returns the counters of the tile scheduler of product i. */
inline int32_t *tile_counter(const Alignment *a, int i) {
  return a->blocks.tile_counters + i * a->counters;
}

/* Returns the number of rows of a buffer that is ordered by position. */
inline size_t positions(const Alignment *a) {
  return (size_t)a->blocks.max_blocks * a->blocks.rows;
}

/* Sets schedule, weights and adapters of a product with `w`, forward or backward. */
template <class Plan>
void describe_product(const Alignment *a, const moelora_routes *routes, const moelora_weights *w,
                      const moelora_factors *lora, const Plan *plan, moelora_gemm_launch *g) {
  g->schedule.l2_elements = plan->l2_elements;
  g->schedule.run = 1;
  g->schedule.blocks = a->blocks;
  g->schedule.num_rows = (int32_t)routes->num_rows;
  g->schedule.num_experts = routes->num_experts;
  g->epilogue.top_k = routes->top_k;
  g->weights.w = *w;
  g->weights.vectors = plan->vectors;
  g->weights.read_again = plan->weights_again;
  if (lora->num_slices == 0)
    g->schedule.blocks.packed_ranks = nullptr;
  if (g->schedule.blocks.packed_ranks) {
    g->adapters.lora = *lora;
    g->schedule.max_loras = routes->max_loras;
    g->adapters.xa_slice = moelora_padded_rank(lora->max_rank);
    g->adapters.xa_stride = g->adapters.xa_slice * lora->num_slices;
  }
}

/* Describes out [M, columns] = sum over top_k of the rows of z, which are ordered by flat row if
 * `by_row`, otherwise by position. */
inline moelora_sum_launch sum_of_rows(const Alignment *a, const void *z, bool by_row,
                                      int64_t columns, bool weighted, void *out,
                                      int64_t out_stride) {
  const moelora_routes *routes = &a->routes;
  moelora_sum_launch s = {};
  s.routes = *routes;
  s.z = z;
  s.z_stride = columns;
  s.columns = (int32_t)columns;
  s.positions = a->blocks.positions;
  s.by_row = by_row;
  if (weighted) {
    s.weights = routes->topk_weights;
    s.weights_stride[0] = routes->topk_weights_stride[0];
    s.weights_stride[1] = routes->topk_weights_stride[1];
  }
  s.out = out;
  s.out_stride = out_stride;
  return s;
}

} // namespace
