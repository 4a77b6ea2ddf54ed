/* Tensor maps (TMA descriptors). */
#pragma once

#include <cuda.h>

#include <cuda_runtime.h>

#include "core/backend.h"

/* The outer dimensions, experts and adapters, of the tensor maps of a factor's slices. A dimension
 * whose stride is 0 has extent 1. */
struct StackDims {
  uint32_t experts, adapters; // bit i: slice i has a nonzero stride there

  /* Fills in the dimensions of `slice`. row: the stride in bytes for dimensions of extent 1. */
  void describe(int slice, const moelora_factor &f, int32_t num_experts, int32_t max_loras,
                cuuint64_t row, cuuint64_t *sizes, cuuint64_t *strides) {
    experts |= (uint32_t)(f.stride_e != 0) << slice;
    adapters |= (uint32_t)(f.stride_l != 0) << slice;
    sizes[0] = f.stride_e ? num_experts : 1;
    sizes[1] = f.stride_l ? max_loras : 1;
    strides[0] = f.stride_e ? f.stride_e * 2 : row;
    strides[1] = f.stride_l ? f.stride_l * 2 : row;
  }
  __device__ __forceinline__ int expert(int slice, int e) const {
    return experts >> slice & 1 ? e : 0;
  }
  __device__ __forceinline__ int adapter(int slice, int l) const {
    return adapters >> slice & 1 ? l : 0;
  }
};

/* Tensor maps of a matrix that is ordered by position, with two box heights. */
struct RowMaps {
  CUtensorMap box, rest_box;
};

/* Tensor maps of the slices of B [max_loras, E, halves, rows, ranks], with boxes of one slab and
 * of a whole stage; see map_factors. */
struct FactorMaps {
  CUtensorMap slice[MOELORA_MAX_SLICES], wide[MOELORA_MAX_SLICES];
  StackDims dims;
};

/* Encodes a map of a bf16 or fp16 tensor with `rank` dimensions, innermost first. `sizes` and
 * `box` are in elements; `strides`, of all but the innermost dimension, in bytes. Out-of-bounds
 * elements read as zero. Fails with DEVICE_ERROR if the driver rejects the map. */
moelora_status
moelora_encode_map(CUtensorMap *map, bool is_bf16, cuuint32_t rank, const void *data,
                   const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                   CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
