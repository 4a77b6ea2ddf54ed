/* Rounds float32 factors to the 16-bit dtype of a call, all in one launch.
 *
 * Each row of a factor [max_loras, experts, rows] is contiguous; the copy is contiguous as a whole.
 * A CTA processes neighboring rows with about kElements elements; a thread rounds 4 elements at a
 * time, or one if alignment requires it. */
#include "cuda/backward/gradients.h"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/mma.cuh"

namespace {

constexpr int kThreads = 256, kElements = 4 * kThreads * 4;
constexpr int kMaxFactors = MOELORA_PROJECTIONS * 2 * MOELORA_MAX_SLICES;

struct RoundedFactor {
  const float *from;
  void *to;
  int64_t stride_l, stride_e, stride_i, all_rows;
  int32_t experts, rows, columns;
  int32_t cta_rows;      // rows per CTA
  moelora_divisor units; // units of 4 elements, or of 1, per row
  bool quads;
  int64_t first, ctas; // first CTA, number of CTAs
};

struct RoundLaunch {
  RoundedFactor factor[kMaxFactors];
  int32_t count;
  int64_t ctas;
};

template <class T, int WIDTH>
__device__ __forceinline__ void round_rows(const RoundedFactor &f, int64_t first, int rows) {
  const int64_t pair = first / f.rows;
  const int64_t adapter = pair / f.experts;
  const int units = rows * (int)f.units.value;
  for (int unit = threadIdx.x; unit < units; unit += kThreads) {
    // Index of the row, relative to the CTA's first one.
    const int row = (int)divide((uint32_t)unit, f.units), at = (unit - row * (int)f.units.value);
    const int i = (int)(first - pair * f.rows) + row, pairs = i / f.rows;
    const int e = (int)(pair - adapter * f.experts) + pairs, adapters = e / f.experts;
    const float *from = f.from + (adapter + adapters) * f.stride_l +
                        (int64_t)(e - adapters * f.experts) * f.stride_e +
                        (int64_t)(i - pairs * f.rows) * f.stride_i + at * WIDTH;
    T *to = (T *)f.to + (first + row) * f.columns + at * WIDTH;
    if constexpr (WIDTH == 4) {
      const float4 v = *(const float4 *)from;
      *(uint2 *)to = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
    } else {
      *to = Element<T>::round(*from);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) round_factors(const __grid_constant__ RoundLaunch s) {
  follow_previous_kernel();
  for (int64_t work = blockIdx.x; work < s.ctas; work += gridDim.x) {
    int number = 0;
    while (number + 1 < s.count && work >= s.factor[number + 1].first)
      number++;
    const RoundedFactor &f = s.factor[number];
    const int64_t first = (work - f.first) * f.cta_rows;
    const int64_t left = f.all_rows - first;
    const int rows = left < f.cta_rows ? (int)left : f.cta_rows;
    if (f.quads)
      round_rows<T, 4>(f, first, rows);
    else
      round_rows<T, 1>(f, first, rows);
  }
}

bool allows_quads(const moelora_factor &f, int64_t columns) {
  return (uintptr_t)f.data % 16 == 0 && f.stride_l % 4 == 0 && f.stride_e % 4 == 0 &&
         f.stride_i % 4 == 0 && columns % 4 == 0;
}

void add_factor(RoundLaunch *s, const moelora_factor &from, const moelora_factor &to,
                const moelora_routes &routes, int64_t rows) {
  const int64_t columns = to.stride_i;
  RoundedFactor &f = s->factor[s->count++];
  f.from = (const float *)from.data;
  f.to = (void *)to.data;
  f.stride_l = from.stride_l;
  f.stride_e = from.stride_e;
  f.stride_i = from.stride_i;
  f.experts = from.stride_e ? routes.num_experts : 1;
  f.rows = (int32_t)rows;
  f.columns = (int32_t)columns;
  f.all_rows = (int64_t)routes.max_loras * f.experts * rows;
  f.quads = allows_quads(from, columns);
  f.units = moelora_divisor_of((uint32_t)(f.quads ? columns / 4 : columns));
  f.cta_rows = columns < kElements ? (int32_t)(kElements / columns) : 1;
  f.first = s->ctas;
  f.ctas = (f.all_rows + f.cta_rows - 1) / f.cta_rows;
  s->ctas += f.ctas;
}

} // namespace

moelora_status moelora_cuda_round_factors(const moelora_rounding *roundings, int32_t count,
                                          const moelora_routes *routes, moelora_dtype dtype,
                                          const moelora_exec *exec) {
  RoundLaunch s = {};
  for (int32_t p = 0; p < count; p++) {
    const moelora_factors &from = *roundings[p].from, &to = *roundings[p].to;
    for (int32_t i = 0; from.wide && i < from.num_slices; i++) {
      add_factor(&s, from.a[i], to.a[i], *routes, from.max_rank);
      add_factor(&s, from.b[i], to.b[i], *routes, moelora_slice_columns(&from, i));
    }
  }
  if (dtype == MOELORA_BF16)
    return launch_kernel<round_factors<__nv_bfloat16>>("round_factors", s.ctas, kThreads, 0, exec,
                                                       s);
  return launch_kernel<round_factors<__half>>("round_factors", s.ctas, kThreads, 0, exec, s);
}
