/* Gradients of factors: grouped GEMMs ranks^T wide, with the rows of a part as K.
 *
 *   index of step i + 6, rows of step i + 3    cp.async
 *   products of step i                         ldmatrix.trans, mma.sync
 *
 * K is the slow dimension of both operands in global and in shared memory, so ldmatrix transposes
 * both. ranks^T is operand A of m16n8k16, wide is operand B. A CTA of 4 warps computes a tile of
 * RANKS columns of ranks by 128 columns of wide, 32 columns of wide per warp; with 128 ranks, there
 * are 8 warps, each with half of the ranks. A K step is 32 rows, two k16 slabs. Rows in shared
 * memory are padded by 16 bytes, so that ldmatrix reads 8 rows without bank conflicts.
 *
 * Rows past the end of a part are zero in both operands. Accumulators are stored to the gradient
 * through shared memory; if a gradient has several parts, to float32 slots, which sum_slots() adds
 * in order. */
#include "cuda/backward/gradients_few.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

/* Reduces the CTAs per SM before sm_90, where ptxas would spill otherwise. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSpared = 1;
#else
constexpr int kSpared = 0;
#endif

template <int RANKS_> struct GradientShape {
  static constexpr int RANKS = RANKS_, ROWS = 32, STAGES = 4;
  static constexpr int WARPS = RANKS == 128 ? 8 : 4, THREADS = 32 * WARPS;
  static constexpr int CTAS = RANKS == 128 ? 2 - kSpared : RANKS == 64 ? 4 - kSpared : 4;
  static constexpr int WIDE_PITCH = 2 * kColumns + 16, RANKS_PITCH = 2 * RANKS + 16;
  static constexpr int WARP_COLUMNS = 32;
  static constexpr int TILES = RANKS / 16, WARP_TILES = TILES / (WARPS / 4); // m16 tiles
  /* Steps whose row indices are in shared memory: those of the stages, and as many after them. */
  static constexpr int INDICES = 2 * STAGES;

  struct Stage {
    char wide[ROWS * WIDE_PITCH];
    char ranks[ROWS * RANKS_PITCH];
  };
  /* Row indices of the operands; past the end of the part, row 0 with weight 0. */
  struct Index {
    int32_t wide[ROWS], ranks[ROWS];
    float weight[ROWS];
  };
  /* Accumulators, laid out like the gradient. The padding avoids bank conflicts. */
  struct Sums {
    union {
      float by_rank[RANKS][kColumns + 4];
      float by_column[kColumns][RANKS + 4]; // of transposed gradients
    };

    template <bool TRANSPOSED, int WIDTH>
    __device__ __forceinline__ void load(float (&v)[WIDTH], int rank, int column) const {
      const float *from = TRANSPOSED ? &by_column[column][rank] : &by_rank[rank][column];
      if constexpr (WIDTH == 1)
        v[0] = *from;
      else
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4)
          *(float4 *)&v[i] = *(const float4 *)&from[i];
    }
  };
  struct SharedStorage {
    union {
      Stage stages[STAGES];
      Sums sums;
    };
    Index index[INDICES];
    moelora_gradient_part part[2]; // of the current and of the next tile
    int64_t of_pairs, all;         // tiles of pairs, of all parts; here to save registers
  };
};

/* A thread's work on one tile of one part. */
template <class T, class S> struct PartTile {
  const GradientLaunch &s;
  const GradientGroup &group;
  const GradientProduct &p;
  const moelora_gradient_part &part;
  GradientTile tile;
  uint32_t active; // bit mask of the m16 tiles that have ranks
  RowCopies<T> wide, ranks;

  static constexpr int CHUNKS = kColumns / 8, RANK_CHUNKS = S::RANKS / 8;

  __device__ __forceinline__ PartTile(const GradientLaunch &launch, const GradientGroup &of,
                                      const GradientProduct &product,
                                      const moelora_gradient_part &of_part, GradientTile at)
      : s(launch), group(of), p(product), part(of_part), tile(at) {
    active = 0;
#pragma unroll
    for (int i = 0; i < S::TILES; i++)
      if (ranks_left(16 * i) > 0)
        active |= 1u << i;
    const int column = tile.column + threadIdx.x % CHUNKS * 8;
    wide.describe(p.wide, column, p.columns - column);
    const int own = threadIdx.x % RANK_CHUNKS * 8, at_rank = tile.rank + own;
    const int slice = at_rank >= p.padded_rank;
    ranks.describe(p.ranks, slice * (p.ranks_slice - p.padded_rank) + at_rank, ranks_left(own));
  }

  __device__ __forceinline__ int rank() const { return min(part.rank, p.max_rank); }
  /* Returns how many true ranks the slice has from column `own` of the tile on. */
  __device__ __forceinline__ int ranks_left(int own) const {
    const int at = tile.rank + own, slice = at >= p.padded_rank;
    return at < p.slices * p.padded_rank ? rank() - at + slice * p.padded_rank : 0;
  }
  __device__ __forceinline__ int steps() const { return (part.count + S::ROWS - 1) / S::ROWS; }

  /* Issues the copies of a step's index, with one warp. */
  __device__ __forceinline__ void load_index(typename S::Index &index, int step) const {
    const int i = threadIdx.x, at = step * S::ROWS + i;
    if (i >= S::ROWS)
      return;
    const bool valid = at < part.count;
    const int row = part.first + at;
    copy_async_4(shared_address(&index.wide[i]), s.index[p.wide.index] + row, valid);
    copy_async_4(shared_address(&index.ranks[i]), s.index[p.ranks.index] + row, valid);
    if (p.weighted)
      copy_async_4(shared_address(&index.weight[i]), s.weight + row, valid);
    if (!valid)
      index.wide[i] = 0, index.ranks[i] = 0, index.weight[i] = 0.f;
  }
  /* Issues the copies of the indices of the first stages. */
  __device__ __forceinline__ void load_first(typename S::SharedStorage &shared) const {
    for (int step = 0; step < S::STAGES - 1; step++)
      load_index(shared.index[step], step);
    copy_async_commit();
  }

  /* Issues the copies of a step's rows. */
  __device__ __forceinline__ void load_rows(typename S::Stage &stage,
                                            const typename S::Index &index, int step) const {
    const int left = part.count - step * S::ROWS;
    const uint32_t sWide = shared_address(stage.wide) + threadIdx.x % CHUNKS * 16;
#pragma unroll
    for (int j = 0; j < S::ROWS * CHUNKS / S::THREADS; j++) {
      const int i = threadIdx.x / CHUNKS + j * (S::THREADS / CHUNKS);
      wide.copy(p.wide, p.wide_vectors, sWide + i * S::WIDE_PITCH, index.wide[i], i < left);
    }
    const uint32_t sRanks = shared_address(stage.ranks) + threadIdx.x % RANK_CHUNKS * 16;
    constexpr int STEP = S::THREADS / RANK_CHUNKS; // rows per iteration
    if ((STEP > S::ROWS && threadIdx.x / RANK_CHUNKS >= S::ROWS) ||
        !(active >> threadIdx.x % RANK_CHUNKS / 2 & 1))
      return;
#pragma unroll
    for (int j = 0; j < (S::ROWS + STEP - 1) / STEP; j++) {
      const int i = threadIdx.x / RANK_CHUNKS + j * STEP;
      ranks.copy(p.ranks, p.ranks_vectors, sRanks + i * S::RANKS_PITCH, index.ranks[i], i < left);
    }
  }

  /* Scales two elements consecutive in K, and rounds them. */
  static __device__ __forceinline__ uint32_t weigh(uint32_t pair, float first, float second) {
    const T *two = (const T *)&pair;
    return pack2<T>(Element<T>::to_float(two[0]) * first, Element<T>::to_float(two[1]) * second);
  }

  /* Accumulates the products of a step. */
  __device__ __forceinline__ void
  multiply(const typename S::Stage &stage, const typename S::Index &index,
           float (&rAcc)[S::WARP_TILES][S::WARP_COLUMNS / 8][4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = warp / 4 * S::WARP_TILES;
    // For wide, ldmatrix loads 16 rows of 8 columns as matrices 0 and 1, the next 8 columns as 2
    // and 3; for ranks, 8 rows of 16 columns as matrices 0 and 1, the next 8 rows as 2 and 3.
    const uint32_t sWide = shared_address(stage.wide) + lane % 16 * S::WIDE_PITCH +
                           2 * (warp % 4 * S::WARP_COLUMNS + lane / 16 * 8);
    const uint32_t sRanks = shared_address(stage.ranks) +
                            (lane % 8 + lane / 16 * 8) * S::RANKS_PITCH +
                            2 * (lane / 8 % 2 * 8 + 16 * first);
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
      for (int i = 0; i < S::WARP_TILES; i++) {
        if (!(active >> (first + i) & 1))
          continue;
        uint32_t a[4];
        load_matrix_x4_trans(a, sRanks + k * S::RANKS_PITCH + 32 * i);
        if (p.weighted) {
#pragma unroll
          for (int q = 0; q < 4; q++)
            a[q] = weigh(a[q], weight[q / 2 * 2], weight[q / 2 * 2 + 1]);
        }
#pragma unroll
        for (int j = 0; j < S::WARP_COLUMNS / 8; j++)
          mma_16816<T>(rAcc[i][j], a, b[j / 2] + j % 2 * 2);
      }
    }
  }

  /* Runs the K loop over the part, after load_first(), and writes the accumulators to shared.sums.
   * All threads must call it; on return, `index` may be overwritten. */
  __device__ __forceinline__ void run(typename S::SharedStorage &shared) const {
    constexpr int STAGES = S::STAGES;
    float rAcc[S::WARP_TILES][S::WARP_COLUMNS / 8][4] = {};
    const int all = steps();

    // Issue the copies of the first stages, once their indices have arrived.
    copy_async_wait<0>();
    __syncthreads();
    for (int step = 0; step < STAGES - 1; step++) {
      if (step < all)
        load_rows(shared.stages[step], shared.index[step], step);
      if (step + STAGES - 1 < all)
        load_index(shared.index[step + STAGES - 1], step + STAGES - 1);
      copy_async_commit();
    }

#pragma unroll 1
    for (int step = 0; step < all; step++) {
      // Wait for the stage, and until all threads have read the previous one.
      copy_async_wait<STAGES - 2>();
      __syncthreads();

      // Refill the previous stage.
      const int next = step + STAGES - 1, ahead = next + STAGES - 1;
      if (next < all)
        load_rows(shared.stages[next % STAGES], shared.index[next % S::INDICES], next);
      if (ahead < all)
        load_index(shared.index[ahead % S::INDICES], ahead);
      copy_async_commit();

      multiply(shared.stages[step % STAGES], shared.index[step % S::INDICES], rAcc);
    }
    copy_async_wait<0>();
    __syncthreads();

    if (p.transposed)
      put_sums<true>(shared.sums, rAcc);
    else
      put_sums<false>(shared.sums, rAcc);
    __syncthreads();
  }

  /* Writes the accumulators of m16 tiles that have ranks. */
  template <bool TRANSPOSED>
  __device__ __forceinline__ void
  put_sums(typename S::Sums &sums,
           const float (&rAcc)[S::WARP_TILES][S::WARP_COLUMNS / 8][4]) const {
    const int thread = epilogue_thread(), lane = thread % 32, warp = thread / 32;
    const int first = warp / 4 * S::WARP_TILES;
#pragma unroll
    for (int i = 0; i < S::WARP_TILES; i++) {
      if (!(active >> (first + i) & 1))
        continue;
#pragma unroll
      for (int j = 0; j < S::WARP_COLUMNS / 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int rank = 16 * (first + i) + 8 * half + lane / 4;
          const int column = warp % 4 * S::WARP_COLUMNS + 8 * j + lane % 4 * 2;
          const float *two = &rAcc[i][j][2 * half];
          if constexpr (TRANSPOSED) {
            sums.by_column[column][rank] = two[0];
            sums.by_column[column + 1][rank] = two[1];
          } else {
            *(float2 *)&sums.by_rank[rank][column] = make_float2(two[0], two[1]);
          }
        }
    }
  }

  /* Stores the sums to the gradient or, if it has several parts, to this part's slot; does nothing
   * if the part has no gradient. */
  __device__ __forceinline__ void store(const typename S::SharedStorage &shared) const {
    if (part.to[1] < 0)
      return;
    if (part.slot < 0)
      return write_tile<T, S>(p, tile, part.to, part.count > 0 ? rank() : 0, s.accumulate,
                              shared.sums);
    float *to = group.slots + part.slot * group.slot_floats + p.slot_offset;
    for (int at = epilogue_thread(); at < S::RANKS * kColumns; at += S::THREADS) {
      const int r = p.transposed ? at % S::RANKS : at / kColumns;
      const int c = p.transposed ? at / S::RANKS : at % kColumns;
      const int rank = tile.rank + r, column = tile.column + c;
      if (rank < p.slices * p.padded_rank && column < p.columns)
        to[slot_index(p, rank, column)] =
            p.transposed ? shared.sums.by_column[c][r] : shared.sums.by_rank[r][c];
    }
  }
};

/* Returns the tiles of all parts (of = 0), or splits (1). */
__device__ __forceinline__ int64_t tiles_of(const GradientGroup &group, int of) {
  return group.tiles ? (int64_t)group.parts.count[of] * group.tiles : 0;
}

/* Finds tile `work` among the tiles of all parts (or splits); tiles of pairs come first. */
struct GradientWork {
  const GradientGroup *group;
  int number, tile; // number of the part or split; tile within it

  __device__ __forceinline__ GradientWork(const GradientLaunch &s, int64_t work, int64_t of_pairs) {
    group = &s.group[work >= of_pairs];
    const int64_t at = work >= of_pairs ? work - of_pairs : work;
    number = divide_work(at, group->tiles);
    tile = (int)(at - (int64_t)number * group->tiles);
  }
};

/* Persistent kernel; the index of the next tile is copied while the current one is stored. */
template <class T, class S>
__global__ void __launch_bounds__(S::THREADS, S::CTAS)
    gradients(const __grid_constant__ GradientLaunch s) {
  extern __shared__ __align__(128) char memory[];
  typename S::SharedStorage &shared = *(typename S::SharedStorage *)memory;
  follow_previous_kernel();
  if (threadIdx.x == 0) {
    shared.of_pairs = tiles_of(s.group[0], 0);
    shared.all = shared.of_pairs + tiles_of(s.group[1], 0);
  }
  __syncthreads();
  // Issues the copies of a tile's part, with one warp.
  const auto load_part = [&](int64_t work, moelora_gradient_part &to) {
    const GradientWork found(s, work, shared.of_pairs);
    const auto *from = (const int32_t *)&found.group->parts.part[found.number];
    if (threadIdx.x < sizeof to / sizeof(int32_t))
      copy_async_4(shared_address((int32_t *)&to + threadIdx.x), from + threadIdx.x, true);
  };
  const auto tile_of = [&](int64_t work, const moelora_gradient_part &part) {
    const GradientWork found(s, work, shared.of_pairs);
    GradientTile tile;
    const GradientProduct &p = find_tile<S::RANKS>(*found.group, found.tile, &tile);
    return PartTile<T, S>(s, *found.group, p, part, tile);
  };
  if ((int64_t)blockIdx.x >= shared.all)
    return;
  int own = 0;
  load_part(blockIdx.x, shared.part[own]);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  tile_of(blockIdx.x, shared.part[own]).load_first(shared);
  for (int64_t work = blockIdx.x; work < shared.all; work += gridDim.x, own ^= 1) {
    const moelora_gradient_part &part = shared.part[own];
    const int64_t next = work + gridDim.x;
    if (next < shared.all)
      load_part(next, shared.part[own ^ 1]);
    if (part.count > 0 && part.to[1] >= 0) {
      tile_of(work, part).run(shared);
    } else { // nothing to sum; wait for the next part
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
    }
    if (next < shared.all)
      tile_of(next, shared.part[own ^ 1]).load_first(shared);
    tile_of(work, part).store(shared); // find the tile again: the K loop needs all registers
    __syncthreads();                   // all threads have read the sums
  }
}

/* Adds the slots of a gradient in order. */
struct SlotSums {
  const GradientGroup &group;
  const GradientProduct &p;
  const GradientTile &tile;
  const float *slots; // of the first part
  int parts;

  template <bool TRANSPOSED, int WIDTH>
  __device__ __forceinline__ void load(float (&v)[WIDTH], int rank, int column) const {
    const float *from = slots + slot_index(p, tile.rank + rank, tile.column + column);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      v[i] = from[i];
      for (int part = 1; part < parts; part++)
        v[i] += from[part * group.slot_floats + i];
    }
  }
};

/* Stores the gradients that have several parts. */
template <class T, class S>
__global__ void __launch_bounds__(S::THREADS) sum_slots(const __grid_constant__ GradientLaunch s) {
  follow_previous_kernel();
  const int64_t of_pairs = tiles_of(s.group[0], 1), all = of_pairs + tiles_of(s.group[1], 1);
  for (int64_t work = blockIdx.x; work < all; work += gridDim.x) {
    const GradientWork found(s, work, of_pairs);
    const GradientGroup &group = *found.group;
    const moelora_gradient_split split = group.parts.split[found.number];
    GradientTile tile;
    const GradientProduct &p = find_tile<S::RANKS>(group, found.tile, &tile);
    if (split.to[1] < 0)
      continue;
    const float *slots = group.slots + split.slot * group.slot_floats + p.slot_offset;
    write_tile<T, S>(p, tile, split.to, min(split.rank, p.max_rank), s.accumulate,
                     SlotSums{group, p, tile, slots, split.parts});
  }
}

/* ---- host ---- */

bool is_shared(const moelora_gradient &gradient, const moelora_gradient_rows *list) {
  return list->adapters.max_parts > 0 && gradient.experts == 1 && !gradient.sparse;
}

bool allows_vectors(const moelora_gradient_operand &operand, int64_t slice, int64_t columns) {
  return (uintptr_t)operand.data % 16 == 0 && operand.stride % 8 == 0 && slice % 8 == 0 &&
         columns % 8 == 0 && operand.stride < (int64_t)1 << 31;
}

/* Adds slices [first, first + slices) of a product to a group. */
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
  // Elements beyond the true rank are not read, so the rank need not be a multiple of 8.
  p.ranks_vectors = allows_vectors(p.ranks, p.ranks_slice, 0);
  p.wide_vectors = allows_vectors(p.wide, 0, from.columns);
  p.gradient_vectors = true;
  for (int i = 0; i < slices; i++) {
    p.gradient[i] = from.gradient[first + i];
    p.gradient_vectors = p.gradient_vectors && moelora_is_vector_gradient(&p.gradient[i]);
  }
}

/* Returns the kernels' arguments except tiles, and in *most the largest number of rank columns of a
 * product. */
GradientLaunch describe(const moelora_gradients_launch *g, const moelora_gradient_rows *list,
                        int32_t *most) {
  GradientLaunch s = {};
  s.group[0].parts = list->pairs;
  s.group[1].parts = list->adapters;
  s.index[MOELORA_ROW_POSITION] = list->position;
  s.index[MOELORA_ROW_FLAT] = list->row;
  s.index[MOELORA_ROW_TOKEN] = list->token;
  s.weight = list->weight;
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
      slots += group.parts.max_slots * group.slot_floats;
  }
  return s;
}

/* Numbers the tiles of a launch. */
void number_tiles(GradientLaunch *s, int ranks, int columns) {
  for (GradientGroup &group : s->group) {
    group.tiles = 0;
    for (int i = 0; i < group.count; i++) {
      GradientProduct &p = group.product[i];
      p.column_tiles = (p.columns + columns - 1) / columns;
      p.first_tile = group.tiles;
      group.tiles += p.column_tiles * ((p.slices * p.padded_rank + ranks - 1) / ranks);
    }
  }
}

template <class T, int RANKS>
moelora_status launch_few(GradientLaunch &s, const moelora_exec *exec) {
  using S = FewShape<RANKS>;
  number_tiles(&s, RANKS, kFewColumns);
  return launch_kernel<gradients_few<T, S>>("gradients_few",
                                            s.group[0].parts.max_few * s.group[0].tiles, S::THREADS,
                                            sizeof(typename S::SharedStorage), exec, s);
}

template <class T, int RANKS> moelora_status launch(GradientLaunch &s, const moelora_exec *exec) {
  using S = GradientShape<RANKS>;
  static_assert(sizeof(typename S::SharedStorage) <= kPortableShared, "shared memory of a CTA");
  number_tiles(&s, RANKS, kColumns);
  int64_t work = 0, splits = 0;
  for (const GradientGroup &group : s.group)
    work += group.parts.max_parts * group.tiles, splits += group.parts.max_splits * group.tiles;
  MOELORA_TRY((launch_kernel<gradients<T, S>>("gradients", work, S::THREADS,
                                              sizeof(typename S::SharedStorage), exec, s)));
  return launch_kernel<sum_slots<T, S>>("sum_gradients", splits, S::THREADS, 0, exec, s);
}

template <class T>
moelora_status launch_any(GradientLaunch &s, int32_t most, const moelora_exec *exec) {
  if (s.group[0].count && s.group[0].parts.few)
    MOELORA_TRY((most <= 16   ? launch_few<T, 16>(s, exec)
                 : most <= 32 ? launch_few<T, 32>(s, exec)
                              : launch_few<T, 64>(s, exec)));
  return most <= 16   ? launch<T, 16>(s, exec)
         : most <= 32 ? launch<T, 32>(s, exec)
         : most <= 64 ? launch<T, 64>(s, exec)
                      : launch<T, 128>(s, exec);
}

} // namespace

size_t moelora_cuda_gradient_slot_bytes(const moelora_gradients_launch *g,
                                        const moelora_gradient_rows *list) {
  int32_t most;
  const GradientLaunch s = describe(g, list, &most);
  size_t floats = 0;
  for (const GradientGroup &group : s.group) {
    const size_t own = moelora_times((size_t)group.parts.max_slots, (size_t)group.slot_floats);
    floats = floats + own < own ? SIZE_MAX : floats + own;
  }
  return moelora_times(floats, sizeof(float));
}

moelora_status moelora_cuda_factor_gradients(const moelora_gradients_launch *g,
                                             const moelora_gradient_rows *list,
                                             const moelora_exec *exec) {
  int32_t most;
  GradientLaunch s = describe(g, list, &most);
  return g->dtype == MOELORA_BF16 ? launch_any<__nv_bfloat16>(s, most, exec)
                                  : launch_any<__half>(s, most, exec);
}
