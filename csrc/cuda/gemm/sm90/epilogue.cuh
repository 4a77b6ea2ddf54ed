/* Epilogue of the weight-major kernels: converts accumulators, stages them in epilogue tiles in
 * shared memory and stores them to global memory, 32 tokens at a time. Outputs that are ordered by
 * position are stored by TMA in whole boxes, which never cross the end of the block; these stores
 * overlap the next tile's main loop. */
#pragma once

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/common/epilogue.cuh"
#include "cuda/gemm/common/gate_up.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/ptx/opaque.cuh"

/* Stores the outputs of a gated projection as the e4m3 input of the next one. Quantizes the rounded
 * outputs in the epilogue tiles, with the same values and scales as quantize.cu. A tile of 256
 * weight rows has 128 outputs, which is one scale group.
 *
 * Quantizes tokens [first, end) of a tile with THREADS threads. sOut(half, token / 32) is the
 * epilogue tile of outputs 64 half to 64 half + 63, which must be complete. */
template <class S, class T, int THREADS, class Buffer>
__device__ __forceinline__ void store_e4m3(const moelora_gemm_launch &g, const Tile &tile,
                                           int first, int end, Buffer sOut) {
  static_assert(S::ROWS == 256, "128 outputs");
  const moelora_quantized_rows &gOut = g.epilogue.e4m3;
  const int thread = threadIdx.x % 128 + (THREADS > 128 ? threadIdx.x / 128 % 2 * 128 : 0);
  const int lane = thread % 8, half = lane / 4;
#pragma unroll 1
  for (int from = first; from < end; from += THREADS / 8) {
    const int token = from + thread / 8;
    // Lanes of the two halves read different banks.
    const uint32_t row = sOut(half, token / 32) + token % 32 * kRowBytes;
    const int chunk = (lane % 4 * 2 + half) ^ (token & 7);
    const uint4 a = load_shared_16(row + (chunk << 4)),
                b = load_shared_16(row + ((chunk ^ 1) << 4));
    const uint4 low = half ? b : a, high = half ? a : b;
    FloatColumns n = to_floats<T>({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
    float scale = gOut.scale;
    if (gOut.rule == MOELORA_X_GROUP)
      scale = group_scale(max_over_lanes<8>(abs_max(1e-10f, n)));
    const float inverse = 1.f / scale;
    for (int i = 0; i < 16; i++)
      n.v[i] *= inverse;
    if (token >= end)
      continue;
    const int64_t position = (int64_t)tile.block * S::TOKENS + token;
    char *const values = (char *)gOut.values + position * gOut.stride;
    store_global_16(values + tile.column * 128 + lane * 16, e4m3_bytes(n));
    if (lane == 0)
      gOut.scales[tile.column * gOut.scales_stride + position] = scale;
  }
}

/* Rounds the outputs of up to 32 tokens of an m64 tile, starting at token c, and transposes them
 * into an epilogue tile: each token's 64 outputs form a swizzled row of 128 bytes. */
template <class T, int N>
__device__ __forceinline__ void write_epilogue_tile(const float (&rAcc)[N / 2], int c,
                                                    uint32_t sOut) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int i = 0; i < kEpilogueTokens / 8; i += 2) {
    const int j = c / 8 + i;
    if (j >= N / 8)
      break;
    const int token = 8 * (i + (lane >> 4)) + (lane & 7);
    const int chunk = warp * 2 + (lane >> 3 & 1);
    const uint32_t at = sOut + token * kRowBytes + ((chunk ^ (token & 7)) << 4);
    const float *v = &rAcc[4 * j];
    if (j + 1 < N / 8)
      store_matrix_x4_trans(at, pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]),
                            pack2<T>(v[6], v[7]));
    else
      store_matrix_x2_trans(at, pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]));
  }
}

/* Stores an epilogue tile to flat rows. Each warp writes whole 128-byte lines. */
template <class S, class T>
__device__ __forceinline__ void store_rows(const moelora_gemm_launch &g, int first, int c,
                                           const TileHeader &header, int32_t rows, uint32_t sOut) {
  const int thread = threadIdx.x & 127;
#pragma unroll
  for (int i = 0; i < kEpilogueTokens / 16; i++) {
    const int token = i * 16 + thread / 8, chunk = thread & 7;
    const int row = __shfl_sync(0xffffffffu, rows, token);
    if (c + token < header.count && first + chunk * 8 < g.weights.n_out)
      store_global_16((T *)g.epilogue.out + output_offset(g, 0, row) + first + chunk * 8,
                      load_shared_16(sOut + token * kRowBytes + ((chunk ^ (token & 7)) << 4)));
  }
}

/* Interleaves gate and up and writes them like write_epilogue_tile; two epilogue tiles hold the 128
 * elements of each token. */
template <class T, int N>
__device__ __forceinline__ void write_interleaved_tiles(const float (&rAcc)[2][N / 2], int c,
                                                        uint32_t sFirst, uint32_t sSecond) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, token = lane >> 2;
  const uint32_t at = (warp < 2 ? sFirst : sSecond) + token * kRowBytes + (lane & 1) * 8;
#pragma unroll
  for (int i = 0; i < kEpilogueTokens / 8 && c / 8 + i < N / 8; i++)
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++) {
      const int v = 4 * (c / 8 + i) + 2 * m8, chunk = (warp & 1) * 4 + 2 * m8 + (lane >> 1 & 1);
      const uint32_t gate = transpose_8x8(pack2<T>(rAcc[0][v], rAcc[0][v + 1]));
      const uint32_t up = transpose_8x8(pack2<T>(rAcc[1][v], rAcc[1][v + 1]));
      store_shared_8(at + 8 * i * kRowBytes + ((chunk ^ token) << 4),
                     make_uint2(__byte_perm(gate, up, 0x5410), __byte_perm(gate, up, 0x7632)));
    }
}

/* Stores gate and up (before the activation) of up to 32 tokens, starting at token c, to flat rows.
 * Assembles whole lines in the last two epilogue buffers; callers must synchronize before they save
 * the next tokens. */
template <class S, class T, int N>
__device__ __forceinline__ void save_gate_up(const float (&rAcc)[2][N / 2],
                                             const moelora_gemm_launch &g, const TileHeader &header,
                                             const WarpContext<S> &warp, int c, int32_t rows) {
  constexpr int BUFFERS = WarpContext<S>::BUFFERS;
  const int thread = opaque(threadIdx.x & 127); // else offsets stay in registers between calls
  const int inter = g.weights.n_out, first = first_output<S>(g, header.tile, 2 * warp.consumer);
  const uint32_t sTile[2] = {warp.sOut(warp.consumer, BUFFERS - 2),
                             warp.sOut(warp.consumer, BUFFERS - 1)};
  if (g.weights.interleaved) {
    write_interleaved_tiles<T, N>(rAcc, c, sTile[0], sTile[1]);
  } else {
    write_epilogue_tile<T, N>(rAcc[0], c, sTile[0]);
    write_epilogue_tile<T, N>(rAcc[1], c, sTile[1]);
  }
  warp.sync();
  const int scale = g.weights.interleaved ? 2 : 1, next = g.weights.interleaved ? 64 : inter;
#pragma unroll
  for (int i = 0; i < kEpilogueTokens / 16; i++) {
    const int token = i * 16 + thread / 8, chunk = thread & 7;
    const int row = __shfl_sync(0xffffffffu, rows, token);
    uint16_t *const to = (uint16_t *)g.before.rows + (int64_t)row * g.before.stride;
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const int column = scale * first + chunk * 8 + t * next;
      const int end = scale * inter + (scale == 1 ? t * inter : 0);
      if (c + token < header.count && column < end)
        store_global_16(to + column, load_shared_16(sTile[t] + token * kRowBytes +
                                                    ((chunk ^ (token & 7)) << 4)));
    }
  }
}

/* Stores a consumer's accumulators before the activation, by flat row. */
template <class S, class T>
__device__ __forceinline__ void save_tile(const float (&rAcc)[2][S::TOKENS / 2],
                                          const moelora_gemm_launch &g, const TileHeader &header,
                                          int consumer) {
  const int token = (threadIdx.x & 31) / 4;
#pragma unroll
  for (int j = 0; j < S::TOKENS / 8; j++) {
    if (8 * j >= header.count)
      break;
    const bool valid = 8 * j + token < header.count;
    const int32_t row = valid ? block_row<S>(g, header.tile.block, 8 * j + token) : 0;
    save_before<S, T, true>(&rAcc[0][4 * j], &rAcc[1][4 * j], g, header.tile, consumer, row, valid);
  }
}

/* Epilogue of a tile. It is not specialized by N: the main loops leave little instruction cache. */
template <class S, class T, EpilogueMode MODE> struct WeightMajorEpilogue {
  static constexpr int N = S::TOKENS, BUFFERS = WarpContext<S>::BUFFERS;
  static constexpr bool GENERAL = MODE == EpilogueMode::GENERAL;
  static constexpr bool IS_GATED = MODE == EpilogueMode::GATED || MODE == EpilogueMode::SILU;
  static constexpr bool STORES_E4M3 = moelora_stores_e4m3(S::FORMAT, S::ROWS) && IS_GATED;
  static_assert(!STORES_E4M3 || N <= BUFFERS * kEpilogueTokens, "a buffer for all of a tile");
  // Whether gate and up are saved as whole lines, in two buffers that outputs do not need.
  static constexpr bool SAVES_LINES =
      S::SAVES && IS_GATED && (N + kEpilogueTokens - 1) / kEpilogueTokens + 2 <= BUFFERS;

  static __device__ __forceinline__ void store(float (&rAcc)[2][N / 2], const RowMaps *out_maps,
                                               const moelora_gemm_launch &g,
                                               const TileHeader &header,
                                               const WarpContext<S> &warp) {
    const int lane = threadIdx.x & 31;
    const bool gated = GENERAL ? g.weights.gated : IS_GATED;
    const bool by_position =
        !S::BY_ROW && (!(GENERAL || S::TRANSPOSED) || g.epilogue.out_by_position);
    const int halves = gated ? 1 : 2; // m64 tiles of outputs

    // Add the bias, save the values before the activation, apply relu^2, weigh flat rows.
    const Epilogue<S, MODE> epilogue(g, header.tile, warp.consumer, T());
    if constexpr (S::SAVES) {
      epilogue.template add_bias<T, N>(rAcc, g);
      if constexpr (!SAVES_LINES)
        save_tile<S, T>(rAcc, g, header, warp.consumer);
      epilogue.template square<N>(rAcc, g);
    } else {
      epilogue.template begin<T, N>(rAcc, g);
    }
    if constexpr (S::BY_ROW)
      epilogue.template weigh<N>(rAcc, g, header.tile.block);
    if (WarpContext<S>::ALIASED_BUFFERS == 0)
      warp.wait_stores_read();
    if (SAVES_LINES)
      warp.sync_all(); // both consumers have finished reading the stage

#pragma unroll
    for (int c = 0; c < N; c += kEpilogueTokens) {
      if (c > 0 && c >= header.count)
        break;

      // Save gate and up if SAVES_LINES; apply the activation and, if GENERAL, routing weights.
      const int32_t rows =
          by_position && !SAVES_LINES ? 0 : block_row<S>(g, header.tile.block, c + lane);
      if constexpr (SAVES_LINES)
        save_gate_up<S, T, N>(rAcc, g, header, warp, c, rows);
      epilogue.template apply_activation<N>(rAcc, g, header.tile.block, c);

      // Wait until consumers have read the aliased stage, and TMA has read the previous outputs.
      const int buffer = c / kEpilogueTokens * halves, end = buffer + halves;
      if (!SAVES_LINES && buffer <= S::OWN_BUFFERS && end > S::OWN_BUFFERS)
        warp.sync_all(); // both consumers have finished reading the stage
      if (end > BUFFERS)
        warp.template wait_stores_read<WarpContext<S>::ALIASED_BUFFERS / 4>();

      // Write the outputs to shared memory.
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half == halves)
          break;
        write_epilogue_tile<T, N>(rAcc[half], c, warp.sOut(warp.consumer, buffer + half));
      }

      // Store from shared memory to global memory. The warps take turns at issuing the TMA stores.
      fence_async_proxy();
      warp.sync();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half == halves)
          break;
        const int first = first_output<S>(g, header.tile, 2 * warp.consumer + half);
        const uint32_t sOut = warp.sOut(warp.consumer, buffer + half);
        if (!by_position)
          store_rows<S, T>(g, first, c, header, rows, sOut);
        else if (threadIdx.x % 128 == (buffer + half) % 4 * 32 &&
                 !(STORES_E4M3 && g.epilogue.out_unread))
          tma_store_2d(c + kEpilogueTokens <= S::TOKENS ? &out_maps->box : &out_maps->rest_box,
                       first, header.tile.block * S::TOKENS + c, sOut);
      }
    }
    if (!by_position)
      warp.sync(); // all warps have read the buffers

    // Store the same outputs in e4m3. Each consumer holds half of a scale group.
    if constexpr (STORES_E4M3)
      if (g.epilogue.e4m3.values) {
        warp.sync_all();
        store_e4m3<S, T, 128 * S::CONSUMERS>(g, header.tile, 0, header.count,
                                             [&](int half, int i) { return warp.sOut(half, i); });
        warp.sync_all(); // before buffers are reused or outputs are fixed up
      }
  }
};
