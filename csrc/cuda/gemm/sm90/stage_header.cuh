/* Stage headers: what a producer tells the consumers with a stage. They are written before the
 * arrival on the stage's full barrier and read after the wait for it. */
#ifndef MOELORA_CUDA_SM90_STAGE_HEADER_CUH
#define MOELORA_CUDA_SM90_STAGE_HEADER_CUH

#include "cuda/gemm/common/tile.cuh"
#include "cuda/launch/warp.cuh"

/* The header of a stage in shared memory. */
struct StageHeader {
  uint4 tile;        // TileHeader
  uint32_t adapters; // AdaptersHeader or SlabsHeader
  uint32_t unused[3];
};

/* In the first stage of a tile: the tile, its rows in use, and the rows that consumers multiply,
 * some of which may hold anything. After the last tile comes a stage with block -1. */
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

/* In the last k step of a tile: how many adapter stages follow, and whether some of their products
 * must be zero whatever B holds: those of tokens that do not carry a slab's adapter (`shared`), or
 * of ranks that the adapter does not have (`ragged`). */
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

/* In an adapter stage: its k16 slabs, and how many of them share a row of B. */
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

#endif
