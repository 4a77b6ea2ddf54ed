/* Products of the decode kernel's shrinks: rows of A are loaded from memory into the operand
 * registers of mma, one chunk ahead. */
#ifndef MOELORA_CUDA_DECODE_PRODUCT_CUH
#define MOELORA_CUDA_DECODE_PRODUCT_CUH

#include "cuda/decode/scheduler.cuh"
#include "cuda/launch/warp.cuh"
#include "cuda/ptx/mma.cuh"

namespace decode {

constexpr int kBatch = 4; // blocks that are multiplied and then reloaded together
constexpr int kAhead = 1; // chunks that a warp prefetches to L2 before a grid sync; 0: none

/* Returns the number of blocks of a K span in which this lane's eight elements are within K. */
__device__ __forceinline__ int blocks_inside(const DecodeParams &p, int kind, const KSpan &span) {
  const int k = span.first * kBlockDepth + threadIdx.x % 4 * 8;
  return min(span.blocks, (depth_of(p, kind) - k + kBlockDepth - 1) / kBlockDepth);
}

/* Addresses of a lane's rows of one operand in a K span. */
template <int ROWS> struct OperandRows {
  const uint16_t *row[ROWS];
  int blocks; // blocks left within K
};

__device__ __forceinline__ bool has_vectors(const DecodeParams &p, int kind) {
  return p.a_vectors[kind == SHRINK2];
}

__device__ __forceinline__ OperandRows<2> rows_of_a(const DecodeParams &p, const Tables &t,
                                                    const WorkIterator &work) {
  const KSpan span = span_of(p, t, work);
  OperandRows<2> s = {{nullptr, nullptr}, 0};
  if (span.blocks == 0)
    return s;
  s.blocks = blocks_inside(p, work.kind, span);
  item_rows(p, t, work, span, threadIdx.x % 32 / 4, s.row);
#pragma unroll
  for (int half = 0; half < 2; half++)
    s.row[half] += threadIdx.x % 4 * 8;
  return s;
}

/* Rows that an item multiplies: of x, one per token, or of h, one per routed row. */
struct TokenRows {
  const uint16_t *rows; // in shared memory, if all rows fit
  int64_t stride;
};

/* Bytes of shared memory for tokens on GPUs with less than kLargeShared bytes (tiles.cuh). More
 * would leave less L1 for the loads of factors. */
constexpr int kStagedBytes = 18 * 1024;

/* If all rows fit, starts to copy them to shared memory and returns the copies, otherwise `from`.
 * With first_row, copies only rows p with first_row[p] == p. The stride of the copies is an odd
 * multiple of 16 bytes, so that ldmatrix has no bank conflicts. They are zero-filled to a multiple
 * of 64 elements. */
__device__ __forceinline__ TokenRows stage_tokens(const uint16_t *from, int64_t stride,
                                                  int64_t rows, int depth, const int32_t *first_row,
                                                  uint16_t *staged, int room) {
  const int end = (depth + 63) / 64 * 64, pitch = end + 8;
  if (rows * pitch * 2 > room)
    return {from, stride};
#pragma unroll 1
  for (int row = 0; row < rows; row++)
#pragma unroll 1
    for (int k = first_row && first_row[row] != row ? end : threadIdx.x * 8; k < end;
         k += kThreads * 8)
      copy_async_16(shared_address(staged + row * pitch + k),
                    from + row * stride + min(k, depth - 8), k < depth ? 16 : 0);
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

/* Register prefetch buffer: rows of A of the next chunk, and addresses of the chunk after it. */
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
          load_16<Read::CONSTANT>(buffer.next.row[half] + j * kBlockDepth, j < buffer.next.blocks);
}

template <int ROWS> __device__ __forceinline__ void step_chunk(OperandRows<ROWS> &s) {
#pragma unroll
  for (int i = 0; i < ROWS; i++)
    s.row[i] += kChunk * kBlockDepth;
  s.blocks -= kChunk;
}

/* Subtracted from the blocks of the prefetch buffer, so that it loads none: factors without 16-byte
 * alignment bypass it. */
constexpr int kBypass = 1 << 30;

/* Sets the buffer's addresses to the start of the K span at `work`. */
__device__ __forceinline__ void follow(const DecodeParams &p, const Tables &t,
                                       const WorkIterator &work, PrefetchBuffer &buffer) {
  buffer.next = rows_of_a(p, t, work);
  if (!has_vectors(p, work.kind))
    buffer.next.blocks -= kBypass;
}

__device__ __forceinline__ void start(const DecodeParams &p, const Tables &t,
                                      const WorkIterator &work, PrefetchBuffer &buffer) {
  follow(p, t, work, buffer);
  load_batch<0>(buffer), load_batch<kBatch>(buffer);
  step_chunk(buffer.next);
}

/* Adds the product of one block to d, 16 consecutive elements at a time. */
template <class T>
__device__ __forceinline__ void multiply_block(float (&d)[4], const uint4 (&w)[2], const uint4 &x) {
  const uint4 low = neighbors_16(w[0]), high = neighbors_16(w[1]), tokens = neighbors_16(x);
  const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
  const uint32_t b[2][2] = {{tokens.x, tokens.y}, {tokens.z, tokens.w}};
  mma_16816<T>(d, a[0], b[0]);
  mma_16816<T>(d, a[1], b[1]);
}

/* Multiplies blocks FIRST to FIRST + kBatch - 1 of a chunk. */
template <class T, int FIRST>
__device__ __forceinline__ void multiply_batch(float (&d)[4], const PrefetchBuffer &buffer,
                                               const OperandRows<1> &x) {
#pragma unroll
  for (int i = 0; i < kBatch; i += 2) {
    uint4 columns[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      columns[j] = load_16<Read::WRITTEN>(x.row[0] + (FIRST + i + j) * kBlockDepth,
                                          FIRST + i + j < x.blocks);
#pragma unroll
    for (int j = 0; j < 2; j++)
      multiply_block<T>(d, buffer.w[FIRST + i + j], columns[j]);
  }
}

/* Prefetches to L2 the rows of A that a warp loads next in its K span; a 128-byte line is two
 * blocks. */
__device__ __forceinline__ void prefetch_next(const PrefetchBuffer &buffer) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kAhead; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (i * kChunk + 2 * c < buffer.next.blocks)
        prefetch_l2(buffer.next.row[half] + i * kChunk * kBlockDepth + c * (2 * kBlockDepth - 8));
}

/* Adds the product of the buffer's K span to d. Loads the first chunk of the K span at `work`,
 * which is the next one, into the buffer. */
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
    if (blocks > -kBatch) // the branch also keeps the compiler from sinking the loads above past it
      multiply_batch<T, kBatch>(d, buffer, x);
    load_batch<kBatch>(buffer);
    step_chunk(buffer.next);
    step_chunk(x);
  } while (blocks > 0);
}

/* Adds the product of a K span to d, for factors without 16-byte alignment. `next` points kChunk
 * blocks past the start of the span, as it does for prefetching. */
template <class T>
__device__ __forceinline__ void multiply_elements(const OperandRows<2> &next,
                                                  const OperandRows<1> &x, float (&d)[4]) {
  const int blocks = next.blocks + kChunk + kBypass, end = __reduce_max_sync(~0u, blocks);
#pragma unroll 1
  for (int j = 0; j < end; j++) {
    uint4 rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
      rows[half] = load_elements(next.row[half] + (j - kChunk) * kBlockDepth, j < blocks ? 8 : 0);
    multiply_block<T>(d, rows, load_16<Read::WRITTEN>(x.row[0] + j * kBlockDepth, j < x.blocks));
  }
}

} // namespace decode

#endif
