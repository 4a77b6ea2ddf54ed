/* csrc/cuda/ptx/hopper.cuh on the engine. */
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "cuda/ptx/mma.cuh"

inline uint64_t *barrier_at(uint32_t barrier) {
  return (uint64_t *)emulation::checked(barrier, 8);
}
inline void barrier_init(uint32_t barrier, int arrivals) {
  emulation::mbarrier_init(barrier_at(barrier), arrivals);
}
inline void barrier_invalidate(uint32_t barrier) {
  emulation::mbarrier_invalidate(barrier_at(barrier));
}
inline void barrier_init_visible() {}
inline void barrier_arrive(uint32_t barrier) {
  emulation::mbarrier_arrive(barrier_at(barrier), 0);
}
inline void barrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_arrive(barrier_at(barrier), bytes);
}
inline void barrier_arrive_cp_async(uint32_t barrier) {
  uint64_t *at = barrier_at(barrier);
  emulation::after_copies([at] { emulation::mbarrier_arrive(at, 0); });
}
inline bool elect_one() {
  return threadIdx.x % 32 == 0;
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulation::mbarrier_wait(barrier_at(barrier), parity);
}
inline bool barrier_test(uint32_t barrier, uint32_t parity) {
  return emulation::mbarrier_test(barrier_at(barrier), parity);
}
inline uint32_t cluster_address(uint32_t at, uint32_t rank) {
  return rank << 24 | at;
}
inline void barrier_arrive_cluster(uint32_t there) {
  const uint32_t barrier = there & 0xffffff;
  barrier_at(barrier);
  emulation::mbarrier_arrive((uint64_t *)(emulation::window_of(there >> 24) + barrier), 0);
}
inline void barrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_arrived(barrier_at(barrier), -(int64_t)bytes);
}

inline uint64_t evict_first_policy() {
  return 0;
}
inline uint64_t evict_normal_policy() {
  return 0;
}

inline void tma_load_2d(uint32_t to, const CUtensorMap *map, int c0, int c1, uint32_t barrier) {
  emulation::load_box(to, *map, {c0, c1}, barrier, false);
}
inline void tma_load_4d(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3,
                        uint32_t barrier, uint64_t) {
  emulation::load_box(to, *map, {c0, c1, c2, c3}, barrier, false);
}
inline void tma_load_4d_multicast(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2,
                                  int c3, uint32_t barrier, uint64_t) {
  emulation::load_box(to, *map, {c0, c1, c2, c3}, barrier, true);
}
inline void tma_load_5d(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3, int c4,
                        uint32_t barrier, uint64_t) {
  emulation::load_box(to, *map, {c0, c1, c2, c3, c4}, barrier, false);
}
inline void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t) {
  emulation::load_bytes(to, from, bytes, barrier, false);
}
inline void bulk_load_multicast(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                uint64_t) {
  emulation::load_bytes(to, from, bytes, barrier, true);
}
inline void tma_store_2d(const CUtensorMap *map, int c0, int c1, uint32_t from) {
  emulation::store_box(*map, c0, c1, from);
}
template <int PENDING = 0> void tma_store_wait_read() {
  emulation::wait_group(emulation::BULK_STORES, PENDING);
}
inline void tma_store_wait() {
  emulation::wait_group(emulation::BULK_STORES, 0);
}

inline uint32_t cluster_rank() {
  return emulation::cluster_rank();
}
inline void cluster_sync() {
  emulation::cluster_sync();
}
inline void store_cluster_4(uint32_t at, uint32_t rank, uint32_t v) {
  emulation::checked(at, 4);
  memcpy(emulation::window_of(rank) + at, &v, 4);
}

template <int THREADS = 128> bool warpgroup_any(int id, bool value) {
  return emulation::barrier_sync(id, THREADS, value);
}
template <int THREADS = 128> void warpgroup_sync(int id) {
  emulation::barrier_sync(id, THREADS);
}

inline void fence_async_proxy() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::meet(~0u, [](void *const(&)[32], uint32_t) { emulation::commit_products(); }, nullptr);
}
template <int PENDING> void wgmma_wait() {
  emulation::meet(
      ~0u, [](void *const(&)[32], uint32_t) { emulation::wait_products(PENDING); }, nullptr);
}
template <int COUNT> void fence_accumulators(float *) {}
inline uint64_t wgmma_descriptor_of(uint32_t address, int steps) {
  const uint32_t high = (uint32_t)(3 - steps / 2) << 30 | (uint32_t)steps * (256 >> 4);
  return ((uint64_t)high << 32) | ((uint64_t)1 << 16) | (uint64_t)((address & 0x3FFFF) >> 4);
}
inline uint64_t wgmma_descriptor(uint32_t address) {
  return wgmma_descriptor_of(address, 4);
}
inline uint64_t move_descriptor(uint64_t descriptor, uint32_t by) {
  return (descriptor & ~(uint64_t)UINT32_MAX) | (uint32_t)((uint32_t)descriptor + by);
}
template <int REGISTERS> void warpgroup_reg_dealloc() {}
template <int REGISTERS> void warpgroup_reg_alloc() {}

inline void store_matrix_x4(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t v[4] = {a, b, c, d};
  emulation::move_matrices({false, false}, v, 4, at);
}
inline void store_matrix_x4_trans(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t v[4] = {a, b, c, d};
  emulation::move_matrices({false, true}, v, 4, at);
}
inline void store_matrix_x2_trans(uint32_t at, uint32_t a, uint32_t b) {
  uint32_t v[2] = {a, b};
  emulation::move_matrices({false, true}, v, 2, at);
}
