/* Tensor maps of a Hopper GEMM, encoded by the host for each launch. */
#ifndef MOELORA_CUDA_SM90_MAPS_CUH
#define MOELORA_CUDA_SM90_MAPS_CUH

#include "cuda/gemm/sm90/adapter_layout.cuh"
#include "cuda/gemm/sm90/tensor_map.h"

namespace {

struct GemmMaps {
  CUtensorMap w;
  RowMaps x, out;
  FactorMaps b;
};

/* Boxes of 64 rows by 64 columns of weights. Row-major weights are [E, half, n, K], where `half`
 * selects gate or up, whether concatenated or interleaved; packed weights are [E * N/64, K/64, 64,
 * 64]. Out-of-bounds elements read as zero. */
moelora_status map_weights(const moelora_gemm_launch *g, bool is_bf16, CUtensorMap *map) {
  const moelora_weights *w = &g->weights.w;
  const cuuint64_t experts = w->stride_e ? g->schedule.num_experts : 1, row = w->stride_n * 2;
  const cuuint64_t half = g->weights.interleaved ? row : row * g->weights.n_out;
  const cuuint64_t n = g->weights.n_out, halves = g->weights.gated ? 2 : 1;
  cuuint64_t sizes[4] = {(cuuint64_t)w->k, n, halves, experts};
  cuuint64_t strides[3] = {g->weights.interleaved ? 2 * row : row, half,
                           w->stride_e ? (cuuint64_t)w->stride_e * 2 : half * halves};
  if (w->packed) {
    const cuuint64_t tile = 64 * 64 * 2, depth = w->k / 64;
    const cuuint64_t packed_sizes[4] = {64, 64, depth, experts * (w->n / 64)};
    const cuuint64_t packed_strides[3] = {64 * 2, tile, tile * depth};
    memcpy(sizes, packed_sizes, sizeof sizes);
    memcpy(strides, packed_strides, sizeof strides);
  }
  const cuuint32_t box[4] = {64, 64, 1, 1};
  return moelora_encode_map(map, is_bf16, 4, w->data, sizes, strides, box);
}

/* Boxes of 64 columns by `box` or `rest_box` rows of a matrix that is ordered by position. */
moelora_status map_positions(const moelora_gemm_launch *g, bool is_bf16, const void *data,
                             int64_t columns, int64_t stride, int box, int rest_box,
                             RowMaps *maps) {
  const cuuint64_t sizes[2] = {
      (cuuint64_t)columns, (cuuint64_t)(g->schedule.blocks.max_blocks * g->schedule.blocks.rows)};
  const cuuint64_t strides[1] = {(cuuint64_t)stride * 2};
  const cuuint32_t box_size[2] = {64, (cuuint32_t)box},
                   rest_box_size[2] = {64, (cuuint32_t)rest_box};
  MOELORA_TRY(moelora_encode_map(&maps->box, is_bf16, 2, data, sizes, strides, box_size));
  return moelora_encode_map(&maps->rest_box, is_bf16, 2, data, sizes, strides, rest_box_size);
}

/* Boxes of rows of B [max_loras, E, half, n, ranks], for each slice: 16 ranks wide, and as wide as
 * a whole stage. A box has the rows of a tile, or half of them in a gated projection. In a gated
 * projection with one slice, `half` selects gate or up as in map_weights; likewise if two slices
 * cut across interleaved rows. Ranks beyond a box may exceed the true rank, so L2 promotion is
 * small. */
template <class S>
moelora_status map_factors(const moelora_gemm_launch *g, bool is_bf16, FactorMaps *maps) {
  const moelora_factors *lora = &g->adapters.lora;
  const bool halved = g->weights.gated && !has_gate_up_slices(*g);
  const cuuint64_t n = lora->slice_n / (halved ? 2 : 1);
  const cuuint32_t rows = (cuuint32_t)(g->weights.gated ? S::ROWS / 2 : S::ROWS);
  const cuuint32_t width = (cuuint32_t)slabs_per_stage<S>(*g);
  const cuuint32_t box[5] = {kSlabDepth, rows, 1, 1, 1};
  const cuuint32_t wide_box[5] = {width * kSlabDepth, rows, 1, 1, 1};
  for (int32_t i = 0; i < lora->num_slices; i++) {
    const moelora_factor *b = &lora->b[i];
    const cuuint64_t row = b->stride_i * 2, alternate = halved && g->weights.interleaved;
    cuuint64_t sizes[5] = {(cuuint64_t)lora->max_rank, n, halved ? 2u : 1u};
    cuuint64_t strides[4] = {alternate ? 2 * row : row, alternate ? row : row * n};
    maps->dims.describe(i, *b, g->schedule.num_experts, g->schedule.max_loras, row, sizes + 3,
                        strides + 2);
    MOELORA_TRY(moelora_encode_map(&maps->slice[i], is_bf16, 5, b->data, sizes, strides, box,
                                   CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_L2_PROMOTION_L2_64B));
    if (lora->max_rank <= (int32_t)((width - 1) * kSlabDepth))
      continue; // no adapter fills a stage
    MOELORA_TRY(
        moelora_encode_map(&maps->wide[i], is_bf16, 5, b->data, sizes, strides, wide_box,
                           width == 2 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B));
  }
  return MOELORA_OK;
}

} // namespace

#endif
