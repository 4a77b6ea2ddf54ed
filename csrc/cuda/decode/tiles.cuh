/* The kernel of the single-launch layer; decode.cu describes its work items and phases.
 *
 * A W13 item has 16 outputs per warp; if gated, per pair of warps: one multiplies gate rows, the
 * other up rows. Weights pass through the pipelines of slabs.cuh, which stay filled from the start
 * of the kernel to its last item; shrinks load A directly to registers. */
#ifndef MOELORA_CUDA_DECODE_TILES_CUH
#define MOELORA_CUDA_DECODE_TILES_CUH

#include "cuda/decode/epilogue.cuh"
#include "cuda/decode/expand.cuh"
#include "cuda/decode/grid.cuh"
#include "cuda/decode/slabs.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace decode {
namespace {

struct SharedStorage {
  Tables tables;
  Partials partials;
  TokenRows tokens;                // rows of x, then of h
  ProducerState producers[kWarps]; // saved during shrinks
};

/* Sets d to the product of the K span at `work`, and moves `work` to the CTA's next shrink item. */
template <class T>
__device__ __forceinline__ void multiply_shrink(const DecodeParams &p, const Tables &t,
                                                WorkIterator &work, const TokenRows &tokens,
                                                PrefetchBuffer &buffer, float (&d)[4]) {
  const bool vectors = has_vectors(p, work.kind);
  const KSpan span = span_of(p, t, work);
  const OperandRows<1> x = tokens_of(p, t, work.kind, tokens, span);
#pragma unroll
  for (int q = 0; q < 4; q++)
    d[q] = 0.f;
  if (!vectors)
    multiply_elements<T>(buffer.next, x, d);
  work.index += gridDim.x;
  multiply_span<T>(p, t, work, vectors ? span.blocks : 0, {{x.row[0]}, vectors ? x.blocks : 0},
                   buffer, d);
}

template <class T, moelora_kernel_format FORMAT>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_tiles(const __grid_constant__ DecodeParams p) {
  constexpr int DEFERRED = TileFragment<FORMAT, T>::DEFERRED;
  __shared__ SharedStorage shared;
  extern __shared__ __align__(16) uint16_t staged[]; // tokens, then the pipelines of the warps
  Tables &t = shared.tables;
  TokenRows &tokens = shared.tokens;
  GridSync sync;
  sync.waits = false;
  int partial_stage = 0;
  if (threadIdx.x == 0)
    t.uses_first = false;
  begin_layer(p, t, tokens, staged, sync, nullptr);

  SlabProducer weights;
  SlabPipeline<FORMAT> pipeline;
  pipeline.first =
      shared_address(staged) + p.staged_bytes + threadIdx.x / 32 * kPipelineBytes<FORMAT>;
#pragma unroll 1
  for (int projection = 0; projection < 2; projection++) {
    PrefetchBuffer buffer;
    const int kind = projection ? W2 : W13;
    WorkIterator work = {projection ? SHRINK2 : SHRINK13, 0, (int)threadIdx.x / 32};
    work.index = first_shrink();
    start(p, t, work, buffer);
    if (projection == 0) {
      fill(p, t, weights, pipeline);
    } else {
      sync.shrinks = p.p.w2_lora.num_slices > 0;
      prefetch_next(buffer);
      prefetch_next(weights);
      wait(sync);
      if ((int)blockIdx.x < t.items[W2] || has_item(t, work)) {
        const TokenRows h =
            stage_tokens(p.h, p.p.intermediate, p.p.routes.num_rows, (int)p.p.intermediate,
                         t.first_row, staged, p.staged_bytes);
        if (threadIdx.x == 0)
          tokens = h;
      }
      if (!t.uses_first)
        compare_snapshots(t, p.digests);
      copy_async_wait<0>();
      __syncthreads();
      if (t.mismatch) { /* all CTAs take this branch, before they write to `out` */
        begin_again(p, t, tokens, staged, sync);
        projection = -1;
        continue;
      }
    }
    if (has_item(t, work)) {
      save(weights, shared.producers[threadIdx.x / 32]);
#pragma unroll 1
      do {
        const WorkItem item = {work.kind, 0, work.index};
        float d[4];
        multiply_shrink<T>(p, t, work, tokens, buffer, d);
        float *partial = shared.partials.sums[partial_stage];
        partial_stage = !partial_stage;
        store_partial(partial, d);
        __syncthreads();
        epilogue_shrink<T, DEFERRED>(p, t, item, partial);
      } while (has_item(t, work));
      restore(p, weights, shared.producers[threadIdx.x / 32]);
    }
    if (sync.shrinks) {
      sync.shrinks = false;
      arrive(sync);
    }
#pragma unroll 1
    for (int index = blockIdx.x; index < t.items[kind]; index += gridDim.x) {
      float *partial = shared.partials.sums[partial_stage];
      partial_stage = !partial_stage;
      WorkIterator product = first_part(kind, index);
      WorkItem item = item_of(p, product);
      for (; has_product(p, t, product, item); product.part += kWarps) {
        item = item_of(p, product);
        float d[4];
        prefetch_slabs(p, t, item);
        multiply_tiles<T, FORMAT>(p, t, item, tokens, staged, weights, pipeline, d);
        wait(sync);
        expand<T>(p, t, item, d);
        if (projection)
          store_rows<T, DEFERRED>(p, t, item, d, partial);
        else
          store_partial(partial, d);
      }
      wait(sync);
      __syncthreads();
      if (projection)
        epilogue_sum<T>(p, t, item, partial);
      else
        epilogue_w13<T, DEFERRED>(p, t, item.active,
                                  (item.tile - (int)threadIdx.x / 32 % warps_of_half(p)) * 16,
                                  partial);
    }
    wait(sync);
    if (!projection)
      arrive(sync);
  }
}

} // namespace

/* Bytes of shared memory per CTA for tokens on GPUs with at least kLargeShared bytes. With more,
 * Hopper's two CTAs per SM would leave too little L1 for the loads of factors. */
constexpr int kMaxStagedBytes = 36 * 1024, kLargeShared = 160 * 1024;

template <moelora_kernel_format FORMAT>
moelora_status launch_tiles(DecodeParams params, int64_t work, const moelora_exec *exec,
                            bool *fits) {
  const bool large =
      moelora_known_device(MOELORA_CUDA, exec->device_index)->shared_bytes >= kLargeShared;
  params.staged_bytes = large ? kMaxStagedBytes : kStagedBytes;
  const size_t bytes = (size_t)params.staged_bytes + kWarps * kPipelineBytes<FORMAT>;
  return params.p.dtype == MOELORA_BF16
             ? launch_cooperative<decode_tiles<__nv_bfloat16, FORMAT>>(
                   "decode_tiles", work, kThreads, bytes, kMaxResident, exec, fits, params)
             : launch_cooperative<decode_tiles<__half, FORMAT>>(
                   "decode_tiles", work, kThreads, bytes, kMaxResident, exec, fits, params);
}

} // namespace decode

#endif
