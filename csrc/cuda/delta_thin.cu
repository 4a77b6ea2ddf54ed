/* The delta of a few rows in one launch: shrink and expand of the same rows by the same CTAs, with
 * nothing but shared memory between the halves.
 *
 * A cluster takes up to kPart rows of one (expert, adapter) pair, and one slice: each of its CTAs a
 * part of the depth of A, then, when all have exchanged their sums, a part of the columns of B.
 * There is a cluster for every row; the first row of a part finds the others by comparing all rows
 * with itself, and the clusters of those end at once. What B and out hold is on its way while A is
 * multiplied.
 *
 * How the depth is shared depends on sizes alone, and not on the number of adapters' slots. */
#include <math.h>

#include "delta_tile.cuh"
#include "kernel_launch.cuh"
#include "shrink_splits.cuh"

namespace {

constexpr int kWarpsThin = 8, kThreads = 32 * kWarpsThin;
constexpr int kThinRows = 512;     // at most: two of a thread
constexpr int kPart = 16;          // rows of a part
constexpr int kThinPerExpert = 64; // rows, at most: 8 of each of eight adapters
constexpr int kMaxSplits = 8;      // CTAs of a cluster
constexpr int kResidentCtas = 2;   // of an SM
constexpr int kWords = kThinRows / 32;

/* STEPS teams have 16 rows of A each. */
template <int STEPS>
using ThinShape =
    Shape<1, STEPS, kWarpsThin / STEPS, kPart, kResidentCtas * kWarpsThin, STEPS == 4 ? 68 : 84>;

struct Params {
  delta_shrink s;
  delta_expand e;
  int32_t tiles, splits; // tiles: of a slice's columns
};

template <class T, int STEPS> struct Shared {
  Sums<ThinShape<STEPS>> sums;
  alignas(16) T h[kPart][16 * STEPS];
  uint32_t same[kWords]; // bit of each row with the pair of this one
  int32_t x[kPart];      // row of x of each row of the part
  Places<kPart> places;
};

/* Rows of a part and their pair, the same in all threads. */
struct Part {
  int rows, slice, expert, adapter, rank;
};

/* Finds the part that begins with flat row `first`, and where its rows lie; none if that row has no
 * adapter or is in another one's part. Ends with a barrier if there is one. */
template <class T, int STEPS>
__device__ __forceinline__ Part find_part(const Params &p, int first, Shared<T, STEPS> &shared) {
  constexpr int PASSES = kThinRows / kThreads;
  const delta_rows &r = p.s.rows;
  const int lane = threadIdx.x % 32, rows = (int)r.routes.num_rows;
  const WindowRow own = route_row(r, first);
  Part part = {0, 0, own.expert, own.adapter, 0};
  WindowRow other[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * kThreads + (int)threadIdx.x;
    if (i < rows)
      other[pass] = route_row(r, i);
  }
  if (own.expert >= 0 && own.adapter >= 0)
    part.rank = true_rank(r, own.adapter);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    const int i = pass * kThreads + (int)threadIdx.x;
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
    const int i = pass * kThreads + (int)threadIdx.x, at = rows_before(i) - before;
    if (shared.same[i / 32] >> lane & 1 && at >= 0 && at < part.rows) {
      shared.x[at] = (uint32_t)i / (uint32_t)p.s.x_divisor;
      find_place(p.e, shared.places, at, i, false);
    }
  }
  __syncthreads();
  return part;
}

template <class S> struct Sources {
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

/* A warp's tiles of B: every kWarpsThin-th of the CTA's share of a slice. */
template <class T, int STEPS> struct Columns {
  using B = Tile<T, STEPS>;
  const T *factor;
  int64_t stride;
  int n, rank, tile, end;

  __device__ __forceinline__ Columns(const Params &p, const Part &part, int split, int splits) {
    const moelora_factor &f = p.e.lora.b[part.slice];
    factor = factor_row<T>(f, part.adapter, part.expert, 0);
    stride = f.stride_i;
    n = (int)p.e.lora.slice_n;
    rank = part.rank;
    tile = p.tiles * split / splits + (int)(threadIdx.x / 32);
    end = p.tiles * (split + 1) / splits;
  }
  __device__ __forceinline__ bool more() const { return tile < end; }
  __device__ __forceinline__ void advance() { tile += kWarpsThin; }
  /* First of a lane's columns; at `n` and behind nobody wants them. */
  __device__ __forceinline__ int first() const {
    return tile * B::COLUMNS + (int)(threadIdx.x % 32 / 4) * B::OWN;
  }
  __device__ __forceinline__ void load(B &b) const {
    b.load_b(factor + min(first(), n - B::OWN) * stride, stride, rank);
  }
  /* Brings what follows the tile at hand near: B, and `out` of all rows. */
  __device__ __forceinline__ void bring(const Params &p, const Places<kPart> &places,
                                        const Part &part) const {
    const int lane = threadIdx.x % 32;
    for (int t = tile; t < end; t += kWarpsThin) {
      const int column = t * B::COLUMNS;
      if (t > tile)
        for (int c = lane; c < B::COLUMNS; c += 32)
          prefetch_l2(factor + min(column + c, n - 1) * stride);
      if (p.e.add && lane < part.rows)
        prefetch_l2((const T *)p.e.out + places.out[lane] + part.slice * n + min(column, n - 1));
    }
  }
};

/* h of all rows of the part, rounded. */
template <class T, int STEPS>
__device__ __forceinline__ void shrink(const Params &p, const Part &part, int split, int splits,
                                       Shared<T, STEPS> &shared) {
  using S = ThinShape<STEPS>;
  constexpr int EIGHTS = S::RANKS / 8;
  const int warp = threadIdx.x / 32;
  const Sources<S> sources = {p.s, part, shared.x};
  multiply_tokens<T, S, true, 1>(
      part.rows, sources, part.slice * sources.width() + warp / S::DEPTHS * S::TEAM_RANKS, p.s.k,
      split * S::DEPTHS + warp % S::DEPTHS, splits * S::DEPTHS, shared.sums);
  const float scaling = p.s.scalings ? p.s.scalings[part.adapter] : 1.f;
  if (splits > 1)
    share_sums<S>(shared.sums, part.rows, threadIdx.x);
  for (int i = threadIdx.x; i < part.rows * EIGHTS; i += kThreads) {
    const int token = i / EIGHTS, column = i % EIGHTS * 8;
    float sum[8] = {};
    add_splits<S>(sum, shared.sums, token, column, splits);
    *(uint4 *)&shared.h[token][column] = round_ranks<T>(sum, scaling, column, part.rank);
  }
  __syncthreads();
}

/* out [+]= weight * h B^T of one tile. */
template <class T, int STEPS>
__device__ __forceinline__ void expand(const Params &p, const Part &part, Tile<T, STEPS> &b,
                                       int first, const Shared<T, STEPS> &shared) {
  using B = Tile<T, STEPS>;
  const int lane = threadIdx.x % 32, n = (int)p.e.lora.slice_n;
  const int to = first < n ? part.rows : 0, column = part.slice * n + first;
  const Places<kPart> &places = shared.places;
#pragma unroll
  for (int c = 0; c < B::OWN; c++)
    B::mask(b.b[c], part.rank);
#pragma unroll 1
  for (int row = 0; row < part.rows; row += 8) {
    const int own = row + lane % 4 * 2;
    typename B::Old old;
    B::load_old(old, p.e, places, own, to, column);
    typename B::Ranks h;
    B::load_h(h, shared.h[min(row + lane / 4, part.rows - 1)], part.rank);
    B::mask(h, part.rank);
    float d[B::PRODUCTS][4];
    b.multiply(d, h, part.rank);
    B::finish(d, old, p.e, places, own, to, column);
  }
}

template <class T, int STEPS>
__global__ void __launch_bounds__(kThreads, kResidentCtas)
    delta_thin(const __grid_constant__ Params p) {
  __shared__ Shared<T, STEPS> shared;
  const int splits = num_splits(p.splits), split = own_split();
  const int item = (int)blockIdx.x / splits, slices = p.s.lora.num_slices;
  wait_for_previous_kernel();
  start_next_kernel();
  Part part = find_part(p, item / slices, shared);
  if (part.rows == 0)
    return;
  part.slice = item % slices;
  Columns<T, STEPS> columns(p, part, split, splits);
  Tile<T, STEPS> next;
  if (columns.more())
    columns.load(next);
  columns.bring(p, shared.places, part);
  shrink(p, part, split, splits, shared);
#pragma unroll 1
  while (columns.more()) {
    Tile<T, STEPS> b = next;
    const int first = columns.first();
    columns.advance();
    if (columns.more())
      columns.load(next);
    expand(p, part, b, first, shared);
  }
  if (splits > 1)
    meet_cluster(); // nobody reads this CTA's sums any more
}

/* ---- launch ---- */

/* Pairs that the rows make on average if each of eight adapters is as likely as the others. */
double expected_pairs(const moelora_routes &routes) {
  const double pool = 8.0 * routes.num_experts;
  return pool * (1.0 - exp(-(double)routes.num_rows / pool));
}

template <class T, int STEPS>
moelora_status launch(const delta_shrink &s, const delta_expand &e, const moelora_exec *exec) {
  const int64_t n = s.lora.slice_n, slices = s.lora.num_slices;
  Params p = {s, e, (int32_t)((n + Tile<T, STEPS>::COLUMNS - 1) / Tile<T, STEPS>::COLUMNS), 1};
  const double parts = slices * expected_pairs(s.rows.routes);
  const double ctas = kResidentCtas * moelora_cuda_num_sms(exec->device_index);
  if (moelora_cuda_can_overlap())
    while (p.splits < kMaxSplits && 2 * p.splits * parts <= ctas)
      p.splits *= 2;
#ifdef MOELORA_THIN_PROBE
  if (getenv("MOELORA_THIN_SPLITS"))
    p.splits = atoi(getenv("MOELORA_THIN_SPLITS"));
#endif
  const int64_t blocks = s.rows.routes.num_rows * slices * p.splits;
  constexpr auto kernel = delta_thin<T, STEPS>;
  switch (p.splits) {
  case 1:
    return launch_blocks<kernel, 1>("delta_thin", blocks, kThreads, 0, exec, p);
  case 2:
    return launch_blocks<kernel, 2>("delta_thin", blocks, kThreads, 0, exec, p);
  case 4:
    return launch_blocks<kernel, 4>("delta_thin", blocks, kThreads, 0, exec, p);
  default:
    static_assert(kMaxSplits == 8, "all cases are there");
    return launch_blocks<kernel, 8>("delta_thin", blocks, kThreads, 0, exec, p);
  }
}

template <class T>
moelora_status launch_as(const delta_shrink &s, const delta_expand &e, const moelora_exec *exec) {
  return s.lora.max_rank <= 16   ? launch<T, 1>(s, e, exec)
         : s.lora.max_rank <= 32 ? launch<T, 2>(s, e, exec)
                                 : launch<T, 4>(s, e, exec);
}

} // namespace

extern "C" bool delta_fits_thin(const delta_shrink *shrink, const delta_expand *expand) {
  const moelora_routes &routes = shrink->rows.routes;
  return shrink->rows.order != DELTA_LISTED && shrink->vectors && expand->vectors &&
         !expand->silu_and_mul && shrink->lora.max_rank <= 64 && routes.num_rows > 0 &&
         routes.num_rows <= kThinRows && routes.num_rows <= kThinPerExpert * routes.num_experts;
}

extern "C" moelora_status delta_launch_thin(const delta_shrink *shrink, const delta_expand *expand,
                                            moelora_dtype dtype, const moelora_exec *exec) {
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(*shrink, *expand, exec)
                               : launch_as<__half>(*shrink, *expand, exec);
}
