/* The epilogue of a backward's first product on Hopper: applies the gradient of the activation to
 * accumulators v, eight tokens at a time. For the j-th eight, with BUFFERS - 1 loads in flight:
 *
 *   apply               v, gate, up -> h, dgate, dup; the gradients overwrite gate and up
 *   store               dgu and h, whole cache lines of a row
 *   load(j + BUFFERS)   gate_up of eight tokens by 128 outputs to shared memory, cp.async
 *
 * Each consumer has two kinds of buffers; a block has rows of 64 columns, 128-byte swizzle:
 *
 *   sGu [BUFFERS][4 blocks][8 tokens]  gate and up in halves: gate, gate, up, up of the two m64
 *                                      tiles; interleaved: two blocks per m64 tile;
 *                                      ungated: one block per m64 tile, the others are unused
 *   sH  [2 blocks][8 tokens]           one block per m64 tile
 *
 * A thread loads and stores the same chunks of every eight tokens, so a buffer needs no barrier
 * between a store and the next load. The first loads are issued before the main loop. */
#pragma once

#include "cuda/gemm/common/back_epilogue.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"

/* Rows of an epilogue buffer of the kernel shape; the buffer is 2 KB. */
constexpr int kDactRows = 16;
/* Returns the number of epilogue buffers that sGu [buffers] and sH take; inverse: dact_buffers. */
constexpr int own_buffers_of_dact(int buffers) {
  return 2 * buffers + 1;
}
constexpr int dact_buffers(int buffers) {
  return (buffers - 1) / 2;
}

template <class S, class T> struct DactEpilogue {
  static constexpr int BLOCK_BYTES = 8 * kRowBytes;
  static constexpr int GU_BYTES = 4 * BLOCK_BYTES, H_BYTES = 2 * BLOCK_BYTES;
  static constexpr int BUFFERS = dact_buffers(S::OWN_BUFFERS);
  static_assert(BUFFERS > 1 &&
                    BUFFERS * GU_BYTES + H_BYTES <= (int)sizeof(SharedStorage<S>::sOut[0]),
                "a consumer's epilogue buffers");

  /* The chunks that a thread copies: `chunk` of `token`, in blocks `block` and `block` + 2. */
  struct Share {
    int token, chunk, block;
    uint32_t sGu, sH; // sGu of buffer 0

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

  /* Returns the first column of gate_up in a thread's chunk i (0 or 1); -1: no such chunk. */
  static __device__ __forceinline__ int column_of(GateUp form, int first, int inter,
                                                  const Share &share, int i) {
    if (form == GateUp::INTERLEAVED) {
      const int column = 2 * first + (share.block + 2 * i) * 64 + share.chunk * 8;
      return column < 2 * inter ? column : -1;
    }
    const int column = first + share.block * 64 + share.chunk * 8;
    return column < inter && (i == 0 || form == GateUp::HALVES) ? column + i * inter : -1;
  }

  /* Returns the flat row of a thread's token among tokens 8 j to 8 j + 7. */
  static __device__ __forceinline__ int32_t row_of(const moelora_back_launch &g,
                                                   const TileHeader &header, const Share &share,
                                                   int j) {
    const int t = 8 * j + share.token;
    return t < header.count
               ? g.schedule.blocks.sorted_ids[(int64_t)header.tile.block * S::TOKENS + t]
               : 0;
  }

  /* Returns the address of a row of 16-bit elements; the plan refuses strides beyond 31 bits. */
  static __device__ __forceinline__ char *address_of(const void *rows, int32_t row,
                                                     int64_t stride) {
    return (char *)rows + (uint64_t)(uint32_t)row * (2 * (uint32_t)stride);
  }

  /* Issues the loads of gate_up for eight tokens to the buffer at offset `buffer`; zero-fills past
   * the last output. `row` is that of the thread's token, if it is `valid`. */
  static __device__ __forceinline__ void load(const moelora_back_launch &g, GateUp form, int first,
                                              int32_t row, bool valid, const Share &share,
                                              uint32_t buffer) {
    if (valid) {
      const char *from = address_of(g.dact.gate_up, row, g.dact.gate_up_stride);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = column_of(form, first, g.weights.n_out, share, i);
        copy_async_16(share.sGu + buffer + i * 2 * BLOCK_BYTES, from + 2 * (uint32_t)max(column, 0),
                      column >= 0 ? 16 : 0);
      }
    }
    copy_async_commit();
  }

  /* Issues the first loads before the main loop, and prefetches the other rows to L2. */
  static __device__ __forceinline__ void prefetch_rows(const moelora_back_launch &g,
                                                       const TileHeader &header,
                                                       const WarpContext<S> &warp) {
    const GateUp form = gate_up_form(g.epilogue.activation);
    const int first = first_output<S>(g, header.tile, 2 * warp.consumer), inter = g.weights.n_out;
    const Share share(warp);
    for (int j = 0; j < BUFFERS; j++)
      load(g, form, first, row_of(g, header, share, j), 8 * j + share.token < header.count, share,
           j * GU_BYTES);
    const int line = threadIdx.x & 1, columns = form == GateUp::INTERLEAVED ? 2 : 1;
    for (int t = 8 * BUFFERS + (threadIdx.x & 127) / 2; t < header.count; t += 64) {
      const int64_t row = block_row<S>(g, header.tile.block, t);
      const uint16_t *gate_up = (const uint16_t *)g.dact.gate_up + row * g.dact.gate_up_stride;
      for (int half = 0; half < (form == GateUp::ONE ? 1 : 2); half++) {
        const int column = first + line * 64 + (columns == 2 ? half * 32 : 0);
        if (column < inter)
          prefetch_l2(gate_up + columns * column + (columns == 1 ? half * inter : 0));
      }
    }
  }

  /* Read a warp's 16 outputs of m64 tile t for eight tokens, and write their gradients and h. */
  static __device__ __forceinline__ void read(BackOutputs<T> &outputs, GateUp form, uint32_t sGu,
                                              int t) {
    if (form == GateUp::INTERLEAVED) {
#pragma unroll
      for (int m8 = 0; m8 < 2; m8++) {
        const uint2 two = load_shared_8(interleaved(sGu, t, m8));
        outputs.gate[m8] = transpose_8x8(__byte_perm(two.x, two.y, 0x5410));
        outputs.up[m8] = transpose_8x8(__byte_perm(two.x, two.y, 0x7632));
      }
    } else {
      uint32_t words[4];
      load_matrix_x4_trans(words, halves(sGu, t));
      outputs.gate[0] = words[0], outputs.gate[1] = words[1];
      outputs.up[0] = words[2], outputs.up[1] = words[3];
    }
  }
  static __device__ __forceinline__ void write(const BackOutputs<T> &outputs, GateUp form,
                                               uint32_t sGu, uint32_t sH, int t) {
    if (form == GateUp::INTERLEAVED) {
#pragma unroll
      for (int m8 = 0; m8 < 2; m8++) {
        const uint32_t gate = transpose_8x8(outputs.gate[m8]);
        const uint32_t up = transpose_8x8(outputs.up[m8]);
        store_shared_8(interleaved(sGu, t, m8),
                       make_uint2(__byte_perm(gate, up, 0x5410), __byte_perm(gate, up, 0x7632)));
      }
    } else {
      store_matrix_x4_trans(halves(sGu, t), outputs.gate[0], outputs.gate[1], outputs.up[0],
                            outputs.up[1]);
    }
    store_matrix_x2_trans(sH + t * BLOCK_BYTES + in_block(), outputs.h[0], outputs.h[1]);
  }

  /* Returns the offset within a block of this lane's row of an 8 x 8 matrix, for ldmatrix and
   * stmatrix. */
  static __device__ __forceinline__ uint32_t in_block() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, row = lane & 7;
    return row * kRowBytes + ((2 * warp + (lane >> 3 & 1) ^ row) << 4);
  }
  /* Returns the address of this lane's row of gate or up, if these are in halves. */
  static __device__ __forceinline__ uint32_t halves(uint32_t sGu, int t) {
    return sGu + ((threadIdx.x >> 4 & 1) * 2 + t) * BLOCK_BYTES + in_block();
  }
  /* Returns the address of outputs 8 m8 + 2 (lane % 4) and the next of token lane / 4, if gate and
   * up are interleaved. */
  static __device__ __forceinline__ uint32_t interleaved(uint32_t sGu, int t, int m8) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, token = lane >> 2;
    const int pair = lane & 3;
    return sGu + (2 * t + warp / 2) * BLOCK_BYTES + token * kRowBytes + (pair & 1) * 8 +
           ((((warp & 1) * 4 + m8 * 2 + pair / 2) ^ token) << 4);
  }

  /* Sums dt over the eight lanes that hold outputs of the same two tokens. Returns the sum of m64
   * tile lane >> 2 & 1, for the lane's first (lane >> 3 & 1 is 0) or second token. */
  static __device__ __forceinline__ float sum(const BackOutputs<T> (&outputs)[2]) {
    const int lane = threadIdx.x & 31, t = lane >> 2 & 1, q = lane >> 3 & 1;
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      two[i] = (t ? outputs[1].dt[i] : outputs[0].dt[i]) +
               __shfl_xor_sync(0xffffffffu, t ? outputs[0].dt[i] : outputs[1].dt[i], 4);
    float one = (q ? two[1] : two[0]) + __shfl_xor_sync(0xffffffffu, q ? two[0] : two[1], 8);
    return one + __shfl_xor_sync(0xffffffffu, one, 16);
  }

  /* Stores a thread's chunks of dgu and h. */
  static __device__ __forceinline__ void store_rows(const moelora_back_launch &g, GateUp form,
                                                    int first, const Share &share, uint32_t buffer,
                                                    int32_t row) {
    const int inter = g.weights.n_out;
    char *const dgu = address_of(g.dact.dgu, row, g.dact.dgu_stride);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = column_of(form, first, inter, share, i);
      if (column >= 0)
        store_global_16(dgu + 2 * (uint32_t)column,
                        load_shared_16(share.sGu + buffer + i * 2 * BLOCK_BYTES));
    }
    const int column = first + share.block * 64 + share.chunk * 8;
    if (g.dact.h && column < inter)
      store_global_16(address_of(g.dact.h, row, inter) + 2 * (uint32_t)column,
                      load_shared_16(share.sH));
  }

  template <GradientKind KIND>
  static __device__ __forceinline__ void
  store_as(float (&rAcc)[2][S::TOKENS / 2], const moelora_back_launch &g, const TileHeader &header,
           const WarpContext<S> &warp) {
    // An iteration processes PASS groups of eight tokens. It then moves the accumulators of the
    // next iteration to the first registers: unrolling would exceed the instruction cache.
    constexpr int PASS = KIND == GradientKind::SILU && S::Format::IS_NATIVE ? 4 : 2;
    const int lane = threadIdx.x & 31, inter = g.weights.n_out, mine = 2 * (lane & 3);
    const int first = first_output<S>(g, header.tile, 2 * warp.consumer);
    const int64_t position = (int64_t)header.tile.block * S::TOKENS;
    const GateUp form =
        KIND == GradientKind::SILU ? GateUp::HALVES : gate_up_form(g.epilogue.activation);
    const Share share(warp);
    const uint32_t base = buffers(warp), sH = base + BUFFERS * GU_BYTES;
    // Address of the element of dt that this lane stores.
    const int t_of_dt = lane >> 2 & 1, token_of_dt = mine + (lane >> 3 & 1);
    const int output = first + t_of_dt * 64 + (threadIdx.x >> 5 & 3) * 16;
    const bool stores_dt = lane < 16 && output < inter;
    float *dt =
        g.dact.dt + (position + token_of_dt) * g.dact.dt_parts + output / MOELORA_DT_OUTPUTS;
    uint32_t buffer = 0;
#pragma unroll 1
    for (int pass = 0; 8 * PASS * pass < header.count; pass++) {
#pragma unroll
      for (int p = 0; p < PASS; p++) {
        const int j = PASS * pass + p;
        if (8 * j >= header.count)
          break;
        const int32_t next = row_of(g, header, share, j + BUFFERS); // early, to hide its latency
        float2 weight = {1.f, 1.f};
        if (g.schedule.blocks.weights)
          weight = *(const float2 *)&g.schedule.blocks.weights[position + 8 * j + mine];

        // Wait for gate_up.
        copy_async_wait<BUFFERS - 1>();
        warp.sync();

        // Apply the gradient of the activation, in both m64 tiles.
        BackOutputs<T> outputs[2];
        float v[2][4];
#pragma unroll
        for (int t = 0; t < 2; t++) {
          read(outputs[t], form, base + buffer, t);
#pragma unroll
          for (int q = 0; q < 4; q++)
            v[t][q] = rAcc[t][4 * p + q];
        }
        apply_back<KIND>(outputs, v, g.dact.activation, weight);
#pragma unroll
        for (int t = 0; t < 2; t++)
          write(outputs[t], form, base + buffer, sH, t);
        const float sum_of_dt = sum(outputs);
        if (stores_dt && 8 * j + token_of_dt < header.count)
          *dt = sum_of_dt;
        dt += 8 * g.dact.dt_parts;

        // Store the rows, and load the next ones to the same buffer.
        const int32_t row = row_of(g, header, share, j); // in L1 since its load was issued
        warp.sync();
        if (8 * j + share.token < header.count)
          store_rows(g, form, first, share, buffer, row);
        load(g, form, first, next, 8 * (j + BUFFERS) + share.token < header.count, share, buffer);
        buffer = buffer == (BUFFERS - 1) * GU_BYTES ? 0 : buffer + GU_BYTES;
      }
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i + 4 * PASS < S::TOKENS / 2; i++)
          rAcc[t][i] = rAcc[t][i + 4 * PASS];
    }
  }

  static __device__ __forceinline__ void store(float (&rAcc)[2][S::TOKENS / 2],
                                               const moelora_back_launch &g,
                                               const TileHeader &header,
                                               const WarpContext<S> &warp) {
    switch (gradient_kind(g.dact.activation)) {
    case GradientKind::SILU:
      return store_as<GradientKind::SILU>(rAcc, g, header, warp);
    case GradientKind::GATED:
      return store_as<GradientKind::GATED>(rAcc, g, header, warp);
    case GradientKind::OTHER:
      return store_as<GradientKind::OTHER>(rAcc, g, header, warp);
    }
  }
};
