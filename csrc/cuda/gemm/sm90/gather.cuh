/* Rows of x into the stages of a Hopper kernel's pipeline, wherever they lie: by cp.async of three
 * warps, 64 of depth at a time, rows of 128 bytes as in tile.cuh. */
#ifndef MOELORA_CUDA_SM90_GATHER_CUH
#define MOELORA_CUDA_SM90_GATHER_CUH

#include "cuda/gemm/sm90/pipeline.cuh"

/* A thread's share of a stage: chunk `chunk` of token rows `first` + STEP i. */
struct GatherShare {
  static constexpr int STEP = kGatherers / 8;
  static constexpr uint32_t NONE = 0xffffffffu; // instead of a row
  static_assert(STEP % 8 == 4, "every other row has the same place in the swizzle");

  int chunk, first, left; // left: of the depth, from this chunk on
  uint32_t to[2];         // in a stage, of even and of odd i
  const uint16_t *x;      // at this depth

  __device__ __forceinline__ explicit GatherShare(int thread)
      : chunk(thread & 7), first(thread / 8) {
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
      to[odd] = (uint32_t)(first * kRowBytes + ((chunk ^ ((first + 4 * odd) & 7)) << 4));
  }
  __device__ __forceinline__ void begin(const moelora_tokens &tokens) {
    left = tokens.k - chunk * 8;
    x = (const uint16_t *)tokens.x + (left > 0 ? chunk * 8 : 0); // what is not read is mapped
  }
  /* The next 64 of depth, of the rows of x that begin at `token`, in 16 bytes. */
  template <int ROWS>
  __device__ __forceinline__ void copy_rows(uint32_t stage, const uint32_t *token) {
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

/* Rows of a block are found while something else streams, and kept. */
template <int TOKENS> struct Gather : GatherShare {
  static constexpr int ROWS = (TOKENS + STEP - 1) / STEP;

  uint32_t token[ROWS]; // where rows of x begin, in 16 bytes
  uint32_t next[ROWS];  // and those that come next

  __device__ __forceinline__ explicit Gather(int thread) : GatherShare(thread) {}

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
    GatherShare::begin(tokens);
  }
  __device__ __forceinline__ void copy(uint32_t stage) { copy_rows<ROWS>(stage, token); }
};

/* Where there are no registers to keep rows in they are listed in shared memory, those of a share
 * together: at `list` [STEP][STEP], that of token first + STEP i at [first][i]. */
template <int TOKENS> struct ListedGather : GatherShare {
  static constexpr int ROWS = (TOKENS + STEP - 1) / STEP;
  static_assert(ROWS <= STEP && STEP % 4 == 0, "a list of whole 16 bytes");

  __device__ __forceinline__ explicit ListedGather(int thread) : GatherShare(thread) {}

  /* That of one token; NONE: there is none. */
  static __device__ __forceinline__ void put(uint32_t list, int token, uint32_t row,
                                             const moelora_tokens &tokens) {
    store_shared_4(list + (token % STEP * STEP + token / STEP) * 4,
                   row == NONE ? NONE : row * (uint32_t)(tokens.stride / 8));
  }
  __device__ __forceinline__ void copy(uint32_t stage, uint32_t list) {
    uint32_t token[STEP];
#pragma unroll
    for (int i = 0; i < STEP; i += 4) {
      const uint4 four = load_shared_16(list + (first * STEP + i) * 4);
      token[i] = four.x, token[i + 1] = four.y, token[i + 2] = four.z, token[i + 3] = four.w;
    }
    copy_rows<ROWS>(stage, token);
  }
};

#endif
