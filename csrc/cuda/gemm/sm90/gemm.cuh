/* Grouped GEMM with LoRA inside, for Hopper: TMA, wgmma, warp specialisation.
 *
 *   out[p] = act( w[e] x[p] + B[l, e] xa[p] + bias[e] ) * weight
 *
 * One CTA per SM goes over the tiles that its tile scheduler finds (tile_scheduler.cuh). A producer
 * warpgroup (gemm/sm90/produce.cuh) fills a pipeline of stages (gemm/sm90/pipeline.cuh); its one or
 * two consumer warpgroups own a row group of two m64 tiles each and multiply with wgmma, whose
 * accumulators lie in registers as mma.sync's do. The token side of wgmma is sized per tile, so
 * that an expert with few tokens wastes few columns.
 *
 * Adapters are more depth: a stage of them holds, for up to 64 (segment, rank) columns, rows of B
 * beside the shrink results of the tokens that carry the segment's adapter, and zeros for all
 * others. What the others get added is exactly zero as long as B is finite. Where it is not, no
 * token's sum stays finite in that row. So the consumers check two tokens of a tile. If neither is
 * finite, the CTA goes over its tiles once more, in the non-finite fix-up pass: then the consumers
 * check B before they multiply, and what is not finite in it makes the outputs that it belongs to
 * NaN for the tokens that carry the adapter, and for no others (gemm/sm90/nonfinite.cuh). At ranks
 * that an adapter does not have B may be anything: there they check at once. */
#ifndef MOELORA_CUDA_SM90_GEMM_CUH
#define MOELORA_CUDA_SM90_GEMM_CUH

#include "cuda/ptx/wgmma.cuh"
#include "cuda/gemm/sm90/e4m3_rows.cuh"
#include "cuda/gemm/sm90/produce.cuh"
#include "cuda/gemm/sm90/nonfinite.cuh"
#include "cuda/gemm/sm90/quantized.cuh"
#include "cuda/gemm/sm90/tokens_first.cuh"
#include "cuda/gemm/common/epilogue.cuh"
#include "cuda/gemm/common/tile_scheduler.cuh"

namespace {

/* One m64 tile's results for up to 32 tokens from c on, rounded and transposed into an epilogue
 * tile: a token's 64 outputs are a row of 128 bytes, swizzled. */
template <class T, int N>
__device__ __forceinline__ void write_epilogue_tile(const float (&d)[N / 2], int c,
                                                    uint32_t buffer) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int i = 0; i < kEpilogueTokens / 8; i += 2) {
    const int j = c / 8 + i;
    if (j >= N / 8)
      break;
    const int token = 8 * (i + (lane >> 4)) + (lane & 7);
    const int chunk = warp * 2 + (lane >> 3 & 1);
    const uint32_t at = buffer + token * kRowBytes + ((chunk ^ (token & 7)) << 4);
    const float *v = &d[4 * j];
    if (j + 1 < N / 8)
      store_matrix_x4_trans(at, pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]),
                            pack2<T>(v[6], v[7]));
    else
      store_matrix_x2_trans(at, pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]));
  }
}

/* An epilogue tile by flat row: a warp writes whole 128-byte lines. */
template <class S, class T>
__device__ __forceinline__ void store_rows(const moelora_gemm_launch &g, int first, int c,
                                           const TileHeader &header, int32_t rows,
                                           uint32_t buffer) {
  const int thread = threadIdx.x & 127;
#pragma unroll
  for (int i = 0; i < kEpilogueTokens / 16; i++) {
    const int token = i * 16 + thread / 8, chunk = thread & 7;
    const int row = __shfl_sync(0xffffffffu, rows, token);
    if (c + token < header.count && first + chunk * 8 < g.weights.n_out)
      *(uint4 *)((T *)g.epilogue.out + output_offset(g, 0, row) + first + chunk * 8) =
          load_shared_16(buffer + token * kRowBytes + ((chunk ^ (token & 7)) << 4));
  }
}

/* From accumulators to memory, 32 tokens at a time. Where results lie by position, the copy engine
 * stores whole boxes, which end within the block, while the next tile is multiplied. One body of
 * code for tiles of all widths: there is little room for instructions near the tensor cores. */
template <class S, class T, EpilogueMode MODE>
__device__ __forceinline__ void store_tile(float (&d)[2][S::TOKENS / 2], const RowMaps *out_maps,
                                           const moelora_gemm_launch &g, const TileHeader &header,
                                           int consumer, const Pipeline<S> &pipeline) {
  if constexpr (S::TOKENS_FIRST) {
    store_tokens_first<S, T, MODE>(d, out_maps, g, header, consumer, pipeline);
    return;
  }
  constexpr int N = S::TOKENS;
  const int lane = threadIdx.x & 31;
  constexpr bool GENERAL = MODE == EpilogueMode::GENERAL;
  constexpr int BUFFERS = S::OWN_BUFFERS + S::ALIASED_BUFFERS;
  const bool gated =
      GENERAL ? g.weights.gated : MODE == EpilogueMode::GATED || MODE == EpilogueMode::SILU;
  const bool by_position = !GENERAL || g.epilogue.out_by_position;
  const bool f32 = MODE == EpilogueMode::PLAIN_F32 ||
                   (GENERAL && S::TOKENS <= MOELORA_FLOAT_ROWS && g.epilogue.out_f32);
  const int halves = gated ? 1 : 2;
  constexpr bool E4M3 = S::Format::IS_W8A8 && S::CONSUMERS == 2 &&
                        (MODE == EpilogueMode::GATED || MODE == EpilogueMode::SILU);
  static_assert(!E4M3 || N <= BUFFERS * kEpilogueTokens, "all of a tile is there at once");
  const Epilogue<S, MODE> epilogue(g, header.tile, consumer, T());
  epilogue.template begin<T, N>(d, g);
  if (!f32 && S::ALIASED_BUFFERS == 0)
    wait_until_read(consumer);
#pragma unroll
  for (int c = 0; c < N; c += kEpilogueTokens) {
    if (c > 0 && c >= header.count)
      break;
    epilogue.template finish<N>(d, g, header.tile.block, c);
    const int32_t rows = by_position ? 0 : block_row<S>(g, header.tile.block, c + lane);
    const int index = c / kEpilogueTokens * halves, end = index + halves;
    if (!f32 && index <= S::OWN_BUFFERS && end > S::OWN_BUFFERS)
      warpgroup_sync<128 * S::CONSUMERS>(3); // all have multiplied the stage
    if (!f32 && end > BUFFERS)
      wait_until_read<S::ALIASED_BUFFERS / 4>(consumer); // its own buffers once more
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half == halves)
        break;
      if (f32)
        store_f32<S, N, !GENERAL>(d[half], g, first_output<S>(g, header.tile, 2 * consumer + half),
                                  c, out_block<S>(g, header.tile), header.count, rows);
      else
        write_epilogue_tile<T, N>(d[half], c, pipeline.epilogue_buffer(consumer, index + half));
    }
    if (f32)
      continue;
    fence_async_proxy();
    warpgroup_sync(consumer + 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half == halves)
        break;
      const int first = first_output<S>(g, header.tile, 2 * consumer + half);
      const uint32_t buffer = pipeline.epilogue_buffer(consumer, index + half);
      if (!by_position)
        store_rows<S, T>(g, first, c, header, rows, buffer);
      else if (threadIdx.x % 128 == (index + half) % 4 * 32 && // the warps take turns
               !(E4M3 && g.epilogue.out_unread))
        tma_store_2d(c + kEpilogueTokens <= S::TOKENS ? &out_maps->many : &out_maps->few, first,
                     header.tile.block * S::TOKENS + c, buffer);
    }
  }
  if constexpr (E4M3)
    if (g.epilogue.e4m3.values) {
      warpgroup_sync<128 * S::CONSUMERS>(3); // each has half of a group
      store_e4m3<S, T, 128 * S::CONSUMERS>(g, header.tile, 0, header.count, [&](int half, int i) {
        return pipeline.epilogue_buffer(half, i);
      });
      warpgroup_sync<128 * S::CONSUMERS>(3); // before buffers are used again, or rows mended
    }
}

/* Adds the stage at hand, and leaves stage `previous`. Returns true if it checks and something in B
 * was neither finite nor added. */
template <class S, class T, int N>
__device__ __forceinline__ bool add_adapters(float (&d)[2][S::TOKENS / 2],
                                             const moelora_gemm_launch &g,
                                             const Pipeline<S> &pipeline, int previous,
                                             int consumer, bool active, bool half, bool checks) {
  // Two CTAs on an SM fill each other's gaps: there a stage is rather free soon.
  if (S::RESIDENT > 1)
    wgmma_wait<0>(), pipeline.release(previous);
  pipeline.wait_full();
  const SlabsHeader header = SlabsHeader::read(pipeline.header());
  const SlabLayout<S> layout = {header.width};
  const int first = layout.m64(slab_m64<S>(g, own_m64(half, consumer)));
  const int next = half ? 0 : layout.m64(slab_m64<S>(g, 2 * consumer + 1)) - first;
  const uint32_t weights = pipeline.weights() + first;
  bool nonfinite = checks && NonFinite<S, T>::clear(weights, next, consumer, header);
  if (S::TOKENS_FIRST && checks) // each consumer multiplies what both have cleared
    nonfinite = warpgroup_any<128 * S::CONSUMERS>(3, nonfinite);
  if constexpr (S::TOKENS <= 32) {
    add_slabs<S, T, N>(d, g, pipeline, consumer, header);
    __syncwarp(); // all lanes have read them
    return nonfinite;
  }
  fence_async_proxy(); // cp.async, or `clear`, wrote through the ordinary proxy
  if (S::RESIDENT == 1)
    wgmma_wait<0>(), pipeline.release(previous);
  if constexpr (S::TOKENS_FIRST) {
    if (active && half)
      add_slabs_tokens_first<S, T, S::HALF_TILES>(d, g, pipeline, consumer, header);
    else if (active)
      add_slabs_tokens_first<S, T, false>(d, g, pipeline, consumer, header);
    return nonfinite;
  }
  const uint64_t a = layout.descriptor(weights), b = wgmma_descriptor(pipeline.tokens());
  const int step = has_gate_up_slices(g) ? 4 : 2,
            up = has_gate_up_slices(g) ? 2 : 0; // as in gemm/sm90/adapters.cuh
#pragma unroll 1
  for (int j = 0; j < header.slabs; j++) {
    wgmma_fence();
    const uint64_t slab = a + layout.slab(j) / 16;
    Wgmma<N>::template mma<Element<T>::is_bf16>(d[0], slab, b + step * j);
    Wgmma<N>::template mma<Element<T>::is_bf16>(d[1], slab + next / 16, b + step * j + up);
    wgmma_commit();
    if (S::Format::IS_W8A8)
      wgmma_wait<0>(); // sums that arithmetic made may not meet those that are on their way
  }
  return nonfinite;
}

/* The pending check: what a tile's products leave to be done. */
enum class PendingCheck {
  NOTHING,
  CHECK_SUMS, // nobody has checked B
  FIX_UP,     // NaN to what belongs to B's infinities
};

/* The base product: all of the depth. Returns the last stage, which wgmma may still read. */
template <class S, class T, int N>
__device__ __forceinline__ int multiply_depth(float (&d)[2][S::TOKENS / 2],
                                              const moelora_gemm_launch &g, Pipeline<S> &pipeline,
                                              int consumer, int depth_steps) {
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    wgmma_fence();
    const uint64_t a = wgmma_descriptor(pipeline.weights() + consumer * 2 * kM64Bytes);
    const uint64_t b = wgmma_descriptor(pipeline.tokens());
#pragma unroll
    for (int k = 0; k < 4; k++) {
      Wgmma<N>::template mma<Element<T>::is_bf16>(d[0], a + 2 * k, b + 2 * k);
      Wgmma<N>::template mma<Element<T>::is_bf16>(d[1], a + kM64Bytes / 16 + 2 * k, b + 2 * k);
    }
    wgmma_commit();
    if (S::ALIASED_BUFFERS > 0 && step == 1)
      release_aliased_stage(pipeline, consumer);
    wgmma_wait<1>();
    if (step > 0)
      pipeline.release(previous);
    previous = pipeline.stage;
    pipeline.advance();
  }
  return previous;
}

/* The products of a tile, with the token side of wgmma N wide: what d has beyond is for rows that
 * nobody reads. */
template <class S, class T, int N>
__device__ __forceinline__ PendingCheck multiply(float (&d)[2][S::TOKENS / 2],
                                                 const moelora_gemm_launch &g,
                                                 Pipeline<S> &pipeline, const TileHeader &header,
                                                 int consumer) {
  // Nobody reads any sums of a consumer that is not.
  const bool active = !S::TOKENS_FIRST || consumer * 64 < header.multiplied;
  const bool half = is_half<S>(header.tile);
  const int depth_steps = DepthSteps::of<S>(g, header.tile, all_depth_steps<S>(g)).count;
  if (S::ALIASED_BUFFERS > 0 && S::Format::IS_W8A8)
    release_aliased_stage(pipeline, consumer); // whose loops have no time for a barrier
#pragma unroll
  for (int i = 0; i < N / 2; i++)
    d[0][i] = d[1][i] = 0.f;
  int previous;
  if constexpr (S::Format::IS_NATIVE)
    previous = multiply_depth<S, T, N>(d, g, pipeline, consumer, depth_steps);
  else if constexpr (S::TOKENS_FIRST)
    previous = !active ? follow_depth<S>(g, pipeline)
               : half  ? multiply_tokens_first<S, S::HALF_TILES>(d, g, pipeline, consumer)
                       : multiply_tokens_first<S, false>(d, g, pipeline, consumer);
  else if constexpr (S::Format::IS_W8A8)
    previous = multiply_w8a8<S, N>(d, g, pipeline, consumer, depth_steps);
  else if constexpr (S::FEW)
    previous = multiply_few<S, T, N>(d, g, pipeline, depth_steps);
  else
    previous = multiply_quantized<S, T, N>(d, g, pipeline, consumer, depth_steps);
  if (S::ALIASED_BUFFERS > 0 && !S::Format::IS_W8A8)
    release_aliased_stage(pipeline, consumer); // of a tile without a second step
  const AdaptersHeader adapters = AdaptersHeader::read(pipeline.header(previous));
  const bool checks = adapters.ragged || (adapters.shared && pipeline.in_fixup());
  bool nonfinite = false;
#pragma unroll 1
  for (int i = 0; i < adapters.stages; i++) {
    nonfinite |= add_adapters<S, T, N>(d, g, pipeline, previous, consumer, active, half, checks);
    previous = pipeline.stage;
    pipeline.advance();
  }
  wgmma_wait<0>();
  if (S::ALIASED_BUFFERS > 0)
    pipeline.aliased = previous;
  else
    pipeline.release(previous);
  return nonfinite                    ? PendingCheck::FIX_UP
         : adapters.shared && !checks ? PendingCheck::CHECK_SUMS
                                      : PendingCheck::NOTHING;
}

/* With the narrowest wgmma that holds the tile's tokens, from width N on. */
template <class S, class T, int N>
__device__ __forceinline__ PendingCheck multiply_fitting(float (&d)[2][S::TOKENS / 2],
                                                         const moelora_gemm_launch &g,
                                                         Pipeline<S> &pipeline,
                                                         const TileHeader &header, int consumer) {
  if constexpr (S::TOKENS_FIRST) {
    return multiply<S, T, S::TOKENS>(d, g, pipeline, header, consumer);
  } else if constexpr (N < S::TOKENS) {
    if (header.count > N)
      return multiply_fitting<S, T, N + S::STEP>(d, g, pipeline, header, consumer);
  }
  return multiply<S, T, N>(d, g, pipeline, header, consumer);
}

/* Whether each row of a tile has a finite sum among the two tokens of its first that a thread
 * holds: only lanes of the first column say so, whose tokens are real. */
template <class S>
__device__ __forceinline__ bool are_finite(const float (&d)[2][S::TOKENS / 2], int consumer) {
  if constexpr (S::TOKENS_FIRST)
    return are_finite_tokens_first(d, consumer);
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float *two = &d[i / 2][i % 2 * 2];
    const float least = fminf(fabsf(two[0]), fabsf(two[1])); // the finite one
    most = max_nan(most, least);
  }
  return (threadIdx.x & 3) != 0 || most < __builtin_inff();
}

template <class S, class T, EpilogueMode MODE>
__device__ __forceinline__ void consume(const RowMaps *out_maps, const moelora_gemm_launch &g,
                                        Pipeline<S> &pipeline, int consumer) {
  const int lane = threadIdx.x & 31;
  for (;;) {
    pipeline.wait_full();
    const TileHeader header = TileHeader::read(pipeline.header());
    if (header.tile.block < 0)
      break;
    // Accumulators fill the registers: what the epilogue needs is only brought near.
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const int64_t position = (int64_t)header.tile.block * S::TOKENS + i * 32 + lane;
      if (!g.epilogue.out_by_position && i * 32 + lane < header.count)
        prefetch(&g.schedule.blocks.sorted_ids[position]);
      if (g.epilogue.weighted && i * 32 + lane < header.count)
        prefetch(&g.schedule.blocks.weights[position]);
    }
    float d[2][S::TOKENS / 2];
    const PendingCheck pending = multiply_fitting<S, T, S::LEAST>(d, g, pipeline, header, consumer);
    const bool used = !S::TOKENS_FIRST || consumer * 64 < header.count;
    if (pending == PendingCheck::CHECK_SUMS && used && !are_finite<S>(d, consumer))
      pipeline.request_fixup();
    if (MODE == EpilogueMode::GATED && g.epilogue.plain_silu)
      store_tile<S, T, EpilogueMode::SILU>(d, out_maps, g, header, consumer, pipeline);
    else
      store_tile<S, T, MODE>(d, out_maps, g, header, consumer, pipeline);
    if (pending == PendingCheck::FIX_UP)
      NonFinite<S, T>::fix_up(g, header, consumer);
  }
  tma_store_wait();
}

/* Whether all tiles come once more: in the fix-up pass, which comes only if some tile wants it. */
template <class S>
__device__ __forceinline__ bool has_another_pass(const moelora_gemm_launch &g,
                                                 Pipeline<S> &pipeline) {
  return g.schedule.blocks.packed_ranks && !pipeline.in_fixup() && pipeline.needs_fixup();
}

template <class S, class T, EpilogueMode MODE>
__global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    gemm_sm90(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ RowMaps x_maps,
              const __grid_constant__ RowMaps out_maps, const __grid_constant__ FactorMaps b_maps,
              const __grid_constant__ moelora_gemm_launch g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  Pipeline<S> pipeline(shared);
  if (threadIdx.x == 0)
    pipeline.init(), pipeline.init_fixup();
  if constexpr (S::CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  // With adapters the kernel before is the shrink. It let this one start only after it had itself
  // waited for all that came before, so that nothing but its own results is missing here.
  if (!g.schedule.blocks.packed_ranks)
    wait_for_previous_kernel();
  start_next_kernel();
  constexpr int PRODUCER = S::FIRST_PRODUCER / 128, FIRST_CONSUMER = PRODUCER == 0 ? 1 : 0;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == PRODUCER) {
    if constexpr (S::CONSUMER_REGISTERS > S::START_REGISTERS)
      give_registers<S::PRODUCER_REGISTERS>();
    if (__shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) == S::FIRST_PRODUCER / 32) {
#pragma unroll 1
      do {
        stream<S>(&w_map, &x_maps, &b_maps, g, pipeline);
      } while (has_another_pass(g, pipeline));
    } else {
#pragma unroll 1
      do {
        gather<S, T>(g, pipeline);
      } while (has_another_pass(g, pipeline));
    }
  } else {
    if constexpr (S::CONSUMER_REGISTERS > S::START_REGISTERS)
      take_registers<S::CONSUMER_REGISTERS>();
#pragma unroll 1
    do {
      consume<S, T, MODE>(&out_maps, g, pipeline, warpgroup - FIRST_CONSUMER);
    } while (has_another_pass(g, pipeline));
  }
  // Whoever waits for this kernel relies on the one before it, too.
  wait_for_previous_kernel();
  // No CTA leaves while its neighbour may still reach into its memory.
  if constexpr (S::CLUSTER > 1)
    cluster_sync();
#endif
}

} // namespace

#endif
