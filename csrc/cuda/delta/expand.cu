/* Expand: z[p, slice * N + n] = sum over r of xa[p, slice, r] B[slice][l, e, n, r], stored to out:
 *
 *   out = z, or out += z; z may be weighted, or silu(gate) * up of its two halves
 *
 * A work item is up to `part` rows of a segment of a window; its columns are split into tiles.
 * Warps work independently. There are two kernels:
 *
 *   expand_rows   copies xa, out and B of the next steps to shared memory during mma. A step is 16
 *                 rows by K_SPAN ranks, with two groups of 32 columns, which are adjacent, or are
 *                 gate and up. B stays in registers for a whole item if K_SPAN covers the true
 *                 rank. The CTAs of a window take its tiles in turn; adjacent warps take adjacent
 *                 columns.
 *   expand_thin   for segments with so few rows that loads of B dominate: B is loaded directly to
 *                 registers and multiplied with up to 8 rows (delta/tile.cuh); no silu. Each warp
 *                 of the CTAs of a window takes an equal, contiguous range of the tiles of all
 *                 items, so that most of its tiles share their rows. */
#include "cuda/delta/tile.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/variant_ids.h"

namespace {

/* CTAs per SM, limited by registers: 16 ranks of B take 16 registers per thread. */
template <int STEPS, bool SILU, bool VECTORS>
constexpr int kCtas = VECTORS ? (STEPS == 4 && !SILU ? 3 : 2) : 1;
/* Number of stages: as many as fit kPortableShared. */
template <int STEPS> constexpr int kStages = STEPS == 1 ? 2 : 1;

template <class T, int STEPS, bool SILU, bool VECTORS> struct ExpandShared {
  static constexpr int WARPS = kWarps<STEPS>, STAGES = kStages<STEPS>;
  alignas(16) char stages[WARPS][STAGES][Expand<T, STEPS, SILU, VECTORS>::STAGE_BYTES];
  Window<kRows<STEPS>> window;
  RowAddresses<kRows<STEPS>> addresses;
  Step<SILU> steps[WARPS][STAGES]; // the step in each stage
  Step<SILU> next[WARPS];
  int work_units;
};

/* tiles: number of column tiles; part: maximum rows of an item; stride: number of warps that share
 * a window, as a TileCoord. */
template <class T, int STEPS, bool SILU, bool VECTORS>
__global__ void __launch_bounds__(32 * kWarps<STEPS>, kCtas<STEPS, SILU, VECTORS>)
    expand_rows(const __grid_constant__ delta_expand p, int tiles, int part, int shares,
                TileCoord stride) {
  using E = Expand<T, STEPS, SILU, VECTORS>;
  constexpr int WARPS = kWarps<STEPS>, STAGES = kStages<STEPS>;
  extern __shared__ __align__(16) char memory[];
  auto &shared = *(ExpandShared<T, STEPS, SILU, VECTORS> *)memory;
  Window<E::ROWS> &w = shared.window;
  RowAddresses<E::ROWS> &addresses = shared.addresses;
  const int warp = threadIdx.x / 32;
  bool early = p.after_shrink;
  if (!early)
    follow_previous_kernel();

  shared.work_units = (int)count_windows(p.rows) * shares;
  for (int work_unit = blockIdx.x; work_unit < shared.work_units; work_unit += gridDim.x) {
    load_share<32 * WARPS>(p, work_unit, shares, part, w, addresses);
    const int number = work_unit % shares * WARPS + warp;
    const auto start_item = [&](Step<SILU> &s) {
      s.rank = 0;
      if (s.at.part >= w.items)
        return;
      s.item.find(p, w, s.at, part);
      s.row = s.item.from;
      s.k = 0;
      s.rank = w.rank[s.row];
    };
    const auto keep = [&](Step<SILU> &to, const Step<SILU> &s) {
      if (threadIdx.x % 32 == 0)
        to = s;
    };
    // The next step is kept in shared memory during the products, to save registers.
    const auto fill = [&](int slot) {
      __syncwarp(); // all lanes have read the stage, and the next step is written
      Step<SILU> s = shared.next[warp];
      char *stage = shared.stages[warp][slot];
      keep(shared.steps[warp][slot], s);
      if (s.rank > 0 && E::wants_b(s))
        E::copy_b(stage, p, w, s);
      if (s.rank > 0 && E::wants_out(p, s))
        E::copy_out(stage, p, addresses, s);
      if (early)
        follow_previous_kernel();
      early = false;
      if (s.rank > 0) {
        E::copy_xa(stage, p, addresses, s);
        s.row += E::is_last(s) ? 16 : 0;
        s.k = E::is_last(s) ? 0 : s.k + E::K_SPAN;
        if (s.row >= s.item.to) {
          s.at = s.at.next(stride, tiles);
          start_item(s);
        }
        __syncwarp();
        keep(shared.next[warp], s);
      }
      copy_async_commit();
    };
    Step<SILU> first;
    first.at = {number / tiles, number % tiles};
    start_item(first);
    keep(shared.next[warp], first);
#pragma unroll
    for (int slot = 0; slot < STAGES; slot++)
      fill(slot);
    E expand;
    float d[2][4][4];
#pragma unroll 1
    for (int slot = 0;; slot = slot + 1 == STAGES ? 0 : slot + 1) {
      copy_async_wait<STAGES - 1>();
      __syncwarp();
      const Step<SILU> step = shared.steps[warp][slot];
      if (step.rank == 0)
        break;
      const char *stage = shared.stages[warp][slot];
      if (E::wants_b(step))
        expand.read_b(stage, step);
      if (E::ONE_SPAN || step.k == 0) {
#pragma unroll
        for (int i = 0; i < 32; i++)
          d[i / 16][i / 4 % 4][i % 4] = 0.f;
      }
      expand.multiply(d, stage, step);
      uint32_t old[2][2][4] = {};
      if (E::wants_out(p, step))
        E::read_out(old, stage);
      fill(slot);
      if (E::is_last(step))
        E::finish(d, old, p, addresses, step);
    }
  }
  if (early)
    follow_previous_kernel();
}

/* ---- thin segments ---- */

constexpr int kThinThreads = 256, kWindow = 512;
constexpr int kPart = 32; // maximum rows per item

/* CTAs per SM, limited by registers. */
template <int STEPS> constexpr int kThinCtas = STEPS == 4 ? 2 : 3;

/* Position of a warp: `left` tiles of a work unit remain, from tile `tile` of item `item` on. */
struct Next {
  int work_unit, item, tile, left;
};

struct ThinExpandShared {
  Window<kWindow> window;
  RowAddresses<kWindow> addresses;
  int work_units;
  Next next[kThinThreads / 32]; // kept here to save registers
};

template <class T, int STEPS>
__global__ void __launch_bounds__(kThinThreads, kThinCtas<STEPS>)
    expand_thin(const __grid_constant__ delta_expand p, int tiles, int shares) {
  using B = ThinTile<T, STEPS>;
  extern __shared__ __align__(16) char memory[];
  ThinExpandShared &shared = *(ThinExpandShared *)memory;
  const Window<kWindow> &w = shared.window;
  const RowAddresses<kWindow> &addresses = shared.addresses;
  bool early = p.after_shrink;
  if (!early)
    follow_previous_kernel();

  shared.work_units = (int)count_windows(p.rows) * shares;
  Next &next = shared.next[threadIdx.x / 32]; // all lanes write the same value
  for (int work_unit = blockIdx.x; work_unit < shared.work_units;
       work_unit = next.work_unit + gridDim.x) {
    load_share<kThinThreads>(p, work_unit, shares, kPart, shared.window, shared.addresses);
    const int number = work_unit % shares * (kThinThreads / 32) + (int)(threadIdx.x / 32);
    const int workers = shares * (kThinThreads / 32), all = w.items * tiles;
    const int each = all / workers, more = all % workers;
    const int line = number * each + min(number, more);
    next = {work_unit, line / tiles, line % tiles, each + (number < more)};
    __syncwarp();
#pragma unroll 1
    while (next.left > 0) {
      const Next at = next;
      const int segment = w.segment_of(at.item);
      const int from = w.low[segment] + (at.item - w.first[segment]) * kPart;
      const int to = min(from + kPart, w.high[segment]);
      const int rank = w.rank[from];
      int count = min(tiles - at.tile, at.left);
      __syncwarp(); // all lanes have read `next`
      next = {at.work_unit, at.item + 1, 0, at.left - count};
      __syncwarp();
      int slice = 0, first = at.tile * B::COLUMNS, n = columns_of_slice(p, 0);
#pragma unroll 1
      while (first >= n) { // on to the next slice, which begins with a tile of its own
        first -= ceil_divide(n, B::COLUMNS) * B::COLUMNS;
        n = columns_of_slice(p, ++slice);
      }
      const T *factor = factor_row<T>(p.lora.b[slice], w.adapter[from], w.expert[from], 0);
#pragma unroll 1
      for (; count > 0; count--) {
        const int own = B::own_column(first);
        const int64_t stride = p.lora.b[slice].stride_i;
        B b;
        b.load_b(factor, stride, own, n, rank);
        const T *xa = (const T *)p.xa + slice * p.xa_stride[0];
        b.expand(p, addresses, from, to, rank, own, n, (int)p.lora.column[slice], [&](int row) {
          if (early)
            follow_previous_kernel();
          early = false;
          return xa + addresses.xa[row];
        });
        first += B::COLUMNS;
        if (first >= n && count > 1) {
          first = 0;
          n = columns_of_slice(p, ++slice);
          factor = factor_row<T>(p.lora.b[slice], w.adapter[from], w.expert[from], 0);
        }
      }
    }
  }
  if (early)
    follow_previous_kernel();
}

/* ---- launch ---- */

template <class T, int STEPS, bool SILU, bool VECTORS>
moelora_status launch(delta_expand p, const moelora_expand_plan &plan, const moelora_exec *exec) {
  constexpr size_t bytes = sizeof(ExpandShared<T, STEPS, SILU, VECTORS>);
  static_assert(bytes <= kPortableShared, "a CTA's shared memory");
  constexpr int WARPS = kWarps<STEPS>;
  p.rows.window = plan.window;
  const int warps = plan.shares * WARPS;
  const TileCoord stride = {warps / plan.tiles, warps % plan.tiles};
  return launch_waves<expand_rows<T, STEPS, SILU, VECTORS>>(
      plan.waves, "delta_expand", plan.work, 32 * WARPS, bytes, exec, p, (int)plan.tiles,
      (int)plan.part, (int)plan.shares, stride);
}

template <class T, int STEPS>
moelora_status launch_thin(delta_expand p, const moelora_expand_plan &plan,
                           const moelora_exec *exec) {
  constexpr size_t bytes = sizeof(ThinExpandShared);
  static_assert(bytes <= kPortableShared, "a CTA's shared memory");
  p.rows.window = plan.window;
  return launch_kernel<expand_thin<T, STEPS>>("delta_expand_thin", plan.work, kThinThreads, bytes,
                                              exec, p, (int)plan.tiles, (int)plan.shares);
}

} // namespace

moelora_status delta_launch_expand(const delta_expand *expand, const moelora_expand_plan *plan,
                                   const moelora_exec *exec) {
  if (!plan->variant)
    return MOELORA_OK;
  switch (plan->variant->id) {
#define LAUNCH(NAME, T, STEPS, GATED, ELEMENTS, CTAS)                                              \
  case CUDA_##NAME:                                                                                \
    static_assert(CTAS == kCtas<STEPS, GATED, !ELEMENTS>, #NAME);                                  \
    return launch<T, STEPS, GATED, !ELEMENTS>(*expand, *plan, exec);
#define MOELORA_CUDA_EXPAND(STEM, ...) MOELORA_BOTH_DTYPES(LAUNCH, expand, STEM, __VA_ARGS__)
#define LAUNCH_THIN(NAME, T, STEPS, CTAS)                                                          \
  case CUDA_##NAME:                                                                                \
    static_assert(CTAS == kThinCtas<STEPS>, #NAME);                                                \
    return launch_thin<T, STEPS>(*expand, *plan, exec);
#define MOELORA_CUDA_EXPAND_THIN(STEM, ...)                                                        \
  MOELORA_BOTH_DTYPES(LAUNCH_THIN, expand, STEM, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_THIN
#undef LAUNCH
  }
  return moelora_no_kernel(plan->variant->name, "expands nothing");
}
