/* Products of the decode kernel: weights from memory straight into the operands of mma, a chunk
 * ahead of their use. */
#ifndef MOELORA_CUDA_DECODE_PRODUCT_CUH
#define MOELORA_CUDA_DECODE_PRODUCT_CUH

#include "cuda/decode/scheduler.cuh"
#include "cuda/launch/warp.cuh"
#include "cuda/ptx/mma.cuh"

namespace decode {

constexpr int kBatch = 4; // blocks that are multiplied and then loaded anew at once
constexpr int kAhead = 1; // chunks that a warp brings to L2 before a grid sync; 0: none

/* Blocks of a k-span in which this lane's eight elements are inside the depth. */
__device__ __forceinline__ int blocks_inside(const DecodeParams &p, int kind, const KSpan &span) {
  const int k = span.first * kBlockDepth + threadIdx.x % 4 * 8;
  return min(span.blocks, (depth_of(p, kind) - k + kBlockDepth - 1) / kBlockDepth);
}

/* A lane's share of one operand's rows in a k-span. */
template <int ROWS> struct OperandRows {
  const uint16_t *row[ROWS];
  int there; // blocks
};

__device__ __forceinline__ bool has_vectors(const DecodeParams &p, int kind) {
  return !is_shrink(kind) || p.a_vectors[kind == SHRINK2];
}

__device__ __forceinline__ OperandRows<2> weights_of(const DecodeParams &p, const Tables &t,
                                                     const WorkIterator &work) {
  const KSpan span = span_of(p, t, work);
  OperandRows<2> s = {{nullptr, nullptr}, 0};
  if (span.blocks == 0)
    return s;
  s.there = blocks_inside(p, work.kind, span);
  item_rows(p, t, work, span, threadIdx.x % 32 / 4, s.row);
#pragma unroll
  for (int half = 0; half < 2; half++)
    s.row[half] += threadIdx.x % 4 * 8;
  return s;
}

/* x, a row for a token, or h, a row for a routed row. */
struct TokenRows {
  const uint16_t *rows; // in shared memory, if all of them fit there
  int64_t stride;
};

/* What is shared is missing from L1, through which weights come. */
constexpr int kStagedBytes = 18 * 1024;

/* Begins to copy rows, all or those that are their own `lead`, to shared memory if they fit: a batch that asked
 * memory for its columns would wait each time, and a grid sync empties L1. Where eight rows lie an
 * odd number of 64 bytes apart, a block of them covers all banks; for TILES, whose rows ldmatrix
 * reads to the end of a tile, an odd number of 16 bytes, with zeros behind the depth. */
template <bool TILES>
__device__ __forceinline__ TokenRows stage_tokens(const uint16_t *from, int64_t stride,
                                                  int64_t rows, int depth, const int32_t *lead,
                                                  uint16_t *staged, int room) {
  const int padded = (depth + 63) / 64 * 64, pitch = padded + (TILES ? 8 : 32);
  const int end = TILES ? padded : depth;
  if (rows * pitch * 2 > room)
    return {from, stride};
#pragma unroll 1
  for (int row = 0; row < rows; row++)
#pragma unroll 1
    for (int k = lead && lead[row] != row ? end : threadIdx.x * 8; k < end; k += kThreads * 8)
      copy_async_16(shared_address(staged + row * pitch + k),
                    from + row * stride + (TILES ? min(k, depth - 8) : k),
                    TILES && k >= depth ? 0 : 16);
  copy_async_commit();
  return {staged, pitch};
}

__device__ __forceinline__ OperandRows<1> tokens_of(const DecodeParams &p, const Tables &t,
                                                    int kind, const TokenRows &tokens,
                                                    const KSpan &span) {
  const int lane = threadIdx.x % 32, token = lane / 4, row = t.row[span.active][token];
  const uint16_t *x = tokens.rows + (kind < SHRINK2 ? token : row) * tokens.stride;
  return {{x + span.first * kBlockDepth + lane % 4 * 8},
          row < 0 ? 0 : blocks_inside(p, kind, span)};
}

/* The register prefetch buffer: weights of a chunk that is to be multiplied, and where the chunk
 * behind it is. */
struct PrefetchBuffer {
  uint4 w[kChunk][2];
  OperandRows<2> next;
};

template <int FIRST> __device__ __forceinline__ void load_batch(PrefetchBuffer &buffer) {
#pragma unroll
  for (int j = FIRST; j < FIRST + kBatch; j++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      buffer.w[j][half] =
          load_16<Read::CONSTANT>(buffer.next.row[half] + j * kBlockDepth, j < buffer.next.there);
}

template <int ROWS> __device__ __forceinline__ void step_chunk(OperandRows<ROWS> &s) {
#pragma unroll
  for (int i = 0; i < ROWS; i++)
    s.row[i] += kChunk * kBlockDepth;
  s.there -= kChunk;
}

/* Has the buffer go on where `work` is; factors that do not allow vectors stay out of it. */
constexpr int kElements = 1 << 30;

__device__ __forceinline__ void follow(const DecodeParams &p, const Tables &t,
                                       const WorkIterator &work, PrefetchBuffer &buffer) {
  buffer.next = weights_of(p, t, work);
  if (!has_vectors(p, work.kind))
    buffer.next.there -= kElements;
}

__device__ __forceinline__ void start(const DecodeParams &p, const Tables &t,
                                      const WorkIterator &work, PrefetchBuffer &buffer) {
  follow(p, t, work, buffer);
  load_batch<0>(buffer), load_batch<kBatch>(buffer);
  step_chunk(buffer.next);
}

/* d += rows x^T over one block, 16 neighbours at a time. */
template <class T>
__device__ __forceinline__ void multiply_block(float (&d)[4], const uint4 (&w)[2], const uint4 &x) {
  const uint4 low = neighbors_16(w[0]), high = neighbors_16(w[1]), tokens = neighbors_16(x);
  const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
  const uint32_t b[2][2] = {{tokens.x, tokens.y}, {tokens.z, tokens.w}};
  mma_16816<T>(d, a[0], b[0]);
  mma_16816<T>(d, a[1], b[1]);
}

/* Blocks FIRST to FIRST + kBatch - 1 of a chunk. */
template <class T, int FIRST>
__device__ __forceinline__ void multiply_batch(float (&d)[4], const PrefetchBuffer &buffer,
                                               const OperandRows<1> &x) {
#pragma unroll
  for (int i = 0; i < kBatch; i += 2) {
    uint4 columns[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      columns[j] =
          load_16<Read::WRITTEN>(x.row[0] + (FIRST + i + j) * kBlockDepth, FIRST + i + j < x.there);
#pragma unroll
    for (int j = 0; j < 2; j++)
      multiply_block<T>(d, buffer.w[FIRST + i + j], columns[j]);
  }
}

/* Brings to L2 what a warp loads later in its k-span: a line of 128 bytes is two blocks. */
__device__ __forceinline__ void prefetch_next(const PrefetchBuffer &buffer) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kAhead; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (i * kChunk + 2 * c < buffer.next.there)
        prefetch_l2(buffer.next.row[half] + i * kChunk * kBlockDepth + c * (2 * kBlockDepth - 8));
}

/* d += the k-span that the buffer has begun to load; `work` is behind it. */
template <class T>
__device__ __forceinline__ void
multiply_span(const DecodeParams &p, const Tables &t, const WorkIterator &work, int blocks,
              OperandRows<1> x, PrefetchBuffer &buffer, float (&d)[4]) {
  static_assert(kChunk == 2 * kBatch, "as written out below");
#pragma unroll 1
  do {
    blocks -= kChunk;
    if (blocks <= 0)
      follow(p, t, work, buffer);
    multiply_batch<T, 0>(d, buffer, x);
    load_batch<0>(buffer);
    if (blocks > -kBatch) // the branch also keeps the loads above from sinking below
      multiply_batch<T, kBatch>(d, buffer, x);
    load_batch<kBatch>(buffer);
    step_chunk(buffer.next);
    step_chunk(x);
  } while (blocks > 0);
}

/* d += the k-span that the buffer is at, of factors that do not allow vectors. The buffer has taken
 * its first chunk as loaded. */
template <class T>
__device__ __forceinline__ void multiply_elements(const OperandRows<2> &next,
                                                  const OperandRows<1> &x, float (&d)[4]) {
  const int there = next.there + kChunk + kElements, end = __reduce_max_sync(~0u, there);
#pragma unroll 1
  for (int j = 0; j < end; j++) {
    uint4 rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
      rows[half] = load_elements(next.row[half] + (j - kChunk) * kBlockDepth, j < there ? 8 : 0);
    multiply_block<T>(d, rows, load_16<Read::WRITTEN>(x.row[0] + j * kBlockDepth, j < x.there));
  }
}

} // namespace decode

#endif
