/* The whole layer in one launch, for a handful of tokens: weights stream from memory straight into
 * the operands of mma, and the grid waits for itself instead of for a next launch.
 *
 *   SHRINK13  hl13[p, slice, r] = round(s[l] * sum_k a13[l, e, r, k] x[m, k])        16 ranks
 *   W13       h[p, i] = act(x w13[e]^T + hl13 b13[l, e]^T + bias)    8 outputs, ungated 16
 *   SHRINK2   hl2[p, r] = round(s[l] * sum_i a2[l, e, r, i] h[p, i])                 16 ranks
 *   W2        out[m, n] = sum over p of weight[p] (h w2[e]^T + hl2 b2[l, e]^T + bias)    16 columns
 *
 * are the four kinds of items, dealt to the CTAs one by one; those of W2 go over all units (see
 * decode_tables.cuh), so that there is no z and no second sum. The grid meets three times: hl13 is
 * ready, h is ready, hl2 is ready. A CTA arrives when it has no more items that write, and waits as
 * late as it can: a base product comes before the wait for the shrink that it is added to.
 *
 * An item is 16 weight rows by the 8 tokens. Its depth goes in blocks of 32 to the eight warps,
 * each of which has a run of blocks; runs go in chunks of up to 8 blocks, and a warp loads its next
 * chunk, be it of the next item or beyond a meeting, while it multiplies this one. In a block lane
 * (g, c) = (lane / 4, lane % 4) loads elements 8c to 8c + 7 of weight rows g and g + 8 and of token
 * g: which element of depth is which does not matter as long as both operands agree. So total[2i +
 * j] is row g + 8i, token 2c + j. Gated, rows g are gate and rows g + 8 the matching up.
 *
 * Tokens are columns, and columns do not mix: a token takes only what its units and its adapter
 * add, whatever the neighbours' factors hold. */
#include <cooperative_groups.h>

#include "decode_walk.cuh"
#include "kernel_launch.cuh"
#include "ptx/mma.cuh"
#include "tile.cuh"

namespace decode {
namespace {

constexpr int kBatch = kChunk / 2; // blocks that are multiplied and then loaded anew at once
constexpr int kAhead = 3;          // chunks that a warp brings to L2 before the grid meets
/* CTAs per SM. Memory that is half as fast needs half as much in flight, and portable code a few
 * registers more. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kResident = 1;
#else
constexpr int kResident = 2;
#endif
/* Floats between tokens and between warps of the partial sums: writes and reads of a warp meet all
 * banks. */
constexpr int kTokenPitch = 20, kWarpPitch = 164;

/* ---- products ---- */

/* Blocks of a chunk in which this lane's eight elements, from `k` on, are inside the depth. */
__device__ __forceinline__ int blocks_inside(int blocks, int depth, int k) {
  return min(blocks, (depth - k + kBlockDepth - 1) >> 5);
}

/* Where a lane finds its rows of a chunk. */
struct Source {
  const uint16_t *row[2];
  int there; // blocks
};

__device__ __forceinline__ Source source_of(const Params &p, const Tables &t, const Walk &walk) {
  Source s = {{nullptr, nullptr}, 0};
  if (walk.kind == DONE)
    return s;
  const int lane = threadIdx.x % 32;
  const Chunk chunk = chunk_of(p, t, walk);
  const int k = chunk.first * kBlockDepth + lane % 4 * 8;
  s.there = blocks_inside(chunk.blocks, depth_of(p, walk.kind), k);
#pragma unroll
  for (int half = 0; half < 2; half++)
    s.row[half] = item_row(p, t, walk, chunk.unit, lane / 4, half) + k;
  return s;
}

/* Blocks FIRST to FIRST + kBatch - 1 of a chunk. */
template <int FIRST>
__device__ __forceinline__ void load(const Params &p, int kind, const Source &s,
                                     uint4 (&w)[kChunk][2]) {
  if (!is_shrink(kind) || p.a_vectors[kind == SHRINK2]) {
#pragma unroll
    for (int j = FIRST; j < FIRST + kBatch; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        w[j][half] = load_once_16(s.row[half] + j * kBlockDepth, j < s.there);
  } else {
#pragma unroll
    for (int j = FIRST; j < FIRST + kBatch; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        w[j][half] = load_elements(s.row[half] + j * kBlockDepth, j < s.there ? 8 : 0);
  }
}

/* d += rows x^T over one block, as one sum of even and one of odd steps. */
template <class T>
__device__ __forceinline__ void multiply_block(float (&d)[2][4], const uint4 (&w)[2],
                                               const uint4 &x) {
  const uint32_t a[2][4] = {{w[0].x, w[1].x, w[0].y, w[1].y}, {w[0].z, w[1].z, w[0].w, w[1].w}};
  const uint32_t b[2][2] = {{x.x, x.y}, {x.z, x.w}};
  mma_16816<T>(d[0], a[0], b[0]);
  mma_16816<T>(d[1], a[1], b[1]);
}

/* Blocks FIRST to FIRST + kBatch - 1 of a chunk by this lane's token. */
template <class T, int FIRST>
__device__ __forceinline__ void multiply(float (&d)[2][4], const uint4 (&w)[kChunk][2],
                                         const uint16_t *x, int there) {
  uint4 columns[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; j++)
    columns[j] = load_16(x + (FIRST + j) * kBlockDepth, FIRST + j < there);
#pragma unroll
  for (int j = 0; j < kBatch; j++)
    multiply_block<T>(d, w[FIRST + j], columns[j]);
}

/* total += what a chunk gives to the tokens of its unit; then the walk is at the next chunk, whose
 * loads are under way unless it is of another kind. False behind the item's last. */
template <class T>
__device__ __forceinline__ bool multiply_chunk(const Params &p, const Tables &t, Walk &walk,
                                               uint4 (&w)[kChunk][2], float (&total)[4]) {
  const int lane = threadIdx.x % 32, kind = walk.kind;
  const Chunk chunk = chunk_of(p, t, walk);
  const int k = chunk.first * kBlockDepth + lane % 4 * 8;
  const int row = t.row[chunk.unit][lane / 4];
  const int there = row < 0 ? 0 : blocks_inside(chunk.blocks, depth_of(p, kind), k);
  const uint16_t *x = kind < SHRINK2 ? (const uint16_t *)p.p.x + lane / 4 * p.p.x_stride + k
                                     : p.h + row * p.p.intermediate + k;
  const bool more = advance(p, t, walk);
  const Source next = source_of(p, t, walk);
  float d[2][4] = {};
  multiply<T, 0>(d, w, x, there);
  if (walk.kind == kind)
    load<0>(p, kind, next, w);
  multiply<T, kBatch>(d, w, x, there);
  if (walk.kind == kind)
    load<kBatch>(p, kind, next, w);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int token = lane % 4 * 2 + i;
    if (t.row[chunk.unit][token] < 0)
      continue;
    const float weight = kind == W2 ? t.weight[chunk.unit][token] : 1.f;
    total[i] += weight * (d[0][i] + d[1][i]);
    total[2 + i] += weight * (d[0][2 + i] + d[1][2 + i]);
  }
  return more;
}

/* ---- adapters on top of a base product ---- */

/* A block of ranks, from `first` on, of one slice of a segment's factor B. */
struct Piece {
  int segment, slice, first, rank;
};

/* visit(piece) for this warp's pieces of a W13 or W2 item. */
template <class Visit>
__device__ __forceinline__ void for_each_piece(const Params &p, const Tables &t, int kind,
                                               int index, Visit visit) {
  const moelora_factors &f = factors_of(p, kind);
  if (f.num_slices == 0)
    return;
  const int unit = kind == W13 ? index / p.tiles13 : 0;
  const int end = kind == W13 ? t.first_segment[unit + 1] : t.segments;
  const int warp = threadIdx.x / 32;
  int turn = 0;
  for (int s = t.first_segment[unit]; s < end; s++) {
    const int rank = rank_in(f, t.segment_rank[s]);
    for (int slice = 0; slice < f.num_slices; slice++)
      for (int first = 0; first < rank; first += kBlockDepth)
        if (turn++ % kWarps == warp)
          visit(Piece{s, slice, first, rank});
  }
}

/* This lane's eight elements of B in row g + 8 half; NULL where the slice has none. */
__device__ __forceinline__ const uint16_t *piece_row(const Params &p, const Tables &t, int kind,
                                                     int index, const Piece &piece, int half) {
  const int lane = threadIdx.x % 32, column = piece.first + lane % 4 * 8;
  const moelora_factors &f = factors_of(p, kind);
  const moelora_factor &b = f.b[piece.slice];
  const int output = output_of(p, kind, index, lane / 4, half);
  const int64_t n = weight_row(p, kind, output, half) - piece.slice * f.slice_n;
  if (output >= outputs_of(p, kind) || n < 0 || n >= f.slice_n || column >= piece.rank)
    return nullptr;
  return (const uint16_t *)b.data + t.segment_adapter[piece.segment] * b.stride_l +
         t.expert[t.segment_unit[piece.segment]] * b.stride_e + n * b.stride_i + column;
}

__device__ __forceinline__ void prefetch_pieces(const Params &p, const Tables &t,
                                                const Walk &walk) {
  if (walk.kind != W13 && walk.kind != W2)
    return;
  for_each_piece(p, t, walk.kind, walk.index, [&](const Piece &piece) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (const uint16_t *row = piece_row(p, t, walk.kind, walk.index, piece, half))
        prefetch_l2(row);
  });
}

/* The first `count` of eight elements; what a factor holds beyond the true rank may be NaN. */
__device__ __forceinline__ uint4 keep_elements(uint4 v, int count) {
  auto keep = [&](uint32_t pair, int first) {
    return count >= first + 2 ? pair : count == first + 1 ? pair & 0xffff : 0;
  };
  return make_uint4(keep(v.x, 0), keep(v.y, 2), keep(v.z, 4), keep(v.w, 6));
}

/* total += hl B^T for the tokens that carry each adapter. */
template <class T>
__device__ __forceinline__ void expand(const Params &p, const Tables &t, int kind, int index,
                                       float (&total)[4]) {
  const int lane = threadIdx.x % 32, projection = kind == W2;
  for_each_piece(p, t, kind, index, [&](const Piece &piece) {
    const moelora_factors &f = factors_of(p, kind);
    const int column = piece.first + lane % 4 * 8, left = min(8, piece.rank - column);
    const int unit = t.segment_unit[piece.segment], width = moelora_padded_rank(f.max_rank);
    const uint32_t tokens = t.segment_tokens[piece.segment];
    const uint16_t *from[2];
    uint4 b[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      from[half] = piece_row(p, t, kind, index, piece, half);
      b[half] = p.b_vectors[projection]
                    ? keep_elements(load_once_16(from[half], from[half] != nullptr), left)
                    : load_elements(from[half], from[half] ? left : 0);
    }
    const uint16_t *hl = p.hl[projection] +
                         ((int64_t)t.row[unit][lane / 4] * f.num_slices + piece.slice) * width +
                         column;
    const uint4 x = load_16(hl, left > 0 && (tokens >> lane / 4 & 1));
    float d[2][4] = {};
    multiply_block<T>(d, b, x);
    /* The lanes of a quad share their rows; the first of them, which has a rank in any piece, knows
     * which are there. */
    uint32_t rows = 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
      rows |= __shfl_sync(~0u, from[half] != nullptr, lane & 28) << half;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = lane % 4 * 2 + i;
      if (!(tokens >> token & 1))
        continue;
      const float weight = kind == W2 ? t.weight[unit][token] : 1.f;
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (rows >> half & 1)
          total[2 * half + i] += weight * (d[0][2 * half + i] + d[1][2 * half + i]);
    }
  });
}

/* ---- the end of an item ---- */

__device__ __forceinline__ void store_partial(float *partial, const float (&total)[4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int q = 0; q < 4; q++)
    partial[warp * kWarpPitch + (lane % 4 * 2 + q % 2) * kTokenPitch + lane / 4 + 8 * (q / 2)] =
        total[q];
}

template <class T> __device__ __forceinline__ float to_float(const void *data, int64_t at) {
  return Element<T>::to_float(((const T *)data)[at]);
}

/* Adds the warps' sums up and writes the results of token `warp`, four lanes to a pair of rows. */
template <class T>
__device__ __forceinline__ void finish(const Params &p, const Tables &t, int kind, int index,
                                       const float *partial) {
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32, g = lane / 4, quarter = lane % 4;
  const moelora_experts_problem &problem = p.p;
  float sum[2];
  int output[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float *from = partial + 2 * quarter * kWarpPitch + token * kTokenPitch + g + 8 * half;
    sum[half] = from[0] + from[kWarpPitch];
    output[half] = is_shrink(kind) ? 0 : output_of(p, kind, index, g, half);
  }
  if (kind == W2 && problem.w2.bias)
    for (int u = quarter; u < t.units; u += 4)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (t.row[u][token] >= 0 && output[half] < problem.hidden)
          sum[half] +=
              t.weight[u][token] *
              to_float<T>(problem.w2.bias, t.expert[u] * problem.w2.bias_stride_e + output[half]);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
  }
  if (is_shrink(kind)) {
    const Ranks r = ranks_of(p, t, kind, index);
    const moelora_factors &f = factors_of(p, kind);
    if (quarter || !(t.segment_tokens[r.segment] >> token & 1))
      return;
    const int64_t row = t.row[t.segment_unit[r.segment]][token];
    T *to = (T *)p.hl[kind == SHRINK2] +
            (row * f.num_slices + r.slice) * moelora_padded_rank(f.max_rank) + r.first + g;
#pragma unroll
    for (int half = 0; half < 2; half++)
      to[8 * half] =
          Element<T>::round(r.first + 8 * half + g < r.rank ? t.scaling[token] * sum[half] : 0.f);
    return;
  }
  if (quarter)
    return;
  if (kind == W2) {
    if (token < problem.routes.num_tokens)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (output[half] < problem.hidden)
          ((T *)problem.out)[token * problem.out_stride + output[half]] =
              Element<T>::round(sum[half]);
    return;
  }
  const int unit = index / p.tiles13;
  const int64_t row = t.row[unit][token];
  if (row < 0)
    return;
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (problem.w13.bias && output[half] < problem.intermediate)
      sum[half] += to_float<T>(problem.w13.bias, t.expert[unit] * problem.w13.bias_stride_e +
                                                     weight_row(p, W13, output[half], half));
  T *to = (T *)p.h + row * problem.intermediate;
  if (p.gated) {
    if (output[0] < problem.intermediate)
      to[output[0]] = Element<T>::round(Activation(problem.activation)(sum[0], sum[1]));
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (output[half] < problem.intermediate)
      to[output[half]] = Element<T>::round(sum[half] < 0.f ? 0.f : sum[half] * sum[half]);
}

/* ---- the kernel ---- */

/* The grid's meetings as steps that every CTA takes in this order, however few items it has. */
enum Step { START, SENT_HL13, HAS_HL13, SENT_H, HAS_H, SENT_HL2, HAS_HL2 };

/* To arrive takes until the loads that a CTA has under way are there: it does so first. */
__device__ __forceinline__ int step_before_load(int kind, int step) {
  return kind == SHRINK13 ? START : kind == W13 ? SENT_HL13 : step < HAS_H ? SENT_H : SENT_HL2;
}

__device__ __forceinline__ int step_before_product(int kind) {
  return kind == SHRINK13 ? START : kind == W13 ? SENT_HL13 : kind == SHRINK2 ? HAS_H : SENT_HL2;
}

/* Brings the next chunks of an item to L2. */
__device__ __forceinline__ void prefetch_chunks(const Params &p, const Tables &t, Walk walk) {
  const int lane = threadIdx.x % 32, kind = walk.kind;
  if (kind == DONE || (is_shrink(kind) && !p.a_vectors[kind == SHRINK2]))
    return;
  bool more = true;
  for (int i = 0; i < kAhead && more; i++) {
    const Chunk chunk = chunk_of(p, t, walk);
    const int first = chunk.first * kBlockDepth;
    const int count = min(chunk.blocks * kBlockDepth, depth_of(p, kind) - first);
    const uint16_t *row = item_row(p, t, walk, chunk.unit, lane % 8, lane / 8 % 2) + first;
    if (lane < 16 && count > 0)
      prefetch_l2(row, 2 * count);
    more = advance(p, t, walk);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_layer(const __grid_constant__ Params p) {
  __shared__ Tables t;
  __shared__ float partial[kWarps * kWarpPitch];
  /* Of each thread, and seldom asked for: registers are scarce. */
  __shared__ unsigned arrivals[kThreads];
  __shared__ int steps[kThreads];
  load_rows(t, p.p.routes);
  __syncthreads();
  find_units(t);
  find_segments(t, p.p.routes);
  if (threadIdx.x < 64)
    count_shrinks(t, threadIdx.x < 32 ? p.p.w13_lora : p.p.w2_lora, threadIdx.x / 32);
  if (threadIdx.x == 64) {
    t.items[W13] = t.units * p.tiles13;
    t.items[W2] = (int)((p.p.hidden + 15) / 16);
  }
  __syncthreads();

  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  unsigned &arrival = arrivals[threadIdx.x];
  int &step = steps[threadIdx.x];
  step = START;
  Walk walk = {SHRINK13, first_item(SHRINK13), 0, 0};
  auto step_to = [&](int goal) {
    while (step < goal) {
      const int meeting = step / 2;
      if (meeting == 1 || (meeting ? p.p.w2_lora : p.p.w13_lora).num_slices > 0) {
        if (step % 2 == 0)
          arrival = grid.barrier_arrive();
        else
          grid.barrier_wait(static_cast<unsigned &&>(arrival));
      }
      step++;
    }
  };

  uint4 w[kChunk][2];
  open_item(p, t, walk);
  prefetch_pieces(p, t, walk);
  while (walk.kind != DONE) {
    const int kind = walk.kind;
    step_to(step_before_load(kind, step));
    const Source source = source_of(p, t, walk);
    load<0>(p, kind, source, w);
    load<kBatch>(p, kind, source, w);
    step_to(step_before_product(kind));
    do {
      const int index = walk.index;
      float total[4] = {};
      while (multiply_chunk<T>(p, t, walk, w, total))
        ;
      if (walk.kind != kind)
        prefetch_chunks(p, t, walk);
      prefetch_pieces(p, t, walk);
      if (!is_shrink(kind)) {
        step_to(kind == W13 ? HAS_HL13 : HAS_HL2);
        expand<T>(p, t, kind, index, total);
      }
      __syncthreads(); // the sums of the item before have been read
      store_partial(partial, total);
      __syncthreads();
      finish<T>(p, t, kind, index, partial);
    } while (walk.kind == kind);
  }
  step_to(HAS_HL2);
}

struct Layout {
  uint16_t *h, *hl[2];
  size_t bytes;
};

Layout lay_out(const moelora_experts_problem *p, void *base) {
  moelora_arena arena = {(char *)base, 0};
  const size_t rows = (size_t)p->routes.num_rows;
  Layout l;
  l.h = (uint16_t *)moelora_take(&arena, 2 * rows * (size_t)p->intermediate);
  for (int i = 0; i < 2; i++) {
    const moelora_factors *f = i ? &p->w2_lora : &p->w13_lora;
    const size_t width = (size_t)(f->num_slices * moelora_padded_rank(f->max_rank));
    l.hl[i] = (uint16_t *)moelora_take(&arena, 2 * rows * width);
  }
  l.bytes = arena.used;
  return l;
}

} // namespace
} // namespace decode

size_t moelora_cuda_decode_workspace(const moelora_experts_problem *problem) {
  return decode::lay_out(problem, nullptr).bytes;
}

moelora_status moelora_cuda_decode(const moelora_experts_problem *problem,
                                   const moelora_exec *exec) {
  using namespace decode;
  const moelora_experts_problem &p = *problem;
  const Layout l = lay_out(problem, exec->workspace);
  Params params = {};
  params.p = p;
  params.gated = p.activation != MOELORA_RELU2;
  params.interleaved = p.activation == MOELORA_SWIGLUOAI;
  const int64_t outputs = params.gated ? 8 : 16;
  params.tiles13 = (int32_t)((p.intermediate + outputs - 1) / outputs);
  params.h = l.h;
  for (int i = 0; i < 2; i++) {
    const moelora_factors &f = i ? p.w2_lora : p.w13_lora;
    params.hl[i] = l.hl[i];
    params.a_vectors[i] = moelora_are_vector_factors(f.a, f.num_slices);
    params.b_vectors[i] = f.max_rank % 8 == 0 && moelora_are_vector_factors(f.b, f.num_slices);
  }
  const int64_t units =
      p.routes.num_rows < p.routes.num_experts ? p.routes.num_rows : p.routes.num_experts;
  const int64_t columns = (p.hidden + 15) / 16;
  const int64_t work = units * params.tiles13 > columns ? units * params.tiles13 : columns;
  return p.dtype == MOELORA_BF16
             ? launch_cooperative<decode_layer<__nv_bfloat16>>("decode_layer", work, kThreads,
                                                               kResident, exec, params)
             : launch_cooperative<decode_layer<__half>>("decode_layer", work, kThreads, kResident,
                                                        exec, params);
}
