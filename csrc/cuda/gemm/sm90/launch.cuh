/* Launches a Hopper GEMM: selects the kernel of a variant, encodes its tensor maps, sets the grid.
 * A generated source also includes the main loop of its variants. */
#pragma once

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/tensor_map.h"
#include "cuda/launch/kernel_launch.cuh"

/* Shapes of the kernels, each defined in the file of its main loop. */
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, Major W> struct NativeShape;
template <int TOKENS, int STAGES, moelora_kernel_format FORMAT, bool ZEROS> struct FewRowsShape;
template <int TOKENS, int CONSUMERS, int STAGES, moelora_kernel_format FORMAT, bool ZEROS>
struct DequantizeShape;
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER> struct Fp8WeightMajorShape;
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER> struct Fp8TokenMajorShape;
template <class S, bool GATHERS> struct WithRowStores; // fp8_token_major.cuh

namespace {

/* Selects the shape, and with it the main loop, from weight format, tile and cluster size. */
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, moelora_kernel_format FORMAT,
          bool ZEROS>
constexpr auto select_shape() {
  using Format = FormatTraits<FORMAT>;
  if constexpr (Format::IS_NATIVE)
    return NativeShape<TOKENS, CONSUMERS, STAGES, CLUSTER, Major::K>();
  else if constexpr (moelora_is_token_major(FORMAT, TOKENS))
    return Fp8TokenMajorShape<TOKENS, CONSUMERS, STAGES, CLUSTER>();
  else if constexpr (Format::IS_W8A8)
    return Fp8WeightMajorShape<TOKENS, CONSUMERS, STAGES, CLUSTER>();
  else if constexpr (TOKENS <= 16)
    return FewRowsShape<TOKENS, STAGES, FORMAT, ZEROS>();
  else
    return DequantizeShape<TOKENS, CONSUMERS, STAGES, FORMAT, ZEROS>();
}
template <int TOKENS, int CONSUMERS, int STAGES, int CLUSTER, moelora_kernel_format FORMAT,
          bool ZEROS>
using GemmShape = decltype(select_shape<TOKENS, CONSUMERS, STAGES, CLUSTER, FORMAT, ZEROS>());

/* ---- tensor maps, encoded for each launch ---- */

struct GemmMaps {
  CUtensorMap w;
  RowMaps x, out;
  FactorMaps b;
};

/* Encodes a map with boxes of 64 rows by 64 columns of weights. Row-major weights are [E, half, n,
 * K], where `half` selects gate or up, whether concatenated or interleaved; packed weights are [E *
 * N/64, K/64, 64, 64]. Out-of-bounds elements read as zero. */
moelora_status map_weights(const moelora_gemm_launch *g, bool is_bf16, CUtensorMap *map) {
  const moelora_weights *w = &g->weights.w;
  const cuuint64_t experts = w->stride_e ? g->schedule.num_experts : 1, row = w->stride_n * 2;
  const cuuint64_t half = g->weights.interleaved ? row : row * g->weights.n_out;
  const cuuint64_t n = g->weights.n_out, halves = g->weights.gated ? 2 : 1;
  cuuint64_t sizes[4] = {(cuuint64_t)w->k, n, halves, experts};
  cuuint64_t strides[3] = {g->weights.interleaved ? 2 * row : row, half,
                           w->stride_e ? (cuuint64_t)w->stride_e * 2 : half * halves};
  if (w->packed) {
    const cuuint64_t tile = 64 * 64 * 2, depth = w->k / 64;
    const cuuint64_t packed_sizes[4] = {64, 64, depth, experts * (w->n / 64)};
    const cuuint64_t packed_strides[3] = {64 * 2, tile, tile * depth};
    memcpy(sizes, packed_sizes, sizeof sizes);
    memcpy(strides, packed_strides, sizeof strides);
  }
  const cuuint32_t box[4] = {64, 64, 1, 1};
  return moelora_encode_map(map, is_bf16, 4, w->data, sizes, strides, box);
}

/* Encodes maps of a matrix ordered by position: boxes of 64 columns by `box` or `rest_box` rows. */
moelora_status map_positions(const moelora_gemm_launch *g, bool is_bf16, const void *data,
                             int64_t columns, int64_t stride, int box, int rest_box,
                             RowMaps *maps) {
  const cuuint64_t sizes[2] = {
      (cuuint64_t)columns, (cuuint64_t)(g->schedule.blocks.max_blocks * g->schedule.blocks.rows)};
  const cuuint64_t strides[1] = {(cuuint64_t)stride * 2};
  const cuuint32_t box_size[2] = {64, (cuuint32_t)box},
                   rest_box_size[2] = {64, (cuuint32_t)rest_box};
  MOELORA_TRY(moelora_encode_map(&maps->box, is_bf16, 2, data, sizes, strides, box_size));
  return moelora_encode_map(&maps->rest_box, is_bf16, 2, data, sizes, strides, rest_box_size);
}

/* Encodes maps of each slice of B [max_loras, E, half, n, ranks], with boxes of 16 ranks and with
 * boxes of all ranks of a stage. A box has the rows of a tile, or half of them in a gated
 * projection. Unless gate and up have a slice each, `half` selects gate or up as in map_weights. L2
 * promotion is small, because the ranks next to a box may exceed the true rank. */
template <class S>
moelora_status map_factors(const moelora_gemm_launch *g, bool is_bf16, FactorMaps *maps) {
  const moelora_factors *lora = &g->adapters.lora;
  const bool halved = g->weights.gated && !has_gate_up_slices(*g);
  const cuuint64_t n = lora->slice_n / (halved ? 2 : 1);
  const cuuint32_t rows = (cuuint32_t)(g->weights.gated ? S::ROWS / 2 : S::ROWS);
  const cuuint32_t width = (cuuint32_t)slabs_per_stage<S>(*g);
  const cuuint32_t box[5] = {kSlabDepth, rows, 1, 1, 1};
  const cuuint32_t wide_box[5] = {width * kSlabDepth, rows, 1, 1, 1};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    const moelora_factor *b = &lora->b[i];
    const cuuint64_t row = b->stride_i * 2, alternate = halved && g->weights.interleaved;
    cuuint64_t sizes[5] = {(cuuint64_t)lora->max_rank, n, halved ? 2u : 1u};
    cuuint64_t strides[4] = {alternate ? 2 * row : row, alternate ? row : row * n};
    maps->dims.describe(i, *b, g->schedule.num_experts, g->schedule.max_loras, row, sizes + 3,
                        strides + 2);
    MOELORA_TRY(moelora_encode_map(&maps->slice[i], is_bf16, 5, b->data, sizes, strides, box,
                                   CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_L2_PROMOTION_L2_64B));
    if (lora->max_rank <= (int32_t)((width - 1) * kSlabDepth))
      continue; // no adapter fills a stage
    MOELORA_TRY(
        moelora_encode_map(&maps->wide[i], is_bf16, 5, b->data, sizes, strides, wide_box,
                           width == 2 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B));
  }
  return MOELORA_OK;
}

/* ---- launchers ---- */

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
struct LaunchSm90 {
  // Without zero points, bf16 dequantization takes fewer instructions. One kernel for both cases
  // would spill.
  template <bool ZEROS>
  using Shape = GemmShape<BLOCK_M, BLOCK_N / 128, STAGES, CLUSTER, FORMAT, ZEROS>;
  static constexpr bool HAS_ZEROS = FormatTraits<FORMAT>::HAS_ZEROS, BF16 = Element<T>::is_bf16;

  // The plan repeats these traits.
  using AnyShape = Shape<HAS_ZEROS>;
  static_assert(moelora_uses_mma_sync(FORMAT, BLOCK_M) == AnyShape::FEW_ROWS &&
                    moelora_shares_sm(BLOCK_N) == (AnyShape::RESIDENT > 1) &&
                    moelora_shares_sm(BLOCK_N) != AnyShape::DYNAMIC_SCHEDULE &&
                    moelora_is_token_major(FORMAT, BLOCK_M) == !AnyShape::SWAP_AB,
                "the plan launches another kernel");

  static moelora_status run(const moelora_gemm_launch *g, const moelora_projection_plan *plan,
                            const moelora_exec *exec) {
    if constexpr (HAS_ZEROS && BF16)
      return moelora_has_zeros(g->weights.w.format) ? run_as<Shape<true>>(g, plan, exec)
                                                    : run_as<Shape<false>>(g, plan, exec);
    else
      return run_as<AnyShape>(g, plan, exec);
  }

  template <class S>
  static moelora_status run_as(const moelora_gemm_launch *g, const moelora_projection_plan *plan,
                               const moelora_exec *exec) {
    // Tensor maps count 16-bit elements, or pairs of e4m3 elements.
    constexpr int PAIR = 2 / FormatTraits<FORMAT>::X_BYTES;
    GemmMaps maps = {};
    if (FormatTraits<FORMAT>::IS_NATIVE)
      MOELORA_TRY(map_weights(g, BF16, &maps.w));
    if (g->tokens.divisor.value == 0)
      MOELORA_TRY(map_positions(g, BF16, g->tokens.x, g->tokens.k / PAIR, g->tokens.stride / PAIR,
                                S::BOX, S::REST_BOX, &maps.x));
    if (g->epilogue.out_by_position)
      MOELORA_TRY(map_positions(g, BF16, g->epilogue.out, g->weights.n_out,
                                g->epilogue.out_stride[0], kEpilogueTokens, S::REST_BOX,
                                &maps.out));
    if (g->schedule.blocks.packed_ranks && plan->b_boxes)
      MOELORA_TRY(map_factors<S>(g, BF16, &maps.b));
    switch (plan->epilogue) {
    case MOELORA_EPILOGUE_GATED:
      if constexpr (!S::BY_ROW)
        return launch<S, EpilogueMode::GATED>(g, plan, maps, exec);
      break;
    case MOELORA_EPILOGUE_PLAIN:
      if constexpr (S::SWAP_AB)
        return launch<WithRuns<S>, EpilogueMode::PLAIN>(g, plan, maps, exec);
      else
        return g->tokens.divisor.value
                   ? launch<WithRowStores<S, true>, EpilogueMode::PLAIN>(g, plan, maps, exec)
                   : launch<WithRowStores<S, false>, EpilogueMode::PLAIN>(g, plan, maps, exec);
    case MOELORA_EPILOGUE_GENERAL:
      if constexpr (S::GENERAL_EPILOGUE)
        return launch<S, EpilogueMode::GENERAL>(g, plan, maps, exec);
      break;
    }
    return moelora_no_kernel("gemm_sm90", "has no such epilogue");
  }

  /* Launches the kernel with epilogue MODE. */
  template <class S, EpilogueMode MODE>
  static moelora_status launch(const moelora_gemm_launch *g, const moelora_projection_plan *plan,
                               const GemmMaps &maps, const moelora_exec *exec) {
    const int columns = tile_columns<S>(*g);
    const int64_t tiles =
        g->schedule.blocks.max_blocks * (S::UNPAIRED_BLOCKS ? 2 * columns_each(columns) : columns);
    if constexpr (S::RESIDENT > 1)
      return launch_planned<gemm_sm90<S, T, MODE>>(plan->grid, "gemm_sm90", tiles, S::THREADS,
                                                   kSharedBytes<S>, exec, maps.w, maps.x, maps.out,
                                                   maps.b, *g);
    return launch_kernel<gemm_sm90<S, T, MODE>, CLUSTER>("gemm_sm90", tiles, S::THREADS,
                                                         kSharedBytes<S>, exec, maps.w, maps.x,
                                                         maps.out, maps.b, *g);
  }
};

/* Shape of activated projections that also store the values before the activation (training). */
template <class S> struct Saving : S {
  static constexpr bool SAVES = true, GENERAL_EPILOGUE = false;
};

/* Shape whose PLAIN epilogue stores flat rows (training, single projections). */
template <class S> struct ByRow : S {
  static constexpr bool BY_ROW = true, GENERAL_EPILOGUE = false;
};

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
struct LaunchSaving {
  using Launch = LaunchSm90<FORMAT, T, BLOCK_M, BLOCK_N, STAGES, CLUSTER>;

  static moelora_status run(const moelora_gemm_launch *g, const moelora_projection_plan *plan,
                            const moelora_exec *exec) {
    using S = typename Launch::AnyShape;
    if constexpr (S::SWAP_AB && !FormatTraits<FORMAT>::IS_W8A8)
      if (!g->before.rows)
        return Launch::template run_as<ByRow<S>>(g, plan, exec);
    return Launch::template run_as<Saving<S>>(g, plan, exec);
  }
};

} // namespace
