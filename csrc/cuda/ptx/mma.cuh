/* PTX of sm_80 and up: cp.async, ldmatrix, mma.sync, loads with cache hints. Shared memory
 * addresses are 32-bit, in the shared window. */
#ifndef MOELORA_CUDA_PTX_MMA_CUH
#define MOELORA_CUDA_PTX_MMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "cuda/ptx/pdl.cuh"

/* add_times_zero returns the packed sum + 0 * v: if v is infinite or NaN, the sum becomes NaN. */
template <class T> struct Element;
template <> struct Element<__nv_bfloat16> {
  static constexpr bool is_bf16 = true;
  static __device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __device__ __forceinline__ __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
  static __device__ __forceinline__ uint32_t add_times_zero(uint32_t sum, uint32_t v) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(v), "r"(0));
    return sum;
  }
};
template <> struct Element<__half> {
  static constexpr bool is_bf16 = false;
  static __device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
  static __device__ __forceinline__ __half round(float v) { return __float2half_rn(v); }
  static __device__ __forceinline__ uint32_t add_times_zero(uint32_t sum, uint32_t v) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(v), "r"(0));
    return sum;
  }
};

/* Rounds and packs two values, the first into the low half. */
template <class T> __device__ __forceinline__ uint32_t pack2(float low, float high) {
  T two[2] = {Element<T>::round(low), Element<T>::round(high)};
  return *(const uint32_t *)two;
}

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

/* Copies 16 bytes to shared memory: reads the first `bytes` (0..16), zero-fills the rest. `from`
 * must be mapped even if nothing is read. */
__device__ __forceinline__ void copy_async_16(uint32_t to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/* Copies as above if `wanted`; otherwise `from` may be anything. NEAR: bytes of the L2 prefetch. */
template <int NEAR = 128>
__device__ __forceinline__ void copy_async_16(uint32_t to, const void *from, int bytes,
                                              bool wanted) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %3, 0;\n"
               "@p cp.async.cg.shared.global.L2::%4B [%0], [%1], 16, %2;\n"
               "}" ::"r"(to),
               "l"(from), "r"(bytes), "r"((int)wanted), "n"(NEAR)
               : "memory");
}

/* Copies 4 bytes if `wanted`. */
__device__ __forceinline__ void copy_async_4(uint32_t to, const void *from, bool wanted) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %2, 0;\n"
               "@p cp.async.ca.shared.global [%0], [%1], 4;\n"
               "}" ::"r"(to),
               "l"(from), "r"((int)wanted)
               : "memory");
}

/* Returns the address row * bytes bytes after `from`. In PTX, because the compiler would hoist the
 * product out of a loop, at the cost of two registers. */
template <class T>
__device__ __forceinline__ const T *row_address(const T *from, uint32_t row, uint32_t bytes) {
  const T *at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(bytes), "l"(from));
  return at;
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t at, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/* Stores 16 bytes. In PTX, because nvcc may split the assignment of a uint4 from PTX or shuffles
 * into four 4-byte stores, each of which writes a part of a sector. */
__device__ __forceinline__ void store_global_16(void *to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

/* Loads eight elements, of which those from `count` on are zero, without 16-byte accesses. */
template <class T> __device__ __forceinline__ uint4 load_elements(const T *from, int count) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t low = 2 * i < count ? ((const uint16_t *)from)[2 * i] : 0;
    uint32_t high = 2 * i + 1 < count ? ((const uint16_t *)from)[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Copies eight elements to shared memory, of which those from `count` on are zero. */
template <class T>
__device__ __forceinline__ void copy_elements(uint32_t to, const T *from, int count) {
  store_shared_16(to, load_elements(from, count));
}

/* Access pattern of a load. */
enum class Read {
  STREAMED, // only this warp reads the data: bypasses L1
  SHARED,   // other warps of the SM read the data, too: allocates in L1
  CONSTANT, // as STREAMED, and the data is constant during the kernel: non-coherent load (.nc)
  WRITTEN,  // this kernel may have written the data: generic load, also from shared memory
};

/* Loads 4 bytes, or zero if not `valid`. This kernel may have written them. */
__device__ __forceinline__ uint32_t load_4(const uint16_t *from, bool valid) {
  uint32_t v;
  asm volatile("{\n"
               ".reg .pred p;\n"
               "setp.ne.b32 p, %2, 0;\n"
               "mov.b32 %0, 0;\n"
               "@p ld.global.b32 %0, [%1];\n"
               "}"
               : "=&r"(v)
               : "l"(from), "r"((int)valid)
               : "memory");
  return v;
}

/* Loads 8 bytes, or zeros if not `valid`. */
template <Read READ> __device__ __forceinline__ uint2 load_8(const void *from, bool valid) {
  uint2 v;
#define MOELORA_LOAD(HOW)                                                                          \
  asm volatile("{\n"                                                                               \
               ".reg .pred p;\n"                                                                   \
               "setp.ne.b32 p, %3, 0;\n"                                                           \
               "mov.b32 %0, 0;\n"                                                                  \
               "mov.b32 %1, 0;\n"                                                                  \
               "@p ld." HOW "v2.b32 {%0, %1}, [%2];\n"                                             \
               "}"                                                                                 \
               : "=&r"(v.x), "=&r"(v.y)                                                            \
               : "l"(from), "r"((int)valid))
  static_assert(READ == Read::STREAMED || READ == Read::SHARED);
  if constexpr (READ == Read::STREAMED)
    MOELORA_LOAD("global.L1::no_allocate.L2::128B.");
  else
    MOELORA_LOAD("global.L2::128B.");
#undef MOELORA_LOAD
  return v;
}

/* Loads 16 bytes, or zeros if not `valid`. */
template <Read READ> __device__ __forceinline__ uint4 load_16(const void *from, bool valid) {
  uint4 v;
#define MOELORA_LOAD(HOW, ...)                                                                     \
  asm volatile("{\n"                                                                               \
               ".reg .pred p;\n"                                                                   \
               "setp.ne.b32 p, %5, 0;\n"                                                           \
               "mov.b32 %0, 0;\n"                                                                  \
               "mov.b32 %1, 0;\n"                                                                  \
               "mov.b32 %2, 0;\n"                                                                  \
               "mov.b32 %3, 0;\n"                                                                  \
               "@p ld." HOW "v4.b32 {%0, %1, %2, %3}, [%4];\n"                                     \
               "}"                                                                                 \
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)                                    \
               : "l"(from), "r"((int)valid)__VA_ARGS__)
  if constexpr (READ == Read::STREAMED)
    MOELORA_LOAD("global.L1::no_allocate.L2::128B.");
  else if constexpr (READ == Read::SHARED)
    MOELORA_LOAD("global.L2::128B.");
  else if constexpr (READ == Read::CONSTANT)
    MOELORA_LOAD("global.nc.L1::no_allocate.L2::128B.");
  else
    MOELORA_LOAD("", : "memory");
#undef MOELORA_LOAD
  return v;
}

/* Loads 8 or 16 bytes as Read::STREAMED. */
template <int WORDS>
__device__ __forceinline__ void load_streamed(uint32_t (&v)[WORDS], const void *from) {
  static_assert(WORDS == 2 || WORDS == 4, "one access");
  if constexpr (WORDS == 2)
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "l"(from));
  else
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(from));
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

template <int OFFSET> __device__ __forceinline__ void store_shared_2(uint32_t at, int16_t v) {
  asm volatile("st.shared.b16 [%0 + %2], %1;" ::"r"(at), "h"(v), "n"(OFFSET) : "memory");
}
__device__ __forceinline__ void store_shared_2_4(uint32_t at, int16_t v, int32_t next) {
  asm volatile("st.shared.b16 [%0], %1;\n"
               "st.shared.b32 [%0 + 4], %2;" ::"r"(at),
               "h"(v), "r"(next)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t at, uint2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&v)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

/* Loads as load_matrix_x4, and transposes each 8x8 matrix. */
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&v)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x2(uint32_t (&v)[2], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(v[0]), "=r"(v[1])
               : "r"(at)
               : "memory");
}

/* Adds a[16, 16] b[8, 16]^T to d[16, 8]. Lane t holds rows t/4 and t/4 + 8 of d, columns 2(t%4)
 * and 2(t%4) + 1. */
template <class T>
__device__ __forceinline__ void mma_16816(float *d, const uint32_t *a, const uint32_t *b) {
#define MOELORA_MMA(TYPE)                                                                          \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                      \
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                   \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (Element<T>::is_bf16)
    MOELORA_MMA("bf16");
  else
    MOELORA_MMA("f16");
#undef MOELORA_MMA
}

/* Transposes an 8x8 matrix of 16-bit elements that is distributed over a warp. */
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

__device__ __forceinline__ void prefetch(const void *p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

__device__ __forceinline__ void prefetch_l2(const void *p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

#endif
