/* Packs weights into 64 x 64 tiles: w [E, N, K] -> out [E, N/64, K/64, 64, 64].
 *
 * A CTA copies one tile at a time: 64 rows of 64 elements, `stride_n` apart in w and contiguous in
 * out. Threads copy vectors in the tile's memory order, so that stores are contiguous and loads
 * cover whole rows. A vector is 16 bytes if w and out are aligned, otherwise one element. */
#include "cuda/launch/kernel_launch.cuh"

constexpr int THREADS = 256;

struct pack_sizes {
  const void *from;
  void *to;
  int64_t row_tiles, k_tiles, num_tiles; /* N/64, K/64, E * N/64 * K/64 */
  int64_t stride_e, stride_n;            /* in elements */
  int element_bytes, row_shift;          /* 64 elements are 2^row_shift vectors */
};

template <typename Vector>
static __global__ void __launch_bounds__(THREADS, kLightResident) pack(const pack_sizes p) {
  const int row_vectors = 1 << p.row_shift, tile_vectors = MOELORA_PACK << p.row_shift;
  for (int64_t tile = blockIdx.x; tile < p.num_tiles; tile += gridDim.x) {
    const int64_t expert = tile / (p.row_tiles * p.k_tiles);
    const int64_t row_tile = tile / p.k_tiles % p.row_tiles, k_tile = tile % p.k_tiles;
    const int64_t corner = expert * p.stride_e + row_tile * MOELORA_PACK * p.stride_n +
                           k_tile * MOELORA_PACK; /* in elements */
    for (int i = threadIdx.x; i < tile_vectors; i += THREADS) {
      const int64_t row = corner + (i >> p.row_shift) * p.stride_n;
      const char *from = (const char *)p.from + row * p.element_bytes;
      ((Vector *)p.to)[tile * tile_vectors + i] = ((const Vector *)from)[i & (row_vectors - 1)];
    }
  }
}

moelora_status moelora_cuda_pack_weights(const moelora_pack_problem *problem,
                                         const moelora_exec *exec) {
  const moelora_weights *w = &problem->w;
  const int64_t bytes = problem->element_bytes;
  pack_sizes p = {};
  p.from = w->data;
  p.to = problem->out;
  p.row_tiles = w->n / MOELORA_PACK;
  p.k_tiles = w->k / MOELORA_PACK;
  p.num_tiles = problem->num_experts * p.row_tiles * p.k_tiles;
  p.stride_e = w->stride_e;
  p.stride_n = w->stride_n;
  const bool aligned = (uintptr_t)w->data % 16 == 0 && (uintptr_t)problem->out % 16 == 0 &&
                       w->stride_e * bytes % 16 == 0 && w->stride_n * bytes % 16 == 0;
  p.element_bytes = (int)bytes;
  p.row_shift = !aligned ? 6 : bytes == 2 ? 3 : 4;
  return aligned      ? launch_grid<pack<uint4>>("pack", p.num_tiles, THREADS, exec, p)
         : bytes == 2 ? launch_grid<pack<uint16_t>>("pack", p.num_tiles, THREADS, exec, p)
                      : launch_grid<pack<uint32_t>>("pack", p.num_tiles, THREADS, exec, p);
}
