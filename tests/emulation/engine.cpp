#include "engine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <deque>
#include <string>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStack = 128 << 10;

struct Cta;
struct Cluster;

struct Operation {
  std::function<void()> what;
};
typedef std::vector<std::function<void()>> Group;

struct Fiber {
  void *stack_pointer = nullptr;
  char *stack = nullptr;
  Cta *cta = nullptr;
  unsigned thread = 0;
  bool done = false, result = false;
  const char *waits = nullptr; /* a format of three numbers */
  int64_t numbers[3];
  Group open[KINDS];
  std::deque<Group> groups[KINDS];
};

struct Barrier {
  int arrived = 0;
  bool any = false;
  std::vector<Fiber *> waiting;
};

struct Meeting {
  uint32_t mask, arrived;
  Together all;
  void *lanes[32];
  std::vector<Fiber *> waiting;
};

struct Warp {
  std::vector<Meeting> meetings;
  Group open;
  std::deque<Group> groups;
};

struct Cluster {
  Barrier barrier;
  std::vector<Cta *> ctas;
};

struct Cta {
  char *memory = nullptr;
  unsigned block = 0, alive = 0, grid_arrivals = 0;
  Cluster *cluster = nullptr;
  Barrier named[16];
  std::vector<Warp> warps;
  std::vector<Fiber> fibers;
};

struct Waiter {
  Fiber *fiber;
  uint64_t *barrier;
  uint32_t parity;
};

/* Of the word: arrivals wanted and still missing, bytes still missing, the phase. */
struct Mbarrier {
  int64_t bytes : 23;
  uint64_t wanted : 20, missing : 20, phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

Fiber *self;
void *scheduler_stack;
const std::function<void()> *body;
std::vector<Fiber *> ready, yielded;
std::vector<Waiter> waiters;
std::vector<Operation *> operations;
unsigned grid_arrivals;
Launch launch;
uint64_t progress, random_state;
std::vector<char *> free_stacks, free_windows;
size_t static_used = kDynamic;

const char *setting(const char *name, const char *other) {
  const char *value = getenv(name);
  return value && *value ? value : other;
}

uint32_t draw(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)((random_state >> 32) * below >> 32);
}

enum { NOW, LATE, ANY } copies;

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

void to_scheduler() {
  emulation_switch(&self->stack_pointer, scheduler_stack);
}

void release(std::vector<Fiber *> &waiting) {
  for (Fiber *fiber : waiting)
    ready.push_back(fiber);
  waiting.clear();
  progress++;
}

void block(const char *what, int64_t a = 0, int64_t b = 0, int64_t c = 0) {
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

void perform_operation(size_t index) {
  Operation *operation = operations[index];
  operations.erase(operations.begin() + (ptrdiff_t)index);
  progress++;
  operation->what();
  delete operation;
}

void enter() {
  (*body)();
  for (int kind = 0; kind < KINDS; kind++)
    while (!self->groups[kind].empty()) {
      perform(self->groups[kind].front());
      self->groups[kind].pop_front();
    }
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

Cta *begin_cta(unsigned number, Cluster *cluster) {
  Cta *cta = new Cta;
  cta->block = number;
  cta->cluster = cluster;
  cluster->ctas.push_back(cta);
  cta->memory = take(free_windows, kWindow);
  memset(cta->memory, 0xff, launch.shared);
  memset(cta->memory + kDynamic, 0xff, static_used - kDynamic);
  const unsigned threads = launch.block.x;
  cta->warps.resize((threads + 31) / 32);
  cta->fibers.resize(threads);
  cta->alive = threads;
  for (unsigned t = 0; t < threads; t++) {
    Fiber &fiber = cta->fibers[t];
    fiber.cta = cta;
    fiber.thread = t;
    fiber.stack = take(free_stacks, kStack);
    /* As a call of enter() would leave it, under six registers: 8 from a multiple of 16. */
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
  fprintf(stderr, "emulation: nobody can go on\n");
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

void run_grid(const Launch &wanted, const std::function<void()> &thread) {
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
      bool alive = false;
      for (const Cta *cta : clusters[i]->ctas)
        alive |= cta->alive > 0;
      if (!alive && operations.empty()) {
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
    /* Until a CTA ends. */
    for (bool ended = false; !ended;) {
      if (copies == ANY && !operations.empty() && draw(64) == 0)
        perform_operation(draw((uint32_t)operations.size()));
      if (ready.empty() && !operations.empty())
        perform_operation(draw((uint32_t)operations.size()));
      if (ready.empty() && !yielded.empty()) {
        idle = progress == seen ? idle + 1 : 0;
        seen = progress;
        if (idle > 100000)
          deadlock(clusters);
        ready.swap(yielded);
      }
      if (ready.empty()) {
        bool alive = false;
        for (const Cluster *cluster : clusters)
          for (const Cta *cta : cluster->ctas)
            alive |= cta->alive > 0;
        if (alive && operations.empty() && ready.empty())
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

void later(std::function<void()> what) {
  if (copies == NOW)
    what();
  else
    operations.push_back(new Operation{std::move(what)});
}

void add_to_group(Kind kind, std::function<void()> what) {
  if (copies == NOW || (copies == ANY && draw(4) == 0))
    what();
  else
    self->open[kind].push_back(std::move(what));
}

void commit_group(Kind kind) {
  self->groups[kind].push_back(std::move(self->open[kind]));
  self->open[kind].clear();
}

void wait_group(Kind kind, int pending) {
  while ((int)self->groups[kind].size() > pending) {
    perform(self->groups[kind].front());
    self->groups[kind].pop_front();
  }
}

void after_copies(std::function<void()> what) {
  Fiber *fiber = self;
  later([fiber, what] {
    for (Group &group : fiber->groups[COPIES])
      perform(group); /* who waits still counts it */
    perform(fiber->open[COPIES]);
    what();
  });
}

void yield() {
  yielded.push_back(self);
  to_scheduler();
}

bool barrier_sync(int id, int count, bool value) {
  Barrier &barrier = self->cta->named[id];
  barrier.any |= value;
  if (++barrier.arrived >= count) {
    const bool any = barrier.any;
    for (Fiber *fiber : barrier.waiting)
      fiber->result = any;
    barrier.arrived = 0;
    barrier.any = false;
    release(barrier.waiting);
    ready.push_back(self);
    to_scheduler();
    return any;
  }
  barrier.waiting.push_back(self);
  block("barrier %ld of %ld", id, count);
  return self->result;
}

void barrier_pass(int id, int count) {
  Barrier &barrier = self->cta->named[id];
  if (++barrier.arrived >= count) {
    for (Fiber *fiber : barrier.waiting)
      fiber->result = barrier.any;
    barrier.arrived = 0;
    barrier.any = false;
    release(barrier.waiting);
  }
}

void cluster_sync() {
  Barrier &barrier = self->cta->cluster->barrier;
  if (++barrier.arrived == (int)(launch.cluster * launch.block.x)) {
    barrier.arrived = 0;
    release(barrier.waiting);
    return;
  }
  barrier.waiting.push_back(self);
  block("the cluster");
}

unsigned grid_arrive() {
  barrier_sync(0, (int)launch.block.x);
  if (self->thread == 0) {
    grid_arrivals++;
    progress++;
    return ++self->cta->grid_arrivals;
  }
  return 0;
}

void grid_wait(unsigned token) {
  if (!launch.cooperative)
    fail("a wait for a grid that is not cooperative");
  if (self->thread == 0)
    while (grid_arrivals < token * launch.grid.x) {
      self->waits = "the grid";
      yield();
      self->waits = nullptr;
    }
  barrier_sync(0, (int)launch.block.x);
}

void meet(uint32_t mask, Together all, void *mine) {
  const unsigned lane = self->thread % 32;
  Warp &warp = self->cta->warps[self->thread / 32];
  if (!(mask >> lane & 1))
    fail("lanes %08x meet without this one", mask);
  Meeting *meeting = nullptr;
  for (Meeting &m : warp.meetings)
    if (m.mask == mask && !(m.arrived >> lane & 1))
      meeting = &m;
  if (!meeting) {
    warp.meetings.emplace_back();
    meeting = &warp.meetings.back();
    meeting->mask = mask;
    meeting->arrived = 0;
    meeting->all = all;
  }
  if (meeting->all != all)
    fail("lanes of a warp meet for different things");
  meeting->arrived |= 1u << lane;
  meeting->lanes[lane] = mine;
  if (meeting->arrived == mask) {
    all(meeting->lanes, mask);
    release(meeting->waiting);
    warp.meetings.erase(warp.meetings.begin() + (meeting - warp.meetings.data()));
    return;
  }
  meeting->waiting.push_back(self);
  block("lanes %08lx", mask);
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
  /* The CTAs that run have not filled it. */
  for (Cta *cta : self->cta->cluster->ctas)
    memset(cta->memory + offset, 0xff, bytes);
  return offset;
}

void mbarrier_init(uint64_t *word, int arrivals) {
  Mbarrier barrier = {};
  barrier.wanted = barrier.missing = (uint64_t)arrivals;
  memcpy(word, &barrier, 8);
}

void mbarrier_end(uint64_t *word) {
  for (const Waiter &waiter : waiters)
    if (waiter.barrier == word)
      fail("a barrier ends while thread %u waits", waiter.fiber->thread);
  memset(word, 0xff, 8);
}

static void settle(uint64_t *word, Mbarrier barrier) {
  if (barrier.missing == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.missing = barrier.wanted;
    for (size_t i = 0; i < waiters.size(); i++)
      if (waiters[i].barrier == word && waiters[i].parity != barrier.phase) {
        ready.push_back(waiters[i].fiber);
        waiters[i--] = waiters.back();
        waiters.pop_back();
      }
  }
  memcpy(word, &barrier, 8);
  progress++;
}

void mbarrier_arrive(uint64_t *word, int64_t expected_bytes) {
  Mbarrier barrier;
  memcpy(&barrier, word, 8);
  if (barrier.missing == 0 || barrier.wanted == 0xfffff)
    fail("an arrival at a barrier that has all, or is none");
  barrier.bytes += expected_bytes;
  barrier.missing--;
  settle(word, barrier);
}

void mbarrier_arrived(uint64_t *word, int64_t bytes) {
  Mbarrier barrier;
  memcpy(&barrier, word, 8);
  if (barrier.wanted == 0xfffff)
    fail("bytes for a barrier that is none");
  barrier.bytes -= bytes;
  settle(word, barrier);
}

void mbarrier_wait(uint64_t *word, uint32_t parity) {
  Mbarrier barrier;
  memcpy(&barrier, word, 8);
  if (barrier.wanted == 0xfffff)
    fail("a wait at a barrier that is none");
  if (barrier.phase != parity)
    return;
  waiters.push_back({self, word, parity});
  block("mbarrier at %ld, parity %ld, %ld arrivals missing", (char *)word - window(), parity,
        barrier.missing);
}

static Warp &own_warp() {
  return self->cta->warps[self->thread / 32];
}

void product(std::function<void()> what) {
  if (copies == NOW)
    what();
  else
    own_warp().open.push_back(std::move(what));
}

void commit_products() {
  Warp &warp = own_warp();
  warp.groups.push_back(std::move(warp.open));
  warp.open.clear();
}

void wait_products(int pending) {
  Warp &warp = own_warp();
  while ((int)warp.groups.size() > pending) {
    perform(warp.groups.front());
    warp.groups.pop_front();
  }
}

} // namespace emulation
