/* Shrink of long segments by mma.sync: xa[position, slice * xa_slice + r] as in blocks.cu. */
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/shrink/segments.cuh"
#include "cuda/shrink/staged.cuh"
#include "cuda/variant_ids.h"

namespace {

template <class C> struct SegmentsShared {
  Stages<C> stages;
  ItemList<C::TOKENS, C::RANKS, C::WARPS> list;
};

struct StagedItem {
  const moelora_shrink_launch &s;
  const SegmentItem &item;

  __device__ __forceinline__ int tokens() const { return item.tokens; }
  __device__ __forceinline__ int columns() const { return item.columns - item.first; }
  __device__ __forceinline__ int x_row(int token) const { return item.x_row(s, token); }
  template <class T> __device__ __forceinline__ const T *row_of_a(int column) const {
    if (column >= columns())
      return nullptr;
    return find_row_of_a<T>(s.adapters.lora, item.packed / kRanks, item.expert,
                            rank_of(s.adapters.lora, item.packed), item.first + column);
  }
};

template <class T, class C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    shrink_segments(const __grid_constant__ moelora_shrink_launch s, int span) {
  extern __shared__ __align__(128) char memory[];
  SegmentsShared<C> &shared = *(SegmentsShared<C> *)memory;
  follow_previous_kernel();

  const auto find = [&](int number) { return StagedItem{s, shared.list.items[number]}; };
  const auto store = [&](int number, const Products<T, C> &products) {
    const SegmentItem &item = shared.list.items[number];
    const int rank = rank_of(s.adapters.lora, item.packed), width = moelora_padded_rank(rank);
    const int columns = item.columns - item.first;
    const bool one_a = item.has_one_a(s, width);
    const float scaling = scaling_of(s, item.packed);
    products.for_each(item.tokens, [&](int token, int column, const float *sum) {
      const int slice = (item.first + column) / width, r = (item.first + column) % width;
      if (column < columns)
        store_slice(s.adapters, row_of_xa<T>(s, item, token) + r, slice, one_a,
                    round_two<T>(sum, scaling, r, rank));
    });
  };
  take_part(s, shared.list, (int2 *)shared.stages, [] { __syncthreads(); });
  for (int listed = 0, all = 1; listed < all; listed += kListedItems) {
    list_items(s, shared.list, listed);
    __syncthreads();
    all = shared.list.all;
    run_staged<T, C>({s.tokens.x, s.tokens.stride, s.tokens.k, span}, shared.stages,
                     min(all - listed, kListedItems), find, store);
    __syncthreads();
  }
}

template <class T, class C>
moelora_status launch(const moelora_shrink_launch &s, const moelora_shrink_plan &plan,
                      const moelora_exec *exec) {
  static_assert(sizeof(SegmentsShared<C>) <= kPortableShared, "a CTA's shared memory");
  return launch_kernel<shrink_segments<T, C>>("shrink_segments", plan.work, C::THREADS,
                                              sizeof(SegmentsShared<C>), exec, s, plan.span);
}

} // namespace

moelora_status moelora_cuda_shrink_segments(const moelora_shrink_launch *s,
                                            const moelora_shrink_plan *plan,
                                            const moelora_exec *exec) {
  switch (plan->variant->id) {
#define LAUNCH_SM90(...)
#define LAUNCH_SM80(NAME, T, ROWS, RANKS, RESIDENT)                                                \
  case CUDA_##NAME:                                                                                \
    static_assert(ROWS == Staged<RANKS>::TOKENS && RESIDENT == Staged<RANKS>::CTAS, #NAME);        \
    return launch<T, Staged<RANKS>>(*s, *plan, exec);
#define MOELORA_CUDA_SHRINK_SEGMENTS(STEM, FAMILY, ...)                                            \
  MOELORA_BOTH_DTYPES(LAUNCH_##FAMILY, shrink, STEM, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_SM80
#undef LAUNCH_SM90
  }
  return moelora_no_kernel(plan->variant->name, "shrinks no segments");
}
