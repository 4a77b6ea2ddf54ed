/* Portable grouped GEMM with fused LoRA, for sm_80 and up: cp.async, ldmatrix, mma.sync.
 *
 *   out[p] = act( w[e] x[p] + B[l, e] xa[p] + bias[e] ) * weight
 *
 *   cp.async | step 0 | step 1 | step 2 | ... | adapter stages | step 0 of the next tile | ...
 *   mma.sync          | step 0 | step 1 | ...          | B xa  | epilogue, overlaps the copies
 *
 * Persistent CTAs take tiles in the order of tile.cuh. All threads copy into a pipeline of
 * STAGES stages and multiply; first the K loop, then the adapter stages. The epilogue runs while
 * the first stages of the next tile are in flight. K is accumulated in k16 steps in order, for
 * every tile size, so that all variants of a format agree bit for bit. If rows are not aligned to
 * 16 bytes (VECTORS false), they are copied element by element. */
#pragma once

#include <stddef.h>

#include "cuda/gemm/sm80/adapters.cuh"
#include "cuda/gemm/sm80/operands.cuh"
#include "cuda/gemm/sm80/promotion.cuh"
#include "cuda/gemm/common/back_epilogue.cuh"
#include "cuda/gemm/common/tile.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

/* Shared memory of a CTA. */
template <class E, int STAGES> struct SharedStorage {
  struct Stage {
    uint8_t sW[E::W_BYTES];    // m64 tiles of weights, or rows of B
    SwizzledRow sX[E::TOKENS]; // token rows, or rows of xa
  };
  struct Scales { // of one step, W8A8 only
    uint8_t weights[E::ALL_SCALES];
    float tokens[E::TOKENS];
  };
  Stage stages[STAGES];
  Scales scales[E::SLOTS];
  AdapterStorage<E, STAGES> adapters;

  static_assert(sizeof(Stage) == E::STAGE_BYTES && sizeof(Scales) == E::SLOT_BYTES, "no padding");
};

/* Loads a tile's operands and multiplies them. The CTA keeps one MainLoop for all of its tiles. */
template <class E, class T, int STAGES, bool VECTORS> struct MainLoop {
  using L = OperandLoader<E, T, VECTORS>;
  using F = Fragments<E, T>;
  using Storage = SharedStorage<E, STAGES>;
  const moelora_gemm_launch &g;
  const uint32_t base;
  L loader;

  __device__ __forceinline__ uint32_t stage(int step) const {
    return base + step % STAGES * E::STAGE_BYTES;
  }

  /* Return the addresses of members of SharedStorage. */
  __device__ __forceinline__ uint32_t slots() const {
    return base + (uint32_t)offsetof(Storage, scales);
  }
  __device__ __forceinline__ uint32_t adapters() const {
    return base + (uint32_t)offsetof(Storage, adapters);
  }

  __device__ __forceinline__ void wait() {
    copy_async_wait<STAGES - 2>();
    __syncthreads();
  }

  /* Multiplies the stages of steps [step, end) with the first WIDTH n8 tiles of each warp, and
   * prefetches STAGES - 1 steps ahead if `wanted`. The caller has waited for the first stage; on
   * return the stage after the last is ready. The body is branch-free, so that the compiler can
   * interleave loads, copies and MMAs; it therefore also loads fragments of that stage, which are
   * unused. */
  template <int WIDTH>
  __device__ __forceinline__ void multiply(WarpTile<E> &sum, Partial<E> &partial, int step, int end,
                                           bool wanted) {
    const uint32_t a = F::offset(), b = F::offset_b();
    const auto to = L::place(g);
    const uint32_t top = base + (STAGES - 1) * E::STAGE_BYTES;
    uint32_t before = stage(step + STAGES - 1), now = stage(step); // `before` can be overwritten
    auto from = loader.source(g, step + STAGES - 1);
    F fragments;
    fragments.template load<0>(now, a, g.weights.w, step % 2);
#pragma unroll
    for (int j = 0; j < WIDTH; j += 2)
      fragments.template load_b<WIDTH>(j, now + b);
#pragma unroll 1
    for (; step < end; step++) {
      const uint32_t next = now == top ? base : now + E::STAGE_BYTES;
      // Not a loop: the compiler would unroll it too late to keep the fragments in registers.
      const auto multiply_slab = [&](auto slab) __attribute__((always_inline)) {
        constexpr int K = decltype(slab)::value, AHEAD = (K + 1) % 4;
        uint32_t stage = now;
        if constexpr (K < L::PARTS) {
          loader.template copy<K>(g, from, before, slots(), to, wanted);
        } else {
          copy_async_commit();
          wait();
          stage = next;
        }
        fragments.template load<AHEAD>(stage, a, g.weights.w, (step + (AHEAD == 0)) % 2);
        fragments.template multiply<WIDTH>(partial.of(sum), K % 2, (stage + b) ^ AHEAD << 5);
      };
      multiply_slab(std::integral_constant<int, 0>());
      multiply_slab(std::integral_constant<int, 1>());
      multiply_slab(std::integral_constant<int, 2>());
      multiply_slab(std::integral_constant<int, 3>());
      partial.template promote<WIDTH>(sum, g, slots(), step);
      before = now, now = next;
      from.advance(g);
    }
  }

  /* Dispatches to `multiply` with the smallest WIDTH, from this one on, for `count` tokens. */
  template <int WIDTH>
  __device__ __forceinline__ void multiply_fitting(WarpTile<E> &sum, Partial<E> &partial, int count,
                                                   int step, int end, bool wanted) {
    // Try every 16 tokens: two n8 tiles of a warp, or one of each of two groups of warps.
    constexpr int WIDER = WarpTile<E>::SPLIT == 1 ? 2 : 1;
    if constexpr (WIDTH < WarpTile<E>::N8_TILES) {
      if (count > WIDTH * WarpTile<E>::SPLIT * 8)
        return multiply_fitting<WIDTH + WIDER>(sum, partial, count, step, end, wanted);
    }
    multiply<WIDTH>(sum, partial, step, end, wanted);
  }
};

/* Rounds and stores an n8 tile of the m64 tile that begins at output `first`. After a transpose in
 * registers, a lane holds neighboring outputs of token lane / 4, whose output 0 is at `to`. */
template <class T, bool VECTORS>
__device__ __forceinline__ void store_rounded(const float (&d)[4], uint16_t *to, int n_out,
                                              int first, bool valid) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int m8 = 0; m8 < 2; m8++) {
    const uint32_t v = transpose_8x8(pack2<T>(d[2 * m8], d[2 * m8 + 1]));
    store_two<VECTORS>(to, first + warp * 16 + 8 * m8 + 2 * (lane & 3), n_out, valid, v);
  }
}

/* Runs the epilogue of a tile and stores it. Each n8 tile is an Epilogue's block of 8 tokens. */
template <EpilogueMode MODE, class E, class T, bool VECTORS>
__device__ __forceinline__ void store_tile(WarpTile<E> &sum, const moelora_gemm_launch &g,
                                           const Tile &tile, int count) {
  using S = WarpTile<E>;
  // Transposed weights are fully dequantized: the epilogue has no scale left to apply.
  using N8Extent = Extent<8, E::TILES, E::TRANSPOSED ? MOELORA_KERNEL_NATIVE : E::FORMAT>;
  const bool gated =
      MODE == EpilogueMode::GATED || (MODE == EpilogueMode::GENERAL && g.weights.gated);
  const int lane = threadIdx.x & 31;
  const Epilogue<N8Extent, MODE> epilogues[] = {{g, tile, 0, T()},
                                                {g, tile, S::ROW_GROUPS - 1, T()}};
  const int first_block = (tile.block * E::TOKENS + S::first_token()) / 8;
#pragma unroll
  for (int j = 0; j < S::N8_TILES; j++) {
    const int left = count - S::first_token() - j * S::NEXT;
    if (left <= 0)
      break;
    const int block = first_block + j * S::SPLIT;
    const int32_t row = g.epilogue.out_by_position ? 0 : block_row<N8Extent>(g, block, lane / 4);
    uint16_t *const to = (uint16_t *)g.epilogue.out + output_offset(g, block * 8 + lane / 4, row);
#pragma unroll
    for (int row_group = 0; row_group < S::ROW_GROUPS; row_group++) {
      if constexpr (E::SAVES) {
        epilogues[row_group].template add_bias<T, 8>(sum.d[row_group][j], g);
        save_before<E, T, VECTORS>(sum.d[row_group][j][0], sum.d[row_group][j][1], g, tile,
                                   row_group, block_row<N8Extent>(g, block, lane / 4),
                                   lane / 4 < left);
        epilogues[row_group].template square<8>(sum.d[row_group][j], g);
      } else {
        epilogues[row_group].template begin<T, 8>(sum.d[row_group][j], g);
      }
      epilogues[row_group].template apply_activation<8>(sum.d[row_group][j], g, block, 0);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half == 1 && gated)
          break;
        const int first = first_output<E>(g, tile, 2 * row_group + half);
        const float (&d)[4] = sum.d[row_group][j][half];
        store_rounded<T, VECTORS>(d, to, g.weights.n_out, first, lane / 4 < left);
      }
    }
  }
}

/* Selects the epilogue mode of the launch. */
template <class E, class T, bool VECTORS>
__device__ __forceinline__ void store_any(WarpTile<E> &sum, const moelora_gemm_launch &g,
                                          const Tile &tile, int count) {
  if (g.epilogue.weighted)
    store_tile<EpilogueMode::GENERAL, E, T, VECTORS>(sum, g, tile, count);
  else if (g.weights.gated)
    store_tile<EpilogueMode::GATED, E, T, VECTORS>(sum, g, tile, count);
  else
    store_tile<EpilogueMode::PLAIN, E, T, VECTORS>(sum, g, tile, count);
}

/* Backward: stores the tile as it is, or after the gradient of the activation if dgu is set. */
template <class E, class T, bool VECTORS>
__device__ __forceinline__ void store_any(WarpTile<E> &sum, const moelora_back_launch &g,
                                          const Tile &tile, int count) {
  using S = WarpTile<E>;
  if (!g.dact.dgu)
    return store_tile<EpilogueMode::PLAIN, E, T, VECTORS>(sum, g, tile, count);
#pragma unroll 1
  for (int j = 0; j < S::N8_TILES; j++) {
    const int token = S::first_token() + j * S::NEXT;
    if (token >= count)
      break;
#pragma unroll
    for (int m64 = 0; m64 < E::TILES; m64++) {
      float d[4]; // selected without a branch, to keep the accumulators in registers
#pragma unroll
      for (int i = 0; i < S::N8_TILES; i++)
#pragma unroll
        for (int q = 0; q < 4; q++)
          d[q] = i == 0 || i == j ? sum.d[m64 / 2][i][m64 % 2][q] : d[q];
      store_through<T, VECTORS>(d, g, first_output<E>(g, tile, m64),
                                (int64_t)tile.block * E::TOKENS + token, count - token);
    }
  }
}

template <class E, class T, int STAGES, bool VECTORS>
__global__ void __launch_bounds__(WarpTile<E>::THREADS, WarpTile<E>::SPLIT == 1 ? 2 : 1)
    gemm_sm80(const __grid_constant__ LaunchOf<E> g) {
  using S = WarpTile<E>;
  constexpr int LEAST = S::N8_TILES < 4 ? S::N8_TILES : S::N8_TILES / 2;
  extern __shared__ __align__(128) char shared[];
  __shared__ int next; // next tile of this CTA
  follow_previous_kernel();
  const int columns = tile_columns<E>(g), blocks = *g.schedule.blocks.num_post / E::TOKENS;
  const int tiles = blocks * columns;
  const int depth_steps = TransposedDepth<E>::steps(g);

  // The shuffle keeps the address in a register; otherwise the compiler recomputes it per stage.
  MainLoop<E, T, STAGES, VECTORS> main_loop{g, __shfl_sync(0xffffffffu, shared_address(shared), 0)};
  S sum;
  Partial<E> partial;
  const uint32_t adapter_storage = main_loop.adapters();
  Tile tile, finished;
  int count = 0, finished_count = 0; // tokens of the block; 0 before the first tile
  for (int index = blockIdx.x;;) {
    // Load the first stages of the tile.
    const bool last = index >= tiles;
    if (!last) {
      // Dynamic tile scheduler: an atomic counter keeps CTAs that share weights or tokens close in
      // time. With a static schedule they would drift apart, and L2 would evict the shared data
      // before it is reused.
      int fetched = tiles;
      if (threadIdx.x == 32 && tiles > (int)gridDim.x)
        fetched = (int)gridDim.x + atomicAdd(g.schedule.tile_counter, 1);
      if constexpr (S::SPLIT == 1)
        tile = tile_at<E>(g, index, columns, blocks);
      else
        tile = tile_of_expert<E>(g, index, columns, blocks);
      count = g.schedule.blocks.counts[tile.block];
      const bool lists = g.schedule.blocks.packed_ranks && threadIdx.x < 32;
      Segments<E::LANES> segments;
      if (lists)
        segments.read(g.schedule.blocks.packed_ranks, (int64_t)tile.block * E::TOKENS, E::TOKENS);
      main_loop.loader.open(g, tile);
      auto from = main_loop.loader.source(g, 0);
#pragma unroll 1
      for (int step = 0; step < STAGES - 1; step++) {
        main_loop.loader.copy_all(g, from, main_loop.stage(step), main_loop.slots(),
                                  step < depth_steps);
        from.advance(g);
        copy_async_commit();
      }
      if (lists) {
        TileAdapters<E, STAGES> adapters(adapter_storage);
        adapters.find(g, tile, segments);
      }
      if (threadIdx.x == 32)
        next = fetched;
    }

    // Store the previous tile while these stages are in flight.
    if (finished_count > 0)
      store_any<E, T, VECTORS>(sum, g, finished, finished_count);
    if (last)
      break;

    // Multiply the weights. If the K loop has fewer than STAGES - 1 steps, empty stages precede the
    // first adapter stage.
    sum.clear();
    partial.clear();
    main_loop.wait();
    const int first = max(depth_steps, STAGES - 1);
    TileAdapters<E, STAGES> adapters(adapter_storage);
    auto load_ahead = [&](int step) { // copies adapter stage step + STAGES - 1, if there is one
      const int ahead = step + STAGES - 1, slabs = adapters.slabs_at(g, ahead - first);
      if (slabs > 0)
        load_slabs<E, T>(g, tile, adapters, ahead, ahead == first, slabs, main_loop.stage(ahead));
      return slabs > 0;
    };
    int step = 0;
    while (step < depth_steps) {
      const bool deep = step + STAGES - 1 < depth_steps;
      int end = depth_steps - (STAGES - 1);
      if (!deep)
        end = load_ahead(step) ? step + 1 : depth_steps;
      main_loop.template multiply_fitting<LEAST>(sum, partial, count, step, end, deep);
      step = end;
    }
    if constexpr (E::Format::HAS_TILE_SCALE && !E::TRANSPOSED)
      scale_accumulators<E, T>(sum, g, tile);

    // Multiply the adapters.
#pragma unroll 1
    for (;; step++) {
      load_ahead(step);
      copy_async_commit();
      if (step >= first) {
        const int slabs = adapters.slabs_at(g, step - first);
#pragma unroll 1
        for (int slot = 0; slot < slabs; slot++)
          expand<E, T>(sum, has_gate_up_slices(g), adapters, step, slot, main_loop.stage(step));
        if (slabs < slabs_in_stage<E>(g))
          break;
      }
      main_loop.wait();
    }
    index = next;
    __syncthreads(); // all threads are done with the stages and `next`
    finished = tile, finished_count = count;
  }
}

/* Launches the kernel with extents E. */
template <class E, class T, int STAGES, int CLUSTER> struct Launch {
  static_assert(CLUSTER == 1, "portable");

  template <bool VECTORS>
  static moelora_status run_as(const LaunchOf<E> *g, const moelora_exec *exec) {
    constexpr int SHARED = sizeof(SharedStorage<E, STAGES>);
    static_assert(SHARED <= 166912, "163 KB of shared memory on sm_80");
    static_assert(SHARED <= kPortableShared || STAGES * E::STAGE_BYTES > kPortableShared,
                  "the plan counts only stages to tell whether a kernel fits a GPU");
    static_assert(!E::Format::IS_W8A8 || STAGES < E::SLOTS,
                  "scales stay a step longer than values");
    return launch_kernel<gemm_sm80<E, T, STAGES, VECTORS>>(
        "gemm_sm80", g->schedule.blocks.max_blocks * tile_columns<E>(*g), WarpTile<E>::THREADS,
        SHARED, exec, *g);
  }
  template <class Plan>
  static moelora_status run(const LaunchOf<E> *g, const Plan *plan, const moelora_exec *exec) {
    if constexpr (E::TOKENS <= MOELORA_ELEMENT_ROWS)
      if (!plan->vectors)
        return run_as<false>(g, exec);
    return run_as<true>(g, exec);
  }
};

/* Extents of activated projections that also store the values before the activation. */
template <class E> struct Saving : E {
  static constexpr bool SAVES = true;
};

/* Extents of the backward's products y W. */
template <class E> struct Transposed : E {
  static constexpr bool TRANSPOSED = true;
  // Includes the scale of a second tile, for alternating gate and up rows.
  static constexpr int TILE_BYTES =
      E::TILE_BYTES + (E::Format::HAS_TILE_SCALE ? MOELORA_TILE_SCALE_BYTES : 0);
};

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
using LaunchSm80 = Launch<StageExtent<BLOCK_M, BLOCK_N / 64, FORMAT>, T, STAGES, CLUSTER>;
template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
using LaunchSaving = Launch<Saving<StageExtent<BLOCK_M, BLOCK_N / 64, FORMAT>>, T, STAGES, CLUSTER>;
template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
using LaunchBack =
    Launch<Transposed<StageExtent<BLOCK_M, BLOCK_N / 64, FORMAT>>, T, STAGES, CLUSTER>;

} // namespace
