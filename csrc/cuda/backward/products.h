/* Products of the backward with weights: y W where the forward has x W^T.
 *
 *   v[p]  = dout[p / top_k] W2[e] + yb2[p] A2[l, e]      fused with the gradient of the activation
 *   dz[p] = dgu[p] W13[e] + yb13[p] A13[l, e]            all slices of A extend K
 *
 * and the shrinks before them, yb = s y B. Like the forward, they use one alignment of rows. */
#pragma once

#include "cuda/launch/launch.h"

/* Number of outputs that a partial sum of dt = <v, h> covers; one warp computes it. */
#define MOELORA_DT_OUTPUTS 16

/* Epilogue of v, which applies the gradient of the activation (dAct). It writes, for each row,
 *
 *   h = act(gate_up), dgu = act'(gate_up) t v, both rounded, and the parts of dt = <v, h> */
typedef struct moelora_dact_epilogue {
  const void *gate_up; /* [P, N] by flat row */
  int64_t gate_up_stride;
  void *h;   /* [P, I] by flat row, or NULL */
  void *dgu; /* [P, N] by flat row */
  int64_t dgu_stride;
  float *dt; /* [position, dt_parts] */
  int32_t dt_parts;
  moelora_activation_terms activation;
} moelora_dact_epilogue;

/* A product of the backward: `tokens` are rows of y, `weights` are [E, tokens.k, n_out],
 * adapters.xa is yb; of adapters.lora only A is used. It writes epilogue.out or, with n_out = I,
 * the outputs of `dact`. blocks.weights are t; NULL: 1. */
struct moelora_back_launch : moelora_gemm_launch {
  moelora_dact_epilogue dact; // dgu NULL: writes epilogue.out
};

/* shrink.cu: computes yb[position, slice * xa_slice + r] = round(s[l] y B[l, e]), zero from the
 * true rank to the next multiple of 16. Rows without an adapter are not written. Slice i uses the
 * columns of y from i * slice_n on. Of `g`, only schedule, tokens and adapters are used. `vectors`:
 * y and B allow 16-byte accesses. */
moelora_status moelora_cuda_back_shrink(const moelora_gemm_launch *g, const float *scalings,
                                        void *yb, bool vectors, moelora_dtype dtype,
                                        const moelora_exec *exec);
