/* Shrink of long segments: h[p, slice, r] = round(s[l] * sum over k of x[p, k] A[slice][l, e, r,
 * k])
 *
 * An item is up to TOKENS rows of one segment of a window and up to RANKS columns of A, slice after
 * slice, each slice as many as its true rank rounded up to 16. A CTA takes the items of its window
 * one after the other. Neighbouring windows are walked in opposite directions: both parts of a
 * segment that lies in two read A at about the same time. */
#include "delta_shrink.cuh"
#include "kernel_launch.cuh"
#include "shrink_staged.cuh"

namespace {

constexpr int kWindow = 512;

template <class C> struct Shared {
  Stages<C> stages;
  Window<kWindow> window;
  int32_t x[kWindow]; // row of x that belongs to each row
};

struct StagedItem {
  const delta_shrink &s;
  const int32_t *x;
  ShrinkItem item;

  __device__ __forceinline__ int tokens() const { return item.high - item.low; }
  __device__ __forceinline__ int columns() const { return columns_of(s, item.rank) - item.first; }
  __device__ __forceinline__ int x_row(int token) const { return x[item.low + token]; }
  template <class T> __device__ __forceinline__ const T *row_of_a(int column) const {
    return find_row_of_a<T>(s.lora, item.adapter, item.expert, item.rank, item.first + column);
  }
};

/* Ranks r and r + 1 of a row, below `end`. */
template <class T>
__device__ __forceinline__ void store_pair(T *h, uint32_t pair, int r, int end, bool words) {
  if (words && r + 1 < end) {
    *(uint32_t *)(h + r) = pair;
    return;
  }
  if (r < end)
    ((uint16_t *)h)[r] = (uint16_t)pair;
  if (r + 1 < end)
    ((uint16_t *)h)[r + 1] = (uint16_t)(pair >> 16);
}

template <class T, class C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    shrink_rows(const __grid_constant__ delta_shrink s, int shares) {
  extern __shared__ __align__(128) char memory[];
  Shared<C> &shared = *(Shared<C> *)memory;
  const Window<kWindow> &w = shared.window;
  wait_for_previous_kernel();
  start_next_kernel();

  const int units = (int)count_windows(s.rows) * shares;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    load_window<C::THREADS>(
        s.rows, unit / shares, shared.window,
        [&](int i, uint32_t row) { shared.x[i] = row / (uint32_t)s.x_divisor; },
        [&](int rows, int rank) {
          return ceil_divide(rows, C::TOKENS) * columns_of_items<C::RANKS>(s, rank);
        });
    const auto find = [&](int number) {
      const int at = unit / shares % 2 ? w.items - 1 - number : number;
      return StagedItem{s, shared.x, find_item<C::RANKS>(s, C::TOKENS, w, at)};
    };
    const auto store = [&](int number, const Products<T, C> &products) {
      const ShrinkItem item = find(number).item;
      const int rank = item.rank, width = moelora_padded_rank(rank);
      const float scaling = s.scalings ? s.scalings[item.adapter] : 1.f;
      products.for_each(item.high - item.low, [&](int token, int column, const float *sum) {
        const int slice = (item.first + column) / width, r = (item.first + column) % width;
        if (slice < s.lora.num_slices)
          store_pair(row_of_h<T>(s, w.row[item.low + token], slice),
                     round_pair<T>(sum, scaling, r, rank), r, s.lora.max_rank, s.eights);
      });
      clear_ranks<T, C::THREADS>(s, item, w.row);
    };
    run_staged<T, C>({s.x, s.x_stride, s.k}, shared.stages, unit % shares, w.items, shares, find,
                     store);
  }
}

/* ---- launch ---- */

template <class T, class C> moelora_status launch(delta_shrink s, const moelora_exec *exec) {
  const int64_t columns = s.lora.num_slices * moelora_padded_rank(s.lora.max_rank);
  const int64_t ctas = (int64_t)moelora_cuda_num_sms(exec->device_index) * C::CTAS;
  int32_t shares = 1;
  const int64_t windows = delta_set_window(&s.rows, kWindow, C::TOKENS,
                                           (columns + C::RANKS - 1) / C::RANKS, ctas, &shares);
  return launch_kernel<shrink_rows<T, C>>("delta_shrink_fat", windows * shares, C::THREADS,
                                          sizeof(Shared<C>), exec, s, shares);
}

template <class T> moelora_status launch_as(const delta_shrink &s, const moelora_exec *exec) {
  const int32_t columns = s.lora.num_slices * moelora_padded_rank(s.lora.max_rank);
  return columns <= 32   ? launch<T, Staged<32>>(s, exec)
         : columns <= 64 ? launch<T, Staged<64>>(s, exec)
                         : launch<T, Staged<128>>(s, exec);
}

} // namespace

/* Some long segments for every CTA that the chip holds, which may have the shared memory. */
extern "C" bool delta_fits_fat_shrink(int64_t rows, int64_t segments, const moelora_exec *exec) {
  using C = Staged<128>; // the one that takes most
  const int64_t ctas = (int64_t)moelora_cuda_num_sms(exec->device_index) * C::CTAS;
  return rows >= kFatSegment * segments && rows >= ctas * C::TOKENS &&
         moelora_cuda_shared_bytes(exec->device_index) >= (int64_t)sizeof(Shared<C>);
}

extern "C" moelora_status delta_launch_fat_shrink(const delta_shrink *shrink, moelora_dtype dtype,
                                                  const moelora_exec *exec) {
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(*shrink, exec)
                               : launch_as<__half>(*shrink, exec);
}
