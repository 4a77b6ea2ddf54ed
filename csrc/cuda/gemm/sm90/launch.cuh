/* From a variant's shape and a problem to a Hopper GEMM kernel, its tensor maps and its grid. */
#ifndef MOELORA_CUDA_SM90_LAUNCH_CUH
#define MOELORA_CUDA_SM90_LAUNCH_CUH

#include "cuda/gemm/common/variants.cuh"
#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/maps.cuh"
#include "cuda/launch/kernel_launch.cuh"

namespace {

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
struct LaunchSm90 {
  // bf16 numbers without zero points take fewer instructions to make. For both ways in one kernel
  // the compiler finds no registers.
  template <bool ZEROS>
  using Shape = GemmShape<BLOCK_M, BLOCK_N / 128, STAGES, CLUSTER, FORMAT, ZEROS>;
  static constexpr bool HAS_ZEROS = FormatTraits<FORMAT>::HAS_ZEROS, BF16 = Element<T>::is_bf16;

  static moelora_status run(const moelora_gemm_launch *g, const moelora_exec *exec) {
    if constexpr (HAS_ZEROS && BF16)
      return moelora_has_zeros(g->weights.w.format) ? run_as<Shape<true>>(g, exec)
                                                    : run_as<Shape<false>>(g, exec);
    else
      return run_as<Shape<HAS_ZEROS>>(g, exec);
  }

  template <class S>
  static moelora_status run_as(const moelora_gemm_launch *g, const moelora_exec *exec) {
    GemmMaps maps = {};
    if (FormatTraits<FORMAT>::IS_NATIVE)
      MOELORA_TRY(map_weights(g, BF16, &maps.w));
    if (g->tokens.divisor.value == 0)
      MOELORA_TRY(map_positions(g, BF16, g->tokens.x, g->tokens.k, g->tokens.stride, S::BOX,
                                S::REST_BOX, &maps.x));
    if (g->epilogue.out_by_position && !g->epilogue.out_f32)
      MOELORA_TRY(map_positions(g, BF16, g->epilogue.out, g->weights.n_out,
                                g->epilogue.out_stride[0], kEpilogueTokens, S::REST_BOX,
                                &maps.out));
    if (g->schedule.blocks.packed_ranks && g->weights.factors_boxes)
      MOELORA_TRY(map_factors<S>(g, BF16, &maps.b));
    if (g->epilogue.out_by_position && !g->epilogue.weighted) {
      if (!g->epilogue.out_f32)
        return g->weights.gated ? launch<S, EpilogueMode::GATED>(g, maps, exec)
                                : launch<S, EpilogueMode::PLAIN>(g, maps, exec);
      if constexpr (BLOCK_M <= MOELORA_FLOAT_ROWS)
        if (!g->weights.gated)
          return launch<S, EpilogueMode::PLAIN_F32>(g, maps, exec);
    }
    if constexpr (S::GENERAL_EPILOGUE)
      return launch<S, EpilogueMode::GENERAL>(g, maps, exec);
    return moelora_no_kernel("gemm_sm90", "writes whole layers alone");
  }

  template <class S, EpilogueMode MODE>
  static moelora_status launch(const moelora_gemm_launch *g, const GemmMaps &maps,
                               const moelora_exec *exec) {
    constexpr bool HALVES = MODE == EpilogueMode::PLAIN && !S::SWAP_AB;
    if constexpr (MODE == EpilogueMode::PLAIN_F32)
      if (g->epilogue.splits > 1)
        return launch_shape<WithSplitK<S>, MODE>(g, g->epilogue.splits, maps, exec);
    return launch_shape<std::conditional_t<HALVES, WithHalfTiles<S>, S>, MODE>(g, HALVES ? 2 : 1,
                                                                               maps, exec);
  }

  /* parts: into which a tile may be cut. */
  template <class S, EpilogueMode MODE>
  static moelora_status launch_shape(const moelora_gemm_launch *g, int parts, const GemmMaps &maps,
                                     const moelora_exec *exec) {
    const int columns = tile_columns<S>(*g);
    const int64_t tiles = parts * g->schedule.blocks.max_blocks *
                          (S::UNPAIRED_BLOCKS ? 2 * columns_each(columns) : columns);
    if constexpr (S::FEW_ROWS)
      if (g->schedule.blocks.packed_ranks) // behind a shrink
        return launch_even<gemm_sm90<S, T, MODE>>("gemm_sm90", tiles, S::THREADS, kSharedBytes<S>,
                                                  exec, maps.w, maps.x, maps.out, maps.b, *g);
    if constexpr (S::RESIDENT > 1)
      // Behind the other projection, not behind a shrink or a sort.
      if (g->tokens.divisor.value == 0 && !g->schedule.blocks.packed_ranks)
        return launch_spread<gemm_sm90<S, T, MODE>>("gemm_sm90", tiles, S::THREADS, kSharedBytes<S>,
                                                    exec, maps.w, maps.x, maps.out, maps.b, *g);
    return launch_kernel<gemm_sm90<S, T, MODE>, CLUSTER>("gemm_sm90", tiles, S::THREADS,
                                                         kSharedBytes<S>, exec, maps.w, maps.x,
                                                         maps.out, maps.b, *g);
  }
};

} // namespace

#endif
