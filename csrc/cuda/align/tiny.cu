/* Sorts up to ALIGN_TINY_ITEMS items in one launch: each item is compared with all others, without
 * bins to clear, count and scan. All CTAs compare; the first one places the items, all share the
 * rest of the output. An item has four lanes, each of which compares it with a quarter of the
 * others. If the caller's tables must be resolved first, a single CTA does everything. */
#include "cuda/align/align.cuh"
#include "cuda/align/resolve.cuh"
#include "cuda/launch/kernel_launch.cuh"

constexpr int LANES = 4, THREADS = LANES * ALIGN_TINY_ITEMS; /* LANES: quad_sum() adds four */
/* Enough that each warp writes the padding of at most one group. */
constexpr uint32_t CTAS = 16;

/* Per-item data that other threads read: the key, with the index in the low bits; and for a group's
 * first item, the group's first key, number of items and number of blocks. */
struct tiny_shared {
  alignas(16) int32_t item[ALIGN_TINY_ITEMS];
  alignas(16) int32_t low[ALIGN_TINY_ITEMS];    /* INT32_MAX if another item is the first */
  alignas(16) int32_t blocks[ALIGN_TINY_ITEMS]; /* 0 if another item is the first */
  int32_t count[ALIGN_TINY_ITEMS];
  int32_t block[ALIGN_TINY_ITEMS];
  int32_t expert[ALIGN_TINY_ITEMS], adapter[ALIGN_TINY_ITEMS]; /* of rows and tokens, resolved */
};

/* Resolves the caller's tables. Separate threads handle rows, tokens and the other tables. */
static __device__ __forceinline__ void resolve(const align_sort &s, const ResolveParams &tables,
                                               tiny_shared &shared) {
  constexpr int32_t EACH = ALIGN_TINY_ITEMS;
  static_assert(THREADS > 2 * EACH, "some threads are left");
  const int32_t thread = (int32_t)threadIdx.x;
  if (thread < EACH) {
    if (thread < (int32_t)s.num_items)
      shared.expert[thread] = resolve_expert(tables, thread);
  } else if (thread < 2 * EACH) {
    if (tables.adapter && thread - EACH < s.routes.num_tokens)
      shared.adapter[thread - EACH] = resolve_adapter(tables, thread - EACH);
  } else {
    resolve_others(tables, thread - 2 * EACH, THREADS - 2 * EACH);
  }
}

/* Returns the key of an item, as load_keys(), but from ids in shared memory. */
static __device__ __forceinline__ int32_t resolved_key(const align_sort &s,
                                                       const tiny_shared &shared, int32_t item) {
  if (item >= (int32_t)s.num_items || shared.expert[item] < 0)
    return -1;
  const int32_t adapter = s.by_adapter ? shared.adapter[divide((uint32_t)item, s.top_k)] + 1 : 0;
  return shared.expert[item] * (int32_t)s.adapter_keys.value + adapter;
}

template <bool RESOLVES>
static __global__ void __launch_bounds__(THREADS)
    align_tiny(const __grid_constant__ align_sort s, const __grid_constant__ ResolveParams tables) {
  __shared__ tiny_shared shared;
  const int32_t me = (int32_t)threadIdx.x / LANES, lane = (int32_t)threadIdx.x % LANES;
  const int32_t items = (int32_t)s.num_items;
  follow_previous_kernel();
  int32_t key[1];
  if constexpr (RESOLVES) {
    resolve(s, tables, shared);
    __syncthreads();
    key[0] = resolved_key(s, shared, me);
  } else {
    load_keys(s, (uint32_t)me, s.num_items, key);
  }
  const int32_t mine = key[0] * ALIGN_TINY_ITEMS + me;
  if (lane == 0)
    shared.item[me] = mine;
  __syncthreads();

  const uint32_t group = key[0] < 0 ? 0 : group_of_key(s, key[0]);
  const int32_t low = (int32_t)(group * s.ways);
  const uint32_t width = s.ways * ALIGN_TINY_ITEMS;
  /* Counts of the group's items, one byte each: all; those sorted before this one; those of smaller
   * index. */
  uint32_t counts = 0;
  for (int32_t i = 4 * lane; i < items; i += 4 * LANES) {
    const int4 four = *(const int4 *)(shared.item + i);
    const int32_t others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      if ((uint32_t)(others[j] - low * ALIGN_TINY_ITEMS) < width)
        counts += 1 + ((others[j] < mine) << 8) + ((i + j < me) << 16);
  }
  counts = quad_sum(counts);
  const int32_t count = (int32_t)(counts & 0xff), place = (int32_t)(counts >> 8 & 0xff);
  const bool first = key[0] >= 0 && counts >> 16 == 0;
  const int32_t blocks = blocks_for(s, count);
  if (lane == 0) {
    shared.low[me] = first ? low : INT32_MAX;
    shared.blocks[me] = first ? blocks : 0;
    shared.count[me] = count;
  }
  __syncthreads();

  uint32_t sizes = 0; /* numbers of blocks, 16 bits each: of all groups, of lower groups */
  for (int32_t i = 4 * lane; i < items; i += 4 * LANES) {
    const int4 low4 = *(const int4 *)(shared.low + i), blocks4 = *(const int4 *)(shared.blocks + i);
    const int32_t lows[4] = {low4.x, low4.y, low4.z, low4.w};
    const int32_t more[4] = {blocks4.x, blocks4.y, blocks4.z, blocks4.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      sizes += (uint32_t)more[j] + (lows[j] < low ? (uint32_t)more[j] << 16 : 0);
  }
  sizes = quad_sum(sizes);
  const int32_t num_blocks = (int32_t)(sizes & 0xffff), block = (int32_t)(sizes >> 16);
  if (lane == 0)
    shared.block[me] = block;
  if (blockIdx.x == 0 && lane == 0) {
    if (key[0] >= 0)
      write_item(s, (uint32_t)me, key[0],
                 block * (int32_t)s.block_size.value + place_in_group(s, place, count, blocks));
    else if (me < items)
      skip_item(s, (uint32_t)me);
  }
  __syncthreads();
  const int32_t warp = (int32_t)threadIdx.x / 32;
  for (int32_t i = (int32_t)blockIdx.x + (int32_t)gridDim.x * warp; i < items;
       i += (int32_t)gridDim.x * (THREADS / 32))
    if (shared.blocks[i])
      write_around_group(s, group_of_key(s, shared.low[i]), shared.block[i], shared.count[i],
                         shared.blocks[i], (int32_t)threadIdx.x % 32, 32);
  write_around_groups(s, num_blocks, (int64_t)blockIdx.x * THREADS + threadIdx.x,
                      (int64_t)gridDim.x * THREADS);
}

moelora_status align_launch_tiny(const align_sort &sort, const moelora_routes *from,
                                 const moelora_exec *exec) {
  if (!from)
    return launch_blocks<align_tiny<false>>("align_tiny", CTAS, THREADS, 0, exec, sort,
                                            ResolveParams{});
  return launch_blocks<align_tiny<true>, 1, false>(
      "align_tiny", 1, THREADS, 0, exec, sort,
      describe_resolve(from, &sort.routes, nullptr, nullptr));
}
