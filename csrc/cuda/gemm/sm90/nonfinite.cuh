/* The non-finite fix-up pass: infinities and NaNs in rows of a factor B. An adapter stage
 * multiplies all tokens of a block, and zero times one of them is not zero: they are cleared
 * before, and afterwards the outputs that they belong to become NaN for the tokens that carry the
 * adapter. */
#ifndef MOELORA_CUDA_SM90_NONFINITE_CUH
#define MOELORA_CUDA_SM90_NONFINITE_CUH

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/common/epilogue.cuh"
#include "cuda/gemm/sm90/adapters.cuh"

template <class S, class T> struct NonFinite {
  static constexpr uint32_t EXPONENT = Element<T>::is_bf16 ? 0x7f807f80u : 0x7c007c00u;
  static constexpr uint32_t EXPONENT_ONE = Element<T>::is_bf16 ? 0x00800080u : 0x04000400u;

  /* An exponent of all ones carries into the sign. */
  static __device__ __forceinline__ uint32_t signs(uint32_t v) {
    return (v & EXPONENT) + EXPONENT_ONE & 0x80008000u;
  }
  static __device__ __forceinline__ uint32_t cleared(uint32_t v) {
    return v & ~((signs(v) >> 15) * 0xffffu);
  }

  /* This thread's part of chunk i of the consumer's rows of a stage, of two m64 tiles `next` apart,
   * in either layout. */
  static __device__ __forceinline__ uint32_t chunk(uint32_t weights, int next, int i, int width) {
    return weights + i / 2 * (width == 1 ? S::TILES * kSlabM64Bytes : kSlabM64Bytes) +
           (i & 1) * next + (threadIdx.x & 127) * 16;
  }

  /* Zeros where they were in the consumer's rows of a stage; true if there were any. */
  static __device__ __forceinline__ bool clear(uint32_t weights, int next, int consumer,
                                               const SlabsHeader &header) {
    const int slabs = header.slabs, width = header.width;
    uint32_t zeros[2] = {0, 0}; // times what is finite
#pragma unroll 2
    for (int i = 0; i < 2 * slabs; i++) {
      const uint4 v = load_shared_16(chunk(weights, next, i, width));
      zeros[0] = Element<T>::add_times_zero(zeros[0], v.x);
      zeros[1] = Element<T>::add_times_zero(zeros[1], v.y);
      zeros[0] = Element<T>::add_times_zero(zeros[0], v.z);
      zeros[1] = Element<T>::add_times_zero(zeros[1], v.w);
    }
    if (!uniform(warpgroup_any(consumer + 1, (zeros[0] | zeros[1]) != 0)))
      return false;
#pragma unroll 1
    for (int i = 0; i < 2 * slabs; i++) {
      const uint32_t at = chunk(weights, next, i, width);
      const uint4 v = load_shared_16(at);
      store_shared_16(at, make_uint4(cleared(v.x), cleared(v.y), cleared(v.z), cleared(v.w)));
    }
    fence_async_proxy();
    warpgroup_sync(consumer + 1);
    return true;
  }

  /* NaN to the outputs of the rows of B that hold some, for the tokens that carry the adapter.
   * Thread i of the consumer looks after row i of its m64 tiles. */
  static __device__ __forceinline__ void fix_up(const moelora_gemm_launch &g,
                                                const TileHeader &header, int consumer) {
    tma_store_wait(); // the finite parts come first
    if (S::TOKENS_FIRST)
      warpgroup_sync<128 * S::CONSUMERS>(3); // of all tokens
    else
      warpgroup_sync(consumer + 1);
    const bool half = is_half<S>(header.tile);
    const int i = threadIdx.x & 127, m64 = own_m64(half, consumer) + i / 64;
    const int output = first_output<S>(g, header.tile, m64) + i % 64;
    if (output >= g.weights.n_out || (half && i >= 64))
      return;
    const int64_t row = weight_row(g, m64, output);
    const int slice = (int)(row / g.adapters.lora.slice_n);
    int32_t known = -1;
    bool nonfinite = false;
    for (int t = 0; t < header.count; t++) {
      const int64_t position = (int64_t)header.tile.block * S::TOKENS + t;
      const int32_t packed = g.schedule.blocks.packed_ranks[position];
      if (packed != known) {
        const uint16_t *from =
            factor_row<uint16_t>(g.adapters.lora.b[slice], packed / kRanks, header.tile.expert,
                                 row - slice * g.adapters.lora.slice_n);
        nonfinite = false;
        for (int r = 0; packed >= 0 && r < min(packed % kRanks, g.adapters.lora.max_rank); r++)
          nonfinite |= signs(from[r]) != 0;
        known = packed;
      }
      if (!nonfinite)
        continue;
      const int64_t at =
          output_offset(g, out_block<S>(g, header.tile) * S::TOKENS + t,
                        g.epilogue.out_by_position ? 0 : g.schedule.blocks.sorted_ids[position]) +
          output;
      if (g.epilogue.out_f32)
        ((float *)g.epilogue.out)[at] = __int_as_float(0x7fffffff);
      else
        ((T *)g.epilogue.out)[at] = Element<T>::round(__int_as_float(0x7fffffff));
      const moelora_e4m3_rows &e4m3 = g.epilogue.e4m3;
      if (S::Format::IS_W8A8 && e4m3.values)
        ((uint8_t *)e4m3.values)[position * e4m3.stride + quad_place(output)] = kNanE4m3;
    }
  }
};

#endif
