/* Grouped GEMM with fused LoRA, for Hopper: TMA, wgmma, warp specialization.
 *
 *   out[p] = act( w[e] x[p] + B[l, e] xa[p] + bias[e] ) * weight
 *
 * A persistent CTA loops over the tiles of its tile scheduler. Producer warps fill a pipeline of
 * stages; one or two consumer warpgroups multiply them, accumulate the adapter stages, and run the
 * epilogue:
 *
 *   producers   | k step | k step | ... | adapter stage | k step of the next tile | ...
 *   consumers            | wgmma  | wgmma | ...  | B xa | epilogue | wgmma | ...
 *
 * This file contains the kernel, which is common to all formats. Each main loop has its own file,
 * which generated sources include beside launch.cuh or back.cuh:
 *
 *   native.cuh             weights of the dtype of x, forward and backward
 *   few_rows.cuh           quantized weights, 16-bit x, up to 16 tokens
 *   dequantize.cuh         quantized weights, 16-bit x, more than 16 tokens
 *   transposed_tiles.cuh   quantized weights, backward
 *   fp8_weight_major.cuh   FP8 weights and tokens, weights as operand A
 *   fp8_token_major.cuh    FP8 weights and tokens, tokens as operand A
 *
 * They share the types in tile_scheduler.cuh, pipeline.cuh, producer.cuh, adapters.cuh,
 * epilogue.cuh and fixup.cuh. A main loop defines
 *
 *   WeightLoads    producer, TMA warp: begin(tile), bytes(), load(k step) of weights
 *   Rows, Scales   producer, gather warps: find(next tile), begin(), copy(k step) of x;
 *                  Rows::LOADS_BOXES: they, not the TMA warp, load x ordered by position
 *   main_loop<N>   consumer: the K loop of a tile; returns the last stage, not yet released
 *   Adapters       consumer: add_stage<N>(), and are_finite() of the accumulators
 *   Epilogue<MODE> consumer: store()
 *   RELEASES_ALIASED_STAGE  main_loop calls release_aliased_stage(); see pipeline.cuh
 *
 * The epilogue of a backward that applies the gradient of the activation is DactEpilogue. */
#ifndef MOELORA_CUDA_SM90_GEMM_CUH
#define MOELORA_CUDA_SM90_GEMM_CUH

#include "cuda/gemm/sm90/adapters.cuh"
#include "cuda/gemm/sm90/epilogue.cuh"
#include "cuda/gemm/sm90/fixup.cuh"
#include "cuda/gemm/sm90/producer.cuh"

#include <type_traits>

/* Members of the main loops with weights as operand A. */
template <class S, class T> struct WeightMajorMainloop {
  using Rows = TokenRows<S>;
  using Scales = NoTokenScales<S>;
  using Adapters =
      std::conditional_t<S::TRANSPOSED, TransposedAdapters<S, T>, WeightMajorAdapters<S, T>>;
  template <EpilogueMode MODE> using Epilogue = WeightMajorEpilogue<S, T, MODE>;
  static constexpr bool RELEASES_ALIASED_STAGE = true;
};

template <class S, class T> struct DactEpilogue; // dact_epilogue.cuh

namespace {

/* Runs main loop and adapter stages of a tile for N tokens. Accumulators past N stay undefined. */
template <class Mainloop, int N, class S>
__device__ __forceinline__ PendingCheck multiply(float (&rAcc)[2][S::TOKENS / 2],
                                                 const moelora_gemm_launch &g, WarpContext<S> &warp,
                                                 const TileHeader &header) {
  constexpr bool ALIASES = WarpContext<S>::ALIASED_BUFFERS > 0;
  const int k_steps = k_steps_of<S>(g);

  // Release the stage that the previous epilogue aliases, unless the main loop does so in its
  // second step.
  if (ALIASES && !Mainloop::RELEASES_ALIASED_STAGE)
    warp.release_aliased_stage();

#pragma unroll
  for (int i = 0; i < N / 2; i++)
    rAcc[0][i] = rAcc[1][i] = 0.f;

  // K loop.
  const int last = Mainloop::template main_loop<N>(rAcc, g, warp, header, k_steps);
  if (ALIASES && Mainloop::RELEASES_ALIASED_STAGE)
    warp.release_aliased_stage(); // if the tile had a single k step

  // Adapter stages.
  return add_adapters<typename Mainloop::Adapters, N>(rAcc, g, warp, header, last);
}

/* Dispatches to `multiply` with the smallest N that holds the tile's tokens. */
template <class Mainloop, class S, int N>
__device__ __forceinline__ PendingCheck multiply_fitting(float (&rAcc)[2][S::TOKENS / 2],
                                                         const moelora_gemm_launch &g,
                                                         WarpContext<S> &warp,
                                                         const TileHeader &header) {
  if constexpr (!S::SWAP_AB) {
    return multiply<Mainloop, S::TOKENS>(rAcc, g, warp, header);
  } else if constexpr (N < S::TOKENS) {
    if (header.count > N)
      return multiply_fitting<Mainloop, S, N + S::STEP>(rAcc, g, warp, header);
  }
  return multiply<Mainloop, N>(rAcc, g, warp, header);
}

/* Multiplies and stores tile after tile, in a consumer warpgroup. */
template <class Mainloop, EpilogueMode MODE, class S, class T>
__device__ __forceinline__ void consume(const RowMaps *out_maps, const LaunchOf<S> &g,
                                        WarpContext<S> &warp) {
  const int lane = threadIdx.x & 31;
  for (;;) {
    // Wait for the first stage of the next tile.
    warp.pipeline.wait_full();
    const TileHeader header = TileHeader::read(warp.smem.header(warp.pipeline.stage));
    if (header.tile.block < 0)
      break;

    // Prefetch the inputs of the epilogue: accumulators leave no registers to load them into.
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const int64_t position = (int64_t)header.tile.block * S::TOKENS + i * 32 + lane;
      if (!g.epilogue.out_by_position && i * 32 + lane < header.count)
        prefetch(&g.schedule.blocks.sorted_ids[position]);
      if (g.epilogue.weighted && i * 32 + lane < header.count)
        prefetch(&g.schedule.blocks.weights[position]);
    }
    if constexpr (MODE == EpilogueMode::DACT)
      DactEpilogue<S, T>::prefetch_rows(g, header, warp);

    // Main loop and adapter stages.
    float rAcc[2][S::TOKENS / 2];
    const PendingCheck pending = multiply_fitting<Mainloop, S, S::LEAST>(rAcc, g, warp, header);
    const bool has_tokens = S::SWAP_AB || warp.consumer * 64 < header.count;
    if (pending == PendingCheck::CHECK_ACCUMULATORS && has_tokens &&
        !Mainloop::Adapters::are_finite(rAcc, warp.consumer))
      FixupPass<S>(warp.smem).request();

    if constexpr (MODE == EpilogueMode::DACT)
      DactEpilogue<S, T>::store(rAcc, g, header, warp);
    else if (MODE == EpilogueMode::GATED && g.epilogue.plain_silu)
      Mainloop::template Epilogue<EpilogueMode::SILU>::store(rAcc, out_maps, g, header, warp);
    else
      Mainloop::template Epilogue<MODE>::store(rAcc, out_maps, g, header, warp);
    if (pending == PendingCheck::FIX_UP)
      NonFinite<S, T>::poison_outputs(g, header, warp.consumer);
  }
  tma_store_wait();
}

/* Called after the last tile. Starts a fix-up pass if one was requested; returns whether it did. */
template <class S>
__device__ __forceinline__ bool has_another_pass(const moelora_gemm_launch &g,
                                                 WarpContext<S> &warp) {
  const FixupPass<S> fixup(warp.smem);
  return g.schedule.blocks.packed_ranks && !fixup.is_running() && fixup.start(warp);
}

template <class S, class T, EpilogueMode MODE>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    gemm_sm90(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ RowMaps x_maps,
              const __grid_constant__ RowMaps out_maps, const __grid_constant__ FactorMaps b_maps,
              const __grid_constant__ LaunchOf<S> g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Mainloop = typename S::template Mainloop<S, T>;

  // Initialize the barriers.
  extern __shared__ char shared[];
  WarpContext<S> warp(shared);
  if (threadIdx.x == 0)
    warp.pipeline.init(S::GATHERERS + 1, 4 * S::CONSUMERS), FixupPass<S>(warp.smem).init();
  if constexpr (S::CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();

  // With adapters, the previous kernel is the shrink. It waited for all earlier kernels before it
  // let this one start, so only its own results may be missing; the gather warps wait for those.
  if (!g.schedule.blocks.packed_ranks)
    wait_for_previous_kernel();
  start_next_kernel();

  // Warp specialization.
  constexpr int PRODUCER = S::FIRST_PRODUCER / 128, FIRST_CONSUMER = PRODUCER == 0 ? 1 : 0;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == PRODUCER) {
    if constexpr (S::REALLOCATES)
      warpgroup_reg_dealloc<S::PRODUCER_REGISTERS>();
    if (__shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) == S::FIRST_PRODUCER / 32) {
#pragma unroll 1
      do {
        produce_by_tma<Mainloop>(&w_map, &x_maps, &b_maps, g, warp);
      } while (has_another_pass(g, warp));
    } else {
#pragma unroll 1
      do {
        produce_by_gather<Mainloop, S, T>(&x_maps, g, warp);
      } while (has_another_pass(g, warp));
    }
  } else {
    if constexpr (S::REALLOCATES)
      warpgroup_reg_alloc<S::CONSUMER_REGISTERS>();
    warp.consumer = warpgroup - FIRST_CONSUMER;
    if constexpr (S::PAIRS) {
      CodePairs<T, S::TRANSPOSED>::template write<128 * S::CONSUMERS>(
          warp.smem.pairs(), threadIdx.x - 128 * FIRST_CONSUMER, g.weights.w.format);
      warp.sync_all();
    }
#pragma unroll 1
    do {
      consume<Mainloop, MODE, S, T>(&out_maps, g, warp);
    } while (has_another_pass(g, warp));
  }

  // PDL is not transitive: kernels that wait for this one rely on all earlier ones having
  // completed.
  wait_for_previous_kernel();
  // A CTA must not exit while the other may still access its shared memory.
  if constexpr (S::CLUSTER > 1)
    cluster_sync();
#endif
}

} // namespace

#endif
