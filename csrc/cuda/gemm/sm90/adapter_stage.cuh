/* Consumer side of the adapter stages: after the last k step of a tile, accumulates B xa into the
 * same accumulators. See adapter_layout.cuh and adapter_loads.cuh. */
#ifndef MOELORA_CUDA_SM90_ADAPTER_STAGE_CUH
#define MOELORA_CUDA_SM90_ADAPTER_STAGE_CUH

#include "cuda/gemm/sm90/adapter_layout.cuh"
#include "cuda/gemm/sm90/warp_context.cuh"
#include "cuda/gemm/sm90/fixup.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/wgmma.cuh"

/* Offset in sX from which a lane loads a pair of n8 tiles of a k16 slab with one ldmatrix. Slab K
 * is at `^ K << 5`. */
__device__ __forceinline__ uint32_t token_offset() {
  const int lane = threadIdx.x & 31, row = lane & 7;
  return ((lane >> 4) * 8 + row) * kRowBytes + ((lane >> 3 & 1 ^ row) << 4);
}

/* A full adapter stage, and this consumer's rows of B in it. */
template <class S, class T> struct AdapterStage {
  SlabsHeader header;
  SlabLayout<S> layout;
  uint32_t sB; // rows of B of the consumer's first m64 tile
  int next;    // byte offset from the first m64 tile to the second; 0 in a half tile
  bool nonfinite;

  /* Waits for the stage. clears: zero the non-finite elements of B first (see fixup.cuh). */
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

/* Multiplies an adapter stage with mma.sync, for N <= 32 tokens, where the latency of wgmma
 * dominates. mma.sync and wgmma round identically. */
template <class S, class T, int N>
__device__ __forceinline__ void mma_slabs(float (&rAcc)[2][S::TOKENS / 2],
                                          const moelora_gemm_launch &g, const WarpContext<S> &warp,
                                          const SlabsHeader &header) {
  const SlabLayout<S> layout = {header.width};
  const int stage = warp.pipeline.stage;
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
  // Swizzle: a row has 2 * width chunks; logical chunk c is at c ^ first.
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

/* Adapter stages of the weight-major (swap_ab) kernels. */
template <class S, class T> struct WeightMajorAdapters {
  /* Accumulates the current adapter stage and releases stage `previous`. Returns whether elements
   * of B were cleared. */
  template <int N>
  static __device__ __forceinline__ bool
  add_stage(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g,
            const WarpContext<S> &warp, const TileHeader &, int previous, bool clears) {
    // With two CTAs per SM, release the stage early: the other CTA covers the wait.
    if (S::RESIDENT > 1)
      wgmma_wait<0>(), warp.pipeline.release(previous);

    const AdapterStage<S, T> stage = AdapterStage<S, T>::wait(g, warp, false, clears);

    // Up to 32 tokens: use mma.sync.
    if constexpr (S::TOKENS <= 32) {
      mma_slabs<S, T, N>(rAcc, g, warp, stage.header);
      __syncwarp(); // all lanes have read the stage
      return stage.nonfinite;
    }

    // Release stage `previous` once its wgmmas have completed.
    fence_async_proxy(); // make writes by cp.async and by `clear` visible to wgmma
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
        wgmma_wait<0>(); // promotion has written the accumulators, so no wgmma may be in flight
    }
    return stage.nonfinite;
  }

  /* Checks the tile's first two tokens: whether each row has a finite accumulator for at least one
   * of them. Only lanes that hold column 0 take part, because these tokens are never padding. */
  static __device__ __forceinline__ bool are_finite(const float (&rAcc)[2][S::TOKENS / 2], int) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *two = &rAcc[i / 2][i % 2 * 2];
      const float least = fminf(fabsf(two[0]), fabsf(two[1])); // the finite one, if any
      most = max_nan(most, least);
    }
    return (threadIdx.x & 3) != 0 || most < __builtin_inff();
  }
};

/* Accumulates all adapter stages of a tile and completes its wgmmas. `last` is the stage of the
 * last k step. Adapters is WeightMajorAdapters or Fp8TokenMajorMainloop. */
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
