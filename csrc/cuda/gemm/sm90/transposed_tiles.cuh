/* Grouped products y W of a backward for Hopper with quantized weights: bulk copies, tiles
 * dequantized and transposed in registers, wgmma with operand A in registers.
 *
 *   TMA warp        W(0)  W(1)  ...                quantized tiles of step i
 *   gather warps    Y(0)  Y(1)  ...                rows of y of step i, if gathered
 *   consumers       dequantize 0 | dequantize 1 | dequantize 2 | ...    two k16 slabs each
 *                                | wgmma 0      | wgmma 1      | ...    overlaps next dequantize
 *
 * The rows of W are K, its columns the outputs. A k step covers 128 elements of K: two rows of
 * tiles, or one row of gate tiles and one of up tiles if gate and up rows alternate in K.
 *
 *   sW [2][tiles of columns]         two rows of tiles, laid out as in memory
 *   sX [2][TOKENS]                   rows of y, 64 elements of K each
 *
 * Each of a consumer's two m64 tiles has a register buffer for operand A: while wgmma reads both,
 * the next operand is dequantized, and transposed into the buffer that is free first. See
 * common/transposed_tiles.cuh for the transpose. */
#ifndef MOELORA_CUDA_SM90_TRANSPOSED_TILES_CUH
#define MOELORA_CUDA_SM90_TRANSPOSED_TILES_CUH

#include "cuda/gemm/common/transposed_tiles.cuh"
#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/wgmma.cuh"

#include <type_traits>

template <class S, class T> struct TransposedTilesMainloop;

/* Producers give up registers for dequantization, as in dequantize.cuh. ZEROS_: formats may have
 * zero points. */
template <int TOKENS, int CONSUMERS, int STAGES, moelora_kernel_format FORMAT_, bool ZEROS_>
struct TransposedTilesShape : KernelShape<TOKENS, CONSUMERS, STAGES, 1, FORMAT_>,
                              RegisterBudget<CONSUMERS == 1 ? 96 : 88, CONSUMERS> {
  using Base = KernelShape<TOKENS, CONSUMERS, STAGES, 1, FORMAT_>;
  using Format = FormatTraits<FORMAT_>;
  static constexpr bool TRANSPOSED = true, GENERAL_EPILOGUE = false;
  static constexpr bool ZEROS = ZEROS_;
  static constexpr int SPANS = 2, GATHER_LANES = 4;
  // With more sizes of N there are too few registers for wgmmas in flight.
  static constexpr int STEP = 32, LEAST = 96;
  static_assert(TOKENS == 128, "sizes of N");
  // Number of tiles that hold a CTA's outputs, in one row of tiles.
  static constexpr int COLUMN_TILES = Base::ROWS / Format::TILE_DEPTH;
  static constexpr int SPAN_BYTES = COLUMN_TILES * Format::MAX_TILE_BYTES;

  struct Stage {
    uint8_t sW[(SPANS * SPAN_BYTES + 1023) / 1024 * 1024]; // weights and scales
    SwizzledRow sX[SPANS][TOKENS];                         // rows of y
  };
  static constexpr bool PAIRS = Format::IS_LOOKED_UP;
  template <class S> using Storage = std::conditional_t<PAIRS, PairsStorage<S>, SharedStorage<S>>;
  template <class S, class T> using Mainloop = TransposedTilesMainloop<S, T>;
};

template <class S, class T> struct TransposedTilesMainloop : WeightMajorMainloop<S, T> {
  /* Producer of the weights of a k step: issues a bulk copy for each of its two rows of tiles.
   * Tiles past the last output are not loaded; their outputs are not stored. In a row of tiles past
   * the end of K, y is zero and weights may be anything: the last row is loaded again. */
  struct WeightLoads {
    const char *gW; // the CTA's first tile in the first row of tiles
    uint32_t share; // bytes of the CTA's part of a row of tiles

    __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const ClusterTile &tile) {
      const moelora_weights &w = g.weights.w;
      gW = (const char *)w.data + tile.expert * w.stride_e +
           first_output<S>(g, tile, 0) / S::Format::TILE_DEPTH * w.stride_kt;
      share = bytes(g, tile) / S::SPANS;
    }
    static __device__ __forceinline__ uint32_t bytes(const moelora_gemm_launch &g,
                                                     const Tile &tile) {
      constexpr int WIDTH = S::Format::TILE_DEPTH;
      const int left = (g.weights.n_out - first_output<S>(g, tile, 0) + WIDTH - 1) / WIDTH;
      return S::SPANS * min(left, S::COLUMN_TILES) * S::Format::tile_bytes(g.weights.w.format);
    }
    __device__ __forceinline__ void load(const CUtensorMap *, const moelora_gemm_launch &g,
                                         const Tile &, int step, const SharedMemory<S> &smem,
                                         const GemmPipeline<S> &pipeline, uint64_t policy) {
      const moelora_weights &w = g.weights.w;
      const int last = (g.tokens.k + kDepth - 1) / kDepth - 1;
#pragma unroll
      for (int span = 0; span < S::SPANS; span++) {
        const int row =
            is_interleaved(w) ? step + span * (int)w.half_tiles : min(step * S::SPANS + span, last);
        bulk_load(smem.sW(pipeline.stage) + span * S::SPAN_BYTES, gW + row * w.stride_nt, share,
                  pipeline.full(), policy);
      }
    }
  };

  /* Splits the scales of a consumer's tiles of a stage, two for each thread. */
  static __device__ __forceinline__ void split_scales(uint32_t sW, int thread, int consumer,
                                                      moelora_format format) {
    const int tile = thread >> 5 & 3, pair = thread & 31;
    CodeScales<T>::split(sW + tile / 2 * S::SPAN_BYTES +
                             (2 * consumer + tile % 2) * S::Format::tile_bytes(format) +
                             MOELORA_TILE_VALUES + pair * 2 * S::Format::SCALE_BYTES,
                         format);
    fence_async_proxy(); // make them visible before TMA overwrites them
    warpgroup_sync(kConsumerBarrier + consumer);
  }

  /* Loads elements 32 PAIR to 32 PAIR + 31 of a k step, for m64 tile t of the consumer. pairs: as
   * in SlabPair::load. */
  template <int PAIR, class... Pairs>
  static __device__ __forceinline__ void load(SlabPair<T> &rA, uint32_t sW, int thread,
                                              int consumer, int t, const moelora_weights &w,
                                              const Pairs &...pairs) {
    const int lane = thread & 31, slab = thread >> 5 & 3, row = lane / 4;
    const bool interleaved = is_interleaved(w);
    const uint32_t bytes = S::Format::tile_bytes(w.format);
    if constexpr (S::Format::IS_FP8) {
      sW += consumer * bytes;
      // A lane passes row `lane` of K to ldmatrix, but applies the scales of rows lane / 4 + 8 i.
      const int from = interleaved ? 16 * PAIR + lane / 2 : PAIR % 2 * 32 + lane;
      const int scale = interleaved ? 16 * PAIR + row / 2 : PAIR % 2 * 32 + row;
      const bool rows = moelora_has_row_scales(w.format);
      const uint32_t scales = sW + (interleaved ? row % 2 : PAIR / 2) * S::SPAN_BYTES +
                              S::Format::TILE_VALUES + 4 * (rows ? scale : t);
      rA.load_fp8(sW + (interleaved ? lane % 2 : PAIR / 2) * S::SPAN_BYTES + from * 128 +
                      ((4 * t + slab ^ from & 7) << 4),
                  scales,
                  !rows         ? 0
                  : interleaved ? 16
                                : 32);
    } else {
      const uint32_t tile =
          sW + (2 * consumer + t) * bytes + (interleaved ? row % 2 : PAIR / 2) * S::SPAN_BYTES;
      rA.template load<S::FORMAT, S::ZEROS>(tile, tile + S::Format::TILE_SCALE_OFFSET,
                                            interleaved ? 8 * PAIR + row / 2 : PAIR % 2 * 16 + row,
                                            slab, interleaved, w.format, pairs...);
    }
  }

  template <int N>
  static __device__ __forceinline__ int
  main_loop(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g, WarpContext<S> &warp,
            const TileHeader &, int k_steps) {
    GemmPipeline<S> &pipeline = warp.pipeline;
    int previous = 0;
    const int thread = opaque(threadIdx.x); // offsets are not kept between tiles
    const CodePairs<T, true> pairs(warp.smem.pairs());
    SlabPair<T> rA[2];
#pragma unroll 1
    for (int step = 0; step < k_steps; step++) {
      // Wait for the stage.
      pipeline.wait_full();
      if (g.tokens.divisor.value)
        fence_async_proxy(); // make writes to sX by cp.async visible to wgmma

      // TMA has probably read the outputs of the previous tile by now, so that this wait is short.
      if (WarpContext<S>::ALIASED_BUFFERS > 0 && step == 1)
        warp.release_aliased_stage();

      const uint32_t sW = warp.smem.sW(pipeline.stage);
      if constexpr (S::PAIRS)
        split_scales(sW, thread, warp.consumer, g.weights.w.format);
      const uint64_t b = wgmma_descriptor(uniform(warp.smem.sX(pipeline.stage)));
      const auto multiply_pair = [&](auto pair) __attribute__((always_inline)) {
        constexpr int PAIR = decltype(pair)::value;
        const uint64_t slabs = b + PAIR / 2 * (S::TOKENS * kRowBytes / 16) + PAIR % 2 * 4;
#pragma unroll
        for (int t = 0; t < 2; t++) {
          // The wgmmas of both m64 tiles are in flight while this one's operand is dequantized.
          SlabPair<T> rW;
          if constexpr (S::PAIRS)
            load<PAIR>(rW, sW, thread, warp.consumer, t, g.weights.w, pairs);
          else
            load<PAIR>(rW, sW, thread, warp.consumer, t, g.weights.w);
          // Wait for the wgmmas that last read rA[t]; the other m64 tile's stay in flight.
          wgmma_wait<1>();
          rA[t].transpose(rW);
          wgmma_fence();
          Wgmma<N>::template mma_registers<Element<T>::is_bf16>(rAcc[t], rA[t].a[0], slabs);
          Wgmma<N>::template mma_registers<Element<T>::is_bf16>(rAcc[t], rA[t].a[1], slabs + 2);
          wgmma_commit();

          // All wgmmas of the previous step have completed: release its stage.
          if (PAIR == 0 && t == 1 && step > 0)
            pipeline.release(previous);
        }
      };
      multiply_pair(std::integral_constant<int, 0>());
      multiply_pair(std::integral_constant<int, 1>());
      multiply_pair(std::integral_constant<int, 2>());
      multiply_pair(std::integral_constant<int, 3>());
      previous = pipeline.stage;
      pipeline.advance();
    }
    return previous;
  }
};

#endif
