/* Shrink: hl[p, slice * hl_slice + r] = round( s[l] * sum_k a[l, e, r, k] x[p, k] )
 *
 * for rows p of adapter l, r below its true rank; zero from there to the next multiple of 16. Rows
 * come in alignment order, so that neighbours share an expert and mostly an adapter.
 *
 * A block takes ROWS = 16 * TILES rows and a share of their segments, every SHARES-th. Its warps
 * take a stretch of the depth each and add up in a fixed order. Both operands have depth
 * contiguous, and a dot product may take depth in any order, so a lane loads 16 bytes of a row and
 * calls them two steps of an mma fragment: no staging, whole sectors. */
#include "kernel_launch.cuh"
#include "tile.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kColumns = 4; // of 8 ranks, per pass

struct Params {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  void *hl;
};

/* Eight elements of a row from depth k on, zeros past the end. */
template <class T, bool VECTORS>
__device__ __forceinline__ uint4 load_chunk(const T *row, int k, int depth) {
  uint4 v = {0, 0, 0, 0};
  if (!row || k >= depth)
    return v;
  if (VECTORS)
    return *(const uint4 *)(row + k);
  uint16_t *parts = (uint16_t *)&v;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (k + i < depth)
      parts[i] = ((const uint16_t *)row)[k + i];
  return v;
}

template <class T, int TILES, int SHARES, bool VECTORS>
__global__ void __launch_bounds__(32 * kWarps, 1) shrink(const __grid_constant__ Params p) {
  constexpr int ROWS = 16 * TILES, LANES = (ROWS + 31) / 32;
  constexpr int AHEAD = VECTORS ? 4 : 1;       // depth steps in flight
  constexpr int VALUES = TILES * kColumns * 4; // of one lane
  const moelora_gemm_launch &g = p.g;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  extern __shared__ float partial[]; // [kWarps][TILES * kColumns * 4][32 lanes]
  wait_for_previous_kernel();
  start_next_kernel();
  const int items = (*g.num_post + ROWS - 1) / ROWS;
  const int stretch = ((g.k + kWarps - 1) / kWarps + 31) / 32 * 32;

  // Warps of one item never part ways: what bounds these loops is the same for all of them.
  for (int share = blockIdx.x; share < items * SHARES; share += gridDim.x) {
    const int first = share / SHARES * ROWS;
    int segment = 0;
    const int expert = g.expert_ids[first / g.block_rows];
    Segments<LANES> segments;
    segments.load(g.lora_ids + first, ROWS, g.lora_ranks, g.lora.max_rank);
    int32_t rows[LANES];
#pragma unroll
    for (int i = 0; i < LANES; i++)
      rows[i] = i * 32 + lane < ROWS ? g.sorted_ids[first + i * 32 + lane] : g.num_rows;
    const T *x[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        const int row = __shfl_sync(0xffffffffu, rows[t / 2], t % 2 * 16 + eight * 8 + lane / 4);
        x[t][eight] = row < g.num_rows ? (const T *)g.x + row / g.x_divisor * g.x_stride : nullptr;
      }

    for (int low = 0; low < ROWS;) {
      const int high = segments.next(low + 1, ROWS), pair = segments.at(low);
      // Every SHARES-th adapted segment is this block's.
      const bool taken = pair >= 0 && segment++ % SHARES == share % SHARES;
      const int lora = pair / kRanks, rank = taken ? pair % kRanks : 0;
      const int per_slice = (rank + 15) / 16 * 2, tiles = per_slice * g.lora.num_slices;
      const float scaling = rank && p.scalings ? p.scalings[lora] : 1.f;
      for (int done = 0; done < tiles; done += kColumns) {
        const T *a[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          const int slice = (done + c) / per_slice;
          const int r = (done + c) % per_slice * 8 + lane / 4;
          a[c] = nullptr;
          if (done + c < tiles && r < rank) {
            const moelora_factor &f = g.lora.a[slice];
            a[c] = (const T *)f.data + lora * f.stride_l + expert * f.stride_e + r * f.stride_i;
          }
        }
        float d[TILES][kColumns][4] = {};
        const int begin = warp * stretch, end = min(g.k, begin + stretch);
        for (int k = begin + (lane & 3) * 8; k < end + (lane & 3) * 8; k += 32 * AHEAD) {
          // All loads of AHEAD steps first: it is their number in flight that hides the latency.
          uint4 left[AHEAD][TILES][2], right[AHEAD][kColumns];
#pragma unroll
          for (int step = 0; step < AHEAD; step++) {
#pragma unroll
            for (int c = 0; c < kColumns; c++)
              right[step][c] = load_chunk<T, VECTORS>(a[c], k + 32 * step, end);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
              const bool meets = t * 16 < high && t * 16 + 16 > low;
#pragma unroll
              for (int eight = 0; eight < 2; eight++)
                left[step][t][eight] =
                    load_chunk<T, VECTORS>(meets ? x[t][eight] : nullptr, k + 32 * step, end);
            }
          }
#pragma unroll
          for (int step = 0; step < AHEAD; step++)
#pragma unroll
            for (int t = 0; t < TILES; t++) {
              if (t * 16 >= high || t * 16 + 16 <= low)
                continue;
              const uint4 &u = left[step][t][0], &v = left[step][t][1];
              const uint32_t a0[4] = {u.x, v.x, u.y, v.y}, a1[4] = {u.z, v.z, u.w, v.w};
#pragma unroll
              for (int c = 0; c < kColumns; c++) {
                const uint4 &b = right[step][c];
                const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
                mma_16816<T>(d[t][c], a0, b0);
                mma_16816<T>(d[t][c], a1, b1);
              }
            }
        }
        float *flat = &d[0][0][0];
#pragma unroll
        for (int v = 0; v < VALUES; v++)
          partial[(warp * VALUES + v) * 32 + lane] = flat[v];
        __syncthreads();
        // Warp w adds up values w, w + kWarps, ... and leaves them with warp 0.
        for (int v = warp; v < VALUES; v += kWarps) {
          float total = 0.f;
#pragma unroll
          for (int other = 0; other < kWarps; other++)
            total += partial[(other * VALUES + v) * 32 + lane];
          partial[v * 32 + lane] = total;
        }
        __syncthreads();
        // Tile t and half `eight` of it are stored by warp 2t + eight.
        if (warp < 2 * TILES) {
          const int t = warp / 2, eight = warp % 2, at = t * 16 + eight * 8 + lane / 4;
          int row = g.num_rows;
#pragma unroll
          for (int i = 0; i < LANES; i++) {
            const int here = __shfl_sync(0xffffffffu, rows[i], at & 31);
            row = at / 32 == i ? here : row;
          }
          for (int c = 0; c < kColumns && done + c < tiles; c++) {
            if (at < low || at >= high || row >= g.num_rows)
              break;
            const int slice = (done + c) / per_slice;
            const int r = (done + c) % per_slice * 8 + (lane & 3) * 2;
            const float *sum = partial + ((t * kColumns + c) * 4 + 2 * eight) * 32 + lane;
            T *to = (T *)p.hl + row * g.hl_stride + slice * g.hl_slice + r;
            *(uint32_t *)to =
                pack2<T>(r < rank ? scaling * sum[0] : 0.f, r + 1 < rank ? scaling * sum[32] : 0.f);
          }
        }
        __syncthreads(); // the next pass writes where this one was read
      }
      low = high;
    }
  }
}

template <class T, int TILES, int SHARES, bool VECTORS>
moelora_status launch(const Params &p, int64_t rows, const moelora_exec *exec) {
  constexpr size_t SHARED = sizeof(float) * kWarps * TILES * kColumns * 4 * 32;
  return launch_kernel<shrink<T, TILES, SHARES, VECTORS>>("shrink", rows / (16 * TILES) * SHARES,
                                                          32 * kWarps, SHARED, exec, p);
}

template <class T>
moelora_status launch_as(const Params &p, bool vectors, const moelora_exec *exec) {
  const int64_t rows = (int64_t)p.g.max_blocks * p.g.block_rows;
  if (!vectors)
    return launch<T, 1, 2, false>(p, rows, exec);
  if (p.g.block_rows % 32 != 0)
    return launch<T, 1, 2, true>(p, rows, exec);
  // Shares are for chips that the items alone do not fill: an idle share still looks for its work.
  const bool full = rows / 32 >= 2 * moelora_cuda_num_sms(exec->device_index);
  return full ? launch<T, 2, 1, true>(p, rows, exec) : launch<T, 2, 4, true>(p, rows, exec);
}

} // namespace

moelora_status moelora_cuda_shrink(const moelora_gemm_launch *g, const float *lora_scalings,
                                   bool vectors, moelora_dtype dtype, void *hl,
                                   const moelora_exec *exec) {
  const Params p = {*g, lora_scalings, hl};
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(p, vectors, exec)
                               : launch_as<__half>(p, vectors, exec);
}
