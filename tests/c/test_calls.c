/* Prepared calls as values: what running one depends on, and which cannot be run. */
#include "cases.h"

enum { M = 40, TOP_K = 2, E = 4, K = 160, N = 512 };

static moelora_gemm_args gemm_args(void) {
  return (moelora_gemm_args){
      .x = random_tensor(MOELORA_F32, 1, SIZES(M, K)),
      .w = random_tensor(MOELORA_F32, 1, SIZES(E, N, K)),
      .routing = {.topk_ids = random_ids(MOELORA_I32, 0, E - 1, SIZES(M, TOP_K))},
      .out = new_tensor(MOELORA_F32, SIZES(M, TOP_K, N)),
  };
}

/* Later changes of plans do not affect a prepared call. */
static void test_a_call_is_a_value(void) {
  moelora_gemm_args args = gemm_args();
  moelora_exec exec = serial;
  moelora_call call, copy;
  CHECK_INVALID(moelora_prepare_gemm(&args, &exec, NULL), "call is NULL");
  CHECK_INVALID(moelora_run(NULL, &exec), "call or exec is NULL");
  CHECK_OK(moelora_prepare_gemm(&args, &exec, &call));
  give_workspace(&exec, call.workspace_bytes);
  copy = call;
  memset(&args, 0xff, sizeof args); /* only prepare reads it */
  CHECK_OK(moelora_force_variant(moelora_variant_name(0)));
  CHECK_OK(moelora_run(&call, &exec));
  CHECK_OK(moelora_force_variant(NULL));
  CHECK_OK(moelora_run(&copy, &exec));
  exec.device_index = 1;
  CHECK_INVALID(moelora_run(&call, &exec),
                "exec is device 0, index 1; the call was prepared for device 0, index 0");
  release_all();
}

#define CHECK_TOO_MANY(THREADS, PREPARED)                                                          \
  CHECK_INVALID(moelora_run(&call, &exec),                                                         \
                "exec.parallel_for runs " #THREADS                                                 \
                " threads, the call was prepared for " #PREPARED                                   \
                ": give moelora_prepare_* the parallel_for and num_threads of moelora_run")

/* Each thread has its part of the workspace: more threads than it was sized for would write past
 * its end. Their number follows from parallel_for and num_threads together. */
static void test_threads_are_those_of_the_workspace(void) {
  const moelora_gemm_args args = gemm_args();
  moelora_exec exec = {.device = MOELORA_CPU, .num_threads = 32};
  moelora_call call;
  CHECK_OK(moelora_prepare_gemm(&args, &exec, &call));
  give_workspace(&exec, call.workspace_bytes);
  const size_t least = call.workspace_bytes;
  exec.parallel_for = parallel_for;
  CHECK_TOO_MANY(32, 1);
  exec.parallel_for = NULL;
  CHECK_OK(moelora_run(&call, &exec));
  const moelora_tensor want = copy_of(&args.out);

  /* Fewer threads need less. */
  exec.parallel_for = parallel_for;
  CHECK_OK(moelora_prepare_gemm(&args, &exec, &call));
  CHECK(call.workspace_bytes > least);
  give_workspace(&exec, call.workspace_bytes);
  const int32_t threads[] = {32, THREADS, 1, 0};
  for (int i = 0; i < 5; i++) {
    exec.num_threads = i < 4 ? threads[i] : 32;
    exec.parallel_for = i < 4 ? parallel_for : NULL;
    memset(args.out.data, 0, (size_t)count_of(&want) * sizeof(float));
    CHECK_OK(moelora_run(&call, &exec));
    CHECK(same_bytes(&args.out, &want));
  }
  exec.parallel_for = parallel_for, exec.num_threads = 33;
  CHECK_TOO_MANY(33, 32);
  release_all();
}

#define CHECK_UNPREPARED(CALL)                                                                     \
  CHECK_INVALID(moelora_run(CALL, &exec),                                                          \
                "the call is not prepared: moelora_prepare_* was not called, or refused it")

/* A refused call is not an empty one. */
static void test_a_refused_call_cannot_run(void) {
  const moelora_gemm_args good = gemm_args();
  moelora_gemm_args args = good;
  moelora_exec exec = threaded;
  give_workspace(&exec, 1 << 20);
  moelora_call call = {0};
  CHECK_UNPREPARED(&call);
  memset(&call, 0xa5, sizeof call);
  CHECK_UNPREPARED(&call);

  /* Refused: first, after a valid call, after an empty call. */
  for (int before = 0; before < 3; before++) {
    args = good;
    if (before == 2)
      args.x.size[0] = args.routing.topk_ids.size[0] = args.out.size[0] = 0;
    if (before)
      CHECK_OK(moelora_prepare_gemm(&args, &exec, &call));
    args = good, args.x.size[1] = K - 1;
    CHECK(moelora_prepare_gemm(&args, &exec, &call) == MOELORA_INVALID_ARGUMENT);
    CHECK_UNPREPARED(&call);
  }
  moelora_exec nowhere = exec;
  nowhere.device = (moelora_device)7;
  const moelora_exec *const execs[] = {&exec, NULL, &nowhere};
  for (int i = 0; i < 3; i++) {
    CHECK_OK(moelora_prepare_gemm(&good, &exec, &call));
    CHECK(moelora_prepare_gemm(i ? &good : NULL, execs[i], &call) == MOELORA_INVALID_ARGUMENT);
    CHECK_UNPREPARED(&call);
  }
  release_all();
}

static void test_an_empty_call_runs(void) {
  moelora_gemm_args args = gemm_args();
  args.x.size[0] = args.routing.topk_ids.size[0] = args.out.size[0] = 0;
  moelora_call call;
  CHECK_OK(moelora_prepare_gemm(&args, &serial, &call));
  CHECK_INT(call.workspace_bytes, 0);
  CHECK_OK(moelora_run(&call, &serial));
  moelora_delta_args nobody = {
      .num_experts = E,
      .x = args.x,
      .routing = args.routing,
      .lora = {.num_slices = 1,
               .a = {random_tensor(MOELORA_F32, 1, SIZES(1, E, 4, K))},
               .b = {random_tensor(MOELORA_F32, 1, SIZES(1, E, N, 4))}},
      .out = args.out,
  };
  nobody.x.size[0] = nobody.routing.topk_ids.size[0] = nobody.out.size[0] = M;
  CHECK_OK(moelora_prepare_delta(&nobody, &serial, &call));
  CHECK_OK(moelora_run(&call, &serial));
  release_all();
}

int main(void) {
  test_a_call_is_a_value();
  test_threads_are_those_of_the_workspace();
  test_a_refused_call_cannot_run();
  test_an_empty_call_runs();
  printf("test_calls: calls run as they were prepared\n");
  return 0;
}
