/* Sorts of any number of items in two launches.
 *
 * align_count: CTA c writes how often each key occurs in chunk c,
 *   table [num_chunks, ceil(num_keys / 2)]  two 16-bit counts to a word.
 * align_place: every CTA sums the table into before and total, lays out the groups like all others,
 * and places its chunk in tiles of ALIGN_THREADS items. In a tile, groups of ALIGN_GROUP threads
 * take turns: before[k] runs along as the number of items of key k already placed.
 *
 * Reading the whole table costs each CTA num_chunks * num_keys * 2 bytes, so chunks grow with the
 * number of keys (align.cu). */
#include "cuda/align.cuh"

/* Loads in flight per thread: while counting, and while summing the table. */
constexpr int BATCH = 4;
constexpr int TABLE_BATCH = 16;

static __device__ __forceinline__ uint32_t chunk_end(const align_sort &s, uint32_t begin) {
  return begin >= s.num_items ? begin : begin + min(s.chunk_items, s.num_items - begin);
}

template <typename Id, typename Lora>
static __global__ void __launch_bounds__(ALIGN_THREADS)
    align_count(const __grid_constant__ align_sort s) {
  extern __shared__ int32_t count[]; /* [num_keys], one more if that is odd */
  const uint32_t words = (s.num_keys + 1) / 2;
  const uint32_t begin = blockIdx.x * s.chunk_items, end = chunk_end(s, begin);

  wait_for_previous_kernel();
  start_next_kernel();
  for (uint32_t k = threadIdx.x; k < 2 * words; k += ALIGN_THREADS)
    count[k] = 0;
  int32_t key[BATCH];
  load_keys<Id, Lora>(s, begin + threadIdx.x, end, key);
  __syncthreads();
  for (uint32_t base = begin;;) {
#pragma unroll
    for (int u = 0; u < BATCH; u++)
      if (key[u] >= 0)
        atomicAdd(count + key[u], 1);
    base += BATCH * ALIGN_THREADS;
    if (base >= end)
      break;
    load_keys<Id, Lora>(s, base + threadIdx.x, end, key);
  }
  __syncthreads();
  for (uint32_t w = threadIdx.x; w < words; w += ALIGN_THREADS)
    s.table[(size_t)blockIdx.x * words + w] = (uint32_t)count[2 * w] | (uint32_t)count[2 * w + 1]
                                                                           << 16;
}

/* Adds the table into the bins: chunks before this CTA's, and the others. */
static __device__ __forceinline__ void sum_table(const align_sort &s, const align_bins &bins) {
  const uint32_t words = (s.num_keys + 1) / 2;
  const uint32_t batches = (s.num_chunks + TABLE_BATCH - 1) / TABLE_BATCH;
  for (uint32_t i = threadIdx.x; i < batches * words; i += ALIGN_THREADS) {
    const uint32_t first = i / words * TABLE_BATCH, w = i % words;
    uint32_t pair[TABLE_BATCH];
#pragma unroll
    for (int u = 0; u < TABLE_BATCH; u++)
      pair[u] = first + u < s.num_chunks ? __ldcg(s.table + (size_t)(first + u) * words + w) : 0;
    int32_t low[2] = {0, 0}, high[2] = {0, 0}; /* [0] before the chunk, [1] from it on */
#pragma unroll
    for (int u = 0; u < TABLE_BATCH; u++) {
      const bool before = first + u < blockIdx.x;
      low[0] += before ? pair[u] & 0xffff : 0;
      low[1] += before ? 0 : pair[u] & 0xffff;
      high[0] += before ? pair[u] >> 16 : 0;
      high[1] += before ? 0 : pair[u] >> 16;
    }
    /* the second half of a last, odd word is 0 and adds nothing */
    if (low[0])
      atomicAdd(bins.before + 2 * w, low[0]);
    if (low[1])
      atomicAdd(bins.total + 2 * w, low[1]);
    if (high[0])
      atomicAdd(bins.before + 2 * w + 1, high[0]);
    if (high[1])
      atomicAdd(bins.total + 2 * w + 1, high[1]);
  }
}

/* Rank of a thread's key among equal keys of the lower threads of its group of ALIGN_GROUP.
 * `group_key` are the keys of that group. */
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

/* Items of a tile's keys before them, group after group; before[k] ends up behind the tile. */
static __device__ __forceinline__ int32_t count_earlier(const align_bins &bins, int32_t key,
                                                        int32_t rank, uint32_t num_items) {
  const uint32_t group = threadIdx.x / ALIGN_GROUP;
  int32_t earlier = 0;
  for (uint32_t turn = 0; turn * ALIGN_GROUP < min(num_items, (uint32_t)ALIGN_THREADS); turn++) {
    if (group == turn) {
      if (key >= 0)
        earlier = bins.before[key] + rank;
      asm volatile("bar.sync 1, %0;" ::"n"(ALIGN_GROUP) : "memory");
      if (key >= 0)
        atomicAdd(bins.before + key, 1);
    }
    __syncthreads();
  }
  return earlier;
}

template <typename Id, typename Lora>
static __global__ void __launch_bounds__(ALIGN_THREADS, 1)
    align_place(const __grid_constant__ align_sort s) {
  if (blockIdx.x >= s.num_chunks) {
    write_zeros(s);
    return;
  }
  extern __shared__ int32_t memory[];
  __shared__ align_shared shared;
  const align_bins bins = bins_in(s, memory);
  const uint32_t begin = blockIdx.x * s.chunk_items, end = chunk_end(s, begin);

  clear_bins(s, bins, shared);
  int32_t key[1], next[1];
  if (s.order)
    wait_for_previous_kernel();
  load_keys<Id, Lora>(s, begin + threadIdx.x, end, key);
  wait_for_previous_kernel();
  start_next_kernel();
  __syncthreads();
  mark_local_experts(s, shared);
  sum_table(s, bins);
  __syncthreads();

  int32_t num_blocks = lay_out(s, bins, shared);
  write_around_items(s, bins, shared, num_blocks);
  for (uint32_t tile = begin; tile < end; tile += ALIGN_THREADS) {
    const uint32_t index = tile + threadIdx.x;
    shared.key[threadIdx.x] = key[0];
    __syncthreads();
    load_keys<Id, Lora>(s, index + ALIGN_THREADS, end, next);
    int32_t rank = rank_in_group(shared.key + threadIdx.x / ALIGN_GROUP * ALIGN_GROUP, key[0]);
    int32_t earlier = count_earlier(bins, key[0], rank, end - tile);
    if (key[0] >= 0)
      write_item<Lora>(s, index, key[0], position_of(s, bins, shared, key[0], earlier));
    else if (index < end)
      skip_item(s, index);
    key[0] = next[0];
  }
}

static inline int pick(const align_sort &sort) {
  return sort.routes.topk_ids.is_64 * 2 + sort.routes.token_lora_mapping.is_64;
}

cudaError_t align_launch_count(const align_sort &sort, cudaStream_t stream) {
  static const void *const kernels[4] = {
      (const void *)align_count<int32_t, int32_t>, (const void *)align_count<int32_t, int64_t>,
      (const void *)align_count<int64_t, int32_t>, (const void *)align_count<int64_t, int64_t>};
  align_sort argument = sort;
  size_t bytes = ((size_t)sort.num_keys + 1) * sizeof(int32_t);
  return align_launch_kernel(kernels[pick(sort)], sort.num_chunks, ALIGN_THREADS, bytes, stream,
                             &argument);
}

cudaError_t align_launch_place(const align_sort &sort, cudaStream_t stream) {
  static const void *const kernels[4] = {
      (const void *)align_place<int32_t, int32_t>, (const void *)align_place<int32_t, int64_t>,
      (const void *)align_place<int64_t, int32_t>, (const void *)align_place<int64_t, int64_t>};
  align_sort argument = sort;
  size_t bytes = 3 * (size_t)sort.num_keys * sizeof(int32_t);
  return align_launch_kernel(kernels[pick(sort)], sort.num_chunks + align_zero_ctas(sort),
                             ALIGN_THREADS, bytes, stream, &argument);
}
