/* Quantised weights: where their tiles lie, and their base product with x as it is. A warp makes
 * operand A in registers, a few k16 slabs at a time, while the tensor cores take those before: by
 * wgmma, or for up to 16 tokens by mma.sync, whose operands and sums lie alike. wgmma takes some
 * 150 cycles for each 16 of depth however few tokens there are, and until then nobody may touch its
 * registers; of the other's products there are many on their way, and the compiler mixes them with
 * what makes their numbers. For more tokens the tensor cores have no time left for those. */
#ifndef MOELORA_CUDA_SM90_QUANTIZED_CUH
#define MOELORA_CUDA_SM90_QUANTIZED_CUH

#include "cuda/gemm/common/format.cuh"
#include "cuda/gemm/sm90/adapters.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"

/* Where this CTA's share of a tile's m64 tiles of quantised weights lies, at the step to come: one
 * lane has to start copies of 2 to 8 KB as fast as memory brings them. */
template <class S> struct QuantizedTiles {
  static constexpr int SHARE = S::TILES / S::CLUSTER, MOST = S::ODD_BLOCKS ? S::TILES : SHARE;
  const char *at[MOST];
  int count;    // of the share
  bool are_all; // the share is all of the tile: nothing comes from the cluster's other CTA

  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const ClusterTile &tile) {
    if constexpr (!S::Format::IS_NATIVE) {
      are_all = S::CLUSTER == 1 || (S::ODD_BLOCKS && tile.is_shared());
      count = (are_all ? S::TILES : SHARE) >> is_half<S>(tile);
#pragma unroll
      for (int i = 0; i < MOST; i++) {
        const int m64 = first() + i;
        at[i] = quantized_tile(g, tile.expert, m64, first_output<S>(g, tile, m64));
      }
    }
  }
  __device__ __forceinline__ int first() const { return are_all ? 0 : (int)cluster_rank() * count; }
  __device__ __forceinline__ void advance(const moelora_gemm_launch &g, int tiles) {
#pragma unroll
    for (int i = 0; i < MOST; i++)
      at[i] += tiles * g.weights.w.stride_kt;
  }
};

/* Whether the two m64 tiles of a consumer are multiplied in turns: products of few tokens are
 * mostly latency, which two sums share. Accumulators of many tokens leave no registers for that,
 * and need it less; FP8 has second ones. */
template <class S> constexpr bool kPaired = S::TOKENS <= (S::Format::IS_W8A8 ? 64 : 96);

/* Adds slab K of both m64 tiles, with N tokens at `tokens`. */
template <int K, int N, class T, class F, int D>
__device__ __forceinline__ void multiply_slab(float (&d)[2][D], const F (&tiles)[2],
                                              uint32_t tokens) {
  static_assert(N == 8 || N == 16, "what one instruction loads");
  uint32_t b[N / 4], a[2][4];
  if constexpr (N == 16)
    load_matrix_x4(b, tokens ^ K << 5);
  else
    load_matrix_x2(b, tokens ^ K << 5);
  tiles[0].template dequantize<K>(a[0]);
  tiles[1].template dequantize<K>(a[1]);
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int t = 0; t < 2; t++)
      mma_16816<T>(&d[t][j * 4], a[t], &b[j * 2]);
}

/* All of the depth, by mma.sync. Returns the last stage, which nobody has left. */
template <class S, class T, int N>
__device__ __forceinline__ int multiply_few(float (&d)[2][S::TOKENS / 2],
                                            const moelora_gemm_launch &g, Pipeline<S> &pipeline,
                                            int depth_steps) {
  using F = TileFragment<S::FORMAT, T, S::ZEROS>;
  const moelora_format format = g.weights.w.format;
  const uint32_t bytes = S::Format::tile_bytes(format), offset = token_offset();
  const LanePlaces at = LanePlaces::find<S::FORMAT>(threadIdx.x >> 5 & 3, format);
  for (int step = 1;; step++) {
    pipeline.wait_full();
#pragma unroll
    for (int span = 0; span < S::SPANS; span++) {
      F tiles[2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const uint32_t slot = pipeline.weights() + t * S::SPANS * S::SLOT_BYTES + span * bytes;
        tiles[t].load(slot + at.values, slot + at.scales, slot + at.zeros, format);
      }
      const uint32_t tokens = pipeline.tokens(span) + offset;
      multiply_slab<0, N, T>(d, tiles, tokens);
      multiply_slab<1, N, T>(d, tiles, tokens);
      multiply_slab<2, N, T>(d, tiles, tokens);
      multiply_slab<3, N, T>(d, tiles, tokens);
    }
    const int stage = pipeline.stage;
    pipeline.advance();
    if (step == depth_steps)
      return stage;
    __syncwarp(); // all lanes have read it
    pipeline.release(stage);
  }
}

/* Adds slab K of TILES m64 tiles. Operand A is made in what that of the slab before the last was
 * in; the last may still be running. */
template <int K, int N, int TILES, int D, class F>
__device__ __forceinline__ void multiply_group(float (*d)[D], uint32_t (&a)[TILES][4],
                                               const F *tiles, uint64_t b) {
  wgmma_wait<1>();
#pragma unroll
  for (int t = 0; t < TILES; t++)
    tiles[t].template dequantize<K>(a[t]);
  wgmma_fence();
#pragma unroll
  for (int t = 0; t < TILES; t++)
    Wgmma<N>::template mma_registers<F::IS_BF16>(d[t], a[t], b + 2 * K);
  wgmma_commit();
}

/* All of the depth, by wgmma. Returns the last stage, which that may still read. */
template <class S, class T, int N>
__device__ __forceinline__ int
multiply_quantized(float (&d)[2][S::TOKENS / 2], const moelora_gemm_launch &g,
                   Pipeline<S> &pipeline, int consumer, int depth_steps) {
  using F = TileFragment<S::FORMAT, T, S::ZEROS>;
  constexpr int TILES = kPaired<S> ? 2 : 1;
  const moelora_format format = g.weights.w.format;
  const uint32_t bytes = S::Format::tile_bytes(format);
  const LanePlaces at = LanePlaces::find<S::FORMAT>(threadIdx.x >> 5 & 3, format);
  int previous = 0;
  uint32_t a[2][TILES][4];
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    pipeline.wait_full();
    if (g.tokens.divisor.value)
      fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    if (S::ALIASED_BUFFERS > 0 && step == 1)
      release_aliased_stage(pipeline, consumer);
    const uint32_t weights = pipeline.weights() + 2 * consumer * S::SPANS * S::SLOT_BYTES;
    const uint64_t b = wgmma_descriptor(uniform(pipeline.tokens()));
#pragma unroll
    for (int span = 0; span < S::SPANS; span++) {
#pragma unroll
      for (int first = 0; first < 2; first += TILES) {
        F tiles[TILES];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const uint32_t slot = weights + (first + t) * S::SPANS * S::SLOT_BYTES + span * bytes;
          tiles[t].load(slot + at.values, slot + at.scales, slot + at.zeros, format);
        }
        const uint64_t tokens = b + span * (S::TOKENS * kRowBytes / 16);
        multiply_group<0, N>(d + first, a[0], tiles, tokens);
        multiply_group<1, N>(d + first, a[1], tiles, tokens);
        multiply_group<2, N>(d + first, a[0], tiles, tokens);
        multiply_group<3, N>(d + first, a[1], tiles, tokens);
        if (step > 0 && span == 0 && first == 0)
          pipeline.release(previous); // its products were awaited before the second group
      }
    }
    previous = pipeline.stage;
    pipeline.advance();
  }
  return previous;
}

#endif
