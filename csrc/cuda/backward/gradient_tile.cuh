/* Tiles of the gradients of factors: numbers them, copies their operands, and stores them.
 *
 * A tile of a part is RANKS columns of `ranks` by COLUMNS columns of `wide`. The rank columns of
 * all slices are concatenated, with each slice padded to a multiple of 16. */
#pragma once

#include "cuda/backward/gradients.h"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/opaque.cuh"

constexpr int kColumns = 128;

/* A product, as passed to the kernels. */
struct GradientProduct {
  moelora_gradient_operand ranks, wide;
  int64_t ranks_slice;
  int32_t slices, max_rank, padded_rank, columns;
  bool weighted, transposed;
  bool ranks_vectors, wide_vectors; // operands allow 16-byte accesses
  bool gradient_vectors;            // gradients allow them for each 8 elements
  moelora_gradient gradient[2];
  int64_t slot_offset; // offset of this product's [rank columns, columns] within a slot, in floats
  int32_t column_tiles, first_tile; // of a launch; first_tile: within a part
};

/* Products that share parts: those of pairs, or those of adapters. */
struct GradientGroup {
  moelora_gradient_parts parts;
  GradientProduct product[MOELORA_GRADIENT_PRODUCTS];
  int32_t count;
  int32_t tiles; // per part, of a launch
  int64_t slot_floats;
  float *slots;
};

/* The arguments of the gradient kernels. */
struct GradientLaunch {
  GradientGroup group[2];  // of pairs, of adapters
  const int32_t *index[3]; // [P] row indices, by moelora_row_index
  const float *weight;
  bool accumulate;
};

struct GradientTile {
  int rank, column; // first rank and column of the tile
};

/* Finds tile `tile` of a part, and returns its product. */
template <int RANKS, int COLUMNS = kColumns>
__device__ __forceinline__ const GradientProduct &find_tile(const GradientGroup &group, int tile,
                                                            GradientTile *found) {
  int p = 0;
  while (p + 1 < group.count && tile >= group.product[p + 1].first_tile)
    p++;
  const GradientProduct &product = group.product[p];
  const int at = tile - product.first_tile;
  *found = {at / product.column_tiles * RANKS, at % product.column_tiles * COLUMNS};
  return product;
}

/* The columns of an operand that a thread copies to shared memory: 8 consecutive elements of each
 * of its rows; the first `size` are valid. */
template <class T> struct RowCopies {
  const T *from; // its columns in row 0
  int size;      // valid elements; the rest is zero-filled

  __device__ __forceinline__ void describe(const moelora_gradient_operand &operand, int64_t offset,
                                           int left) {
    size = max(min(left, 8), 0);
    from = (const T *)operand.data + (size ? offset : 0);
  }
  /* Copies the columns of a row, or zero-fills if it is not `valid`. */
  __device__ __forceinline__ void copy(const moelora_gradient_operand &operand, bool vectors,
                                       uint32_t to, int row, bool valid) const {
    if (vectors)
      copy_async_16(to,
                    row_address(from, (uint32_t)row, (uint32_t)(operand.stride * (int)sizeof(T))),
                    valid ? size * (int)sizeof(T) : 0);
    else
      copy_elements(to, from + row * operand.stride, valid ? size : 0);
  }
};

/* Returns at / tiles: the part or split that tile `at` belongs to, where each has `tiles` tiles.
 * From 2^32 on bit by bit: the compiler's division is a call, which would spill registers. */
__device__ __forceinline__ int divide_work(int64_t at, int tiles) {
  if (at >> 32 == 0)
    return (int)((uint32_t)at / (uint32_t)tiles);
  uint32_t quotient = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 0; bit--)
    if (at >= (int64_t)tiles << bit)
      at -= (int64_t)tiles << bit, quotient |= 1u << bit;
  return (int)quotient;
}

template <int WIDTH, class V>
struct alignas(WIDTH * sizeof(V) < 16 ? WIDTH * sizeof(V) : 16) Several {
  V value[WIDTH];
};

/* Stores to[i] = (or +=) v[i] for i < count; when overwriting, zeroes the rest of the WIDTH
 * elements. */
template <int WIDTH, class V>
__device__ __forceinline__ void put(V *to, const float (&v)[WIDTH], int count, bool accumulate) {
  Several<WIDTH, V> all;
  if (accumulate)
    all = *(const Several<WIDTH, V> *)to;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    if constexpr (sizeof(V) == sizeof(float)) {
      if (!accumulate)
        all.value[i] = i < count ? v[i] : 0.f;
      else if (i < count)
        all.value[i] += v[i];
    } else {
      if (!accumulate)
        all.value[i] = Element<V>::round(i < count ? v[i] : 0.f);
      else if (i < count)
        all.value[i] = Element<V>::round(Element<V>::to_float(all.value[i]) + v[i]);
    }
  }
  *(Several<WIDTH, V> *)to = all;
}

/* Returns threadIdx.x, hidden from the compiler, which would compute the epilogue's addresses
 * before the K loop. */
__device__ __forceinline__ int epilogue_thread() {
  return opaque(threadIdx.x);
}

/* Returns the index of an element within a product's share of a slot, which is laid out like the
 * gradient. */
__device__ __forceinline__ int64_t slot_index(const GradientProduct &p, int rank, int column) {
  return p.transposed ? (int64_t)column * (p.slices * p.padded_rank) + rank
                      : (int64_t)rank * p.columns + column;
}

/* Stores a tile by lines (rows of the gradient), in units of WIDTH columns of A or WIDTH ranks of
 * B. sums.load<TRANSPOSED>(v, rank, column) loads the unit whose first element has these indices in
 * the tile. Elements from the true rank on are zeroed or, if accumulating, unchanged. A thread
 * stores the same unit of each of its lines. */
template <class T, class S, int WIDTH, bool TRANSPOSED, class Sums>
__device__ __forceinline__ void write_lines(const GradientProduct &p, const GradientTile &tile,
                                            const int32_t (&to)[2], int rank, bool accumulate,
                                            const Sums &sums) {
  constexpr int UNITS = (TRANSPOSED ? S::RANKS : kColumns) / WIDTH; // of a line
  constexpr int LINES = TRANSPOSED ? kColumns : S::RANKS, STEP = S::THREADS / UNITS;
  const int thread = epilogue_thread(), own = thread % UNITS * WIDTH;
#pragma unroll 1
  for (int i = 0; i < (LINES + STEP - 1) / STEP; i++) {
    const int line = thread / UNITS + i * STEP;
    const int of_ranks = TRANSPOSED ? own : line, c = TRANSPOSED ? line : own;
    const int at = tile.rank + of_ranks, slice = at >= p.padded_rank;
    const int r = at - (slice ? p.padded_rank : 0), column = tile.column + c;
    if (line >= LINES || at >= p.slices * p.padded_rank || r >= p.max_rank || column >= p.columns ||
        (accumulate && r >= rank))
      continue;
    const moelora_gradient &g = p.gradient[slice];
    float v[WIDTH];
    sums.template load<TRANSPOSED>(v, of_ranks, c);
    const int count = TRANSPOSED ? rank - r : r < rank ? WIDTH : 0;
    const int64_t offset = to[0] * g.stride_l + to[1] * g.stride_e +
                           (TRANSPOSED ? column * g.stride_i + r : r * g.stride_i + column);
    if (g.dtype == MOELORA_F32)
      put<WIDTH>((float *)g.data + offset, v, count, accumulate);
    else
      put<WIDTH>((T *)g.data + offset, v, count, accumulate);
  }
}

template <class T, class S, int WIDTH, class Sums>
__device__ __forceinline__ void write_units(const GradientProduct &p, const GradientTile &tile,
                                            const int32_t (&to)[2], int rank, bool accumulate,
                                            const Sums &sums) {
  if (p.transposed)
    write_lines<T, S, WIDTH, true>(p, tile, to, rank, accumulate, sums);
  else
    write_lines<T, S, WIDTH, false>(p, tile, to, rank, accumulate, sums);
}

/* Stores a tile. `to` has the gradient's indices in the first two dimensions. */
template <class T, class S, class Sums>
__device__ __forceinline__ void write_tile(const GradientProduct &p, const GradientTile &tile,
                                           const int32_t (&to)[2], int rank, bool accumulate,
                                           const Sums &sums) {
  if (p.gradient_vectors)
    write_units<T, S, 8>(p, tile, to, rank, accumulate, sums);
  else
    write_units<T, S, 1>(p, tile, to, rank, accumulate, sums);
}
