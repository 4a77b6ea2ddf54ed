/* The base product of FP8 weights and FP8 tokens: wgmma of e4m3, whose sums of 128 of depth become
 * float32 numbers by the scales of both, and are added there. Inside wgmma sums of e4m3 products
 * keep fewer bits than float32 has: longer ones would lose accuracy (DeepSeek-V3 Technical Report,
 * 2024, section 3.3.2).
 *
 * Weights are tiles as moelora.h has them. Tokens are rows of e4m3 in the same order of columns.
 * They are moved as pairs of 16 bits, so that a stage has 64 of these and all around it is as with
 * other weights: tokens.k and tokens.stride count pairs. The scales of a stage:
 *
 *   weights [TILES][64] float32    of FP8 the first of 64 alone, of FP8_ROWS those of rows
 *   tokens  [TOKENS] float32 */
#ifndef MOELORA_CUDA_SM90_W8A8_CUH
#define MOELORA_CUDA_SM90_W8A8_CUH

#include "cuda/gemm/sm90/quantized.cuh"

/* 128 of depth of this CTA's share of m64 tiles, and of their scales. */
template <class S>
__device__ __forceinline__ void load_w8a8(const moelora_gemm_launch &g,
                                          const QuantizedTiles<S> &tiles, int step,
                                          const Pipeline<S> &pipeline, uint64_t policy) {
  constexpr int SHARE = S::TILES / S::CLUSTER;
  const int first = S::CLUSTER > 1 ? (int)cluster_rank() * SHARE : 0;
  const uint32_t scales = tile_bytes<S::FORMAT>(g.weights.w.format) - MOELORA_FP8_TILE_VALUES;
  const int64_t depth = step * g.weights.w.stride_kt;
#pragma unroll
  for (int i = 0; i < SHARE; i++) {
    const char *from = tiles.first(i) + depth;
    const uint32_t to = pipeline.weights() + (first + i) * kM64Bytes;
    const uint32_t behind = pipeline.weight_scales(first + i);
    if constexpr (S::CLUSTER > 1) {
      bulk_load_multicast(to, from, kM64Bytes, pipeline.full(), policy);
      bulk_load_multicast(behind, from + kM64Bytes, scales, pipeline.full(), policy);
    } else {
      bulk_load(to, from, kM64Bytes, pipeline.full(), policy);
      bulk_load(behind, from + kM64Bytes, scales, pipeline.full(), policy);
    }
  }
}

/* Scales of a block's tokens, by the warps that gather: a thread keeps the rows of x that its
 * tokens are in shared memory, for its registers are full of others. */
template <class S> struct TokenScales {
  static constexpr int EACH = (S::TOKENS + kGatherers - 1) / kGatherers;

  static __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile,
                                              int count, int thread, const Pipeline<S> &pipeline) {
#pragma unroll 1
    for (int t = thread; t < count; t += kGatherers) {
      uint32_t row[1] = {(uint32_t)(tile.block * S::TOKENS + t)};
      find_x_rows(g.schedule.blocks, g.tokens, row);
      store_shared_4(pipeline.scale_rows() + t * 4, row[0]);
    }
  }
  /* Those of a step. */
  static __device__ __forceinline__ void copy(const moelora_gemm_launch &g, int step, int count,
                                              int thread, const Pipeline<S> &pipeline) {
    const float *scales = g.tokens.scales + step * g.tokens.scales_stride;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int t = thread + i * kGatherers;
      if (t < count)
        copy_async_4(pipeline.token_scales() + t * 4,
                     scales + load_shared_4(pipeline.scale_rows() + t * 4), true);
    }
  }
};

/* Two consumers take turns: while the products of an m64 tile of one are with the tensor cores, the
 * other promotes what it has, which takes about as long (pingpong scheduling: Shah et al.,
 * FlashAttention-3, 2024, section 3.1). */
template <class S> struct Turns {
  static constexpr int BARRIER = 4;

  static __device__ __forceinline__ void take(int consumer) {
    if constexpr (S::CONSUMERS == 2)
      warpgroup_sync<256>(BARRIER + consumer);
  }
  static __device__ __forceinline__ void pass(int consumer) {
    if constexpr (S::CONSUMERS == 2)
      warpgroup_arrive<256>(BARRIER + (consumer ^ 1));
  }
  /* Around all tiles: the first turn is consumer 0's, who is also passed the last. */
  static __device__ __forceinline__ void begin(int consumer) {
    if (consumer == 1)
      pass(consumer);
  }
  static __device__ __forceinline__ void end(int consumer) {
    if (consumer == 0)
      take(consumer);
  }
};

/* The 128 of depth of an m64 tile, from zero. */
template <int N>
__device__ __forceinline__ void multiply_e4m3(float *partial, uint64_t a, uint64_t b) {
  settle<N / 2>(partial);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    Wgmma<N>::mma_e4m3(partial, a + 2 * k, b + 2 * k, k > 0);
  wgmma_commit();
}

/* d += partial times the scales of a thread's rows and of its tokens. Rows have one scale, at
 * `weight_scales`, or BY_ROW one each. */
template <bool BY_ROW, int N>
__device__ __forceinline__ void promote(float *d, const float *partial, uint32_t weight_scales,
                                        uint32_t token_scales) {
  if (BY_ROW)
    weight_scales += (threadIdx.x >> 5 & 3) * 64 + (threadIdx.x >> 2 & 7) * 4;
  const float low = __uint_as_float(load_shared_4(weight_scales));
  const float high = BY_ROW ? __uint_as_float(load_shared_4(weight_scales + 32)) : low;
  token_scales += (threadIdx.x & 3) * 8;
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const uint2 v = load_shared_8(token_scales + 32 * i);
    const float2 x = {__uint_as_float(v.x), __uint_as_float(v.y)};
    const float2 first = {low * x.x, low * x.y};
    const float2 second = BY_ROW ? float2{high * x.x, high * x.y} : first;
    d[4 * i] = fmaf(partial[4 * i], first.x, d[4 * i]);
    d[4 * i + 1] = fmaf(partial[4 * i + 1], first.y, d[4 * i + 1]);
    d[4 * i + 2] = fmaf(partial[4 * i + 2], second.x, d[4 * i + 2]);
    d[4 * i + 3] = fmaf(partial[4 * i + 3], second.y, d[4 * i + 3]);
  }
}

/* All of the depth. Returns the last stage, which the caller releases. */
template <class S, int N>
__device__ __forceinline__ int multiply_w8a8(float (&d)[2][S::TOKENS / 2],
                                             const moelora_gemm_launch &g, Pipeline<S> &pipeline,
                                             int consumer) {
  const int depth_steps = (g.tokens.k + kDepth - 1) / kDepth;
  const bool by_row = g.weights.w.format == MOELORA_FP8_ROWS;
  int previous = 0;
  float partial[N / 2];
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    const uint64_t a = wgmma_descriptor(pipeline.weights() + consumer * 2 * kM64Bytes);
    const uint64_t b = wgmma_descriptor(pipeline.tokens());
#pragma unroll
    for (int t = 0; t < 2; t++) {
      Turns<S>::take(consumer);
      multiply_e4m3<N>(partial, a + t * (kM64Bytes / 16), b);
      Turns<S>::pass(consumer);
      if (S::ALIASED_BUFFERS > 0 && t == 0 && step == 1)
        release_aliased_stage(pipeline, consumer);
      wgmma_wait<0>();
      settle<N / 2>(partial);
      const uint32_t scales = pipeline.weight_scales(2 * consumer + t);
      if (by_row)
        promote<true, N>(d[t], partial, scales, pipeline.token_scales());
      else
        promote<false, N>(d[t], partial, scales, pipeline.token_scales());
    }
    previous = pipeline.stage;
    __syncwarp(); // all lanes have read the scales
    if (step + 1 < depth_steps)
      pipeline.release(previous);
    pipeline.advance();
  }
  settle<N / 2>(d[0]);
  settle<N / 2>(d[1]);
  return previous;
}

#endif
