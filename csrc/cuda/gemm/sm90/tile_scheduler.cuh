/* The tile scheduler of the Hopper GEMM: the tiles of a CTA, one after the other, and the k steps
 * that a tile has.
 *
 * Small tiles have a static schedule: cluster i has tiles i, i + clusters, ... of the order in
 * tile_order.cuh. Large tiles have a dynamic one: only the first is static, the others come from an
 * atomic counter. All producers of a cluster need the same tile, and in the fix-up pass the same
 * once more, so one lane fetches and writes what it got to global memory:
 *
 *   tile_counter [0]      tiles fetched so far
 *                [1 + i]  the tile that follows tile i in its cluster; 0: not fetched yet
 *
 * A tile is fetched when the one before begins. Fetched earlier, it would go to the clusters that
 * start first, whether or not they have time for it. */
#ifndef MOELORA_CUDA_SM90_TILE_SCHEDULER_CUH
#define MOELORA_CUDA_SM90_TILE_SCHEDULER_CUH

#include "cuda/gemm/common/tile_order.cuh"
#include "cuda/gemm/sm90/kernel_shape.cuh"
#include "cuda/ptx/hopper.cuh"

/* A tile of one CTA of a cluster, and the block of the other CTA: the same block where the two
 * have a column each and share no weights. */
struct ClusterTile : Tile {
  int32_t beside;

  __device__ __forceinline__ bool is_shared() const { return beside == block; }
};

/* Unpaired blocks: a cluster has a pair of blocks for half of the columns, or a block without a
 * pair for all of them, two at a time. So every block has as many tiles. */
__host__ __device__ inline int columns_each(int columns) {
  return (columns + 1) / 2;
}

/* Tile `index` of CTA `rank` of a cluster of two, and its rows in use, over blocks of which some
 * are pairs. Its column may be past the last one. */
template <class S>
__device__ __forceinline__ ClusterTile tile_of_pair(const moelora_gemm_launch &g, int index,
                                                    int columns, int blocks, int rank, int *count) {
  const int each = columns_each(columns);
  const Tile t = tile_at<S>(g, index, each, blocks);
  const int pair = g.schedule.blocks.pairs[t.block];
  *count = g.schedule.blocks.counts[t.block];
  if (pair == 0) // of an odd number of columns both CTAs have the last one, and the same results
    return {{t.block, min(2 * t.column + rank, columns - 1), t.expert, 0}, t.block};
  const int second = pair < 0, first = t.block - second;
  if (rank != second)
    *count = abs(pair);
  return {{first + rank, t.column + second * each, t.expert, 0}, first + 1 - rank};
}

template <class S> __device__ __forceinline__ int k_steps_of(const moelora_gemm_launch &g) {
  constexpr int ELEMENTS = S::SPANS * S::Format::X_ELEMENTS;
  return (g.tokens.k + ELEMENTS - 1) / ELEMENTS;
}

template <class S> struct TileScheduler {
  int index;
  ClusterTile tile; // block -1 after the last
  int count;        // rows in use
  bool fetches;     // this lane does

  __device__ __forceinline__ TileScheduler(const moelora_gemm_launch &g, bool fetches_)
      : index(blockIdx.x / S::CLUSTER), fetches(fetches_) {
    find(g);
  }
  __device__ __forceinline__ bool more() const { return tile.block >= 0; }
  /* Fetches the tile after this one, except that the first tile starts its loads before: there
   * `advance` fetches. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g) const {
    if (index >= clusters())
      fetch(g);
  }
  __device__ __forceinline__ void advance(const moelora_gemm_launch &g) {
    if (index < clusters())
      fetch(g);
    follow(g);
    find(g);
  }

private:
  static __device__ __forceinline__ int clusters() { return gridDim.x / S::CLUSTER; }

  __device__ __forceinline__ void fetch(const moelora_gemm_launch &g) const {
    if (S::DYNAMIC_SCHEDULE && fetches)
      ((volatile int32_t *)g.schedule.tile_counter)[1 + index] =
          clusters() + atomicAdd(g.schedule.tile_counter, 1);
  }
  __device__ __forceinline__ void follow(const moelora_gemm_launch &g) {
    if constexpr (!S::DYNAMIC_SCHEDULE) {
      index += clusters();
      return;
    }
    const volatile int32_t *next = g.schedule.tile_counter + 1 + index;
    do
      index = *next;
    while (index == 0);
  }
  /* The tile at `index`, or the first one after it that exists. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g) {
    const int columns = tile_columns<S>(g);
    const int blocks = *g.schedule.blocks.num_post / S::TOKENS;
    const int rank = S::CLUSTER > 1 ? (int)cluster_rank() : 0;
    const int all =
        S::UNPAIRED_BLOCKS ? blocks * columns_each(columns) : blocks / S::CLUSTER * columns;
    // The last tiles become halves: as many as keep all clusters busy for half of a tile's time.
    const int halved = S::HALF_TILES ? min(min(all, clusters() / 2), MOELORA_MOST_HALVED) : 0;
    for (; index < all + halved; follow(g)) {
      const int past = index - (all - halved); // tiles that are whole
      const int at = !S::HALF_TILES || past < 0 ? index : index - (past + 1) / 2;
      if constexpr (S::UNPAIRED_BLOCKS) {
        tile = tile_of_pair<S>(g, at, columns, blocks, rank, &count);
      } else {
        const Tile first = tile_at<S, S::CLUSTER>(g, at, columns, blocks / S::CLUSTER);
        tile = {{first.block + rank, first.column, first.expert, 0}, first.block + 1 - rank};
        count = g.schedule.blocks.counts[tile.block];
      }
      if constexpr (S::HALF_TILES) {
        tile.half = past < 0 ? 0 : 1 + past % 2;
        if (past < 0 && first_output<S>(g, tile, S::TILES / 2) >= g.weights.n_out)
          tile.half = 1; // there are no outputs in its second half
      }
      // CTAs that have a column each advance together, even where one has no outputs.
      const bool exists = tile.is_shared() || first_output<S>(g, tile, 0) < g.weights.n_out;
      if ((!S::UNPAIRED_BLOCKS || tile.column < columns) && (!S::HALF_TILES || exists))
        return;
      fetch(g);
    }
    tile.block = -1;
  }
};

#endif
