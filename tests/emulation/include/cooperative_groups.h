#pragma once

#include "engine.h"

namespace cooperative_groups {
struct grid_group {
  unsigned barrier_arrive() { return emulation::grid_arrive(); }
  void barrier_wait(unsigned &&token) { emulation::grid_wait(token); }
};
inline grid_group this_grid() {
  return {};
}
} // namespace cooperative_groups
