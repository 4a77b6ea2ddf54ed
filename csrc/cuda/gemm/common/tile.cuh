/* Tile of the grouped GEMM kernels: its extents, the order of the tiles, and the rows and outputs
 * that belong to a tile. segments.cuh has the adapters of its tokens, epilogue.cuh the epilogue.
 *
 * All kernels except sm90/fp8_token_major.cuh swap operands (swap_ab): weight rows are the M
 * dimension of an MMA, tokens its N dimension. A CTA tile is TOKENS tokens (one block) by TILES
 * m64 tiles of 64 weight rows. Two m64 tiles form a row group: in a gated projection, the even one
 * holds the gate rows and the odd one the up rows of the same 64 outputs. Four warps share the rows
 * of a row group: warp w of the four has rows 16w to 16w + 15 of both m64 tiles. Its accumulators
 * of a row group are d[2][N / 2]: d[g][4i + q] is row 16w + lane/4 + 8 (q / 2) of m64 tile g and
 * token 8i + 2 (lane % 4) + q % 2.
 *
 * A stage in shared memory holds rows of 128 bytes (64 elements of K). 16-byte chunk c of row r is
 * at c ^ (r & 7):
 *
 *   W  [TILES][64]   weight rows (native)
 *   X  [TOKENS]      token rows
 *
 * Quantized weights and e4m3 tokens change this, see sm80/product.cuh, sm90/weight_tiles.cuh and
 * sm90/fp8.cuh. In an adapter stage, X holds rows of the shrink output xa and W rows of the LoRA
 * factor B, as adapters.cuh of sm80 and sm90 describe.
 *
 * The backward multiplies by the same weights without transposing them in memory: rows of W are K,
 * its columns are outputs. An m64 tile of a stage then has a row of 64 outputs for each of 64
 * elements of K: ldmatrix transposes it, wgmma reads it as an MN-major operand. */
#pragma once

#include "cuda/gemm/common/format.cuh"
#include "cuda/launch/routes.cuh"
#include "cuda/launch/launch.h"
#include "cuda/ptx/mma.cuh"

#include <type_traits>

constexpr int kDepth = 64;
constexpr int kRowBytes = 128;
constexpr int kM64Bytes = 64 * kRowBytes;

/* Row of a stage in shared memory. */
struct SwizzledRow {
  uint4 chunks[8];
};
static_assert(sizeof(SwizzledRow) == kRowBytes, "64 16-bit elements, or 128 of e4m3");

/* Returns the bytes of `tiles` m64 tiles in a stage. For weights to dequantize, these are quantized
 * tiles, and the sum is rounded up to the alignment that the swizzle of X requires. */
template <moelora_kernel_format FORMAT> constexpr int weight_bytes(int tiles) {
  using F = FormatTraits<FORMAT>;
  return F::IS_DEQUANTIZED ? (tiles * F::MAX_TILE_BYTES + 1023) / 1024 * 1024 : tiles * kM64Bytes;
}

/* Extents of a CTA's tile. If TRANSPOSED, adapter stages hold rows of LoRA factor A instead of rows
 * of B. */
template <int TOKENS_, int TILES_, moelora_kernel_format FORMAT_ = MOELORA_KERNEL_NATIVE>
struct Extent {
  static constexpr int TOKENS = TOKENS_, TILES = TILES_;
  static constexpr moelora_kernel_format FORMAT = FORMAT_;
  using Format = FormatTraits<FORMAT>;
  static constexpr int ROWS = 64 * TILES;
  static constexpr int LANES = (TOKENS + 31) / 32; // tokens per lane of a warp
  static constexpr int W_BYTES = weight_bytes<FORMAT>(TILES), X_BYTES = TOKENS * kRowBytes;
  static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
  static constexpr bool TRANSPOSED = false; // backward: outputs are columns of w, K its rows
  static constexpr bool SAVES = false;      // the kernel also stores values before the activation
};

/* Arguments of the kernel: those of a backward also describe the gradient of the activation. */
struct moelora_back_launch;
template <class E>
using LaunchOf = std::conditional_t<E::TRANSPOSED, moelora_back_launch, moelora_gemm_launch>;

/* Tile of a block and a column. */
struct Tile {
  int32_t block, column, expert;
};

/* Returns the output of row 0 of an m64 tile; consecutive rows compute consecutive outputs. In a
 * gated projection even m64 tiles are of gate rows, odd ones of up rows. */
template <class E>
__device__ __forceinline__ int first_output(const moelora_gemm_launch &g, const Tile &tile,
                                            int m64) {
  if (g.weights.gated)
    return tile.column * (E::ROWS / 2) + m64 / 2 * 64;
  return tile.column * E::ROWS + m64 * 64;
}

/* Returns the row of w and bias that computes an output of an m64 tile. */
__device__ __forceinline__ int64_t weight_row(const moelora_gemm_launch &g, int m64, int output) {
  if (!g.weights.gated)
    return output;
  const int half = m64 & 1;
  return g.weights.interleaved ? 2 * (int64_t)output + half
                               : (int64_t)half * g.weights.n_out + output;
}

/* Returns the address, at k = 0, of the quantized tile of an m64 tile whose first output is
 * `output`; past the last output, that of the last tile, since the results are unused. */
__device__ __forceinline__ const char *quantized_tile(const moelora_gemm_launch &g, int expert,
                                                      int m64, int output) {
  const moelora_weights &w = g.weights.w;
  const int row = min(output, g.weights.n_out - 1) / 64;
  const int64_t at = g.weights.gated && (m64 & 1) ? row + w.half_tiles : row;
  return (const char *)w.data + expert * w.stride_e + at * w.stride_nt;
}

/* Returns the flat row of a block's token t; num_rows in padding. */
template <class E>
__device__ __forceinline__ int32_t block_row(const moelora_gemm_launch &g, int block, int t) {
  return t < E::TOKENS ? g.schedule.blocks.sorted_ids[(int64_t)block * E::TOKENS + t]
                       : g.schedule.num_rows;
}

/* Returns the row of x of a block's token t, given its flat row; -1 in padding. */
template <class E>
__device__ __forceinline__ int32_t x_row(const moelora_gemm_launch &g, int block, int t, int row) {
  if (row >= g.schedule.num_rows)
    return -1;
  return g.tokens.divisor.value ? divide(row, g.tokens.divisor) : block * E::TOKENS + t;
}

/* Replaces positions by rows of x. Issues all loads before it uses a result. */
template <int N>
__device__ __forceinline__ void find_x_rows(const moelora_blocks &blocks,
                                            const moelora_tokens &tokens, uint32_t (&at)[N]) {
  if (!tokens.divisor.value)
    return;
#pragma unroll
  for (int n = 0; n < N; n++)
    at[n] = blocks.sorted_ids[at[n]];
#pragma unroll
  for (int n = 0; n < N; n++)
    at[n] = divide(at[n], tokens.divisor);
}

/* Ranks per k16 slab, the K of one MMA. */
constexpr int kSlabDepth = 16;

/* Bytes of a k16 slab of an m64 tile, in 16-bit elements. */
constexpr int kSlabBytes = 64 * kSlabDepth * 2;

/* Returns whether gate and up have a slice each. If so a slab covers both: m64 tiles of gate rows
 * use slice 0, those of up rows slice 1. */
__host__ __device__ __forceinline__ bool has_gate_up_slices(const moelora_gemm_launch &g) {
  return g.weights.gated && !g.weights.interleaved && g.adapters.lora.num_slices == 2;
}

/* Returns the offset at which this lane reads the first k16 slab of a transposed m64 tile with
 * ldmatrix.trans, as operand A of mma.m16n8k16. */
__device__ __forceinline__ uint32_t transposed_offset() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int row = (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
  return row * kRowBytes + ((chunk ^ lane & 7) << 4);
}

/* ---- order of tiles: CTAs that run concurrently share operands in L2 ---- */

/* Returns the number of tile columns that cover the outputs. */
template <class E> __host__ __device__ inline int tile_columns(const moelora_gemm_launch &g) {
  const int outputs = g.weights.gated ? E::ROWS / 2 : E::ROWS;
  return (g.weights.n_out + outputs - 1) / outputs;
}

/* Returns tile `index` of `clusters` clusters of CLUSTER blocks, which start at block `from`. The
 * `block` of the tile is the first one of its cluster. */
template <class E, int CLUSTER = 1>
__device__ __forceinline__ Tile tile_at(const moelora_gemm_launch &g, int index, int columns,
                                        int clusters, int from = 0) {
  // The order covers all columns of eight blocks before the next eight, so that concurrent CTAs
  // share weights (blocks of one expert) and token rows (columns of one block) in L2.
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

/* Counts the consecutive blocks of one expert that begin with block `from` and continue forwards
 * (STEP 1) or backwards (STEP -1). Called by whole warps. */
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

/* Returns tile `index`. The order covers all columns of a group of blocks of one expert before the
 * next group, so that concurrent CTAs share weights (blocks) and token rows (columns) in L2. Called
 * by whole warps. Only large tiles can hide the latency of the search. */
template <class E>
__device__ __forceinline__ Tile tile_of_expert(const moelora_gemm_launch &g, int index, int columns,
                                               int blocks) {
  // Each column reads the tokens of the group again, so they must stay in L2 (l2_elements) while
  // weights stream through. Weights are read once per group. Without weights k is 0.
  const int most = max(1, g.schedule.l2_elements / max(1, E::TOKENS * g.tokens.k));
  const int block =
      index /
      columns; // a block of the tile's group, since a group of n blocks has n * columns tiles
  const int before = blocks_of_expert<-1>(g, block, blocks) - 1;
  const int count = before + blocks_of_expert<1>(g, block, blocks);
  const int groups = (count + most - 1) / most;
  const int share = (count + groups - 1) / groups; // blocks of each group but the last
  const int skipped = before / share * share, first = block - before + skipped;
  const int height = min(share, count - skipped), rest = index - first * columns;
  return {first + rest % height, rest / height, g.schedule.blocks.expert_ids[block]};
}
