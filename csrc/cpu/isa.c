/* Finds the instruction sets that the CPU supports and whose registers the OS saves. */
#define _DEFAULT_SOURCE /* syscall() */
#include "cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* XCR0 bits for AVX (SSE and AVX state), AVX-512 (also opmask and both halves of the ZMM state),
 * and AMX (configuration and data of tiles). */
enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xe6, XCR0_AMX = 0x60000 };
/* CPUID leaf 7, EDX: bf16 products, and tiles. */
enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };

static uint64_t read_xcr0(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

static bool has(uint32_t word, uint32_t bits) {
  return (word & bits) == bits;
}

/* Requests permission to use tiles: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for all
 * threads of the process and its forks. Linux before 5.16 refuses it; later versions refuse it if
 * the alternate signal stack of a thread is too small to save tiles. */
static bool may_use_tiles(void) {
  enum { REQUEST = 0x1023, TILE_DATA = 18 };
#ifdef SYS_arch_prctl
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

uint32_t moelora_cpu_isa(void) {
  uint32_t a, b, c, d, isa = MOELORA_ISA_SCALAR;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C))
    return isa;
  uint64_t xcr0 = read_xcr0();
  if ((xcr0 & XCR0_AVX) != XCR0_AVX || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
    return isa;
  const uint32_t subleaves = a, leaf7 = d;
  if (has(b, bit_AVX2))
    isa |= MOELORA_ISA_AVX2;
  if ((xcr0 & XCR0_AVX512) == XCR0_AVX512 &&
      has(b, bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL)) {
    isa |= MOELORA_ISA_AVX512;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, bit_AVX512BF16))
      isa |= MOELORA_ISA_AVX512_BF16;
    if ((isa & MOELORA_ISA_AVX512_BF16) && has(leaf7, AMX_BF16 | AMX_TILE) &&
        (xcr0 & XCR0_AMX) == XCR0_AMX && may_use_tiles())
      isa |= MOELORA_ISA_AMX_BF16;
  }
  return isa;
}
#else
uint32_t moelora_cpu_isa(void) {
  return MOELORA_ISA_SCALAR;
}
#endif
