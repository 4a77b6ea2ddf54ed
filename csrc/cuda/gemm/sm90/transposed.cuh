/* Grouped products y W of a backward for Hopper, without transposing W in memory: the kernel of
 * native.cuh with weights as an MN-major operand. Rows of W are K, its columns outputs (operand
 * A):
 *
 *   sW [TILES][64 of K]              one TMA box per m64 tile: rows of 64 outputs, 128-byte swizzle
 *   sX [TOKENS]                      rows of y, 64 elements of K
 *
 * In an adapter stage sW holds rows of factors A, [TILES][slabs][16 ranks] of 64 outputs, and sX
 * rows of yb. It is multiplied with mma.sync: the accumulators are complete by then, and tokens
 * that do not carry a slab's adapter are left out, whatever A holds. mma.sync and wgmma round
 * identically. */
#ifndef MOELORA_CUDA_SM90_TRANSPOSED_CUH
#define MOELORA_CUDA_SM90_TRANSPOSED_CUH

#include "cuda/gemm/common/transposed.cuh"
#include "cuda/gemm/sm90/native.cuh"
#include "cuda/gemm/sm90/dact_epilogue.cuh"
#include "cuda/ptx/opaque.cuh"

template <class S, class T> struct TransposedMainloop;

/* DACT_: the epilogue applies the gradient of the activation, in buffers of its own. */
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, bool DACT_>
struct TransposedShape : NativeShape<TOKENS, CONSUMERS, STAGES, CLUSTER> {
  using Native = NativeShape<TOKENS, CONSUMERS, STAGES, CLUSTER>;
  static constexpr bool TRANSPOSED = true, GENERAL_EPILOGUE = false;
  static constexpr bool ALIASES = Native::ALIASES && !DACT_;
  // The gradient of the activation needs registers beside the accumulators.
  static constexpr bool NARROW = DACT_ && CONSUMERS == 2;
  static constexpr int PRODUCER_REGISTERS = NARROW ? 104 : Native::PRODUCER_REGISTERS;
  static constexpr int CONSUMER_REGISTERS = NARROW ? 200 : Native::CONSUMER_REGISTERS;
  static constexpr int OUT_ROWS = DACT_ ? kDactRows : Native::OUT_ROWS;
  static constexpr int OWN_BUFFERS =
      DACT_ ? own_buffers_of_dact(TOKENS > 128 ? 2 : 3) : Native::OWN_BUFFERS;
  template <class S, class T> using Mainloop = TransposedMainloop<S, T>;
};

/* Adapter stages. */
template <class S, class T> struct TransposedAdapters {
  /* Accumulates the current adapter stage and releases stage `previous`. Elements are never
   * cleared. */
  template <int N>
  static __device__ __forceinline__ bool
  add_stage(float (&rAcc)[2][S::TOKENS / 2], const moelora_gemm_launch &g,
            const WarpContext<S> &warp, const TileHeader &, int previous, bool) {
    wgmma_wait<0>(); // accumulators are read from here on
    warp.pipeline.release(previous);
    warp.pipeline.wait_full();
    const int stage = warp.pipeline.stage;
    const uint32_t header = warp.smem.header(stage);
    const int slabs = SlabsHeader::read(header).slabs;
    const uint32_t sA =
        warp.smem.sW(stage) + 2 * warp.consumer * kDepthM64Bytes<S> + transposed_offset();
    const uint32_t sYb = warp.smem.sX(stage) + token_offset();
#pragma unroll 1
    for (int j = 0; j < slabs; j++) {
      const SlabTokens tokens = SlabTokens::read(header, j);
      // Distances from the slab's first token to the first of this lane's two, and to the end.
      int ahead = 2 * (int)(threadIdx.x & 3) - tokens.low;
      const uint32_t length = tokens.high - tokens.low;
      uint32_t rA[2][4];
#pragma unroll
      for (int t = 0; t < 2; t++)
        load_matrix_x4_trans(rA[t], sA + t * kDepthM64Bytes<S> + j * kSlabBytes);
#pragma unroll
      for (int i = 0; i < (N + 8) / 16; i++, ahead += 16) {
        ahead = opaque(ahead);
        if (16 * i >= tokens.high || 16 * i + 16 <= tokens.low)
          continue;
        uint32_t rYb[4];
        load_matrix_x4(rYb, (sYb ^ j << 5) + i * 16 * kRowBytes);
#pragma unroll
        for (int half = 0; half < 2 && 16 * i + 8 * half < N; half++) {
          const bool carries[2] = {(uint32_t)(ahead + 8 * half) < length,
                                   (uint32_t)(ahead + 8 * half + 1) < length};
#pragma unroll
          for (int t = 0; t < 2; t++) {
            float *d = &rAcc[t][8 * i + 4 * half];
            float more[4] = {d[0], d[1], d[2], d[3]};
            mma_16816<T>(more, rA[t], rYb + 2 * half);
#pragma unroll
            for (int q = 0; q < 4; q++)
              d[q] = carries[q % 2] ? more[q] : d[q];
          }
        }
      }
    }
    __syncwarp(); // all lanes have read the stage
    return false;
  }

  static __device__ __forceinline__ bool are_finite(const float (&)[2][S::TOKENS / 2], int) {
    return true;
  }
};

template <class S, class T> struct TransposedMainloop {
  using Rows = TokenRows<S>;
  using Scales = NoTokenScales<S>;
  using Adapters = TransposedAdapters<S, T>;
  template <EpilogueMode MODE>
  using Epilogue = std::conditional_t<MODE == EpilogueMode::DACT, DactEpilogue<S, T>,
                                      WeightMajorEpilogue<S, T, MODE>>;
  static constexpr bool RELEASES_ALIASED_STAGE = true;

  /* Producer of the weights of a k step: one box of 64 elements of K by 64 outputs per m64 tile.
   * The CTAs of a cluster load an equal share each and multicast it to both. */
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
        int c[4] = {output, step * kDepth, 0, tile.expert};
        if (g.weights.w.packed) {
          c[0] = c[1] = 0, c[2] = output / 64;
          c[3] = tile.expert * (g.tokens.k / 64) + step;
        }
        if (S::CLUSTER > 1)
          tma_load_4d_multicast(sW, map, c[0], c[1], c[2], c[3], pipeline.full(), policy);
        else
          tma_load_4d(sW, map, c[0], c[1], c[2], c[3], pipeline.full(), policy);
      }
    }
  };

  /* K loop of a consumer, for N tokens. Returns the last stage, which is not yet released. */
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
        const uint64_t slab = a + k * kSlabBytes / 16;
        Wgmma<N>::template mma_transposed<Element<T>::is_bf16>(rAcc[0], slab, b + 2 * k);
        Wgmma<N>::template mma_transposed<Element<T>::is_bf16>(rAcc[1], slab + kM64Bytes / 16,
                                                               b + 2 * k);
      }
      wgmma_commit();

      // By now TMA has stored the outputs of the previous tile.
      if (WarpContext<S>::ALIASED_BUFFERS > 0 && step == 1)
        warp.release_aliased_stage();

      // The wgmmas of the previous step have completed: release its stage.
      wgmma_wait<1>();
      if (step > 0)
        pipeline.release(previous);
      previous = pipeline.stage;
      pipeline.advance();
    }
    return previous;
  }
};

#endif
