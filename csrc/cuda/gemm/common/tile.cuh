/* What the grouped GEMM kernels share: the order of the tile scheduler, segments of adapters, and
 * the epilogue: what happens to an accumulator between the last product and memory.
 *
 * All kernels multiply with operands swapped: weight rows are the M side of an instruction, tokens
 * its N side. A CTA's tile is TOKENS tokens (one block) by TILES m64 tiles of 64 weight rows. Two
 * of these are a row group: of a gated projection the even one holds gate rows, the odd one the up
 * rows of the same 64 outputs. A row group belongs to four warps; warp w of them owns rows 16w to
 * 16w + 15 of both, as accumulators d[2][N / 2]: d[g][4i + q] is row lane/4 + 8 (q / 2) of m64 tile
 * g, token 8i + 2 (lane % 4) + q % 2.
 *
 * In shared memory a stage holds rows of 128 bytes (64 elements of depth), 16-byte chunk c of row r
 * at c ^ (r & 7):
 *
 *   W  [TILES][64]   weight rows, or rows of a LoRA factor B
 *   X  [TOKENS]      token rows, or rows of the shrink result xa */
#ifndef MOELORA_CUDA_TILE_CUH
#define MOELORA_CUDA_TILE_CUH

#include "cuda/adapters/factors.cuh"
#include "cuda/launch/launch.h"
#include "cuda/ptx/mma.cuh"

constexpr int kDepth = 64;
constexpr int kRowBytes = 128;
constexpr int kM64Bytes = 64 * kRowBytes;

/* Extents of a CTA's tile. */
template <int TOKENS_, int TILES_> struct Extent {
  static constexpr int TOKENS = TOKENS_, TILES = TILES_;
  static constexpr int ROWS = 64 * TILES;
  static constexpr int LANES = (TOKENS + 31) / 32; // tokens that one lane of a warp looks after
  static constexpr int W_BYTES = TILES * kM64Bytes, X_BYTES = TOKENS * kRowBytes;
  static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
};

struct Tile {
  int32_t block, column, expert;
};

/* The tile scheduler's tile `index`, over clusters of CLUSTER blocks; `block` is the cluster's
 * first. */
template <class E, int CLUSTER = 1>
__device__ __forceinline__ Tile tile_at(const moelora_gemm_launch &g, int index, int columns,
                                        int clusters) {
  // Eight blocks by all columns: CTAs that run together share weights (blocks of one expert) and
  // token rows (columns of one block) in L2.
  constexpr int GROUP = 8 / CLUSTER;
  const int first = index / (GROUP * columns) * GROUP;
  const int height = min(GROUP, clusters - first);
  const int rest = index % (GROUP * columns);
  const bool full = height == GROUP; // the usual case, without division
  Tile t;
  t.column = full ? rest / GROUP : rest / height;
  t.block = (first + (full ? rest % GROUP : rest % height)) * CLUSTER;
  t.expert = g.blocks.expert_ids[t.block];
  return t;
}

/* Blocks of the expert of block `from` that follow each other from there on, forwards (STEP 1) or
 * backwards (STEP -1), counting itself. A warp. */
template <int STEP>
__device__ __forceinline__ int blocks_alike(const moelora_gemm_launch &g, int from, int blocks) {
  const int lane = threadIdx.x & 31;
  const int32_t expert = g.blocks.expert_ids[from];
  for (int n = 0;; n += 32) {
    const int at = from + STEP * (n + lane);
    const bool alike = at >= 0 && at < blocks && g.blocks.expert_ids[at] == expert;
    const uint32_t others = ~__ballot_sync(0xffffffffu, alike);
    if (others)
      return n + __ffs(others) - 1;
  }
}

/* The tile scheduler's tile `index`, over all columns of a few blocks of one expert, then of the
 * next ones: CTAs that run together share weights (blocks) and token rows (columns) in L2. It takes
 * a warp, and time that only large tiles have. */
template <class E>
__device__ __forceinline__ Tile tile_of_expert(const moelora_gemm_launch &g, int index, int columns,
                                               int blocks) {
  // Each column reads the tokens of these blocks again: a quarter of the L2 keeps them while
  // weights stream by. Weights are read once for each such group of blocks.
  const int most = max(1, g.near_elements / (E::TOKENS * g.k));
  const int block = index / columns; // one of the tile's group, for all have as many columns
  const int before = blocks_alike<-1>(g, block, blocks) - 1;
  const int count = before + blocks_alike<1>(g, block, blocks);
  const int groups = (count + most - 1) / most;
  const int share = (count + groups - 1) / groups; // blocks of each group but the last
  const int skipped = before / share * share, first = block - before + skipped;
  const int height = min(share, count - skipped), rest = index - first * columns;
  return {first + rest % height, rest / height, g.blocks.expert_ids[block]};
}

/* Columns of tiles that cover the outputs. */
template <class E> __host__ __device__ inline int tile_columns(const moelora_gemm_launch &g) {
  const int outputs = g.gated ? E::ROWS / 2 : E::ROWS;
  return (g.n_out + outputs - 1) / outputs;
}

/* Output that row 0 of an m64 tile stands for; its row r stands for output first + r. */
template <class E>
__device__ __forceinline__ int first_output(const moelora_gemm_launch &g, int column, int m64) {
  return g.gated ? column * (E::ROWS / 2) + m64 / 2 * 64 : column * E::ROWS + m64 * 64;
}

/* Row of w (and of its bias and factors) that makes an output in an m64 tile. */
__device__ __forceinline__ int64_t weight_row(const moelora_gemm_launch &g, int m64, int output) {
  if (!g.gated)
    return output;
  const int half = m64 & 1;
  return g.interleaved ? 2 * (int64_t)output + half : (int64_t)half * g.n_out + output;
}

/* Flat row of a block's token t; num_rows in padding. */
template <class E>
__device__ __forceinline__ int32_t block_row(const moelora_gemm_launch &g, int block, int t) {
  return t < E::TOKENS ? g.blocks.sorted_ids[(int64_t)block * E::TOKENS + t] : g.num_rows;
}

/* Row of x that belongs to a block's token t, from its flat row; -1 in padding. */
template <class E>
__device__ __forceinline__ int32_t x_row(const moelora_gemm_launch &g, int block, int t, int row) {
  if (row >= g.num_rows)
    return -1;
  return g.x_divisor.value ? divide(row, g.x_divisor) : block * E::TOKENS + t;
}

/* Positions become rows of x. All loads are on their way before one is used. */
template <int N>
__device__ __forceinline__ void find_x_rows(const moelora_gemm_launch &g, uint32_t (&at)[N]) {
  if (!g.x_divisor.value)
    return;
#pragma unroll
  for (int n = 0; n < N; n++)
    at[n] = g.blocks.sorted_ids[at[n]];
#pragma unroll
  for (int n = 0; n < N; n++)
    at[n] = divide(at[n], g.x_divisor);
}

template <class E>
__device__ __forceinline__ float routed_weight(const moelora_gemm_launch &g, int block, int t) {
  return g.weighted && t < E::TOKENS ? g.blocks.weights[(int64_t)block * E::TOKENS + t] : 0.f;
}

/* Where the outputs of a row begin, from its position and its flat row. */
__device__ __forceinline__ int64_t output_offset(const moelora_gemm_launch &g, int position,
                                                 int row) {
  if (g.out_by_position)
    return position * g.out_stride[0];
  return row / g.top_k * g.out_stride[0] + row % g.top_k * g.out_stride[1];
}

/* Segments: neighbouring tokens of a block with one adapter. Lane t of a warp knows tokens t, t +
 * 32, ...; every warp finds them by itself, and all find the same. */
template <int LANES> struct Segments {
  int32_t packed[LANES]; // adapter * kRanks + true rank; -1 for a base row
  uint32_t starts[LANES];

  __device__ __forceinline__ void load(const moelora_gemm_launch &g, int64_t position, int tokens) {
    read(g, position, tokens);
    find(g.lora.max_rank);
  }

  /* Packed ranks alone, for find. */
  __device__ __forceinline__ void read(const moelora_gemm_launch &g, int64_t position, int tokens) {
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      const int t = i * 32 + (threadIdx.x & 31);
      packed[i] = t < tokens ? g.blocks.packed_ranks[position + t] : -1;
    }
  }

  /* From packed ranks that are there already. */
  __device__ __forceinline__ const Segments &of(const int32_t (&packed_ranks)[LANES],
                                                int max_rank) {
#pragma unroll
    for (int i = 0; i < LANES; i++)
      packed[i] = packed_ranks[i];
    find(max_rank);
    return *this;
  }

  __device__ __forceinline__ void find(int max_rank) {
#pragma unroll
    for (int i = 0; i < LANES; i++)
      if (packed[i] >= 0 && packed[i] % kRanks > max_rank)
        packed[i] += max_rank - packed[i] % kRanks;
    int before = -2;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      int previous = __shfl_up_sync(0xffffffffu, packed[i], 1);
      if ((threadIdx.x & 31) == 0)
        previous = before;
      starts[i] = __ballot_sync(0xffffffffu, packed[i] != previous);
      before = __shfl_sync(0xffffffffu, packed[i], 31);
    }
  }

  /* First start at or after token t; `tokens` if none. */
  __device__ __forceinline__ int next(int t, int tokens) const {
    int found = tokens;
#pragma unroll
    for (int i = LANES - 1; i >= 0; i--) {
      uint32_t mask = starts[i];
      if (t > i * 32)
        mask = t - i * 32 < 32 ? mask & (0xffffffffu << (t - i * 32)) : 0;
      if (mask)
        found = i * 32 + __ffs(mask) - 1;
    }
    return min(found, tokens);
  }
};

template <class E>
__device__ __forceinline__ bool m64_overlaps_slice(const moelora_gemm_launch &g, int column,
                                                   int m64, int slice) {
  const int output = first_output<E>(g, column, m64);
  if (output >= g.n_out)
    return false;
  const int64_t begin = weight_row(g, m64, output);
  const int64_t end = weight_row(g, m64, min(output + 63, g.n_out - 1));
  return end >= slice * g.lora.slice_n && begin < (slice + 1) * g.lora.slice_n;
}

/* Ranks that a step of the tensor cores takes: adapter work comes in k16 slabs. */
constexpr int kSlabDepth = 16;

/* Gate and up have a slice each: a slab covers both, m64 tiles of gate rows take slice 0, those of
 * up rows slice 1. */
__host__ __device__ __forceinline__ bool has_gate_up_slices(const moelora_gemm_launch &g) {
  return g.gated && !g.interleaved && g.lora.num_slices == 2;
}

/* All gated activations are g' sigmoid(g' (a + b g'^2)) (u' + c) of clamped g' and u': silu has
 * a = 1; gelu in its tanh form is the identity 1 + tanh(t) = 2 sigmoid(2t); swigluoai has a =
 * alpha, c = 1. NaN stays NaN. Here a and b have a factor of -log2(e). */
struct Activation {
  static constexpr float LOG2E = 1.4426950408889634f;
  float a, b = 0.f, c = 0.f, limit;

  __device__ __forceinline__ explicit Activation(const moelora_activation_problem &p)
      : a(-LOG2E * p.alpha), limit(p.limit) {
    if (p.kind == MOELORA_GELU)
      a = -LOG2E * 1.5957691216057308f, b = -LOG2E * 0.07135481627159729f;
    if (p.kind == MOELORA_SWIGLUOAI || p.kind == MOELORA_SWIGLUOAI_UNINTERLEAVE)
      c = 1.f;
  }

  /* One asm statement: given its parts, the compiler starts them for all outputs of a thread at
   * once and runs out of registers. */
  __device__ __forceinline__ float operator()(float gate, float up) const {
    float y;
    asm volatile("{\n"
                 ".reg .f32 g, u, t;\n"
                 "min.NaN.f32 g, %1, %5;\n"
                 "min.NaN.f32 u, %2, %5;\n"
                 "max.NaN.f32 u, u, %6;\n"
                 "add.f32 u, u, %7;\n"
                 "mul.f32 t, g, g;\n"
                 "fma.rn.f32 t, t, %4, %3;\n"
                 "mul.f32 t, t, g;\n"
                 "ex2.approx.ftz.f32 t, t;\n"
                 "add.f32 t, t, 0f3F800000;\n"
                 "rcp.approx.ftz.f32 t, t;\n"
                 "mul.f32 u, u, g;\n"
                 "mul.f32 %0, u, t;\n"
                 "}"
                 : "=f"(y)
                 : "f"(gate), "f"(up), "f"(a), "f"(b), "f"(limit), "f"(-limit), "f"(c));
    return y;
  }

  /* The same with the constants of silu without a limit. */
  static __device__ __forceinline__ float silu(float gate, float up) {
    float y;
    asm volatile("{\n"
                 ".reg .f32 u, t;\n"
                 "mul.f32 t, %1, 0fBFB8AA3B;\n" // -log2(e)
                 "ex2.approx.ftz.f32 t, t;\n"
                 "add.f32 t, t, 0f3F800000;\n"
                 "rcp.approx.ftz.f32 t, t;\n"
                 "mul.f32 u, %2, %1;\n"
                 "mul.f32 %0, u, t;\n"
                 "}"
                 : "=f"(y)
                 : "f"(gate), "f"(up));
    return y;
  }
};

/* The epilogue mode: what an epilogue does. An epilogue is straight code for every output of a
 * thread: what it asks at run time it asks for each of them, and more than a few thousand
 * instructions no longer stay in the instruction cache from tile to tile. */
enum class EpilogueMode {
  GENERAL,   // anything
  GATED,     // bias, gated activation
  SILU,      // the most frequent one of them, without a limit
  PLAIN,     // bias, relu^2 or nothing
  PLAIN_F32, // the same, left in float32
};

/* What an epilogue adds: bias[2 half + m8] of this thread's four rows. */
template <class E, EpilogueMode MODE> struct Epilogue {
  float bias[4];
  Activation activation;

  template <class T>
  __device__ __forceinline__ Epilogue(const moelora_gemm_launch &g, const Tile &tile, int row_group,
                                      T)
      : activation(g.activation) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int m64 = 2 * row_group + j / 2;
      const int output = first_output<E>(g, tile.column, m64) + warp * 16 + lane / 4 + 8 * (j % 2);
      bias[j] = 0.f;
      if (g.w.bias && output < g.n_out)
        bias[j] = Element<T>::to_float(
            ((const T *)g.w.bias)[tile.expert * g.w.bias_stride_e + weight_row(g, m64, output)]);
    }
  }

  /* What comes before `finish`, of all tokens at once: one branch skips what most layers do not
   * have, where one for each output would cost as much as the rest of a plain epilogue. */
  template <int N>
  __device__ __forceinline__ void begin(float (&d)[2][N / 2], const moelora_gemm_launch &g) const {
    if (g.w.bias) {
#pragma unroll
      for (int i = 0; i < N; i++)
        d[i % 2][i / 2] += bias[i % 2 * 2 + i / 2 % 4 / 2];
    }
    if (MODE != EpilogueMode::GATED && MODE != EpilogueMode::SILU &&
        g.activation.kind == MOELORA_RELU2) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        float &v = d[i % 2][i / 2];
        v = v < 0.f ? 0.f : v * v;
      }
    }
  }

  /* Up to 32 tokens of `block` from `first` on, in place; afterwards d[0] holds a gated
   * projection's outputs. */
  template <int N>
  __device__ __forceinline__ void finish(float (&d)[2][N / 2], const moelora_gemm_launch &g,
                                         int block, int first) const {
    const int lane = threadIdx.x & 31;
    const float here =
        MODE == EpilogueMode::GENERAL ? routed_weight<E>(g, block, first + lane) : 1.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (first + 8 * i >= N)
        break;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int at = (first / 8 + i) * 4 + q;
        float v[2] = {d[0][at], d[1][at]};
        if (MODE == EpilogueMode::SILU)
          v[0] = Activation::silu(v[0], v[1]);
        else if (MODE == EpilogueMode::GATED || (MODE == EpilogueMode::GENERAL && g.gated))
          v[0] = activation(v[0], v[1]);
        if (MODE == EpilogueMode::GENERAL && g.weighted) {
          const float weight = __shfl_sync(0xffffffffu, here, i * 8 + (lane & 3) * 2 + q % 2);
          v[0] *= weight, v[1] *= weight;
        }
        d[0][at] = v[0], d[1][at] = v[1];
      }
    }
  }
};

/* One m64 tile's results for up to 32 tokens from `from` on in float32: eight lanes hold eight
 * neighbouring outputs of a token, a whole sector. Lane t holds the flat row of token from + t,
 * which counts only where results do not lie by position. */
template <class E, int N>
__device__ __forceinline__ void store_f32(const float (&d)[N / 2], const moelora_gemm_launch &g,
                                          int first, int from, int block, int count, int32_t rows) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (from + 8 * i >= N)
      break;
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const int output = first + warp * 16 + lane / 4 + 8 * (q / 2);
      const int t = i * 8 + (lane & 3) * 2 + q % 2;
      const int row = __shfl_sync(0xffffffffu, rows, t);
      if (from + t < count && output < g.n_out)
        ((float *)g.out)[output_offset(g, block * E::TOKENS + from + t, row) + output] =
            d[(from / 8 + i) * 4 + q];
    }
  }
}

#endif
