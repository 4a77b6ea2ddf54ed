/* Loads the operands of the portable GEMM into pipeline stages. */
#ifndef MOELORA_CUDA_SM80_OPERANDS_CUH
#define MOELORA_CUDA_SM80_OPERANDS_CUH

#include "cuda/gemm/sm80/copies.cuh"
#include "cuda/gemm/sm80/product.cuh"
#include "cuda/gemm/sm80/transposed.cuh"

/* Row-major or packed native weights: a thread copies its chunk of every STEP-th row. */
template <class E, class T, bool VECTORS, bool NATIVE = E::Format::IS_NATIVE> struct WeightLoader {
  static constexpr int STEP = WarpTile<E>::THREADS / 8;
  static constexpr int PIECES = E::ROWS / STEP;
  static_assert(64 % STEP == 0, "all threads copy as many rows");

  // Offsets of weight rows; in units of 16 bytes if aligned, which saves registers.
  using Offset = std::conditional_t<VECTORS, uint32_t, int64_t>;
  static constexpr int OFFSET_ELEMENTS = VECTORS ? 8 : 1;

  const T *weights; // of the expert
  Offset row[PIECES];

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    weights = (const T *)g.weights.w.data + tile.expert * g.weights.w.stride_e;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int m64 = i * STEP / 64, r = i * STEP % 64 + (int)threadIdx.x / 8;
      const int output = first_output<E>(g, tile, m64) + r;
      // Outputs past the last one are discarded: any row will do.
      const uint32_t n = (uint32_t)weight_row(g, m64, min(output, g.weights.n_out - 1));
      row[i] = (n / 64 * g.weights.w.stride_nt + n % 64 * g.weights.w.stride_n) / OFFSET_ELEMENTS;
    }
  }

  /* This thread's chunk of row 0 at k step `step`. */
  using Source = const T *;
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    return weights + step * g.weights.w.stride_kt + (threadIdx.x & 7) * 8;
  }
  /* Advances by one step. */
  static __device__ __forceinline__ void advance(Source &from, const moelora_gemm_launch &g) {
    from += g.weights.w.stride_kt;
  }
  /* A mapped address, even if nothing is read. */
  __device__ __forceinline__ Source readable(Source from, int left) const {
    return left > 0 ? from : weights;
  }

  /* This thread's destination within a stage. */
  using Place = uint32_t;
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &) { return row_chunk(); }

  __device__ __forceinline__ void copy(int piece, Source from, int left, uint32_t stage, uint32_t,
                                       Place place, bool wanted) const {
    copy_chunk<VECTORS>(stage + place + piece * STEP * kRowBytes,
                        VECTORS ? row_address(from, row[piece], 16) : from + row[piece], left,
                        wanted);
  }
};

/* Quantized weights, in whole tiles or, for FP8, half tiles. 128 threads copy a part of the
 * values, 16 bytes each; half an FP8 tile has two parts. Warp w then copies the scales and zeros
 * of m64 tile w. */
template <class E, class T, bool VECTORS> struct WeightLoader<E, T, VECTORS, false> {
  static constexpr int PART_BYTES = 128 * 16, TILE_PARTS = E::VALUES / PART_BYTES; // parts per tile
  static constexpr int AT_ONCE = WarpTile<E>::THREADS / 128; // parts copied concurrently
  static constexpr int VALUES = E::TILES * TILE_PARTS / AT_ONCE, PIECES = VALUES + 1;
  static constexpr int SCALES_AT = E::Format::TILE_VALUES; // offset within a tile
  static_assert(E::TILES * TILE_PARTS % AT_ONCE == 0 && E::TILES <= WarpTile<E>::THREADS / 32 &&
                    E::Format::MAX_TILE_BYTES - SCALES_AT <= 32 * 16,
                "a warp for the scales of each tile");

  const char *weights;     // of the expert
  uint32_t chunks[PIECES]; // offsets that this thread reads, in chunks of 16 bytes

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    const char *const data = (const char *)g.weights.w.data;
    weights = data + tile.expert * g.weights.w.stride_e;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int m64 = i < VALUES ? part_of_values(i) / TILE_PARTS : tile_of_scales();
      const int chunk = i < VALUES ? chunk_of_values(part_of_values(i) % TILE_PARTS)
                                   : SCALES_AT / 16 + (int)(threadIdx.x & 31);
      const int output = first_output<E>(g, tile, m64);
      chunks[i] = (uint32_t)((quantized_tile(g, 0, m64, output) - data) / 16) + chunk;
    }
  }

  /* Index among the parts of all tiles. */
  static __device__ __forceinline__ int part_of_values(int piece) {
    return piece * AT_ONCE + (AT_ONCE > 1 ? (int)threadIdx.x / 128 : 0);
  }
  static __device__ __forceinline__ int tile_of_scales() { return threadIdx.x / 32; }

  /* Chunk of a tile that this thread copies in a part; for FP8, in the first half of K. */
  static __device__ __forceinline__ int chunk_of_values(int part) {
    const int at = part * 128 + (threadIdx.x & 127);
    if constexpr (!E::Format::IS_FP8)
      return at;
    const int row = at / 4, chunk = at ^ row >> 1 & 3;
    return row * 8 + (chunk & 3 ^ row & 7);
  }

  /* The expert's first tile at a k step; for FP8, also the offset of the second half of K. */
  struct Source {
    const char *tile;
    int half;
  };
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    if constexpr (!E::Format::IS_FP8)
      return {weights + step * g.weights.w.stride_kt, 0};
    return {weights + step / 2 * g.weights.w.stride_kt, step % 2 ? second_half() : 0};
  }
  static __device__ __forceinline__ void advance(Source &from, const moelora_gemm_launch &g) {
    if (!E::Format::IS_FP8 || from.half)
      from.tile += g.weights.w.stride_kt;
    if (E::Format::IS_FP8)
      from.half = second_half() - from.half;
  }
  __device__ __forceinline__ Source readable(Source from, int) const { return from; }

  /* A row's chunks are swizzled by its last three bits, which are equal for all rows of this
   * thread. */
  static __device__ __forceinline__ int second_half() { return threadIdx.x & 16 ? -64 : 64; }

  struct Place {
    uint32_t values, scales;
    bool has_scales; // this thread copies scales
  };
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    const int thread = threadIdx.x, part = part_of_values(0), behind = (thread & 31) * 16;
    const int scales = E::Format::IS_W8A8  ? tile_of_scales() * kFp8Scales
                       : E::Format::IS_FP8 ? E::ALL_VALUES + tile_of_scales() * kFp8Scales
                                           : tile_of_scales() * E::TILE_BYTES + E::VALUES;
    return {(uint32_t)(part / TILE_PARTS * E::TILE_BYTES + part % TILE_PARTS * PART_BYTES +
                       (thread & 127) * 16),
            (uint32_t)(scales + behind),
            tile_of_scales() < E::TILES &&
                SCALES_AT + behind < (E::Format::IS_FP8 ? moelora_fp8_tile_size(g.weights.w.format)
                                                        : moelora_tile_size(g.weights.w.format))};
  }

  /* Scales are copied to `slot`. */
  __device__ __forceinline__ void copy(int piece, Source from, int, uint32_t stage, uint32_t slot,
                                       const Place &place, bool wanted) const {
    const int part = piece * AT_ONCE;
    const uint32_t ahead = part / TILE_PARTS * E::TILE_BYTES + part % TILE_PARTS * PART_BYTES;
    const bool scales = piece == VALUES;
    copy_async_16<256>(scales ? slot + place.scales : stage + place.values + ahead,
                       row_address(from.tile + (scales ? 0 : from.half), chunks[piece], 16), 16,
                       wanted && (!scales || place.has_scales));
  }
};

/* Copies a thread's share of a stage, weights and token rows, in PARTS parts that are interleaved
 * with MMAs. */
template <class E, class T, bool VECTORS> struct OperandLoader {
  using W = std::conditional_t<E::TRANSPOSED, TransposedLoader<E, T, VECTORS>,
                               WeightLoader<E, T, VECTORS>>;
  static constexpr int STEP = WarpTile<E>::THREADS / 8; // distance between two rows of a thread
  static constexpr int X_ROWS = E::TOKENS / STEP;
  static_assert(E::TOKENS % STEP == 0, "all threads copy as many rows");
  static constexpr int PARTS = 3;
  static constexpr int PART_PIECES = (W::PIECES + X_ROWS + PARTS - 1) / PARTS;

  W weights;
  int32_t token[X_ROWS]; // -1 in padding, which is not copied
  int32_t scaled;        // W8A8: token whose scale this thread copies, or -1

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    weights.open(g, tile);
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
      const int t = (int)threadIdx.x / 8 + i * STEP;
      token[i] = x_row<E>(g, tile.block, t, block_row<E>(g, tile.block, t));
    }
    const int t = threadIdx.x;
    if constexpr (E::Format::IS_W8A8)
      scaled = t < E::TOKENS ? x_row<E>(g, tile.block, t, block_row<E>(g, tile.block, t)) : -1;
  }

  /* Global addresses of both operands at a k step. */
  struct Source {
    typename W::Source w;
    const T *x; // this thread's chunk of row 0
    int left;   // elements from this chunk to the end of a row
    int step;

    __device__ __forceinline__ void advance(const moelora_gemm_launch &g) {
      W::advance(w, g);
      x += kDepth, left -= kDepth, step++;
    }
  };

  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    const int chunk = (threadIdx.x & 7) * 8;
    return {weights.source(g, step), (const T *)g.tokens.x + step * kDepth + chunk,
            g.tokens.k - step * kDepth - chunk, step};
  }

  /* This thread's destinations within a stage. */
  struct Place {
    typename W::Place w;
    uint32_t x;
  };
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    return {W::place(g), row_chunk()};
  }

  /* Copies one of PARTS parts of a stage if `wanted`. W8A8: copies scales to their slot in
   * `slots`. */
  template <int PART>
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const Source &from,
                                       uint32_t stage, uint32_t slots, const Place &to,
                                       bool wanted) const {
    const uint32_t slot = E::Format::IS_W8A8 ? slots + from.step % E::SLOTS * E::SLOT_BYTES : stage;
    // Past the end of a row, cp.async writes zeros and reads nothing, but the address must be
    // mapped.
    const auto w = weights.readable(from.w, from.left);
    const T *x = from.left > 0 ? from.x : (const T *)g.tokens.x;
#pragma unroll
    for (int i = 0; i < W::PIECES; i++)
      if (i / PART_PIECES == PART)
        weights.copy(i, w, from.left, stage, slot, to.w, wanted);
#pragma unroll
    for (int i = 0; i < X_ROWS; i++)
      if ((W::PIECES + i) / PART_PIECES == PART)
        copy_chunk<VECTORS>(stage + to.x + E::W_BYTES + i * STEP * kRowBytes,
                            row_address(x, token[i], 2 * (uint32_t)g.tokens.stride), from.left,
                            wanted && token[i] >= 0);
    if constexpr (E::Format::IS_W8A8 && PART == PARTS - 1) {
      const int64_t group =
          moelora_x_group(g.weights.w.format) == kDepth ? from.step : from.step / 2;
      copy_async_4(slot + E::ALL_SCALES + 4 * threadIdx.x,
                   g.tokens.scales + group * g.tokens.scales_stride + scaled,
                   wanted && scaled >= 0);
    }
  }

  __device__ __forceinline__ void copy_all(const moelora_gemm_launch &g, const Source &from,
                                           uint32_t stage, uint32_t slots, bool wanted) const {
    copy<0>(g, from, stage, slots, place(g), wanted);
    copy<1>(g, from, stage, slots, place(g), wanted);
    copy<2>(g, from, stage, slots, place(g), wanted);
  }
};

#endif
