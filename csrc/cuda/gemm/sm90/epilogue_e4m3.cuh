/* Epilogue of a gated projection whose outputs are the e4m3 input of the next projection.
 * Quantizes the rounded outputs in the epilogue tiles, with the same values and scales as
 * quantize.cu. A tile of 256 weight rows has 128 outputs, which is one scale group. */
#ifndef MOELORA_CUDA_SM90_EPILOGUE_E4M3_CUH
#define MOELORA_CUDA_SM90_EPILOGUE_E4M3_CUH

#include "cuda/gemm/common/e4m3.cuh"
#include "cuda/gemm/common/tile.cuh"

/* Quantizes tokens `first` to `end` of a tile with THREADS threads. sOut(half, token / 32) holds
 * outputs 64 half to 64 half + 63 of 32 tokens; all threads must have written it. */
template <class S, class T, int THREADS, class Buffer>
__device__ __forceinline__ void store_e4m3(const moelora_gemm_launch &g, const Tile &tile,
                                           int first, int end, Buffer sOut) {
  static_assert(S::ROWS == 256, "128 outputs");
  const moelora_quantized_rows &gOut = g.epilogue.e4m3;
  const int thread = threadIdx.x % 128 + (THREADS > 128 ? threadIdx.x / 128 % 2 * 128 : 0);
  const int lane = thread % 8, half = lane / 4;
#pragma unroll 1
  for (int from = first; from < end; from += THREADS / 8) {
    const int token = from + thread / 8;
    // Lanes of the two halves read different banks.
    const uint32_t row = sOut(half, token / 32) + token % 32 * kRowBytes;
    const int chunk = (lane % 4 * 2 + half) ^ (token & 7);
    const uint4 a = load_shared_16(row + (chunk << 4)),
                b = load_shared_16(row + ((chunk ^ 1) << 4));
    const uint4 low = half ? b : a, high = half ? a : b;
    FloatColumns n = to_floats<T>({low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
    float scale = gOut.scale;
    if (gOut.rule == MOELORA_X_GROUP)
      scale = group_scale(max_over_lanes<8>(abs_max(1e-10f, n)));
    const float inverse = 1.f / scale;
    for (int i = 0; i < 16; i++)
      n.v[i] *= inverse;
    if (token >= end)
      continue;
    const int64_t position = (int64_t)tile.block * S::TOKENS + token;
    char *const values = (char *)gOut.values + position * gOut.stride;
    store_global_16(values + tile.column * 128 + lane * 16, e4m3_bytes(n));
    if (lane == 0)
      gOut.scales[tile.column * gOut.scales_stride + position] = scale;
  }
}

#endif
