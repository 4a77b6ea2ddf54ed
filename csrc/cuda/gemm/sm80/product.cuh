/* Warp-level products, fragments and accumulators of the portable GEMM.
 *
 * Four warps cover a tile's weight rows: warp w owns rows 16w to 16w + 15 of all m64 tiles, so
 * that gate and up of an output are in the same thread. Tiles of more than 64 tokens have two
 * groups of four warps. The groups alternate over n8 tiles, which balances their work in partially
 * filled blocks.
 *
 * The tile of 128 tokens by 256 weight rows gives each warp 64 x 64. Among the shapes that fit the
 * registers it reads the least shared memory per product: a warp reads 4 KB for the 32 MMAs of a
 * k16 slab. At 128 bytes per cycle, that takes 32 cycles, and the warp's share of the copies 12,
 * while the SM takes 64 cycles for the MMAs on sm_80 and about 51 on Hopper.
 *
 * Fragments are double-buffered: while one k16 slab is multiplied the next is loaded. Weights use
 * a second set of registers, because all tokens need them; tokens are replaced two n8 tiles at a
 * time. 4-bit weights are loaded for a whole stage (four slabs), FP8 weights for two slabs; both
 * are dequantized slab by slab. */
#pragma once

#include "cuda/gemm/sm80/transposed_fragments.cuh"

/* Bytes reserved for the scales of an FP8 tile. */
constexpr int kFp8Scales = 256;

/* Extents of a tile in the portable GEMM. An FP8 stage holds half of the K extent of a tile:
 *
 *   values [TILES][64 rows][4] 16 bytes   chunk c, columns 16 c to 16 c + 15 of the half, at
 *                                         c ^ (r / 2 & 3)
 *   scales [TILES] 256 bytes              all scales of the tile
 *
 * W8A8 needs scales longer than values. It has SLOTS slots after all stages: each holds the weight
 * scales of a step, followed by its token scales, float32 [TOKENS]. */
template <int TOKENS_, int TILES_, moelora_kernel_format FORMAT_>
struct StageExtent : Extent<TOKENS_, TILES_, FORMAT_> {
  using E = Extent<TOKENS_, TILES_, FORMAT_>;
  using F = FormatTraits<FORMAT_>;
  static constexpr int VALUES = F::TILE_VALUES / (F::TILE_DEPTH / kDepth);
  static constexpr int TILE_BYTES = F::IS_NATIVE ? kM64Bytes
                                    : F::IS_FP8  ? VALUES
                                                 : F::MAX_TILE_BYTES;
  static constexpr int ALL_VALUES = TILES_ * VALUES, ALL_SCALES = TILES_ * kFp8Scales;
  static constexpr int W_BYTES = F::IS_W8A8  ? ALL_VALUES
                                 : F::IS_FP8 ? ALL_VALUES + ALL_SCALES
                                             : E::W_BYTES;
  static constexpr int STAGE_BYTES = W_BYTES + E::X_BYTES;
  static constexpr int SLOTS = F::IS_W8A8 ? 8 : 0, SLOT_BYTES = ALL_SCALES + 4 * TOKENS_;
};

/* The tile of a warp and its accumulators. */
template <class E> struct WarpTile {
  static constexpr int SPLIT = E::TOKENS > 64 ? 2 : 1; // groups of four warps that share the tokens
  static constexpr int THREADS = 128 * SPLIT;
  static constexpr int ROW_GROUPS = E::TILES / 2;
  static constexpr int N8_TILES = E::TOKENS / 8 / SPLIT;

  float d[ROW_GROUPS][N8_TILES][2][4]; // [row group][n8 tile][m64 tile in group][q of tile.cuh]

  static constexpr int NEXT = 8 * SPLIT; // distance in tokens between a warp's n8 tiles

  /* Returns the first token, within the block, of a warp's first n8 tile. */
  static __device__ __forceinline__ int first_token() {
    return SPLIT == 1 ? 0 : (int)(threadIdx.x >> 7) * 8;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < ROW_GROUPS * N8_TILES * 8; i++)
      (&d[0][0][0][0])[i] = 0.f;
  }
};

/* After the K loop, multiplies accumulators by the tile scale, which all tiles along K share. */
template <class E, class T>
__device__ __forceinline__ void scale_accumulators(WarpTile<E> &sum, const moelora_gemm_launch &g,
                                                   const Tile &tile) {
#pragma unroll
  for (int m64 = 0; m64 < E::TILES; m64++) {
    const float scale = E::Format::template tile_scale<T>(
        quantized_tile(g, tile.expert, m64, first_output<E>(g, tile, m64)));
#pragma unroll
    for (int j = 0; j < WarpTile<E>::N8_TILES; j++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        sum.d[m64 / 2][j][m64 % 2][q] *= scale;
  }
}

/* Weight fragments of a k16 slab: 16 rows of each m64 tile, double-buffered. */
template <class E, class T, moelora_kernel_format FORMAT = E::FORMAT> struct WeightFragments;

template <class E, class T> struct WeightFragments<E, T, MOELORA_KERNEL_NATIVE> {
  uint32_t a[2][E::TILES][4];

  /* Returns the offset in a stage from which this lane reads the first k16 slab; slab k is at this
   * offset ^ k << 5. */
  static __device__ __forceinline__ uint32_t offset() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    return (warp * 16 + (lane & 15)) * kRowBytes + ((lane >> 4 ^ lane & 7) << 4);
  }

  /* Loads k16 slab K of a stage into buffer K % 2. */
  template <int K>
  __device__ __forceinline__ void load(uint32_t stage, uint32_t offset, const moelora_weights &,
                                       int) {
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++)
      load_matrix_x4(a[K % 2][m64], (stage + offset ^ K << 5) + m64 * kM64Bytes);
  }
};

/* 4-bit weights. A lane loads its part of whole tiles and dequantizes it slab by slab. */
template <class E, class T, moelora_kernel_format FORMAT> struct WeightFragments {
  uint32_t a[2][E::TILES][4];
  TileFragment<E::FORMAT, T> tiles[E::TILES];

  static __device__ __forceinline__ uint32_t offset() { return 0; }

  template <int K>
  __device__ __forceinline__ void load(uint32_t stage, uint32_t, const moelora_weights &w, int) {
    if constexpr (K == 0) {
#pragma unroll
      for (int m64 = 0; m64 < E::TILES; m64++)
        tiles[m64].load(stage + m64 * E::TILE_BYTES, threadIdx.x >> 5 & 3, w.format);
    }
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++)
      tiles[m64].template dequantize<K>(a[K % 2][m64]);
  }
};

/* Loads the scales of a lane's rows r and r + 8, for half `half` of a tile's K extent. */
__device__ __forceinline__ float2 load_fp8_scales(uint32_t scales, moelora_format format,
                                                  int half) {
  const bool rows = moelora_has_row_scales(format);
  const int row = (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4;
  const uint32_t at = scales + 4 * (rows ? row : half);
  return {__uint_as_float(load_shared_4(at)), __uint_as_float(load_shared_4(at + (rows ? 32 : 0)))};
}

/* FP8 weights. One load reads the words of two k16 slabs: rows r and r + 8 of the first slab, then
 * of the second. W8A8 does not apply scales here. */
template <class E, class T> struct Fp8Fragments {
  uint32_t a[2][E::TILES][4];
  uint32_t words[E::TILES][4];
  uint32_t scales[E::TILES]; // packed: of r and of r + 8

  static __device__ __forceinline__ uint32_t offset() {
    const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
    return row * 64 + ((lane >> 4 ^ row >> 1 & 3) << 4);
  }

  template <int K>
  __device__ __forceinline__ void load(uint32_t stage, uint32_t offset, const moelora_weights &w,
                                       int half) {
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++) {
      if constexpr (K % 2 == 0)
        load_matrix_x4(words[m64], (stage + offset ^ K << 4) + m64 * E::TILE_BYTES);
      if constexpr (E::Format::IS_W8A8) {
        scales[m64] = e4m3_scales<T>(1.f, 1.f);
      } else if constexpr (K == 0) {
        const float2 of_rows =
            load_fp8_scales(stage + E::ALL_VALUES + m64 * kFp8Scales, w.format, half);
        scales[m64] = e4m3_scales<T>(of_rows.x, of_rows.y);
      }
      const uint32_t low = words[m64][K % 2 * 2], high = words[m64][K % 2 * 2 + 1];
      uint32_t (&to)[4] = a[K % 2][m64];
      to[0] = e4m3<T, 0, 0>(low, scales[m64]);
      to[1] = e4m3<T, 0, 1>(high, scales[m64]);
      to[2] = e4m3<T, 1, 0>(low, scales[m64]);
      to[3] = e4m3<T, 1, 1>(high, scales[m64]);
    }
  }
};

template <class E, class T>
struct WeightFragments<E, T, MOELORA_KERNEL_FP8> : Fp8Fragments<E, T> {};
template <class E, class T>
struct WeightFragments<E, T, MOELORA_KERNEL_W8A8> : Fp8Fragments<E, T> {};

template <class E, class T>
using FragmentsOf =
    std::conditional_t<E::TRANSPOSED, TransposedFragments<E, T>, WeightFragments<E, T>>;

/* Operand fragments of a k16 slab: weights, and the tokens of a warp's n8 tiles. */
template <class E, class T> struct Fragments : FragmentsOf<E, T> {
  using S = WarpTile<E>;
  using FragmentsOf<E, T>::a;
  uint32_t b[(S::N8_TILES + 1) / 2][4];

  static __device__ __forceinline__ uint32_t offset_b() {
    const int lane = threadIdx.x & 31;
    return E::W_BYTES + (S::first_token() + (lane >> 4) * S::NEXT + (lane & 7)) * kRowBytes +
           (((lane >> 3 & 1) ^ lane & 7) << 4);
  }

  /* Loads n8 tiles j and j + 1, or only j if it is the last below WIDTH. */
  template <int WIDTH> __device__ __forceinline__ void load_b(int j, uint32_t at) {
    at += j * S::NEXT * kRowBytes;
    if (j + 1 < WIDTH) {
      load_matrix_x4(b[j / 2], at);
    } else {
      uint32_t last[2];
      load_matrix_x2(last, at);
      b[j / 2][0] = last[0], b[j / 2][1] = last[1];
    }
  }

  /* Multiplies with weight buffer `set`, and replaces b by the next slab's tokens. */
  template <int WIDTH> __device__ __forceinline__ void multiply(S &sum, int set, uint32_t next_b) {
#pragma unroll
    for (int j = 0; j < WIDTH; j += 2) {
#pragma unroll
      for (int i = j; i < j + 2 && i < WIDTH; i++)
#pragma unroll
        for (int m64 = 0; m64 < E::TILES; m64++)
          mma_16816<T>(sum.d[m64 / 2][i][m64 % 2], a[set][m64], &b[i / 2][i % 2 * 2]);
      load_b<WIDTH>(j, next_b);
    }
  }
};
