/* Sorts thousands of items in one launch. Each CTA reads all items, which is faster than a second
 * launch or a grid-wide barrier, and places ALIGN_GROUP of them, its chunk:
 *   before[k], total[k]   number of items of key k before the chunk, and from its start on
 *   in_warp[k]            number of items of key k, one byte per warp of the chunk
 * Counts are integer sums in shared memory, so that the order of additions does not matter. */
#include "cuda/align/align.cuh"
#include "cuda/launch/kernel_launch.cuh"

static_assert(ALIGN_GROUP / 32 == 4, "a word counts the items of four warps");

/* BATCH: loads in flight per thread while counting. */
template <int BATCH>
static __global__ void __launch_bounds__(ALIGN_THREADS, 1)
    align_small(const __grid_constant__ align_sort s) {
  if (blockIdx.x >= s.num_chunks) {
    write_zeros(s);
    return;
  }
  extern __shared__ int32_t memory[];
  __shared__ align_shared shared;
  const align_bins bins = bins_in(s, memory);
  int32_t *const in_warp = bins.first;
  const uint32_t begin = blockIdx.x * ALIGN_GROUP;

  clear_bins(bins, 3 * s.num_keys, shared);
  follow_previous_kernel();
  int32_t key[BATCH];
  load_keys(s, threadIdx.x, s.num_items, key);
  __syncthreads();
  mark_local_experts(s, shared);
  for (uint32_t base = 0;;) {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      /* a warp's items are on one side of `begin`: both start at multiples of 32 */
      const uint32_t item = base + u * ALIGN_THREADS + threadIdx.x;
      int32_t *bin = item < begin ? bins.before : bins.total;
      if (key[u] >= 0)
        atomicAdd(bin + key[u], 1);
      if (item - begin < ALIGN_GROUP) {
        shared.key[item - begin] = key[u];
        if (key[u] >= 0)
          atomicAdd((uint32_t *)in_warp + key[u], 1u << (item - begin) / 32 * 8);
      }
    }
    base += BATCH * ALIGN_THREADS;
    if (base >= s.num_items)
      break;
    load_keys(s, base + threadIdx.x, s.num_items, key);
  }
  __syncthreads();

  const uint32_t index = begin + threadIdx.x;
  const bool places = threadIdx.x < ALIGN_GROUP && index < s.num_items;
  const int32_t own = places ? shared.key[threadIdx.x] : -1;
  int32_t earlier = 0;
  if (threadIdx.x < ALIGN_GROUP) {
    earlier = rank_in_warp(own);
    if (own >= 0)
      earlier += bins.before[own] + bytes_below((uint32_t)in_warp[own], threadIdx.x / 32 * 8);
  }
  /* lay_out() has a barrier before it overwrites in_warp */
  const int32_t num_blocks = lay_out(s, bins, shared);
  if (own >= 0)
    write_item(s, index, own, position_of(s, bins, shared, own, earlier));
  else if (places)
    skip_item(s, index);
  write_around_items(s, bins, shared, num_blocks);
}

template <int BATCH>
static moelora_status launch_batched(const align_sort &sort, const moelora_exec *exec) {
  const size_t bytes = 3 * (size_t)sort.num_keys * sizeof(int32_t);
  return launch_sized<align_small<BATCH>>("align_small", sort.num_chunks + align_zero_ctas(sort),
                                          ALIGN_THREADS, bytes, exec, sort);
}

moelora_status align_launch_small_2(const align_sort &sort, const moelora_exec *exec) {
  return launch_batched<2>(sort, exec);
}

moelora_status align_launch_small_8(const align_sort &sort, const moelora_exec *exec) {
  return launch_batched<8>(sort, exec);
}
