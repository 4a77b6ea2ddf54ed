/* Loads the operands of the portable GEMM into pipeline stages. */
#pragma once

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

  using Source = const T *;
  /* Returns the address of this thread's chunk of row 0 at k step `step`. */
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    return weights + step * g.weights.w.stride_kt + (threadIdx.x & 7) * 8;
  }
  static __device__ __forceinline__ void advance(Source &from, const moelora_gemm_launch &g) {
    from += g.weights.w.stride_kt;
  }
  /* Returns `from` or, if nothing is left to read, an address that is mapped. */
  __device__ __forceinline__ Source readable(Source from, int left) const {
    return left > 0 ? from : weights;
  }

  /* Returns this thread's destination within a stage. */
  using Place = uint32_t;
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &) { return row_chunk(); }

  __device__ __forceinline__ void copy(int piece, Source from, int left, uint32_t stage, uint32_t,
                                       Place place, bool wanted) const {
    copy_chunk<VECTORS>(stage + place + piece * STEP * kRowBytes,
                        VECTORS ? row_address(from, row[piece], 16) : from + row[piece], left,
                        wanted);
  }
};

/* Quantized weights, in whole tiles or, for FP8, half tiles. 128 threads copy a part of the values,
 * 16 bytes each; half an FP8 tile has two parts. Warp w then copies the scales and zero points of
 * m64 tile w. */
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

  /* Returns the index of a thread's piece among the parts of all tiles. */
  static __device__ __forceinline__ int part_of_values(int piece) {
    return piece * AT_ONCE + (AT_ONCE > 1 ? (int)threadIdx.x / 128 : 0);
  }
  static __device__ __forceinline__ int tile_of_scales() { return threadIdx.x / 32; }

  /* Returns the chunk of a tile that this thread copies in a part; FP8: in the first half of K. */
  static __device__ __forceinline__ int chunk_of_values(int part) {
    const int at = part * 128 + (threadIdx.x & 127);
    if constexpr (!E::Format::IS_FP8)
      return at;
    const int row = at / 4, chunk = at ^ row >> 1 & 3;
    return row * 8 + (chunk & 3 ^ row & 7);
  }

  /* The expert's first tile at a k step; for FP8, also the offset of the step's half of K. */
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

  /* Returns the distance in bytes from a thread's chunk to the same chunk of the second half of K.
   * It is the same in all rows of a thread, which have the same row % 8. */
  static __device__ __forceinline__ int second_half() { return threadIdx.x & 16 ? -64 : 64; }

  struct Place {
    uint32_t values, scales;
    bool has_scales; // this thread copies scales
  };
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    const int thread = threadIdx.x, part = part_of_values(0), lane_offset = (thread & 31) * 16;
    const int scales = E::Format::IS_W8A8  ? tile_of_scales() * kFp8Scales
                       : E::Format::IS_FP8 ? E::ALL_VALUES + tile_of_scales() * kFp8Scales
                                           : tile_of_scales() * E::TILE_BYTES + E::VALUES;
    return {(uint32_t)(part / TILE_PARTS * E::TILE_BYTES + part % TILE_PARTS * PART_BYTES +
                       (thread & 127) * 16),
            (uint32_t)(scales + lane_offset),
            tile_of_scales() < E::TILES &&
                lane_offset < (E::Format::IS_FP8
                                   ? moelora_fp8_scale_bytes(g.weights.w.format)
                                   : moelora_tile_size(g.weights.w.format) - SCALES_AT)};
  }

  /* Copies values to `stage`, or scales to `slot`. */
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

/* Quantized weights of a backward: for each m64 tile, a stage holds 64 rows of K in the layout of
 * WeightLoader. If gate and up rows alternate in K, these are 32 rows of a gate tile, then the same
 * 32 rows of an up tile. A scale of the whole up tile follows that of the gate tile: directly for
 * NVFP4, 128 bytes later for FP8 without row scales. */
template <class E, class T> struct TransposedTileLoader : WeightLoader<E, T, true, false> {
  using W = WeightLoader<E, T, true, false>;
  using typename W::Place;
  using W::chunks;
  using W::PIECES;
  using W::SCALES_AT;
  using W::TILE_PARTS;
  using W::VALUES;
  using W::weights;
  // Bytes from the values of a tile's first 32 rows to those of the other 32.
  static constexpr uint32_t NEXT_VALUES = E::Format::TILE_VALUES / 2;
  static_assert(E::TILES * E::TILE_BYTES + (E::Format::IS_FP8 ? E::ALL_SCALES : 0) <= E::W_BYTES,
                "a stage holds all tiles");

  uint32_t next_scales; // bytes from the scales that this thread copies for a tile's first 32 rows
                        // to those for the other 32

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    const moelora_weights &w = g.weights.w;
    const bool interleaved = is_interleaved(w);
    const uint32_t up = interleaved ? (uint32_t)(w.half_tiles * w.stride_nt / 16) : 0;
    weights = (const char *)w.data + tile.expert * w.stride_e;
    const ScaleChunk scale = find_scale(w.format, interleaved);
    next_scales = scale.next * 16;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int m64 = i < VALUES ? W::part_of_values(i) / TILE_PARTS : W::tile_of_scales();
      const int output = min(first_output<E>(g, tile, m64), g.weights.n_out - 1);
      const int at = W::part_of_values(i) % TILE_PARTS * 128 + (threadIdx.x & 127);
      const ScaleChunk from = i < VALUES ? find_values(at, m64 % 2, interleaved) : scale;
      chunks[i] = (uint32_t)(output / E::Format::TILE_DEPTH * w.stride_kt / 16) + from.chunk +
                  (from.is_up ? up : 0);
    }
  }

  /* Source of a chunk of a stage; if gate and up rows alternate, for the first 32 rows of tiles. */
  struct ScaleChunk {
    int chunk;
    bool is_up;
    int next; // distance, in chunks, to the chunk of the other 32 rows
  };

  /* Returns the source of chunk `at` of an m64 tile's values. half: 64 of an FP8 tile's columns. */
  static __device__ __forceinline__ ScaleChunk find_values(int at, int half, bool interleaved) {
    if constexpr (E::Format::IS_FP8) {
      const int row = at / 4, chunk = ((at ^ row >> 1) & 3) + 4 * half;
      const bool is_up = interleaved && row >= 32;
      return {(is_up ? row - 32 : row) * 8 + (chunk ^ row & 7), is_up, 0};
    }
    const bool is_up = interleaved && at >= 64;
    return {is_up ? at - 64 : at, is_up, 0};
  }

  /* Returns the source of the scales, or zero points, that this thread copies. */
  static __device__ __forceinline__ ScaleChunk find_scale(moelora_format format, bool interleaved) {
    constexpr int FIRST = SCALES_AT / 16;
    const int chunk = threadIdx.x & 31;
    int begin = 0, count = 16; // of the section that contains the chunk
    if (E::Format::IS_FP8 && !moelora_has_row_scales(format))
      return {FIRST, interleaved && chunk > 0, 0};
    if constexpr (!E::Format::IS_FP8) {
      const int groups = E::Format::groups(format), scales = 4 * E::Format::SCALE_BYTES * groups;
      begin = chunk < scales ? 0 : scales;
      count = chunk < scales ? scales : 4 * groups;
      if (E::Format::HAS_TILE_SCALE && chunk >= scales)
        return {FIRST + scales, interleaved && chunk > scales, 0};
    }
    if (!interleaved)
      return {FIRST + chunk, false, 0};
    const int in_section = chunk - begin;
    const bool is_up = in_section >= count / 2;
    return {FIRST + begin + in_section - (is_up ? count / 2 : 0), is_up, count / 2};
  }

  /* The expert's first tile at a k step, and the half of its rows if gate and up rows alternate. */
  struct Source {
    const char *tile;
    int half;
  };
  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    if (is_interleaved(g.weights.w))
      return {weights + step / 2 * g.weights.w.stride_nt, step % 2};
    return {weights + step * g.weights.w.stride_nt, 0};
  }
  static __device__ __forceinline__ void advance(Source &from, const moelora_gemm_launch &g) {
    const bool interleaved = is_interleaved(g.weights.w);
    from.tile += !interleaved || from.half ? g.weights.w.stride_nt : 0;
    from.half = interleaved ? 1 - from.half : 0;
  }
  __device__ __forceinline__ Source readable(Source from, int) const { return from; }

  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    const moelora_format format = g.weights.w.format;
    const int chunk = threadIdx.x & 31;
    Place place = W::place(g);
    place.has_scales = W::tile_of_scales() < E::TILES;
    if (!E::Format::IS_FP8)
      place.has_scales &= chunk < (int)(E::Format::tile_bytes(format) - SCALES_AT) / 16 +
                                      (E::Format::HAS_TILE_SCALE ? 1 : 0);
    else
      place.has_scales &=
          moelora_has_row_scales(format) ? chunk < 16 : chunk % 8 == 0 && chunk < 16;
    return place;
  }

  __device__ __forceinline__ void copy(int piece, Source from, int, uint32_t stage, uint32_t slot,
                                       const Place &place, bool wanted) const {
    const int part = piece * W::AT_ONCE;
    const uint32_t ahead = part / TILE_PARTS * E::TILE_BYTES + part % TILE_PARTS * W::PART_BYTES;
    const bool scales = piece == VALUES;
    const uint32_t next = !from.half ? 0 : scales ? next_scales : NEXT_VALUES;
    copy_async_16<256>(scales ? slot + place.scales : stage + place.values + ahead,
                       row_address(from.tile + next, chunks[piece], 16), 16,
                       wanted && (!scales || place.has_scales));
  }
};

template <class E, class T, bool VECTORS>
using TransposedWeights = std::conditional_t<E::Format::IS_NATIVE, TransposedLoader<E, T, VECTORS>,
                                             TransposedTileLoader<E, T>>;

/* Maps K steps to columns of y. In y, the first up column follows the last gate column, while the
 * tiles of up rows follow whole tiles of gate rows. */
template <class E> struct TransposedDepth {
  static constexpr bool SPLITS = E::TRANSPOSED && !E::Format::IS_NATIVE;

  static __device__ __forceinline__ bool is_split(const moelora_weights &w) {
    return SPLITS && w.order == MOELORA_ROWS_GATE_UP;
  }
  static __device__ __forceinline__ int steps(const moelora_gemm_launch &g) {
    return is_split(g.weights.w) ? 2 * (int)g.weights.w.half_tiles
                                 : (g.tokens.k + kDepth - 1) / kDepth;
  }
  /* Returns the column of y that matches a step's first row of W. Sets `end` to K or, for gate
   * rows in order GATE_UP, to the number of gate columns. */
  static __device__ __forceinline__ int column(const moelora_gemm_launch &g, int step, int *end) {
    const bool split = is_split(g.weights.w), is_up = split && step >= g.weights.w.half_tiles;
    *end = split && !is_up ? g.tokens.k / 2 : g.tokens.k;
    return is_up ? g.tokens.k / 2 + (step - (int)g.weights.w.half_tiles) * kDepth : step * kDepth;
  }
};

/* Copies a thread's share of a stage, weights and token rows, in PARTS parts that are interleaved
 * with MMAs. */
template <class E, class T, bool VECTORS> struct OperandLoader {
  using W = std::conditional_t<E::TRANSPOSED, TransposedWeights<E, T, VECTORS>,
                               WeightLoader<E, T, VECTORS>>;
  using Depth = TransposedDepth<E>;
  static constexpr int STEP = WarpTile<E>::THREADS / 8; // distance between two rows of a thread
  static constexpr int X_ROWS = E::TOKENS / STEP;
  static_assert(E::TOKENS % STEP == 0, "all threads copy as many rows");
  static constexpr int PARTS = 3;
  static constexpr int PART_PIECES = (W::PIECES + X_ROWS + PARTS - 1) / PARTS;

  W weights;
  int32_t token[X_ROWS]; // rows of x; -1: padding, which is not copied
  int32_t scaled;        // W8A8: row of x whose scale this thread copies, or -1

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
      if (Depth::is_split(g.weights.w) && step == g.weights.w.half_tiles) {
        const int past = step * kDepth;
        x += g.tokens.k / 2 - past, left += past;
      }
    }
  };

  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    const int chunk = (threadIdx.x & 7) * 8;
    int end;
    const int column = Depth::column(g, step, &end) + chunk;
    return {weights.source(g, step), (const T *)g.tokens.x + column, end - column, step};
  }

  /* This thread's destinations within a stage. */
  struct Place {
    typename W::Place w;
    uint32_t x;
  };
  static __device__ __forceinline__ Place place(const moelora_gemm_launch &g) {
    return {W::place(g), row_chunk()};
  }

  /* Copies part PART of a stage if `wanted`; W8A8 copies scales to a slot in `slots`. */
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
