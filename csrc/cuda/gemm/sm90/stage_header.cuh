/* Stage headers: metadata that the producer passes to the consumers with a stage. Written before
 * the arrival on the full barrier and read after the wait for it. */
#ifndef MOELORA_CUDA_SM90_STAGE_HEADER_CUH
#define MOELORA_CUDA_SM90_STAGE_HEADER_CUH

#include "cuda/gemm/common/tile.cuh"
#include "cuda/launch/warp.cuh"

/* Header of a stage in shared memory. */
struct StageHeader {
  uint4 tile;        // TileHeader
  uint32_t adapters; // AdaptersHeader or SlabsHeader
  uint32_t unused[3];
};

/* In the first stage of a tile: the tile, its number of valid tokens, and the number of tokens
 * that consumers multiply, which may include padding. A stage with block -1 follows the last tile.
 */
struct TileHeader {
  Tile tile;
  int count, multiplied;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_16(at, make_uint4(tile.block, tile.column, tile.expert,
                                   count | multiplied << 8 | tile.half << 16));
  }
  static __device__ __forceinline__ TileHeader read(uint32_t at) {
    const uint4 v = load_shared_16(at);
    const uint32_t rows = uniform(v.w);
    return {{(int)uniform(v.x), (int)v.y, (int)v.z, (int)(rows >> 16)},
            (int)(rows & 0xff),
            (int)(rows >> 8 & 0xff)};
  }
};

/* In the last k step of a tile: the number of adapter stages that follow, and whether non-finite
 * elements of B need care: `shared` if some tokens do not carry a slab's adapter, `ragged` if a
 * slab extends beyond an adapter's true rank. */
struct AdaptersHeader {
  int stages;
  bool shared, ragged;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_4(at + 16, stages | shared << 16 | ragged << 17);
  }
  static __device__ __forceinline__ AdaptersHeader read(uint32_t at) {
    const uint32_t v = uniform(load_shared_4(at + 16));
    return {(int)(v & 0xffff), (v >> 16 & 1) != 0, v >> 17 != 0};
  }
};

/* In an adapter stage: the number of k16 slabs, and how many of them share a row of B. */
struct SlabsHeader {
  int slabs, width;

  __device__ __forceinline__ void write(uint32_t at) const {
    store_shared_4(at + 16, slabs | width << 16);
  }
  static __device__ __forceinline__ SlabsHeader read(uint32_t at) {
    const uint32_t v = uniform(load_shared_4(at + 16));
    return {(int)(v & 0xffff), (int)(v >> 16)};
  }
};

/* Token range of slab `slab`, in an adapter stage whose consumers predicate by token; replaces the
 * tile. */
struct SlabTokens {
  int low, high;

  __device__ __forceinline__ void write(uint32_t at, int slab) const {
    store_shared_4(at + 4 * slab, low | high << 16);
  }
  static __device__ __forceinline__ SlabTokens read(uint32_t at, int slab) {
    const uint32_t v = uniform(load_shared_4(at + 4 * slab));
    return {(int)(v & 0xffff), (int)(v >> 16)};
  }
};

#endif
