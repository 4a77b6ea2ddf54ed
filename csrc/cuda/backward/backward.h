/* The backward of a layer on the GPU; see backward.cu. */
#ifndef MOELORA_CUDA_BACKWARD_H
#define MOELORA_CUDA_BACKWARD_H

#include "cuda/launch/launch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* backward.cu: functions of the backend's table */
size_t moelora_cuda_experts_backward_workspace(const moelora_experts_backward_problem *problem,
                                               const moelora_backward_plan *plan,
                                               const moelora_exec *exec);
moelora_status moelora_cuda_experts_backward(const moelora_experts_backward_problem *problem,
                                             const moelora_backward_plan *plan,
                                             const moelora_exec *exec);

/* routing_weights.cu */
typedef struct moelora_weight_gradients {
  const int32_t *positions; /* [P] -1: skipped */
  const int32_t *experts;   /* [P] */
  int64_t num_rows;         /* P */
  int32_t top_k;
  const float *dt; /* [position, parts] */
  int32_t parts;
  int64_t hidden;
  const void *bias; /* [E, K]; NULL: none */
  int64_t bias_stride_e;
  const void *dout; /* [M, K] */
  int64_t dout_stride;
  const void *dz, *x; /* [P, K], [M, K]: for weights on the input; otherwise dz is NULL */
  int64_t x_stride;
  float *out; /* [M, top_k] */
  int64_t out_stride[2];
} moelora_weight_gradients;

moelora_status moelora_cuda_weight_gradients(const moelora_weight_gradients *s, moelora_dtype dtype,
                                             const moelora_exec *exec);

/* zero.cu: zeros a whole gradient. */
moelora_status moelora_cuda_zero_gradient(const moelora_gradient *gradient,
                                          const moelora_exec *exec);

#ifdef __cplusplus
}
#endif
#endif
