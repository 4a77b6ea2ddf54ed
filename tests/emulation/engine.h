/* Grids of CUDA threads without a GPU. A thread is a fiber; all fibers of the CTAs that are
 * resident at once take turns in one thread of the host, in an order drawn from a seed. What waits
 * names what it waits for, so that a deadlock can be told.
 *
 * Shared memory of a CTA is a window that addresses of 32 bits count from; it begins as NaNs.
 * Copies that the hardware makes by itself, and wgmma, happen as EMULATION_COPIES says: at once, as
 * late as allowed (when nothing else can go on, or a wait asks for them), or at any time between.
 *
 *   EMULATION_SEED=1  EMULATION_COPIES=now|late|any  EMULATION_SMS=4  EMULATION_CAPABILITY=90
 *   EMULATION_RESIDENT=4: CTAs side by side of a grid that does not ask for all of them
 *   EMULATION_DEVICES=1 */
#ifndef EMULATION_ENGINE_H
#define EMULATION_ENGINE_H

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

/* Of a CTA: dynamic memory, then that of static variables, each at one place for the program. */
constexpr size_t kDynamic = 232448, kStatic = 1 << 20, kWindow = 1 << 21;

struct Launch {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool cooperative = false;
};
void run_grid(const Launch &launch, const std::function<void()> &thread);

/* Of the thread of the host that launches; which one it is makes no other difference. */
extern thread_local int current_device;

struct Place {
  const char *file;
  int line;
};

/* What comes to pass by itself: belongs to the fiber that asked for it. */
void later(std::function<void()> what);
/* All but the last `pending` groups of this fiber's are there. */
enum Kind { COPIES, BULK_STORES, KINDS };
void add_to_group(Kind kind, std::function<void()> what);
void commit_group(Kind kind);
void wait_group(Kind kind, int pending);
/* Once all of this fiber's copies so far are there. */
void after_copies(std::function<void()> what);

void yield();
/* A turn for the others, in a loop that reads memory until one of them has written there; true. */
bool spin();

/* Named barriers of a CTA, of `count` threads; sync returns whether any came with `value`. */
bool barrier_sync(int id, int count, bool value = false);
void cluster_sync();
unsigned grid_arrive();
void grid_wait(unsigned token);

/* The lanes of `mask` meet; the last does `all` with what each brought. */
typedef void (*Together)(void *const (&lanes)[32], uint32_t mask);
void meet(uint32_t mask, Together all, void *mine);

char *window();
char *window_of(unsigned rank);
unsigned cluster_rank();
inline void *at(uint32_t address) {
  return window() + address;
}
char *checked(uint32_t address, uint32_t bytes);
size_t reserve_static(size_t bytes, size_t alignment);
inline char *dynamic_shared() {
  return window();
}
/* A kernel's static variables, as a struct of its own. */
template <class Variables> Variables &static_shared() {
  static const size_t offset = reserve_static(sizeof(Variables), alignof(Variables));
  return *(Variables *)(window() + offset);
}

/* mbarriers lie in shared memory, as hardware has them: a word of 64 bits. */
void mbarrier_init(uint64_t *barrier, int arrivals);
void mbarrier_end(uint64_t *barrier);
void mbarrier_arrive(uint64_t *barrier, int64_t expected_bytes);
void mbarrier_arrived(uint64_t *barrier, int64_t bytes);
void mbarrier_wait(uint64_t *barrier, uint32_t parity);
bool mbarrier_test(uint64_t *barrier, uint32_t parity);

/* Warpgroup products: a warp's, in the order of its calls. */
void product(std::function<void()> what);
void commit_products();
void wait_products(int pending);

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

} // namespace emulation

#endif
