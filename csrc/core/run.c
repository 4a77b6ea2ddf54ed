/* The public operators: check, plan, hand over. */
#include "core/check.h"
#include "core/plan.h"

#include <stdio.h>

/* One call on its way: where it runs and with what. */
typedef struct call {
  const moelora_backend *backend;
  moelora_device_info device;
} call;

static moelora_status begin(const void *args, const moelora_exec *exec, call *call) {
  moelora_clear_error();
  MOELORA_REQUIRE(args && exec, "args or exec is NULL");
  MOELORA_REQUIRE(exec->num_threads >= 0, "exec.num_threads is %d, expected 0 or more",
                  exec->num_threads);
  return moelora_find_device(exec, &call->backend, &call->device);
}

static moelora_status unsupported(const call *call, const char *name) {
  return moelora_fail(MOELORA_UNSUPPORTED, "%s is not supported on %s", name, call->backend->name);
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

/* What a workspace grows with, under the names of moelora.h; a value of 0 plays no part. */
typedef struct named_size {
  const char *name;
  int64_t value;
} named_size;

enum { MAX_SIZES = 8 };

/* Keeps what no memory can hold from the caller, who could not tell it from a size. */
static moelora_status check_addressable(size_t *workspace, const moelora_routes *routes,
                                        const named_size *more, int32_t count) {
  if (*workspace <= (size_t)MOELORA_MAX_BYTES)
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
  *workspace = 0;
  return moelora_fail(MOELORA_INVALID_ARGUMENT,
                      "%s: too large, the workspace would take more than 2^56 bytes", text);
}

/* ---- alignment; runs for an empty batch too, as its outputs must be filled ---- */

static moelora_status begin_align(const moelora_align_args *args, const moelora_exec *exec,
                                  call *call, moelora_align_problem *problem, size_t *workspace) {
  MOELORA_TRY(begin(args, exec, call));
  MOELORA_TRY(moelora_check_align(args, problem));
  if (!call->backend->align)
    return unsupported(call, "moelora_align");
  *workspace = call->backend->align_workspace(problem);
  return check_addressable(workspace, &problem->routes, NULL, 0);
}

moelora_status moelora_align_workspace_size(const moelora_align_args *args,
                                            const moelora_exec *exec, size_t *bytes) {
  call call;
  moelora_align_problem problem;
  *bytes = 0;
  return begin_align(args, exec, &call, &problem, bytes);
}

moelora_status moelora_align(const moelora_align_args *args, const moelora_exec *exec) {
  call call;
  moelora_align_problem problem;
  size_t workspace = 0;
  MOELORA_TRY(begin_align(args, exec, &call, &problem, &workspace));
  MOELORA_TRY(check_workspace(exec, workspace));
  return call.backend->align(&problem, exec);
}

/* ---- one projection ---- */

/* An empty batch needs no plan: `plan` stays without a variant. */
static moelora_status begin_gemm(const moelora_gemm_args *args, const moelora_exec *exec,
                                 call *call, moelora_gemm_problem *problem, moelora_gemm_plan *plan,
                                 size_t *workspace) {
  *plan = (moelora_gemm_plan){0};
  *workspace = 0;
  MOELORA_TRY(begin(args, exec, call));
  MOELORA_TRY(moelora_check_gemm(args, problem));
  if (problem->routes.num_rows == 0)
    return MOELORA_OK;
  if (!call->backend->gemm)
    return unsupported(call, "moelora_gemm");
  MOELORA_TRY(moelora_plan_gemm(problem, &call->device, plan));
  *workspace = call->backend->gemm_workspace(problem, plan, exec);
  const named_size sizes[] = {
      {"N", problem->w.n}, {"K", problem->w.k}, {"R", problem->lora.max_rank}};
  return check_addressable(workspace, &problem->routes, sizes, 3);
}

moelora_status moelora_gemm_workspace_size(const moelora_gemm_args *args, const moelora_exec *exec,
                                           size_t *bytes) {
  call call;
  moelora_gemm_problem problem;
  moelora_gemm_plan plan;
  return begin_gemm(args, exec, &call, &problem, &plan, bytes);
}

moelora_status moelora_gemm(const moelora_gemm_args *args, const moelora_exec *exec) {
  call call;
  moelora_gemm_problem problem;
  moelora_gemm_plan plan;
  size_t workspace = 0;
  MOELORA_TRY(begin_gemm(args, exec, &call, &problem, &plan, &workspace));
  if (!plan.variant)
    return MOELORA_OK;
  MOELORA_TRY(check_workspace(exec, workspace));
  moelora_note_gemm(&problem, &call.device, &plan);
  return call.backend->gemm(&problem, &plan, exec);
}

/* ---- the whole layer ---- */

static moelora_status begin_experts(const moelora_experts_args *args, const moelora_exec *exec,
                                    call *call, moelora_experts_problem *problem,
                                    moelora_experts_plan *plan, size_t *workspace) {
  *plan = (moelora_experts_plan){0};
  *workspace = 0;
  MOELORA_TRY(begin(args, exec, call));
  MOELORA_TRY(moelora_check_experts(args, problem));
  if (problem->routes.num_rows == 0)
    return MOELORA_OK;
  if (!call->backend->experts)
    return unsupported(call, "moelora_experts");
  MOELORA_TRY(moelora_plan_experts(problem, &call->device, plan));
  *workspace = call->backend->experts_workspace(problem, plan, exec);
  const named_size sizes[] = {
      {"K", problem->hidden},
      {"I", problem->intermediate},
      {"R of w13", problem->w13_lora.max_rank},
      {"R of w2", problem->w2_lora.max_rank},
  };
  return check_addressable(workspace, &problem->routes, sizes, 4);
}

moelora_status moelora_experts_workspace_size(const moelora_experts_args *args,
                                              const moelora_exec *exec, size_t *bytes) {
  call call;
  moelora_experts_problem problem;
  moelora_experts_plan plan;
  return begin_experts(args, exec, &call, &problem, &plan, bytes);
}

moelora_status moelora_experts(const moelora_experts_args *args, const moelora_exec *exec) {
  call call;
  moelora_experts_problem problem;
  moelora_experts_plan plan;
  size_t workspace = 0;
  MOELORA_TRY(begin_experts(args, exec, &call, &problem, &plan, &workspace));
  if (!plan.w13.variant)
    return MOELORA_OK;
  MOELORA_TRY(check_workspace(exec, workspace));
  moelora_note_experts(&problem, &call.device, &plan);
  return call.backend->experts(&problem, &plan, exec);
}

/* ---- adapters alone ---- */

static moelora_status begin_align_lists(const moelora_align_lists_args *args,
                                        const moelora_exec *exec, call *call,
                                        moelora_align_lists_problem *problem, size_t *workspace) {
  *workspace = 0;
  MOELORA_TRY(begin(args, exec, call));
  MOELORA_TRY(moelora_check_align_lists(args, problem));
  if (!call->backend->align_lists)
    return unsupported(call, "moelora_align_lists");
  *workspace = call->backend->align_lists_workspace(problem);
  return check_addressable(workspace, &problem->routes, NULL, 0);
}

moelora_status moelora_align_lists_workspace_size(const moelora_align_lists_args *args,
                                                  const moelora_exec *exec, size_t *bytes) {
  call call;
  moelora_align_lists_problem problem;
  return begin_align_lists(args, exec, &call, &problem, bytes);
}

moelora_status moelora_align_lists(const moelora_align_lists_args *args, const moelora_exec *exec) {
  call call;
  moelora_align_lists_problem problem;
  size_t workspace;
  MOELORA_TRY(begin_align_lists(args, exec, &call, &problem, &workspace));
  MOELORA_TRY(check_workspace(exec, workspace));
  return call.backend->align_lists(&problem, exec);
}

/* `plan` stays empty where no row can have an adapter. */
static moelora_status begin_delta(const moelora_delta_args *args, const moelora_exec *exec,
                                  call *call, moelora_delta_problem *problem,
                                  moelora_delta_plan *plan, size_t *workspace) {
  *plan = (moelora_delta_plan){0};
  *workspace = 0;
  MOELORA_TRY(begin(args, exec, call));
  MOELORA_TRY(moelora_check_delta(args, problem));
  const bool any = problem->lists.sorted_token_ids
                       ? problem->lists.num_active > 0
                       : problem->routes.token_lora_mapping.data != NULL;
  if (!any || problem->routes.num_rows == 0)
    return MOELORA_OK;
  if (!call->backend->delta)
    return unsupported(call, "moelora_delta");
  MOELORA_TRY(moelora_plan_delta(&problem->routes, problem->dtype, &call->device, plan));
  *workspace = call->backend->delta_workspace(problem, plan, exec);
  const named_size sizes[] = {
      {"K", problem->k}, {"columns", problem->columns}, {"R", problem->lora.max_rank}};
  return check_addressable(workspace, &problem->routes, sizes, 3);
}

moelora_status moelora_delta_workspace_size(const moelora_delta_args *args,
                                            const moelora_exec *exec, size_t *bytes) {
  call call;
  moelora_delta_problem problem;
  moelora_delta_plan plan;
  return begin_delta(args, exec, &call, &problem, &plan, bytes);
}

moelora_status moelora_delta(const moelora_delta_args *args, const moelora_exec *exec) {
  call call;
  moelora_delta_problem problem;
  moelora_delta_plan plan;
  size_t workspace;
  MOELORA_TRY(begin_delta(args, exec, &call, &problem, &plan, &workspace));
  if (!plan.block_rows)
    return MOELORA_OK;
  MOELORA_TRY(check_workspace(exec, workspace));
  moelora_note_delta("delta", &problem.routes, problem.dtype, &call.device, &plan);
  return call.backend->delta(&problem, &plan, exec);
}

static moelora_status begin_mlp_delta(const moelora_mlp_delta_args *args, const moelora_exec *exec,
                                      call *call, moelora_mlp_delta_problem *problem,
                                      moelora_delta_plan *plan, size_t *workspace) {
  *plan = (moelora_delta_plan){0};
  *workspace = 0;
  MOELORA_TRY(begin(args, exec, call));
  MOELORA_TRY(moelora_check_mlp_delta(args, problem));
  if (!problem->routes.token_lora_mapping.data || problem->routes.num_rows == 0)
    return MOELORA_OK;
  if (!call->backend->mlp_delta)
    return unsupported(call, "moelora_mlp_delta");
  MOELORA_TRY(moelora_plan_delta(&problem->routes, problem->dtype, &call->device, plan));
  *workspace = call->backend->mlp_delta_workspace(problem, plan, exec);
  const named_size sizes[] = {
      {"K", problem->hidden},
      {"I", problem->intermediate},
      {"R of gate_up", problem->gate_up.max_rank},
      {"R of down", problem->down.max_rank},
  };
  return check_addressable(workspace, &problem->routes, sizes, 4);
}

moelora_status moelora_mlp_delta_workspace_size(const moelora_mlp_delta_args *args,
                                                const moelora_exec *exec, size_t *bytes) {
  call call;
  moelora_mlp_delta_problem problem;
  moelora_delta_plan plan;
  return begin_mlp_delta(args, exec, &call, &problem, &plan, bytes);
}

moelora_status moelora_mlp_delta(const moelora_mlp_delta_args *args, const moelora_exec *exec) {
  call call;
  moelora_mlp_delta_problem problem;
  moelora_delta_plan plan;
  size_t workspace;
  MOELORA_TRY(begin_mlp_delta(args, exec, &call, &problem, &plan, &workspace));
  if (!plan.block_rows)
    return MOELORA_OK;
  MOELORA_TRY(check_workspace(exec, workspace));
  moelora_note_delta("mlp_delta", &problem.routes, problem.dtype, &call.device, &plan);
  return call.backend->mlp_delta(&problem, &plan, exec);
}

/* ---- packing ---- */

moelora_status moelora_pack_weights(const moelora_tensor *w, const moelora_tensor *out,
                                    const moelora_exec *exec) {
  call call;
  moelora_pack_problem problem;
  MOELORA_TRY(begin(w, exec, &call));
  MOELORA_REQUIRE(out, "out is NULL");
  MOELORA_TRY(moelora_check_pack(w, out, &problem));
  if (!call.backend->pack)
    return unsupported(&call, "moelora_pack_weights");
  return call.backend->pack(&problem, exec);
}
