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

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/sm90/gather.cuh"
#include "cuda/gemm/sm90/quantized.cuh"

/* 128 of depth of this CTA's share of m64 tiles, and of their scales. */
template <class S>
__device__ __forceinline__ void load_w8a8(const moelora_gemm_launch &g, QuantizedTiles<S> &tiles,
                                          const Pipeline<S> &pipeline, uint64_t policy) {
  const int first = tiles.first();
  const uint32_t scales = S::Format::tile_bytes(g.weights.w.format) - MOELORA_FP8_TILE_VALUES;
#pragma unroll
  for (int i = 0; i < QuantizedTiles<S>::MOST; i++) {
    if (i >= tiles.count)
      break;
    const char *from = tiles.at[i];
    const uint32_t to = pipeline.weights() + (first + i) * kM64Bytes;
    const uint32_t behind = pipeline.weight_scales(first + i);
    if (tiles.are_all) {
      bulk_load(to, from, kM64Bytes, pipeline.full(), policy);
      bulk_load(behind, from + kM64Bytes, scales, pipeline.full(), policy);
    } else if constexpr (S::CLUSTER > 1) {
      bulk_load_multicast(to, from, kM64Bytes, pipeline.full(), policy);
      bulk_load_multicast(behind, from + kM64Bytes, scales, pipeline.full(), policy);
    }
  }
  tiles.advance(g, 1);
}

/* Scales of a block's tokens, by the warps that gather: a thread knows the rows of x that tokens
 * `thread` + kGatherers i are. They are found while the tile before streams. */
template <class S> struct TokenScales {
  static constexpr int EACH = (S::TOKENS + kGatherers - 1) / kGatherers;
  static_assert(kGatherers % 16 == 0, "a thread's tokens lie alike among 16");

  uint32_t row[EACH], next[EACH];
  uint32_t to;         // of the first token
  const float *scales; // of the step

  __device__ __forceinline__ explicit TokenScales(int thread)
      : to((uint32_t)(quad_place(thread) * 4)) {
    asm volatile("" : "+r"(to)); // not found anew
  }

  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile, int count,
                                       int thread) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      next[i] = tile.block * S::TOKENS + max(min(thread + i * kGatherers, count - 1), 0);
    find_x_rows(g.schedule.blocks, g.tokens, next);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (thread + i * kGatherers >= count)
        next[i] = kNoRow;
  }
  /* From here on `copy` is about what was found, from step `first` on. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, int first) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      row[i] = next[i];
    scales = g.tokens.scales + first * g.tokens.scales_stride;
  }
  /* Those of the next step. */
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const Pipeline<S> &pipeline) {
    const uint32_t at = pipeline.token_scales() + to;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (row[i] != kNoRow)
        copy_async_4(at + i * kGatherers * 4, row_address(scales, row[i], 4), true);
    scales += g.tokens.scales_stride;
  }
  /* For who gathers rows by a list of them: all threads at once. */
  __device__ __forceinline__ void list(const moelora_gemm_launch &g, int thread,
                                       const Pipeline<S> &pipeline) const {
    warpgroup_sync<kGatherers>(4); // nobody needs the last tile's
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int t = thread + i * kGatherers;
      if (t * 4 < S::ROW_LIST_BYTES)
        ListedGather<S::TOKENS>::put(pipeline.row_list(), t, row[i], g.tokens);
    }
    warpgroup_sync<kGatherers>(4);
  }
};

/* The 128 of depth of an m64 tile, from zero. */
template <int N>
__device__ __forceinline__ void multiply_e4m3(float *partial, uint64_t a, uint64_t b) {
  settle<N / 2>(partial);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    Wgmma<N>::mma_e4m3(partial, move_descriptor(a, 2 * k), move_descriptor(b, 2 * k), k > 0);
  wgmma_commit();
}

/* Scales of a thread's tokens. */
template <int N> struct ThreadScales {
  uint4 v[(N + 15) / 16];

  __device__ __forceinline__ void load(uint32_t token_scales) {
    token_scales += (threadIdx.x & 3) * 16;
#pragma unroll
    for (int i = 0; i < (N + 15) / 16; i++)
      v[i] = load_shared_16(token_scales + i * 64);
  }
  /* Of n8 tile i. */
  __device__ __forceinline__ float2 operator[](int i) const {
    const uint4 four = v[i / 2];
    return {__uint_as_float(i % 2 ? four.z : four.x), __uint_as_float(i % 2 ? four.w : four.y)};
  }
};

/* d += partial times the scales of a thread's rows, `low` and of BY_ROW `high`, and of its tokens.
 */
template <bool BY_ROW, int N>
__device__ __forceinline__ void promote(float *d, const float *partial, float low, float high,
                                        const ThreadScales<N> &tokens) {
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const float2 x = tokens[i];
    const float2 first = {low * x.x, low * x.y};
    const float2 second = BY_ROW ? float2{high * x.x, high * x.y} : first;
    d[4 * i] = fmaf(partial[4 * i], first.x, d[4 * i]);
    d[4 * i + 1] = fmaf(partial[4 * i + 1], first.y, d[4 * i + 1]);
    d[4 * i + 2] = fmaf(partial[4 * i + 2], second.x, d[4 * i + 2]);
    d[4 * i + 3] = fmaf(partial[4 * i + 3], second.y, d[4 * i + 3]);
  }
}

/* All of the depth. The products of one consumer are with the tensor cores while the other
 * promotes, and where registers allow, those of its other m64 tile as well. Returns the last stage,
 * which the caller releases. */
template <class S, int N>
__device__ __forceinline__ int multiply_w8a8(float (&d)[2][S::TOKENS / 2],
                                             const moelora_gemm_launch &g, Pipeline<S> &pipeline,
                                             int consumer, int depth_steps) {
  constexpr int TILES = kPaired<S> ? 2 : 1;
  const bool by_row = moelora_has_row_scales(g.weights.w.format);
  const int row = by_row ? (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7) : 0;
  int previous = 0;
  float partial[TILES][N / 2];
  bool full = false; // the next stage, as far as is known
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    const uint32_t place = pipeline.uniform_weights();
    const uint32_t weights = place + 2 * consumer * kM64Bytes;
    if (!full)
      pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    const uint64_t b = wgmma_descriptor(place + S::W_BYTES);
    const uint32_t token_scales_at = pipeline.token_scales();
    const uint32_t weight_scales = pipeline.weight_scales(2 * consumer) + row * 4;
    ThreadScales<N> token_scales;
    previous = pipeline.stage;
    pipeline.advance();
#pragma unroll
    for (int first = 0; first < 2; first += TILES) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
        multiply_e4m3<N>(partial[t], wgmma_descriptor(weights + (first + t) * kM64Bytes), b);
      float low[TILES], high[TILES]; // while the products take their time
      if (first == 0)
        token_scales.load(token_scales_at);
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const uint32_t scales = weight_scales + (first + t) * S::M64_SCALES;
        low[t] = __uint_as_float(load_shared_4(scales));
        high[t] = __uint_as_float(load_shared_4(scales + 32));
      }
      if (first == 2 - TILES)
        full = pipeline.is_full();
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if (t + 1 < TILES)
          wgmma_wait<1>();
        else
          wgmma_wait<0>();
        settle<N / 2>(partial[t]);
        if (by_row)
          promote<true, N>(d[first + t], partial[t], low[t], high[t], token_scales);
        else
          promote<false, N>(d[first + t], partial[t], low[t], 0.f, token_scales);
      }
    }
    __syncwarp(); // all lanes have read the scales
    if (step + 1 < depth_steps)
      pipeline.release(previous);
  }
  settle<N / 2>(d[0]);
  settle<N / 2>(d[1]);
  return previous;
}

#endif
