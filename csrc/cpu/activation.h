/* Activations in float32, in place: gate[i] = f(gate[i], up[i]). Included by the kernels of every
 * instruction set, whose compiler flags vectorize the loops.
 *
 *   silu       g * sigmoid(g) * u
 *   gelu       g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) * u, which is gelu_tanh(g) * u
 *   swigluoai  g * sigmoid(alpha g) * (u + 1)
 *   relu2      max(g, 0)^2
 *   situ       alpha tanh(g / alpha) sigmoid(g) * limit tanh(u / limit)
 *
 * silu and swigluoai first clamp g to at most the limit and u to [-limit, limit]. swiglustep,
 * min(silu(g), limit) u, is silu with a limit of g at which silu is the limit. */
#ifndef MOELORA_CPU_ACTIVATION_H
#define MOELORA_CPU_ACTIVATION_H

#include <math.h>
#include <string.h>

#include "core/backend.h"

/* exp to 2 ulp on [-87.3, 88.7], clamped outside; NaN stays NaN. x = n ln2 + r, |r| <= ln2 / 2, and
 * a degree 6 polynomial for exp(r). */
static inline float moelora_exp(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  /* adding 1.5 * 2^23 rounds to an integer, which is then in the low bits */
  const float shifter = 12582912.0f;
  float shifted = x * 1.44269504f + shifter;
  float n = shifted - shifter;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float poly = 1.9875691500e-4f;
  poly = poly * r + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  poly = poly * r * r + r + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return poly * scale;
}

static inline float moelora_times_sigmoid(float x, float y) {
  return x / (1.0f + moelora_exp(-y));
}

/* Argument from which tanh is computed by exp; below, by a series, where that would cancel. */
#define MOELORA_TANH_SPLIT 0.625f

/* cap tanh(x / cap) to 3 ulp, for a normal `inverse` = 1 / cap. The polynomial is Cephes' tanhf;
 * its linear term is x itself, so that a cap beyond every x changes nothing. */
static inline float moelora_soft_cap(float x, float cap, float inverse) {
  const float z = x * inverse, a = fabsf(z), square = z * z;
  float poly = -5.70498872745e-3f;
  poly = poly * square + 2.06390887954e-2f;
  poly = poly * square - 5.37397155531e-2f;
  poly = poly * square + 1.33314422036e-1f;
  poly = poly * square - 3.33332819422e-1f;
  const float near = poly * square * x + x;
  const float far = copysignf(cap * (1.0f - 2.0f / (1.0f + moelora_exp(2.0f * a))), x);
  return a < MOELORA_TANH_SPLIT ? near : far;
}

/* NaN stays NaN. */
static inline float moelora_clamp(float x, float least, float most) {
  x = x > most ? most : x;
  return x < least ? least : x;
}

static inline void moelora_activate(const moelora_activation_problem *activation,
                                    float *restrict gate, const float *restrict up, int64_t n) {
  const float alpha = activation->alpha, limit = activation->limit;
  const float gate_limit = activation->gate_limit;
  const float inverse_alpha = activation->inverse_alpha, inverse_limit = activation->inverse_limit;
  switch (activation->kind) {
  case MOELORA_SILU:
  case MOELORA_SWIGLUSTEP:
    for (int64_t i = 0; i < n; i++) {
      float g = moelora_clamp(gate[i], -INFINITY, gate_limit);
      gate[i] = moelora_times_sigmoid(g, g) * moelora_clamp(up[i], -limit, limit);
    }
    break;
  case MOELORA_GELU:
    for (int64_t i = 0; i < n; i++) {
      float g = gate[i], inner = 1.5957691216f * (g + 0.044715f * g * g * g);
      gate[i] = moelora_times_sigmoid(g, inner) * up[i];
    }
    break;
  case MOELORA_SWIGLUOAI:
  case MOELORA_SWIGLUOAI_UNINTERLEAVE:
    for (int64_t i = 0; i < n; i++) {
      float g = moelora_clamp(gate[i], -INFINITY, gate_limit);
      float u = moelora_clamp(up[i], -limit, limit);
      gate[i] = moelora_times_sigmoid(g, alpha * g) * (u + 1.0f);
    }
    break;
  case MOELORA_RELU2:
    for (int64_t i = 0; i < n; i++) {
      float g = gate[i] < 0.0f ? 0.0f : gate[i];
      gate[i] = g * g;
    }
    break;
  case MOELORA_SITU:
    for (int64_t i = 0; i < n; i++) {
      float g = moelora_soft_cap(gate[i], alpha, inverse_alpha);
      gate[i] = moelora_times_sigmoid(g, gate[i]) * moelora_soft_cap(up[i], limit, inverse_limit);
    }
    break;
  }
}

#endif
