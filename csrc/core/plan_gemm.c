/* Plans a projection or a layer: its GEMM kernels, which are forced, tuned or chosen by
 * plan_tile.c, and the launches around them. */
#include <stdio.h>

#include "core/check.h"
#include "core/format.h"
#include "core/plan_tile.h"

/* Whether one launch for the layer is faster: for one token, unless Hopper kernels can run. */
static bool is_few(const moelora_routes *routes, const moelora_access *access,
                   const moelora_device_info *device) {
  return routes->num_tokens == 1 && !(access->tma && moelora_family_of(device) == MOELORA_SM90);
}

/* Whether one tensor map covers the weights of all experts: strided rows, or contiguous tiles. For
 * quantized weights: whether one bulk copy can load adjacent K tiles. */
bool moelora_are_map_weights(const moelora_weights *w, int32_t num_experts) {
  const int64_t tile = MOELORA_PACK * MOELORA_PACK;
  if (moelora_is_quantized(w->format))
    return w->stride_kt == moelora_tile_size(w->format);
  if (w->packed)
    return w->stride_kt == tile && w->stride_nt == w->k / MOELORA_PACK * tile &&
           w->stride_e == w->n / MOELORA_PACK * w->stride_nt &&
           num_experts * (w->n / MOELORA_PACK) <= UINT32_MAX;
  return w->stride_e > 0 && w->stride_n > 0 && moelora_is_map_stride(w->stride_e) &&
         moelora_is_map_stride(w->stride_n * w->n);
}

/* Returns whether a forced or tuned variant supports the problem; logs why not. */
static bool serves_request(const moelora_variant *v, const moelora_access *access,
                           const moelora_device_info *device) {
  const char *why = moelora_tile_misfit(v, access, device);
  if (why)
    moelora_log_passed_over(v, why);
  return !why;
}

/* Returns the forced layer or projection variant that supports the problem, or NULL. */
static const moelora_variant *forced_for(moelora_dtype dtype, const moelora_access *access,
                                         const moelora_device_info *device) {
  static const moelora_role roles[] = {MOELORA_ROLE_LAYER, MOELORA_ROLE_GEMM};
  for (int32_t i = 0; i < 2; i++) {
    const moelora_variant *variant = moelora_forced(roles[i], dtype, device);
    if (variant && serves_request(variant, access, device))
      return variant;
  }
  return NULL;
}

moelora_status moelora_check_row_stride(const char *name, int64_t stride) {
  if (stride <= INT32_MAX)
    return MOELORA_OK;
  return moelora_fail(MOELORA_UNSUPPORTED,
                      "rows of %s are %lld elements apart: the GPU kernels take at most %d", name,
                      (long long)stride, INT32_MAX);
}

static moelora_status refuse(moelora_dtype dtype, const moelora_access *access,
                             const moelora_device_info *device) {
  char weights[64] = "";
  if (device->device == MOELORA_CPU)
    return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for this CPU",
                        moelora_dtype_name(dtype));
  if (dtype != MOELORA_F32)
    MOELORA_TRY(moelora_check_row_stride(access->layer ? "hidden_states" : "x", access->x_stride));
  if (!moelora_is_native_kernel(access->format))
    snprintf(weights, sizeof weights, "%s weights and ", moelora_kernel_name(access->format));
  return moelora_no_kernel_for(dtype, weights, device);
}

/* Whether `v` returns the same bits as `usual`: mma.sync and wgmma accumulate FP8 products
 * differently, so a problem must always run on the same instruction. */
static bool keeps_bits(const moelora_variant *v, const moelora_variant *usual,
                       const moelora_access *access, const moelora_device_info *device) {
  const bool fp8 = moelora_is_e4m3_kernel(access->format) || moelora_is_e4m3_kernel(access->second);
  return !(fp8 && device->device == MOELORA_CUDA) || !usual || v->needs == usual->needs;
}

/* Whether x is quantized to FP8 with a scale per 64 columns. */
static bool quantizes_by_64(const moelora_weights *w) {
  return moelora_is_e4m3_kernel(moelora_kernel_format_of(w->format, w->x)) &&
         moelora_x_group(w->format) == 64;
}

/* Picks the forced variant if it supports the problem and keeps the bits, else the best variant. */
static moelora_status pick_variant(int64_t rows, moelora_dtype dtype, const moelora_access *access,
                                   const moelora_device_info *device,
                                   const moelora_variant **picked) {
  const moelora_variant *forced = forced_for(dtype, access, device);
  *picked = moelora_choose_tile(rows, dtype, access, device);
  if (forced && keeps_bits(forced, *picked, access, device))
    *picked = forced;
  return *picked ? MOELORA_OK : refuse(dtype, access, device);
}

moelora_status moelora_plan_cpu(moelora_dtype dtype, const moelora_device_info *device,
                                const moelora_variant **picked) {
  const moelora_access any = {.vectors = true};
  return pick_variant(1, dtype, &any, device, picked);
}

moelora_status moelora_check_kernel_limits(const moelora_routes *routes,
                                           const moelora_factors *lora,
                                           const moelora_device_info *device) {
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  if (lora->num_slices > 0 && lora->max_rank >= MOELORA_RANKS)
    return moelora_fail(MOELORA_UNSUPPORTED, "rank %d: the GPU kernels take ranks below %d",
                        lora->max_rank, MOELORA_RANKS);
  return moelora_check_sort(MOELORA_ALIGN_SEGMENTED, routes);
}

/* ---- launches around a projection ---- */

static bool sum_serves(const moelora_variant *v, bool vectors) {
  return v && (v->elements || vectors);
}

const moelora_variant *moelora_plan_sum(moelora_dtype dtype, bool vectors,
                                        const moelora_variant *tuned,
                                        const moelora_device_info *device) {
  const moelora_variant *forced = moelora_forced(MOELORA_ROLE_SUM, dtype, device);
  if (sum_serves(forced, vectors))
    return forced;
  if (sum_serves(tuned, vectors))
    return tuned;
  return moelora_variant_like(&(moelora_variant){.device = MOELORA_CUDA,
                                                 .dtype = dtype,
                                                 .role = MOELORA_ROLE_SUM,
                                                 .needs = MOELORA_SM80,
                                                 .elements = !vectors});
}

moelora_status moelora_plan_gemm(const moelora_gemm_problem *problem,
                                 const moelora_device_info *device, moelora_gemm_plan *plan) {
  const moelora_routes *routes = &problem->routes;
  moelora_access access = {.layer = false,
                           .format = moelora_kernel_format_of(problem->w.format, problem->w.x),
                           .x_rows = problem->x_per_row ? routes->num_rows : routes->num_tokens,
                           .x_stride = problem->x_stride,
                           .k = problem->w.k};
  access.vectors = moelora_is_vector_weights(&problem->w) &&
                   moelora_is_vector_row(problem->x, problem->x_stride, problem->w.k) &&
                   moelora_is_vector_row(problem->out, problem->out_stride[0], problem->w.n) &&
                   problem->out_stride[1] % 8 == 0;
  access.tma = access.vectors && moelora_are_map_weights(&problem->w, routes->num_experts);
  access.x_groups_of_64 = quantizes_by_64(&problem->w);
  *plan = (moelora_gemm_plan){0};
  MOELORA_TRY(moelora_check_kernel_limits(routes, &problem->lora, device));
  MOELORA_TRY(pick_variant(moelora_rows_per_expert(routes), problem->dtype, &access, device,
                           &plan->variant));
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  const moelora_variant *v = plan->variant;
  const moelora_factors lora =
      moelora_rounded(&problem->lora, problem->w.k, routes, problem->dtype, NULL);
  const moelora_projection_load load = {
      .routes = routes,
      .w = &problem->w,
      .lora = &lora,
      .x = problem->x,
      .x_stride = problem->x_stride,
      .x_rows_each = problem->x_per_row ? 1 : routes->top_k,
      .out = problem->out,
      .out_stride = {problem->out_stride[0], problem->out_stride[1]},
      .n_out = problem->w.n,
      .weighted = problem->mul_routed_weight,
  };
  plan->projection = moelora_plan_projection(&load, v, device);
  moelora_plan_blocks(routes, v->block_m, moelora_cluster_blocks(v), device, NULL, &plan->align);
  plan->shrink = moelora_plan_projection_shrink(&load, v, &plan->align, NULL, device);
  return MOELORA_OK;
}

/* Returns the tuned variant of one role of the layer if the device supports it, or NULL. */
static const moelora_variant *tuned_for(moelora_role role, const moelora_experts_problem *p,
                                        const moelora_device_info *device,
                                        const moelora_device_info *seen) {
  const moelora_variant *tuned = moelora_tuned_variant(p, seen, role);
  return tuned && moelora_variant_runs_on(tuned, device) ? tuned : NULL;
}

/* Returns the tuned variant if it suits the problem and `picked` is not forced, else `picked`. */
static const moelora_variant *prefer_tuned(const moelora_variant *tuned,
                                           const moelora_variant *picked,
                                           const moelora_access *access,
                                           const moelora_device_info *device) {
  return tuned && !moelora_is_forced(picked) && serves_request(tuned, access, device) &&
                 keeps_bits(tuned, picked, access, device)
             ? tuned
             : picked;
}

/* Plans the launches of a layer on a GPU; `gemm` is the kernel of w13. */
static void plan_around(const moelora_experts_problem *p, const moelora_variant *gemm,
                        const moelora_device_info *device, const moelora_device_info *seen,
                        moelora_experts_plan *plan) {
  const moelora_routes *routes = &p->routes;
  const moelora_factors w13_lora = moelora_rounded(&p->w13_lora, p->hidden, routes, p->dtype, NULL);
  const moelora_factors w2_lora =
      moelora_rounded(&p->w2_lora, p->intermediate, routes, p->dtype, NULL);
  const moelora_variant *tuned_shrink = tuned_for(MOELORA_ROLE_SHRINK, p, device, seen);
  const bool adapters = routes->token_lora_mapping.data && p->w2_lora.num_slices > 0;
  /* Hidden states times routing weights, h, and z are in the workspace. */
  plan->scales_x = p->apply_router_weight_on_input;
  const moelora_projection_load first = {
      .routes = routes,
      .w = &p->w13,
      .lora = &w13_lora,
      .x = plan->scales_x ? NULL : p->x,
      .x_stride = plan->scales_x ? p->hidden : p->x_stride,
      .x_rows_each = routes->top_k,
      .n_out = p->intermediate,
      .gated = moelora_is_gated(p->activation.kind),
      .interleaved = moelora_is_interleaved(p->activation.kind),
      .next = &p->w2,
      .next_reads_out = adapters,
  };
  plan->projection[0] = moelora_plan_projection(&first, gemm, device);
  const moelora_projection_load second = {
      .routes = routes,
      .w = &p->w2,
      .lora = &w2_lora,
      .x_stride = p->intermediate,
      .n_out = p->hidden,
      .x_is_quantized = plan->projection[0].stores_e4m3,
  };
  plan->projection[1] = moelora_plan_projection(&second, plan->w2, device);
  moelora_plan_blocks(routes, gemm->block_m, moelora_cluster_blocks(gemm), device,
                      tuned_for(MOELORA_ROLE_SORT, p, device, seen), &plan->align);
  plan->shrink[0] =
      moelora_plan_projection_shrink(&first, gemm, &plan->align, tuned_shrink, device);
  plan->shrink[1] =
      moelora_plan_projection_shrink(&second, gemm, &plan->align, tuned_shrink, device);
  /* In training, z is stored by flat row where the kernel of w2 can read it so: padding it to
   * blocks takes memory. */
  plan->z_by_row =
      p->saved.gate_up && (plan->w2->needs != MOELORA_SM90 || moelora_stores_by_row(plan->w2));
  plan->sum = moelora_plan_sum(p->dtype, moelora_is_vector_row(p->out, p->out_stride, p->hidden),
                               tuned_for(MOELORA_ROLE_SUM, p, device, seen), device);
}

moelora_factors moelora_rounded(const moelora_factors *factors, int64_t depth,
                                const moelora_routes *routes, moelora_dtype dtype,
                                moelora_arena *arena) {
  moelora_factors to = *factors;
  to.wide = false;
  for (int32_t i = 0; factors->wide && i < factors->num_slices; i++) {
    moelora_factor *both[] = {&to.a[i], &to.b[i]};
    for (int32_t j = 0; j < 2; j++) {
      const int64_t rows = j ? moelora_slice_columns(&to, i) : to.max_rank;
      const int64_t columns = j ? to.max_rank : depth;
      const int32_t experts = both[j]->stride_e ? routes->num_experts : 1;
      const size_t count = moelora_times(moelora_times((size_t)routes->max_loras, (size_t)experts),
                                         moelora_times((size_t)rows, (size_t)columns));
      *both[j] = (moelora_factor){
          .data = arena ? moelora_take_array(arena, count, moelora_dtype_bytes(dtype)) : NULL,
          .stride_l = experts * rows * columns,
          .stride_e = both[j]->stride_e ? rows * columns : 0,
          .stride_i = columns,
      };
    }
  }
  return to;
}

moelora_status moelora_plan_experts(const moelora_experts_problem *problem,
                                    const moelora_device_info *device, moelora_experts_plan *plan) {
  const moelora_activation activation = problem->activation.kind;
  const int32_t experts = problem->routes.num_experts;
  const bool saves = problem->saved.gate_up != NULL;
  moelora_access access = {.layer = true,
                           .saves = saves,
                           .format = moelora_kernel_format_of(problem->w13.format, problem->w13.x),
                           .x_rows = problem->routes.num_tokens,
                           .x_stride = problem->apply_router_weight_on_input ? problem->hidden
                                                                             : problem->x_stride,
                           .k = problem->hidden};
  access.second = moelora_kernel_format_of(problem->w2.format, problem->w2.x);
  access.vectors = moelora_is_vector_weights(&problem->w13) &&
                   moelora_is_vector_weights(&problem->w2) &&
                   moelora_is_vector_row(problem->x, problem->x_stride, problem->hidden) &&
                   (!saves || moelora_is_vector_row(problem->saved.gate_up,
                                                    problem->saved.gate_up_stride, problem->w13.n));
  /* A TMA box of packed rows is one tile, which must not mix gate and up rows. */
  access.tma = access.vectors && moelora_are_map_weights(&problem->w13, experts) &&
               moelora_are_map_weights(&problem->w2, experts) &&
               !(problem->w13.packed && moelora_is_gated(activation) &&
                 (moelora_is_interleaved(activation) || problem->intermediate % 64 != 0));
  access.x_groups_of_64 = quantizes_by_64(&problem->w13) || quantizes_by_64(&problem->w2);
  /* One kernel runs both projections, which therefore must have the same format. */
  access.decode = access.vectors && access.format == access.second &&
                  !problem->apply_router_weight_on_input &&
                  problem->routes.num_tokens <= MOELORA_DECODE_TOKENS &&
                  problem->routes.num_rows <= MOELORA_DECODE_ROWS;
  access.few = access.decode && is_few(&problem->routes, &access, device);
  const moelora_variant *picked;
  const int64_t rows = moelora_rows_per_expert(&problem->routes);
  MOELORA_TRY(moelora_check_kernel_limits(&problem->routes, &problem->w13_lora, device));
  MOELORA_TRY(moelora_check_kernel_limits(&problem->routes, &problem->w2_lora, device));
  MOELORA_TRY(pick_variant(rows, problem->dtype, &access, device, &picked));
  const moelora_device_info seen = moelora_limited(device);
  *plan = (moelora_experts_plan){0};
  plan->variant =
      prefer_tuned(tuned_for(MOELORA_ROLE_GEMM, problem, device, &seen), picked, &access, device);
  const moelora_variant *last = plan->variant;
  if (plan->variant->role == MOELORA_ROLE_LAYER) {
    access.decode = false;
    last = forced_for(problem->dtype, &access, device);
    if (!last)
      last = moelora_choose_tile(rows, problem->dtype, &access, device);
    if (!last)
      return refuse(problem->dtype, &access, device);
    plan->staged = last;
  }
  plan->w2 = moelora_tile_of_format(last, access.second, device);
  if (device->device == MOELORA_CUDA)
    plan_around(problem, last, device, &seen, plan);
  return MOELORA_OK;
}
