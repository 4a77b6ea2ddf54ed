/* Per-warp state of a Hopper GEMM: shared memory, position in the pipeline, and in consumers the
 * epilogue buffers. Each warp has its own copy.
 *
 * An epilogue tile holds 64 outputs of 32 tokens. A consumer has two dedicated buffers; the others
 * alias its part of the tile's last stage, which returns to the pipeline once TMA stores have read
 * it. Tiles of up to 32 tokens need no aliased buffers. */
#ifndef MOELORA_CUDA_SM90_WARP_CONTEXT_CUH
#define MOELORA_CUDA_SM90_WARP_CONTEXT_CUH

#include "cuda/gemm/sm90/shared_storage.cuh"

/* Named barriers. */
constexpr int kConsumerBarrier = 1; // + consumer: its four warps
constexpr int kAllConsumersBarrier = 3, kGatherBarrier = 4;

template <class S> struct WarpContext {
  static constexpr int OWN_BUFFERS = S::OWN_BUFFERS;
  static constexpr int OWN_BYTES = sizeof(SharedStorage<S>::sOut[0][0]);
  static constexpr int ALIASED_BUFFERS =
      S::ALIASES ? (int)sizeof(typename S::Stage) / S::CONSUMERS / kEpilogueBytes : 0;
  static constexpr int BUFFERS = OWN_BUFFERS + ALIASED_BUFFERS;

  SharedMemory<S> smem;
  int aliased = -1;
  int consumer = -1;
  GemmPipeline<S> pipeline;

  __device__ __forceinline__ explicit WarpContext(const void *dynamic)
      : smem(dynamic), pipeline(smem.base) {}

  /* Returns to the first stage, for another pass over the tiles. */
  __device__ __forceinline__ void restart() {
    pipeline.restart();
    aliased = -1;
  }

  /* ---- consumers only ---- */

  __device__ __forceinline__ void sync() const { warpgroup_sync(kConsumerBarrier + consumer); }
  static __device__ __forceinline__ void sync_all() {
    warpgroup_sync<128 * S::CONSUMERS>(kAllConsumersBarrier);
  }

  /* Address of epilogue buffer `buffer` of consumer `owner`. */
  __device__ __forceinline__ uint32_t sOut(int owner, int buffer) const {
    const int more = buffer - OWN_BUFFERS;
    if (more >= 0 && more < ALIASED_BUFFERS)
      return smem.sW(aliased) + (owner * ALIASED_BUFFERS + more) * kEpilogueBytes;
    return smem.base + (uint32_t)offsetof(SharedStorage<S>, sOut) +
           (owner * OWN_BUFFERS + (more & 1)) * OWN_BYTES;
  }

  /* Waits until TMA has read the buffers that the warps of this consumer stored, except for the
   * last PENDING stores of each warp. */
  template <int PENDING = 0> __device__ __forceinline__ void wait_stores_read() const {
    if ((threadIdx.x & 31) == 0)
      tma_store_wait_read<PENDING>();
    sync();
  }

  /* Returns the aliased stage to the pipeline. */
  __device__ __forceinline__ void release_aliased_stage() {
    if (aliased < 0)
      return;
    wait_stores_read();
    pipeline.release(aliased);
    aliased = -1;
  }

  /* Called after the main loop of a tile: the last stage becomes epilogue buffers, or is released.
   */
  __device__ __forceinline__ void take_last_stage(int last) {
    if (ALIASED_BUFFERS > 0)
      aliased = last;
    else
      pipeline.release(last);
  }
};

#endif
