/* Tile of the grouped GEMM kernels: its extents, the rows and outputs that belong to it, and the
 * adapter segments among its tokens. See tile_order.cuh for the order of tiles and epilogue.cuh
 * for the epilogue.
 *
 * All kernels except sm90/fp8_token_major.cuh swap operands (swap_ab): weight rows are the M
 * dimension of an MMA, tokens its N dimension. A CTA tile is TOKENS tokens (one block) by TILES
 * m64 tiles of 64 weight rows. Two m64 tiles form a row group: in a gated projection, the even one
 * holds the gate rows and the odd one the up rows of the same 64 outputs. A row group belongs to
 * four warps; warp w owns rows 16w to 16w + 15 of both tiles. Its accumulators are d[2][N / 2]:
 * d[g][4i + q] is row lane/4 + 8 (q / 2) of m64 tile g and token 8i + 2 (lane % 4) + q % 2.
 *
 * A stage in shared memory holds rows of 128 bytes (64 elements of K). 16-byte chunk c of row r is
 * at c ^ (r & 7):
 *
 *   W  [TILES][64]   weight rows, or rows of a LoRA factor B
 *   X  [TOKENS]      token rows, or rows of the shrink output xa
 *
 * For quantized weights, W is TILES contiguous tiles in the layout of moelora.h. They take less
 * space, so that a stage then holds fewer k16 slabs of B. */
#ifndef MOELORA_CUDA_TILE_CUH
#define MOELORA_CUDA_TILE_CUH

#include "cuda/launch/factors.cuh"
#include "cuda/gemm/common/format.cuh"
#include "cuda/launch/launch.h"
#include "cuda/ptx/mma.cuh"

constexpr int kDepth = 64;
constexpr int kRowBytes = 128;
constexpr int kM64Bytes = 64 * kRowBytes;

/* Row of a stage in shared memory. */
struct SwizzledRow {
  uint4 chunks[8];
};
static_assert(sizeof(SwizzledRow) == kRowBytes, "64 16-bit elements, or 128 of e4m3");

/* Bytes of the weights of a stage, rounded up to the alignment that the swizzle of X requires. */
template <moelora_kernel_format FORMAT> constexpr int weight_bytes(int tiles) {
  using F = FormatTraits<FORMAT>;
  return F::IS_DEQUANTIZED ? (tiles * F::MAX_TILE_BYTES + 1023) / 1024 * 1024 : tiles * kM64Bytes;
}

/* Extents of a CTA's tile. Where w is TRANSPOSED, an m64 tile of a stage is 64 of depth in rows of
 * 64 outputs, and rows of a LoRA factor A are depth, too. */
template <int TOKENS_, int TILES_, moelora_kernel_format FORMAT_ = MOELORA_KERNEL_NATIVE>
struct Extent {
  static constexpr int TOKENS = TOKENS_, TILES = TILES_;
  static constexpr moelora_kernel_format FORMAT = FORMAT_;
  using Format = FormatTraits<FORMAT>;
  static constexpr int ROWS = 64 * TILES;
  static constexpr int LANES = (TOKENS + 31) / 32; // tokens per lane of a warp
  static constexpr int W_BYTES = weight_bytes<FORMAT>(TILES), X_BYTES = TOKENS * kRowBytes;
  static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
  static constexpr bool TRANSPOSED =
      false;                           // a backward's: outputs are columns of w, depth its rows
  static constexpr bool SAVES = false; // leaves what is before the activation, too
  static constexpr bool HALF_TILES = false; // some tiles have half as many rows
};

/* A half tile (`half` 1 or 2) has the first or second half of a column's m64 tiles, numbered from
 * 0; a whole tile has half 0. */
struct Tile {
  int32_t block, column, expert, half;
};

/* Output of row 0 of an m64 tile; row r is output first + r. */
template <class E>
__device__ __forceinline__ int first_output(const moelora_gemm_launch &g, const Tile &tile,
                                            int m64) {
  if (g.weights.gated)
    return tile.column * (E::ROWS / 2) + m64 / 2 * 64;
  return tile.column * E::ROWS + (E::HALF_TILES && tile.half == 2 ? E::ROWS / 2 : 0) + m64 * 64;
}

/* Row of w, bias and factors that corresponds to an output of an m64 tile. */
__device__ __forceinline__ int64_t weight_row(const moelora_gemm_launch &g, int m64, int output) {
  if (!g.weights.gated)
    return output;
  const int half = m64 & 1;
  return g.weights.interleaved ? 2 * (int64_t)output + half
                               : (int64_t)half * g.weights.n_out + output;
}

/* Address of the quantized tile of an m64 tile, at k = 0. Past the last output, any tile will do.
 */
__device__ __forceinline__ const char *quantized_tile(const moelora_gemm_launch &g, int expert,
                                                      int m64, int output) {
  const moelora_weights &w = g.weights.w;
  const int row = min(output, g.weights.n_out - 1) / 64;
  const int64_t at = g.weights.gated && (m64 & 1) ? row + w.half_tiles : row;
  return (const char *)w.data + expert * w.stride_e + at * w.stride_nt;
}

/* Flat row of a block's token t; num_rows in padding. */
template <class E>
__device__ __forceinline__ int32_t block_row(const moelora_gemm_launch &g, int block, int t) {
  return t < E::TOKENS ? g.schedule.blocks.sorted_ids[(int64_t)block * E::TOKENS + t]
                       : g.schedule.num_rows;
}

/* Row of x of a block's token t, given its flat row; -1 in padding. */
template <class E>
__device__ __forceinline__ int32_t x_row(const moelora_gemm_launch &g, int block, int t, int row) {
  if (row >= g.schedule.num_rows)
    return -1;
  return g.tokens.divisor.value ? divide(row, g.tokens.divisor) : block * E::TOKENS + t;
}

/* Replaces positions by rows of x. Issues all loads before using one. */
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

/* Segments: maximal runs of tokens in a block with the same adapter. Lane t of a warp holds tokens
 * t, t + 32, .... Every warp computes them redundantly. */
template <int LANES> struct Segments {
  int32_t packed[LANES]; // adapter * kRanks + true rank; -1 for a base row
  uint32_t starts[LANES];

  __device__ __forceinline__ void load(const moelora_blocks &blocks, int max_rank, int64_t position,
                                       int tokens) {
    read(blocks.packed_ranks, position, tokens);
    find(max_rank);
  }

  /* Loads packed ranks only; call `find` next. */
  __device__ __forceinline__ void read(const int32_t *packed_ranks, int64_t position, int tokens) {
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      const int t = i * 32 + (threadIdx.x & 31);
      packed[i] = t < tokens ? packed_ranks[position + t] : -1;
    }
  }

  __device__ __forceinline__ void find(int max_rank) {
#pragma unroll
    for (int i = 0; i < LANES; i++)
      if (packed[i] >= 0 && packed[i] % kRanks > max_rank)
        packed[i] += max_rank - packed[i] % kRanks;
    int before = -2;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      int previous = __shfl_up_sync(0xffffffffu, packed[i], 1);
      if ((threadIdx.x & 31) == 0)
        previous = before;
      starts[i] = __ballot_sync(0xffffffffu, packed[i] != previous);
      before = __shfl_sync(0xffffffffu, packed[i], 31);
    }
  }

  /* First segment start at or after token t; `tokens` if there is none. */
  __device__ __forceinline__ int next(int t, int tokens) const {
    int found = tokens;
#pragma unroll
    for (int i = LANES - 1; i >= 0; i--) {
      uint32_t mask = starts[i];
      if (t > i * 32)
        mask = t - i * 32 < 32 ? mask & (0xffffffffu << (t - i * 32)) : 0;
      if (mask)
        found = i * 32 + __ffs(mask) - 1;
    }
    return min(found, tokens);
  }
};

template <class E>
__device__ __forceinline__ bool m64_overlaps_slice(const moelora_gemm_launch &g, const Tile &tile,
                                                   int m64, int slice) {
  const int output = first_output<E>(g, tile, m64);
  if (output >= g.weights.n_out)
    return false;
  const int64_t begin = weight_row(g, m64, output);
  const int64_t end = weight_row(g, m64, min(output + 63, g.weights.n_out - 1));
  return end >= slice * g.adapters.lora.slice_n && begin < (slice + 1) * g.adapters.lora.slice_n;
}

/* Ranks per k16 slab, the K of one MMA. */
constexpr int kSlabDepth = 16;

/* Whether gate and up have a slice each. If so a slab covers both: m64 tiles of gate rows use
 * slice 0, those of up rows slice 1. */
__host__ __device__ __forceinline__ bool has_gate_up_slices(const moelora_gemm_launch &g) {
  return g.weights.gated && !g.weights.interleaved && g.adapters.lora.num_slices == 2;
}

#endif
