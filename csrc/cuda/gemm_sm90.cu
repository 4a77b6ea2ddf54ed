/* Grouped GEMM with LoRA inside, for Hopper: TMA, wgmma, warp specialisation.
 *
 *   out[p] = act( w[e] x[p] + B[l, e] hl[p] + bias[e] ) * weight
 *
 * One CTA per SM walks over tiles (tile.cuh). Its producer warpgroup fills a ring of stages: weight
 * rows by TMA, token rows gathered by cp.async; behind the depth of the base product come the
 * adapter stages. Its one or two consumer warpgroups own a pair of 64-row groups each and multiply
 * with wgmma, whose accumulators lie in registers as mma.sync's do. The token side of wgmma is
 * sized per tile in quarters, so that an expert with few tokens wastes few columns. */
#include <cuda.h>

#include "kernel_launch.cuh"
#include "ptx/hopper.cuh"
#include "ptx/wgmma.cuh"
#include "tile.cuh"
#include "variants.cuh"

namespace {

constexpr int kProducers = 128; // threads
constexpr int kStagingTokens = 32;
constexpr int kStagingBytes = 2 * kStagingTokens * kRowBytes; // two buffers per consumer

template <int TOKENS_, int CONSUMERS_, int STAGES_> struct Shape : Extent<TOKENS_, 2 * CONSUMERS_> {
  using E = Extent<TOKENS_, 2 * CONSUMERS_>;
  static constexpr int CONSUMERS = CONSUMERS_, STAGES = STAGES_;
  static constexpr int THREADS = kProducers + 128 * CONSUMERS;
  // Up to 1023 bytes go to the alignment that the swizzle needs.
  static constexpr int SHARED = 1024 + STAGES * (E::STAGE_BYTES + 16) + CONSUMERS * kStagingBytes;
  static_assert(TOKENS_ % 8 == 0 && SHARED <= 232448, "227 KB of shared memory per block");
};

template <class S> struct Ring {
  uint32_t base, full, empty;
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ uint32_t weights() const { return base + stage * S::STAGE_BYTES; }
  __device__ __forceinline__ uint32_t tokens() const { return weights() + S::W_BYTES; }
  __device__ __forceinline__ void advance() {
    if (++stage == S::STAGES)
      stage = 0, phase ^= 1;
  }
};

template <class S, class T>
__device__ void produce(const CUtensorMap *map, const moelora_gemm_launch &g, Ring<S> ring) {
  const int thread = threadIdx.x, chunk = thread & 7;
  constexpr int PER_THREAD = (S::TOKENS + 15) / 16;
  // This thread fills chunk `chunk` of token rows thread / 8 + 16 i.
  const uint32_t mine = thread / 8 * kRowBytes + ((chunk ^ (thread / 8 & 7)) << 4);
  const int depth_steps = (g.k + kDepth - 1) / kDepth;
  const int columns = tile_columns<S>(g), blocks = *g.num_post / S::TOKENS;
  // Few tokens read each weight once; the blocks of a busy expert read it one after the other.
  const uint64_t policy = S::TOKENS <= 32 ? evict_first_policy() : evict_normal_policy();
  const T *x = (const T *)g.x;

  for (int index = blockIdx.x; index < blocks * columns; index += gridDim.x) {
    const Tile tile = tile_at<S>(g, index, columns, blocks);
    int32_t token[PER_THREAD]; // rows of x, -1 in padding
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
      const int row = block_row<S>(g, tile.block, thread / 8 + 16 * i);
      token[i] = row < g.num_rows ? row / g.x_divisor : -1;
    }
    Segments<S::LANES> segments;
    if (g.lora_ids)
      segments.load(g.lora_ids + (int64_t)tile.block * S::TOKENS, S::TOKENS, g.lora_ranks,
                    g.lora.max_rank);
    for (int step = 0; step < depth_steps; step++) {
      barrier_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
      const uint32_t full = ring.full + 8 * ring.stage;
      if (thread == 0) {
        barrier_expect(full, S::W_BYTES);
        for (int group = 0; group < S::TILES; group++) {
          const int output = first_output<S>(g, tile.column, group);
          const uint32_t to = ring.weights() + group * kGroupBytes;
          if (g.w.packed)
            tma_load_4d(to, map, 0, 0, step,
                        (int)((tile.expert * g.w.n + weight_row(g, group, output)) / 64), full,
                        policy);
          else
            tma_load_4d(to, map, step * kDepth, output, g.gated ? group & 1 : 0, tile.expert, full,
                        policy);
        }
      }
      const int column = step * kDepth + chunk * 8;
#pragma unroll
      for (int i = 0; i < PER_THREAD; i++)
        if (S::TOKENS % 16 == 0 || thread / 8 + 16 * i < S::TOKENS) {
          const bool copy = column < g.k && token[i] >= 0;
          copy_async_16(ring.tokens() + mine + i * 16 * kRowBytes,
                        x + (copy ? token[i] * g.x_stride + column : 0), copy);
        }
      barrier_arrive_after_copies(full);
      ring.advance();
    }
    if (!g.lora_ids)
      continue;
    for (Piece cursor;; ring.advance()) {
      barrier_wait(ring.empty + 8 * ring.stage, ring.phase ^ 1);
      if (!load_pieces<S, T, kProducers>(g, tile, segments, cursor, ring.weights(), ring.tokens(),
                                         thread))
        break;
      const uint32_t full = ring.full + 8 * ring.stage;
      // The arrival below speaks for asynchronous copies, not for plain stores.
      if (!g.factors_vectors)
        __threadfence_block();
      if (thread == 0)
        barrier_arrive(full);
      barrier_arrive_after_copies(full);
    }
  }
}

/* One group's results, rounded, by token row: transposed through shared memory, so that a warp
 * writes whole 128-byte lines. */
template <class S, class T, int N>
__device__ __forceinline__ void store_rounded(const float (&d)[N / 2], const moelora_gemm_launch &g,
                                              int first, int consumer,
                                              const int32_t (&rows)[S::LANES], uint32_t staging) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int c = 0; c < N; c += kStagingTokens) {
    const uint32_t buffer = staging + (c / kStagingTokens & 1) * (kStagingBytes / 2);
#pragma unroll
    for (int j = c / 8; j < N / 8 && j < c / 8 + 4; j += 2) {
      const int token = 8 * (j - c / 8 + (lane >> 4)) + (lane & 7);
      const int chunk = warp * 2 + (lane >> 3 & 1);
      const uint32_t at = buffer + token * kRowBytes + ((chunk ^ (token & 7)) << 4);
      const float *v = &d[4 * j];
      if (j + 1 < N / 8)
        store_matrix_x4_trans(at, pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]),
                              pack2<T>(v[6], v[7]));
      else
        store_matrix_x2_trans(at, pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]));
    }
    warpgroup_sync(consumer + 1);
#pragma unroll
    for (int i = 0; i < kStagingTokens / 16; i++) {
      const int token = i * 16 + thread / 8, chunk = thread & 7;
      const int row = __shfl_sync(0xffffffffu, rows[c / 32], token);
      if (c + token < N && row < g.num_rows && first + chunk * 8 < g.n_out)
        *(uint4 *)((T *)g.out + output_offset(g, row) + first + chunk * 8) =
            load_shared_16(buffer + token * kRowBytes + ((chunk ^ (token & 7)) << 4));
    }
  }
  // An odd number of buffers' worth would let the next user of the first overtake its readers.
  warpgroup_sync(consumer + 1);
}

template <class S, class T, int N>
__device__ __forceinline__ void consume_tile(const moelora_gemm_launch &g, Ring<S> &ring,
                                             const Tile &tile, int consumer, uint32_t staging) {
  const int lane = threadIdx.x & 31;
  float d[2][N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++)
    d[0][i] = d[1][i] = 0.f;

  const int depth_steps = (g.k + kDepth - 1) / kDepth;
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < depth_steps; step++) {
    barrier_wait(ring.full + 8 * ring.stage, ring.phase);
    fence_async_proxy(); // cp.async wrote X through the ordinary proxy
    wgmma_fence();
    const uint64_t a = wgmma_descriptor(ring.weights() + consumer * 2 * kGroupBytes);
    const uint64_t b = wgmma_descriptor(ring.tokens());
#pragma unroll
    for (int k = 0; k < 4; k++) {
      Wgmma<N>::template mma<Element<T>::is_bf16>(d[0], a + 2 * k, b + 2 * k);
      Wgmma<N>::template mma<Element<T>::is_bf16>(d[1], a + kGroupBytes / 16 + 2 * k, b + 2 * k);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && lane == 0)
      barrier_arrive(ring.empty + 8 * previous);
    previous = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  if (lane == 0)
    barrier_arrive(ring.empty + 8 * previous);

  // Accumulators fill the registers: what the rest of the tile needs was only brought near.
  if (g.lora_ids) {
    Segments<S::LANES> segments;
    segments.load(g.lora_ids + (int64_t)tile.block * S::TOKENS, S::TOKENS, g.lora_ranks,
                  g.lora.max_rank);
    const int per_stage = pieces_per_stage(g);
    int slot = 0;
    auto release = [&] {
      __syncwarp();
      if (lane == 0)
        barrier_arrive(ring.empty + 8 * ring.stage);
      ring.advance();
      slot = 0;
    };
    for (Piece s; next_piece<S>(g, tile, segments, s);) {
      if (slot == 0)
        barrier_wait(ring.full + 8 * ring.stage, ring.phase);
      expand<S, T, N>(d, g, tile, s, slot, ring.weights(), ring.tokens(), consumer);
      if (++slot == per_stage)
        release();
    }
    if (slot > 0)
      release();
  }
  int32_t rows[S::LANES];
  float weights[S::LANES];
#pragma unroll
  for (int i = 0; i < S::LANES; i++) {
    rows[i] = block_row<S>(g, tile.block, i * 32 + lane);
    weights[i] = g.topk_weights && rows[i] < g.num_rows ? *routed_weight(g, rows[i]) : 0.f;
  }
  finish<S, T, N>(d, g, tile, consumer, weights);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (half == 1 && g.gated)
      break;
    const int first = first_output<S>(g, tile.column, 2 * consumer + half);
    if (g.out_f32)
      store_f32<S, N>(d[half], g, first, rows);
    else
      store_rounded<S, T, N>(d[half], g, first, consumer, rows, staging);
  }
}

template <class S, class T>
__device__ void consume(const moelora_gemm_launch &g, Ring<S> ring, int consumer,
                        uint32_t staging) {
  constexpr int WIDTH = S::TOKENS >= 32 ? S::TOKENS / 4 : 8;
  const int lane = threadIdx.x & 31;
  const int columns = tile_columns<S>(g), blocks = *g.num_post / S::TOKENS;
  for (int index = blockIdx.x; index < blocks * columns; index += gridDim.x) {
    const Tile tile = tile_at<S>(g, index, columns, blocks);
    int count = 0;
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const int t = i * 32 + lane;
      const int row = block_row<S>(g, tile.block, t);
      count += __popc(__ballot_sync(0xffffffffu, row < g.num_rows));
      if (g.topk_weights && row < g.num_rows)
        prefetch(routed_weight(g, row));
      if (g.lora_ids && t < S::TOKENS)
        prefetch(&g.lora_ids[(int64_t)tile.block * S::TOKENS + t]);
    }
    const int quarter = (count + WIDTH - 1) / WIDTH;
    if (quarter <= 1)
      consume_tile<S, T, WIDTH>(g, ring, tile, consumer, staging);
    else if constexpr (S::TOKENS < 32)
      consume_tile<S, T, S::TOKENS>(g, ring, tile, consumer, staging);
    else if (quarter == 2)
      consume_tile<S, T, 2 * WIDTH>(g, ring, tile, consumer, staging);
    else if (quarter == 3)
      consume_tile<S, T, 3 * WIDTH>(g, ring, tile, consumer, staging);
    else
      consume_tile<S, T, 4 * WIDTH>(g, ring, tile, consumer, staging);
  }
}

template <class S, class T>
__global__ void __launch_bounds__(S::THREADS, 1)
    gemm_sm90(const __grid_constant__ CUtensorMap map,
              const __grid_constant__ moelora_gemm_launch g) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[];
  Ring<S> ring;
  ring.base = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t staging = ring.base + S::STAGES * S::STAGE_BYTES;
  ring.full = staging + S::CONSUMERS * kStagingBytes;
  ring.empty = ring.full + 8 * S::STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; i++) {
      barrier_init(ring.full + 8 * i, kProducers + 1);
      barrier_init(ring.empty + 8 * i, 4 * S::CONSUMERS);
    }
    barrier_init_visible();
  }
  __syncthreads();
  wait_for_previous_kernel();
  start_next_kernel();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  if (warpgroup == 0) {
    // 384 threads start with 168 registers each; what the producers give is what consumers can
    // take.
    if constexpr (S::CONSUMERS == 2)
      give_registers<88>();
    produce<S, T>(&map, g, ring);
  } else {
    if constexpr (S::CONSUMERS == 2)
      take_registers<208>();
    consume<S, T>(g, ring, warpgroup - 1, staging + (warpgroup - 1) * kStagingBytes);
  }
#endif
}

/* ---- host ---- */

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's encoder, found at run time so that nothing links against libcuda. */
EncodeTiled find_encoder() {
  static EncodeTiled encode; // races write the same value
  if (!encode) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) == cudaSuccess &&
        result == cudaDriverEntryPointSuccess)
      encode = (EncodeTiled)found;
  }
  return encode;
}

/* Boxes of 64 rows by 64 of depth. Row-major weights are [E, half, n, K], where half tells gate
 * from up whether they follow or alternate; packed ones [E * N/64, K/64, 64, 64]. Rows and depth
 * past the end read as zeros. */
moelora_status map_weights(const moelora_gemm_launch *g, bool is_bf16, CUtensorMap *map) {
  const EncodeTiled encode = find_encoder();
  if (!encode)
    return moelora_fail(MOELORA_DEVICE_ERROR, "the driver has no cuTensorMapEncodeTiled");
  const moelora_weights *w = &g->w;
  const cuuint64_t experts = w->stride_e ? g->num_experts : 1, row = w->stride_n * 2;
  const cuuint64_t half = g->interleaved ? row : row * g->n_out;
  const cuuint64_t n = g->n_out, halves = g->gated ? 2 : 1;
  cuuint64_t sizes[4] = {(cuuint64_t)w->k, n, halves, experts};
  cuuint64_t strides[3] = {g->interleaved ? 2 * row : row, half,
                           w->stride_e ? (cuuint64_t)w->stride_e * 2 : half * halves};
  if (w->packed) {
    const cuuint64_t tile = 64 * 64 * 2, depth = w->k / 64;
    const cuuint64_t packed_sizes[4] = {64, 64, depth, experts * (w->n / 64)};
    const cuuint64_t packed_strides[3] = {64 * 2, tile, tile * depth};
    memcpy(sizes, packed_sizes, sizeof sizes);
    memcpy(strides, packed_strides, sizeof strides);
  }
  const cuuint32_t box[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
             (void *)w->data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return moelora_fail(MOELORA_DEVICE_ERROR, "cuTensorMapEncodeTiled failed with %d", (int)result);
  return MOELORA_OK;
}

template <int MIN_CC, class T, int BLOCK_M, int BLOCK_N, int STAGES> struct Launch {
  static moelora_status run(const moelora_gemm_launch *, const moelora_exec *) {
    return moelora_fail(MOELORA_UNSUPPORTED, "not an sm_90 kernel");
  }
};

template <class T, int BLOCK_M, int BLOCK_N, int STAGES>
struct Launch<90, T, BLOCK_M, BLOCK_N, STAGES> {
  using S = Shape<BLOCK_M, BLOCK_N / 128, STAGES>;
  static moelora_status run(const moelora_gemm_launch *g, const moelora_exec *exec) {
    CUtensorMap map;
    const moelora_status status = map_weights(g, Element<T>::is_bf16, &map);
    if (status != MOELORA_OK)
      return status;
    return launch_kernel<gemm_sm90<S, T>>("gemm_sm90", (int64_t)g->max_blocks * tile_columns<S>(*g),
                                          S::THREADS, S::SHARED, exec, map, *g);
  }
};

} // namespace

moelora_status moelora_cuda_gemm_sm90(const moelora_gemm_launch *g, const moelora_variant *variant,
                                      const moelora_exec *exec) {
  return launch_variant<Launch>(g, variant, exec);
}
