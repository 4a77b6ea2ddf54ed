/* Finds and lists the segments of a block and iterates over the k16 slabs of a GEMM tile. A slab is
 * 16 ranks of a segment's adapter, in one slice that the tile overlaps or, if gate and up have a
 * slice each, in both. */
#pragma once

#include "cuda/gemm/common/tile.cuh"

/* Segments of a block: maximal runs of tokens with the same adapter. Lane t of a warp holds tokens
 * t, t + 32, .... Each warp that needs the segments computes them. */
template <int LANES> struct Segments {
  int32_t packed[LANES];  // adapter * kRanks + true rank; -1: no adapter
  uint32_t starts[LANES]; // bit t % 32 of starts[t / 32]: token t starts a segment

  __device__ __forceinline__ void load(const moelora_blocks &blocks, int max_rank, int64_t position,
                                       int tokens) {
    read(blocks.packed_ranks, position, tokens);
    find(max_rank);
  }

  /* Loads packed ranks only; call `find` next. */
  __device__ __forceinline__ void read(const int32_t *packed_ranks, int64_t position, int tokens) {
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      const int t = i * 32 + (threadIdx.x & 31);
      packed[i] = t < tokens ? packed_ranks[position + t] : -1;
    }
  }

  __device__ __forceinline__ void find(int max_rank) {
#pragma unroll
    for (int i = 0; i < LANES; i++)
      if (packed[i] >= 0 && packed[i] % kRanks > max_rank)
        packed[i] += max_rank - packed[i] % kRanks;
    int before = -2;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      int previous = __shfl_up_sync(0xffffffffu, packed[i], 1);
      if ((threadIdx.x & 31) == 0)
        previous = before;
      starts[i] = __ballot_sync(0xffffffffu, packed[i] != previous);
      before = __shfl_sync(0xffffffffu, packed[i], 31);
    }
  }

  /* Returns the first segment start at or after token t; `tokens` if there is none. */
  __device__ __forceinline__ int next(int t, int tokens) const {
    int found = tokens;
#pragma unroll
    for (int i = LANES - 1; i >= 0; i--) {
      uint32_t mask = starts[i];
      if (t > i * 32)
        mask = t - i * 32 < 32 ? mask & (0xffffffffu << (t - i * 32)) : 0;
      if (mask)
        found = i * 32 + __ffs(mask) - 1;
    }
    return min(found, tokens);
  }
};

template <class E>
__device__ __forceinline__ bool m64_overlaps_slice(const moelora_gemm_launch &g, const Tile &tile,
                                                   int m64, int slice) {
  const int output = first_output<E>(g, tile, m64);
  if (output >= g.weights.n_out)
    return false;
  const int64_t begin = weight_row(g, m64, output);
  const int64_t end = weight_row(g, m64, min(output + 63, g.weights.n_out - 1));
  return end >= slice * g.adapters.lora.slice_n && begin < (slice + 1) * g.adapters.lora.slice_n;
}

/* 16 ranks of a segment; warp-uniform. */
struct Slab {
  int low, high, packed; // tokens [low, high)
  int slice, rank;
};

/* Segment in shared memory. */
struct ListedSegment {
  int16_t low, high; // tokens [low, high)
  int32_t packed;
};

/* Segments of one block that carry an adapter, listed in shared memory by one warp. */
template <class S> struct SegmentList {
  uint32_t base;
  int count, slabs; // number of segments; of slabs, which `find` counts for one slice only
  uint32_t slices;  // bit mask, see overlapped_slices

  /* Builds the list from `segments`. */
  __device__ __forceinline__ void find(const moelora_gemm_launch &g, const Tile &tile,
                                       const Segments<S::LANES> &segments) {
    slices = overlapped_slices(g, tile);
    slabs = slabs_of(segments);
    count = 0;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const bool carries = segments.packed[i] >= 0 && segments.packed[i] % kRanks > 0;
      const bool first = segments.starts[i] >> lane & 1;
      const uint32_t begin = __ballot_sync(0xffffffffu, carries && first);
      const uint32_t after = i + 1 < S::LANES ? segments.starts[i + 1] : 1;
      const bool last = (lane < 31 ? segments.starts[i] >> (lane + 1) : after) & 1;
      const uint32_t at = base + 8 * (count + __popc(begin & ((2u << lane) - 1)) - 1);
      const int t = i * 32 + lane;
      if (carries && first)
        store_shared_2_4(at, (int16_t)t, segments.packed[i]);
      if (carries && last)
        store_shared_2<2>(at, (int16_t)(t + 1));
      count += __popc(begin);
    }
    __syncwarp();
  }

  /* Returns the bit mask of the slices that contain outputs of the tile. If a slab covers the
   * slices of gate and up, they count as slice 0. */
  static __device__ __forceinline__ uint32_t overlapped_slices(const moelora_gemm_launch &g,
                                                               const Tile &tile) {
    if (has_gate_up_slices(g) || g.adapters.lora.num_slices == 1)
      return 1;
    if (S::TRANSPOSED) // each slice is part of the K of all outputs
      return (1u << g.adapters.lora.num_slices) - 1;
    uint32_t overlapped = 0;
    for (int slice = 0; slice < g.adapters.lora.num_slices; slice++)
      for (int m64 = 0; m64 < S::TILES; m64++)
        overlapped |= (uint32_t)m64_overlaps_slice<S>(g, tile, m64, slice) << slice;
    return overlapped;
  }

  /* Returns the number of slabs per slice. */
  static __device__ __forceinline__ int slabs_of(const Segments<S::LANES> &segments) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < S::LANES; i++)
      if (segments.packed[i] >= 0 && segments.starts[i] >> (threadIdx.x & 31) & 1)
        sum += (segments.packed[i] % kRanks + kSlabDepth - 1) / kSlabDepth;
    return __reduce_add_sync(0xffffffffu, sum);
  }

  __device__ __forceinline__ Slab at(int index) const {
    const uint2 segment = load_shared_8(base + 8 * index);
    return {(int)(segment.x & 0xffff), (int)(segment.x >> 16), (int)segment.y, 0, 0};
  }
};

/* Iterates over a tile's slabs: for each segment, for each slice, in order of ranks. */
struct SlabIterator {
  int segment = 0, slice = -1, rank = 0;

  /* Returns the next slab, which must exist. */
  template <class S> __device__ __forceinline__ Slab next(const SegmentList<S> &list) {
    Slab slab = list.at(segment);
    if (slice < 0)
      slice = __ffs(list.slices) - 1;
    slab.slice = slice;
    slab.rank = rank;
    rank += kSlabDepth;
    if (rank >= slab.packed % kRanks) {
      rank = 0;
      slice = __ffs(list.slices & ~((2u << slice) - 1)) - 1;
      segment += slice < 0;
    }
    return slab;
  }
};
