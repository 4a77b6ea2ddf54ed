/* Quantizes rows of x, or of h, to e4m3. moelora_x_format in moelora.h defines the scales;
 * quotients match vLLM's kernels bit for bit:
 *
 *   s = scale of a K group, of a row, or given
 *   values[row] = e4m3(x[row] / s), scales[group, row] = s
 *
 * A lane has 16 neighboring columns, eight lanes a tile of 128, and a warp four tiles. With
 * per-token scales, the four tiles belong to one row, whose scale the warp computes first;
 * otherwise they may belong to several rows. Columns past K in the last tile are zero. */
#include "core/format.h"
#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int TILES = 4;   // tiles per warp
constexpr int FLIGHTS = 2; // batches of TILES in flight

/* Loads this lane's columns of a tile; zeros if not `valid`. VECTORS: k is a multiple of 8, and
 * rows are aligned. */
template <class T, bool VECTORS>
__device__ __forceinline__ PackedColumns load_columns(const moelora_quantize_launch &q, int row,
                                                      int tile, bool valid) {
  const int at = tile * 128 + threadIdx.x % 8 * 16, left = valid ? q.k - at : 0;
  const T *x = (const T *)q.x + (row * q.x_stride + at);
  PackedColumns c;
  if (VECTORS) {
    const uint4 low = left > 0 ? ((const uint4 *)x)[0] : uint4{};
    const uint4 high = left > 8 ? ((const uint4 *)x)[1] : uint4{};
    c = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  } else {
    for (int i = 0; i < 16; i += 2) {
      const uint32_t low = left > i ? ((const uint16_t *)x)[i] : 0;
      const uint32_t high = left > i + 1 ? ((const uint16_t *)x)[i + 1] : 0;
      c.two[i / 2] = low | high << 16;
    }
  }
  return c;
}

/* Converts two e4m3 values to T. */
template <class T> __device__ __forceinline__ uint32_t elements_of(uint32_t two) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3);
  const float2 v = __half22float2(*(const __half2 *)&raw);
  return pack2<T>(v.x, v.y);
}

/* Returns whether a block uses a row; other rows are uninitialized. */
__device__ __forceinline__ bool is_used(const moelora_quantize_launch &q, int row) {
  if (!q.counts)
    return true;
  const int block = (int)divide((uint32_t)row, q.block);
  return row - block * (int)q.block.value < q.counts[block];
}

template <class T, bool BYTES, bool VECTORS>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(const __grid_constant__ moelora_quantize_launch q) {
  const int rows = q.num_post ? *q.num_post : (int)q.rows;
  if (!q.early)
    wait_for_previous_kernel();
  start_next_kernel();
  const int lane = threadIdx.x & 31, tiles = (q.k + 127) / 128;
  const int groups = 128 / moelora_x_group(q.format); // per tile
  const bool by_token = q.rule == MOELORA_X_TOKEN;
  const int warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int warps = gridDim.x * (kThreads / 32);
  // Tiles of a lane are `step` apart, within the warp's row or over all rows.
  const int first = by_token ? 0 : warp * TILES, step = (by_token ? 1 : warps) * TILES;
  const int step_rows = step / tiles, step_tiles = step % tiles;
  const int64_t all = by_token ? tiles : (int64_t)rows * tiles;
  for (int mine = by_token ? warp : 0; mine < (by_token ? rows : 1); mine += warps) {
    const int end = by_token ? mine + is_used(q, mine) : rows;
    float scale = q.x_scale;
    if (by_token) {
      float most = 0.f;
#pragma unroll(VECTORS ? FLIGHTS : 1)
      for (int tile = lane / 8; tile < tiles && mine < end; tile += TILES)
        most = abs_max(most, to_floats<T>(load_columns<T, VECTORS>(q, mine, tile, true)));
      scale = fmaxf(max_over_lanes<32>(most) / kMaxE4m3, 1.f / (kMaxE4m3 * 512.f));
    }
    float inverse = 1.f / scale;
    int row = mine + (first + lane / 8) / tiles, tile = (first + lane / 8) % tiles;
    for (int64_t at = first; at < all; at += (int64_t)step * FLIGHTS) {
      PackedColumns columns[FLIGHTS];
      int its_row[FLIGHTS], its_tile[FLIGHTS];
      bool used[FLIGHTS];
#pragma unroll
      for (int j = 0; j < FLIGHTS; j++) {
        its_row[j] = row, its_tile[j] = tile;
        used[j] = row < end && (by_token || is_used(q, row));
        columns[j] = load_columns<T, VECTORS>(q, row, tile, used[j]);
        row += step_rows, tile += step_tiles;
        if (tile >= tiles)
          tile -= tiles, row++;
      }
#pragma unroll
      for (int j = 0; j < FLIGHTS; j++) {
        FloatColumns n = to_floats<T>(columns[j]);
        if (q.rule == MOELORA_X_GROUP) {
          const float most = max_over_lanes<4>(abs_max(1e-10f, n));
          const float other = __shfl_xor_sync(0xffffffffu, most, 4);
          scale = group_scale(groups == 1 ? fmaxf(most, other) : most);
          inverse = 1.f / scale;
        }
        if (by_token) {
          const float by = scale < INFINITY ? scale : 0.f;
          for (int i = 0; i < 16; i++)
            n.v[i] = divide_rounded(n.v[i], by, inverse);
        } else {
          for (int i = 0; i < 16; i++)
            n.v[i] *= inverse;
        }
        if (!used[j])
          continue;
        const int64_t to = its_row[j] * q.values_stride + (its_tile[j] * 128 + lane % 8 * 16);
        if constexpr (BYTES) {
          *(uint4 *)((char *)q.values + to) = e4m3_bytes(n);
        } else {
          uint32_t two[8];
          for (int i = 0; i < 8; i++)
            two[i] = elements_of<T>(e4m3_pair(n, i));
          uint4 *values = (uint4 *)((T *)q.values + to);
          values[0] = make_uint4(two[0], two[1], two[2], two[3]);
          values[1] = make_uint4(two[4], two[5], two[6], two[7]);
        }
        if (lane % (8 / groups) == 0)
          q.scales[(its_tile[j] * groups + lane % 8 / 4) * q.rows + its_row[j]] = scale;
      }
    }
  }
  // PDL is not transitive: kernels that wait for this one rely on all earlier ones having
  // completed.
  if (q.early)
    wait_for_previous_kernel();
}

template <class T, bool BYTES>
moelora_status launch(const moelora_quantize_launch *q, const moelora_exec *exec) {
  const int64_t tiles = q->rule == MOELORA_X_TOKEN && q->k ? TILES : (q->k + 127) / 128;
  const int64_t share = kThreads / 32 * TILES, work = (q->rows * tiles + share - 1) / share;
  return q->vectors ? launch_kernel<quantize_rows<T, BYTES, true>>("quantize_rows", work, kThreads,
                                                                   0, exec, *q)
                    : launch_kernel<quantize_rows<T, BYTES, false>>("quantize_rows", work, kThreads,
                                                                    0, exec, *q);
}

} // namespace

moelora_status moelora_cuda_quantize_rows(const moelora_quantize_launch *q,
                                          const moelora_exec *exec) {
  if (q->dtype == MOELORA_BF16)
    return q->bytes ? launch<__nv_bfloat16, true>(q, exec) : launch<__nv_bfloat16, false>(q, exec);
  return q->bytes ? launch<__half, true>(q, exec) : launch<__half, false>(q, exec);
}
