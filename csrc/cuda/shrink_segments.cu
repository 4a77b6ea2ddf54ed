/* Shrink of long segments, each as the alignment lists it, over whatever blocks it lies in.
 *
 * Segments are laid end to end, each as long as what it reads: its rows of x and, for every TOKENS
 * of them, its rows of A. Every CTA takes an equal part of that length. A segment that lies in
 * several parts is cut between rows, in sixteens; what a part has of it is cut evenly into items of
 * up to TOKENS rows. How rows are cut changes no bit: each is multiplied by itself, over all of the
 * depth, in the same order. */
#include "kernel_launch.cuh"
#include "shrink_staged.cuh"
#include "tile.cuh"
#include "warp.cuh"

namespace {

constexpr int kItems = 64; // of a CTA, listed at once
constexpr int kCut = 16;   // rows

struct Params {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  void *hl;
};

/* Rows [low, high) of a segment by columns of A from `first` on. */
struct Item {
  int expert, pair, position, share, low, high, first;
};

template <class C> struct Shared {
  Stages<C> stages;
  Item items[kItems];
  int64_t warp_length[C::WARPS];
  int warp_items[C::WARPS];
};

/* Sum of `value` over the threads before this one, and over all of them; one barrier. */
template <int WARPS, class Value>
__device__ __forceinline__ Value sum_before(Value value, Value (&warp_sum)[WARPS], Value *all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Value inclusive = warp_inclusive_sum(value);
  if (lane == 31)
    warp_sum[warp] = inclusive;
  __syncthreads();
  Value before = 0;
  *all = 0;
  for (int w = 0; w < WARPS; w++) {
    before += w < warp ? warp_sum[w] : 0;
    *all += warp_sum[w];
  }
  return before + inclusive - value;
}

/* The part of the segments' length that a CTA takes. */
struct Part {
  int64_t begin, end;
};

/* What a segment reads, in rows. */
template <class C> struct Length {
  int columns, chunks;
  int64_t rows = 0;

  __device__ __forceinline__ Length(const moelora_gemm_launch &g, const moelora_segment &s) {
    if (s.pair < 0 || s.count == 0)
      return;
    columns = columns_of(g, s.pair);
    chunks = ceil_divide(columns, C::RANKS);
    rows = (int64_t)s.count * chunks + (int64_t)ceil_divide(s.count, C::TOKENS) * columns;
  }

  /* The first row of the segment, which begins at `begin`, that lies behind `cut`. */
  __device__ __forceinline__ int row_at(const moelora_segment &s, int64_t begin,
                                        int64_t cut) const {
    if (cut <= begin)
      return 0;
    if (cut >= begin + rows)
      return s.count;
    return (int)((cut - begin) * s.count / rows / kCut) * kCut;
  }
};

/* visit(segment's number, segment, low, high, chunks) for what `part` has of this thread's
 * segments, of which `begin` is the first one's place. */
template <class C, class Visit>
__device__ __forceinline__ void for_each_segment(const moelora_gemm_launch &g, int first, int last,
                                                 int64_t begin, const Part &part, Visit visit) {
  for (int i = first; i < last && begin < part.end; i++) {
    const moelora_segment s = g.blocks.segments[i];
    const Length<C> length(g, s);
    if (begin + length.rows > part.begin && length.rows > 0) {
      const int low = length.row_at(s, begin, part.begin);
      const int high = length.row_at(s, begin, part.end);
      if (low < high)
        visit(i, s, low, high, length.chunks);
    }
    begin += length.rows;
  }
}

struct StagedItem {
  const moelora_gemm_launch &g;
  const Item &item;

  __device__ __forceinline__ int tokens() const { return item.high - item.low; }
  __device__ __forceinline__ int columns() const { return columns_of(g, item.pair) - item.first; }
  __device__ __forceinline__ int position(int token) const {
    const int rows = g.blocks.rows, block = item.position / rows * rows;
    const int row = item.position - block + item.low + token; // from the block's first on
    return block + row / item.share * rows + row % item.share;
  }
  __device__ __forceinline__ int x_row(int token) const {
    const int at = position(token);
    return g.x_divisor ? (uint32_t)g.blocks.sorted_ids[at] / (uint32_t)g.x_divisor : at;
  }
  template <class T> __device__ __forceinline__ const T *row_of_a(int column) const {
    return find_row_of_a<T>(g.lora, item.pair / kRanks, item.expert, rank_of(g, item.pair),
                            item.first + column);
  }
};

template <class T, class C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    shrink_segments(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  Shared<C> &shared = *(Shared<C> *)memory;
  const moelora_gemm_launch &g = p.g;
  wait_for_previous_kernel();
  start_next_kernel();

  const int ways = g.max_loras + 1, segments = g.num_experts * ways;
  const int run = ceil_divide(segments, C::THREADS);
  const int first = min((int)threadIdx.x * run, segments), last = min(first + run, segments);
  int64_t own = 0, all;
  for (int i = first; i < last; i++)
    own += Length<C>(g, g.blocks.segments[i]).rows;
  const int64_t begin = sum_before(own, shared.warp_length, &all);
  const Part part = {all * blockIdx.x / gridDim.x, all * (blockIdx.x + 1) / gridDim.x};

  int own_items = 0, items;
  for_each_segment<C>(g, first, last, begin, part,
                      [&](int, const moelora_segment &, int low, int high, int chunks) {
                        own_items += ceil_divide(high - low, C::TOKENS) * chunks;
                      });
  const int before = sum_before(own_items, shared.warp_items, &items);

  const auto find_item = [&](int number) { return StagedItem{g, shared.items[number]}; };
  const auto store = [&](int number, const Products<T, C> &products) {
    const StagedItem at = find_item(number);
    const int adapter = at.item.pair / kRanks, rank = rank_of(g, at.item.pair);
    const int width = moelora_padded_rank(rank);
    const float scaling = p.scalings ? p.scalings[adapter] : 1.f;
    products.for_each(at.tokens(), [&](int token, int column, const float *sum) {
      const int slice = (at.item.first + column) / width, r = (at.item.first + column) % width;
      if (slice < g.lora.num_slices)
        *(uint32_t *)((T *)p.hl + (int64_t)at.position(token) * g.hl_stride + slice * g.hl_slice +
                      r) =
            pack2<T>(r < rank ? scaling * sum[0] : 0.f, r + 1 < rank ? scaling * sum[1] : 0.f);
    });
  };
  for (int listed = 0; listed < items; listed += kItems) {
    int number = before - listed;
    for_each_segment<C>(g, first, last, begin, part,
                        [&](int i, const moelora_segment &s, int low, int high, int chunks) {
                          const int cuts = ceil_divide(high - low, C::TOKENS);
                          const int rows = ceil_divide(high - low, kCut * cuts) * kCut;
                          for (int j = 0; j < cuts * chunks; j++, number++) {
                            const int from = low + j / chunks * rows;
                            if (number >= 0 && number < kItems)
                              shared.items[number] = {i / ways,
                                                      s.pair,
                                                      s.position,
                                                      s.share,
                                                      from,
                                                      min(from + rows, high),
                                                      j % chunks * C::RANKS};
                          }
                        });
    __syncthreads();
    run_staged<T, C>({g.x, g.x_stride, g.k}, shared.stages, 0, min(items - listed, kItems), 1,
                     find_item, store);
    __syncthreads();
  }
}

template <class T, class C> moelora_status launch(const Params &p, const moelora_exec *exec) {
  const int64_t ctas = (int64_t)moelora_cuda_num_sms(exec->device_index) * C::CTAS;
  return launch_kernel<shrink_segments<T, C>>("shrink_segments", ctas, C::THREADS,
                                              sizeof(Shared<C>), exec, p);
}

template <class T> moelora_status launch_as(const Params &p, const moelora_exec *exec) {
  return p.g.hl_stride <= 32   ? launch<T, Staged<32, 256>>(p, exec)
         : p.g.hl_stride <= 64 ? launch<T, Staged<64, 256>>(p, exec)
                               : launch<T, Staged<128, 256>>(p, exec);
}

} // namespace

/* Enough rows in a segment that A is not all that counts, and enough for every CTA that the chip
 * holds. */
bool moelora_cuda_fits_segments(const moelora_gemm_launch *g, int64_t segments,
                                const moelora_exec *exec) {
  using C = Staged<128, 256>; // the one that takes most
  const int64_t ctas = (int64_t)moelora_cuda_num_sms(exec->device_index) * C::CTAS;
  return g->blocks.segments && g->num_rows >= kLongSegment * segments &&
         g->num_rows >= 128 * ctas &&
         moelora_cuda_shared_bytes(exec->device_index) >= (int64_t)sizeof(Shared<C>);
}

moelora_status moelora_cuda_shrink_segments(const moelora_gemm_launch *g,
                                            const float *lora_scalings, moelora_dtype dtype,
                                            void *hl, const moelora_exec *exec) {
  const Params p = {*g, lora_scalings, hl};
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(p, exec) : launch_as<__half>(p, exec);
}
