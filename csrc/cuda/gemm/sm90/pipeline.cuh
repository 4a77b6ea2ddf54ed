/* The pipeline of a Hopper GEMM: stages of shared memory that a producer warpgroup fills and one or
 * two consumer warpgroups empty, and the stage headers, by which the producer tells the consumers
 * about them.
 *
 *   STAGES x { W [TILES][SPANS] m64 tiles, X [SPANS][TOKENS] rows }      see tile.cuh
 *   CONSUMERS x { OWN_BUFFERS epilogue tiles }             results on their way out
 *   STAGES x { header }                                    32 bytes
 *   STAGES x { full }, STAGES x { empty }                  mbarriers
 *   PRODUCERS / 32 x { segments }                          of adapters, one list per producer warp
 *   { fix-up }, { sync }                                   see Pipeline::needs_fixup; an mbarrier
 *   { list of rows }                                       see ListedGather
 *   STAGES x { scales }                                    of FP8 alone, see w8a8.cuh
 *
 * The CTAs of a cluster work on neighbouring blocks of one expert and share its weights: each loads
 * its part and the copy engine delivers it to both, so that a stage is free when the consumers of
 * both have left it, and the pipelines of both go in step. */
#ifndef MOELORA_CUDA_SM90_PIPELINE_CUH
#define MOELORA_CUDA_SM90_PIPELINE_CUH

#include "cuda/ptx/hopper.cuh"
#include "cuda/gemm/common/tile.cuh"

constexpr int kProducers = 128, kGatherers = 96; // threads
constexpr int kListedAtOnce = kGatherers / 4;    // rows that ListedGather copies at once
constexpr int kEpilogueTokens = 32;
constexpr int kEpilogueBytes = kEpilogueTokens * kRowBytes; // 64 outputs of 32 tokens
constexpr int kHeaderBytes = 32;
constexpr uint32_t kInFixup = 2; // where 1 asks for the fix-up pass

/* Lanes of a warp that arrive when it leaves a stage. One does, for what the others read has
 * reached registers: a shuffle or a barrier has used it. compute-sanitizer's racecheck follows each
 * thread by itself, and sees that only where all of them arrive. */
#ifdef MOELORA_RACECHECK
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

/* Tiles of one consumer are for streaming weights: two CTAs share an SM, and one fills its pipeline
 * while the other finishes a tile. Of up to 16 tokens and four bits, to make numbers takes a warp
 * longer than their bytes take to come: there three share it, of six warps each, whose registers
 * stay with them. Two of these warps are enough to copy few tokens. */
template <int TOKENS_, int CONSUMERS_, int STAGES_, int CLUSTER_, moelora_kernel_format FORMAT_,
          bool ZEROS_ = false>
struct GemmShape : Extent<TOKENS_, 2 * CONSUMERS_, FORMAT_> {
  using E = Extent<TOKENS_, 2 * CONSUMERS_, FORMAT_>;
  static constexpr int CONSUMERS = CONSUMERS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
  static constexpr bool ZEROS = ZEROS_; // of quantised weights there may be zero points
  static constexpr bool FOUR_BITS = E::Format::IS_FOUR_BITS;
  static constexpr bool FEW = FOUR_BITS && TOKENS_ <= 16;
  static constexpr int RESIDENT = // CTAs per SM
      CONSUMERS == 2                  ? 1
      : TOKENS_ <= MOELORA_FLOAT_ROWS ? moelora_float_ctas(FORMAT_)
                                      : 2;
  // wgmma wants its warps from a multiple of four on: behind them come producers of two warps.
  static constexpr int PRODUCERS = FEW ? 64 : kProducers, GATHERERS = PRODUCERS - 32;
  static constexpr int FIRST_PRODUCER = FEW ? 128 * CONSUMERS : 0;
  static constexpr int THREADS = PRODUCERS + 128 * CONSUMERS;
  // Which of both is operand A of wgmma, see tokens_first.cuh.
  static constexpr bool TOKENS_FIRST = moelora_tokens_first(FORMAT_, TOKENS_);
  // An expert's blocks are not all in pairs, see tile_of_pair.
  static constexpr bool ODD_BLOCKS = TOKENS_FIRST && CLUSTER_ > 1;
  static constexpr bool DRAWN = CONSUMERS == 2; // tiles, see TileScheduler
  // 64 of depth each, of a stage: where warps make numbers of them, to wait for each alone takes a
  // tenth of their time.
  static constexpr int SPANS = E::Format::IS_DEQUANTIZED ? 2 : 1;
  static constexpr int DEPTH = SPANS * kDepth;
  static constexpr int ELEMENTS = E::Format::IS_W8A8 ? 2 * DEPTH : DEPTH; // of x, of a step
  static constexpr int W_BYTES = weight_bytes<FORMAT_>(SPANS * E::TILES);
  static constexpr int SLOT_BYTES = E::Format::MOST_TILE_BYTES; // of quantised weights
  static constexpr int STAGE_BYTES = W_BYTES + SPANS * E::X_BYTES;
  static constexpr int M64_SCALES = E::Format::IS_W8A8 ? 64 * 4 : 0;
  static constexpr int SCALE_BYTES = E::Format::IS_W8A8 ? E::TILES * M64_SCALES + TOKENS_ * 4 : 0;
  static constexpr int ROW_LIST_BYTES =
      TOKENS_FIRST ? (TOKENS_ + kListedAtOnce - 1) / kListedAtOnce * kListedAtOnce * 4 : 0;
  // All threads start with as many registers; what producers give is what consumers can take, who
  // need more of them to make weights. Native tiles of few tokens need none.
  static constexpr bool NATIVE = E::Format::IS_NATIVE;
  static constexpr int START_REGISTERS = RESIDENT == 1 ? 168 : RESIDENT == 2 ? 128 : 96;
  static constexpr int PRODUCER_REGISTERS = CONSUMERS == 2  ? (NATIVE           ? 136
                                                               : TOKENS_FIRST   ? 56
                                                               : TOKENS_ <= 96  ? 104
                                                               : TOKENS_ <= 128 ? 88
                                                                                : 72)
                                            : TOKENS_ > 32  ? (E::Format::IS_W8A8 ? 80 : 96)
                                            : NATIVE || FEW ? START_REGISTERS
                                                            : 88;
  static constexpr int GATHER_LANES = NATIVE || (E::Format::IS_W8A8 && !TOKENS_FIRST) ? 8 : 4;
  static constexpr int CONSUMER_REGISTERS =
      START_REGISTERS + (START_REGISTERS - PRODUCER_REGISTERS) / CONSUMERS;
  // Token rows that one copy brings, and those of another kind that bring the last ones.
  static constexpr int BOX = TOKENS_ < 64 ? TOKENS_ : 64, REST_BOX = TOKENS_ % 32 == 0 ? 32 : 16;
  // Widths of the token side of wgmma: from half of a full tile on, in steps.
  static constexpr int STEP = TOKENS_ < 64 ? 8 : 16;
  static constexpr int LEAST = (TOKENS_ / 2 + STEP - 1) / STEP * STEP;
  // Epilogue buffers of a consumer, an epilogue tile each: its own, and those that alias its part
  // of a pipeline stage that all have multiplied. A tile of few tokens does without those.
  static constexpr int OWN_BUFFERS = 2;
  static constexpr int ALIASED_BUFFERS =
      TOKENS_ <= kEpilogueTokens ? 0 : STAGE_BYTES / CONSUMERS_ / kEpilogueBytes;
  static constexpr int OWN_BYTES = TOKENS_ < kEpilogueTokens ? TOKENS_ * kRowBytes : kEpilogueBytes;
  // Up to 1023 bytes go to the alignment that the swizzle needs.
  static constexpr int SEGMENTS_BYTES = 8 * TOKENS_;
  static constexpr int EPILOGUE_BYTES = CONSUMERS_ * OWN_BUFFERS * OWN_BYTES;
  static constexpr int SHARED = 1024 + STAGES * (STAGE_BYTES + SCALE_BYTES + 16 + kHeaderBytes) +
                                ROW_LIST_BYTES + EPILOGUE_BYTES + PRODUCERS / 32 * SEGMENTS_BYTES +
                                32;
  static_assert(TOKENS_ % REST_BOX == 0 && TOKENS_ % STEP == 0, "whole boxes, whole steps");
  static_assert(RESIDENT * (SHARED + 1024) <= 228 * 1024, "shared memory of an SM");
};

/* The same, whose last tiles are halves: of projections that are not gated. */
template <class S> struct WithHalfTiles : S {
  static_assert(S::TOKENS_FIRST, "m64 tiles are multiplied pair by pair");
  static constexpr bool HALF_TILES = true;
};

/* The same with split-K: of a projection whose results are summed anyway, in float32. */
template <class S> struct WithSplitK : S {
  static constexpr bool SPLIT_K = true;
};

template <class S> __device__ __forceinline__ int all_depth_steps(const moelora_gemm_launch &g) {
  return (g.tokens.k + S::DEPTH - 1) / S::DEPTH;
}

/* The steps of depth that a tile has, of `all`. */
struct DepthSteps {
  int first, count;

  template <class S>
  static __device__ __forceinline__ DepthSteps of(const moelora_gemm_launch &g, const Tile &tile,
                                                  int all) {
    if (!S::SPLIT_K)
      return {0, all};
    const int each = g.epilogue.split_tiles * (MOELORA_SPLIT_DEPTH / S::ELEMENTS);
    return {tile.split * each, min(each, all - tile.split * each)};
  }
};

template <class S> __device__ __forceinline__ bool is_half(const Tile &tile) {
  return S::HALF_TILES && tile.half;
}

/* The m64 tile that a consumer looks after, the first of two in a whole tile. */
__device__ __forceinline__ int own_m64(bool half, int consumer) {
  return half ? consumer : 2 * consumer;
}

/* What every lane read alike, so that the compiler, too, knows it for the same in all of a warp. */
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

template <class S> struct Pipeline {
  static constexpr uint32_t EPILOGUE = S::STAGES * S::STAGE_BYTES;
  static constexpr uint32_t HEADERS = EPILOGUE + S::EPILOGUE_BYTES;
  static constexpr uint32_t FULL = HEADERS + S::STAGES * kHeaderBytes;
  static constexpr uint32_t EMPTY = FULL + 8 * S::STAGES;
  static constexpr uint32_t SEGMENTS = EMPTY + 8 * S::STAGES;
  static constexpr uint32_t FIXUP = SEGMENTS + S::PRODUCERS / 32 * S::SEGMENTS_BYTES;
  static constexpr uint32_t SYNC = FIXUP + 8;
  static constexpr uint32_t SCALES = (SYNC + 8 + 15) / 16 * 16;
  uint32_t base;
  int stage = 0;
  int aliased = -1; // the stage that epilogue buffers of the last tile alias
  uint32_t phase = 0;

  __device__ __forceinline__ explicit Pipeline(const void *shared)
      : base((shared_address(shared) + 1023) & ~1023u) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(base + FULL + 8 * i, S::GATHERERS + 1);
      barrier_init(base + EMPTY + 8 * i, kArrivals * 4 * S::CONSUMERS * S::CLUSTER);
    }
    barrier_init_visible();
  }
  __device__ __forceinline__ void init_fixup() const {
    store_shared_4(base + FIXUP, 0);
    barrier_init(base + SYNC, kArrivals * S::THREADS / 32);
    barrier_init_visible();
  }
  /* Some consumer has come upon a tile whose factors may hold what is not finite: the non-finite
   * fix-up pass is wanted. */
  __device__ __forceinline__ void request_fixup() const {
    if constexpr (S::CLUSTER == 1)
      store_shared_4(base + FIXUP, 1);
    for (int rank = 0; S::CLUSTER > 1 && rank < S::CLUSTER; rank++)
      store_cluster_4(base + FIXUP, rank, 1);
  }
  /* This is the fix-up pass, which wants no other. */
  __device__ __forceinline__ bool in_fixup() const {
    return uniform(load_shared_4(base + FIXUP)) == kInFixup;
  }
  /* All threads of the cluster, once no tile is left: whether the fix-up pass is wanted. The
   * pipeline is then as at the start. */
  __device__ __forceinline__ bool needs_fixup() {
    sync(0);
    if (uniform(load_shared_4(base + FIXUP)) == 0)
      return false;
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * S::STAGES; i++)
        barrier_end(base + FULL + 8 * i);
      init();
      store_shared_4(base + FIXUP, kInFixup);
    }
    sync(1);
    stage = 0, aliased = -1, phase = 0;
    return true;
  }
  /* From whatever code a warp comes, which __syncthreads() forbids. */
  __device__ __forceinline__ void sync(uint32_t parity) const {
    __syncwarp();
    if constexpr (S::CLUSTER > 1) {
      cluster_sync();
      return;
    }
    if ((threadIdx.x & 31) < kArrivals)
      barrier_arrive(base + SYNC);
    barrier_wait(base + SYNC, parity);
    __syncwarp();
  }
  /* Where a consumer puts its epilogue tile number `index`. */
  __device__ __forceinline__ uint32_t epilogue_buffer(int consumer, int index) const {
    const int more = index - S::OWN_BUFFERS;
    if (more >= 0 && more < S::ALIASED_BUFFERS)
      return base + aliased * S::STAGE_BYTES +
             (consumer * S::ALIASED_BUFFERS + more) * kEpilogueBytes;
    return base + EPILOGUE + (consumer * S::OWN_BUFFERS + (more & 1)) * S::OWN_BYTES;
  }
  /* The list of this producer warp. */
  __device__ __forceinline__ uint32_t segments() const {
    return base + SEGMENTS + ((threadIdx.x - S::FIRST_PRODUCER) >> 5) * S::SEGMENTS_BYTES;
  }
  __device__ __forceinline__ uint32_t weights() const { return base + stage * S::STAGE_BYTES; }
  /* The same, known alike in all of a warp: by votes, which take less time than a shuffle. */
  __device__ __forceinline__ uint32_t uniform_weights() const {
    uint32_t at = base;
#pragma unroll
    for (int bit = 1; bit < S::STAGES; bit *= 2)
      at += __all_sync(0xffffffffu, stage & bit) ? bit * S::STAGE_BYTES : 0;
    return at;
  }
  __device__ __forceinline__ uint32_t tokens(int span = 0) const {
    return weights() + S::W_BYTES + span * S::TOKENS * kRowBytes;
  }
  __device__ __forceinline__ uint32_t weight_scales(int m64) const {
    return base + SCALES + S::ROW_LIST_BYTES + stage * S::SCALE_BYTES + m64 * S::M64_SCALES;
  }
  __device__ __forceinline__ uint32_t row_list() const { return base + SCALES; }
  __device__ __forceinline__ uint32_t token_scales() const { return weight_scales(S::TILES); }
  __device__ __forceinline__ uint32_t header() const { return header(stage); }
  __device__ __forceinline__ uint32_t header(int which) const {
    return base + HEADERS + which * kHeaderBytes;
  }
  __device__ __forceinline__ uint32_t full() const { return base + FULL + 8 * stage; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), phase); }
  /* Whether wait_full() would be over at once: asked early, it saves a warp that wait. */
  __device__ __forceinline__ bool is_full() const {
    return __all_sync(0xffffffffu, barrier_test(full(), phase));
  }
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
  __device__ __forceinline__ void advance(int stages) {
    const int times = (stage + stages) / S::STAGES;
    stage += stages - times * S::STAGES, phase ^= times & 1;
  }
};

/* Until the copy engine has read what this consumer's warps stored, but for the last PENDING stores
 * of each. */
template <int PENDING = 0> __device__ __forceinline__ void wait_until_read(int consumer) {
  if ((threadIdx.x & 31) == 0)
    tma_store_wait_read<PENDING>();
  warpgroup_sync(consumer + 1);
}

/* The stage that the last tile's epilogue buffers alias is free once they have been read. */
template <class S>
__device__ __forceinline__ void release_aliased_stage(Pipeline<S> &pipeline, int consumer) {
  if (pipeline.aliased < 0)
    return;
  wait_until_read(consumer);
  pipeline.release(pipeline.aliased);
  pipeline.aliased = -1;
}

/* With the first stage of a tile: the tile, the rows in use, and those that consumers multiply, of
 * which some may be anything. Behind the last tile comes a stage with block -1. */
struct TileHeader {
  Tile tile;
  int count, multiplied;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_16(at, make_uint4(tile.block, tile.column, tile.expert,
                                   count | multiplied << 8 | tile.half << 16 | tile.split << 24));
  }
  static __device__ __forceinline__ TileHeader read(uint32_t at) {
    const uint4 v = load_shared_16(at);
    const uint32_t rows = uniform(v.w);
    return {{(int)uniform(v.x), (int)v.y, (int)v.z, (int)(rows >> 16 & 0xff), (int)(rows >> 24)},
            (int)(rows & 0xff),
            (int)(rows >> 8 & 0xff)};
  }
};

/* With the last stage of a tile's depth: how many adapter stages follow, and whether products in
 * them must be zero, whatever B holds: those with tokens that do not carry a slab's adapter
 * (`shared`), or with ranks that it does not have (`ragged`). */
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

/* With an adapter stage: how many slabs it holds, and how many of them a row of B has. */
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

#endif
