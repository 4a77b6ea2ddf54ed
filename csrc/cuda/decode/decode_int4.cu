/* The single-launch layer for a few tokens: INT4 weights. */
#include "cuda/decode/tiles.cuh"

namespace decode {

moelora_status launch_INT4(const DecodeParams &params, int64_t work, const moelora_exec *exec,
                           bool *fits) {
  return launch_tiles<MOELORA_KERNEL_INT4>(params, work, exec, fits);
}

} // namespace decode
