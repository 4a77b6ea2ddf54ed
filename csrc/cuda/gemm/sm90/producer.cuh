/* Producer warps of a Hopper GEMM.
 *
 *                  in each k step                        in each adapter stage
 *   TMA warp       weights; x if ordered by position     rows of B that a tensor map covers
 *   gather warps   x if gathered; token scales (FP8)     rows of xa; other rows of factors
 *
 * Where Rows::LOADS_BOXES, a gather warp also issues the boxes of x that is ordered by position.
 *
 * All producer warps iterate over the same tiles and stages. A full barrier expects one arrival
 * from the TMA warp, with the transaction bytes, and one from each gather thread, after its
 * cp.async.
 *
 * A producer has a few hundred cycles per stage, so its K loop only issues loads. Per-tile work
 * (finding the adapters, the next tile and the rows of the next tile) is done between parts of the
 * K loop, where it does not raise the loop's register pressure. */
#pragma once

#include "cuda/gemm/common/tile.cuh"
#include "cuda/gemm/sm90/adapters.cuh"
#include "cuda/gemm/sm90/fixup.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cuda/ptx/opaque.cuh"

/* ---- rows of x, gathered by cp.async, 128 bytes of each row at a time ---- */

constexpr int kProducers = 128,
              kGatherers = 96; // threads of the producer warpgroup; those that gather

constexpr uint32_t kNoRow = 0xffffffffu; // padding of a block

/* 16-bit elements of x per 16-byte copy. */
constexpr int kChunkElements = 8;

/* Share of a stage that one thread copies. LANES threads copy a row: for lane = thread % LANES,
 * this thread copies chunks `lane`, `lane` + LANES, ... of token rows thread / LANES + STEP i.
 * Eight lanes read whole lines; with four, a thread copies twice the chunks of half the rows and
 * computes half as many addresses. */
template <int TOKENS, int LANES, int GATHERERS = kGatherers, int CHUNK = kChunkElements>
struct GatherShare {
  static constexpr int STEP = GATHERERS / LANES, ROWS = (TOKENS + STEP - 1) / STEP;
  static constexpr int CHUNKS = 8 / LANES, PLACES = STEP % 8 == 0 ? 1 : 2;
  static_assert(STEP % 4 == 0, "every other row has the same place in the swizzle");

  uint32_t token[ROWS]; // offsets of the rows in x, in units of 16 bytes
  uint32_t to[PLACES];  // offsets in sX: to[i % PLACES] + i STEP rows, for row i's first chunk
  int left;             // elements of K left, from the first chunk on
  const uint16_t *gX;   // address of row 0 of x at the current k

  __device__ __forceinline__ explicit GatherShare(int thread) {
    const int first = thread / LANES, lane = thread % LANES;
#pragma unroll
    for (int i = 0; i < PLACES; i++)
      to[i] = (uint32_t)(first * kRowBytes + ((lane ^ ((first + STEP * i) & 7)) << 4));
  }
  /* Switches `copy` to the rows in `token`. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
    const int lane = thread % LANES;
    left = tokens.k - lane * CHUNK;
    gX = (const uint16_t *)tokens.x + (left > 0 ? lane * 8 : 0); // never past the end of x
  }
  /* Copies the next 128 bytes of each row. Elements past the end of K are zero-filled. FEW: stops
   * at the first absent row, which pays if most stages have few rows. */
  template <bool FEW = false> __device__ __forceinline__ void copy(uint32_t sX) {
    uint32_t at[CHUNKS][PLACES];
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
      for (int i = 0; i < PLACES; i++)
        at[j][i] = opaque(sX + (to[i] ^ j * LANES << 4)); // once for all rows
    gX = opaque(gX);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (FEW && token[i] == kNoRow)
        break;
      if (token[i] != kNoRow) {
        const uint16_t *from = row_address(gX, token[i], 16);
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
          copy_async_16(at[j][i % PLACES] + i * STEP * kRowBytes, from + j * LANES * 8,
                        left > j * LANES * CHUNK ? 16 : 0);
      }
    }
    gX += left > 8 * CHUNK ? kDepth : 0;
    left -= 8 * CHUNK;
  }
};

/* GatherShare that looks up the rows of the next block while it still copies those of this one. */
template <int TOKENS, int LANES = 8, int GATHERERS = kGatherers, int CHUNK = kChunkElements>
struct Gather : GatherShare<TOKENS, LANES, GATHERERS, CHUNK> {
  using Share = GatherShare<TOKENS, LANES, GATHERERS, CHUNK>;
  using Share::token;

  uint32_t next[Share::ROWS]; // `token` of the next block

  using Share::Share;

  /* Looks up the rows of `count` tokens; token t is at position_of(t). */
  template <class PositionOf>
  __device__ __forceinline__ void find(const moelora_blocks &blocks, const moelora_tokens &tokens,
                                       int count, int thread, PositionOf position_of) {
    const int first = thread / LANES;
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      next[i] = position_of(max(min(first + Share::STEP * i, count - 1), 0));
    find_x_rows(blocks, tokens, next);
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      next[i] =
          first + Share::STEP * i < count ? next[i] * (uint32_t)(tokens.stride / CHUNK) : kNoRow;
  }

  /* Switches `copy` to the rows that `find` looked up. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      token[i] = next[i];
    Share::begin(tokens, thread);
  }
};

/* ---- producers of the GEMM ---- */

/* TMA boxes that cover the `count` rows of a block: `boxes` of S::BOX rows, then `rest` of
 * S::REST_BOX. */
template <class S> struct TokenBoxes {
  int boxes, rest;

  __device__ __forceinline__ explicit TokenBoxes(int count) {
    const int left = count % S::BOX;
    boxes = count / S::BOX + (left > max(32, S::BOX - 32) && count - left + S::BOX <= S::TOKENS);
    rest = (max(count - boxes * S::BOX, 0) + S::REST_BOX - 1) / S::REST_BOX;
  }
  __device__ __forceinline__ int rows() const { return boxes * S::BOX + rest * S::REST_BOX; }
  __device__ __forceinline__ void load(const RowMaps *maps, int step, int row,
                                       const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline) const {
#pragma unroll
    for (int span = 0; span < S::SPANS; span++) {
      const int k = (step * S::SPANS + span) * kDepth;
      const uint32_t sX = smem.sX(pipeline.stage, span);
#pragma unroll 1
      for (int i = 0; i < boxes; i++)
        tma_load_2d(sX + i * S::BOX * kRowBytes, &maps->box, k, row + i * S::BOX, pipeline.full());
#pragma unroll 1
      for (int i = 0, at = boxes * S::BOX; i < rest; i++, at += S::REST_BOX)
        tma_load_2d(sX + at * kRowBytes, &maps->rest_box, k, row + at, pipeline.full());
    }
  }
};

/* Splits the K loop into parts. Producers find the tile's adapters after part ADAPTERS, the next
 * tile after part TILE, and its rows after part ROWS. If the epilogue aliases a stage, producers
 * wait longest for that stage: all searches follow the first part, which ends before it. Otherwise,
 * all parts but the last are one k step. The last k step, whose header describes the adapters, is
 * in the last part. */
template <class S> struct TileParts {
  static constexpr bool AT_ONCE = WarpContext<S>::ALIASED_BUFFERS > 0;
  static constexpr int ADAPTERS = 0, TILE = AT_ONCE ? 0 : 1, ROWS = AT_ONCE ? 0 : 2;

  /* Returns the end of a part. `last` is the index of the last part. */
  static __device__ __forceinline__ int end(int part, int last, int k_steps) {
    return part < last ? min(AT_ONCE ? S::STAGES - 1 : 1 + part, k_steps - 1) : k_steps;
  }
};

/* Returns whether weights and factors are loaded with evict_first, so that they do not displace
 * other data from L2: not if other clusters read them again, as is usual with the largest native
 * tiles (144 tokens, clusters of two). */
template <class S>
__device__ __forceinline__ bool evicts_first(const moelora_weight_rows &weights) {
  return (S::TOKENS <= 128 || S::CLUSTER == 1) && !weights.read_again;
}

/* Returns TileHeader::multiplied. With tokens as operand A, a consumer whose 64 tokens start at or
 * past it skips the tile, which leaves the tensor cores to the other. If both CTAs of a cluster
 * process the same block, it is faster if both consumers multiply. */
template <class S>
__device__ __forceinline__ int rows_multiplied(const ClusterTile &tile, int count) {
  return S::UNPAIRED_BLOCKS && tile.is_shared() ? S::TOKENS : count;
}

/* Producer of token rows, by cp.async of the gather warps. */
template <class S> struct TokenRows {
  static constexpr bool LOADS_BOXES = false;
  Gather<S::TOKENS, S::GATHER_LANES, S::GATHERERS, S::Format::X_ELEMENTS / 8> rows;

  __device__ __forceinline__ explicit TokenRows(int thread) : rows(thread) {}

  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile, int count,
                                       int thread) {
    rows.find(g.schedule.blocks, g.tokens, count, thread,
              [&](int t) { return tile.block * S::TOKENS + t; });
  }
  /* Switches `copy` to the rows that `find` looked up. */
  template <class Scales>
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const Tile &, int,
                                        const Scales &, int thread, const SharedMemory<S> &) {
    rows.begin(g.tokens, thread);
  }
  __device__ __forceinline__ void copy(const RowMaps *, const moelora_gemm_launch &g,
                                       const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline) {
    if (g.tokens.divisor.value)
#pragma unroll
      for (int span = 0; span < S::SPANS; span++)
        rows.copy(smem.sX(pipeline.stage, span));
  }
};

/* Tokens that are not FP8 have no scales; see TokenScales in fp8.cuh. */
template <class S> struct NoTokenScales {
  __device__ __forceinline__ explicit NoTokenScales(int) {}
  __device__ __forceinline__ void find(const moelora_gemm_launch &, const Tile &, int, int) {}
  __device__ __forceinline__ void begin(const moelora_gemm_launch &, const Tile &, int) {}
  __device__ __forceinline__ void copy(const moelora_gemm_launch &, const SharedMemory<S> &, int) {}
};

/* Runs the TMA warp: loads weights, x if it is ordered by position, and B by tensor maps. */
template <class Mainloop, class S>
__device__ __forceinline__ void produce_by_tma(const CUtensorMap *w_map, const RowMaps *x_maps,
                                               const FactorMaps *b_maps,
                                               const moelora_gemm_launch &g, WarpContext<S> &warp) {
  const SharedMemory<S> &smem = warp.smem;
  GemmPipeline<S> &pipeline = warp.pipeline;
  using Parts = TileParts<S>;
  const int k_steps = k_steps_of<S>(g);
  const uint64_t policy = evicts_first<S>(g.weights) ? evict_first_policy() : evict_normal_policy();
  const bool in_fixup = FixupPass<S>(smem).is_running(); // read by all lanes
  const bool fetches =
      !in_fixup && threadIdx.x == S::FIRST_PRODUCER && (S::CLUSTER == 1 || cluster_rank() == 0);
  TileScheduler<S> next(g, fetches);
  SegmentList<S> list;
  AdaptersHeader adapters;
  while (next.more()) {
    next.begin(g);
    const ClusterTile tile = next.tile;
    const int count = next.count();
    const TokenBoxes<S> boxes(g.tokens.divisor.value || Mainloop::Rows::LOADS_BOXES ? 0 : count);
    typename Mainloop::WeightLoads weights;
    weights.begin(g, tile);
    if constexpr (!S::RUNS)
      list = {}, adapters = {};
    list.base = smem.segments();

    // K loop, in parts.
    const bool continues = next.continues();
#pragma unroll 1
    for (int part = 0, step = 0; step < k_steps; part++) {
      const int end = continues ? k_steps : Parts::end(part, Parts::TILE + 1, k_steps);
      if (elect_one()) { // always the same lane, whose `weights` advance
        GemmPipeline<S> at = pipeline;
#pragma unroll 1
        for (int i = step; i < end; i++, at.advance()) {
          // Wait until consumers have released the stage.
          at.wait_empty();

          // Write the stage header.
          if (i == 0)
            TileHeader{tile, count, rows_multiplied<S>(tile, count)}.write(smem.header(at.stage));
          if (i == k_steps - 1)
            adapters.write(smem.header(at.stage));

          // Issue the TMA loads.
          barrier_arrive_expect_tx(at.full(),
                                   weights.bytes(g, tile) + S::SPANS * boxes.rows() * kRowBytes);
          weights.load(w_map, g, tile, i, smem, at, policy);
          boxes.load(x_maps, i, tile.block * S::TOKENS, smem, at);
        }
      }
      __syncwarp();
      pipeline.advance(end - step);
      step = end;

      // Between parts, find this tile's adapters, and the next tile.
      if (part == Parts::ADAPTERS && !continues)
        adapters = adapters_header(list, count, find_adapters(g, tile, list));
      if (part == Parts::TILE || continues)
        next.advance(g);
    }

    // Adapter stages: load rows of B.
    SlabIterator cursor;
    for (int i = 0; i < adapters.stages; i++, pipeline.advance()) {
      const int slabs = slabs_in(g, list, i);
      pipeline.wait_empty();
      if (elect_one()) {
        const bool wide = g.weights.factors_boxes && is_wide(g, list, slabs, cursor);
        const SlabsHeader header = {slabs, wide ? slabs : 1};
        header.write(smem.header(pipeline.stage));
        if constexpr (S::TRANSPOSED) // before the arrival, which makes them visible to consumers
          write_slab_tokens(list, slabs, cursor, smem.header(pipeline.stage));
        barrier_arrive_expect_tx(pipeline.full(),
                                 g.weights.factors_boxes ? slabs * S::TILES * kSlabBytes : 0);
        if (!S::TRANSPOSED && g.weights.factors_boxes)
          load_factors<S>(b_maps, g, tile, list, header, cursor, smem, pipeline, policy);
      }
      __syncwarp();
    }
  }

  // Signal the end with a stage whose block is -1.
  pipeline.wait_empty();
  if (elect_one()) {
    TileHeader{{-1, 0, 0}, 0, 0}.write(smem.header(pipeline.stage));
    barrier_arrive(pipeline.full());
  }
}

/* Runs a gather warp: copies what Rows and Scales do in the K loop, xa, and unmapped factors. */
template <class Mainloop, class S, class T>
__device__ __forceinline__ void
produce_by_gather(const RowMaps *x_maps, const moelora_gemm_launch &g, WarpContext<S> &warp) {
  const SharedMemory<S> &smem = warp.smem;
  GemmPipeline<S> &pipeline = warp.pipeline;
  using Parts = TileParts<S>;
  const int thread = threadIdx.x - S::FIRST_PRODUCER - 32, k_steps = k_steps_of<S>(g);
  typename Mainloop::Rows rows(thread);
  typename Mainloop::Scales scales(thread);
  TileScheduler<S> next(g, false);
  const auto find_rows = [&] {
    if (!next.more())
      return;
    scales.find(g, next.tile, next.count(), thread);
    if (g.tokens.divisor.value)
      rows.find(g, next.tile, next.count(), thread);
  };
  find_rows();
  SegmentList<S> list;
  int adapter_stages;
  while (next.more()) {
    const ClusterTile tile = next.tile;
    const int count = next.count();
    scales.begin(g, tile, thread);
    rows.begin(g, tile, count, scales, thread, smem);
    if constexpr (!S::RUNS)
      list = {}, adapter_stages = 0;
    list.base = smem.segments();

    // K loop, in parts.
    const bool continues = next.continues();
#pragma unroll 1
    for (int part = 0, step = 0; step < k_steps; part++) {
      const int end = continues ? k_steps : Parts::end(part, Parts::ROWS + 1, k_steps);
      pipeline.stage = (int)uniform(pipeline.stage);
#pragma unroll 1
      for (; step < end; step++, pipeline.advance()) {
        // Wait until consumers have released the stage, then issue the copies. The barrier is
        // signaled when they complete.
        pipeline.wait_empty();
        rows.copy(x_maps, g, smem, pipeline);
        scales.copy(g, smem, pipeline.stage);
        barrier_arrive_cp_async(pipeline.full());
      }

      // Between parts, find this tile's adapters, the next tile, and the rows of the next tile.
      if (part == Parts::ADAPTERS && !continues)
        adapter_stages = find_adapters(g, tile, list);
      if (part == Parts::TILE || continues)
        next.advance(g);
      if ((part == Parts::ROWS || continues) && !next.continues())
        find_rows();
    }

    // Adapter stages: copy rows of xa, and of B if no tensor map covers it.
    if (adapter_stages > 0)
      wait_for_previous_kernel(); // wait for the shrink
    SlabIterator cursor;
    for (int i = 0; i < adapter_stages; i++, pipeline.advance()) {
      const int slabs = slabs_in(g, list, i);
      pipeline.wait_empty();
      if constexpr (S::TRANSPOSED) {
        if (g.weights.factors_vectors)
          copy_factor_depth<S, T, true, S::GATHERERS>(g, tile, list, slabs, cursor, smem,
                                                      pipeline.stage, thread);
        else
          copy_factor_depth<S, T, false, S::GATHERERS>(g, tile, list, slabs, cursor, smem,
                                                       pipeline.stage, thread);
      } else if (!g.weights.factors_boxes)
        copy_factors<S, T, S::GATHERERS>(g, tile, list, slabs, cursor, smem, pipeline.stage,
                                         thread);
      copy_xa<S, T, S::GATHERERS>(g, tile, list, slabs, cursor, count, smem, pipeline.stage,
                                  thread);
      barrier_arrive_cp_async(pipeline.full());
    }
  }

  // Arrive on the stage that signals the end.
  pipeline.wait_empty();
  barrier_arrive_cp_async(pipeline.full());
}
