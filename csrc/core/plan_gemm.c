/* From a problem and a device to the kernels of a projection or a layer. Those of the base product
 * depend on shapes, dtype and device; whichever they are, a row has the same bits. */
#include <math.h>

#include "core/check.h"
#include "core/format.h"
#include "core/plan.h"

/* Routed rows that an expert of this rank gets on average, at least 1. */
int64_t moelora_rows_per_expert(const moelora_routes *routes) {
  int64_t everywhere =
      routes->num_global > routes->num_experts ? routes->num_global : routes->num_experts;
  return routes->num_rows > everywhere ? moelora_divide_up(routes->num_rows, everywhere) : 1;
}

double moelora_expected_pairs(const moelora_routes *routes, int32_t adapters) {
  const double pool = (double)routes->num_experts * adapters;
  return pool > 0 ? pool * (1.0 - exp(-(double)routes->num_rows / pool)) : 0.0;
}

/* The shape of a CUDA kernel that suits a load. */
typedef struct shape {
  int32_t block, cluster;
} shape;

/* A shape for up to so many rows of an expert on average. */
typedef struct shape_bound {
  int64_t rows;
  shape shape;
} shape_bound;

/* From the average rows of an expert. Routing is uneven: a block, or a cluster of them, needs room
 * above the average to keep nearly every expert together, so that its weights are read once. The
 * bounds are where the times of two neighbours cross on an H200 (Qwen3-30B-A3B, Mixtral-8x7B,
 * DeepSeek-V2-Lite; `python -m moelora tune` finds them for another GPU). */
static const shape_bound native_shapes[] = {
    {8, {16, 1}},          /* nothing but weights moves */
    {26, {32, 1}},         /* a few experts read twice cost less than wider instructions */
    {44, {64, 1}},         /* Hopper has 96: two CTAs of 64 on an SM were slower */
    {80, {96, 1}},         /* the most tokens of which two CTAs fit an SM */
    {116, {128, 1}},       /* products begin to count: 256 weight rows by one reading of X */
    {INT64_MAX, {144, 2}}, /* products alone count: weights shared by multicast */
};

/* Of quantised weights, which are made anew for each block: that is what an expert in two blocks
 * costs, and more than wider instructions do (gpt-oss-20b, Qwen3-30B-A3B, Mixtral-8x7B). With 144
 * tokens nearly every expert of 128 rows on average has one block, and one of 256 has two. */
static const shape_bound quantised_shapes[] = {
    {8, {16, 1}},  {26, {32, 1}},   {44, {64, 1}},
    {82, {96, 1}}, {112, {128, 1}}, {INT64_MAX, {144, 1}},
};

/* Of FP8 weights and tokens (Qwen3-30B-A3B, Mixtral): with weights as operand A a second
 * accumulator and scales leave no room for more than 96 tokens. Where these are operand A, 128 take
 * a fifth less time, but come 64 at a time and leave more to be done behind a tile's depth: that
 * pays where one tile holds most experts, whatever few rows others have beyond, or two tiles of 96
 * no longer hold nearly every expert. Where they do, they share what they read of its weights. Of
 * 32 tokens an expert on average some have more. */
static const shape_bound w8a8_shapes[] = {
    {8, {16, 1}},    {26, {32, 1}},  {44, {64, 1}},         {80, {96, 1}},
    {108, {128, 2}}, {176, {96, 2}}, {INT64_MAX, {128, 2}},
};

/* What a problem lets a CUDA kernel do, from shapes, strides and pointers of everything but
 * adapters: 16-byte accesses, boxes of 64 weight rows by TMA, the whole layer in one launch. */
typedef struct access {
  bool vectors, tma, decode;
  bool few;       /* tokens and rows, so that one launch is better than several */
  bool layer;     /* a whole layer, whose results lie as its kernels like them */
  int64_t x_rows; /* of x, so far apart; FP8 ones lie in the workspace */
  int64_t x_stride, k;
  moelora_kernel_format format;
  moelora_kernel_format second; /* that of w2, where it is a layer */
  bool halves; /* some FP8 scales are of 64 of depth, for which Hopper has no kernel */
} access;

/* Up to so many tokens, and so many rows of more than one, one launch is the faster one (measured on
 * an H100 with Qwen3-30B-A3B and Mixtral). With adapters, which come at the end of each product,
 * several launches are, from two tokens on; with Hopper's kernels for quantized weights from one. */
enum { FEW_TOKENS = 2, FEW_ROWS = 18 };

static bool is_few(const moelora_experts_problem *p, const access *access,
                   const moelora_device_info *device) {
  const moelora_routes *routes = &p->routes;
  if (!moelora_is_native_kernel(access->format))
    return routes->num_tokens == 1 && !(access->tma && moelora_family_of(device) == MOELORA_SM90);
  const bool adapters =
      routes->token_lora_mapping.data && p->w13_lora.num_slices + p->w2_lora.num_slices > 0;
  return routes->num_tokens == 1 ||
         (!adapters && routes->num_tokens <= FEW_TOKENS && routes->num_rows <= FEW_ROWS);
}

static shape pick_cuda_shape(int64_t rows, const access *access) {
  const bool native =
      moelora_is_native_kernel(access->format) && moelora_is_native_kernel(access->second);
  const shape_bound *bound = native                                   ? native_shapes
                             : moelora_is_e4m3_kernel(access->format) ? w8a8_shapes
                                                                      : quantised_shapes;
  while (rows > bound->rows)
    bound++;
  return bound->shape;
}

/* One tensor map covers all experts: rows that lie apart, or tiles that lie together. Of quantised
 * weights one copy covers tiles of neighbouring depth. */
static bool is_tma_weights(const moelora_weights *w, int32_t num_experts) {
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

/* Nearest to the wanted block, a larger one before a smaller one; of these the wanted cluster. */
static bool is_nearer(const moelora_variant *v, const moelora_variant *best, shape want) {
  const int32_t candidate = v->block_m, known = best->block_m;
  if (candidate == known)
    return v->cluster == want.cluster && best->cluster != want.cluster;
  if ((candidate >= want.block) != (known >= want.block))
    return candidate >= want.block;
  return candidate >= want.block ? candidate < known : candidate > known;
}

/* The row that differs from `v` in nothing but the weight format, and runs on the device; NULL:
 * there is none. */
static const moelora_variant *of_format(const moelora_variant *v, moelora_kernel_format format,
                                        const moelora_device_info *device) {
  const moelora_variant *other;
  if (v->device == MOELORA_CPU || v->format == format)
    return v;
  for (int32_t i = 0; (other = moelora_variant_at(i)); i++)
    if (other->role == v->role && other->format == format && other->dtype == v->dtype &&
        other->needs == v->needs && other->block_m == v->block_m && other->cluster == v->cluster &&
        moelora_variant_runs_on(other, device))
      return other;
  return NULL;
}

/* Results of a layer lie as its kernels like them. The largest of Hopper know no others: those that
 * share weights in a cluster, and those that make weights in registers. */
static bool takes_any_output(const moelora_variant *v) {
  return v->cluster == 1 && (moelora_is_native_kernel(v->format) || v->block_n == 128);
}

/* Hopper's kernels count all 16 bytes of an x that they gather in 32 bits, portable ones the
 * elements from row to row. */
static bool reaches_rows(const moelora_variant *v, const access *access) {
  const bool sm90 = v->needs == MOELORA_SM90;
  int64_t stride = access->x_stride;
  if (moelora_is_e4m3_kernel(v->format))
    stride = moelora_divide_up(access->k, 128) * (sm90 ? 64 : 128);
  return sm90 ? access->x_rows * (stride / 8) <= UINT32_MAX : stride <= INT32_MAX;
}

/* Why a row of the table cannot run a problem; NULL: it can. */
static const char *why_not(const moelora_variant *v, const access *access,
                           const moelora_device_info *device) {
  if (v->device == MOELORA_CPU)
    return NULL;
  if (v->format != access->format)
    return "it is for weights of another format";
  if (access->layer && !of_format(v, access->second, device))
    return "no row like it is for the format of w2";
  if (v->role == MOELORA_ROLE_LAYER)
    return access->decode ? NULL : "it takes a few tokens of a whole layer in rows or tiles alone";
  if (!reaches_rows(v, access))
    return "its offsets do not reach all rows of x";
  if (v->needs == MOELORA_SM90) {
    if (!access->tma)
      return "no tensor map covers the weights, or something allows no 16-byte accesses";
    if (access->halves)
      return "it takes no FP8 scales of 64 columns";
    return access->layer || takes_any_output(v) ? NULL : "it stores outputs of whole layers alone";
  }
  /* Element by element, larger tiles would spill registers. */
  return access->vectors || v->block_m <= 32 ? NULL : "something allows no 16-byte accesses";
}

static bool serves(const moelora_variant *v, const access *access,
                   const moelora_device_info *device) {
  return !why_not(v, access, device);
}

/* The same of a row that somebody wants, who learns why it is passed over. */
static bool serves_as_wanted(const moelora_variant *v, const access *access,
                             const moelora_device_info *device) {
  const char *why = why_not(v, access, device);
  if (why)
    moelora_log_passed_over(v, why);
  return !why;
}

/* For few tokens the whole layer; else the newest instruction set, or the GPU's own family before
 * the portable one, within it the shape nearest to `want`, where block 0 takes the last row. */
static const moelora_variant *choose(const moelora_device_info *device, moelora_dtype dtype,
                                     shape want, const access *access) {
  const moelora_variant *best = NULL, *v;
  for (int32_t i = 0; (v = moelora_variant_at(i)); i++) {
    const bool layer = v->role == MOELORA_ROLE_LAYER;
    if (!layer && v->role != MOELORA_ROLE_GEMM)
      continue;
    if (v->dtype != dtype || !moelora_variant_runs_on(v, device) || !serves(v, access, device))
      continue;
    if (layer && access->few)
      return v;
    if (layer)
      continue;
    if (!best || v->needs > best->needs ||
        (v->needs == best->needs && (want.block == 0 || is_nearer(v, best, want))))
      best = v;
  }
  return best;
}

/* A forced layer or projection if it serves. */
static const moelora_variant *forced_for(moelora_dtype dtype, const access *access,
                                         const moelora_device_info *device) {
  static const moelora_role roles[] = {MOELORA_ROLE_LAYER, MOELORA_ROLE_GEMM};
  for (int32_t i = 0; i < 2; i++) {
    const moelora_variant *variant = moelora_forced(roles[i], dtype, device);
    if (variant && serves_as_wanted(variant, access, device))
      return variant;
  }
  return NULL;
}

static moelora_status refuse(moelora_dtype dtype, const access *access,
                             const moelora_device_info *device) {
  if (device->device == MOELORA_CUDA && dtype != MOELORA_F32 && access->x_stride > INT32_MAX)
    return moelora_fail(
        MOELORA_UNSUPPORTED, "rows of %s are %lld elements apart: the GPU kernels take at most %d",
        access->layer ? "hidden_states" : "x", (long long)access->x_stride, INT32_MAX);
  if (device->device == MOELORA_CUDA && !moelora_is_native_kernel(access->format))
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "no %s kernel for %s weights and CUDA compute capability %d.%d",
                        moelora_dtype_name(dtype), moelora_kernel_name(access->format),
                        device->compute_capability / 10, device->compute_capability % 10);
  if (device->device == MOELORA_CUDA)
    return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for CUDA compute capability %d.%d",
                        moelora_dtype_name(dtype), device->compute_capability / 10,
                        device->compute_capability % 10);
  return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for this CPU", moelora_dtype_name(dtype));
}

/* mma.sync and wgmma add up FP8 products otherwise: all calls stay with one of them. */
static bool adds_up_alike(const moelora_variant *v, const moelora_variant *usual,
                          const access *access, const moelora_device_info *device) {
  const bool fp8 = moelora_is_e4m3_kernel(access->format) || moelora_is_e4m3_kernel(access->second);
  return !(fp8 && device->device == MOELORA_CUDA) || !usual || v->needs == usual->needs;
}

/* The forced variant if it serves, else the best of the table. */
static moelora_status pick_variant(int64_t rows, moelora_dtype dtype, const access *access,
                                   const moelora_device_info *device,
                                   const moelora_variant **picked) {
  MOELORA_TRY(moelora_check_told());
  const bool cuda = device->device == MOELORA_CUDA;
  const moelora_variant *forced = forced_for(dtype, access, device);
  *picked = choose(device, dtype, cuda ? pick_cuda_shape(rows, access) : (shape){0, 1}, access);
  if (forced && adds_up_alike(forced, *picked, access, device))
    *picked = forced;
  return *picked ? MOELORA_OK : refuse(dtype, access, device);
}

moelora_status moelora_plan_cpu(moelora_dtype dtype, const moelora_device_info *device,
                                const moelora_variant **picked) {
  const access any = {.vectors = true};
  return pick_variant(1, dtype, &any, device, picked);
}

/* What every kernel of a layer or a projection, and the sort before it, has room for. */
static moelora_status check_room(const moelora_routes *routes, const moelora_factors *lora,
                                 const moelora_device_info *device) {
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  if (lora->num_slices > 0 && lora->max_rank >= MOELORA_RANKS)
    return moelora_fail(MOELORA_UNSUPPORTED, "rank %d: the GPU kernels take ranks below %d",
                        lora->max_rank, MOELORA_RANKS);
  return moelora_check_sort(MOELORA_ALIGN_SEGMENTED, routes);
}

/* ---- what goes with a projection ---- */

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
  access access = {.layer = false,
                   .format = moelora_kernel_format_of(problem->w.format, problem->w.x),
                   .x_rows = problem->x_per_row ? routes->num_rows : routes->num_tokens,
                   .x_stride = problem->x_stride,
                   .k = problem->w.k};
  access.vectors = moelora_is_vector_weights(&problem->w) &&
                   moelora_is_vector_row(problem->x, problem->x_stride, problem->w.k) &&
                   moelora_is_vector_row(problem->out, problem->out_stride[0], problem->w.n) &&
                   problem->out_stride[1] % 8 == 0;
  access.tma = access.vectors && is_tma_weights(&problem->w, routes->num_experts);
  access.halves = moelora_x_group(problem->w.format) == 64;
  *plan = (moelora_gemm_plan){0};
  MOELORA_TRY(check_room(routes, &problem->lora, device));
  MOELORA_TRY(pick_variant(moelora_rows_per_expert(routes), problem->dtype, &access, device,
                           &plan->variant));
  if (device->device == MOELORA_CPU)
    return MOELORA_OK;
  const moelora_variant *v = plan->variant;
  const moelora_projection_load load = {
      .routes = routes,
      .w = &problem->w,
      .lora = &problem->lora,
      .x = problem->x,
      .x_stride = problem->x_stride,
      .x_rows_each = problem->x_per_row ? 1 : routes->top_k,
      .out = problem->out,
      .out_stride = {problem->out_stride[0], problem->out_stride[1]},
      .n_out = problem->w.n,
      .weighted = problem->mul_routed_weight,
  };
  plan->projection = moelora_plan_projection(&load, v, device);
  moelora_plan_blocks(routes, v->block_m, moelora_blocks_together(v), device, NULL, &plan->align);
  plan->shrink = moelora_plan_projection_shrink(&load, v, &plan->align, NULL, device);
  return MOELORA_OK;
}

/* What was measured to be best for a part of the layer, if this device runs it; NULL: nothing. */
static const moelora_variant *tuned_for(moelora_role role, const moelora_experts_problem *p,
                                        const moelora_device_info *device,
                                        const moelora_device_info *seen) {
  const moelora_variant *tuned = moelora_tuned_variant(p, seen, role);
  return tuned && moelora_variant_runs_on(tuned, device) ? tuned : NULL;
}

/* What was measured goes before the table, and after a forced variant. */
static const moelora_variant *prefer_tuned(const moelora_variant *tuned,
                                           const moelora_variant *picked, const access *access,
                                           const moelora_device_info *device) {
  return tuned && !moelora_is_forced(picked) && serves_as_wanted(tuned, access, device) &&
                 adds_up_alike(tuned, picked, access, device)
             ? tuned
             : picked;
}

/* All around the projections of a layer, which `gemm` serves. */
static void plan_around(const moelora_experts_problem *p, const moelora_variant *gemm,
                        const moelora_device_info *device, const moelora_device_info *seen,
                        moelora_experts_plan *plan) {
  const moelora_routes *routes = &p->routes;
  const moelora_variant *tuned_shrink = tuned_for(MOELORA_ROLE_SHRINK, p, device, seen);
  const bool adapters = routes->token_lora_mapping.data && p->w2_lora.num_slices > 0;
  /* Scaled hidden states, h, and the outputs of both lie in the workspace. */
  plan->scales_x = p->apply_router_weight_on_input;
  const moelora_projection_load first = {
      .routes = routes,
      .w = &p->w13,
      .lora = &p->w13_lora,
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
      .lora = &p->w2_lora,
      .x_stride = p->intermediate,
      .n_out = p->hidden,
      .x_is_quantized = plan->projection[0].stores_e4m3,
  };
  plan->projection[1] = moelora_plan_projection(&second, plan->w2, device);
  moelora_plan_blocks(routes, gemm->block_m, moelora_blocks_together(gemm), device,
                      tuned_for(MOELORA_ROLE_SORT, p, device, seen), &plan->align);
  plan->shrink[0] =
      moelora_plan_projection_shrink(&first, gemm, &plan->align, tuned_shrink, device);
  plan->shrink[1] =
      moelora_plan_projection_shrink(&second, gemm, &plan->align, tuned_shrink, device);
  plan->sum = moelora_plan_sum(p->dtype, moelora_is_vector_row(p->out, p->out_stride, p->hidden),
                               tuned_for(MOELORA_ROLE_SUM, p, device, seen), device);
}

moelora_status moelora_plan_experts(const moelora_experts_problem *problem,
                                    const moelora_device_info *device, moelora_experts_plan *plan) {
  const moelora_activation activation = problem->activation.kind;
  const int32_t experts = problem->routes.num_experts;
  access access = {.layer = true,
                   .format = moelora_kernel_format_of(problem->w13.format, problem->w13.x),
                   .x_rows = problem->routes.num_tokens,
                   .x_stride =
                       problem->apply_router_weight_on_input ? problem->hidden : problem->x_stride,
                   .k = problem->hidden};
  access.second = moelora_kernel_format_of(problem->w2.format, problem->w2.x);
  access.vectors = moelora_is_vector_weights(&problem->w13) &&
                   moelora_is_vector_weights(&problem->w2) &&
                   moelora_is_vector_row(problem->x, problem->x_stride, problem->hidden);
  /* A box of packed rows is one tile: all of it gate rows or all of it up rows. */
  access.tma = access.vectors && is_tma_weights(&problem->w13, experts) &&
               is_tma_weights(&problem->w2, experts) &&
               !(problem->w13.packed && moelora_is_gated(activation) &&
                 (moelora_is_interleaved(activation) || problem->intermediate % 64 != 0));
  access.halves =
      moelora_x_group(problem->w13.format) == 64 || moelora_x_group(problem->w2.format) == 64;
  /* One kernel takes both projections, natively in rows. */
  access.decode = access.vectors && access.format == access.second &&
                  !problem->w13.packed && !problem->w2.packed &&
                  !problem->apply_router_weight_on_input &&
                  problem->routes.num_tokens <= MOELORA_DECODE_TOKENS &&
                  problem->routes.num_rows <= MOELORA_DECODE_ROWS;
  access.few = access.decode && is_few(problem, &access, device);
  const moelora_variant *picked;
  const int64_t rows = moelora_rows_per_expert(&problem->routes);
  MOELORA_TRY(check_room(&problem->routes, &problem->w13_lora, device));
  MOELORA_TRY(check_room(&problem->routes, &problem->w2_lora, device));
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
      last = choose(&seen, problem->dtype, pick_cuda_shape(rows, &access), &access);
    if (!last)
      return refuse(problem->dtype, &access, device);
    plan->staged = last;
  }
  plan->w2 = of_format(last, access.second, device);
  if (device->device == MOELORA_CUDA)
    plan_around(problem, last, device, &seen, plan);
  return MOELORA_OK;
}
