/* Reports plans: for moelora_last_plan and for MOELORA_LOG=plan. */
#include <stdarg.h>
#include <stdio.h>

#include "core/check.h"
#include "core/log.h"
#include "core/plan.h"

/* Names a kernel and its operation: "w13", "shrink2". */
typedef struct named {
  const char *what, *kernel;
} named;

enum { MAX_KERNELS = 12 };

/* The kernels of this thread's last plan. Only moelora_last_plan and the log format them. */
static _Thread_local struct last {
  named kernels[MAX_KERNELS];
  int32_t count;
} last;

static void name(const char *what, const char *kernel) {
  if (last.count < MAX_KERNELS)
    last.kernels[last.count++] = (named){what, kernel};
}

static void name_variant(const char *what, const moelora_variant *variant) {
  if (variant)
    name(what, variant->name);
}

/* Clears the last plan and records the first kernel of a new one. */
static void begin(const char *what, const char *kernel) {
  last.count = 0;
  name(what, kernel);
}

static void name_sorts(const moelora_align_plan *plan) {
  name_variant("sort_tokens", plan->tokens.variant);
  name_variant("sort", plan->rows.variant);
}

/* Formats the kernels from index `from` on as "what=kernel", separated by spaces. */
static const char *list_kernels(char *text, size_t size, int32_t from) {
  size_t used = 0;
  text[0] = '\0';
  for (int32_t i = from; i < last.count && used < size; i++)
    used += (size_t)snprintf(text + used, size - used, "%s%s=%s", used ? " " : "",
                             last.kernels[i].what, last.kernels[i].kernel);
  return text;
}

enum { MAX_TEXT = 512 };

const char *moelora_last_plan(void) {
  static _Thread_local char text[MAX_TEXT];
  return list_kernels(text, sizeof text, 0);
}

/* Logs the first line of a call, and returns whether the launches on a GPU follow. `shape` formats
 * the sizes a and b. variant: the kernel whose block size the alignment has; NULL: none. named: how
 * many of the first recorded kernels are printed as one, by the name of the first. */
static bool log_plan(const char *operator, const char *shape, int64_t a, int64_t b,
                     const char *dtype, const moelora_routes *routes,
                     const moelora_device_info *device, int32_t named,
                     const moelora_variant *variant, const moelora_variant *tuned) {
  if (moelora_log() < MOELORA_LOG_PLAN)
    return false;
  const int32_t capability = moelora_limited(device).compute_capability;
  char where[48], blocks[32] = "", sizes[64], more[MAX_TEXT];
  snprintf(sizes, sizeof sizes, shape, (long long)a, (long long)b);
  if (capability != device->compute_capability)
    snprintf(where, sizeof where, "sm_%d as sm_%d, %d SMs", device->compute_capability, capability,
             device->num_units);
  else if (device->device == MOELORA_CUDA)
    snprintf(where, sizeof where, "sm_%d, %d SMs", device->compute_capability, device->num_units);
  else
    snprintf(where, sizeof where, "isa %#x, %d threads", device->cpu_isa, device->num_units);
  if (variant)
    snprintf(blocks, sizeof blocks, ", blocks of %d rows", variant->block_m);
  const char *why = moelora_is_forced(variant)    ? "; forced"
                    : variant && variant == tuned ? "; tuned"
                                                  : "";
  const char *kernels = named ? last.kernels[0].kernel : "";
  list_kernels(more, sizeof more, named);
  fprintf(stderr,
          "moelora: %s%s%s M=%lld top_k=%d E=%d %s: %s%s%s%s (%s; %lld rows per expert%s)\n",
          operator, *dtype ? " " : "", dtype, (long long)routes->num_tokens, routes->top_k,
          routes->num_experts, sizes, kernels, *kernels && *more ? " " : "", more, blocks, where,
          (long long)moelora_rows_per_expert(routes), why);
  return device->device == MOELORA_CUDA;
}

void moelora_log_passed_over(const moelora_variant *variant, const char *why) {
  if (moelora_log() >= MOELORA_LOG_PLAN)
    fprintf(stderr, "moelora: %s is passed over: %s\n", variant->name, why);
}

/* ---- launches of a call, one line each, in order ---- */

/* Logs a part of a call and its launch parameters: "what: key=value ...". */
static void log_part(const char *what, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void log_part(const char *what, const char *format, ...) {
  char text[MAX_TEXT];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  fprintf(stderr, "moelora:   %s: %s\n", what, text);
}

static void log_sort(const char *what, const moelora_sort_plan *plan) {
  if (plan->variant)
    log_part(what, "%s ctas=%u items=%u table_rows=%u chunks_of_row=%u table_bytes=%zu",
             plan->variant->name, plan->num_chunks, plan->chunk_items, plan->num_rows,
             plan->row_chunks, plan->table_bytes);
}

/* Logs the launch that resolves the caller's tables. */
static void log_resolve(bool resolves, const moelora_routes *routes) {
  if (resolves)
    log_part("resolve", "rows=%lld", (long long)routes->num_rows);
}

static void log_align(const moelora_align_plan *plan) {
  log_sort("sort_tokens", &plan->tokens);
  log_sort("sort", &plan->rows);
  if (plan->segments)
    log_part("segments", "listed=%lld", (long long)plan->segments);
  if (plan->list_parts)
    log_part("lists", "parts=%d", plan->list_parts);
}

static void log_shrink(const char *what, const moelora_shrink_plan *plan) {
  if (plan->variant)
    log_part(
        what,
        "%s part=%d shares=%d group=%d listed=%d few=%d by_adapter=%d window=%d span=%d work=%lld",
        plan->variant->name, plan->part, plan->shares, plan->group, plan->listed, plan->few,
        plan->by_adapter, plan->window, plan->span, (long long)plan->work);
}

static void log_expand(const char *what, const moelora_expand_plan *plan) {
  if (plan->variant)
    log_part(what, "%s part=%d tiles=%d shares=%d window=%d waves=%d work=%lld",
             plan->variant->name, plan->part, plan->tiles, plan->shares, plan->window, plan->waves,
             (long long)plan->work);
}

static void log_projection(const char *what, const moelora_variant *variant,
                           const moelora_projection_plan *plan) {
  static const char *const epilogues[] = {[MOELORA_EPILOGUE_GENERAL] = "general",
                                          [MOELORA_EPILOGUE_PLAIN] = "plain",
                                          [MOELORA_EPILOGUE_GATED] = "gated"};
  static const char *const grids[] = {[MOELORA_GRID_OVERLAPPED] = "overlapped",
                                      [MOELORA_GRID_SPREAD] = "spread"};
  log_part(what,
           "%s epilogue=%s grid=%s vectors=%d a_vectors=%d b_vectors=%d b_boxes=%d "
           "quantizes_x=%d quantizes_vectors=%d stores_e4m3=%d stores_out=%d counters=%lld "
           "l2_elements=%d weights_again=%d run=%d",
           variant->name, epilogues[plan->epilogue], grids[plan->grid], plan->vectors,
           plan->a_vectors, plan->b_vectors, plan->b_boxes, plan->quantizes_x,
           plan->quantizes_vectors, plan->stores_e4m3, plan->stores_out,
           (long long)plan->num_counters, plan->l2_elements, plan->weights_again, plan->run);
}

static void note_align(const moelora_routes *routes, const moelora_device_info *device,
                       const moelora_align_plan *plan) {
  if (!plan->rows.variant)
    return;
  last.count = 0;
  name_sorts(plan);
  if (!log_plan("align", "max_loras=%lld", routes->max_loras, 0, "", routes, device, 0, NULL, NULL))
    return;
  log_resolve(plan->resolves, routes);
  log_align(plan);
}

void moelora_note_align(const moelora_align_problem *problem, const moelora_device_info *device,
                        const moelora_align_plan *plan) {
  note_align(&problem->routes, device, plan);
}

void moelora_note_align_lists(const moelora_align_lists_problem *problem,
                              const moelora_device_info *device, const moelora_align_plan *plan) {
  note_align(&problem->routes, device, plan);
}

void moelora_note_gemm(const moelora_gemm_problem *problem, const moelora_device_info *device,
                       const moelora_gemm_plan *plan) {
  begin("w", plan->variant->name);
  name_variant("shrink", plan->shrink.variant);
  name_sorts(&plan->align);
  if (!log_plan("gemm", "N=%lld K=%lld", problem->w.n, problem->w.k,
                moelora_dtype_name(problem->dtype), &problem->routes, device, 1, plan->variant,
                NULL))
    return;
  log_resolve(plan->align.resolves, &problem->routes);
  log_align(&plan->align);
  log_part("zero_skipped", "rows=%lld", (long long)problem->routes.num_rows);
  log_shrink("shrink", &plan->shrink);
  log_projection("w", plan->variant, &plan->projection);
}

void moelora_note_experts(const moelora_experts_problem *problem, const moelora_device_info *device,
                          const moelora_experts_plan *plan) {
  begin("w13", plan->variant->name);
  name_variant("w2", plan->staged ? plan->variant : plan->w2);
  if (plan->variant->role == MOELORA_ROLE_GEMM) {
    name_variant("shrink13", plan->shrink[0].variant);
    name_variant("shrink2", plan->shrink[1].variant);
    name_sorts(&plan->align);
    name_variant("sum", plan->sum);
  }
  const moelora_device_info seen = moelora_limited(device);
  const bool is_logged = moelora_log() >= MOELORA_LOG_PLAN;
  if (!log_plan("experts", "K=%lld I=%lld", problem->hidden, problem->intermediate,
                moelora_dtype_name(problem->dtype), &problem->routes, device,
                plan->staged || plan->w2 == plan->variant ? 2 : 1, plan->variant,
                is_logged ? moelora_tuned_variant(problem, &seen, MOELORA_ROLE_GEMM) : NULL))
    return;
  const moelora_variant *w13 = plan->staged ? plan->staged : plan->variant;
  if (plan->staged)
    log_part("layer",
             "%s in one launch; where its CTAs do not fit the context:", plan->variant->name);
  log_resolve(plan->align.resolves, &problem->routes);
  log_align(&plan->align);
  if (plan->scales_x)
    log_part("scale_x", "rows=%lld", (long long)problem->routes.num_tokens);
  log_shrink("shrink13", &plan->shrink[0]);
  log_projection("w13", w13, &plan->projection[0]);
  log_shrink("shrink2", &plan->shrink[1]);
  log_projection("w2", plan->w2, &plan->projection[1]);
  if (plan->sum)
    log_part("sum", "%s by_row=%d", plan->sum->name, plan->z_by_row);
}

static void log_back_product(const char *what, const moelora_back_product_plan *product) {
  log_part(what,
           "%s vectors=%d a_vectors=%d shrinks_vectors=%d counters=%lld l2_elements=%d "
           "weights_again=%d",
           product->variant->name, product->vectors, product->a_vectors, product->shrinks_vectors,
           (long long)product->num_counters, product->l2_elements, product->weights_again);
}

void moelora_note_gemm_backward(const moelora_gemm_backward_problem *problem,
                                const moelora_device_info *device,
                                const moelora_gemm_backward_plan *plan) {
  begin("backward", plan->variant->name);
  if (device->device == MOELORA_CUDA) {
    name_variant("shrink", plan->shrink.variant);
    name_sorts(&plan->align);
    name_variant("sum", plan->sum);
  }
  const moelora_gemm_problem *forward = &problem->forward;
  if (!log_plan("gemm_backward", "N=%lld K=%lld", forward->w.n, forward->w.k,
                moelora_dtype_name(forward->dtype), &forward->routes, device, 1, plan->variant,
                NULL))
    return;
  log_align(&plan->align);
  if (plan->copies_dout)
    log_part("copy_dout", "rows=%lld", (long long)forward->routes.num_rows);
  log_back_product("w", &plan->product);
  log_shrink("shrink", &plan->shrink);
  if (plan->sum)
    log_part("sum", "%s", plan->sum->name);
}

void moelora_note_experts_backward(const moelora_experts_backward_problem *problem,
                                   const moelora_device_info *device,
                                   const moelora_backward_plan *plan) {
  begin("backward", plan->variant->name);
  if (device->device == MOELORA_CUDA) {
    name_sorts(&plan->align);
    name_variant("sum", plan->sum);
  }
  const moelora_experts_problem *forward = &problem->forward;
  if (!log_plan("experts_backward", "K=%lld I=%lld", forward->hidden, forward->intermediate,
                moelora_dtype_name(forward->dtype), &forward->routes, device, 1, plan->variant,
                NULL))
    return;
  log_align(&plan->align);
  log_back_product("w2", &plan->product[0]);
  log_back_product("w13", &plan->product[1]);
  log_part("sum", "%s", plan->sum->name);
}

static void note_delta(const char *operator, const moelora_delta_problem *problem,
                       const moelora_device_info *device, const moelora_delta_plan *plan) {
  const moelora_routes *routes = &problem->routes;
  static const char *const shrinks[] = {"shrink", "shrink2"}, *const expands[] = {"expand",
                                                                                  "expand2"};
  const char *kernels = plan->variant                  ? plan->variant->name
                        : plan->family == MOELORA_SM90 ? "adapters_sm90"
                                                       : "adapters_sm80";
  begin("delta", kernels);
  for (int32_t i = 0; i < 2; i++) {
    name_variant(shrinks[i], plan->shrink[i].variant);
    name_variant(expands[i], plan->expand[i].variant);
  }
  name_sorts(&plan->align);
  name_variant("sum", plan->sum);
  if (!log_plan(operator, "max_loras=%lld", routes->max_loras, 0,
                moelora_dtype_name(problem->dtype), routes, device, 1, plan->variant, NULL))
    return;
  static const char *const orders[] = {[MOELORA_BY_ROUTE] = "by_route",
                                       [MOELORA_GROUPED] = "grouped",
                                       [MOELORA_SORTED] = "sorted",
                                       [MOELORA_LISTED] = "listed"};
  log_resolve(true, routes);
  log_part("rows", "order=%s xa_vectors=%d", orders[plan->order], plan->xa_vectors);
  log_align(&plan->align);
  for (int32_t i = 0; i < 2; i++) {
    log_shrink(shrinks[i], &plan->shrink[i]);
    log_expand(expands[i], &plan->expand[i]);
  }
  if (plan->sum)
    log_part("sum", "%s", plan->sum->name);
}

void moelora_note_delta(const moelora_delta_problem *problem, const moelora_device_info *device,
                        const moelora_delta_plan *plan) {
  note_delta("delta", problem, device, plan);
}

void moelora_note_mlp_delta(const moelora_mlp_delta_problem *problem,
                            const moelora_device_info *device, const moelora_delta_plan *plan) {
  note_delta("mlp_delta", &problem->of[1], device, plan);
}
