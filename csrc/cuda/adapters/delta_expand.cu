/* Expand: z[p, slice * N + n] = sum over r of xa[p, slice, r] B[slice][l, e, n, r], into out
 *
 *   out = z, or out += z; z may be weighted, or silu(gate) * up of its two halves
 *
 * Warps work alone: an item is some rows of a segment and two groups of 32 columns, neighbours or a
 * gate and its up; a step is 16 rows of it and K_SPAN ranks. What the next steps read is on its way
 * to shared memory meanwhile: xa, out, and B where it is not yet in registers, which is once for an
 * item if K_SPAN ranks cover the true rank.
 *
 * The CTAs that share a window take its items in turn, neighbouring warps neighbouring columns.
 *
 * Batches of thin segments go to delta_expand_thin.cu. */
#include "cuda/adapters/delta_expand.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/variant_ids.h"

namespace {

/* CTAs of an SM, as registers allow: B alone takes 16 of them for each 16 ranks. */
template <int STEPS, bool SILU, bool VECTORS>
constexpr int kCtas = VECTORS ? (STEPS == 4 && !SILU ? 3 : 2) : 1;
/* Steps on their way, as many as kPortableShared holds. */
template <int STEPS> constexpr int kStages = STEPS == 1 ? 2 : 1;

template <class T, int STEPS, bool SILU, bool VECTORS> struct ExpandShared {
  static constexpr int WARPS = kWarps<STEPS>, STAGES = kStages<STEPS>;
  alignas(16) char stages[WARPS][STAGES][Expand<T, STEPS, SILU, VECTORS>::STAGE_BYTES];
  Window<kRows<STEPS>> window;
  RowAddresses<kRows<STEPS>> addresses;
  Step<SILU> steps[WARPS][STAGES]; // what each stage is of
  Step<SILU> next[WARPS];
  int work_units;
};

/* tiles: of columns; part: rows of an item; stride: what all warps that share a window take at
 * once. */
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
    begin();

  shared.work_units = (int)count_windows(p.rows) * shares;
  for (int work_unit = blockIdx.x; work_unit < shared.work_units; work_unit += gridDim.x) {
    const int share = work_unit % shares;
    load_window<32 * WARPS>(
        p.rows, work_unit / shares, w,
        [&](int i, uint32_t row) { find_addresses(p, addresses, i, row, share == 0); },
        [&](int rows, int) { return (rows + part - 1) / part; });
    const int number = share * WARPS + warp;
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
    // What comes next is not in registers while there are products.
    const auto fill = [&](int slot) {
      __syncwarp(); // the stage has been read, what comes next is there
      Step<SILU> s = shared.next[warp];
      char *stage = shared.stages[warp][slot];
      keep(shared.steps[warp][slot], s);
      if (s.rank > 0 && E::wants_b(s))
        E::copy_b(stage, p, w, s);
      if (s.rank > 0 && E::wants_out(p, s))
        E::copy_out(stage, p, addresses, s);
      if (early)
        begin();
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
    begin();
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

} // namespace

extern "C" moelora_status delta_launch_expand(const delta_expand *expand,
                                              const moelora_expand_plan *plan,
                                              const moelora_exec *exec) {
  if (!plan->variant)
    return MOELORA_OK;
  if (plan->variant->method == MOELORA_EXPAND_THIN)
    return delta_launch_thin_expand(expand, plan, exec);
  switch (plan->variant->id) {
#define LAUNCH(NAME, T, STEPS, GATED, ELEMENTS, CTAS)                                              \
  case CUDA_##NAME:                                                                                \
    static_assert(CTAS == kCtas<STEPS, GATED, !ELEMENTS>, #NAME);                                  \
    return launch<T, STEPS, GATED, !ELEMENTS>(*expand, *plan, exec);
#define MOELORA_CUDA_EXPAND(STEM, ...)                                                             \
  LAUNCH(expand_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                           \
  LAUNCH(expand_f16_##STEM, __half, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH
  }
  return moelora_fail(MOELORA_UNSUPPORTED, "variant %s expands nothing", plan->variant->name);
}
