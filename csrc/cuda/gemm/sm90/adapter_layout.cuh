/* Where an adapter stage has its operands. Adapters are more depth of a tile: after its K columns
 * of weights come k16 slabs, 16 ranks of a segment each, a few to a stage:
 *
 *   sW  rows of B, [slab][TILES][64] rows of 32 bytes in the 32-byte swizzle,
 *       or [TILES][64] rows of 64 or 128 bytes in the swizzle of as many
 *   sX  [TOKENS] rows of xa, 128 bytes; zeros for tokens that do not carry the slab's adapter
 *
 * TMA is slow with narrow rows: a stage that is full with the ranks of one segment has wide ones.
 * Of a gated projection rows of gate come before those of up. Slab j of xa is in chunks 2j and
 * 2j + 1; where a slab covers gate and up, its two slices are in chunks 4j to 4j + 3. */
#ifndef MOELORA_CUDA_SM90_ADAPTER_LAYOUT_CUH
#define MOELORA_CUDA_SM90_ADAPTER_LAYOUT_CUH

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/sm90/shared_storage.cuh"

constexpr int kSlabM64Bytes = 64 * 32;

/* Slabs of a stage: as many as both sW and sX hold. */
template <class S>
__host__ __device__ __forceinline__ int slabs_per_stage(const moelora_gemm_launch &g) {
  constexpr int MOST = sizeof(S::Stage::sW) / (S::TILES * kSlabM64Bytes);
  static_assert(MOST >= 2, "slabs of wide rows fit the weights of a stage");
  return has_gate_up_slices(g) || MOST < 4 ? 2 : 4;
}

/* Place of an m64 tile in a slab. */
template <class S> __device__ __forceinline__ int slab_m64(const moelora_gemm_launch &g, int m64) {
  return g.weights.gated ? (m64 & 1) * (S::TILES / 2) + m64 / 2 : m64;
}

/* Rows of B in sW. */
template <class S> struct SlabLayout {
  int width; // slabs side by side in a row: 1, or all of the stage

  /* Offset of an m64 tile, by its place in a slab, and of a slab of it. */
  __device__ __forceinline__ uint32_t m64(int place) const { return place * kSlabM64Bytes * width; }
  __device__ __forceinline__ uint32_t slab(int j) const {
    return j * (width == 1 ? S::TILES * kSlabM64Bytes : 32);
  }
  __device__ __forceinline__ uint64_t descriptor(uint32_t address) const {
    return wgmma_descriptor_of(address, width);
  }
};

/* Chunks of xa in sX. */
struct XaLayout {
  int slab, up; // from a slab to the next; from the slice of gate to that of up

  __device__ __forceinline__ explicit XaLayout(const moelora_gemm_launch &g)
      : slab(has_gate_up_slices(g) ? 4 : 2), up(has_gate_up_slices(g) ? 2 : 0) {}
  __device__ __forceinline__ explicit XaLayout(bool gate_up)
      : slab(gate_up ? 4 : 2), up(gate_up ? 2 : 0) {}
};

#endif
