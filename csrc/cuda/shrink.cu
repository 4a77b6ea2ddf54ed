/* Shrink: hl[position, slice * hl_slice + r] = round( s[l] * sum_k a[l, e, r, k] x[k] )
 *
 * for rows of adapter l, r below its true rank; zero from there to the next multiple of 16.
 *
 * A part is up to `part` tokens of one segment of a block, an item a part and up to RANKS rows of
 * A, slice after slice. The items of a block are dealt to `shares` units, and the units to CTAs;
 * the warps of a CTA first look for the items of a unit each.
 *
 * Nothing is staged: a warp loads what it multiplies, 16 bytes for every lane, rows of A as the M
 * side and tokens as the N side of m16n8k16. Lane t has row t/4 of eight, and of a step of 32 of
 * depth the elements 8 (t%4) to 8 (t%4) + 7: the first four are what the instruction calls columns
 * 2 (t%4), 2 (t%4) + 1, 2 (t%4) + 8 and 2 (t%4) + 9, the others those of a second one. The order
 * within the depth is the same on both sides, so that the sum is over the same products. Rows of A
 * or tokens that are not there repeat the last ones: their sums reach no other row, and nobody
 * stores them.
 *
 * TEAMS teams of warps have RANKS / TEAMS rows of A each; the DEPTHS warps of a team share the
 * depth, each a run of whole lines of 64, and what they found is added up in that order. DEPTHS
 * depends on sizes alone, so that neither other tokens nor other adapters change a bit. */
#include "kernel_launch.cuh"
#include "tile.cuh"
#include "warp.cuh"

namespace {

constexpr int kStep = 32, kLine = 64; // of depth
constexpr int kResidentWarps = 16;    // of an SM, which leaves 128 registers to a thread:
constexpr int kRegisters = 108;       // so many for sums, pointers and loads
constexpr int kLongDepth = 4096;      // from here on, and where CTAs are idle, eight warps share it
constexpr int kThinSegment = 4;       // tokens; below, what A takes is all that counts
constexpr int kShares = 8;            // of a block, for every RANKS ranks
constexpr int kLanes = 8;             // tokens of a block that a lane looks after
constexpr int kItems = 32 * kLanes / kShares; // of a unit at most

struct Params {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  int32_t part, shares;
  bool few; // one look of all CTAs finds everything
  void *hl;
};

/* Columns [first, first + RANKS) of the shrink results of tokens [low, high) of a block. */
struct Item {
  int block, expert, pair, low, high, first;
};

template <int TILES_, int TEAMS_, int DEPTHS_, int TOKENS_> struct Shape {
  static constexpr int TILES = TILES_; // 16 rows of A each, of a warp
  static constexpr int TEAMS = TEAMS_, DEPTHS = DEPTHS_, TOKENS = TOKENS_;
  static constexpr int WARPS = TEAMS * DEPTHS, THREADS = 32 * WARPS;
  static constexpr int RANKS = 16 * TILES * TEAMS;
  static constexpr int PITCH = RANKS + 4; // no bank conflicts between the lanes of a store
};

template <class S> struct Shared {
  float sums[S::DEPTHS][S::TOKENS][S::PITCH];
  Item items[S::WARPS][kItems];
  int found[S::WARPS];
};

__device__ __forceinline__ int ceil_divide(int a, int b) {
  return (a + b - 1) / b;
}

/* Writes the items of a unit and returns how many there are; a warp. */
template <class S>
__device__ __forceinline__ int find(const Params &p, int blocks, int unit, Item *items) {
  const moelora_gemm_launch &g = p.g;
  const int lane = threadIdx.x % 32, rows = g.blocks.rows;
  const int block = unit % blocks, share = unit / blocks;
  if (share >= p.shares)
    return 0;
  const int64_t position = (int64_t)block * rows;
  if (g.x_divisor && lane * 8 < rows)
    prefetch(g.blocks.sorted_ids + position + lane * 8);
  const int expert = g.blocks.expert_ids[block];
  Segments<kLanes> segments;
  segments.load(g, position, rows);
  int count = 0; // of the block, so far
#pragma unroll 1
  for (int i = 0; i * 32 < rows; i++) {
    const int low = i * 32 + lane;
    int pair = -1, high = low, parts = 0, chunks = 0;
#pragma unroll
    for (int j = 0; j < kLanes; j++)
      if (j == i && segments.starts[j] >> lane & 1)
        pair = segments.pair[j];
    if (pair >= 0) {
      high = segments.next(low + 1, rows);
      parts = ceil_divide(high - low, p.part);
      chunks = ceil_divide(moelora_padded_rank(pair % kRanks) * g.lora.num_slices, S::RANKS);
      if (p.scalings)
        prefetch(p.scalings + pair / kRanks);
    }
    const int end = warp_inclusive_sum(parts * chunks);
    const int first = count + end - parts * chunks;
    const int tokens = parts ? ceil_divide(ceil_divide(high - low, parts), 8) * 8 : 0;
    for (int j = (share + p.shares - first % p.shares) % p.shares; j < parts * chunks;
         j += p.shares) {
      const int from = low + j / chunks * tokens;
      items[(first + j) / p.shares] =
          Item{block, expert, pair, from, min(from + tokens, high), j % chunks * S::RANKS};
    }
    count += __shfl_sync(0xffffffffu, end, 31);
  }
  return (count - share + p.shares - 1) / p.shares;
}

/* 16 bytes of a row, of which `left` elements are left; zeros behind them. */
template <class T, bool VECTORS, bool ONCE>
__device__ __forceinline__ uint4 load_row(const T *from, int left) {
  if constexpr (VECTORS)
    return load_16<ONCE ? Read::ALONE : Read::SHARED>(from, left > 0);
  else
    return load_elements(from, left);
}

/* What a lane loads: rows of A, and of 8 N tokens. */
template <class T, class S, int N> struct Rows {
  static constexpr int M = S::TILES;
  const T *a[2 * M], *x[N];
  int left; // of each, for this warp

  /* Ranks from `column` on, depth from `k` on. */
  __device__ __forceinline__ void find_a(const moelora_gemm_launch &g, const Item &item, int column,
                                         int columns, int k) {
    const int lane = threadIdx.x % 32, rank = item.pair % kRanks;
    const int width = moelora_padded_rank(rank);
#pragma unroll
    for (int m = 0; m < M; m++) {
      const int tile = min(column + m * 16, columns - 16), slice = tile / width;
      const moelora_factor &f = g.lora.a[slice];
      const T *factor =
          (const T *)f.data + item.pair / kRanks * f.stride_l + item.expert * f.stride_e + k;
#pragma unroll
      for (int half = 0; half < 2; half++)
        a[2 * m + half] =
            factor + min(tile - slice * width + half * 8 + lane / 4, rank - 1) * f.stride_i;
    }
  }

  __device__ __forceinline__ void find_x(const moelora_gemm_launch &g, const Item &item, int k) {
    uint32_t row[N];
#pragma unroll
    for (int n = 0; n < N; n++)
      row[n] = item.block * g.blocks.rows +
               min(item.low + n * 8 + (int)threadIdx.x % 32 / 4, item.high - 1);
    if (g.x_divisor) {
#pragma unroll
      for (int n = 0; n < N; n++)
        row[n] = g.blocks.sorted_ids[row[n]];
#pragma unroll
      for (int n = 0; n < N; n++)
        row[n] /= (uint32_t)g.x_divisor;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
      x[n] = (const T *)g.x + row[n] * g.x_stride + k;
  }

  template <bool VECTORS>
  __device__ __forceinline__ void load_a(uint4 (&to)[2 * M], int step) const {
#pragma unroll
    for (int m = 0; m < 2 * M; m++)
      to[m] = load_row<T, VECTORS, true>(a[m] + step * kStep, left - step * kStep);
  }

  template <bool VECTORS> __device__ __forceinline__ void load_x(uint4 (&to)[N], int step) const {
#pragma unroll
    for (int n = 0; n < N; n++)
      to[n] = load_row<T, VECTORS, S::TEAMS == 1>(x[n] + step * kStep, left - step * kStep);
  }

  __device__ __forceinline__ void advance(int steps) {
    left -= steps * kStep;
#pragma unroll
    for (int m = 0; m < 2 * M; m++)
      a[m] += steps * kStep;
#pragma unroll
    for (int n = 0; n < N; n++)
      x[n] += steps * kStep;
  }
};

/* The sums of a warp for up to 8 N tokens. All threads come here. */
template <class T, class S, bool VECTORS, int N>
__device__ __forceinline__ void multiply(const moelora_gemm_launch &g, const Item &item,
                                         Shared<S> &shared) {
  constexpr int M = S::TILES;
  constexpr int LOADS = 2 * M + N;
  constexpr int FIT = (kRegisters - 4 * M * N - 2 * LOADS) / (4 * LOADS);
  constexpr int STEPS = VECTORS && FIT > 1 ? FIT : 1; // on their way
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int depth = warp % S::DEPTHS, team = warp / S::DEPTHS * 16 * M;
  const int columns = moelora_padded_rank(item.pair % kRanks) * g.lora.num_slices;
  float d[M][N][4] = {};
  const int share = ceil_divide(ceil_divide(g.k, kLine), S::DEPTHS) * kLine;
  const int begin = depth * share, end = min(begin + share, g.k);
  if (item.first + team < columns && begin < end) {
    const int k = begin + lane % 4 * 8;
    Rows<T, S, N> rows;
    uint4 a[STEPS][2 * M], x[STEPS][N];
    rows.left = end - k;
    rows.find_a(g, item, item.first + team, columns, k);
#pragma unroll
    for (int slot = 0; slot < STEPS; slot++)
      rows.template load_a<VECTORS>(a[slot], slot);
    rows.find_x(g, item, k);
#pragma unroll
    for (int slot = 0; slot < STEPS; slot++)
      rows.template load_x<VECTORS>(x[slot], slot);
#pragma unroll 1
    for (int steps = ceil_divide(end - begin, kStep); steps > 0; steps -= STEPS) {
      rows.advance(STEPS);
#pragma unroll
      for (int slot = 0; slot < STEPS; slot++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
          const uint4 low = a[slot][2 * m], high = a[slot][2 * m + 1];
          const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
          const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int n = 0; n < N; n++) {
            const uint32_t b0[2] = {x[slot][n].x, x[slot][n].y};
            const uint32_t b1[2] = {x[slot][n].z, x[slot][n].w};
            mma_16816<T>(d[m][n], a0, b0);
            mma_16816<T>(d[m][n], a1, b1);
          }
        }
        rows.template load_a<VECTORS>(a[slot], slot);
        rows.template load_x<VECTORS>(x[slot], slot);
      }
    }
  }
  __syncthreads(); // the item before has been read
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        shared.sums[depth][n * 8 + 2 * (lane % 4) + q % 2][team + m * 16 + lane / 4 + q / 2 * 8] =
            d[m][n][q];
  __syncthreads();
}

/* Adds up the sums of a team's warps, scales and rounds. */
template <class T, class S>
__device__ __forceinline__ void store(const Params &p, const Item &item, const Shared<S> &shared) {
  const int rank = item.pair % kRanks, width = moelora_padded_rank(rank);
  const float scaling = p.scalings ? p.scalings[item.pair / kRanks] : 1.f;
  constexpr int EIGHTS = S::RANKS / 8;
  for (int i = threadIdx.x; i < (item.high - item.low) * EIGHTS; i += S::THREADS) {
    const int token = i / EIGHTS, column = i % EIGHTS * 8;
    const int slice = (item.first + column) / width, r = (item.first + column) % width;
    if (slice >= p.g.lora.num_slices)
      continue;
    float sum[8] = {};
#pragma unroll
    for (int depth = 0; depth < S::DEPTHS; depth++)
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const float4 v = *(const float4 *)&shared.sums[depth][token][column + j];
        sum[j] += v.x, sum[j + 1] += v.y, sum[j + 2] += v.z, sum[j + 3] += v.w;
      }
    uint32_t rounded[4];
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      rounded[j / 2] = pack2<T>(r + j < rank ? scaling * sum[j] : 0.f,
                                r + j + 1 < rank ? scaling * sum[j + 1] : 0.f);
    const int64_t position = (int64_t)item.block * p.g.blocks.rows + item.low + token;
    *(uint4 *)((T *)p.hl + position * p.g.hl_stride + slice * p.g.hl_slice + r) =
        make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
  }
}

template <class T, class S, bool VECTORS>
__device__ __forceinline__ void run_item(const Params &p, const Item &item, Shared<S> &shared) {
  switch (ceil_divide(item.high - item.low, 8)) {
#define MOELORA_TOKENS(N)                                                                          \
  case N:                                                                                          \
    if constexpr (8 * N <= S::TOKENS)                                                              \
      multiply<T, S, VECTORS, N>(p.g, item, shared);                                               \
    break
    MOELORA_TOKENS(1);
    MOELORA_TOKENS(2);
    MOELORA_TOKENS(3);
    MOELORA_TOKENS(4);
    MOELORA_TOKENS(5);
    MOELORA_TOKENS(6);
#undef MOELORA_TOKENS
  }
  store<T, S>(p, item, shared);
}

template <class T, class S, bool VECTORS>
__global__ void __launch_bounds__(S::THREADS, kResidentWarps / S::WARPS)
    shrink(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  Shared<S> &shared = *(Shared<S> *)memory;
  const int warp = threadIdx.x / 32, ctas = gridDim.x;
  wait_for_previous_kernel();
  start_next_kernel();
  // Blocks that are not in use hold nothing to find.
  const int blocks = p.few ? (int)p.g.blocks.max_blocks : *p.g.blocks.num_post / p.g.blocks.rows;
  for (int unit = blockIdx.x; unit < blocks * p.shares; unit += ctas * S::WARPS) {
    shared.found[warp] = find<S>(p, blocks, unit + warp * ctas, shared.items[warp]);
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < S::WARPS; w++)
#pragma unroll 1
      for (int i = 0; i < shared.found[w]; i++)
        run_item<T, S, VECTORS>(p, shared.items[w][i], shared);
    __syncthreads();
  }
}

template <class T, class S, bool VECTORS>
moelora_status launch(Params p, int tokens, bool few, const moelora_exec *exec) {
  p.part = tokens < S::TOKENS ? tokens : S::TOKENS;
  p.shares = kShares * (int32_t)((p.g.hl_stride + S::RANKS - 1) / S::RANKS);
  p.few = few;
  return launch_kernel<shrink<T, S, VECTORS>>("shrink", p.g.blocks.max_blocks * p.shares,
                                              S::THREADS, sizeof(Shared<S>), exec, p);
}

/* Items large enough to read little twice, and enough of them for all CTAs. WIDE_TOKENS: what
 * 99 KiB of shared memory hold. */
template <class T, int DEPTHS, int WIDE_TOKENS>
moelora_status launch_vectors(const Params &p, const moelora_exec *exec) {
  using Narrow = Shape<1, 1, DEPTHS, 48>;
  using Middle = Shape<2, 1, DEPTHS, 48>;
  using Wide = Shape<2, 2, DEPTHS, WIDE_TOKENS>;
  const int64_t ctas = moelora_cuda_num_sms(exec->device_index) * (kResidentWarps / DEPTHS);
  const int64_t rows = p.g.num_rows, pairs = (int64_t)p.g.num_experts * p.g.max_loras;
  const int64_t segments = rows < pairs ? rows : pairs;
  const int tokens = segments + rows / 48 < ctas ? 32 : 48;
  if (p.g.hl_stride <= 16 || segments + rows / 32 < ctas ||
      (p.g.hl_stride <= 32 && rows < kThinSegment * segments))
    return launch<T, Narrow, true>(p, tokens, rows * p.g.hl_stride / 16 <= ctas, exec);
  if (p.g.hl_stride <= 32)
    return launch<T, Middle, true>(p, tokens, false, exec);
  return launch<T, Wide, true>(p, tokens, false, exec);
}

template <class T>
moelora_status launch_as(const Params &p, bool vectors, const moelora_exec *exec) {
  if (!vectors)
    return launch<T, Shape<1, 1, 4, 32>, false>(p, 32, false, exec);
  const int64_t items = (int64_t)p.g.num_rows * p.g.hl_stride / 16;
  const bool idle = items < 2 * moelora_cuda_num_sms(exec->device_index);
  return p.g.k < kLongDepth && !idle ? launch_vectors<T, 4, 48>(p, exec)
                                     : launch_vectors<T, 8, 32>(p, exec);
}

} // namespace

moelora_status moelora_cuda_shrink(const moelora_gemm_launch *g, const float *lora_scalings,
                                   bool vectors, moelora_dtype dtype, void *hl,
                                   const moelora_exec *exec) {
  const Params p = {.g = *g, .scalings = lora_scalings, .hl = hl};
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(p, vectors, exec)
                               : launch_as<__half>(p, vectors, exec);
}
