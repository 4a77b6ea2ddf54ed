/* The delta of a few rows in one launch: shrink and expand of the same rows by the same CTAs, with
 * nothing but shared memory between the halves.
 *
 * A cluster takes up to kPart rows of one (expert, adapter) pair, and one slice: each of its CTAs a
 * part of the depth of A, then, when all have exchanged their sums, a part of the columns of B.
 * There is a cluster for every row; the first row of a part finds the others by comparing all rows
 * with itself, and the clusters of those end at once. The first columns of B are on their way while
 * A is multiplied; to bring more near did not pay.
 *
 * How the depth is shared depends on sizes alone, and not on the number of adapters' slots. */
#include "cuda/adapters/delta_tile.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/adapters/shrink_splits.cuh"
#include "cuda/variant_ids.h"

namespace {

constexpr int kThinRows = MOELORA_WINDOW_ROWS; // at most
constexpr int kWords = kThinRows / 32;
constexpr int kPart = 16; // rows of a part

/* STEPS teams have 16 rows of A each. A tile of B is in registers meanwhile. */
template <int STEPS, int WARPS>
using ThinShape =
    Shape<1, STEPS, WARPS / STEPS, kPart, kResidentWarps, kRegisters - (STEPS == 4 ? 40 : 24)>;

struct DeltaThinParams {
  delta_shrink s;
  delta_expand e;
  int32_t tiles, splits; // tiles: of a slice's columns
};

template <class T, int STEPS, int WARPS> struct DeltaThinShared {
  Sums<ThinShape<STEPS, WARPS>> sums;
  alignas(16) T xa[kPart][16 * STEPS];
  uint32_t same[kWords]; // bit of each row with the pair of this one
  int32_t x[kPart];      // row of x of each row of the part
  RowAddresses<kPart> addresses;
};

/* Rows of a part and their pair, the same in all threads. */
struct Part {
  int rows, slice, expert, adapter, rank;
};

/* Finds the part that begins with flat row `first`, and where its rows lie; none if that row has no
 * adapter or is in another one's part. Ends with a barrier if there is one. */
template <class T, int STEPS, int WARPS>
__device__ __forceinline__ Part find_part(const DeltaThinParams &p, int first,
                                          DeltaThinShared<T, STEPS, WARPS> &shared) {
  constexpr int THREADS = 32 * WARPS, PASSES = kThinRows / THREADS;
  const delta_rows &r = p.s.rows;
  const int lane = threadIdx.x % 32, rows = (int)r.routes.num_rows;
  const RoutedRow own = routed_row(r.routes, first);
  Part part = {0, 0, own.expert, own.adapter, 0};
  RoutedRow other[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + (int)threadIdx.x;
    if (i < rows)
      other[pass] = routed_row(r.routes, i);
  }
  if (own.expert >= 0 && own.adapter >= 0)
    part.rank = true_rank(r.routes, own.adapter, r.max_rank);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + (int)threadIdx.x;
    const uint32_t same = __ballot_sync(~0u, i < rows && other[pass].expert == own.expert &&
                                                 other[pass].adapter == own.adapter);
    if (lane == 0)
      shared.same[i / 32] = same;
  }
  __syncthreads();
  if (part.rank == 0)
    return part;
  const int here = lane < kWords ? __popc(shared.same[lane]) : 0, upto = warp_inclusive_sum(here);
  const auto rows_before = [&](int row) { // with the same pair
    const uint32_t word = shared.same[row / 32];
    return __shfl_sync(~0u, upto - here, row / 32) + __popc(word & ((1u << row % 32) - 1));
  };
  const int before = rows_before(first);
  if (before % kPart != 0)
    return part;
  part.rows = min(kPart, __shfl_sync(~0u, upto, 31) - before);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * THREADS + (int)threadIdx.x, at = rows_before(i) - before;
    if (shared.same[i / 32] >> lane & 1 && at >= 0 && at < part.rows) {
      shared.x[at] = (uint32_t)i / (uint32_t)p.s.x_divisor;
      find_addresses(p.e, shared.addresses, at, i, false);
    }
  }
  __syncthreads();
  return part;
}

template <class S> struct PartOperands {
  const delta_shrink &s;
  const Part &part;
  const int32_t (&x_rows)[kPart];

  __device__ __forceinline__ int width() const { return moelora_padded_rank(part.rank); }
  __device__ __forceinline__ int columns() const { return (part.slice + 1) * width(); }

  template <class T, int M, int N>
  __device__ __forceinline__ void find_a(Rows<T, S, M, N> &rows, int column, int columns,
                                         int k) const {
    rows.find_a(s.lora, part.adapter, part.expert, part.rank, column, columns, k);
  }

  template <class T, int N> __device__ __forceinline__ void find_x(const T *(&x)[N], int k) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++)
      x[n] = (const T *)s.x + x_rows[min(n * 8 + lane / 4, part.rows - 1)] * s.x_stride + k;
  }
};

/* xa of all rows of the part, rounded. */
template <class T, int STEPS, int WARPS>
__device__ __forceinline__ void shrink(const DeltaThinParams &p, const Part &part, int split,
                                       int splits, DeltaThinShared<T, STEPS, WARPS> &shared) {
  using S = ThinShape<STEPS, WARPS>;
  constexpr int RANK_VECTORS = S::RANKS / 8;
  const int warp = threadIdx.x / 32;
  const PartOperands<S> operands = {p.s, part, shared.x};
  multiply_tokens<T, S, true, 1>(
      part.rows, operands, part.slice * operands.width() + warp / S::DEPTHS * S::TEAM_RANKS, p.s.k,
      split * S::DEPTHS + warp % S::DEPTHS, splits * S::DEPTHS, shared.sums);
  const float scaling = p.s.scalings ? p.s.scalings[part.adapter] : 1.f;
  if (splits > 1)
    share_sums<S>(shared.sums, part.rows, threadIdx.x);
  for (int i = threadIdx.x; i < part.rows * RANK_VECTORS; i += S::THREADS) {
    const int token = i / RANK_VECTORS, column = i % RANK_VECTORS * 8;
    float sum[8] = {};
    add_splits<S>(sum, shared.sums, token, column, splits);
    *(uint4 *)&shared.xa[token][column] = round_ranks<T>(sum, scaling, column, part.rank);
  }
  __syncthreads();
}

template <class T, int STEPS, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, kResidentWarps / WARPS)
    delta_thin(const __grid_constant__ DeltaThinParams p) {
  using B = ThinTile<T, STEPS>;
  __shared__ DeltaThinShared<T, STEPS, WARPS> shared;
  const int splits = num_splits(p.splits), split = own_split();
  const int item = (int)blockIdx.x / splits, slices = p.s.lora.num_slices;
  wait_for_previous_kernel();
  start_next_kernel();
  Part part = find_part(p, item / slices, shared);
  if (part.rows == 0)
    return;
  part.slice = item % slices;
  const moelora_factor &f = p.e.lora.b[part.slice];
  const T *factor = factor_row<T>(f, part.adapter, part.expert, 0);
  const int64_t stride = f.stride_i;
  const int n = (int)p.e.lora.slice_n, end = p.tiles * (split + 1) / splits;
  int tile = p.tiles * split / splits + (int)(threadIdx.x / 32); // of the warp
  B next;
  if (tile < end)
    next.load_b(factor, stride, B::own_column(tile * B::COLUMNS), n, part.rank);
  shrink(p, part, split, splits, shared);
#pragma unroll 1
  while (tile < end) {
    B b = next;
    const int own = B::own_column(tile * B::COLUMNS);
    tile += WARPS;
    if (tile < end)
      next.load_b(factor, stride, B::own_column(tile * B::COLUMNS), n, part.rank);
    b.expand(p.e, shared.addresses, 0, part.rows, part.rank, own, n, part.slice * n,
             [&](int row) { return shared.xa[row]; });
  }
  if (splits > 1)
    sync_cluster(); // nobody reads this CTA's sums any more
}

/* ---- launch ---- */

/* In clusters of SPLITS, or of half as many, and so on, until the `parts` that are likely to have
 * work are on the chip at once. */
template <class T, int STEPS, int WARPS, int SPLITS>
moelora_status launch_splits(DeltaThinParams p, double parts, const moelora_exec *exec) {
  constexpr auto kernel = delta_thin<T, STEPS, WARPS>;
  if constexpr (SPLITS > 1) {
    int64_t resident = 0;
    if (moelora_cuda_can_overlap(exec->device_index)) {
      const cudaError_t error = resident_blocks<kernel, SPLITS>(32 * WARPS, 0, exec, &resident);
      if (error != cudaSuccess)
        return moelora_cuda_check(error, "delta_thin");
    }
    if (resident <= SPLITS || SPLITS * parts > resident)
      return launch_splits<T, STEPS, WARPS, SPLITS / 2>(p, parts, exec);
  }
  p.splits = SPLITS;
  const int64_t blocks = p.s.rows.routes.num_rows * p.s.lora.num_slices * SPLITS;
  return launch_blocks<kernel, SPLITS>("delta_thin", blocks, 32 * WARPS, 0, exec, p);
}

template <class T, int STEPS, int WARPS, int SPLITS>
moelora_status launch(const delta_shrink &s, const delta_expand &e, double parts,
                      const moelora_exec *exec) {
  constexpr int COLUMNS = ThinTile<T, STEPS>::COLUMNS;
  const DeltaThinParams p = {s, e, (int32_t)((s.lora.slice_n + COLUMNS - 1) / COLUMNS), 1};
  return launch_splits<T, STEPS, WARPS, SPLITS>(p, parts, exec);
}

} // namespace

extern "C" moelora_status delta_launch_thin(const delta_shrink *shrink, const delta_expand *expand,
                                            const moelora_delta_plan *plan,
                                            const moelora_exec *exec) {
  switch (plan->one->id) {
#define LAUNCH(NAME, T, STEPS, WARPS, CLUSTER)                                                     \
  case CUDA_##NAME:                                                                                \
    return launch<T, STEPS, WARPS, CLUSTER>(*shrink, *expand, plan->parts, exec);
#define MOELORA_CUDA_DELTA(STEM, ...)                                                              \
  LAUNCH(delta_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                            \
  LAUNCH(delta_f16_##STEM, __half, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH
  }
  return moelora_no_kernel(plan->one->name, "is no delta");
}
