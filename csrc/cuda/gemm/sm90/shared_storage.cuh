/* Shared memory of a Hopper GEMM: a struct, and the addresses of its members.
 *
 * Addresses are 32-bit, in the shared window: SharedMemory<S> holds the address of the struct and
 * adds member offsets. */
#ifndef MOELORA_CUDA_SM90_SHARED_STORAGE_CUH
#define MOELORA_CUDA_SM90_SHARED_STORAGE_CUH

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/sm90/kernel_shape.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/stage_header.cuh"

/* State of the fix-up pass, see fixup.cuh. */
struct FixupState {
  uint32_t state;
  uint64_t barrier;
};

/* S::Stage has the members sW, weights in the layout of the kernel, and sX[SPANS][TOKENS], token
 * rows. In an adapter stage sW holds rows of B and sX rows of xa, see adapter_layout.cuh. */
template <class S> struct SharedStorage {
  typename S::Stage stages[S::STAGES];
  SwizzledRow sOut[S::CONSUMERS][S::OWN_BUFFERS][S::OUT_ROWS]; // epilogue tiles
  StageHeader headers[S::STAGES];
  PipelineBarriers<S::STAGES> barriers;
  ListedSegment segments[S::PRODUCERS / 32][S::TOKENS]; // one list per producer warp
  FixupState fixup;

  static_assert(sizeof(typename S::Stage) % 1024 == 0, "alignment of the 128-byte swizzle");
};

template <class S> using GemmPipeline = Pipeline<SharedStorage<S>, S::CLUSTER>;

/* Dynamic shared memory of a launch, with room to align the start for the swizzle. */
template <class S> constexpr int kSharedBytes = 1024 + (int)sizeof(typename S::template Storage<S>);

template <class S> struct SharedMemory {
  using Storage = SharedStorage<S>;
  using Stage = typename S::Stage;
  static constexpr int STAGE_BYTES = sizeof(Stage);
  static_assert(S::RESIDENT * (kSharedBytes<S> + 1024) <= 228 * 1024, "shared memory of an SM");
  uint32_t base;

  __device__ __forceinline__ explicit SharedMemory(const void *dynamic)
      : base((shared_address(dynamic) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t sW(int stage) const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t sX(int stage, int span = 0) const {
    return sW(stage) + (uint32_t)offsetof(Stage, sX) + span * S::TOKENS * kRowBytes;
  }
  __device__ __forceinline__ uint32_t header(int stage) const {
    return base + (uint32_t)offsetof(Storage, headers) + stage * (int)sizeof(StageHeader);
  }
  /* Segment list of this producer warp. */
  __device__ __forceinline__ uint32_t segments() const {
    return base + (uint32_t)offsetof(Storage, segments) +
           ((threadIdx.x - S::FIRST_PRODUCER) >> 5) * (int)(S::TOKENS * sizeof(ListedSegment));
  }
};

#endif
