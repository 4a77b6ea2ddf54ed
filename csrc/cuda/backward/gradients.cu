/* Gradients of factors: grouped products whose depth is the rows of a part.
 *
 *   index of step i + 6, rows of step i + 3    cp.async
 *   products of step i                         ldmatrix.trans, mma.sync
 *
 * Both operands lie as rows in memory, so that the depth is the slow dimension of what is in
 * shared memory, and ldmatrix transposes both. ranks^T is operand A of m16n8k16, wide operand B. A
 * CTA of 4 warps has a tile of RANKS columns of ranks by 128 of wide, a warp 32 of the latter; a
 * step is 32 rows, two k16. Pitches of 16 bytes more than a row spread 8 rows over all banks.
 *
 * Rows past the end of a part are zeros in both operands. Sums go to the gradient through shared
 * memory; those of one of several parts to float32 slots, which sum_slots() adds up in order. */
#include "cuda/backward/gradient_tile.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

template <int RANKS_> struct GradientShape {
  static constexpr int RANKS = RANKS_, ROWS = 32, STAGES = 4, THREADS = 128;
  static constexpr int CTAS = 4; // of an SM, as registers allow
  static constexpr int WIDE_PITCH = 2 * kColumns + 16, RANKS_PITCH = 2 * RANKS + 16;
  static constexpr int TILES = RANKS / 16, WARP_COLUMNS = 32;
  /* Steps of which the index is in shared memory: from that of the products to that of the copies,
   * and as many beyond. */
  static constexpr int INDICES = 2 * STAGES;

  struct Stage {
    char wide[ROWS * WIDE_PITCH];
    char ranks[ROWS * RANKS_PITCH];
  };
  struct Index {
    int32_t position[ROWS], row[ROWS];
    float weight[ROWS]; // 0 past the end
  };
  struct SharedStorage {
    union {
      Stage stages[STAGES];
      float sums[RANKS][kColumns + 4];
    };
    Index index[INDICES];
  };
};

struct GradientLaunch {
  GradientGroup group[2]; // of pairs, of adapters
  const int32_t *position, *row;
  const float *weight;
  moelora_divisor top_k;
  bool accumulate;
};

/* One tile of one part. */
template <class S> struct PartTile {
  const GradientLaunch &s;
  const GradientProduct &p;
  const moelora_gradient_part &part;
  GradientTile tile;
  uint32_t active; // bit of each m16 tile that has ranks

  __device__ __forceinline__ int rank() const { return min(part.rank, p.max_rank); }
  __device__ __forceinline__ int steps() const { return (part.count + S::ROWS - 1) / S::ROWS; }

  __device__ __forceinline__ void find_active() {
    active = 0;
#pragma unroll
    for (int i = 0; i < S::TILES; i++) {
      const int at = tile.rank + 16 * i, slice = at / p.padded_rank;
      if (slice < p.slices && at - slice * p.padded_rank < rank())
        active |= 1u << i;
    }
  }

  /* Starts copies of the index of a step, by one warp. */
  __device__ __forceinline__ void load_index(typename S::Index &index, int step) const {
    const int i = threadIdx.x, at = step * S::ROWS + i;
    if (i >= S::ROWS)
      return;
    const bool there = at < part.count;
    const int64_t from = there ? part.first + at : 0;
    copy_async_4(shared_address(&index.position[i]), s.position + from, there);
    copy_async_4(shared_address(&index.row[i]), s.row + from, there);
    if (p.weighted)
      copy_async_4(shared_address(&index.weight[i]), s.weight + from, there);
    if (p.weighted && !there)
      index.weight[i] = 0.f;
  }

  /* Where a row of an operand begins, which is `there`. */
  template <class T>
  __device__ __forceinline__ const T *row_of(const moelora_gradient_operand &operand,
                                             const typename S::Index &index, int i) const {
    int64_t row = operand.index == MOELORA_ROW_POSITION ? index.position[i] : index.row[i];
    if (operand.index == MOELORA_ROW_TOKEN)
      row = divide((uint32_t)row, s.top_k);
    return (const T *)operand.data + row * operand.stride;
  }

  /* `count` (at most 8) elements and zeros behind them; `from` counts if there are any. */
  template <class T>
  static __device__ __forceinline__ void copy(uint32_t to, const T *from, const T *mapped,
                                              int count, bool vectors) {
    count = max(min(count, 8), 0);
    if (vectors)
      copy_async_16(to, count > 0 ? from : mapped, 2 * count);
    else
      copy_elements(to, from, count);
  }

  /* Starts copies of the rows of a step. */
  template <class T>
  __device__ __forceinline__ void load_rows(typename S::Stage &stage,
                                            const typename S::Index &index, int step) const {
    const int left = part.count - step * S::ROWS;
    const uint32_t sWide = shared_address(stage.wide), sRanks = shared_address(stage.ranks);
    constexpr int CHUNKS = kColumns / 8;
    const int column = threadIdx.x % CHUNKS * 8;
#pragma unroll
    for (int j = 0; j < S::ROWS * CHUNKS / S::THREADS; j++) {
      const int i = threadIdx.x / CHUNKS + j * (S::THREADS / CHUNKS);
      const int count = i < left ? p.columns - (tile.column + column) : 0;
      const T *from = (const T *)p.wide.data;
      if (count > 0)
        from = row_of<T>(p.wide, index, i) + tile.column + column;
      copy<T>(sWide + i * S::WIDE_PITCH + 2 * column, from, (const T *)p.wide.data, count,
              p.wide_vectors);
    }
    constexpr int RANK_CHUNKS = S::RANKS / 8, COPIES = S::ROWS * RANK_CHUNKS;
#pragma unroll
    for (int j = 0; j < (COPIES + S::THREADS - 1) / S::THREADS; j++) {
      const int number = threadIdx.x + j * S::THREADS;
      const int i = number / RANK_CHUNKS, at = number % RANK_CHUNKS * 8;
      const int slice = (tile.rank + at) / p.padded_rank;
      const int r = tile.rank + at - slice * p.padded_rank;
      if ((COPIES % S::THREADS && number >= COPIES) || !(active >> at / 16 & 1))
        continue;
      const int count = i < left ? rank() - r : 0;
      const T *from = (const T *)p.ranks.data;
      if (count > 0)
        from = row_of<T>(p.ranks, index, i) + slice * p.ranks_slice + r;
      copy<T>(sRanks + i * S::RANKS_PITCH + 2 * at, from, (const T *)p.ranks.data, count,
              p.ranks_vectors);
    }
  }

  /* Multiplies two neighbours along the depth, rounded again. */
  template <class T>
  static __device__ __forceinline__ uint32_t weigh(uint32_t pair, float first, float second) {
    const T *two = (const T *)&pair;
    return pack2<T>(Element<T>::to_float(two[0]) * first, Element<T>::to_float(two[1]) * second);
  }

  /* The products of a step. */
  template <class T>
  __device__ __forceinline__ void multiply(const typename S::Stage &stage,
                                           const typename S::Index &index,
                                           float (&rAcc)[S::TILES][S::WARP_COLUMNS / 8][4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Matrices 0, 1 of wide are 16 rows of 8 columns, 2 and 3 those of the next 8 columns; of ranks
    // matrices 0, 1 are 8 rows of 16 columns, 2 and 3 the next 8 rows.
    const uint32_t sWide = shared_address(stage.wide) + lane % 16 * S::WIDE_PITCH +
                           2 * (warp * S::WARP_COLUMNS + lane / 16 * 8);
    const uint32_t sRanks = shared_address(stage.ranks) +
                            (lane % 8 + lane / 16 * 8) * S::RANKS_PITCH + 2 * (lane / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < S::ROWS; k += 16) {
      uint32_t b[S::WARP_COLUMNS / 16][4];
#pragma unroll
      for (int j = 0; j < S::WARP_COLUMNS / 16; j++)
        load_matrix_x4_trans(b[j], sWide + k * S::WIDE_PITCH + 32 * j);
      float weight[4] = {};
      if (p.weighted) {
#pragma unroll
        for (int q = 0; q < 4; q++)
          weight[q] = index.weight[k + 2 * (lane % 4) + q / 2 * 8 + q % 2];
      }
#pragma unroll
      for (int i = 0; i < S::TILES; i++) {
        if (!(active >> i & 1))
          continue;
        uint32_t a[4];
        load_matrix_x4_trans(a, sRanks + k * S::RANKS_PITCH + 32 * i);
        if (p.weighted) {
#pragma unroll
          for (int q = 0; q < 4; q++)
            a[q] = weigh<T>(a[q], weight[q / 2 * 2], weight[q / 2 * 2 + 1]);
        }
#pragma unroll
        for (int j = 0; j < S::WARP_COLUMNS / 8; j++)
          mma_16816<T>(rAcc[i][j], a, b[j / 2] + j % 2 * 2);
      }
    }
  }

  /* The sums of the part to shared memory. All threads come here, and leave the stages. */
  template <class T> __device__ __forceinline__ void run(typename S::SharedStorage &shared) const {
    constexpr int STAGES = S::STAGES;
    float rAcc[S::TILES][S::WARP_COLUMNS / 8][4] = {};
    const int all = steps();

    // The index of the first stages, then the stages.
    for (int step = 0; step < STAGES - 1; step++)
      load_index(shared.index[step], step);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    for (int step = 0; step < STAGES - 1; step++) {
      if (step < all)
        load_rows<T>(shared.stages[step], shared.index[step], step);
      load_index(shared.index[step + STAGES - 1], step + STAGES - 1);
      copy_async_commit();
    }

#pragma unroll 1
    for (int step = 0; step < all; step++) {
      // Wait for the stage, and until all threads are done with the one before.
      copy_async_wait<STAGES - 2>();
      __syncthreads();

      // Start the copies of the stage that takes its place.
      const int next = step + STAGES - 1;
      if (next < all)
        load_rows<T>(shared.stages[next % STAGES], shared.index[next % S::INDICES], next);
      load_index(shared.index[(next + STAGES - 1) % S::INDICES], next + STAGES - 1);
      copy_async_commit();

      multiply<T>(shared.stages[step % STAGES], shared.index[step % S::INDICES], rAcc);
    }
    copy_async_wait<0>();
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
#pragma unroll
      for (int j = 0; j < S::WARP_COLUMNS / 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *(float2 *)&shared
               .sums[16 * i + 8 * half + lane / 4][warp * S::WARP_COLUMNS + 8 * j + lane % 4 * 2] =
              make_float2(rAcc[i][j][2 * half], rAcc[i][j][2 * half + 1]);
    __syncthreads();
  }
};

/* Stores the sums of a part that is one of several: [rank columns, columns] of its slot. */
template <class S>
__device__ __forceinline__ void store_slot(const GradientGroup &group, const GradientProduct &p,
                                           const GradientTile &tile, int slot,
                                           const typename S::SharedStorage &shared) {
  float *to = group.slots + slot * group.slot_floats + p.slot_offset;
  for (int at = threadIdx.x; at < S::RANKS * kColumns; at += S::THREADS) {
    const int rank = tile.rank + at / kColumns, column = tile.column + at % kColumns;
    if (rank < p.slices * p.padded_rank && column < p.columns)
      to[(int64_t)rank * p.columns + column] = shared.sums[at / kColumns][at % kColumns];
  }
}

template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, S::CTAS)
    gradients(const __grid_constant__ GradientLaunch s) {
  extern __shared__ __align__(128) char memory[];
  typename S::SharedStorage &shared = *(typename S::SharedStorage *)memory;
  wait_for_previous_kernel();
  start_next_kernel();
  const int64_t of_pairs =
      s.group[0].tiles ? (int64_t)s.group[0].parts.count[0] * s.group[0].tiles : 0;
  const int64_t of_adapters =
      s.group[1].tiles ? (int64_t)s.group[1].parts.count[0] * s.group[1].tiles : 0;
  for (int64_t work = blockIdx.x; work < of_pairs + of_adapters; work += gridDim.x) {
    const GradientGroup &group = s.group[work >= of_pairs];
    const int64_t at = work >= of_pairs ? work - of_pairs : work;
    const int number = (int)(at / group.tiles);
    const moelora_gradient_part part = group.parts.part[number];
    GradientTile tile;
    const GradientProduct &p =
        find_tile<S::RANKS>(group, (int)(at - (int64_t)number * group.tiles), &tile);
    PartTile<S> job = {s, p, part, tile, 0};
    job.find_active();
    job.template run<T>(shared);
    if (part.slot >= 0)
      store_slot<S>(group, p, tile, part.slot, shared);
    else
      write_tile<T, S::RANKS>(p, tile, part.adapter, part.expert, job.rank(), s.accumulate,
                              [&](int rank, int column) { return shared.sums[rank][column]; });
    __syncthreads();
  }
}

/* The gradients of several parts: their slots, in order. */
template <class T, class S>
__global__ void __launch_bounds__(S::THREADS) sum_slots(const __grid_constant__ GradientLaunch s) {
  wait_for_previous_kernel();
  start_next_kernel();
  const int64_t of_pairs =
      s.group[0].tiles ? (int64_t)s.group[0].parts.count[1] * s.group[0].tiles : 0;
  const int64_t of_adapters =
      s.group[1].tiles ? (int64_t)s.group[1].parts.count[1] * s.group[1].tiles : 0;
  for (int64_t work = blockIdx.x; work < of_pairs + of_adapters; work += gridDim.x) {
    const GradientGroup &group = s.group[work >= of_pairs];
    const int64_t at = work >= of_pairs ? work - of_pairs : work;
    const int number = (int)(at / group.tiles);
    const moelora_gradient_split split = group.parts.split[number];
    GradientTile tile;
    const GradientProduct &p =
        find_tile<S::RANKS>(group, (int)(at - (int64_t)number * group.tiles), &tile);
    const float *slots = group.slots + split.slot * group.slot_floats + p.slot_offset;
    write_tile<T, S::RANKS>(p, tile, split.adapter, split.expert, min(split.rank, p.max_rank),
                            s.accumulate, [&](int rank, int column) {
                              const float *from = slots + (int64_t)(tile.rank + rank) * p.columns +
                                                  tile.column + column;
                              float sum = from[0];
                              for (int i = 1; i < split.parts; i++)
                                sum += from[i * group.slot_floats];
                              return sum;
                            });
  }
}

/* ---- host ---- */

bool is_shared(const moelora_gradient &gradient, const moelora_gradient_rows *list) {
  return list->adapters.most_parts > 0 && gradient.experts == 1;
}

/* Accesses of 4 elements of 16 or 32 bits. */
bool allows_quads(const moelora_gradient &g) {
  return !g.data ||
         ((uintptr_t)g.data % (4 * moelora_dtype_bytes(g.dtype)) == 0 && g.columns % 4 == 0 &&
          g.stride_i % 4 == 0 && g.stride_e % 4 == 0 && g.stride_l % 4 == 0);
}

bool allows_vectors(const moelora_gradient_operand &operand, int64_t slice, int64_t columns) {
  return (uintptr_t)operand.data % 16 == 0 && operand.stride % 8 == 0 && slice % 8 == 0 &&
         columns % 8 == 0;
}

/* Slices [first, first + slices) of a product. */
void add_product(GradientGroup *group, const moelora_gradient_product &from, int first,
                 int slices) {
  GradientProduct &p = group->product[group->count++];
  p.ranks = from.ranks;
  p.ranks.data = (const uint16_t *)from.ranks.data + first * from.ranks_slice;
  p.wide = from.wide;
  p.ranks_slice = slices > 1 ? from.ranks_slice : 0;
  p.slices = slices;
  p.max_rank = from.max_rank;
  p.padded_rank = moelora_padded_rank(from.max_rank);
  p.columns = (int32_t)from.columns;
  p.weighted = from.weighted;
  p.transposed = from.transposed;
  // Ranks that a row has not are not read.
  p.ranks_vectors = allows_vectors(p.ranks, p.ranks_slice, 0);
  p.wide_vectors = allows_vectors(p.wide, 0, from.columns);
  p.quads = true;
  for (int i = 0; i < slices; i++) {
    p.gradient[i] = from.gradient[first + i];
    p.quads = p.quads && allows_quads(p.gradient[i]);
  }
}

/* What the kernels take but for the tiles, whose ranks are `*most` at most. */
GradientLaunch describe(const moelora_gradients_launch *g, const moelora_gradient_rows *list,
                        int32_t *most) {
  GradientLaunch s = {};
  s.group[0].parts = list->pairs;
  s.group[1].parts = list->adapters;
  s.position = list->position;
  s.row = list->row;
  s.weight = list->weight;
  s.top_k = moelora_divisor_of((uint32_t)g->top_k);
  s.accumulate = g->accumulate;
  *most = 0;
  for (int i = 0; i < g->count; i++) {
    const moelora_gradient_product &from = g->product[i];
    const bool both = from.slices == 2 && from.gradient[0].data && from.gradient[1].data &&
                      is_shared(from.gradient[0], list) == is_shared(from.gradient[1], list);
    for (int slice = 0; slice < from.slices; slice += both ? 2 : 1)
      if (from.gradient[slice].data) {
        GradientGroup *group = &s.group[is_shared(from.gradient[slice], list)];
        add_product(group, from, slice, both ? 2 : 1);
        const int32_t columns = (both ? 2 : 1) * moelora_padded_rank(from.max_rank);
        *most = columns > *most ? columns : *most;
      }
  }
  float *slots = g->slots;
  for (GradientGroup &group : s.group) {
    for (int i = 0; i < group.count; i++) {
      GradientProduct &p = group.product[i];
      p.slot_offset = group.slot_floats;
      group.slot_floats += (int64_t)p.slices * p.padded_rank * p.columns;
    }
    group.slots = slots;
    if (slots)
      slots += group.parts.most_slots * group.slot_floats;
  }
  return s;
}

template <class T, int RANKS> moelora_status launch(GradientLaunch &s, const moelora_exec *exec) {
  using S = GradientShape<RANKS>;
  static_assert(sizeof(typename S::SharedStorage) <= kPortableShared, "shared memory of a CTA");
  int64_t work = 0, splits = 0;
  for (GradientGroup &group : s.group) {
    for (int i = 0; i < group.count; i++) {
      GradientProduct &p = group.product[i];
      p.column_tiles = (p.columns + kColumns - 1) / kColumns;
      p.first_tile = group.tiles;
      p.tiles = p.column_tiles * ((p.slices * p.padded_rank + RANKS - 1) / RANKS);
      group.tiles += p.tiles;
    }
    work += group.parts.most_parts * group.tiles;
    splits += group.parts.most_splits * group.tiles;
  }
  MOELORA_TRY((launch_kernel<gradients<T, S>>("gradients", work, S::THREADS,
                                              sizeof(typename S::SharedStorage), exec, s)));
  return launch_kernel<sum_slots<T, S>>("sum_gradients", splits, S::THREADS, 0, exec, s);
}

template <class T>
moelora_status launch_any(GradientLaunch &s, int32_t most, const moelora_exec *exec) {
  if (most <= 16)
    return launch<T, 16>(s, exec);
  if (most <= 32)
    return launch<T, 32>(s, exec);
  return launch<T, 64>(s, exec);
}

} // namespace

extern "C" size_t moelora_cuda_gradient_slot_bytes(const moelora_gradients_launch *g,
                                                   const moelora_gradient_rows *list) {
  int32_t most;
  const GradientLaunch s = describe(g, list, &most);
  size_t floats = 0;
  for (const GradientGroup &group : s.group) {
    const size_t own = moelora_times((size_t)group.parts.most_slots, (size_t)group.slot_floats);
    floats = floats + own < own ? SIZE_MAX : floats + own;
  }
  return moelora_times(floats, sizeof(float));
}

extern "C" moelora_status moelora_cuda_factor_gradients(const moelora_gradients_launch *g,
                                                        const moelora_gradient_rows *list,
                                                        const moelora_exec *exec) {
  int32_t most;
  GradientLaunch s = describe(g, list, &most);
  return g->dtype == MOELORA_BF16 ? launch_any<__nv_bfloat16>(s, most, exec)
                                  : launch_any<__half>(s, most, exec);
}
