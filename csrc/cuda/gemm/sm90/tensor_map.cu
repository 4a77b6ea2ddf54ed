/* Encodes tensor maps with the driver's cuTensorMapEncodeTiled. */
#include "cuda/gemm/sm90/tensor_map.h"

namespace {

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Looks up the driver's encoder at run time, so that libcuda is not a link dependency. */
EncodeTiled find_encoder() {
  static EncodeTiled known; // concurrent calls write the same value
  EncodeTiled encode = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (!encode) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) == cudaSuccess &&
        result == cudaDriverEntryPointSuccess)
      encode = (EncodeTiled)found;
    __atomic_store_n(&known, encode, __ATOMIC_RELAXED);
  }
  return encode;
}

} // namespace

moelora_status moelora_encode_map(CUtensorMap *map, bool is_bf16, cuuint32_t rank, const void *data,
                                  const cuuint64_t *sizes, const cuuint64_t *strides,
                                  const cuuint32_t *box, CUtensorMapSwizzle swizzle,
                                  CUtensorMapL2promotion fetched) {
  const EncodeTiled encode = find_encoder();
  if (!encode)
    return moelora_fail(MOELORA_DEVICE_ERROR, "the driver has no cuTensorMapEncodeTiled");
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             rank, (void *)data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    return moelora_fail(MOELORA_DEVICE_ERROR, "cuTensorMapEncodeTiled failed with %d", (int)result);
  return MOELORA_OK;
}
