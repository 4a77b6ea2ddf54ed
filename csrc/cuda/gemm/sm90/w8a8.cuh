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
 *   tokens  [TOKENS] float32       of 16 tokens, the four that a thread's accumulators are of lie
 *                                  together: 2q, 2q + 1, 2q + 8, 2q + 9 for q = 0 to 3 */
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

/* Where among a stage's token scales that of token t lies. */
__device__ __forceinline__ int scale_place(int t) {
  return (t & ~15) | (t >> 1 & 3) << 2 | (t >> 3 & 1) << 1 | (t & 1);
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
        copy_async_4(pipeline.token_scales() + scale_place(t) * 4,
                     scales + load_shared_4(pipeline.scale_rows() + t * 4), true);
    }
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
  token_scales += (threadIdx.x & 3) * 16;
  uint4 v;
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    if (i % 2 == 0)
      v = load_shared_16(token_scales + i * 32);
    const float2 x = {__uint_as_float(i % 2 ? v.z : v.x), __uint_as_float(i % 2 ? v.w : v.y)};
    const float2 first = {low * x.x, low * x.y};
    const float2 second = BY_ROW ? float2{high * x.x, high * x.y} : first;
    d[4 * i] = fmaf(partial[4 * i], first.x, d[4 * i]);
    d[4 * i + 1] = fmaf(partial[4 * i + 1], first.y, d[4 * i + 1]);
    d[4 * i + 2] = fmaf(partial[4 * i + 2], second.x, d[4 * i + 2]);
    d[4 * i + 3] = fmaf(partial[4 * i + 3], second.y, d[4 * i + 3]);
  }
}

/* What a consumer does with a stage: its two m64 tiles. */
template <class S, int N> struct DepthStep {
  uint32_t weights, tokens, weight_scales, token_scales; // in shared memory
  int stage;

  __device__ __forceinline__ DepthStep(Pipeline<S> &pipeline, int consumer)
      : weights(uniform(pipeline.weights() + 2 * consumer * kM64Bytes)),
        tokens(uniform(pipeline.tokens())), weight_scales(pipeline.weight_scales(2 * consumer)),
        token_scales(pipeline.token_scales()), stage(pipeline.stage) {
    pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    pipeline.advance();
  }
  __device__ __forceinline__ void begin(int t, float *partial) const {
    multiply_e4m3<N>(partial, wgmma_descriptor(weights + t * kM64Bytes), wgmma_descriptor(tokens));
  }
  __device__ __forceinline__ void end(int t, float *partial, float *d, bool by_row) const {
    settle<N / 2>(partial);
    const uint32_t scales = weight_scales + t * S::M64_SCALES;
    if (by_row)
      promote<true, N>(d, partial, scales, token_scales);
    else
      promote<false, N>(d, partial, scales, token_scales);
  }
};

/* All of the depth, two steps at a time: the sums of an m64 tile are promoted while the products of
 * the next one are with the tensor cores, but for the last of both steps, since ptxas follows
 * accumulators that are read no further than the end of a loop. Returns the last stage, which the
 * caller releases. */
template <class S, int N>
__device__ __forceinline__ int multiply_w8a8(float (&d)[2][S::TOKENS / 2],
                                             const moelora_gemm_launch &g, Pipeline<S> &pipeline,
                                             int consumer) {
  const int depth_steps = (g.tokens.k + kDepth - 1) / kDepth;
  const bool by_row = g.weights.w.format == MOELORA_FP8_ROWS;
  int previous = 0;
  float partial[2][N / 2];
  const auto leave = [&](const DepthStep<S, N> &step, bool is_last) {
    previous = step.stage;
    __syncwarp(); // all lanes have read the scales
    if (!is_last)
      pipeline.release(previous);
  };
  if (depth_steps % 2) {
    const DepthStep<S, N> only(pipeline, consumer);
    only.begin(0, partial[0]);
    only.begin(1, partial[1]);
    wgmma_wait<1>();
    only.end(0, partial[0], d[0], by_row);
    wgmma_wait<0>();
    only.end(1, partial[1], d[1], by_row);
    leave(only, depth_steps == 1);
  }
#pragma unroll 1
  for (int i = depth_steps % 2; i < depth_steps; i += 2) {
    const DepthStep<S, N> first(pipeline, consumer);
    first.begin(0, partial[0]);
    first.begin(1, partial[1]);
    wgmma_wait<1>();
    first.end(0, partial[0], d[0], by_row);
    if (S::ALIASED_BUFFERS > 0 && i < 2)
      release_aliased_stage(pipeline, consumer);
    const DepthStep<S, N> second(pipeline, consumer);
    second.begin(0, partial[0]);
    wgmma_wait<1>();
    first.end(1, partial[1], d[1], by_row);
    second.begin(1, partial[1]);
    leave(first, false);
    wgmma_wait<1>();
    second.end(0, partial[0], d[0], by_row);
    wgmma_wait<0>();
    second.end(1, partial[1], d[1], by_row);
    leave(second, i + 2 == depth_steps);
  }
  settle<N / 2>(d[0]);
  settle<N / 2>(d[1]);
  return previous;
}

#endif
