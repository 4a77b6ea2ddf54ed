/* Activations of w13, h = act(gate, up), for host and device: parameters, coefficients, forward and
 * derivative of each. To add an activation of one of the forms below, add a row to
 * MOELORA_ACTIVATIONS and its coefficients to MOELORA_SET_GATE_TERMS. A new form also needs a
 * forward and a gradient at the end of this file, which every backend calls.
 *
 *   form         forward
 *   SILU         g sigmoid(g) u                               GATED without limits
 *   GATED        g' sigmoid(g' (a + b g'^2)) (u' + c)         g' = min(g, gate_limit),
 *                                                             u' = clamp(u, -limit, limit)
 *   SOFT_CAPPED  T(g) sigmoid(g) T(u)                         T(x) = cap tanh(x / cap)
 *   SQUARED      max(g, 0)^2
 *
 * gelu is gelu_tanh: 1 + tanh(t) = 2 sigmoid(2t). swiglustep, min(silu(g), limit) u, is silu with
 * the gate_limit at which silu(g) = limit. NaN propagates. */
#ifndef MOELORA_CORE_ACTIVATION_H
#define MOELORA_CORE_ACTIVATION_H

#include <math.h>

#include "core/format.h"

#ifdef __CUDACC__
#define MOELORA_MATH static __device__ __forceinline__
#else
#define MOELORA_MATH static inline
#endif

/* ROW(NAME, TEXT, FORM, ROWS, ALPHA, LIMIT), in the order of moelora_activation.
 *
 *   ROWS          order of the rows of w13: HALVES (gate before up), INTERLEAVED, ONE (no up rows)
 *   ALPHA, LIMIT  defaults; 0: the activation takes none */
#define MOELORA_ACTIVATIONS(ROW)                                                                   \
  ROW(SILU, "silu", GATED, HALVES, 0, INFINITY)                                                    \
  ROW(GELU, "gelu", GATED, HALVES, 0, 0)                                                           \
  ROW(SWIGLUOAI, "swigluoai", GATED, INTERLEAVED, 1.702f, 7)                                       \
  ROW(RELU2, "relu2", SQUARED, ONE, 0, 0)                                                          \
  ROW(SWIGLUOAI_UNINTERLEAVE, "swigluoai_uninterleave", GATED, HALVES, 1.702f, 7)                  \
  ROW(SITU, "situ", SOFT_CAPPED, HALVES, 1, INFINITY)                                              \
  ROW(SWIGLUSTEP, "swiglustep", GATED, HALVES, 0, 7)

/* FORM(NAME, function, HAS_UP): the forward is moelora_<function>, the gradient
 * moelora_<function>_gradient. */
#define MOELORA_ACTIVATION_FORMS(FORM)                                                             \
  FORM(SILU, silu, 1)                                                                              \
  FORM(GATED, gated, 1) FORM(SOFT_CAPPED, soft_capped, 1) FORM(SQUARED, squared, 0)

typedef enum moelora_activation_form {
#define MOELORA_FORM(NAME, FUNCTION, HAS_UP) MOELORA_FORM_##NAME,
  MOELORA_ACTIVATION_FORMS(MOELORA_FORM)
#undef MOELORA_FORM
} moelora_activation_form;

/* Orders of the rows of w13. */
enum { MOELORA_GATE_UP_HALVES, MOELORA_GATE_UP_INTERLEAVED, MOELORA_GATE_UP_ONE };

enum {
#define MOELORA_ROW(...) +1
  MOELORA_NUM_ACTIVATIONS = MOELORA_ACTIVATIONS(MOELORA_ROW)
#undef MOELORA_ROW
};

/* The activation of a layer, with defaults filled in. */
typedef struct moelora_activation_problem {
  moelora_activation kind;
  float alpha; /* GATED: alpha in sigmoid(alpha g), not for gelu; SOFT_CAPPED: cap of g; else 1 */
  float limit; /* GATED: upper bound of |u|, infinity: none; SOFT_CAPPED: cap of u, finite */
  float gate_limit;                   /* GATED: upper bound of g, infinity: none */
  float inverse_alpha, inverse_limit; /* SOFT_CAPPED: reciprocals of the caps */
} moelora_activation_problem;

/* Appends "|| kind is NAME" if the constant CONDITION holds, else "|| false". */
#define MOELORA_ACTIVATION_WHERE(CONDITION, NAME) || ((CONDITION) && kind == MOELORA_##NAME)

/* Whether w13 has up rows. */
static MOELORA_CONSTEXPR bool moelora_is_gated(moelora_activation kind) {
#define MOELORA_ROW(NAME, TEXT, FORM, ROWS, ...)                                                   \
  MOELORA_ACTIVATION_WHERE(MOELORA_GATE_UP_##ROWS == MOELORA_GATE_UP_ONE, NAME)
  return !(false MOELORA_ACTIVATIONS(MOELORA_ROW));
#undef MOELORA_ROW
}

/* Whether gate and up rows of w13 alternate; otherwise gate rows come first. */
static MOELORA_CONSTEXPR bool moelora_is_interleaved(moelora_activation kind) {
#define MOELORA_ROW(NAME, TEXT, FORM, ROWS, ...)                                                   \
  MOELORA_ACTIVATION_WHERE(MOELORA_GATE_UP_##ROWS == MOELORA_GATE_UP_INTERLEAVED, NAME)
  return false MOELORA_ACTIVATIONS(MOELORA_ROW);
#undef MOELORA_ROW
}

/* Whether the activation has form `form`; SILU counts as GATED. */
static MOELORA_CONSTEXPR bool moelora_has_form(moelora_activation kind,
                                               moelora_activation_form form) {
#define MOELORA_ROW(NAME, TEXT, FORM, ...)                                                         \
  MOELORA_ACTIVATION_WHERE(form == MOELORA_FORM_##FORM, NAME)
  return false MOELORA_ACTIVATIONS(MOELORA_ROW);
#undef MOELORA_ROW
}

/* Sets a, b and c of the GATED form for problem P; a and b are multiplied by FACTOR. This is a
 * macro because nvcc schedules the epilogues differently if a function returns the terms. */
#define MOELORA_SET_GATE_TERMS(P, FACTOR, A, B, C)                                                 \
  do {                                                                                             \
    A = (FACTOR) * (P).alpha, B = 0.f, C = 0.f;                                                    \
    if ((P).kind == MOELORA_GELU) /* a = 2 sqrt(2 / pi), b = 0.044715 a */                         \
      A = (FACTOR) * 1.5957691216057308f, B = (FACTOR) * 0.07135481627159729f;                     \
    if ((P).kind == MOELORA_SWIGLUOAI || (P).kind == MOELORA_SWIGLUOAI_UNINTERLEAVE)               \
      C = 1.f;                                                                                     \
  } while (0)

/* Parameters of the functions below: an activation's form and its coefficients. */
typedef struct moelora_activation_terms {
  float a, b, c, gate_limit, limit; /* SOFT_CAPPED: a is the cap of g, `limit` that of u */
  float saturated;                  /* |g'| from which on the sigmoid is 0 or 1 in float32 */
  float inverse[2];                 /* SOFT_CAPPED: reciprocals of the caps */
  bool gated, plain, soft_capped;   /* whether the form is not SQUARED; is SILU; is SOFT_CAPPED */
} moelora_activation_terms;

static inline moelora_activation_form
moelora_activation_form_of(const moelora_activation_problem *p) {
  if (p->kind == MOELORA_SILU && p->gate_limit == INFINITY && p->limit == INFINITY)
    return MOELORA_FORM_SILU;
  switch (p->kind) {
#define MOELORA_ROW(NAME, TEXT, FORM, ...)                                                         \
  case MOELORA_##NAME:                                                                             \
    return MOELORA_FORM_##FORM;
    MOELORA_ACTIVATIONS(MOELORA_ROW)
#undef MOELORA_ROW
  }
  return MOELORA_FORM_GATED;
}

static inline moelora_activation_terms
moelora_activation_terms_of(const moelora_activation_problem *p) {
  const moelora_activation_form form = moelora_activation_form_of(p);
  moelora_activation_terms t = {0};
  MOELORA_SET_GATE_TERMS(*p, 1.f, t.a, t.b, t.c);
  t.gate_limit = p->gate_limit;
  t.limit = p->limit;
  t.gated = form != MOELORA_FORM_SQUARED;
  t.plain = form == MOELORA_FORM_SILU;
  t.soft_capped = form == MOELORA_FORM_SOFT_CAPPED;
  t.inverse[0] = p->inverse_alpha;
  t.inverse[1] = p->inverse_limit;
  /* Clamping g' to this keeps products with the sigmoid's derivative finite. */
  t.saturated = t.soft_capped ? 88.f : t.b != 0.f ? 16.f : 88.f / t.a;
  return t;
}

/* Returns the problem of silu(gate) * up, without limits. */
static inline moelora_activation_problem moelora_silu_problem(void) {
  moelora_activation_problem p = {MOELORA_SILU, 1.f, INFINITY, INFINITY, 0.f, 0.f};
  return p;
}

#endif

/* Forward and gradient of each form, in float32, for files that define MOELORA_ACTIVATION_MATH and
 * the following functions, for their processor, before they include this header:
 *
 *   moelora_min_nan(x, y), moelora_max_nan(x, y)   NaN if x is NaN
 *   moelora_multiply_add(x, y, z)                  x y + z
 *   moelora_sigmoid(x, y)                          sigmoid(x y)
 *   moelora_times_sigmoid(x, y, z)                 x sigmoid(y z)
 *   moelora_soft_cap(x, cap, inverse, &slope)      cap tanh(x / cap), and its derivative
 *
 * A gradient returns h and replaces gate and up by their gradients, given the gradient dh of h.
 * With q the sigmoid and d = a + 3 b g'^2:
 *
 *   GATED        dgate = q (1 + g' d (1 - q)) (u' + c) dh       dup = g' q dh
 *   SOFT_CAPPED  dgate = q (T'(g) + T(g) (1 - q)) T(u) dh       dup = T(g) q T'(u) dh
 *   SQUARED      dgate = 2 max(g, 0) dh
 *
 * The derivative of a clamp is 1 for values that the clamp does not change, including its bounds.
 * The functions have no branches, so that compilers can vectorize or interleave them. */
#if defined(MOELORA_ACTIVATION_MATH) && !defined(MOELORA_CORE_ACTIVATION_MATH)
#define MOELORA_CORE_ACTIVATION_MATH

MOELORA_MATH float moelora_silu(const moelora_activation_terms *p, float gate, float up) {
  (void)p;
  return moelora_times_sigmoid(gate, gate, 1.f) * up;
}
MOELORA_MATH float moelora_silu_gradient(const moelora_activation_terms *p, float *gate, float *up,
                                         float dh) {
  const float q = moelora_sigmoid(*gate, 1.f), s = *gate * q;
  const float r = moelora_max_nan(moelora_min_nan(*gate, p->saturated), -p->saturated);
  const float h = s * *up;
  *gate = q * moelora_multiply_add(r, 1.f - q, 1.f) * *up * dh;
  *up = s * dh;
  return h;
}

MOELORA_MATH float moelora_gated(const moelora_activation_terms *p, float gate, float up) {
  const float g = moelora_min_nan(gate, p->gate_limit);
  const float u = moelora_max_nan(moelora_min_nan(up, p->limit), -p->limit) + p->c;
  return moelora_times_sigmoid(g, g, moelora_multiply_add(p->b * g, g, p->a)) * u;
}
MOELORA_MATH float moelora_gated_gradient(const moelora_activation_terms *p, float *gate, float *up,
                                          float dh) {
  const float g = moelora_min_nan(*gate, p->gate_limit);
  const float u = moelora_max_nan(moelora_min_nan(*up, p->limit), -p->limit) + p->c;
  const float q = moelora_sigmoid(g, moelora_multiply_add(p->b * g, g, p->a));
  const float r = moelora_max_nan(moelora_min_nan(g, p->saturated), -p->saturated), s = g * q;
  const float slope = r * moelora_multiply_add(3.f * p->b * r, r, p->a);
  const float dg = q * moelora_multiply_add(slope, 1.f - q, 1.f) * u * dh;
  *gate = *gate > p->gate_limit ? 0.f : dg;
  *up = fabsf(*up) > p->limit ? 0.f : s * dh;
  return s * u;
}

MOELORA_MATH float moelora_soft_capped(const moelora_activation_terms *p, float gate, float up) {
  float slope;
  const float g = moelora_soft_cap(gate, p->a, p->inverse[0], &slope);
  return moelora_times_sigmoid(g, gate, 1.f) *
         moelora_soft_cap(up, p->limit, p->inverse[1], &slope);
}
MOELORA_MATH float moelora_soft_capped_gradient(const moelora_activation_terms *p, float *gate,
                                                float *up, float dh) {
  float slope_g, slope_u;
  const float g = moelora_soft_cap(*gate, p->a, p->inverse[0], &slope_g);
  const float u = moelora_soft_cap(*up, p->limit, p->inverse[1], &slope_u);
  const float q = moelora_sigmoid(*gate, 1.f), s = g * q;
  const float r = moelora_max_nan(g, -p->saturated);
  *gate = q * moelora_multiply_add(r, 1.f - q, slope_g) * u * dh;
  *up = s * slope_u * dh;
  return s * u;
}

MOELORA_MATH float moelora_squared(const moelora_activation_terms *p, float gate, float up) {
  (void)p, (void)up;
  return gate < 0.f ? 0.f : gate * gate;
}
MOELORA_MATH float moelora_squared_gradient(const moelora_activation_terms *p, float *gate,
                                            float *up, float dh) {
  (void)p, (void)up;
  const float g = *gate < 0.f ? 0.f : *gate;
  *gate = 2.f * g * dh;
  return g * g;
}

#endif
