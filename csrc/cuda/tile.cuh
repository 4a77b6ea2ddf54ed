/* What the grouped GEMM kernels share: the walk over tiles, segments of adapters, and what happens
 * to an accumulator between the last product and memory.
 *
 * All kernels multiply with operands swapped: weight rows are the M side of an instruction, tokens
 * its N side. A CTA's tile is TOKENS tokens (one block) by TILES groups of 64 weight
 * rows. Groups come in pairs: of a gated projection the even one holds gate rows, the odd one the
 * up rows of the same 64 outputs. A pair belongs to four warps; warp w of them owns rows 16w to 16w
 * + 15 of both, as accumulators d[2][N / 2]: d[g][4i + q] is row lane/4 + 8 (q / 2) of group g,
 * token 8i + 2 (lane % 4) + q % 2.
 *
 * In shared memory a stage holds rows of 128 bytes (64 elements of depth), 16-byte chunk c of row r
 * at c ^ (r & 7): W [TILES][64]   weight rows, or rows of a LoRA factor B X [TOKENS]      token
 * rows, or rows of the shrink result hl */
#ifndef MOELORA_CUDA_TILE_CUH
#define MOELORA_CUDA_TILE_CUH

#include "launch.h"
#include "ptx/mma.cuh"

constexpr int kDepth = 64;
constexpr int kRowBytes = 128;
constexpr int kGroupBytes = 64 * kRowBytes;

/* Extents of a CTA's tile. */
template <int TOKENS_, int TILES_> struct Extent {
  static constexpr int TOKENS = TOKENS_, TILES = TILES_;
  static constexpr int ROWS = 64 * TILES;
  static constexpr int LANES = (TOKENS + 31) / 32; // tokens that one lane of a warp looks after
  static constexpr int W_BYTES = TILES * kGroupBytes, X_BYTES = TOKENS * kRowBytes;
  static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
};

struct Tile {
  int32_t block, column, expert;
};

/* Tile `index` of a walk over units of CLUSTER blocks; `block` is the unit's first. */
template <class E, int CLUSTER = 1>
__device__ __forceinline__ Tile tile_at(const moelora_gemm_launch &g, int index, int columns,
                                        int units) {
  // Eight blocks by all columns: CTAs that run together share weights (blocks of one expert) and
  // token rows (columns of one block) in L2.
  constexpr int GROUP = 8 / CLUSTER;
  const int first = index / (GROUP * columns) * GROUP;
  const int height = min(GROUP, units - first);
  const int rest = index % (GROUP * columns);
  Tile t;
  t.column = rest / height;
  t.block = (first + rest % height) * CLUSTER;
  t.expert = g.blocks.expert_ids[t.block];
  return t;
}

/* Columns of tiles that cover the outputs. */
template <class E> __host__ __device__ inline int tile_columns(const moelora_gemm_launch &g) {
  const int outputs = g.gated ? E::ROWS / 2 : E::ROWS;
  return (g.n_out + outputs - 1) / outputs;
}

/* Output that row 0 of a group stands for; the group's row r stands for output first + r. */
template <class E>
__device__ __forceinline__ int first_output(const moelora_gemm_launch &g, int column, int group) {
  return g.gated ? column * (E::ROWS / 2) + group / 2 * 64 : column * E::ROWS + group * 64;
}

/* Row of w (and of its bias and factors) that makes an output in a group. */
__device__ __forceinline__ int64_t weight_row(const moelora_gemm_launch &g, int group, int output) {
  if (!g.gated)
    return output;
  const int half = group & 1;
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
  return g.x_divisor ? row / g.x_divisor : block * E::TOKENS + t;
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

/* Runs of equal adapter among the tokens of a block. Lane t of a warp knows tokens t, t + 32, ...;
 * every warp finds them by itself, and all find the same. */
template <int LANES> struct Segments {
  int32_t pair[LANES]; // adapter * kRanks + true rank; -1 for a base row
  uint32_t starts[LANES];

  __device__ __forceinline__ void load(const moelora_gemm_launch &g, int64_t position, int tokens) {
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      const int t = i * 32 + (threadIdx.x & 31);
      pair[i] = t < tokens ? g.blocks.pairs[position + t] : -1;
    }
    find(g.lora.max_rank);
  }

  /* From pairs that are there already. */
  __device__ __forceinline__ const Segments &of(const int32_t (&pairs)[LANES], int max_rank) {
#pragma unroll
    for (int i = 0; i < LANES; i++)
      pair[i] = pairs[i];
    find(max_rank);
    return *this;
  }

  __device__ __forceinline__ void find(int max_rank) {
#pragma unroll
    for (int i = 0; i < LANES; i++)
      if (pair[i] >= 0 && pair[i] % kRanks > max_rank)
        pair[i] += max_rank - pair[i] % kRanks;
    int before = -2;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      int previous = __shfl_up_sync(0xffffffffu, pair[i], 1);
      if ((threadIdx.x & 31) == 0)
        previous = before;
      starts[i] = __ballot_sync(0xffffffffu, pair[i] != previous);
      before = __shfl_sync(0xffffffffu, pair[i], 31);
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

  __device__ __forceinline__ int at(int t) const {
    int value = 0;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      const int here = __shfl_sync(0xffffffffu, pair[i], t & 31);
      value = t / 32 == i ? here : value;
    }
    return value;
  }
};

template <class E>
__device__ __forceinline__ bool group_meets_slice(const moelora_gemm_launch &g, int column,
                                                  int group, int slice) {
  const int output = first_output<E>(g, column, group);
  if (output >= g.n_out)
    return false;
  const int64_t begin = weight_row(g, group, output);
  const int64_t end = weight_row(g, group, min(output + 63, g.n_out - 1));
  return end >= slice * g.lora.slice_n && begin < (slice + 1) * g.lora.slice_n;
}

/* Adapter work comes in pieces: up to 16 ranks from `rank` on of the adapter of tokens [low, high).
 * Where gate and up have a slice each, a piece covers both: groups of gate rows take
 * slice 0, groups of up rows slice 1. Otherwise it covers `slice`. */
struct Piece {
  int low = 0, high = 0, pair = -1, slice = 0, rank = 0;
};

constexpr int kPieceDepth = 16;

__host__ __device__ __forceinline__ bool is_paired(const moelora_gemm_launch &g) {
  return g.gated && !g.interleaved && g.lora.num_slices == 2;
}

/* Pieces in a stage. In W, piece j of a stage lies in chunks 2j and 2j + 1; in X too, but the two
 * slices of a paired piece follow each other, in chunks 4j to 4j + 3. */
__device__ __forceinline__ int pieces_per_stage(const moelora_gemm_launch &g) {
  return is_paired(g) ? 2 : 4;
}

/* Moves on to a tile's next piece, the first one from a fresh `s`; false behind the last. The order
 * is the same for all warps, whether they load or multiply. */
template <class E>
__device__ __forceinline__ bool next_piece(const moelora_gemm_launch &g, const Tile &tile,
                                           const Segments<E::LANES> &segments, Piece &s) {
  const int slices = is_paired(g) ? 1 : g.lora.num_slices;
  s.rank += kPieceDepth;
  while (s.pair < 0 || s.rank >= s.pair % kRanks) {
    s.rank = 0;
    if (s.pair < 0 || ++s.slice == slices) {
      s.slice = 0;
      s.low = s.high;
      s.pair = -1;
      if (s.low >= E::TOKENS)
        return false;
      s.high = segments.next(s.low + 1, E::TOKENS);
      s.pair = segments.at(s.low);
      if (s.pair < 0)
        continue;
    }
    bool meets = slices == 1;
    for (int group = 0; group < E::TILES && !meets; group++)
      meets = group_meets_slice<E>(g, tile.column, group, s.slice);
    if (!meets)
      s.rank = kRanks;
  }
  return true;
}

/* Copies one stage of pieces with THREADS threads: rows of B, zeros beyond the true rank, and the
 * tokens' rows of hl up to token `tokens`, zeros outside of the segment. Returns the number of
 * pieces. */
template <class E, class T, int THREADS>
__device__ __forceinline__ int load_pieces(const moelora_gemm_launch &g, const Tile &tile,
                                           const Segments<E::LANES> &segments, int tokens,
                                           Piece &cursor, uint32_t w, uint32_t x, int thread) {
  const bool paired = is_paired(g);
  const int per_stage = pieces_per_stage(g);
  const int w_wide = 2 * per_stage, w_chunk = thread % w_wide, w_rows = THREADS / w_wide;
  const int x_chunk = thread & 7, x_rows = THREADS / 8;
  // Found once for B and once more for hl: to keep both at hand would cost registers.
  int count = 0;
  auto piece_of = [&](Piece &walk, int slot) {
    Piece found;
    for (count = 0; count < per_stage && next_piece<E>(g, tile, segments, walk); count++)
      if (slot == count)
        found = walk;
    return found;
  };
  Piece walk = cursor;
  const Piece of_w = piece_of(walk, w_chunk / 2);
  auto at = [](int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); };

  if (of_w.pair >= 0) {
    const int column = of_w.rank + (w_chunk & 1) * 8;
    const int ranks = max(0, min(8, of_w.pair % kRanks - column)); // of this chunk
    const int step = g.gated && g.interleaved ? 2 : 1;             // rows of B between two outputs
#pragma unroll 1
    for (int group = 0; group < E::TILES; group++) {
      const int slice = paired ? group & 1 : of_w.slice;
      const moelora_factor &b = g.lora.b[slice];
      const int output = first_output<E>(g, tile.column, group), width = (int)g.lora.slice_n;
      int r = thread / w_wide;
      int n = paired ? output + r : (int)weight_row(g, group, output + r) - slice * width;
      const T *from = (const T *)b.data + of_w.pair / kRanks * b.stride_l +
                      tile.expert * b.stride_e + n * b.stride_i + column;
      const int64_t ahead = (int64_t)w_rows * step * b.stride_i;
      const int end = min(64, g.n_out - output); // nobody looks at rows behind the last output
#pragma unroll 1
      for (; r < end; r += w_rows, n += w_rows * step, from += ahead) {
        const bool there = n >= 0 && n < width;
        const uint32_t to = w + group * kGroupBytes + at(r, w_chunk);
        if (g.factors_vectors)
          copy_async_16(to, there ? from : (const T *)b.data, there ? 2 * ranks : 0);
        else
          copy_elements(to, from, there ? ranks : 0);
      }
    }
  }
  const Piece of_x = piece_of(cursor, paired ? x_chunk / 4 : x_chunk / 2);
  if (of_x.pair >= 0) {
    const int slice = paired ? x_chunk / 2 & 1 : of_x.slice;
    const T *hl = (const T *)g.hl + (int64_t)tile.block * E::TOKENS * g.hl_stride +
                  slice * g.hl_slice + of_x.rank + (x_chunk & 1) * 8;
    const int stride = (int)g.hl_stride;
#pragma unroll 1
    for (int t = thread / 8; t < tokens; t += x_rows) {
      const bool carries = t >= of_x.low && t < of_x.high;
      copy_async_16(x + at(t, x_chunk), hl + (carries ? t : of_x.low) * stride, carries ? 16 : 0);
    }
  }
  return count;
}

/* d += B hl^T for the tokens of piece `slot` of a stage. Each 16 x 8 patch is multiplied into
 * registers of its own and added only where its token belongs to the segment: what an adapter's
 * factors hold, NaN included, never reaches a token that does not carry it, and a base row keeps
 * its bits. */
template <class E, class T, int N>
__device__ __forceinline__ void expand(float (&d)[2][N / 2], const moelora_gemm_launch &g,
                                       const Tile &tile, const Piece &s, int slot, uint32_t w,
                                       uint32_t x, int pair) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const bool paired = is_paired(g);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int group = 2 * pair + half;
    if (!paired && g.lora.num_slices > 1 && !group_meets_slice<E>(g, tile.column, group, s.slice))
      continue;
    uint32_t a[4];
    const int row = warp * 16 + (lane & 15);
    load_matrix_x4(a, w + group * kGroupBytes + row * kRowBytes +
                          ((2 * slot + (lane >> 4) ^ row & 7) << 4));
    const int first = paired ? 4 * slot + 2 * half : 2 * slot;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
      if (i * 8 >= s.high || i * 8 + 8 <= s.low)
        continue;
      uint32_t b[2];
      const int token = i * 8 + (lane & 7);
      load_matrix_x2(b, x + token * kRowBytes + ((first + (lane >> 3 & 1) ^ token & 7) << 4));
      float delta[4] = {0.f, 0.f, 0.f, 0.f};
      mma_16816<T>(delta, a, b);
      const int t = i * 8 + (lane & 3) * 2;
      if (t >= s.low && t < s.high)
        d[half][4 * i] += delta[0], d[half][4 * i + 2] += delta[2];
      if (t + 1 >= s.low && t + 1 < s.high)
        d[half][4 * i + 1] += delta[1], d[half][4 * i + 3] += delta[3];
    }
  }
}

/* All three gated activations are g' sigmoid(g' (a + b g'^2)) (u' + c): silu has a = 1; gelu in its
 * tanh form is the identity 1 + tanh(t) = 2 sigmoid(2t); gpt-oss clamps both and has a = 1.702, c
 * = 1. NaN stays NaN. */
struct Activation {
  float a = 1.f, b = 0.f, c = 0.f, limit = __builtin_inff();

  __device__ __forceinline__ explicit Activation(int activation) {
    if (activation == MOELORA_GELU)
      a = 1.5957691216057308f, b = 0.07135481627159729f;
    if (activation == MOELORA_SWIGLUOAI)
      a = 1.702f, c = 1.f, limit = 7.f;
  }

  /* One piece of assembly: given its parts, the compiler starts them for all outputs of a thread at
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
                 "mul.f32 t, t, 0fBFB8AA3B;\n" // -log2(e)
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
};

/* What an epilogue does. An epilogue is straight code for every output of a thread: what it asks at
 * run time it asks for each of them, and more than a few thousand instructions no longer stay in
 * the instruction cache from tile to tile. */
enum class Finish {
  GENERAL,   // anything
  GATED,     // bias, gated activation
  PLAIN,     // bias, relu^2 or nothing
  PLAIN_F32, // the same, left in float32
};

/* What an epilogue adds: bias[2 half + eight] of this thread's four rows. */
template <class E, Finish FINISH> struct Epilogue {
  float bias[4];
  Activation activation;

  template <class T>
  __device__ __forceinline__ Epilogue(const moelora_gemm_launch &g, const Tile &tile, int pair, T)
      : activation(g.activation) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int group = 2 * pair + j / 2;
      const int output =
          first_output<E>(g, tile.column, group) + warp * 16 + lane / 4 + 8 * (j % 2);
      bias[j] = 0.f;
      if (g.w.bias && output < g.n_out)
        bias[j] = Element<T>::to_float(
            ((const T *)g.w.bias)[tile.expert * g.w.bias_stride_e + weight_row(g, group, output)]);
    }
  }

  /* Up to 32 tokens of `block` from `first` on, in place; afterwards d[0] holds a gated
   * projection's outputs.
   */
  template <int N>
  __device__ __forceinline__ void finish(float (&d)[2][N / 2], const moelora_gemm_launch &g,
                                         int block, int first) const {
    const int lane = threadIdx.x & 31;
    const float here = FINISH == Finish::GENERAL ? routed_weight<E>(g, block, first + lane) : 1.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (first + 8 * i >= N)
        break;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const int at = (first / 8 + i) * 4 + q;
        float v[2] = {d[0][at] + bias[q / 2], d[1][at] + bias[2 + q / 2]};
        if (FINISH == Finish::GATED || (FINISH == Finish::GENERAL && g.gated))
          v[0] = activation(v[0], v[1]);
        if (FINISH != Finish::GATED && g.activation == MOELORA_RELU2)
          v[0] = v[0] < 0.f ? 0.f : v[0] * v[0], v[1] = v[1] < 0.f ? 0.f : v[1] * v[1];
        if (FINISH == Finish::GENERAL && g.weighted) {
          const float weight = __shfl_sync(0xffffffffu, here, i * 8 + (lane & 3) * 2 + q % 2);
          v[0] *= weight, v[1] *= weight;
        }
        d[0][at] = v[0], d[1][at] = v[1];
      }
    }
  }
};

/* One group's results for up to 32 tokens from `from` on in float32: eight lanes hold eight
 * neighbouring outputs of a token, a whole sector. Lane t holds the flat row of token
 * from + t, which counts only where results do not lie by position. */
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
