/* Launches the backward's products y W on sm_80 and up. */
#ifndef MOELORA_CUDA_SM80_BACK_CUH
#define MOELORA_CUDA_SM80_BACK_CUH

#include "cuda/gemm/sm80/gemm.cuh"

namespace {

template <class E> struct Transposed : E {
  static constexpr bool TRANSPOSED = true;
  // Includes the scale of a second tile, for alternating gate and up rows.
  static constexpr int TILE_BYTES =
      E::TILE_BYTES + (E::Format::HAS_TILE_SCALE ? MOELORA_TILE_SCALE_BYTES : 0);
};

template <moelora_kernel_format FORMAT, class T, int BLOCK_M, int BLOCK_N, int STAGES, int CLUSTER>
struct LaunchBack {
  static_assert(CLUSTER == 1, "portable");
  using E = Transposed<StageExtent<BLOCK_M, BLOCK_N / 64, FORMAT>>;

  static moelora_status run(const moelora_back_launch *g, const moelora_back_product_plan *plan,
                            const moelora_exec *exec) {
    return KernelSm80<E, T, STAGES>::run(g, plan->vectors, exec);
  }
};

} // namespace

#endif
