/* How the operands of the portable GEMM come to a stage: what each thread copies. */
#ifndef MOELORA_CUDA_SM80_OPERANDS_CUH
#define MOELORA_CUDA_SM80_OPERANDS_CUH

#include <type_traits>

#include "cuda/gemm/sm80/product.cuh"

/* Rows that a thread brings to each stage: a chunk of 16 bytes of each. */
template <class E, class T, bool VECTORS> struct OperandLoader {
  static constexpr int STEP = WarpTile<E>::THREADS / 8; // rows between two rows of one thread
  static constexpr int W_ROWS = E::ROWS / STEP, X_ROWS = E::TOKENS / STEP;
  static_assert(64 % STEP == 0 && E::TOKENS % STEP == 0, "all threads copy as many rows");
  static constexpr int PARTS = 3;
  static constexpr int PART = (W_ROWS + X_ROWS + PARTS - 1) / PARTS;

  // Offsets of weight rows, in vectors if there are vectors to spare registers.
  using Offset = std::conditional_t<VECTORS, uint32_t, int64_t>;
  static constexpr int OFFSET_ELEMENTS = VECTORS ? 8 : 1;

  const T *weights; // of the expert
  Offset row[W_ROWS];
  int32_t token[X_ROWS]; // -1 in padding, which nobody copies

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    const int thread = threadIdx.x;
    weights = (const T *)g.weights.w.data + tile.expert * g.weights.w.stride_e;
#pragma unroll
    for (int i = 0; i < W_ROWS; i++) {
      const int m64 = i * STEP / 64, r = i * STEP % 64 + thread / 8;
      const int output = first_output<E>(g, tile.column, m64) + r;
      // Nobody looks at outputs behind the last one: any row will do.
      const uint32_t n = (uint32_t)weight_row(g, m64, min(output, g.weights.n_out - 1));
      row[i] = (n / 64 * g.weights.w.stride_nt + n % 64 * g.weights.w.stride_n) / OFFSET_ELEMENTS;
    }
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
      const int t = thread / 8 + i * STEP;
      token[i] = x_row<E>(g, tile.block, t, block_row<E>(g, tile.block, t));
    }
  }

  /* This thread's chunk of row 0 of both operands at some step. */
  struct Source {
    const T *w, *x;
    int left; // elements of a row from the chunk on

    __device__ __forceinline__ void advance(const moelora_gemm_launch &g) {
      w += g.weights.w.stride_kt, x += kDepth, left -= kDepth;
    }
  };

  __device__ __forceinline__ Source source(const moelora_gemm_launch &g, int step) const {
    const int chunk = (threadIdx.x & 7) * 8;
    return {weights + step * g.weights.w.stride_kt + chunk,
            (const T *)g.tokens.x + step * kDepth + chunk, g.tokens.k - step * kDepth - chunk};
  }

  /* Where this thread writes in a stage. */
  static __device__ __forceinline__ uint32_t offset() {
    const int thread = threadIdx.x;
    return thread / 8 * kRowBytes + ((thread & 7 ^ thread / 8 & 7) << 4);
  }

  /* One of PARTS parts of a stage to `to`, if it is `wanted`. */
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, const Source &from, int part,
                                       uint32_t to, bool wanted) const {
    // Behind the end of a row zeros are written and nothing is read, but from a mapped address.
    const T *w = from.left > 0 ? from.w : weights,
            *x = from.left > 0 ? from.x : (const T *)g.tokens.x;
#pragma unroll
    for (int i = part * PART; i < (part + 1) * PART && i < W_ROWS; i++)
      put(to + i * STEP * kRowBytes, VECTORS ? row_address(w, row[i], 16) : w + row[i], from.left,
          wanted);
#pragma unroll
    for (int i = max(part * PART - W_ROWS, 0); i < (part + 1) * PART - W_ROWS && i < X_ROWS; i++)
      put(to + E::W_BYTES + i * STEP * kRowBytes,
          row_address(x, token[i], 2 * (uint32_t)g.tokens.stride), from.left,
          wanted && token[i] >= 0);
  }

  // No cache policy: with one, ptxas 13.0 names a descriptor register that is none (64-token tile).
  static __device__ __forceinline__ void put(uint32_t to, const T *from, int left, bool wanted) {
    if (VECTORS)
      copy_async_16<256>(to, from, left > 0 ? 16 : 0, wanted); // with the next stage's
    else if (wanted)
      copy_elements(to, from, max(0, min(8, left)));
  }
};

#endif
