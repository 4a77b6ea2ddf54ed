/* Adapters alone: which launches, in which order, and what lies in the workspace.
 *
 *   resolve -> [sort] -> shrink -> expand [-> sum]
 *
 * or, of few rows, shrink and expand in one launch. x A^T and whatever waits for a sum is stored by
 * flat row. Few rows are sorted by each CTA for itself, or not at all: where pairs hardly repeat,
 * reading the factors of a repeated one again costs less. */
#include "cuda/adapters/delta.h"
#include "cuda/backend.h"

extern "C" delta_sorted delta_take_sorted(const moelora_routes *routes,
                                          const moelora_align_plan *plan, moelora_arena *arena) {
  delta_sorted sorted = {};
  const size_t bytes = sizeof(int32_t) * (size_t)routes->num_rows;
  sorted.row = (int32_t *)moelora_take(arena, bytes);
  sorted.expert = (int32_t *)moelora_take(arena, bytes);
  sorted.adapter = (int32_t *)moelora_take(arena, bytes);
  sorted.count = (int32_t *)moelora_take(arena, sizeof(int32_t));
  if (plan->segments > 0)
    sorted.segments =
        (moelora_segment *)moelora_take(arena, sizeof(moelora_segment) * (size_t)plan->segments);
  sorted.scratch = moelora_take(arena, moelora_cuda_align_rows_workspace(routes, plan));
  return sorted;
}

extern "C" moelora_status delta_sort(const moelora_routes *routes, const delta_sorted *sorted,
                                     const moelora_align_plan *plan, const moelora_exec *exec) {
  const moelora_blocks blocks = {.rows = 1,
                                 .cluster = 1,
                                 .max_blocks = routes->num_rows,
                                 .sorted_ids = sorted->row,
                                 .expert_ids = sorted->expert,
                                 .packed_ranks = sorted->adapter,
                                 .segments = sorted->segments,
                                 .num_post = sorted->count};
  return moelora_cuda_align_rows(routes, &blocks, plan, sorted->scratch, exec);
}

namespace {

/* sorted: of MOELORA_SORTED. */
delta_rows rows_of(const moelora_routes *routes, moelora_delta_order order,
                   const delta_sorted *sorted) {
  delta_rows rows = {};
  rows.order = order;
  rows.routes = *routes;
  if (order == MOELORA_SORTED) {
    rows.row = sorted->row;
    rows.expert = sorted->expert;
    rows.adapter = sorted->adapter;
    rows.count = sorted->count;
    rows.segments = sorted->segments;
  }
  return rows;
}

/* ---- the two halves ---- */

/* x A^T [slices, M, top_k, R], or our own with rows of all slices. */
struct XaView {
  void *data;
  int64_t stride[3];
};

size_t xa_bytes(const moelora_routes *routes, const moelora_factors *lora) {
  return moelora_times(
      moelora_times((size_t)routes->num_rows, (size_t)moelora_padded_columns(lora)), 2);
}

XaView own_xa(void *data, const moelora_routes *routes, const moelora_factors *lora) {
  const int64_t width = moelora_padded_rank(lora->max_rank), row = width * lora->num_slices;
  return {data, {width, routes->top_k * row, row}};
}

delta_shrink begin_shrink(const delta_rows *rows, const void *x, int64_t x_stride, bool x_per_row,
                          int64_t k, const moelora_factors *lora, const float *scalings,
                          const XaView *xa) {
  delta_shrink s = {};
  s.rows = *rows;
  s.rows.max_rank = lora->max_rank;
  s.x = x;
  s.x_stride = x_stride;
  s.x_divisor = x_per_row ? 1 : rows->routes.top_k;
  s.k = (int32_t)k;
  s.lora = *lora;
  s.scalings = scalings;
  s.xa = xa->data;
  s.xa_vectors = (uintptr_t)xa->data % 16 == 0;
  for (int i = 0; i < 3; i++) {
    s.xa_stride[i] = xa->stride[i];
    s.xa_vectors = s.xa_vectors && xa->stride[i] % 8 == 0;
  }
  return s;
}

/* All of an expand but what becomes of z. */
delta_expand begin_expand(const delta_rows *rows, const XaView *xa, const moelora_factors *lora,
                          bool after_shrink) {
  delta_expand e = {};
  e.after_shrink = after_shrink;
  e.rows = *rows;
  e.rows.max_rank = lora->max_rank;
  e.lora = *lora;
  e.xa = xa->data;
  for (int i = 0; i < 3; i++)
    e.xa_stride[i] = xa->stride[i];
  return e;
}

void set_out(delta_expand *e, void *out, int64_t token_stride, int64_t choice_stride) {
  e->out = out;
  e->out_stride[0] = token_stride;
  e->out_stride[1] = choice_stride;
}

/* Rows that wait for their sum. */
struct Waiting {
  void *data; // [P, stride]
  int64_t stride;
  bool f32;
};

Waiting take_waiting(const moelora_routes *routes, int64_t columns, bool f32,
                     moelora_arena *arena) {
  Waiting z = {};
  z.stride = (columns + 7) / 8 * 8;
  z.f32 = f32;
  z.data = moelora_take_array(arena, moelora_times((size_t)routes->num_rows, (size_t)z.stride),
                              z.f32 ? 4 : 2);
  return z;
}

/* An expand into rows that wait. written: which of them are there; NULL: what rows say. */
void set_waiting(delta_expand *e, const Waiting *z, uint8_t *written) {
  set_out(e, z->data, e->rows.routes.top_k * z->stride, z->stride);
  e->f32 = z->f32;
  e->written = written;
}

/* Their sum over top_k, into out. */
moelora_status add_up(const delta_expand *e, const Waiting *z, int64_t columns, bool add, void *out,
                      int64_t out_stride, const moelora_variant *variant,
                      const moelora_exec *exec) {
  moelora_sum_launch s = {};
  s.routes = e->rows.routes;
  s.z = z->data;
  s.z_stride = z->stride;
  s.z_f32 = z->f32;
  s.written = e->written;
  s.max_rank = e->rows.max_rank;
  s.add = add;
  s.out = out;
  s.out_stride = out_stride;
  s.columns = (int32_t)columns;
  return moelora_cuda_sum(&s, variant, exec);
}

/* ---- one adapter ---- */

struct DeltaLayout {
  moelora_routes routes; // resolved
  moelora_list_blocks lists;
  delta_sorted sorted;
  void *xa;
  Waiting z;
  uint8_t *written;
  size_t bytes;
};

DeltaLayout lay_out(const moelora_delta_problem *p, const moelora_delta_plan *plan, void *base) {
  moelora_arena arena = {(char *)base, 0};
  DeltaLayout l = {};
  const bool listed = p->lists.sorted_token_ids;
  l.routes = moelora_cuda_take_routes(&p->routes, false, &arena);
  if (listed)
    l.lists = moelora_cuda_take_lists(&p->lists, p->routes.max_loras, true, &arena);
  if (plan->order == MOELORA_SORTED && !plan->one)
    l.sorted = delta_take_sorted(&l.routes, &plan->align, &arena);
  if (!p->xa)
    l.xa = moelora_take(&arena, xa_bytes(&p->routes, &p->lora));
  if (p->sum_top_k) {
    l.z = take_waiting(&p->routes, p->columns, plan->waiting_f32, &arena);
    if (listed)
      l.written = (uint8_t *)moelora_take(&arena, (size_t)p->routes.num_rows);
  }
  l.bytes = arena.used;
  return l;
}

bool has_rows(const moelora_delta_problem *p) {
  return p->routes.max_loras > 0 &&
         (p->lists.sorted_token_ids ? p->lists.num_active > 0
                                    : p->routes.token_lora_mapping.data != nullptr);
}

} // namespace

extern "C" size_t moelora_cuda_delta_workspace(const moelora_delta_problem *problem,
                                               const moelora_delta_plan *plan,
                                               const moelora_exec *exec) {
  (void)exec;
  return lay_out(problem, plan, nullptr).bytes;
}

extern "C" moelora_status moelora_cuda_delta(const moelora_delta_problem *p,
                                             const moelora_delta_plan *plan,
                                             const moelora_exec *exec) {
  if (!has_rows(p))
    return MOELORA_OK;
  if (p->silu_and_mul && p->lora.num_slices != 1 && p->lora.num_slices % 2 != 0)
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "silu_and_mul of %d slices: the GPU kernels take 1 or an even number",
                        p->lora.num_slices);
  const DeltaLayout l = lay_out(p, plan, exec->workspace);
  const moelora_routes *routes = &l.routes;
  delta_rows rows = rows_of(routes, plan->order, &l.sorted);
  rows.lists = l.lists;
  const XaView xa = p->xa ? XaView{p->xa, {p->xa_stride[0], p->xa_stride[1], p->xa_stride[2]}}
                          : own_xa(l.xa, routes, &p->lora);
  delta_shrink s = {};
  if (p->x)
    s = begin_shrink(&rows, p->x, p->x_stride, p->x_per_row, p->k, &p->lora, routes->lora_scalings,
                     &xa);
  delta_expand e = begin_expand(&rows, &xa, &p->lora, p->x != nullptr);
  e.topk_weights = p->mul_routed_weight ? routes->topk_weights : nullptr;
  if (p->sum_top_k) {
    set_waiting(&e, &l.z, l.written);
  } else {
    set_out(&e, p->out, p->out_stride[0], p->out_stride[1]);
    e.add = p->add_inputs;
    e.silu_and_mul = p->silu_and_mul;
  }

  const bool listed = plan->order == MOELORA_LISTED;
  MOELORA_TRY(moelora_cuda_check_layout(l.bytes, exec));
  if (l.written)
    MOELORA_TRY(moelora_cuda_check(
        cudaMemsetAsync(l.written, 0, (size_t)routes->num_rows, (cudaStream_t)exec->stream),
        "cudaMemsetAsync"));
  MOELORA_TRY(moelora_cuda_resolve(&p->routes, routes, listed ? &p->lists : nullptr,
                                   listed ? &l.lists : nullptr, true, exec));
  if (plan->one) {
    MOELORA_TRY(delta_launch_thin(&s, &e, plan, exec));
  } else {
    if (plan->order == MOELORA_SORTED)
      MOELORA_TRY(delta_sort(routes, &l.sorted, &plan->align, exec));
    if (p->x)
      MOELORA_TRY(delta_launch_shrink(&s, &plan->shrink[0], exec));
    if (p->out)
      MOELORA_TRY(delta_launch_expand(&e, &plan->expand[0], exec));
  }
  if (!p->out || !p->sum_top_k)
    return MOELORA_OK;
  return add_up(&e, &l.z, p->columns, p->add_inputs, p->out, p->out_stride[0], plan->sum, exec);
}

/* ---- an adapter MLP ---- */

namespace {

struct MlpLayout {
  moelora_routes routes; // resolved
  delta_sorted sorted;
  void *xa1, *act, *xa2;
  Waiting z;
  size_t bytes;
};

MlpLayout lay_out_mlp(const moelora_mlp_delta_problem *p, const moelora_delta_plan *plan,
                      void *base) {
  moelora_arena arena = {(char *)base, 0};
  MlpLayout l = {};
  l.routes = moelora_cuda_take_routes(&p->routes, false, &arena);
  if (plan->order == MOELORA_SORTED)
    l.sorted = delta_take_sorted(&l.routes, &plan->align, &arena);
  l.xa1 = moelora_take(&arena, xa_bytes(&p->routes, &p->gate_up));
  l.act = moelora_take_array(&arena,
                             moelora_times((size_t)p->routes.num_rows, (size_t)p->intermediate), 2);
  l.xa2 = moelora_take(&arena, xa_bytes(&p->routes, &p->down));
  l.z = take_waiting(&p->routes, p->hidden, plan->waiting_f32, &arena);
  l.bytes = arena.used;
  return l;
}

} // namespace

extern "C" size_t moelora_cuda_mlp_delta_workspace(const moelora_mlp_delta_problem *problem,
                                                   const moelora_delta_plan *plan,
                                                   const moelora_exec *exec) {
  (void)exec;
  return plan->one ? 0 : lay_out_mlp(problem, plan, nullptr).bytes;
}

extern "C" moelora_status moelora_cuda_mlp_delta(const moelora_mlp_delta_problem *p,
                                                 const moelora_delta_plan *plan,
                                                 const moelora_exec *exec) {
  if (!p->routes.token_lora_mapping.data || p->routes.max_loras == 0)
    return MOELORA_OK;
  if (plan->one)
    return delta_launch_mlp(p, plan->one, exec);
  const MlpLayout l = lay_out_mlp(p, plan, exec->workspace);
  const moelora_routes *routes = &l.routes;
  const int64_t intermediate = p->intermediate;
  const delta_rows rows = rows_of(routes, plan->order, &l.sorted);
  MOELORA_TRY(moelora_cuda_check_layout(l.bytes, exec));
  MOELORA_TRY(moelora_cuda_resolve(&p->routes, routes, nullptr, nullptr, true, exec));
  if (plan->order == MOELORA_SORTED)
    MOELORA_TRY(delta_sort(routes, &l.sorted, &plan->align, exec));

  const XaView xa1 = own_xa(l.xa1, routes, &p->gate_up);
  const XaView xa2 = own_xa(l.xa2, routes, &p->down);
  const delta_shrink shrink1 =
      begin_shrink(&rows, p->x, p->x_stride, false, p->hidden, &p->gate_up, nullptr, &xa1);
  const delta_shrink shrink2 = begin_shrink(&rows, l.act, intermediate, true, intermediate,
                                            &p->down, routes->lora_scalings, &xa2);
  delta_expand expand1 = begin_expand(&rows, &xa1, &p->gate_up, true);
  expand1.silu_and_mul = true;
  set_out(&expand1, l.act, routes->top_k * intermediate, intermediate);
  delta_expand expand2 = begin_expand(&rows, &xa2, &p->down, true);
  expand2.topk_weights = routes->topk_weights;
  set_waiting(&expand2, &l.z, nullptr);
  MOELORA_TRY(delta_launch_shrink(&shrink1, &plan->shrink[0], exec));
  MOELORA_TRY(delta_launch_expand(&expand1, &plan->expand[0], exec));
  MOELORA_TRY(delta_launch_shrink(&shrink2, &plan->shrink[1], exec));
  MOELORA_TRY(delta_launch_expand(&expand2, &plan->expand[1], exec));
  return add_up(&expand2, &l.z, p->hidden, true, p->out, p->out_stride, plan->sum, exec);
}
