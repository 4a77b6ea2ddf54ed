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

namespace {

/* CTAs of an SM, as registers allow: B alone takes 16 of them for each 16 ranks. */
template <int STEPS, bool SILU, bool VECTORS>
constexpr int kCtas = VECTORS ? (STEPS == 4 && !SILU ? 3 : 2) : 1;
/* Steps on their way, as many as kPortableShared holds. */
template <int STEPS> constexpr int kStages = STEPS == 1 ? 2 : 1;
/* Rows of an item: many, so that B is seldom read again, if so many leave each warp some items. */
constexpr int kMaxPart = 256, kMinPart = 32, kItems = 8;

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

/* How many times as many CTAs as the chip holds share the work. SMs do not reach memory equally
 * fast: what moves much is dealt as they become free, a megabyte to a CTA of eight warps. */
int waves_of(const delta_expand &p, double pairs, int64_t warps) {
  constexpr double SHARE = 1 << 17, MOST = 6;
  const double columns = (double)p.lora.num_slices * (double)p.lora.slice_n;
  const double moved =
      columns * (4.0 * (double)p.rows.routes.num_rows + 2.0 * p.lora.max_rank * pairs);
  return (int)fmax(1.0, fmin(round(moved / (SHARE * (double)warps)), MOST));
}

template <class T, int STEPS, bool SILU, bool VECTORS>
moelora_status launch(delta_expand p, const moelora_exec *exec) {
  const int64_t n = p.lora.slice_n, slices = p.lora.num_slices;
  int64_t tiles = slices * ((n + 2 * kGroup - 1) / (2 * kGroup));
  if (SILU)
    tiles = slices == 1 ? (n / 2 + kGroup - 1) / kGroup : slices / 2 * ((n + kGroup - 1) / kGroup);
  if (tiles == 0)
    return MOELORA_OK;
  constexpr size_t bytes = sizeof(ExpandShared<T, STEPS, SILU, VECTORS>);
  static_assert(bytes <= kPortableShared, "a CTA's shared memory");
  constexpr int WARPS = kWarps<STEPS>;
  const int64_t ctas = moelora_cuda_num_sms(exec->device_index) * kCtas<STEPS, SILU, VECTORS>;
  const double rows = (double)p.rows.routes.num_rows;
  const double pairs = delta_expected_pairs(&p.rows.routes, delta_likely_adapters(&p.rows.routes));
  int part = kMaxPart;
  while (part > kMinPart &&
         fmax(rows / part, pairs) * (double)tiles < (double)(kItems * ctas * WARPS))
    part /= 2;
  int32_t shares = 1;
  const int waves = waves_of(p, pairs, ctas * WARPS);
  const int64_t windows = delta_set_window(&p.rows, kRows<STEPS>, part, (tiles + WARPS - 1) / WARPS,
                                           waves * ctas, &shares);
  const int64_t warps = (int64_t)shares * WARPS;
  const TileCoord stride = {(int)(warps / tiles), (int)(warps % tiles)};
  return launch_waves<expand_rows<T, STEPS, SILU, VECTORS>>(waves, "delta_expand", windows * shares,
                                                            32 * WARPS, bytes, exec, p, (int)tiles,
                                                            part, shares, stride);
}

template <class T, int STEPS>
moelora_status launch_steps(const delta_expand &p, const moelora_exec *exec) {
  if (p.silu_and_mul)
    return launch<T, STEPS, true, true>(p, exec);
  return launch<T, STEPS, false, true>(p, exec);
}

template <class T> moelora_status launch_as(const delta_expand &p, const moelora_exec *exec) {
  if (!p.vectors)
    return p.silu_and_mul ? launch<T, 1, true, false>(p, exec)
                          : launch<T, 1, false, false>(p, exec);
  return p.lora.max_rank <= 16   ? launch_steps<T, 1>(p, exec)
         : p.lora.max_rank <= 32 ? launch_steps<T, 2>(p, exec)
                                 : launch_steps<T, 4>(p, exec);
}

} // namespace

extern "C" moelora_status delta_launch_expand(const delta_expand *expand, moelora_dtype dtype,
                                              const moelora_exec *exec) {
  if (delta_fits_thin_expand(expand))
    return delta_launch_thin_expand(expand, dtype, exec);
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(*expand, exec)
                               : launch_as<__half>(*expand, exec);
}
