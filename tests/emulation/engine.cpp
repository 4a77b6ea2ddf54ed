#include "state.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {

Fiber *self;
std::vector<Fiber *> ready, yielded;
std::vector<Waiter> waiters;
Group operations;
Launch launch;
uint64_t progress;
unsigned grid_arrivals;
Copies copies;

namespace {

constexpr size_t kStack = 256 << 10; // without optimization a GEMM tile takes 90 KB
constexpr size_t kPage = 4096;

void *scheduler_stack;
const std::function<void()> *body;
uint64_t random_state;
std::vector<char *> free_stacks, free_windows;
size_t static_used = kDynamic;

extern "C" void emulation_switch(void **from, void *to);
asm(".text\n"
    ".globl emulation_switch\n"
    ".type emulation_switch, @function\n"
    "emulation_switch:\n"
    "  pushq %rbx\n  pushq %rbp\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbp\n  popq %rbx\n"
    "  ret\n");

} // namespace

uint32_t draw(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)((random_state >> 32) * below >> 32);
}

void to_scheduler() {
  emulation_switch(&self->stack_pointer, scheduler_stack);
}

void release(std::vector<Fiber *> &waiting) {
  for (Fiber *fiber : waiting)
    ready.push_back(fiber);
  waiting.clear();
  progress++;
}

void block(const char *what, int64_t a, int64_t b, int64_t c) {
  self->waits = what;
  self->numbers[0] = a, self->numbers[1] = b, self->numbers[2] = c;
  to_scheduler();
  self->waits = nullptr;
}

void perform(Group &group) {
  for (auto &what : group)
    what();
  group.clear();
}

void perform_all_but(int pending, std::deque<Group> &groups) {
  while ((int)groups.size() > pending) {
    perform(groups.front());
    groups.pop_front();
  }
}

namespace {

const char *setting(const char *name, const char *other) {
  const char *value = getenv(name);
  return value && *value ? value : other;
}

void perform_any_operation() {
  const auto chosen = operations.begin() + draw((uint32_t)operations.size());
  const std::function<void()> what = std::move(*chosen);
  operations.erase(chosen);
  progress++;
  what();
}

bool is_alive(const Cluster *cluster) {
  for (const Cta *cta : cluster->ctas)
    if (cta->alive > 0)
      return true;
  return false;
}

void enter() {
  (*body)();
  for (int kind = 0; kind < KINDS; kind++)
    perform_all_but(0, self->groups[kind]);
  self->done = true;
  self->cta->alive--;
  progress++;
  to_scheduler();
  abort();
}

char *map(size_t bytes) {
  void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    fail("no memory for %zu bytes", bytes);
  return (char *)memory;
}

char *take(std::vector<char *> &from, size_t bytes) {
  if (from.empty())
    return map(bytes);
  char *memory = from.back();
  from.pop_back();
  return memory;
}

/* A stack that ends at a page without access: a larger one faults, and writes to no other. */
char *take_stack() {
  const bool mapped = free_stacks.empty();
  char *stack = take(free_stacks, kStack);
  if (mapped && mprotect(stack, kPage, PROT_NONE))
    fail("the end of a stack cannot be protected");
  return stack;
}

/* Fill byte of uninitialized memory: NaN or large values; as integers -1 or large. */
static int unwritten(const Cta *cta) {
  return cta->block % 2 ? 0x7f : 0xff;
}

Cta *begin_cta(unsigned number, Cluster *cluster) {
  Cta *cta = new Cta;
  cta->block = number;
  cta->cluster = cluster;
  cluster->ctas.push_back(cta);
  cta->memory = take(free_windows, kWindow);
  memset(cta->memory, unwritten(cta), launch.shared);
  memset(cta->memory + kDynamic, unwritten(cta), static_used - kDynamic);
  const unsigned threads = launch.block.x;
  cta->warps.resize((threads + 31) / 32);
  cta->fibers.resize(threads);
  cta->alive = threads;
  for (unsigned t = 0; t < threads; t++) {
    Fiber &fiber = cta->fibers[t];
    fiber.cta = cta;
    fiber.thread = t;
    fiber.stack = take_stack();
    /* Stack as if enter() had been called, below six saved registers: 8 modulo 16. */
    void **top = (void **)(fiber.stack + kStack - 16);
    top[0] = (void *)enter;
    for (int i = 1; i <= 6; i++)
      top[-i] = nullptr;
    fiber.stack_pointer = top - 6;
    ready.push_back(&fiber);
  }
  return cta;
}

void end_cta(Cta *cta) {
  for (Fiber &fiber : cta->fibers)
    free_stacks.push_back(fiber.stack);
  free_windows.push_back(cta->memory);
  delete cta;
}

[[noreturn]] void deadlock(const std::vector<Cluster *> &clusters) {
  fprintf(stderr, "emulation: deadlock, no thread can continue\n");
  for (const Cluster *cluster : clusters)
    for (const Cta *cta : cluster->ctas) {
      std::string last;
      for (const Fiber &fiber : cta->fibers) {
        char text[120];
        snprintf(text, sizeof text,
                 fiber.done    ? "done"
                 : fiber.waits ? fiber.waits
                               : "runs",
                 fiber.numbers[0], fiber.numbers[1], fiber.numbers[2]);
        const std::string what = text;
        if (what != last)
          fprintf(stderr, "  CTA %u, thread %u and on: %s\n", cta->block, fiber.thread,
                  what.c_str());
        last = what;
      }
    }
  abort();
}

} // namespace

void fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "emulation: ");
  vfprintf(stderr, format, list);
  va_end(list);
  if (self)
    fprintf(stderr, " (CTA %u, thread %u)", self->cta->block, self->thread);
  fprintf(stderr, "\n");
  abort();
}

thread_local int current_device;
static long launches[64];
extern "C" long emulation_launches(int device) {
  return launches[device];
}
extern "C" int *emulation_current_device() {
  return &current_device;
}

void run_grid(const Launch &wanted, const std::function<void()> &thread) {
  launches[current_device]++;
  launch = wanted;
  body = &thread;
  if (!random_state)
    random_state = strtoull(setting("EMULATION_SEED", "1"), nullptr, 0) * 0x9E3779B97F4A7C15u | 1;
  const std::string when = setting("EMULATION_COPIES", "now");
  copies = when == "late" ? LATE : when == "any" ? ANY : NOW;
  if (launch.shared > kDynamic || launch.block.x > 1024 || launch.grid.y * launch.grid.z != 1 ||
      launch.block.y * launch.block.z != 1 || launch.grid.x % launch.cluster)
    fail("a launch of %u x %u threads with %zu bytes that there is not", launch.grid.x,
         launch.block.x, launch.shared);
  blockDim = launch.block;
  gridDim = launch.grid;
  grid_arrivals = 0;
  unsigned resident = (unsigned)atoi(setting("EMULATION_RESIDENT", "4"));
  if (launch.cooperative)
    resident = launch.grid.x;
  unsigned next = 0, idle = 0;
  uint64_t seen = progress;
  std::vector<Cluster *> clusters;
  for (;;) {
    for (size_t i = 0; i < clusters.size(); i++) {
      if (!is_alive(clusters[i]) && operations.empty()) {
        for (Cta *cta : clusters[i]->ctas)
          end_cta(cta);
        delete clusters[i];
        clusters.erase(clusters.begin() + (ptrdiff_t)i--);
      }
    }
    while (next < launch.grid.x &&
           (clusters.empty() || (clusters.size() + 1) * launch.cluster <= resident)) {
      Cluster *cluster = new Cluster;
      clusters.push_back(cluster);
      for (unsigned i = 0; i < launch.cluster; i++)
        begin_cta(next++, cluster);
    }
    if (clusters.empty())
      break;
    /* Run until a CTA ends. */
    for (bool ended = false; !ended;) {
      if (copies == ANY && !operations.empty() && draw(64) == 0)
        perform_any_operation();
      if (ready.empty() && !operations.empty())
        perform_any_operation();
      if (ready.empty() && !yielded.empty()) {
        idle = progress == seen ? idle + 1 : 0;
        seen = progress;
        if (idle > 100000)
          deadlock(clusters);
        ready.swap(yielded);
      }
      if (ready.empty()) {
        const bool alive = std::any_of(clusters.begin(), clusters.end(), is_alive);
        if (alive && operations.empty())
          deadlock(clusters);
        ended = !alive && operations.empty();
        continue;
      }
      const uint32_t drawn = draw((uint32_t)ready.size());
      Fiber *fiber = ready[drawn];
      ready[drawn] = ready.back();
      ready.pop_back();
      self = fiber;
      threadIdx = {fiber->thread, 0, 0};
      blockIdx = {fiber->cta->block, 0, 0};
      emulation_switch(&scheduler_stack, fiber->stack_pointer);
      ended = fiber->cta->alive == 0;
      self = nullptr;
    }
  }
  if (!waiters.empty())
    fail("the grid ended before %zu waits", waiters.size());
}

bool spin(const char *waits) {
  self->waits = waits;
  yielded.push_back(self);
  to_scheduler();
  self->waits = nullptr;
  return true;
}

char *window() {
  return self->cta->memory;
}

char *window_of(unsigned rank) {
  if (rank >= self->cta->cluster->ctas.size())
    fail("CTA %u of a cluster of %zu", rank, self->cta->cluster->ctas.size());
  return self->cta->cluster->ctas[rank]->memory;
}

unsigned cluster_rank() {
  return self->cta->block % launch.cluster;
}

char *checked(uint32_t address, uint32_t bytes) {
  const bool dynamic = address + (uint64_t)bytes <= launch.shared;
  const bool fixed = address >= kDynamic && address + (uint64_t)bytes <= static_used;
  if (!dynamic && !fixed)
    fail("%u bytes of shared memory at %u; there are %zu", bytes, address, launch.shared);
  return window() + address;
}

size_t reserve_static(size_t bytes, size_t alignment) {
  static_used = (static_used + alignment - 1) / alignment * alignment;
  const size_t offset = static_used;
  static_used += bytes;
  if (static_used > kWindow)
    fail("too many static variables");
  /* The running CTAs have not initialized it. */
  for (Cta *cta : self->cta->cluster->ctas)
    memset(cta->memory + offset, unwritten(cta), bytes);
  return offset;
}

} // namespace emulation
