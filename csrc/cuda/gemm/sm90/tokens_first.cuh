/* Tiles of FP8 products alone count for: tokens are operand A of wgmma, 64 of them a consumer, and
 * weight rows operand B, 128 at a time. So a thread needs the scales of two tokens, where with
 * weights first it needs those of a quarter of the tile, and what shared memory has to deliver for
 * a product is a fifth less: of 128 tokens by 256 rows it is busy for as long as the tensor cores.
 *
 * Accumulators d[2][64]: d[h][4i + q] is token 64 * consumer + 16 * warp + lane/4 + 8 (q / 2), row
 * 8i + 2 (lane % 4) + q % 2 of m64 tiles 2h and 2h + 1, one after the other. Of a gated projection
 * d[h][j] is gate, d[h][j + 32] up.
 *
 * A consumer without tokens keeps up with the pipeline and does nothing else. */
#ifndef MOELORA_CUDA_SM90_TOKENS_FIRST_CUH
#define MOELORA_CUDA_SM90_TOKENS_FIRST_CUH

#include "cuda/gemm/common/epilogue.cuh"
#include "cuda/gemm/sm90/e4m3_rows.cuh"
#include "cuda/gemm/sm90/w8a8.cuh"

/* A thread's place in a tile. */
struct ThreadPlace {
  int token, row; // of its first accumulator

  __device__ __forceinline__ explicit ThreadPlace(int consumer)
      : token(consumer * 64 + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x >> 2 & 7)),
        row(2 * (threadIdx.x & 3)) {}
};

/* d += partial times the scales of two tokens and of the weights of two m64 tiles: one of each
 * tile, or BY_ROW one of each row, which lie from `rows` on. */
template <bool BY_ROW>
__device__ __forceinline__ void promote_tokens_first(float (&d)[64], const float *partial,
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
      d[4 * i + q] =
          fmaf(partial[4 * i + q], (q % 2 ? weight.y : weight.x) * tokens[q / 2], d[4 * i + q]);
  }
}

/* A consumer's share of the depth, where it has no tokens. Returns the last stage, as below. */
template <class S>
__device__ __forceinline__ int follow_depth(const moelora_gemm_launch &g, Pipeline<S> &pipeline) {
  const int depth_steps = (g.tokens.k + kDepth - 1) / kDepth;
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    pipeline.wait_full();
    previous = pipeline.stage;
    if (step + 1 < depth_steps)
      pipeline.release(previous);
    pipeline.advance();
  }
  return previous;
}

/* The base product: all of the depth. Returns the last stage, which the caller releases. */
template <class S, bool HALF, bool BY_ROW>
__device__ __forceinline__ int multiply_tokens_first(float (&d)[2][64],
                                                     const moelora_gemm_launch &g,
                                                     Pipeline<S> &pipeline, int consumer) {
  constexpr int PAIRS = HALF ? 1 : 2; // of m64 tiles
  const int depth_steps = (g.tokens.k + kDepth - 1) / kDepth;
  const ThreadPlace thread(consumer);
  const uint32_t token_scale = quad_place(thread.token) * 4;
  int previous = 0;
  float partial[64], tokens[2];
  bool full = false; // the next stage, as far as is known
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    const uint32_t place = pipeline.uniform_weights();
    if (!full)
      pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    const uint64_t a = wgmma_descriptor(place + S::W_BYTES + consumer * kM64Bytes);
    const uint32_t token_scales = pipeline.token_scales() + token_scale;
    const uint32_t weight_scales = pipeline.weight_scales(0);
    previous = pipeline.stage;
    pipeline.advance();
    const auto leave = [&] {
      __syncwarp(); // all lanes have read the scales
      if (step + 1 < depth_steps)
        pipeline.release(previous);
    };
#pragma unroll
    for (int h = 0; h < PAIRS; h++) {
      multiply_e4m3<128>(partial, a, wgmma_descriptor(place + 2 * h * kM64Bytes));
      const uint32_t scales = weight_scales + 2 * h * S::M64_SCALES; // read while products run
      if (h == 0)
#pragma unroll
        for (int i = 0; i < 2; i++)
          tokens[i] = __uint_as_float(load_shared_4(token_scales + i * 8));
      const float weights[2] = {__uint_as_float(load_shared_4(scales)),
                                __uint_as_float(load_shared_4(scales + S::M64_SCALES))};
      if (h == PAIRS - 1)
        full = pipeline.is_full();
      wgmma_wait<0>();
      settle<64>(partial);
      if (h == PAIRS - 1 && !BY_ROW)
        leave();
      promote_tokens_first<BY_ROW>(d[h], partial, tokens, weights, scales + thread.row * 4);
    }
    if (BY_ROW)
      leave();
  }
  settle<64>(d[0]);
  settle<64>(d[1]);
  return previous;
}

template <class S, bool HALF>
__device__ __forceinline__ int multiply_tokens_first(float (&d)[2][64],
                                                     const moelora_gemm_launch &g,
                                                     Pipeline<S> &pipeline, int consumer) {
  return moelora_has_row_scales(g.weights.w.format)
             ? multiply_tokens_first<S, HALF, true>(d, g, pipeline, consumer)
             : multiply_tokens_first<S, HALF, false>(d, g, pipeline, consumer);
}

/* The products of COUNT slabs of adapters. */
template <class S, class T, int COUNT, bool HALF>
__device__ __forceinline__ void multiply_slabs(float (&d)[2][64], const moelora_gemm_launch &g,
                                               const SlabLayout<S> &layout, uint64_t a,
                                               uint64_t b) {
  const bool gate_up = has_gate_up_slices(g);
  const int step = gate_up ? 4 : 2, up = gate_up ? 2 : 0; // as in gemm/sm90/adapters.cuh
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < COUNT; j++)
#pragma unroll
    for (int m64 = 0; m64 < (HALF ? S::TILES / 2 : S::TILES); m64++)
      Wgmma<64>::template mma<Element<T>::is_bf16>(
          d[m64 / 2] + m64 % 2 * 32, a + step * j + m64 % 2 * up,
          b + (layout.slab(j) + layout.m64(slab_m64<S>(g, m64))) / 16);
  wgmma_commit();
  wgmma_wait<0>(); // sums that arithmetic made may not meet those that are on their way
}

/* A stage of adapters: its `slabs`, two at once. */
template <class S, class T, bool HALF>
__device__ __forceinline__ void
add_slabs_tokens_first(float (&d)[2][64], const moelora_gemm_launch &g, const Pipeline<S> &pipeline,
                       int consumer, const SlabsHeader &header) {
  const SlabLayout<S> layout = {header.width};
  const int step = has_gate_up_slices(g) ? 4 : 2;
  uint64_t a = wgmma_descriptor(pipeline.tokens() + uniform(consumer * kM64Bytes));
  uint64_t b = layout.descriptor(pipeline.weights());
  int slabs = header.slabs;
#pragma unroll 1
  for (; slabs > 1; slabs -= 2, a += 2 * step, b += layout.slab(2) / 16)
    multiply_slabs<S, T, 2, HALF>(d, g, layout, a, b);
  if (slabs > 0)
    multiply_slabs<S, T, 1, HALF>(d, g, layout, a, b);
}

/* Whether each row has a finite sum among two tokens of a tile's first. */
__device__ __forceinline__ bool are_finite_tokens_first(const float (&d)[2][64], int consumer) {
  if (ThreadPlace(consumer).token != 0)
    return true;
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const float *two = &d[i / 32][i / 2 % 16 * 4 + i % 2];
    most = max_nan(most, fminf(fabsf(two[0]), fabsf(two[2])));
  }
  return most < __builtin_inff();
}

/* Adds the bias of an m64 tile. */
template <class T>
__device__ __forceinline__ void add_bias_tokens_first(float *d, const moelora_gemm_launch &g,
                                                      int expert, int m64, int first) {
  const T *bias = (const T *)g.weights.w.bias + expert * g.weights.w.bias_stride_e;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int output = first + i / 2 * 8 + 2 * (threadIdx.x & 3) + i % 2;
    if (output < g.weights.n_out) {
      const float b = Element<T>::to_float(bias[weight_row(g, m64, output)]);
      d[i / 2 * 4 + i % 2] += b, d[i / 2 * 4 + i % 2 + 2] += b;
    }
  }
}

/* From accumulators to memory, by the copy engine, 64 outputs at a time: a warp puts its 16 tokens
 * beside those of its neighbour into an epilogue tile of 32. */
template <class S, class T, EpilogueMode MODE>
__device__ __forceinline__ void
store_tokens_first(float (&d)[2][64], const RowMaps *out_maps, const moelora_gemm_launch &g,
                   const TileHeader &header, int consumer, const Pipeline<S> &pipeline) {
  constexpr bool GATED = MODE != EpilogueMode::PLAIN;
  const Activation activation(g.epilogue.activation);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int token = warp % 2 * 16 + (lane & 15), from = consumer * 64;
#pragma unroll
  for (int i = 0; i < (GATED ? 2 : 4); i++) {
    float *v = GATED ? d[i] : d[i / 2] + i % 2 * 32;
    const int m64 = GATED ? 2 * i : i, first = first_output<S>(g, header.tile, m64);
    if (is_half<S>(header.tile) && i == 2)
      break;
    if (i == 1)                              // from here on in the last stage
      warpgroup_sync<128 * S::CONSUMERS>(3); // all have multiplied it
    if (from >= header.count)
      continue;
    if (g.weights.w.bias)
      add_bias_tokens_first<T>(v, g, header.tile.expert, m64, first);
    if (GATED && g.weights.w.bias)
      add_bias_tokens_first<T>(v + 32, g, header.tile.expert, m64 + 1, first);
    if (GATED) {
#pragma unroll
      for (int j = 0; j < 32; j++)
        v[j] = MODE == EpilogueMode::SILU ? silu_and_mul(v[j], v[j + 32])
                                          : activation(v[j], v[j + 32]);
    } else if (g.epilogue.activation.kind == MOELORA_RELU2) {
#pragma unroll
      for (int j = 0; j < 32; j++)
        v[j] = v[j] < 0.f ? 0.f : v[j] * v[j];
    }
    const uint32_t buffer = pipeline.epilogue_buffer(consumer, 2 * i + warp / 2);
#pragma unroll
    for (int n8 = 0; n8 < 8; n8 += 2) {
      const float *u = v + 4 * n8;
      const int chunk = n8 + (lane >> 4);
      store_matrix_x4(buffer + token * kRowBytes + ((chunk ^ (token & 7)) << 4),
                      pack2<T>(u[0], u[1]), pack2<T>(u[2], u[3]), pack2<T>(u[4], u[5]),
                      pack2<T>(u[6], u[7]));
    }
    fence_async_proxy();
    warpgroup_sync(consumer + 1);
    const int half = warp / 2 * 32;
    if (threadIdx.x % 64 == 0 && from + half < header.count && !(GATED && g.epilogue.out_unread))
      tma_store_2d(&out_maps->many, first, header.tile.block * S::TOKENS + from + half, buffer);
  }
  if (GATED && g.epilogue.e4m3.values)
    store_e4m3<S, T, 128>(g, header.tile, from, min(header.count, from + 64), [&](int half, int i) {
      return pipeline.epilogue_buffer(consumer, 2 * half + i % 2);
    });
}

#endif
