/* Rows of x into the stages of a Hopper kernel's pipeline, wherever they lie: by cp.async of one
 * warp or three, 64 of depth at a time, rows of 128 bytes as in tile.cuh. */
#ifndef MOELORA_CUDA_SM90_GATHER_CUH
#define MOELORA_CUDA_SM90_GATHER_CUH

#include "cuda/gemm/sm90/pipeline.cuh"

constexpr uint32_t kNoRow = 0xffffffffu; // of a token that is not there

/* A thread's share of a stage, where LANES threads copy a row: chunks `lane`, `lane` + LANES, ...
 * of token rows thread / LANES + STEP i, for lane = thread % LANES. Eight read whole lines; four
 * have half the rows to find the addresses of. */
template <int TOKENS, int LANES, int GATHERERS = kGatherers> struct GatherShare {
  static constexpr int STEP = GATHERERS / LANES, ROWS = (TOKENS + STEP - 1) / STEP;
  static constexpr int CHUNKS = 8 / LANES, PLACES = STEP % 8 == 0 ? 1 : 2;
  static_assert(STEP % 4 == 0, "every other row has the same place in the swizzle");

  uint32_t token[ROWS]; // where rows of x begin, in 16 bytes
  uint32_t to[PLACES];  // in a stage, of the first chunk of row i % PLACES
  int left;             // of the depth, from the first chunk on
  const uint16_t *x;    // at this depth

  __device__ __forceinline__ explicit GatherShare(int thread) {
    const int first = thread / LANES, lane = thread % LANES;
#pragma unroll
    for (int i = 0; i < PLACES; i++)
      to[i] = (uint32_t)(first * kRowBytes + ((lane ^ ((first + STEP * i) & 7)) << 4));
  }
  /* From here on `copy` is about the rows that `token` has. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
    const int lane = thread % LANES;
    left = tokens.k - lane * 8;
    x = (const uint16_t *)tokens.x + (left > 0 ? lane * 8 : 0); // what is read is mapped
  }
  /* The next 64 of depth. */
  __device__ __forceinline__ void copy(uint32_t stage) {
    uint32_t at[CHUNKS][PLACES];
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
      for (int i = 0; i < PLACES; i++) {
        at[j][i] = stage + (to[i] ^ j * LANES << 4);
        asm volatile("" : "+r"(at[j][i])); // found once, not for every row
      }
    asm volatile("" : "+l"(x));
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (token[i] != kNoRow) {
        const uint16_t *from = row_address(x, token[i], 16);
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
          copy_async_16(at[j][i % PLACES] + i * STEP * kRowBytes, from + j * LANES * 8,
                        left > j * LANES * 8 ? 16 : 0);
      }
    x += left > kDepth ? kDepth : 0;
    left -= kDepth;
  }
};

/* Rows of a block are found while something else streams, and kept. */
template <int TOKENS, int LANES = 8, int GATHERERS = kGatherers>
struct Gather : GatherShare<TOKENS, LANES, GATHERERS> {
  using Share = GatherShare<TOKENS, LANES, GATHERERS>;
  using Share::token;

  uint32_t next[Share::ROWS]; // rows that come next

  using Share::Share;

  /* Of `count` tokens at position_of(token). */
  template <class PositionOf>
  __device__ __forceinline__ void find(const moelora_blocks &blocks, const moelora_tokens &tokens,
                                       int count, int thread, PositionOf position_of) {
    const int first = thread / LANES;
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      next[i] = position_of(max(min(first + Share::STEP * i, count - 1), 0));
    find_x_rows(blocks, tokens, next);
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      next[i] = first + Share::STEP * i < count ? next[i] * (uint32_t)(tokens.stride / 8) : kNoRow;
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
template <int TOKENS> struct ListedGather : GatherShare<TOKENS, 4> {
  using Share = GatherShare<TOKENS, 4>;
  using Share::token;
  static_assert(Share::STEP == kListedAtOnce, "a list of all that is read");

  using Share::Share;

  /* Where row x of token t begins, or kNoRow, at place t of the list. */
  static __device__ __forceinline__ void put(uint32_t list, int t, uint32_t row,
                                             const moelora_tokens &tokens) {
    store_shared_4(list + t * 4, row == kNoRow ? kNoRow : row * (uint32_t)(tokens.stride / 8));
  }
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread, uint32_t list) {
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      token[i] = load_shared_4(list + (thread / 4 + Share::STEP * i) * 4);
    Share::begin(tokens, thread);
  }
};

#endif
