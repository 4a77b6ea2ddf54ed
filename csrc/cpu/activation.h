/* Activations and their gradients over vectors of float32. Included by the kernels of every
 * instruction set, whose compiler flags vectorize the loops over core/activation.h. */
#pragma once

#include <math.h>
#include <string.h>

#include "core/backend.h"

/* Returns exp(x) to 2 ulp on [-87.3, 88.3], to which x is clamped; NaN stays NaN. x = n ln2 + r
 * with |r| <= ln2 / 2, and a polynomial of degree 7 for exp(r). */
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

static inline float moelora_sigmoid(float x, float y) {
  return 1.0f / (1.0f + moelora_exp(-(x * y)));
}
static inline float moelora_times_sigmoid(float x, float y, float z) {
  return x / (1.0f + moelora_exp(-(y * z)));
}
static inline float moelora_min_nan(float x, float y) {
  return x > y ? y : x;
}
static inline float moelora_max_nan(float x, float y) {
  return x < y ? y : x;
}
static inline float moelora_multiply_add(float x, float y, float z) {
  return x * y + z;
}

/* Returns 1 - tanh(x)^2, without cancellation. */
static inline float moelora_tanh_slope(float x) {
  const float r = 1.0f / (1.0f + moelora_exp(2.0f * fabsf(x)));
  return 4.0f * r * (1.0f - r);
}

/* From this argument on, exp computes tanh; below, where that would cancel, a polynomial does. */
#define MOELORA_TANH_SPLIT 0.625f

/* Returns cap tanh(x / cap) to 3 ulp, and its derivative; `inverse` = 1 / cap must be normal. The
 * linear term of the polynomial (Cephes' tanhf) is x itself, so that a huge cap returns x. */
static inline float moelora_soft_cap(float x, float cap, float inverse, float *slope) {
  const float z = x * inverse, a = fabsf(z), square = z * z;
  float poly = -5.70498872745e-3f;
  poly = poly * square + 2.06390887954e-2f;
  poly = poly * square - 5.37397155531e-2f;
  poly = poly * square + 1.33314422036e-1f;
  poly = poly * square - 3.33332819422e-1f;
  const float near = poly * square * x + x;
  const float far = copysignf(cap * (1.0f - 2.0f / (1.0f + moelora_exp(2.0f * a))), x);
  *slope = moelora_tanh_slope(z);
  return a < MOELORA_TANH_SPLIT ? near : far;
}

#define MOELORA_ACTIVATION_MATH
#include "core/activation.h"

/* Computes gate[i] = f(gate[i], up[i]); `up` is not read if the activation is not gated. */
static inline void moelora_activate(const moelora_activation_problem *activation,
                                    float *restrict gate, const float *restrict up, int64_t n) {
  const moelora_activation_terms terms = moelora_activation_terms_of(activation);
  switch (moelora_activation_form_of(activation)) {
#define MOELORA_FORM(NAME, FUNCTION, HAS_UP)                                                       \
  case MOELORA_FORM_##NAME:                                                                        \
    for (int64_t i = 0; i < n; i++)                                                                \
      gate[i] = moelora_##FUNCTION(&terms, gate[i], HAS_UP ? up[i] : 0.0f);                        \
    break;
    MOELORA_ACTIVATION_FORMS(MOELORA_FORM)
#undef MOELORA_FORM
  }
}

/* Computes h[i] = f(gate[i], up[i]), and replaces gate[i] and up[i] by their gradients, given the
 * gradient dh[i] of h[i]. `up` is neither read nor written if the activation is not gated. */
static inline void moelora_activate_backward(const moelora_activation_problem *activation,
                                             float *restrict gate, float *restrict up,
                                             const float *restrict dh, float *restrict h,
                                             int64_t n) {
  const moelora_activation_terms terms = moelora_activation_terms_of(activation);
  switch (moelora_activation_form_of(activation)) {
#define MOELORA_FORM(NAME, FUNCTION, HAS_UP)                                                       \
  case MOELORA_FORM_##NAME:                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                              \
      float g = gate[i], u = HAS_UP ? up[i] : 0.0f;                                                \
      h[i] = moelora_##FUNCTION##_gradient(&terms, &g, &u, dh[i]);                                 \
      gate[i] = g;                                                                                 \
      if (HAS_UP)                                                                                  \
        up[i] = u;                                                                                 \
    }                                                                                              \
    break;
    MOELORA_ACTIVATION_FORMS(MOELORA_FORM)
#undef MOELORA_FORM
  }
}
