/* Tiles of the gradients of factors: their numbering, and how one is stored.
 *
 * A tile is RANKS columns of `ranks` by kColumns of `wide`, of one part. The columns of ranks are
 * those of all slices, concatenated, each padded to a multiple of 16. */
#ifndef MOELORA_CUDA_GRADIENT_TILE_CUH
#define MOELORA_CUDA_GRADIENT_TILE_CUH

#include "cuda/backward/gradients.h"
#include "cuda/ptx/mma.cuh"

constexpr int kColumns = 128;

/* A product, as passed to kernels. */
struct GradientProduct {
  moelora_gradient_operand ranks, wide;
  int64_t ranks_slice;
  int32_t slices, max_rank, padded_rank, columns;
  bool weighted, transposed;
  bool ranks_vectors, wide_vectors; // they allow 16-byte accesses
  bool quads;                       // gradients allow accesses of 4 elements
  moelora_gradient gradient[2];
  int64_t slot_offset; // offset of this product's [rank columns, columns] within a slot, in floats
  int32_t column_tiles;
  int32_t first_tile, tiles; // range of its tiles within a part
};

/* Products over the parts of one kind. */
struct GradientGroup {
  moelora_gradient_parts parts;
  GradientProduct product[MOELORA_GRADIENT_PRODUCTS];
  int32_t count;
  int32_t tiles; // tiles per part
  int64_t slot_floats;
  float *slots;
};

struct GradientTile {
  int rank, column; // first of the tile
};

/* Tile `tile` of a part, and its product. */
template <int RANKS>
__device__ __forceinline__ const GradientProduct &find_tile(const GradientGroup &group, int tile,
                                                            GradientTile *found) {
  int p = 0;
  while (p + 1 < group.count && tile >= group.product[p + 1].first_tile)
    p++;
  const GradientProduct &product = group.product[p];
  const int at = tile - product.first_tile;
  *found = {at / product.column_tiles * RANKS, at % product.column_tiles * kColumns};
  return product;
}

template <int WIDTH, class V> struct alignas(WIDTH * sizeof(V)) Several {
  V value[WIDTH];
};

/* to[i] = (or +=) v[i] for i < count; if overwriting, the rest of the WIDTH elements becomes zero.
 */
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

/* Stores a tile, WIDTH neighboring elements of the gradient at a time: get(rank, column) returns a
 * sum by its index in the tile. Elements at and beyond the true rank are zero, or left unchanged.
 * Neighbors are columns of A, ranks of B; a thread has the same ones in all of its lines. */
template <class T, int RANKS, int WIDTH, bool TRANSPOSED, class Get>
__device__ __forceinline__ void write_lines(const GradientProduct &p, const GradientTile &tile,
                                            int adapter, int expert, int rank, bool accumulate,
                                            Get get) {
  constexpr int UNITS = (TRANSPOSED ? RANKS : kColumns) / WIDTH; // of a line
  constexpr int LINES = TRANSPOSED ? kColumns : RANKS;
  const int own = threadIdx.x % UNITS * WIDTH, step = (int)blockDim.x / UNITS;
  for (int line = threadIdx.x / UNITS; line < LINES; line += step) {
    const int of_ranks = TRANSPOSED ? own : line, c = TRANSPOSED ? line : own;
    const int at = tile.rank + of_ranks, slice = at >= p.padded_rank;
    const int r = at - (slice ? p.padded_rank : 0), column = tile.column + c;
    if (at >= p.slices * p.padded_rank || r >= p.max_rank || column >= p.columns ||
        (accumulate && r >= rank))
      continue;
    const moelora_gradient &g = p.gradient[slice];
    float v[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      v[i] = TRANSPOSED ? get(of_ranks + i, c) : get(of_ranks, c + i);
    const int count = TRANSPOSED ? rank - r : r < rank ? WIDTH : 0;
    const int64_t to = adapter * g.stride_l + expert * g.stride_e +
                       (TRANSPOSED ? column * g.stride_i + r : r * g.stride_i + column);
    if (g.dtype == MOELORA_F32)
      put<WIDTH>((float *)g.data + to, v, count, accumulate);
    else
      put<WIDTH>((T *)g.data + to, v, count, accumulate);
  }
}

template <class T, int RANKS, int WIDTH, class Get>
__device__ __forceinline__ void write_units(const GradientProduct &p, const GradientTile &tile,
                                            int adapter, int expert, int rank, bool accumulate,
                                            Get get) {
  if (p.transposed)
    write_lines<T, RANKS, WIDTH, true>(p, tile, adapter, expert, rank, accumulate, get);
  else
    write_lines<T, RANKS, WIDTH, false>(p, tile, adapter, expert, rank, accumulate, get);
}

template <class T, int RANKS, class Get>
__device__ __forceinline__ void write_tile(const GradientProduct &p, const GradientTile &tile,
                                           int adapter, int expert, int rank, bool accumulate,
                                           Get get) {
  if (p.quads)
    write_units<T, RANKS, 4>(p, tile, adapter, expert, rank, accumulate, get);
  else
    write_units<T, RANKS, 1>(p, tile, adapter, expert, rank, accumulate, get);
}

#endif
