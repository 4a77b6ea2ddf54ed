/* Adapter stages, the consumers' side: the products of rows of B with rows of xa, in the same
 * accumulators, after the last k step of a tile. See adapter_layout.cuh and adapter_loads.cuh. */
#ifndef MOELORA_CUDA_SM90_ADAPTER_STAGE_CUH
#define MOELORA_CUDA_SM90_ADAPTER_STAGE_CUH

#include "cuda/gemm/sm90/adapter_layout.cuh"
#include "cuda/gemm/sm90/warp_context.cuh"
#include "cuda/gemm/sm90/fixup.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/wgmma.cuh"

/* Where a lane reads n8 tiles of 16 of depth in sX, two by one ldmatrix: slab K at `^ K << 5`. */
__device__ __forceinline__ uint32_t token_offset() {
  const int lane = threadIdx.x & 31, row = lane & 7;
  return ((lane >> 4) * 8 + row) * kRowBytes + ((lane >> 3 & 1 ^ row) << 4);
}

/* An adapter stage that is full, and this consumer's rows of B in it. */
template <class S, class T> struct AdapterStage {
  SlabsHeader header;
  SlabLayout<S> layout;
  uint32_t sB; // of the consumer's first m64 tile
  int next;    // bytes from there to the second; 0 in a half tile
  bool nonfinite;

  /* Waits for the stage. clears: B may hold what is not finite where products must be zero. */
  static __device__ __forceinline__ AdapterStage wait(const moelora_gemm_launch &g,
                                                      const WarpContext<S> &warp, bool half,
                                                      bool clears) {
    warp.pipeline.wait_full();
    const int stage = warp.pipeline.stage;
    const SlabsHeader header = SlabsHeader::read(warp.smem.header(stage));
    const SlabLayout<S> layout = {header.width};
    const int first = layout.m64(slab_m64<S>(g, first_m64(half, warp.consumer)));
    const int next = half ? 0 : layout.m64(slab_m64<S>(g, 2 * warp.consumer + 1)) - first;
    const uint32_t sB = warp.smem.sW(stage) + first;
    const bool nonfinite = clears && NonFinite<S, T>::clear(sB, next, warp.consumer, header);
    return {header, layout, sB, next, nonfinite};
  }
};

/* Products of an adapter stage with N <= 32 tokens by mma.sync: of so few, wgmma is mostly latency.
 * Both round alike. */
template <class S, class T, int N>
__device__ __forceinline__ void mma_slabs(float (&rAcc)[2][S::TOKENS / 2],
                                          const moelora_gemm_launch &g, const WarpContext<S> &warp,
                                          const SlabsHeader &header) {
  const SlabLayout<S> layout = {header.width};
  const int stage = warp.pipeline.stage;
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
  // The swizzle: a row of `width` slabs begins in chunk `first`, and has twice as many of them.
  const int first = row >> (2 - header.width / 2) & (2 * header.width - 1);
  const uint32_t sB = warp.smem.sW(stage) + row * 32 * header.width + ((lane >> 4 ^ first) << 4);
  const uint32_t sXa = warp.smem.sX(stage) + token_offset();
  const bool gate_up = has_gate_up_slices(g);
#pragma unroll 1
  for (int j = 0; j < header.slabs; j++) {
    const uint32_t slab = header.width == 1 ? sB + layout.slab(j) : sB ^ layout.slab(j);
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const uint32_t at = sXa ^ (gate_up ? 2 * j + t : j) << 5;
      uint32_t rB[4], rXa[(N + 8) / 16][4];
      load_matrix_x4(rB, slab + layout.m64(slab_m64<S>(g, 2 * warp.consumer + t)));
#pragma unroll
      for (int i = 0; i < (N + 8) / 16; i++)
        load_matrix_x4(rXa[i], at + i * 16 * kRowBytes);
#pragma unroll
      for (int n8 = 0; n8 < N / 8; n8++)
        mma_16816<T>(&rAcc[t][n8 * 4], rB, &rXa[n8 / 2][n8 % 2 * 2]);
    }
  }
}

/* Adapter stages where weight rows are operand A. */
template <class S, class T> struct WeightMajorAdapters {
  /* Adds the stage at hand, and releases stage `previous`. Returns true if something in B was
   * cleared. */
  template <int N>
  static __device__ __forceinline__ bool
  add_stage(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g,
            const WarpContext<S> &warp, const TileHeader &, int previous, bool clears) {
    // Two CTAs of an SM fill each other's gaps: there stages rather become free early.
    if (S::RESIDENT > 1)
      wgmma_wait<0>(), warp.pipeline.release(previous);

    const AdapterStage<S, T> stage = AdapterStage<S, T>::wait(g, warp, false, clears);

    // Up to 32 tokens: mma.sync.
    if constexpr (S::TOKENS <= 32) {
      mma_slabs<S, T, N>(rAcc, g, warp, stage.header);
      __syncwarp(); // all lanes have read the stage
      return stage.nonfinite;
    }

    // The last products have read stage `previous`.
    fence_async_proxy(); // cp.async, or `clear`, wrote through the generic proxy
    if (S::RESIDENT == 1)
      wgmma_wait<0>(), warp.pipeline.release(previous);

    // Issue the wgmmas of each slab.
    const uint64_t a = stage.layout.descriptor(stage.sB),
                   b = wgmma_descriptor(warp.smem.sX(warp.pipeline.stage));
    const XaLayout xa(g);
#pragma unroll 1
    for (int j = 0; j < stage.header.slabs; j++) {
      wgmma_fence();
      const uint64_t slab = a + stage.layout.slab(j) / 16;
      Wgmma<N>::template mma<Element<T>::is_bf16>(rAcc[0], slab, b + xa.slab * j);
      Wgmma<N>::template mma<Element<T>::is_bf16>(rAcc[1], slab + stage.next / 16,
                                                  b + xa.slab * j + xa.up);
      wgmma_commit();
      if (S::Format::IS_W8A8)
        wgmma_wait<0>(); // promotion has written the accumulators: no product may be in flight
    }
    return stage.nonfinite;
  }

  /* Whether each row of a tile has a finite accumulator among the two tokens of the tile's first
   * that a thread holds. Only lanes of the first column answer: their tokens are not padding. */
  static __device__ __forceinline__ bool are_finite(const float (&rAcc)[2][S::TOKENS / 2], int) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *two = &rAcc[i / 2][i % 2 * 2];
      const float least = fminf(fabsf(two[0]), fabsf(two[1])); // the finite one
      most = max_nan(most, least);
    }
    return (threadIdx.x & 3) != 0 || most < __builtin_inff();
  }
};

/* Adds all adapter stages of a tile whose last k step was in stage `last`, and ends the tile's
 * products. Adapters: WeightMajorAdapters, or those of fp8_token_major.cuh. */
template <class Adapters, int N, class S>
__device__ __forceinline__ PendingCheck add_adapters(float (&rAcc)[2][S::TOKENS / 2],
                                                     const moelora_gemm_launch &g,
                                                     WarpContext<S> &warp, const TileHeader &header,
                                                     int last) {
  GemmPipeline<S> &pipeline = warp.pipeline;
  const AdaptersHeader adapters = AdaptersHeader::read(warp.smem.header(last));
  const bool clears = adapters.ragged || (adapters.shared && FixupPass<S>(warp.smem).is_running());
  bool nonfinite = false;
#pragma unroll 1
  for (int i = 0; i < adapters.stages; i++) {
    nonfinite |= Adapters::template add_stage<N>(rAcc, g, warp, header, last, clears);
    last = pipeline.stage;
    pipeline.advance();
  }
  wgmma_wait<0>();
  warp.take_last_stage(last);
  return nonfinite                    ? PendingCheck::FIX_UP
         : adapters.shared && !clears ? PendingCheck::CHECK_ACCUMULATORS
                                      : PendingCheck::NOTHING;
}

#endif
