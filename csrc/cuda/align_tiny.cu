/* Sorts of a few items in one launch: every item is compared with every other one, so that there
 * are no bins to clear, to count and to scan. Every CTA does that; the first one places the items,
 * all of them share what lies around. */
#include "cuda/align.cuh"

constexpr int WARPS = ALIGN_TINY_ITEMS / 32;
/* As many as let a warp write around a group or two. */
constexpr uint32_t CTAS = 16;

/* What an item tells the others: its key, and of the first item of a group where the group's keys
 * begin, its items and its blocks. */
struct tiny_shared {
  alignas(16) int32_t key[ALIGN_TINY_ITEMS];
  alignas(16) int32_t low[ALIGN_TINY_ITEMS];    /* INT32_MAX if another item is the first */
  alignas(16) int32_t blocks[ALIGN_TINY_ITEMS]; /* 0, then */
  int32_t count[ALIGN_TINY_ITEMS];
  int32_t block[ALIGN_TINY_ITEMS];
};

template <typename Id, typename Lora>
static __global__ void __launch_bounds__(ALIGN_TINY_ITEMS)
    align_tiny(const __grid_constant__ align_sort s) {
  __shared__ tiny_shared shared;
  const int32_t me = (int32_t)threadIdx.x, items = (int32_t)s.num_items;
  wait_for_previous_kernel();
  start_next_kernel();
  int32_t key[1];
  load_keys<Id, Lora>(s, threadIdx.x, s.num_items, key);
  shared.key[me] = key[0];
  __syncthreads();

  const uint32_t group = key[0] < 0 ? 0 : group_of_key(s, key[0]);
  const int32_t low = (int32_t)(group * s.ways);
  int32_t count = 0, place = 0, earlier = 0; /* in the group: all, before this one, of less index */
#pragma unroll 4
  for (int32_t i = 0; i < items; i += 4) {
    const int4 four = *(const int4 *)(shared.key + i);
    const int32_t others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool same = (uint32_t)(others[j] - low) < s.ways;
      count += same;
      place += same && (others[j] < key[0] || (others[j] == key[0] && i + j < me));
      earlier += same && i + j < me;
    }
  }
  const bool first = key[0] >= 0 && earlier == 0;
  const int32_t blocks = blocks_for(s, count);
  shared.low[me] = first ? low : INT32_MAX;
  shared.blocks[me] = first ? blocks : 0;
  shared.count[me] = count;
  __syncthreads();

  int32_t block = 0, num_blocks = 0;
#pragma unroll 4
  for (int32_t i = 0; i < items; i += 4) {
    const int4 lows = *(const int4 *)(shared.low + i), sizes = *(const int4 *)(shared.blocks + i);
    block += (lows.x < low ? sizes.x : 0) + (lows.y < low ? sizes.y : 0) +
             (lows.z < low ? sizes.z : 0) + (lows.w < low ? sizes.w : 0);
    num_blocks += sizes.x + sizes.y + sizes.z + sizes.w;
  }
  shared.block[me] = block;
  if (blockIdx.x == 0) {
    if (key[0] >= 0)
      write_item<Lora>(s, threadIdx.x, key[0],
                       block * (int32_t)s.block_size.value +
                           place_in_group(s, place, count, blocks));
    else if (me < items)
      skip_item(s, threadIdx.x);
  }
  __syncthreads();
  for (int32_t i = (int32_t)blockIdx.x + (int32_t)gridDim.x * (me / 32); i < items;
       i += (int32_t)gridDim.x * WARPS)
    if (shared.blocks[i])
      write_around_group(s, group_of_key(s, shared.low[i]), shared.block[i], shared.count[i],
                         shared.blocks[i], me % 32, 32);
  write_around_groups(s, num_blocks, (int64_t)blockIdx.x * ALIGN_TINY_ITEMS + me,
                      (int64_t)gridDim.x * ALIGN_TINY_ITEMS);
}

cudaError_t align_launch_tiny(const align_sort &sort, cudaStream_t stream) {
  static const void *const kernels[2][2] = {
      {(const void *)align_tiny<int32_t, int32_t>, (const void *)align_tiny<int32_t, int64_t>},
      {(const void *)align_tiny<int64_t, int32_t>, (const void *)align_tiny<int64_t, int64_t>},
  };
  align_sort argument = sort;
  return align_launch_kernel(
      kernels[sort.routes.topk_ids.is_64][sort.routes.token_lora_mapping.is_64], CTAS,
      ALIGN_TINY_ITEMS, 0, stream, !sort.apart, &argument);
}
