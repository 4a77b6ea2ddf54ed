/* Launches a Hopper GEMM: selects the kernel of a variant, encodes the tensor maps, sets the grid.
 */
#ifndef MOELORA_CUDA_SM90_LAUNCH_CUH
#define MOELORA_CUDA_SM90_LAUNCH_CUH

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/maps.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

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
                    moelora_has_dynamic_schedule(BLOCK_N) == AnyShape::DYNAMIC_SCHEDULE &&
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
    // Boxes count 16-bit elements, or pairs of e4m3 elements.
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
        return launch<S, EpilogueMode::GATED>(g, plan, 1, maps, exec);
      break;
    case MOELORA_EPILOGUE_PLAIN:
      if constexpr (S::SWAP_AB)
        return launch<WithRuns<S>, EpilogueMode::PLAIN>(g, plan, 1, maps, exec);
      else
        return launch<WithHalfTiles<S>, EpilogueMode::PLAIN>(g, plan, 2, maps, exec);
    case MOELORA_EPILOGUE_GENERAL:
      if constexpr (S::GENERAL_EPILOGUE)
        return launch<S, EpilogueMode::GENERAL>(g, plan, 1, maps, exec);
      break;
    }
    return moelora_no_kernel("gemm_sm90", "has no such epilogue");
  }

  /* parts: number of parts that a tile may be split into. */
  template <class S, EpilogueMode MODE>
  static moelora_status launch(const moelora_gemm_launch *g, const moelora_projection_plan *plan,
                               int parts, const GemmMaps &maps, const moelora_exec *exec) {
    const int columns = tile_columns<S>(*g);
    const int64_t tiles = parts * g->schedule.blocks.max_blocks *
                          (S::UNPAIRED_BLOCKS ? 2 * columns_each(columns) : columns);
    if constexpr (S::RESIDENT > 1)
      return launch_planned<gemm_sm90<S, T, MODE>>(plan->grid, "gemm_sm90", tiles, S::THREADS,
                                                   kSharedBytes<S>, exec, maps.w, maps.x, maps.out,
                                                   maps.b, *g);
    return launch_kernel<gemm_sm90<S, T, MODE>, CLUSTER>("gemm_sm90", tiles, S::THREADS,
                                                         kSharedBytes<S>, exec, maps.w, maps.x,
                                                         maps.out, maps.b, *g);
  }
};

} // namespace

#endif
