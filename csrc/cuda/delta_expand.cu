/* Expand: z[p, slice * N + n] = sum over r of h[p, slice, r] B[slice][l, e, n, r], into out
 *
 *   out = z, or out += z; z may be weighted, or silu(gate) * up of its two halves
 *
 * Warps work alone: an item is some rows of a segment and two groups of 32 columns, neighbours or a
 * gate and its up. The warp loads its piece of B into registers, once if PIECE ranks cover the true
 * rank, and then goes over the rows, 16 at a time: the loads of h and of out first, then the
 * products, then the stores. Before, it asks for the next item's B and out to be in L2: what waits
 * for DRAM takes no registers.
 *
 * The CTAs that share a window take its items in turn, neighbouring warps neighbouring columns.
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

constexpr int kGroup = 32; // columns

/* Warps of a CTA and CTAs of an SM, as registers allow: B alone takes 16 of them for each step. */
template <int STEPS> constexpr int kWarps = STEPS <= 2 ? 8 : 4;
template <int STEPS, bool SILU> constexpr int kCtas = STEPS == 4 && !SILU ? 3 : 2;
/* Rows of a window at most: two of a thread. */
template <int STEPS> constexpr int kRows = 64 * kWarps<STEPS>;
/* Rows of an item at most, so many that B is not read much more often than they are. */
template <int STEPS> constexpr int kPart = STEPS <= 2 ? 32 : 64;

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
template <int ROWS> struct Places {
  int64_t h[ROWS], out[ROWS]; // of slice 0, of column 0
  float weight[ROWS];
};

/* Part of a window's rows by tile of columns. A warp walks over them in steps of as many as there
 * are warps, without a division. */
struct Walk {
  int part, tile;

  __device__ __forceinline__ Walk next(const Walk &step, int tiles) const {
    Walk n = {part + step.part, tile + step.tile};
    if (n.tile >= tiles)
      n = {n.part + 1, n.tile - tiles};
    return n;
  }
};

/* Rows from `from` to `to` - 1 of a segment of a window, and columns. */
template <bool SILU> struct Item {
  static constexpr int SOURCES = SILU ? 2 : 1; // h of gate and up may differ in slice
  int from, to;
  int slice[SOURCES], first[2], end[SOURCES]; // first column of either group, end of the slice

  /* A warp. */
  template <int PART, int ROWS>
  __device__ __forceinline__ void find(const delta_expand &p, const Window<ROWS> &w, Walk at) {
    const int segment = w.segment_of(at.part);
    from = w.low[segment] + (at.part - w.first[segment]) * PART;
    to = min(from + PART, w.high[segment]);
    const int n = (int)p.lora.slice_n, slices = p.lora.num_slices;
    // one slice holds gate and up, or the first half of the slices does gate
    const int width = SILU && slices == 1 ? n / 2 : n;
    const int columns = SILU ? kGroup : 2 * kGroup, tiles = (width + columns - 1) / columns;
    slice[0] = 0;
    while (at.tile >= tiles)
      at.tile -= tiles, slice[0]++;
    first[0] = at.tile * columns;
    first[1] = first[0] + kGroup;
    end[0] = width;
    if constexpr (SILU) {
      slice[1] = slices == 1 ? 0 : slice[0] + slices / 2;
      first[1] = slices == 1 ? width + first[0] : first[0];
      end[1] = slices == 1 ? n : width;
    }
  }

  /* Asks for B and, if there is something to add to, for out. */
  template <class T, int ROWS>
  __device__ __forceinline__ void prefetch(const delta_expand &p, const Window<ROWS> &w,
                                           const Places<ROWS> &places) const {
    const int lane = threadIdx.x % 32, rank = w.rank[from];
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const moelora_factor &f = p.lora.b[slice[SILU ? g : 0]];
      const int n = first[g] + lane;
      const T *row = (const T *)f.data + w.adapter[from] * f.stride_l +
                     w.expert[from] * f.stride_e + n * f.stride_i;
#pragma unroll 1
      for (int r = 0; n < end[SILU ? g : 0] && r < rank; r += 128 / (int)sizeof(T))
        prefetch_l2(row + r);
    }
    const int64_t column = slice[0] * p.lora.slice_n + first[0];
#pragma unroll 1
    for (int i = from + lane; !SILU && p.add && i < to; i += 32)
      prefetch_l2((const T *)p.out + places.out[i] + column);
  }
};

/* STEPS products of 16 ranks are one piece of B. */
template <class T, int STEPS, bool SILU, bool VECTORS> struct Expand {
  static constexpr int PIECE = 16 * STEPS, CHUNK = STEPS == 1 ? 4 : 8; // ranks of a load
  static constexpr int LOADS = PIECE / (4 * CHUNK);
  static constexpr int SOURCES = SILU ? 2 : 1, ROWS = kRows<STEPS>;

  Item<SILU> item;
  uint32_t b[2][4][LOADS][CHUNK / 2];

  __device__ __forceinline__ void load_b(const delta_expand &p, int64_t adapter, int64_t expert,
                                         int rank, int piece) {
    const int j = threadIdx.x / 4 % 8, r0 = piece + threadIdx.x % 4 * CHUNK;
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const moelora_factor &f = p.lora.b[item.slice[SILU ? g : 0]];
      const int n = item.first[g] + 8 * (j / 2) + j % 2, there = item.end[SILU ? g : 0] - n;
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
                                           const Places<ROWS> &places, const int (&row)[2],
                                           int rank, int piece) {
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
            load_elements<T, CHUNK, VECTORS>(h[s][eight][i],
                                             (const T *)p.h + item.slice[s] * p.h_stride[0] +
                                                 places.h[row[eight]] + r,
                                             rank - r);
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
    return item.slice[0] * (int)p.lora.slice_n + item.first[0] + g * kGroup + threadIdx.x % 4 * 8;
  }
  __device__ __forceinline__ int out_count(int g) const {
    return item.end[0] - item.first[0] - g * kGroup - threadIdx.x % 4 * 8;
  }

  /* What is in out, for `add`. */
  __device__ __forceinline__ void load_out(uint32_t (&old)[2][2][4], const delta_expand &p,
                                           const Places<ROWS> &places, const int (&row)[2]) const {
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
                                         const delta_expand &p, const Places<ROWS> &places,
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

  __device__ __forceinline__ void run(const delta_expand &p, const Window<ROWS> &w,
                                      const Places<ROWS> &places) {
    const int rank = w.rank[item.from];
#pragma unroll 1
    for (int sixteen = item.from; sixteen < item.to; sixteen += 16) {
      int row[2];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        row[eight] = sixteen + eight * 8 + threadIdx.x % 32 / 4;
        row[eight] = row[eight] < item.to ? row[eight] : -1;
      }
      uint32_t old[2][2][4] = {};
      if (!SILU && p.add)
        load_out(old, p, places, row);
      float d[2][4][4] = {};
#pragma unroll 1
      for (int piece = 0; piece < rank; piece += PIECE) {
        if (sixteen == item.from || rank > PIECE)
          load_b(p, w.adapter[item.from], w.expert[item.from], rank, piece);
        multiply(d, p, places, row, rank, piece);
      }
      finish(d, old, p, places, row);
    }
  }
};

template <int ROWS> struct Shared {
  Window<ROWS> window;
  Places<ROWS> places;
};

/* tiles: of columns; step: what all warps that share a window take at once. */
template <class T, int STEPS, bool SILU, bool VECTORS>
__global__ void __launch_bounds__(32 * kWarps<STEPS>, kCtas<STEPS, SILU>)
    expand_rows(const __grid_constant__ delta_expand p, int tiles, int shares, Walk step) {
  constexpr int ROWS = kRows<STEPS>, WARPS = kWarps<STEPS>, PART = kPart<STEPS>;
  extern __shared__ __align__(16) char memory[];
  Window<ROWS> &w = ((Shared<ROWS> *)memory)->window;
  Places<ROWS> &places = ((Shared<ROWS> *)memory)->places;
  // This kernel starts when all of the shrink has waited for what it reads: for rows, too.
  bool early = p.after_shrink;
  const auto begin = [] {
    wait_for_previous_kernel();
    start_next_kernel();
  };
  if (!early)
    begin();

  const int units = (int)count_windows(p.rows) * shares;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int share = unit % shares;
    load_window<32 * WARPS>(
        p.rows, unit / shares, w,
        [&](int i, uint32_t row) {
          const moelora_routes &routes = p.rows.routes;
          const uint32_t token = row / (uint32_t)routes.top_k, choice = row - token * routes.top_k;
          places.h[i] = token * p.h_stride[1] + choice * p.h_stride[2];
          places.out[i] = token * p.out_stride[0] + choice * p.out_stride[1];
          places.weight[i] = p.topk_weights ? p.topk_weights[token * routes.topk_weights_stride[0] +
                                                             choice * routes.topk_weights_stride[1]]
                                            : 1.f;
          if (p.written && share == 0)
            p.written[row] = 1;
        },
        [](int rows, int) { return (rows + PART - 1) / PART; });
    const int number = share * WARPS + threadIdx.x / 32;
    Walk at = {number / tiles, number % tiles};
    const auto prefetch = [&](const Walk &where) {
      if (where.part >= w.items)
        return;
      Item<SILU> item;
      item.template find<PART>(p, w, where);
      item.template prefetch<T>(p, w, places);
    };
    if (early) {
      prefetch(at);
      begin();
      early = false;
    }
#pragma unroll 1
    while (at.part < w.items) {
      const Walk next = at.next(step, tiles);
      prefetch(next);
      Expand<T, STEPS, SILU, VECTORS> expand;
      expand.item.template find<PART>(p, w, at);
      expand.run(p, w, places);
      at = next;
    }
  }
  if (early)
    begin();
}

/* ---- launch ---- */

template <class T, int STEPS, bool SILU, bool VECTORS>
moelora_status launch(delta_expand p, const moelora_exec *exec) {
  const int64_t n = p.lora.slice_n, slices = p.lora.num_slices;
  int64_t tiles = slices * ((n + 2 * kGroup - 1) / (2 * kGroup));
  if (SILU)
    tiles = slices == 1 ? (n / 2 + kGroup - 1) / kGroup : slices / 2 * ((n + kGroup - 1) / kGroup);
  if (tiles == 0)
    return MOELORA_OK;
  constexpr int WARPS = kWarps<STEPS>;
  const int64_t ctas = moelora_cuda_num_sms(exec->device_index) * kCtas<STEPS, SILU>;
  int32_t shares = 1;
  const int64_t windows = delta_set_window(&p.rows, kRows<STEPS>, kPart<STEPS>,
                                           (tiles + WARPS - 1) / WARPS, ctas, &shares);
  const int64_t warps = (int64_t)shares * WARPS;
  const Walk step = {(int)(warps / tiles), (int)(warps % tiles)};
  return launch_kernel<expand_rows<T, STEPS, SILU, VECTORS>>(
      "delta_expand", windows * shares, 32 * WARPS, sizeof(Shared<kRows<STEPS>>), exec, p,
      (int)tiles, shares, step);
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
