/* Tensor maps, the descriptors of TMA. */
#ifndef MOELORA_CUDA_TENSOR_MAP_H
#define MOELORA_CUDA_TENSOR_MAP_H

#include <cuda.h>

#include <cuda_runtime.h>

#include "core/backend.h"

/* The last dimensions, experts and adapters, of the tensor maps of a stack's slices. What the
 * experts or the adapters of a slice share is a dimension of 1. */
struct StackDims {
  uint32_t experts, adapters; // bit of each slice where they are apart

  /* Of `slice`; `row`: its smallest stride, which a dimension of 1 gets, too. */
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

/* Tensor maps of a matrix that lies by position: boxes of many of its rows and of few. */
struct RowMaps {
  CUtensorMap many, few;
};

/* Tensor maps of the slices of B: [max_loras, E, halves, rows, ranks], in boxes of one slab and of
 * those of a whole stage; see map_factors. */
struct FactorMaps {
  CUtensorMap slice[MOELORA_MAX_SLICES], wide[MOELORA_MAX_SLICES];
  StackDims dims;
};

/* Describes a tensor of `rank` dimensions of bf16 or fp16, innermost first: `sizes` and `box` count
 * elements, `strides`, of all but the innermost, bytes. What a box has outside reads as zeros.
 * DEVICE_ERROR if the driver refuses. */
moelora_status
moelora_encode_map(CUtensorMap *map, bool is_bf16, cuuint32_t rank, const void *data,
                   const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                   CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

#endif
