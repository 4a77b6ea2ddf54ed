/* Shrinks of a backward: yb[position, slice * xa_slice + r] = round(s[l] sum_n y[n] B[l, e, n, r])
 *
 * for rows of adapter l and r below its true rank; zero from there to the next multiple of 16.
 * Ranks of B are contiguous, but operand A of mma needs them as rows, so ldmatrix transposes.
 *
 * A work unit covers up to RANKS ranks of a slice, and
 *
 *   LISTED      every kSplits-th group of TOKENS rows of a segment that the sort or the gradients
 *               have listed
 *   otherwise   up to TOKENS rows of a block; a CTA loops over the segments among them
 *
 * For each segment a CTA loops over K, with a cp.async pipeline:
 *
 *   X [TOKENS rows][64 of K]    zeros outside the segment
 *   B [64 of K][RANKS]          zeros past the end of K
 *
 * A warp computes 16 rows. If a part of a segment has only one or two such groups of rows, several
 * warps split the ranks of a group. K is accumulated in k16 steps in order: the result of a row
 * does not depend on other rows. */
#include "cuda/backward/products.h"
#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/common/tile.cuh"
#include "cuda/gemm/sm80/copies.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kSplits = 2; // units per listed segment
// LISTED is used up to kListedRows rows per pair on average, with TOKENS = 32 up to kFewRows; not
// with more than kEmptyPairs pairs per row, when most units would be empty.
constexpr int64_t kListedRows = 64, kFewRows = 24, kEmptyPairs = 8;

/* Segments with few rows are bound by latency: their CTAs are small, with many on an SM. */
template <int TILES_, int TOKENS_, bool LISTED_> struct BackShape {
  static constexpr int TILES = TILES_, TOKENS = TOKENS_;
  static constexpr bool LISTED = LISTED_;
  static constexpr int RANKS = 16 * TILES, GROUPS = TOKENS / 16; // groups of 16 rows
  static constexpr int STAGES = TOKENS == 64 ? 4 : 3, CTAS = TOKENS == 64 ? 3 : TILES > 2 ? 5 : 6;
  // Maximum number of m16 rank tiles per warp. With two groups, each has at least two warps, which
  // split its ranks; with four, a group may have a single warp.
  static constexpr int OWN = GROUPS == 2 ? (TILES + 1) / 2 : TILES;
  static_assert(GROUPS == 2 || GROUPS == kWarps, "all groups at once");

  struct Stage {
    SwizzledRow sX[TOKENS], sB[kDepth];
  };
  static constexpr int SHARED = STAGES * (int)sizeof(Stage);
  static_assert(SHARED <= (int)kPortableShared, "a CTA's shared memory");
};

struct BackShrinkParams {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  void *yb;
  int32_t parts, chunks; // parts of TOKENS rows per block; chunks of RANKS ranks
};

/* A segment's rows [low, high) within a part. */
struct PartSegment {
  int low, high, packed;
};

/* Maps row t of a part to its position. The segment has `share` rows in each block of `rows`
 * positions; the part begins at row `at` of a block. */
struct PartPositions {
  int64_t block; // first position of the block
  int at, share, rows;

  __device__ __forceinline__ int64_t operator()(int t) const {
    const int next = (at + t) / share;
    return block + (int64_t)next * rows + at + t - next * share;
  }
};

/* Shrinks the segments of a part. */
template <class T, bool VECTORS, class S> struct BackShrink {
  // Rows of X and of B that the threads copy at once; a thread copies eight elements of each.
  static constexpr int X_ROWS = kThreads / 8, B_ROWS = kThreads / (2 * S::TILES);
  const BackShrinkParams &p;
  uint32_t base;
  PartPositions position;
  int slice, chunk, expert;
  uint32_t row[S::GROUPS]; // row of y for row threadIdx.x / 8 + X_ROWS * i of the part

  /* Looks up the rows of a part with `count` rows. */
  __device__ __forceinline__ void find_rows(int count) {
#pragma unroll
    for (int i = 0; i < S::GROUPS; i++)
      row[i] = (uint32_t)position(min((int)threadIdx.x / 8 + X_ROWS * i, count - 1));
    find_x_rows(p.g.schedule.blocks, p.g.tokens, row);
  }
  __device__ __forceinline__ int ranks_of(const PartSegment &segment) const {
    return segment.packed % kRanks - chunk * S::RANKS;
  }

  /* A thread's copies: issue() issues those of a step and advances to the next. */
  struct Copies {
    const T *x[S::GROUPS], *b; // sources of the next step
    const T *mapped;           // valid source of copies that only zero-fill
    uint32_t b_row;            // bytes between rows of B
    int x_left, b_left;        // elements of K left from this thread's first one in X, and in B
    int ranks;                 // true ranks from this thread's first on
    bool any;                  // whether the products read this thread's ranks
    uint32_t to, stage;        // this thread's offset in sX; stage of the next step

    __device__ __forceinline__ Copies(const BackShrink &shrink, const PartSegment &segment) {
      const BackShrinkParams &p = shrink.p;
      const moelora_factors &lora = p.g.adapters.lora;
      const int lane = threadIdx.x & 7, c = threadIdx.x % (2 * S::TILES);
      const int n = (int)threadIdx.x / (2 * S::TILES);
      mapped = (const T *)p.g.tokens.x + shrink.slice * lora.slice_n;
#pragma unroll
      for (int i = 0; i < S::GROUPS; i++)
        x[i] = mapped + (int64_t)shrink.row[i] * p.g.tokens.stride + lane * 8;
      const moelora_factor &factor = lora.b[shrink.slice];
      b = factor_row<T>(factor, segment.packed / kRanks, shrink.expert, n) +
          shrink.chunk * S::RANKS + c * 8;
      b_row = (uint32_t)factor.stride_i * (uint32_t)sizeof(T);
      x_left = (int)lora.slice_n - lane * 8, b_left = (int)lora.slice_n - n;
      ranks = shrink.ranks_of(segment) - c * 8;
      any = c * 8 < moelora_padded_rank(ranks + c * 8);
      to = (threadIdx.x / 8) * kRowBytes + ((lane ^ (int)threadIdx.x / 8 & 7) << 4);
      stage = shrink.base;
    }
    /* Returns the offset, within sB, of this thread's chunk of row n. */
    static __device__ __forceinline__ uint32_t b_chunk(int n) {
      return n * kRowBytes + (((int)threadIdx.x % (2 * S::TILES) ^ n & 7) << 4);
    }

    __device__ __forceinline__ void issue(const BackShrink &shrink, const PartSegment &segment) {
#pragma unroll
      for (int i = 0; i < S::GROUPS; i++) {
        const int t = (int)threadIdx.x / 8 + X_ROWS * i;
        copy_chunk<VECTORS>(stage + to + i * X_ROWS * kRowBytes, x_left > 0 ? x[i] : mapped, x_left,
                            t >= segment.low && t < segment.high);
        x[i] += kDepth;
      }
      x_left -= kDepth;
      if (any) {
        const uint32_t sB = stage + (uint32_t)offsetof(typename S::Stage, sB);
        const int n = (int)threadIdx.x / (2 * S::TILES);
#pragma unroll
        for (int i = 0; i < kDepth / B_ROWS; i++) {
          const bool exists = i * B_ROWS < b_left && ranks > 0;
          copy_chunk<VECTORS>(sB + b_chunk(n + i * B_ROWS),
                              exists ? row_address(b, i * B_ROWS, b_row) : mapped,
                              exists ? ranks : 0, true);
        }
        b = row_address(b, kDepth, b_row);
        b_left -= kDepth;
      }
      stage = shrink.after(stage);
    }
  };

  __device__ __forceinline__ uint32_t after(uint32_t stage) const {
    const uint32_t next = stage + (uint32_t)sizeof(typename S::Stage);
    return next < base + S::SHARED ? next : base;
  }

  /* A warp's share of a segment: 16 rows from `first` on, m16 tiles [low, high) of ranks. */
  struct Work {
    int first, low, high;

    __device__ __forceinline__ Work(const PartSegment &segment, int warp, int ranks) {
      const int from = segment.low / 16, groups = (segment.high + 15) / 16 - from;
      const int warps = groups == 1 ? kWarps : groups == 2 ? kWarps / 2 : 1;
      const int tiles = min((ranks + 15) / 16, S::TILES), each = (tiles + warps - 1) / warps;
      first = 16 * (from + warp / warps);
      low = warp % warps * each, high = min(low + each, tiles);
    }
  };

  __device__ __forceinline__ void run(const PartSegment &segment) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int steps = ((int)p.g.adapters.lora.slice_n + kDepth - 1) / kDepth;
    const Work work(segment, warp, ranks_of(segment));
    const int first = work.first;
    const bool mine = first < segment.high && first + 16 > segment.low && work.low < work.high;
    // Rows from which this lane loads the first k16 slab: of B transposed, of X two n8 tiles.
    const int depth_row = (lane >> 4) * 8 + (lane & 7), half = lane >> 3 & 1;
    const uint32_t b_row = depth_row * kRowBytes, x_row = (first + depth_row) * kRowBytes;
    float d[S::OWN][2][4] = {};
    Copies copies(*this, segment);
#pragma unroll 1
    for (int step = 0; step < S::STAGES - 1; step++) {
      if (step < steps)
        copies.issue(*this, segment);
      copy_async_commit();
    }
    uint32_t stage = base;
#pragma unroll 1
    for (int step = 0; step < steps; step++, stage = after(stage)) {
      copy_async_wait<S::STAGES - 2>();
      __syncthreads();
      if (step + S::STAGES - 1 < steps)
        copies.issue(*this, segment);
      copy_async_commit();
      if (!mine)
        continue;
      const uint32_t sB = stage + (uint32_t)offsetof(typename S::Stage, sB);
#pragma unroll
      for (int k = 0; k < kDepth / 16; k++) {
        uint32_t x[4], a[4];
        load_matrix_x4(x, stage + x_row + ((2 * k + half ^ lane & 7) << 4));
#pragma unroll
        for (int m = 0; m < S::OWN; m++) {
          if (work.low + m >= work.high)
            continue;
          load_matrix_x4_trans(a, sB + k * 16 * kRowBytes + b_row +
                                      ((2 * (work.low + m) + half ^ lane & 7) << 4));
#pragma unroll
          for (int n = 0; n < 2; n++)
            mma_16816<T>(d[m][n], a, x + 2 * n);
        }
      }
    }
    __syncthreads(); // all threads are done with the stages
    if (mine)
      store(segment, work, d);
  }

  /* Scales, rounds, transposes and stores; a lane stores two ranks of a token at a time. */
  __device__ __forceinline__ void store(const PartSegment &segment, const Work &work,
                                        const float (&d)[S::OWN][2][4]) const {
    const int lane = threadIdx.x & 31;
    const int rank = ranks_of(segment), padded = moelora_padded_rank(rank);
    const float scaling = p.scalings ? p.scalings[segment.packed / kRanks] : 1.f;
    T *const yb = (T *)p.yb + slice * p.g.adapters.xa_slice + chunk * S::RANKS;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int t = work.first + n * 8 + lane / 4;
      const bool valid = t >= segment.low && t < segment.high;
      T *const to = yb + position(valid ? t : segment.low) * p.g.adapters.xa_stride;
#pragma unroll
      for (int m = 0; m < S::OWN; m++)
#pragma unroll
        for (int m8 = 0; m8 < 2; m8++) {
          const int own = (work.low + m) * 16 + m8 * 8;
          const bool exists = own + lane / 4 < rank;
          const float *two = &d[m][n][2 * m8];
          const uint32_t v = transpose_8x8(
              pack2<T>(exists ? scaling * two[0] : 0.f, exists ? scaling * two[1] : 0.f));
          const int r = own + 2 * (lane & 3);
          if (valid && r < padded && work.low + m < work.high)
            *(uint32_t *)(to + r) = v;
        }
    }
  }
};

/* Processes up to TOKENS rows of a block with one CTA. */
template <class T, bool VECTORS, class S>
__device__ __forceinline__ void shrink_part(const BackShrinkParams &p, uint32_t base, int block,
                                            int part, int slice, int chunk) {
  const moelora_blocks &blocks = p.g.schedule.blocks;
  const int count = min(S::TOKENS, blocks.counts[block] - part * S::TOKENS);
  if (count <= 0)
    return;
  const PartPositions position = {(int64_t)block * blocks.rows, part * S::TOKENS, blocks.rows,
                                  blocks.rows};
  Segments<S::TOKENS / 32> segments;
  segments.load(blocks, p.g.adapters.lora.max_rank, position(0), count);
  BackShrink<T, VECTORS, S> shrink = {p, base, position, slice, chunk, blocks.expert_ids[block],
                                      {}};
  shrink.find_rows(count);
  for (int low = 0, high; low < count; low = high) {
    high = segments.next(low + 1, count);
    const int packed =
        __shfl_sync(0xffffffffu, low < 32 ? segments.packed[0] : segments.packed[1], low % 32);
    if (packed >= 0 && packed % kRanks > chunk * S::RANKS)
      shrink.run({low, high, packed});
  }
}

/* Processes every kSplits-th group of TOKENS rows of a listed segment, from group `split` on. */
template <class T, bool VECTORS, class S>
__device__ __forceinline__ void shrink_listed(const BackShrinkParams &p, uint32_t base, int4 listed,
                                              int expert, int split, int slice, int chunk) {
  const moelora_segment segment = {listed.x, listed.y, listed.z, listed.w};
  const int rows = p.g.schedule.blocks.rows, most = p.g.adapters.lora.max_rank;
  if (segment.packed < 0 || segment.packed % kRanks <= chunk * S::RANKS)
    return;
  const int packed = min(segment.packed % kRanks, most) + segment.packed / kRanks * kRanks;
  const int64_t block = segment.position / rows * rows;
  for (int from = split * S::TOKENS; from < segment.count; from += kSplits * S::TOKENS) {
    const int count = min(S::TOKENS, segment.count - from);
    BackShrink<T, VECTORS, S> shrink = {
        p,     base,  {block, (int)(segment.position - block) + from, segment.share, rows},
        slice, chunk, expert,
        {}};
    shrink.find_rows(count);
    shrink.run({0, count, packed});
  }
}

template <class T, bool VECTORS, class S>
__global__ void __launch_bounds__(kThreads, S::CTAS)
    back_shrink(const __grid_constant__ BackShrinkParams p) {
  extern __shared__ __align__(128) char shared[];
  follow_previous_kernel();
  const moelora_blocks &blocks = p.g.schedule.blocks;
  const int slices = p.g.adapters.lora.num_slices, adapters = p.g.schedule.max_loras + 1;
  const int all = S::LISTED ? p.g.schedule.num_experts * adapters * kSplits
                            : *blocks.num_post / blocks.rows * p.parts;
  const int units = all * slices * p.chunks;
  const auto number_of = [&](int unit) { return unit / p.chunks / slices; };
  const auto segment_of = [&](int unit) {
    return S::LISTED && unit < units ? *(const int4 *)&blocks.segments[number_of(unit) / kSplits]
                                     : make_int4(-1, 0, 0, 0);
  };
  // A round has one unit for each CTA, and each round is shifted by one CTA: units of a kind (first
  // groups of segments, chunks, parts) recur with a period that may divide the grid.
  const auto unit_of = [](int round) {
    return round * (int)gridDim.x + (int)((blockIdx.x + (unsigned)round) % gridDim.x);
  };
  int4 segment = segment_of(unit_of(0));
  for (int round = 0, unit; (unit = unit_of(round)) < units; round++) {
    const int chunk = unit % p.chunks, slice = unit / p.chunks % slices, number = number_of(unit);
    const int4 next = segment_of(unit_of(round + 1)); // early, to hide its latency
    if constexpr (S::LISTED)
      shrink_listed<T, VECTORS, S>(p, shared_address(shared), segment, number / kSplits / adapters,
                                   number % kSplits, slice, chunk);
    else
      shrink_part<T, VECTORS, S>(p, shared_address(shared), number / p.parts, number % p.parts,
                                 slice, chunk);
    segment = next;
  }
}

template <class T, bool VECTORS, class S>
moelora_status launch_shape(BackShrinkParams p, const moelora_exec *exec) {
  const moelora_blocks &blocks = p.g.schedule.blocks;
  p.parts = (blocks.rows + S::TOKENS - 1) / S::TOKENS;
  p.chunks = (p.g.adapters.lora.max_rank + S::RANKS - 1) / S::RANKS;
  const int64_t units =
      S::LISTED ? (int64_t)kSplits * p.g.schedule.num_experts * (p.g.schedule.max_loras + 1)
                : blocks.max_blocks * p.parts;
  return launch_kernel<back_shrink<T, VECTORS, S>>(
      "back_shrink", units * p.chunks * p.g.adapters.lora.num_slices, kThreads, S::SHARED, exec, p);
}

template <class T, bool VECTORS, int TILES>
moelora_status launch(const BackShrinkParams &p, const moelora_exec *exec) {
  const moelora_schedule &schedule = p.g.schedule;
  const int64_t pairs = (int64_t)schedule.num_experts * schedule.max_loras;
  const int64_t rows = schedule.num_rows;
  // If a unit holds an average segment, LISTED does not cut it at blocks, and reads its B once.
  if (!schedule.blocks.segments || rows > kListedRows * pairs || pairs > kEmptyPairs * rows)
    return launch_shape<T, VECTORS, BackShape<TILES, 64, false>>(p, exec);
  if (rows > kFewRows * pairs)
    return launch_shape<T, VECTORS, BackShape<TILES, 64, true>>(p, exec);
  return launch_shape<T, VECTORS, BackShape<TILES, 32, true>>(p, exec);
}

template <class T>
moelora_status launch_any(const BackShrinkParams &p, bool vectors, const moelora_exec *exec) {
  const int rank = p.g.adapters.lora.max_rank;
  if (!vectors)
    return launch<T, false, 1>(p, exec);
  return rank <= 16   ? launch<T, true, 1>(p, exec)
         : rank <= 32 ? launch<T, true, 2>(p, exec)
                      : launch<T, true, 4>(p, exec);
}

} // namespace

moelora_status moelora_cuda_back_shrink(const moelora_gemm_launch *g, const float *scalings,
                                        void *yb, bool vectors, moelora_dtype dtype,
                                        const moelora_exec *exec) {
  const BackShrinkParams p = {*g, scalings, yb, 0, 0};
  return dtype == MOELORA_BF16 ? launch_any<__nv_bfloat16>(p, vectors, exec)
                               : launch_any<__half>(p, vectors, exec);
}
