/* Rows of x into the stages of a Hopper kernel's pipeline, wherever they lie: by cp.async of three
 * warps, 64 of depth at a time, rows of 128 bytes as in tile.cuh. */
#ifndef MOELORA_CUDA_SM90_GATHER_CUH
#define MOELORA_CUDA_SM90_GATHER_CUH

#include "cuda/gemm/sm90/pipeline.cuh"

/* A thread's share: chunk `chunk` of token rows `first` + STEP i. The rows of what comes next are
 * found while something else streams. */
template <int TOKENS> struct Gather {
  static constexpr int STEP = kGatherers / 8, ROWS = (TOKENS + STEP - 1) / STEP;
  static constexpr uint32_t NONE = 0xffffffffu;
  static_assert(STEP % 8 == 4, "every other row has the same place in the swizzle");

  int chunk, first, left; // left: of the depth, from this chunk on
  uint32_t to[2];         // in a stage, of even and of odd i
  uint32_t token[ROWS];   // where rows of x begin, in 16 bytes
  uint32_t next[ROWS];    // and those that come next
  const uint16_t *x;      // at this depth

  __device__ __forceinline__ explicit Gather(int thread) : chunk(thread & 7), first(thread / 8) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
      to[odd] = (uint32_t)(first * kRowBytes + ((chunk ^ ((first + 4 * odd) & 7)) << 4));
  }

  /* Of `count` tokens at position_of(token). */
  template <class PositionOf>
  __device__ __forceinline__ void find(const moelora_blocks &blocks, const moelora_tokens &tokens,
                                       int count, PositionOf position_of) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      next[i] = position_of(max(min(first + STEP * i, count - 1), 0));
    find_x_rows(blocks, tokens, next);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      next[i] = first + STEP * i < count ? next[i] * (uint32_t)(tokens.stride / 8) : NONE;
  }

  /* From here on `copy` is about what was found. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens) {
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      token[i] = next[i];
    left = tokens.k - chunk * 8;
    x = (const uint16_t *)tokens.x + (left > 0 ? chunk * 8 : 0); // what is not read is mapped
  }

  /* The next 64 of depth. */
  __device__ __forceinline__ void copy(uint32_t stage) {
    uint32_t at[2] = {stage + to[0], stage + to[1]};
    asm volatile("" : "+l"(x), "+r"(at[0]), "+r"(at[1])); // found once, not for every row
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (token[i] != NONE)
        copy_async_16(at[i % 2] + i * STEP * kRowBytes, row_address(x, token[i], 16),
                      left > 0 ? 16 : 0);
    x += left > kDepth ? kDepth : 0;
    left -= kDepth;
  }
};

#endif
