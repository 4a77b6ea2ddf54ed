/* Shared memory layout of an adapter stage. LoRA extends the K loop of a tile: after the K columns
 * of the weights come k16 slabs, each 16 ranks of one segment, several slabs per stage:
 *
 *   sW  rows of B: [slab][TILES][64] rows of 32 bytes, 32-byte swizzle,
 *       or [TILES][64] rows of 64 or 128 bytes, 64- or 128-byte swizzle ("wide")
 *   sX  [TOKENS] rows of xa, 128 bytes; zeros for tokens that do not carry the slab's adapter
 *
 * TMA boxes with narrow rows are slow, so a stage that holds ranks of a single segment only uses
 * wide rows. In a gated projection the gate rows precede the up rows. Slab j of xa occupies chunks
 * 2j and 2j + 1; if a slab covers both gate and up, its two slices occupy chunks 4j to 4j + 3. */
#ifndef MOELORA_CUDA_SM90_ADAPTER_LAYOUT_CUH
#define MOELORA_CUDA_SM90_ADAPTER_LAYOUT_CUH

#include "cuda/gemm/common/segments.cuh"
#include "cuda/gemm/sm90/shared_storage.cuh"

constexpr int kSlabM64Bytes = 64 * 32;

/* Slabs per stage, limited by the sizes of sW and sX. */
template <class S>
__host__ __device__ __forceinline__ int slabs_per_stage(const moelora_gemm_launch &g) {
  constexpr int MAX_SLABS = sizeof(S::Stage::sW) / (S::TILES * kSlabM64Bytes);
  static_assert(MAX_SLABS >= 2, "slabs of wide rows fit the weights of a stage");
  return has_gate_up_slices(g) || MAX_SLABS < 4 ? 2 : 4;
}

/* Backward: bytes of the rows of A of an m64 tile in an adapter stage, all slabs of it. */
template <class S>
constexpr int kDepthM64Bytes =
    (sizeof(S::Stage::sW) < S::TILES * 4 * kSlabM64Bytes ? 2 : 4) * kSlabM64Bytes;

/* Index of an m64 tile within a slab. */
template <class S> __device__ __forceinline__ int slab_m64(const moelora_gemm_launch &g, int m64) {
  return g.weights.gated ? (m64 & 1) * (S::TILES / 2) + m64 / 2 : m64;
}

/* Layout of the rows of B in sW. */
template <class S> struct SlabLayout {
  int width; // slabs that share a row: 1, or all slabs of the stage

  /* Offset of an m64 tile, given its index within a slab, and offset of a slab. */
  __device__ __forceinline__ uint32_t m64(int place) const { return place * kSlabM64Bytes * width; }
  __device__ __forceinline__ uint32_t slab(int j) const {
    return j * (width == 1 ? S::TILES * kSlabM64Bytes : 32);
  }
  __device__ __forceinline__ uint64_t descriptor(uint32_t address) const {
    return wgmma_descriptor_of(address, width);
  }
};

/* Layout of the rows of xa in sX, in chunks of 16 bytes. */
struct XaLayout {
  int slab, up; // stride between slabs; offset of the up slice from the gate slice

  __device__ __forceinline__ explicit XaLayout(const moelora_gemm_launch &g)
      : slab(has_gate_up_slices(g) ? 4 : 2), up(has_gate_up_slices(g) ? 2 : 0) {}
  __device__ __forceinline__ explicit XaLayout(bool gate_up)
      : slab(gate_up ? 4 : 2), up(gate_up ? 2 : 0) {}
};

#endif
