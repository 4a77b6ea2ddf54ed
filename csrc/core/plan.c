/* From a problem and a device to a kernel variant. A plan depends on shapes, dtype and device,
 * never on adapters: a base row must meet the same kernel whatever the batch carries. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "core/check.h"
#include "core/format.h"
#include "core/log.h"
#include "core/plan.h"

/* ---- forced variant, limit, log and last plan ---- */

static pthread_once_t environment_once = PTHREAD_ONCE_INIT;
static _Atomic(const moelora_variant *) forced_variant;
static _Atomic(bool) forced_unknown;      /* MOELORA_FORCE_VARIANT names nothing */
static _Atomic(int32_t) capability_limit; /* 0: none */
static _Atomic(bool) limit_unknown;       /* MOELORA_MAX_CC is no capability */

static bool is_capability(long value) {
  return value >= 80 && value < 1000;
}

static void read_environment(void) {
  const char *name = getenv("MOELORA_FORCE_VARIANT"), *most = getenv("MOELORA_MAX_CC");
  if (name && *name) {
    forced_variant = moelora_find_variant(name);
    forced_unknown = !forced_variant;
  }
  if (most && *most) {
    char *end;
    const long value = strtol(most, &end, 10);
    limit_unknown = *end != '\0' || !is_capability(value);
    capability_limit = limit_unknown ? 0 : (int32_t)value;
  }
}

moelora_status moelora_force_variant(const char *name) {
  moelora_clear_error();
  pthread_once(&environment_once, read_environment);
  const moelora_variant *variant = name ? moelora_find_variant(name) : NULL;
  MOELORA_REQUIRE(!name || variant, "variant '%s' does not exist", name);
  forced_variant = variant;
  forced_unknown = false;
  return MOELORA_OK;
}

moelora_status moelora_limit_capability(int32_t compute_capability) {
  moelora_clear_error();
  pthread_once(&environment_once, read_environment);
  MOELORA_REQUIRE(compute_capability == 0 || is_capability(compute_capability),
                  "compute_capability is %d, expected 80 or more, or 0", compute_capability);
  capability_limit = compute_capability;
  limit_unknown = false;
  return MOELORA_OK;
}

/* The kernels of this thread's last plan; text is made only when asked for. */
static _Thread_local struct last {
  const moelora_variant *gemm, *experts, *w2;
  const char *delta;
} last;

static const char *delta_kernels(const moelora_delta_plan *plan) {
  return plan->variant                  ? plan->variant->name
         : plan->family == MOELORA_SM90 ? "adapters_sm90"
                                        : "adapters_sm80";
}

const char *moelora_last_plan(void) {
  static _Thread_local char text[160];
  text[0] = '\0';
  if (last.gemm)
    snprintf(text, sizeof text, "w=%s", last.gemm->name);
  else if (last.experts)
    snprintf(text, sizeof text, "w13=%s w2=%s", last.experts->name, last.w2->name);
  else if (last.delta)
    snprintf(text, sizeof text, "delta=%s", last.delta);
  return text;
}

/* ---- choice ---- */

/* Shared memory that a CTA of a GPU of this capability may ask for: much on data-centre chips and
 * on the boards made like them. */
static int32_t shared_bytes_of(int32_t compute_capability) {
  bool large = compute_capability == 80 || compute_capability == 87;
  bool largest = compute_capability >= 90 && compute_capability < 120;
  return (largest ? 227 : large ? 163 : 99) * 1024;
}

/* The device that plans are for. */
static moelora_device_info limited(const moelora_device_info *device) {
  pthread_once(&environment_once, read_environment);
  moelora_device_info seen = *device;
  const int32_t limit = capability_limit;
  if (device->device == MOELORA_CUDA && limit && limit < device->compute_capability) {
    seen.compute_capability = limit;
    if (shared_bytes_of(limit) < seen.shared_bytes)
      seen.shared_bytes = shared_bytes_of(limit);
  }
  return seen;
}

/* The newest family whose kernels a GPU of this capability runs. */
static moelora_family family_of(int32_t compute_capability) {
  return compute_capability == 90 ? MOELORA_SM90 : MOELORA_SM80;
}

moelora_family moelora_family_of(const moelora_device_info *device) {
  const moelora_family own = family_of(device->compute_capability);
  return family_of(limited(device).compute_capability) == own ? own : MOELORA_SM80;
}

/* What the tile of an sm_80 kernel keeps in shared memory. */
static int32_t pipeline_bytes(const moelora_variant *v) {
  const int32_t tiles = v->block_n / MOELORA_PACK * (v->block_k / MOELORA_PACK);
  const int32_t weights = v->format == MOELORA_NATIVE ? v->block_n * v->block_k * 2
                                                      : tiles * moelora_most_tile_bytes(v->format);
  return v->stages * (weights + v->block_m * v->block_k * 2);
}

static bool has_family(const moelora_variant *variant, const moelora_device_info *device) {
  if (device->compute_capability < 80)
    return false;
  if (variant->needs != MOELORA_SM80)
    return variant->needs == (int32_t)family_of(device->compute_capability);
  return pipeline_bytes(variant) <= device->shared_bytes;
}

bool moelora_variant_runs_on(const moelora_variant *variant, const moelora_device_info *device) {
  if (variant->device != device->device)
    return false;
  if (variant->device == MOELORA_CPU)
    return (device->cpu_isa & (uint32_t)variant->needs) == (uint32_t)variant->needs;
  const moelora_device_info seen = limited(device);
  return has_family(variant, device) && has_family(variant, &seen);
}

/* Routed rows that an expert of this rank gets on average, at least 1. */
static int64_t rows_per_expert(const moelora_routes *routes) {
  int64_t everywhere =
      routes->num_global > routes->num_experts ? routes->num_global : routes->num_experts;
  return routes->num_rows > everywhere ? (routes->num_rows + everywhere - 1) / everywhere : 1;
}

/* The shape of a CUDA kernel that suits a load. */
typedef struct shape {
  int32_t block, cluster;
} shape;

/* From the average rows of an expert. Routing is uneven: a block, or a cluster of them, needs room
 * above the average to keep nearly every expert together, so that its weights are read once. The
 * bounds are where the times of two neighbours cross on an H200 (Qwen3-30B-A3B, Mixtral-8x7B,
 * DeepSeek-V2-Lite; `python -m moelora tune` finds them for another GPU). */
static shape pick_cuda_shape(int64_t rows) {
  static const struct {
    int64_t rows; /* up to this many per expert */
    shape shape;
  } table[] = {
      {8, {16, 1}},          /* nothing but weights moves */
      {26, {32, 1}},         /* a few experts read twice cost less than wider instructions */
      {44, {64, 1}},         /* Hopper has 96: two CTAs of 64 on an SM were slower */
      {80, {96, 1}},         /* the most tokens of which two CTAs fit an SM */
      {116, {128, 1}},       /* products begin to count: 256 weight rows by one reading of X */
      {INT64_MAX, {144, 2}}, /* products alone count: weights shared by multicast */
  };
  int32_t at = 0;
  while (rows > table[at].rows)
    at++;
  return table[at].shape;
}

/* Up to so many tokens, and so many rows of more than one, one launch is the faster one: on an H200
 * by 4 to 12 % without adapters, by 2 to 8 % with some of rank 16 (of rank 64, two tokens of top-8
 * take 5 % longer). Where experts are narrow and more rows bring more adapters, the adapters at the
 * end of each CTA decide, and six launches win. */
enum { FEW_TOKENS = 4, FEW_ROWS = 18 };

/* What a problem lets a CUDA kernel do, from shapes, strides and pointers of everything but
 * adapters: 16-byte accesses, boxes of 64 weight rows by TMA, the whole layer in one launch. */
typedef struct access {
  bool vectors, tma, decode;
  bool few;              /* tokens and rows, so that one launch is better than several */
  bool layer;            /* a whole layer, whose results lie as its kernels like them */
  moelora_format format; /* of weights, for which a kernel is written */
  moelora_format second; /* that of w2, where it is a layer */
} access;

/* One tensor map covers all experts: rows that lie apart, or tiles that lie together. */
static bool is_tma_weights(const moelora_weights *w) {
  const int64_t tile = MOELORA_PACK * MOELORA_PACK;
  if (w->format != MOELORA_NATIVE)
    return true;
  if (w->packed)
    return w->stride_kt == tile && w->stride_nt == w->k / MOELORA_PACK * tile &&
           w->stride_e == w->n / MOELORA_PACK * w->stride_nt;
  return w->stride_e > 0 && w->stride_n > 0;
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

/* The row that differs from `v` in nothing but the weight format; NULL: there is none. */
static const moelora_variant *of_format(const moelora_variant *v, moelora_format format) {
  const moelora_variant *other;
  if (v->device == MOELORA_CPU || v->format == format)
    return v;
  for (int32_t i = 0; (other = moelora_variant_at(i)); i++)
    if (other->format == format && other->device == v->device && other->dtype == v->dtype &&
        other->needs == v->needs && other->block_m == v->block_m && other->cluster == v->cluster &&
        !other->decode)
      return other;
  return NULL;
}

/* Results of a layer lie as its kernels like them. The largest of Hopper know no others: those that
 * share weights in a cluster, and those that make weights in registers. */
static bool takes_any_output(const moelora_variant *v) {
  return v->cluster == 1 && (v->format == MOELORA_NATIVE || v->block_n == 128);
}

/* Element by element, the tiles above 32 rows would spill registers: they have no such kernel. */
static bool serves(const moelora_variant *v, const access *access) {
  if (v->device == MOELORA_CPU)
    return true;
  if (v->format != access->format || (access->layer && !of_format(v, access->second)))
    return false;
  if (v->decode)
    return access->decode;
  if (v->needs == MOELORA_SM90)
    return access->tma && (access->layer || takes_any_output(v));
  return access->vectors || v->block_m <= 32;
}

/* For few tokens the whole layer; else the newest instruction set, or the GPU's own family before
 * the portable one, within it the shape nearest to `want`, where block 0 takes the last row. */
static const moelora_variant *choose(const moelora_device_info *device, moelora_dtype dtype,
                                     shape want, const access *access) {
  const moelora_variant *best = NULL, *v;
  for (int32_t i = 0; (v = moelora_variant_at(i)); i++) {
    if (v->dtype != dtype || !moelora_variant_runs_on(v, device))
      continue;
    if (!serves(v, access))
      continue;
    if (v->decode && access->few)
      return v;
    if (v->decode)
      continue;
    if (!best || v->needs > best->needs ||
        (v->needs == best->needs && (want.block == 0 || is_nearer(v, best, want))))
      best = v;
  }
  return best;
}

/* The forced variant if it serves, else the best of the table. */
static moelora_status pick_variant(const moelora_routes *routes, moelora_dtype dtype,
                                   const access *access, const moelora_device_info *device,
                                   const moelora_variant **picked) {
  pthread_once(&environment_once, read_environment);
  MOELORA_REQUIRE(!forced_unknown, "MOELORA_FORCE_VARIANT is '%s': no such variant",
                  getenv("MOELORA_FORCE_VARIANT"));
  MOELORA_REQUIRE(!limit_unknown, "MOELORA_MAX_CC is '%s', expected a number such as 80",
                  getenv("MOELORA_MAX_CC"));
  const moelora_variant *variant = forced_variant;
  if (!variant || variant->dtype != dtype || !moelora_variant_runs_on(variant, device) ||
      !serves(variant, access)) {
    const bool cuda = device->device == MOELORA_CUDA;
    variant = choose(device, dtype, cuda ? pick_cuda_shape(rows_per_expert(routes)) : (shape){0, 1},
                     access);
  }
  if (!variant && access->format != MOELORA_NATIVE)
    return moelora_fail(MOELORA_UNSUPPORTED,
                        "no %s kernel for %s weights and CUDA compute capability %d.%d",
                        moelora_dtype_name(dtype), moelora_format_name(access->format),
                        device->compute_capability / 10, device->compute_capability % 10);
  if (!variant && device->device == MOELORA_CUDA)
    return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for CUDA compute capability %d.%d",
                        moelora_dtype_name(dtype), device->compute_capability / 10,
                        device->compute_capability % 10);
  if (!variant)
    return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for this CPU",
                        moelora_dtype_name(dtype));
  *picked = variant;
  return MOELORA_OK;
}

moelora_status moelora_plan_gemm(const moelora_gemm_problem *problem,
                                 const moelora_device_info *device, moelora_gemm_plan *plan) {
  access access = {.layer = false, .format = moelora_kernel_format(problem->w.format)};
  access.vectors = moelora_is_vector_weights(&problem->w) &&
                   moelora_is_vector_row(problem->x, problem->x_stride, problem->w.k) &&
                   moelora_is_vector_row(problem->out, problem->out_stride[0], problem->w.n) &&
                   problem->out_stride[1] % 8 == 0;
  access.tma = access.vectors && is_tma_weights(&problem->w);
  return pick_variant(&problem->routes, problem->dtype, &access, device, &plan->variant);
}

/* What was measured goes before the table, and after a forced variant. */
static const moelora_variant *prefer_tuned(const moelora_variant *tuned,
                                           const moelora_variant *picked, const access *access,
                                           const moelora_device_info *device) {
  const bool better = tuned && picked != forced_variant && moelora_variant_runs_on(tuned, device) &&
                      serves(tuned, access);
  return better ? tuned : picked;
}

moelora_status moelora_plan_experts(const moelora_experts_problem *problem,
                                    const moelora_device_info *device, moelora_experts_plan *plan) {
  const moelora_activation activation = problem->activation.kind;
  access access = {.layer = true, .format = moelora_kernel_format(problem->w13.format)};
  access.second = moelora_kernel_format(problem->w2.format);
  access.vectors = moelora_is_vector_weights(&problem->w13) &&
                   moelora_is_vector_weights(&problem->w2) &&
                   moelora_is_vector_row(problem->x, problem->x_stride, problem->hidden);
  /* A box of packed rows is one tile: all of it gate rows or all of it up rows. */
  access.tma = access.vectors && is_tma_weights(&problem->w13) && is_tma_weights(&problem->w2) &&
               !(problem->w13.packed && moelora_is_gated(activation) &&
                 (moelora_is_interleaved(activation) || problem->intermediate % 64 != 0));
  access.decode = access.vectors && access.format == MOELORA_NATIVE &&
                  access.second == MOELORA_NATIVE && !problem->w13.packed && !problem->w2.packed &&
                  !problem->apply_router_weight_on_input &&
                  problem->routes.num_tokens <= MOELORA_DECODE_TOKENS &&
                  problem->routes.num_rows <= MOELORA_DECODE_ROWS;
  access.few = access.decode && problem->routes.num_tokens <= FEW_TOKENS &&
               (problem->routes.num_tokens == 1 || problem->routes.num_rows <= FEW_ROWS);
  const moelora_variant *picked;
  MOELORA_TRY(pick_variant(&problem->routes, problem->dtype, &access, device, &picked));
  const moelora_device_info seen = limited(device);
  *plan = (moelora_experts_plan){0};
  plan->variant = prefer_tuned(moelora_tuned_variant(problem, &seen), picked, &access, device);
  const moelora_variant *last = plan->variant;
  if (plan->variant->decode) {
    access.decode = false;
    last = plan->staged =
        choose(&seen, problem->dtype, pick_cuda_shape(rows_per_expert(&problem->routes)), &access);
  }
  plan->w2 = of_format(last, access.second);
  /* Rows that wait for their sum do so in float32, so that the sum alone rounds, where they are
   * few; elsewhere their traffic would cost a twentieth to a fifth of the layer. */
  plan->partial_f32 = device->device == MOELORA_CPU || last->block_m <= MOELORA_FLOAT_ROWS;
  return MOELORA_OK;
}

moelora_status moelora_plan_delta(const moelora_routes *routes, moelora_dtype dtype,
                                  const moelora_device_info *device, moelora_delta_plan *plan) {
  *plan = (moelora_delta_plan){0};
  if (device->device == MOELORA_CPU) {
    const access any = {.vectors = true};
    return pick_variant(routes, dtype, &any, device, &plan->variant);
  }
  if (dtype == MOELORA_F32 || device->compute_capability < 80)
    return moelora_fail(MOELORA_UNSUPPORTED, "no %s kernel for CUDA compute capability %d.%d",
                        moelora_dtype_name(dtype), device->compute_capability / 10,
                        device->compute_capability % 10);
  plan->family = moelora_family_of(device);
  return MOELORA_OK;
}

/* ---- log ---- */

/* variant: NULL where none is of the table. */
static void log_plan(const char *operator, const char *shape, moelora_dtype dtype,
                     const moelora_routes *routes, const moelora_device_info *device,
                     const char *kernels, const moelora_variant *variant,
                     const moelora_variant *tuned) {
  const int32_t capability = limited(device).compute_capability;
  char where[48], blocks[32] = "";
  if (capability != device->compute_capability)
    snprintf(where, sizeof where, "sm_%d as sm_%d, %d SMs", device->compute_capability, capability,
             device->num_units);
  else if (device->device == MOELORA_CUDA)
    snprintf(where, sizeof where, "sm_%d, %d SMs", device->compute_capability, device->num_units);
  else
    snprintf(where, sizeof where, "isa %#x, %d threads", device->cpu_isa, device->num_units);
  if (variant)
    snprintf(blocks, sizeof blocks, ", blocks of %d rows", variant->block_m);
  const char *why = !variant                    ? ""
                    : variant == forced_variant ? "; forced"
                    : variant == tuned          ? "; tuned"
                                                : "";
  fprintf(stderr, "moelora: %s %s M=%lld top_k=%d E=%d %s: %s%s (%s; %lld rows per expert%s)\n",
          operator, moelora_dtype_name(dtype), (long long)routes->num_tokens, routes->top_k,
          routes->num_experts, shape, kernels, blocks, where, (long long)rows_per_expert(routes),
          why);
}

void moelora_note_gemm(const moelora_gemm_problem *problem, const moelora_device_info *device,
                       const moelora_gemm_plan *plan) {
  last = (struct last){.gemm = plan->variant};
  if (moelora_log() < MOELORA_LOG_PLAN)
    return;
  char shape[64];
  snprintf(shape, sizeof shape, "N=%lld K=%lld", (long long)problem->w.n, (long long)problem->w.k);
  log_plan("gemm", shape, problem->dtype, &problem->routes, device, plan->variant->name,
           plan->variant, NULL);
}

void moelora_note_experts(const moelora_experts_problem *problem, const moelora_device_info *device,
                          const moelora_experts_plan *plan) {
  last = (struct last){.experts = plan->variant,
                       .w2 = plan->variant->decode ? plan->variant : plan->w2};
  if (moelora_log() < MOELORA_LOG_PLAN)
    return;
  char shape[64];
  snprintf(shape, sizeof shape, "K=%lld I=%lld", (long long)problem->hidden,
           (long long)problem->intermediate);
  const moelora_device_info seen = limited(device);
  log_plan("experts", shape, problem->dtype, &problem->routes, device, plan->variant->name,
           plan->variant, moelora_tuned_variant(problem, &seen));
}

void moelora_note_delta(const char *operator, const moelora_routes *routes, moelora_dtype dtype,
                        const moelora_device_info *device, const moelora_delta_plan *plan) {
  last = (struct last){.delta = delta_kernels(plan)};
  if (moelora_log() < MOELORA_LOG_PLAN)
    return;
  char shape[32];
  snprintf(shape, sizeof shape, "max_loras=%d", routes->max_loras);
  log_plan(operator, shape, dtype, routes, device, last.delta, plan->variant, NULL);
}
