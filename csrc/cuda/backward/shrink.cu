/* Shrinks of a backward: yb[position, slice * xa_slice + r] = round(s[l] sum_n y[n] B[l, e, n, r])
 *
 * for rows of adapter l and r below its true rank; zero from there to the next multiple of 16.
 * Ranks of B are contiguous, while operand A of a product needs them as rows: ldmatrix transposes.
 *
 * A work unit is a slice, up to RANKS ranks, and
 *
 *   LISTED      every kSplits-th 64 rows of a segment, of those that the sort has listed
 *   otherwise   up to 64 rows of a block: a CTA loops over the segments among them
 *
 * For each segment a CTA loops over K, with a cp.async pipeline:
 *
 *   X [64 rows][64 of K]        those of the segment
 *   B [64 of K][RANKS]          zeros past the end of K
 *
 * Warps share 16 rows each, and, if there are fewer rows, their ranks. K is accumulated in k16
 * steps in order: the result of a row does not depend on other rows. */
#include "cuda/backward/products.h"
#include "cuda/gemm/common/tile.cuh"
#include "cuda/gemm/sm80/copies.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kTokens = 64, kStages = 4;
constexpr int kSplits = 2; // units of a listed segment

struct Stage {
  SwizzledRow sX[kTokens], sB[kDepth];
};
constexpr int kSharedStages = kStages * (int)sizeof(Stage);
static_assert(kSharedStages <= (int)kPortableShared, "a CTA's shared memory");

struct BackShrinkParams {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  void *yb;
  int32_t parts, chunks; // parts of a block's rows; chunks of its ranks
};

/* A segment's rows [low, high) within a part. */
struct PartSegment {
  int low, high, packed;
};

/* Positions of a part's rows: `at`, ... of a block, up to `share`, then those of the next. */
struct PartPositions {
  int64_t block; // first position of the block
  int at, share, rows;

  __device__ __forceinline__ int64_t operator()(int t) const {
    const int next = (at + t) / share;
    return block + (int64_t)next * rows + at + t - next * share;
  }
};

/* One segment of a part: 16 TILES ranks. */
template <class T, bool VECTORS, int TILES> struct BackShrink {
  static constexpr int RANKS = 16 * TILES;
  const BackShrinkParams &p;
  uint32_t base;
  PartPositions position;
  int slice, chunk, expert;
  uint32_t row[kTokens / 16]; // of y, for token threadIdx.x / 8 + 16 i

  /* Looks up the rows of a part with `count` rows. */
  __device__ __forceinline__ void find_rows(int count) {
#pragma unroll
    for (int i = 0; i < kTokens / 16; i++)
      row[i] = (uint32_t)position(min((int)threadIdx.x / 8 + 16 * i, count - 1));
    find_x_rows(p.g.schedule.blocks, p.g.tokens, row);
  }

  __device__ __forceinline__ uint32_t sX(int step) const {
    return base + step % kStages * (int)sizeof(Stage);
  }
  __device__ __forceinline__ uint32_t sB(int step) const {
    return sX(step) + (uint32_t)offsetof(Stage, sB);
  }

  __device__ __forceinline__ void load(const PartSegment &segment, int step) const {
    const moelora_factors &lora = p.g.adapters.lora;
    const int depth = (int)lora.slice_n, lane = threadIdx.x & 7, at = step * kDepth;
    const T *y = (const T *)p.g.tokens.x + slice * lora.slice_n;
    const int left = depth - at - lane * 8;
#pragma unroll
    for (int i = 0; i < kTokens / 16; i++) {
      const int t = (int)threadIdx.x / 8 + 16 * i;
      copy_chunk<VECTORS>(sX(step) + t * kRowBytes + ((lane ^ t & 7) << 4),
                          y + (int64_t)row[i] * p.g.tokens.stride + (left > 0 ? at + lane * 8 : 0),
                          left, t >= segment.low && t < segment.high);
    }
    const moelora_factor &b = lora.b[slice];
    const T *factor = factor_row<T>(b, segment.packed / kRanks, expert, 0) + chunk * RANKS;
    const int ranks = segment.packed % kRanks - chunk * RANKS;
    const int c = threadIdx.x % (2 * TILES);
    if (c * 8 >= moelora_padded_rank(ranks))
      return; // not multiplied
#pragma unroll
    for (int i = 0; i < kDepth * 2 * TILES / kThreads; i++) {
      const int n = (int)threadIdx.x / (2 * TILES) + i * (kThreads / (2 * TILES));
      const int count = at + n < depth ? ranks - c * 8 : 0;
      copy_chunk<VECTORS>(sB(step) + n * kRowBytes + ((c ^ n & 7) << 4),
                          count > 0 ? factor + (at + n) * b.stride_i + c * 8 : factor, count, true);
    }
  }

  /* A warp's share of a segment: 16 rows from `first` on, m16 tiles [low, high) of ranks. */
  struct Work {
    int first, low, high;

    __device__ __forceinline__ Work(const PartSegment &segment, int warp, int ranks) {
      const int from = segment.low / 16, groups = (segment.high + 15) / 16 - from;
      const int warps = groups == 1 ? kWarps : groups == 2 ? kWarps / 2 : 1;
      const int tiles = min((ranks + 15) / 16, TILES), each = (tiles + warps - 1) / warps;
      first = 16 * (from + warp / warps);
      low = warp % warps * each, high = min(low + each, tiles);
    }
  };

  __device__ __forceinline__ void run(const PartSegment &segment) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int steps = ((int)p.g.adapters.lora.slice_n + kDepth - 1) / kDepth;
    const Work work(segment, warp, segment.packed % kRanks - chunk * RANKS);
    const int first = work.first;
    const bool mine = first < segment.high && first + 16 > segment.low && work.low < work.high;
    // Addresses from which this lane loads the first k16 slab: of B transposed, of X two n8 tiles.
    const int depth_row = (lane >> 4) * 8 + (lane & 7), half = lane >> 3 & 1;
    const uint32_t b_row = depth_row * kRowBytes, x_row = (first + depth_row) * kRowBytes;
    float d[TILES][2][4] = {};
#pragma unroll 1
    for (int step = 0; step < kStages - 1; step++) {
      if (step < steps)
        load(segment, step);
      copy_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      copy_async_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < steps)
        load(segment, step + kStages - 1);
      copy_async_commit();
      if (!mine)
        continue;
#pragma unroll
      for (int k = 0; k < kDepth / 16; k++) {
        uint32_t x[4], a[TILES][4];
        load_matrix_x4(x, sX(step) + x_row + ((2 * k + half ^ lane & 7) << 4));
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          if (m < work.low || m >= work.high)
            continue;
          load_matrix_x4_trans(a[m], sB(step) + k * 16 * kRowBytes + b_row +
                                         ((2 * m + half ^ lane & 7) << 4));
#pragma unroll
          for (int n = 0; n < 2; n++)
            mma_16816<T>(d[m][n], a[m], x + 2 * n);
        }
      }
    }
    __syncthreads(); // all threads are done with the stages
    if (mine)
      store(segment, work, d);
  }

  /* Scaled, rounded and transposed: a lane stores two ranks of a token. */
  __device__ __forceinline__ void store(const PartSegment &segment, const Work &work,
                                        const float (&d)[TILES][2][4]) const {
    const int lane = threadIdx.x & 31;
    const int rank = segment.packed % kRanks - chunk * RANKS, padded = moelora_padded_rank(rank);
    const float scaling = p.scalings ? p.scalings[segment.packed / kRanks] : 1.f;
    T *const yb = (T *)p.yb + slice * p.g.adapters.xa_slice + chunk * RANKS;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int m8 = 0; m8 < 2; m8++) {
          const bool exists = m * 16 + m8 * 8 + lane / 4 < rank;
          const float *two = &d[m][n][2 * m8];
          const uint32_t v = transpose_8x8(
              pack2<T>(exists ? scaling * two[0] : 0.f, exists ? scaling * two[1] : 0.f));
          const int t = work.first + n * 8 + lane / 4, r = m * 16 + m8 * 8 + 2 * (lane & 3);
          if (t >= segment.low && t < segment.high && r < padded && m >= work.low && m < work.high)
            *(uint32_t *)(yb + position(t) * p.g.adapters.xa_stride + r) = v;
        }
  }
};

/* Up to 64 rows of a block. */
template <class T, bool VECTORS, int TILES>
__device__ __forceinline__ void shrink_part(const BackShrinkParams &p, uint32_t base, int block,
                                            int part, int slice, int chunk) {
  const moelora_blocks &blocks = p.g.schedule.blocks;
  const int count = min(kTokens, blocks.counts[block] - part * kTokens);
  if (count <= 0)
    return;
  const PartPositions position = {(int64_t)block * blocks.rows, part * kTokens, blocks.rows,
                                  blocks.rows};
  Segments<kTokens / 32> segments;
  segments.load(blocks, p.g.adapters.lora.max_rank, position(0), count);
  BackShrink<T, VECTORS, TILES> shrink = {p, base, position, slice, chunk, blocks.expert_ids[block],
                                          {}};
  shrink.find_rows(count);
  for (int low = 0, high; low < count; low = high) {
    high = segments.next(low + 1, count);
    const int packed =
        __shfl_sync(0xffffffffu, low < 32 ? segments.packed[0] : segments.packed[1], low % 32);
    if (packed >= 0 && packed % kRanks > chunk * 16 * TILES)
      shrink.run({low, high, packed});
  }
}

/* Every kSplits-th 64 rows of a listed segment of `expert`, from `split` on. */
template <class T, bool VECTORS, int TILES>
__device__ __forceinline__ void shrink_listed(const BackShrinkParams &p, uint32_t base, int4 listed,
                                              int expert, int split, int slice, int chunk) {
  const moelora_segment segment = {listed.x, listed.y, listed.z, listed.w};
  const int rows = p.g.schedule.blocks.rows, most = p.g.adapters.lora.max_rank;
  if (segment.packed < 0 || segment.packed % kRanks <= chunk * 16 * TILES)
    return;
  const int packed = min(segment.packed % kRanks, most) + segment.packed / kRanks * kRanks;
  const int64_t block = segment.position / rows * rows;
  for (int from = split * kTokens; from < segment.count; from += kSplits * kTokens) {
    const int count = min(kTokens, segment.count - from);
    BackShrink<T, VECTORS, TILES> shrink = {
        p,     base,  {block, (int)(segment.position - block) + from, segment.share, rows},
        slice, chunk, expert,
        {}};
    shrink.find_rows(count);
    shrink.run({0, count, packed});
  }
}

template <class T, bool VECTORS, int TILES, bool LISTED>
__global__ void __launch_bounds__(kThreads, 3)
    back_shrink(const __grid_constant__ BackShrinkParams p) {
  extern __shared__ __align__(128) char shared[];
  wait_for_previous_kernel();
  start_next_kernel();
  const moelora_blocks &blocks = p.g.schedule.blocks;
  const int slices = p.g.adapters.lora.num_slices, adapters = p.g.schedule.max_loras + 1;
  const int all = LISTED ? p.g.schedule.num_experts * adapters * kSplits
                         : *blocks.num_post / blocks.rows * p.parts;
  const int units = all * slices * p.chunks;
  const auto number_of = [&](int unit) { return unit / p.chunks / slices; };
  const auto segment_of = [&](int unit) {
    return LISTED && unit < units ? *(const int4 *)&blocks.segments[number_of(unit) / kSplits]
                                  : make_int4(-1, 0, 0, 0);
  };
  int4 segment = segment_of(blockIdx.x);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int chunk = unit % p.chunks, slice = unit / p.chunks % slices, number = number_of(unit);
    const int4 next = segment_of(unit + gridDim.x); // early, to hide its latency
    if constexpr (LISTED)
      shrink_listed<T, VECTORS, TILES>(p, shared_address(shared), segment,
                                       number / kSplits / adapters, number % kSplits, slice, chunk);
    else
      shrink_part<T, VECTORS, TILES>(p, shared_address(shared), number / p.parts, number % p.parts,
                                     slice, chunk);
    segment = next;
  }
}

template <class T, bool VECTORS, int TILES>
moelora_status launch(BackShrinkParams p, const moelora_exec *exec) {
  const moelora_blocks &blocks = p.g.schedule.blocks;
  const moelora_schedule &schedule = p.g.schedule;
  p.parts = (blocks.rows + kTokens - 1) / kTokens;
  p.chunks = (p.g.adapters.lora.max_rank + 16 * TILES - 1) / (16 * TILES);
  const int64_t each = (int64_t)p.chunks * p.g.adapters.lora.num_slices;
  const int64_t pairs = (int64_t)schedule.num_experts * schedule.max_loras;
  // Segments that a unit holds on average are not cut by blocks, and their B is read once.
  if (blocks.segments && schedule.num_rows <= kTokens * pairs)
    return launch_kernel<back_shrink<T, VECTORS, TILES, true>>(
        "back_shrink", each * kSplits * schedule.num_experts * (schedule.max_loras + 1), kThreads,
        kSharedStages, exec, p);
  return launch_kernel<back_shrink<T, VECTORS, TILES, false>>(
      "back_shrink", each * blocks.max_blocks * p.parts, kThreads, kSharedStages, exec, p);
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

extern "C" moelora_status moelora_cuda_back_shrink(const moelora_gemm_launch *g,
                                                   const float *scalings, void *yb, bool vectors,
                                                   moelora_dtype dtype, const moelora_exec *exec) {
  const BackShrinkParams p = {*g, scalings, yb, 0, 0};
  return dtype == MOELORA_BF16 ? launch_any<__nv_bfloat16>(p, vectors, exec)
                               : launch_any<__half>(p, vectors, exec);
}
