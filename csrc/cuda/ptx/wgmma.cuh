/* Wgmma<N>::mma(d, a, b): d[64, N] += A[64, 16] B[N, 16]^T for one warpgroup. A and B are in shared
 * memory, given by matrix descriptors. B is K-major; A may also be MN-major: its 64 rows are then
 * contiguous, 128 bytes per element of K. d is float32 in registers: lane t of warp w holds rows
 * 16w + t/4 and 16w + t/4 + 8. Of the i-th eight columns, it holds 8i + 2(t%4) and the next: d[4i]
 * and d[4i+1] in the first row, d[4i+2] and d[4i+3] in the second.
 *
 * mma_registers: A is in registers, with the layout of mma.m16n8k16: a[0] (first row) and a[1]
 * (second row) hold columns 2(t%4) and the next, a[2] and a[3] the columns 8 further on.
 *
 * mma_e4m3: K is 32 e4m3 elements; d starts at zero unless `add` is set. */
#ifndef MOELORA_CUDA_PTX_WGMMA_CUH
#define MOELORA_CUDA_PTX_WGMMA_CUH

#include <stdint.h>

/* Major dimension of an operand in shared memory. */
enum class Major { K, MN };

template <int N> struct Wgmma;

/* An instruction names all N / 2 accumulators: MOELORA_REGISTERS_<N> are their names in its text,
 * MOELORA_D_<N> the operands of the asm statement. */
#define MOELORA_REGISTERS_8 "%0, %1, %2, %3"
#define MOELORA_REGISTERS_16 MOELORA_REGISTERS_8 ", %4, %5, %6, %7"
#define MOELORA_REGISTERS_24 MOELORA_REGISTERS_16 ", %8, %9, %10, %11"
#define MOELORA_REGISTERS_32 MOELORA_REGISTERS_24 ", %12, %13, %14, %15"
#define MOELORA_REGISTERS_48 MOELORA_REGISTERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOELORA_REGISTERS_64 MOELORA_REGISTERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOELORA_REGISTERS_80 MOELORA_REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOELORA_REGISTERS_96 MOELORA_REGISTERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOELORA_REGISTERS_112 MOELORA_REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOELORA_REGISTERS_128 MOELORA_REGISTERS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MOELORA_REGISTERS_144 MOELORA_REGISTERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"

#define MOELORA_FOUR(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define MOELORA_D_8 MOELORA_FOUR(0)
#define MOELORA_D_16 MOELORA_D_8, MOELORA_FOUR(4)
#define MOELORA_D_24 MOELORA_D_16, MOELORA_FOUR(8)
#define MOELORA_D_32 MOELORA_D_24, MOELORA_FOUR(12)
#define MOELORA_D_48 MOELORA_D_32, MOELORA_FOUR(16), MOELORA_FOUR(20)
#define MOELORA_D_64 MOELORA_D_48, MOELORA_FOUR(24), MOELORA_FOUR(28)
#define MOELORA_D_80 MOELORA_D_64, MOELORA_FOUR(32), MOELORA_FOUR(36)
#define MOELORA_D_96 MOELORA_D_80, MOELORA_FOUR(40), MOELORA_FOUR(44)
#define MOELORA_D_112 MOELORA_D_96, MOELORA_FOUR(48), MOELORA_FOUR(52)
#define MOELORA_D_128 MOELORA_D_112, MOELORA_FOUR(56), MOELORA_FOUR(60)
#define MOELORA_D_144 MOELORA_D_128, MOELORA_FOUR(64), MOELORA_FOUR(68)

#define MOELORA_WGMMA_SHARED(N, TYPE, A, B, TRANSPOSED)                                            \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                     \
               " {" MOELORA_REGISTERS_##N "}, %" #A ", %" #B ", 1, 1, 1, %" #TRANSPOSED ", 0;"     \
               : MOELORA_D_##N                                                                     \
               : "l"(a), "l"(b), "n"(MAJOR_A == Major::MN))
#define MOELORA_WGMMA_REGISTERS(N, TYPE, A0, A1, A2, A3, B)                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                     \
               " {" MOELORA_REGISTERS_##N "}, "                                                    \
                                          "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B         \
                                          ", 1, 1, 1, 0;"                                          \
               : MOELORA_D_##N                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* P0 to P4 are the numbers of the asm operands that follow the accumulators. */
#define MOELORA_WGMMA(N, P0, P1, P2, P3, P4)                                                       \
  template <> struct Wgmma<N> {                                                                    \
    template <bool IS_BF16, Major MAJOR_A = Major::K>                                              \
    static __device__ __forceinline__ void mma(float *d, uint64_t a, uint64_t b) {                 \
      if constexpr (IS_BF16)                                                                       \
        MOELORA_WGMMA_SHARED(N, "bf16", P0, P1, P2);                                               \
      else                                                                                         \
        MOELORA_WGMMA_SHARED(N, "f16", P0, P1, P2);                                                \
    }                                                                                              \
    template <bool IS_BF16>                                                                        \
    static __device__ __forceinline__ void mma_registers(float *d, const uint32_t (&a)[4],         \
                                                         uint64_t b) {                             \
      if constexpr (IS_BF16)                                                                       \
        MOELORA_WGMMA_REGISTERS(N, "bf16", P0, P1, P2, P3, P4);                                    \
      else                                                                                         \
        MOELORA_WGMMA_REGISTERS(N, "f16", P0, P1, P2, P3, P4);                                     \
    }                                                                                              \
    static __device__ __forceinline__ void mma_e4m3(float *d, uint64_t a, uint64_t b, bool add) {  \
      asm volatile("{\n"                                                                           \
                   ".reg .pred p;\n"                                                               \
                   "setp.ne.b32 p, %" #P2 ", 0;\n"                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                      \
                   " {" MOELORA_REGISTERS_##N "}, %" #P0 ", %" #P1 ", p, 1, 1;\n}"                 \
                   : MOELORA_D_##N                                                                 \
                   : "l"(a), "l"(b), "r"((int)add));                                               \
    }                                                                                              \
  };
MOELORA_WGMMA(8, 4, 5, 6, 7, 8)
MOELORA_WGMMA(16, 8, 9, 10, 11, 12)
MOELORA_WGMMA(24, 12, 13, 14, 15, 16)
MOELORA_WGMMA(32, 16, 17, 18, 19, 20)
MOELORA_WGMMA(48, 24, 25, 26, 27, 28)
MOELORA_WGMMA(64, 32, 33, 34, 35, 36)
MOELORA_WGMMA(80, 40, 41, 42, 43, 44)
MOELORA_WGMMA(96, 48, 49, 50, 51, 52)
MOELORA_WGMMA(112, 56, 57, 58, 59, 60)
MOELORA_WGMMA(128, 64, 65, 66, 67, 68)
MOELORA_WGMMA(144, 72, 73, 74, 75, 76)

#endif
