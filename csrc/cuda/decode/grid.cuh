/* Grid-wide coordination of the decode kernel: number of CTAs, grid syncs, and the start of the
 * layer. */
#ifndef MOELORA_CUDA_DECODE_GRID_CUH
#define MOELORA_CUDA_DECODE_GRID_CUH

#include <cooperative_groups.h>

#include "cuda/decode/product.cuh"

namespace decode {

/* CTAs per SM. GPUs of compute capability 8.x and 12.x have less bandwidth and need fewer loads in
 * flight than the others; one CTA per SM may use more registers. */
constexpr int kMaxResident = 2;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int kResident = 1;
#else
constexpr int kResident = kMaxResident;
#endif

/* State of a grid sync, which is split into arrive and wait. */
struct GridSync {
  unsigned arrival;
  bool waits;   // the CTA has arrived, but has not waited yet
  bool shrinks; // the CTA may have shrink items, and has not arrived after them yet
};

__device__ __forceinline__ void arrive(GridSync &sync) {
  sync.arrival = cooperative_groups::this_grid().barrier_arrive();
  sync.waits = true;
}

__device__ __forceinline__ void wait(GridSync &sync) {
  if (sync.waits)
    cooperative_groups::this_grid().barrier_wait(static_cast<unsigned &&>(sync.arrival));
  sync.waits = false;
}

/* Builds the tables and loads x. If w13 has adapters, a CTA that can have no SHRINK13 item already
 * arrives at the sync after these items. */
__device__ __forceinline__ void begin_layer(const DecodeParams &p, Tables &t, TokenRows &tokens,
                                            uint16_t *staged, GridSync &sync,
                                            const RoutingSnapshot *snapshot) {
  const TokenRows x = stage_tokens((const uint16_t *)p.p.x, p.p.x_stride, p.p.routes.num_tokens,
                                   (int)p.p.hidden, nullptr, staged, p.staged_bytes);
  if (threadIdx.x == 0)
    tokens = x;
  sync.shrinks = p.p.w13_lora.num_slices > 0;
  if (sync.shrinks && (int)blockIdx.x < free_ctas(p)) {
    sync.shrinks = false;
    arrive(sync);
  }
  build_tables(t, p.p, p.tiles13, (int)((p.p.hidden + 15) / 16), snapshot);
  if (!snapshot && threadIdx.x / 32 == kWarps - 1)
    publish_snapshot(t, p.digests, p.snapshot);
  copy_async_wait<0>();
  __syncthreads();
}

/* Restarts from the first CTA's snapshot. Not inlined, to save registers in the main loop. */
inline __device__ __noinline__ void begin_again(const DecodeParams &p, Tables &t, TokenRows &tokens,
                                                uint16_t *staged, GridSync &sync) {
  __syncthreads(); // all threads have read t.mismatch
  if (threadIdx.x == 0)
    t.uses_first = true;
  begin_layer(p, t, tokens, staged, sync, p.snapshot);
}

} // namespace decode

#endif
