/* Grouped GEMM for Hopper with FP8 weights and FP8 tokens, tokens as operand A, for tiles of 128
 * tokens: bulk copies, wgmma of e4m3, promotion to float32.
 *
 *   TMA warp        W(0) W(1) W(2)  ...       weights of step i, multicast
 *   gather warps    X(0) X(1) X(2)  ...       token rows of step i, gathered or (x ordered by
 *                                             position) by TMA, and the scales of both
 *   consumer 0      wgmma 0a | promote 0a | wgmma 0b | promote 0b | wgmma 1a | ...   64 tokens
 *   consumer 1           | wgmma 0a | promote 0a | wgmma 0b | ...                    64 tokens
 *                   a, b: the halves of the tile's weight rows, N = 128 each
 *
 * With tokens as operand A, a thread needs the scales of two tokens; with weights as operand A it
 * needs those of 32. Token-major wgmmas also read less shared memory, whose bandwidth bounds tiles
 * of 128 tokens by 256 rows.
 *
 * In a gated projection the first half of the weight rows are gate rows, the second half the up
 * rows of the same outputs. Accumulators rAcc[2][64]: rAcc[h][4i + q] is
 *
 *   token  64 * consumer + 16 * warp + lane/4 + 8 (q / 2)
 *   row    128h + 8i + 2 (lane % 4) + q % 2
 *
 * A consumer without tokens advances with the pipeline and skips the wgmmas. */
#pragma once

#include "cuda/gemm/sm90/fp8_token_major_producer.cuh"
#include "cuda/gemm/sm90/gemm.cuh"

template <class S, class T> struct Fp8TokenMajorMainloop;

template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER>
struct Fp8TokenMajorShape : KernelShape<TOKENS, CONSUMERS, STAGES, CLUSTER, MOELORA_KERNEL_W8A8>,
                            RegisterBudget<56, CONSUMERS> {
  static_assert(TOKENS == 64 * CONSUMERS && CONSUMERS == 2, "64 tokens a consumer");
  static_assert(CLUSTER == 2, "half of the weights a CTA");
  static constexpr bool SWAP_AB = false, UNPAIRED_BLOCKS = true;
  static constexpr int BOX = TOKENS; // rows of x in one copy
  static constexpr bool GATHERS = true;

  using Stage = Fp8Stage<TOKENS, 2 * CONSUMERS>;
  template <class S> using Storage = Fp8TokenMajorStorage<S>;
  template <class S, class T> using Mainloop = Fp8TokenMajorMainloop<S, T>;
};

/* Shape of projections that are not gated. Each warp stores its own outputs, so that consumers do
 * not wait for each other, nor for buffers. Without GATHERS x is ordered by position, and the
 * gather warps have registers left to find adapters. */
template <class S, bool GATHERS_> struct WithRowStores : WithRuns<S> {
  static_assert(!S::SWAP_AB, "a warp has whole rows");
  static constexpr bool ALIASES = false, GATHERS = GATHERS_;
};

/* Position of a thread's accumulators within a tile. */
struct ThreadPlace {
  int token, row; // of the thread's first accumulator

  __device__ __forceinline__ explicit ThreadPlace(int consumer)
      : token(consumer * 64 + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)),
        row(2 * (threadIdx.x & 3)) {}
};

template <class S, class T, EpilogueMode MODE> struct Fp8TokenMajorEpilogue;

template <class S, class T> struct Fp8TokenMajorMainloop {
  using WeightLoads = Fp8Halves<S>;
  using Rows = ListedTokenRows<S>;
  using Scales = TokenMajorScales<S>;
  using Adapters = Fp8TokenMajorMainloop;
  template <EpilogueMode MODE> using Epilogue = Fp8TokenMajorEpilogue<S, T, MODE>;
  static constexpr bool RELEASES_ALIASED_STAGE = false;
  static constexpr int N = S::ROWS / 2;
  using Accumulators = float[2][N / 2];

  template <int>
  static __device__ __forceinline__ int main_loop(Accumulators &rAcc, const moelora_gemm_launch &g,
                                                  WarpContext<S> &warp, const TileHeader &header,
                                                  int k_steps) {
    if (!is_active(warp, header))
      return skip_k_steps(warp.pipeline, k_steps);
    return moelora_has_row_scales(g.weights.w.format)
               ? multiply_k_steps<true>(rAcc, g, warp, k_steps)
               : multiply_k_steps<false>(rAcc, g, warp, k_steps);
  }

  /* Returns whether this consumer has tokens to multiply. */
  static __device__ __forceinline__ bool is_active(const WarpContext<S> &warp,
                                                   const TileHeader &header) {
    return warp.consumer * 64 < header.multiplied;
  }

  /* Operands in the first stage. */
  struct Operands {
    uint64_t a, b;
    uint32_t token_scales, weight_scales;
    uint32_t empty; // empty barrier of stage 0 in CTA lane % 2, where this lane arrives

    __device__ __forceinline__ explicit Operands(const WarpContext<S> &warp) {
      const ThreadPlace thread(warp.consumer);
      a = wgmma_descriptor(uniform(warp.smem.sX(0) + warp.consumer * kM64Bytes));
      b = wgmma_descriptor(warp.smem.sW(0));
      token_scales = sXScale<S>(warp.smem, 0) + quad_position(thread.token) * 4;
      weight_scales = sWScale<S>(warp.smem, 0, 0);
      empty = cluster_address(warp.smem.base + GemmPipeline<S>::EMPTY, threadIdx.x & 1);
    }
  };

  /* Runs the K loop. Whole rounds of the pipeline are unrolled: addresses of a stage are then
   * constants, and little is left between two chains of wgmmas but promotion. With BY_ROW, unrolled
   * code would spill. */
  template <bool BY_ROW>
  static __device__ __forceinline__ int multiply_k_steps(Accumulators &rAcc,
                                                         const moelora_gemm_launch &g,
                                                         WarpContext<S> &warp, int k_steps) {
    GemmPipeline<S> &pipeline = warp.pipeline;
    const Operands operands(warp);
    bool full = false; // whether the current stage is known to be full
    int previous = 0;
#pragma unroll 1
    while (k_steps > 0) {
      if (!BY_ROW && pipeline.stage == 0 && k_steps >= S::STAGES) {
#pragma unroll
        for (int stage = 0; stage < S::STAGES; stage++)
          multiply_k_step<BY_ROW>(rAcc, g, warp, operands, stage,
                                  stage + 1 == S::STAGES && k_steps == S::STAGES, full);
        previous = S::STAGES - 1, k_steps -= S::STAGES;
      } else {
        previous = (int)uniform(pipeline.stage), k_steps--;
        multiply_k_step<BY_ROW>(rAcc, g, warp, operands, previous, k_steps == 0, full);
      }
    }
    fence_accumulators<N / 2>(rAcc[0]);
    fence_accumulators<N / 2>(rAcc[1]);
    return previous;
  }

  /* Multiplies `stage`, the current one of the pipeline. */
  template <bool BY_ROW>
  static __device__ __forceinline__ void
  multiply_k_step(Accumulators &rAcc, const moelora_gemm_launch &g, WarpContext<S> &warp,
                  const Operands &operands, int stage, bool last, bool &full) {
    GemmPipeline<S> &pipeline = warp.pipeline;
    const bool gathered = gathers_x<S>(g);
    float rPartial[N / 2], tokens[2];
    if (!full) {
      barrier_wait(pipeline.base + GemmPipeline<S>::FULL + 8 * stage, pipeline.phase);
      if (gathered)
        fence_async_proxy(); // make writes to sX by cp.async visible to wgmma
    }
    const int apart = stage * (SharedMemory<S>::STAGE_BYTES / 16);
    const uint32_t scales = stage * (int)sizeof(ScalesOf<S>);
    const bool wraps = stage + 1 == S::STAGES;
    pipeline.stage = wraps ? 0 : stage + 1;
    pipeline.phase ^= wraps;
    const auto release = [&] {
      __syncwarp(); // all lanes have read the scales
      if (last)
        return;
      if (kArrivals > 1)
        pipeline.release(stage);
      else if ((threadIdx.x & 31) < S::CLUSTER)
        barrier_arrive_cluster(operands.empty + 8 * stage);
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
      // Issue the wgmmas of half of the weight rows.
      wgmma_e4m3<N>(rPartial, move_descriptor(operands.a, apart),
                    move_descriptor(operands.b, apart + half * (N * kRowBytes / 16)));

      // While they run, load the scales and test whether the next stage is full.
      const uint32_t of_rows = operands.weight_scales + scales + half * (N * 4);
      float weights[2];
      if (half == 0)
#pragma unroll
        for (int i = 0; i < 2; i++)
          tokens[i] = __uint_as_float(load_shared_4(operands.token_scales + scales + i * 8));
#pragma unroll
      for (int i = 0; i < 2; i++)
        weights[i] = BY_ROW ? 0.f : __uint_as_float(load_shared_4(of_rows + i * kM64ScaleBytes));
      if (half == 1) {
        full = pipeline.is_full();
        if (full && gathered)
          fence_async_proxy();
      }

      // Promote. With BY_ROW, promotion reads scales from the stage, so release it afterwards.
      wgmma_wait<0>();
      if (half == 1 && !BY_ROW)
        release();
      fence_accumulators<N / 2>(rPartial);
      promote<BY_ROW>(rAcc[half], rPartial, tokens, weights, of_rows + ThreadPlace(0).row * 4);
    }
    if (BY_ROW)
      release();
  }

  /* Runs the K loop of a consumer without tokens. */
  static __device__ __forceinline__ int skip_k_steps(GemmPipeline<S> &pipeline, int k_steps) {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < k_steps; step++) {
      pipeline.wait_full();
      previous = pipeline.stage;
      if (step + 1 < k_steps)
        pipeline.release(previous);
      pipeline.advance();
    }
    return previous;
  }

  /* Adds rPartial * token scales * weight scales to rAcc. A stored tile has one scale, or with
   * BY_ROW one per row, read from shared memory at `rows`. */
  template <bool BY_ROW>
  static __device__ __forceinline__ void promote(float (&rAcc)[N / 2], const float *rPartial,
                                                 const float (&tokens)[2],
                                                 const float (&weights)[2], uint32_t rows) {
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
      float2 weight = {weights[i / 8], weights[i / 8]};
      if (BY_ROW) {
        const uint2 bits = load_shared_8(rows + i * 32);
        weight = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
      }
#pragma unroll
      for (int q = 0; q < 4; q++)
        rAcc[4 * i + q] = fmaf(rPartial[4 * i + q], (q % 2 ? weight.y : weight.x) * tokens[q / 2],
                               rAcc[4 * i + q]);
    }
  }

  /* Accumulates the current adapter stage and releases stage `previous`. Returns whether elements
   * of B were cleared. */
  template <int>
  static __device__ __forceinline__ bool
  add_stage(Accumulators &rAcc, const moelora_gemm_launch &g, const WarpContext<S> &warp,
            const TileHeader &header, int previous, bool clears) {
    const AdapterStage<S, T> stage = AdapterStage<S, T>::wait(g, warp, clears);
    bool nonfinite = stage.nonfinite;
    if (clears) // each consumer multiplies the rows that both have cleared
      nonfinite = warpgroup_any<128 * S::CONSUMERS>(kAllConsumersBarrier, nonfinite);
    fence_async_proxy(); // make writes by cp.async and by `clear` visible to wgmma
    wgmma_wait<0>(), warp.pipeline.release(previous);
    if (is_active(warp, header))
      add_slabs(rAcc, g, warp, stage.header);
    return nonfinite;
  }

  /* Multiplies the slabs of a stage, two at a time. */
  static __device__ __forceinline__ void add_slabs(Accumulators &rAcc, const moelora_gemm_launch &g,
                                                   const WarpContext<S> &warp,
                                                   const SlabsHeader &header) {
    const SlabLayout<S> layout = {header.width};
    const int step = has_gate_up_slices(g) ? 4 : 2;
    const int stage = warp.pipeline.stage;
    uint64_t a = wgmma_descriptor(warp.smem.sX(stage) + uniform(warp.consumer * kM64Bytes));
    uint64_t b = layout.descriptor(warp.smem.sW(stage));
    int slabs = header.slabs;
#pragma unroll 1
    for (; slabs > 1; slabs -= 2, a += 2 * step, b += layout.slab(2) / 16)
      wgmma_slabs<2>(rAcc, g, layout, a, b);
    if (slabs > 0)
      wgmma_slabs<1>(rAcc, g, layout, a, b);
  }
  template <int COUNT>
  static __device__ __forceinline__ void
  wgmma_slabs(Accumulators &rAcc, const moelora_gemm_launch &g, const SlabLayout<S> &layout,
              uint64_t a, uint64_t b) {
    const XaLayout xa(has_gate_up_slices(g));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < COUNT; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        Wgmma<N>::template mma<Element<T>::is_bf16>(rAcc[h], a + xa.slab * j + h * xa.up,
                                                    b + (layout.slab(j) + h * layout.half()) / 16);
    wgmma_commit();
    wgmma_wait<0>(); // the loop merges rAcc with that of promotion: no wgmma may be in flight
  }

  /* Returns whether each weight row has a finite accumulator for the tile's token 0 or 8. Only the
   * threads that hold these check. */
  static __device__ __forceinline__ bool are_finite(const Accumulators &rAcc, int consumer) {
    if (ThreadPlace(consumer).token != 0)
      return true;
    float most[4] = {}; // four independent maxima
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const float *two = &rAcc[i % 2][i / 4 * 4 + i / 2 % 2];
      most[i % 4] = max_nan(most[i % 4], fminf(fabsf(two[0]), fabsf(two[2])));
    }
    return max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3])) < __builtin_inff();
  }
};

/* Adds the bias to a thread's accumulators of an m64 tile. */
template <class T>
__device__ __forceinline__ void add_bias(float *v, const moelora_gemm_launch &g, int expert, int up,
                                         int first) {
  const T *gBias = (const T *)g.weights.w.bias + expert * g.weights.w.bias_stride_e;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int output = first + i / 2 * 8 + 2 * (threadIdx.x & 3) + i % 2;
    if (output < g.weights.n_out) {
      const float b = Element<T>::to_float(gBias[weight_row(g, up, output)]);
      v[i / 2 * 4 + i % 2] += b, v[i / 2 * 4 + i % 2 + 2] += b;
    }
  }
}

/* Rounds a warp's outputs of an m64 tile, 16 tokens, and writes them to shared memory: each token's
 * 64 outputs form a swizzled row of 128 bytes, the first of them at `rows`. */
template <class T> __device__ __forceinline__ void write_tokens(const float *v, uint32_t rows) {
  const int lane = threadIdx.x & 31, token = lane & 15;
#pragma unroll
  for (int n8 = 0; n8 < 8; n8 += 2) {
    const float *u = v + 4 * n8;
    const int chunk = n8 + (lane >> 4);
    store_matrix_x4(rows + token * kRowBytes + ((chunk ^ (token & 7)) << 4), pack2<T>(u[0], u[1]),
                    pack2<T>(u[2], u[3]), pack2<T>(u[4], u[5]), pack2<T>(u[6], u[7]));
  }
}

/* Epilogue: applies bias and activation to accumulators and stores them, 64 outputs at a time. */
template <class S, class T, EpilogueMode MODE> struct Fp8TokenMajorEpilogue {
  static constexpr bool GATED = MODE != EpilogueMode::PLAIN;

  static __device__ __forceinline__ void store(float (&rAcc)[2][64], const RowMaps *out_maps,
                                               const moelora_gemm_launch &g,
                                               const TileHeader &header,
                                               const WarpContext<S> &warp) {
    const Activation activation(g.epilogue.activation);
    const int from = warp.consumer * 64;
#pragma unroll
    for (int i = 0; i < (GATED ? 2 : 4); i++) {
      float *v = GATED ? rAcc[0] + i * 32 : rAcc[i / 2] + i % 2 * 32,
            *up = GATED ? rAcc[1] + i * 32 : nullptr;
      const int first = first_output<S>(g, header.tile, 0) + i * 64;
      if (GATED && i == 1) // from here on buffers alias the last stage:
        warp.sync_all();   // wait until both consumers have read it
      if (from >= header.count)
        continue;

      // Apply bias and activation.
      if (g.weights.w.bias)
        add_bias<T>(v, g, header.tile.expert, 0, first);
      if (GATED && g.weights.w.bias)
        add_bias<T>(up, g, header.tile.expert, 1, first);
      if (MODE == EpilogueMode::SILU) {
#pragma unroll
        for (int j = 0; j < 32; j++)
          v[j] = activation.template apply<MOELORA_FORM_SILU>(v[j], up[j]);
      } else if (GATED) {
        activation.with_form([&](auto form) __attribute__((always_inline)) {
#pragma unroll
          for (int j = 0; j < 32; j++)
            v[j] = activation.template apply<decltype(form)::value>(v[j], up[j]);
        });
      } else if (!moelora_is_gated(g.epilogue.activation.kind)) {
#pragma unroll
        for (int j = 0; j < 32; j++)
          v[j] = moelora_squared(nullptr, v[j], 0.f);
      }

      if constexpr (GATED)
        store_by_tma(v, out_maps, g, header, warp, i, first);
      else
        store_rows(v, g, header, warp, first);
    }

    // Store the same outputs in e4m3.
    if (GATED && g.epilogue.e4m3.values)
      store_e4m3<S, T, 128>(
          g, header.tile, from, min(header.count, from + 64),
          [&](int half, int i) { return warp.sOut(warp.consumer, 2 * half + i % 2); });
  }

private:
  /* Stages 64 outputs of the consumer's tokens in two epilogue tiles, of two warps each, and stores
   * them by TMA. */
  static __device__ __forceinline__ void
  store_by_tma(const float *v, const RowMaps *out_maps, const moelora_gemm_launch &g,
               const TileHeader &header, const WarpContext<S> &warp, int i, int first) {
    const int warp_id = threadIdx.x >> 5 & 3, from = warp.consumer * 64 + warp_id / 2 * 32;
    const uint32_t sOut = warp.sOut(warp.consumer, 2 * i + warp_id / 2);
    write_tokens<T>(v, sOut + warp_id % 2 * 16 * kRowBytes);
    fence_async_proxy();
    warp.sync();
    if (threadIdx.x % 64 == 0 && from < header.count && !g.epilogue.out_unread)
      tma_store_2d(&out_maps->box, first, header.tile.block * S::TOKENS + from, sOut);
  }

  /* Stages 64 outputs of the warp's tokens in its part of the consumer's buffers, and stores them
   * as whole 128-byte lines. */
  static __device__ __forceinline__ void store_rows(const float *v, const moelora_gemm_launch &g,
                                                    const TileHeader &header,
                                                    const WarpContext<S> &warp, int first) {
    static_assert(S::OWN_BUFFERS * kEpilogueTokens == 64, "16 rows for each of four warps");
    const int lane = threadIdx.x & 31, warp_id = threadIdx.x >> 5 & 3, chunk = lane & 7;
    const uint32_t rows = warp.sOut(warp.consumer, 0) + warp_id * 16 * kRowBytes;
    const int from =
        warp.consumer * 64 + warp_id * 16 + lane / 8; // this lane stores every fourth token
    const int64_t stride = g.epilogue.out_stride[0];
    T *gOut = (T *)g.epilogue.out + ((int64_t)header.tile.block * S::TOKENS + from) * stride +
              first + chunk * 8;
    write_tokens<T>(v, rows);
    __syncwarp();
    uint4 outputs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 4 * i + lane / 8;
      outputs[i] = load_shared_16(rows + token * kRowBytes + ((chunk ^ (token & 7)) << 4));
    }
    __syncwarp(); // all lanes have read the rows
    const int tokens = first + chunk * 8 < g.weights.n_out ? header.count - from : 0;
#pragma unroll
    for (int i = 0; i < 4; i++, gOut += 4 * stride)
      if (4 * i < tokens)
        store_global_16(gOut, outputs[i]);
  }
};
