/* csrc/cuda/ptx/wgmma.cuh on the engine. */
#pragma once

#include <stdint.h>

#include "operations.h"

enum class Major { K, MN };

template <int N> struct Wgmma {
  static_assert(N % 8 == 0 && N <= 256, "an instruction's");
  template <bool IS_BF16, Major A = Major::K> static void mma(float *d, uint64_t a, uint64_t b) {
    emulation::wgmma(IS_BF16 ? emulation::BF16 : emulation::F16, N, d, nullptr, a, b, true,
                     A == Major::MN);
  }
  template <bool IS_BF16> static void mma_registers(float *d, const uint32_t (&a)[4], uint64_t b) {
    emulation::wgmma(IS_BF16 ? emulation::BF16 : emulation::F16, N, d, a, 0, b, true);
  }
  static void mma_e4m3(float *d, uint64_t a, uint64_t b, bool add) {
    emulation::wgmma(emulation::E4M3, N, d, nullptr, a, b, add);
  }
};
