/* Expand of thin segments: z[p, slice * N + n] = sum_r xa[p, slice, r] B[slice][l, e, n, r], into
 * out
 *
 *   out = z, or out += z; z may be weighted
 *
 * What a few rows of a pair cost is its B: columns of B are the M side of m16n8k16, up to 8 rows at
 * a time the N side. A warp loads what it multiplies, straight into registers.
 *
 * An item is up to kPart rows of a segment; its columns are cut into tiles. The tiles of all items
 * of a window lie in one line, and each warp of the CTAs that share the window takes an equal part
 * of it, so that most of its tiles have the same rows. */
#include "cuda/adapters/delta_tile.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/variant_ids.h"

namespace {

constexpr int kThreads = 256, kWindow = 512;
constexpr int kSide = 8;  // rows of a product
constexpr int kPart = 32; // rows of an item at most

/* CTAs of an SM, as registers allow. */
template <int STEPS> constexpr int kThinCtas = STEPS == 4 ? 2 : 3;

/* Where a warp goes on: `left` tiles of a work unit, from tile `tile` of an item on. */
struct Next {
  int work_unit, item, tile, left;
};

struct ThinExpandShared {
  Window<kWindow> window;
  RowAddresses<kWindow> addresses;
  int work_units;
  Next next[kThreads / 32]; // not in registers meanwhile
};

template <class T, int STEPS>
__global__ void __launch_bounds__(kThreads, kThinCtas<STEPS>)
    expand_thin(const __grid_constant__ delta_expand p, int tiles, int slice_tiles, int shares) {
  using B = ThinTile<T, STEPS>;
  extern __shared__ __align__(16) char memory[];
  ThinExpandShared &shared = *(ThinExpandShared *)memory;
  const Window<kWindow> &w = shared.window;
  const RowAddresses<kWindow> &addresses = shared.addresses;
  const int n = (int)p.lora.slice_n;
  bool early = p.after_shrink;
  if (!early)
    begin();

  shared.work_units = (int)count_windows(p.rows) * shares;
  Next &next = shared.next[threadIdx.x / 32]; // all lanes write the same
  for (int work_unit = blockIdx.x; work_unit < shared.work_units;
       work_unit = next.work_unit + gridDim.x) {
    const int share = work_unit % shares;
    load_window<kThreads>(
        p.rows, work_unit / shares, shared.window,
        [&](int i, uint32_t row) { find_addresses(p, shared.addresses, i, row, share == 0); },
        [&](int rows, int) { return (rows + kPart - 1) / kPart; });
    const int number = share * (kThreads / 32) + (int)(threadIdx.x / 32);
    const int workers = shares * (kThreads / 32), all = w.items * tiles;
    const int each = all / workers, more = all % workers;
    const int line = number * each + min(number, more);
    next = {work_unit, line / tiles, line % tiles, each + (number < more)};
#pragma unroll 1
    while (next.left > 0) {
      const Next at = next;
      const int segment = w.segment_of(at.item);
      const int from = w.low[segment] + (at.item - w.first[segment]) * kPart;
      const int to = min(from + kPart, w.high[segment]);
      const int rank = w.rank[from];
      int count = min(tiles - at.tile, at.left);
      __syncwarp(); // all lanes have read it
      next = {at.work_unit, at.item + 1, 0, at.left - count};
      int slice = at.tile / slice_tiles;
      int first = (at.tile - slice * slice_tiles) * B::COLUMNS;
      const T *factor = nullptr;
      bool fresh = true;
#pragma unroll 1
      for (; count > 0; count--) {
        if (fresh)
          factor = factor_row<T>(p.lora.b[slice], w.adapter[from], w.expert[from], 0);
        const int wanted = first + (int)(threadIdx.x % 32 / 4) * B::OWN;
        const int column = min(wanted, n - B::OWN); // what nobody wants is read again
        const int64_t stride = p.lora.b[slice].stride_i;
        B b;
        b.load_b(factor + column * stride, stride, rank);
#pragma unroll 1
        for (int row = from; row < to; row += kSide) {
          const int own = row + (int)(threadIdx.x % 4) * 2;
          typename B::Old old;
          B::load_old(old, p, addresses, own, wanted < n ? to : 0, slice * n + wanted);
          if (early)
            begin();
          early = false;
          typename B::Ranks xa;
          const int xa_row = min(row + (int)(threadIdx.x % 32 / 4), to - 1);
          B::load_xa(xa, (const T *)p.xa + slice * p.xa_stride[0] + addresses.xa[xa_row], rank);
          B::mask(xa, rank);
          if (row == from) { // not before: other loads are on their way
#pragma unroll
            for (int c = 0; c < B::OWN; c++)
              B::mask(b.b[c], rank);
          }
          float d[B::PRODUCTS][4];
          b.multiply(d, xa, rank);
          B::finish(d, old, p, addresses, own, wanted < n ? to : 0, slice * n + wanted);
        }
        first += B::COLUMNS;
        fresh = first >= n;
        if (fresh)
          first = 0, slice++;
      }
    }
  }
  if (early)
    begin();
}

/* ---- launch ---- */

template <class T, int STEPS>
moelora_status launch(delta_expand p, const moelora_expand_plan &plan, const moelora_exec *exec) {
  constexpr size_t bytes = sizeof(ThinExpandShared);
  static_assert(bytes <= kPortableShared, "a CTA's shared memory");
  p.rows.window = plan.window;
  return launch_kernel<expand_thin<T, STEPS>>(
      "delta_expand_thin", plan.work, kThreads, bytes, exec, p, (int)plan.tiles,
      (int)plan.tiles / p.lora.num_slices, (int)plan.shares);
}

} // namespace

extern "C" moelora_status delta_launch_thin_expand(const delta_expand *expand,
                                                   const moelora_expand_plan *plan,
                                                   const moelora_exec *exec) {
  switch (plan->variant->id) {
#define LAUNCH(NAME, T, STEPS, CTAS)                                                               \
  case CUDA_##NAME:                                                                                \
    static_assert(CTAS == kThinCtas<STEPS>, #NAME);                                                \
    return launch<T, STEPS>(*expand, *plan, exec);
#define MOELORA_CUDA_EXPAND_THIN(STEM, ...)                                                        \
  LAUNCH(expand_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                           \
  LAUNCH(expand_f16_##STEM, __half, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH
  }
  return moelora_fail(MOELORA_UNSUPPORTED, "variant %s expands nothing", plan->variant->name);
}
