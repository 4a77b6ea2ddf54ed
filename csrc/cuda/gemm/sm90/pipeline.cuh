/* Pipeline of a Hopper kernel: a ring of stages with two mbarriers each.
 *
 *   producer                                   consumer
 *     wait_empty                                 wait_full
 *     fill the stage, arrive on full()           read the stage
 *     advance                                    release, advance
 *
 * This type only holds the barriers; the data of a stage is in the kernel's SharedStorage. The
 * CTAs of a cluster multicast weights to each other, so a stage is empty only when the consumers
 * of all CTAs have released it: the pipelines of a cluster advance together. */
#ifndef MOELORA_CUDA_SM90_PIPELINE_CUH
#define MOELORA_CUDA_SM90_PIPELINE_CUH

#include <stddef.h>
#include <stdint.h>

#include "cuda/ptx/hopper.cuh"
#include "cuda/ptx/mma.cuh"

/* Lanes of a consumer warp that arrive on an empty barrier. One suffices: the other lanes' reads
 * have completed, since a shuffle or barrier has consumed them. The racecheck tool of
 * compute-sanitizer tracks each thread separately and needs all lanes to arrive. */
#ifdef MOELORA_RACECHECK
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

/* Member `barriers` of a kernel's SharedStorage. */
template <int STAGES_> struct PipelineBarriers {
  static constexpr int STAGES = STAGES_;
  uint64_t full[STAGES], empty[STAGES];
};

/* Storage is the kernel's SharedStorage, at shared address `base`. Barrier addresses are `base`
 * plus constants and take no registers. */
template <class Storage, int CLUSTER = 1> struct Pipeline {
  static constexpr int STAGES = decltype(Storage::barriers)::STAGES;
  static constexpr uint32_t FULL = offsetof(Storage, barriers), EMPTY = FULL + 8 * STAGES;
  uint32_t base;
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ explicit Pipeline(uint32_t shared) : base(shared) {}

  /* Called by one thread. producer_arrivals: arrivals on a full barrier, besides the transaction
   * bytes. */
  __device__ __forceinline__ void init(int producer_arrivals, int consumer_warps) const {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + FULL + 8 * i, producer_arrivals);
      barrier_init(base + EMPTY + 8 * i, kArrivals * consumer_warps * CLUSTER);
    }
    barrier_init_visible();
  }
  __device__ __forceinline__ void invalidate() const {
    for (int i = 0; i < 2 * STAGES; i++)
      barrier_invalidate(base + FULL + 8 * i);
  }

  __device__ __forceinline__ uint32_t full() const { return base + FULL + 8 * stage; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), phase); }
  /* Whether wait_full() would return immediately; warp-uniform. Testing ahead of time hides the
   * latency of the barrier. */
  __device__ __forceinline__ bool is_full() const {
    return __all_sync(0xffffffffu, barrier_test(full(), phase));
  }
  __device__ __forceinline__ void wait_empty() const {
    barrier_wait(base + EMPTY + 8 * stage, phase ^ 1);
  }
  /* Called by a consumer warp that has read stage `which`: signals the producers of all CTAs of
   * the cluster. */
  __device__ __forceinline__ void release(int which) const {
    const int lane = threadIdx.x & 31;
    if (CLUSTER == 1 && lane < kArrivals)
      barrier_arrive(base + EMPTY + 8 * which);
    for (int rank = 0; CLUSTER > 1 && rank < CLUSTER; rank++)
      if (kArrivals > 1 || lane == rank)
        barrier_arrive_cluster(base + EMPTY + 8 * which, rank);
  }

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES)
      stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void advance(int stages) {
    const int times = (stage + stages) / STAGES;
    stage += stages - times * STAGES, phase ^= times & 1;
  }
  /* Returns to the first stage, after init(). */
  __device__ __forceinline__ void restart() { stage = 0, phase = 0; }
};

#endif
