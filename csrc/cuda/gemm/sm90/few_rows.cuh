/* Grouped GEMM for Hopper with quantized weights, 16-bit x and up to 16 tokens: bulk copies,
 * dequantization in registers, mma.sync.
 *
 *   TMA warp        W(0) W(1) W(2)  ...   quantized tiles of step i
 *   gather warp     X(0) X(1) X(2)  ...   token rows of step i, if gathered
 *   consumer             0    1     ...   per k16 slab: dequantize operand A, then mma.sync
 *
 * For so few tokens the kernel is bound by dequantization, not by memory. With wgmma, each k16 slab
 * would take the latency of a wgmma, which must complete before its source registers can be
 * overwritten; several mma.sync can be in flight, and the compiler interleaves them with the
 * dequantization. mma.sync and wgmma round identically. Three CTAs of six warps share an SM and
 * hide each other's latency. A k step covers 128 elements of K. */
#pragma once

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/weight_tiles.cuh"
#include "cuda/ptx/mma.cuh"

template <class S, class T> struct FewRowsMainloop;

/* Two producer warps suffice for so few tokens. All warps keep the launch's registers. */
template <int TOKENS, int STAGES, moelora_kernel_format FORMAT_, bool ZEROS_>
struct FewRowsShape : KernelShape<TOKENS, 1, STAGES, 1, FORMAT_, 2> {
  static constexpr bool FEW_ROWS = true, REALLOCATES = false;
  static constexpr bool ZEROS = ZEROS_; // formats may have zero points
  static constexpr int RESIDENT = 3;    // CTAs per SM, to hide the latency of dequantization
  static constexpr int SPANS = kQuantizedSpans;
  static constexpr int GATHER_LANES = 4;

  using Stage = QuantizedStage<TOKENS, 2, FORMAT_>;
  template <class S> using Storage = SharedStorage<S>;
  template <class S, class T> using Mainloop = FewRowsMainloop<S, T>;
};

template <class S, class T> struct FewRowsMainloop : WeightMajorMainloop<S, T> {
  using Fragment = TileFragment<S::FORMAT, T, S::ZEROS>;
  using WeightLoads = QuantizedLoads<S>;
  static constexpr bool RELEASES_ALIASED_STAGE = false;

  /* Accumulates k16 slab K of both m64 tiles, for the N tokens at sX. */
  template <int K, int N>
  static __device__ __forceinline__ void mma_slab(float (&rAcc)[2][S::TOKENS / 2],
                                                  Fragment (&rW)[2], uint32_t sX) {
    static_assert(N == 8 || N == 16, "what one ldmatrix loads");
    uint32_t rX[N / 4], rA[2][4];
    if constexpr (N == 16)
      load_matrix_x4(rX, sX ^ K << 5);
    else
      load_matrix_x2(rX, sX ^ K << 5);
    rW[0].template dequantize<K>(rA[0]);
    rW[1].template dequantize<K>(rA[1]);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int t = 0; t < 2; t++)
        mma_16816<T>(&rAcc[t][j * 4], rA[t], &rX[j * 2]);
  }

  template <int N>
  static __device__ __forceinline__ int
  main_loop(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g, WarpContext<S> &warp,
            const TileHeader &, int k_steps) {
    GemmPipeline<S> &pipeline = warp.pipeline;
    const moelora_format format = g.weights.w.format;
    const uint32_t offset = token_offset();
    const LaneOffsets at = LaneOffsets::find<S::FORMAT>(threadIdx.x >> 5 & 3, format);
    int previous;
    for (int step = 1;; step++) {
      // Wait for the stage.
      pipeline.wait_full();

#pragma unroll
      for (int span = 0; span < S::SPANS; span++) {
        // Load this lane's values, scales and zero points of both m64 tiles.
        Fragment rW[2];
#pragma unroll
        for (int t = 0; t < 2; t++)
          rW[t].load_span(warp.smem.sW(pipeline.stage) + t * S::Stage::SLOT_BYTES, span, at,
                          format);

        // Dequantize and multiply slab by slab.
        const uint32_t sX = warp.smem.sX(pipeline.stage, span) + offset;
        mma_slab<0, N>(rAcc, rW, sX);
        mma_slab<1, N>(rAcc, rW, sX);
        mma_slab<2, N>(rAcc, rW, sX);
        mma_slab<3, N>(rAcc, rW, sX);
      }

      // Release the stage, but leave the last one to add_adapters.
      previous = pipeline.stage;
      pipeline.advance();
      if (step == k_steps)
        break;
      __syncwarp(); // all lanes have read the stage
      pipeline.release(previous);
    }
    if constexpr (S::Format::HAS_TILE_SCALE)
      scale_accumulators<S, T, N>(rAcc, warp, previous);
    return previous;
  }
};
