/* Sum over top_k, in float32 and in the order of j, rounded once:
 *
 *   out[m] = [out[m] +] sum over j of weight[m, j] z[row of (m, j)]
 *
 * z [, z_stride] has the dtype of out. A thread sums WIDTH neighboring columns.
 * Layers and deltas differ in which rows of a token exist and where they are. */
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/launch/routes.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/variant_ids.h"

namespace {

constexpr int kThreads = 256;

/* Rows of a layer: by position or by flat row, weighted. Tokens without a row are zeroed. */
struct LayerRows {
  static constexpr bool EVERY_TOKEN = true;

  /* Returns the row of z for flat row `row`; -1: skipped. */
  static __device__ __forceinline__ int64_t find(const moelora_sum_launch &s, int64_t row) {
    const int32_t position = s.positions[row];
    return s.by_row && position >= 0 ? row : position;
  }
  static __device__ __forceinline__ float weight(const moelora_sum_launch &s, int64_t m, int j) {
    return s.weights ? s.weights[m * s.weights_stride[0] + j * s.weights_stride[1]] : 1.f;
  }
};

/* Rows of a delta: by flat row. Tokens without a row are left unchanged. */
struct DeltaRows {
  static constexpr bool EVERY_TOKEN = false;

  static __device__ __forceinline__ int64_t find(const moelora_sum_launch &s, int64_t row) {
    if (s.written)
      return s.written[row] ? row : -1;
    const RoutedRow found = routed_row(s.routes, (uint32_t)row);
    const bool active = found.expert >= 0 && found.adapter >= 0 &&
                        true_rank(s.routes, found.adapter, s.max_rank) > 0;
    return active ? row : -1;
  }
  static __device__ __forceinline__ float weight(const moelora_sum_launch &, int64_t, int) {
    return 1.f;
  }
};

/* Adds weight times WIDTH neighboring columns to `sum`; WIDTH is 1, or fills 16 bytes. Each row is
 * read once: __ldcs makes L2 evict it before rows that are still to be read. */
template <int WIDTH, class T>
__device__ __forceinline__ void add_columns(float (&sum)[WIDTH], const T *from, float weight) {
  __align__(16) T chunk[WIDTH];
  if constexpr (WIDTH > 1)
    *(uint4 *)chunk = __ldcs((const uint4 *)from);
  else
    chunk[0] = *from;
#pragma unroll
  for (int c = 0; c < WIDTH; c++)
    sum[c] += weight * Element<T>::to_float(chunk[c]);
}

/* Sums all rows of a token. Returns whether to store the sum. */
template <class Rows, int WIDTH, class T>
__device__ __forceinline__ bool add_rows(float (&sum)[WIDTH], const moelora_sum_launch &s,
                                         int64_t m, const T *z) {
  const int top_k = s.routes.top_k;
  bool any = Rows::EVERY_TOKEN;
#pragma unroll 4
  for (int j = 0; j < top_k; j++) {
    const int64_t row = Rows::find(s, m * top_k + j);
    const float weight = Rows::weight(s, m, j);
    if (row < 0)
      continue;
    any = true;
    add_columns(sum, z + row * s.z_stride, weight);
  }
  return any;
}

template <class Rows, class T, int WIDTH>
__global__ void __launch_bounds__(kThreads, kLightResident)
    sum_rows(const __grid_constant__ moelora_sum_launch s) {
  follow_previous_kernel();
  const int32_t chunks = (s.columns + WIDTH - 1) / WIDTH;
  const int64_t count = s.routes.num_tokens * chunks;
  for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < count;
       i += (int64_t)gridDim.x * kThreads) {
    const int64_t m = i / chunks, column = i % chunks * WIDTH;
    float sum[WIDTH] = {};
    if (!add_rows<Rows>(sum, s, m, (const T *)s.z + column))
      continue;
    T *to = (T *)s.out + m * s.out_stride + column;
    __align__(16) T rounded[WIDTH];
    if constexpr (!Rows::EVERY_TOKEN) {
      if constexpr (WIDTH > 1)
        *(uint4 *)rounded = *(const uint4 *)to;
      else
        rounded[0] = *to;
    }
#pragma unroll
    for (int c = 0; c < WIDTH; c++) {
      if constexpr (!Rows::EVERY_TOKEN)
        sum[c] += s.add ? Element<T>::to_float(rounded[c]) : 0.f;
      rounded[c] = Element<T>::round(sum[c]);
    }
    if constexpr (WIDTH > 1)
      *(uint4 *)to = *(const uint4 *)rounded;
    else
      *to = rounded[0];
  }
}

template <class Rows, class T, int WIDTH>
moelora_status launch_rows(const moelora_sum_launch &s, const moelora_exec *exec) {
  const int64_t chunks = (s.columns + WIDTH - 1) / WIDTH;
  const int64_t work = (s.routes.num_tokens * chunks + kThreads - 1) / kThreads;
  return launch_kernel<sum_rows<Rows, T, WIDTH>>("sum", work, kThreads, 0, exec, s);
}

template <class T, int WIDTH>
moelora_status launch(const moelora_sum_launch &s, const moelora_exec *exec) {
  return s.positions ? launch_rows<LayerRows, T, WIDTH>(s, exec)
                     : launch_rows<DeltaRows, T, WIDTH>(s, exec);
}

} // namespace

moelora_status moelora_cuda_sum(const moelora_sum_launch *s, const moelora_variant *variant,
                                const moelora_exec *exec) {
  switch (variant->id) {
#define LAUNCH(NAME, T, WIDTH)                                                                     \
  case CUDA_##NAME:                                                                                \
    return launch<T, WIDTH>(*s, exec);
#define MOELORA_CUDA_SUM(STEM, ...) MOELORA_BOTH_DTYPES(LAUNCH, sum, STEM, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH
  }
  return moelora_no_kernel(variant->name, "sums nothing");
}
