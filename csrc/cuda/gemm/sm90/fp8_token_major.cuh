/* Grouped GEMM for Hopper with FP8 weights and FP8 tokens, tokens as operand A, for tiles of 128
 * tokens: bulk copies, wgmma of e4m3, promotion to float32.
 *
 *   TMA warp        W(0) W(1) W(2)  ...       weights of step i and their scales, multicast
 *   gather warps    X(0) X(1) X(2)  ...       token scales of step i, and token rows unless TMA
 *                                             loads them (x ordered by position)
 *   consumer 0      wgmma 0a | promote 0a | wgmma 0b | promote 0b | wgmma 1a | ...   64 tokens
 *   consumer 1           | wgmma 0a | promote 0a | wgmma 0b | ...                    64 tokens
 *                   a, b: the two pairs of m64 tiles, N = 128 weight rows each
 *
 * With tokens as operand A, a thread needs the scales of two tokens; with weights as operand A it
 * needs those of 32. Token-major wgmmas also read less shared memory, whose bandwidth bounds tiles
 * of 128 tokens by 256 rows.
 *
 * Accumulators rAcc[2][64]: rAcc[h][4i + q] is
 *
 *   token  64 * consumer + 16 * warp + lane/4 + 8 (q / 2)
 *   row    8i + 2 (lane % 4) + q % 2 of the concatenated m64 tiles 2h and 2h + 1
 *
 * In a gated projection rAcc[h][j] is gate and rAcc[h][j + 32] is up.
 *
 * A consumer without tokens advances with the pipeline and skips the wgmmas. */
#pragma once

#include "cuda/gemm/sm90/fp8.cuh"
#include "cuda/gemm/sm90/gemm.cuh"

template <class S, class T> struct Fp8TokenMajorMainloop;

/* Shared memory. `rows` lists the offsets of a block's rows of x, see ListedTokenRows. */
constexpr int kListedAtOnce = kGatherers / 4; // rows that the gather warps copy at once
template <class S> struct Fp8TokenMajorStorage {
  SharedStorage<S> gemm;
  alignas(16) uint32_t rows[(S::TOKENS + kListedAtOnce - 1) / kListedAtOnce * kListedAtOnce];
  alignas(16) ScalesOf<S> scales[S::STAGES];
};

template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER>
struct Fp8TokenMajorShape : KernelShape<TOKENS, CONSUMERS, STAGES, CLUSTER, MOELORA_KERNEL_W8A8>,
                            RegisterBudget<56, CONSUMERS> {
  static_assert(TOKENS == 64 * CONSUMERS && CONSUMERS == 2, "64 tokens a consumer");
  static constexpr bool SWAP_AB = false, UNPAIRED_BLOCKS = CLUSTER > 1;

  using Stage = Fp8Stage<TOKENS, 2 * CONSUMERS>;
  template <class S> using Storage = Fp8TokenMajorStorage<S>;
  template <class S, class T> using Mainloop = Fp8TokenMajorMainloop<S, T>;
};

/* Shape with half tiles at the end of the schedule, for projections that are not gated. Each warp
 * stores its own outputs, so that consumers do not wait for each other, nor for buffers. */
template <class S> struct WithHalfTiles : WithRuns<S> {
  static_assert(!S::SWAP_AB, "m64 tiles are multiplied pair by pair");
  static constexpr bool HALF_TILES = true, ALIASES = false;
};

/* Producer of token rows, by cp.async. Each thread has looked up the rows whose scales it copies;
 * the threads exchange these rows through a list in shared memory. */
template <class S> struct ListedTokenRows {
  using Rows = GatherShare<S::TOKENS, 4, kGatherers, S::Format::X_ELEMENTS / 8>;
  static constexpr int LIST_BYTES = sizeof(Fp8TokenMajorStorage<S>::rows);
  static_assert(Rows::STEP == kListedAtOnce, "a list of all that is read");
  Rows rows;

  __device__ __forceinline__ explicit ListedTokenRows(int thread) : rows(thread) {}

  __device__ __forceinline__ void find(const moelora_gemm_launch &, const Tile &, int, int) {}

  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const TokenScales<S> &scales,
                                        int thread, const SharedMemory<S> &smem) {
    if (g.tokens.divisor.value) {
      const uint32_t sRows = smem.base + (uint32_t)offsetof(Fp8TokenMajorStorage<S>, rows);
      list(g.tokens, scales, sRows, thread);
#pragma unroll
      for (int i = 0; i < Rows::ROWS; i++)
        rows.token[i] = load_shared_4(sRows + (thread / 4 + Rows::STEP * i) * 4);
      rows.begin(g.tokens, thread);
    }
  }
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const SharedMemory<S> &smem,
                                       int stage) {
    if (g.tokens.divisor.value)
      rows.copy(smem.sX(stage));
  }

private:
  /* Lists the offset of each token's row, in units of 16 bytes, or kNoRow. Called by all gather
   * threads. */
  static __device__ __forceinline__ void
  list(const moelora_tokens &tokens, const TokenScales<S> &scales, uint32_t sRows, int thread) {
    warpgroup_sync<kGatherers>(kGatherBarrier); // all have read the list of the previous tile
#pragma unroll
    for (int i = 0; i < TokenScales<S>::EACH; i++) {
      const int t = thread + i * kGatherers;
      const uint32_t row = scales.row[i];
      if (t * 4 < LIST_BYTES)
        store_shared_4(
            sRows + t * 4,
            row == kNoRow ? kNoRow : row * (uint32_t)(tokens.stride / (S::Format::X_ELEMENTS / 8)));
    }
    warpgroup_sync<kGatherers>(kGatherBarrier);
  }
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
  using WeightLoads = Fp8Loads<S>;
  using Rows = ListedTokenRows<S>;
  using Scales = TokenScales<S>;
  using Adapters = Fp8TokenMajorMainloop;
  template <EpilogueMode MODE> using Epilogue = Fp8TokenMajorEpilogue<S, T, MODE>;
  static constexpr bool RELEASES_ALIASED_STAGE = false;

  template <int N>
  static __device__ __forceinline__ int
  main_loop(float (&rAcc)[2][64], const moelora_gemm_launch &g, WarpContext<S> &warp,
            const TileHeader &header, int) {
    return !is_active(warp, header)  ? skip_k_steps(g, warp.pipeline)
           : is_half<S>(header.tile) ? multiply_k_steps<S::HALF_TILES>(rAcc, g, warp)
                                     : multiply_k_steps<false>(rAcc, g, warp);
  }

  /* Returns whether this consumer has tokens to multiply. */
  static __device__ __forceinline__ bool is_active(const WarpContext<S> &warp,
                                                   const TileHeader &header) {
    return warp.consumer * 64 < header.multiplied;
  }

  /* Runs the K loop of a half or whole tile. */
  template <bool HALF, bool BY_ROW>
  static __device__ __forceinline__ int
  multiply_k_steps(float (&rAcc)[2][64], const moelora_gemm_launch &g, WarpContext<S> &warp) {
    constexpr int PAIRS = HALF ? 1 : 2; // pairs of m64 tiles
    GemmPipeline<S> &pipeline = warp.pipeline;
    const int k_steps = (g.tokens.k + S::Format::X_ELEMENTS - 1) / S::Format::X_ELEMENTS;
    const ThreadPlace thread(warp.consumer);
    const uint32_t token_scale = quad_position(thread.token) * 4;
    int previous = 0;
    float rPartial[64], tokens[2];
    bool full = false; // whether the next stage is known to be full
#pragma unroll 1
    for (int step = 0; step < k_steps; step++) {
      // Wait for the stage.
      const uint32_t stage = uniform_stage(warp.smem, pipeline);
      if (!full)
        pipeline.wait_full();
      if (g.tokens.divisor.value)
        fence_async_proxy(); // make writes to sX by cp.async visible to wgmma
      const uint64_t a = wgmma_descriptor(stage + (uint32_t)offsetof(typename S::Stage, sX) +
                                          warp.consumer * kM64Bytes);
      const uint32_t token_scales = sXScale<S>(warp.smem, pipeline.stage) + token_scale;
      const uint32_t weight_scales = sWScale<S>(warp.smem, pipeline.stage, 0);
      previous = pipeline.stage;
      pipeline.advance();
      const auto release = [&] {
        __syncwarp(); // all lanes have read the scales
        if (step + 1 < k_steps)
          pipeline.release(previous);
      };

#pragma unroll
      for (int h = 0; h < PAIRS; h++) {
        // Issue the wgmmas of a pair of m64 tiles.
        wgmma_e4m3<128>(rPartial, a, wgmma_descriptor(stage + 2 * h * kM64Bytes));

        // While they run, load the scales and test whether the next stage is full.
        const uint32_t scales = weight_scales + 2 * h * kM64ScaleBytes;
        if (h == 0)
#pragma unroll
          for (int i = 0; i < 2; i++)
            tokens[i] = __uint_as_float(load_shared_4(token_scales + i * 8));
        const float weights[2] = {__uint_as_float(load_shared_4(scales)),
                                  __uint_as_float(load_shared_4(scales + kM64ScaleBytes))};
        if (h == PAIRS - 1)
          full = pipeline.is_full();

        // Promote. With BY_ROW, promotion reads scales from the stage, so release it afterwards.
        wgmma_wait<0>();
        fence_accumulators<64>(rPartial);
        if (h == PAIRS - 1 && !BY_ROW)
          release();
        promote<BY_ROW>(rAcc[h], rPartial, tokens, weights, scales + thread.row * 4);
      }
      if (BY_ROW)
        release();
    }
    fence_accumulators<64>(rAcc[0]);
    fence_accumulators<64>(rAcc[1]);
    return previous;
  }
  template <bool HALF>
  static __device__ __forceinline__ int
  multiply_k_steps(float (&rAcc)[2][64], const moelora_gemm_launch &g, WarpContext<S> &warp) {
    return moelora_has_row_scales(g.weights.w.format)
               ? multiply_k_steps<HALF, true>(rAcc, g, warp)
               : multiply_k_steps<HALF, false>(rAcc, g, warp);
  }

  /* Runs the K loop of a consumer without tokens. */
  static __device__ __forceinline__ int skip_k_steps(const moelora_gemm_launch &g,
                                                     GemmPipeline<S> &pipeline) {
    const int k_steps = (g.tokens.k + S::Format::X_ELEMENTS - 1) / S::Format::X_ELEMENTS;
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

  /* Adds rPartial * token scales * weight scales of two m64 tiles to rAcc. There is one weight
   * scale per tile, or with BY_ROW one per row, read from shared memory at `rows`. */
  template <bool BY_ROW>
  static __device__ __forceinline__ void promote(float (&rAcc)[64], const float *rPartial,
                                                 const float (&tokens)[2],
                                                 const float (&weights)[2], uint32_t rows) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
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
  template <int N>
  static __device__ __forceinline__ bool
  add_stage(float (&rAcc)[2][64], const moelora_gemm_launch &g, const WarpContext<S> &warp,
            const TileHeader &header, int previous, bool clears) {
    const bool active = is_active(warp, header), half = is_half<S>(header.tile);
    const AdapterStage<S, T> stage = AdapterStage<S, T>::wait(g, warp, half, clears);
    bool nonfinite = stage.nonfinite;
    if (clears) // each consumer multiplies the rows that both have cleared
      nonfinite = warpgroup_any<128 * S::CONSUMERS>(kAllConsumersBarrier, nonfinite);
    fence_async_proxy(); // make writes by cp.async and by `clear` visible to wgmma
    wgmma_wait<0>(), warp.pipeline.release(previous);
    if (active && half)
      add_slabs<S::HALF_TILES>(rAcc, g, warp, stage.header);
    else if (active)
      add_slabs<false>(rAcc, g, warp, stage.header);
    return nonfinite;
  }

  /* Multiplies the slabs of a stage, two at a time. */
  template <bool HALF>
  static __device__ __forceinline__ void
  add_slabs(float (&rAcc)[2][64], const moelora_gemm_launch &g, const WarpContext<S> &warp,
            const SlabsHeader &header) {
    const SlabLayout<S> layout = {header.width};
    const int step = has_gate_up_slices(g) ? 4 : 2;
    const int stage = warp.pipeline.stage;
    uint64_t a = wgmma_descriptor(warp.smem.sX(stage) + uniform(warp.consumer * kM64Bytes));
    uint64_t b = layout.descriptor(warp.smem.sW(stage));
    int slabs = header.slabs;
#pragma unroll 1
    for (; slabs > 1; slabs -= 2, a += 2 * step, b += layout.slab(2) / 16)
      wgmma_slabs<2, HALF>(rAcc, g, layout, a, b);
    if (slabs > 0)
      wgmma_slabs<1, HALF>(rAcc, g, layout, a, b);
  }
  template <int COUNT, bool HALF>
  static __device__ __forceinline__ void
  wgmma_slabs(float (&rAcc)[2][64], const moelora_gemm_launch &g, const SlabLayout<S> &layout,
              uint64_t a, uint64_t b) {
    const XaLayout xa(has_gate_up_slices(g));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      if constexpr (S::HALF_TILES) { // not gated: pairs of m64 tiles are contiguous
#pragma unroll
        for (int h = 0; h < (HALF ? 1 : 2); h++)
          Wgmma<128>::template mma<Element<T>::is_bf16>(
              rAcc[h], a + xa.slab * j, b + (layout.slab(j) + layout.m64(2 * h)) / 16);
      } else {
#pragma unroll
        for (int m64 = 0; m64 < S::TILES; m64++)
          Wgmma<64>::template mma<Element<T>::is_bf16>(
              rAcc[m64 / 2] + m64 % 2 * 32, a + xa.slab * j + m64 % 2 * xa.up,
              b + (layout.slab(j) + layout.m64(slab_m64<S>(g, m64))) / 16);
      }
    }
    wgmma_commit();
    wgmma_wait<0>(); // the loop merges rAcc with that of promotion: no wgmma may be in flight
  }

  /* Returns whether each weight row has a finite accumulator for the tile's token 0 or 8. Only the
   * threads that hold these check. */
  static __device__ __forceinline__ bool are_finite(const float (&rAcc)[2][64], int consumer) {
    if (ThreadPlace(consumer).token != 0)
      return true;
    float most[4] = {}; // four independent maxima
#pragma unroll
    for (int i = 0; i < 64; i++) {
      const float *two = &rAcc[i / 32][i / 2 % 16 * 4 + i % 2];
      most[i % 4] = max_nan(most[i % 4], fminf(fabsf(two[0]), fabsf(two[2])));
    }
    return max_nan(max_nan(most[0], most[1]), max_nan(most[2], most[3])) < __builtin_inff();
  }
};

/* Adds the bias to a thread's accumulators of an m64 tile. */
template <class T>
__device__ __forceinline__ void add_bias(float *v, const moelora_gemm_launch &g, int expert,
                                         int m64, int first) {
  const T *gBias = (const T *)g.weights.w.bias + expert * g.weights.w.bias_stride_e;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int output = first + i / 2 * 8 + 2 * (threadIdx.x & 3) + i % 2;
    if (output < g.weights.n_out) {
      const float b = Element<T>::to_float(gBias[weight_row(g, m64, output)]);
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
      float *v = GATED ? rAcc[i] : rAcc[i / 2] + i % 2 * 32;
      const int m64 = GATED ? 2 * i : i, first = first_output<S>(g, header.tile, m64);
      if (is_half<S>(header.tile) && i == 2)
        break;
      if (GATED && i == 1) // from here on buffers alias the last stage:
        warp.sync_all();   // wait until both consumers have read it
      if (from >= header.count)
        continue;

      // Apply bias and activation.
      if (g.weights.w.bias)
        add_bias<T>(v, g, header.tile.expert, m64, first);
      if (GATED && g.weights.w.bias)
        add_bias<T>(v + 32, g, header.tile.expert, m64 + 1, first);
      if (MODE == EpilogueMode::SILU) {
#pragma unroll
        for (int j = 0; j < 32; j++)
          v[j] = activation.template apply<MOELORA_FORM_SILU>(v[j], v[j + 32]);
      } else if (GATED) {
        activation.with_form([&](auto form) __attribute__((always_inline)) {
#pragma unroll
          for (int j = 0; j < 32; j++)
            v[j] = activation.template apply<decltype(form)::value>(v[j], v[j + 32]);
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
