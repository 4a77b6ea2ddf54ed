/* The ring of a Hopper GEMM: stages of shared memory that a producer warpgroup fills and one or two
 * consumer warpgroups empty, and what the producer tells the consumers about them.
 *
 *   STAGES x { W [TILES][64] rows, X [TOKENS] rows }      rows of 128 bytes, see tile.cuh
 *   CONSUMERS x { OWN_UNITS units }                        results on their way out
 *   STAGES x { note }                                      32 bytes
 *   STAGES x { full }, STAGES x { empty }                  mbarriers
 *   4 x { runs }                                           of adapters, one list per producer warp
 *   { wild }, { met }                                      see Ring::is_wild; an mbarrier
 *
 * The CTAs of a cluster work on neighbouring blocks of one expert and share its weights: each loads
 * its part and the copy engine delivers it to both, so that a stage is free when the consumers of
 * both have left it, and the rings of both go in step. */
#ifndef MOELORA_CUDA_SM90_RING_CUH
#define MOELORA_CUDA_SM90_RING_CUH

#include "cuda/ptx/hopper.cuh"
#include "cuda/gemm/common/tile.cuh"

constexpr int kProducers = 128, kGatherers = 96; // threads
constexpr int kUnitTokens = 32;
constexpr int kUnitBytes = kUnitTokens * kRowBytes; // 64 outputs of 32 tokens
constexpr int kNoteBytes = 32;

/* Lanes of a warp that arrive when it leaves a stage. One does, for what the others read has
 * reached registers: a shuffle or a barrier has used it. compute-sanitizer's racecheck follows each
 * thread by itself, and sees that only where all of them arrive. */
#ifdef MOELORA_RACECHECK
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

/* Tiles of one consumer are for streaming weights: two CTAs share an SM, and one fills its ring
 * while the other finishes a tile. */
template <int TOKENS_, int CONSUMERS_, int STAGES_, int CLUSTER_>
struct GemmShape : Extent<TOKENS_, 2 * CONSUMERS_> {
  using E = Extent<TOKENS_, 2 * CONSUMERS_>;
  static constexpr int CONSUMERS = CONSUMERS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr int THREADS = kProducers + 128 * CONSUMERS;
  static constexpr int RESIDENT = CONSUMERS == 1 ? 2 : 1; // CTAs per SM
  // Token rows that one copy brings, and those of another kind that bring the last ones.
  static constexpr int BOX = TOKENS_ < 64 ? TOKENS_ : 64, REST_BOX = TOKENS_ % 32 == 0 ? 32 : 16;
  // Widths of the token side of wgmma: from half of a full tile on, in steps.
  static constexpr int STEP = TOKENS_ < 64 ? 8 : 16;
  static constexpr int LEAST = (TOKENS_ / 2 + STEP - 1) / STEP * STEP;
  // Units of results that a consumer has room for: of its own, and in its part of a stage that all
  // have multiplied. A tile of few tokens does without those.
  static constexpr int OWN_UNITS = 2;
  static constexpr int LENT_UNITS =
      TOKENS_ <= kUnitTokens ? 0 : E::STAGE_BYTES / CONSUMERS_ / kUnitBytes;
  // Up to 1023 bytes go to the alignment that the swizzle needs.
  static constexpr int RUNS_BYTES = 8 * TOKENS_;
  static constexpr int STAGING_BYTES = CONSUMERS_ * OWN_UNITS * kUnitBytes;
  static constexpr int SHARED =
      1024 + STAGES * (E::STAGE_BYTES + 16 + kNoteBytes) + STAGING_BYTES + 4 * RUNS_BYTES + 16;
  static_assert(TOKENS_ % REST_BOX == 0 && TOKENS_ % STEP == 0, "whole boxes, whole steps");
  static_assert(RESIDENT * (SHARED + 1024) <= 228 * 1024, "shared memory of an SM");
};

/* What every lane read alike, so that the compiler, too, knows it for the same in all of a warp. */
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

template <class S> struct Ring {
  static constexpr uint32_t STAGING = S::STAGES * S::STAGE_BYTES;
  static constexpr uint32_t NOTES = STAGING + S::STAGING_BYTES;
  static constexpr uint32_t FULL = NOTES + S::STAGES * kNoteBytes;
  static constexpr uint32_t EMPTY = FULL + 8 * S::STAGES;
  static constexpr uint32_t RUNS = EMPTY + 8 * S::STAGES;
  static constexpr uint32_t WILD = RUNS + 4 * S::RUNS_BYTES;
  static constexpr uint32_t MET = WILD + 8;
  uint32_t base;
  int stage = 0;
  int lent = -1; // the stage that holds results of the last tile
  uint32_t phase = 0;

  __device__ __forceinline__ explicit Ring(const void *shared)
      : base((shared_address(shared) + 1023) & ~1023u) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(base + FULL + 8 * i, kGatherers + 1);
      barrier_init(base + EMPTY + 8 * i, kArrivals * 4 * S::CONSUMERS * S::CLUSTER);
    }
    barrier_init_visible();
  }
  __device__ __forceinline__ void begin_tame() const {
    store_shared_4(base + WILD, 0);
    barrier_init(base + MET, kArrivals * S::THREADS / 32);
    barrier_init_visible();
  }
  /* Some consumer has come upon a tile whose factors may hold what is not finite. */
  __device__ __forceinline__ void call_wild() const {
    if constexpr (S::CLUSTER == 1)
      store_shared_4(base + WILD, 1);
    for (int rank = 0; S::CLUSTER > 1 && rank < S::CLUSTER; rank++)
      store_cluster_4(base + WILD, rank, 1);
  }
  /* All threads of the cluster, once no tile is left: whether one has. The ring is then as at the
   * start. */
  __device__ __forceinline__ bool is_wild() {
    meet(0);
    if (uniform(load_shared_4(base + WILD)) == 0)
      return false;
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * S::STAGES; i++)
        barrier_end(base + FULL + 8 * i);
      init();
    }
    meet(1);
    stage = 0, lent = -1, phase = 0;
    return true;
  }
  /* From whatever code a warp comes, which __syncthreads() forbids. */
  __device__ __forceinline__ void meet(uint32_t parity) const {
    __syncwarp();
    if constexpr (S::CLUSTER > 1) {
      cluster_sync();
      return;
    }
    if ((threadIdx.x & 31) < kArrivals)
      barrier_arrive(base + MET);
    barrier_wait(base + MET, parity);
    __syncwarp();
  }
  /* Where a consumer puts its results number `index`. */
  __device__ __forceinline__ uint32_t unit(int consumer, int index) const {
    const int more = index - S::OWN_UNITS;
    if (more >= 0 && more < S::LENT_UNITS)
      return base + lent * S::STAGE_BYTES + (consumer * S::LENT_UNITS + more) * kUnitBytes;
    return base + STAGING + (consumer * S::OWN_UNITS + (more & 1)) * kUnitBytes;
  }
  /* The list of this producer warp. */
  __device__ __forceinline__ uint32_t runs() const {
    return base + RUNS + (threadIdx.x >> 5) * S::RUNS_BYTES;
  }
  __device__ __forceinline__ uint32_t weights() const { return base + stage * S::STAGE_BYTES; }
  __device__ __forceinline__ uint32_t tokens() const { return weights() + S::W_BYTES; }
  __device__ __forceinline__ uint32_t note() const { return note(stage); }
  __device__ __forceinline__ uint32_t note(int which) const {
    return base + NOTES + which * kNoteBytes;
  }
  __device__ __forceinline__ uint32_t full() const { return base + FULL + 8 * stage; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), phase); }
  __device__ __forceinline__ void wait_empty() const {
    barrier_wait(base + EMPTY + 8 * stage, phase ^ 1);
  }
  /* kArrivals of each consumer warp, at all CTAs of the cluster. */
  __device__ __forceinline__ void release(int which) const {
    const int lane = threadIdx.x & 31;
    if (S::CLUSTER == 1 && lane < kArrivals)
      barrier_arrive(base + EMPTY + 8 * which);
    for (int rank = 0; S::CLUSTER > 1 && rank < S::CLUSTER; rank++)
      if (kArrivals > 1 || lane == rank)
        barrier_arrive_at(base + EMPTY + 8 * which, rank);
  }
  __device__ __forceinline__ void advance() {
    if (++stage == S::STAGES)
      stage = 0, phase ^= 1;
  }
};

/* With the first stage of a tile: the tile, and the rows in use. Behind the last tile comes a stage
 * with block -1. */
struct TileNote {
  Tile tile;
  int count;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_16(at, make_uint4(tile.block, tile.column, tile.expert, count));
  }
  static __device__ __forceinline__ TileNote read(uint32_t at) {
    const uint4 v = load_shared_16(at);
    return {{(int)uniform(v.x), (int)v.y, (int)v.z}, (int)uniform(v.w)};
  }
};

/* With the last stage of a tile's depth: how many adapter stages follow, and whether products in
 * them must be zero, whatever B holds: those with tokens that do not carry a piece's adapter
 * (`shared`), or with ranks that it does not have (`ragged`). */
struct AdaptersNote {
  int stages;
  bool shared, ragged;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_4(at + 16, stages | shared << 16 | ragged << 17);
  }
  static __device__ __forceinline__ AdaptersNote read(uint32_t at) {
    const uint32_t v = uniform(load_shared_4(at + 16));
    return {(int)(v & 0xffff), (v >> 16 & 1) != 0, v >> 17 != 0};
  }
};

/* With an adapter stage: how many pieces it holds. */
struct PiecesNote {
  int pieces;

  __device__ __forceinline__ void write(uint32_t at) const { store_shared_4(at + 16, pieces); }
  static __device__ __forceinline__ PiecesNote read(uint32_t at) {
    return {(int)uniform(load_shared_4(at + 16))};
  }
};

#endif
