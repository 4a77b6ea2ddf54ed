/* Multiplies rows of A by rows of x, for the shrink kernels.
 *
 * Operands are loaded directly to registers: rows of A are the M side, tokens the N side of
 * m16n8k16. Lane t loads row t/4 of eight. An mma has 16 consecutive elements of K, as in all
 * kernels. From sm_90 on, their order in the mma does not affect the result: a lane loads elements
 * 4 (t%4) to 4 (t%4) + 3 of each 16. On older GPUs, or without 16-byte alignment, it loads elements
 * 8 (t%4) to 8 (t%4) + 7 of each 32, and lanes exchange these. Rows past the end of A or x repeat
 * the last row: their sums are not stored and affect no other row.
 *
 * A team of warps has up to TEAM_RANKS rows of A. Its DEPTHS warps split K into spans, each a
 * multiple of 64 elements; the sums of the spans are added in order. */
#pragma once

#include "cuda/launch/routes.cuh"
#include "cuda/launch/launch.h"
#include "cuda/launch/warp.cuh"
#include "cuda/ptx/mma.cuh"

constexpr int kStep = 32, kLine = 64; // elements of K
constexpr int kResidentWarps = 16;    // per SM, which leaves 128 registers per thread

template <int TILES_, int TEAMS_, int DEPTHS_, int TOKENS_, int RESIDENT_> struct Shape {
  static constexpr int RESIDENT = RESIDENT_; // warps per SM
  static constexpr int TILES = TILES_;       // tiles of 16 rows of A per warp
  static constexpr int TEAMS = TEAMS_, DEPTHS = DEPTHS_, TOKENS = TOKENS_;
  static constexpr int WARPS = TEAMS * DEPTHS, THREADS = 32 * WARPS;
  static constexpr int TEAM_RANKS = 16 * TILES, RANKS = TEAM_RANKS * TEAMS;
  static constexpr int PITCH = RANKS + 4; // lanes store without bank conflicts
};

template <class S> using Sums = float[S::DEPTHS][S::TOKENS][S::PITCH];

/* Returns the true rank of a packed rank. */
__device__ __forceinline__ int rank_of(const moelora_factors &lora, int packed) {
  return min(packed % kRanks, lora.max_rank);
}

/* Returns the number of padded ranks of all slices, or of slice 0 alone if both slices of the
 * adapter share one A. */
__device__ __forceinline__ int columns_of(const moelora_lora_operands &adapters, int packed) {
  const bool one_a = adapters.one_a && adapters.one_a[packed / kRanks] != 0;
  return moelora_padded_rank(rank_of(adapters.lora, packed)) *
         (one_a ? 1 : adapters.lora.num_slices);
}

/* Stores results of `slice`, given their address in slice 0; if slices share one A, to both
 * slices. */
template <class Value, class T>
__device__ __forceinline__ void store_slice(const moelora_lora_operands &adapters, T *to, int slice,
                                            bool one_a, Value value) {
  *(Value *)(to + slice * adapters.xa_slice) = value;
  if (one_a)
    *(Value *)(to + adapters.xa_slice) = value;
}

__device__ __forceinline__ float scaling_of(const moelora_shrink_launch &s, int packed) {
  return s.scalings ? s.unit * s.scalings[packed / kRanks] : s.unit;
}

#if __CUDA_ARCH__ >= 900
constexpr bool kAnyOrder = true;
#else
constexpr bool kAnyOrder = false;
#endif
constexpr int kRegisters = kAnyOrder ? 108 : 76; // for sums, pointers and loads

/* Returns the first element of K of a lane. */
template <bool VECTORS> __device__ __forceinline__ int first_element() {
  return threadIdx.x % 4 * (VECTORS && kAnyOrder ? 4 : 8);
}

/* Returns a lane's operand of two mma, from the elements that it has loaded. */
template <bool VECTORS> __device__ __forceinline__ uint4 operand_of(uint4 loaded) {
  if constexpr (VECTORS && kAnyOrder)
    return loaded;
  return neighbors_16(loaded);
}

/* Loads a lane's part of 32 elements of a row: its first element is at `from`, and `left` elements
 * remain from there on. Returns zeros beyond. ONCE: vector loads bypass L1. */
template <class T, bool VECTORS, bool ONCE>
__device__ __forceinline__ uint4 load_row(const T *from, int left) {
  if constexpr (VECTORS && kAnyOrder) {
    constexpr Read READ = ONCE ? Read::STREAMED : Read::SHARED;
    const uint2 first = load_8<READ>(from, left > 0), second = load_8<READ>(from + 16, left > 16);
    return make_uint4(first.x, first.y, second.x, second.y);
  }
  if constexpr (VECTORS)
    return load_16<ONCE ? Read::STREAMED : Read::SHARED>(from, left > 0);
  else
    return load_elements(from, left);
}

/* Addresses of a lane's operands: 16 M rows of A and 8 N tokens. */
template <class T, class S, int M, int N> struct Rows {
  const T *a[2 * M], *x[N];
  int left; // remaining elements of a row, from this lane's first one on

  /* Finds the addresses, at `k`, of rows of A from `column` on, of `columns` (columns_of()). */
  __device__ __forceinline__ void find_a(const moelora_factors &lora, int adapter, int expert,
                                         int rank, int column, int columns, int k) {
    const int lane = threadIdx.x % 32;
    const int width = moelora_padded_rank(rank);
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int tile = min(column + m * 16, columns - 16), slice = tile / width;
      const moelora_factor &f = lora.a[slice];
      const T *factor = factor_row<T>(f, adapter, expert, 0) + k;
#pragma unroll
      for (int half = 0; half < 2; half++)
        a[2 * m + half] =
            factor + min(tile - slice * width + half * 8 + lane / 4, rank - 1) * f.stride_i;
    }
  }

  template <bool VECTORS>
  __device__ __forceinline__ void load_a(uint4 (&to)[2 * M], int step) const {
#pragma unroll
    for (int m = 0; m < 2 * M; m++)
      to[m] = load_row<T, VECTORS, true>(a[m] + step * kStep, left - step * kStep);
  }

  template <bool VECTORS> __device__ __forceinline__ void load_x(uint4 (&to)[N], int step) const {
#pragma unroll
    for (int n = 0; n < N; n++)
      to[n] = load_row<T, VECTORS, S::TEAMS == 1>(x[n] + step * kStep, left - step * kStep);
  }

  __device__ __forceinline__ void advance(int steps) {
    left -= steps * kStep;
#pragma unroll
    for (int m = 0; m < 2 * M; m++)
      a[m] += steps * kStep;
#pragma unroll
    for (int n = 0; n < N; n++)
      x[n] += steps * kStep;
  }
};

/* Writes a warp's sums over K span `span` to `sums`, for 16 M ranks from `column` on (zeros if that
 * is past the last) and 8 N tokens. `operands` finds the addresses of A and x. Called by all
 * threads. */
template <class T, class S, bool VECTORS, int M, int N, class Operands>
__device__ __forceinline__ void multiply(const Operands &operands, int column, int depth, int span,
                                         Sums<S> &sums) {
  constexpr int LOADS = 2 * M + N;
  constexpr int FIT = (kRegisters - 4 * M * N - 2 * LOADS) / (4 * LOADS);
  constexpr int STEPS = VECTORS && FIT > 1 ? FIT : 1; // in flight
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int columns = operands.columns();
  float d[M][N][4] = {};
  const int share = ceil_divide(ceil_divide(depth, kLine), S::DEPTHS) * kLine;
  const int begin = span * share, end = min(begin + share, depth);
  if (column < columns && begin < end) {
    const int k = begin + first_element<VECTORS>();
    Rows<T, S, M, N> rows;
    uint4 a[STEPS][2 * M], x[STEPS][N];
    rows.left = end - k;
    operands.find_a(rows, column, columns, k);
#pragma unroll
    for (int slot = 0; slot < STEPS; slot++)
      rows.template load_a<VECTORS>(a[slot], slot);
    operands.find_x(rows.x, k);
#pragma unroll
    for (int slot = 0; slot < STEPS; slot++)
      rows.template load_x<VECTORS>(x[slot], slot);
#pragma unroll 1
    for (int steps = ceil_divide(end - begin, kStep); steps > 0; steps -= STEPS) {
      rows.advance(STEPS);
#pragma unroll
      for (int slot = 0; slot < STEPS; slot++) {
#pragma unroll
        for (int n = 0; n < N; n++)
          x[slot][n] = operand_of<VECTORS>(x[slot][n]);
#pragma unroll
        for (int m = 0; m < M; m++) {
          const uint4 low = operand_of<VECTORS>(a[slot][2 * m]);
          const uint4 high = operand_of<VECTORS>(a[slot][2 * m + 1]);
          const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
          const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int n = 0; n < N; n++) {
            const uint32_t b0[2] = {x[slot][n].x, x[slot][n].y};
            const uint32_t b1[2] = {x[slot][n].z, x[slot][n].w};
            mma_16816<T>(d[m][n], a0, b0);
            mma_16816<T>(d[m][n], a1, b1);
          }
        }
        rows.template load_a<VECTORS>(a[slot], slot);
        rows.template load_x<VECTORS>(x[slot], slot);
      }
    }
  }
  __syncthreads(); // the previous sums have been read
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        sums[warp % S::DEPTHS][n * 8 + 2 * (lane % 4) + q % 2]
            [warp / S::DEPTHS * S::TEAM_RANKS + m * 16 + lane / 4 + q / 2 * 8] = d[m][n][q];
  __syncthreads();
}

/* Calls multiply() with the fewest n8 tiles that hold `tokens` tokens. */
template <class T, class S, bool VECTORS, int M, class Operands>
__device__ __forceinline__ void multiply_tokens(int tokens, const Operands &operands, int column,
                                                int depth, int span, Sums<S> &sums) {
  switch (ceil_divide(tokens, 8)) {
#define MOELORA_TOKENS(N)                                                                          \
  case N:                                                                                          \
    if constexpr (8 * N <= S::TOKENS)                                                              \
      multiply<T, S, VECTORS, M, N>(operands, column, depth, span, sums);                          \
    break
    MOELORA_TOKENS(1);
    MOELORA_TOKENS(2);
    MOELORA_TOKENS(3);
    MOELORA_TOKENS(4);
    MOELORA_TOKENS(5);
    MOELORA_TOKENS(6);
#undef MOELORA_TOKENS
  }
}

/* Adds the sums of eight ranks of a token over the warps of a team, in order. */
template <class S>
__device__ __forceinline__ void add_spans(float (&sum)[8], const Sums<S> &sums, int token,
                                          int column) {
#pragma unroll
  for (int depth = 0; depth < S::DEPTHS; depth++)
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      const float4 v = *(const float4 *)&sums[depth][token][column + j];
      sum[j] += v.x, sum[j + 1] += v.y, sum[j + 2] += v.z, sum[j + 3] += v.w;
    }
}

/* Returns the sums of ranks r and r + 1, scaled and rounded; zeros from the true rank on. */
template <class T>
__device__ __forceinline__ uint32_t round_two(const float *sum, float scaling, int r, int rank) {
  return pack2<T>(r < rank ? scaling * sum[0] : 0.f, r + 1 < rank ? scaling * sum[1] : 0.f);
}

/* Returns the sums of eight ranks from r on, scaled and rounded. */
template <class T>
__device__ __forceinline__ uint4 round_ranks(const float (&sum)[8], float scaling, int r,
                                             int rank) {
  uint32_t rounded[4];
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    rounded[j / 2] = round_two<T>(sum + j, scaling, r + j, rank);
  return make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
}
