/* The epilogue of a backward's first product on Hopper: applies the gradient of the activation to
 * accumulators v, eight tokens at a time.
 *
 *   load(j + 1), load(j + 2)     gate_up of eight tokens by 128 outputs to shared memory, cp.async
 *   apply(j)                     v, gate, up -> h, dgate, dup; the gradients overwrite gate and up
 *   store(j)                     dgu and h, whole cache lines of a row
 *
 * Buffers of a consumer; a block has rows of 64 columns in the 128-byte swizzle:
 *
 *   sGu [2][4 blocks][8 tokens]  gate and up in halves: gate, gate, up, up of the two m64 tiles;
 *                                interleaved: two blocks per m64 tile;
 *                                ungated: one block per m64 tile, the others are unused
 *   sH  [2][2 blocks][8 tokens]  one block per m64 tile
 *
 * A thread loads and stores the same chunks of every eight tokens, so no barrier is needed between
 * the store from a buffer and the next load to it. The first loads are issued before the main loop.
 */
#ifndef MOELORA_CUDA_SM90_THROUGH_EPILOGUE_CUH
#define MOELORA_CUDA_SM90_THROUGH_EPILOGUE_CUH

#include "cuda/gemm/common/back_epilogue.cuh"
#include "cuda/gemm/sm90/warp_context.cuh"

template <class S, class T> struct ThroughEpilogue {
  static constexpr int BLOCK_BYTES = 8 * kRowBytes;
  static constexpr int GU_BYTES = 4 * BLOCK_BYTES, H_BYTES = 2 * BLOCK_BYTES;
  static constexpr int BUFFERS = 2;
  static_assert(BUFFERS * (GU_BYTES + H_BYTES) <= (int)sizeof(SharedStorage<S>::sOut[0]),
                "a consumer's epilogue buffers");

  /* The chunks that a thread copies: of one of eight tokens, in blocks `block` and `block` + 2. */
  struct Share {
    int token, chunk, block;
    uint32_t sGu, sH; // of buffer 0

    __device__ __forceinline__ explicit Share(const WarpContext<S> &warp) {
      const int thread = threadIdx.x & 127;
      chunk = thread & 7, token = thread >> 3 & 7, block = thread >> 6;
      const uint32_t base = buffers(warp);
      const uint32_t at = block * BLOCK_BYTES + token * kRowBytes + ((chunk ^ token) << 4);
      sGu = base + at, sH = base + BUFFERS * GU_BYTES + at;
    }
  };

  static __device__ __forceinline__ uint32_t buffers(const WarpContext<S> &warp) {
    return warp.smem.base + (uint32_t)offsetof(SharedStorage<S>, sOut) +
           warp.consumer * (uint32_t)sizeof(SharedStorage<S>::sOut[0]);
  }

  /* First column of gate_up in a thread's chunk i (0 or 1); -1: no such chunk. */
  static __device__ __forceinline__ int column_of(GateUp form, int first, int inter,
                                                  const Share &share, int i) {
    if (form == GateUp::INTERLEAVED) {
      const int column = 2 * first + (share.block + 2 * i) * 64 + share.chunk * 8;
      return column < 2 * inter ? column : -1;
    }
    const int column = first + share.block * 64 + share.chunk * 8;
    return column < inter && (i == 0 || form == GateUp::HALVES) ? column + i * inter : -1;
  }

  /* Flat row of a thread's token among tokens 8 j to 8 j + 7. */
  static __device__ __forceinline__ int32_t row_of(const moelora_back_launch &g,
                                                   const TileHeader &header, const Share &share,
                                                   int j) {
    const int t = 8 * j + share.token;
    return t < header.count ? block_row<S>(g, header.tile.block, t) : 0;
  }

  /* Issues the loads of gate_up for tokens 8 j to 8 j + 7; zeros past the last output. */
  static __device__ __forceinline__ void load(const moelora_back_launch &g, GateUp form, int first,
                                              int32_t row, bool there, const Share &share, int j) {
    if (there) {
      const uint16_t *from =
          (const uint16_t *)g.through.gate_up + (int64_t)row * g.through.gate_up_stride;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = column_of(form, first, g.weights.n_out, share, i);
        copy_async_16(share.sGu + j % BUFFERS * GU_BYTES + i * 2 * BLOCK_BYTES,
                      from + max(column, 0), column >= 0 ? 16 : 0);
      }
    }
    copy_async_commit();
  }

  /* Before the main loop: issues the first loads, and prefetches the other rows to L2. */
  static __device__ __forceinline__ void prefetch_rows(const moelora_back_launch &g,
                                                       const TileHeader &header,
                                                       const WarpContext<S> &warp) {
    const GateUp form = gate_up_form(g.epilogue.activation);
    const int first = first_output<S>(g, header.tile, 2 * warp.consumer), inter = g.weights.n_out;
    const Share share(warp);
    for (int j = 0; j < BUFFERS; j++)
      load(g, form, first, row_of(g, header, share, j), 8 * j + share.token < header.count, share,
           j);
    const int line = threadIdx.x & 1, columns = form == GateUp::INTERLEAVED ? 2 : 1;
    for (int t = 8 * BUFFERS + (threadIdx.x & 127) / 2; t < header.count; t += 64) {
      const int64_t row = block_row<S>(g, header.tile.block, t);
      const uint16_t *gate_up =
          (const uint16_t *)g.through.gate_up + row * g.through.gate_up_stride;
      for (int half = 0; half < (form == GateUp::ONE ? 1 : 2); half++) {
        const int column = first + line * 64 + (columns == 2 ? half * 32 : 0);
        if (column < inter)
          prefetch_l2(gate_up + columns * column + (columns == 1 ? half * inter : 0));
      }
    }
  }

  /* Processes a warp's 16 outputs of m64 tile t, for eight tokens. Returns this thread's partial
   * sums of dt. */
  static __device__ __forceinline__ float2 apply(const float (&v)[4], const moelora_back_launch &g,
                                                 GateUp form, uint32_t sGu, uint32_t sH, int t,
                                                 float2 weight) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const int row = lane & 7, half = lane >> 3 & 1;
    BackOutputs<T> outputs;
    if (form == GateUp::INTERLEAVED) {
      // In memory order: token lane / 4, outputs 2 (lane % 4) and the next.
      const int token = lane >> 2, pair = lane & 3;
      const uint32_t at =
          sGu + (2 * t + warp / 2) * BLOCK_BYTES + token * kRowBytes + (pair & 1) * 8;
      uint32_t place[2];
#pragma unroll
      for (int m8 = 0; m8 < 2; m8++) {
        place[m8] = at + ((((warp & 1) * 4 + m8 * 2 + pair / 2) ^ token) << 4);
        const uint2 two = load_shared_8(place[m8]);
        outputs.gate[m8] = transpose_8x8(__byte_perm(two.x, two.y, 0x5410));
        outputs.up[m8] = transpose_8x8(__byte_perm(two.x, two.y, 0x7632));
      }
      outputs.apply(v, g.through.activation, weight);
#pragma unroll
      for (int m8 = 0; m8 < 2; m8++) {
        const uint32_t gate = transpose_8x8(outputs.gate[m8]);
        const uint32_t up = transpose_8x8(outputs.up[m8]);
        store_shared_8(place[m8],
                       make_uint2(__byte_perm(gate, up, 0x5410), __byte_perm(gate, up, 0x7632)));
      }
    } else {
      const uint32_t at = sGu + ((lane >> 4) * 2 + t) * BLOCK_BYTES + row * kRowBytes +
                          ((2 * warp + half ^ row) << 4);
      uint32_t words[4];
      load_matrix_x4_trans(words, at);
      outputs.gate[0] = words[0], outputs.gate[1] = words[1];
      outputs.up[0] = words[2], outputs.up[1] = words[3];
      outputs.apply(v, g.through.activation, weight);
      store_matrix_x4_trans(at, outputs.gate[0], outputs.gate[1], outputs.up[0], outputs.up[1]);
    }
    store_matrix_x2_trans(sH + t * BLOCK_BYTES + row * kRowBytes + ((2 * warp + half ^ row) << 4),
                          outputs.h[0], outputs.h[1]);
    return outputs.sum();
  }

  /* Stores a thread's chunks of dgu and h. */
  static __device__ __forceinline__ void store_rows(const moelora_back_launch &g, GateUp form,
                                                    int first, const Share &share, int buffer,
                                                    int64_t row) {
    const int inter = g.weights.n_out;
    uint16_t *dgu = (uint16_t *)g.through.dgu + row * g.through.dgu_stride;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = column_of(form, first, inter, share, i);
      if (column >= 0)
        *(uint4 *)(dgu + column) =
            load_shared_16(share.sGu + buffer * GU_BYTES + i * 2 * BLOCK_BYTES);
    }
    const int column = first + share.block * 64 + share.chunk * 8;
    if (g.through.h && column < inter)
      *(uint4 *)((uint16_t *)g.through.h + row * inter + column) =
          load_shared_16(share.sH + buffer * H_BYTES);
  }

  static __device__ __forceinline__ void store(float (&rAcc)[2][S::TOKENS / 2],
                                               const moelora_back_launch &g,
                                               const TileHeader &header,
                                               const WarpContext<S> &warp) {
    const int lane = threadIdx.x & 31, inter = g.weights.n_out, mine = 2 * (lane & 3);
    const int first = first_output<S>(g, header.tile, 2 * warp.consumer);
    const int64_t position = (int64_t)header.tile.block * S::TOKENS;
    const GateUp form = gate_up_form(g.epilogue.activation);
    const Share share(warp);
    const uint32_t base = buffers(warp);
    // Not unrolled over pairs of eight tokens, to fit the instruction cache.
#pragma unroll 1
    for (int pair = 0; 16 * pair < header.count; pair++) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const int j = 2 * pair + p;
        if (8 * j >= header.count)
          break;
        const int64_t at = position + 8 * j;
        const int32_t next = row_of(g, header, share, j + BUFFERS); // early, to hide its latency
        float2 weight = {1.f, 1.f};
        if (g.schedule.blocks.weights)
          weight = *(const float2 *)&g.schedule.blocks.weights[at + mine];

        // Wait for gate_up.
        copy_async_wait<BUFFERS - 1>();
        warp.sync();

        // Apply the gradient of the activation, in both m64 tiles.
#pragma unroll
        for (int t = 0; t < 2; t++) {
          float v[4]; // branch-free, so that accumulators stay in registers
#pragma unroll
          for (int i = 0; i < S::TOKENS / 16; i++)
#pragma unroll
            for (int q = 0; q < 4; q++)
              v[q] = i == 0 || i == pair ? rAcc[t][8 * i + 4 * p + q] : v[q];
          const float2 dt = apply(v, g, form, base + p * GU_BYTES,
                                  base + BUFFERS * GU_BYTES + p * H_BYTES, t, weight);
          const int output = first + t * 64 + (threadIdx.x >> 5 & 3) * 16;
          float *to = g.through.dt + (at + mine) * g.through.dt_parts + output / MOELORA_DT_OUTPUTS;
          if (lane < 4 && output < inter && 8 * j + mine < header.count)
            to[0] = dt.x;
          if (lane < 4 && output < inter && 8 * j + mine + 1 < header.count)
            to[g.through.dt_parts] = dt.y;
        }

        // Store the rows, and load the next ones to the same buffer.
        const int32_t row = row_of(g, header, share, j); // in L1 since its load was issued
        warp.sync();
        if (8 * j + share.token < header.count)
          store_rows(g, form, first, share, p, row);
        load(g, form, first, next, 8 * (j + BUFFERS) + share.token < header.count, share,
             j + BUFFERS);
      }
    }
  }
};

#endif
