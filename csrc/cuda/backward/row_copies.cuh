/* Copies rows of gradient operands to shared memory. Declares the gradient kernels' arguments. */
#pragma once

#include "cuda/backward/gradient_tile.cuh"

struct GradientLaunch {
  GradientGroup group[2];  // of pairs, of adapters
  const int32_t *index[3]; // [P] row indices, by moelora_row_index
  const float *weight;
  bool accumulate;
};

/* The columns of an operand that a thread copies to shared memory: 8 consecutive elements of each
 * of its rows; the first `size` are valid. */
template <class T> struct RowCopies {
  const T *from; // its columns in row 0
  int size;      // valid elements; the rest is zero-filled

  __device__ __forceinline__ void describe(const moelora_gradient_operand &operand, int64_t offset,
                                           int left) {
    size = max(min(left, 8), 0);
    from = (const T *)operand.data + (size ? offset : 0);
  }
  /* Copies the columns of a row, or zero-fills if it is not `valid`. */
  __device__ __forceinline__ void copy(const moelora_gradient_operand &operand, bool vectors,
                                       uint32_t to, int row, bool valid) const {
    if (vectors)
      copy_async_16(to,
                    row_address(from, (uint32_t)row, (uint32_t)(operand.stride * (int)sizeof(T))),
                    valid ? size * (int)sizeof(T) : 0);
    else
      copy_elements(to, from + row * operand.stride, valid ? size : 0);
  }
};

/* Returns at / tiles: the part or split that tile `at` belongs to, where each has `tiles` tiles.
 * From 2^32 on bit by bit: the compiler's division is a call, which would spill registers. */
__device__ __forceinline__ int divide_work(int64_t at, int tiles) {
  if (at >> 32 == 0)
    return (int)((uint32_t)at / (uint32_t)tiles);
  uint32_t quotient = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 0; bit--)
    if (at >= (int64_t)tiles << bit)
      at -= (int64_t)tiles << bit, quotient |= 1u << bit;
  return (int)quotient;
}
