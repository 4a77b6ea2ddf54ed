/* Base of the compile-time shapes of the Hopper GEMM kernels: warps of a CTA, its tile, and the
 * traits in which kernels differ.
 *
 * A shape is a class of constants and the template argument S of all other templates. Each kernel
 * derives its own from KernelShape (e.g. NativeShape in native.cuh): it adds the register budget,
 * the pipeline stage and the main loop, and overrides traits. */
#ifndef MOELORA_CUDA_SM90_KERNEL_SHAPE_CUH
#define MOELORA_CUDA_SM90_KERNEL_SHAPE_CUH

#include "cuda/gemm/common/tile.cuh"

constexpr int kEpilogueTokens = 32;                         // tokens per epilogue tile
constexpr int kEpilogueBytes = kEpilogueTokens * kRowBytes; // 64 outputs per token

template <int TOKENS_, int CONSUMERS_, int STAGES_, int CLUSTER_, moelora_kernel_format FORMAT_,
          int PRODUCER_WARPS = 4>
struct KernelShape : Extent<TOKENS_, 2 * CONSUMERS_, FORMAT_> {
  // A consumer warpgroup has the accumulators of a row group; token-major, those of 64 tokens.
  static constexpr int CONSUMERS = CONSUMERS_, STAGES = STAGES_, CLUSTER = CLUSTER_;

  // One producer warp issues TMA loads; the others gather with cp.async. A consumer warpgroup must
  // start at a multiple of four warps, so fewer than four producer warps follow the consumers.
  static constexpr int PRODUCERS = 32 * PRODUCER_WARPS, GATHERERS = PRODUCERS - 32;
  static constexpr int FIRST_PRODUCER = PRODUCER_WARPS == 4 ? 0 : 128 * CONSUMERS;
  static constexpr int THREADS = PRODUCERS + 128 * CONSUMERS;

  // CTAs per SM. A tile with one consumer streams weights for few tokens: with two CTAs, one fills
  // its pipeline while the other is in its epilogue.
  static constexpr int RESIDENT = CONSUMERS == 2 ? 1 : 2;

  // K extent of a stage, in 128-byte rows of x.
  static constexpr int SPANS = 1;

  // Rows of x are loaded in TMA boxes of BOX rows, the remainder in boxes of REST_BOX.
  static constexpr int BOX = TOKENS_ < 64 ? TOKENS_ : 64, REST_BOX = TOKENS_ % 32 == 0 ? 32 : 16;

  // The N of an MMA is the smallest of LEAST, LEAST + STEP, ... that holds the tile's tokens. For
  // fewer tokens per expert, the plan selects smaller tiles.
  static constexpr int STEP = TOKENS_ < 64 ? 8 : 16;
  static constexpr int LEAST = (TOKENS_ / 2 + STEP - 1) / STEP * STEP;
  static_assert(TOKENS_ % REST_BOX == 0 && TOKENS_ % STEP == 0, "whole boxes, whole steps");

  // Epilogue buffers per consumer that do not alias a pipeline stage.
  static constexpr int OWN_BUFFERS = 2;
  static constexpr int OUT_ROWS = TOKENS_ < kEpilogueTokens ? TOKENS_ : kEpilogueTokens;

  // Whether further buffers alias the last stage of a tile.
  static constexpr bool ALIASES = TOKENS_ > kEpilogueTokens;

  // Defaults, which shapes override.
  static constexpr bool SWAP_AB = true;          // operand A is weights, operand B tokens
  static constexpr bool UNPAIRED_BLOCKS = false; // both CTAs of a cluster may share a block
  static constexpr bool PAIRS = false;           // looks up codes in CodePairs
  static constexpr bool FEW_ROWS = false;        // mma.sync for up to 16 tokens
  // Whether there is a kernel with the GENERAL epilogue, which single projections use. Variants
  // without one use ByRow (launch.cuh), or serve layers only.
  static constexpr bool GENERAL_EPILOGUE = CLUSTER == 1 && CONSUMERS == 1;
  static constexpr bool DYNAMIC_SCHEDULE = CONSUMERS == 2; // see TileScheduler
  static constexpr bool RUNS = false;                      // tiles may be scheduled in runs
  // Whether the PLAIN epilogue stores flat rows and applies routing weights.
  static constexpr bool BY_ROW = false;
};

/* Shape that can schedule tiles in runs, for projections that are not gated: w2 of narrow experts
 * has few k steps. */
template <class S> struct WithRuns : S {
  static constexpr bool RUNS = S::DYNAMIC_SCHEDULE;
};

/* Register budget per thread. setmaxnreg moves registers from producers to consumers, in multiples
 * of 8. The launch allocates START per thread: 64K registers per SM over 384 threads, or over 2 *
 * 256. */
template <int PRODUCER, int CONSUMERS> struct RegisterBudget {
  static constexpr int START = CONSUMERS == 2 ? 168 : 128;
  static constexpr int PRODUCER_REGISTERS = PRODUCER;
  static constexpr int CONSUMER_REGISTERS = START + (START - PRODUCER) / CONSUMERS;
  static constexpr bool REALLOCATES = CONSUMER_REGISTERS > START;
};

#endif
