/* Shrink: xa[p, slice, r] = round(s[l] * sum over k of x[p, k] A[slice][l, e, r, k])
 *
 * A work item is up to `part` rows of one segment of a window by up to RANKS rows of A. The rows of
 * A of all slices are concatenated, each slice padded to a multiple of 16. The CTAs of a window
 * take its items in turn.
 *
 * Long segments of large batches are left to shrink/segments.cu and segments_sm90.cu. */
#include "cuda/delta/rows.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/shrink/product.cuh"
#include "cuda/variant_ids.h"

namespace {

template <class S> constexpr int kRows = 2 * S::THREADS; // maximum rows of a window: two per thread

struct DeltaShrinkParams {
  delta_shrink s;
  int32_t part, shares;
};

/* An item: rows [low, high) of a window by up to RANKS padded ranks of all slices, from `first`
 * on. */
struct ShrinkItem {
  int low, high, first, adapter, expert, rank;
};

/* Returns the number of padded ranks of all slices. */
__device__ __forceinline__ int columns_of(const delta_shrink &s, int rank) {
  return moelora_padded_rank(rank) * s.lora.num_slices;
}

/* Returns the number of items that share a part of a segment; each has RANKS ranks. */
template <int RANKS>
__device__ __forceinline__ int columns_of_items(const delta_shrink &s, int rank) {
  return ceil_divide(columns_of(s, rank), RANKS);
}

/* Returns item `number`; a segment is split evenly into parts of up to `part` rows. Called by one
 * warp. */
template <int RANKS, int ROWS>
__device__ __forceinline__ ShrinkItem find_item(const delta_shrink &s, int part,
                                                const Window<ROWS> &w, int number) {
  const int segment = w.segment_of(number), j = number - w.first[segment];
  const int low = w.low[segment], high = w.high[segment], rank = w.rank[low];
  const int columns = columns_of_items<RANKS>(s, rank);
  const int tokens = ceil_divide(ceil_divide(high - low, ceil_divide(high - low, part)), 8) * 8;
  const int from = low + j / columns * tokens;
  return {from, min(from + tokens, high), j % columns * RANKS, w.adapter[low], w.expert[low], rank};
}

/* Stores eight ranks of a row from rank r on, except those from `end` on. */
template <class T>
__device__ __forceinline__ void store_ranks(T *xa, uint4 ranks, int r, int end, bool vectors) {
  if (vectors && r + 8 <= end) {
    *(uint4 *)(xa + r) = ranks;
    return;
  }
  const uint32_t words[4] = {ranks.x, ranks.y, ranks.z, ranks.w};
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (r + j < end)
      ((uint16_t *)xa)[r + j] = (uint16_t)(words[j / 2] >> j % 2 * 16);
}

template <class T>
__device__ __forceinline__ T *row_of_xa(const delta_shrink &s, uint32_t row, int slice) {
  const uint32_t top_k = s.rows.routes.top_k;
  return (T *)s.xa + slice * s.xa_stride[0] + row / top_k * s.xa_stride[1] +
         row % top_k * s.xa_stride[2];
}

/* Clears xa of the item's rows from the padded true rank to max_rank, if the item is the first one
 * of these rows. Called by all threads. */
template <class T, int THREADS>
__device__ __forceinline__ void clear_ranks(const delta_shrink &s, const ShrinkItem &item,
                                            const int32_t *rows) {
  const int width = moelora_padded_rank(item.rank), max_rank = s.lora.max_rank;
  if (item.first > 0 || width >= max_rank)
    return;
  const int rank_vectors = ceil_divide(max_rank - width, 8), slices = s.lora.num_slices;
  for (int i = threadIdx.x; i < (item.high - item.low) * slices * rank_vectors; i += THREADS)
    store_ranks(
        row_of_xa<T>(s, rows[item.low + i / rank_vectors / slices], i / rank_vectors % slices),
        make_uint4(0, 0, 0, 0), width + i % rank_vectors * 8, max_rank, s.xa_vectors);
}

/* Position of a CTA: an item of a work unit, which is a share of a window. */
struct WorkCursor {
  int work_unit, item;
};

/* A warp's item and the CTA's position, in shared memory to save registers. */
struct WarpItem {
  ShrinkItem item;
  WorkCursor cursor;
};

template <class S> struct DeltaShrinkShared {
  Sums<S> sums;
  Window<kRows<S>> window;
  int32_t x[kRows<S>]; // row of x for each row of the window
  int work_units;
  WarpItem items[S::WARPS];
};

template <class S> struct WindowOperands {
  const delta_shrink &s;
  const int32_t (&x_rows)[kRows<S>];
  const ShrinkItem &item;

  __device__ __forceinline__ int columns() const { return columns_of(s, item.rank); }

  template <class T, int M, int N>
  __device__ __forceinline__ void find_a(Rows<T, S, M, N> &rows, int column, int columns,
                                         int k) const {
    rows.find_a(s.lora, item.adapter, item.expert, item.rank, column, columns, k);
  }

  template <class T, int N> __device__ __forceinline__ void find_x(const T *(&x)[N], int k) const {
    const int lane = opaque(threadIdx.x % 32);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const int i = min(item.low + n * 8 + lane / 4, item.high - 1);
      x[n] = (const T *)s.x + x_rows[i] * s.x_stride + k;
    }
  }
};

/* Adds the partial sums, scales, rounds and stores them. Called by all threads. */
template <class T, class S>
__device__ __forceinline__ void store(const DeltaShrinkParams &p, const ShrinkItem &item,
                                      DeltaShrinkShared<S> &shared) {
  constexpr int RANK_VECTORS = S::RANKS / 8;
  const delta_shrink &s = p.s;
  const int thread = opaque(threadIdx.x); // opaque: derived values are not kept between items
  const int width = moelora_padded_rank(item.rank), max_rank = s.lora.max_rank;
  const int count = (item.high - item.low) * RANK_VECTORS;
  const float scaling = s.scalings ? s.scalings[item.adapter] : 1.f;
  for (int i = thread; i < count; i += S::THREADS) {
    const int token = i / RANK_VECTORS, column = i % RANK_VECTORS * 8;
    const int slice = (item.first + column) / width, r = (item.first + column) % width;
    if (slice >= s.lora.num_slices)
      continue;
    float sum[8] = {};
    add_spans<S>(sum, shared.sums, token, column);
    store_ranks(row_of_xa<T>(s, shared.window.row[item.low + token], slice),
                round_ranks<T>(sum, scaling, r, item.rank), r, max_rank, s.xa_vectors);
  }
  clear_ranks<T, S::THREADS>(s, item, shared.window.row);
}

template <class T, class S, bool VECTORS>
__global__ void __launch_bounds__(S::THREADS, kResidentWarps / S::WARPS)
    shrink_rows(const __grid_constant__ DeltaShrinkParams p) {
  extern __shared__ __align__(16) char memory[];
  DeltaShrinkShared<S> &shared = *(DeltaShrinkShared<S> *)memory;
  const Window<kRows<S>> &w = shared.window;
  follow_previous_kernel();

  shared.work_units = (int)count_windows(p.s.rows) * p.shares;
  WarpItem &own = shared.items[threadIdx.x / 32];
  const ShrinkItem &item = own.item;
  for (WorkCursor at = {(int)blockIdx.x, 0}; at.work_unit < shared.work_units;
       at.work_unit += gridDim.x) {
    load_window<S::THREADS>(
        p.s.rows, at.work_unit / p.shares, shared.window,
        [&](int i, uint32_t row) { shared.x[i] = row / (uint32_t)p.s.x_divisor; },
        [&](int rows, int rank) {
          return ceil_divide(rows, p.part) * columns_of_items<S::RANKS>(p.s, rank);
        });
    at.item = at.work_unit % p.shares;
#pragma unroll 1
    while (at.item < w.items) {
      const ShrinkItem found = find_item<S::RANKS>(p.s, p.part, w, at.item);
      __syncwarp(); // the previous item is no longer read
      if (threadIdx.x % 32 == 0)
        own = {found, at};
      __syncwarp();
      const int warp = threadIdx.x / 32;
      multiply_tokens<T, S, VECTORS, S::TILES>(
          item.high - item.low, WindowOperands<S>{p.s, shared.x, item},
          item.first + warp / S::DEPTHS * S::TEAM_RANKS, p.s.k, warp % S::DEPTHS, shared.sums);
      store<T, S>(p, item, shared);
      at = own.cursor; // kept here to save registers
      at.item += p.shares;
    }
  }
}

/* ---- launch ---- */

template <class T, class S, bool VECTORS>
moelora_status launch(const delta_shrink &s, const moelora_shrink_plan &plan,
                      const moelora_exec *exec) {
  DeltaShrinkParams p = {s, plan.part, plan.shares};
  p.s.rows.window = plan.window;
  constexpr size_t bytes = sizeof(DeltaShrinkShared<S>);
  static_assert(bytes <= kPortableShared, "a CTA's shared memory");
  return launch_kernel<shrink_rows<T, S, VECTORS>>("delta_shrink", plan.work, S::THREADS, bytes,
                                                   exec, p);
}

/* Returns the arguments of the whole-segment kernels. */
moelora_shrink_launch whole_segments(const delta_shrink &s) {
  const moelora_routes &routes = s.rows.routes;
  moelora_shrink_launch l = {};
  l.schedule.blocks.rows = 1;
  l.schedule.blocks.cluster = 1;
  l.schedule.blocks.sorted_ids = (int32_t *)s.rows.row;
  l.schedule.blocks.segments = (moelora_segment *)s.rows.segments;
  l.schedule.num_rows = (int32_t)routes.num_rows;
  l.schedule.num_experts = routes.num_experts;
  l.tokens.x = s.x;
  l.tokens.stride = s.x_stride;
  l.tokens.divisor = moelora_divisor_of(s.x_divisor);
  l.tokens.k = s.k;
  l.adapters.lora = s.lora;
  l.schedule.max_loras = routes.max_loras;
  l.adapters.xa_slice = s.xa_stride[0];
  l.adapters.xa_stride = s.xa_stride[2];
  l.scalings = s.scalings;
  l.unit = 1.f;
  l.xa = s.xa;
  l.by_row = true;
  return l;
}

} // namespace

moelora_status delta_launch_shrink(const delta_shrink *s, const moelora_shrink_plan *plan,
                                   const moelora_exec *exec) {
  if (!plan->variant)
    return MOELORA_OK;
  if (plan->variant->method == MOELORA_SHRINK_SEGMENTS) {
    const moelora_shrink_launch segments = whole_segments(*s);
    return moelora_cuda_shrink(&segments, plan, exec);
  }
  switch (plan->variant->id) {
#define LAUNCH_BLOCKS(...)
#define LAUNCH_WINDOWS(NAME, T, TILES, TEAMS, SPANS, TOKENS, CTAS, ELEMENTS)                       \
  case CUDA_##NAME:                                                                                \
    return launch<T, Shape<TILES, TEAMS, SPANS, TOKENS, CTAS * TEAMS * SPANS>, !ELEMENTS>(         \
        *s, *plan, exec);
#define MOELORA_CUDA_SHRINK(STEM, METHOD, ...)                                                     \
  MOELORA_BOTH_DTYPES(LAUNCH_##METHOD, shrink, STEM, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_WINDOWS
#undef LAUNCH_BLOCKS
  }
  return moelora_no_kernel(plan->variant->name, "shrinks no windows");
}
