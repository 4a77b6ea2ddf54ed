/* Grouped GEMM for Hopper with weights of the dtype of x: TMA, wgmma with both operands in shared
 * memory, warp specialization.
 *
 *   TMA warp        W(0) W(1) W(2) W(3)  ...   weights of step i: one box per m64 tile
 *   gather warps    X(0) X(1) X(2) X(3)  ...   token rows of step i, if gathered
 *   consumers            mma0 mma1 mma2  ...   wgmma of step i, overlaps the previous step,
 *                             rel0 rel1  ...   whose stage is released when it completes
 *
 * Weights are operand A, tokens operand B (swap_ab): M is 64 weight rows, N the smallest compiled
 * size that holds the tile's tokens. A k step covers 64 elements of K. The accumulators are
 * rAcc[2][TOKENS / 2], see tile.cuh.
 *
 * The backward's y W reads the same weights without transposing them in memory: the rows of W are
 * K, its columns the outputs. Operand A is then MN-major: a box has a row of 64 outputs for each of
 * 64 elements of K. */
#pragma once

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/ptx/wgmma.cuh"

template <class S, class T> struct NativeMainloop;

/* Returns the registers of a producer thread, which keeps the offsets of gathered rows in them.
 * With up to 32 tokens, consumers need no more registers than the launch allocates. */
constexpr int native_producer_registers(int tokens, int consumers) {
  return consumers == 2 ? 136 : tokens > 32 ? 96 : 128;
}

/* W_MAJOR_: major dimension of the weights as operand A, MN in a backward. */
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, Major W_MAJOR_>
struct NativeShape : KernelShape<TOKENS, CONSUMERS, STAGES, CLUSTER, MOELORA_KERNEL_NATIVE>,
                     RegisterBudget<native_producer_registers(TOKENS, CONSUMERS), CONSUMERS> {
  static constexpr Major W_MAJOR = W_MAJOR_;
  static constexpr bool TRANSPOSED = W_MAJOR == Major::MN;
  static constexpr int GATHER_LANES = 8;          // threads per row of x
  static constexpr bool GENERAL_EPILOGUE = false; // see ByRow

  struct Stage {
    SwizzledRow sW[2 * CONSUMERS][64]; // m64 tiles of weight rows
    SwizzledRow sX[1][TOKENS];         // token rows
  };
  template <class S> using Storage = SharedStorage<S>;
  template <class S, class T> using Mainloop = NativeMainloop<S, T>;
};

template <class S, class T> struct NativeMainloop : WeightMajorMainloop<S, T> {
  /* Producer of the weights of a k step. Each CTA of a cluster loads an equal share of the m64
   * tiles and multicasts it to both. */
  struct WeightLoads {
    __device__ __forceinline__ void begin(const moelora_gemm_launch &, const ClusterTile &) {}

    static __device__ __forceinline__ uint32_t bytes(const moelora_gemm_launch &, const Tile &) {
      return sizeof(S::Stage::sW);
    }
    __device__ __forceinline__ void load(const CUtensorMap *map, const moelora_gemm_launch &g,
                                         const Tile &tile, int step, const SharedMemory<S> &smem,
                                         const GemmPipeline<S> &pipeline, uint64_t policy) {
      constexpr int SHARE = S::TILES / S::CLUSTER;
      const int rank = S::CLUSTER > 1 ? (int)cluster_rank() : 0;
      for (int i = 0; i < SHARE; i++) {
        const int m64 = rank * SHARE + i, output = first_output<S>(g, tile, m64);
        const uint32_t sW = smem.sW(pipeline.stage) + m64 * kM64Bytes;
        int c[4];
        coordinates(c, g, tile, m64, output, step);
        if (S::CLUSTER > 1)
          tma_load_4d_multicast(sW, map, c[0], c[1], c[2], c[3], pipeline.full(), policy);
        else
          tma_load_4d(sW, map, c[0], c[1], c[2], c[3], pipeline.full(), policy);
      }
    }

  private:
    /* Sets c to the coordinates of an m64 tile's box; see map_weights, map_transposed_weights. */
    static __device__ __forceinline__ void coordinates(int (&c)[4], const moelora_gemm_launch &g,
                                                       const Tile &tile, int m64, int output,
                                                       int step) {
      if constexpr (S::TRANSPOSED) {
        c[0] = output, c[1] = step * kDepth, c[2] = 0, c[3] = tile.expert;
        if (g.weights.w.packed) {
          c[0] = c[1] = 0, c[2] = output / 64;
          c[3] = tile.expert * (g.tokens.k / 64) + step;
        }
      } else {
        c[0] = step * kDepth, c[1] = output, c[2] = g.weights.gated ? m64 & 1 : 0;
        c[3] = tile.expert;
        if (g.weights.w.packed) {
          c[0] = c[1] = 0, c[2] = step;
          c[3] = (int)((tile.expert * g.weights.w.n + weight_row(g, m64, output)) / 64);
        }
      }
    }
  };

  /* Distance between k16 slabs of operand A in units of 16 bytes: 16 columns, MN-major 16 rows. */
  static constexpr int A_STEP = S::TRANSPOSED ? kSlabBytes / 16 : 2;

  template <int N>
  static __device__ __forceinline__ int main_loop(float (&rAcc)[2][S::TOKENS / 2],
                                                  const moelora_gemm_launch &, WarpContext<S> &warp,
                                                  const TileHeader &, int k_steps) {
    GemmPipeline<S> &pipeline = warp.pipeline;
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < k_steps; step++) {
      // Wait for the stage.
      pipeline.wait_full();
      fence_async_proxy(); // make writes to sX by cp.async visible to wgmma

      // Issue the wgmmas of the consumer's two m64 tiles.
      wgmma_fence();
      const uint64_t a =
          wgmma_descriptor(warp.smem.sW(pipeline.stage) + warp.consumer * 2 * kM64Bytes);
      const uint64_t b = wgmma_descriptor(warp.smem.sX(pipeline.stage));
#pragma unroll
      for (int k = 0; k < 4; k++) {
        Wgmma<N>::template mma<Element<T>::is_bf16, S::W_MAJOR>(rAcc[0], a + k * A_STEP, b + 2 * k);
        Wgmma<N>::template mma<Element<T>::is_bf16, S::W_MAJOR>(
            rAcc[1], a + kM64Bytes / 16 + k * A_STEP, b + 2 * k);
      }
      wgmma_commit();

      // TMA has probably read the outputs of the previous tile by now, so that this wait is short.
      if (WarpContext<S>::ALIASED_BUFFERS > 0 && step == 1)
        warp.release_aliased_stage();

      // Wait for the wgmmas of the previous step, and release its stage.
      wgmma_wait<1>();
      if (step > 0)
        pipeline.release(previous);
      previous = pipeline.stage;
      pipeline.advance();
    }
    return previous;
  }
};
