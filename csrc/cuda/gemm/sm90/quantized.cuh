/* The base product of quantised weights. A warp makes operand A in registers, 16 of depth at a
 * time, while the tensor cores take the 16 before. */
#ifndef MOELORA_CUDA_SM90_QUANTIZED_CUH
#define MOELORA_CUDA_SM90_QUANTIZED_CUH

#include "cuda/gemm/common/format.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/ptx/wgmma.cuh"

/* Adds k16 slab SLAB of an m64 tile. Of the products before, the last may still be running: it
 * reads the other half of a. */
template <int SLAB, int N, class F>
__device__ __forceinline__ void multiply_slab(float *d, uint32_t (&a)[2][4], const F &tile,
                                              uint64_t b) {
  wgmma_wait<1>();
  tile.template dequantize<SLAB>(a[SLAB % 2]);
  wgmma_fence();
  Wgmma<N>::template mma_registers<F::IS_BF16>(d, a[SLAB % 2], b + 2 * SLAB);
  wgmma_commit();
}

/* All of the depth. Returns the last stage, which wgmma may still read. */
template <class S, class T, int N>
__device__ __forceinline__ int multiply_quantized(float (&d)[2][S::TOKENS / 2],
                                                  const moelora_gemm_launch &g,
                                                  Pipeline<S> &pipeline, int consumer) {
  const int depth_steps = (g.tokens.k + kDepth - 1) / kDepth, warp = threadIdx.x >> 5 & 3;
  const uint32_t bytes = tile_bytes<S::FORMAT>(g.weights.w.format);
  int previous = 0;
  uint32_t a[2][4];
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    const uint64_t b = wgmma_descriptor(pipeline.tokens());
    if (S::ALIASED_BUFFERS > 0 && step == 1)
      release_aliased_stage(pipeline, consumer);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      TileFragment<S::FORMAT, T> tile;
      tile.load(pipeline.weights() + (2 * consumer + half) * bytes, warp, g.weights.w.format);
      multiply_slab<0, N>(d[half], a, tile, b);
      multiply_slab<1, N>(d[half], a, tile, b);
      if (half == 0 && step > 0)
        pipeline.release(previous); // its last product was awaited
      multiply_slab<2, N>(d[half], a, tile, b);
      multiply_slab<3, N>(d[half], a, tile, b);
    }
    previous = pipeline.stage;
    pipeline.advance();
  }
  return previous;
}

#endif
