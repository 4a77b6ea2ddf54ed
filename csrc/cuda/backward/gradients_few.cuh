/* Gradients of factors of pairs with few rows, or none: grouped GEMMs bound by storing their
 * outputs, which go from registers to memory.
 *
 *   CTA     all ranks rows of a pair in shared memory, up to RANKS columns of them
 *   warp    slabs of 32 columns of wide: rows by cp.async in a pipeline of its own, mma.sync,
 *           exchange in the stage that has been read, 16-byte stores
 *
 * Gradients are overwritten, have the dtype of the operands and allow 16-byte accesses. Transposed
 * ones have one slice.
 * The gradient's rows are the M of m16n8k16: ranks of A, columns of B. K is the rows of the pair,
 * in their order; rows past the end are zero in both operands. */
#ifndef MOELORA_CUDA_GRADIENTS_FEW_CUH
#define MOELORA_CUDA_GRADIENTS_FEW_CUH

#include "cuda/backward/gradient_tile.cuh"
#include "cuda/backward/row_copies.cuh"

/* Columns of wide of a tile: the more, the less often rows of ranks are loaded, as long as there
 * are tiles for all CTAs. */
constexpr int kFewColumns = 512, kMostFewColumns = 2048;
constexpr int64_t kManyFewTiles = 4096;

template <int RANKS_> struct FewShape {
  static constexpr int RANKS = RANKS_, WARPS = 4, THREADS = 32 * WARPS;
  static constexpr int ROWS = 32, COLUMNS = 32, STAGES = 3; // of a warp's pipeline
  static constexpr int WIDE_PITCH = 2 * COLUMNS + 16, RANKS_PITCH = 2 * RANKS + 16;
  static constexpr int RANK_TILES = RANKS / 16, CTAS = 4;
  static constexpr int MOST_ROWS = MOELORA_GRADIENT_FEW(RANKS);

  struct SharedStorage {
    char ranks[MOST_ROWS * RANKS_PITCH];
    char wide[WARPS][STAGES][ROWS * WIDE_PITCH];
    int32_t wide_row[MOST_ROWS], ranks_row[MOST_ROWS];
    float weight[MOST_ROWS];
  };
};

/* Tile `tile` of a pair, and its product. */
template <int RANKS>
__device__ __forceinline__ const GradientProduct &find_few_tile(const GradientGroup &group,
                                                                int tile, GradientTile *found) {
  int p = 0;
  while (p + 1 < group.count && tile >= group.product[p + 1].few.first)
    p++;
  const GradientProduct &product = group.product[p];
  const int at = tile - product.few.first;
  *found = {at / product.few.columns * RANKS, at % product.few.columns * group.few_columns};
  return product;
}

/* Zeros all but the first `count` of eight elements. */
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
  // Neighbors of eight elements in a line of the gradient, a rank of A or a column of B.
  static constexpr int UNITS = N_TILES, TURN = 32 / UNITS; // of a line; lines that a warp stores
  const GradientProduct &p;
  const moelora_gradient_part &part;
  GradientTile tile;
  typename S::SharedStorage &shared;
  int most_columns; // of the tile
  // Columns of ranks of the tile that belong to the first slice; true ranks from the tile's first
  // column on, and the same of the second slice.
  int split, ranks_left[2];

  __device__ __forceinline__ FewTile(const GradientProduct &p, const moelora_gradient_part &part,
                                     const GradientTile &tile, typename S::SharedStorage &shared,
                                     int rank, int most_columns)
      : p(p), part(part), tile(tile), shared(shared), most_columns(most_columns),
        split(p.padded_rank - tile.rank), ranks_left{rank - tile.rank, 0} {
    if (p.slices > 1)
      ranks_left[1] = ranks_left[0] + p.padded_rank;
  }

  __device__ __forceinline__ int lane() const { return threadIdx.x & 31; }
  __device__ __forceinline__ int warp() const { return threadIdx.x >> 5; }
  /* First column of a slab. */
  __device__ __forceinline__ int column_of(int slab) const {
    return tile.column + (slab * S::WARPS + warp()) * S::COLUMNS;
  }
  __device__ __forceinline__ int slabs() const {
    const int left = min(p.columns - tile.column, most_columns) - warp() * S::COLUMNS;
    return max(0, (left + S::WARPS * S::COLUMNS - 1) / (S::WARPS * S::COLUMNS));
  }
  __device__ __forceinline__ int passes() const { return (part.count + S::ROWS - 1) / S::ROWS; }
  __device__ __forceinline__ uint32_t sWide(int step) const {
    return shared_address(shared.wide[warp()][step % S::STAGES]);
  }

  /* Issues the copies of the rows of a pass, of a slab's columns: as many as the products read. */
  __device__ __forceinline__ void load(int slab, int pass, int step) const {
    constexpr int CHUNKS = S::COLUMNS / 8, TURN_ROWS = 32 / CHUNKS;
    const int chunk = lane() % CHUNKS, column = column_of(slab) + chunk * 8;
    const int first = pass * S::ROWS + lane() / CHUNKS;
    const uint32_t to = sWide(step) + lane() / CHUNKS * S::WIDE_PITCH + chunk * 16;
    RowCopies<T> wide;
    wide.describe(p.wide, column, p.columns - column);
    const auto copy_all = [&](bool vectors) {
#pragma unroll
      for (int i = 0; i < S::ROWS; i += TURN_ROWS) {
        if (pass * S::ROWS + i / 16 * 16 >= part.count)
          break;
        const bool there = first + i < part.count;
        wide.copy(p.wide, vectors, to + i * S::WIDE_PITCH, there ? shared.wide_row[first + i] : 0,
                  there);
      }
    };
    if (p.wide_vectors)
      copy_all(true);
    else
      copy_all(false);
  }

  /* Accumulates the products of a pass. */
  __device__ __forceinline__ void multiply(int pass, int step,
                                           float (&rAcc)[M_TILES][N_TILES][4]) const {
    // Addresses from which ldmatrix.trans loads an operand A: 16 rows of K by 16 columns in the
    // order of m16k16; and an operand B: in that of two k16n8.
    const int l = lane(), a_row = l % 8 + l / 16 * 8, a_column = l / 8 % 2 * 8;
    const int b_row = l % 16, b_column = l / 16 * 8;
    const uint32_t sRanks = shared_address(shared.ranks) + pass * S::ROWS * S::RANKS_PITCH;
    const int left = part.count - pass * S::ROWS;
#pragma unroll
    for (int k = 0; k < S::ROWS; k += 16) {
      if (k >= left)
        break;
      const uint32_t a = TRANSPOSED ? sWide(step) + (k + a_row) * S::WIDE_PITCH + 2 * a_column
                                    : sRanks + (k + a_row) * S::RANKS_PITCH + 2 * a_column;
      const uint32_t b = TRANSPOSED ? sRanks + (k + b_row) * S::RANKS_PITCH + 2 * b_column
                                    : sWide(step) + (k + b_row) * S::WIDE_PITCH + 2 * b_column;
      uint32_t rA[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
        if (TRANSPOSED || has_ranks(16 * m))
          load_matrix_x4_trans(rA[m], a + 32 * m);
#pragma unroll
      for (int n = 0; n < N_TILES; n += 2) {
        if (TRANSPOSED && !has_ranks(8 * n))
          continue;
        uint32_t rB[4];
        load_matrix_x4_trans(rB, b + 16 * n);
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
          if (TRANSPOSED || has_ranks(16 * m)) {
            mma_16816<T>(rAcc[m][n], rA[m], rB);
            mma_16816<T>(rAcc[m][n + 1], rA[m], rB + 2);
          }
      }
    }
  }

  /* True ranks from column `own` of the tile on, in its slice. */
  __device__ __forceinline__ int left_of(int own) const {
    return (own < split ? ranks_left[0] : ranks_left[1]) - own;
  }
  __device__ __forceinline__ bool has_ranks(int own) const { return left_of(own) > 0; }

  /* Where a lane stores 16 bytes of a line of a slab: of the line `i` + lane / UNITS, at i times
   * `stride` bytes from `to` if i is below `end`. Of ranks, `there` are not zero, and `columns` is
   * how many columns of the gradient there are from the first of the lane on. */
  struct Lines {
    T *to;
    uint32_t stride;
    int end, there, columns;
  };
  /* Those of ranks of a slice, by column of the tile, or of columns. */
  __device__ __forceinline__ Lines lines_of(int slice, int first_column) const {
    const int line = lane() / UNITS, unit = lane() % UNITS * 8;
    const int first_rank = tile.rank - slice * p.padded_rank; // of the tile's first column
    const int r = first_rank + (TRANSPOSED ? unit : line);
    const int column = first_column + (TRANSPOSED ? line : unit);
    const moelora_gradient &g = p.gradient[slice];
    T *const gradient = (T *)g.data + part.to[0] * g.stride_l + part.to[1] * g.stride_e;
    Lines lines = {gradient + (TRANSPOSED ? column * g.stride_i + r : r * g.stride_i + column),
                   (uint32_t)(g.stride_i * (int)sizeof(T)), 0, 0, p.columns - column};
    if constexpr (TRANSPOSED)
      lines.end = r < p.max_rank ? lines.columns : 0;
    else
      lines.end = lines.columns > 0 ? p.max_rank - r : 0, lines.there = ranks_left[slice] - line;
    return lines;
  }

  /* To the next slab of this warp. */
  __device__ __forceinline__ void advance(Lines &lines) const {
    constexpr int COLUMNS = S::WARPS * S::COLUMNS;
    if constexpr (TRANSPOSED) {
      lines.to += COLUMNS * p.gradient[0].stride_i, lines.end -= COLUMNS;
    } else {
      lines.to += COLUMNS, lines.columns -= COLUMNS;
      lines.end = lines.columns > 0 ? lines.end : 0;
    }
  }

  /* Stores a slab through the stage whose rows the last pass has multiplied. */
  __device__ __forceinline__ void store(const Lines &of_first, int slab, int step,
                                        const float (&rAcc)[M_TILES][N_TILES][4]) const {
    constexpr int TILES = TRANSPOSED || M_TILES == 1 ? 1 : 2;
    constexpr int PITCH = TRANSPOSED ? S::RANKS_PITCH : S::WIDE_PITCH;
    static_assert(16 * TILES * PITCH <= S::ROWS * S::WIDE_PITCH, "they fit into a stage");
    const uint32_t sMine = sWide(step) + lane() / 4 * PITCH + lane() % 4 * 4;
    const uint32_t sLines = sWide(step) + lane() / UNITS * PITCH + lane() % UNITS * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m += TILES) {
      __syncwarp(); // all lanes have read the stage
#pragma unroll
      for (int i = 0; i < 2 * TILES; i++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
          if (has_ranks(TRANSPOSED ? 8 * n : 16 * m + 8 * i)) {
            const float *two = &rAcc[m + i / 2][n][i % 2 * 2];
            store_shared_4(sMine + 8 * i * PITCH + 16 * n, pack2<T>(two[0], two[1]));
          }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const bool second = !TRANSPOSED && p.slices > 1 && 16 * (m + i) >= split;
        store_lines(second ? lines_of(1, column_of(slab)) : of_first, 16 * (m + i),
                    sLines + 16 * i * PITCH);
      }
    }
  }
  /* Stores 16 lines from `from` on. */
  __device__ __forceinline__ void store_lines(const Lines &lines, int from, uint32_t sLines) const {
    constexpr int PITCH = TRANSPOSED ? S::RANKS_PITCH : S::WIDE_PITCH;
#pragma unroll
    for (int j = 0; j < 16; j += TURN) {
      if (from + j >= lines.end)
        continue;
      uint4 v = load_shared_16(sLines + j * PITCH);
      const int count = TRANSPOSED ? left_of(lane() % UNITS * 8) : lines.there - from - j;
      if (TRANSPOSED ? count < 8 : count <= 0)
        v = first_elements(v, TRANSPOSED ? count : 0);
      store_global_16((void *)row_address(lines.to, from + j, lines.stride), v);
    }
  }

  /* All slabs of this warp; the rows of ranks and their indices are there. */
  __device__ __forceinline__ void run() const {
    const int all = slabs(), each = passes();
    Lines lines = lines_of(0, column_of(0));
    if (each == 0) { // zeros
      float rAcc[M_TILES][N_TILES][4] = {};
#pragma unroll 1
      for (int slab = 0; slab < all; slab++, advance(lines))
        store(lines, slab, 0, rAcc);
      return;
    }
    int slab = 0, pass = 0, ahead_slab = 0, ahead_pass = 0;
    const auto load_next = [&](int step) {
      if (ahead_slab < all)
        load(ahead_slab, ahead_pass, step);
      copy_async_commit();
      if (++ahead_pass == each)
        ahead_pass = 0, ahead_slab++;
    };
#pragma unroll 1
    for (int step = 0; step < S::STAGES - 1; step++)
      load_next(step);
    float rAcc[M_TILES][N_TILES][4] = {};
#pragma unroll 1
    for (int step = 0; slab < all; step++) {
      // Wait for the stage, and until all lanes have read the previous one.
      copy_async_wait<S::STAGES - 2>();
      __syncwarp();
      load_next(step + S::STAGES - 1);
      multiply(pass, step, rAcc);
      if (++pass < each)
        continue;
      store(lines, slab, step, rAcc);
      pass = 0, slab++, advance(lines);
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            rAcc[m][n][i] = 0.f;
    }
    copy_async_wait<0>();
  }
};

/* Copies the rows of ranks to shared memory and scales them. Called by all threads. */
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

/* Persistent kernel over the tiles of all pairs with few rows. */
template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, S::CTAS)
    gradients_few(const __grid_constant__ GradientLaunch s) {
  extern __shared__ __align__(128) char memory[];
  typename S::SharedStorage &shared = *(typename S::SharedStorage *)memory;
  wait_for_previous_kernel();
  start_next_kernel();
  const GradientGroup &group = s.group[0];
  const int64_t all = (int64_t)group.parts.count[2] * group.few_tiles;
#pragma unroll 1
  for (int64_t work = blockIdx.x; work < all; work += gridDim.x) {
    const int number = divide_work(work, group.few_tiles);
    const moelora_gradient_part part = group.parts.few[number];
    GradientTile tile;
    const GradientProduct &p =
        find_few_tile<S::RANKS>(group, (int)(work - (int64_t)number * group.few_tiles), &tile);
    if (part.to[1] < 0)
      continue;
    const int rank = part.count > 0 ? min(part.rank, p.max_rank) : 0;
    if (part.count > 0)
      load_few_ranks<T, S>(s, p, part, tile, rank, shared);
    if (p.transposed)
      FewTile<T, S, true>(p, part, tile, shared, rank, group.few_columns).run();
    else
      FewTile<T, S, false>(p, part, tile, shared, rank, group.few_columns).run();
    __syncthreads(); // all warps have read the rows
  }
}

#endif
