/* Adapters of a tile for the portable GEMM: stages of its ring filled with pieces, and their
 * products, patch by patch. */
#ifndef MOELORA_CUDA_SM80_ADAPTERS_CUH
#define MOELORA_CUDA_SM80_ADAPTERS_CUH

#include "sm80_product.cuh"

/* Up to 16 ranks from `rank` on of the adapter of tokens [low, high), of `slice` unless the slices
 * are paired. In W, piece j of a stage lies in chunks 2j and 2j + 1. */
struct Piece {
  int low = 0, high = 0, pair = -1, slice = 0, rank = 0;
};

/* Moves on to a tile's next piece, the first one from a fresh `s`; false behind the last. The order
 * is the same for all warps, whether they load or multiply. */
template <class E>
__device__ __forceinline__ bool next_piece(const moelora_gemm_launch &g, const Tile &tile,
                                           const Segments<E::LANES> &segments, Piece &s) {
  const int slices = is_paired(g) ? 1 : g.lora.num_slices;
  s.rank += kPieceDepth;
  while (s.pair < 0 || s.rank >= s.pair % kRanks) {
    s.rank = 0;
    if (s.pair < 0 || ++s.slice == slices) {
      s.slice = 0;
      s.low = s.high;
      s.pair = -1;
      if (s.low >= E::TOKENS)
        return false;
      s.high = segments.next(s.low + 1, E::TOKENS);
      s.pair = segments.at(s.low);
      if (s.pair < 0)
        continue;
    }
    bool meets = slices == 1;
    for (int group = 0; group < E::TILES && !meets; group++)
      meets = group_meets_slice<E>(g, tile.column, group, s.slice);
    if (!meets)
      s.rank = kRanks;
  }
  return true;
}

/* Copies one stage of pieces with THREADS threads: rows of B, zeros beyond the true rank, and the
 * tokens' rows of hl up to token `tokens`, zeros outside of the segment. Returns the number of
 * pieces. */
template <class E, class T, int THREADS>
__device__ __forceinline__ int load_pieces(const moelora_gemm_launch &g, const Tile &tile,
                                           const Segments<E::LANES> &segments, int tokens,
                                           Piece &cursor, uint32_t w, uint32_t x, int thread) {
  const bool paired = is_paired(g);
  const int per_stage = pieces_per_stage(g);
  const int w_wide = 2 * per_stage, w_chunk = thread % w_wide, w_rows = THREADS / w_wide;
  const int x_chunk = thread & 7, x_rows = THREADS / 8;
  // Found once for B and once more for hl: to keep both at hand would cost registers.
  int count = 0;
  auto piece_of = [&](Piece &walk, int slot) {
    Piece found;
    for (count = 0; count < per_stage && next_piece<E>(g, tile, segments, walk); count++)
      if (slot == count)
        found = walk;
    return found;
  };
  Piece walk = cursor;
  const Piece of_w = piece_of(walk, w_chunk / 2);
  auto at = [](int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); };

  if (of_w.pair >= 0) {
    const int column = of_w.rank + (w_chunk & 1) * 8;
    const int ranks = max(0, min(8, of_w.pair % kRanks - column)); // of this chunk
    const int step = g.gated && g.interleaved ? 2 : 1;             // rows of B between two outputs
#pragma unroll 1
    for (int group = 0; group < E::TILES; group++) {
      const int slice = paired ? group & 1 : of_w.slice;
      const moelora_factor &b = g.lora.b[slice];
      const int output = first_output<E>(g, tile.column, group), width = (int)g.lora.slice_n;
      int r = thread / w_wide;
      int n = paired ? output + r : (int)weight_row(g, group, output + r) - slice * width;
      const T *from = (const T *)b.data + of_w.pair / kRanks * b.stride_l +
                      tile.expert * b.stride_e + n * b.stride_i + column;
      const int64_t ahead = (int64_t)w_rows * step * b.stride_i;
      const int end = min(64, g.n_out - output); // nobody looks at rows behind the last output
#pragma unroll 1
      for (; r < end; r += w_rows, n += w_rows * step, from += ahead) {
        const bool there = n >= 0 && n < width;
        const uint32_t to = w + group * kGroupBytes + at(r, w_chunk);
        if (g.factors_vectors)
          copy_async_16(to, there ? from : (const T *)b.data, there ? 2 * ranks : 0);
        else
          copy_elements(to, from, there ? ranks : 0);
      }
    }
  }
  const Piece of_x = piece_of(cursor, paired ? x_chunk / 4 : x_chunk / 2);
  if (of_x.pair >= 0) {
    const int slice = paired ? x_chunk / 2 & 1 : of_x.slice;
    const T *hl = (const T *)g.hl + (int64_t)tile.block * E::TOKENS * g.hl_stride +
                  slice * g.hl_slice + of_x.rank + (x_chunk & 1) * 8;
    const int stride = (int)g.hl_stride;
#pragma unroll 1
    for (int t = thread / 8; t < tokens; t += x_rows) {
      const bool carries = t >= of_x.low && t < of_x.high;
      copy_async_16(x + at(t, x_chunk), hl + (carries ? t : of_x.low) * stride, carries ? 16 : 0);
    }
  }
  return count;
}

/* sum += B hl^T for the tokens of piece `slot` of a stage. Each 16 x 8 patch is multiplied into
 * registers of its own and added only where its token belongs to the segment: what an adapter's
 * factors hold, NaN included, never reaches a token that does not carry it, and a base row keeps
 * its bits. */
template <class E, class T>
__device__ __forceinline__ void expand(Share<E> &sum, const moelora_gemm_launch &g,
                                       const Tile &tile, const Piece &s, int slot, uint32_t w,
                                       uint32_t x) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const bool paired = is_paired(g);
  // From the segment's start on: to count from the block's would keep a register for each eight.
  const int begin = Share<E>::first_token() - s.low, length = s.high - s.low;
#pragma unroll
  for (int group = 0; group < E::TILES; group++) {
    if (!paired && g.lora.num_slices > 1 && !group_meets_slice<E>(g, tile.column, group, s.slice))
      continue;
    uint32_t a[4];
    const int row = warp * 16 + (lane & 15);
    load_matrix_x4(a, w + group * kGroupBytes + row * kRowBytes +
                          ((2 * slot + (lane >> 4) ^ row & 7) << 4));
    const int first = paired ? 4 * slot + 2 * (group % 2) : 2 * slot;
    const uint32_t at = x + (Share<E>::first_token() + (lane & 7)) * kRowBytes +
                        ((first + (lane >> 3 & 1) ^ lane & 7) << 4);
#pragma unroll
    for (int j = 0; j < Share<E>::EIGHTS; j++) {
      const int eight = begin + j * Share<E>::NEXT;
      if (eight >= length || eight <= -8)
        continue;
      uint32_t b[2];
      load_matrix_x2(b, at + j * Share<E>::NEXT * kRowBytes);
      float delta[4] = {0.f, 0.f, 0.f, 0.f};
      mma_16816<T>(delta, a, b);
      const int t = eight + (lane & 3) * 2;
      float (&d)[4] = sum.d[group / 2][j][group % 2];
      if (t >= 0 && t < length)
        d[0] += delta[0], d[2] += delta[2];
      if (t + 1 >= 0 && t + 1 < length)
        d[1] += delta[1], d[3] += delta[3];
    }
  }
}

#endif
