/* Non-finite fix-up pass, for infinities and NaNs in a LoRA factor B.
 *
 * An adapter stage multiplies all tokens of a block; tokens that do not carry the adapter have
 * zeros in xa. Zero times a finite number adds exactly nothing, but a non-finite row of B makes its
 * accumulators of all tokens non-finite. Checking B in every stage would be slow, so consumers
 * check the accumulators of two tokens per tile instead. If both are non-finite in some row, the
 * cluster processes all of its tiles again in a fix-up pass: consumers zero the non-finite elements
 * of B before they multiply it, and then write NaN to the outputs of these rows of B, but only for
 * tokens that carry the adapter.
 *
 * Beyond an adapter's true rank, B may hold anything: if a slab extends there, the first pass
 * already clears the tile's B. */
#pragma once

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/common/epilogue.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"

/* State of the fix-up pass of a CTA. */
template <class S> struct FixupPass {
  static constexpr uint32_t STATE = offsetof(SharedStorage<S>, fixup.state),
                            BARRIER = offsetof(SharedStorage<S>, fixup.barrier);
  static constexpr uint32_t REQUESTED = 1, RUNNING = 2; // values of the state; 0: neither
  uint32_t base;

  __device__ __forceinline__ explicit FixupPass(const SharedMemory<S> &smem) : base(smem.base) {}

  /* Initializes the state and the barrier; called by one thread. */
  __device__ __forceinline__ void init() const {
    store_shared_4(base + STATE, 0);
    barrier_init(base + BARRIER, kArrivals * S::THREADS / 32);
    barrier_init_visible();
  }
  /* Requests the pass; called by consumer threads that have found non-finite accumulators. */
  __device__ __forceinline__ void request() const {
    if constexpr (S::CLUSTER == 1)
      store_shared_4(base + STATE, REQUESTED);
    for (int rank = 0; S::CLUSTER > 1 && rank < S::CLUSTER; rank++)
      store_cluster_4(base + STATE, rank, REQUESTED);
  }
  __device__ __forceinline__ bool is_running() const {
    return uniform(load_shared_4(base + STATE)) == RUNNING;
  }
  /* Called by all threads of the cluster after the last tile. If the pass was requested, starts it
   * at the first stage and returns true. */
  __device__ __forceinline__ bool start(WarpContext<S> &warp) const {
    sync(0);
    if (uniform(load_shared_4(base + STATE)) == 0)
      return false;
    if (threadIdx.x == 0) {
      warp.pipeline.invalidate();
      warp.pipeline.init(S::GATHERERS + 1, 4 * S::CONSUMERS);
      store_shared_4(base + STATE, RUNNING);
    }
    sync(1);
    warp.restart();
    return true;
  }

private:
  /* Synchronizes the cluster. Producers and consumers call it from different code, where
   * __syncthreads() is undefined. */
  __device__ __forceinline__ void sync(uint32_t parity) const {
    __syncwarp();
    if constexpr (S::CLUSTER > 1) {
      cluster_sync();
      return;
    }
    if ((threadIdx.x & 31) < kArrivals)
      barrier_arrive(base + BARRIER);
    barrier_wait(base + BARRIER, parity);
    __syncwarp();
  }
};

/* Work that remains for a tile after its adapter stages. */
enum class PendingCheck {
  NOTHING,
  CHECK_ACCUMULATORS, // B may contain NaN or infinity
  FIX_UP,             // NaN and infinity in B were replaced by 0
};

template <class S, class T> struct NonFinite {
  static constexpr uint32_t EXPONENT = Element<T>::is_bf16 ? 0x7f807f80u : 0x7c007c00u;
  static constexpr uint32_t EXPONENT_ONE = Element<T>::is_bf16 ? 0x00800080u : 0x04000400u;

  static __device__ __forceinline__ T quiet_nan() {
    return Element<T>::round(__int_as_float(0x7fffffff));
  }

  /* Returns two elements with the sign bit set where `v` is non-finite, else 0: adding one to an
   * exponent of all ones carries into the sign. */
  static __device__ __forceinline__ uint32_t signs(uint32_t v) {
    return (v & EXPONENT) + EXPONENT_ONE & 0x80008000u;
  }
  static __device__ __forceinline__ uint32_t cleared(uint32_t v) {
    return v & ~((signs(v) >> 15) * 0xffffu);
  }

  /* Returns the address of this thread's chunk of part i (kSlabBytes) of a consumer's rows of B.
   * The parts alternate between two m64 tiles, which are `next` bytes apart. */
  static __device__ __forceinline__ uint32_t chunk(uint32_t sB, int next, int i, int width) {
    return sB + i / 2 * (width == 1 ? S::TILES * kSlabBytes : kSlabBytes) + (i & 1) * next +
           (threadIdx.x & 127) * 16;
  }

  /* Zeros the non-finite elements of the consumer's rows of B in a stage. Returns whether there
   * were any. */
  static __device__ __forceinline__ bool clear(uint32_t sB, int next, int consumer,
                                               const SlabsHeader &header) {
    const int slabs = header.slabs, width = header.width;
    uint32_t zeros[2] = {0, 0}; // accumulates 0 * B: stays zero while B is finite
#pragma unroll 2
    for (int i = 0; i < 2 * slabs; i++) {
      const uint4 v = load_shared_16(chunk(sB, next, i, width));
      zeros[0] = Element<T>::add_times_zero(zeros[0], v.x);
      zeros[1] = Element<T>::add_times_zero(zeros[1], v.y);
      zeros[0] = Element<T>::add_times_zero(zeros[0], v.z);
      zeros[1] = Element<T>::add_times_zero(zeros[1], v.w);
    }
    if (!uniform(warpgroup_any(kConsumerBarrier + consumer, (zeros[0] | zeros[1]) != 0)))
      return false;
#pragma unroll 1
    for (int i = 0; i < 2 * slabs; i++) {
      const uint32_t at = chunk(sB, next, i, width);
      const uint4 v = load_shared_16(at);
      store_shared_16(at, make_uint4(cleared(v.x), cleared(v.y), cleared(v.z), cleared(v.w)));
    }
    fence_async_proxy();
    warpgroup_sync(kConsumerBarrier + consumer);
    return true;
  }

  /* Writes NaN to the outputs of non-finite rows of B, for tokens that carry the adapter. Thread i
   * of the consumer handles row i of its m64 tiles. */
  static __device__ __forceinline__ void poison_outputs(const moelora_gemm_launch &g,
                                                        const TileHeader &header, int consumer) {
    tma_store_wait(); // NaN must overwrite outputs already stored
    if (!S::SWAP_AB)
      WarpContext<S>::sync_all(); // stores of both consumers have completed
    else
      warpgroup_sync(kConsumerBarrier + consumer);
    const int i = threadIdx.x & 127;
    const int m64 = !S::SWAP_AB && g.weights.gated ? consumer + i / 64 * 2 : 2 * consumer + i / 64;
    const int output = first_output<S>(g, header.tile, m64) + i % 64;
    if (output >= g.weights.n_out)
      return;
    const int64_t row = weight_row(g, m64, output);
    const int slice = (int)(row / g.adapters.lora.slice_n);
    int32_t known = -1;
    bool nonfinite = false;
    for (int t = 0; t < header.count; t++) {
      const int64_t position = (int64_t)header.tile.block * S::TOKENS + t;
      const int32_t packed = g.schedule.blocks.packed_ranks[position];
      if (packed != known) {
        const uint16_t *gB =
            factor_row<uint16_t>(g.adapters.lora.b[slice], packed / kRanks, header.tile.expert,
                                 row - slice * g.adapters.lora.slice_n);
        nonfinite = false;
        for (int r = 0; packed >= 0 && r < min(packed % kRanks, g.adapters.lora.max_rank); r++)
          nonfinite |= signs(gB[r]) != 0;
        known = packed;
      }
      if (!nonfinite)
        continue;
      const int64_t at =
          output_offset(g, header.tile.block * S::TOKENS + t,
                        g.epilogue.out_by_position ? 0 : g.schedule.blocks.sorted_ids[position]) +
          output;
      ((T *)g.epilogue.out)[at] = quiet_nan();
      if constexpr (S::SAVES)
        ((T *)g.before.rows)[g.schedule.blocks.sorted_ids[position] * g.before.stride + row] =
            quiet_nan();
      const moelora_quantized_rows &e4m3 = g.epilogue.e4m3;
      if (S::Format::IS_W8A8 && e4m3.values)
        ((uint8_t *)e4m3.values)[position * e4m3.stride + quad_position(output)] = kNanE4m3;
    }
  }
};
