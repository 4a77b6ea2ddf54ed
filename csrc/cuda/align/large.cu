/* Sorts any number of items in two launches. A table row covers row_chunks chunks.
 *
 *   align_count   CTA r counts the keys of row r
 *   align_place   each CTA sums the table into `before` and `total`, computes the layout, and
 *                 places its chunk in tiles. Within its own row, it counts the items before its
 *                 chunk itself, while the first launch runs: this keeps the table short.
 *
 *   table [num_rows, ceil(num_keys / 2)]   two 16-bit counts per word
 *   in_group [2, num_keys]                 one byte each for the 8 thread groups of a tile
 *
 * In a tile, each thread group of ALIGN_GROUP threads counts its keys; an item follows the items of
 * equal key in lower thread groups. before[k] accumulates the items of key k in earlier tiles and
 * chunks. If shared memory has no room for in_group, a tile is a single thread group. */
#include "cuda/align/align.cuh"
#include "cuda/launch/kernel_launch.cuh"

/* Loads in flight per thread, while counting and while summing the table. */
constexpr int BATCH = 4;
constexpr int TABLE_BATCH = 16;

/* Calls add(key) for the items in [begin, end) that are not skipped. */
template <class Add>
static __device__ __forceinline__ void for_each_key(const align_sort &s, uint32_t begin,
                                                    uint32_t end, Add add) {
  for (uint32_t base = begin; base < end; base += BATCH * ALIGN_THREADS) {
    int32_t key[BATCH];
    load_keys(s, base + threadIdx.x, end, key);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
      if (key[u] >= 0)
        add(key[u]);
  }
}

static __global__ void __launch_bounds__(ALIGN_THREADS, 1)
    align_count(const __grid_constant__ align_sort s) {
  extern __shared__ int32_t count[]; /* [num_keys], rounded up to an even number */
  const uint32_t words = s.words.value, row_items = s.row_chunks * s.chunk_items;
  const uint32_t begin = blockIdx.x * row_items;

#pragma unroll 1
  for (uint32_t k = threadIdx.x; k < 2 * words; k += ALIGN_THREADS)
    count[k] = 0;
  follow_previous_kernel();
  __syncthreads();
  for_each_key(s, begin, begin + min(row_items, s.num_items - begin),
               [&](int32_t key) { atomicAdd(count + key, 1); });
  __syncthreads();
  for (uint32_t w = threadIdx.x; w < words; w += ALIGN_THREADS)
    s.table[(size_t)blockIdx.x * words + w] = (uint32_t)count[2 * w] | (uint32_t)count[2 * w + 1]
                                                                           << 16;
}

/* Adds the table to the bins: rows before the CTA's row `own` to `before`, the others to `total`.
 * `teams` threads share the rows of each word. */
static __device__ __forceinline__ void sum_table(const align_sort &s, const align_bins &bins,
                                                 uint32_t own) {
  const uint32_t words = s.words.value;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < s.teams * words; i += ALIGN_THREADS) {
    const uint32_t team = divide(i, s.words), w = i - team * words;
    const uint32_t first = team * s.team_rows, last = min(first + s.team_rows, s.num_rows);
    int32_t all[2] = {0, 0}, before[2] = {0, 0}; /* of the low and the high key */
#pragma unroll 1
    for (uint32_t row = first; row < last; row += TABLE_BATCH) {
      uint32_t word[TABLE_BATCH];
#pragma unroll
      for (int u = 0; u < TABLE_BATCH; u++)
        word[u] = row + u < last ? __ldcg(s.table + (size_t)(row + u) * words + w) : 0;
#pragma unroll
      for (int u = 0; u < TABLE_BATCH; u++) {
        const int32_t low = (int32_t)(word[u] & 0xffff), high = (int32_t)(word[u] >> 16);
        all[0] += low;
        all[1] += high;
        if (row + u < own) {
          before[0] += low;
          before[1] += high;
        }
      }
    }
    /* the upper half of an odd last word is 0 and adds nothing */
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (before[half])
        atomicAdd(bins.before + 2 * w + half, before[half]);
      if (all[half] > before[half])
        atomicAdd(bins.total + 2 * w + half, all[half] - before[half]);
    }
  }
}

/* Returns the number of lower threads in the thread group with the same key. `group_key` has the
 * keys of the thread group. */
static __device__ __forceinline__ int32_t rank_in_group(const int32_t *group_key, int32_t key) {
  const int earlier = threadIdx.x % ALIGN_GROUP / 32 * 32;
  int32_t rank = rank_in_warp(key);
#pragma unroll 8
  for (int i = 0; i < earlier; i += 4) {
    int4 four = *(const int4 *)(group_key + i);
    rank += (four.x == key) + (four.y == key) + (four.z == key) + (four.w == key);
  }
  return rank;
}

/* Returns the number of lower threads in the tile with the same key. `in_group` must be zero; it is
 * used only if the tile has several thread groups. Has one barrier. */
static __device__ __forceinline__ int32_t rank_in_tile(const align_sort &s, align_shared &shared,
                                                       uint32_t *in_group, int32_t key) {
  const uint32_t group = threadIdx.x / ALIGN_GROUP;
  const bool several = s.tile > ALIGN_GROUP && key >= 0;
  shared.key[threadIdx.x] = key;
  if (several)
    atomicAdd(in_group + group / 4 * s.num_keys + key, 1u << group % 4 * 8);
  __syncthreads();
  int32_t rank = rank_in_group(shared.key + group * ALIGN_GROUP, key);
  if (several)
    rank += bytes_below(in_group[key], group * 8) +
            bytes_below(in_group[s.num_keys + key], group < 4 ? 0 : (group - 4) * 8);
  return rank;
}

static __global__ void __launch_bounds__(ALIGN_THREADS, 1)
    align_place(const __grid_constant__ align_sort s) {
  if (blockIdx.x >= s.num_chunks) {
    write_zeros(s);
    return;
  }
  extern __shared__ int32_t memory[];
  __shared__ align_shared shared;
  const align_bins bins = bins_in(s, memory);
  uint32_t *const in_group = (uint32_t *)memory + 3 * s.num_keys;
  const uint32_t row = blockIdx.x / s.row_chunks, row_begin = row * s.row_chunks * s.chunk_items;
  const uint32_t begin = blockIdx.x * s.chunk_items;
  const uint32_t end = begin + min(s.chunk_items, s.num_items - begin);

  clear_bins(bins, 2 * s.num_keys, shared);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; s.tile > ALIGN_GROUP && i < 2 * s.num_keys; i += ALIGN_THREADS)
    in_group[i] = 0;
  /* ids are complete once this kernel may start; for `order`, wait */
  if (s.order)
    wait_for_previous_kernel();
  int32_t key[1];
  load_keys(s, begin + threadIdx.x, min(begin + s.tile, end), key);
  __syncthreads();
  for_each_key(s, row_begin, begin, [&](int32_t early) {
    atomicAdd(bins.before + early, 1);
    atomicSub(bins.total + early, 1);
  });
  mark_local_experts(s, shared);
  int32_t rank = rank_in_tile(s, shared, in_group, key[0]);
  follow_previous_kernel();
  sum_table(s, bins, row);
  __syncthreads();

  /* lay_out() does not change `before`, and ends with a barrier */
  const int32_t num_blocks = lay_out(s, bins, shared);
  for (uint32_t tile = begin;;) {
    const uint32_t index = tile + threadIdx.x;
    if (key[0] >= 0)
      write_item(s, index, key[0],
                 position_of(s, bins, shared, key[0], bins.before[key[0]] + rank));
    else if (threadIdx.x < s.tile && index < end)
      skip_item(s, index);
    tile += s.tile;
    if (tile >= end)
      break;
    __syncthreads();
    if (key[0] >= 0) {
      atomicAdd(bins.before + key[0], 1);
      if (s.tile > ALIGN_GROUP)
        in_group[key[0]] = in_group[s.num_keys + key[0]] = 0;
    }
    load_keys(s, tile + threadIdx.x, min(tile + s.tile, end), key);
    __syncthreads();
    rank = rank_in_tile(s, shared, in_group, key[0]);
  }
  write_around_items(s, bins, shared, num_blocks);
}

moelora_status align_launch_count(const align_sort &sort, const moelora_exec *exec) {
  const size_t bytes = ((size_t)sort.num_keys + 1) * sizeof(int32_t);
  return launch_sized<align_count>("align_count", sort.num_rows, ALIGN_THREADS, bytes, exec, sort);
}

moelora_status align_launch_place(const align_sort &sort, const moelora_exec *exec) {
  const size_t key_bytes = (size_t)sort.num_keys * sizeof(int32_t);
  const bool counts_groups = 5 * key_bytes + sizeof(align_shared) <= kPortableShared;
  align_sort argument = sort;
  argument.tile = counts_groups ? ALIGN_THREADS : ALIGN_GROUP;
  const uint32_t batches = (sort.num_rows + TABLE_BATCH - 1) / TABLE_BATCH;
  const uint32_t fit = max(ALIGN_THREADS / sort.words.value, 1u);
  argument.teams = min(fit, batches);
  argument.team_rows = (sort.num_rows + argument.teams - 1) / argument.teams;
  const size_t bytes = counts_groups ? 5 * key_bytes : 2 * key_bytes + sort.num_groups * 4;
  return launch_sized<align_place>("align_place", sort.num_chunks + align_zero_ctas(sort),
                                   ALIGN_THREADS, bytes, exec, argument);
}
