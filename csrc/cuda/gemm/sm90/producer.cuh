/* The producer warps of a Hopper GEMM.
 *
 *                  of each k step                      of each adapter stage
 *   TMA warp       weights; x where it is by position  rows of B
 *   gather warps   x by routing; its scales in FP8     rows of xa
 *
 * Both walk the same tiles and stages. Every stage's full barrier expects one arrival of the TMA
 * warp, with the bytes that it loads, and one of each gathering thread, after its cp.async.
 *
 * A producer has some hundred cycles per stage. So the loop over k steps does nothing but loads;
 * what a tile needs to know (its adapters, the next tile and that one's rows) is found between
 * parts of that loop, where it costs the loop no registers. */
#ifndef MOELORA_CUDA_SM90_PRODUCER_CUH
#define MOELORA_CUDA_SM90_PRODUCER_CUH

#include "cuda/gemm/sm90/adapter_loads.cuh"
#include "cuda/gemm/sm90/warp_context.cuh"
#include "cuda/gemm/sm90/fixup.cuh"
#include "cuda/gemm/sm90/tile_scheduler.cuh"

/* The TMA boxes that load a block's `count` rows of x: `boxes` of S::BOX rows, `rest` of
 * S::REST_BOX. */
template <class S> struct TokenBoxes {
  int boxes, rest;

  __device__ __forceinline__ explicit TokenBoxes(int count) {
    const int left = count % S::BOX;
    boxes = count / S::BOX + (left > 32 && count - left + S::BOX <= S::TOKENS);
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
        tma_load_2d(sX + i * S::BOX * kRowBytes, &maps->many, k, row + i * S::BOX, pipeline.full());
#pragma unroll 1
      for (int i = 0, at = boxes * S::BOX; i < rest; i++, at += S::REST_BOX)
        tma_load_2d(sX + at * kRowBytes, &maps->few, k, row + at, pipeline.full());
    }
  }
};

/* The parts of a tile's k steps, after which producers look for the adapters of the tile, for the
 * next tile, and for the rows of that. Where consumers alias a stage, producers wait longest for
 * it and find all of that before; elsewhere a part is a step. */
template <class S> struct TileParts {
  static constexpr bool AT_ONCE = WarpContext<S>::ALIASED_BUFFERS > 0;
  static constexpr int ADAPTERS = 0, TILE = AT_ONCE ? 0 : 1, ROWS = AT_ONCE ? 0 : 2;

  /* The step after a part, the last of which is number `last`. */
  static __device__ __forceinline__ int end(int part, int last, int k_steps) {
    return part < last ? min(AT_ONCE ? S::STAGES - 1 : 1 + part, k_steps - 1) : k_steps;
  }
};

/* Tiles that nearly always hold all tokens of an expert read its weights and factors once, and have
 * L2 evict them first: both or neither, for factors that stay in L2 take the place of other data.
 * So do the largest tiles of quantized weights; native weights are read again by other blocks. */
template <class S> constexpr bool kEvictFirst = S::TOKENS <= 128 || S::CLUSTER == 1;

/* Rows of a tile that consumers multiply. Where tokens are operand A each consumer takes 64, and
 * one without tokens leaves the tensor cores to the other; but where both CTAs of a cluster have
 * the same tokens it is faster for it to multiply what is in its half of the stage. */
template <class S>
__device__ __forceinline__ int rows_multiplied(const ClusterTile &tile, int count) {
  return S::UNPAIRED_BLOCKS && tile.is_shared() ? S::TOKENS : count;
}

/* Token rows by cp.async of the gather warps. */
template <class S> struct TokenRows {
  Gather<S::TOKENS, S::GATHER_LANES, S::GATHERERS, S::Format::X_ELEMENTS / 8> rows;

  __device__ __forceinline__ explicit TokenRows(int thread) : rows(thread) {}

  /* Finds the rows of the next tile. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile, int count,
                                       int thread) {
    rows.find(g.schedule.blocks, g.tokens, count, thread,
              [&](int t) { return tile.block * S::TOKENS + t; });
  }
  /* From here on `copy` is about the rows that were found. */
  template <class Scales>
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const Scales &, int thread,
                                        const SharedMemory<S> &) {
    rows.begin(g.tokens, thread);
  }
  /* Those of the next k step. */
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const SharedMemory<S> &smem,
                                       int stage) {
    if (g.tokens.divisor.value)
#pragma unroll
      for (int span = 0; span < S::SPANS; span++)
        rows.copy(smem.sX(stage, span));
  }
};

/* Tokens that are no FP8 have no scales; see TokenScales in fp8.cuh. */
template <class S> struct NoTokenScales {
  __device__ __forceinline__ explicit NoTokenScales(int) {}
  __device__ __forceinline__ void find(const moelora_gemm_launch &, const Tile &, int, int) {}
  __device__ __forceinline__ void begin(const moelora_gemm_launch &) {}
  __device__ __forceinline__ void copy(const moelora_gemm_launch &, const SharedMemory<S> &, int) {}
};

/* The TMA warp: weights, factors B, and x where it lies by position. */
template <class Mainloop, class S>
__device__ __forceinline__ void produce_by_tma(const CUtensorMap *w_map, const RowMaps *x_maps,
                                               const FactorMaps *b_maps,
                                               const moelora_gemm_launch &g, WarpContext<S> &warp) {
  const SharedMemory<S> &smem = warp.smem;
  GemmPipeline<S> &pipeline = warp.pipeline;
  using Parts = TileParts<S>;
  const int k_steps = k_steps_of<S>(g);
  const uint64_t policy = kEvictFirst<S> ? evict_first_policy() : evict_normal_policy();
  const bool in_fixup = FixupPass<S>(smem).is_running(); // all lanes
  const bool fetches =
      !in_fixup && threadIdx.x == S::FIRST_PRODUCER && (S::CLUSTER == 1 || cluster_rank() == 0);
  TileScheduler<S> next(g, fetches);
  while (next.more()) {
    next.begin(g);
    const ClusterTile tile = next.tile;
    const int count = next.count;
    const TokenBoxes<S> boxes(g.tokens.divisor.value ? 0 : count);
    typename Mainloop::WeightLoads weights;
    weights.begin(g, tile);
    SegmentList<S> list;
    list.base = smem.segments();
    AdaptersHeader adapters = {};

    // The k steps, in parts.
#pragma unroll 1
    for (int part = 0, step = 0; step < k_steps; part++) {
      const int end = Parts::end(part, Parts::TILE + 1, k_steps);
      if (is_elected()) { // the same lane every time
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
          barrier_expect(at.full(), weights.bytes(g, tile) + S::SPANS * boxes.rows() * kRowBytes);
          weights.load(w_map, g, tile, i, smem, at, policy);
          boxes.load(x_maps, i, tile.block * S::TOKENS, smem, at);
        }
      }
      __syncwarp();
      pipeline.advance(end - step);
      step = end;

      // Between parts: the adapters of this tile, and the next tile.
      if (part == Parts::ADAPTERS)
        adapters = adapters_header(list, count, find_adapters(g, tile, list));
      if (part == Parts::TILE)
        next.advance(g);
    }

    // The adapter stages: rows of B.
    SlabIterator cursor;
    for (int i = 0; i < adapters.stages; i++, pipeline.advance()) {
      const int slabs = slabs_in(g, list, i);
      pipeline.wait_empty();
      if (is_elected()) {
        const bool wide = g.weights.factors_boxes && is_wide(g, list, slabs, cursor);
        const SlabsHeader header = {slabs, wide ? slabs : 1};
        header.write(smem.header(pipeline.stage));
        barrier_expect(pipeline.full(),
                       g.weights.factors_boxes ? slabs * S::TILES * kSlabM64Bytes : 0);
        if (g.weights.factors_boxes)
          load_factors<S>(b_maps, g, tile, list, header, cursor, smem, pipeline, policy);
      }
      __syncwarp();
    }
  }

  // The stage after the last tile.
  pipeline.wait_empty();
  if (is_elected()) {
    TileHeader{{-1, 0, 0, 0}, 0, 0}.write(smem.header(pipeline.stage));
    barrier_arrive(pipeline.full());
  }
}

/* The gather warps: x where it does not lie by position, scales of x, and xa. */
template <class Mainloop, class S, class T>
__device__ __forceinline__ void produce_by_gather(const moelora_gemm_launch &g,
                                                  WarpContext<S> &warp) {
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
    scales.find(g, next.tile, next.count, thread);
    if (g.tokens.divisor.value)
      rows.find(g, next.tile, next.count, thread);
  };
  find_rows();
  while (next.more()) {
    const ClusterTile tile = next.tile;
    const int count = next.count;
    scales.begin(g);
    rows.begin(g, scales, thread, smem);
    SegmentList<S> list;
    list.base = smem.segments();
    int adapter_stages = 0;

    // The k steps, in parts.
#pragma unroll 1
    for (int part = 0, step = 0; step < k_steps; part++) {
      const int end = Parts::end(part, Parts::ROWS + 1, k_steps);
      pipeline.stage = (int)uniform(pipeline.stage);
#pragma unroll 1
      for (; step < end; step++, pipeline.advance()) {
        // Wait until consumers have released the stage, and start the copies; their end arrives.
        pipeline.wait_empty();
        rows.copy(g, smem, pipeline.stage);
        scales.copy(g, smem, pipeline.stage);
        barrier_arrive_after_copies(pipeline.full());
      }

      // Between parts: the adapters of this tile, the next tile, and its rows.
      if (part == Parts::ADAPTERS)
        adapter_stages = find_adapters(g, tile, list);
      if (part == Parts::TILE)
        next.advance(g);
      if (part == Parts::ROWS)
        find_rows();
    }

    // The adapter stages: rows of xa, and of B where no tensor map covers it.
    if (adapter_stages > 0)
      wait_for_previous_kernel(); // the shrink
    SlabIterator cursor;
    for (int i = 0; i < adapter_stages; i++, pipeline.advance()) {
      const int slabs = slabs_in(g, list, i);
      pipeline.wait_empty();
      if (!g.weights.factors_boxes)
        copy_factors<S, T, S::GATHERERS>(g, tile, list, slabs, cursor, smem, pipeline.stage,
                                         thread);
      copy_xa<S, T, S::GATHERERS>(g, tile, list, slabs, cursor, count, smem, pipeline.stage,
                                  thread);
      barrier_arrive_after_copies(pipeline.full());
    }
  }

  // The stage after the last tile.
  pipeline.wait_empty();
  barrier_arrive_after_copies(pipeline.full());
}

#endif
