/* Results of a gated projection in e4m3, for a next projection whose tokens are FP8, from the
 * epilogue tiles that hold them rounded: what quantize.cu would make of what it reads. A tile of
 * 256 weight rows has 128 outputs, a group. */
#ifndef MOELORA_CUDA_SM90_E4M3_ROWS_CUH
#define MOELORA_CUDA_SM90_E4M3_ROWS_CUH

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"

/* Rows `first` to `end` of a tile, by THREADS threads. Outputs 64 half to 64 half + 63 of 32 tokens
 * from `token` on lie in buffer(half, token / 32). All threads have written them. */
template <class S, class T, int THREADS, class Buffer>
__device__ __forceinline__ void store_e4m3(const moelora_gemm_launch &g, const Tile &tile,
                                           int first, int end, Buffer buffer) {
  static_assert(S::ROWS == 256, "128 outputs");
  const moelora_e4m3_rows &to = g.epilogue.e4m3;
  const int thread = threadIdx.x % 128 + (THREADS > 128 ? threadIdx.x / 128 % 2 * 128 : 0);
  const int lane = thread % 8, half = lane / 4;
#pragma unroll 1
  for (int from = first; from < end; from += THREADS / 8) {
    const int token = from + thread / 8;
    // Lanes of both halves read different banks.
    const uint32_t row = buffer(half, token / 32) + token % 32 * kRowBytes;
    const int chunk = (lane % 4 * 2 + half) ^ (token & 7);
    const uint4 a = load_shared_16(row + (chunk << 4)),
                b = load_shared_16(row + ((chunk ^ 1) << 4));
    const uint4 low = half ? b : a, high = half ? a : b;
    Numbers n = numbers_of<T>({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
    float scale = to.scale;
    if (to.rule == MOELORA_X_GROUP)
      scale = group_scale(largest_of<8>(largest(1e-10f, n)));
    const float inverse = 1.f / scale;
    for (int i = 0; i < 16; i++)
      n.v[i] *= inverse;
    if (token >= end)
      continue;
    const int64_t position = (int64_t)tile.block * S::TOKENS + token;
    char *const values = (char *)to.values + position * to.stride;
    *(uint4 *)(values + tile.column * 128 + lane * 16) = e4m3_bytes(n);
    if (lane == 0)
      to.scales[tile.column * to.scales_stride + position] = scale;
  }
}

#endif
