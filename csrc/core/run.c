/* Public operators: validate, plan, run. */
#include "core/check.h"
#include "core/format.h"
#include "core/plan.h"

#include <stdio.h>

/* Sizes that determine a workspace, with their names in moelora.h; 0: not used. */
typedef struct named_size {
  const char *name;
  int64_t value;
} named_size;

enum { MAX_SIZES = 8 };

/* Refuses workspaces that exceed any memory, instead of returning a meaningless size. */
static moelora_status check_addressable(size_t workspace, const moelora_routes *routes,
                                        const named_size *more, int32_t count) {
  if (workspace <= (size_t)MOELORA_MAX_BYTES)
    return MOELORA_OK;
  named_size sizes[MAX_SIZES] = {
      {"M", routes->num_tokens},
      {"top_k", routes->top_k},
      {"E", routes->num_experts},
      {"max_loras", routes->max_loras},
  };
  for (int32_t i = 0; i < count; i++)
    sizes[4 + i] = more[i];
  char text[256] = "";
  size_t used = 0;
  for (int32_t i = 0; i < MAX_SIZES && used < sizeof text; i++)
    if (sizes[i].value)
      used += (size_t)snprintf(text + used, sizeof text - used, "%s%s is %lld", used ? ", " : "",
                               sizes[i].name, (long long)sizes[i].value);
  return moelora_fail(MOELORA_INVALID_ARGUMENT,
                      "%s: too large, the workspace would take more than 2^56 bytes", text);
}

/* ---- operators: validate, plan, query the size of the workspace ---- */

/* State of a prepared call. Uninitialized memory is unlikely to hold the last two values. */
typedef enum call_state {
  CALL_REFUSED = 0,
  CALL_EMPTY = 0x6d6f6501, /* nothing to do */
  CALL_READY = 0x6d6f6502,
} call_state;

/* Checked and planned. */
typedef struct prepared {
  call_state state;
  const moelora_backend *backend;
  moelora_device_info device;
  moelora_exec sized_for; /* its workspace is NULL: returns the required size */
  moelora_status (*launch)(const struct prepared *call, const moelora_exec *exec);
  union {
    struct {
      moelora_align_problem problem;
      moelora_align_plan plan;
    } align;
    struct {
      moelora_gemm_problem problem;
      moelora_gemm_plan plan;
    } gemm;
    struct {
      moelora_gemm_backward_problem problem;
      moelora_gemm_backward_plan plan;
    } gemm_backward;
    struct {
      moelora_experts_problem problem;
      moelora_experts_plan plan;
    } experts;
    struct {
      moelora_experts_backward_problem problem;
      moelora_backward_plan plan;
    } experts_backward;
    struct {
      moelora_align_lists_problem problem;
      moelora_align_plan plan;
    } align_lists;
    struct {
      moelora_delta_problem problem;
      moelora_delta_plan plan;
    } delta;
    struct {
      moelora_mlp_delta_problem problem;
      moelora_delta_plan plan;
    } mlp_delta;
    moelora_pack_problem pack;
    moelora_quantized_problem quantized;
  } of;
} prepared;

_Static_assert(sizeof(prepared) <= sizeof(((moelora_call *)NULL)->state), "a call has the room");
_Static_assert(_Alignof(prepared) <= _Alignof(moelora_call), "a call is where its state is");

static moelora_status begin(const void *args, const moelora_exec *exec, moelora_call *call,
                            prepared **prepared) {
  moelora_clear_error();
  if (call) {
    call->workspace_bytes = 0;
    *prepared = (void *)call->state;
    (*prepared)->state = CALL_REFUSED;
  }
  MOELORA_REQUIRE(args && exec, "args or exec is NULL");
  MOELORA_REQUIRE(call, "call is NULL");
  MOELORA_REQUIRE(exec->num_threads >= 0, "exec.num_threads is %d, expected 0 or more",
                  exec->num_threads);
  (*prepared)->sized_for = *exec;
  (*prepared)->sized_for.workspace = NULL;
  (*prepared)->sized_for.workspace_bytes = 0;
  return moelora_find_device(exec, &(*prepared)->backend, &(*prepared)->device);
}

static moelora_status unsupported(const prepared *call, const char *name) {
  return moelora_fail(MOELORA_UNSUPPORTED, "%s is not supported on %s", name, call->backend->name);
}

static moelora_status nothing_to_do(prepared *p) {
  p->state = CALL_EMPTY;
  return MOELORA_OK;
}

/* Completes a prepared call with its workspace size and launcher. */
static moelora_status finish(moelora_call *call, prepared *p, size_t workspace,
                             moelora_status (*launch)(const prepared *, const moelora_exec *),
                             const moelora_routes *routes, const named_size *sizes, int32_t count) {
  MOELORA_TRY(check_addressable(workspace, routes, sizes, count));
  call->workspace_bytes = workspace;
  p->launch = launch;
  p->state = CALL_READY;
  return MOELORA_OK;
}

/* finish() for a layer, forward or backward. */
static moelora_status finish_layer(moelora_call *call, prepared *p, size_t workspace,
                                   moelora_status (*launch)(const prepared *, const moelora_exec *),
                                   const moelora_experts_problem *forward) {
  const named_size sizes[] = {
      {"K", forward->hidden},
      {"I", forward->intermediate},
      {"R of w13", forward->w13_lora.max_rank},
      {"R of w2", forward->w2_lora.max_rank},
  };
  return finish(call, p, workspace, launch, &forward->routes, sizes, 4);
}

/* Alignment runs for an empty batch too, as its outputs must be filled. */

static moelora_status launch_align(const prepared *call, const moelora_exec *exec) {
  moelora_note_align(&call->of.align.problem.routes, &call->device, &call->of.align.plan);
  return call->backend->align(&call->of.align.problem, &call->of.align.plan, exec);
}

moelora_status moelora_prepare_align(const moelora_align_args *args, const moelora_exec *exec,
                                     moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_align_problem *problem = &p->of.align.problem;
  MOELORA_TRY(moelora_check_align(args, problem));
  if (!p->backend->align)
    return unsupported(p, "moelora_align");
  moelora_align_plan *plan = &p->of.align.plan;
  MOELORA_TRY(moelora_plan_align(problem, &p->device, plan));
  return finish(call, p, p->backend->align_workspace(problem, plan, &p->sized_for), launch_align,
                &problem->routes, NULL, 0);
}

static moelora_status check_built(const moelora_variant *variant) {
  if (!variant || moelora_is_built(variant))
    return MOELORA_OK;
  return moelora_fail(MOELORA_UNSUPPORTED,
                      "%s is not built: MOELORA_VARIANTS left it out of this build; build without "
                      "it, or force a variant that is there (MOELORA_FORCE_VARIANT)",
                      variant->name);
}

static moelora_status launch_gemm(const prepared *call, const moelora_exec *exec) {
  moelora_note_gemm(&call->of.gemm.problem, &call->device, &call->of.gemm.plan);
  return call->backend->gemm(&call->of.gemm.problem, &call->of.gemm.plan, exec);
}

moelora_status moelora_prepare_gemm(const moelora_gemm_args *args, const moelora_exec *exec,
                                    moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_gemm_problem *problem = &p->of.gemm.problem;
  moelora_gemm_plan *plan = &p->of.gemm.plan;
  MOELORA_TRY(moelora_check_gemm(args, problem));
  if (problem->routes.num_rows == 0)
    return nothing_to_do(p);
  if (!p->backend->gemm)
    return unsupported(p, "moelora_gemm");
  MOELORA_TRY(moelora_plan_gemm(problem, &p->device, plan));
  MOELORA_TRY(check_built(plan->variant));
  const named_size sizes[] = {
      {"N", problem->w.n}, {"K", problem->w.k}, {"R", problem->lora.max_rank}};
  return finish(call, p, p->backend->gemm_workspace(problem, plan, &p->sized_for), launch_gemm,
                &problem->routes, sizes, 3);
}

static moelora_status launch_experts(const prepared *call, const moelora_exec *exec) {
  moelora_note_experts(&call->of.experts.problem, &call->device, &call->of.experts.plan);
  return call->backend->experts(&call->of.experts.problem, &call->of.experts.plan, exec);
}

moelora_status moelora_prepare_experts(const moelora_experts_args *args, const moelora_exec *exec,
                                       moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_experts_problem *problem = &p->of.experts.problem;
  moelora_experts_plan *plan = &p->of.experts.plan;
  MOELORA_TRY(moelora_check_experts(args, problem));
  if (problem->routes.num_rows == 0)
    return nothing_to_do(p);
  if (!p->backend->experts)
    return unsupported(p, "moelora_experts");
  MOELORA_TRY(moelora_plan_experts(problem, &p->device, plan));
  const moelora_variant *const needed[] = {plan->variant, plan->w2, plan->staged};
  for (int32_t i = 0; i < 3; i++)
    MOELORA_TRY(check_built(needed[i]));
  return finish_layer(call, p, p->backend->experts_workspace(problem, plan, &p->sized_for),
                      launch_experts, problem);
}

static moelora_status launch_experts_backward(const prepared *call, const moelora_exec *exec) {
  const moelora_experts_backward_problem *problem = &call->of.experts_backward.problem;
  moelora_note_experts_backward(problem, &call->device, &call->of.experts_backward.plan);
  return call->backend->experts_backward(problem, &call->of.experts_backward.plan, exec);
}

/* An empty batch runs too: gradients of factors are zero. */
moelora_status moelora_prepare_experts_backward(const moelora_experts_backward_args *args,
                                                const moelora_exec *exec, moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_experts_backward_problem *problem = &p->of.experts_backward.problem;
  moelora_backward_plan *plan = &p->of.experts_backward.plan;
  MOELORA_TRY(moelora_check_experts_backward(args, problem));
  if (!p->backend->experts_backward)
    return unsupported(p, "moelora_experts_backward");
  MOELORA_TRY(moelora_plan_experts_backward(problem, &p->device, plan));
  for (int32_t i = 0; i < 2; i++)
    MOELORA_TRY(check_built(plan->product[i].variant));
  return finish_layer(call, p, p->backend->experts_backward_workspace(problem, plan, &p->sized_for),
                      launch_experts_backward, &problem->forward);
}

static moelora_status launch_gemm_backward(const prepared *call, const moelora_exec *exec) {
  const moelora_gemm_backward_problem *problem = &call->of.gemm_backward.problem;
  moelora_note_gemm_backward(problem, &call->device, &call->of.gemm_backward.plan);
  return call->backend->gemm_backward(problem, &call->of.gemm_backward.plan, exec);
}

moelora_status moelora_prepare_gemm_backward(const moelora_gemm_backward_args *args,
                                             const moelora_exec *exec, moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_gemm_backward_problem *problem = &p->of.gemm_backward.problem;
  moelora_gemm_backward_plan *plan = &p->of.gemm_backward.plan;
  MOELORA_TRY(moelora_check_gemm_backward(args, problem));
  if (!p->backend->gemm_backward)
    return unsupported(p, "moelora_gemm_backward");
  MOELORA_TRY(moelora_plan_gemm_backward(problem, &p->device, plan));
  MOELORA_TRY(check_built(plan->variant));
  const named_size sizes[] = {{"N", problem->forward.w.n},
                              {"K", problem->forward.w.k},
                              {"R", problem->forward.lora.max_rank}};
  return finish(call, p, p->backend->gemm_backward_workspace(problem, plan, &p->sized_for),
                launch_gemm_backward, &problem->forward.routes, sizes, 3);
}

static moelora_status launch_align_lists(const prepared *call, const moelora_exec *exec) {
  moelora_note_align(&call->of.align_lists.problem.routes, &call->device,
                     &call->of.align_lists.plan);
  return call->backend->align_lists(&call->of.align_lists.problem, &call->of.align_lists.plan,
                                    exec);
}

moelora_status moelora_prepare_align_lists(const moelora_align_lists_args *args,
                                           const moelora_exec *exec, moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_align_lists_problem *problem = &p->of.align_lists.problem;
  MOELORA_TRY(moelora_check_align_lists(args, problem));
  if (!p->backend->align_lists)
    return unsupported(p, "moelora_align_lists");
  moelora_align_plan *plan = &p->of.align_lists.plan;
  MOELORA_TRY(moelora_plan_align_lists(problem, &p->device, plan));
  return finish(call, p, p->backend->align_lists_workspace(problem, plan, &p->sized_for),
                launch_align_lists, &problem->routes, NULL, 0);
}

static moelora_status launch_delta(const prepared *call, const moelora_exec *exec) {
  const moelora_delta_problem *problem = &call->of.delta.problem;
  moelora_note_delta("delta", &problem->routes, problem->dtype, &call->device,
                     &call->of.delta.plan);
  return call->backend->delta(problem, &call->of.delta.plan, exec);
}

moelora_status moelora_prepare_delta(const moelora_delta_args *args, const moelora_exec *exec,
                                     moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_delta_problem *problem = &p->of.delta.problem;
  moelora_delta_plan *plan = &p->of.delta.plan;
  MOELORA_TRY(moelora_check_delta(args, problem));
  const bool any = problem->lists.sorted_token_ids
                       ? problem->lists.num_active > 0
                       : problem->routes.token_lora_mapping.data != NULL;
  if (!any || problem->routes.num_rows == 0)
    return nothing_to_do(p);
  if (!p->backend->delta)
    return unsupported(p, "moelora_delta");
  MOELORA_TRY(moelora_plan_delta(problem, &p->device, plan));
  const named_size sizes[] = {
      {"K", problem->k}, {"columns", problem->columns}, {"R", problem->lora.max_rank}};
  return finish(call, p, p->backend->delta_workspace(problem, plan, &p->sized_for), launch_delta,
                &problem->routes, sizes, 3);
}

static moelora_status launch_mlp_delta(const prepared *call, const moelora_exec *exec) {
  const moelora_mlp_delta_problem *problem = &call->of.mlp_delta.problem;
  moelora_note_delta("mlp_delta", &problem->routes, problem->dtype, &call->device,
                     &call->of.mlp_delta.plan);
  return call->backend->mlp_delta(problem, &call->of.mlp_delta.plan, exec);
}

moelora_status moelora_prepare_mlp_delta(const moelora_mlp_delta_args *args,
                                         const moelora_exec *exec, moelora_call *call) {
  prepared *p = NULL;
  MOELORA_TRY(begin(args, exec, call, &p));
  moelora_mlp_delta_problem *problem = &p->of.mlp_delta.problem;
  moelora_delta_plan *plan = &p->of.mlp_delta.plan;
  MOELORA_TRY(moelora_check_mlp_delta(args, problem));
  if (!problem->routes.token_lora_mapping.data || problem->routes.num_rows == 0)
    return nothing_to_do(p);
  if (!p->backend->mlp_delta)
    return unsupported(p, "moelora_mlp_delta");
  MOELORA_TRY(moelora_plan_mlp_delta(problem, &p->device, plan));
  const named_size sizes[] = {
      {"K", problem->hidden},
      {"I", problem->intermediate},
      {"R of gate_up", problem->gate_up.max_rank},
      {"R of down", problem->down.max_rank},
  };
  return finish(call, p, p->backend->mlp_delta_workspace(problem, plan, &p->sized_for),
                launch_mlp_delta, &problem->routes, sizes, 4);
}

/* ---- running ---- */

/* The size of a workspace depends on the device and the number of threads. */
static moelora_status check_same_device(const prepared *p, const moelora_exec *exec) {
  const moelora_exec *sized = &p->sized_for;
  MOELORA_REQUIRE(exec->device == sized->device && exec->device_index == sized->device_index,
                  "exec is device %d, index %d; the call was prepared for device %d, index %d",
                  (int)exec->device, exec->device_index, (int)sized->device, sized->device_index);
  MOELORA_REQUIRE(moelora_workers(exec) <= moelora_workers(sized),
                  "exec.parallel_for runs %d threads, the call was prepared for %d: give "
                  "moelora_prepare_* the parallel_for and num_threads of moelora_run",
                  moelora_workers(exec), moelora_workers(sized));
  return MOELORA_OK;
}

static moelora_status check_workspace(const moelora_exec *exec, size_t want) {
  if (want && (!exec->workspace || exec->workspace_bytes < want))
    return moelora_fail(MOELORA_WORKSPACE_TOO_SMALL,
                        "the workspace has %zu bytes, expected at least %zu",
                        exec->workspace ? exec->workspace_bytes : 0, want);
  MOELORA_REQUIRE(!want || (uintptr_t)exec->workspace % 256 == 0,
                  "the workspace starts at %p, expected a multiple of 256 bytes", exec->workspace);
  return MOELORA_OK;
}

static moelora_status launch_on_device(const prepared *p, const moelora_exec *exec) {
  int32_t outer = 0;
  MOELORA_TRY(p->backend->enter(exec->device_index, &outer));
  const moelora_status launched = p->launch(p, exec);
  const moelora_status left = p->backend->leave(exec->device_index, outer);
  return launched != MOELORA_OK ? launched : left;
}

moelora_status moelora_run(const moelora_call *call, const moelora_exec *exec) {
  moelora_clear_error();
  MOELORA_REQUIRE(call && exec, "call or exec is NULL");
  const prepared *p = (const void *)call->state;
  if (p->state == CALL_EMPTY)
    return MOELORA_OK;
  MOELORA_REQUIRE(p->state == CALL_READY,
                  "the call is not prepared: moelora_prepare_* was not called, or refused it");
  MOELORA_TRY(check_same_device(p, exec));
  MOELORA_TRY(check_workspace(exec, call->workspace_bytes));
  return launch_on_device(p, exec);
}

/* ---- packing: prepared and run in one call, without a workspace ---- */

static moelora_status launch_pack(const prepared *call, const moelora_exec *exec) {
  return call->backend->pack(&call->of.pack, exec);
}

moelora_status moelora_pack_weights(const moelora_tensor *w, const moelora_tensor *out,
                                    const moelora_exec *exec) {
  moelora_call call;
  prepared *p = NULL;
  MOELORA_TRY(begin(w, exec, &call, &p));
  MOELORA_REQUIRE(out, "out is NULL");
  MOELORA_TRY(moelora_check_pack(w, out, &p->of.pack));
  if (!p->backend->pack)
    return unsupported(p, "moelora_pack_weights");
  p->launch = launch_pack;
  return launch_on_device(p, exec);
}

int32_t moelora_tile_bytes(moelora_format format) {
  return moelora_is_format(format) ? moelora_tile_size(format) : 0;
}

static moelora_status launch_pack_quantized(const prepared *call, const moelora_exec *exec) {
  return call->backend->pack_quantized(&call->of.quantized, exec);
}

moelora_status moelora_pack_quantized(const moelora_quantized *w, const moelora_layout *layout,
                                      moelora_dtype dtype, const moelora_tensor *tiles,
                                      const moelora_exec *exec) {
  moelora_call call;
  prepared *p = NULL;
  MOELORA_TRY(begin(w, exec, &call, &p));
  MOELORA_REQUIRE(tiles, "tiles is NULL");
  MOELORA_TRY(moelora_check_pack_quantized(w, layout, dtype, tiles, &p->of.quantized));
  if (!p->backend->pack_quantized)
    return unsupported(p, "moelora_pack_quantized");
  p->launch = launch_pack_quantized;
  return launch_on_device(p, exec);
}

static moelora_status launch_unpack_quantized(const prepared *call, const moelora_exec *exec) {
  return call->backend->unpack_quantized(&call->of.quantized, exec);
}

moelora_status moelora_unpack_quantized(const moelora_tensor *tiles, const moelora_layout *layout,
                                        const moelora_tensor *out, const moelora_exec *exec) {
  moelora_call call;
  prepared *p = NULL;
  MOELORA_TRY(begin(tiles, exec, &call, &p));
  MOELORA_REQUIRE(out, "out is NULL");
  MOELORA_TRY(moelora_check_unpack_quantized(tiles, layout, out, &p->of.quantized));
  if (!p->backend->unpack_quantized)
    return unsupported(p, "moelora_unpack_quantized");
  p->launch = launch_unpack_quantized;
  return launch_on_device(p, exec);
}
