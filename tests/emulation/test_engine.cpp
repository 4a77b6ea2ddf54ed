/* The engine must detect missing waits, out-of-bounds accesses and deadlocks. Kernels with and
 * without each fault. */
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda/ptx/hopper.cuh"

static uint32_t from[64], to[64];

/* Copies 64 words through shared memory, by cp.async. */
template <bool WAITS, bool SYNCS> static void copy() {
  const uint32_t own = threadIdx.x * 16, other = (64 - 4 - threadIdx.x * 4) * 4;
  copy_async_16(own, from + threadIdx.x * 4, 16);
  copy_async_commit();
  if (WAITS)
    copy_async_wait<0>();
  if (SYNCS)
    __syncthreads();
  for (uint32_t i = 0; i < 4; i++)
    to[other / 4 + i] = load_shared_4(other + i * 4);
}

/* The same with a single bulk copy. */
template <bool WAITS> static void bulk() {
  if (threadIdx.x == 0) {
    barrier_init(256, 1);
    barrier_arrive_expect_tx(256, 256);
    bulk_load(0, from, 256, 256, 0);
  }
  __syncthreads();
  if (WAITS)
    barrier_wait(256, 0);
  for (uint32_t i = threadIdx.x * 4; i < threadIdx.x * 4 + 4; i++)
    to[i] = load_shared_4(i * 4);
}

static void beyond() {
  store_shared_4(512, 1);
}
static void half_a_barrier() {
  if (threadIdx.x < 8)
    __syncthreads();
}
static void waits_forever() {
  if (threadIdx.x == 0)
    barrier_init(256, 1);
  __syncthreads();
  barrier_wait(256, 0);
}

static volatile uint32_t written;
template <bool WRITES> static void spins() {
  if (WRITES && threadIdx.x == 15)
    written = 1;
  while (written == 0 && emulation::spin())
    ;
}

/* 0: the copy is correct; 1: it is wrong; 2: the engine stopped. */
static int outcome(void (*kernel)(), const char *copies) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (!freopen("/dev/null", "w", stderr))
      _exit(3);
    setenv("EMULATION_COPIES", copies, 1);
    for (uint32_t i = 0; i < 64; i++)
      from[i] = i + 1, to[i] = 0;
    emulation::Launch launch;
    launch.block = dim3(16);
    launch.shared = 512;
    emulation::run_grid(launch, kernel);
    _exit(memcmp(from, to, sizeof from) != 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? 2 : WEXITSTATUS(status);
}

static int failures;
static void expect(const char *what, void (*kernel)(), const char *copies, int wanted) {
  const int got = outcome(kernel, copies);
  if (got != wanted)
    failures++,
        fprintf(stderr, "test_engine: %s, copies %s: %d, expected %d\n", what, copies, got, wanted);
}

int main() {
  for (const char *copies : {"now", "late", "any"}) {
    expect("a copy", copy<true, true>, copies, 0);
    expect("a bulk copy", bulk<true>, copies, 0);
    expect("memory beyond", beyond, copies, 2);
    expect("half a barrier", half_a_barrier, copies, 2);
    expect("a wait without an arrival", waits_forever, copies, 2);
    expect("a read of what no thread writes", spins<false>, copies, 2);
    expect("a read of what another writes", spins<true>, copies, 1); // not a copy
    expect("a copy that others read at once", copy<true, false>, copies, 1);
  }
  expect("a copy without a wait", copy<false, true>, "late", 1);
  expect("a bulk copy without a wait", bulk<false>, "late", 1);
  if (!failures)
    printf("test_engine: all faults are found\n");
  return failures != 0;
}
