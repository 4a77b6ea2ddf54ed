/* Producer's iterator over quantized weights: the global address of this CTA's share of a tile's
 * m64 tiles at the next k step. One lane must issue copies of 2 to 8 KB as fast as memory delivers
 * them, so the state per step is minimal. */
#ifndef MOELORA_CUDA_SM90_WEIGHT_TILES_CUH
#define MOELORA_CUDA_SM90_WEIGHT_TILES_CUH

#include "cuda/gemm/sm90/shared_storage.cuh"
#include "cuda/gemm/sm90/tile_scheduler.cuh"

/* Tiles of an m64 tile that a stage holds along K. */
template <class S>
constexpr int kDepthTiles = S::SPANS * S::Format::X_ELEMENTS / S::Format::TILE_DEPTH;

template <class S> struct WeightTiles {
  static constexpr int SHARE = S::TILES / S::CLUSTER,
                       MAX_SHARE = S::UNPAIRED_BLOCKS ? S::TILES : SHARE;
  const char *gW[MAX_SHARE];
  int count;    // m64 tiles in the share
  bool are_all; // the share is the whole tile: no multicast from the other CTA

  /* Starts at the first k step of a tile. */
  __device__ __forceinline__ void begin(const moelora_gemm_launch &g, const ClusterTile &tile) {
    are_all = S::CLUSTER == 1 || (S::UNPAIRED_BLOCKS && tile.is_shared());
    count = (are_all ? S::TILES : SHARE) >> is_half<S>(tile);
#pragma unroll
    for (int i = 0; i < MAX_SHARE; i++) {
      const int m64 = first() + i;
      gW[i] = quantized_tile(g, tile.expert, m64, first_output<S>(g, tile, m64));
    }
  }
  __device__ __forceinline__ int first() const { return are_all ? 0 : (int)cluster_rank() * count; }
  __device__ __forceinline__ void advance(const moelora_gemm_launch &g, int tiles) {
#pragma unroll
    for (int i = 0; i < MAX_SHARE; i++)
      gW[i] += tiles * g.weights.w.stride_kt;
  }
};

/* Bytes of weights, including scales, that this CTA receives per k step. */
template <class S>
__device__ __forceinline__ uint32_t weight_tile_bytes(const moelora_gemm_launch &g,
                                                      const Tile &tile) {
  const uint32_t bytes = kDepthTiles<S> * S::TILES * S::Format::tile_bytes(g.weights.w.format);
  return bytes >> is_half<S>(tile);
}

#endif
