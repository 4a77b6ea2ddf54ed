/* Launches the kernel that runs a whole layer, for a few tokens and 4-bit weights. The kernel is in
 * decode/tiles.cuh. A CTA processes work items of four kinds, of the sizes in the last column:
 *
 *   SHRINK13  xa13[p, slice, r] = round(s[l] * sum_k a13[l, e, r, k] x[m, k])        16 ranks
 *   W13       h[p, i] = act(x w13[e]^T + xa13 b13[l, e]^T + bias)    64 outputs, ungated 128
 *   SHRINK2   xa2[p, r] = round(s[l] * sum_i a2[l, e, r, i] h[p, i])                 16 ranks
 *   W2        out[m, n] = sum over p of weight[p] (h w2[e]^T + xa2 b2[l, e]^T + bias)    16 columns
 *
 * Until the epilogue, xa and base products lack a factor of 2^DEFERRED, see
 * moelora_deferred_exponent(). A W2 item covers all active experts (decode/tables.cuh), so the rows
 * before the sum over top_k stay in shared memory. A grid sync separates W13 from what follows; if
 * a projection has adapters, another separates its shrink from its expand. A CTA waits for h before
 * it loads h, but for xa only after the base product to which it adds the delta.
 *
 * Results are bitwise equal to those of separate launches: one warp accumulates a base product in
 * the order of K and then adds the delta; a shrink splits K into the same spans, one per warp; rows
 * are rounded before the sum over top_k.
 *
 * A warp of a shrink loads A directly to operand registers, in chunks of eight blocks of 32
 * elements of K; it loads the next chunk in halves as registers become free. In a block, lane 4g +
 * c loads elements 8c to 8c + 7 of rows g and g + 8 and of token g; lanes exchange them so that
 * each of two mma has 16 consecutive elements. d[2i + j] is row g + 8i, token 2c + j.
 *
 * Tokens are columns of the mma, and an adapter's delta is added to its tokens only. So a NaN in
 * one token, or in its factors, never affects another token. */
#include "cuda/decode/grid.cuh"
#include "cuda/launch/kernel_launch.cuh"
#include "cuda/variant_ids.h"

namespace decode {
namespace {

struct DecodeLayout {
  uint32_t *digests;
  RoutingSnapshot *snapshot;
  uint16_t *h, *xa[2];
  size_t bytes;
};

DecodeLayout lay_out(const moelora_experts_problem *p, const moelora_exec *exec) {
  moelora_arena arena = moelora_workspace_of(exec);
  const size_t rows = (size_t)p->routes.num_rows;
  const size_t ctas = (size_t)kMaxResident * (size_t)moelora_cuda_num_sms(exec->device_index);
  DecodeLayout l;
  take_array(&arena, &l.digests, kCopies * digest_pitch(ctas));
  take_array(&arena, &l.snapshot, 1);
  take_array(&arena, &l.h, moelora_times(rows, (size_t)p->intermediate));
  for (int i = 0; i < 2; i++) {
    const size_t columns = (size_t)moelora_padded_columns(i ? &p->w2_lora : &p->w13_lora);
    take_array(&arena, &l.xa[i], moelora_times(rows, columns));
  }
  l.bytes = arena.used;
  return l;
}

} // namespace

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
  const int64_t outputs = 16 * kWarps / (params.gated ? 2 : 1); // per W13 item
  params.tiles13 = (int32_t)((p.intermediate + outputs - 1) / outputs);
  params.max_shrinks13 =
      (int32_t)(p.routes.num_rows * p.w13_lora.num_slices * ((p.w13_lora.max_rank + 15) / 16));
  params.by_tiles13 = moelora_divisor_of((uint32_t)params.tiles13);
  params.digests = l.digests;
  params.snapshot = l.snapshot;
  params.h = l.h;
  for (int i = 0; i < 2; i++) {
    params.xa[i] = l.xa[i];
    params.a_vectors[i] = plan->projection[i].a_vectors;
    params.b_vectors[i] = plan->projection[i].b_vectors;
    params.span_blocks[i] =
        moelora_shrink_span(i ? p.intermediate : p.hidden, plan->projection[i].a_vectors) /
        kBlockDepth;
  }
  const int64_t active_experts =
      p.routes.num_rows < p.routes.num_experts ? p.routes.num_rows : p.routes.num_experts;
  const int64_t columns = (p.hidden + 15) / 16;
  const int64_t items =
      active_experts * params.tiles13 > columns ? active_experts * params.tiles13 : columns;
  const int64_t work = items < kMaxCtas ? items : kMaxCtas;
  switch (plan->variant->id) {
#define MOELORA_CUDA_DECODE(STEM, FORMAT, FAMILY)                                                  \
  case CUDA_decode_bf16_##STEM:                                                                    \
  case CUDA_decode_f16_##STEM:                                                                     \
    return launch_##FORMAT(params, work, exec, fits);
#include "cuda/variants.inc"
  }
  return moelora_no_kernel(plan->variant->name, "is no whole layer");
}
