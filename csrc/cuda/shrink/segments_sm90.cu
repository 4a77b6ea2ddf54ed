/* Shrink of long segments on Hopper: xa[position, slice * xa_slice + r] as in blocks.cu.
 *
 *   TMA warp        A(0) A(1) A(2)  ...   rows of A of k step i
 *   gather warps    X(0) X(1) X(2)  ...   rows of x of k step i, gathered by cp.async
 *   consumers            0    1     ...   wgmma of step i, in flight with that of step i - 1
 *
 * An SM runs one CTA. The producer warpgroup lists the CTA's items and fills a pipeline. A stage
 * holds 64 elements of K or, for an item with few tokens, two k steps of 64: otherwise, the fixed
 * cost of a stage would dominate. Two consumer warpgroups run wgmma with tokens as operand A and
 * ranks as operand B: one has the first 64 tokens and those from 128 on, the other the second 64.
 * They swap roles after each item, so that with at most 64 tokens one stores the results of an item
 * while the other multiplies the next. Rows that an item lacks are undefined: their accumulators
 * are not stored and affect no other row. Therefore, a tile of 64 tokens may extend into the rows
 * of A.
 *
 * Accumulation restarts after every `span` of K, and the sums of spans are added in order, as in
 * shrink/product.cuh. With 128 ranks, TOKENS is 128 to leave registers for these sums. */
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/shrink/segments.cuh"
#include "cuda/gemm/sm90/producer.cuh"
#include "cuda/gemm/sm90/pipeline.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/variant_ids.h"

template <int RANKS_> struct ShrinkShape {
  static constexpr int TOKENS = RANKS_ == 128 ? 128 : 160, RANKS = RANKS_;
  static constexpr int CONSUMERS = 2, THREADS = kProducers + 128 * CONSUMERS;
  static constexpr int STAGES = RANKS == 128 ? 6 : RANKS == 64 ? 7 : 9;
  static constexpr int FEW = (TOKENS - RANKS) / 2; // maximum tokens for two k steps per stage
  using List = ItemList<TOKENS, RANKS, kProducers / 32>;

  struct Stage {
    SwizzledRow sX[TOKENS]; // rows of x
    SwizzledRow sA[RANKS];  // rows of A
  };
  struct SharedStorage {
    Stage stages[STAGES];
    uint4 headers[STAGES][2]; // the item, in its first stage; expert -1 after the last item
    PipelineBarriers<STAGES> barriers;
  };
  static constexpr int SHARED_BYTES = 1024 + sizeof(SharedStorage); // alignment of the swizzle
  static_assert(sizeof(Stage) % 2048 == 0 && FEW % 8 == 0 && FEW <= 64,
                "alignment of the 128-byte swizzle in both steps of a stage");
  using Ring = Pipeline<SharedStorage>;
};

namespace {

constexpr int kSmallBox = 16, kLargeBox = 64; // rows of A per TMA box

/* Tensor maps of the slices of A: [max_loras, E, ranks, K]. */
struct ShrinkMaps {
  CUtensorMap small_box[MOELORA_MAX_SLICES], large_box[MOELORA_MAX_SLICES];
  StackDims dims;
};

/* A warp's shared memory and its state in the pipeline. */
template <class S> struct ShrinkContext : S::Ring {
  using Storage = typename S::SharedStorage;
  using S::Ring::base;
  using S::Ring::stage;

  __device__ __forceinline__ explicit ShrinkContext(const void *dynamic)
      : S::Ring((shared_address(dynamic) + 1023) & ~1023u) {}

  __device__ __forceinline__ uint32_t sX() const {
    return base + stage * (int)sizeof(typename S::Stage);
  }
  __device__ __forceinline__ uint32_t header() const {
    return base + (uint32_t)offsetof(Storage, headers) + stage * 32;
  }

  __device__ __forceinline__ void write_header(const SegmentItem &item) const {
    const uint32_t at = header();
    store_shared_16(at, make_uint4(item.expert, item.packed, item.block, item.row));
    store_shared_16(
        at + 16, make_uint4(item.share, item.magic, item.tokens, item.first | item.columns << 16));
  }
  __device__ __forceinline__ SegmentItem read_header() const {
    const uint32_t at = header();
    const uint4 a = load_shared_16(at), b = load_shared_16(at + 16);
    return {(int)uniform(a.x), (int)uniform(a.y),      (int)uniform(a.z),
            (int)uniform(a.w), (int)uniform(b.x),      uniform(b.y),
            (int)uniform(b.z), (uint16_t)uniform(b.w), (uint16_t)(uniform(b.w) >> 16)};
  }
};

/* Placement of an item's k steps in stages. */
template <class S> struct StageLayout {
  int steps, sA; // k steps per stage; offset of the rows of A of a step

  __device__ __forceinline__ explicit StageLayout(const SegmentItem &item)
      : steps(item.tokens <= S::FEW ? 2 : 1), sA((steps == 2 ? S::FEW : S::TOKENS) * kRowBytes) {}
  static constexpr int STEP = sizeof(typename S::Stage) / 2; // offset of the second step

  __device__ __forceinline__ int stages(const moelora_shrink_launch &s) const {
    return ceil_divide(s.tokens.k, kDepth * steps);
  }
};

/* Returns the number of padded ranks of an item. */
template <class S>
__device__ __forceinline__ int columns_in(const moelora_shrink_launch &s, const SegmentItem &item) {
  return min(item.columns - item.first, S::RANKS);
}

/* A TMA box: rows of A of an item. */
struct BoxOfA {
  const CUtensorMap *map;
  int r, expert, adapter, ranks;
};

/* Iterates over an item's boxes: 64 or 16 rows of A, slice after slice. */
template <class S> struct BoxesOfA {
  const ShrinkMaps *maps;
  SegmentItem item;
  int width, left, slice, r;

  __device__ __forceinline__ BoxesOfA(const ShrinkMaps *maps_, const moelora_shrink_launch &s,
                                      const SegmentItem &item_)
      : maps(maps_), item(item_),
        width(moelora_padded_rank(rank_of(s.adapters.lora, item_.packed))),
        left(columns_in<S>(s, item_)), slice(item_.first / width), r(item_.first - slice * width) {}

  __device__ __forceinline__ BoxOfA next() {
    const bool large = min(width - r, left) >= kLargeBox;
    const int ranks = large ? kLargeBox : kSmallBox;
    const BoxOfA box = {large ? &maps->large_box[slice] : &maps->small_box[slice], r,
                        maps->dims.expert(slice, item.expert),
                        maps->dims.adapter(slice, item.packed / kRanks), ranks};
    left -= ranks, r += ranks;
    if (r == width)
      r = 0, slice++;
    return box;
  }
};

/* Issues the loads of an item's rows of A. `first` and `second` are its first boxes, which stay in
 * registers; each step finds the `others` again. */
template <class S, int BOXES>
__device__ __forceinline__ void load_steps(const moelora_shrink_launch &s, const SegmentItem &item,
                                           const BoxOfA &first, const BoxOfA &second,
                                           const BoxesOfA<S> &others, ShrinkContext<S> at) {
  const uint64_t policy = evict_first_policy();
  const StageLayout<S> layout(item);
  const int bytes = columns_in<S>(s, item) * kRowBytes;
  const auto load = [&](int k, const BoxOfA &box, uint32_t sA) {
    tma_load_4d(sA, box.map, k, box.r, box.expert, box.adapter, at.full(), policy);
  };
  const auto load_step = [&](int k, uint32_t sA) {
    load(k, first, sA);
    if constexpr (BOXES > 1)
      load(k, second, sA += first.ranks * kRowBytes);
    if constexpr (BOXES > 2) {
      sA += second.ranks * kRowBytes;
#pragma unroll 1
      for (BoxesOfA<S> boxes = others; boxes.left > 0;) {
        const BoxOfA box = boxes.next();
        load(k, box, sA);
        sA += box.ranks * kRowBytes;
      }
    }
  };
#pragma unroll 1
  for (int k = 0; k < s.tokens.k; at.advance()) {
    // Wait until consumers have released the stage.
    at.wait_empty();
    if (k == 0)
      at.write_header(item);

    const bool two = layout.steps == 2 && k + kDepth < s.tokens.k;
    const uint32_t sA = at.sX() + layout.sA;
    barrier_arrive_expect_tx(at.full(), two ? 2 * bytes : bytes);
    load_step(k, sA);
    k += kDepth;
    if (two) {
      load_step(k, sA + StageLayout<S>::STEP);
      k += kDepth;
    }
  }
}

/* Loads rows of A of the listed items, in the TMA warp. The elected lane issues all loads of an
 * item: with few tokens there is little time for each. */
template <class S>
__device__ __forceinline__ void load_a(const ShrinkMaps *maps, const moelora_shrink_launch &s,
                                       const typename S::List &list, int items,
                                       ShrinkContext<S> &warp) {
  for (int number = 0; number < items; number++) {
    if (elect_one()) {
      const SegmentItem item = list.items[number];
      BoxesOfA<S> boxes(maps, s, item);
      const BoxOfA first = boxes.next(), second = boxes.left > 0 ? boxes.next() : first;
      if (boxes.left > 0)
        load_steps<S, 3>(s, item, first, second, boxes, warp);
      else if (columns_in<S>(s, item) > first.ranks)
        load_steps<S, 2>(s, item, first, second, boxes, warp);
      else
        load_steps<S, 1>(s, item, first, second, boxes, warp);
    }
    __syncwarp();
    warp.advance(StageLayout<S>(list.items[number]).stages(s));
  }
}

/* Copies rows of x of the listed items, in the gather warps. The addresses of the next item are
 * computed once the first stages of this one are in flight. */
template <class S>
__device__ __forceinline__ void gather_x(const moelora_shrink_launch &s,
                                         const typename S::List &list, int items,
                                         ShrinkContext<S> &warp) {
  Gather<S::TOKENS> gather(threadIdx.x - 32);
  const auto find = [&](int number) {
    if (number == items)
      return;
    const SegmentItem item = list.items[number];
    gather.find(s.schedule.blocks, s.tokens, item.tokens, threadIdx.x - 32,
                [&](int t) { return item.position_of(s, t); });
  };
  find(0);
  for (int number = 0; number < items; number++) {
    const StageLayout<S> layout(list.items[number]);
    const int stages = layout.stages(s);
    gather.begin(s.tokens, threadIdx.x - 32);
    for (int i = 0; i < stages; i++, warp.advance()) {
      if (i == min((int)S::STAGES, stages - 1))
        find(number + 1);
      // Wait until consumers have released the stage, then issue the copies, which arrive on its
      // barrier.
      warp.wait_empty();
#pragma unroll 1
      for (int step = 0; step < layout.steps; step++)
        gather.template copy<true>(warp.sX() + step * StageLayout<S>::STEP);
      barrier_arrive_cp_async(warp.full());
    }
  }
}

template <class S>
__device__ __forceinline__ void produce(const ShrinkMaps *maps, const moelora_shrink_launch &s,
                                        typename S::List &list, void *scratch,
                                        ShrinkContext<S> warp) {
  const auto sync = [] { fence_async_proxy(), warpgroup_sync(1); };
  const bool issues_tma = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0) == 0;
  // If x is ordered by position (divisor 0), the previous kernel may still be writing x, but the
  // segments are complete: wait only before the loads.
  if (s.tokens.divisor.value)
    wait_for_previous_kernel();

  // Process the CTA's part of all segments, as many items at a time as fit the list.
  take_part(s, list, (int2 *)scratch, sync);
  for (int listed = 0, all = 1; listed < all; listed += kListedItems) {
    list_items(s, list, listed);
    sync();
    if (listed == 0)
      wait_for_previous_kernel();
    all = list.all;
    const int items = min(all - listed, kListedItems);
    if (issues_tma)
      load_a<S>(maps, s, list, items, warp);
    else
      gather_x<S>(s, list, items, warp);
    sync(); // all threads have read the list
  }

  // A stage marks the end of the items.
  warp.wait_empty();
  if (threadIdx.x == 0) {
    warp.write_header({-1, 0, 0, 0, 1, 0, 0, 0, 0});
    barrier_arrive(warp.full());
  }
  if (!issues_tma)
    barrier_arrive_cp_async(warp.full());
}

/* Stores a tile of 64 tokens, which starts at token `first` of an item. */
template <class T, int N>
__device__ __forceinline__ void store_tile(const moelora_shrink_launch &s, const SegmentItem &item,
                                           int first, int columns, const float (&rAcc)[N / 2]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int rank = rank_of(s.adapters.lora, item.packed), width = moelora_padded_rank(rank);
  const float scaling = scaling_of(s, item.packed);
  const bool one_a = item.has_one_a(s, width);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int token = first + 16 * warp + 8 * half + lane / 4;
    if (token >= item.tokens)
      continue;
    T *gXa = row_of_xa<T>(s, item, token);
    int slice = item.first / width, r = item.first - slice * width + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const float *v = rAcc + 4 * j + 2 * half;
      if (8 * j < columns)
        store_slice(s.adapters, gXa + r, slice, one_a, round_two<T>(v, scaling, r, rank));
      r += 8;
      if (r >= width)
        r -= width, slice++;
    }
  }
}

/* Multiplies TILES tiles of 64 tokens of an item by N ranks. The item's first stage must be full. A
 * stage has STEPS k steps; the last one of an item may have fewer. */
template <class S, class T, int N, int TILES, int STEPS>
__device__ __forceinline__ void consume_tiles(const moelora_shrink_launch &s,
                                              const SegmentItem &item, int columns, int span,
                                              ShrinkContext<S> &warp, int half) {
  const int sA = StageLayout<S>(item).sA;
  float rAcc[TILES][N / 2], rSum[TILES][N / 2]; // of this span, of the previous spans
#pragma unroll
  for (int i = 0; i < TILES * N / 2; i++)
    rSum[i / (N / 2)][i % (N / 2)] = 0.f;

  int step = 0, previous = -1; // k step in the stage; the previous stage, not yet released
#pragma unroll 1
  for (int begin = 0; begin < s.tokens.k; begin += span) {
#pragma unroll
    for (int i = 0; i < TILES * N / 2; i++)
      rAcc[i / (N / 2)][i % (N / 2)] = 0.f;

    // K loop.
    const int end = min(begin + span, s.tokens.k);
#pragma unroll 1
    for (int k = begin; k < end; k += kDepth) {
      if (step == 0) {
        warp.wait_full();
        fence_async_proxy(); // cp.async wrote sX through the generic proxy
      }

      // Issue the wgmmas.
      wgmma_fence();
      const uint32_t sX = warp.sX() + (STEPS > 1 ? step * StageLayout<S>::STEP : 0);
      const uint64_t a = wgmma_descriptor(sX + half * kM64Bytes);
      const uint64_t b = wgmma_descriptor(sX + sA);
#pragma unroll
      for (int k16 = 0; k16 < 4; k16++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
          Wgmma<N>::template mma<Element<T>::is_bf16>(
              rAcc[i], a + i * (2 * kM64Bytes / 16) + 2 * k16, b + 2 * k16);
      wgmma_commit();

      // Wait for the previous wgmmas and release their stage.
      if (step == 0) {
        wgmma_wait<1>();
        if (previous >= 0)
          warp.release(previous);
      }
      if (STEPS > 1 && ++step < STEPS && k + kDepth < s.tokens.k)
        continue;
      step = 0;
      previous = warp.stage;
      warp.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < TILES * N / 2; i++)
      rSum[i / (N / 2)][i % (N / 2)] += rAcc[i / (N / 2)][i % (N / 2)];
  }
  warp.release(previous);

  // Scale, round and store.
#pragma unroll
  for (int i = 0; i < TILES; i++)
    store_tile<T, N>(s, item, 64 * (half + 2 * i), columns, rSum[i]);
}

/* Consumes an item with the narrowest wgmma (N, 2N, 4N, ... columns) that covers it. half: 0 for
 * the first 64 of every 128 tokens, 1 for the second. */
template <class S, class T, int N>
__device__ __forceinline__ void consume_item(const moelora_shrink_launch &s,
                                             const SegmentItem &item, int columns, int span,
                                             ShrinkContext<S> &warp, int half) {
  if constexpr (N < S::RANKS) {
    if (columns > N)
      return consume_item<S, T, 2 * N>(s, item, columns, span, warp, half);
  }
  const int tiles = (item.tokens - 64 * half + 127) / 128, stages = StageLayout<S>(item).stages(s);
  if constexpr (S::FEW > 0) {
    if (tiles == 1 && StageLayout<S>(item).steps == 2)
      return consume_tiles<S, T, N, 1, 2>(s, item, columns, span, warp, half);
  }
  if constexpr (S::TOKENS > 128) {
    if (tiles == 2)
      return consume_tiles<S, T, N, 2, 1>(s, item, columns, span, warp, half);
  }
  if (tiles == 1)
    return consume_tiles<S, T, N, 1, 1>(s, item, columns, span, warp, half);
  for (int i = 0; i < stages; i++) { // all tokens belong to the other consumer
    warp.wait_full();
    warp.release(warp.stage);
    warp.advance();
  }
}

template <class S, class T>
__device__ __forceinline__ void consume(const moelora_shrink_launch &s, int span,
                                        ShrinkContext<S> warp, int consumer) {
  for (int half = consumer;; half ^= 1) {
    warp.wait_full();
    const SegmentItem item = warp.read_header();
    if (item.expert < 0)
      break;
    consume_item<S, T, 16>(s, item, columns_in<S>(s, item), span, warp, half);
  }
}

template <class S, class T>
__global__ void __launch_bounds__(S::THREADS, 1)
    shrink_sm90(const __grid_constant__ ShrinkMaps maps,
                const __grid_constant__ moelora_shrink_launch s, int span) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  __shared__ typename S::List list;
  ShrinkContext<S> warp(shared);
  if (threadIdx.x == 0)
    warp.init(kGatherers + 1, 4 * S::CONSUMERS);
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<120>();
    produce<S>(&maps, s, list, shared,
               warp); // stages serve as scratch memory until they are filled
  } else {
    warpgroup_reg_alloc<192>();
    follow_previous_kernel();
    consume<S, T>(s, span, warp, warpgroup - 1);
  }
#endif
}

/* ---- host ---- */

/* Encodes maps with boxes of 16 ranks, and of 64 if a slice has as many, by 64 elements of K. */
moelora_status map_factors(const moelora_shrink_launch *s, bool is_bf16, ShrinkMaps *maps) {
  const moelora_factors *lora = &s->adapters.lora;
  const cuuint32_t small[4] = {kDepth, kSmallBox, 1, 1}, large[4] = {kDepth, kLargeBox, 1, 1};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    const moelora_factor *a = &lora->a[i];
    const cuuint64_t row = a->stride_i * 2;
    cuuint64_t sizes[4] = {(cuuint64_t)s->tokens.k, (cuuint64_t)lora->max_rank}, strides[3] = {row};
    maps->dims.describe(i, *a, s->schedule.num_experts, s->schedule.max_loras, row, sizes + 2,
                        strides + 1);
    MOELORA_TRY(
        moelora_encode_map(&maps->small_box[i], is_bf16, 4, a->data, sizes, strides, small));
    if (moelora_padded_rank(lora->max_rank) >= kLargeBox)
      MOELORA_TRY(
          moelora_encode_map(&maps->large_box[i], is_bf16, 4, a->data, sizes, strides, large));
  }
  return MOELORA_OK;
}

template <class T, int RANKS>
moelora_status launch(const moelora_shrink_launch &s, const moelora_shrink_plan &plan,
                      const moelora_exec *exec) {
  using S = ShrinkShape<RANKS>;
  static_assert(S::TOKENS <= 128 || S::TOKENS + RANKS >= 192, "rows that the third tile reads");
  static_assert(S::SHARED_BYTES + sizeof(typename S::List) <= 227 * 1024, "shared memory of a CTA");
  ShrinkMaps maps = {};
  MOELORA_TRY(map_factors(&s, Element<T>::is_bf16, &maps));
  return launch_kernel<shrink_sm90<S, T>>("shrink_sm90", plan.work, S::THREADS, S::SHARED_BYTES,
                                          exec, maps, s, plan.span);
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
  MOELORA_BOTH_DTYPES(LAUNCH_##FAMILY, shrink, STEM, __VA_ARGS__)
#include "cuda/variants.inc"
#undef LAUNCH_SM90
#undef LAUNCH_SM80
  }
  return moelora_no_kernel(plan->variant->name, "shrinks no segments");
}
