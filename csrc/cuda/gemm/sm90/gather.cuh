/* Gathers rows of x into pipeline stages by cp.async, 128 bytes of each row at a time. Runs in the
 * producer warps that do not issue TMA. */
#ifndef MOELORA_CUDA_SM90_GATHER_CUH
#define MOELORA_CUDA_SM90_GATHER_CUH

#include "cuda/gemm/common/tile.cuh"
#include "cuda/ptx/opaque.cuh"

constexpr int kProducers = 128,
              kGatherers = 96; // threads of the producer warpgroup; those that gather

constexpr uint32_t kNoRow = 0xffffffffu; // token past the end of its block

/* Elements of x per 16-byte copy. */
constexpr int kChunkElements = 8;

/* Share of a stage that one thread copies. LANES threads copy a row: for lane = thread % LANES,
 * this thread copies chunks `lane`, `lane` + LANES, ... of token rows thread / LANES + STEP i.
 * Eight lanes read whole lines; with four, a thread copies twice the chunks of half the rows and
 * computes half as many addresses. */
template <int TOKENS, int LANES, int GATHERERS = kGatherers, int CHUNK = kChunkElements>
struct GatherShare {
  static constexpr int STEP = GATHERERS / LANES, ROWS = (TOKENS + STEP - 1) / STEP;
  static constexpr int CHUNKS = 8 / LANES, PLACES = STEP % 8 == 0 ? 1 : 2;
  static_assert(STEP % 4 == 0, "every other row has the same place in the swizzle");

  uint32_t token[ROWS]; // offsets of the rows in x, in units of 16 bytes
  uint32_t to[PLACES];  // offset in sX of the first chunk of row i % PLACES
  int left;             // elements of K left, from the first chunk on
  const uint16_t *gX;   // x at the current k

  __device__ __forceinline__ explicit GatherShare(int thread) {
    const int first = thread / LANES, lane = thread % LANES;
#pragma unroll
    for (int i = 0; i < PLACES; i++)
      to[i] = (uint32_t)(first * kRowBytes + ((lane ^ ((first + STEP * i) & 7)) << 4));
  }
  /* Switches `copy` to the rows in `token`. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
    const int lane = thread % LANES;
    left = tokens.k - lane * CHUNK;
    gX = (const uint16_t *)tokens.x + (left > 0 ? lane * 8 : 0); // never past the end of x
  }
  /* Copies the next 128 bytes of each row. Elements past the end of K are zero-filled. FEW: stops
   * at the first absent row, which pays if most stages have few rows. */
  template <bool FEW = false> __device__ __forceinline__ void copy(uint32_t sX) {
    uint32_t at[CHUNKS][PLACES];
#pragma unroll
    for (int j = 0; j < CHUNKS; j++)
#pragma unroll
      for (int i = 0; i < PLACES; i++)
        at[j][i] = opaque(sX + (to[i] ^ j * LANES << 4)); // once for all rows
    gX = opaque(gX);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (FEW && token[i] == kNoRow)
        break;
      if (token[i] != kNoRow) {
        const uint16_t *from = row_address(gX, token[i], 16);
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
          copy_async_16(at[j][i % PLACES] + i * STEP * kRowBytes, from + j * LANES * 8,
                        left > j * LANES * CHUNK ? 16 : 0);
      }
    }
    gX += left > 8 * CHUNK ? kDepth : 0;
    left -= 8 * CHUNK;
  }
};

/* GatherShare with prefetched rows: the rows of the next block are looked up while stages are
 * full. */
template <int TOKENS, int LANES = 8, int GATHERERS = kGatherers, int CHUNK = kChunkElements>
struct Gather : GatherShare<TOKENS, LANES, GATHERERS, CHUNK> {
  using Share = GatherShare<TOKENS, LANES, GATHERERS, CHUNK>;
  using Share::token;

  uint32_t next[Share::ROWS]; // `token` of the next block

  using Share::Share;

  /* Looks up the rows of `count` tokens; token t is at position_of(t). */
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
      next[i] =
          first + Share::STEP * i < count ? next[i] * (uint32_t)(tokens.stride / CHUNK) : kNoRow;
  }

  /* Switches `copy` to the rows that `find` looked up. */
  __device__ __forceinline__ void begin(const moelora_tokens &tokens, int thread) {
#pragma unroll
    for (int i = 0; i < Share::ROWS; i++)
      token[i] = next[i];
    Share::begin(tokens, thread);
  }
};

#endif
