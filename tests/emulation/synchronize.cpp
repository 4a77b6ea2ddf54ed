#include <string.h>

#include "state.h"

namespace emulation {
namespace {

/* Layout of the word: expected and pending arrivals, pending bytes, phase. */
struct Mbarrier {
  int64_t bytes : 23;
  uint64_t wanted : 20, missing : 20, phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

} // namespace

void later(std::function<void()> what) {
  if (copies == NOW)
    what();
  else
    operations.push_back(std::move(what));
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
  perform_all_but(pending, self->groups[kind]);
}

void after_copies(std::function<void()> what) {
  Fiber *fiber = self;
  later([fiber, what] {
    for (Group &group : fiber->groups[COPIES])
      perform(group); /* waiting fibers still count it */
    perform(fiber->open[COPIES]);
    what();
  });
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
    while (grid_arrivals < token * launch.grid.x)
      spin("the grid");
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

void mbarrier_init(uint64_t *word, int arrivals) {
  Mbarrier barrier = {};
  barrier.wanted = barrier.missing = (uint64_t)arrivals;
  memcpy(word, &barrier, 8);
}

void mbarrier_invalidate(uint64_t *word) {
  for (const Waiter &waiter : waiters)
    if (waiter.barrier == word)
      fail("a barrier ends while thread %u waits", waiter.fiber->thread);
  memset(word, 0xff, 8);
}

static void complete_phase(uint64_t *word, Mbarrier barrier) {
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

/* Loads the barrier at `word`. Operation `what` on anything else is a fault. */
static Mbarrier load(const uint64_t *word, const char *what) {
  Mbarrier barrier;
  memcpy(&barrier, word, sizeof barrier);
  if (barrier.wanted == 0xfffff)
    fail("%s a barrier that is none", what);
  return barrier;
}

void mbarrier_arrive(uint64_t *word, int64_t expected_bytes) {
  Mbarrier barrier = load(word, "an arrival at");
  if (barrier.missing == 0)
    fail("an arrival at a barrier that has all");
  barrier.bytes += expected_bytes;
  barrier.missing--;
  complete_phase(word, barrier);
}

void mbarrier_arrived(uint64_t *word, int64_t bytes) {
  Mbarrier barrier = load(word, "bytes for");
  barrier.bytes -= bytes;
  complete_phase(word, barrier);
}

void mbarrier_wait(uint64_t *word, uint32_t parity) {
  const Mbarrier barrier = load(word, "a wait at");
  if (barrier.phase != parity)
    return;
  waiters.push_back({self, word, parity});
  block("mbarrier at %ld, parity %ld, %ld arrivals missing", (char *)word - window(), parity,
        barrier.missing);
}

bool mbarrier_test(uint64_t *word, uint32_t parity) {
  return load(word, "a test of").phase != parity;
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
  perform_all_but(pending, own_warp().groups);
}

} // namespace emulation
