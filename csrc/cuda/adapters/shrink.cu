/* Shrink: xa[position, slice * xa_slice + r] = round( s[l] * sum_k a[l, e, r, k] x[k] )
 *
 * for rows of adapter l, r below its true rank; zero from there to the next multiple of 16.
 *
 * A part is some tokens of one segment of a block, an item a part and up to RANKS rows of A, slice
 * after slice. Where the adapter has fewer, teams that would have none have tokens of their own.
 * The items of a block are dealt to `shares` work units, and these to CTAs, so that those that run
 * together work on a `group` of neighbouring blocks; the warps of a CTA first look for the items of
 * a work unit each. Long segments of large batches are for shrink_segments.cu and shrink_sm90.cu.
 *
 * How the depth is shared depends on sizes alone, so that neither other tokens nor other adapters
 * change a bit. */
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/adapters/shrink_product.cuh"
#include "cuda/gemm/common/tile.cuh"
#include "cuda/variant_ids.h"
#include "cuda/launch/warp.cuh"

namespace {

constexpr int kShares = 8;                    // of a block, for every RANKS ranks
constexpr int kLanes = 8;                     // tokens of a block that a lane looks after
constexpr int kItems = 32 * kLanes / kShares; // of a work unit at most

struct ShrinkParams {
  moelora_shrink_launch s;
  int32_t part, shares, group;
  bool few; // one look of all CTAs finds everything
};

/* Columns [first, first + RANKS) of the shrink results of tokens [low, high) of a block, `split` of
 * them for a team. */
struct BlockItem {
  int block, expert, packed, low, high, first, split;
};

template <class S> struct ShrinkShared {
  Sums<S> sums;
  BlockItem items[S::WARPS][kItems];
  int found[S::WARPS];
};

/* How the teams of a CTA share an item of so many columns: team t * ranks + r has the r-th part of
 * the columns and the t-th of the tokens. */
template <class S> struct Teams {
  static_assert(S::TEAMS <= 2, "one side takes them all");
  int ranks, tokens;

  __device__ __forceinline__ explicit Teams(int columns)
      : ranks(columns > S::TEAM_RANKS ? S::TEAMS : 1), tokens(S::TEAMS / ranks) {}
};

/* Writes the items of a work unit and returns how many there are; a warp. */
template <class S>
__device__ __forceinline__ int find(const ShrinkParams &p, int blocks, int work_unit,
                                    BlockItem *items) {
  const moelora_shrink_launch &s = p.s;
  const int lane = threadIdx.x % 32, rows = s.schedule.blocks.rows;
  if (work_unit >= blocks * p.shares)
    return 0;
  const int before = work_unit / (p.group * p.shares) * p.group; // blocks of the groups before
  const int height = min(p.group, blocks - before), rest = work_unit - before * p.shares;
  const int block = before + rest % height, share = rest / height;
  const int64_t position = (int64_t)block * rows;
  if (s.tokens.divisor.value && lane * 8 < rows)
    prefetch(s.schedule.blocks.sorted_ids + position + lane * 8);
  const int expert = s.schedule.blocks.expert_ids[block];
  Segments<kLanes> segments;
  segments.load(s.schedule.blocks, s.adapters.lora.max_rank, position, rows);
  int count = 0; // of the block, so far
#pragma unroll 1
  for (int i = 0; i * 32 < rows; i++) {
    const int low = i * 32 + lane;
    int packed = -1, high = low, parts = 0, chunks = 0, teams = 1; // that take tokens
#pragma unroll
    for (int j = 0; j < kLanes; j++)
      if (j == i && segments.starts[j] >> lane & 1)
        packed = segments.packed[j];
    if (packed >= 0) {
      high = segments.next(low + 1, rows);
      const int columns = columns_of(s.adapters.lora, packed);
      teams = Teams<S>(columns).tokens;
      parts = ceil_divide(high - low, teams * p.part);
      chunks = ceil_divide(columns, S::RANKS);
      if (p.s.scalings)
        prefetch(p.s.scalings + packed / kRanks);
    }
    const int end = warp_inclusive_sum(parts * chunks);
    const int first = count + end - parts * chunks;
    const int split = parts ? ceil_divide(high - low, 8 * teams * parts) * 8 : 0;
    const int tokens = split * teams;
    for (int j = (share + p.shares - first % p.shares) % p.shares; j < parts * chunks;
         j += p.shares) {
      const int from = low + j / chunks * tokens;
      items[(first + j) / p.shares] = BlockItem{
          block, expert, packed, from, min(from + tokens, high), j % chunks * S::RANKS, split};
    }
    count += __shfl_sync(0xffffffffu, end, 31);
  }
  return (count - share + p.shares - 1) / p.shares;
}

/* Where the operands of an item lie, tokens from `low` on. */
struct BlockOperands {
  const moelora_shrink_launch &s;
  const BlockItem &item;
  int low;

  __device__ __forceinline__ int columns() const {
    return columns_of(s.adapters.lora, item.packed);
  }

  template <class T, class S, int M, int N>
  __device__ __forceinline__ void find_a(Rows<T, S, M, N> &rows, int column, int columns,
                                         int k) const {
    rows.find_a(s.adapters.lora, item.packed / kRanks, item.expert, item.packed % kRanks, column,
                columns, k);
  }

  template <class T, int N> __device__ __forceinline__ void find_x(const T *(&x)[N], int k) const {
    uint32_t row[N];
#pragma unroll
    for (int n = 0; n < N; n++)
      row[n] = item.block * s.schedule.blocks.rows +
               min(low + n * 8 + (int)threadIdx.x % 32 / 4, item.high - 1);
    find_x_rows(s.schedule.blocks, s.tokens, row);
#pragma unroll
    for (int n = 0; n < N; n++)
      x[n] = (const T *)s.tokens.x + row[n] * s.tokens.stride + k;
  }
};

/* Adds up the sums of a team's warps, scales and rounds. */
template <class T, class S>
__device__ __forceinline__ void store(const ShrinkParams &p, const BlockItem &item,
                                      const ShrinkShared<S> &shared) {
  const int rank = item.packed % kRanks, width = moelora_padded_rank(rank);
  const float scaling = scaling_of(p.s, item.packed);
  const int tokens = item.high - item.low;
  const Teams<S> teams(columns_of(p.s.adapters.lora, item.packed));
  constexpr int RANK_VECTORS = S::RANKS / 8;
  for (int i = threadIdx.x; i < min(item.split, tokens) * RANK_VECTORS; i += S::THREADS) {
    const int row = i / RANK_VECTORS, at = i % RANK_VECTORS * 8, team = at / S::TEAM_RANKS;
    const int token = row + team / teams.ranks * item.split;
    const int column = item.first + team % teams.ranks * S::TEAM_RANKS + at % S::TEAM_RANKS;
    const int slice = column / width, r = column % width;
    if (slice >= p.s.adapters.lora.num_slices || token >= tokens)
      continue;
    float sum[8] = {};
    add_spans<S>(sum, shared.sums, row, at);
    const int64_t position = (int64_t)item.block * p.s.schedule.blocks.rows + item.low + token;
    *(uint4 *)((T *)p.s.xa + position * p.s.adapters.xa_stride + slice * p.s.adapters.xa_slice +
               r) = round_ranks<T>(sum, scaling, r, rank);
  }
}

template <class T, class S, bool VECTORS>
__device__ __forceinline__ void run_item(const ShrinkParams &p, const BlockItem &item,
                                         ShrinkShared<S> &shared) {
  const int columns = columns_of(p.s.adapters.lora, item.packed);
  const Teams<S> teams(columns);
  const int warp = threadIdx.x / 32, team = warp / S::DEPTHS, span = warp % S::DEPTHS;
  const BlockOperands operands = {p.s, item, item.low + team / teams.ranks * item.split};
  const int column =
      operands.low < item.high ? item.first + team % teams.ranks * S::TEAM_RANKS : columns;
  if (S::TILES > 1 && columns <= 16)
    multiply_tokens<T, S, VECTORS, 1>(item.split, operands, column, p.s.tokens.k, span, S::DEPTHS,
                                      shared.sums);
  else
    multiply_tokens<T, S, VECTORS, S::TILES>(item.split, operands, column, p.s.tokens.k, span,
                                             S::DEPTHS, shared.sums);
  store<T, S>(p, item, shared);
}

template <class T, class S, bool VECTORS>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT / S::WARPS)
    shrink(const __grid_constant__ ShrinkParams p) {
  extern __shared__ __align__(128) char memory[];
  ShrinkShared<S> &shared = *(ShrinkShared<S> *)memory;
  const int warp = threadIdx.x / 32, ctas = gridDim.x;
  wait_for_previous_kernel();
  start_next_kernel();
  // Blocks that are not in use hold nothing to find.
  const int blocks = p.few ? (int)p.s.schedule.blocks.max_blocks
                           : *p.s.schedule.blocks.num_post / p.s.schedule.blocks.rows;
  for (int work_unit = blockIdx.x; work_unit < blocks * p.shares; work_unit += ctas * S::WARPS) {
    shared.found[warp] = find<S>(p, blocks, work_unit + warp * ctas, shared.items[warp]);
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < S::WARPS; w++)
#pragma unroll 1
      for (int i = 0; i < shared.found[w]; i++)
        run_item<T, S, VECTORS>(p, shared.items[w][i], shared);
    __syncthreads();
  }
}

template <class T, class S, bool VECTORS>
moelora_status launch(const moelora_shrink_launch &s, const moelora_shrink_plan &plan,
                      const moelora_exec *exec) {
  static_assert(sizeof(ShrinkShared<S>) <= kPortableShared, "a CTA's shared memory");
  const ShrinkParams p = {s, plan.part, plan.shares, plan.group, plan.few};
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
  LAUNCH_##METHOD(shrink_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                  \
      LAUNCH_##METHOD(shrink_f16_##STEM, __half, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_BLOCKS
#undef LAUNCH_WINDOWS
  }
  return moelora_fail(MOELORA_UNSUPPORTED, "variant %s shrinks no blocks", plan->variant->name);
}
