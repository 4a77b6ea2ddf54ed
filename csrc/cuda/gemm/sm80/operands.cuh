/* How the operands of the portable GEMM come to a stage: what each thread copies, and where to. */
#ifndef MOELORA_CUDA_SM80_OPERANDS_CUH
#define MOELORA_CUDA_SM80_OPERANDS_CUH

#include <type_traits>

#include "cuda/gemm/sm80/product.cuh"

/* Eight elements of a row, of which `left` are before its end, and zeros behind it.
 * No cache policy: with one, ptxas 13.0 names a descriptor register that is none (64-token tile).
 */
template <bool VECTORS, class T>
__device__ __forceinline__ void copy_chunk(uint32_t to, const T *from, int left, bool wanted) {
  if (VECTORS)
    copy_async_16<256>(to, from, left > 0 ? 16 : 0, wanted); // with the next stage's
  else if (wanted)
    copy_elements(to, from, max(0, min(8, left)));
}

/* A thread's chunk of rows, in a stage. */
__device__ __forceinline__ uint32_t row_chunk() {
  const int thread = threadIdx.x;
  return thread / 8 * kRowBytes + ((thread & 7 ^ thread / 8 & 7) << 4);
}

/* The weights of a tile, rows of them: a thread copies its chunk of every STEP-th. */
template <class E, class T, bool VECTORS, bool NATIVE = E::FORMAT == MOELORA_NATIVE>
struct WeightLoader {
  static constexpr int STEP = WarpTile<E>::THREADS / 8;
  static constexpr int PIECES = E::ROWS / STEP;
  static_assert(64 % STEP == 0, "all threads copy as many rows");

  // Offsets of weight rows, in vectors if there are vectors to spare registers.
  using Offset = std::conditional_t<VECTORS, uint32_t, int64_t>;
  static constexpr int OFFSET_ELEMENTS = VECTORS ? 8 : 1;

  const T *weights; // of the expert
  Offset row[PIECES];

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    weights = (const T *)g.weights.w.data + tile.expert * g.weights.w.stride_e;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int m64 = i * STEP / 64, r = i * STEP % 64 + (int)threadIdx.x / 8;
      const int output = first_output<E>(g, tile.column, m64) + r;
      // Nobody looks at outputs behind the last one: any row will do.
      const uint32_t n = (uint32_t)weight_row(g, m64, min(output, g.weights.n_out - 1));
      row[i] = (n / 64 * g.weights.w.stride_nt + n % 64 * g.weights.w.stride_n) / OFFSET_ELEMENTS;
    }
  }

  /* This thread's chunk of row 0 at some step. */
  using Source = const T *;
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    return weights + step * g.weights.w.stride_kt + (threadIdx.x & 7) * 8;
  }
  /* Where nothing is read, some mapped address. */
  __device__ __forceinline__ Source readable(Source from, int left) const {
    return left > 0 ? from : weights;
  }

  /* Where this thread writes in a stage. */
  using Place = uint32_t;
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &) { return row_chunk(); }

  __device__ __forceinline__ void copy(int piece, Source from, int left, uint32_t stage,
                                       Place place, bool wanted) const {
    copy_chunk<VECTORS>(stage + place + piece * STEP * kRowBytes,
                        VECTORS ? row_address(from, row[piece], 16) : from + row[piece], left,
                        wanted);
  }
};

/* Quantised weights, whole tiles of them, TILE_BYTES apart in a stage whatever INT4 needs: 128
 * threads copy the values of one, 16 bytes each. Warp w then copies what follows the values of m64
 * tile w. */
template <class E, class T, bool VECTORS> struct WeightLoader<E, T, VECTORS, false> {
  static constexpr int AT_ONCE = WarpTile<E>::THREADS / 128; // tiles
  static constexpr int VALUES = E::TILES / AT_ONCE, PIECES = VALUES + 1;
  static constexpr int TILE_BYTES = moelora_most_tile_bytes(E::FORMAT);
  static_assert(E::TILES % AT_ONCE == 0 && E::TILES <= WarpTile<E>::THREADS / 32 &&
                    TILE_BYTES - MOELORA_TILE_VALUES <= 32 * 16,
                "a warp for the scales of each tile");

  const char *weights;     // of the expert
  uint32_t chunks[PIECES]; // where this thread reads, in chunks of 16 bytes

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    const char *const data = (const char *)g.weights.w.data;
    weights = data + tile.expert * g.weights.w.stride_e;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int m64 = i < VALUES ? tile_of_values(i) : tile_of_scales();
      const int chunk =
          i < VALUES ? threadIdx.x & 127 : MOELORA_TILE_VALUES / 16 + (threadIdx.x & 31);
      const int output = first_output<E>(g, tile.column, m64);
      chunks[i] = (uint32_t)((quantized_tile(g, 0, m64, output) - data) / 16) + chunk;
    }
  }

  static __device__ __forceinline__ int tile_of_values(int piece) {
    return piece * AT_ONCE + (AT_ONCE > 1 ? (int)threadIdx.x / 128 : 0);
  }
  static __device__ __forceinline__ int tile_of_scales() { return threadIdx.x / 32; }

  /* The first tile of the expert at some step. */
  using Source = const char *;
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    return weights + step * g.weights.w.stride_kt;
  }
  __device__ __forceinline__ Source readable(Source from, int) const { return from; }

  struct Place {
    uint32_t values, scales;
    bool has_scales; // this thread copies some
  };
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    const int thread = threadIdx.x;
    const int chunk = MOELORA_TILE_VALUES / 16 + (thread & 31);
    return {(uint32_t)(tile_of_values(0) * TILE_BYTES + (thread & 127) * 16),
            (uint32_t)(tile_of_scales() * TILE_BYTES + chunk * 16),
            tile_of_scales() < E::TILES && chunk * 16 < moelora_tile_size(g.weights.w.format)};
  }

  __device__ __forceinline__ void copy(int piece, Source from, int, uint32_t stage,
                                       const Place &place, bool wanted) const {
    const uint32_t to = piece < VALUES ? place.values + piece * AT_ONCE * TILE_BYTES : place.scales;
    copy_async_16<256>(stage + to, row_address(from, chunks[piece], 16), 16,
                       wanted && (piece < VALUES || place.has_scales));
  }
};

/* What a thread brings to each stage, in PARTS parts between the products of another: its pieces of
 * the weights, and a chunk of token rows. */
template <class E, class T, bool VECTORS> struct OperandLoader {
  using W = WeightLoader<E, T, VECTORS>;
  static constexpr int STEP = WarpTile<E>::THREADS / 8; // rows between two rows of one thread
  static constexpr int X_ROWS = E::TOKENS / STEP;
  static_assert(E::TOKENS % STEP == 0, "all threads copy as many rows");
  static constexpr int PARTS = 3;
  static constexpr int PART_PIECES = (W::PIECES + X_ROWS + PARTS - 1) / PARTS;

  W weights;
  int32_t token[X_ROWS]; // -1 in padding, which nobody copies

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    weights.open(g, tile);
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
      const int t = (int)threadIdx.x / 8 + i * STEP;
      token[i] = x_row<E>(g, tile.block, t, block_row<E>(g, tile.block, t));
    }
  }

  /* Where both operands are read at some step. */
  struct Source {
    typename W::Source w;
    const T *x; // this thread's chunk of row 0
    int left;   // elements of a row from the chunk on

    __device__ __forceinline__ void advance(const moelora_gemm_launch &g) {
      w += g.weights.w.stride_kt, x += kDepth, left -= kDepth;
    }
  };

  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    const int chunk = (threadIdx.x & 7) * 8;
    return {weights.source(g, step), (const T *)g.tokens.x + step * kDepth + chunk,
            g.tokens.k - step * kDepth - chunk};
  }

  /* Where this thread writes in a stage. */
  struct Place {
    typename W::Place w;
    uint32_t x;
  };
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    return {W::place(g), row_chunk()};
  }

  /* One of PARTS parts of a stage, if it is `wanted`. */
  template <int PART>
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const Source &from,
                                       uint32_t stage, const Place &to, bool wanted) const {
    // Behind the end of a row zeros are written and nothing is read, but from a mapped address.
    const auto w = weights.readable(from.w, from.left);
    const T *x = from.left > 0 ? from.x : (const T *)g.tokens.x;
#pragma unroll
    for (int i = 0; i < W::PIECES; i++)
      if (i / PART_PIECES == PART)
        weights.copy(i, w, from.left, stage, to.w, wanted);
#pragma unroll
    for (int i = 0; i < X_ROWS; i++)
      if ((W::PIECES + i) / PART_PIECES == PART)
        copy_chunk<VECTORS>(stage + to.x + E::W_BYTES + i * STEP * kRowBytes,
                            row_address(x, token[i], 2 * (uint32_t)g.tokens.stride), from.left,
                            wanted && token[i] >= 0);
  }

  __device__ __forceinline__ void copy_all(const moelora_gemm_launch &g, const Source &from,
                                           uint32_t stage, bool wanted) const {
    copy<0>(g, from, stage, place(g), wanted);
    copy<1>(g, from, stage, place(g), wanted);
    copy<2>(g, from, stage, place(g), wanted);
  }
};

#endif
