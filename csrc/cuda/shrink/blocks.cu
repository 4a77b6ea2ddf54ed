/* Shrink: xa[position, slice * xa_slice + r] = round( unit * s[l] * sum_k a[l, e, r, k] x[k] )
 *
 * for rows of adapter l and r below its true rank, and zero from there to the next multiple of 16.
 *
 * A work item (items.cuh) is some tokens of a segment by up to RANKS rows of A. If one team of
 * warps suffices for all ranks of an adapter, the other takes other tokens. Long segments of large
 * batches are left to segments.cu and segments_sm90.cu.
 *
 * The split of K depends only on K and alignment: no result depends on other tokens or adapters. */
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/shrink/items.cuh"
#include "cuda/variant_ids.h"

namespace {

template <class S> struct ShrinkShared {
  Sums<S> sums;
  ShrinkItems<S> list;
};

/* Finds the addresses of the operands of an item, for tokens from `low` on. */
struct BlockOperands {
  const moelora_shrink_launch &s;
  const SegmentItem &item;
  int low;

  __device__ __forceinline__ int columns() const { return item.columns; }

  template <class T, class S, int M, int N>
  __device__ __forceinline__ void find_a(Rows<T, S, M, N> &rows, int column, int columns,
                                         int k) const {
    rows.find_a(s.adapters.lora, item.packed / kRanks, item.expert,
                rank_of(s.adapters.lora, item.packed), column, columns, k);
  }

  /* Called after the loads of A are issued: the previous kernel may still be writing x. */
  template <class T, int N> __device__ __forceinline__ void find_x(const T *(&x)[N], int k) const {
    uint32_t row[N];
    follow_previous_kernel();
#pragma unroll
    for (int n = 0; n < N; n++)
      row[n] = item.position_of(s, min(low + n * 8 + (int)threadIdx.x % 32 / 4, item.tokens - 1));
    find_x_rows(s.schedule.blocks, s.tokens, row);
#pragma unroll
    for (int n = 0; n < N; n++)
      x[n] = (const T *)s.tokens.x + row[n] * s.tokens.stride + k;
  }
};

/* Adds the K spans of an item, scales, rounds and stores the sums. */
template <class T, class S>
__device__ __forceinline__ void store(const ShrinkParams &p, const SegmentItem &item, int split,
                                      const Sums<S> &sums) {
  const int rank = rank_of(p.s.adapters.lora, item.packed), width = moelora_padded_rank(rank);
  const float scaling = scaling_of(p.s, item.packed);
  const bool one_a = item.has_one_a(p.s, width);
  const Teams<S> teams(item.columns);
  constexpr int RANK_VECTORS = S::RANKS / 8;
  for (int i = threadIdx.x; i < min(split, item.tokens) * RANK_VECTORS; i += S::THREADS) {
    const int row = i / RANK_VECTORS, at = i % RANK_VECTORS * 8, team = at / S::TEAM_RANKS;
    const int token = row + team / teams.ranks * split;
    const int column = item.first + team % teams.ranks * S::TEAM_RANKS + at % S::TEAM_RANKS;
    const int slice = column / width, r = column % width;
    if (column >= item.columns || token >= item.tokens)
      continue;
    float sum[8] = {};
    add_spans<S>(sum, sums, row, at);
    store_slice(p.s.adapters, row_of_xa<T>(p.s, item, token) + r, slice, one_a,
                round_ranks<T>(sum, scaling, r, rank));
  }
}

template <class T, class S, bool VECTORS>
__device__ __forceinline__ void run_item(const ShrinkParams &p, const SegmentItem &item,
                                         Sums<S> &sums) {
  const int columns = item.columns;
  const Teams<S> teams(columns);
  const int warp = threadIdx.x / 32, team = warp / S::DEPTHS, span = warp % S::DEPTHS;
  const int split = teams.split(item.tokens);
  const BlockOperands operands = {p.s, item, team / teams.ranks * split};
  const int column =
      operands.low < item.tokens ? item.first + team % teams.ranks * S::TEAM_RANKS : columns;
  if (S::TILES > 1 && columns <= 16)
    multiply_tokens<T, S, VECTORS, 1>(split, operands, column, p.s.tokens.k, span, sums);
  else
    multiply_tokens<T, S, VECTORS, S::TILES>(split, operands, column, p.s.tokens.k, span, sums);
  store<T, S>(p, item, split, sums);
}

template <class T, class S, bool VECTORS>
__device__ __forceinline__ void run_items(const ShrinkParams &p, const SegmentItem *items,
                                          int count, Sums<S> &sums) {
#pragma unroll 1
  for (int i = 0; i < count; i++)
    run_item<T, S, VECTORS>(p, items[i], sums);
}

template <class T, class S, bool VECTORS>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT / S::WARPS)
    shrink(const __grid_constant__ ShrinkParams p) {
  extern __shared__ __align__(128) char memory[];
  ShrinkShared<S> &shared = *(ShrinkShared<S> *)memory;
  ShrinkItems<S> &list = shared.list;
  const int warp = threadIdx.x / 32, ctas = gridDim.x;
  // If x is ordered by position (divisor 0), the previous kernel may still be writing x, but the
  // blocks are complete: only find_x() waits.
  if (p.s.tokens.divisor.value)
    follow_previous_kernel();
  // Unused blocks have no segments: with few items, search them, too, instead of loading num_post.
  const int blocks = p.listed ? 0
                     : p.few  ? (int)p.s.schedule.blocks.max_blocks
                              : *p.s.schedule.blocks.num_post / p.s.schedule.blocks.rows;
  constexpr int LISTED = ShrinkItems<S>::LISTED;
  for (int turn = 0, count = LISTED;; turn++) {
    int lists = S::WARPS;
    if (p.listed) {
      if (count < LISTED)
        break;
      lists = 1;
      count = min(list.list(p, turn * LISTED) - turn * LISTED, LISTED);
    } else {
      const int work_unit = blockIdx.x + turn * ctas * S::WARPS;
      if (work_unit >= blocks * p.shares)
        break;
      const int found = list.find(p, blocks, work_unit + warp * ctas);
      if (threadIdx.x % 32 == 0)
        list.found[warp] = found;
      __syncthreads();
    }
    // A single call serves both cases, because the product loop is most of the code size.
#pragma unroll 1
    for (int w = 0; w < lists; w++)
      run_items<T, S, VECTORS>(p, list.items[w], p.listed ? count : list.found[w], shared.sums);
    __syncthreads();
  }
  follow_previous_kernel(); // threads without work have not waited yet
}

template <class T, class S, bool VECTORS>
moelora_status launch(const moelora_shrink_launch &s, const moelora_shrink_plan &plan,
                      const moelora_exec *exec) {
  static_assert(sizeof(ShrinkShared<S>) <= kPortableShared, "a CTA's shared memory");
  const ShrinkParams p = {s, plan.part, plan.shares, plan.group, plan.listed, plan.few};
  return launch_kernel<shrink<T, S, VECTORS>>("shrink", plan.work, S::THREADS,
                                              sizeof(ShrinkShared<S>), exec, p);
}

} // namespace

moelora_status moelora_cuda_shrink(const moelora_shrink_launch *s, const moelora_shrink_plan *plan,
                                   const moelora_exec *exec) {
  if (plan->variant->method == MOELORA_SHRINK_SEGMENTS)
    return plan->variant->needs == MOELORA_SM90 ? moelora_cuda_shrink_sm90(s, plan, exec)
                                                : moelora_cuda_shrink_segments(s, plan, exec);
  switch (plan->variant->id) {
#define LAUNCH_WINDOWS(...)
#define LAUNCH_BLOCKS(NAME, T, TILES, TEAMS, SPANS, TOKENS, CTAS, ELEMENTS)                        \
  case CUDA_##NAME:                                                                                \
    return launch<T, Shape<TILES, TEAMS, SPANS, TOKENS, CTAS * TEAMS * SPANS>, !ELEMENTS>(         \
        *s, *plan, exec);
#define MOELORA_CUDA_SHRINK(STEM, METHOD, ...)                                                     \
  MOELORA_BOTH_DTYPES(LAUNCH_##METHOD, shrink, STEM, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_BLOCKS
#undef LAUNCH_WINDOWS
  }
  return moelora_no_kernel(plan->variant->name, "shrinks no blocks");
}
