/* Shrink: h[p, slice, r] = round(s[l] * sum over k of x[p, k] A[slice][l, e, r, k])
 *
 * A CTA takes one window of rows and up to RANKS ranks. "Virtual" ranks count through the slices,
 * each padded to a multiple of 16, so that 16 of them never straddle two. The CTA walks over the
 * window's segments and, within each, over the depth; loads run STAGES - 1 steps ahead of the
 * products, across the ends of segments, so that the stream of factors never pauses.
 *
 * A stage holds, for every 64 of depth, ROWS rows of x and RANKS rows of A of 128 bytes each,
 * 16-byte chunk c of row i at c ^ (i & 7). Row i of x is row low + i of the window. Rows and ranks
 * that a segment does not have are neither loaded nor stored: what their memory holds stays in its
 * own rows and columns of a product. Depth past the end is zero in both.
 *
 * Warps share the rows (WARPS_M), the ranks (WARPS_N) and the depth (WARPS_K) of a stage; what the
 * last ones found is added up in a fixed order. */
#include "delta_rows.cuh"
#include "kernel_launch.cuh"

namespace {

template <int ROWS_, int RANKS_, int WARPS_M_, int WARPS_N_, int WARPS_K_, int DEPTH_, int STAGES_,
          int CTAS_>
struct Tile {
  static constexpr int ROWS = ROWS_, RANKS = RANKS_, DEPTH = DEPTH_, STAGES = STAGES_;
  static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, WARPS_K = WARPS_K_, CTAS = CTAS_;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
  static constexpr int LOADERS = THREADS / 8; // rows that all threads load at once
  static constexpr int X_PASSES = ROWS / LOADERS, A_PASSES = RANKS / LOADERS;
  static constexpr int MS = ROWS / (16 * WARPS_M), NS = RANKS / (16 * WARPS_N); // of a warp
  static constexpr int SLAB_BYTES = (ROWS + RANKS) * 128, STAGE_BYTES = DEPTH / 64 * SLAB_BYTES;
  static constexpr int PARTIAL_FLOATS = MS * NS * 8 * 32; // of a warp
  static constexpr int PARTIAL_BYTES = (WARPS_K - 1) * WARPS_M * WARPS_N * PARTIAL_FLOATS * 4;
  static constexpr int SHARED_BYTES =
      STAGES * STAGE_BYTES + PARTIAL_BYTES + (int)sizeof(Window<ROWS>);
  static_assert(ROWS % LOADERS == 0 && RANKS % LOADERS == 0, "threads load whole passes");
};

/* What a thread copies of one segment: chunk thread % 8 of these rows. */
template <class T, class C> struct Loader {
  const T *x[C::X_PASSES], *a[C::A_PASSES];

  __device__ __forceinline__ void start(const delta_shrink &p, const Window<C::ROWS> &w,
                                        int segment, int first_rank, int width) {
    const int low = w.low[segment], rows = w.high[segment] - low;
    const int64_t adapter = w.adapter[low], expert = w.expert[low];
    const int rank = w.rank[low];
#pragma unroll
    for (int pass = 0; pass < C::X_PASSES; pass++) {
      const int i = threadIdx.x / 8 + pass * C::LOADERS;
      x[pass] = nullptr;
      if (i < rows)
        x[pass] = (const T *)p.x + (uint32_t)w.row[low + i] / (uint32_t)p.x_divisor * p.x_stride;
    }
#pragma unroll
    for (int pass = 0; pass < C::A_PASSES; pass++) {
      const int v = first_rank + threadIdx.x / 8 + pass * C::LOADERS;
      const int slice = v / width, r = v - slice * width;
      a[pass] = nullptr;
      if (slice < p.lora.num_slices && r < rank) {
        const moelora_factor &f = p.lora.a[slice];
        a[pass] = (const T *)f.data + adapter * f.stride_l + expert * f.stride_e + r * f.stride_i;
      }
    }
  }

  template <bool VECTORS>
  static __device__ __forceinline__ void copy(uint32_t to, const T *from, int k, int depth) {
    if (VECTORS)
      copy_async_16(to, k < depth ? from + k : from, k < depth ? 16 : 0);
    else
      copy_elements(to, k < depth ? from + k : from, max(0, min(8, depth - k)));
  }

  template <bool VECTORS>
  __device__ __forceinline__ void load(const delta_shrink &p, uint32_t stage, int step) const {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const uint32_t to = stage + row * 128 + ((chunk ^ (row & 7)) << 4);
    static_assert(C::LOADERS % 8 == 0, "a pass keeps the row's place in the swizzle");
#pragma unroll
    for (int slab = 0; slab < C::DEPTH / 64; slab++) {
      const int k = step * C::DEPTH + slab * 64 + chunk * 8;
#pragma unroll
      for (int pass = 0; pass < C::A_PASSES; pass++)
        if (a[pass])
          copy<VECTORS>(to + slab * C::SLAB_BYTES + (C::ROWS + pass * C::LOADERS) * 128, a[pass], k,
                        p.k);
#pragma unroll
      for (int pass = 0; pass < C::X_PASSES; pass++)
        if (x[pass])
          copy<VECTORS>(to + slab * C::SLAB_BYTES + pass * C::LOADERS * 128, x[pass], k, p.k);
    }
  }
};

/* What a warp has of one segment's products: 16-row tiles warp_m + i * WARPS_M, 16-rank tiles
 * warp_n + j * WARPS_N. */
template <class T, class C> struct Products {
  float d[C::MS][C::NS][2][4];
  int rows;       // of the segment
  uint32_t ranks; // bit j: rank tile j has some

  __device__ __forceinline__ void start(const delta_shrink &p, const Window<C::ROWS> &w,
                                        int segment, int first_rank, int width) {
    const int low = w.low[segment], warp_n = threadIdx.x / 32 / C::WARPS_M % C::WARPS_N;
    rows = w.high[segment] - low;
    ranks = 0;
#pragma unroll
    for (int j = 0; j < C::NS; j++) {
      const int v = first_rank + 16 * (warp_n + j * C::WARPS_N);
      if (v / width < p.lora.num_slices && v % width < w.rank[low])
        ranks |= 1u << j;
#pragma unroll
      for (int i = 0; i < C::MS; i++)
#pragma unroll
        for (int q = 0; q < 4; q++)
          d[i][j][0][q] = d[i][j][1][q] = 0.f;
    }
  }

  __device__ __forceinline__ void add(uint32_t stage) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp % C::WARPS_M, warp_n = warp / C::WARPS_M % C::WARPS_N;
    const int warp_k = warp / (C::WARPS_M * C::WARPS_N);
    if (ranks == 0 || warp_m * 16 >= rows)
      return;
#pragma unroll
    for (int step = 0; step < C::DEPTH / 16 / C::WARPS_K; step++) {
      const int k16 = step * C::WARPS_K + warp_k, chunk = k16 % 4 * 2;
      const uint32_t slab = stage + k16 / 4 * C::SLAB_BYTES;
      uint32_t b[C::NS][4];
#pragma unroll
      for (int j = 0; j < C::NS; j++) {
        const int r = C::ROWS + 16 * (warp_n + j * C::WARPS_N) + (lane & 7) + (lane & 16) / 2;
        if (ranks >> j & 1)
          load_matrix_x4(b[j], slab + r * 128 + ((chunk + (lane >> 3 & 1) ^ r & 7) << 4));
      }
#pragma unroll
      for (int i = 0; i < C::MS; i++) {
        const int first = 16 * (warp_m + i * C::WARPS_M);
        if (first >= rows)
          break;
        uint32_t a[4];
        const int row = first + (lane & 15);
        load_matrix_x4(a, slab + row * 128 + ((chunk + (lane >> 4) ^ row & 7) << 4));
#pragma unroll
        for (int j = 0; j < C::NS; j++)
          if (ranks >> j & 1) {
            mma_16816<T>(d[i][j][0], a, &b[j][0]);
            mma_16816<T>(d[i][j][1], a, &b[j][2]);
          }
      }
    }
  }

  /* Adds up what the warps of different depth have; the first of them gets the sum. All threads
   * come here. */
  __device__ __forceinline__ void reduce(float *partial) {
    constexpr int TEAM = C::WARPS_M * C::WARPS_N;
    const int lane = threadIdx.x % 32, team = threadIdx.x / 32 % TEAM;
    const int warp_k = threadIdx.x / 32 / TEAM;
    float *flat = &d[0][0][0][0];
    if (warp_k > 0) {
      float *to = partial + ((warp_k - 1) * TEAM + team) * C::PARTIAL_FLOATS + lane;
#pragma unroll
      for (int v = 0; v < C::PARTIAL_FLOATS / 32; v++)
        to[v * 32] = flat[v];
    }
    __syncthreads();
    if (warp_k > 0)
      return;
#pragma unroll 1
    for (int other = 1; other < C::WARPS_K; other++) {
      const float *from = partial + ((other - 1) * TEAM + team) * C::PARTIAL_FLOATS + lane;
#pragma unroll
      for (int v = 0; v < C::PARTIAL_FLOATS / 32; v++)
        flat[v] += from[v * 32];
    }
  }

  __device__ __forceinline__ void store(const delta_shrink &p, const Window<C::ROWS> &w,
                                        int segment, int first_rank, int width) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, low = w.low[segment];
    const int warp_m = warp % C::WARPS_M, warp_n = warp / C::WARPS_M % C::WARPS_N;
    if (warp >= C::WARPS_M * C::WARPS_N)
      return;
    const int rank = w.rank[low], max_rank = p.lora.max_rank;
    const float scaling = p.scalings ? p.scalings[w.adapter[low]] : 1.f;
#pragma unroll
    for (int i = 0; i < C::MS; i++)
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        const int row = 16 * (warp_m + i * C::WARPS_M) + eight * 8 + lane / 4;
        if (row >= rows)
          continue;
        const uint32_t flat = w.row[low + row], top_k = p.rows.routes.top_k;
        T *h = (T *)p.h + flat / top_k * p.h_stride[1] + flat % top_k * p.h_stride[2];
#pragma unroll
        for (int j = 0; j < C::NS; j++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int v = first_rank + 16 * (warp_n + j * C::WARPS_N);
            const int slice = v / width, r = v - slice * width + half * 8 + (lane & 3) * 2;
            if (slice >= p.lora.num_slices || r >= max_rank)
              continue;
            const float *sum = d[i][j][half] + 2 * eight;
            const uint32_t both =
                pack2<T>(r < rank ? scaling * sum[0] : 0.f, r + 1 < rank ? scaling * sum[1] : 0.f);
            T *to = h + slice * p.h_stride[0] + r;
            if (p.pairs) {
              *(uint32_t *)to = both;
            } else {
              *(uint16_t *)to = (uint16_t)both;
              if (r + 1 < max_rank)
                *(uint16_t *)(to + 1) = (uint16_t)(both >> 16);
            }
          }
      }
  }
};

template <class T, class C, bool VECTORS>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    shrink_rows(const __grid_constant__ delta_shrink p) {
  extern __shared__ __align__(128) char memory[];
  const uint32_t stages = shared_address(memory);
  float *partial = (float *)(memory + C::STAGES * C::STAGE_BYTES);
  Window<C::ROWS> &w = *(Window<C::ROWS> *)((char *)partial + C::PARTIAL_BYTES);
  const int width = moelora_padded_rank(p.lora.max_rank);
  const int tiles = (p.lora.num_slices * width + C::RANKS - 1) / C::RANKS;
  const int steps = (p.k + C::DEPTH - 1) / C::DEPTH;
  wait_for_previous_kernel();
  start_next_kernel();

  const int64_t units = count_windows(p.rows) * tiles;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int first_rank = (int)(unit % tiles) * C::RANKS;
    load_window(p.rows, unit / tiles, w, [](int, uint32_t) {});

    Loader<T, C> loader;
    int loaded_segment = 0, loaded_step = 0, to_stage = 0;
    auto load = [&] {
      if (loaded_segment < w.segments) {
        if (loaded_step == 0)
          loader.start(p, w, loaded_segment, first_rank, width);
        loader.template load<VECTORS>(p, stages + to_stage * C::STAGE_BYTES, loaded_step);
        if (++loaded_step == steps) {
          loaded_step = 0;
          loaded_segment++;
        }
      }
      copy_async_commit();
      to_stage = to_stage + 1 == C::STAGES ? 0 : to_stage + 1;
    };
    for (int ahead = 0; ahead < C::STAGES - 1; ahead++)
      load();

    int from_stage = 0;
    for (int segment = 0; segment < w.segments; segment++) {
      Products<T, C> products;
      products.start(p, w, segment, first_rank, width);
      for (int step = 0; step < steps; step++) {
        copy_async_wait<C::STAGES - 2>();
        __syncthreads();
        load();
        products.add(stages + from_stage * C::STAGE_BYTES);
        from_stage = from_stage + 1 == C::STAGES ? 0 : from_stage + 1;
      }
      if (C::WARPS_K > 1)
        products.reduce(partial);
      products.store(p, w, segment, first_rank, width);
    }
    copy_async_wait<0>();
  }
}

/* ---- launch ---- */

/* Few rows to a pair: all that counts is how many bytes of A are on their way. Three CTAs to an SM,
 * two of the last; 99 KiB of shared memory, which every chip since sm_80 gives, hold each. */
using Stream16 = Tile<32, 16, 1, 1, 4, 128, 6, 3>;
using Stream32 = Tile<32, 32, 1, 2, 2, 128, 4, 3>;
using Stream64 = Tile<32, 64, 1, 4, 1, 128, 4, 2>;
/* Many rows to a pair: one reading of A serves up to 128 or 256 of them. */
using Thin = Tile<128, 32, 4, 1, 2, 64, 4, 2>;
using Wide = Tile<256, 128, 4, 2, 1, 64, 4, 1>;
using WideSmall = Tile<256, 128, 4, 2, 1, 64, 3, 1>; // for 163 KiB

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct Shape {
  int64_t rows, ranks, sms; // ranks of all slices, each padded to 16

  template <class C> int64_t units() const { return rows * ceil_div(ranks, C::RANKS); }
  /* Rows of a window, so that the CTAs that fit the chip get equally many. */
  template <class C> int64_t window() const {
    const int64_t ctas = sms * C::CTAS, rounds = ceil_div(units<C>(), ctas * C::ROWS);
    return ceil_div(units<C>(), ctas * rounds);
  }
  /* One round of windows is enough. */
  template <class C> bool suits() const { return units<C>() <= sms * C::CTAS * C::ROWS; }
};

template <class T, class C, bool VECTORS>
moelora_status launch(delta_shrink p, const Shape &shape, const moelora_exec *exec) {
  const int64_t windows = delta_set_window(&p.rows, shape.window<C>());
  return launch_kernel<shrink_rows<T, C, VECTORS>>("delta_shrink",
                                                   windows * ceil_div(shape.ranks, C::RANKS),
                                                   C::THREADS, C::SHARED_BYTES, exec, p);
}

template <class T> moelora_status launch_as(const delta_shrink &p, const moelora_exec *exec) {
  const Shape shape = {p.rows.routes.num_rows,
                       p.lora.num_slices * moelora_padded_rank(p.lora.max_rank),
                       moelora_cuda_num_sms(exec->device_index)};
  const int64_t shared = moelora_cuda_shared_bytes(exec->device_index);
  if (!p.vectors)
    return launch<T, Stream64, false>(p, shape, exec);
  /* As few ranks to a CTA as keep the chip busy, but no more CTAs than that. */
  if (shape.ranks <= 16 ? shape.suits<Stream16>() : shape.units<Stream16>() <= shape.sms)
    return launch<T, Stream16, true>(p, shape, exec);
  if (shape.ranks <= 32 ? shape.suits<Stream32>() : shape.units<Stream32>() <= shape.sms)
    return launch<T, Stream32, true>(p, shape, exec);
  if (shape.ranks <= 32 && shared >= Thin::SHARED_BYTES)
    return launch<T, Thin, true>(p, shape, exec);
  if (shape.suits<Stream64>() || shared < WideSmall::SHARED_BYTES)
    return launch<T, Stream64, true>(p, shape, exec);
  return shared < Wide::SHARED_BYTES ? launch<T, WideSmall, true>(p, shape, exec)
                                     : launch<T, Wide, true>(p, shape, exec);
}

} // namespace

extern "C" moelora_status delta_launch_shrink(const delta_shrink *shrink, moelora_dtype dtype,
                                              const moelora_exec *exec) {
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(*shrink, exec)
                               : launch_as<__half>(*shrink, exec);
}
