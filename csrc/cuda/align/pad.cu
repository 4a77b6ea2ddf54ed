/* Pads sorted rows into blocks of one (expert, adapter) pair each: the last step of UNIFORM
 * alignment if there are too many pairs to count in shared memory.
 *
 * A single CTA processes the rows in tiles. A segment is a run of rows of one pair. If row i is in
 * a segment that begins at row f, it opens a block if (i - f) % block_size == 0. A row is in the
 * block that was opened last. The work is linear in rows: two scans per tile, no atomics. */
#include "cuda/align/align.cuh"
#include "cuda/launch/kernel_launch.cuh"

static __device__ __forceinline__ bool begins_segment(const align_pad &p, int32_t i) {
  return i == 0 || __ldcg(p.expert + i) != __ldcg(p.expert + i - 1) ||
         __ldcg(p.adapter + i) != __ldcg(p.adapter + i - 1);
}

/* Returns the maximum of `value` over this and all lower threads. Has one barrier. */
static __device__ __forceinline__ int32_t block_max_so_far(int32_t value, int32_t *warp_max) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int32_t other = __shfl_up_sync(~0u, value, step);
    value = lane >= step ? max(value, other) : value;
  }
  if (lane == 31)
    warp_max[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; w++)
    value = max(value, warp_max[w]);
  return value;
}

static __global__ void __launch_bounds__(ALIGN_THREADS)
    align_pad_pairs(const __grid_constant__ align_pad p) {
  __shared__ int32_t warp_max[ALIGN_WARPS], warp_sum[ALIGN_WARPS], last_begin;
  const int32_t size = (int32_t)p.out.block_size.value;
  wait_for_previous_kernel();

  const int32_t count = __ldcg(p.count);
  int32_t carried_begin = 0, num_blocks = 0;
  for (int32_t tile = 0; tile < count; tile += ALIGN_THREADS) {
    const int32_t i = tile + (int32_t)threadIdx.x;
    const bool valid = i < count;
    int32_t begin = valid && begins_segment(p, i) ? i : carried_begin;
    begin = block_max_so_far(begin, warp_max);
    const int32_t offset = (i - begin) % size;
    int32_t opened;
    const int32_t opens = valid && offset == 0;
    const int32_t block = num_blocks + block_sum_before(opens, warp_sum, &opened) + opens - 1;
    if (valid) {
      const int64_t position = (int64_t)block * size + offset;
      p.out.sorted_ids[position] = __ldcg(p.row + i);
      if (opens) {
        p.out.expert_ids[block] = __ldcg(p.expert + i);
        p.out.block_loras[block] = __ldcg(p.adapter + i);
      }
      if (i == count - 1 || begins_segment(p, i + 1))
        for (int32_t rest = 1; rest < size - offset; rest++)
          write_padding(p.out, position + rest);
    }
    if (threadIdx.x == ALIGN_THREADS - 1)
      last_begin = begin;
    __syncthreads();
    carried_begin = last_begin;
    num_blocks += opened;
  }

  const int64_t rows = (int64_t)num_blocks * size;
  for (int64_t i = rows + threadIdx.x; i < p.out.max_blocks * size; i += ALIGN_THREADS)
    write_padding(p.out, i);
  for (int64_t b = num_blocks + threadIdx.x; b < p.out.max_blocks; b += ALIGN_THREADS)
    p.out.expert_ids[b] = p.out.block_loras[b] = -1;
  if (threadIdx.x == 0)
    *p.out.num_post = (int32_t)rows;
}

moelora_status align_launch_pad(const align_pad &pad, const moelora_exec *exec) {
  return launch_blocks<align_pad_pairs>("align_pad", 1, ALIGN_THREADS, 0, exec, pad);
}
