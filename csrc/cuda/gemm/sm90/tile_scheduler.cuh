/* Tile scheduler of the Hopper GEMM: the sequence of tiles of a CTA, and the k steps of each tile.
 *
 * Small tiles use a static schedule: cluster i processes tiles i, i + clusters, ... in the order of
 * tile_at. Large tiles use a dynamic schedule: the first tile of a cluster is static, the others
 * come from an atomic counter. All producers of a cluster must see the same sequence, also in the
 * fix-up pass, so one lane fetches each tile and publishes it in global memory:
 *
 *   tile_counter [0]      tiles fetched so far
 *                [1 + i]  the tile that follows tile i in its cluster; 0: not fetched yet
 *
 * A tile is fetched when its cluster begins the previous tile. Fetching earlier would assign tiles
 * to the clusters that start first rather than to those that are free first.
 *
 * A tile with few k steps ends before its producers have found the next tile and its adapters. Such
 * tiles are scheduled in runs of neighboring columns of one block, which have the same tokens and
 * segments. A run has one index. The last tiles are in no run, to keep all clusters busy. */
#pragma once

#include "cuda/gemm/common/tile.cuh"
#include "cuda/gemm/sm90/kernel_shape.cuh"
#include "cuda/ptx/hopper.cuh"

/* Tiles per cluster at the end of the schedule that are in no run. */
constexpr int kSingleTiles = 4;

/* Tile of one CTA of a cluster. `peer_block` is the block of the other CTA: the same block if the
 * two CTAs process different columns of it and share no weights. */
struct ClusterTile : Tile {
  int32_t peer_block;

  __device__ __forceinline__ bool is_shared() const { return peer_block == block; }
};

/* Returns the number of cluster tiles per block with UNPAIRED_BLOCKS. A cluster tile covers one
 * column of both blocks of a pair, or two columns of an unpaired block. */
__host__ __device__ inline int columns_each(int columns) {
  return (columns + 1) / 2;
}

/* Returns the tile of CTA `rank` in cluster tile `t`, for UNPAIRED_BLOCKS and clusters of two. Sets
 * `count` to its number of valid tokens. Its column may be past the last column. */
__device__ __forceinline__ ClusterTile tile_of_pair(const moelora_gemm_launch &g, const Tile &t,
                                                    int columns, int rank, int *count) {
  const int each = columns_each(columns);
  const int pair = g.schedule.blocks.pairs[t.block];
  *count = g.schedule.blocks.counts[t.block];
  if (pair == 0) // with an odd number of columns, both CTAs compute the last one
    return {{t.block, min(2 * t.column + rank, columns - 1), t.expert}, t.block};
  const int second = pair < 0, first = t.block - second;
  if (rank != second)
    *count = abs(pair);
  return {{first + rank, t.column + second * each, t.expert}, first + 1 - rank};
}

template <class S> __device__ __forceinline__ int k_steps_of(const moelora_gemm_launch &g) {
  constexpr int ELEMENTS = S::SPANS * S::Format::X_ELEMENTS;
  return (g.tokens.k + ELEMENTS - 1) / ELEMENTS;
}

template <class S> struct TileScheduler {
  int index;
  ClusterTile tile; // block is -1 after the last tile
  bool fetches;     // whether this lane fetches tiles

  __device__ __forceinline__ TileScheduler(const moelora_gemm_launch &g, bool fetches_)
      : index(blockIdx.x / S::CLUSTER), fetches(fetches_) {
    find(g);
  }
  __device__ __forceinline__ bool more() const { return tile.block >= 0; }
  /* Returns the number of valid tokens of the tile. */
  __device__ __forceinline__ int count() const { return S::RUNS ? packed & 0xff : packed; }
  /* Returns whether the previous tile was of the same run: another column of the same block. */
  __device__ __forceinline__ bool continues() const { return S::RUNS && packed & CONTINUES; }
  /* Fetches the next tile if this one is the last of its run. At the first tile it leaves that to
   * advance(), so that the first loads are issued earlier. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g) const {
    if (index >= clusters() && left() == 0)
      fetch(g);
  }
  __device__ __forceinline__ void advance(const moelora_gemm_launch &g) {
    if (left() > 0)
      return next_column(g);
    if (index < clusters())
      fetch(g);
    follow(g);
    find(g);
  }

private:
  static constexpr int CONTINUES = 1 << 16;
  int packed; // count() | left() << 8 | CONTINUES: producers have few registers

  /* Returns how many tiles of the current run follow this tile. */
  __device__ __forceinline__ int left() const { return S::RUNS ? packed >> 8 & 0xff : 0; }
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
  /* Moves `tile` to this CTA's next column in its run. */
  __device__ __forceinline__ void next_column(const moelora_gemm_launch &g) {
    packed = packed - (1 << 8) | CONTINUES;
    tile.column += 1 + tile.is_shared();
    if (tile.is_shared())
      tile.column = min(tile.column, tile_columns<S>(g) - 1);
  }
  /* Sets `tile` to tile `index`, or the first valid one after it. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g) {
    const int columns = tile_columns<S>(g),
              each = S::UNPAIRED_BLOCKS ? columns_each(columns) : columns;
    const int blocks = *g.schedule.blocks.num_post / S::TOKENS;
    const int rank = S::CLUSTER > 1 ? (int)cluster_rank() : 0;
    constexpr int CLUSTER_BLOCKS = S::UNPAIRED_BLOCKS ? 1 : S::CLUSTER; // blocks of a cluster tile
    const int rows = blocks / CLUSTER_BLOCKS;
    // Schedule all but the last tiles in runs.
    const int run = S::RUNS ? g.schedule.run : 1, runs = (each + run - 1) / run;
    const int rows_in_runs =
        run > 1 ? max(rows - (kSingleTiles * clusters() + each - 1) / each, 0) : 0;
    const int in_runs = rows_in_runs * runs, all = in_runs + (rows - rows_in_runs) * each;
    for (; index < all; follow(g)) {
      const bool in_run = index < in_runs;
      Tile first = tile_at<S, CLUSTER_BLOCKS>(
          g, in_run ? index : index - in_runs, in_run ? runs : each,
          in_run ? rows_in_runs : rows - rows_in_runs, in_run ? 0 : rows_in_runs * CLUSTER_BLOCKS);
      if (in_run)
        first.column *= run;
      int count, left = in_run ? min(run, each - first.column) - 1 : 0;
      if constexpr (S::UNPAIRED_BLOCKS) {
        tile = tile_of_pair(g, first, columns, rank, &count);
        if (!tile.is_shared())
          left = min(left, columns - 1 - tile.column);
      } else {
        tile = {{first.block + rank, first.column, first.expert}, first.block + 1 - rank};
        count = g.schedule.blocks.counts[tile.block];
      }
      packed = S::RUNS ? count | max(left, 0) << 8 : count;
      if (!S::UNPAIRED_BLOCKS || tile.column < columns)
        return;
      fetch(g);
    }
    tile.block = -1;
  }
};
