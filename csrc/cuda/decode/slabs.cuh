/* Multiplies by the 4-bit weights. Each warp has a pipeline in shared memory with the slabs that it
 * multiplies next, across items and from W13 to W2: weights do not depend on grid syncs. A slab is
 * 16 rows of a tile of 4-bit values, 64 elements of K:
 *
 *   values [32 lanes] 16 bytes         as in the tile: a lane's part of operand A of four mma
 *   scales [8 quads][2 rows][groups]   as in the tile
 *   zeros  [8 quads][2 rows][groups]   as in the tile */
#ifndef MOELORA_CUDA_DECODE_SLABS_CUH
#define MOELORA_CUDA_DECODE_SLABS_CUH

#include "cuda/decode/product.cuh"
#include "cuda/gemm/common/format.cuh"

namespace decode {

/* Stages per warp. The pipelines of a CTA take 51 to 57 KB, depending on the format: with tokens
 * (kStagedBytes) and static memory, a CTA fits the 99 KB of the smallest GPUs. */
constexpr int kStages = 12;
constexpr int kSlabsOfTile = 4, kSlabValues = MOELORA_TILE_VALUES / kSlabsOfTile;

template <moelora_kernel_format FORMAT>
constexpr int kSlabBytes = FormatTraits<FORMAT>::MAX_ROW_BYTES / kSlabsOfTile;
template <moelora_kernel_format FORMAT> constexpr int kPipelineBytes = kStages * kSlabBytes<FORMAT>;

/* Iterates over the slabs that a warp copies to its pipeline, kStages ahead of the slab that it
 * multiplies. */
struct SlabProducer {
  WorkIterator work; // the product after the one whose slabs are copied
  const char *from;  // this lane's 16 bytes of the values of the next slab
  int64_t step;      // bytes to the next slab
  int scales;        // offset from `from` to this lane's 16 bytes of scales or zeros; 0: none
  int left;          // remaining slabs of the product
};

__device__ __forceinline__ const moelora_weights &weights_of(const DecodeParams &p, int kind) {
  return kind == W13 ? p.p.w13 : p.p.w2;
}

/* Returns the offset in bytes from this lane's values to the 16 bytes of scales or zeros that this
 * lane copies; 0 if it copies none. */
__device__ __forceinline__ int offset_of_scales(moelora_format format, int slab) {
  const int at = threadIdx.x % 32 * 16, groups = moelora_tile_groups(format);
  const int scales = 16 * groups * moelora_scale_bytes(format); // of a slab
  const int zeros = moelora_has_zeros(format) ? 16 * groups : 0;
  if (at < scales)
    return MOELORA_TILE_VALUES + slab * (scales - kSlabValues);
  if (at < scales + zeros)
    return MOELORA_TILE_VALUES + (kSlabsOfTile - 1) * scales + slab * (zeros - kSlabValues);
  return 0;
}

/* State of a SlabProducer that a warp saves to shared memory while a shrink needs its registers. */
struct ProducerState {
  WorkIterator work;
  const char *from; // of lane 0
  int left;
};

__device__ __forceinline__ void save(const SlabProducer &s, ProducerState &saved) {
  if (threadIdx.x % 32 == 0)
    saved = {s.work, s.from, s.left};
  __syncwarp();
}

__device__ __forceinline__ void restore(const DecodeParams &p, SlabProducer &s,
                                        const ProducerState &saved) {
  s.work = saved.work;
  const moelora_weights &w = weights_of(p, s.work.kind);
  s.from = saved.from + threadIdx.x % 32 * 16;
  s.step = w.stride_kt;
  s.scales = offset_of_scales(w.format, item_of(p, s.work).tile % kSlabsOfTile);
  s.left = saved.left;
}

/* Returns the address of the first tile of this warp's product. */
__device__ __forceinline__ const char *first_tile_of(const DecodeParams &p, const Tables &t,
                                                     const WorkItem &item) {
  const moelora_weights &w = weights_of(p, item.kind);
  return (const char *)w.data + t.expert[item.active] * w.stride_e +
         (item.tile / kSlabsOfTile + half_of_warp(p, item.kind) * w.half_tiles) * w.stride_nt;
}

/* If the current product has no slabs left, moves to the warp's next product that has some. */
__device__ __forceinline__ void open_product(const DecodeParams &p, const Tables &t,
                                             SlabProducer &s) {
  while (s.left == 0 && has_item(t, s.work)) {
    const WorkItem item = item_of(p, s.work);
    if (!has_product(p, t, s.work, item)) {
      const int next = s.work.index + gridDim.x;
      s.work = s.work.kind == W13 && next >= t.items[W13] ? first_part(W2, blockIdx.x)
                                                          : first_part(s.work.kind, next);
      continue;
    }
    const moelora_weights &w = weights_of(p, item.kind);
    const unsigned slab = item.tile % kSlabsOfTile;
    s.from = first_tile_of(p, t, item) + slab * kSlabValues + threadIdx.x % 32 * 16;
    s.step = w.stride_kt;
    s.scales = offset_of_scales(w.format, slab);
    s.left = depth_tiles_of(p, item.kind);
    s.work.part += kWarps;
  }
}

/* Starts to copy the next slab to `stage`. */
__device__ __forceinline__ void produce(const DecodeParams &p, const Tables &t, SlabProducer &s,
                                        uint32_t stage) {
  if (s.left == 0)
    open_product(p, t, s);
  const uint32_t to = stage + threadIdx.x % 32 * 16;
  copy_async_16(to, s.from, 16, s.left > 0);
  copy_async_16(to + kSlabValues, s.from + s.scales, 16, s.left > 0 && s.scales != 0);
  copy_async_commit(); // even if nothing was copied: waits count commit groups
  s.from += s.step;
  s.left -= s.left > 0;
}

/* Addresses of the first and of the current stage of a warp's pipeline. */
template <moelora_kernel_format FORMAT> struct SlabPipeline {
  uint32_t first, stage;

  __device__ __forceinline__ void advance() {
    stage += kSlabBytes<FORMAT>;
    if (stage == first + kPipelineBytes<FORMAT>)
      stage = first;
  }
};

/* Fills the pipeline with the first slabs that the warp multiplies. */
template <moelora_kernel_format FORMAT>
__device__ __forceinline__ void fill(const DecodeParams &p, const Tables &t, SlabProducer &s,
                                     SlabPipeline<FORMAT> &pipeline) {
  s.work = first_part(t.items[W13] > (int)blockIdx.x ? W13 : W2, blockIdx.x);
  s.left = 0;
  pipeline.stage = pipeline.first;
#pragma unroll 1
  for (int i = 0; i < kStages; i++) {
    produce(p, t, s, pipeline.stage);
    pipeline.advance();
  }
}

/* Prefetches to L2 up to eight slabs of the current product that a warp copies next. */
__device__ __forceinline__ void prefetch_next(const SlabProducer &s) {
  const int lane = threadIdx.x % 32, scales = __shfl_sync(~0u, s.scales, 0);
  const char *from = s.from - lane * 16;
  if (lane / 4 < s.left)
    prefetch_l2(from + lane / 4 * s.step + lane % 4 * 128);
  if (lane < 8 && lane < s.left)
    prefetch_l2(from + lane * s.step + scales);
}

/* ---- tokens ---- */

/* A lane's part of operand B: read from shared memory by ldmatrix if tokens are staged, otherwise
 * from global memory. */
struct TokenColumns {
  bool staged;
  uint32_t shared;
  const uint16_t *from;
  int left; // elements of K from `from` on
};

__device__ __forceinline__ TokenColumns columns_of(const DecodeParams &p, const Tables &t, int kind,
                                                   const TokenRows &tokens, const uint16_t *staged,
                                                   int active) {
  const int lane = threadIdx.x % 32;
  TokenColumns x;
  x.staged = tokens.rows == staged;
  const int token = x.staged ? lane % 8 : lane / 4, row = t.row[active][token];
  // Columns of absent tokens are undefined and not stored.
  const int64_t at = (row < 0 ? 0 : kind == W13 ? token : row) * tokens.stride;
  x.shared = shared_address(staged) + ((uint32_t)at + lane / 8 * 8) * 2;
  x.from = tokens.rows + at + lane % 4 * 2;
  x.left = row < 0 ? 0 : depth_of(p, kind) - lane % 4 * 2;
  return x;
}

/* Loads the next 64 elements of K of token lane / 4: this lane's elements 8 i + 2 (lane % 4) and
 * 8 i + 2 (lane % 4) + 1 go to b[i / 4][i % 4]. */
template <bool STAGED>
__device__ __forceinline__ void load_columns(TokenColumns &x, uint32_t (&b)[2][4]) {
  if constexpr (STAGED) {
    load_matrix_x4(b[0], x.shared);
    load_matrix_x4(b[1], x.shared + 64);
    x.shared += MOELORA_PACK * 2;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      b[i / 4][i % 4] = load_4(x.from + 8 * i, 8 * i < x.left);
    x.from += MOELORA_PACK;
    x.left -= MOELORA_PACK;
  }
}

/* ---- products ---- */

/* Adds to d the products of the next `slabs` slabs of the pipeline, and refills their stages. If
 * not STAGED, tokens are loaded one slab ahead. */
template <class T, moelora_kernel_format FORMAT, bool STAGED>
__device__ __forceinline__ void multiply_slabs(const DecodeParams &p, const Tables &t,
                                               moelora_format format, int slabs, TokenColumns &x,
                                               SlabProducer &producer,
                                               SlabPipeline<FORMAT> &pipeline, float (&d)[4]) {
  const int lane = threadIdx.x % 32, groups = moelora_tile_groups(format);
  const int scales = kSlabValues + lane / 4 * 2 * groups * FormatTraits<FORMAT>::SCALE_BYTES;
  const int zeros = kSlabValues + 32 * groups + lane / 4 * 2 * groups;
  uint32_t b[2][4], next[2][4];
  if (!STAGED)
    load_columns<STAGED>(x, next);
#pragma unroll 1
  for (;;) {
    slabs--;
    if (STAGED)
      load_columns<STAGED>(x, b);
    else
      memcpy(b, next, sizeof b);
    if (!STAGED && slabs > 0)
      load_columns<STAGED>(x, next);
    copy_async_wait<kStages - 1>();
    __syncwarp(); // lanes copy scales for each other
    TileFragment<FORMAT, T> w;
    w.load(pipeline.stage + lane * 16, pipeline.stage + scales, pipeline.stage + zeros, format);
    __syncwarp(); // all lanes have read the stage
    produce(p, t, producer, pipeline.stage);
    pipeline.advance();
    uint32_t a[4];
    w.template dequantize<0>(a);
    mma_16816<T>(d, a, &b[0][0]);
    w.template dequantize<1>(a);
    mma_16816<T>(d, a, &b[0][2]);
    w.template dequantize<2>(a);
    mma_16816<T>(d, a, &b[1][0]);
    w.template dequantize<3>(a);
    mma_16816<T>(d, a, &b[1][2]);
    if (slabs == 0)
      break;
  }
}

/* Computes this warp's product of an item into d, not yet scaled by 2^DEFERRED. */
template <class T, moelora_kernel_format FORMAT>
__device__ __forceinline__ void multiply_tiles(const DecodeParams &p, const Tables &t,
                                               const WorkItem &item, const TokenRows &tokens,
                                               const uint16_t *staged, SlabProducer &producer,
                                               SlabPipeline<FORMAT> &pipeline, float (&d)[4]) {
  const moelora_format format = weights_of(p, item.kind).format;
  const int slabs = depth_tiles_of(p, item.kind);
  TokenColumns x = columns_of(p, t, item.kind, tokens, staged, item.active);
#pragma unroll
  for (int q = 0; q < 4; q++)
    d[q] = 0.f;
  if (x.staged)
    multiply_slabs<T, FORMAT, true>(p, t, format, slabs, x, producer, pipeline, d);
  else
    multiply_slabs<T, FORMAT, false>(p, t, format, slabs, x, producer, pipeline, d);
  if constexpr (FormatTraits<FORMAT>::HAS_TILE_SCALE) {
    const float scale = FormatTraits<FORMAT>::template tile_scale<T>(first_tile_of(p, t, item));
#pragma unroll
    for (int q = 0; q < 4; q++)
      d[q] *= scale;
  }
}

} // namespace decode

#endif
