/* The producer warpgroup of a Hopper GEMM: weights by TMA; token rows by TMA where they lie by
 * position, else gathered by cp.async; behind the depth of the base product the adapter stages. */
#ifndef MOELORA_CUDA_SM90_PRODUCE_CUH
#define MOELORA_CUDA_SM90_PRODUCE_CUH

#include "sm90_ring.cuh"

/* What the producers must know of a tile, loaded while the tile before it streams. */
template <class S> struct Job {
  static constexpr int ROWS = (S::TOKENS + 15) / 16; // token rows of one thread
  Tile tile;
  int count;
  int32_t row[ROWS];                       // flat rows; only where they are gathered
  int32_t pair[S::LANES], other[S::LANES]; // of this CTA's block, and of its neighbour's

  __device__ __forceinline__ void load(const moelora_gemm_launch &g, int index, int columns,
                                       int units, int rank) {
    if (index >= units * columns)
      return;
    tile = tile_at<S, S::CLUSTER>(g, index, columns, units);
    const int first = tile.block;
    tile.block = first + rank;
    count = g.blocks.counts[tile.block];
    if (g.x_divisor) {
#pragma unroll
      for (int i = 0; i < ROWS; i++)
        row[i] = block_row<S>(g, tile.block, threadIdx.x / 8 + 16 * i);
    }
    if (g.blocks.pairs) {
      load_pairs(pair, g, tile.block);
      if (S::CLUSTER > 1)
        load_pairs(other, g, first + 1 - rank);
    }
  }

  static __device__ __forceinline__ void load_pairs(int32_t (&pair)[S::LANES],
                                                    const moelora_gemm_launch &g, int block) {
#pragma unroll
    for (int i = 0; i < S::LANES; i++) {
      const int t = i * 32 + (threadIdx.x & 31);
      pair[i] = t < S::TOKENS ? g.blocks.pairs[(int64_t)block * S::TOKENS + t] : -1;
    }
  }
};

/* Adapter stages of a tile. */
template <class S>
__device__ __forceinline__ int count_stages(const moelora_gemm_launch &g, const Tile &tile,
                                            const Segments<S::LANES> &segments) {
  int slices = 0, pieces = 0;
  for (int slice = 0; slice < (is_paired(g) ? 1 : g.lora.num_slices); slice++) {
    bool meets = is_paired(g) || g.lora.num_slices == 1;
    for (int group = 0; group < S::TILES && !meets; group++)
      meets = group_meets_slice<S>(g, tile.column, group, slice);
    slices += meets;
  }
  for (int low = 0; low < S::TOKENS; low = segments.next(low + 1, S::TOKENS)) {
    const int pair = segments.at(low);
    if (pair >= 0)
      pieces += (pair % kRanks + kPieceDepth - 1) / kPieceDepth;
  }
  const int per_stage = pieces_per_stage(g);
  return (pieces * slices + per_stage - 1) / per_stage;
}

/* This CTA's share of a depth step's weights. */
template <class S>
__device__ __forceinline__ void load_weights(const CUtensorMap *map, const moelora_gemm_launch &g,
                                             const Tile &tile, int step, const Ring<S> &ring,
                                             int rank, uint64_t policy) {
  constexpr int SHARE = S::TILES / S::CLUSTER;
  for (int i = 0; i < SHARE; i++) {
    const int group = rank * SHARE + i, output = first_output<S>(g, tile.column, group);
    const uint32_t to = ring.weights() + group * kGroupBytes;
    int c[4] = {step * kDepth, output, g.gated ? group & 1 : 0, tile.expert};
    if (g.w.packed) {
      c[0] = c[1] = 0, c[2] = step;
      c[3] = (int)((tile.expert * g.w.n + weight_row(g, group, output)) / 64);
    }
    if (S::CLUSTER > 1)
      tma_load_4d_pair(to, map, c[0], c[1], c[2], c[3], ring.full(), policy);
    else
      tma_load_4d(to, map, c[0], c[1], c[2], c[3], ring.full(), policy);
  }
}

template <class S, class T>
__device__ __forceinline__ void produce(const CUtensorMap *w_map, const CUtensorMap *x_map,
                                        const moelora_gemm_launch &g, Ring<S> ring) {
  const int thread = threadIdx.x, chunk = thread & 7;
  const int rank = S::CLUSTER > 1 ? (int)cluster_rank() : 0;
  const int depth_steps = (g.k + kDepth - 1) / kDepth;
  const int columns = tile_columns<S>(g), units = *g.blocks.num_post / (S::TOKENS * S::CLUSTER);
  // This thread fills chunk `chunk` of token rows thread / 8 + 16 i.
  const uint32_t mine = thread / 8 * kRowBytes + ((chunk ^ (thread / 8 & 7)) << 4);
  // Few tokens read each weight once; the blocks of a busy expert read it one after the other.
  const uint64_t policy = S::TOKENS <= 32 ? evict_first_policy() : evict_normal_policy();
  const T *x = (const T *)g.x;

  Job<S> next;
  int index = blockIdx.x / S::CLUSTER;
  next.load(g, index, columns, units, rank);
  for (; index < units * columns;) {
    const Tile tile = next.tile;
    const int count = next.count, boxes = (count + S::BOX - 1) / S::BOX;
    int32_t token[Job<S>::ROWS]; // rows of x, -1 in padding
#pragma unroll
    for (int i = 0; i < Job<S>::ROWS; i++)
      token[i] = g.x_divisor && next.row[i] < g.num_rows ? next.row[i] / g.x_divisor : -1;
    Segments<S::LANES> segments;
    int adapter_stages = 0;
    if (g.blocks.pairs) {
      if (S::CLUSTER > 1) {
#pragma unroll
        for (int i = 0; i < S::LANES; i++)
          segments.pair[i] = next.other[i];
        segments.find(g.lora.max_rank);
        adapter_stages = count_stages<S>(g, tile, segments);
      }
#pragma unroll
      for (int i = 0; i < S::LANES; i++)
        segments.pair[i] = next.pair[i];
      segments.find(g.lora.max_rank);
      adapter_stages = max(adapter_stages, count_stages<S>(g, tile, segments));
    }
    index += gridDim.x / S::CLUSTER;
    next.load(g, index, columns, units, rank);

    for (int step = 0; step < depth_steps; step++, ring.advance()) {
      ring.wait_empty();
      if (thread == 0) {
        if (step == 0)
          TileNote{tile, count, adapter_stages}.write(ring.note());
        barrier_expect(ring.full(), S::W_BYTES + (g.x_divisor ? 0 : boxes * S::BOX * kRowBytes));
        load_weights<S>(w_map, g, tile, step, ring, rank, policy);
        for (int i = 0; !g.x_divisor && i < boxes; i++)
          tma_load_2d(ring.tokens() + i * S::BOX * kRowBytes, x_map, step * kDepth,
                      tile.block * S::TOKENS + i * S::BOX, ring.full());
      }
      if (g.x_divisor) {
        const int column = step * kDepth + chunk * 8;
#pragma unroll
        for (int i = 0; i < Job<S>::ROWS; i++)
          if (token[i] >= 0)
            copy_async_16(ring.tokens() + mine + i * 16 * kRowBytes,
                          x + (column < g.k ? token[i] * g.x_stride + column : 0),
                          column < g.k ? 16 : 0);
      }
      barrier_arrive_after_copies(ring.full());
    }

    if (adapter_stages > 0)
      wait_for_previous_kernel(); // it is the shrink
    Piece cursor;
    for (int i = 0; i < adapter_stages; i++, ring.advance()) {
      ring.wait_empty();
      PiecesNote note;
      note.mixed = segments.next(1, count) < count;
      note.pieces = load_pieces<S, T, kProducers>(g, tile, segments, count, cursor, ring.weights(),
                                                  ring.tokens(), thread);
      // The arrival below speaks for asynchronous copies, not for plain stores.
      if (!g.factors_vectors)
        __threadfence_block();
      if (thread == 0) {
        note.write(ring.note());
        barrier_arrive(ring.full());
      }
      barrier_arrive_after_copies(ring.full());
    }
  }
  ring.wait_empty();
  if (thread == 0) {
    TileNote{{-1, 0, 0}, 0, 0}.write(ring.note());
    barrier_arrive(ring.full());
  }
  barrier_arrive_after_copies(ring.full());
}

#endif
