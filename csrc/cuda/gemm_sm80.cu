/* Grouped GEMM with LoRA inside, portable: cp.async, ldmatrix, mma.sync; sm_80 and up.
 *
 *   out[p] = act( w[e] x[p] + B[l, e] hl[p] + bias[e] ) * weight
 *
 * A CTA walks over tiles (tile.cuh). All its threads copy ahead into a ring of STAGES stages and
 * multiply behind; first the depth of the base product, then the adapter stages, in one pipeline.
 * The depth is summed in steps of 16 in order, whatever the tile, so that all variants agree bit
 * for bit. Without 16-byte alignment (VECTORS false) rows are copied element by element. */
#include <type_traits>

#include "kernel_launch.cuh"
#include "sm80_adapters.cuh"
#include "variants.cuh"

namespace {

template <class E, class T, bool VECTORS> struct Loader {
  static constexpr int THREADS = 64 * E::TILES;
  static constexpr int STEP = THREADS / 8; // rows between two rows of one thread
  static constexpr int X_ROWS = (E::TOKENS + STEP - 1) / STEP;

  // Offsets of weight rows, in vectors if there are vectors to spare registers; -1 past the end.
  using Offset = std::conditional_t<VECTORS, int32_t, int64_t>;
  static constexpr int UNIT = VECTORS ? 8 : 1;

  const T *weights; // of the expert, at this thread's chunk
  Offset row[8];
  int32_t token[X_ROWS];

  __device__ __forceinline__ void open(const moelora_gemm_launch &g, const Tile &tile) {
    const int thread = threadIdx.x, chunk = thread & 7;
    weights = (const T *)g.w.data + tile.expert * g.w.stride_e + chunk * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int r = thread / 8 + i * STEP, group = r / 64;
      const int output = first_output<E>(g, tile.column, group) + r % 64;
      const int64_t n = weight_row(g, group, output);
      row[i] = output < g.n_out ? (n / 64 * g.w.stride_nt + n % 64 * g.w.stride_n) / UNIT : -1;
    }
#pragma unroll
    for (int i = 0; i < X_ROWS; i++) {
      const int t = thread / 8 + i * STEP;
      token[i] = x_row<E>(g, tile.block, t, block_row<E>(g, tile.block, t));
    }
  }

  /* Rows of depth [64 step, 64 step + 64). */
  __device__ __forceinline__ void copy(const moelora_gemm_launch &g, int step, uint32_t w,
                                       uint32_t x) const {
    const int thread = threadIdx.x, chunk = thread & 7;
    const int left = g.k - step * kDepth - chunk * 8; // elements of the row from this chunk on
    const uint32_t to = thread / 8 * kRowBytes + ((chunk ^ (thread / 8 & 7)) << 4);
    const T *from = weights + step * g.w.stride_kt;
#pragma unroll
    for (int i = 0; i < 8; i++)
      put(w + to + i * STEP * kRowBytes, from, row[i] < 0 ? -1 : (int64_t)row[i] * UNIT, left,
          (const T *)g.w.data);
    const T *xs = (const T *)g.x + step * kDepth + chunk * 8;
#pragma unroll
    for (int i = 0; i < X_ROWS; i++)
      if (E::TOKENS % STEP == 0 || thread / 8 + i * STEP < E::TOKENS)
        put(x + to + i * STEP * kRowBytes, xs, token[i] < 0 ? -1 : token[i] * g.x_stride, left,
            (const T *)g.x);
  }

  static __device__ __forceinline__ void put(uint32_t to, const T *from, int64_t offset, int left,
                                             const T *mapped) {
    const bool there = offset >= 0 && left > 0;
    if (VECTORS)
      copy_async_16(to, there ? from + offset : mapped, there ? 16 : 0);
    else
      copy_elements(to, from + offset, there ? min(8, left) : 0);
  }
};

template <class E, class T>
__device__ __forceinline__ void multiply(float (&d)[2][E::TOKENS / 2], uint32_t w, uint32_t x,
                                         int pair, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int k = 0; k < kDepth / 8; k += 2) {
    uint32_t a[2][4];
    const int row = warp * 16 + (lane & 15);
    const uint32_t at =
        pair * 2 * kGroupBytes + row * kRowBytes + ((k + (lane >> 4) ^ row & 7) << 4);
    load_matrix_x4(a[0], w + at);
    load_matrix_x4(a[1], w + at + kGroupBytes);
#pragma unroll
    for (int i = 0; i < E::TOKENS / 8; i += 2) {
      if (i * 8 >= count)
        break;
      uint32_t b[4];
      const int token = i * 8 + (lane >> 4) * 8 + (lane & 7);
      load_matrix_x4(b, x + token * kRowBytes + ((k + (lane >> 3 & 1) ^ token & 7) << 4));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        mma_16816<T>(&d[half][4 * i], a[half], b);
        mma_16816<T>(&d[half][4 * i + 4], a[half], b + 2);
      }
    }
  }
}

/* One group's results, rounded. Transposed in registers, a lane holds two outputs of a token. */
template <class E, class T>
__device__ __forceinline__ void store_rounded(const float (&d)[E::TOKENS / 2],
                                              const moelora_gemm_launch &g, int first, int from,
                                              int block, int32_t rows) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (from + 8 * i >= E::TOKENS)
      break;
    const int t = i * 8 + lane / 4, row = __shfl_sync(0xffffffffu, rows, t);
    const float *of = &d[(from / 8 + i) * 4];
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      const uint32_t v = transpose_8x8(pack2<T>(of[2 * eight], of[2 * eight + 1]));
      const int output = first + warp * 16 + 8 * eight + 2 * (lane & 3);
      if (row >= g.num_rows || output >= g.n_out)
        continue;
      uint16_t *to =
          (uint16_t *)g.out + output_offset(g, block * E::TOKENS + from + t, row) + output;
      if (g.vectors) {
        *(uint32_t *)to = v;
      } else {
        to[0] = (uint16_t)v;
        if (output + 1 < g.n_out)
          to[1] = (uint16_t)(v >> 16);
      }
    }
  }
}

template <class E, class T, int STAGES, bool VECTORS>
__global__ void __launch_bounds__(64 * E::TILES, 4 / E::TILES)
    gemm_sm80(const __grid_constant__ moelora_gemm_launch g) {
  constexpr int THREADS = 64 * E::TILES;
  extern __shared__ __align__(128) char shared[];
  const uint32_t base = shared_address(shared);
  const int lane = threadIdx.x & 31, pair = threadIdx.x / 128;
  wait_for_previous_kernel();
  start_next_kernel();
  const int columns = tile_columns<E>(g), blocks = *g.blocks.num_post / E::TOKENS;
  const int depth_steps = (g.k + kDepth - 1) / kDepth;

  for (int index = blockIdx.x; index < blocks * columns; index += gridDim.x) {
    const Tile tile = tile_at<E>(g, index, columns, blocks);
    Loader<E, T, VECTORS> loader;
    loader.open(g, tile);
    const int count = g.blocks.counts[tile.block];

    float d[2][E::TOKENS / 2];
#pragma unroll
    for (int i = 0; i < E::TOKENS / 2; i++)
      d[0][i] = d[1][i] = 0.f;

    // Segments are found anew for each stage: kept, they would cost the main loop its registers.
    auto find_segments = [&] {
      Segments<E::LANES> segments;
      segments.load(g, (int64_t)tile.block * E::TOKENS, E::TOKENS);
      return segments;
    };
    Piece ahead, now;
    bool more = g.blocks.pairs != nullptr;
    auto copy_ahead = [&](int step) {
      const uint32_t w = base + step % STAGES * E::STAGE_BYTES, x = w + E::W_BYTES;
      if (step < depth_steps)
        loader.copy(g, step, w, x);
      else if (more)
        more = load_pieces<E, T, THREADS>(g, tile, find_segments(), count, ahead, w, x,
                                          threadIdx.x) > 0;
      copy_async_commit();
    };
    for (int step = 0; step < STAGES - 1; step++)
      copy_ahead(step);
    for (int step = 0;; step++) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();
      copy_ahead(step + STAGES - 1);
      const uint32_t w = base + step % STAGES * E::STAGE_BYTES, x = w + E::W_BYTES;
      if (step < depth_steps) {
        multiply<E, T>(d, w, x, pair, count);
        continue;
      }
      if (!g.blocks.pairs)
        break;
      const Segments<E::LANES> segments = find_segments();
      int slot = 0;
      while (slot < pieces_per_stage(g) && next_piece<E>(g, tile, segments, now))
        expand<E, T, E::TOKENS>(d, g, tile, now, slot++, w, x, pair);
      if (slot == 0)
        break;
    }

    const Epilogue<E, Finish::GENERAL> epilogue(g, tile, pair, T());
#pragma unroll
    for (int c = 0; c < E::TOKENS; c += 32) {
      epilogue.template finish<E::TOKENS>(d, g, tile.block, c);
      const int32_t rows = block_row<E>(g, tile.block, c + lane);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half == 1 && g.gated)
          break;
        const int first = first_output<E>(g, tile.column, 2 * pair + half);
        if (g.out_f32)
          store_f32<E, E::TOKENS>(d[half], g, first, c, tile.block, count, rows);
        else
          store_rounded<E, T>(d[half], g, first, c, tile.block, rows);
      }
    }
  }
}

template <int MIN_CC, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER> struct Launch {
  static moelora_status run(const moelora_gemm_launch *, const moelora_exec *) {
    return moelora_fail(MOELORA_UNSUPPORTED, "not an sm_80 kernel");
  }
};

template <class T, int BLOCK_M, int BLOCK_N, int STAGES>
struct Launch<80, T, BLOCK_M, BLOCK_N, STAGES, 1> {
  using E = Extent<BLOCK_M, BLOCK_N / 64>;

  template <bool VECTORS>
  static moelora_status run_as(const moelora_gemm_launch *g, const moelora_exec *exec) {
    constexpr int SHARED = STAGES * E::STAGE_BYTES;
    static_assert(SHARED <= 166912, "163 KB of shared memory on sm_80");
    return launch_kernel<gemm_sm80<E, T, STAGES, VECTORS>>(
        "gemm_sm80", g->blocks.max_blocks * tile_columns<E>(*g), 64 * E::TILES, SHARED, exec, *g);
  }
  static moelora_status run(const moelora_gemm_launch *g, const moelora_exec *exec) {
    // Element by element larger tiles would spill; the plan gives unaligned problems these.
    if constexpr (BLOCK_M <= 32)
      if (!g->vectors)
        return run_as<false>(g, exec);
    if (!g->vectors)
      return moelora_fail(MOELORA_UNSUPPORTED, "blocks of %d rows need 16-byte alignment", BLOCK_M);
    return run_as<true>(g, exec);
  }
};

} // namespace

moelora_status moelora_cuda_gemm_sm80(const moelora_gemm_launch *g, const moelora_variant *variant,
                                      const moelora_exec *exec) {
  return launch_variant<Launch>(g, variant, exec);
}
