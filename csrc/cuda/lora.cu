/* Shrink: hl[position, slice * hl_slice + r] = round( s[l] * sum_k a[l, e, r, k] x[k] )
 *
 * for rows of adapter l, r below its true rank; zero from there to the next multiple of 16.
 *
 * An item is one pass over the depth: up to RANKS rows of A, slice after slice, by up to 32 tokens
 * of one segment. The items of a block of rows are dealt to SHARES CTAs. A CTA copies ahead into a
 * ring of stages; a stage holds rows of 256 bytes, 128 of depth, 16-byte chunk c of row r at
 * c ^ (r & 7): first RANKS rows of A, then 32 token rows. Its four warps take two of the eight
 * 16-deep steps of a stage each and add up, in a fixed order, at the end. */
#include "kernel_launch.cuh"
#include "tile.cuh"

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTokens = 32;
constexpr int kStageDepth = 128, kStageRowBytes = 2 * kStageDepth;

struct Params {
  moelora_gemm_launch g;
  const float *scalings; // [max_loras] or NULL
  int32_t shares;
  void *hl;
};

/* Columns [first, first + RANKS) of the shrink results of tokens [low, high) of a block. */
struct Item {
  int block, expert, pair, low, high, first;
};

template <int RANKS_> struct Layout {
  static constexpr int RANKS = RANKS_, ROWS = RANKS + kTokens, STAGES = 4;
  static constexpr int RESIDENT = RANKS > 32 ? 2 : 3; // CTAs per SM
  static constexpr int STAGE_BYTES = ROWS * kStageRowBytes;
  static constexpr int PITCH = RANKS + 4; // floats between tokens of the partial sums
  static constexpr int SHARED = STAGES * STAGE_BYTES;
  static_assert(kWarps * kTokens * PITCH * 4 <= SHARED, "partial sums fit where the stages were");
};

template <class T, class L, bool VECTORS> struct Operands {
  static constexpr int STEP = kThreads / 16; // rows between two rows of one thread
  static constexpr int A_ROWS = L::RANKS / STEP, X_ROWS = kTokens / STEP;
  const T *a[A_ROWS], *x[X_ROWS]; // at depth 0; NULL: zeros

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Item &item) {
    const int thread = threadIdx.x, rank = item.pair % kRanks, width = moelora_padded_rank(rank);
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
      const int t = item.low + thread / 16 + i * STEP;
      const int64_t position = (int64_t)item.block * g.blocks.rows + t;
      x[i] = nullptr;
      if (t < item.high)
        x[i] = (const T *)g.x +
               (g.x_divisor ? g.blocks.sorted_ids[position] / g.x_divisor : position) * g.x_stride;
    }
#pragma unroll
    for (int i = 0; i < A_ROWS; i++) {
      const int column = item.first + thread / 16 + i * STEP;
      const int slice = column / width, r = column % width;
      a[i] = nullptr;
      if (slice < g.lora.num_slices && r < rank) {
        const moelora_factor &f = g.lora.a[slice];
        a[i] = (const T *)f.data + item.pair / kRanks * f.stride_l + item.expert * f.stride_e +
               r * f.stride_i;
      }
    }
  }

  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, int step,
                                       uint32_t stage) const {
    const int thread = threadIdx.x, chunk = thread & 15, row = thread / 16;
    const int column = step * kStageDepth + chunk * 8, left = g.k - column;
#pragma unroll
    for (int i = 0; i < A_ROWS + X_ROWS; i++) {
      const T *from = i < A_ROWS ? a[i] : x[i - A_ROWS];
      const int r = row + i * STEP;
      const uint32_t to = stage + r * kStageRowBytes + ((chunk ^ (r & 7)) << 4);
      const bool there = from && left > 0;
      if (VECTORS)
        copy_async_16(to, there ? from + column : (const T *)g.x, there ? 16 : 0);
      else
        copy_elements(to, from + column, there ? min(8, left) : 0);
    }
  }
};

template <class T, class L>
__device__ __forceinline__ void multiply(float (&d)[L::RANKS / 16][kTokens / 8][4], uint32_t stage,
                                         int tokens) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int k = warp; k < kStageDepth / 16; k += kWarps) {
    uint32_t a[L::RANKS / 16][4];
#pragma unroll
    for (int m = 0; m < L::RANKS / 16; m++) {
      const int row = m * 16 + (lane & 15);
      load_matrix_x4(a[m], stage + row * kStageRowBytes + ((2 * k + (lane >> 4) ^ row & 7) << 4));
    }
#pragma unroll
    for (int n = 0; n < kTokens / 8; n += 2) {
      if (n * 8 >= tokens)
        break;
      uint32_t b[4];
      const int row = L::RANKS + n * 8 + (lane >> 4) * 8 + (lane & 7);
      load_matrix_x4(b, stage + row * kStageRowBytes + ((2 * k + (lane >> 3 & 1) ^ row & 7) << 4));
#pragma unroll
      for (int m = 0; m < L::RANKS / 16; m++) {
        mma_16816<T>(d[m][n], a[m], b);
        mma_16816<T>(d[m][n + 1], a[m], b + 2);
      }
    }
  }
}

/* Adds up the warps' sums, scales and rounds. */
template <class T, class L>
__device__ __forceinline__ void store(const float (&d)[L::RANKS / 16][kTokens / 8][4],
                                      const Params &p, const Item &item, float *partial) {
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int rank = item.pair % kRanks, width = moelora_padded_rank(rank);
#pragma unroll
  for (int m = 0; m < L::RANKS / 16; m++)
#pragma unroll
    for (int n = 0; n < kTokens / 8; n++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int token = n * 8 + 2 * (lane & 3) + q % 2, row = m * 16 + lane / 4 + 8 * (q / 2);
        partial[(warp * kTokens + token) * L::PITCH + row] = d[m][n][q];
      }
  __syncthreads();
  const float scaling = p.scalings ? p.scalings[item.pair / kRanks] : 1.f;
  for (int i = thread; i < kTokens * L::RANKS / 8; i += kThreads) {
    const int token = i / (L::RANKS / 8), row = i % (L::RANKS / 8) * 8;
    const int slice = (item.first + row) / width, r = (item.first + row) % width;
    if (item.low + token >= item.high || slice >= p.g.lora.num_slices)
      continue;
    __align__(16) uint32_t rounded[4];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        sum[0] += partial[(w * kTokens + token) * L::PITCH + row + j];
        sum[1] += partial[(w * kTokens + token) * L::PITCH + row + j + 1];
      }
      rounded[j / 2] = pack2<T>(r + j < rank ? scaling * sum[0] : 0.f,
                                r + j + 1 < rank ? scaling * sum[1] : 0.f);
    }
    const int64_t position = (int64_t)item.block * p.g.blocks.rows + item.low + token;
    *(uint4 *)((T *)p.hl + position * p.g.hl_stride + slice * p.g.hl_slice + r) =
        *(const uint4 *)rounded;
  }
  __syncthreads(); // the next item writes where this one was read
}

template <class T, class L, bool VECTORS>
__device__ __forceinline__ void run_item(const Params &p, const Item &item, char *shared) {
  const uint32_t base = shared_address(shared);
  const int steps = (p.g.k + kStageDepth - 1) / kStageDepth;
  Operands<T, L, VECTORS> operands;
  operands.open(p.g, item);
  auto copy_ahead = [&](int step) {
    if (step < steps)
      operands.copy(p.g, step, base + step % L::STAGES * L::STAGE_BYTES);
    copy_async_commit();
  };
  float d[L::RANKS / 16][kTokens / 8][4] = {};
  for (int step = 0; step < L::STAGES - 1; step++)
    copy_ahead(step);
  for (int step = 0; step < steps; step++) {
    copy_async_wait<L::STAGES - 2>();
    __syncthreads();
    copy_ahead(step + L::STAGES - 1);
    multiply<T, L>(d, base + step % L::STAGES * L::STAGE_BYTES, item.high - item.low);
  }
  __syncthreads();
  store<T, L>(d, p, item, (float *)shared);
}

template <class T, class L, bool VECTORS>
__global__ void __launch_bounds__(kThreads, L::RESIDENT) shrink(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  const moelora_gemm_launch &g = p.g;
  // A thread looks after eight rows of a block at most.
  constexpr int LANES = 8;
  wait_for_previous_kernel();
  start_next_kernel();
  const int blocks = *g.blocks.num_post / g.blocks.rows;
  for (int unit = blockIdx.x; unit < blocks * p.shares; unit += gridDim.x) {
    Item item;
    item.block = unit / p.shares;
    item.expert = g.blocks.expert_ids[item.block];
    const int count = g.blocks.counts[item.block];
    Segments<LANES> segments;
    segments.load(g, (int64_t)item.block * g.blocks.rows, count);
    int index = 0;
    for (int low = 0, high; low < count; low = high) {
      high = segments.next(low + 1, count);
      item.pair = segments.at(low);
      if (item.pair < 0)
        continue;
      const int columns = moelora_padded_rank(item.pair % kRanks) * g.lora.num_slices;
      for (item.low = low; item.low < high; item.low += kTokens) {
        item.high = min(high, item.low + kTokens);
        for (item.first = 0; item.first < columns; item.first += L::RANKS)
          if (index++ % p.shares == unit % p.shares)
            run_item<T, L, VECTORS>(p, item, shared);
      }
    }
  }
}

template <class T, int RANKS, bool VECTORS>
moelora_status launch(const Params &p, const moelora_exec *exec) {
  using L = Layout<RANKS>;
  return launch_kernel<shrink<T, L, VECTORS>>("shrink", p.g.blocks.max_blocks * p.shares, kThreads,
                                              L::SHARED, exec, p);
}

template <class T>
moelora_status launch_as(const Params &p, bool vectors, const moelora_exec *exec) {
  if (!vectors)
    return launch<T, 32, false>(p, exec);
  return p.g.hl_stride <= 32 ? launch<T, 32, true>(p, exec) : launch<T, 64, true>(p, exec);
}

} // namespace

moelora_status moelora_cuda_shrink(const moelora_gemm_launch *g, const float *lora_scalings,
                                   bool vectors, moelora_dtype dtype, void *hl,
                                   const moelora_exec *exec) {
  // Small blocks hold few segments; an idle share still looks for its work.
  const int32_t shares = g->blocks.rows <= 32 ? 4 : 8;
  const Params p = {*g, lora_scalings, shares, hl};
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(p, vectors, exec)
                               : launch_as<__half>(p, vectors, exec);
}
