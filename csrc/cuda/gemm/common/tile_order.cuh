/* Order of the tiles of a projection: CTAs that run concurrently share operands in L2. */
#ifndef MOELORA_CUDA_TILE_ORDER_CUH
#define MOELORA_CUDA_TILE_ORDER_CUH

#include "cuda/gemm/common/tile.cuh"

/* Number of tile columns that cover the outputs. */
template <class E> __host__ __device__ inline int tile_columns(const moelora_gemm_launch &g) {
  const int outputs = g.weights.gated ? E::ROWS / 2 : E::ROWS;
  return (g.weights.n_out + outputs - 1) / outputs;
}

/* Tile `index` in an order over `clusters` clusters of CLUSTER blocks, of which block `from` is the
 * first; `block` is the cluster's first block. */
template <class E, int CLUSTER = 1>
__device__ __forceinline__ Tile tile_at(const moelora_gemm_launch &g, int index, int columns,
                                        int clusters, int from = 0) {
  // Groups of eight blocks by all columns: concurrent CTAs share weights (blocks of one expert)
  // and token rows (columns of one block) in L2.
  constexpr int GROUP = 8 / CLUSTER;
  const int first = index / (GROUP * columns) * GROUP;
  const int height = min(GROUP, clusters - first);
  const int rest = index % (GROUP * columns);
  const bool full = height == GROUP; // common case, without a division by a variable
  Tile t = {};
  t.column = full ? rest / GROUP : rest / height;
  t.block = from + (first + (full ? rest % GROUP : rest % height)) * CLUSTER;
  t.expert = g.schedule.blocks.expert_ids[t.block];
  return t;
}

/* Number of consecutive blocks that belong to the expert of block `from`, including it, forwards
 * (STEP 1) or backwards (STEP -1). Called by a warp. */
template <int STEP>
__device__ __forceinline__ int blocks_of_expert(const moelora_gemm_launch &g, int from,
                                                int blocks) {
  const int lane = threadIdx.x & 31;
  const int32_t expert = g.schedule.blocks.expert_ids[from];
  for (int n = 0;; n += 32) {
    const int at = from + STEP * (n + lane);
    const bool alike = at >= 0 && at < blocks && g.schedule.blocks.expert_ids[at] == expert;
    const uint32_t others = ~__ballot_sync(0xffffffffu, alike);
    if (others)
      return n + __ffs(others) - 1;
  }
}

/* Tile `index` in an order over all columns of a group of blocks of one expert, then of the next
 * group: concurrent CTAs share weights (blocks) and token rows (columns) in L2. Needs a warp, and
 * takes time that only large tiles can hide. */
template <class E>
__device__ __forceinline__ Tile tile_of_expert(const moelora_gemm_launch &g, int index, int columns,
                                               int blocks) {
  // Each column reads the tokens of the group again, so the group is sized for its tokens to stay
  // in L2 (a quarter of it) while weights stream through. Weights are read once per group.
  const int most = max(1, g.schedule.l2_elements / (E::TOKENS * g.tokens.k));
  const int block =
      index /
      columns; // some block of the tile's group, since each block has as many tiles as columns
  const int before = blocks_of_expert<-1>(g, block, blocks) - 1;
  const int count = before + blocks_of_expert<1>(g, block, blocks);
  const int groups = (count + most - 1) / most;
  const int share = (count + groups - 1) / groups; // blocks of each group but the last
  const int skipped = before / share * share, first = block - before + skipped;
  const int height = min(share, count - skipped), rest = index - first * columns;
  return {first + rest % height, rest / height, g.schedule.blocks.expert_ids[block], 0};
}

#endif
