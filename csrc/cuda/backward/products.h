/* Products of a backward with weights as they lie, y W where the forward has x W^T:
 *
 *   v[p]  = dout[p / top_k] W2[e] + yb2[p] A2[l, e]      and through the activation
 *   dz[p] = dgu[p] W13[e] + yb13[p] A13[l, e]            all slices of A are more depth
 *
 * and the shrinks before them, yb = s y B. They run on one alignment of rows, as the forward's. */
#ifndef MOELORA_CUDA_BACKWARD_PRODUCTS_H
#define MOELORA_CUDA_BACKWARD_PRODUCTS_H

#include "cuda/launch/launch.h"

extern "C" {

/* Outputs of which a warp adds up v h by itself; the sum over them is one part of dt. */
#define MOELORA_DT_OUTPUTS 16

/* The derivative of a gated activation, which is g' q (u' + c) of clamped g' and u', with q =
 * sigmoid(g' (a + b g'^2)) and d = a + 3 b g'^2:
 *
 *   dg = q (1 + g' d (1 - q)) (u' + c) dh   du = g' q dh
 *
 * A clamp passes the gradient where it changes nothing, its ends included. */
typedef struct moelora_activation_gradient {
  float a, b, c, limit;
  float saturated; /* |g'| from which on q is 0 or 1 to float32 */
  bool gated;      /* else it is relu2 */
} moelora_activation_gradient;

/* What becomes of v:
 *
 *   h = act(gate_up), dgu = act'(gate_up) t v, both rounded, and the parts of dt = <v, h> */
typedef struct moelora_through_activation {
  const void *gate_up; /* [P, N] by flat row */
  int64_t gate_up_stride;
  void *h;   /* [position, I]; NULL: not wanted */
  void *dgu; /* [position, N] */
  float *dt; /* [position, dt_parts] */
  int32_t dt_parts;
  moelora_activation_gradient activation;
} moelora_through_activation;

/* A projection of which `tokens` are rows of y, and `weights` [E, tokens.k, n_out]. adapters.xa is
 * yb, and of adapters.lora the factors A count. It writes epilogue.out, or what through is about,
 * of which n_out is I; blocks.weights are t, NULL: 1. */
struct moelora_back_launch : moelora_gemm_launch {
  moelora_through_activation through; // dgu NULL: out
};

/* shrink.cu: yb[position, slice * xa_slice + r] = round(s[l] y B[l, e]), zero from the true rank to
 * the next multiple of 16; base rows are not written. Slice i is about columns i slice_n and on of
 * y. Of `g`, schedule, tokens and adapters count; vectors: y and B allow 16-byte accesses. */
moelora_status moelora_cuda_back_shrink(const moelora_gemm_launch *g, const float *scalings,
                                        void *yb, bool vectors, moelora_dtype dtype,
                                        const moelora_exec *exec);
}
#endif
