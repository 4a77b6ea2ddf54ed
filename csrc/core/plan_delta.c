/* Plans deltas, LoRA without a base product:
 *
 *   [sort] -> shrink -> expand [-> shrink -> expand] [-> sum] */
#include <math.h>

#include "core/check.h"
#include "core/plan.h"

/* Thresholds measured on an H200, except for those that follow from a kernel. Nanoseconds are
 * compared with the memory time of cost.c. */
#define SORT_NS 5000.      /* a launch that sorts */
#define GROUP_NS 500.      /* no launch: each CTA sorts the rows of its window */
#define WARP_BYTES 131072. /* bytes that a warp of an expand moves per wave */

enum {
  LIKELY_ADAPTERS = 8, /* adapters in one batch; other slots may be idle */
  THIN_ROWS = 8,       /* per (expert, adapter): from here on, an expand mostly moves outputs */
  THIN_RANKS = 64,
  LONG_ROWS = 256,  /* per expert, from which the sort lists segments: 32 for each of 8 adapters */
  EXPAND_ITEMS = 8, /* per warp: enough to keep all warps busy, few enough to reread B seldom */
  MIN_PART = 32,    /* rows per item of an expand */
  MAX_WAVES = 6,
};

/* ---- rows ---- */

static int32_t likely_adapters(const moelora_routes *routes) {
  return routes->max_loras < LIKELY_ADAPTERS ? routes->max_loras : LIKELY_ADAPTERS;
}

/* Returns the expected number of (expert, adapter) pairs with rows, if every row carries each of
 * the likely adapters with the same probability. */
static double expected_pairs(const moelora_routes *routes) {
  const double pool = (double)routes->num_experts * likely_adapters(routes);
  return pool > 0 ? pool * (1.0 - exp(-(double)routes->num_rows / pool)) : 0.0;
}

/* Returns the bytes of all factors of one (expert, adapter) pair. */
static double pair_bytes(const moelora_factors *lora, int64_t k, int64_t columns) {
  return 2.0 * lora->max_rank * ((double)lora->num_slices * (double)k + (double)columns);
}

/* Chooses the order of rows: if few rows share factors, rereading these costs less than sorting. */
static moelora_delta_order order_for(const moelora_routes *routes, double bytes_of_pair,
                                     const moelora_device_info *device) {
  const double repeated = (double)routes->num_rows - expected_pairs(routes);
  const double saved = moelora_memory_ns(device, repeated * bytes_of_pair);
  if (routes->num_rows <= MOELORA_WINDOW_ROWS &&
      (int64_t)routes->num_experts * routes->max_loras <= MOELORA_WINDOW_PAIRS)
    return saved > GROUP_NS ? MOELORA_GROUPED : MOELORA_BY_ROUTE;
  return saved > SORT_NS ? MOELORA_SORTED : MOELORA_BY_ROUTE;
}

/* ---- expand ---- */

typedef struct expand_load {
  moelora_dtype dtype;
  moelora_delta_order order;
  const moelora_routes *routes;
  const moelora_list_blocks *lists;
  const moelora_factors *lora;
  bool gated;
  bool vectors; /* xa, B and the output allow 16-byte accesses */
} expand_load;

/* Returns block_k of the narrowest kernel that covers max_rank in one step, or of the widest. */
static int32_t step_ranks(int32_t max_rank) {
  return max_rank <= 16 ? 16 : max_rank <= 32 ? 32 : 64;
}

static bool is_thin(const moelora_factors *lora, bool gated, bool vectors) {
  return vectors && !gated && lora->max_rank <= THIN_RANKS;
}

/* Whether the variant accumulates ranks in the order that the problem requires. The order depends
 * on the tensors only, so that variants return the same bits: an mma multiplies 16 consecutive
 * ranks, or four of every eight in 32 (delta/expand.cuh). */
static bool has_rank_order(const moelora_variant *v, const expand_load *load) {
  const bool neighbors = !load->vectors || step_ranks(load->lora->max_rank) == 16;
  return neighbors == (v->block_k == 16);
}

static bool expand_serves(const moelora_variant *v, const expand_load *load) {
  if (!v || v->gated != load->gated || !(v->elements || load->vectors) || !has_rank_order(v, load))
    return false;
  if (v->method == MOELORA_EXPAND_THIN)
    return is_thin(load->lora, load->gated, load->vectors) && load->lora->max_rank <= v->block_k;
  return v->elements || v->block_k == 64 || load->lora->max_rank <= v->block_k;
}

static const moelora_variant *choose_expand(const expand_load *load,
                                            const moelora_device_info *device) {
  const moelora_variant *forced = moelora_forced(MOELORA_ROLE_EXPAND, load->dtype, device);
  if (expand_serves(forced, load))
    return forced;
  const moelora_routes *routes = load->routes;
  const int64_t pairs = (int64_t)routes->num_experts * routes->max_loras;
  const bool thin =
      is_thin(load->lora, load->gated, load->vectors) && routes->num_rows < THIN_ROWS * pairs;
  return moelora_variant_like(
      &(moelora_variant){.device = MOELORA_CUDA,
                         .dtype = load->dtype,
                         .role = MOELORA_ROLE_EXPAND,
                         .method = thin ? MOELORA_EXPAND_THIN : MOELORA_EXPAND_STAGED,
                         .needs = MOELORA_SM80,
                         .block_k = load->vectors ? step_ranks(load->lora->max_rank) : 0,
                         .elements = !load->vectors,
                         .gated = load->gated});
}

/* Returns the number of waves of CTAs. SMs differ in memory throughput, so a large expand is
 * launched in several waves, with one megabyte per CTA of eight warps. */
static int32_t waves_of(const expand_load *load, double pairs, int64_t warps) {
  const moelora_factors *lora = load->lora;
  const double columns = (double)lora->column[lora->num_slices];
  const double moved =
      columns * (4.0 * (double)load->routes->num_rows + 2.0 * lora->max_rank * pairs);
  return (int32_t)fmax(1.0, fmin(round(moved / (WARP_BYTES * (double)warps)), MAX_WAVES));
}

static moelora_expand_plan plan_expand(const expand_load *load, const moelora_device_info *device) {
  const moelora_variant *v = choose_expand(load, device);
  const int64_t n = load->lora->slice_n, slices = load->lora->num_slices;
  moelora_expand_plan plan = {.part = v->block_m, .waves = 1};
  int64_t tiles = 0;
  for (int32_t i = 0; i < slices; i++)
    tiles += moelora_divide_up(moelora_slice_columns(load->lora, i), v->block_n);
  if (load->gated) /* gate and up in one slice, or in half of the slices each */
    tiles = slices == 1 ? moelora_divide_up(n / 2, v->block_n)
                        : slices / 2 * moelora_divide_up(n, v->block_n);
  if (tiles == 0)
    return plan;
  plan.variant = v;
  plan.tiles = (int32_t)tiles;
  const int64_t ctas = (int64_t)device->num_units * v->ctas;
  if (v->method == MOELORA_EXPAND_STAGED) {
    const double rows = (double)load->routes->num_rows;
    const double pairs = expected_pairs(load->routes);
    while (plan.part > MIN_PART &&
           fmax(rows / plan.part, pairs) * (double)tiles < (double)(EXPAND_ITEMS * ctas * v->warps))
      plan.part /= 2;
    plan.waves = waves_of(load, pairs, ctas * v->warps);
  }
  const moelora_windows windows =
      moelora_cut_windows(load->routes, load->lists, load->order, 64 * v->warps, plan.part,
                          moelora_divide_up(tiles, v->warps), plan.waves * ctas);
  plan.window = windows.rows;
  plan.shares = windows.shares;
  plan.work = windows.count * windows.shares;
  return plan;
}

/* ---- a projection ---- */

/* Whether B allows 16-byte accesses. */
static bool is_vector_expand(const moelora_factors *lora) {
  bool whole = lora->max_rank % 8 == 0;
  for (int32_t i = 1; i <= lora->num_slices; i++)
    whole = whole && lora->column[i] % 8 == 0;
  return whole && moelora_are_vector_factors(lora->b, lora->num_slices);
}

static bool are_vector_strides(const void *data, const int64_t *strides, int32_t count) {
  bool all = (uintptr_t)data % 16 == 0;
  for (int32_t i = 0; i < count; i++)
    all = all && strides[i] % 8 == 0;
  return all;
}

static moelora_status begin(moelora_dtype dtype, const moelora_device_info *device,
                            moelora_delta_plan *plan) {
  *plan = (moelora_delta_plan){0};
  if (device->device == MOELORA_CPU)
    return moelora_plan_cpu(dtype, device, &plan->variant);
  if (dtype == MOELORA_F32 || device->compute_capability < 80)
    return moelora_no_kernel_for(dtype, "", device);
  plan->family = moelora_family_of(device);
  return MOELORA_OK;
}

/* Plans the order of the rows, and their sort. */
static void plan_order(const moelora_routes *routes, double bytes_of_pair,
                       const moelora_device_info *device, moelora_delta_plan *plan) {
  plan->order = order_for(routes, bytes_of_pair, device);
  if (plan->order != MOELORA_SORTED)
    return;
  moelora_plan_blocks(routes, 1, 1, device, NULL, &plan->align);
  if (routes->num_rows < (int64_t)LONG_ROWS * routes->num_experts)
    plan->align.segments = 0;
}

static moelora_shrink_load begin_shrink(const moelora_routes *routes, moelora_dtype dtype,
                                        const moelora_factors *lora,
                                        const moelora_delta_plan *plan) {
  moelora_shrink_load load = {.dtype = dtype,
                              .family = plan->family,
                              .rows = routes->num_rows,
                              .segments = (int64_t)routes->num_experts * routes->max_loras,
                              .columns = moelora_padded_columns(lora),
                              .listed = lora->max_rank < MOELORA_RANKS ? plan->align.segments : 0,
                              .order = plan->order,
                              .routes = routes};
  if (load.segments > load.rows || load.order == MOELORA_BY_ROUTE)
    load.segments = load.rows;
  return load;
}

/* Plans projection i of a call, after plan_order(). */
static moelora_status plan_projection(const moelora_delta_problem *p, int32_t i,
                                      const moelora_device_info *device, moelora_delta_plan *plan) {
  if (p->silu_and_mul && p->lora.num_slices != 1 && p->lora.num_slices % 2 != 0)
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "silu_and_mul of %d slices: the GPU kernels take 1 or an even number",
                        p->lora.num_slices);
  const moelora_routes *routes = &p->routes;
  const moelora_factors lora = moelora_rounded(&p->lora, p->k, routes, p->dtype, NULL);
  if (p->sum_top_k)
    plan->sum = moelora_plan_sum(
        p->dtype, moelora_is_vector_row(p->out, p->out_stride[0], p->columns), NULL, device);
  plan->xa_vectors = !p->xa || are_vector_strides(p->xa, p->xa_stride, 3);
  const bool gated = p->silu_and_mul && !p->sum_top_k;
  const bool out_vectors = p->sum_top_k || are_vector_strides(p->out, p->out_stride, 2);
  const bool whole = !gated || lora.num_slices != 1 || lora.slice_n % 16 == 0;
  const bool expand_vectors = is_vector_expand(&lora) && plan->xa_vectors && out_vectors && whole;
  if (plan->order == MOELORA_SORTED)
    MOELORA_TRY(moelora_check_sort(MOELORA_ALIGN_SEGMENTED, routes));
  if (p->k) {
    moelora_shrink_load load = begin_shrink(routes, p->dtype, &lora, plan);
    load.depth = p->k;
    load.vectors = moelora_is_vector_row(p->x, p->x_stride, p->k) &&
                   moelora_are_vector_factors(lora.a, lora.num_slices);
    load.boxes = moelora_are_boxes(&lora, routes->num_rows / (p->x_per_row ? 1 : routes->top_k),
                                   p->x_stride);
    load.lists = &p->lists;
    /* Whole-segment kernels write a row of xa up to the true rank, rounded up to 16. A caller's xa
     * may have shorter rows, or need zeros up to max_rank. They also need rows of xa at a constant
     * stride. */
    const bool exact = p->xa && (routes->lora_ranks || lora.max_rank % 16 != 0);
    const bool one_stride = !p->xa || p->xa_stride[1] == routes->top_k * p->xa_stride[2];
    if (!plan->xa_vectors || !one_stride || exact)
      load.listed = 0;
    plan->shrink[i] = moelora_plan_shrink_windows(&load, device);
  }
  if (p->columns) {
    const expand_load load = {p->dtype, plan->order, routes,        &p->lists,
                              &lora,    gated,       expand_vectors};
    plan->expand[i] = plan_expand(&load, device);
  }
  return MOELORA_OK;
}

/* Plans a call of `count` projections over the same rows. */
static moelora_status plan_projections(const moelora_delta_problem *p, int32_t count,
                                       const moelora_device_info *device,
                                       moelora_delta_plan *plan) {
  double bytes = 0;
  MOELORA_TRY(begin(p->dtype, device, plan));
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  for (int32_t i = 0; i < count; i++)
    bytes += pair_bytes(&p[i].lora, p[i].k, p[i].columns);
  if (p->lists.sorted_token_ids)
    plan->order = MOELORA_LISTED;
  else
    plan_order(&p->routes, bytes, device, plan);
  for (int32_t i = 0; i < count; i++)
    MOELORA_TRY(plan_projection(&p[i], i, device, plan));
  return MOELORA_OK;
}

moelora_status moelora_plan_delta(const moelora_delta_problem *p, const moelora_device_info *device,
                                  moelora_delta_plan *plan) {
  return plan_projections(p, 1, device, plan);
}

moelora_status moelora_plan_mlp_delta(const moelora_mlp_delta_problem *p,
                                      const moelora_device_info *device, moelora_delta_plan *plan) {
  return plan_projections(p->of, 2, device, plan);
}
