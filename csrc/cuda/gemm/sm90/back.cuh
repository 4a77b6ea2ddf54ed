/* Launches the backward's products y W on Hopper. A generated source also includes native.cuh or
 * transposed_tiles.cuh. */
#pragma once

#include "cuda/gemm/sm90/dact_epilogue.cuh"
#include "cuda/gemm/sm90/launch.cuh"

#include <type_traits>

template <int TOKENS, int CONSUMERS, int STAGES, moelora_kernel_format FORMAT, bool ZEROS>
struct TransposedTilesShape; // transposed_tiles.cuh

namespace {

/* Shape whose epilogue applies the gradient of the activation. Its buffers alias no stage. */
template <class S> struct WithDact : S {
  static constexpr bool ALIASES = false;
  // Consumers need registers for the gradient of the activation, so producers get fewer.
  static constexpr bool NARROW = S::Format::IS_NATIVE && S::CONSUMERS == 2;
  static constexpr int PRODUCER_REGISTERS = NARROW ? 104 : S::PRODUCER_REGISTERS;
  static constexpr int CONSUMER_REGISTERS = NARROW ? 200 : S::CONSUMER_REGISTERS;
  static constexpr int OUT_ROWS = kDactRows;
  static constexpr int OWN_BUFFERS =
      own_buffers_of_dact(S::Format::IS_NATIVE && S::TOKENS <= 128 ? 3 : 2);
};

/* Encodes a map with boxes of 64 outputs by 64 elements of K. Row-major weights are [E, 1, K,
 * outputs]; packed ones [E * K / 64, outputs / 64, 64, 64]. Out-of-bounds elements read as zero. */
moelora_status map_transposed_weights(const moelora_back_launch *g, bool is_bf16,
                                      CUtensorMap *map) {
  const moelora_weights *w = &g->weights.w;
  const cuuint64_t experts = w->stride_e ? g->schedule.num_experts : 1, row = w->stride_n * 2;
  const cuuint64_t matrix = w->stride_e ? (cuuint64_t)w->stride_e * 2 : row * w->n;
  const cuuint64_t tile = 64 * 64 * 2, tiles = w->k / 64;
  const cuuint64_t sizes[2][4] = {{(cuuint64_t)w->k, (cuuint64_t)w->n, 1, experts},
                                  {64, 64, tiles, experts * (w->n / 64)}};
  const cuuint64_t strides[2][3] = {{row, matrix, matrix},
                                    {64 * 2, tile, (cuuint64_t)w->stride_nt * 2}};
  const cuuint32_t box[4] = {64, 64, 1, 1};
  return moelora_encode_map(map, is_bf16, 4, w->data, sizes[w->packed], strides[w->packed], box);
}

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
struct LaunchBack {
  static constexpr bool BF16 = Element<T>::is_bf16, NATIVE = FormatTraits<FORMAT>::IS_NATIVE;
  static_assert(NATIVE || CLUSTER == 1, "CTAs share native weights");

  static moelora_status run(const moelora_back_launch *g, const moelora_back_product_plan *,
                            const moelora_exec *exec) {
    // As in the forward, bf16 dequantization takes fewer instructions without zero points.
    constexpr bool HAS_ZEROS = FormatTraits<FORMAT>::HAS_ZEROS;
    if constexpr (HAS_ZEROS && BF16)
      if (!moelora_has_zeros(g->weights.w.format))
        return run_with<false>(g, exec);
    return run_with<HAS_ZEROS>(g, exec);
  }

  template <bool ZEROS>
  static moelora_status run_with(const moelora_back_launch *g, const moelora_exec *exec) {
    return g->dact.dgu ? run_as<ZEROS, true, EpilogueMode::DACT>(g, exec)
                       : run_as<ZEROS, false, EpilogueMode::PLAIN>(g, exec);
  }

  template <bool ZEROS, bool DACT, EpilogueMode MODE>
  static moelora_status run_as(const moelora_back_launch *g, const moelora_exec *exec) {
    // Up to 32 tokens, the epilogue buffers take the room of a stage: two CTAs share an SM.
    constexpr int KEPT = DACT && BLOCK_M <= 32 ? STAGES - 1 : STAGES;
    using Product =
        std::conditional_t<NATIVE, NativeShape<BLOCK_M, BLOCK_N / 128, KEPT, CLUSTER, Major::MN>,
                           TransposedTilesShape<BLOCK_M, BLOCK_N / 128, KEPT, FORMAT, ZEROS>>;
    using S = std::conditional_t<DACT, WithDact<Product>, Product>;
    static_assert(moelora_shares_sm(BLOCK_N) != S::DYNAMIC_SCHEDULE,
                  "the plan launches another kernel");
    GemmMaps maps = {};
    if (NATIVE)
      MOELORA_TRY(map_transposed_weights(g, BF16, &maps.w));
    if (g->tokens.divisor.value == 0)
      MOELORA_TRY(map_positions(g, BF16, g->tokens.x, g->tokens.k, g->tokens.stride, S::BOX,
                                S::REST_BOX, &maps.x));
    return launch_kernel<gemm_sm90<S, T, MODE>, CLUSTER>(
        "back_sm90", g->schedule.blocks.max_blocks * tile_columns<S>(*g), S::THREADS,
        kSharedBytes<S>, exec, maps.w, maps.x, maps.out, maps.b, *g);
  }
};

} // namespace
