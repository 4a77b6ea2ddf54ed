/* The single-launch layer for a few tokens: MXFP4 weights. */
#include "cuda/decode/tiles.cuh"

namespace decode {

moelora_status launch_MXFP4(const DecodeParams &params, int64_t work, const moelora_exec *exec,
                            bool *fits) {
  return launch_tiles<MOELORA_KERNEL_MXFP4>(params, work, exec, fits);
}

} // namespace decode
