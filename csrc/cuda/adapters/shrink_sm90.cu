/* Shrink of long segments on Hopper: xa[position, slice * xa_slice + r] as in shrink.cu.
 *
 *   TMA warp        A(0) A(1) A(2)  ...   rows of A of step i, in boxes of 16 or 64 ranks
 *   gather warps    X(0) X(1) X(2)  ...   token rows of step i, by cp.async
 *   consumers            0    1     ...   wgmma of step i, in flight beside that of step i - 1
 *
 * One CTA per SM goes over the items that its producer warpgroup lists. Tokens are operand A of
 * wgmma, columns of A^T operand B. Consumer w multiplies tokens 64w to 64w + 63 of an item, the
 * first one also those from 128 on. Rows of a stage that an item does not have may hold anything:
 * their accumulators reach no other row and are not stored. The third 64 tokens may therefore
 * extend into sA.
 *
 * The header of an item's first stage is the item; after the last item comes one with expert -1. */
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/adapters/shrink_segments.cuh"
#include "cuda/gemm/sm90/gather.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/shared_storage.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/variant_ids.h"

template <int RANKS_> struct ShrinkShape {
  static constexpr int TOKENS = 160, RANKS = RANKS_, CONSUMERS = 2;
  static constexpr int STAGES = RANKS == 128 ? 6 : RANKS == 64 ? 7 : 9;
  static constexpr int THREADS = kProducers + 128 * CONSUMERS;
  using List = ItemList<TOKENS, RANKS, kProducers / 32>;

  struct Stage {
    SwizzledRow sX[TOKENS]; // token rows
    SwizzledRow sA[RANKS];  // rows of A
  };
  struct Storage {
    Stage stages[STAGES];
    uint4 headers[STAGES][2]; // a SegmentItem
    PipelineBarriers<STAGES> barriers;
  };
  static constexpr int SHARED = 1024 + (int)sizeof(Storage);
};

namespace {

constexpr int kFewRanks = 16, kManyRanks = 64; // rows of A in a TMA box

/* The pipeline, and the shared addresses of the stage at hand. */
template <class S> struct ShrinkPipeline : Pipeline<typename S::Storage> {
  using Storage = typename S::Storage;
  using Stage = typename S::Stage;
  using Pipeline<Storage>::base;
  using Pipeline<Storage>::stage;

  __device__ __forceinline__ explicit ShrinkPipeline(const void *dynamic)
      : Pipeline<Storage>((shared_address(dynamic) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t sX() const { return base + stage * (int)sizeof(Stage); }
  __device__ __forceinline__ uint32_t sA() const { return sX() + (uint32_t)offsetof(Stage, sA); }
  __device__ __forceinline__ uint32_t header() const {
    return base + (uint32_t)offsetof(Storage, headers) + stage * 32;
  }
};

/* Tensor maps of the slices of A: [max_loras, E, ranks, K]. */
struct ShrinkMaps {
  CUtensorMap few[MOELORA_MAX_SLICES], many[MOELORA_MAX_SLICES];
  StackDims dims;
};

template <class S>
__device__ __forceinline__ void write_header(const ShrinkPipeline<S> &pipeline,
                                             const SegmentItem &item) {
  const uint32_t at = pipeline.header();
  store_shared_16(at, make_uint4(item.expert, item.packed, item.block, item.row));
  store_shared_16(at + 16, make_uint4(item.share, item.magic, item.tokens, item.first));
}

template <class S>
__device__ __forceinline__ SegmentItem read_header(const ShrinkPipeline<S> &pipeline) {
  const uint32_t at = pipeline.header();
  const uint4 a = load_shared_16(at), b = load_shared_16(at + 16);
  return {(int)uniform(a.x), (int)uniform(a.y), (int)uniform(a.z), (int)uniform(a.w),
          (int)uniform(b.x), uniform(b.y),      (int)uniform(b.z), (int)uniform(b.w)};
}

/* Columns of A that an item has. */
template <class S>
__device__ __forceinline__ int columns_in(const moelora_shrink_launch &s, const SegmentItem &item) {
  return min(columns_of(s.adapters.lora, item.packed) - item.first, S::RANKS);
}

/* The TMA warp: rows of A of the listed items. One lane issues all loads of an item: with few
 * tokens there is little time for each stage. */
template <class S>
__device__ __forceinline__ void stream_a(const ShrinkMaps *maps, const moelora_shrink_launch &s,
                                         const typename S::List &list, int items,
                                         ShrinkPipeline<S> &pipeline) {
  const uint64_t policy = evict_first_policy();
  const int depth_steps = ceil_divide(s.tokens.k, kDepth);
  for (int number = 0; number < items; number++) {
    const SegmentItem item = list.items[number];
    const int columns = columns_in<S>(s, item),
              width = moelora_padded_rank(rank_of(s.adapters.lora, item.packed));
    const int first_slice = item.first / width, first_r = item.first - first_slice * width;
    const int adapter = item.packed / kRanks;
    if (is_elected()) {
      ShrinkPipeline<S> at = pipeline;
#pragma unroll 1
      for (int step = 0; step < depth_steps; step++, at.advance()) {
        at.wait_empty();
        if (step == 0)
          write_header(at, item);
        barrier_expect(at.full(), columns * kRowBytes);
        uint32_t to = at.sA();
#pragma unroll 1
        for (int left = columns, slice = first_slice, r = first_r; left > 0;) {
          const bool many = min(width - r, left) >= kManyRanks;
          const int ranks = many ? kManyRanks : kFewRanks;
          tma_load_4d(to, many ? &maps->many[slice] : &maps->few[slice], step * kDepth, r,
                      maps->dims.expert(slice, item.expert), maps->dims.adapter(slice, adapter),
                      at.full(), policy);
          to += ranks * kRowBytes, left -= ranks, r += ranks;
          if (r == width)
            r = 0, slice++;
        }
      }
    }
    __syncwarp();
    pipeline.advance(depth_steps);
  }
}

/* The gather warps: token rows of the listed items. The rows of the next item are found once the
 * first stages of this one are in flight. */
template <class S>
__device__ __forceinline__ void gather_x(const moelora_shrink_launch &s,
                                         const typename S::List &list, int items,
                                         ShrinkPipeline<S> &pipeline) {
  Gather<S::TOKENS> gather(threadIdx.x - 32);
  const auto find = [&](int number) {
    if (number == items)
      return;
    const SegmentItem item = list.items[number];
    gather.find(s.schedule.blocks, s.tokens, item.tokens, threadIdx.x - 32,
                [&](int t) { return item.position_of(s, t); });
  };
  find(0);
  const int depth_steps = ceil_divide(s.tokens.k, kDepth);
  for (int number = 0; number < items; number++) {
    gather.begin(s.tokens, threadIdx.x - 32);
    for (int step = 0; step < depth_steps; step++, pipeline.advance()) {
      if (step == min((int)S::STAGES, depth_steps - 1))
        find(number + 1);
      pipeline.wait_empty();
      gather.copy(pipeline.sX());
      barrier_arrive_after_copies(pipeline.full());
    }
  }
}

template <class S>
__device__ __forceinline__ void produce(const ShrinkMaps *maps, const moelora_shrink_launch &s,
                                        typename S::List &list, void *stages,
                                        ShrinkPipeline<S> pipeline) {
  const auto sync = [] { fence_async_proxy(), warpgroup_sync(1); };
  const bool streams = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) == 0;
  // Where x lies by position the kernel before is the GEMM that makes it, and segments are older.
  if (s.tokens.divisor.value)
    wait_for_previous_kernel();
  take_part(s, list, (int2 *)stages, sync);
  for (int listed = 0, all = 1; listed < all; listed += kListedItems) {
    list_items(s, list, listed);
    sync();
    if (listed == 0)
      wait_for_previous_kernel();
    all = list.all;
    const int items = min(all - listed, kListedItems);
    if (streams)
      stream_a<S>(maps, s, list, items, pipeline);
    else
      gather_x<S>(s, list, items, pipeline);
    sync(); // all have read the list
  }
  pipeline.wait_empty();
  if (threadIdx.x == 0) {
    write_header(pipeline, {-1, 0, 0, 0, 1, 0, 0, 0});
    barrier_arrive(pipeline.full());
  }
  if (!streams)
    barrier_arrive_after_copies(pipeline.full());
}

/* Rows of a tile of 64 tokens, which begins at token `first` of an item. */
template <class T, int N>
__device__ __forceinline__ void store_tile(const moelora_shrink_launch &s, const SegmentItem &item,
                                           int first, int columns, const float (&d)[N / 2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int rank = rank_of(s.adapters.lora, item.packed), width = moelora_padded_rank(rank);
  const float scaling = scaling_of(s, item.packed);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = first + 16 * warp + 8 * half + lane / 4;
    if (token >= item.tokens)
      continue;
    T *to = row_of_xa<T>(s, item, token);
    int slice = item.first / width, r = item.first - slice * width + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float *v = d + 4 * j + 2 * half;
      if (8 * j < columns)
        *(uint32_t *)(to + slice * s.adapters.xa_slice + r) = round_two<T>(v, scaling, r, rank);
      r += 8;
      if (r >= width)
        r -= width, slice++;
    }
  }
}

/* TILES tiles of 64 tokens of an item; the pipeline is at its first stage. */
template <class S, class T, int N, int TILES>
__device__ __forceinline__ void consume_tiles(const moelora_shrink_launch &s,
                                              const SegmentItem &item, int columns,
                                              ShrinkPipeline<S> &pipeline, int consumer) {
  float d[TILES][N / 2];
#pragma unroll
  for (int i = 0; i < TILES * N / 2; i++)
    d[i / (N / 2)][i % (N / 2)] = 0.f;
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < s.tokens.k; k += kDepth) {
    pipeline.wait_full();
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    wgmma_fence();
    const uint64_t a = wgmma_descriptor(pipeline.sX() + consumer * kM64Bytes);
    const uint64_t b = wgmma_descriptor(pipeline.sA());
#pragma unroll
    for (int k16 = 0; k16 < 4; k16++)
#pragma unroll
      for (int i = 0; i < TILES; i++)
        Wgmma<N>::template mma<Element<T>::is_bf16>(d[i], a + i * (2 * kM64Bytes / 16) + 2 * k16,
                                                    b + 2 * k16);
    wgmma_commit();
    wgmma_wait<1>();
    if (k > 0)
      pipeline.release(previous);
    previous = pipeline.stage;
    pipeline.advance();
  }
  wgmma_wait<0>();
  pipeline.release(previous);
#pragma unroll
  for (int i = 0; i < TILES; i++)
    store_tile<T, N>(s, item, 64 * (consumer + 2 * i), columns, d[i]);
}

/* The narrowest wgmma that holds the item's columns, from width N on. */
template <class S, class T, int N>
__device__ __forceinline__ void consume_item(const moelora_shrink_launch &s,
                                             const SegmentItem &item, int columns,
                                             ShrinkPipeline<S> &pipeline, int consumer) {
  if constexpr (N < S::RANKS) {
    if (columns > N)
      return consume_item<S, T, 2 * N>(s, item, columns, pipeline, consumer);
  }
  const int tiles = (item.tokens - 64 * consumer + 127) / 128;
  if (tiles == 2)
    return consume_tiles<S, T, N, 2>(s, item, columns, pipeline, consumer);
  if (tiles == 1)
    return consume_tiles<S, T, N, 1>(s, item, columns, pipeline, consumer);
  for (int k = 0; k < s.tokens.k; k += kDepth) { // all tokens are the other consumer's
    pipeline.wait_full();
    pipeline.release(pipeline.stage);
    pipeline.advance();
  }
}

template <class S, class T>
__device__ __forceinline__ void consume(const moelora_shrink_launch &s, ShrinkPipeline<S> pipeline,
                                        int consumer) {
  for (;;) {
    pipeline.wait_full();
    const SegmentItem item = read_header(pipeline);
    if (item.expert < 0)
      break;
    consume_item<S, T, 16>(s, item, columns_in<S>(s, item), pipeline, consumer);
  }
}

template <class S, class T>
__global__ void __launch_bounds__(S::THREADS, 1)
    shrink_sm90(const __grid_constant__ ShrinkMaps maps,
                const __grid_constant__ moelora_shrink_launch s) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  __shared__ typename S::List list;
  ShrinkPipeline<S> pipeline(shared);
  if (threadIdx.x == 0)
    pipeline.init(kGatherers + 1, 4 * S::CONSUMERS);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    give_registers<120>();
    produce<S>(&maps, s, list, shared, pipeline);
  } else {
    take_registers<192>();
    wait_for_previous_kernel();
    start_next_kernel();
    consume<S, T>(s, pipeline, warpgroup - 1);
  }
#endif
}

/* ---- host ---- */

/* Boxes of 16 and, where a slice has as many, of 64 ranks by 64 of depth. */
moelora_status map_factors(const moelora_shrink_launch *s, bool is_bf16, ShrinkMaps *maps) {
  const moelora_factors *lora = &s->adapters.lora;
  const cuuint32_t few[4] = {kDepth, kFewRanks, 1, 1}, many[4] = {kDepth, kManyRanks, 1, 1};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    const moelora_factor *a = &lora->a[i];
    const cuuint64_t row = a->stride_i * 2;
    cuuint64_t sizes[4] = {(cuuint64_t)s->tokens.k, (cuuint64_t)lora->max_rank}, strides[3] = {row};
    maps->dims.describe(i, *a, s->schedule.num_experts, s->schedule.max_loras, row, sizes + 2,
                        strides + 1);
    MOELORA_TRY(moelora_encode_map(&maps->few[i], is_bf16, 4, a->data, sizes, strides, few));
    if (moelora_padded_rank(lora->max_rank) >= kManyRanks)
      MOELORA_TRY(moelora_encode_map(&maps->many[i], is_bf16, 4, a->data, sizes, strides, many));
  }
  return MOELORA_OK;
}

template <class T, int RANKS>
moelora_status launch(const moelora_shrink_launch &s, const moelora_shrink_plan &plan,
                      const moelora_exec *exec) {
  using S = ShrinkShape<RANKS>;
  static_assert(S::TOKENS + RANKS >= 192, "rows that the third tile reads");
  static_assert(S::SHARED + sizeof(typename S::List) <= 227 * 1024, "shared memory of a CTA");
  ShrinkMaps maps = {};
  MOELORA_TRY(map_factors(&s, Element<T>::is_bf16, &maps));
  return launch_kernel<shrink_sm90<S, T>>("shrink_sm90", plan.work, S::THREADS, S::SHARED, exec,
                                          maps, s);
}

} // namespace

moelora_status moelora_cuda_shrink_sm90(const moelora_shrink_launch *s,
                                        const moelora_shrink_plan *plan, const moelora_exec *exec) {
  switch (plan->variant->id) {
#define LAUNCH_SM80(...)
#define LAUNCH_SM90(NAME, T, ROWS, RANKS, RESIDENT)                                                \
  case CUDA_##NAME:                                                                                \
    static_assert(ROWS == ShrinkShape<RANKS>::TOKENS && RESIDENT == 1, #NAME);                     \
    return launch<T, RANKS>(*s, *plan, exec);
#define MOELORA_CUDA_SHRINK_SEGMENTS(STEM, FAMILY, ...)                                            \
  LAUNCH_##FAMILY(shrink_bf16_##STEM, __nv_bfloat16, __VA_ARGS__)                                  \
      LAUNCH_##FAMILY(shrink_f16_##STEM, __half, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_SM90
#undef LAUNCH_SM80
  }
  return moelora_no_kernel(plan->variant->name, "shrinks no segments");
}
