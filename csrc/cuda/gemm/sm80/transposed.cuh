/* Loads native weights, and factors A, of the portable backward's y W, without transposing W in
 * memory. The rows of W are K, its columns the outputs:
 *
 *   W [TILES][64 of K]               rows of 64 outputs, chunk c of row r at c ^ (r & 7)
 *   A [TILES][slabs][16 ranks]       rows of 64 outputs, in an adapter stage
 *
 * ldmatrix transposes on load: operand A of an MMA has outputs as its rows. TransposedTileLoader
 * loads quantized weights. */
#pragma once

#include "cuda/gemm/sm80/copies.cuh"
#include "cuda/gemm/sm80/product.cuh"

/* Loads the weights of a tile: a thread copies its chunk of every STEP-th row. Same interface as
 * WeightLoader. */
template <class E, class T, bool VECTORS, bool NATIVE = E::Format::IS_NATIVE>
struct TransposedLoader {
  static constexpr int STEP = WarpTile<E>::THREADS / 8;
  static constexpr int PIECES = E::ROWS / STEP;
  static_assert(64 % STEP == 0, "all threads copy as many rows");

  const T *weights;  // of the expert
  int32_t left;      // outputs from this thread's chunk of the first m64 tile to the end
  int64_t next_tile; // distance between m64 tiles

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    const int chunk = (threadIdx.x & 7) * 8, first = first_output<E>(g, tile, 0);
    weights = (const T *)g.weights.w.data + tile.expert * g.weights.w.stride_e +
              first / 64 * g.weights.w.stride_kt + chunk;
    left = g.weights.n_out - first - chunk;
    next_tile = g.weights.w.stride_kt;
  }

  /* Source of this thread's chunk of its first row, at a k step. */
  struct Source {
    const T *row;
    int64_t stride; // distance between rows
  };
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    return {weights + step * g.weights.w.stride_nt + threadIdx.x / 8 * g.weights.w.stride_n,
            g.weights.w.stride_n};
  }
  static __device__ __forceinline__ void advance(Source &from, const moelora_gemm_launch &g) {
    from.row += g.weights.w.stride_nt;
  }
  __device__ __forceinline__ Source readable(Source from, int) const { return from; }

  using Place = uint32_t;
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &) { return row_chunk(); }

  /* Copies one chunk. x_left: elements of a row of x from this thread's chunk to the end. */
  __device__ __forceinline__ void copy(int piece, Source from, int x_left, uint32_t stage, uint32_t,
                                       Place place, bool wanted) const {
    const int m64 = piece * STEP / 64, row = piece * STEP % 64;
    const int depth =
        x_left + (int)(threadIdx.x & 7) * 8; // rows of K from the stage's first one to the end
    const int count = row + (int)threadIdx.x / 8 < depth ? left - m64 * 64 : 0;
    // The address must be mapped, even if nothing is read.
    const T *at = count > 0 ? from.row + row * from.stride + m64 * next_tile : weights;
    copy_chunk<VECTORS>(stage + place + piece * STEP * kRowBytes, at, count, wanted);
  }
};

/* Copies a slab's rows of A to `w`; each m64 tile begins m64_bytes after the previous one.
 * Zero-fills beyond the true rank and past the last output. */
template <class E, class T, bool VECTORS>
__device__ __forceinline__ void load_factor_depth(const moelora_gemm_launch &g, const Tile &tile,
                                                  const Slab &slab, int thread, uint32_t w,
                                                  int m64_bytes) {
  const moelora_factor &a = g.adapters.lora.a[slab.slice];
  const T *factor = factor_row<T>(a, slab.packed / kRanks, tile.expert, slab.rank);
  const int chunk = thread & 7, ranks = slab.packed % kRanks - slab.rank;
#pragma unroll 1
  for (int i = thread / 8; i < E::TILES * kSlabDepth; i += WarpTile<E>::THREADS / 8) {
    const int m64 = i / kSlabDepth, r = i % kSlabDepth;
    const int output = first_output<E>(g, tile, m64) + chunk * 8;
    const int count = r < ranks ? g.weights.n_out - output : 0;
    copy_chunk<VECTORS>(w + m64 * m64_bytes + r * kRowBytes + ((chunk ^ r & 7) << 4),
                        count > 0 ? factor + r * a.stride_i + output : factor, count, true);
  }
}
