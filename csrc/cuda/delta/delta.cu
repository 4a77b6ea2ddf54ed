/* Host side of deltas, LoRA without a base product: launch sequence and workspace layout.
 *
 *   [round factors] -> resolve -> [sort] -> shrink -> expand [-> sum]
 *
 * Intermediate results are stored by flat row. Each CTA sorts a small batch itself, or the batch
 * stays unsorted: if pairs rarely repeat, rereading the factors of a repeated pair costs less. */
#include "cuda/delta/delta.h"
#include "cuda/backward/gradients.h"

namespace {

/* Buffers of up to two projections; the second reads `act`, which the first writes. */
struct DeltaLayout {
  moelora_factors lora[2]; // of the dtype
  moelora_routes routes;   // resolved
  moelora_list_blocks lists;
  moelora_sorted_rows sorted;
  void *xa[2]; // [P, slices, padded rank]
  void *act;   // [P, k of the second]
  void *z;     // [P, z_stride] rows before the sum over top_k
  int64_t z_stride;
  uint8_t *written; // [P] whether the expand wrote row p of z; NULL: see moelora_sum_launch
  size_t bytes;
};

DeltaLayout lay_out(const moelora_delta_problem *p, int count, const moelora_delta_plan *plan,
                    const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  DeltaLayout l = {};
  const moelora_delta_problem *last = p + count - 1;
  const size_t rows = (size_t)p->routes.num_rows;
  const bool listed = p->lists.sorted_token_ids;
  for (int i = 0; i < count; i++)
    l.lora[i] = moelora_rounded(&p[i].lora, p[i].k, &p->routes, p->dtype, &arena);
  l.routes = moelora_cuda_take_routes(&last->routes, false, &arena);
  if (listed)
    l.lists = moelora_cuda_take_lists(&p->lists, p->routes.max_loras, true, &arena);
  if (plan->order == MOELORA_SORTED)
    l.sorted = moelora_cuda_take_sorted(&l.routes, &plan->align, &arena);
  for (int i = 0; i < count; i++)
    if (!p[i].xa)
      l.xa[i] = moelora_take_array(
          &arena, moelora_times(rows, (size_t)moelora_padded_columns(&p[i].lora)), 2);
  if (count > 1)
    l.act = moelora_take_array(&arena, moelora_times(rows, (size_t)last->k), 2);
  if (last->sum_top_k) {
    l.z_stride = (last->columns + 7) / 8 * 8;
    l.z = moelora_take_array(&arena, moelora_times(rows, (size_t)l.z_stride), 2);
    if (listed)
      take_array(&arena, &l.written, rows);
  }
  l.bytes = arena.used;
  return l;
}

/* Resolves and sorts the rows, for all projections. */
moelora_status find_rows(const moelora_delta_problem *p, const DeltaLayout *l,
                         const moelora_delta_plan *plan, const moelora_exec *exec) {
  const bool listed = plan->order == MOELORA_LISTED;
  if (l->written)
    MOELORA_TRY(moelora_cuda_check(
        cudaMemsetAsync(l->written, 0, (size_t)l->routes.num_rows, (cudaStream_t)exec->stream),
        "cudaMemsetAsync"));
  MOELORA_TRY(moelora_cuda_resolve(&p->routes, &l->routes, listed ? &p->lists : nullptr,
                                   listed ? &l->lists : nullptr, true, exec));
  return plan->order == MOELORA_SORTED
             ? moelora_cuda_sort_rows(&l->routes, &l->sorted, &plan->align, exec)
             : MOELORA_OK;
}

/* Runs projection `i` of the plan, after the rows have been resolved and sorted. */
moelora_status project(const moelora_delta_problem *p, const DeltaLayout *l, int i,
                       const moelora_delta_plan *plan, const moelora_exec *exec) {
  const moelora_routes *routes = &l->routes;
  delta_rows rows = {};
  rows.order = plan->order;
  rows.max_rank = p->lora.max_rank;
  rows.routes = *routes;
  rows.lists = l->lists;
  rows.row = l->sorted.row;
  rows.expert = l->sorted.expert;
  rows.adapter = l->sorted.adapter;
  rows.count = l->sorted.count;
  rows.segments = l->sorted.segments;

  const int64_t width = moelora_padded_rank(p->lora.max_rank), row = width * p->lora.num_slices;
  const int64_t own[3] = {width, routes->top_k * row, row};
  delta_shrink s = {};
  delta_expand e = {};
  s.rows = e.rows = rows;
  s.lora = e.lora = l->lora[i];
  e.xa = s.xa = p->xa ? p->xa : l->xa[i];
  s.xa_vectors = plan->xa_vectors;
  for (int d = 0; d < 3; d++)
    s.xa_stride[d] = e.xa_stride[d] = p->xa ? p->xa_stride[d] : own[d];
  s.x = p->x ? p->x : l->act;
  s.x_stride = p->x_stride;
  s.x_divisor = p->x_per_row ? 1 : routes->top_k;
  s.k = (int32_t)p->k;
  s.scalings = p->routes.lora_scalings ? routes->lora_scalings : nullptr;
  e.after_shrink = p->k > 0;
  e.topk_weights = p->mul_routed_weight ? routes->topk_weights : nullptr;
  e.out = p->sum_top_k ? l->z : p->out ? p->out : l->act;
  e.out_stride[0] = p->sum_top_k ? routes->top_k * l->z_stride : p->out_stride[0];
  e.out_stride[1] = p->sum_top_k ? l->z_stride : p->out_stride[1];
  e.add = !p->sum_top_k && p->add_inputs;
  e.silu_and_mul = !p->sum_top_k && p->silu_and_mul;
  e.written = l->written;
  if (p->k)
    MOELORA_TRY(delta_launch_shrink(&s, &plan->shrink[i], exec));
  if (p->columns)
    MOELORA_TRY(delta_launch_expand(&e, &plan->expand[i], exec));
  if (!p->sum_top_k)
    return MOELORA_OK;

  moelora_sum_launch sum = {};
  sum.routes = *routes;
  sum.z = l->z;
  sum.z_stride = l->z_stride;
  sum.written = l->written;
  sum.max_rank = p->lora.max_rank;
  sum.add = p->add_inputs;
  sum.out = p->out;
  sum.out_stride = p->out_stride[0];
  sum.columns = (int32_t)p->columns;
  return moelora_cuda_sum(&sum, plan->sum, exec);
}

moelora_status run(const moelora_delta_problem *p, int count, const moelora_delta_plan *plan,
                   const moelora_exec *exec) {
  const moelora_delta_problem *last = p + count - 1;
  if (last->routes.max_loras == 0 || moelora_is_idle_delta(last))
    return MOELORA_OK;
  const DeltaLayout l = lay_out(p, count, plan, exec);
  const moelora_rounding factors[] = {{&p->lora, &l.lora[0]}, {&last->lora, &l.lora[1]}};
  MOELORA_TRY(moelora_cuda_round_factors(factors, count, &last->routes, last->dtype, exec));
  MOELORA_TRY(find_rows(last, &l, plan, exec));
  for (int i = 0; i < count; i++)
    MOELORA_TRY(project(p + i, &l, i, plan, exec));
  return MOELORA_OK;
}

} // namespace

moelora_status moelora_cuda_delta(const moelora_delta_problem *p, const moelora_delta_plan *plan,
                                  const moelora_exec *exec, size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(p, 1, plan, exec).bytes);
  return run(p, 1, plan, exec);
}

moelora_status moelora_cuda_mlp_delta(const moelora_mlp_delta_problem *p,
                                      const moelora_delta_plan *plan, const moelora_exec *exec,
                                      size_t *bytes) {
  MOELORA_MEASURE(bytes, lay_out(p->of, 2, plan, exec).bytes);
  return run(p->of, 2, plan, exec);
}
