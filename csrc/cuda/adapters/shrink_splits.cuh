/* The depth of a shrink shared by the CTAs of a cluster: each adds up what its own warps found,
 * then reads the others' sums in the order of the depth. Before sm_90 there is one CTA. */
#ifndef MOELORA_CUDA_SHRINK_SPLITS_CUH
#define MOELORA_CUDA_SHRINK_SPLITS_CUH

#include "cuda/ptx/hopper.cuh"
#include "cuda/adapters/shrink_product.cuh"

/* CTAs of a cluster, and which of them this is. */
__device__ __forceinline__ int num_splits(int splits) {
#if __CUDA_ARCH__ >= 900
  return splits;
#else
  return 1;
#endif
}
__device__ __forceinline__ int own_split() {
#if __CUDA_ARCH__ >= 900
  return (int)cluster_rank();
#else
  return 0;
#endif
}

/* All threads wait for the whole cluster. */
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  cluster_sync();
#endif
}

/* Eight sums of CTA `rank` of the cluster. */
__device__ __forceinline__ void add_remote(float (&sum)[8], const float *here, int rank) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    const float4 v = load_cluster_16(shared_address(here + j), rank);
    sum[j] += v.x, sum[j + 1] += v.y, sum[j + 2] += v.z, sum[j + 3] += v.w;
  }
#endif
}

/* What the warps of this CTA found for `tokens` of them, added up for the others. All threads come
 * here. */
template <class S>
__device__ __forceinline__ void share_sums(Sums<S> &sums, int tokens, int thread) {
  constexpr int RANK_VECTORS = S::RANKS / 8;
  for (int i = thread; i < tokens * RANK_VECTORS; i += S::THREADS) {
    float sum[8] = {};
    add_spans<S>(sum, sums, i / RANK_VECTORS, i % RANK_VECTORS * 8);
    float4 *to = (float4 *)&sums[0][i / RANK_VECTORS][i % RANK_VECTORS * 8];
    to[0] = {sum[0], sum[1], sum[2], sum[3]};
    to[1] = {sum[4], sum[5], sum[6], sum[7]};
  }
  sync_cluster();
}

/* Eight columns of a token over the whole depth; of several splits, behind share_sums(). */
template <class S>
__device__ __forceinline__ void add_splits(float (&sum)[8], const Sums<S> &sums, int token,
                                           int column, int splits) {
  if (splits == 1)
    add_spans<S>(sum, sums, token, column);
  for (int rank = 0; splits > 1 && rank < splits; rank++)
    add_remote(sum, &sums[0][token][column], rank);
}

#endif
