/* Hopper GEMMs with other outputs than those of serving a layer: activated projections that also
 * store the values before the activation (training), and PLAIN epilogues that store flat rows
 * (training, single projections). */
#ifndef MOELORA_CUDA_SM90_SAVING_CUH
#define MOELORA_CUDA_SM90_SAVING_CUH

#include "cuda/gemm/sm90/launch.cuh"

namespace {

/* Also stores the values before the activation. */
template <class S> struct Saving : S {
  static constexpr bool SAVES = true, GENERAL_EPILOGUE = false;
};

/* Stores flat rows, in the PLAIN epilogue. */
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

#endif
