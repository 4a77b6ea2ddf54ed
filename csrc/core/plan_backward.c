/* Plans the backward of a layer and of a projection: the intermediate results that are needed, and
 * the kernels that compute them. */
#include <stdio.h>

#include "core/check.h"
#include "core/format.h"
#include "core/plan_tile.h"

/* ---- needed results ---- */

static bool any(const moelora_gradient *gradients, int32_t count) {
  for (int32_t i = 0; i < count; i++)
    if (gradients[i].data)
      return true;
  return false;
}

static moelora_backward_needs find_needs(const moelora_experts_backward_problem *problem) {
  const moelora_experts_problem *forward = &problem->forward;
  const bool adapters = forward->routes.token_lora_mapping.data != NULL;
  const bool lora13 = adapters && forward->w13_lora.num_slices > 0;
  const bool lora2 = adapters && forward->w2_lora.num_slices > 0;
  moelora_backward_needs needs = {0};
  needs.dz = problem->dx || (problem->dtopk_weights && forward->apply_router_weight_on_input);
  needs.yb13 = lora13 && (needs.dz || any(problem->a13, 2));
  needs.xa13 = lora13 && any(problem->b13, 2);
  needs.v = needs.dz || problem->dtopk_weights || needs.yb13 || needs.xa13 ||
            problem->bias13.data || problem->a2.data;
  needs.yb2 = lora2 && needs.v;
  needs.xa2 = lora2 && problem->b2.data;
  return needs;
}

static moelora_gemm_backward_needs find_gemm_needs(const moelora_gemm_backward_problem *problem) {
  const moelora_gemm_problem *forward = &problem->forward;
  const bool adapters = forward->routes.token_lora_mapping.data && forward->lora.num_slices > 0;
  moelora_gemm_backward_needs needs = {0};
  needs.dz = problem->dx || (problem->dtopk_weights && forward->mul_routed_weight);
  needs.yb = adapters && (needs.dz || any(problem->a, MOELORA_MAX_SLICES));
  needs.xa = adapters && any(problem->b, MOELORA_MAX_SLICES);
  return needs;
}

/* ---- CUDA ---- */

/* The fastest shapes. Nearly every small expert fits one block. A k step of two CTAs with n rows
 * each takes 512 + 5 n cycles, bound by shared memory, which favors blocks of 144 rows for experts
 * of two to five blocks; in larger experts, they only add padding. Clusters of two multicast
 * weights, if many experts exceed one block. */
static const moelora_shape_bound shapes[] = {
    {8, {16, 1}},    {26, {32, 1}},   {80, {64, 1}},         {116, {128, 1}},
    {192, {128, 2}}, {640, {144, 2}}, {INT64_MAX, {128, 2}},
};

/* Inputs to the plan of one backward product y w. y NULL: it is in the workspace. */
typedef struct back_load {
  const moelora_weights *w;
  moelora_factors lora; /* in the dtype of the call */
  const void *y;
  int64_t y_stride;
  int64_t y_rows;        /* number of rows of y, which kernels index */
  bool rows_are_vectors; /* the epilogue's rows allow 16-byte accesses */
} back_load;

static bool is_vector_product(const back_load *load) {
  return load->rows_are_vectors && moelora_is_vector_weights(load->w) &&
         moelora_is_vector_row(load->y, load->y_stride, load->w->n);
}

/* Access modes that all products of a call allow. */
typedef struct back_access {
  bool vectors, tma;
  moelora_kernel_format format;       /* weights of the product that choose() picks a kernel for */
  moelora_kernel_format first_format; /* weights of the first product, which uses the same blocks */
} back_access;

/* Whether Hopper kernels can read the tiles: in GATE_UP order, gate rows must fill whole tiles. */
static bool has_consecutive_tiles(const moelora_weights *w) {
  return w->order != MOELORA_ROWS_GATE_UP || w->n / 2 % MOELORA_PACK == 0;
}

/* Finds the access modes of a call. Hopper kernels address rows of y by 32-bit offsets in units of
 * 16 bytes, and need weights, which deltas lack. */
static back_access find_access(const moelora_routes *routes, const back_load *loads,
                               int32_t count) {
  back_access access = {
      .vectors = true,
      .format = moelora_kernel_format_of(loads[count - 1].w->format, MOELORA_X_NATIVE),
      .first_format = moelora_kernel_format_of(loads[0].w->format, MOELORA_X_NATIVE),
  };
  for (int32_t i = 0; i < count; i++)
    access.vectors = access.vectors && is_vector_product(&loads[i]);
  access.tma = access.vectors;
  for (int32_t i = 0; i < count; i++)
    access.tma = access.tma && loads[i].y_rows * (loads[i].y_stride / 8) <= UINT32_MAX &&
                 moelora_are_map_weights(loads[i].w, routes->num_experts) &&
                 has_consecutive_tiles(loads[i].w);
  return access;
}

static bool serves(const moelora_variant *v, const back_access *access,
                   const moelora_device_info *device) {
  if (v->format != access->format || !moelora_tile_of_format(v, access->first_format, device))
    return false;
  if (v->needs == MOELORA_SM90)
    return access->tma;
  return access->vectors || v->block_m <= MOELORA_ELEMENT_ROWS;
}

/* Chooses the kernel of the last of `count` products. */
static moelora_status choose(const moelora_routes *routes, moelora_dtype dtype,
                             const back_access *access, int32_t count,
                             const moelora_device_info *device, const moelora_variant **chosen) {
  const moelora_variant *forced = moelora_forced(MOELORA_ROLE_BACK, dtype, device);
  const moelora_variant *best = NULL, *v;
  const moelora_shape want = moelora_shape_for(shapes, moelora_rows_per_expert(routes));
  char weights[96];
  for (int32_t i = 0; (v = moelora_variant_at(i)); i++) {
    if (v->role != MOELORA_ROLE_BACK || v->dtype != dtype || !moelora_variant_runs_on(v, device) ||
        !serves(v, access, device))
      continue;
    const bool newer = best && v->needs > best->needs;
    const bool nearer = best && v->needs == best->needs && moelora_is_nearer(v, best, want);
    if (!best || newer || nearer)
      best = v;
  }
  *chosen = forced && serves(forced, access, device) ? forced : best;
  if (*chosen)
    return MOELORA_OK;
  snprintf(weights, sizeof weights, "a backward with %s%s%s weights and ",
           moelora_kernel_name(access->format), count > 1 ? " and " : "",
           count > 1 ? moelora_kernel_name(access->first_format) : "");
  return moelora_no_kernel_for(dtype, weights, device);
}

/* Returns the number of scheduler counters: one for the tiles fetched and, on Hopper, one per tile
 * for the tile that follows it. */
static int64_t num_counters(const moelora_routes *routes, const moelora_weights *w,
                            const moelora_variant *v) {
  if (v->needs != MOELORA_SM90)
    return 1;
  const int64_t blocks = moelora_max_blocks(routes, v->block_m, moelora_cluster_blocks(v));
  return (int64_t)moelora_times((size_t)blocks + 1, (size_t)moelora_divide_up(w->k, v->block_n));
}

static moelora_back_product_plan plan_product(const moelora_routes *routes, const back_load *load,
                                              const moelora_variant *v,
                                              const moelora_device_info *device) {
  const moelora_factors *lora = &load->lora;
  const bool a_vectors = moelora_are_vector_factors(lora->a, lora->num_slices);
  return (moelora_back_product_plan){
      .variant = v,
      .vectors = is_vector_product(load),
      .a_vectors = a_vectors && load->w->k % 8 == 0,
      .shrinks_vectors = moelora_is_vector_row(load->y, load->y_stride, load->w->n) &&
                         lora->slice_n % 8 == 0 && lora->max_rank % 8 == 0 &&
                         moelora_are_vector_factors(lora->b, lora->num_slices),
      .num_counters = num_counters(routes, load->w, v),
      .l2_elements = device->l2_bytes / 4 / 2,
      .weights_again = moelora_reads_weights_again(v, moelora_rows_per_expert(routes)),
  };
}

/* Rejects factors B whose row stride exceeds INT32_MAX: the shrink cannot address them. */
static moelora_status check_factors(const char *name, const moelora_factors *lora) {
  for (int32_t i = 0; i < lora->num_slices; i++)
    MOELORA_TRY(moelora_check_row_stride(name, lora->b[i].stride_i));
  return MOELORA_OK;
}

static moelora_status plan_cuda(const moelora_experts_backward_problem *problem,
                                const moelora_device_info *device, moelora_backward_plan *plan) {
  const moelora_experts_problem *p = &problem->forward;
  const moelora_routes *routes = &p->routes;
  MOELORA_TRY(moelora_check_kernel_limits(routes, &p->w13_lora, device));
  MOELORA_TRY(moelora_check_kernel_limits(routes, &p->w2_lora, device));
  MOELORA_TRY(moelora_check_row_stride("dout", problem->dout_stride));
  MOELORA_TRY(moelora_check_row_stride("gate_up", p->saved.gate_up_stride));
  const back_load loads[2] = {
      {.w = &p->w2,
       .lora = moelora_rounded(&p->w2_lora, p->intermediate, routes, p->dtype, NULL),
       .y = problem->dout,
       .y_stride = problem->dout_stride,
       .y_rows = routes->num_tokens,
       .rows_are_vectors =
           moelora_is_vector_row(p->saved.gate_up, p->saved.gate_up_stride, p->intermediate)},
      {.w = &p->w13,
       .lora = moelora_rounded(&p->w13_lora, p->hidden, routes, p->dtype, NULL),
       .y = problem->overwrites_gate_up ? p->saved.gate_up : NULL,
       .y_stride = problem->overwrites_gate_up ? p->saved.gate_up_stride : p->w13.n,
       .y_rows = routes->num_rows,
       .rows_are_vectors = p->hidden % 8 == 0 && p->intermediate % 8 == 0},
  };
  MOELORA_TRY(check_factors("w2_lora_b", &loads[0].lora));
  MOELORA_TRY(check_factors("w13_lora_b", &loads[1].lora));
  const back_access access = find_access(routes, loads, 2);
  MOELORA_TRY(choose(routes, p->dtype, &access, 2, device, &plan->variant));
  const moelora_variant *const variants[] = {
      moelora_tile_of_format(plan->variant, access.first_format, device), plan->variant};
  for (int32_t i = 0; i < 2; i++)
    plan->product[i] = plan_product(routes, &loads[i], variants[i], device);
  moelora_plan_blocks(routes, plan->variant->block_m, moelora_cluster_blocks(plan->variant), device,
                      NULL, &plan->align);
  plan->sum = moelora_plan_sum(
      p->dtype, moelora_is_vector_row(problem->dx, problem->dx_stride, p->hidden), NULL, device);
  return MOELORA_OK;
}

moelora_status moelora_plan_experts_backward(const moelora_experts_backward_problem *problem,
                                             const moelora_device_info *device,
                                             moelora_backward_plan *plan) {
  *plan = (moelora_backward_plan){.needs = find_needs(problem)};
  if (device->device == MOELORA_CUDA)
    return plan_cuda(problem, device, plan);
  return moelora_plan_cpu(problem->forward.dtype, device, &plan->variant);
}

/* Returns the stride of flat rows of dout [M, top_k, N], or -1 if they are not equally spaced. */
static int64_t flat_stride(const moelora_gemm_backward_problem *problem) {
  const moelora_routes *routes = &problem->forward.routes;
  const int64_t *stride = problem->dout_stride;
  if (routes->top_k == 1)
    return stride[0];
  return routes->num_tokens <= 1 || stride[0] == routes->top_k * stride[1] ? stride[1] : -1;
}

static moelora_status plan_gemm_cuda(const moelora_gemm_backward_problem *problem,
                                     const moelora_device_info *device,
                                     moelora_gemm_backward_plan *plan) {
  const moelora_gemm_problem *p = &problem->forward;
  const moelora_routes *routes = &p->routes;
  const int64_t stride = flat_stride(problem);
  MOELORA_TRY(moelora_check_kernel_limits(routes, &p->lora, device));
  MOELORA_TRY(moelora_check_row_stride("x", p->x_stride));
  MOELORA_TRY(moelora_check_row_stride("dout", stride));
  plan->copies_dout = stride < 0;
  plan->dout_stride = stride < 0 ? moelora_divide_up(p->w.n, 8) * 8 : stride;
  /* false: the product writes dz to the workspace */
  const bool writes_dx = problem->dx && p->x_per_row && !p->mul_routed_weight;
  const moelora_factors lora = moelora_rounded(&p->lora, p->w.k, routes, p->dtype, NULL);
  MOELORA_TRY(check_factors("lora_b", &lora));
  const back_load load = {
      .w = &p->w,
      .lora = lora,
      .y = plan->copies_dout ? NULL : problem->dout,
      .y_stride = plan->dout_stride,
      .y_rows = routes->num_rows,
      .rows_are_vectors = writes_dx ? moelora_is_vector_row(problem->dx, problem->dx_stride, p->w.k)
                                    : p->w.k % 8 == 0,
  };
  const back_access access = find_access(routes, &load, 1);
  MOELORA_TRY(choose(routes, p->dtype, &access, 1, device, &plan->variant));
  plan->product = plan_product(routes, &load, plan->variant, device);
  moelora_plan_blocks(routes, plan->variant->block_m, moelora_cluster_blocks(plan->variant), device,
                      NULL, &plan->align);
  const moelora_projection_load shrink = {
      .routes = routes,
      .w = &p->w,
      .lora = &lora,
      .x = p->x,
      .x_stride = p->x_stride,
      .x_rows_each = p->x_per_row ? 1 : routes->top_k,
  };
  if (plan->needs.xa)
    plan->shrink =
        moelora_plan_projection_shrink(&shrink, plan->variant, &plan->align, NULL, device);
  if (problem->dx && !p->x_per_row)
    plan->sum = moelora_plan_sum(
        p->dtype, moelora_is_vector_row(problem->dx, problem->dx_stride, p->w.k), NULL, device);
  return MOELORA_OK;
}

moelora_status moelora_plan_gemm_backward(const moelora_gemm_backward_problem *problem,
                                          const moelora_device_info *device,
                                          moelora_gemm_backward_plan *plan) {
  *plan = (moelora_gemm_backward_plan){.needs = find_gemm_needs(problem)};
  if (device->device == MOELORA_CUDA)
    return plan_gemm_cuda(problem, device, plan);
  return moelora_plan_cpu(problem->forward.dtype, device, &plan->variant);
}
