/* Checks, plans and runs the public operators. operators.inc says what each one needs. */
#include "core/check.h"
#include "core/plan.h"

#include <stdio.h>

/* State of a prepared call. Uninitialized memory is unlikely to hold EMPTY or READY. */
typedef enum call_state {
  CALL_REFUSED = 0,
  CALL_EMPTY = 0x6d6f6501, /* nothing to do */
  CALL_READY = 0x6d6f6502,
} call_state;

/* The state that a moelora_call holds: a checked and planned call. */
typedef struct prepared {
  call_state state;
  const moelora_backend *backend;
  moelora_device_info device;
  moelora_exec sized_for; /* exec of moelora_prepare_*, without its workspace */
  moelora_status (*launch)(const struct prepared *call, const moelora_exec *exec);
  union {
#define OPERATOR(NAME, PROBLEM, PLAN, ...)                                                         \
  struct {                                                                                         \
    moelora_##PROBLEM problem;                                                                     \
    moelora_##PLAN plan;                                                                           \
  } NAME;
#define CONVERSION(NAME, PROBLEM) moelora_##PROBLEM NAME;
#include "core/operators.inc"
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

static moelora_status check_built(const moelora_variant *variant) {
  if (!variant || moelora_is_built(variant))
    return MOELORA_OK;
  return moelora_fail(MOELORA_UNSUPPORTED,
                      "%s is not built: MOELORA_VARIANTS left it out of this build; build without "
                      "it, or force a variant that is there (MOELORA_FORCE_VARIANT)",
                      variant->name);
}

/* A size that determines the workspace, with its name in messages; 0: not mentioned. */
typedef struct named_size {
  const char *name;
  int64_t value;
} named_size;

enum { MAX_SIZES = 8 };

/* Completes a prepared call, unless the workspace would exceed any memory: its size may then have
 * overflowed. */
static moelora_status finish(moelora_call *call, prepared *p, size_t workspace,
                             moelora_status (*launch)(const prepared *, const moelora_exec *),
                             const named_size *sizes, size_t count) {
  char text[256] = "";
  size_t used = 0;
  if (workspace > (size_t)MOELORA_MAX_BYTES) {
    for (size_t i = 0; i < count && used < sizeof text; i++)
      if (sizes[i].value)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s is %lld", used ? ", " : "",
                                 sizes[i].name, (long long)sizes[i].value);
    return moelora_fail(MOELORA_INVALID_ARGUMENT,
                        "%s: too large, the workspace would take more than 2^56 bytes", text);
  }
  call->workspace_bytes = workspace;
  p->launch = launch;
  p->state = CALL_READY;
  return MOELORA_OK;
}

static moelora_status launch_on_device(const prepared *p, const moelora_exec *exec) {
  int32_t outer = 0;
  MOELORA_TRY(p->backend->enter(exec->device_index, &outer));
  const moelora_status launched = p->launch(p, exec);
  const moelora_status left = p->backend->leave(exec->device_index, outer);
  return launched != MOELORA_OK ? launched : left;
}

/* ---- moelora_prepare_<NAME> for each operator, run_<NAME> for each conversion ---- */

#define OPERATOR(NAME, PROBLEM, PLAN, IDLE)                                                        \
  static moelora_status launch_##NAME(const prepared *p, const moelora_exec *exec) {               \
    moelora_note_##NAME(&p->of.NAME.problem, &p->device, &p->of.NAME.plan);                        \
    return p->backend->NAME(&p->of.NAME.problem, &p->of.NAME.plan, exec, NULL);                    \
  }                                                                                                \
  moelora_status moelora_prepare_##NAME(const moelora_##NAME##_args *args,                         \
                                        const moelora_exec *exec, moelora_call *call) {            \
    prepared *p = NULL;                                                                            \
    MOELORA_TRY(begin(args, exec, call, &p));                                                      \
    moelora_##PROBLEM *problem = &p->of.NAME.problem;                                              \
    moelora_##PLAN *plan = &p->of.NAME.plan;                                                       \
    MOELORA_TRY(moelora_check_##NAME(args, problem));                                              \
    if (IDLE) {                                                                                    \
      p->state = CALL_EMPTY;                                                                       \
      return MOELORA_OK;                                                                           \
    }                                                                                              \
    MOELORA_TRY(moelora_check_environment());                                                      \
    MOELORA_TRY(moelora_plan_##NAME(problem, &p->device, plan));                                   \
    named_size sizes[MAX_SIZES];                                                                   \
    size_t count = 0;
#define VARIANT(ROW) MOELORA_TRY(check_built(ROW));
#define SIZE(TEXT, VALUE) sizes[count++] = (named_size){TEXT, VALUE};
#define END(NAME)                                                                                  \
  size_t bytes = 0;                                                                                \
  MOELORA_TRY(p->backend->NAME(problem, plan, &p->sized_for, &bytes));                             \
  return finish(call, p, bytes, launch_##NAME, sizes, count);                                      \
  }
#define CONVERSION(NAME, ...)                                                                      \
  static moelora_status launch_##NAME(const prepared *p, const moelora_exec *exec) {               \
    return p->backend->NAME(&p->of.NAME, exec);                                                    \
  }                                                                                                \
  moelora_status moelora_run_##NAME(const moelora_##NAME##_args *args, const moelora_exec *exec) { \
    moelora_call call;                                                                             \
    prepared *p = NULL;                                                                            \
    MOELORA_TRY(begin(args, exec, &call, &p));                                                     \
    MOELORA_TRY(moelora_check_##NAME(args, &p->of.NAME));                                          \
    p->launch = launch_##NAME;                                                                     \
    return launch_on_device(p, exec);                                                              \
  }
#include "core/operators.inc"

/* ---- running ---- */

/* Checks device, threads and workspace. The workspace size depends on device and threads. */
static moelora_status check_exec(const prepared *p, size_t want, const moelora_exec *exec) {
  const moelora_exec *sized = &p->sized_for;
  MOELORA_REQUIRE(exec->device == sized->device && exec->device_index == sized->device_index,
                  "exec is device %d, index %d; the call was prepared for device %d, index %d",
                  (int)exec->device, exec->device_index, (int)sized->device, sized->device_index);
  MOELORA_REQUIRE(moelora_workers(exec) <= moelora_workers(sized),
                  "exec.parallel_for runs %d threads, the call was prepared for %d: give "
                  "moelora_prepare_* the parallel_for and num_threads of moelora_run",
                  moelora_workers(exec), moelora_workers(sized));
  const size_t bytes = exec->workspace ? exec->workspace_bytes : 0;
  if (bytes < want)
    return moelora_fail(MOELORA_WORKSPACE_TOO_SMALL,
                        "the workspace has %zu bytes, expected at least %zu", bytes, want);
  MOELORA_REQUIRE(!want || (uintptr_t)exec->workspace % 256 == 0,
                  "the workspace starts at %p, expected a multiple of 256 bytes", exec->workspace);
  return MOELORA_OK;
}

moelora_status moelora_run(const moelora_call *call, const moelora_exec *exec) {
  moelora_clear_error();
  MOELORA_REQUIRE(call && exec, "call or exec is NULL");
  const prepared *p = (const void *)call->state;
  if (p->state == CALL_EMPTY)
    return MOELORA_OK;
  MOELORA_REQUIRE(p->state == CALL_READY,
                  "the call is not prepared: moelora_prepare_* was not called, or refused it");
  MOELORA_TRY(check_exec(p, call->workspace_bytes, exec));
  return launch_on_device(p, exec);
}

/* ---- packing: checked and run in one call, without a workspace ---- */

#define CHECK_GIVEN(POINTER)                                                                       \
  do {                                                                                             \
    moelora_clear_error();                                                                         \
    MOELORA_REQUIRE(POINTER, "%s is NULL", #POINTER);                                              \
  } while (0)

moelora_status moelora_pack_weights(const moelora_tensor *w, const moelora_tensor *out,
                                    const moelora_exec *exec) {
  CHECK_GIVEN(w);
  CHECK_GIVEN(out);
  return moelora_run_pack_weights(&(moelora_pack_weights_args){*w, *out}, exec);
}

moelora_status moelora_pack_quantized(const moelora_quantized *w, const moelora_layout *layout,
                                      moelora_dtype dtype, const moelora_tensor *tiles,
                                      const moelora_exec *exec) {
  CHECK_GIVEN(w);
  CHECK_GIVEN(layout);
  CHECK_GIVEN(tiles);
  return moelora_run_pack_quantized(&(moelora_pack_quantized_args){*w, *layout, dtype, *tiles},
                                    exec);
}

moelora_status moelora_unpack_quantized(const moelora_tensor *tiles, const moelora_layout *layout,
                                        const moelora_tensor *out, const moelora_exec *exec) {
  CHECK_GIVEN(tiles);
  CHECK_GIVEN(layout);
  CHECK_GIVEN(out);
  return moelora_run_unpack_quantized(&(moelora_unpack_quantized_args){*tiles, *layout, *out},
                                      exec);
}
