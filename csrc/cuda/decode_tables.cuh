/* What every CTA of the decode kernel finds out for itself from ids, in shared memory.
 *
 * A unit is an expert that some token chose; a segment is the tokens of a unit that carry one
 * adapter. Units go by the first row that names them, segments by unit and then by first token. A
 * token that names an expert twice belongs to the unit once, with both weights. */
#ifndef MOELORA_CUDA_DECODE_TABLES_CUH
#define MOELORA_CUDA_DECODE_TABLES_CUH

#include "cuda/align.cuh"

namespace decode {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokens = MOELORA_DECODE_TOKENS, kRows = MOELORA_DECODE_ROWS;
static_assert(kTokens == 8, "tokens are the columns of one mma");
static_assert(kRows == 64, "a warp looks after rows, units or segments two by two");

/* What a CTA works on, in this order. */
enum Kind { SHRINK13, W13, SHRINK2, W2, DONE };

struct Tables {
  int32_t units, segments;
  int32_t items[DONE]; // of each kind, in the whole grid
  int32_t expert[kRows];
  int32_t row[kRows][kTokens];  // flat row of a unit's token, -1: not in this unit
  float weight[kRows][kTokens]; // routing weight
  int32_t first_segment[kRows + 1];
  int32_t segment_unit[kRows], segment_adapter[kRows], segment_rank[kRows]; // rank: as told
  uint32_t segment_tokens[kRows];                                           // bit of each token
  int32_t shrinks_end[2][kRows]; // shrink items up to and with a segment, of w13 and of w2
  int32_t adapter[kTokens], rank[kTokens];
  float scaling[kTokens];
  // while being built
  int32_t row_expert[kRows];
  float row_weight[kRows];
  uint32_t leads[kRows * kTokens / 32]; // bit of each row or cell that comes first
};

__device__ __forceinline__ int64_t load_id(const moelora_ids &ids, int64_t at) {
  return ids.is_64 ? ((const int64_t *)ids.data)[at] : ((const int32_t *)ids.data)[at];
}

/* True rank in a stack. */
__device__ __forceinline__ int rank_in(const moelora_factors &f, int rank) {
  return f.num_slices ? min(rank, f.max_rank) : 0;
}

/* Bits below `index` in an array of words. */
__device__ __forceinline__ int count_below(const uint32_t *words, int index) {
  int count = 0;
  for (int w = 0; w < index / 32; w++)
    count += __popc(words[w]);
  return count + __popc(words[index / 32] & ((1u << index % 32) - 1));
}

__device__ __forceinline__ void load_rows(Tables &t, const moelora_routes &r) {
  const int thread = threadIdx.x;
  if (thread < kRows) {
    int64_t expert[1] = {-1};
    float weight = 0.f;
    if (thread < r.num_rows) {
      const int64_t token = thread / r.top_k, choice = thread % r.top_k;
      expert[0] = load_id(r.topk_ids, token * r.topk_ids.stride[0] + choice * r.topk_ids.stride[1]);
      weight = r.topk_weights[token * r.topk_weights_stride[0] + choice * r.topk_weights_stride[1]];
      local_experts(r, expert);
    }
    t.row_expert[thread] = (int32_t)expert[0];
    t.row_weight[thread] = weight;
  } else if (thread < kRows + kTokens) {
    const int token = thread - kRows;
    int64_t adapter[1] = {-1};
    int rank = 0;
    float scaling = 1.f;
    if (token < r.num_tokens && r.token_lora_mapping.data) {
      adapter[0] = load_id(r.token_lora_mapping, token * r.token_lora_mapping.stride[0]);
      active_adapters(r, adapter);
      if (adapter[0] >= 0)
        rank = r.lora_ranks ? r.lora_ranks[adapter[0]] : INT32_MAX;
      if (adapter[0] >= 0 && r.lora_scalings)
        scaling = r.lora_scalings[adapter[0]];
    }
    t.adapter[token] = (int32_t)adapter[0];
    t.rank[token] = max(rank, 0);
    t.scaling[token] = scaling;
  }
}

/* Needs the rows; a thread per row. */
__device__ __forceinline__ void find_units(Tables &t) {
  const int thread = threadIdx.x;
  bool first = false;
  if (thread < kRows) {
    const int expert = t.row_expert[thread];
    first = expert >= 0;
    for (int q = 0; q < thread; q++)
      first = first && t.row_expert[q] != expert;
    const uint32_t leads = __ballot_sync(~0u, first);
    if (thread % 32 == 0)
      t.leads[thread / 32] = leads;
  }
  __syncthreads();
  if (first)
    t.expert[count_below(t.leads, thread)] = t.row_expert[thread];
  if (thread == 0)
    t.units = __popc(t.leads[0]) + __popc(t.leads[1]);
  __syncthreads();
}

/* Needs the units; a thread per cell (unit, token), eight neighbouring lanes for a unit. */
__device__ __forceinline__ void find_segments(Tables &t, const moelora_routes &r) {
  const int lane = threadIdx.x % 32, token = threadIdx.x % kTokens;
  const int adapter = t.adapter[token], rank = t.rank[token];
  constexpr int CELLS = kRows * kTokens / kThreads; // of one thread
  uint32_t carriers[CELLS];                         // of this cell's adapter; 0: base or no row
#pragma unroll
  for (int i = 0; i < CELLS; i++) {
    const int cell = i * kThreads + threadIdx.x, unit = cell / kTokens;
    int row = -1;
    float weight = 0.f;
    if (unit < t.units && token < r.num_tokens)
      for (int j = r.top_k - 1; j >= 0; j--)
        if (t.row_expert[token * r.top_k + j] == t.expert[unit]) {
          row = token * r.top_k + j;
          weight += t.row_weight[row];
        }
    t.row[unit][token] = row;
    t.weight[unit][token] = weight;
    carriers[i] = 0;
    const uint32_t carries = __ballot_sync(~0u, row >= 0 && rank > 0) >> (lane & 24) & 255;
    for (int n = 0; n < kTokens; n++)
      if (carries >> n & carries >> token & 1 && t.adapter[n] == adapter)
        carriers[i] |= 1u << n;
    const bool leads = carriers[i] && __ffs(carriers[i]) - 1 == token;
    const uint32_t word = __ballot_sync(~0u, leads);
    if (lane == 0)
      t.leads[cell / 32] = word;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < CELLS; i++) {
    const int cell = i * kThreads + threadIdx.x;
    const int s = count_below(t.leads, cell);
    if (token == 0)
      t.first_segment[cell / kTokens] = s;
    if (t.leads[cell / 32] >> cell % 32 & 1) {
      t.segment_unit[s] = cell / kTokens;
      t.segment_adapter[s] = adapter;
      t.segment_rank[s] = rank;
      t.segment_tokens[s] = carriers[i];
    }
    if (cell == kRows * kTokens - 1)
      t.first_segment[kRows] = t.segments = s + (int)(t.leads[cell / 32] >> 31);
  }
  __syncthreads();
}

/* Needs the segments; warp i sums up the shrink items of projection i. */
__device__ __forceinline__ void count_shrinks(Tables &t, const moelora_factors &f, int projection) {
  const int s = threadIdx.x % 32 * 2;
  int own[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    own[i] = s + i < t.segments ? (rank_in(f, t.segment_rank[s + i]) + 15) / 16 * f.num_slices : 0;
  int sum = own[0] + own[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    sum += threadIdx.x % 32 >= step ? other : 0;
  }
  t.shrinks_end[projection][s] = sum - own[1];
  t.shrinks_end[projection][s + 1] = sum;
  if (threadIdx.x % 32 == 31)
    t.items[projection ? SHRINK2 : SHRINK13] = sum;
}

/* Segment of a shrink item; all lanes of a warp together. */
__device__ __forceinline__ int segment_of(const Tables &t, int projection, int item) {
  const int lane = threadIdx.x % 32;
  const int *end = t.shrinks_end[projection];
  return __popc(__ballot_sync(~0u, end[lane] <= item)) +
         __popc(__ballot_sync(~0u, end[lane + 32] <= item));
}

} // namespace decode

#endif
