/* csrc/cuda/ptx/mma.cuh on the engine. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "cuda/ptx/pdl.cuh"
#include "operations.h"

template <class T> struct Element;
template <> struct Element<__nv_bfloat16> {
  static constexpr bool is_bf16 = true;
  static float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
  static __nv_bfloat16 round(float v) { return __float2bfloat16_rn(v); }
  static uint32_t add_times_zero(uint32_t sum, uint32_t v) {
    return emulation::fma_pair(true, v, 0, sum);
  }
};
template <> struct Element<__half> {
  static constexpr bool is_bf16 = false;
  static float to_float(__half v) { return __half2float(v); }
  static __half round(float v) { return __float2half_rn(v); }
  static uint32_t add_times_zero(uint32_t sum, uint32_t v) {
    return emulation::fma_pair(false, v, 0, sum);
  }
};

template <class T> uint32_t pack2(float low, float high) {
  const T two[2] = {Element<T>::round(low), Element<T>::round(high)};
  uint32_t word;
  memcpy(&word, two, 4);
  return word;
}

inline uint32_t shared_address(const void *p) {
  const ptrdiff_t offset = (const char *)p - emulation::window();
  if (offset < 0 || offset >= (ptrdiff_t)emulation::kWindow)
    emulation::fail("an address that is not of shared memory");
  return (uint32_t)offset;
}

inline void copy_async_16(uint32_t to, const void *from, int bytes) {
  emulation::copy_async(to, from, 16, bytes);
}
template <int NEAR = 128>
void copy_async_16(uint32_t to, const void *from, int bytes, bool wanted) {
  if (wanted)
    emulation::copy_async(to, from, 16, bytes);
}
inline void copy_async_4(uint32_t to, const void *from, bool wanted) {
  if (wanted)
    emulation::copy_async(to, from, 4, 4);
}
template <class T> const T *row_address(const T *from, uint32_t row, uint32_t bytes) {
  return (const T *)((const char *)from + (uint64_t)row * bytes);
}
inline void copy_async_commit() {
  emulation::commit_group(emulation::COPIES);
}
template <int PENDING> void copy_async_wait() {
  emulation::wait_group(emulation::COPIES, PENDING);
}

template <class T> void store_shared(uint32_t at, T v) {
  memcpy(emulation::checked(at, sizeof v), &v, sizeof v);
}
template <class T> T load_shared(uint32_t at) {
  T v;
  memcpy(&v, emulation::checked(at, sizeof v), sizeof v);
  return v;
}
inline void store_shared_16(uint32_t at, uint4 v) {
  store_shared(at, v);
}
inline void store_global_16(void *to, uint4 v) {
  memcpy(to, &v, sizeof v);
}
inline void store_shared_8(uint32_t at, uint2 v) {
  store_shared(at, v);
}
inline void store_shared_4(uint32_t at, uint32_t v) {
  store_shared(at, v);
}
template <int OFFSET> void store_shared_2(uint32_t at, int16_t v) {
  store_shared(at + OFFSET, v);
}
inline void store_shared_2_4(uint32_t at, int16_t v, int32_t next) {
  store_shared(at, v);
  store_shared(at + 4, next);
}
inline uint4 load_shared_16(uint32_t at) {
  return load_shared<uint4>(at);
}
inline uint2 load_shared_8(uint32_t at) {
  return load_shared<uint2>(at);
}
inline uint32_t load_shared_4(uint32_t at) {
  return load_shared<uint32_t>(at);
}
inline uint32_t load_shared_2(uint32_t at) {
  return load_shared<uint16_t>(at);
}

template <class T> uint4 load_elements(const T *from, int count) {
  uint4 v = {};
  if (count > 0)
    memcpy(&v, from, 2 * (size_t)(count < 8 ? count : 8));
  return v;
}
template <class T> void copy_elements(uint32_t to, const T *from, int count) {
  store_shared_16(to, load_elements(from, count));
}

enum class Read { STREAMED, SHARED, CONSTANT, WRITTEN };

template <class V> V load_if(const void *from, bool valid) {
  V v = {};
  if (valid) {
    emulation::check_aligned(from, sizeof v);
    memcpy(&v, from, sizeof v);
  }
  return v;
}
template <Read READ> uint2 load_8(const void *from, bool valid) {
  return load_if<uint2>(from, valid);
}
template <Read READ> uint4 load_16(const void *from, bool valid) {
  return load_if<uint4>(from, valid);
}
inline uint32_t load_4(const uint16_t *from, bool valid) {
  return load_if<uint32_t>(from, valid);
}
template <int WORDS> void load_streamed(uint32_t (&v)[WORDS], const void *from) {
  emulation::check_aligned(from, sizeof v);
  memcpy(v, from, sizeof v);
}

inline void load_matrix_x4(uint32_t (&v)[4], uint32_t at) {
  emulation::move_matrices({true, false}, v, 4, at);
}
inline void load_matrix_x4_trans(uint32_t (&v)[4], uint32_t at) {
  emulation::move_matrices({true, true}, v, 4, at);
}
inline void load_matrix_x2(uint32_t (&v)[2], uint32_t at) {
  emulation::move_matrices({true, false}, v, 2, at);
}
template <class T> void mma_16816(float *d, const uint32_t *a, const uint32_t *b) {
  emulation::mma(Element<T>::is_bf16, d, a, b);
}
inline uint32_t transpose_8x8(uint32_t v) {
  return emulation::transpose(v);
}

inline void prefetch(const void *) {}
inline void prefetch_l2(const void *) {}
