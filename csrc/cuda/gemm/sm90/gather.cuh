/* Rows of x into the stages of a Hopper kernel's pipeline, wherever they lie: by cp.async of three
 * warps, 64 of depth at a time, rows of 128 bytes as in tile.cuh. */
#ifndef MOELORA_CUDA_SM90_GATHER_CUH
#define MOELORA_CUDA_SM90_GATHER_CUH

#include "cuda/gemm/sm90/pipeline.cuh"

/* Four lanes copy a row, two 16-byte chunks each, with one address for both. A thread's share of a
 * stage: chunks lane and lane + 4 of token rows thread / 4 + STEP i, for lane = thread % 4. */
template <int TOKENS> struct GatherShare {
  static constexpr int STEP = kGatherers / 4, ROWS = (TOKENS + STEP - 1) / STEP;
  static constexpr uint32_t NONE = 0xffffffffu; // instead of a row
  static_assert(STEP % 8 == 0, "rows of a share have the same place in the swizzle");

  uint32_t token[ROWS]; // where rows of x begin, in 16 bytes
  uint32_t to;          // in a stage, of the first chunk
  int left;             // of the depth, from the first chunk on
  const uint16_t *x;    // at this depth

  __device__ __forceinline__ explicit GatherShare(int thread)
      : to((uint32_t)(thread / 4 * kRowBytes + ((thread % 4 ^ (thread / 4 & 7)) << 4))) {}
  /* From here on `copy` is about the rows that `token` has. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
    left = tokens.k - thread % 4 * 8;
    x = (const uint16_t *)tokens.x + (left > 0 ? thread % 4 * 8 : 0); // what is read is mapped
  }
  /* The next 64 of depth. */
  __device__ __forceinline__ void copy(uint32_t stage) {
    uint32_t low = stage + to, high = low ^ 64;
    asm volatile("" : "+l"(x), "+r"(low), "+r"(high)); // found once, not for every row
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (token[i] != NONE) {
        const uint16_t *from = row_address(x, token[i], 16);
        copy_async_16(low + i * STEP * kRowBytes, from, left > 0 ? 16 : 0);
        copy_async_16(high + i * STEP * kRowBytes, from + 32, left > 32 ? 16 : 0);
      }
    x += left > kDepth ? kDepth : 0;
    left -= kDepth;
  }
};

/* Rows of a block are found while something else streams, and kept. */
template <int TOKENS> struct Gather : GatherShare<TOKENS> {
  using Share = GatherShare<TOKENS>;
  using Share::token;

  uint32_t next[Share::ROWS]; // rows that come next

  using Share::Share;

  /* Of `count` tokens at position_of(token). */
  template <class PositionOf>
  __device__ __forceinline__ void find(const moelora_blocks &blocks, const moelora_tokens &tokens,
                                       int count, int thread, PositionOf position_of) {
    const int first = thread / 4;
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      next[i] = position_of(max(min(first + Share::STEP * i, count - 1), 0));
    find_x_rows(blocks, tokens, next);
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      next[i] = first + Share::STEP * i < count ? next[i] * (uint32_t)(tokens.stride / 8)
                                                : Share::NONE;
  }

  /* From here on `copy` is about what was found. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      token[i] = next[i];
    Share::begin(tokens, thread);
  }
};

/* Where there are no registers to find rows in, others find them and list them in shared memory. */
template <int TOKENS> struct ListedGather : GatherShare<TOKENS> {
  using Share = GatherShare<TOKENS>;
  using Share::token;
  static_assert(Share::STEP == kListedAtOnce, "a list of all that is read");

  using Share::Share;

  /* Where row x of token t begins, or NONE, at place t of the list. */
  static __device__ __forceinline__ void put(uint32_t list, int t, uint32_t row,
                                             const moelora_tokens &tokens) {
    store_shared_4(list + t * 4,
                   row == Share::NONE ? Share::NONE : row * (uint32_t)(tokens.stride / 8));
  }
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread, uint32_t list) {
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      token[i] = load_shared_4(list + (thread / 4 + Share::STEP * i) * 4);
    Share::begin(tokens, thread);
  }
};

#endif
