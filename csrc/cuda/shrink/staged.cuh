/* Shrink of long segments with both operands in shared memory.
 *
 * A work item is up to TOKENS rows of x by up to RANKS rows of A, over all of K. Results equal
 * those of shrink/product.cuh bit for bit: an mma adds the same 16 elements of K, accumulation
 * restarts after every `span` of K, and the sums of spans are added in order.
 *
 * Copies run STAGES - 1 k steps ahead of the products, also across items, so that the pipeline does
 * not drain between items.
 *
 * A stage holds TOKENS rows of x and RANKS rows of A, each with 64 elements of K; 16-byte chunk c
 * of row i is at c ^ i % 8, so that ldmatrix reads eight rows without bank conflicts. Rows that an
 * item lacks are not loaded: stale memory affects only their rows and columns of the product, which
 * are not stored. K beyond the end is zero in both. */
#pragma once

#include "cuda/shrink/product.cuh"

/* An SM holds two CTAs, kResidentWarps warps in all: one CTA multiplies while the other waits. */
template <int RANKS_> struct Staged {
  static constexpr int TOKENS = 128, RANKS = RANKS_, WARPS = 8, THREADS = 32 * WARPS;
  static constexpr int CTAS = kResidentWarps / WARPS;
  static constexpr int STAGES = 4;                                   // limited by shared memory
  static constexpr int TILES = TOKENS / 16 / (WARPS / (RANKS / 32)); // 16-row tiles per warp
  static constexpr int STAGE_BYTES = (TOKENS + RANKS) * 128;
};

__device__ __forceinline__ int staged_chunk(int row, int chunk) {
  return row * 128 + ((chunk ^ row % 8) << 4);
}

template <class C> using Stages = char[C::STAGES][C::STAGE_BYTES];

/* x [, K], rows `stride` elements apart. */
struct StagedRows {
  const void *x;
  int64_t stride;
  int depth, span; // span: a multiple of kLine
};

/* Returns the row of A for rank `column` among the padded ranks of all slices; NULL if none. */
template <class T>
__device__ __forceinline__ const T *find_row_of_a(const moelora_factors &lora, int adapter,
                                                  int expert, int rank, int column) {
  const int width = moelora_padded_rank(rank), slice = column / width, r = column - slice * width;
  if (slice >= lora.num_slices || r >= rank)
    return nullptr;
  return factor_row<T>(lora.a[slice], adapter, expert, r);
}

/* A thread's copies: chunk thread % 8 of rows thread / 8 + 32 i of an item. */
template <class T, class C> struct StagedLoader {
  static constexpr int ROWS = C::THREADS / 8;
  int x[C::TOKENS / ROWS]; // row of x; -1: none
  const T *a[C::RANKS / ROWS];

  template <class Item> __device__ __forceinline__ void start(const Item &item) {
    const int row = threadIdx.x / 8;
#pragma unroll
    for (int i = 0; i < C::TOKENS / ROWS; i++)
      x[i] = row + i * ROWS < item.tokens() ? item.x_row(row + i * ROWS) : -1;
#pragma unroll
    for (int i = 0; i < C::RANKS / ROWS; i++)
      a[i] = item.template row_of_a<T>(row + i * ROWS);
  }

  __device__ __forceinline__ void load(const StagedRows &rows, uint32_t stage, int first) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8, k = first + chunk * 8;
    const uint32_t to = stage + staged_chunk(row, chunk);
    const int from = k < rows.depth ? k : 0, bytes = k < rows.depth ? 16 : 0;
    static_assert(ROWS % 8 == 0, "a pass keeps the row's place in the swizzle");
#pragma unroll
    for (int i = 0; i < C::RANKS / ROWS; i++)
      copy_async_16(to + (C::TOKENS + i * ROWS) * 128, a[i] + from, bytes, a[i] != nullptr);
#pragma unroll
    for (int i = 0; i < C::TOKENS / ROWS; i++)
      copy_async_16(to + i * ROWS * 128,
                    row_address((const T *)rows.x + from, x[i], (uint32_t)rows.stride * sizeof(T)),
                    bytes, x[i] >= 0);
  }
};

/* A warp's part of an item: columns `column` to `column` + 31 of every step-th tile of 16 rows
 * from first_tile on. With fewer columns, more warps share the rows. */
template <class T, class C> struct Products {
  int column, first_tile, step;
  using Tiles = float[C::TILES][2][2][4]; // [tile][16 columns][8 columns][accumulators of an mma]
  Tiles d, sum;                           // of this span, of the previous spans

  __device__ __forceinline__ explicit Products(int columns) {
    const int warp = threadIdx.x / 32, across = min(columns, C::RANKS) <= 32   ? 1
                                                : min(columns, C::RANKS) <= 64 ? 2
                                                                               : C::RANKS / 32;
    step = C::WARPS / across;
    column = warp / step * 32;
    first_tile = warp % step;
  }

  static __device__ __forceinline__ void clear(Tiles &tiles) {
#pragma unroll
    for (int i = 0; i < C::TILES * 16; i++)
      tiles[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0.f;
  }

  __device__ __forceinline__ void begin() { clear(d), clear(sum); }

  __device__ __forceinline__ void end_span() {
#pragma unroll
    for (int i = 0; i < C::TILES * 16; i++)
      sum[i / 16][i / 8 % 2][i / 4 % 2][i % 4] += d[i / 16][i / 8 % 2][i / 4 % 2][i % 4];
    clear(d);
  }

  __device__ __forceinline__ void add(uint32_t stage, int tokens) {
    const int lane = threadIdx.x % 32;
#pragma unroll 2 // with full unrolling, registers spill
    for (int chunk = 0; chunk < kLine / 8; chunk += 2) {
      uint32_t b[2][4]; // per 16 columns: two halves of K for the first eight, then for the others
#pragma unroll
      for (int j = 0; j < 2; j++)
        load_matrix_x4(b[j],
                       stage + staged_chunk(C::TOKENS + column + j * 16 + lane / 16 * 8 + lane % 8,
                                            chunk + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < C::TILES; i++) {
        const int first = 16 * (first_tile + i * step);
        if (first >= tokens)
          break;
        uint32_t a[4];
        load_matrix_x4(a, stage + staged_chunk(first + lane % 16, chunk + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; j++)
          mma_16816<T>(d[i][j / 2][j % 2], a, &b[j / 2][j % 2 * 2]);
      }
    }
  }

  /* Calls visit(token, column, sums of columns `column` and `column` + 1) for this lane's sums. */
  template <class Visit> __device__ __forceinline__ void for_each(int tokens, Visit visit) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < C::TILES; i++)
#pragma unroll
      for (int m8 = 0; m8 < 2; m8++) {
        const int token = 16 * (first_tile + i * step) + m8 * 8 + lane / 4;
        if (token >= tokens)
          continue;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            visit(token, column + j * 16 + half * 8 + lane % 4 * 2, sum[i][j][half] + 2 * m8);
      }
  }
};

/* Runs items 0 to `items` - 1: find(number) returns an item with tokens(), columns(), x_row(token)
 * and row_of_a(column); store(number, products) stores its results. Called by all threads. */
template <class T, class C, class Find, class Store>
__device__ __forceinline__ void run_staged(const StagedRows &rows, const Stages<C> &stages,
                                           int items, Find find, Store store) {
  StagedLoader<T, C> loader;
  int loaded = 0, loaded_k = 0;
  const auto load = [&](int stage) {
    if (loaded < items) {
      if (loaded_k == 0)
        loader.start(find(loaded));
      loader.load(rows, shared_address(stages[stage]), loaded_k);
      loaded_k += kLine;
      if (loaded_k >= rows.depth) {
        loaded_k = 0;
        loaded++;
      }
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int ahead = 0; ahead < C::STAGES - 1; ahead++)
    load(ahead);

  int stage = 0;
#pragma unroll 1
  for (int number = 0; number < items; number++) {
    const auto item = find(number);
    const int columns = item.columns();
    Products<T, C> products(columns);
    const int tokens = products.column < columns ? item.tokens() : 0;
    products.begin();
#pragma unroll 1
    for (int k = 0, end = rows.span; k < rows.depth; k += kLine) {
      copy_async_wait<C::STAGES - 2>();
      __syncthreads();
      load(stage == 0 ? C::STAGES - 1 : stage - 1);
      if (tokens > 0)
        products.add(shared_address(stages[stage]), tokens);
      if (k + kLine == end)
        products.end_span(), end += rows.span;
      stage = stage + 1 == C::STAGES ? 0 : stage + 1;
    }
    products.end_span();
    store(number, products);
  }
}
