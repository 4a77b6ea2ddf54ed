/* A step of the expand: a warp copies its operands to shared memory, multiplies and stores.
 *
 * Any assignment of ranks and columns to the slots of an mma is valid if both operands agree:
 *   ranks    lane q = lane % 4 has ranks 8q to 8q + 7 of 32 (or 4q to 4q + 3 of 16), so that one
 *            load of 16 (8) bytes fills its slots of two (one) products
 *   columns  slot j of product t holds column 8 (j / 2) + 2t + j % 2 of a group, so that a
 *            lane ends up with 8 adjacent columns of rows lane / 4 and lane / 4 + 8
 * A stage holds operands in that order: a panel is 8 rows of up to 32 ranks, and lane t reads its
 * t-th 16 (8) bytes. All global accesses are whole sectors. */
#pragma once

#include "cuda/delta/rows.cuh"

constexpr int kGroup = 32; // columns

/* Warps per CTA. */
template <int STEPS> constexpr int kWarps = STEPS <= 2 ? 8 : 4;
/* Maximum rows of a window: two per thread. */
template <int STEPS> constexpr int kRows = 64 * kWarps<STEPS>;

/* Clears the elements from `count` on. */
template <int WORDS>
__device__ __forceinline__ void mask_elements(uint32_t (&v)[WORDS], int count) {
#pragma unroll
  for (int i = 0; i < WORDS; i++)
    v[i] &= (2 * i < count ? 0xffffu : 0u) | (2 * i + 1 < count ? 0xffff0000u : 0u);
}

/* Clears a lane's ranks from the true rank on; four lanes hold the ranks from `first` on. */
template <int WORDS>
__device__ __forceinline__ void mask_ranks(uint32_t (&v)[WORDS], int first, int rank) {
  if (first + 8 * WORDS > rank)
    mask_elements(v, rank - first - (int)(threadIdx.x % 4) * 2 * WORDS);
}

template <int WORDS>
__device__ __forceinline__ void read_words(uint32_t (&v)[WORDS], const void *from) {
  static_assert(WORDS == 2 || WORDS == 4, "one access");
  if constexpr (WORDS == 4) {
    const uint4 all = *(const uint4 *)from;
    v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
  } else {
    const uint2 all = *(const uint2 *)from;
    v[0] = all.x, v[1] = all.y;
  }
}

/* Returns element `i` of packed words. */
template <class T, int WORDS>
__device__ __forceinline__ float element_of(const uint32_t (&v)[WORDS], int i) {
  const uint16_t bits = (uint16_t)(v[i / 2] >> i % 2 * 16);
  return Element<T>::to_float(*(const T *)&bits);
}

/* Stores COLUMNS adjacent elements z to out, from element `at` on. */
template <class T, int COLUMNS>
__device__ __forceinline__ void store_columns(const delta_expand &p, int64_t at,
                                              const float (&z)[COLUMNS]) {
  static_assert(COLUMNS == 4 || COLUMNS == 8, "one access of elements");
  uint32_t words[COLUMNS / 2];
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 2)
    words[c / 2] = pack2<T>(z[c], z[c + 1]);
  T *to = (T *)p.out + at;
  if constexpr (COLUMNS == 8)
    *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
  else
    *(uint2 *)to = make_uint2(words[0], words[1]);
}

/* Offsets in elements of the rows of a window, and their weights. */
template <int ROWS> struct RowAddresses {
  int64_t xa[ROWS], out[ROWS]; // of slice 0, of column 0
  float weight[ROWS];
};

/* Stores the offsets of row i of a window, which is flat row `row`; with `marks`, also sets
 * p.written[row] unless NULL. */
template <int ROWS>
__device__ __forceinline__ void find_addresses(const delta_expand &p, RowAddresses<ROWS> &addresses,
                                               int i, uint32_t row, bool marks) {
  const moelora_routes &routes = p.rows.routes;
  const uint32_t token = row / (uint32_t)routes.top_k, choice = row - token * routes.top_k;
  addresses.xa[i] = token * p.xa_stride[1] + choice * p.xa_stride[2];
  addresses.out[i] = token * p.out_stride[0] + choice * p.out_stride[1];
  addresses.weight[i] = p.topk_weights ? p.topk_weights[token * routes.topk_weights_stride[0] +
                                                        choice * routes.topk_weights_stride[1]]
                                       : 1.f;
  if (p.written && marks)
    p.written[row] = 1;
}

/* Loads the window of a work unit and the offsets of its rows. An item has up to `part` rows of a
 * segment. */
template <int THREADS, int ROWS>
__device__ __forceinline__ void load_share(const delta_expand &p, int work_unit, int shares,
                                           int part, Window<ROWS> &window,
                                           RowAddresses<ROWS> &addresses) {
  const bool marks = work_unit % shares == 0;
  load_window<THREADS>(
      p.rows, work_unit / shares, window,
      [&](int i, uint32_t row) { find_addresses(p, addresses, i, row, marks); },
      [&](int rows, int) { return (rows + part - 1) / part; });
}

/* Position (part of a window's rows, tile of columns) of a warp, which steps by the number of warps
 * without a division. */
struct TileCoord {
  int part, tile;

  __device__ __forceinline__ TileCoord next(const TileCoord &step, int tiles) const {
    TileCoord n = {part + step.part, tile + step.tile};
    if (n.tile >= tiles)
      n = {n.part + 1, n.tile - tiles};
    return n;
  }
};

__device__ __forceinline__ int columns_of_slice(const delta_expand &p, int slice) {
  return (int)(p.lora.column[slice + 1] - p.lora.column[slice]);
}

/* An item: rows [from, to) of a window, within a segment, and a tile of columns. */
template <bool SILU> struct ExpandItem {
  static constexpr int SOURCES = SILU ? 2 : 1; // gate and up may read different slices of xa
  int from, to;
  int slice[SOURCES], first[2], end[SOURCES]; // first column of each group, end of the slice

  /* Finds the rows and columns of the item at `at`. Called by one warp. */
  template <int ROWS>
  __device__ __forceinline__ void find(const delta_expand &p, const Window<ROWS> &w, TileCoord at,
                                       int part) {
    const int segment = w.segment_of(at.part);
    from = w.low[segment] + (at.part - w.first[segment]) * part;
    to = min(from + part, w.high[segment]);
    const int slices = p.lora.num_slices;
    constexpr int COLUMNS = SILU ? kGroup : 2 * kGroup;
    int n = columns_of_slice(p, 0);
    // one slice holds gate and up, or the first half of the slices is gate
    int width = SILU && slices == 1 ? n / 2 : n;
    slice[0] = 0;
    for (int tiles; at.tile >= (tiles = ceil_divide(width, COLUMNS)); at.tile -= tiles)
      width = n = columns_of_slice(p, ++slice[0]);
    first[0] = at.tile * COLUMNS;
    first[1] = first[0] + kGroup;
    end[0] = width;
    if constexpr (SILU) {
      slice[1] = slices == 1 ? 0 : slice[0] + slices / 2;
      first[1] = slices == 1 ? width + first[0] : first[0];
      end[1] = slices == 1 ? n : width;
    }
  }
};

/* A step: rows [row, row + 16) of an item by ranks [k, k + K_SPAN). rank: the true rank; 0: after
 * the last item. */
template <bool SILU> struct Step {
  ExpandItem<SILU> item;
  TileCoord at;
  int row, k, rank;
};

/* A K span of B is STEPS mma of 16 ranks each. */
template <class T, int STEPS, bool SILU, bool VECTORS> struct Expand {
  static constexpr int K_SPAN = 16 * STEPS, CHUNK = STEPS == 1 ? 4 : 8; // ranks per load
  static constexpr int LOADS = K_SPAN / (4 * CHUNK);
  static constexpr int SOURCES = SILU ? 2 : 1, ROWS = kRows<STEPS>;
  static constexpr bool ONE_SPAN = VECTORS && STEPS < 4; // one span covers all ranks
  static constexpr int ROW_VECTORS = CHUNK / 2;          // 16-byte chunks of ranks per panel row
  static constexpr int PANEL_BYTES = 8 * 16 * ROW_VECTORS;
  /* A stage: out [row / 8][group][lane], xa [source][row / 8][load], B [group][product][load]. */
  static constexpr int XA_AT = SILU ? 0 : 4 * 32 * 16;
  static constexpr int B_AT = XA_AT + SOURCES * 2 * LOADS * PANEL_BYTES;
  static constexpr int STAGE_BYTES = B_AT + 2 * 4 * LOADS * PANEL_BYTES;

  uint32_t b[2][4][LOADS][CHUNK / 2];

  /* Copies eight elements to shared memory; the first `count` are valid. */
  static __device__ __forceinline__ void copy_vector(char *to, const T *from, int count) {
    if constexpr (VECTORS)
      copy_async_16(shared_address(to), from, 16, count > 0);
    else
      copy_elements(shared_address(to), from, max(0, min(8, count)));
  }

  /* Copies the step's ranks of ROWS8 groups of 8 rows; find(m8, j, &valid) returns the address of
   * row j of group m8. */
  template <int ROWS8, class Find>
  static __device__ __forceinline__ void copy_ranks(char *to, const Step<SILU> &s, Find find) {
#pragma unroll
    for (int pass = 0; pass < ROWS8 * LOADS * ROW_VECTORS / 4; pass++) {
      const int at = pass * 32 + threadIdx.x % 32, panel = at / (8 * ROW_VECTORS);
      const int r = s.k + panel % LOADS * 32 + at % ROW_VECTORS * 8;
      bool valid;
      const T *row = find(panel / LOADS, at / ROW_VECTORS % 8, &valid);
      copy_vector(to + at * 16, row + r, valid ? s.rank - r : 0);
    }
  }

  static __device__ __forceinline__ bool is_last(const Step<SILU> &s) {
    return ONE_SPAN || s.k + K_SPAN >= s.rank;
  }
  static __device__ __forceinline__ bool wants_b(const Step<SILU> &s) {
    return s.row == s.item.from || (!ONE_SPAN && s.rank > K_SPAN);
  }
  static __device__ __forceinline__ bool wants_out(const delta_expand &p, const Step<SILU> &s) {
    return !SILU && p.add && is_last(s);
  }

  static __device__ __forceinline__ void copy_b(char *stage, const delta_expand &p,
                                                const Window<ROWS> &w, const Step<SILU> &s) {
    const int64_t adapter = w.adapter[s.item.from], expert = w.expert[s.item.from];
#pragma unroll
    for (int g = 0; g < 2; g++) {
      const int first = s.item.first[g], end = s.item.end[SILU ? g : 0];
      const moelora_factor &f = p.lora.b[s.item.slice[SILU ? g : 0]];
      const T *factor = factor_row<T>(f, adapter, expert, 0);
      copy_ranks<4>(stage + B_AT + g * 4 * LOADS * PANEL_BYTES, s, [&](int t, int j, bool *valid) {
        const int n = first + 8 * (j / 2) + 2 * t + j % 2;
        *valid = n < end;
        return factor + n * f.stride_i;
      });
    }
  }

  static __device__ __forceinline__ void copy_xa(char *stage, const delta_expand &p,
                                                 const RowAddresses<ROWS> &addresses,
                                                 const Step<SILU> &s) {
#pragma unroll
    for (int source = 0; source < SOURCES; source++) {
      const T *xa = (const T *)p.xa + s.item.slice[source] * p.xa_stride[0];
      copy_ranks<2>(stage + XA_AT + source * 2 * LOADS * PANEL_BYTES, s,
                    [&](int m8, int j, bool *valid) {
                      const int row = s.row + m8 * 8 + j;
                      *valid = row < s.item.to;
                      return xa + addresses.xa[min(row, s.item.to - 1)];
                    });
    }
  }

  /* Returns the row that this lane stores in group `m8` of eight rows of the step. */
  static __device__ __forceinline__ int own_row(const Step<SILU> &s, int m8) {
    return s.row + m8 * 8 + threadIdx.x % 32 / 4;
  }
  /* Return the first of the 8 columns of group `g` that a lane stores, and how many are valid. */
  static __device__ __forceinline__ int out_column(const delta_expand &p,
                                                   const ExpandItem<SILU> &item, int g) {
    return (int)p.lora.column[item.slice[0]] + item.first[0] + g * kGroup + threadIdx.x % 4 * 8;
  }
  static __device__ __forceinline__ int out_count(const ExpandItem<SILU> &item, int g) {
    return item.end[0] - item.first[0] - g * kGroup - threadIdx.x % 4 * 8;
  }

  static __device__ __forceinline__ void copy_out(char *stage, const delta_expand &p,
                                                  const RowAddresses<ROWS> &addresses,
                                                  const Step<SILU> &s) {
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++)
#pragma unroll
      for (int g = 0; g < 2; g++) {
        const int row = own_row(s, m8);
        copy_vector(stage + ((m8 * 2 + g) * 32 + threadIdx.x % 32) * 16,
                    (const T *)p.out + addresses.out[min(row, s.item.to - 1)] +
                        out_column(p, s.item, g),
                    row < s.item.to ? out_count(s.item, g) : 0);
      }
  }

  /* Reads a lane's ranks of a panel, which begins at rank `first`; zeros from the true rank on. */
  static __device__ __forceinline__ void read_panel(uint32_t (&v)[CHUNK / 2], const char *panel,
                                                    int first, int rank) {
    read_words(v, panel + threadIdx.x % 32 * (int)sizeof v);
    mask_ranks(v, first, rank);
  }

  __device__ __forceinline__ void read_b(const char *stage, const Step<SILU> &s) {
#pragma unroll
    for (int g = 0; g < 2; g++)
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < LOADS; i++)
          read_panel(b[g][t][i], stage + B_AT + ((g * 4 + t) * LOADS + i) * PANEL_BYTES,
                     s.k + i * 4 * CHUNK, s.rank);
  }

  using Ranks = uint32_t[SOURCES][2][LOADS][CHUNK / 2];

  static __device__ __forceinline__ void read_xa(Ranks &xa, const char *stage,
                                                 const Step<SILU> &s) {
#pragma unroll
    for (int source = 0; source < SOURCES; source++)
#pragma unroll
      for (int m8 = 0; m8 < 2; m8++)
#pragma unroll
        for (int i = 0; i < LOADS; i++)
          read_panel(xa[source][m8][i],
                     stage + XA_AT + ((source * 2 + m8) * LOADS + i) * PANEL_BYTES,
                     s.k + i * 4 * CHUNK, s.rank);
  }

  static __device__ __forceinline__ void read_out(uint32_t (&old)[2][2][4], const char *stage) {
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++)
#pragma unroll
      for (int g = 0; g < 2; g++)
        read_words(old[m8][g], stage + ((m8 * 2 + g) * 32 + threadIdx.x % 32) * 16);
  }

  /* Adds xa B^T for the ranks of a step to d. */
  __device__ __forceinline__ void multiply(float (&d)[2][4][4], const char *stage,
                                           const Step<SILU> &s) const {
    Ranks xa;
    read_xa(xa, stage, s);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if (s.k + i * 4 * CHUNK >= s.rank)
        continue;
#pragma unroll
      for (int half = 0; half < CHUNK / 4; half++)
#pragma unroll
        for (int g = 0; g < 2; g++) {
          const auto &of_rows = xa[SILU ? g : 0];
          const uint32_t a[4] = {of_rows[0][i][2 * half], of_rows[1][i][2 * half],
                                 of_rows[0][i][2 * half + 1], of_rows[1][i][2 * half + 1]};
#pragma unroll
          for (int t = 0; t < 4; t++)
            mma_16816<T>(d[g][t], a, &b[g][t][i][2 * half]);
        }
    }
  }

  static __device__ __forceinline__ void store(const delta_expand &p, const float (&z)[8],
                                               int64_t at, int count) {
    if constexpr (VECTORS) {
      store_columns<T>(p, at, z);
    } else {
#pragma unroll
      for (int c = 0; c < 8; c++)
        if (c < count)
          ((T *)p.out)[at + c] = Element<T>::round(z[c]);
    }
  }

  static __device__ __forceinline__ void
  finish(const float (&d)[2][4][4], const uint32_t (&old)[2][2][4], const delta_expand &p,
         const RowAddresses<ROWS> &addresses, const Step<SILU> &s) {
#pragma unroll
    for (int m8 = 0; m8 < 2; m8++) {
      const int row = own_row(s, m8);
      if (row >= s.item.to)
        continue;
      const float weight = addresses.weight[row];
#pragma unroll
      for (int g = 0; g < (SILU ? 1 : 2); g++) {
        const int count = out_count(s.item, g);
        if (count <= 0)
          continue;
        float z[8];
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const float v = d[g][c / 2][2 * m8 + c % 2];
          if constexpr (SILU) {
            z[c] = v * d[1][c / 2][2 * m8 + c % 2] / (1.f + __expf(-v));
          } else {
            z[c] = element_of<T>(old[m8][g], c) + weight * v;
          }
        }
        store(p, z, addresses.out[row] + out_column(p, s.item, g), count);
      }
    }
  }
};
