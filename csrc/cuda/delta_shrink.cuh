/* What the delta shrinks share: items of a window, and rows of h. */
#ifndef MOELORA_CUDA_DELTA_SHRINK_CUH
#define MOELORA_CUDA_DELTA_SHRINK_CUH

#include "delta_rows.cuh"
#include "shrink_product.cuh"

/* Columns of A from `first` on, as many as an item takes, of rows [low, high) of a window. */
struct ShrinkItem {
  int low, high, first, adapter, expert, rank;
};

/* Columns of A of all slices together. */
__device__ __forceinline__ int columns_of(const delta_shrink &s, int rank) {
  return moelora_padded_rank(rank) * s.lora.num_slices;
}

/* Items that RANKS columns at a time make of each part of a segment. */
template <int RANKS>
__device__ __forceinline__ int columns_of_items(const delta_shrink &s, int rank) {
  return ceil_divide(columns_of(s, rank), RANKS);
}

/* A warp; parts of a segment have up to `part` rows, all about the same number. */
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

/* Eight ranks of a row from r on, below `end`. */
template <class T>
__device__ __forceinline__ void store_ranks(T *h, uint4 ranks, int r, int end, bool eights) {
  if (eights && r + 8 <= end) {
    *(uint4 *)(h + r) = ranks;
    return;
  }
  const uint32_t words[4] = {ranks.x, ranks.y, ranks.z, ranks.w};
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (r + j < end)
      ((uint16_t *)h)[r + j] = (uint16_t)(words[j / 2] >> j % 2 * 16);
}

template <class T>
__device__ __forceinline__ T *row_of_h(const delta_shrink &s, uint32_t row, int slice) {
  const uint32_t top_k = s.rows.routes.top_k;
  return (T *)s.h + slice * s.h_stride[0] + row / top_k * s.h_stride[1] +
         row % top_k * s.h_stride[2];
}

/* Zeros from the true rank, rounded up to 16, to the largest one: the first item of some rows. All
 * threads come here. */
template <class T, int THREADS>
__device__ __forceinline__ void clear_ranks(const delta_shrink &s, const ShrinkItem &item,
                                            const int32_t *rows) {
  const int width = moelora_padded_rank(item.rank), max_rank = s.lora.max_rank;
  if (item.first > 0 || width >= max_rank)
    return;
  const int eights = ceil_divide(max_rank - width, 8), slices = s.lora.num_slices;
  for (int i = threadIdx.x; i < (item.high - item.low) * slices * eights; i += THREADS)
    store_ranks(row_of_h<T>(s, rows[item.low + i / eights / slices], i / eights % slices),
                make_uint4(0, 0, 0, 0), width + i % eights * 8, max_rank, s.eights);
}

#endif
