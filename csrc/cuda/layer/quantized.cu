/* Packs weights into tiles and unpacks them (moelora.h describes the layout of a tile).
 *
 * Packing 4-bit weights: a CTA writes up to AT_ONCE tiles that are adjacent in K. It copies their
 * 64 rows to shared memory in whole cache lines; then each thread gathers the 16 bytes that a lane
 * of the GEMM loads at once, and stores them, so that stores are contiguous.
 *
 * Unpacking them: a CTA dequantizes a tile as four warps of the GEMM do, applies the factors that
 * the GEMM applies to accumulators (TileFragment::unpack), and writes the tile as rows.
 *
 * FP8 weights, both ways: a CTA handles one tile at a time, a thread 16 columns of a row at a time.
 * These are also 16 adjacent bytes of the tile, so shared memory is not needed. */
#include "cuda/gemm/common/format.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kRows = MOELORA_PACK;

int64_t tiles_of(const moelora_quantized_problem *p) {
  const moelora_weights *w = &p->tiles;
  return p->num_experts * moelora_row_tiles(w->order, w->n) * moelora_depth_tiles(w->format, w->k);
}

/* ---- packing 4-bit weights ---- */

constexpr int PACK_THREADS = 256;
constexpr int AT_ONCE = 4;
constexpr int TILE_BYTES = kRows / 2;               // bytes per row of a tile
constexpr int LINE = AT_ONCE * TILE_BYTES;          // bytes per row of AT_ONCE tiles
constexpr int PITCH = LINE + (int)sizeof(uint32_t); // avoids bank conflicts between eight rows

/* Copies 16 bytes of a row, from byte `at` on, to shared memory. Bytes from `bytes` on, and all of
 * a NULL row, are zero. */
template <bool VECTORS>
__device__ __forceinline__ void copy_values(const uint8_t *row, int64_t at, int64_t bytes,
                                            uint32_t *to) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (VECTORS) {
    if (row && at < bytes)
      v = *(const uint4 *)(row + at);
  } else if (row) {
    uint8_t *part = (uint8_t *)&v;
#pragma unroll
    for (int i = 0; i < 16; i++)
      part[i] = at + i < bytes ? row[at + i] : 0;
  }
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/* Zeroes each half of 16 bytes of values whose e4m3 scale is 0. */
__device__ __forceinline__ void clear_unscaled(const moelora_quantized_problem &p, int64_t expert,
                                               int64_t n, int64_t at, uint32_t *values) {
  const uint8_t *scales =
      (const uint8_t *)p.scales + expert * p.scales_stride[0] + n * p.scales_stride[1];
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (at + 8 * half < p.tiles.k / 2 && scales[at / 8 + half] == 0)
      values[2 * half] = values[2 * half + 1] = 0;
}

/* Returns a lane's word of a k16 slab, given the addresses of its first byte in row r (`a`) and in
 * r + 8 (`b`). */
__device__ __forceinline__ uint32_t gather_word(const uint8_t *a, const uint8_t *b,
                                                moelora_values values) {
  // A byte holds two columns, the even one low: a[0] and b[0] hold columns c and c + 1, a[4] and
  // b[4] hold c + 8 and c + 9.
  const uint32_t x = a[0] | a[4] << 8, y = b[0] | b[4] << 8;
  const uint32_t even = (x & 0x0f0f) | (y & 0x0f0f) << 4;
  const uint32_t odd = (x >> 4 & 0x0f0f) | (y & 0xf0f0);
  return moelora_spread(values, even | odd << 16);
}

/* Returns a scale as a tile stores it, in the low bytes. */
__device__ __forceinline__ uint32_t packed_scale(const moelora_quantized_problem &p, int64_t at) {
  const bool bf16 = p.dtype == MOELORA_BF16;
  if (moelora_has_tile_scale(p.tiles.format))
    return moelora_e5m3_of_e4m3(((const uint8_t *)p.scales)[at]);
  if (moelora_has_e8m0_scales(p.tiles.format))
    return (uint32_t)max(0, ((const uint8_t *)p.scales)[at] + (bf16 ? 126 : -98));
  const float scale = p.scale_dtype == MOELORA_F32 ? ((const float *)p.scales)[at]
                      : p.scale_dtype == MOELORA_BF16
                          ? __bfloat162float(((const __nv_bfloat16 *)p.scales)[at])
                          : __half2float(((const __half *)p.scales)[at]);
  if (moelora_has_f32_scales(p.tiles.format))
    return __float_as_uint(scale);
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(scale))
              : __half_as_ushort(__float2half_rn(scale));
}

/* Writes the scales and zero points of a tile, in memory order. */
__device__ __forceinline__ void pack_groups(const moelora_quantized_problem &p, int64_t expert,
                                            int64_t first_row, int64_t depth, uint8_t *tile) {
  const moelora_weights &w = p.tiles;
  const int groups = moelora_tile_groups(w.format), bytes = moelora_scale_bytes(w.format);
  const int columns = MOELORA_PACK / groups;
  uint8_t *const scales = tile + MOELORA_TILE_VALUES, *const zeros =
                                                          scales + kRows * groups * bytes;
  for (int place = threadIdx.x; place < kRows * groups; place += PACK_THREADS) {
    // Invert moelora_scale_index: find the row and the group of an index.
    const int pair = place / (2 * groups), high = place / groups % 2;
    const int r = pair / 8 * 16 + pair % 8 + 8 * high;
    const int64_t k = depth + columns * (place % groups);
    const int64_t n = moelora_row_of_tile(w.order, w.n, first_row + r);
    const bool valid = n >= 0 && k < w.k;
    const int64_t group = k / p.group;
    uint32_t scale = 0;
    if (valid)
      scale = packed_scale(p, expert * p.scales_stride[0] + n * p.scales_stride[1] + group);
    if (bytes == 1)
      scales[place] = (uint8_t)scale;
    else if (bytes == 2)
      ((uint16_t *)scales)[place] = (uint16_t)scale;
    else
      ((uint32_t *)scales)[place] = scale;
    if (p.zeros)
      zeros[place] =
          valid ? p.zeros[expert * p.zeros_stride[0] + n * p.zeros_stride[1] + group] : 0;
  }
}

template <bool VECTORS>
__global__ void __launch_bounds__(PACK_THREADS, 2)
    pack_quantized(const __grid_constant__ moelora_quantized_problem p) {
  __shared__ uint32_t rows[kRows * PITCH / sizeof(uint32_t)];
  const moelora_weights &w = p.tiles;
  const int64_t row_tiles = moelora_row_tiles(w.order, w.n),
                depth_tiles = moelora_depth_tiles(w.format, w.k);
  const int64_t lines = (depth_tiles + AT_ONCE - 1) / AT_ONCE;
  const moelora_values values = moelora_values_of(w.format);
  for (int64_t i = blockIdx.x; i < p.num_experts * row_tiles * lines; i += gridDim.x) {
    const int64_t row_tile = i / lines % row_tiles, expert = i / lines / row_tiles;
    const int64_t first_row = row_tile * kRows, first_tile = i % lines * AT_ONCE;
    __syncthreads(); // all threads have read the previous rows
    for (int v = threadIdx.x; v < kRows * LINE / 16; v += PACK_THREADS) {
      const int r = v / (LINE / 16), chunk = v % (LINE / 16);
      const int64_t n = moelora_row_of_tile(w.order, w.n, first_row + r);
      const uint8_t *row =
          n < 0 ? nullptr : p.values + expert * p.values_stride[0] + n * p.values_stride[1];
      const int64_t at = first_tile * TILE_BYTES + chunk * 16;
      uint32_t *const to = rows + (r * PITCH + chunk * 16) / sizeof(uint32_t);
      copy_values<VECTORS>(row, at, w.k / 2, to);
      if (row && moelora_has_tile_scale(w.format))
        clear_unscaled(p, expert, n, at, to);
    }
    __syncthreads();
    const int tiles = (int)min((int64_t)AT_ONCE, depth_tiles - first_tile);
    uint8_t *const packed = (uint8_t *)p.packed + expert * w.stride_e + row_tile * w.stride_nt +
                            first_tile * w.stride_kt;
    for (int v = threadIdx.x; v < tiles * 128; v += PACK_THREADS) {
      const int tile = v / 128, warp = v / 32 % 4, lane = v % 32;
      const uint8_t *low =
          (const uint8_t *)rows + (warp * 16 + lane / 4) * PITCH + tile * TILE_BYTES + lane % 4;
      const uint8_t *high = low + 8 * PITCH;
      uint32_t words[4];
#pragma unroll
      for (int slab = 0; slab < 4; slab++)
        words[slab] = gather_word(low + 8 * slab, high + 8 * slab, values);
      *(uint4 *)(packed + tile * w.stride_kt + v % 128 * 16) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
    for (int tile = 0; tile < tiles; tile++)
      pack_groups(p, expert, first_row, (first_tile + tile) * 64, packed + tile * w.stride_kt);
    if (p.tensor_scales && threadIdx.x < tiles) {
      const int half = w.half_tiles && row_tile >= w.half_tiles;
      const float scale =
          p.tensor_scales[expert * p.tensor_scales_stride[0] + half * p.tensor_scales_stride[1]];
      *(float4 *)(packed + threadIdx.x * w.stride_kt + moelora_tile_scale_offset(w.format)) =
          make_float4(scale, 0.f, 0.f, 0.f);
    }
  }
}

/* ---- unpacking 4-bit weights ---- */

constexpr int UNPACK_THREADS = 128;
constexpr int OUT_PITCH = kRows * 2 + 16; // bytes: avoids bank conflicts between eight rows

template <moelora_kernel_format FORMAT, class T, bool VECTORS>
__global__ void __launch_bounds__(UNPACK_THREADS)
    unpack_quantized(const __grid_constant__ moelora_quantized_problem p) {
  __shared__ __align__(16) uint8_t tile[FormatTraits<FORMAT>::MAX_TILE_BYTES];
  __shared__ __align__(16) uint8_t rows[kRows * OUT_PITCH];
  const moelora_weights &w = p.tiles;
  const int64_t row_tiles = moelora_row_tiles(w.order, w.n),
                depth_tiles = moelora_depth_tiles(w.format, w.k);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int64_t i = blockIdx.x; i < p.num_experts * row_tiles * depth_tiles; i += gridDim.x) {
    const int64_t row_tile = i / depth_tiles % row_tiles, expert = i / depth_tiles / row_tiles;
    const int64_t depth_tile = i % depth_tiles;
    const char *from = (const char *)w.data + expert * w.stride_e + row_tile * w.stride_nt +
                       depth_tile * w.stride_kt;
    for (int v = thread; v < moelora_tile_size(w.format) / 16; v += UNPACK_THREADS)
      ((uint4 *)tile)[v] = ((const uint4 *)from)[v];
    __syncthreads(); // `tile` is complete, and all threads have read the previous rows
    TileFragment<FORMAT, T> fragment;
    fragment.load(shared_address(tile), warp, w.format);
    uint32_t a[4][4];
    fragment.template unpack<0>(a[0], shared_address(tile));
    fragment.template unpack<1>(a[1], shared_address(tile));
    fragment.template unpack<2>(a[2], shared_address(tile));
    fragment.template unpack<3>(a[3], shared_address(tile));
#pragma unroll
    for (int slab = 0; slab < 4; slab++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int r = warp * 16 + lane / 4 + j % 2 * 8;
        const int c = slab * 16 + lane % 4 * 2 + j / 2 * 8;
        *(uint32_t *)(rows + r * OUT_PITCH + c * 2) = a[slab][j];
      }
    __syncthreads();
    for (int v = thread; v < kRows * 8; v += UNPACK_THREADS) {
      const int r = v / 8;
      const int64_t k = depth_tile * 64 + v % 8 * 8;
      const int64_t n = moelora_row_of_tile(w.order, w.n, row_tile * kRows + r);
      if (n < 0 || k >= w.k)
        continue;
      const uint16_t *of = (const uint16_t *)(rows + r * OUT_PITCH + v % 8 * 16);
      uint16_t *to = (uint16_t *)p.out + expert * p.out_stride[0] + n * p.out_stride[1] + k;
      if (VECTORS)
        *(uint4 *)to = *(const uint4 *)of;
      else
        for (int j = 0; j < 8 && k + j < w.k; j++)
          to[j] = of[j];
    }
  }
}

/* ---- FP8 weights ---- */

constexpr int FP8_THREADS = 256;
constexpr int kColumns = 128, kChunk = 16;

/* The tile of FP8 weights that a CTA packs or unpacks. */
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

/* Writes what follows the values of a tile: one scale per half of its K extent, or one per row, and
 * zeros. */
__device__ __forceinline__ void pack_scales(const moelora_quantized_problem &p,
                                            const TileOfCta &tile, float *to) {
  const bool of_rows = moelora_has_row_scales(p.tiles.format);
  const int i = threadIdx.x;
  if (i >= (moelora_fp8_tile_size(p.tiles.format) - MOELORA_FP8_TILE_VALUES) / 4)
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
__global__ void __launch_bounds__(FP8_THREADS)
    pack_fp8(const __grid_constant__ moelora_quantized_problem p, int64_t tiles) {
  const moelora_weights &w = p.tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const TileOfCta tile(w, index);
    uint8_t *const packed = (uint8_t *)p.packed + tile.offset(w);
    for (int v = threadIdx.x; v < kRows * kColumns / kChunk; v += FP8_THREADS) {
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

template <class T, bool VECTORS>
__global__ void __launch_bounds__(FP8_THREADS)
    unpack_fp8(const __grid_constant__ moelora_quantized_problem p, int64_t tiles) {
  const moelora_weights &w = p.tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const TileOfCta tile(w, index);
    const char *const from = (const char *)w.data + tile.offset(w);
    const float *const scales = (const float *)(from + MOELORA_FP8_TILE_VALUES);
    for (int v = threadIdx.x; v < kRows * kColumns / kChunk; v += FP8_THREADS) {
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

/* ---- launches ---- */

template <moelora_kernel_format FORMAT, class T>
moelora_status launch_unpack(const moelora_quantized_problem *p, bool vectors,
                             const moelora_exec *exec) {
  if constexpr (FormatTraits<FORMAT>::IS_FOUR_BITS) {
    const auto launch =
        vectors ? launch_grid<unpack_quantized<FORMAT, T, true>, moelora_quantized_problem>
                : launch_grid<unpack_quantized<FORMAT, T, false>, moelora_quantized_problem>;
    return launch("unpack_quantized", tiles_of(p), UNPACK_THREADS, exec, *p);
  }
  return moelora_no_kernel("unpack_quantized", "has no such format");
}

template <class T>
moelora_status launch_unpack_fp8(const moelora_quantized_problem *p, bool vectors,
                                 const moelora_exec *exec) {
  const int64_t tiles = tiles_of(p);
  const auto launch = vectors
                          ? launch_grid<unpack_fp8<T, true>, moelora_quantized_problem, int64_t>
                          : launch_grid<unpack_fp8<T, false>, moelora_quantized_problem, int64_t>;
  return launch("unpack_fp8", tiles, FP8_THREADS, exec, *p, tiles);
}

} // namespace

moelora_status moelora_cuda_pack_quantized(const moelora_quantized_problem *p,
                                           const moelora_exec *exec) {
  const moelora_weights *w = &p->tiles;
  const bool fp8 = moelora_is_fp8(w->format);
  const bool vectors = (uintptr_t)p->values % 16 == 0 && p->values_stride[0] % 16 == 0 &&
                       p->values_stride[1] % 16 == 0 && w->k % (fp8 ? 16 : 32) == 0;
  if (fp8) {
    const int64_t tiles = tiles_of(p);
    return vectors ? launch_grid<pack_fp8<true>>("pack_fp8", tiles, FP8_THREADS, exec, *p, tiles)
                   : launch_grid<pack_fp8<false>>("pack_fp8", tiles, FP8_THREADS, exec, *p, tiles);
  }
  const int64_t lines = (moelora_depth_tiles(w->format, w->k) + AT_ONCE - 1) / AT_ONCE;
  const int64_t work = p->num_experts * moelora_row_tiles(w->order, w->n) * lines;
  return vectors
             ? launch_grid<pack_quantized<true>>("pack_quantized", work, PACK_THREADS, exec, *p)
             : launch_grid<pack_quantized<false>>("pack_quantized", work, PACK_THREADS, exec, *p);
}

moelora_status moelora_cuda_unpack_quantized(const moelora_quantized_problem *p,
                                             const moelora_exec *exec) {
  const moelora_weights *w = &p->tiles;
  const bool bf16 = p->dtype == MOELORA_BF16;
  const bool vectors =
      moelora_is_vector_row(p->out, p->out_stride[1], w->k) && p->out_stride[0] % 8 == 0;
  if (moelora_is_fp8(w->format))
    return (bf16 ? launch_unpack_fp8<__nv_bfloat16> : launch_unpack_fp8<__half>)(p, vectors, exec);
  switch (moelora_kernel_format_of(w->format, MOELORA_X_NATIVE)) {
#define MOELORA_KERNEL(NAME, ...)                                                                  \
  case MOELORA_KERNEL_##NAME:                                                                      \
    return (bf16 ? launch_unpack<MOELORA_KERNEL_##NAME, __nv_bfloat16>                             \
                 : launch_unpack<MOELORA_KERNEL_##NAME, __half>)(p, vectors, exec);
#include "formats.inc"
  default:
    break;
  }
  return moelora_no_kernel("unpack_quantized", "has no such format");
}
