/* Grouped GEMM for Hopper with quantized weights, 16-bit x and more than 16 tokens: bulk copies,
 * dequantization in registers, wgmma with operand A in registers.
 *
 *   TMA warp        W(0)  W(1)  ...                quantized tiles of step i
 *   gather warps    X(0)  X(1)  ...                token rows of step i, if gathered
 *   consumers       dequantize 0 | dequantize 1 | dequantize 2 | ...    k16 slab by k16 slab
 *                                | wgmma 0      | wgmma 1      | ...    overlaps next dequantize
 *
 * Operand A is double-buffered in registers: a k16 slab is dequantized into one buffer while wgmma
 * reads the other. Up to 96 tokens, the two m64 tiles of a consumer are in flight together; larger
 * accumulators leave no registers for that. A k step covers 128 elements of K. Accumulators
 * rAcc[2][TOKENS / 2], see tile.cuh. */
#ifndef MOELORA_CUDA_SM90_DEQUANTIZE_CUH
#define MOELORA_CUDA_SM90_DEQUANTIZE_CUH

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/weight_tiles.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/wgmma.cuh"

template <class S, class T> struct DequantizeMainloop;

/* Returns the registers of a producer thread. Consumers need registers for dequantization, so
 * producers give up some and may spill per-tile state. */
constexpr int dequantize_producer_registers(int tokens, int consumers) {
  if (consumers == 1)
    return tokens > 32 ? 96 : 88;
  return tokens <= 96 ? 104 : tokens <= 128 ? 88 : 72;
}

template <int TOKENS, int CONSUMERS, int STAGES, moelora_kernel_format FORMAT_, bool ZEROS_>
struct DequantizeShape
    : KernelShape<TOKENS, CONSUMERS, STAGES, 1, FORMAT_>,
      RegisterBudget<dequantize_producer_registers(TOKENS, CONSUMERS), CONSUMERS> {
  static constexpr bool ZEROS = ZEROS_; // formats may have zero points
  static constexpr int SPANS = kQuantizedSpans;
  static constexpr int GATHER_LANES = 4;
  static constexpr int TILES_AT_ONCE = TOKENS <= 96 ? 2 : 1;

  using Stage = QuantizedStage<TOKENS, 2 * CONSUMERS, FORMAT_>;
  // With one consumer, two CTAs share an SM, whose memory has no room for the table.
  static constexpr bool PAIRS = FormatTraits<FORMAT_>::IS_LOOKED_UP && CONSUMERS == 2;
  template <class S> using Storage = std::conditional_t<PAIRS, PairsStorage<S>, SharedStorage<S>>;
  template <class S, class T> using Mainloop = DequantizeMainloop<S, T>;
};

template <class S, class T> struct DequantizeMainloop : WeightMajorMainloop<S, T> {
  static constexpr int TILES = S::TILES_AT_ONCE;
  using Fragment = TileFragment<S::FORMAT, T, S::ZEROS>;
  using WeightLoads = QuantizedLoads<S>;

  /* Dequantizes k16 slab K of TILES m64 tiles into rA and issues its wgmmas. First waits for the
   * wgmmas that last read rA; those that read the other buffer stay in flight. */
  template <int K, int N>
  static __device__ __forceinline__ void wgmma_slab(float (*rAcc)[S::TOKENS / 2],
                                                    uint32_t (&rA)[TILES][4], Fragment *rW,
                                                    uint64_t b, const CodePairs<T, false> &pairs) {
    [[maybe_unused]] uint32_t codes[TILES][4];
#pragma unroll
    for (int i = 0; S::PAIRS && i < TILES * 4; i++)
      codes[i / 4][i % 4] = pairs.look_up(rW[i / 4].words[K], i % 4);
    wgmma_wait<1>();
#pragma unroll
    for (int t = 0; t < TILES; t++)
      if constexpr (S::PAIRS)
        rW[t].scale(rA[t], codes[t]);
      else
        rW[t].template dequantize<K>(rA[t]);
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < TILES; t++)
      Wgmma<N>::template mma_registers<Element<T>::is_bf16>(rAcc[t], rA[t], b + 2 * K);
    wgmma_commit();
  }

  template <int N>
  static __device__ __forceinline__ int
  main_loop(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g, WarpContext<S> &warp,
            const TileHeader &, int k_steps) {
    GemmPipeline<S> &pipeline = warp.pipeline;
    const moelora_format format = g.weights.w.format;
    const LaneOffsets at = LaneOffsets::find<S::FORMAT>(threadIdx.x >> 5 & 3, format);
    int previous = 0;
    const CodePairs<T, false> pairs(opaque(warp.smem.pairs())); // is not kept between tiles
    uint32_t rA[2][TILES][4];
#pragma unroll 1
    for (int step = 0; step < k_steps; step++) {
      // Wait for the stage.
      pipeline.wait_full();
      if (g.tokens.divisor.value)
        fence_async_proxy(); // make writes to sX by cp.async visible to wgmma

      // TMA has probably read the outputs of the previous tile by now, so that this wait is short.
      if (WarpContext<S>::ALIASED_BUFFERS > 0 && step == 1)
        warp.release_aliased_stage();

      const uint32_t sW = warp.smem.sW(pipeline.stage) + 2 * warp.consumer * S::Stage::SLOT_BYTES;
      const uint64_t b = wgmma_descriptor(uniform(warp.smem.sX(pipeline.stage)));
#pragma unroll
      for (int span = 0; span < S::SPANS; span++) {
#pragma unroll
        for (int first = 0; first < 2; first += TILES) {
          // Load this lane's values, scales and zero points.
          Fragment rW[TILES];
#pragma unroll
          for (int t = 0; t < TILES; t++)
            rW[t].load_span(sW + (first + t) * S::Stage::SLOT_BYTES, span, at, format);

          // Dequantize each slab and issue its wgmmas.
          const uint64_t tokens = b + span * (S::TOKENS * kRowBytes / 16);
          wgmma_slab<0, N>(rAcc + first, rA[0], rW, tokens, pairs);
          wgmma_slab<1, N>(rAcc + first, rA[1], rW, tokens, pairs);
          wgmma_slab<2, N>(rAcc + first, rA[0], rW, tokens, pairs);
          wgmma_slab<3, N>(rAcc + first, rA[1], rW, tokens, pairs);

          // The wgmmas of the previous step have completed: release its stage.
          if (step > 0 && span == 0 && first == 0)
            pipeline.release(previous);
        }
      }
      previous = pipeline.stage;
      pipeline.advance();
    }
    if constexpr (S::Format::HAS_TILE_SCALE) {
      wgmma_wait<0>();
      scale_accumulators<S, T, N>(rAcc, warp, previous);
    }
    return previous;
  }
};

#endif
