/* Shrink: hl[p, slice * hl_slice + r] = round( s[l] * sum_k a[l, e, r, k] x[p, k] )
 *
 * for rows p of adapter l, r below its true rank; zero from there to the next multiple of 16. Rows
 * come in alignment order, so that neighbours share an expert and mostly an adapter.
 *
 * A warp takes ROWS = 16 * TILES rows and one segment of them after the other. Both operands have
 * depth contiguous, and a dot product may take depth in any order, so a lane loads 16 bytes of a row
 * and calls them two steps of an mma fragment: no shared memory, whole sectors. The
 * segments of an item are dealt out to SHARES takers. Where there are few rows, the SPLIT warps of a
 * block take a stretch of the depth each and add up in a fixed order. */
#include "kernel_launch.cuh"
#include "tile.cuh"

namespace {

constexpr int kWarps = 8;

struct Params {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  void *hl;
};

/* Eight elements of a row from depth k on, zeros past the end. */
template <class T, bool VECTORS>
__device__ __forceinline__ uint4 load_chunk(const T *row, int k, int depth) {
  uint4 v = {0, 0, 0, 0};
  if (!row || k >= depth) return v;
  if (VECTORS) return *(const uint4 *)(row + k);
  uint16_t *parts = (uint16_t *)&v;
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (k + i < depth) parts[i] = ((const uint16_t *)row)[k + i];
  return v;
}

template <class T, int TILES, int SPLIT, int SHARES, bool VECTORS>
__global__ void __launch_bounds__(32 * kWarps) shrink(const __grid_constant__ Params p) {
  constexpr int ROWS = 16 * TILES, LANES = (ROWS + 31) / 32;
  constexpr int COLUMNS = 4;                         // of 8 ranks, per pass
  constexpr int AHEAD = !VECTORS || TILES > 1 ? 1 : 4; // depth steps in flight
  const moelora_gemm_launch &g = p.g;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __shared__ float partial[SPLIT > 1 ? kWarps : 1][SPLIT > 1 ? 16 * 8 * COLUMNS : 1];
  wait_for_previous_kernel();
  start_next_kernel();
  const int items = (*g.num_post + ROWS - 1) / ROWS;
  const int stretch = (g.k / SPLIT + 31) / 32 * 32 + (g.k % SPLIT ? 32 : 0);

  // Warps of one item never part ways: what bounds these loops is the same for all of them.
  for (int share = (int)blockIdx.x * (kWarps / SPLIT) + warp / SPLIT; share < items * SHARES;
       share += gridDim.x * (kWarps / SPLIT)) {
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
      // Every SHARES-th adapted segment is this one's.
      const bool taken = pair >= 0 && segment++ % SHARES == share % SHARES;
      const int lora = pair / kRanks, rank = taken ? pair % kRanks : 0;
      const int per_slice = (rank + 15) / 16 * 2, tiles = per_slice * g.lora.num_slices;
      const float scaling = rank && p.scalings ? p.scalings[lora] : 1.f;
      for (int done = 0; done < tiles; done += COLUMNS) {
        const T *a[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const int slice = (done + c) / per_slice;
          const int r = (done + c) % per_slice * 8 + lane / 4;
          a[c] = nullptr;
          if (done + c < tiles && r < rank) {
            const moelora_factor &f = g.lora.a[slice];
            a[c] = (const T *)f.data + lora * f.stride_l + expert * f.stride_e + r * f.stride_i;
          }
        }
        float d[TILES][COLUMNS][4] = {};
        const int begin = warp % SPLIT * stretch, end = min(g.k, begin + stretch);
        for (int k = begin + (lane & 3) * 8; k < end + (lane & 3) * 8; k += 32 * AHEAD) {
          // All loads of AHEAD steps first: it is their number in flight that hides the latency.
          uint4 left[AHEAD][TILES][2], right[AHEAD][COLUMNS];
#pragma unroll
          for (int step = 0; step < AHEAD; step++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
              right[step][c] = load_chunk<T, VECTORS>(a[c], k + 32 * step, end);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
              for (int eight = 0; eight < 2; eight++)
                left[step][t][eight] = load_chunk<T, VECTORS>(x[t][eight], k + 32 * step, end);
          }
#pragma unroll
          for (int step = 0; step < AHEAD; step++)
#pragma unroll
            for (int t = 0; t < TILES; t++) {
              if (t * 16 >= high || t * 16 + 16 <= low) continue;
              const uint4 &u = left[step][t][0], &v = left[step][t][1];
              const uint32_t a0[4] = {u.x, v.x, u.y, v.y}, a1[4] = {u.z, v.z, u.w, v.w};
#pragma unroll
              for (int c = 0; c < COLUMNS; c++) {
                const uint4 &b = right[step][c];
                const uint32_t b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
                mma_16816<T>(d[t][c], a0, b0);
                mma_16816<T>(d[t][c], a1, b1);
              }
            }
        }
        if constexpr (SPLIT > 1) {
          static_assert(TILES == 1 && SPLIT == kWarps, "one item of 16 rows per block");
#pragma unroll
          for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int q = 0; q < 4; q++) partial[warp][(c * 4 + q) * 32 + lane] = d[0][c][q];
          __syncthreads();
          if (warp == 0)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
              for (int q = 0; q < 4; q++)
#pragma unroll
                for (int other = 1; other < SPLIT; other++)
                  d[0][c][q] += partial[other][(c * 4 + q) * 32 + lane];
          __syncthreads();
        }
        if (SPLIT > 1 && warp != 0) continue;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int eight = 0; eight < 2; eight++) {
            const int at = t * 16 + eight * 8 + lane / 4;
            const int row = __shfl_sync(0xffffffffu, rows[t / 2], at & 31);
            if (at < low || at >= high || row >= g.num_rows) continue;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
              if (done + c >= tiles) break;
              const int slice = (done + c) / per_slice;
              const int r = (done + c) % per_slice * 8 + (lane & 3) * 2;
              T *to = (T *)p.hl + row * g.hl_stride + slice * g.hl_slice + r;
              *(uint32_t *)to = pack2<T>(r < rank ? scaling * d[t][c][2 * eight] : 0.f,
                                         r + 1 < rank ? scaling * d[t][c][2 * eight + 1] : 0.f);
            }
          }
      }
      low = high;
    }
  }
}

template <class T, bool VECTORS>
moelora_status launch(const Params &p, const moelora_exec *exec) {
  const int64_t rows = (int64_t)p.g.max_blocks * p.g.block_rows;
  // Four tiles a warp read a factor once for 64 rows, all of one block; it takes many to fill the chip.
  if (p.g.block_rows % 64 == 0 && rows >= 64 * kWarps * moelora_cuda_num_sms(exec->device_index))
    return launch_kernel<shrink<T, 4, 1, 2, VECTORS>>(
        "shrink", (rows / 64 * 2 + kWarps - 1) / kWarps, 32 * kWarps, 0, exec, p);
  return launch_kernel<shrink<T, 1, kWarps, 4, VECTORS>>("shrink", rows / 16 * 4, 32 * kWarps, 0,
                                                         exec, p);
}

} // namespace

moelora_status moelora_cuda_shrink(const moelora_gemm_launch *g, const float *lora_scalings,
                                   bool vectors, moelora_dtype dtype, void *hl,
                                   const moelora_exec *exec) {
  const Params p = {*g, lora_scalings, hl};
  if (dtype == MOELORA_BF16)
    return vectors ? launch<__nv_bfloat16, true>(p, exec) : launch<__nv_bfloat16, false>(p, exec);
  return vectors ? launch<__half, true>(p, exec) : launch<__half, false>(p, exec);
}
