/* State of fibers, shared by the two halves of the engine: engine.cpp schedules them,
 * synchronize.cpp blocks and wakes them. */
#pragma once

#include <deque>

#include "engine.h"

namespace emulation {

struct Cta;
struct Cluster;

typedef std::vector<std::function<void()>> Group;

struct Fiber {
  void *stack_pointer = nullptr;
  char *stack = nullptr;
  Cta *cta = nullptr;
  unsigned thread = 0;
  bool done = false, result = false;
  const char *waits = nullptr; /* a format string with three numbers */
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

extern Fiber *self;
extern std::vector<Fiber *> ready, yielded;
extern std::vector<Waiter> waiters;
extern Group operations; /* asynchronous ones, in no order */
extern Launch launch;
extern uint64_t progress; /* incremented whenever a fiber may continue */
extern unsigned grid_arrivals;
extern enum Copies { NOW, LATE, ANY } copies;

uint32_t draw(uint32_t below);
void to_scheduler();
void release(std::vector<Fiber *> &waiting);
/* Blocks until another fiber makes this one ready; `what` is a format string with three numbers. */
void block(const char *what, int64_t a = 0, int64_t b = 0, int64_t c = 0);
void perform(Group &group);
/* Performs the oldest of these groups, until so many are left. */
void perform_all_but(int pending, std::deque<Group> &groups);

} // namespace emulation
