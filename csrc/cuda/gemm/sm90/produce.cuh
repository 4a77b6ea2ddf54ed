/* The producer warpgroup of a Hopper GEMM. Its first warp feeds the copy engine: weights, factors,
 * and token rows where they lie by position. The others, one or three, gather by cp.async: token
 * rows where they do not, and shrink results. */
#ifndef MOELORA_CUDA_SM90_PRODUCE_CUH
#define MOELORA_CUDA_SM90_PRODUCE_CUH

#include "cuda/gemm/common/tile_scheduler.cuh"
#include "cuda/gemm/sm90/adapters.cuh"
#include "cuda/gemm/sm90/gather.cuh"
#include "cuda/gemm/sm90/w8a8.cuh"

#include <type_traits>

/* This CTA's share of a depth step's weights. */
template <class S>
__device__ __forceinline__ void load_native(const CUtensorMap *map, const moelora_gemm_launch &g,
                                            const Tile &tile, int step, const Pipeline<S> &pipeline,
                                            uint64_t policy) {
  constexpr int SHARE = S::TILES / S::CLUSTER;
  const int rank = S::CLUSTER > 1 ? (int)cluster_rank() : 0;
  for (int i = 0; i < SHARE; i++) {
    const int m64 = rank * SHARE + i, output = first_output<S>(g, tile, m64);
    const uint32_t to = pipeline.weights() + m64 * kM64Bytes;
    int c[4] = {step * kDepth, output, g.weights.gated ? m64 & 1 : 0, tile.expert};
    if (g.weights.w.packed) {
      c[0] = c[1] = 0, c[2] = step;
      c[3] = (int)((tile.expert * g.weights.w.n + weight_row(g, m64, output)) / 64);
    }
    if (S::CLUSTER > 1)
      tma_load_4d_multicast(to, map, c[0], c[1], c[2], c[3], pipeline.full(), policy);
    else
      tma_load_4d(to, map, c[0], c[1], c[2], c[3], pipeline.full(), policy);
  }
}

/* What a step has of an m64 tile lies together and comes in one copy: the lane that starts copies
 * does nothing else, and falls behind memory if they are small. Behind the end of the depth x is
 * zero, and any weights will do: the last once more. */
template <class S>
__device__ __forceinline__ void load_quantized(const moelora_gemm_launch &g,
                                               QuantizedTiles<S> &tiles, int step,
                                               const Pipeline<S> &pipeline, uint64_t policy) {
  const uint32_t bytes = S::Format::tile_bytes(g.weights.w.format);
  const bool whole = (step + 1) * S::SPANS * kDepth < g.tokens.k + kDepth;
#pragma unroll
  for (int m64 = 0; m64 < S::TILES; m64++) {
    const uint32_t to = pipeline.weights() + m64 * S::SPANS * S::SLOT_BYTES;
    bulk_load(to, tiles.at[m64], whole ? S::SPANS * bytes : bytes, pipeline.full(), policy);
    if (S::SPANS > 1 && !whole)
      bulk_load(to + bytes, tiles.at[m64], bytes, pipeline.full(), policy);
  }
  tiles.advance(g, S::SPANS);
}

/* Bytes of weights, and of their scales, that a step brings to this CTA. */
template <class S>
__device__ __forceinline__ uint32_t step_bytes(const moelora_gemm_launch &g, const Tile &tile) {
  const uint32_t bytes = S::Format::IS_NATIVE
                             ? S::W_BYTES
                             : S::SPANS * S::TILES * S::Format::tile_bytes(g.weights.w.format);
  return bytes >> is_half<S>(tile);
}

template <class S>
__device__ __forceinline__ void load_weights(const CUtensorMap *map, const moelora_gemm_launch &g,
                                             const Tile &tile, QuantizedTiles<S> &tiles, int step,
                                             const Pipeline<S> &pipeline, uint64_t policy) {
  if constexpr (S::Format::IS_NATIVE)
    load_native<S>(map, g, tile, step, pipeline, policy);
  else if constexpr (S::Format::IS_W8A8)
    load_w8a8<S>(g, tiles, pipeline, policy);
  else
    load_quantized<S>(g, tiles, step, pipeline, policy);
}

/* The tile scheduler: the tiles of this CTA, one after the other. Small ones are this cluster's by
 * its place. Of large ones only the first is, and the others are drawn: g.schedule.tile_counter
 * says how many have been, and behind it, for each tile, which one the same cluster has next. There
 * all producers of a cluster find it, and in the fix-up pass they find it again. One lane draws
 * when a tile begins: earlier, clusters that start first would take more than they have time for.
 */
template <class S> struct TileScheduler {
  int index;
  ClusterTile tile; // block -1 behind the last
  int count;        // rows in use
  bool draws;       // this lane does

  __device__ __forceinline__ TileScheduler(const moelora_gemm_launch &g, bool draws_)
      : index(blockIdx.x / S::CLUSTER), draws(draws_) {
    find(g);
  }
  __device__ __forceinline__ bool more() const { return tile.block >= 0; }
  /* Of the first tile copies come first: `advance` draws. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g) const {
    if (index >= clusters())
      draw(g);
  }
  __device__ __forceinline__ void advance(const moelora_gemm_launch &g) {
    if (index < clusters())
      draw(g);
    follow(g);
    find(g);
  }

private:
  static __device__ __forceinline__ int clusters() { return gridDim.x / S::CLUSTER; }

  __device__ __forceinline__ void draw(const moelora_gemm_launch &g) const {
    if (S::DRAWN && draws)
      ((volatile int32_t *)g.schedule.tile_counter)[1 + index] =
          clusters() + atomicAdd(g.schedule.tile_counter, 1);
  }
  __device__ __forceinline__ void follow(const moelora_gemm_launch &g) {
    if constexpr (!S::DRAWN) {
      index += clusters();
      return;
    }
    const volatile int32_t *next = g.schedule.tile_counter + 1 + index;
    do
      index = *next;
    while (index == 0);
  }
  /* The tile at `index`, or the first one that there is behind it. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g) {
    const int columns = tile_columns<S>(g);
    const int blocks = *g.schedule.blocks.num_post / S::TOKENS;
    const int splits = S::SPLIT_K ? g.epilogue.splits : 1;
    const int rank = S::CLUSTER > 1 ? (int)cluster_rank() : 0;
    const int all = S::ODD_BLOCKS ? blocks * columns_each(columns) : blocks / S::CLUSTER * columns;
    // The last ones become halves: as many as keep all clusters busy for half of a tile's time.
    const int halved = S::HALF_TILES ? min(min(all, clusters() / 2), MOELORA_MOST_HALVED) : 0;
    for (; index < all * splits + halved; follow(g)) {
      const int behind = index - (all - halved);
      const int split = S::SPLIT_K ? index / all : 0;
      const int at = !S::HALF_TILES || behind < 0 ? index - split * all : index - (behind + 1) / 2;
      if constexpr (S::ODD_BLOCKS) {
        tile = tile_of_pair<S>(g, at, columns, blocks, rank, &count);
      } else {
        const Tile first = tile_at<S, S::CLUSTER>(g, at, columns, blocks / S::CLUSTER);
        tile = {{first.block + rank, first.column, first.expert, 0, split}, first.block + 1 - rank};
        count = g.schedule.blocks.counts[tile.block];
      }
      if constexpr (S::HALF_TILES) {
        tile.half = behind < 0 ? 0 : 1 + behind % 2;
        if (behind < 0 && first_output<S>(g, tile, S::TILES / 2) >= g.weights.n_out)
          tile.half = 1; // there is no more of it
      }
      // Where the CTAs of a cluster have a column each, they go in step.
      const bool is_there = tile.is_shared() || first_output<S>(g, tile, 0) < g.weights.n_out;
      if ((!S::ODD_BLOCKS || tile.column < columns) && (!S::HALF_TILES || is_there))
        return;
      draw(g);
    }
    tile.block = -1;
  }
};

/* Copies that bring a block's `count` rows of x: `boxes` of S::BOX, then `rest` of S::REST_BOX. */
template <class S> struct TokenBoxes {
  int boxes, rest;

  __device__ __forceinline__ explicit TokenBoxes(int count) {
    const int left = count % S::BOX;
    boxes = count / S::BOX + (left > 32 && count - left + S::BOX <= S::TOKENS);
    rest = (max(count - boxes * S::BOX, 0) + S::REST_BOX - 1) / S::REST_BOX;
  }
  __device__ __forceinline__ int rows() const { return boxes * S::BOX + rest * S::REST_BOX; }
  __device__ __forceinline__ void load(const RowMaps *maps, int step, int row,
                                       const Pipeline<S> &pipeline) const {
#pragma unroll
    for (int span = 0; span < S::SPANS; span++) {
      const int k = (step * S::SPANS + span) * kDepth;
      const uint32_t to = pipeline.tokens(span);
#pragma unroll 1
      for (int i = 0; i < boxes; i++)
        tma_load_2d(to + i * S::BOX * kRowBytes, &maps->many, k, row + i * S::BOX, pipeline.full());
#pragma unroll 1
      for (int i = 0, at = boxes * S::BOX; i < rest; i++, at += S::REST_BOX)
        tma_load_2d(to + at * kRowBytes, &maps->few, k, row + at, pipeline.full());
    }
  }
};

/* Producers go through a tile in parts, each of some steps; behind the first of them they look for
 * what comes next. They wait longest for the stage that the last tile's epilogue buffers alias:
 * where there is one, they do all that there; where none is, a little at every step. */
template <class S> struct TileParts {
  static constexpr bool AT_ONCE = S::ALIASED_BUFFERS > 0;
  // Behind which part there is time for adapters, for the tile to come, for its rows.
  static constexpr int ADAPTERS = 0, TILE = AT_ONCE ? 0 : 1, ROWS = AT_ONCE ? 0 : 2;

  /* The step behind a part, the last of which is number `last`. */
  static __device__ __forceinline__ int end(int part, int last, int depth_steps) {
    return part < last ? min(AT_ONCE ? S::STAGES - 1 : 1 + part, depth_steps - 1) : depth_steps;
  }
};

/* Tiles that nearly always hold all tokens of an expert: its weights and factors are read once, and
 * L2 is told so. Of both or of neither: factors that stay while weights stream by cost more than
 * the hint brings. The largest tiles of quantised weights have it as well; those of native weights,
 * which blocks read again, are slower with it. */
template <class S> constexpr bool kStreaming = S::TOKENS <= 128 || S::CLUSTER == 1;

/* Where tokens are operand A each consumer takes 64, and one without any leaves the tensor cores to
 * the others. Not so where both CTAs of a cluster have the same tokens: if it multiplies whatever
 * its half of the stage holds, w2 takes 5 to 10 % less time. */
template <class S>
__device__ __forceinline__ int rows_multiplied(const ClusterTile &tile, int count) {
  return S::ODD_BLOCKS && tile.is_shared() ? S::TOKENS : count;
}

/* Weights, factors, and x where it lies by position. One lane starts all copies of a part: to keep
 * up with memory it has some hundred cycles for each. */
template <class S>
__device__ __forceinline__ void stream(const CUtensorMap *w_map, const RowMaps *x_maps,
                                       const FactorMaps *b_maps, const moelora_gemm_launch &g,
                                       Pipeline<S> &pipeline) {
  using Parts = TileParts<S>;
  const int depth_steps = all_depth_steps<S>(g);
  const uint64_t policy = kStreaming<S> ? evict_first_policy() : evict_normal_policy();
  const bool in_fixup = pipeline.in_fixup(); // all lanes ask
  const bool draws =
      !in_fixup && threadIdx.x == S::FIRST_PRODUCER && (S::CLUSTER == 1 || cluster_rank() == 0);
  TileScheduler<S> next(g, draws);
  while (next.more()) {
    next.begin(g);
    const ClusterTile tile = next.tile;
    const int count = next.count;
    const DepthSteps depth = DepthSteps::of<S>(g, tile, depth_steps);
    const TokenBoxes<S> boxes(g.tokens.divisor.value ? 0 : count);
    QuantizedTiles<S> tiles;
    tiles.find(g, tile);
    if (S::SPLIT_K)
      tiles.advance(g, depth.first * S::SPANS);
    SegmentList<S> list;
    list.base = pipeline.segments();
    AdaptersHeader adapters = {};
#pragma unroll 1
    for (int part = 0, step = 0; step < depth.count; part++) {
      const int end = Parts::end(part, Parts::TILE + 1, depth.count);
      if (is_elected()) { // always the same
        Pipeline<S> at = pipeline;
#pragma unroll 1
        for (int i = step; i < end; i++, at.advance()) {
          at.wait_empty();
          if (i == 0)
            TileHeader{tile, count, rows_multiplied<S>(tile, count)}.write(at.header());
          if (i == depth.count - 1)
            adapters.write(at.header());
          barrier_expect(at.full(), step_bytes<S>(g, tile) + S::SPANS * boxes.rows() * kRowBytes);
          load_weights<S>(w_map, g, tile, tiles, depth.first + i, at, policy);
          boxes.load(x_maps, depth.first + i, tile.block * S::TOKENS, at);
        }
      }
      __syncwarp();
      pipeline.advance(end - step);
      step = end;
      if (part == Parts::ADAPTERS)
        adapters = adapters_header(list, count, find_adapters(g, tile, list));
      if (part == Parts::TILE)
        next.advance(g);
    }
    SlabIterator cursor;
    for (int i = 0; i < adapters.stages; i++, pipeline.advance()) {
      const int slabs = slabs_in(g, list, i);
      pipeline.wait_empty();
      if (is_elected()) {
        const bool wide = g.weights.factors_boxes && is_wide(g, list, slabs, cursor);
        const SlabsHeader header = {slabs, wide ? slabs : 1};
        header.write(pipeline.header());
        barrier_expect(pipeline.full(),
                       g.weights.factors_boxes ? slabs * S::TILES * kSlabM64Bytes : 0);
        if (g.weights.factors_boxes)
          load_factors<S>(b_maps, g, tile, list, header, cursor, pipeline, policy);
      }
      __syncwarp();
    }
  }
  pipeline.wait_empty();
  if (is_elected()) {
    TileHeader{{-1, 0, 0, 0}, 0, 0}.write(pipeline.header());
    barrier_arrive(pipeline.full());
  }
}

template <class S, class T>
__device__ __forceinline__ void gather(const moelora_gemm_launch &g, Pipeline<S> &pipeline) {
  using Parts = TileParts<S>;
  const int thread = threadIdx.x - S::FIRST_PRODUCER - 32, depth_steps = all_depth_steps<S>(g);
  constexpr bool SCALED = S::Format::IS_W8A8;
  constexpr bool LISTED = S::TOKENS_FIRST; // consumers have the registers
  std::conditional_t<LISTED, ListedGather<S::TOKENS>,
                     Gather<S::TOKENS, S::GATHER_LANES, S::GATHERERS>>
      rows(thread);
  std::conditional_t<SCALED, TokenScales<S>, int> scales(thread);
  TileScheduler<S> next(g, false);
  const auto find_rows = [&] {
    if (!next.more())
      return;
    if constexpr (SCALED)
      scales.find(g, next.tile, next.count, thread);
    if constexpr (!LISTED)
      if (g.tokens.divisor.value)
        rows.find(g.schedule.blocks, g.tokens, next.count, thread,
                  [&](int t) { return next.tile.block * S::TOKENS + t; });
  };
  find_rows();
  while (next.more()) {
    const ClusterTile tile = next.tile;
    const int count = next.count;
    const DepthSteps depth = DepthSteps::of<S>(g, tile, depth_steps);
    if constexpr (SCALED)
      scales.begin(g, depth.first);
    if constexpr (!LISTED) {
      rows.begin(g.tokens, thread);
    } else if (g.tokens.divisor.value) {
      scales.list(g, thread, pipeline);
      rows.begin(g.tokens, thread, pipeline.row_list());
    }
    SegmentList<S> list;
    list.base = pipeline.segments();
    int adapter_stages = 0;
#pragma unroll 1
    for (int part = 0, step = 0; step < depth.count; part++) {
      const int end = Parts::end(part, Parts::ROWS + 1, depth.count);
      pipeline.stage = (int)uniform(pipeline.stage);
#pragma unroll 1
      for (; step < end; step++, pipeline.advance()) {
        pipeline.wait_empty();
        if (g.tokens.divisor.value)
#pragma unroll
          for (int span = 0; span < S::SPANS; span++)
            rows.copy(pipeline.tokens(span));
        if constexpr (SCALED)
          scales.copy(g, pipeline);
        barrier_arrive_after_copies(pipeline.full());
      }
      if (part == Parts::ADAPTERS)
        adapter_stages = find_adapters(g, tile, list);
      if (part == Parts::TILE)
        next.advance(g);
      if (part == Parts::ROWS)
        find_rows();
    }

    if (adapter_stages > 0)
      wait_for_previous_kernel(); // it is the shrink
    SlabIterator cursor;
    for (int i = 0; i < adapter_stages; i++, pipeline.advance()) {
      const int slabs = slabs_in(g, list, i);
      pipeline.wait_empty();
      if (!g.weights.factors_boxes)
        copy_factors<S, T, S::GATHERERS>(g, tile, list, slabs, cursor, pipeline, thread);
      copy_xa<S, T, S::GATHERERS>(g, tile, list, slabs, cursor, count, pipeline, thread);
      barrier_arrive_after_copies(pipeline.full());
    }
  }
  pipeline.wait_empty();
  barrier_arrive_after_copies(pipeline.full());
}

#endif
