/* The base product of quantised weights. A warp makes operand A in registers, a few k16 slabs at a
 * time, while the tensor cores take those before. */
#ifndef MOELORA_CUDA_SM90_QUANTIZED_CUH
#define MOELORA_CUDA_SM90_QUANTIZED_CUH

#include "cuda/gemm/common/format.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/ptx/wgmma.cuh"

/* k16 slabs that are made, and multiplied, together. A product of few tokens is mostly latency:
 * there a group is all of a tile's 64 of depth. Accumulators of many tokens leave no registers for
 * that. */
template <class S> constexpr int kGroup = S::TOKENS <= 32 ? 4 : S::TOKENS <= 64 ? 2 : 1;

/* Adds the group from slab FIRST on of an m64 tile. `a` is what the group before the last was in;
 * the last may still be running. */
template <int FIRST, int N, int GROUP, class F>
__device__ __forceinline__ void multiply_group(float *d, uint32_t (&a)[GROUP][4], const F &tile,
                                               uint64_t b) {
  wgmma_wait<1>();
  tile.template dequantize<FIRST>(a[0]);
  if constexpr (GROUP > 1)
    tile.template dequantize<FIRST + 1>(a[1]);
  if constexpr (GROUP > 2)
    tile.template dequantize<2>(a[2]), tile.template dequantize<3>(a[3]);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < GROUP; i++)
    Wgmma<N>::template mma_registers<F::IS_BF16>(d, a[i], b + 2 * (FIRST + i));
  wgmma_commit();
}

/* All of the depth. Returns the last stage, which wgmma may still read. */
template <class S, class T, int N>
__device__ __forceinline__ int multiply_quantized(float (&d)[2][S::TOKENS / 2],
                                                  const moelora_gemm_launch &g,
                                                  Pipeline<S> &pipeline, int consumer) {
  constexpr int GROUP = kGroup<S>;
  const int depth_steps = (g.tokens.k + kDepth - 1) / kDepth, warp = threadIdx.x >> 5 & 3;
  const uint32_t bytes = tile_bytes<S::FORMAT>(g.weights.w.format);
  int previous = 0;
  uint32_t a[2][GROUP][4];
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    const uint32_t weights = pipeline.weights() + 2 * consumer * bytes;
    const uint64_t b = wgmma_descriptor(pipeline.tokens());
    if (S::ALIASED_BUFFERS > 0 && step == 1)
      release_aliased_stage(pipeline, consumer);
    TileFragment<S::FORMAT, T> tiles[GROUP == 4 ? 2 : 1];
    tiles[0].load(weights, warp, g.weights.w.format);
    if constexpr (GROUP == 4)
      tiles[1].load(weights + bytes, warp, g.weights.w.format);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (GROUP < 4 && half == 1)
        tiles[0].load(weights + bytes, warp, g.weights.w.format);
      const TileFragment<S::FORMAT, T> &tile = tiles[GROUP == 4 ? half : 0];
      multiply_group<0, N>(d[half], a[GROUP == 4 ? half : 0], tile, b);
      if constexpr (GROUP == 1)
        multiply_group<1, N>(d[half], a[1], tile, b);
      if constexpr (GROUP < 4)
        multiply_group<2, N>(d[half], a[GROUP == 2], tile, b);
      if constexpr (GROUP == 1)
        multiply_group<3, N>(d[half], a[1], tile, b);
      // The last stage's products were awaited before the second group of this one.
      if (step > 0 && half == (GROUP == 4))
        pipeline.release(previous);
    }
    previous = pipeline.stage;
    pipeline.advance();
  }
  return previous;
}

#endif
