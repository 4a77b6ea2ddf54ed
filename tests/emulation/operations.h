/* Matrix loads, stores and MMAs on the engine. For each K step of an instruction, products are
 * summed exactly and added to the accumulator with a single rounding, for mma and wgmma alike. */
#pragma once

#include <cuda.h>
#include <stdint.h>

#include <array>

#include "engine.h"

namespace emulation {

enum Type { BF16, F16, E4M3 };

/* Packed a * b + c, rounded once. */
uint32_t fma_pair(bool is_bf16, uint32_t a, uint32_t b, uint32_t c);
inline void check_aligned(const void *p, size_t to) {
  if ((uintptr_t)p % to)
    fail("%p is no multiple of %zu", p, to);
}
void copy_async(uint32_t to, const void *from, int size, int bytes);
/* Moves the 16-byte rows of a warp's 8x8 matrices, once all lanes arrive: between their memory and
 * the registers of the lanes, which hold two neighbors of a row, or of a column. */
struct Move {
  bool loads, transposed;
};
void move_matrices(Move how, uint32_t *v, int count, uint32_t at);
uint32_t transpose(uint32_t v);
void mma(bool is_bf16, float *d, const uint32_t *a, const uint32_t *b);
void wgmma(Type type, int n, float *d, const uint32_t *a_registers, uint64_t a, uint64_t b,
           bool add, bool a_transposed = false);

void load_box(uint32_t to, const CUtensorMap &map, std::array<int, 5> at, uint32_t barrier,
              bool multicast);
void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, bool multicast);
void store_box(const CUtensorMap &map, int c0, int c1, uint32_t from);

} // namespace emulation
