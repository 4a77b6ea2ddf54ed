/* Tables that every CTA of the decode kernel builds from ids, in shared memory.
 *
 * A CTA loads the ids, ranks and scalings once, into a snapshot, and builds its tables from that.
 * Other streams may change them during the call, so the CTAs compare digests of their snapshots
 * after a grid sync; if two differ, all CTAs restart from the snapshot of the first CTA.
 *
 * An active expert is an expert that at least one token chooses; a segment is the tokens of an
 * active expert with one adapter. Active experts are ordered by the first row that names them,
 * segments by active expert and then by first token. If a token names an expert twice, only the
 * first of these rows is computed; the sum over top_k adds it twice. */
#ifndef MOELORA_CUDA_DECODE_TABLES_CUH
#define MOELORA_CUDA_DECODE_TABLES_CUH

#include "cuda/launch/routes.cuh"
#include "cuda/launch/warp.cuh"

namespace decode {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTokens = MOELORA_DECODE_TOKENS, kRows = MOELORA_DECODE_ROWS;
static_assert(kTokens == 8, "tokens are the columns of one mma");
static_assert(kRows == 64, "a warp looks after rows, active experts or segments two by two");

/* Maximum number of CTAs: each thread compares the digests of up to four CTAs. */
constexpr int kMaxCtas = 4 * kThreads;
/* Number of copies of the digests. CTA i loads copy i % kCopies: fewer CTAs load the same line. */
constexpr int kCopies = 16;

/* Returns the number of words from one copy of the digests to the next. */
__host__ __device__ inline size_t digest_pitch(size_t ctas) {
  return (ctas + 31) / 32 * 32;
}

/* Kinds of work items, in execution order. */
enum Kind { SHRINK13, W13, SHRINK2, W2, DONE };

/* What a CTA has loaded from the caller's tables; rank 0: no adapter. */
struct RoutingSnapshot {
  int32_t expert[kRows]; // local expert of each row; -1: skipped
  int32_t adapter[kTokens], rank[kTokens];
  float scaling[kTokens];
};
constexpr int kSnapshotWords = sizeof(RoutingSnapshot) / 4;

struct Tables {
  RoutingSnapshot routing;
  uint32_t digest; // digest of the snapshot
  bool mismatch;   // whether another CTA has a different digest
  bool uses_first; // whether all CTAs restarted from the first CTA's snapshot
  int32_t active_experts, segments;
  int32_t items[DONE];         // number of items of each kind, over the whole grid
  int32_t expert[kRows];       // id of each active expert
  int32_t row[kRows][kTokens]; // flat row of an active expert's token, -1: none
  int32_t first_row[kRows];    // first flat row with the same expert and token; -1: skipped
  float row_weight[kRows];     // routing weight
  int32_t first_segment[kRows + 1];
  int32_t segment_active[kRows], segment_adapter[kRows], segment_rank[kRows]; // may exceed max_rank
  uint32_t segment_tokens[kRows];                                             // bit mask of tokens
  int32_t shrinks_end[2][kRows]; // [projection] shrink items of this and all lower segments
  // Used to build the tables: bit (active expert, token) is set if the token begins a segment.
  uint32_t first_mask[kRows * kTokens / 32];
};

/* Returns the true rank, limited to max_rank; 0 without factors. */
__device__ __forceinline__ int rank_in(const moelora_factors &f, int rank) {
  return f.num_slices ? min(rank, f.max_rank) : 0;
}

/* Returns the number of set bits in words [0, end), end <= 32. Called by all lanes of a warp. */
__device__ __forceinline__ int count_bits(const uint32_t *words, int end) {
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < end ? __popc(words[lane]) : 0);
}

/* Lists the active experts. Called by one warp; a lane handles two rows. */
__device__ __forceinline__ void find_active_experts(Tables &t, const moelora_routes &r,
                                                    const RoutingSnapshot *snapshot) {
  const int lane = threadIdx.x % 32;
  int64_t expert[2] = {-1, -1};
  float weight[2] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane + 32 * i;
    if (row < r.num_rows) {
      const int token = row / r.top_k, choice = row % r.top_k;
      expert[i] = snapshot ? snapshot->expert[row]
                           : load_id(r.topk_ids,
                                     token * r.topk_ids.stride[0] + choice * r.topk_ids.stride[1]);
      weight[i] =
          r.topk_weights[token * r.topk_weights_stride[0] + choice * r.topk_weights_stride[1]];
    }
  }
  if (!snapshot)
    local_experts(r, expert);
  int active_experts = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    t.routing.expert[lane + 32 * i] = (int32_t)expert[i];
    t.row_weight[lane + 32 * i] = weight[i];
    const uint32_t same = __match_any_sync(~0u, (int)expert[i]);
    bool first = expert[i] >= 0 && __ffs((int)same) - 1 == lane;
    if (i == 1 && r.num_rows > 32)
#pragma unroll 8
      for (int q = 0; q < 32; q++)
        first = __shfl_sync(~0u, (int)expert[0], q) != (int)expert[1] && first;
    const uint32_t first_mask = __ballot_sync(~0u, first);
    if (first)
      t.expert[active_experts + __popc(first_mask & ((1u << lane) - 1))] = (int32_t)expert[i];
    active_experts += __popc(first_mask);
  }
  if (lane == 0)
    t.active_experts = active_experts;
}

/* Looks up the adapter of a token. Called by one thread per token. */
__device__ __forceinline__ void find_adapter(Tables &t, const moelora_routes &r, int token,
                                             const RoutingSnapshot *snapshot) {
  if (snapshot) {
    t.routing.adapter[token] = snapshot->adapter[token];
    t.routing.rank[token] = snapshot->rank[token];
    t.routing.scaling[token] = snapshot->scaling[token];
    return;
  }
  int64_t adapter = -1;
  int rank = INT32_MAX;
  float scaling = 1.f;
  if (token < r.num_tokens)
    adapter = load_id(r.token_lora_mapping, token * r.token_lora_mapping.stride[0]);
  if (inside(adapter, r.max_loras)) {
    bool enabled = true; // tested last, so that all loads are in flight together
    if (r.adapter_enabled)
      enabled = r.adapter_enabled_bytes == 1 ? ((const uint8_t *)r.adapter_enabled)[adapter] != 0
                                             : ((const int32_t *)r.adapter_enabled)[adapter] != 0;
    if (r.lora_ranks)
      rank = r.lora_ranks[adapter];
    if (r.lora_scalings)
      scaling = r.lora_scalings[adapter];
    rank = enabled ? rank : 0;
  } else {
    rank = 0;
  }
  t.routing.adapter[token] = (int32_t)adapter;
  t.routing.rank[token] = max(rank, 0);
  t.routing.scaling[token] = scaling;
}

constexpr int kCells = kRows * kTokens / kThreads; // (active expert, token) pairs per thread

/* Fills in `row` and `first_row`, once the active experts are known. */
__device__ __forceinline__ void find_rows(Tables &t, const moelora_routes &r) {
  const int token = threadIdx.x % kTokens;
#pragma unroll
  for (int i = 0; i < kCells; i++) {
    const int active = (i * kThreads + (int)threadIdx.x) / kTokens;
    int row = -1;
    if (active < t.active_experts && token < r.num_tokens)
#pragma unroll 4
      for (int j = 0; j < r.top_k; j++)
        if (t.routing.expert[token * r.top_k + j] == t.expert[active]) {
          row = row < 0 ? token * r.top_k + j : row;
          t.first_row[token * r.top_k + j] = row;
        }
    t.row[active][token] = row;
  }
}

/* Lists the segments, once adapters and this thread's rows are known. Eight consecutive lanes
 * handle an active expert. */
__device__ __forceinline__ void find_segments(Tables &t) {
  const int lane = threadIdx.x % 32, token = threadIdx.x % kTokens;
  const int adapter = t.routing.adapter[token], rank = t.routing.rank[token];
  uint32_t carriers[kCells]; // bit mask of tokens with this cell's adapter; 0: no adapter or no row
#pragma unroll
  for (int i = 0; i < kCells; i++) {
    const int cell = i * kThreads + threadIdx.x;
    const bool carries = t.row[cell / kTokens][token] >= 0 && rank > 0;
    const uint32_t same = __match_any_sync(~0u, carries ? adapter : -1);
    carriers[i] = carries ? same >> (lane & 24) & 255 : 0;
    const uint32_t first_mask = __ballot_sync(~0u, __ffs((int)carriers[i]) - 1 == token);
    if (lane == 0)
      t.first_mask[cell / 32] = first_mask;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCells; i++) {
    const int cell = i * kThreads + threadIdx.x;
    const uint32_t first_mask = t.first_mask[cell / 32];
    const int s = count_bits(t.first_mask, cell / 32) + __popc(first_mask & ((1u << lane) - 1));
    if (token == 0)
      t.first_segment[cell / kTokens] = s;
    if (first_mask >> lane & 1) {
      t.segment_active[s] = cell / kTokens;
      t.segment_adapter[s] = adapter;
      t.segment_rank[s] = rank;
      t.segment_tokens[s] = carriers[i];
    }
    if (cell == kRows * kTokens - 1)
      t.first_segment[kRows] = t.segments = s + (int)(first_mask >> 31);
  }
  __syncthreads();
}

/* Counts the shrink items of a projection, once the segments are known. One warp calls it. */
__device__ __forceinline__ void count_shrinks(Tables &t, const moelora_factors &f, int projection) {
  const int s = threadIdx.x % 32 * 2;
  int items[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    items[i] =
        s + i < t.segments ? (rank_in(f, t.segment_rank[s + i]) + 15) / 16 * f.num_slices : 0;
  const int sum = warp_inclusive_sum(items[0] + items[1]);
  t.shrinks_end[projection][s] = sum - items[1];
  t.shrinks_end[projection][s + 1] = sum;
  if (threadIdx.x % 32 == 31)
    t.items[projection ? SHRINK2 : SHRINK13] = sum;
}

/* Returns the segment of a shrink item. Called by all lanes of a warp. */
__device__ __forceinline__ int segment_of(const Tables &t, int projection, int item) {
  const int lane = threadIdx.x % 32;
  const int *end = t.shrinks_end[projection];
  return __popc(__ballot_sync(~0u, end[lane] <= item)) +
         __popc(__ballot_sync(~0u, end[lane + 32] <= item));
}

/* Writes the digest of this CTA's snapshot to all copies of `digests`; the first CTA also writes
 * its snapshot to `first`. Called by one warp. The digest is the sum over all words of the
 * finalizer of MurmurHash3, applied to word i xor i * 0x9e3779b9. */
__device__ __forceinline__ void publish_snapshot(Tables &t, uint32_t *digests,
                                                 RoutingSnapshot *first) {
  const int lane = threadIdx.x % 32;
  uint32_t digest = 0;
  for (int i = lane; i < kSnapshotWords; i += 32) {
    const uint32_t word = ((const uint32_t *)&t.routing)[i];
    uint32_t v = word ^ (uint32_t)i * 0x9e3779b9u;
    v = (v ^ v >> 16) * 0x85ebca6bu;
    v = (v ^ v >> 13) * 0xc2b2ae35u;
    digest += v ^ v >> 16;
    if (blockIdx.x == 0)
      ((uint32_t *)first)[i] = word;
  }
  digest = __reduce_add_sync(~0u, digest);
  if (lane < kCopies)
    digests[lane * digest_pitch(gridDim.x) + blockIdx.x] = digest;
  if (lane == 0)
    t.digest = digest;
}

/* Sets `mismatch` if the digest of any CTA differs from this CTA's. A thread compares four. All
 * CTAs must have published theirs. */
__device__ __forceinline__ void compare_snapshots(Tables &t, const uint32_t *digests) {
  const int at = 4 * (int)threadIdx.x, ctas = gridDim.x;
  if (at >= ctas)
    return;
  const uint4 four =
      __ldcg((const uint4 *)(digests + blockIdx.x % kCopies * digest_pitch(gridDim.x) + at));
  const uint32_t digest = t.digest;
  if (four.x != digest || (at + 1 < ctas && four.y != digest) ||
      (at + 2 < ctas && four.z != digest) || (at + 3 < ctas && four.w != digest))
    t.mismatch = true;
}

/* Builds all tables, for `tiles13` W13 items per active expert and `columns` W2 items, from
 * `snapshot`; if that is NULL, the CTA loads its own. */
__device__ __forceinline__ void build_tables(Tables &t, const moelora_experts_problem &p,
                                             int tiles13, int columns,
                                             const RoutingSnapshot *snapshot) {
  const bool lora =
      p.routes.token_lora_mapping.data && p.w13_lora.num_slices + p.w2_lora.num_slices > 0;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0)
    find_active_experts(t, p.routes, snapshot);
  else if (warp == 1 && lane < kTokens && lora)
    find_adapter(t, p.routes, lane, snapshot);
  else if (warp == 1 && lane < kTokens)
    t.routing.adapter[lane] = t.routing.rank[lane] = 0, t.routing.scaling[lane] = 0.f;
  else if (warp >= kWarps - kRows / 32)
    t.first_row[threadIdx.x - kThreads + kRows] = -1;
  __syncthreads();
  find_rows(t, p.routes);
  if (threadIdx.x == 0) {
    t.mismatch = false;
    t.items[W13] = t.active_experts * tiles13;
    t.items[W2] = columns;
    if (!lora)
      t.items[SHRINK13] = t.items[SHRINK2] = t.segments = 0;
  }
  if (lora) {
    find_segments(t);
    if (warp < 2)
      count_shrinks(t, warp ? p.w2_lora : p.w13_lora, warp);
  }
  __syncthreads();
}

} // namespace decode

#endif
