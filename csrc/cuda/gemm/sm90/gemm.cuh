/* Grouped GEMM with LoRA inside, for Hopper: TMA, wgmma, warp specialization.
 *
 *   out[p] = act( w[e] x[p] + B[l, e] xa[p] + bias[e] ) * weight
 *
 * A CTA goes over the tiles of its tile scheduler. Producer warps fill a pipeline of stages; one or
 * two consumer warpgroups multiply them, add the adapter stages, and store the outputs:
 *
 *   producers   | k step | k step | ... | adapter stage | k step of the next tile | ...
 *   consumers            | wgmma  | wgmma | ...  | B xa | epilogue | wgmma | ...
 *
 * This file has the kernel, which all formats share, and says which main loop a format has:
 *
 *   native.cuh             weights of the dtype of x
 *   few_rows.cuh           four bits, up to 16 tokens
 *   dequantize.cuh         four bits, more tokens
 *   fp8_weight_major.cuh   FP8 weights and tokens, weight rows as operand A
 *   fp8_token_major.cuh    FP8 weights and tokens, tokens as operand A
 *
 * They share the types in tile_scheduler.cuh, pipeline.cuh, shared_storage.cuh, producer.cuh,
 * consumer.cuh, adapter_stage.cuh, epilogue.cuh and fixup.cuh. */
#ifndef MOELORA_CUDA_SM90_GEMM_CUH
#define MOELORA_CUDA_SM90_GEMM_CUH

#include "cuda/gemm/sm90/dequantize.cuh"
#include "cuda/gemm/sm90/few_rows.cuh"
#include "cuda/gemm/sm90/fp8_token_major.cuh"
#include "cuda/gemm/sm90/fp8_weight_major.cuh"
#include "cuda/gemm/sm90/native.cuh"

#include <type_traits>

namespace {

/* The shape, and with it the main loop, of a weight format, a tile and a cluster. */
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, moelora_kernel_format FORMAT, bool ZEROS>
constexpr auto select_shape() {
  using Format = FormatTraits<FORMAT>;
  if constexpr (Format::IS_NATIVE)
    return NativeShape<TOKENS, CONSUMERS, STAGES, CLUSTER>();
  else if constexpr (moelora_tokens_first(FORMAT, TOKENS))
    return Fp8TokenMajorShape<TOKENS, CONSUMERS, STAGES, CLUSTER>();
  else if constexpr (Format::IS_W8A8)
    return Fp8WeightMajorShape<TOKENS, CONSUMERS, STAGES, CLUSTER>();
  else if constexpr (TOKENS <= 16)
    return FewRowsShape<TOKENS, STAGES, FORMAT, ZEROS>();
  else
    return DequantizeShape<TOKENS, CONSUMERS, STAGES, FORMAT, ZEROS>();
}
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, moelora_kernel_format FORMAT, bool ZEROS>
using GemmShape = decltype(select_shape<TOKENS, CONSUMERS, STAGES, CLUSTER, FORMAT, ZEROS>());

/* The products of a tile, with the narrowest N from N on that holds its tokens. */
template <class Mainloop, class S, int N>
__device__ __forceinline__ PendingCheck multiply_fitting(float (&rAcc)[2][S::TOKENS / 2],
                                                         const moelora_gemm_launch &g,
                                                         Consumer<S> &consumer,
                                                         const TileHeader &header) {
  if constexpr (!S::SWAP_AB) {
    return Mainloop::template multiply<S::TOKENS>(rAcc, g, consumer, header);
  } else if constexpr (N < S::TOKENS) {
    if (header.count > N)
      return multiply_fitting<Mainloop, S, N + S::STEP>(rAcc, g, consumer, header);
  }
  return Mainloop::template multiply<N>(rAcc, g, consumer, header);
}

/* A consumer warpgroup. */
template <class Mainloop, EpilogueMode MODE, class S, class T>
__device__ __forceinline__ void consume(const RowMaps *out_maps, const moelora_gemm_launch &g,
                                        Consumer<S> &consumer) {
  const int lane = threadIdx.x & 31;
  for (;;) {
    // Wait for the first stage of the next tile.
    consumer.pipeline.wait_full();
    const TileHeader header = TileHeader::read(consumer.smem.header(consumer.pipeline.stage));
    if (header.tile.block < 0)
      break;

    // Prefetch what the epilogue reads: accumulators leave no registers to load it.
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const int64_t position = (int64_t)header.tile.block * S::TOKENS + i * 32 + lane;
      if (!g.epilogue.out_by_position && i * 32 + lane < header.count)
        prefetch(&g.schedule.blocks.sorted_ids[position]);
      if (g.epilogue.weighted && i * 32 + lane < header.count)
        prefetch(&g.schedule.blocks.weights[position]);
    }

    // Main loop and adapter stages.
    float rAcc[2][S::TOKENS / 2];
    const PendingCheck pending =
        multiply_fitting<Mainloop, S, S::LEAST>(rAcc, g, consumer, header);
    const bool used = S::SWAP_AB || consumer.index * 64 < header.count; // it has tokens
    if (pending == PendingCheck::CHECK_ACCUMULATORS && used &&
        !Mainloop::are_finite(rAcc, consumer.index))
      FixupPass<S>(consumer.smem).request();

    // Epilogue.
    if (MODE == EpilogueMode::GATED && g.epilogue.plain_silu)
      Mainloop::template Epilogue<EpilogueMode::SILU>::store(rAcc, out_maps, g, header, consumer);
    else
      Mainloop::template Epilogue<MODE>::store(rAcc, out_maps, g, header, consumer);
    if (pending == PendingCheck::FIX_UP)
      NonFinite<S, T>::poison_outputs(g, header, consumer.index);
  }
  tma_store_wait();
}

/* After the last tile: whether the CTA goes over its tiles once more, in the fix-up pass. */
template <class S, class Position>
__device__ __forceinline__ bool has_another_pass(const moelora_gemm_launch &g,
                                                 const SharedMemory<S> &smem, Position &position) {
  const FixupPass<S> fixup(smem);
  return g.schedule.blocks.packed_ranks && !fixup.is_running() && fixup.start(position);
}

template <class S, class T, EpilogueMode MODE>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    gemm_sm90(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ RowMaps x_maps,
              const __grid_constant__ RowMaps out_maps, const __grid_constant__ FactorMaps b_maps,
              const __grid_constant__ moelora_gemm_launch g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Mainloop = typename S::template Mainloop<S, T>;

  // Initialize the barriers.
  extern __shared__ char shared[];
  const SharedMemory<S> smem(shared);
  GemmPipeline<S> pipeline(smem.base);
  if (threadIdx.x == 0)
    pipeline.init(S::GATHERERS + 1, 4 * S::CONSUMERS), FixupPass<S>(smem).init();
  if constexpr (S::CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();

  // With adapters the kernel before is the shrink, which let this one start after it had itself
  // waited for all kernels before: here nothing but its own results is missing.
  if (!g.schedule.blocks.packed_ranks)
    wait_for_previous_kernel();
  start_next_kernel();

  // Warp specialization.
  constexpr int PRODUCER = S::FIRST_PRODUCER / 128, FIRST_CONSUMER = PRODUCER == 0 ? 1 : 0;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == PRODUCER) {
    if constexpr (S::REALLOCATES)
      give_registers<S::PRODUCER_REGISTERS>();
    if (__shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) == S::FIRST_PRODUCER / 32) {
#pragma unroll 1
      do {
        produce_by_tma<Mainloop>(&w_map, &x_maps, &b_maps, g, smem, pipeline);
      } while (has_another_pass(g, smem, pipeline));
    } else {
#pragma unroll 1
      do {
        produce_by_gather<Mainloop, S, T>(g, smem, pipeline);
      } while (has_another_pass(g, smem, pipeline));
    }
  } else {
    if constexpr (S::REALLOCATES)
      take_registers<S::CONSUMER_REGISTERS>();
    Consumer<S> consumer(smem, warpgroup - FIRST_CONSUMER);
#pragma unroll 1
    do {
      consume<Mainloop, MODE, S, T>(&out_maps, g, consumer);
    } while (has_another_pass(g, smem, consumer));
  }

  // PDL is not transitive: who waits for this kernel relies on the one before as well.
  wait_for_previous_kernel();
  // No CTA exits while the other may still access its shared memory.
  if constexpr (S::CLUSTER > 1)
    cluster_sync();
#endif
}

} // namespace

#endif
