/* Expand: z[p, slice * N + n] = sum over r of h[p, slice, r] B[slice][l, e, n, r], into out
 *
 *   out = z, or out += z; z may be weighted, or silu(gate) * up of its two halves
 *
 * Warps work alone: one takes the rows of a window and two groups of 32 columns, neighbours or a
 * gate and its up. For every segment it loads its piece of B into registers, once if PIECE ranks
 * cover the true rank, and then goes over the rows, 16 at a time: the loads of h and of out first,
 * then the products, then the stores.
 *
 * Which column of B or rank of h a slot of an mma stands for is free, as long as both sides agree:
 *   ranks    lane q = lane % 4 takes ranks 8q to 8q + 7 of 32 (or 4q to 4q + 3 of 16): one load of
 *            16 (8) bytes makes its slots of two (one) products
 *   columns  slot j of product t stands for column 8 (j / 2) + 2t + j % 2 of a group, so that a
 *            lane ends up with 8 neighbouring columns of rows lane / 4 and lane / 4 + 8
 * so nothing passes through shared memory, and all accesses are whole sectors. */
#include "delta_rows.cuh"
#include "kernel_launch.cuh"

namespace {

constexpr int kRows = 128; // of a window, at most
constexpr int kGroup = 32; // columns

/* Warps of a CTA and CTAs of an SM, as registers allow: B alone takes 16 of them for each step. */
template <int STEPS> constexpr int kWarps = STEPS <= 2 ? 8 : 4;
template <int STEPS, bool SILU> constexpr int kCtas = STEPS == 4 && !SILU ? 3 : 2;

/* N elements, of which `count` (at least 1) are wanted: by elements others are 0, by vectors they
 * are what is there. */
template <class T, int N, bool VECTORS>
__device__ __forceinline__ void load_elements(uint32_t (&v)[N / 2], const T *from, int count) {
  if constexpr (VECTORS) {
    if constexpr (N == 8) {
      const uint4 all = *(const uint4 *)from;
      v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
    } else {
      const uint2 all = *(const uint2 *)from;
      v[0] = all.x, v[1] = all.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const uint32_t low = 2 * i < count ? ((const uint16_t *)from)[2 * i] : 0;
      const uint32_t high = 2 * i + 1 < count ? ((const uint16_t *)from)[2 * i + 1] : 0;
      v[i] = low | high << 16;
    }
  }
}

/* Zeroes element `count` and those behind it. */
template <int PAIRS>
__device__ __forceinline__ void mask_elements(uint32_t (&v)[PAIRS], int count) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++)
    v[i] &= (2 * i < count ? 0xffffu : 0u) | (2 * i + 1 < count ? 0xffff0000u : 0u);
}

template <class T> __device__ __forceinline__ float low_half(uint32_t pair) {
  const uint16_t bits = (uint16_t)pair;
  return Element<T>::to_float(*(const T *)&bits);
}
template <class T> __device__ __forceinline__ float high_half(uint32_t pair) {
  const uint16_t bits = (uint16_t)(pair >> 16);
  return Element<T>::to_float(*(const T *)&bits);
}

/* Where the rows of a window lie, and their weights. */
struct Places {
  int64_t h[kRows], out[kRows]; // of slice 0, of column 0
  float weight[kRows];
};

/* STEPS products of 16 ranks are one piece of B. */
template <class T, int STEPS, bool SILU, bool VECTORS> struct Expand {
  static constexpr int PIECE = 16 * STEPS, CHUNK = STEPS == 1 ? 4 : 8; // ranks of a load
  static constexpr int LOADS = PIECE / (4 * CHUNK);
  static constexpr int SOURCES = SILU ? 2 : 1; // h of gate and up may differ in slice

  int slice[SOURCES], first[2], end[SOURCES]; // this lane's first column of either group
  uint32_t b[2][4][LOADS][CHUNK / 2];

  /* Takes tile `tile`; false behind the last. */
  __device__ __forceinline__ bool select(const delta_expand &p, int tile) {
    const int n = (int)p.lora.slice_n, slices = p.lora.num_slices;
    if constexpr (SILU) {
      // one slice holds gate and up, or the first half of the slices does gate
      const int width = slices == 1 ? n / 2 : n, tiles = (width + kGroup - 1) / kGroup;
      slice[0] = tile / tiles;
      slice[1] = slices == 1 ? 0 : slice[0] + slices / 2;
      first[0] = tile % tiles * kGroup;
      first[1] = slices == 1 ? width + first[0] : first[0];
      end[0] = width;
      end[1] = slices == 1 ? n : width;
      return slice[0] < (slices == 1 ? 1 : slices / 2);
    } else {
      const int tiles = (n + 2 * kGroup - 1) / (2 * kGroup);
      slice[0] = tile / tiles;
      first[0] = tile % tiles * 2 * kGroup;
      first[1] = first[0] + kGroup;
      end[0] = n;
      return slice[0] < slices;
    }
  }

  __device__ __forceinline__ void load_b(const delta_expand &p, int64_t adapter, int64_t expert,
                                         int rank, int piece) {
    const int j = threadIdx.x / 4 % 8, r0 = piece + threadIdx.x % 4 * CHUNK;
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const moelora_factor &f = p.lora.b[slice[SILU ? g : 0]];
      const int n = first[g] + 8 * (j / 2) + j % 2, there = end[SILU ? g : 0] - n;
      const T *row =
          (const T *)f.data + adapter * f.stride_l + expert * f.stride_e + n * f.stride_i + r0;
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
          const int r = r0 + i * 4 * CHUNK;
#pragma unroll
          for (int word = 0; word < CHUNK / 2; word++)
            b[g][t][i][word] = 0;
          if (2 * t < there && r < rank)
            load_elements<T, CHUNK, VECTORS>(b[g][t][i], row + 2 * t * f.stride_i + i * 4 * CHUNK,
                                             rank - r);
        }
    }
    // after all loads: none of them waits for another
    if (VECTORS && rank % CHUNK != 0) {
#pragma unroll
      for (int g = 0; g < 2; g++)
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int i = 0; i < LOADS; i++)
            mask_elements(b[g][t][i], rank - r0 - i * 4 * CHUNK);
    }
  }

  /* d += h B^T for a piece of ranks of the rows at `places`, two to a lane; -1 is none. */
  __device__ __forceinline__ void multiply(float (&d)[2][4][4], const delta_expand &p,
                                           const Places &places, const int (&row)[2], int rank,
                                           int piece) {
    const int r0 = piece + threadIdx.x % 4 * CHUNK;
    uint32_t h[SOURCES][2][LOADS][CHUNK / 2];
#pragma unroll
    for (int s = 0; s < SOURCES; s++)
#pragma unroll
      for (int eight = 0; eight < 2; eight++)
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
          const int r = r0 + i * 4 * CHUNK;
#pragma unroll
          for (int word = 0; word < CHUNK / 2; word++)
            h[s][eight][i][word] = 0;
          if (row[eight] >= 0 && r < rank)
            load_elements<T, CHUNK, VECTORS>(
                h[s][eight][i],
                (const T *)p.h + slice[s] * p.h_stride[0] + places.h[row[eight]] + r, rank - r);
        }
    if (VECTORS && rank % CHUNK != 0) {
#pragma unroll
      for (int s = 0; s < SOURCES; s++)
#pragma unroll
        for (int eight = 0; eight < 2; eight++)
#pragma unroll
          for (int i = 0; i < LOADS; i++)
            mask_elements(h[s][eight][i], rank - r0 - i * 4 * CHUNK);
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if (piece + i * 4 * CHUNK >= rank)
        continue;
#pragma unroll
      for (int half = 0; half < CHUNK / 4; half++)
#pragma unroll
        for (int g = 0; g < 2; g++) {
          const auto &of_rows = h[SILU ? g : 0];
          const uint32_t a[4] = {of_rows[0][i][2 * half], of_rows[1][i][2 * half],
                                 of_rows[0][i][2 * half + 1], of_rows[1][i][2 * half + 1]};
#pragma unroll
          for (int t = 0; t < 4; t++)
            mma_16816<T>(d[g][t], a, &b[g][t][i][2 * half]);
        }
    }
  }

  /* First of the 8 columns of group `g` that a lane stores, and how many there are. */
  __device__ __forceinline__ int out_column(const delta_expand &p, int g) const {
    return slice[0] * (int)p.lora.slice_n + first[0] + g * kGroup + threadIdx.x % 4 * 8;
  }
  __device__ __forceinline__ int out_count(int g) const {
    return end[0] - first[0] - g * kGroup - threadIdx.x % 4 * 8;
  }

  /* What is in out, for `add`. */
  __device__ __forceinline__ void load_out(uint32_t (&old)[2][2][4], const delta_expand &p,
                                           const Places &places, const int (&row)[2]) const {
#pragma unroll
    for (int eight = 0; eight < 2; eight++)
#pragma unroll
      for (int g = 0; g < 2; g++) {
        const int count = out_count(g);
        if (row[eight] >= 0 && count > 0)
          load_elements<T, 8, VECTORS>(
              old[eight][g], (const T *)p.out + places.out[row[eight]] + out_column(p, g), count);
      }
  }

  static __device__ __forceinline__ void store(const delta_expand &p, const float (&z)[8],
                                               int64_t at, int count) {
    T *to = (T *)p.out + at;
    float *to_f32 = (float *)p.out + at;
    if constexpr (VECTORS) {
      if (p.f32) {
        ((float4 *)to_f32)[0] = {z[0], z[1], z[2], z[3]};
        ((float4 *)to_f32)[1] = {z[4], z[5], z[6], z[7]};
      } else {
        *(uint4 *)to = {pack2<T>(z[0], z[1]), pack2<T>(z[2], z[3]), pack2<T>(z[4], z[5]),
                        pack2<T>(z[6], z[7])};
      }
    } else {
#pragma unroll
      for (int c = 0; c < 8; c++)
        if (c < count && p.f32)
          to_f32[c] = z[c];
        else if (c < count)
          to[c] = Element<T>::round(z[c]);
    }
  }

  __device__ __forceinline__ void finish(const float (&d)[2][4][4], const uint32_t (&old)[2][2][4],
                                         const delta_expand &p, const Places &places,
                                         const int (&row)[2]) const {
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      if (row[eight] < 0)
        continue;
      const float weight = places.weight[row[eight]];
#pragma unroll
      for (int g = 0; g < (SILU ? 1 : 2); g++) {
        const int count = out_count(g);
        if (count <= 0)
          continue;
        float z[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const float v = d[g][c / 2][2 * eight + c % 2];
          if constexpr (SILU) {
            z[c] = v * d[1][c / 2][2 * eight + c % 2] / (1.f + __expf(-v));
          } else {
            const uint32_t word = old[eight][g][c / 2];
            z[c] = (c % 2 ? high_half<T>(word) : low_half<T>(word)) + weight * v;
          }
        }
        store(p, z, places.out[row[eight]] + out_column(p, g), count);
      }
    }
  }

  /* One segment: rows low to high - 1 of the window. */
  __device__ __forceinline__ void run(const delta_expand &p, const Window<kRows> &w,
                                      const Places &places, int low, int high) {
    const int rank = w.rank[low];
#pragma unroll 1
    for (int sixteen = low; sixteen < high; sixteen += 16) {
      int row[2];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        row[eight] = sixteen + eight * 8 + threadIdx.x % 32 / 4;
        row[eight] = row[eight] < high ? row[eight] : -1;
      }
      uint32_t old[2][2][4] = {};
      if (!SILU && p.add)
        load_out(old, p, places, row);
      float d[2][4][4] = {};
#pragma unroll 1
      for (int piece = 0; piece < rank; piece += PIECE) {
        if (sixteen == low || rank > PIECE)
          load_b(p, w.adapter[low], w.expert[low], rank, piece);
        multiply(d, p, places, row, rank, piece);
      }
      finish(d, old, p, places, row);
    }
  }
};

struct Shared {
  Window<kRows> window;
  Places places;
};

template <class T, int STEPS, bool SILU, bool VECTORS>
__global__ void __launch_bounds__(32 * kWarps<STEPS>, kCtas<STEPS, SILU>)
    expand_rows(const __grid_constant__ delta_expand p, int tiles) {
  extern __shared__ __align__(16) char memory[];
  Window<kRows> &w = ((Shared *)memory)->window;
  Places &places = ((Shared *)memory)->places;
  constexpr int WARPS = kWarps<STEPS>;
  const int teams = (tiles + WARPS - 1) / WARPS;
  wait_for_previous_kernel();
  start_next_kernel();

  const int64_t units = count_windows(p.rows) * teams;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int team = (int)(unit % teams);
    load_window(p.rows, unit / teams, w, [&](int i, uint32_t row) {
      const moelora_routes &routes = p.rows.routes;
      const uint32_t token = row / (uint32_t)routes.top_k, choice = row - token * routes.top_k;
      places.h[i] = token * p.h_stride[1] + choice * p.h_stride[2];
      places.out[i] = token * p.out_stride[0] + choice * p.out_stride[1];
      places.weight[i] = p.topk_weights ? p.topk_weights[token * routes.topk_weights_stride[0] +
                                                         choice * routes.topk_weights_stride[1]]
                                        : 1.f;
      if (p.written && team == 0)
        p.written[row] = 1;
    });
    Expand<T, STEPS, SILU, VECTORS> expand;
    if (!expand.select(p, team * WARPS + threadIdx.x / 32))
      continue;
    for (int s = 0; s < w.segments; s++)
      expand.run(p, w, places, w.low[s], w.high[s]);
  }
}

/* ---- launch ---- */

template <class T, int STEPS, bool SILU, bool VECTORS>
moelora_status launch(delta_expand p, const moelora_exec *exec) {
  const int64_t n = p.lora.slice_n, slices = p.lora.num_slices;
  int64_t tiles = slices * ((n + 2 * kGroup - 1) / (2 * kGroup));
  if (SILU)
    tiles = slices == 1 ? (n / 2 + kGroup - 1) / kGroup : slices / 2 * ((n + kGroup - 1) / kGroup);
  constexpr int WARPS = kWarps<STEPS>;
  const int64_t teams = (tiles + WARPS - 1) / WARPS;
  /* A round or more of windows that keep all CTAs that fit the chip equally busy. */
  const int64_t ctas = moelora_cuda_num_sms(exec->device_index) * kCtas<STEPS, SILU>;
  const int64_t units = p.rows.routes.num_rows * teams;
  const int64_t rounds = (units + ctas * kRows - 1) / (ctas * kRows);
  const int64_t windows = delta_set_window(&p.rows, (units + ctas * rounds - 1) / (ctas * rounds));
  return launch_kernel<expand_rows<T, STEPS, SILU, VECTORS>>(
      "delta_expand", windows * teams, 32 * WARPS, sizeof(Shared), exec, p, (int)tiles);
}

template <class T, int STEPS>
moelora_status launch_steps(const delta_expand &p, const moelora_exec *exec) {
  if (p.silu_and_mul)
    return launch<T, STEPS, true, true>(p, exec);
  return launch<T, STEPS, false, true>(p, exec);
}

template <class T> moelora_status launch_as(const delta_expand &p, const moelora_exec *exec) {
  if (!p.vectors)
    return p.silu_and_mul ? launch<T, 1, true, false>(p, exec)
                          : launch<T, 1, false, false>(p, exec);
  return p.lora.max_rank <= 16   ? launch_steps<T, 1>(p, exec)
         : p.lora.max_rank <= 32 ? launch_steps<T, 2>(p, exec)
                                 : launch_steps<T, 4>(p, exec);
}

} // namespace

extern "C" moelora_status delta_launch_expand(const delta_expand *expand, moelora_dtype dtype,
                                              const moelora_exec *exec) {
  return dtype == MOELORA_BF16 ? launch_as<__nv_bfloat16>(*expand, exec)
                               : launch_as<__half>(*expand, exec);
}
