/* Pipeline of a Hopper kernel, and the shared memory of the GEMM that it synchronizes.
 *
 * A pipeline is a ring of stages with two mbarriers each:
 *
 *   producer                                   consumer
 *     wait_empty                                 wait_full
 *     fill the stage, arrive on full()           read the stage
 *     advance                                    release, advance
 *
 * `Pipeline` is a position in the ring. SharedStorage holds the barriers, the data of the stages,
 * and headers, in which the producer describes a stage to the consumers. The CTAs of a cluster
 * multicast weights to each other, so a stage is empty only when the consumers of all CTAs have
 * released it: the pipelines of a cluster advance together.
 *
 * Addresses are 32-bit, in the shared window: SharedMemory<S> holds the address of the struct and
 * adds member offsets. Each warp has a WarpContext<S>: shared memory, position in the pipeline, and
 * the epilogue buffers of a consumer. An epilogue buffer holds an epilogue tile, 64 outputs of 32
 * tokens. A consumer has OWN_BUFFERS dedicated buffers; if ALIASES, others alias its part of the
 * tile's last stage, which returns to the pipeline once TMA stores have read it. */
#ifndef MOELORA_CUDA_SM90_PIPELINE_CUH
#define MOELORA_CUDA_SM90_PIPELINE_CUH

#include <stddef.h>
#include <stdint.h>

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/sm90/kernel_shape.cuh"
#include "cuda/launch/warp.cuh"
#include "cuda/ptx/hopper.cuh"
#include "cuda/ptx/mma.cuh"

/* Lanes of a warp that arrive on an empty barrier. One suffices: a warp-synchronous instruction
 * after the reads of all lanes precedes the arrival. The racecheck tool of compute-sanitizer tracks
 * each thread separately and needs all lanes to arrive. */
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

/* Storage is the kernel's SharedStorage, at shared address `base`. Barrier addresses follow from
 * `base` and `stage` and take no registers. */
template <class Storage, int CLUSTER = 1> struct Pipeline {
  static constexpr int STAGES = decltype(Storage::barriers)::STAGES;
  static constexpr uint32_t FULL = offsetof(Storage, barriers), EMPTY = FULL + 8 * STAGES;
  uint32_t base;
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ explicit Pipeline(uint32_t shared) : base(shared) {}

  /* Initializes the barriers; called by one thread. producer_arrivals: arrivals on a full barrier,
   * besides the transaction bytes. */
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
  /* Returns whether wait_full() would return immediately; warp-uniform. Testing ahead of time hides
   * the latency of the barrier. */
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
        barrier_arrive_cluster(cluster_address(base + EMPTY + 8 * which, rank));
  }

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES)
      stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void advance(int stages) {
    const int times = (stage + stages) / STAGES;
    stage += stages - times * STAGES, phase ^= times & 1;
  }
  /* Returns to the first stage. Call init() again before. */
  __device__ __forceinline__ void restart() { stage = 0, phase = 0; }
};

/* ---- stage headers: written before the arrival on the full barrier, read after the wait ---- */

struct StageHeader {
  uint4 tile;        // TileHeader
  uint32_t adapters; // AdaptersHeader or SlabsHeader
  uint32_t unused[3];
};

/* In the first stage of a tile: the tile, the number of its valid tokens, and the number of tokens
 * to multiply (rows_multiplied). A stage with block -1 follows the last tile. */
struct TileHeader {
  Tile tile;
  int count, multiplied;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_16(at, make_uint4(tile.block, tile.column, tile.expert, count | multiplied << 8));
  }
  static __device__ __forceinline__ TileHeader read(uint32_t at) {
    const uint4 v = load_shared_16(at);
    const uint32_t rows = uniform(v.w);
    return {{(int)uniform(v.x), (int)v.y, (int)v.z}, (int)(rows & 0xff), (int)(rows >> 8)};
  }
};

/* In the last k step of a tile: the number of adapter stages that follow, and whether non-finite
 * elements of B need care: `shared` if some tokens do not carry a slab's adapter, `ragged` if a
 * slab extends beyond an adapter's true rank. */
struct AdaptersHeader {
  int stages;
  bool shared, ragged;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_4(at + 16, stages | shared << 16 | ragged << 17);
  }
  static __device__ __forceinline__ AdaptersHeader read(uint32_t at) {
    const uint32_t v = uniform(load_shared_4(at + 16));
    return {(int)(v & 0xffff), (v >> 16 & 1) != 0, v >> 17 != 0};
  }
};

/* In an adapter stage: the number of k16 slabs, and how many of them share a row of B. */
struct SlabsHeader {
  int slabs, width;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_4(at + 16, slabs | width << 16);
  }
  static __device__ __forceinline__ SlabsHeader read(uint32_t at) {
    const uint32_t v = uniform(load_shared_4(at + 16));
    return {(int)(v & 0xffff), (int)(v >> 16)};
  }
};

/* Token range of slab `slab`, in an adapter stage whose consumers predicate by token, in place of a
 * TileHeader. */
struct SlabTokens {
  int low, high;

  __device__ __forceinline__ void write(uint32_t at, int slab) const {
    store_shared_4(at + 4 * slab, low | high << 16);
  }
  static __device__ __forceinline__ SlabTokens read(uint32_t at, int slab) {
    const uint32_t v = uniform(load_shared_4(at + 4 * slab));
    return {(int)(v & 0xffff), (int)(v >> 16)};
  }
};

/* ---- shared memory ---- */

/* State of the fix-up pass, see fixup.cuh. */
struct FixupState {
  uint32_t state;
  uint64_t barrier;
};

/* S::Stage has the members sW, weights in the layout of the kernel, and sX[SPANS][TOKENS], token
 * rows. In an adapter stage sW holds rows of B and sX rows of xa, see adapters.cuh. */
template <class S> struct SharedStorage {
  typename S::Stage stages[S::STAGES];
  SwizzledRow sOut[S::CONSUMERS][S::OWN_BUFFERS][S::OUT_ROWS]; // epilogue tiles
  StageHeader headers[S::STAGES];
  PipelineBarriers<S::STAGES> barriers;
  ListedSegment segments[S::PRODUCERS / 32][S::TOKENS]; // one list per producer warp
  FixupState fixup;

  static_assert(sizeof(typename S::Stage) % 1024 == 0, "alignment of the 128-byte swizzle");
};

/* Shared memory of shapes with PAIRS, with the table of CodePairs. */
template <class S> struct PairsStorage {
  SharedStorage<S> gemm;
  uint32_t pairs[256][32];
};

template <class S> using GemmPipeline = Pipeline<SharedStorage<S>, S::CLUSTER>;

/* Bytes of dynamic shared memory of a launch, with room to align the start for the swizzle. */
template <class S> constexpr int kSharedBytes = 1024 + (int)sizeof(typename S::template Storage<S>);

template <class S> struct SharedMemory {
  using Storage = SharedStorage<S>;
  using Stage = typename S::Stage;
  static constexpr int STAGE_BYTES = sizeof(Stage);
  static_assert(S::RESIDENT * (kSharedBytes<S> + 1024) <= 228 * 1024, "shared memory of an SM");
  uint32_t base;

  __device__ __forceinline__ explicit SharedMemory(const void *dynamic)
      : base((shared_address(dynamic) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t sW(int stage) const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t sX(int stage, int span = 0) const {
    return sW(stage) + (uint32_t)offsetof(Stage, sX) + span * S::TOKENS * kRowBytes;
  }
  __device__ __forceinline__ uint32_t pairs() const {
    return base + (uint32_t)offsetof(PairsStorage<S>, pairs);
  }
  __device__ __forceinline__ uint32_t header(int stage) const {
    return base + (uint32_t)offsetof(Storage, headers) + stage * (int)sizeof(StageHeader);
  }
  /* Returns the address of this producer warp's segment list. */
  __device__ __forceinline__ uint32_t segments() const {
    return base + (uint32_t)offsetof(Storage, segments) +
           ((threadIdx.x - S::FIRST_PRODUCER) >> 5) * (int)(S::TOKENS * sizeof(ListedSegment));
  }
};

/* ---- warps ---- */

/* Named barriers. */
constexpr int kConsumerBarrier = 1; // kConsumerBarrier + i: the four warps of consumer i
constexpr int kAllConsumersBarrier = 3, kGatherBarrier = 4;

template <class S> struct WarpContext {
  static constexpr int OWN_BUFFERS = S::OWN_BUFFERS;
  static constexpr int OWN_BYTES = sizeof(SharedStorage<S>::sOut[0][0]);
  static constexpr int ALIASED_BUFFERS =
      S::ALIASES ? (int)sizeof(typename S::Stage) / S::CONSUMERS / kEpilogueBytes : 0;
  static constexpr int BUFFERS = OWN_BUFFERS + ALIASED_BUFFERS;

  SharedMemory<S> smem;
  int aliased = -1;
  int consumer = -1;
  GemmPipeline<S> pipeline;

  __device__ __forceinline__ explicit WarpContext(const void *dynamic)
      : smem(dynamic), pipeline(smem.base) {}

  /* Returns to the first stage, for another pass over the tiles. */
  __device__ __forceinline__ void restart() {
    pipeline.restart();
    aliased = -1;
  }

  /* ---- consumers only ---- */

  __device__ __forceinline__ void sync() const { warpgroup_sync(kConsumerBarrier + consumer); }
  static __device__ __forceinline__ void sync_all() {
    warpgroup_sync<128 * S::CONSUMERS>(kAllConsumersBarrier);
  }

  /* Returns the address of epilogue buffer `buffer` of consumer `owner`. Numbers from BUFFERS on
   * are the dedicated buffers again. */
  __device__ __forceinline__ uint32_t sOut(int owner, int buffer) const {
    const int more = buffer - OWN_BUFFERS;
    if (more >= 0 && more < ALIASED_BUFFERS)
      return smem.sW(aliased) + (owner * ALIASED_BUFFERS + more) * kEpilogueBytes;
    return smem.base + (uint32_t)offsetof(SharedStorage<S>, sOut) +
           (owner * OWN_BUFFERS + (more & 1)) * OWN_BYTES;
  }

  /* Waits until TMA stores have read this consumer's buffers, except for the last PENDING stores of
   * each warp. */
  template <int PENDING = 0> __device__ __forceinline__ void wait_stores_read() const {
    if ((threadIdx.x & 31) == 0)
      tma_store_wait_read<PENDING>();
    sync();
  }

  /* Releases the aliased stage, if there is one, once TMA stores have read it. */
  __device__ __forceinline__ void release_aliased_stage() {
    if (aliased < 0)
      return;
    wait_stores_read();
    pipeline.release(aliased);
    aliased = -1;
  }

  /* Turns the last stage of a tile into epilogue buffers after the main loop, or releases it. */
  __device__ __forceinline__ void take_last_stage(int last) {
    if (ALIASED_BUFFERS > 0)
      aliased = last;
    else
      pipeline.release(last);
  }
};

#endif
