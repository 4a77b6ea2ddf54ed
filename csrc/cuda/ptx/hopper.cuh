/* PTX of sm_90a: mbarriers, TMA, clusters, wgmma fences, setmaxnreg. Shared memory addresses are
 * 32-bit, in the shared window. */
#ifndef MOELORA_CUDA_PTX_HOPPER_CUH
#define MOELORA_CUDA_PTX_HOPPER_CUH

#include <cuda.h>
#include <stdint.h>

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Invalidates a barrier, so that its memory can be initialized again. */
__device__ __forceinline__ void barrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_init_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and adds `bytes` to the transaction count that TMA loads must complete. */
__device__ __forceinline__ void barrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/* Expects more bytes in the current phase, without an arrival. */
__device__ __forceinline__ void barrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/* Arrives when all prior cp.async of this thread complete. */
__device__ __forceinline__ void barrier_arrive_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Returns whether this lane is elected; the warp must be converged. elect.sync tells the compiler
 * that a single lane is active, so it emits TMA instructions without a loop over lanes. */
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n"
               ".reg .pred mine;\n"
               "elect.sync _|mine, 0xffffffff;\n"
               "selp.u32 %0, 1, 0, mine;\n"
               "}"
               : "=r"(elected)::"memory");
  return elected;
}

/* Waits for the phase of parity `parity`, in a plain loop: a trap or printf here would raise the
 * register count of the whole kernel. The suspend-time hint is 10 ms. Without it
 * `mbarrier.try_wait` returns early, and spinning warps take issue slots from the others. */
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

/* Returns whether a wait would return immediately. */
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

/* Issues a bulk copy of `bytes` contiguous bytes; size and addresses must be multiples of 16. */
__device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}

/* Issues a bulk copy to both CTAs of a cluster. In each, it writes at the offset of `to` and
 * completes the bytes on the barrier at the offset of `barrier`. */
__device__ __forceinline__ void bulk_load_multicast(uint32_t to, const void *from, uint32_t bytes,
                                                    uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               ".multicast::cluster.L2::cache_hint [%0], [%1], %2, [%3], %4, %5;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)3), "l"(policy)
               : "memory");
}

/* Issues a TMA load to both CTAs of a cluster, as bulk_load_multicast(). */
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

/* Stores a box from shared to global memory, clipped at the bounds. Commits one group per call. */
__device__ __forceinline__ void tma_store_2d(const CUtensorMap *map, int c0, int c1,
                                             uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
               "cp.async.bulk.commit_group;" ::"l"(map),
               "r"(c0), "r"(c1), "r"(from)
               : "memory");
}

/* tma_store_wait_read() waits until all of this thread's stores except the last PENDING have read
 * shared memory; tma_store_wait() waits until all have completed. */
template <int PENDING = 0> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- thread block clusters ---- */

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

/* Stores a word at the offset of `at` in the shared memory of CTA `rank`. */
__device__ __forceinline__ void store_cluster_4(uint32_t at, uint32_t rank, uint32_t v) {
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "st.shared::cluster.b32 [there], %2;\n"
               "}" ::"r"(at),
               "r"(rank), "r"(v)
               : "memory");
}

/* Returns the address of `at` in CTA `rank` of the cluster. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t at, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}

/* Arrives on the barrier at an address of the cluster. The default, a release at CTA scope, orders
 * prior reads of a stage by this thread; cluster scope would fence global memory. */
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

/* Returns whether `value` is true in any of the THREADS threads at named barrier `id`. */
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

/* Makes generic-proxy writes to shared memory visible to later wgmma and bulk copies. */
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

/* Prevents the compiler from moving arithmetic on wgmma accumulators across the instructions that
 * issue wgmmas or wait for them. */
template <int COUNT> __device__ __forceinline__ void fence_accumulators(float *d) {
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    asm volatile("" : "+f"(d[i])::"memory");
}

/* Returns the matrix descriptor of a tile of 128-byte rows with 128-byte swizzle: contiguous 8-row
 * atoms of 1024 bytes. K-major: adding 2 (units of 16 bytes) advances K by 16 16-bit elements. */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  return ((uint64_t)1 << 62) | ((uint64_t)(1024 >> 4) << 32) | ((uint64_t)1 << 16) |
         (uint64_t)((address & 0x3FFFF) >> 4);
}

/* Returns the matrix descriptor of a K-major tile whose rows have 16 * `steps` 16-bit elements
 * (steps is 1, 2 or 4) and whose swizzle is as wide as a row. */
__device__ __forceinline__ uint64_t wgmma_descriptor_of(uint32_t address, int steps) {
  const uint32_t high = (uint32_t)(3 - steps / 2) << 30 | (uint32_t)steps * (256 >> 4);
  return ((uint64_t)high << 32) | ((uint64_t)1 << 16) | (uint64_t)((address & 0x3FFFF) >> 4);
}

/* Advances a descriptor by `by` units of 16 bytes; the address is in the low half. */
__device__ __forceinline__ uint64_t move_descriptor(uint64_t descriptor, uint32_t by) {
  return (descriptor & ~(uint64_t)UINT32_MAX) | (uint32_t)((uint32_t)descriptor + by);
}

template <int REGISTERS> __device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

/* Waits at named barrier `id` (1..15) for THREADS threads, by default a warpgroup. */
template <int THREADS = 128> __device__ __forceinline__ void warpgroup_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Stores four 8x8 matrices of 16-bit elements to shared memory. */
__device__ __forceinline__ void store_matrix_x4(uint32_t at, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

/* Stores as store_matrix_x4, and transposes each 8x8 matrix. */
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
