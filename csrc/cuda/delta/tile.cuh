/* Multiplies up to 8 rows of xa by some rows of B, both loaded directly to registers, for expands
 * of thin segments. Rows of B (output columns) are the M side of m16n8k16, rows of xa the N side.
 *
 * Ranks have the same slots as in delta/expand.cuh, so that results are bitwise equal. Slot g + 8 j
 * of product t holds column 2 t + j of the columns that lanes with lane / 4 = g store, so that a
 * lane ends up with adjacent columns of rows 2 (lane % 4) and 2 (lane % 4) + 1. */
#pragma once

#include "cuda/delta/expand.cuh"

/* STEPS mma of 16 ranks cover every rank. */
template <class T, int STEPS> struct ThinTile {
  static constexpr int CHUNK = STEPS == 1 ? 4 : 8; // ranks per load
  static constexpr int LOADS = 4 * STEPS / CHUNK;
  static constexpr int PRODUCTS = STEPS == 1 ? 4 : 2; // of 16 columns each, limited by registers
  static constexpr int OWN = 2 * PRODUCTS;            // columns per lane
  static constexpr int COLUMNS = 8 * OWN;
  static constexpr int SIDE = 8; // rows per product
  using Ranks = uint32_t[LOADS][CHUNK / 2];

  Ranks b[OWN];

  /* Clears ranks from the true rank on. */
  static __device__ __forceinline__ void mask(Ranks &v, int rank) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      mask_ranks(v[i], i * 4 * CHUNK, rank);
  }

  /* Returns the offset within a row at which load `i` of a lane begins; 0 if it begins beyond the
   * true rank. */
  static __device__ __forceinline__ int chunk(int i, int rank) {
    const int r = i * 4 * CHUNK + (int)(threadIdx.x % 4) * CHUNK;
    return r < rank ? r : 0;
  }

  /* Loads rows own to own + OWN - 1, the lane's output columns, of a factor with n rows; past the
   * end, the last rows. */
  __device__ __forceinline__ void load_b(const T *factor, int64_t stride, int own, int n,
                                         int rank) {
    const T *row = factor + min(own, n - OWN) * stride;
#pragma unroll
    for (int c = 0; c < OWN; c++, row += stride)
#pragma unroll
      for (int i = 0; i < LOADS; i++)
        load_streamed(b[c][i], row + chunk(i, rank));
  }

  static __device__ __forceinline__ void load_xa(Ranks &xa, const T *row, int rank) {
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      read_words(xa[i], row + chunk(i, rank));
  }

  /* Computes d = B xa^T, as d[product][2 * (slot / 8) + row % 2]. */
  __device__ __forceinline__ void multiply(float (&d)[PRODUCTS][4], const Ranks &xa,
                                           int rank) const {
#pragma unroll
    for (int t = 0; t < PRODUCTS; t++)
      d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if (i * 4 * CHUNK >= rank)
        continue;
#pragma unroll
      for (int half = 0; half < CHUNK / 4; half++)
#pragma unroll
        for (int t = 0; t < PRODUCTS; t++) {
          const uint32_t a[4] = {b[2 * t][i][2 * half], b[2 * t + 1][i][2 * half],
                                 b[2 * t][i][2 * half + 1], b[2 * t + 1][i][2 * half + 1]};
          mma_16816<T>(d[t], a, &xa[i][2 * half]);
        }
    }
  }

  /* Loads `out` from `column` on in rows `own` and own + 1 of a window, if these are below `to` and
   * p.add is set; otherwise zeros. */
  using Old = uint32_t[2][OWN / 2];
  template <int ROWS>
  static __device__ __forceinline__ void load_old(Old &old, const delta_expand &p,
                                                  const RowAddresses<ROWS> &addresses, int own,
                                                  int to, int column) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int c = 0; c < OWN / 2; c++)
        old[j][c] = 0;
      if (p.add && own + j < to)
        load_streamed(old[j], (const T *)p.out + addresses.out[own + j] + column);
    }
  }

  /* Stores out = old + weight d to the rows and columns of load_old(). */
  template <int ROWS>
  static __device__ __forceinline__ void
  finish(const float (&d)[PRODUCTS][4], const Old &old, const delta_expand &p,
         const RowAddresses<ROWS> &addresses, int own, int to, int column) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (own + j >= to)
        continue;
      const float weight = addresses.weight[own + j];
      float z[OWN];
#pragma unroll
      for (int c = 0; c < OWN; c++)
        z[c] = element_of<T>(old[j], c) + weight * d[c / 2][c % 2 * 2 + j];
      store_columns<T>(p, addresses.out[own + j] + column, z);
    }
  }

  /* Returns the lane's first column in a warp's tile from `first` on; columns from n on are not
   * stored. */
  static __device__ __forceinline__ int own_column(int first) {
    return first + (int)(threadIdx.x % 32 / 4) * OWN;
  }

  /* Stores out [+]= weight xa B^T for rows [from, to) of a window and the lane's columns from `own`
   * on; the slice has n columns, from column `slice` of out on. find_xa(row) returns the address of
   * a row's ranks; it is called once all other loads are issued. */
  template <int ROWS, class Find>
  __device__ __forceinline__ void expand(const delta_expand &p, const RowAddresses<ROWS> &addresses,
                                         int from, int to, int rank, int own, int n, int slice,
                                         Find find_xa) {
    const int end = own < n ? to : 0, column = slice + own;
#pragma unroll 1
    for (int row = from; row < to; row += SIDE) {
      const int own_row = row + (int)(threadIdx.x % 4) * 2;
      Old old;
      load_old(old, p, addresses, own_row, end, column);
      Ranks xa;
      load_xa(xa, find_xa(min(row + (int)(threadIdx.x % 32 / 4), to - 1)), rank);
      mask(xa, rank);
      if (row == from) { // after the other loads are issued
#pragma unroll
        for (int c = 0; c < OWN; c++)
          mask(b[c], rank);
      }
      float d[PRODUCTS][4];
      multiply(d, xa, rank);
      finish(d, old, p, addresses, own_row, end, column);
    }
  }
};
