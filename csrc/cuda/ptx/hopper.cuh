/* sm_90a: mbarriers, TMA, clusters, the ordering of wgmma, setmaxnreg. Addresses of shared memory
 * are 32-bit, in the shared window. */
#ifndef MOELORA_CUDA_PTX_HOPPER_CUH
#define MOELORA_CUDA_PTX_HOPPER_CUH

#include <cuda.h>
#include <stdint.h>

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Ends a barrier: its memory may become another one. */
__device__ __forceinline__ void barrier_end(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_init_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* One arrival that also adds `bytes`, which TMA loads complete, to what the phase waits for. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/* One arrival of this thread, when all its cp.async so far are complete. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* True in one lane of a converged warp. The compiler knows that it is one lane, and issues TMA
 * instructions without a loop over lanes. */
__device__ __forceinline__ bool is_elected() {
  uint32_t elected;
  asm volatile("{\n"
               ".reg .pred mine;\n"
               "elect.sync _|mine, 0xffffffff;\n"
               "selp.u32 %0, 1, 0, mine;\n"
               "}"
               : "=r"(elected)::"memory");
  return elected;
}

/* A plain loop: a trap or a printf in here would cost the whole kernel registers. The suspend-time
 * hint is 10 ms: without it `mbarrier.try_wait` returns after a moment, and warps that wait take
 * issue slots from those that work. */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n"
               "@!done bra again;\n"
               "}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}

/* Whether a wait would return at once. */
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n"
               ".reg .pred done;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
               "selp.u32 %0, 1, 0, done;\n"
               "}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done;
}

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                            int c2, int c3, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
               : "memory");
}

/* `bytes` contiguous bytes, a multiple of 16, of addresses that are multiples of 16. */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}

/* The same for both CTAs of a cluster: each gets the bytes, and their completion at its barrier. */
__device__ __forceinline__ void bulk_load_multicast(uint32_t to, const void *from, uint32_t bytes,
                                                    uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster.L2::cache_hint [%0], [%1], %2, [%3], %4, %5;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)3), "l"(policy)
               : "memory");
}

/* The same for both CTAs of a cluster: each gets the box, and its completion at its barrier. */
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t to, const CUtensorMap *map, int c0,
                                                      int c1, int c2, int c3, uint32_t barrier,
                                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"((uint16_t)3), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                            uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(map), "r"(c0), "r"(c1), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                            int c2, int c3, int c4, uint32_t barrier,
                                            uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
               : "memory");
}

/* A box from shared memory to global memory, clipped there. One group per call. */
__device__ __forceinline__ void tma_store_2d(const CUtensorMap *map, int c0, int c1,
                                             uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
               "cp.async.bulk.commit_group;" ::"l"(map),
               "r"(c0), "r"(c1), "r"(from)
               : "memory");
}

/* Waits until all of this thread's stores but the last PENDING have read shared memory, or until
 * all are done. */
template <int PENDING = 0> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- clusters of CTAs ---- */

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\n"
               "barrier.cluster.wait.aligned;" ::
                   : "memory");
}

/* A word of CTA `rank`'s copy of shared memory. */
__device__ __forceinline__ void store_cluster_4(uint32_t at, uint32_t rank, uint32_t v) {
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "st.shared::cluster.b32 [there], %2;\n"
               "}" ::"r"(at),
               "r"(rank), "r"(v)
               : "memory");
}

/* Arrives at CTA `rank`'s copy of a barrier. A release at cluster scope would fence all of global
 * memory; the stage was only read, and a plain arrival orders reads before it. */
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
               "}" ::"r"(barrier),
               "r"(rank)
               : "memory");
}

/* True if `value` is for any of the THREADS threads that wait at named barrier `id`. */
template <int THREADS = 128> __device__ __forceinline__ bool warpgroup_any(int id, bool value) {
  uint32_t any;
  asm volatile("{\n"
               ".reg .pred mine, all;\n"
               "setp.ne.u32 mine, %1, 0;\n"
               "barrier.cta.red.or.pred all, %2, %3, mine;\n"
               "selp.u32 %0, 1, 0, all;\n"
               "}"
               : "=r"(any)
               : "r"((uint32_t)value), "r"(id), "n"(THREADS)
               : "memory");
  return any;
}

/* Orders ordinary writes to shared memory, seen by this thread, before its wgmma and bulk copies.
 */
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps arithmetic with accumulators of wgmma from being moved across the instructions that issue
 * or await products. */
template <int COUNT> __device__ __forceinline__ void settle(float *d) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    asm volatile("" : "+f"(d[i])::"memory");
}

/* Matrix descriptor of a tile of 128-byte rows in the 128-byte swizzle: 8-row atoms of 1024 bytes,
 * one after the other. Adding 2 (units of 16 bytes) advances by 16 elements of depth. */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  return ((uint64_t)1 << 62) | ((uint64_t)(1024 >> 4) << 32) | ((uint64_t)1 << 16) |
         (uint64_t)((address & 0x3FFFF) >> 4);
}

/* The same of rows of `steps` k16 steps, 1, 2 or 4, in the swizzle of as many bytes. */
__device__ __forceinline__ uint64_t wgmma_descriptor_of(uint32_t address, int steps) {
  const uint32_t high = (uint32_t)(3 - steps / 2) << 30 | (uint32_t)steps * (256 >> 4);
  return ((uint64_t)high << 32) | ((uint64_t)1 << 16) | (uint64_t)((address & 0x3FFFF) >> 4);
}

/* Advances a descriptor by `by` units of 16 bytes: addresses are in the low half. */
__device__ __forceinline__ uint64_t move_descriptor(uint64_t descriptor, uint32_t by) {
  return (descriptor & ~(uint64_t)UINT32_MAX) | (uint32_t)((uint32_t)descriptor + by);
}

template <int REGISTERS> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* THREADS threads, by default a warpgroup, wait at named barrier `id` (1..15). */
template <int THREADS = 128> __device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* 8x8 tiles of 16-bit elements to shared memory. */
__device__ __forceinline__ void store_matrix_x4(uint32_t at, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

/* The same, transposed on the way. */
__device__ __forceinline__ void store_matrix_x4_trans(uint32_t at, uint32_t a, uint32_t b,
                                                      uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void store_matrix_x2_trans(uint32_t at, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a),
               "r"(b)
               : "memory");
}

#endif
