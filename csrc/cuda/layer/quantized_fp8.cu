/* Packs FP8 weights into tiles and unpacks them (moelora.h describes the layout of a tile). A CTA
 * handles one tile at a time, a thread 16 columns of a row at a time. These are also 16 adjacent
 * bytes of the tile, so shared memory is not needed. */
#include "cuda/backend.h"
#include "cuda/gemm/common/format.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kRows = MOELORA_PACK, kColumns = 128, kChunk = 16;

/* The tile that a CTA packs or unpacks. */
struct TileOfCta {
  int64_t expert, row_tile, depth_tile;

  __device__ __forceinline__ TileOfCta(const moelora_weights &w, int64_t index) {
    const int64_t row_tiles = moelora_row_tiles(w.order, w.n);
    const int64_t depth_tiles = moelora_depth_tiles(w.format, w.k);
    expert = index / depth_tiles / row_tiles;
    row_tile = index / depth_tiles % row_tiles;
    depth_tile = index % depth_tiles;
  }

  __device__ __forceinline__ int64_t row(const moelora_weights &w, int r) const {
    return moelora_row_of_tile(w.order, w.n, row_tile * kRows + r);
  }
  __device__ __forceinline__ int64_t offset(const moelora_weights &w) const {
    return expert * w.stride_e + row_tile * w.stride_nt + depth_tile * w.stride_kt;
  }
};

int64_t tiles_of(const moelora_quantized_problem *p) {
  const moelora_weights *w = &p->tiles;
  return p->num_experts * moelora_row_tiles(w->order, w->n) * moelora_depth_tiles(w->format, w->k);
}

/* ---- packing ---- */

/* Loads 16 columns of a row; zeros from column `left` on. */
template <bool VECTORS>
__device__ __forceinline__ uint4 read_chunk(const uint8_t *from, int64_t left) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (VECTORS && left > 0)
    v = *(const uint4 *)from;
  if (!VECTORS)
    for (int i = 0; i < kChunk; i++)
      ((uint8_t *)&v)[i] = i < left ? from[i] : 0;
  return v;
}

/* Writes the scales of a tile: one per half of its K extent, or one per row. */
__device__ __forceinline__ void pack_scales(const moelora_quantized_problem &p,
                                            const TileOfCta &tile, float *to) {
  const bool of_rows = moelora_has_row_scales(p.tiles.format);
  const int i = threadIdx.x;
  if (i >= (of_rows ? kRows : 4))
    return;
  const int64_t k = tile.depth_tile * kColumns + (of_rows ? 0 : 64 * i);
  const int64_t n = tile.row(p.tiles, of_rows ? i : 0); // a tile's first row always exists
  float scale = 0.f;
  if (n >= 0 && k < p.tiles.k && (of_rows || i < 2))
    scale = ((const float *)p.scales)[tile.expert * p.scales_stride[0] +
                                      n / p.block_rows * p.scales_stride[1] + k / p.block_columns];
  to[i] = scale;
}

template <bool VECTORS>
__global__ void __launch_bounds__(kThreads)
    pack_fp8(const __grid_constant__ moelora_quantized_problem p, int64_t tiles) {
  const moelora_weights &w = p.tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const TileOfCta tile(w, index);
    uint8_t *const packed = (uint8_t *)p.packed + tile.offset(w);
    for (int v = threadIdx.x; v < kRows * kColumns / kChunk; v += kThreads) {
      const int r = v / 8, chunk = v % 8;
      const int64_t n = tile.row(w, r), k = tile.depth_tile * kColumns + chunk * kChunk;
      uint4 from = make_uint4(0, 0, 0, 0);
      if (n >= 0)
        from = read_chunk<VECTORS>(
            p.values + tile.expert * p.values_stride[0] + n * p.values_stride[1] + k, w.k - k);
      // Word q holds columns {2q, 2q + 1, 2q + 8, 2q + 9}.
      *(uint4 *)(packed + moelora_fp8_offset(r, chunk * kChunk)) =
          make_uint4(__byte_perm(from.x, from.z, 0x5410), __byte_perm(from.x, from.z, 0x7632),
                     __byte_perm(from.y, from.w, 0x5410), __byte_perm(from.y, from.w, 0x7632));
    }
    pack_scales(p, tile, (float *)(packed + MOELORA_FP8_TILE_VALUES));
  }
}

/* ---- unpacking ---- */

template <class T, bool VECTORS>
__global__ void __launch_bounds__(kThreads)
    unpack_fp8(const __grid_constant__ moelora_quantized_problem p, int64_t tiles) {
  const moelora_weights &w = p.tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const TileOfCta tile(w, index);
    const char *const from = (const char *)w.data + tile.offset(w);
    const float *const scales = (const float *)(from + MOELORA_FP8_TILE_VALUES);
    for (int v = threadIdx.x; v < kRows * kColumns / kChunk; v += kThreads) {
      const int r = v / 8, chunk = v % 8;
      const int64_t n = tile.row(w, r), k = tile.depth_tile * kColumns + chunk * kChunk;
      if (n < 0 || k >= w.k)
        continue;
      const uint4 words = *(const uint4 *)(from + moelora_fp8_offset(r, chunk * kChunk));
      const float scale = scales[moelora_has_row_scales(w.format) ? r : chunk / 4];
      const uint32_t by = e4m3_scales<T>(scale, scale);
      const uint32_t numbers[8] = {e4m3<T, 0, 0>(words.x, by), e4m3<T, 0, 0>(words.y, by),
                                   e4m3<T, 0, 0>(words.z, by), e4m3<T, 0, 0>(words.w, by),
                                   e4m3<T, 1, 0>(words.x, by), e4m3<T, 1, 0>(words.y, by),
                                   e4m3<T, 1, 0>(words.z, by), e4m3<T, 1, 0>(words.w, by)};
      uint16_t *const to =
          (uint16_t *)p.out + tile.expert * p.out_stride[0] + n * p.out_stride[1] + k;
#pragma unroll
      for (int i = 0; i < kChunk; i += VECTORS ? 8 : 1) {
        if (k + i >= w.k)
          break;
        if (VECTORS)
          *(uint4 *)(to + i) = make_uint4(numbers[i / 2], numbers[i / 2 + 1], numbers[i / 2 + 2],
                                          numbers[i / 2 + 3]);
        else
          to[i] = (uint16_t)(numbers[i / 2] >> 16 * (i % 2));
      }
    }
  }
}

template <class T>
moelora_status launch_unpack(const moelora_quantized_problem *p, const moelora_exec *exec) {
  const int64_t tiles = tiles_of(p);
  const bool vectors =
      moelora_is_vector_row(p->out, p->out_stride[1], p->tiles.k) && p->out_stride[0] % 8 == 0;
  return vectors
             ? launch_grid<unpack_fp8<T, true>>("unpack_fp8", tiles, kThreads, exec, *p, tiles)
             : launch_grid<unpack_fp8<T, false>>("unpack_fp8", tiles, kThreads, exec, *p, tiles);
}

} // namespace

moelora_status moelora_cuda_pack_fp8(const moelora_quantized_problem *p, const moelora_exec *exec) {
  const int64_t tiles = tiles_of(p);
  const bool vectors = (uintptr_t)p->values % 16 == 0 && p->values_stride[0] % 16 == 0 &&
                       p->values_stride[1] % 16 == 0 && p->tiles.k % 16 == 0;
  return vectors ? launch_grid<pack_fp8<true>>("pack_fp8", tiles, kThreads, exec, *p, tiles)
                 : launch_grid<pack_fp8<false>>("pack_fp8", tiles, kThreads, exec, *p, tiles);
}

moelora_status moelora_cuda_unpack_fp8(const moelora_quantized_problem *p,
                                       const moelora_exec *exec) {
  return p->dtype == MOELORA_BF16 ? launch_unpack<__nv_bfloat16>(p, exec)
                                  : launch_unpack<__half>(p, exec);
}
