/* What the kernels of the Hopper GEMM have in common: the warps of a CTA, its tile, and the traits
 * in which kernels differ.
 *
 * A shape is a class of constants, the argument S of all other templates. Each kernel derives its
 * own from KernelShape (NativeShape in native.cuh and so on): it adds the register budget, the
 * pipeline stage and the main loop, and hides the traits that differ. */
#ifndef MOELORA_CUDA_SM90_KERNEL_SHAPE_CUH
#define MOELORA_CUDA_SM90_KERNEL_SHAPE_CUH

#include "cuda/gemm/common/tile.cuh"
#include "cuda/gemm/sm90/gather.cuh"

constexpr int kEpilogueTokens = 32;                         // of an epilogue tile
constexpr int kEpilogueBytes = kEpilogueTokens * kRowBytes; // 64 outputs of each

template <int TOKENS_, int CONSUMERS_, int STAGES_, int CLUSTER_, moelora_kernel_format FORMAT_,
          int PRODUCER_WARPS = 4>
struct KernelShape : Extent<TOKENS_, 2 * CONSUMERS_, FORMAT_> {
  // Consumer warpgroups: each owns a row group, the accumulators of two m64 tiles.
  static constexpr int CONSUMERS = CONSUMERS_, STAGES = STAGES_, CLUSTER = CLUSTER_;

  // One producer warp issues TMA loads, the others gather by cp.async. Consumers are whole
  // warpgroups, which start at a multiple of four warps: fewer producer warps come after them.
  static constexpr int PRODUCERS = 32 * PRODUCER_WARPS, GATHERERS = PRODUCERS - 32;
  static constexpr int FIRST_PRODUCER = PRODUCER_WARPS == 4 ? 0 : 128 * CONSUMERS;
  static constexpr int THREADS = PRODUCERS + 128 * CONSUMERS;

  // CTAs per SM. Tiles of one consumer stream weights for few tokens: one CTA fills its pipeline
  // while the other finishes a tile.
  static constexpr int RESIDENT = CONSUMERS == 2 ? 1 : 2;

  // Depth of a stage, in rows of 128 bytes of x.
  static constexpr int SPANS = 1;

  // TMA boxes of x: as many of BOX rows as are full, then of REST_BOX.
  static constexpr int BOX = TOKENS_ < 64 ? TOKENS_ : 64, REST_BOX = TOKENS_ % 32 == 0 ? 32 : 16;

  // The N of wgmma is the narrowest of LEAST, LEAST + STEP, ... that holds a tile's tokens: a
  // smaller expert than half of a full tile has a smaller variant.
  static constexpr int STEP = TOKENS_ < 64 ? 8 : 16;
  static constexpr int LEAST = (TOKENS_ / 2 + STEP - 1) / STEP * STEP;
  static_assert(TOKENS_ % REST_BOX == 0 && TOKENS_ % STEP == 0, "whole boxes, whole steps");

  // Epilogue buffers of a consumer that alias no pipeline stage.
  static constexpr int OWN_BUFFERS = 2;

  // Traits that the shapes of kernels hide.
  static constexpr bool SWAP_AB = true;          // operand A is weights, operand B tokens
  static constexpr bool UNPAIRED_BLOCKS = false; // both CTAs of a cluster may share a block
  static constexpr bool FEW_ROWS = false;        // mma.sync for up to 16 tokens
  // Kernels with an epilogue for any projection; the others are for those of whole layers.
  static constexpr bool GENERAL_EPILOGUE = CLUSTER == 1 && CONSUMERS == 1;
  static constexpr bool DYNAMIC_SCHEDULE = CONSUMERS == 2; // see TileScheduler
};

/* Registers per thread: setmaxnreg moves what the producers do without to the consumers, in steps
 * of 8. START is what the launch gives every thread: an SM has 64K registers for 384 threads, or
 * for twice 256. */
template <int PRODUCER, int CONSUMERS> struct RegisterBudget {
  static constexpr int START = CONSUMERS == 2 ? 168 : 128;
  static constexpr int PRODUCER_REGISTERS = PRODUCER;
  static constexpr int CONSUMER_REGISTERS = START + (START - PRODUCER) / CONSUMERS;
  static constexpr bool REALLOCATES = CONSUMER_REGISTERS > START;
};

template <class S> __device__ __forceinline__ bool is_half(const Tile &tile) {
  return S::HALF_TILES && tile.half;
}

/* The first m64 tile of a consumer: of two in a whole tile, of one in a half tile. */
__device__ __forceinline__ int first_m64(bool half, int consumer) {
  return half ? consumer : 2 * consumer;
}

#endif
