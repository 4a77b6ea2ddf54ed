/* Runs grids of CUDA threads without a GPU. Each thread is a fiber; all fibers of the resident
 * CTAs are scheduled on one host thread, in a seeded random order. A blocked fiber records what it
 * waits for, so that deadlocks can be reported.
 *
 * The shared memory of a CTA is a window with 32-bit addresses, initialized to NaN. Asynchronous
 * copies and wgmma execute as EMULATION_COPIES says: immediately, as late as allowed (when no
 * fiber can continue, or a wait requires them), or at any time in between.
 *
 *   EMULATION_SEED=1  EMULATION_COPIES=now|late|any  EMULATION_SMS=4  EMULATION_CAPABILITY=90
 *   EMULATION_RESIDENT=4: concurrent CTAs of a grid that does not need all of them
 *   EMULATION_DEVICES=1 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <utility>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulation {

/* Per CTA: dynamic memory, then static variables, each at a fixed offset in the program. */
constexpr size_t kDynamic = 232448, kStatic = 1 << 20, kWindow = 1 << 21;

struct Launch {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool cooperative = false;
};
void run_grid(const Launch &launch, const std::function<void()> &thread);

/* Current device of the launching host thread; only affects bookkeeping. */
extern thread_local int current_device;

/* Schedules an asynchronous operation of this fiber. */
void later(std::function<void()> what);
/* Waits until all but the last `pending` groups of this fiber have completed. */
enum Kind { COPIES, BULK_STORES, KINDS };
void add_to_group(Kind kind, std::function<void()> what);
void commit_group(Kind kind);
void wait_group(Kind kind, int pending);
/* Runs once all prior copies of this fiber have completed. */
void after_copies(std::function<void()> what);

/* Yields, in a loop that polls memory, until another fiber has written; returns true. */
bool spin(const char *waits = "a write");

/* Named barriers of a CTA for `count` threads; sync returns whether any thread passed `value`. */
bool barrier_sync(int id, int count, bool value = false);
void cluster_sync();
unsigned grid_arrive();
void grid_wait(unsigned token);

/* Synchronizes the lanes of `mask`; the last one calls `all` with every lane's argument. */
typedef void (*Together)(void *const (&lanes)[32], uint32_t mask);
void meet(uint32_t mask, Together all, void *mine);

char *window();
char *window_of(unsigned rank);
unsigned cluster_rank();
char *checked(uint32_t address, uint32_t bytes);
size_t reserve_static(size_t bytes, size_t alignment);
inline char *dynamic_shared() {
  return window();
}
/* Static shared variables of a kernel, as a struct of its own. */
template <class Variables> Variables &static_shared() {
  static const size_t offset = reserve_static(sizeof(Variables), alignof(Variables));
  return *(Variables *)(window() + offset);
}

/* mbarriers are 64-bit words in shared memory, as in hardware. */
void mbarrier_init(uint64_t *barrier, int arrivals);
void mbarrier_invalidate(uint64_t *barrier);
void mbarrier_arrive(uint64_t *barrier, int64_t expected_bytes);
void mbarrier_arrived(uint64_t *barrier, int64_t bytes);
void mbarrier_wait(uint64_t *barrier, uint32_t parity);
bool mbarrier_test(uint64_t *barrier, uint32_t parity);

/* Warpgroup MMAs: executed per warp, in program order. */
void product(std::function<void()> what);
void commit_products();
void wait_products(int pending);

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace emulation
