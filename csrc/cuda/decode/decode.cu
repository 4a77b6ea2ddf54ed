/* The whole layer in one launch, for a handful of tokens: weights stream from memory straight into
 * the operands of mma, and the grid waits for itself instead of for a next launch.
 *
 *   SHRINK13  xa13[p, slice, r] = round(s[l] * sum_k a13[l, e, r, k] x[m, k])        16 ranks
 *   W13       h[p, i] = act(x w13[e]^T + xa13 b13[l, e]^T + bias)    8 outputs, ungated 16
 *   SHRINK2   xa2[p, r] = round(s[l] * sum_i a2[l, e, r, i] h[p, i])                 16 ranks
 *   W2        out[m, n] = sum over p of weight[p] (h w2[e]^T + xa2 b2[l, e]^T + bias)    16 columns
 *
 * are the four kinds of items; those of W2 go over all active experts (see decode/tables.cuh), so
 * that there is no z in memory and no launch for its sum. There are three grid syncs: xa13 is
 * ready, h is ready, xa2 is ready. A CTA arrives when it has no more items that write, one that
 * cannot have any at once, and waits as late as it can: a base product comes before the wait for
 * the shrink that it is added to.
 *
 * An item is 16 weight rows by the 8 tokens, its depth in blocks of 32. One of W13 belongs to a
 * warp. The others go to a CTA: of W2 a warp has the products with every eighth active expert, of a
 * shrink a span of the depth; what they find meets in shared memory. Tokens lie there, too, first x
 * and then h, where they fit.
 *
 * All sums are those of several launches, to the bit: a product with a weight has one accumulator,
 * in the order of the depth, and the adapter behind it; a shrink adds up as many spans; what waits
 * for the sum over top_k is rounded.
 *
 * A warp multiplies k-spans: neighbouring blocks of one active expert, in chunks of eight. The next
 * chunk, be it of the next span or item, is loaded half by half as registers become free. In a
 * block lane (g, c) = (lane / 4, lane % 4) loads elements 8c to 8c + 7 of weight rows g and g + 8
 * and of token g, and exchanges them for what two products of 16 neighbours take. So d[2i + j] is
 * row g + 8i, token 2c + j. Gated, rows g are gate and rows g + 8 the matching up.
 *
 * Tokens are columns, and columns do not mix: a token takes only what its experts and its adapter
 * add, whatever the neighbours' factors hold. */
#include "cuda/decode/epilogue.cuh"
#include "cuda/decode/expand.cuh"
#include "cuda/decode/grid.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/variant_ids.h"

namespace decode {
namespace {

/* ---- the kernel ---- */

/* Cold state: what a thread asks for now and then, for registers are scarce. */
struct ColdState {
  int projection;
  WorkItem item; // at hand; of a shrink, the tile is its index
  float d[4];    // of a product
  bool more;     // products of it
  bool turn;     // of the partial sums
  WorkIterator work;
  OperandRows<2> next; // of the prefetch buffer
  GridSync sync;
};

/* d = the product that `work` is at and moves on from. */
template <class T>
__device__ __forceinline__ void
multiply_next(const DecodeParams &p, const Tables &t, WorkIterator &work, const TokenRows &tokens,
              PrefetchBuffer &buffer, ColdState &cold, float (&d)[4]) {
  const int kind = work.kind;
  const bool vectors = has_vectors(p, kind);
  const KSpan span = span_of(p, t, work);
  const OperandRows<1> x = tokens_of(p, t, kind, tokens, span);
#pragma unroll
  for (int q = 0; q < 4; q++)
    d[q] = 0.f;
  if (!vectors)
    multiply_elements<T>(buffer.next, x, d);
  cold.more = advance(p, t, work);
  multiply_span<T>(p, t, work, vectors ? span.blocks : 0, {{x.row[0]}, vectors ? x.there : 0},
                   buffer, d);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident)
    decode_layer(const __grid_constant__ DecodeParams p) {
  __shared__ Tables t;
  __shared__ Partials partials;
  __shared__ ColdState states[kThreads];
  extern __shared__ __align__(16) uint16_t staged[];
  __shared__ TokenRows tokens;
  ColdState &cold = states[threadIdx.x];
  cold.sync.waits = cold.turn = false;
  if (threadIdx.x == 0)
    t.agreed = false;
  begin_layer<false>(p, t, tokens, staged, cold.sync, nullptr);

  PrefetchBuffer buffer;
#pragma unroll 1
  for (cold.projection = 0; cold.projection < 2; cold.projection++) {
    const int projection = cold.projection;
    if (projection)
      cold.sync.shrinks = p.p.w2_lora.num_slices > 0;
    WorkIterator work = {projection ? SHRINK2 : SHRINK13, 0, 0};
    work.index = first_item(t, work.kind);
    open_item(p, t, work);
    start(p, t, work, buffer);
    if (projection) {
      prefetch_next(buffer);
      wait(cold.sync);
      if (is_there(t, work)) {
        const TokenRows h =
            stage_tokens<false>(p.h, p.p.intermediate, p.p.routes.num_rows, (int)p.p.intermediate,
                                t.lead, staged, kStagedBytes);
        if (threadIdx.x == 0)
          tokens = h;
      }
      if (!t.agreed)
        compare_readings(t, p.digests);
      copy_async_wait<0>();
      __syncthreads();
      if (t.differs) { /* the same in all CTAs, none of which has written to out yet */
        begin_again<false>(p, t, tokens, staged, cold.sync);
        cold.projection = -1;
        continue;
      }
    }
    /* Every warp has a turn behind the shrinks, if an empty one, in which it arrives and waits. */
#pragma unroll 1
    for (;;) {
      cold.item = item_of(p, work.kind, work.index);
      if (!is_shrink(work.kind) && cold.sync.shrinks) {
        cold.sync.shrinks = false;
        arrive(cold.sync);
      }
      if (!is_there(t, work)) {
        wait(cold.sync);
        break;
      }
      do {
        float d[4];
        if (work.kind == W2)
          cold.item.active = work.part;
        prefetch_slabs<false>(p, t, cold.item);
        multiply_next<T>(p, t, work, tokens, buffer, cold, d);
        cold.next = buffer.next;
        if (is_shrink(cold.item.kind)) {
          store_partial(partials.sums[cold.turn], d);
        } else {
          cold.work = work;
          memcpy(cold.d, d, sizeof d);
          wait(cold.sync);
          expand<T, false>(p, t, cold.item, cold.d);
          memcpy(d, cold.d, sizeof d);
          if (cold.item.kind == W13)
            epilogue_w13<T>(p, t, cold.item, d);
          else if (cold.item.active < t.active_experts)
            store_rows<T, 0>(p, t, cold.item, d, partials.sums[cold.turn]);
          work = cold.work;
        }
        buffer.next = cold.next;
      } while (cold.more);
      if (cold.item.kind != W13) {
        const float *partial = partials.sums[cold.turn];
        cold.turn = !cold.turn;
        cold.next = buffer.next;
        __syncthreads();
        if (is_shrink(cold.item.kind))
          epilogue_shrink<T, 0>(p, t, cold.item, partial);
        else
          epilogue_sum<T>(p, t, cold.item, partial);
        buffer.next = cold.next;
      }
    }
    if (!cold.projection)
      arrive(cold.sync);
  }
}

struct DecodeLayout {
  uint32_t *digests;
  Reading *reading;
  uint16_t *h, *xa[2];
  size_t bytes;
};

DecodeLayout lay_out(const moelora_experts_problem *p, const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  const size_t rows = (size_t)p->routes.num_rows;
  const size_t ctas = (size_t)kMostResident * (size_t)moelora_cuda_num_sms(exec->device_index);
  DecodeLayout l;
  l.digests = (uint32_t *)moelora_take(&arena, sizeof(uint32_t) * kCopies * digest_pitch(ctas));
  l.reading = (Reading *)moelora_take(&arena, sizeof(Reading));
  const size_t inner = (size_t)p->intermediate;
  l.h = (uint16_t *)moelora_take_array(&arena, moelora_times(rows, inner), 2);
  for (int i = 0; i < 2; i++) {
    const size_t columns = (size_t)moelora_padded_columns(i ? &p->w2_lora : &p->w13_lora);
    l.xa[i] = (uint16_t *)moelora_take_array(&arena, moelora_times(rows, columns), 2);
  }
  l.bytes = arena.used;
  return l;
}

} // namespace

moelora_status launch_NATIVE(const DecodeParams &params, int64_t work, const moelora_exec *exec,
                             bool *fits) {
  return params.p.dtype == MOELORA_BF16
             ? launch_cooperative<decode_layer<__nv_bfloat16>>(
                   "decode_layer", work, kThreads, kStagedBytes, kResident, exec, fits, params)
             : launch_cooperative<decode_layer<__half>>(
                   "decode_layer", work, kThreads, kStagedBytes, kResident, exec, fits, params);
}

} // namespace decode

size_t moelora_cuda_decode_workspace(const moelora_experts_problem *problem,
                                     const moelora_exec *exec) {
  return decode::lay_out(problem, exec).bytes;
}

moelora_status moelora_cuda_decode(const moelora_experts_problem *problem,
                                   const moelora_experts_plan *plan, const moelora_exec *exec,
                                   bool *fits) {
  using namespace decode;
  const moelora_experts_problem &p = *problem;
  const DecodeLayout l = lay_out(problem, exec);
  DecodeParams params = {};
  params.p = p;
  params.gated = moelora_is_gated(p.activation.kind);
  params.interleaved = moelora_is_interleaved(p.activation.kind);
  /* Of an item, a warp's or, of weights in tiles, a CTA's. */
  const int64_t outputs =
      (moelora_is_quantized(p.w13.format) ? 16 * kWarps : 16) / (params.gated ? 2 : 1);
  params.tiles13 = (int32_t)((p.intermediate + outputs - 1) / outputs);
  params.most_shrinks13 =
      (int32_t)(p.routes.num_rows * p.w13_lora.num_slices * ((p.w13_lora.max_rank + 15) / 16));
  params.by_tiles13 = moelora_divisor_of((uint32_t)params.tiles13);
  params.digests = l.digests;
  params.reading = l.reading;
  params.h = l.h;
  for (int i = 0; i < 2; i++) {
    params.xa[i] = l.xa[i];
    params.a_vectors[i] = plan->projection[i].a_vectors;
    params.b_vectors[i] = plan->projection[i].b_vectors;
    params.span_blocks[i] = moelora_shrink_span(i ? p.intermediate : p.hidden,
                                                plan->projection[i].a_vectors) /
                            kBlockDepth;
  }
  const int64_t active_experts =
      p.routes.num_rows < p.routes.num_experts ? p.routes.num_rows : p.routes.num_experts;
  const int64_t columns = (p.hidden + 15) / 16;
  const int64_t items =
      active_experts * params.tiles13 > columns ? active_experts * params.tiles13 : columns;
  const int64_t work = items < kMostCtas ? items : kMostCtas;
  switch (plan->variant->id) {
#define MOELORA_CUDA_DECODE(NAME, DTYPE, FORMAT, FAMILY)                                           \
  case CUDA_##NAME:                                                                                \
    return launch_##FORMAT(params, work, exec, fits);
#include "cuda/variants.inc"
  }
  return moelora_no_kernel(plan->variant->name, "is no whole layer");
}
