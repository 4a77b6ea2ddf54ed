/* Grouped GEMM for Hopper with FP8 weights and FP8 tokens, weights as operand A (swap_ab): bulk
 * copies, wgmma of e4m3, promotion to float32.
 *
 *   TMA warp        W(0) W(1) W(2)  ...       weights of step i and their scales
 *   gather warps    X(0) X(1) X(2)  ...       token scales of step i, and token rows unless TMA
 *                                             loads them (x ordered by position)
 *   consumer 0      wgmma 0 | promote 0 | wgmma 1 | promote 1 | ...
 *   consumer 1           | wgmma 0 | promote 0 | wgmma 1 | ...
 *
 * One consumer uses the tensor cores while the other, of this CTA or of another on the SM,
 * promotes. Up to 64 tokens, both m64 tiles of a consumer are in flight at once; with more tokens
 * there are no registers for a second rPartial. A k step covers 128 elements of K. Accumulators
 * rAcc[2][TOKENS / 2], see tile.cuh. */
#pragma once

#include "cuda/gemm/sm90/fp8.cuh"
#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/weight_tiles.cuh"

template <class S, class T> struct Fp8WeightMajorMainloop;

/* Returns the registers of a producer thread. Consumers need registers for rPartial, so producers
 * give up some and may spill per-tile state. */
constexpr int fp8_weight_major_producer_registers(int tokens, int consumers) {
  return consumers == 2 ? 104 : tokens > 32 ? 80 : 88;
}

template <class S> struct Fp8WeightMajorStorage {
  SharedStorage<S> gemm;
  alignas(16) ScalesOf<S> scales[S::STAGES];
};

template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER>
struct Fp8WeightMajorShape
    : KernelShape<TOKENS, CONSUMERS, STAGES, CLUSTER, MOELORA_KERNEL_W8A8>,
      RegisterBudget<fp8_weight_major_producer_registers(TOKENS, CONSUMERS), CONSUMERS> {
  static_assert(TOKENS <= 96, "registers of both accumulators");
  static constexpr int GATHER_LANES = 8;
  static constexpr int TILES_AT_ONCE = TOKENS <= 64 ? 2 : 1;

  using Stage = Fp8Stage<TOKENS, 2 * CONSUMERS>;
  template <class S> using Storage = Fp8WeightMajorStorage<S>;
  template <class S, class T> using Mainloop = Fp8WeightMajorMainloop<S, T>;
};

/* Returns the address of the current stage. Votes make it warp-uniform with less latency than a
 * shuffle. */
template <class S>
__device__ __forceinline__ uint32_t uniform_stage(const SharedMemory<S> &smem,
                                                  const GemmPipeline<S> &pipeline) {
  uint32_t at = smem.base;
#pragma unroll
  for (int bit = 1; bit < S::STAGES; bit *= 2)
    at += __all_sync(0xffffffffu, pipeline.stage & bit) ? bit * SharedMemory<S>::STAGE_BYTES : 0;
  return at;
}

/* Producer of the weights of a k step and their scales. Each CTA of a cluster loads a share of the
 * m64 tiles and multicasts it. */
template <class S> struct Fp8Loads : WeightTiles<S> {
  static __device__ __forceinline__ uint32_t bytes(const moelora_gemm_launch &g, const Tile &) {
    return S::TILES * (kM64Bytes + moelora_fp8_scale_bytes(g.weights.w.format));
  }
  __device__ __forceinline__ void load(const CUtensorMap *, const moelora_gemm_launch &g,
                                       const Tile &, int, const SharedMemory<S> &smem,
                                       const GemmPipeline<S> &pipeline, uint64_t policy) {
    const int first = this->first(), stage = pipeline.stage;
    const uint32_t scales = moelora_fp8_scale_bytes(g.weights.w.format);
#pragma unroll
    for (int i = 0; i < WeightTiles<S>::SHARE; i++) {
      const char *gW = this->gW[i];
      const uint32_t sW = smem.sW(stage) + (first + i) * kM64Bytes;
      const uint32_t sScale = sWScale<S>(smem, stage, first + i);
      if constexpr (S::CLUSTER == 1) {
        bulk_load(sW, gW, kM64Bytes, pipeline.full(), policy);
        bulk_load(sScale, gW + kM64Bytes, scales, pipeline.full(), policy);
      } else {
        bulk_load_multicast(sW, gW, kM64Bytes, pipeline.full(), policy);
        bulk_load_multicast(sScale, gW + kM64Bytes, scales, pipeline.full(), policy);
      }
    }
    this->advance(g, 1);
  }
};

/* Scales of a thread's tokens. */
template <int N> struct ThreadScales {
  uint4 v[(N + 15) / 16];

  __device__ __forceinline__ void load(uint32_t sScale) {
    sScale += (threadIdx.x & 3) * 16;
#pragma unroll
    for (int i = 0; i < (N + 15) / 16; i++)
      v[i] = load_shared_16(sScale + i * 64);
  }
  /* Returns the scales of this thread's two tokens in n8 tile i. */
  __device__ __forceinline__ float2 operator[](int i) const {
    const uint4 four = v[i / 2];
    return {__uint_as_float(i % 2 ? four.z : four.x), __uint_as_float(i % 2 ? four.w : four.y)};
  }
};

/* Adds rPartial * weight scales * token scales to rAcc. A thread's two rows have scales `low` and
 * `high` if BY_ROW, otherwise both have `low`. */
template <bool BY_ROW, int N>
__device__ __forceinline__ void promote(float *rAcc, const float *rPartial, float low, float high,
                                        const ThreadScales<N> &tokens) {
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    const float2 x = tokens[i];
    const float2 first = {low * x.x, low * x.y};
    const float2 second = BY_ROW ? float2{high * x.x, high * x.y} : first;
    rAcc[4 * i] = fmaf(rPartial[4 * i], first.x, rAcc[4 * i]);
    rAcc[4 * i + 1] = fmaf(rPartial[4 * i + 1], first.y, rAcc[4 * i + 1]);
    rAcc[4 * i + 2] = fmaf(rPartial[4 * i + 2], second.x, rAcc[4 * i + 2]);
    rAcc[4 * i + 3] = fmaf(rPartial[4 * i + 3], second.y, rAcc[4 * i + 3]);
  }
}

template <class S, class T> struct Fp8WeightMajorMainloop : WeightMajorMainloop<S, T> {
  using WeightLoads = Fp8Loads<S>;
  using Scales = TokenScales<S>;
  static constexpr bool RELEASES_ALIASED_STAGE = false;

  template <int N>
  static __device__ __forceinline__ int
  main_loop(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g, WarpContext<S> &warp,
            const TileHeader &, int k_steps) {
    constexpr int TILES = S::TILES_AT_ONCE;
    GemmPipeline<S> &pipeline = warp.pipeline;
    const bool by_row = moelora_has_row_scales(g.weights.w.format);
    const int row = by_row ? (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7) : 0;
    int previous = 0;
    float rPartial[TILES][N / 2];
    bool full = false; // whether the next stage is known to be full
#pragma unroll 1
    for (int step = 0; step < k_steps; step++) {
      // Wait for the stage.
      const uint32_t stage = uniform_stage(warp.smem, pipeline);
      const uint32_t sW = stage + 2 * warp.consumer * kM64Bytes;
      if (!full)
        pipeline.wait_full();
      fence_async_proxy(); // make writes to sX by cp.async visible to wgmma
      const uint64_t b = wgmma_descriptor(stage + (uint32_t)offsetof(typename S::Stage, sX));
      const uint32_t token_scales_at = sXScale<S>(warp.smem, pipeline.stage);
      const uint32_t weight_scales =
          sWScale<S>(warp.smem, pipeline.stage, 2 * warp.consumer) + row * 4;
      ThreadScales<N> token_scales;
      previous = pipeline.stage;
      pipeline.advance();

#pragma unroll
      for (int first = 0; first < 2; first += TILES) {
        // Issue the wgmmas of TILES m64 tiles.
#pragma unroll
        for (int t = 0; t < TILES; t++)
          wgmma_e4m3<N>(rPartial[t], wgmma_descriptor(sW + (first + t) * kM64Bytes), b);

        // While they run, load the scales and test whether the next stage is full.
        float low[TILES], high[TILES];
        if (first == 0)
          token_scales.load(token_scales_at);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const uint32_t scales = weight_scales + (first + t) * kM64ScaleBytes;
          low[t] = __uint_as_float(load_shared_4(scales));
          high[t] = __uint_as_float(load_shared_4(scales + 32));
        }
        if (first == 2 - TILES)
          full = pipeline.is_full();

        // Promote each tile as soon as its wgmmas complete.
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (t + 1 < TILES)
            wgmma_wait<1>();
          else
            wgmma_wait<0>();
          fence_accumulators<N / 2>(rPartial[t]);
          if (by_row)
            promote<true, N>(rAcc[first + t], rPartial[t], low[t], high[t], token_scales);
          else
            promote<false, N>(rAcc[first + t], rPartial[t], low[t], 0.f, token_scales);
        }
      }

      // Release the stage, but leave the last one to add_adapters.
      __syncwarp(); // all lanes have read the scales
      if (step + 1 < k_steps)
        pipeline.release(previous);
    }
    fence_accumulators<N / 2>(rAcc[0]);
    fence_accumulators<N / 2>(rAcc[1]);
    return previous;
  }
};
