/* Gradients of factors of pairs with few rows, or none: grouped GEMMs bound by storing their
 * outputs.
 *
 *   CTA     keeps all rows of `ranks` of a pair in shared memory, up to RANKS columns of each
 *   warp    processes slabs of 32 columns of `wide`: copies rows by cp.async in its own pipeline,
 *           runs mma.sync, reorders the sums through the stage read last, stores 16 bytes per lane
 *
 * Gradients are overwritten, have the dtype of the operands and allow 16-byte accesses. Transposed
 * ones have one slice. M of m16n8k16 is the rows of the gradient: ranks for A, columns of `wide`
 * for B. K is the rows of the pair, in their order; rows past the end are zero in both operands. */
#pragma once

#include "cuda/backward/gradient_tile.cuh"

constexpr int kFewColumns = 1024; // columns of `wide` per tile

template <int RANKS_> struct FewShape {
  static constexpr int RANKS = RANKS_, WARPS = 4, THREADS = 32 * WARPS;
  static constexpr int ROWS = 32, COLUMNS = 32, STAGES = 3; // of a warp's pipeline
  static constexpr int WIDE_PITCH = 2 * COLUMNS + 16, RANKS_PITCH = 2 * RANKS + 16;
  static constexpr int RANK_TILES = RANKS / 16, CTAS = 4;
  static constexpr int MAX_ROWS = MOELORA_GRADIENT_FEW(RANKS);

  struct SharedStorage {
    char ranks[MAX_ROWS * RANKS_PITCH];
    char wide[WARPS][STAGES][ROWS * WIDE_PITCH];
    int32_t wide_row[MAX_ROWS], ranks_row[MAX_ROWS];
    float weight[MAX_ROWS];
    int64_t next[2]; // the tile after this one, in turns
  };
};

/* Zeroes all but the first `count` of eight elements. */
__device__ __forceinline__ uint4 first_elements(uint4 v, int count) {
  const auto keep = [&](uint32_t two, int first) {
    return first + 1 < count ? two : first < count ? two & 0xffffu : 0u;
  };
  return make_uint4(keep(v.x, 0), keep(v.y, 2), keep(v.z, 4), keep(v.w, 6));
}

/* A warp's work on a tile of a pair. */
template <class T, class S, bool TRANSPOSED> struct FewTile {
  static constexpr int M_TILES = TRANSPOSED ? S::COLUMNS / 16 : S::RANK_TILES;
  static constexpr int N_TILES = TRANSPOSED ? 2 * S::RANK_TILES : S::COLUMNS / 8;
  // A line is a row of the gradient: a rank for A, a column of `wide` for B. A warp stores TURN
  // lines at once, each as UNITS units of 8 elements.
  static constexpr int UNITS = N_TILES, TURN = 32 / UNITS;
  static constexpr int CTA_COLUMNS = S::WARPS * S::COLUMNS;
  static constexpr uint32_t STAGE = S::ROWS * S::WIDE_PITCH;
  const GradientProduct &p;
  const moelora_gradient_part &part;
  const int32_t *wide_row; // by row of the pair; padded to a multiple of 16 with the first row
  uint32_t sRanks, sWide;  // sWide: of this warp
  int rank;                // true rank of the part
  int first_rank;          // column of ranks where the tile begins
  int first_column, slabs; // of this warp

  __device__ __forceinline__ FewTile(const GradientProduct &p, const moelora_gradient_part &part,
                                     const GradientTile &tile, typename S::SharedStorage &shared,
                                     int rank)
      : p(p), part(part), wide_row(shared.wide_row), sRanks(shared_address(shared.ranks)),
        sWide(shared_address(shared.wide[threadIdx.x >> 5])), rank(rank), first_rank(tile.rank) {
    const int own = (int)(threadIdx.x >> 5) * S::COLUMNS;
    const int left = min(p.columns - tile.column, kFewColumns) - own;
    first_column = tile.column + own;
    slabs = max(0, (left + CTA_COLUMNS - 1) / CTA_COLUMNS);
  }

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    return stage == sWide + (S::STAGES - 1) * STAGE ? sWide : stage + STAGE;
  }

  /* Iterates over a warp's copies: slab by slab, and within a slab pass by pass over the rows. */
  struct Copies {
    const T *from; // this lane's columns in row 0
    int left;      // columns from there on
    int slabs, passes, pass;
    uint32_t stage;
  };
  __device__ __forceinline__ Copies all_copies(int passes) const {
    const int column = first_column + lane() % (S::COLUMNS / 8) * 8;
    return {(const T *)p.wide.data + column, p.columns - column, slabs, passes, 0, sWide};
  }

  /* Issues the copies of a pass, only for rows that multiply() reads, and advances. */
  __device__ __forceinline__ void load(Copies &copies) const {
    constexpr int CHUNKS = S::COLUMNS / 8, TURN_ROWS = 32 / CHUNKS;
    if (copies.slabs > 0) {
      const int rows = part.count - copies.pass * S::ROWS, own = lane() / CHUNKS;
      const int32_t *const row = wide_row + copies.pass * S::ROWS + own;
      const T *const from = copies.left > 0 ? copies.from : (const T *)p.wide.data;
      const uint32_t to = copies.stage + own * S::WIDE_PITCH + lane() % CHUNKS * 16;
      const auto copy_all = [&](auto copy) {
#pragma unroll
        for (int i = 0; i < S::ROWS; i += TURN_ROWS) {
          if (i / 16 * 16 >= rows)
            break;
          copy(to + i * S::WIDE_PITCH, (uint32_t)row[i], own + i < rows && copies.left > 0);
        }
      };
      if (p.wide_vectors)
        copy_all([&](uint32_t to, uint32_t row, bool valid) {
          copy_async_16<128>(to, row_address(from, row, (uint32_t)p.wide.stride * sizeof(T)),
                             valid ? 16 : 0, true);
        });
      else
        copy_all([&](uint32_t to, uint32_t row, bool valid) {
          copy_elements(to, from + row * p.wide.stride, valid ? min(copies.left, 8) : 0);
        });
      if (++copies.pass == copies.passes) {
        copies.pass = 0, copies.slabs--;
        copies.from += CTA_COLUMNS, copies.left -= CTA_COLUMNS;
      }
    }
    copy_async_commit();
    copies.stage = after(copies.stage);
  }

  /* Accumulates the products of a pass. */
  __device__ __forceinline__ void multiply(int pass, uint32_t stage,
                                           float (&rAcc)[M_TILES][N_TILES][4]) const {
    // Addresses from which ldmatrix.trans loads 16 rows of K by 16 columns: for operand A in the
    // order of m16k16, for operand B in the order of two k16n8.
    const int l = lane(), a_row = l % 8 + l / 16 * 8, a_column = l / 8 % 2 * 8;
    const int b_row = l % 16, b_column = l / 16 * 8;
    const uint32_t sPass = sRanks + pass * S::ROWS * S::RANKS_PITCH;
    const int left = part.count - pass * S::ROWS;
#pragma unroll
    for (int k = 0; k < S::ROWS; k += 16) {
      if (k >= left)
        break;
      const uint32_t a = TRANSPOSED ? stage + (k + a_row) * S::WIDE_PITCH + 2 * a_column
                                    : sPass + (k + a_row) * S::RANKS_PITCH + 2 * a_column;
      const uint32_t b = TRANSPOSED ? sPass + (k + b_row) * S::RANKS_PITCH + 2 * b_column
                                    : stage + (k + b_row) * S::WIDE_PITCH + 2 * b_column;
      uint32_t rA[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
        if (TRANSPOSED || ranks_left(16 * m) > 0)
          load_matrix_x4_trans(rA[m], a + 32 * m);
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        if (TRANSPOSED && ranks_left(8 * n) <= 0)
          continue;
        uint32_t rB[4];
        load_matrix_x4_trans(rB, b + 16 * n);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
          if (TRANSPOSED || ranks_left(16 * m) > 0) {
            mma_16816<T>(rAcc[m][n], rA[m], rB);
            mma_16816<T>(rAcc[m][n + 1], rA[m], rB + 2);
          }
      }
    }
  }

  /* Returns how many true ranks the slice has from column `own` of the tile on. */
  __device__ __forceinline__ int ranks_left(int own) const {
    const int at = first_rank + own;
    return TRANSPOSED || at < p.padded_rank ? rank - at
           : p.slices > 1                   ? rank + p.padded_rank - at
                                            : 0;
  }

  /* The lines lane / UNITS + i of a slab; a lane stores 16 bytes of each. */
  struct Lines {
    T *to;           // address for i = 0
    uint32_t stride; // bytes between lines
    int end;         // lines i < end are stored
    int valid_end;   // those with i >= valid_end are zeros
    int columns;     // columns of the gradient from this lane's first one in the slab on
  };
  /* Returns the lines of a slab: ranks of `slice` (gradient of A), or columns (gradient of B). */
  __device__ __forceinline__ Lines lines_of(int slice, int slab_column) const {
    const int line = lane() / UNITS, unit = lane() % UNITS * 8;
    const int at = first_rank - slice * p.padded_rank; // rank where the tile begins
    const int r = at + (TRANSPOSED ? unit : line);
    const int column = slab_column + (TRANSPOSED ? line : unit), columns = p.columns - column;
    const moelora_gradient &g = p.gradient[slice];
    T *const gradient = (T *)g.data + part.to[0] * g.stride_l + part.to[1] * g.stride_e;
    T *const to = gradient + (TRANSPOSED ? column * g.stride_i + r : r * g.stride_i + column);
    const uint32_t stride = (uint32_t)g.stride_i * sizeof(T);
    if (TRANSPOSED)
      return {to, stride, r < p.max_rank ? columns : 0, r < rank ? columns : 0, columns};
    return {to, stride, columns > 0 ? p.max_rank - r : 0, rank - r, columns};
  }
  __device__ __forceinline__ void advance(Lines &lines) const {
    lines.columns -= CTA_COLUMNS;
    if constexpr (TRANSPOSED) {
      lines.to += CTA_COLUMNS * p.gradient[0].stride_i;
      lines.end -= CTA_COLUMNS, lines.valid_end -= CTA_COLUMNS;
    } else {
      lines.to += CTA_COLUMNS;
      lines.end = lines.columns > 0 ? lines.end : 0;
    }
  }

  /* Stores a slab through the stage whose rows the last pass has multiplied. */
  __device__ __forceinline__ void store(const Lines &of_first, uint32_t stage,
                                        const float (&rAcc)[M_TILES][N_TILES][4]) const {
    constexpr int TILES = TRANSPOSED || M_TILES == 1 ? 1 : 2;
    constexpr int PITCH = TRANSPOSED ? S::RANKS_PITCH : S::WIDE_PITCH;
    static_assert(16 * TILES * PITCH <= STAGE, "they fit into a stage");
    const uint32_t sMine = stage + lane() / 4 * PITCH + lane() % 4 * 4;
    const uint32_t sLines = stage + lane() / UNITS * PITCH + lane() % UNITS * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m += TILES) {
      __syncwarp(); // all lanes have read the stage
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          if (ranks_left(TRANSPOSED ? 8 * n : 16 * m + 8 * i) > 0) {
            const float *two = &rAcc[m + i / 2][n][i % 2 * 2];
            store_shared_4(sMine + 8 * i * PITCH + 16 * n, pack2<T>(two[0], two[1]));
          }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const int from = 16 * (m + i);
        const bool second = !TRANSPOSED && p.slices > 1 && first_rank + from >= p.padded_rank;
        // Tiles with ranks of the second slice are rare: only these compute the slab's column
        // again, from of_first.
        store_lines(second ? lines_of(1, p.columns - of_first.columns - lane() % UNITS * 8)
                           : of_first,
                    from, sLines + 16 * i * PITCH);
      }
    }
  }
  /* Stores 16 lines, from line `from` on. */
  __device__ __forceinline__ void store_lines(const Lines &lines, int from, uint32_t sLines) const {
    constexpr int PITCH = TRANSPOSED ? S::RANKS_PITCH : S::WIDE_PITCH;
#pragma unroll
    for (int j = 0; j < 16; j += TURN) {
      if (from + j >= lines.end)
        continue;
      uint4 v = load_shared_16(sLines + j * PITCH);
      const bool valid = from + j < lines.valid_end;
      v = make_uint4(valid ? v.x : 0, valid ? v.y : 0, valid ? v.z : 0, valid ? v.w : 0);
      if (TRANSPOSED && rank % 8)
        v = first_elements(v, ranks_left(lane() % UNITS * 8));
      store_global_16((void *)row_address(lines.to, from + j, lines.stride), v);
    }
  }

  /* Multiplies and stores all slabs of this warp, after load_few_ranks(). */
  __device__ __forceinline__ void run() const {
    const int passes = (part.count + S::ROWS - 1) / S::ROWS;
    Lines lines = lines_of(0, first_column);
    if (passes == 0) { // no rows: store zeros
      const float rAcc[M_TILES][N_TILES][4] = {};
#pragma unroll 1
      for (int slab = 0; slab < slabs; slab++, advance(lines))
        store(lines, sWide, rAcc);
      return;
    }
    Copies copies = all_copies(passes);
#pragma unroll 1
    for (int i = 0; i < S::STAGES - 1; i++)
      load(copies);
    uint32_t stage = sWide, last = sWide;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab++, advance(lines)) {
      float rAcc[M_TILES][N_TILES][4] = {};
#pragma unroll 1
      for (int pass = 0; pass < passes; pass++) {
        // Wait for the stage, and until all lanes have read the previous one.
        copy_async_wait<S::STAGES - 2>();
        __syncwarp();
        load(copies);
        multiply(pass, stage, rAcc);
        last = stage, stage = after(stage);
      }
      store(lines, last, rAcc);
    }
    copy_async_wait<0>();
  }
};

/* Copies the rows of `ranks` to shared memory, weighted if p.weighted. All threads must call it. */
template <class T, class S>
__device__ __forceinline__ void
load_few_ranks(const GradientLaunch &s, const GradientProduct &p, const moelora_gradient_part &part,
               const GradientTile &tile, int rank, typename S::SharedStorage &shared) {
  constexpr int CHUNKS = S::RANKS / 8, STEP = S::THREADS / CHUNKS;
  for (int i = threadIdx.x; i < part.count; i += S::THREADS) {
    shared.wide_row[i] = s.index[p.wide.index][part.first + i];
    shared.ranks_row[i] = s.index[p.ranks.index][part.first + i];
    if (p.weighted)
      shared.weight[i] = s.weight[part.first + i];
  }
  for (int i = part.count + threadIdx.x; i < (part.count + 15) / 16 * 16; i += S::THREADS)
    shared.wide_row[i] = s.index[p.wide.index][part.first];
  __syncthreads();
  const int chunk = threadIdx.x % CHUNKS, at = tile.rank + chunk * 8;
  const int slice = at >= p.padded_rank;
  const int left = at < p.slices * p.padded_rank ? rank - at + slice * p.padded_rank : 0;
  RowCopies<T> ranks;
  ranks.describe(p.ranks, slice * (p.ranks_slice - p.padded_rank) + at, left);
  const int rows = (part.count + 15) / 16 * 16;
  const auto place = [&](int i) {
    return shared_address(shared.ranks) + i * S::RANKS_PITCH + chunk * 16;
  };
#pragma unroll 1
  for (int i = threadIdx.x / CHUNKS; i < rows; i += STEP)
    ranks.copy(p.ranks, p.ranks_vectors, place(i), i < part.count ? shared.ranks_row[i] : 0,
               i < part.count);
  copy_async_commit();
  copy_async_wait<0>();
  if (p.weighted)
#pragma unroll 1
    for (int i = threadIdx.x / CHUNKS; i < part.count; i += STEP) {
      T *const row = (T *)(shared.ranks + i * S::RANKS_PITCH) + chunk * 8;
      const float weight = shared.weight[i];
#pragma unroll
      for (int j = 0; j < 8; j++)
        row[j] = Element<T>::round(Element<T>::to_float(row[j]) * weight);
    }
  __syncthreads();
}

/* Persistent kernel over the tiles of all pairs with few rows. The tile scheduler is dynamic, since
 * SMs store at different rates. */
template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, S::CTAS)
    gradients_few(const __grid_constant__ GradientLaunch s) {
  extern __shared__ __align__(128) char memory[];
  typename S::SharedStorage &shared = *(typename S::SharedStorage *)memory;
  follow_previous_kernel();
  const GradientGroup &group = s.group[0];
  const int64_t all = (int64_t)group.parts.count[2] * group.tiles;
  int turn = 0;
#pragma unroll 1
  for (int64_t work = blockIdx.x; work < all; work = shared.next[turn], turn ^= 1) {
    if (threadIdx.x == S::THREADS - 1)
      shared.next[turn] =
          gridDim.x + (int64_t)atomicAdd((unsigned long long *)group.parts.few_counter, 1ull);
    const int number = divide_work(work, group.tiles);
    const moelora_gradient_part part = group.parts.few[number];
    GradientTile tile;
    const GradientProduct &p =
        find_tile<S::RANKS, kFewColumns>(group, (int)(work - (int64_t)number * group.tiles), &tile);
    const int rank = part.count > 0 ? min(part.rank, p.max_rank) : 0;
    if (part.to[1] >= 0) {
      if (part.count > 0)
        load_few_ranks<T, S>(s, p, part, tile, rank, shared);
      if (p.transposed)
        FewTile<T, S, true>(p, part, tile, shared, rank).run();
      else
        FewTile<T, S, false>(p, part, tile, shared, rank).run();
    }
    __syncthreads(); // all warps have read the rows
  }
}
