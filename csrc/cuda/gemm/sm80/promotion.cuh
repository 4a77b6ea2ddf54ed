/* Promotes partial accumulators in the portable GEMM, for FP8 weights and FP8 tokens. Operands are
 * e4m3 values converted to T, whose products are exact. Every 128 elements of K (64 for G64), the
 * partial accumulators are multiplied by the scales of their row and token and added to the
 * accumulators:
 *
 *   sum += partial (s_w s_x)
 *
 * in float32 and in order of K, for every tile size. Other formats accumulate directly. */
#pragma once

#include "cuda/gemm/sm80/product.cuh"

/* Accumulators that MMAs write to: `sum` itself, except for W8A8. */
template <class E, bool IS_W8A8 = E::Format::IS_W8A8> struct Partial {
  __device__ __forceinline__ WarpTile<E> &of(WarpTile<E> &sum) { return sum; }
  __device__ __forceinline__ void clear() {}
  template <int WIDTH>
  __device__ __forceinline__ void promote(WarpTile<E> &, const moelora_gemm_launch &, uint32_t,
                                          int) {}
};

template <class E> struct Partial<E, true> : WarpTile<E> {
  using S = WarpTile<E>;
  using S::d;

  __device__ __forceinline__ S &of(S &) { return *this; }

  /* Promotes the first WIDTH n8 tiles if a scale group ends with step `step`. The step's stage may
   * be overwritten already, but not its slot in `slots`. */
  template <int WIDTH>
  __device__ __forceinline__ void promote(S &sum, const moelora_gemm_launch &g, uint32_t slots,
                                          int step) {
    const moelora_format format = g.weights.w.format;
    if (step % 2 == 0 && moelora_x_group(format) > kDepth && step != (g.tokens.k - 1) / kDepth)
      return;
    slots += step % E::SLOTS * E::SLOT_BYTES;
    float2 of_rows[E::TILES];
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++)
      of_rows[m64] = load_fp8_scales(slots + m64 * kFp8Scales, format, step % 2);
    slots += E::ALL_SCALES + 4 * (S::first_token() + (threadIdx.x & 3) * 2);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      const uint2 two = load_shared_8(slots + 4 * j * S::NEXT);
      const float of_tokens[2] = {__uint_as_float(two.x), __uint_as_float(two.y)};
#pragma unroll
      for (int m64 = 0; m64 < E::TILES; m64++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const float scale = (q < 2 ? of_rows[m64].x : of_rows[m64].y) * of_tokens[q % 2];
          float &more = d[m64 / 2][j][m64 % 2][q];
          sum.d[m64 / 2][j][m64 % 2][q] += more * scale;
          more = 0.f;
        }
    }
  }
};
