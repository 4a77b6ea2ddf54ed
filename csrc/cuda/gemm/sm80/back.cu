/* sm_80 and up: products of a backward, with native weights as they lie. */
#include "cuda/gemm/sm80/gemm.cuh"

namespace {

template <class E> struct Transposed : E {
  static constexpr bool TRANSPOSED = true;
};

template <class T, int BLOCK_M, int BLOCK_N, int STAGES>
moelora_status run(const moelora_back_launch *g, const moelora_back_product_plan *plan,
                   const moelora_exec *exec) {
  using E = Transposed<StageExtent<BLOCK_M, BLOCK_N / 64, MOELORA_KERNEL_NATIVE>>;
  return KernelSm80<E, T, STAGES>::run(g, plan->vectors, exec);
}

} // namespace

extern "C" moelora_status moelora_cuda_back_SM80(const moelora_back_launch *g,
                                                 const moelora_variant *variant,
                                                 const moelora_back_product_plan *plan,
                                                 const moelora_exec *exec) {
  switch (variant->id) {
#define LAUNCH_SM90(...)
#define LAUNCH_SM80(NAME, T, BLOCK_M, BLOCK_N, STAGES)                                             \
  case CUDA_##NAME:                                                                                \
    return run<T, BLOCK_M, BLOCK_N, STAGES>(g, plan, exec);
#define MOELORA_CUDA_BACK(NAME, T, FAMILY, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CLUSTER)             \
  LAUNCH_##FAMILY(NAME, T, BLOCK_M, BLOCK_N, STAGES)
#include "cuda/variants.inc"
#undef LAUNCH_SM80
#undef LAUNCH_SM90
  }
  return moelora_no_kernel(variant->name, "is no product of a backward for sm_80");
}
