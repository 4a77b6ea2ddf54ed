/* Derivatives of activation.h in float32; included by the same files.
 *
 * In: gate[i] and up[i], the inputs of the activation; dh[i], the gradient of its output. Out:
 * h[i] = f(gate[i], up[i]); gate[i] and up[i] are replaced by their gradients.
 *
 * A clamp passes the gradient within its bounds, inclusive. With q = sigmoid:
 *
 *   silu       q(g) (1 + g (1 - q(g))) u,               silu(g)
 *   gelu       (q + g q (1 - q) c (1 + 3 * 0.044715 g^2)) u,  gelu_tanh(g)    q = q(c (g + ...))
 *   swigluoai  q (1 + alpha g (1 - q)) (u + 1),         g q                   q = q(alpha g)
 *   relu2      2 max(g, 0)
 *   situ       (q T'(g) + T(g) q (1 - q)) T(u),  q T(g) T'(u)   T(x) = c tanh(x / c), q = q(g)
 *
 * swiglustep is silu with a limit of its own for g. */
#ifndef MOELORA_CPU_ACTIVATION_BACKWARD_H
#define MOELORA_CPU_ACTIVATION_BACKWARD_H

#include "cpu/activation.h"

/* Beyond this, sigmoid is 0 or 1 in float32; clamping keeps products with its derivative finite. */
#define MOELORA_SATURATED 88.0f

static inline float moelora_sigmoid(float x) {
  return 1.0f / (1.0f + moelora_exp(-x));
}

static inline float moelora_saturate(float x) {
  return moelora_clamp(x, -MOELORA_SATURATED, MOELORA_SATURATED);
}

/* 1 - tanh(x)^2, without cancellation */
static inline float moelora_tanh_slope(float x) {
  const float r = 1.0f / (1.0f + moelora_exp(2.0f * fabsf(x)));
  return 4.0f * r * (1.0f - r);
}

static inline void moelora_activate_backward(const moelora_activation_problem *activation,
                                             float *restrict gate, float *restrict up,
                                             const float *restrict dh, float *restrict h,
                                             int64_t n) {
  const float alpha = activation->alpha, limit = activation->limit;
  const float gate_limit = activation->gate_limit;
  const float inverse_alpha = activation->inverse_alpha, inverse_limit = activation->inverse_limit;
  switch (activation->kind) {
  case MOELORA_SILU:
  case MOELORA_SWIGLUSTEP:
    for (int64_t i = 0; i < n; i++) {
      const float g = moelora_clamp(gate[i], -INFINITY, gate_limit);
      const float u = moelora_clamp(up[i], -limit, limit);
      const float q = moelora_sigmoid(g), s = g * q;
      const float dg = q * (1.0f + moelora_saturate(g) * (1.0f - q)) * u * dh[i];
      const float du = s * dh[i];
      gate[i] = gate[i] > gate_limit ? 0.0f : dg;
      up[i] = up[i] > limit || up[i] < -limit ? 0.0f : du;
      h[i] = s * u;
    }
    break;
  case MOELORA_GELU:
    for (int64_t i = 0; i < n; i++) {
      const float g = gate[i], c = 1.5957691216f;
      const float q = moelora_sigmoid(c * (g + 0.044715f * g * g * g)), s = g * q;
      const float r = moelora_clamp(g, -16.0f, 16.0f); /* beyond, q (1 - q) is 0 */
      const float slope = r * q * (1.0f - q) * c * (1.0f + 0.134145f * r * r);
      gate[i] = (q + slope) * up[i] * dh[i];
      h[i] = s * up[i];
      up[i] = s * dh[i];
    }
    break;
  case MOELORA_SWIGLUOAI:
  case MOELORA_SWIGLUOAI_UNINTERLEAVE:
    for (int64_t i = 0; i < n; i++) {
      const float g = moelora_clamp(gate[i], -INFINITY, gate_limit);
      const float u = moelora_clamp(up[i], -limit, limit);
      const float q = moelora_sigmoid(alpha * g), s = g * q;
      const float dg = q * (1.0f + moelora_saturate(alpha * g) * (1.0f - q)) * (u + 1.0f) * dh[i];
      const float du = s * dh[i];
      gate[i] = gate[i] > gate_limit ? 0.0f : dg;
      up[i] = up[i] > limit || up[i] < -limit ? 0.0f : du;
      h[i] = s * (u + 1.0f);
    }
    break;
  case MOELORA_RELU2:
    for (int64_t i = 0; i < n; i++) {
      const float g = gate[i] < 0.0f ? 0.0f : gate[i];
      h[i] = g * g;
      gate[i] = 2.0f * g * dh[i];
    }
    break;
  case MOELORA_SITU:
    for (int64_t i = 0; i < n; i++) {
      const float g = moelora_soft_cap(gate[i], alpha, inverse_alpha);
      const float u = moelora_soft_cap(up[i], limit, inverse_limit);
      const float q = moelora_sigmoid(gate[i]), s = g * q;
      const float slope = moelora_tanh_slope(gate[i] * inverse_alpha);
      const float dg = q * (slope + moelora_saturate(g) * (1.0f - q));
      gate[i] = dg * u * dh[i];
      up[i] = s * moelora_tanh_slope(up[i] * inverse_limit) * dh[i];
      h[i] = s * u;
    }
    break;
  }
}

#endif
