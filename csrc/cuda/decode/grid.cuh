/* How the CTAs of a decode kernel work as one: how many there are, how they wait for each other,
 * how they begin. */
#ifndef MOELORA_CUDA_DECODE_GRID_CUH
#define MOELORA_CUDA_DECODE_GRID_CUH

#include <cooperative_groups.h>

#include "cuda/decode/product.cuh"

namespace decode {

/* CTAs per SM. Memory that is half as fast, that of 8.x and 12.x, needs half as much in flight, and
 * portable code a few registers more. */
constexpr int kMostResident = 2;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
constexpr int kResident = 1;
#else
constexpr int kResident = kMostResident;
#endif

/* A grid sync in two halves. */
struct GridSync {
  unsigned arrival;
  bool waits;   // for the grid sync of that arrival
  bool shrinks; // come or have come, and the CTA has not arrived behind them
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

/* Tables and x, ready for the first item of W13. */
template <bool TILES>
__device__ __forceinline__ void begin_layer(const DecodeParams &p, Tables &t, TokenRows &tokens,
                                            uint16_t *staged, GridSync &sync,
                                            const Reading *agreed) {
  const TokenRows x =
      stage_tokens<TILES>((const uint16_t *)p.p.x, p.p.x_stride, p.p.routes.num_tokens,
                          (int)p.p.hidden, nullptr, staged, TILES ? p.staged_bytes : kStagedBytes);
  if (threadIdx.x == 0) {
    tokens = x;
    if (!TILES)
      deal_w13(p, t);
  }
  sync.shrinks = p.p.w13_lora.num_slices > 0;
  if (sync.shrinks && (int)blockIdx.x < free_ctas(p)) {
    sync.shrinks = false;
    arrive(sync);
  }
  build_tables(t, p.p, p.tiles13, (int)((p.p.hidden + 15) / 16), agreed);
  if (!agreed && threadIdx.x / 32 == kWarps - 1)
    publish_reading(t, p.digests, p.reading);
  copy_async_wait<0>();
  __syncthreads();
}

/* From the reading that all agree on; rare enough not to take registers of the loop. */
template <bool TILES>
__device__ __noinline__ void begin_again(const DecodeParams &p, Tables &t, TokenRows &tokens,
                                         uint16_t *staged, GridSync &sync) {
  __syncthreads(); // all have seen that readings differ
  if (threadIdx.x == 0)
    t.agreed = true;
  begin_layer<TILES>(p, t, tokens, staged, sync, p.reading);
}

} // namespace decode

#endif
