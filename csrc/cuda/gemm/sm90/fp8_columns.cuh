/* Grouped GEMM for Hopper with FP8 weights and FP8 tokens of small depth, up to 256 elements of K:
 * token rows stay in registers, as operand A, while the columns of the weights stream past.
 *
 * In tiles of fp8_token_major.cuh, this depth would be two k steps, too few to hide the latencies
 * of a tile's beginning, its adapters and its epilogue. Here a CTA takes items, a block of 128
 * tokens by a range of columns of 64 outputs, and a consumer has the products of a column in flight
 * while it scales, adapts and stores those of the column before:
 *
 *   TMA warp     W(0) W(1) B(0) W(2) B(1) ...       weights of a column, all of K; slabs of B
 *   consumer     wgmma(1) | promote(0), B(0) xa, store(0) | wgmma(2) | promote(1), ...   64 tokens
 *
 * Slabs are multiplied with mma.sync, which rounds like wgmma. Each warp multiplies the segments of
 * its 16 tokens and discards the products of other tokens, so non-finite elements of B reach none
 * but the tokens that carry them. */
#ifndef MOELORA_CUDA_SM90_FP8_COLUMNS_CUH
#define MOELORA_CUDA_SM90_FP8_COLUMNS_CUH

#include "cuda/gemm/sm90/fp8_token_major.cuh"

#include <type_traits>

constexpr int kColumnsSteps = 2; // most k steps
constexpr int kColumnsSlabs = 4; // of an adapter stage

/* A block of tokens by `columns` columns. */
struct ColumnsItem {
  Tile tile;                 // its first column; block -1 follows the last item
  int columns, count, slabs; // valid tokens; slabs of adapters

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_16(
        at, make_uint4(tile.block, tile.column, tile.expert, columns << 20 | count << 12 | slabs));
  }
  static __device__ __forceinline__ ColumnsItem read(uint32_t at) {
    const uint4 v = load_shared_16(at);
    const uint32_t w = uniform(v.w);
    return {{(int)uniform(v.x), (int)uniform(v.y), (int)uniform(v.z), 0},
            (int)(w >> 20),
            (int)(w >> 12 & 0xff),
            (int)(w & 0xfff)};
  }
  /* Adapter stages of a column. */
  __device__ __forceinline__ int stages() const {
    return (slabs + kColumnsSlabs - 1) / kColumnsSlabs;
  }
};

/* Tokens and ranks of a slab. The slabs of an adapter stage are in its header in place of a tile.
 */
struct ColumnsSlab {
  int low, high, rank, ranks;

  __device__ __forceinline__ ColumnsSlab(int low_, int high_, int first_rank, int count)
      : low(low_), high(high_), rank(first_rank), ranks(count) {}
  __device__ __forceinline__ explicit ColumnsSlab(uint32_t word)
      : low(word & 0xff), high(word >> 8 & 0xff), rank(word >> 16 & 0xff), ranks(word >> 24) {}
  __device__ __forceinline__ uint32_t word() const {
    return low | high << 8 | rank << 16 | ranks << 24;
  }
};

constexpr int kWarpTokens = 16; // of a consumer's warp

/* TILES is 1: a column is an m64 tile of weights. */
template <int K_STEPS_, int STAGES_>
struct Fp8ColumnsShape : Extent<128, 1, MOELORA_KERNEL_W8A8>, RegisterBudget<56, 2> {
  static constexpr int K_STEPS = K_STEPS_, STAGES = STAGES_, FACTOR_STAGES = 6;
  static constexpr int CONSUMERS = 2, THREADS = kProducers + 128 * CONSUMERS, RESIDENT = 1;
  static constexpr int BUFFERS = 2; // epilogue buffers of a consumer
  static_assert(K_STEPS <= kColumnsSteps, "registers of accumulators and rows");

  struct WeightTile {
    SwizzledRow rows[64];
    SwizzledRow scales[8]; // a tile's scales follow its rows, as in memory
  };
  static_assert(sizeof(WeightTile) % 1024 == 0, "alignment of the 128-byte swizzle");
  struct Stage { // for slabs_per_stage()
    SwizzledRow sW[64];
  };
};

/* Weights and factors have a ring each: a consumer takes the weights of a column before the factors
 * of the one before, of which there may be any number of stages. */
template <int STAGES_> struct ColumnsRing {
  PipelineBarriers<STAGES_> barriers;
};
template <class S> using WeightRing = Pipeline<ColumnsRing<S::STAGES>>;
template <class S> using FactorRing = Pipeline<ColumnsRing<S::FACTOR_STAGES>>;

template <class S> struct ColumnsStorage {
  typename S::WeightTile weights[S::STAGES][S::K_STEPS];
  SwizzledRow factors[S::FACTOR_STAGES][64]; // slabs of B
  SwizzledRow sOut[S::CONSUMERS][S::BUFFERS][4][kWarpTokens];
  SwizzledRow sX[S::K_STEPS][S::TOKENS]; // token rows of the next item
  ListedSegment segments[2][S::TOKENS];  // of this and of the next item
  StageHeader headers[S::FACTOR_STAGES]; // ColumnsSlab, SlabsHeader
  uint4 item;                            // the next one
  ColumnsRing<S::STAGES> weight_ring;
  ColumnsRing<S::FACTOR_STAGES> factor_ring;
  uint64_t full, empty; // barriers of sX and item
};

template <class S> struct ColumnsMemory {
  using Storage = ColumnsStorage<S>;
  static constexpr int BYTES = 1024 + sizeof(Storage); // with room to align the start
  static_assert(BYTES <= 227 * 1024, "shared memory of a CTA");
  uint32_t base;

  __device__ __forceinline__ explicit ColumnsMemory(const void *dynamic)
      : base((shared_address(dynamic) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t weights(int stage, int step) const {
    return base + (stage * S::K_STEPS + step) * (int)sizeof(typename S::WeightTile);
  }
  __device__ __forceinline__ uint32_t factors(int stage) const {
    return base + (uint32_t)offsetof(Storage, factors) + stage * kM64Bytes;
  }
  __device__ __forceinline__ uint32_t header(int stage) const {
    return base + (uint32_t)offsetof(Storage, headers) + stage * (int)sizeof(StageHeader);
  }
  /* Rows of a warp of a consumer. */
  __device__ __forceinline__ uint32_t sOut(int consumer, int buffer, int warp) const {
    return base + (uint32_t)offsetof(Storage, sOut) +
           ((consumer * S::BUFFERS + buffer) * 4 + warp) * kWarpTokens * kRowBytes;
  }
  __device__ __forceinline__ uint32_t sX(int step) const {
    return base + (uint32_t)offsetof(Storage, sX) + step * S::TOKENS * kRowBytes;
  }
  __device__ __forceinline__ uint32_t segments(int parity) const {
    return base + (uint32_t)offsetof(Storage, segments) +
           parity * (int)(S::TOKENS * sizeof(ListedSegment));
  }
  __device__ __forceinline__ uint32_t item() const {
    return base + (uint32_t)offsetof(Storage, item);
  }
  __device__ __forceinline__ uint32_t full() const {
    return base + (uint32_t)offsetof(Storage, full);
  }
  __device__ __forceinline__ uint32_t empty() const {
    return base + (uint32_t)offsetof(Storage, empty);
  }
  __device__ __forceinline__ WeightRing<S> weight_ring() const {
    return WeightRing<S>(base + (uint32_t)offsetof(Storage, weight_ring));
  }
  __device__ __forceinline__ FactorRing<S> factor_ring() const {
    return FactorRing<S>(base + (uint32_t)offsetof(Storage, factor_ring));
  }
};

/* Producer warp of weights and items. It prepares an item while it loads the one before. */
template <class S> struct ColumnsWeights {
  const moelora_gemm_launch &g;
  const CUtensorMap *x_map;
  ColumnsMemory<S> smem;
  WeightRing<S> ring;
  uint64_t policy;
  int columns, each, runs, blocks; // columns of a block, and of an item; items of a block; blocks
  int index = blockIdx.x;          // of the next item
  int items = 0;                   // prepared so far
  ColumnsItem next = {};
  Segments<S::LANES> segments; // of the next item

  __device__ __forceinline__ ColumnsWeights(const moelora_gemm_launch &launch, const CUtensorMap *x,
                                            const ColumnsMemory<S> &memory)
      : g(launch), x_map(x), smem(memory), ring(memory.weight_ring()),
        policy(evict_normal_policy()), columns((launch.weights.n_out + 63) / 64),
        blocks(*launch.schedule.blocks.num_post / S::TOKENS) {
    // Items that are long enough to hide the preparation of the next one, and enough of them to
    // keep all CTAs busy.
    constexpr int LEAST = 8, MOST = 28, WAVES = 8;
    each = min(MOST, max(LEAST, (int)((int64_t)blocks * columns / (WAVES * gridDim.x))));
    runs = (columns + each - 1) / each;
    each = ((columns + runs - 1) / runs + 1) / 2 * 2; // even, for consumers
    runs = (columns + each - 1) / each;
  }

  __device__ __forceinline__ void run() {
    find();
    read_segments();
    begin();
    while (next.tile.block >= 0) {
      const ColumnsItem item = next;
      const int last = item.columns - 1;
      load(item.tile, 0);
#pragma unroll 1
      for (int i = 0; i <= last; i++) {
        if (i < last)
          load(item.tile, i + 1);

        // Prepare the next item in parts, which use what the part before has loaded.
        if (i == 0)
          fetch();
        if (i == min(2, last))
          find();
        if (i == min(4, last))
          read_segments();
        if (i == min(6, last))
          begin();
      }
    }
  }

private:
  /* Fetches the index of the next item. */
  __device__ __forceinline__ void fetch() {
    index = 0;
    if ((threadIdx.x & 31) == 0)
      index = gridDim.x + atomicAdd(g.schedule.tile_counter, 1);
  }
  /* Finds the next item. */
  __device__ __forceinline__ void find() {
    index = (int)uniform(index);
    next.tile.block = -1;
    if (index >= blocks * runs)
      return;
    next.tile = tile_at<S>(g, index, runs, blocks);
    next.tile.column *= each;
    // Even: a column past the last one has no outputs.
    next.columns = min(each, (columns - next.tile.column + 1) / 2 * 2);
    next.count = g.schedule.blocks.counts[next.tile.block];
  }
  __device__ __forceinline__ void read_segments() {
    if (next.tile.block >= 0 && g.schedule.blocks.packed_ranks)
      segments.read(g.schedule.blocks.packed_ranks, (int64_t)next.tile.block * S::TOKENS,
                    S::TOKENS);
  }
  /* Lists the adapters of the next item and loads its rows of x, once the item before has been
   * read. */
  __device__ __forceinline__ void begin() {
    barrier_wait(smem.empty(), items & 1 ^ 1);
    next.slabs = 0;
    if (next.tile.block >= 0 && g.schedule.blocks.packed_ranks) {
      SegmentList<S> list;
      list.base = smem.segments(items & 1);
      segments.find(g.adapters.lora.max_rank);
      list.find(g, next.tile, segments);
      next.slabs = list.slabs;
    }
    items++;
    if (elect_one()) {
      next.write(smem.item());
      if (next.tile.block >= 0) {
        barrier_arrive_expect_tx(smem.full(), S::K_STEPS * S::TOKENS * kRowBytes);
#pragma unroll
        for (int step = 0; step < S::K_STEPS; step++)
          tma_load_2d(smem.sX(step), x_map, step * kDepth, next.tile.block * S::TOKENS,
                      smem.full());
      } else {
        barrier_arrive(smem.full());
      }
    }
    __syncwarp();
  }
  /* Loads the weights of the item's column i, all of K, and their scales. */
  __device__ __forceinline__ void load(const Tile &first, int i) {
    ring.wait_empty();
    if (elect_one()) {
      const uint32_t bytes = S::Format::tile_bytes(g.weights.w.format);
      const char *gW = quantized_tile(g, first.expert, 0, (first.column + i) * 64);
      barrier_arrive_expect_tx(ring.full(), S::K_STEPS * bytes);
#pragma unroll
      for (int step = 0; step < S::K_STEPS; step++, gW += g.weights.w.stride_kt)
        bulk_load(smem.weights(ring.stage, step), gW, bytes, ring.full(), policy);
    }
    __syncwarp();
    ring.advance();
  }
};

/* Producer warp of the factors B. The slabs of an item are the same in all columns, so lane i keeps
 * those of stage i / kColumnsSlabs, of up to eight stages at a time, and issues their loads. */
template <class S> struct ColumnsFactors {
  static constexpr int STAGES_AT_ONCE = 32 / kColumnsSlabs;
  const moelora_gemm_launch &g;
  const FactorMaps *maps;
  ColumnsMemory<S> smem;
  FactorRing<S> ring;
  uint64_t policy;
  SegmentList<S> list = {};
  // The lane's slab:
  uint32_t word;             // ColumnsSlab
  int rank, expert, adapter; // coordinates in the tensor map
  int width;                 // slabs that share a row in its stage; 0: loaded by another lane

  __device__ __forceinline__ ColumnsFactors(const moelora_gemm_launch &launch,
                                            const FactorMaps *b_maps,
                                            const ColumnsMemory<S> &memory)
      : g(launch), maps(b_maps), smem(memory), ring(memory.factor_ring()),
        policy(evict_normal_policy()) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int items = 0;; items++) {
      barrier_wait(smem.full(), items & 1);
      const ColumnsItem item = ColumnsItem::read(smem.item());
      __syncwarp(); // all lanes have read the item
      if ((threadIdx.x & 31) < kArrivals)
        barrier_arrive(smem.empty());
      if (item.tile.block < 0)
        break;
      const int stages = item.stages();
      list.base = smem.segments(items & 1);
      list.slabs = item.slabs;
      list.slices = 1;
      SlabIterator cursor;
      if (stages > 0 && stages <= STAGES_AT_ONCE)
        find(item, 0, cursor);
#pragma unroll 1
      for (int i = 0; i < item.columns; i++) {
#pragma unroll 1
        for (int stage = 0; stage < stages; stage++, ring.advance()) {
          if (stages > STAGES_AT_ONCE && stage % STAGES_AT_ONCE == 0) {
            if (stage == 0)
              cursor = {};
            find(item, stage, cursor);
          }
          load(item, stage, (item.tile.column + i) * 64);
        }
      }
    }
  }

private:
  /* Finds the slabs of eight stages. */
  __device__ __forceinline__ void find(const ColumnsItem &item, int stage, SlabIterator &cursor) {
    const int first = stage * kColumnsSlabs, count = min(32, item.slabs - first);
    int shared = 1; // slabs that share a row
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      if (i % kColumnsSlabs == 0)
        shared = is_wide(g, list, min(kColumnsSlabs, item.slabs - first - i), cursor)
                     ? kColumnsSlabs
                     : 1;
      const Slab s = cursor.next(list);
      if (i != (int)(threadIdx.x & 31))
        continue;
      rank = s.rank;
      word = ColumnsSlab(s.low, s.high, rank, min(kSlabDepth, s.packed % kRanks - rank)).word();
      expert = maps->dims.expert(0, item.tile.expert);
      adapter = maps->dims.adapter(0, s.packed / kRanks);
      width = i % shared == 0 ? shared : 0;
    }
  }
  /* Loads a stage: rows of B from `output` on. */
  __device__ __forceinline__ void load(const ColumnsItem &item, int stage, int output) {
    const int slabs = min(kColumnsSlabs, item.slabs - stage * kColumnsSlabs);
    const int j = (int)(threadIdx.x & 31) - stage % STAGES_AT_ONCE * kColumnsSlabs;
    const bool mine = j >= 0 && j < slabs;
    const uint32_t at = smem.header(ring.stage);
    ring.wait_empty();
    if (mine) {
      store_shared_4(at + 4 * j, word);
      if (j == 0)
        SlabsHeader{slabs, width}.write(at);
    }
    __syncwarp();
    if (j == 0)
      barrier_arrive_expect_tx(ring.full(), slabs * kSlabM64Bytes);
    __syncwarp();
    if (mine && width > 0)
      tma_load_5d(smem.factors(ring.stage) + j * kSlabM64Bytes,
                  width > 1 ? &maps->wide[0] : &maps->slice[0], rank, output, 0, expert, adapter,
                  ring.full(), policy);
  }
};

/* Consumer warpgroup. */
template <class S, class T> struct ColumnsConsumer {
  const moelora_gemm_launch &g;
  const CUtensorMap *out_map;
  ColumnsMemory<S> smem;
  WeightRing<S> weights;
  FactorRing<S> factors;
  uint64_t policy; // of the outputs, which the sum over top_k reads once
  int consumer;
  int from; // first token of this warp
  int buffer = 0;
  ColumnsItem item;
  uint32_t rX[S::K_STEPS * 4][4]; // the warpgroup's token rows
  float scales[S::K_STEPS][2];    // of the thread's two tokens
  uint32_t rXa[4];                // first slab of the warp's rows of xa

  __device__ __forceinline__ ColumnsConsumer(const moelora_gemm_launch &launch,
                                             const CUtensorMap *out, const ColumnsMemory<S> &memory,
                                             int which)
      : g(launch), out_map(out), smem(memory), weights(memory.weight_ring()),
        factors(memory.factor_ring()), policy(evict_first_policy()), consumer(which),
        from(which * 64 + (int)(threadIdx.x >> 5 & 3) * kWarpTokens) {}

  __device__ __forceinline__ void run() {
    bool waits = g.schedule.blocks.packed_ranks != nullptr; // for the shrink
#pragma unroll 1
    for (uint32_t phase = 0;; phase ^= 1) {
      barrier_wait(smem.full(), phase);
      item = ColumnsItem::read(smem.item());
      if (item.tile.block < 0)
        break;
      const bool active = consumer * 64 < item.count;
      if (active)
        load_rows();
      __syncwarp(); // all lanes have read the item
      if ((threadIdx.x & 31) < kArrivals)
        barrier_arrive(smem.empty());
      if (!active) {
        skip();
        continue;
      }
      load_scales();
      if (item.stages() > 0) {
        if (waits)
          wait_for_previous_kernel();
        waits = false;
        load_xa(0, rXa);
      }
      multiply();
    }
    tma_store_wait();
  }

private:
  /* Passes an item without tokens of this consumer. */
  __device__ __forceinline__ void skip() {
    const int stages = item.stages();
#pragma unroll 1
    for (int i = 0; i < item.columns; i++) {
      pass(weights);
#pragma unroll 1
      for (int j = 0; j < stages; j++)
        pass(factors);
    }
  }
  template <class Ring> static __device__ __forceinline__ void pass(Ring &ring) {
    ring.wait_full();
    __syncwarp(); // all lanes have waited
    ring.release(ring.stage);
    ring.advance();
  }

  __device__ __forceinline__ void load_rows() {
    const int lane = threadIdx.x & 31, row = from + (lane & 15);
#pragma unroll
    for (int i = 0; i < S::K_STEPS * 4; i++) {
      const int chunk = i % 4 * 2 + (lane >> 4);
      load_matrix_x4(rX[i], smem.sX(i / 4) + row * kRowBytes + ((chunk ^ (row & 7)) << 4));
    }
  }
  /* Position of the thread's first token; the other one is eight further on. */
  __device__ __forceinline__ int64_t position() const {
    return (int64_t)item.tile.block * S::TOKENS + from + (threadIdx.x >> 2 & 7);
  }
  __device__ __forceinline__ void load_scales() {
    const float *gScale = g.tokens.scales + position();
#pragma unroll
    for (int step = 0; step < S::K_STEPS; step++, gScale += g.tokens.scales_stride)
      scales[step][0] = gScale[0], scales[step][1] = gScale[8];
  }
  /* Loads a k16 slab of the warp's rows of xa. */
  __device__ __forceinline__ void load_xa(int rank, uint32_t (&v)[4]) const {
    const T *gXa =
        (const T *)g.adapters.xa + position() * g.adapters.xa_stride + rank + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = *(const uint32_t *)(gXa + i % 2 * 8 * g.adapters.xa_stride + i / 2 * 8);
  }

  /* All columns of the item, an even number: one is multiplied while the one before is finished. */
  __device__ __forceinline__ void multiply() {
    float rAcc[2][S::K_STEPS][32];
    int stages[2];
    stages[0] = issue(rAcc[0]);
    wait(rAcc[0]);
#pragma unroll 1
    for (int i = 0;; i += 2) {
      stages[1] = issue(rAcc[1]);
      finish(rAcc[0], stages[0], i);
      wait(rAcc[1]);
      if (i + 2 >= item.columns)
        break;
      stages[0] = issue(rAcc[0]);
      finish(rAcc[1], stages[1], i + 1);
      wait(rAcc[0]);
    }
    finish(rAcc[1], stages[1], item.columns - 1);
  }
  __device__ __forceinline__ void wait(float (&rAcc)[S::K_STEPS][32]) {
    wgmma_wait<0>();
#pragma unroll
    for (int step = 0; step < S::K_STEPS; step++)
      fence_accumulators<32>(rAcc[step]);
  }
  /* Issues the wgmmas of the next column, each k step to its own accumulators. Returns its stage.
   */
  __device__ __forceinline__ int issue(float (&rAcc)[S::K_STEPS][32]) {
    const int stage = (int)uniform(weights.stage);
    weights.wait_full();
    const uint64_t b = wgmma_descriptor(smem.weights(stage, 0));
    constexpr int TILE_UNITS = sizeof(typename S::WeightTile) / 16;
#pragma unroll
    for (int step = 0; step < S::K_STEPS; step++)
      fence_accumulators<32>(rAcc[step]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::K_STEPS * 4; i++)
      Wgmma<64>::mma_e4m3_registers(rAcc[i / 4], rX[i],
                                    move_descriptor(b, i / 4 * TILE_UNITS + i % 4 * 2), i % 4 > 0);
    wgmma_commit();
    weights.advance();
    return stage;
  }
  /* Scales the accumulators of the item's column i, adds its adapters and stores it. */
  __device__ __forceinline__ void finish(float (&rAcc)[S::K_STEPS][32], int stage, int i) {
    float (&v)[32] = rAcc[0];
    if (moelora_has_row_scales(g.weights.w.format))
      promote<true>(rAcc, stage);
    else
      promote<false>(rAcc, stage);
    __syncwarp(); // all lanes have read the scales
    weights.release(stage);
    add_adapters(v);
    if (from >= item.count)
      return;
    const int first = (item.tile.column + i) * 64;
    if (g.weights.w.bias)
      add_bias<T>(v, g, item.tile.expert, 0, first);
    if (g.epilogue.activation.kind == MOELORA_RELU2) {
#pragma unroll
      for (int j = 0; j < 32; j++)
        v[j] = v[j] < 0.f ? 0.f : v[j] * v[j];
    }
    store(v, first);
  }
  /* rAcc[0] = sum over k steps of rAcc[step] * weight scales * token scales. */
  template <bool BY_ROW>
  __device__ __forceinline__ void promote(float (&rAcc)[S::K_STEPS][32], int stage) const {
#pragma unroll
    for (int step = 0; step < S::K_STEPS; step++) {
      const uint32_t at =
          smem.weights(stage, step) + kM64Bytes + (BY_ROW ? 8 * (threadIdx.x & 3) : 0);
      float2 weight;
      if (!BY_ROW)
        weight.x = weight.y = __uint_as_float(load_shared_4(at));
#pragma unroll
      for (int n8 = 0; n8 < 8; n8++) {
        if (BY_ROW) {
          const uint2 bits = load_shared_8(at + n8 * 32);
          weight = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
        }
#pragma unroll
        for (int q = 0; q < 4; q++)
          rAcc[0][4 * n8 + q] =
              fmaf(rAcc[step][4 * n8 + q], (q % 2 ? weight.y : weight.x) * scales[step][q / 2],
                   step > 0 ? rAcc[0][4 * n8 + q] : 0.f);
      }
    }
  }

  /* Accumulates the adapter stages of a column. */
  __device__ __forceinline__ void add_adapters(float (&v)[32]) {
    const int stages = item.stages();
#pragma unroll 1
    for (int i = 0; i < stages; i++, factors.advance()) {
      factors.wait_full();
      const int stage = factors.stage;
      const uint4 words = load_shared_16(smem.header(stage));
      const SlabsHeader header = SlabsHeader::read(smem.header(stage));
#pragma unroll 1
      for (int j = 0; j < header.slabs; j++) {
        const ColumnsSlab slab(j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w);
        if (slab.low < from + kWarpTokens && slab.high > from)
          add_slab(v, slab, header, j, smem.factors(stage));
      }
      __syncwarp(); // all lanes have read the stage
      factors.release(stage);
    }
  }
  /* v += xa B^T of slab j, for the tokens that carry its adapter. */
  __device__ __forceinline__ void add_slab(float (&v)[32], const ColumnsSlab &slab,
                                           const SlabsHeader &header, int j, uint32_t sB) const {
    const int lane = threadIdx.x & 31, row = (lane >> 4) * 8 + (lane & 7);
    uint32_t a[4];
    if (slab.rank == 0) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = rXa[i];
    } else {
      load_xa(slab.rank, a);
    }
    // Swizzle: a row has 2 * width chunks; logical chunk c is at c ^ place.
    const SlabLayout<S> layout = {header.width};
    const int place = row >> (2 - header.width / 2) & (2 * header.width - 1);
    const uint32_t rows = sB + row * 32 * header.width + (((lane >> 3 & 1) ^ place) << 4);
    const uint32_t first = header.width == 1 ? rows + layout.slab(j) : rows ^ layout.slab(j);
    uint32_t b[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      load_matrix_x4(b[i], first + i * 16 * 32 * header.width);
    if (slab.ranks < kSlabDepth) { // beyond the true rank, B may hold anything
      const int k = 2 * (lane & 3);
      const uint32_t low = valid(slab.ranks - k), high = valid(slab.ranks - k - 8);
#pragma unroll
      for (int i = 0; i < 4; i++)
        b[i][0] &= low, b[i][1] &= high, b[i][2] &= low, b[i][3] &= high;
    }
    const int token = from + lane / 4;
    const bool mine[2] = {token >= slab.low && token < slab.high,
                          token + 8 >= slab.low && token + 8 < slab.high};
    const bool is_whole = slab.low <= from && slab.high >= min(from + kWarpTokens, item.count);
    const auto multiply = [&](auto whole) {
#pragma unroll
      for (int n8 = 0; n8 < 8; n8++) {
        float *to = v + 4 * n8, sum[4] = {to[0], to[1], to[2], to[3]};
        mma_16816<T>(sum, a, b[n8 / 2] + n8 % 2 * 2);
#pragma unroll
        for (int q = 0; q < 4; q++)
          to[q] = whole.value || mine[q / 2] ? sum[q] : to[q];
      }
    };
    if (is_whole)
      multiply(std::true_type());
    else
      multiply(std::false_type());
  }
  /* Mask of two elements of which the first `count` are valid. */
  static __device__ __forceinline__ uint32_t valid(int count) {
    return count > 1 ? 0xffffffffu : count > 0 ? 0xffffu : 0;
  }

  /* Stores the warp's tokens, 64 outputs each, by TMA. */
  __device__ __forceinline__ void store(const float (&v)[32], int first) {
    const uint32_t sOut = smem.sOut(consumer, buffer, threadIdx.x >> 5 & 3);
    buffer ^= 1;
    if (elect_one())
      tma_store_wait_read<S::BUFFERS - 1>();
    __syncwarp();
    write_tokens<T>(v, sOut);
    fence_async_proxy();
    __syncwarp();
    if (elect_one())
      tma_store_2d(out_map, first, item.tile.block * S::TOKENS + from, sOut, policy);
  }
};

namespace {

template <class S, class T>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    gemm_columns_sm90(const __grid_constant__ CUtensorMap x_map,
                      const __grid_constant__ CUtensorMap out_map,
                      const __grid_constant__ FactorMaps b_maps,
                      const __grid_constant__ moelora_gemm_launch g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  const ColumnsMemory<S> smem(shared);
  if (threadIdx.x == 0) {
    smem.weight_ring().init(1, 4 * S::CONSUMERS);
    smem.factor_ring().init(1, 4 * S::CONSUMERS);
    barrier_init(smem.full(), 1);
    barrier_init(smem.empty(), (4 * S::CONSUMERS + 1) * kArrivals);
    barrier_init_visible();
  }
  __syncthreads();

  // With adapters, the previous kernel is the shrink, whose results consumers wait for; see
  // gemm.cuh.
  if (!g.schedule.blocks.packed_ranks)
    wait_for_previous_kernel();
  start_next_kernel();

  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    const int producer = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (producer == 0)
      ColumnsWeights<S>(g, &x_map, smem).run();
    else if (producer == 1)
      ColumnsFactors<S>(g, &b_maps, smem).run();
  } else {
    warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    ColumnsConsumer<S, T>(g, &out_map, smem, warpgroup - 1).run();
  }
  wait_for_previous_kernel(); // PDL is not transitive
#endif
}

} // namespace

#endif
