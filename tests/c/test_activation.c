/* Activations over vectors, of every instruction set that this processor has: the forward against
 * naive.h, the gradient against core/activation.h with the C library's functions; and that gradient
 * against differences of naive.h. */
#include "core/plan.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "harness.h"
#include "naive.h"

static inline float moelora_min_nan(float x, float y) {
  return x > y ? y : x;
}
static inline float moelora_max_nan(float x, float y) {
  return x < y ? y : x;
}
static inline float moelora_multiply_add(float x, float y, float z) {
  return fmaf(x, y, z);
}
static inline float moelora_times_sigmoid(float x, float y, float z) {
  return (float)(x / (1 + exp(-(double)y * z)));
}
static inline float moelora_sigmoid(float x, float y) {
  return moelora_times_sigmoid(1, x, y);
}
static inline float moelora_soft_cap(float x, float cap, float inverse, float *slope) {
  const double t = tanh((double)x * inverse);
  *slope = (float)(1 - t * t);
  return (float)(cap * t);
}
#define MOELORA_ACTIVATION_MATH
#include "core/activation.h"

enum { COUNT = 203 };

static float gradient(const moelora_activation_problem *p, float *gate, float *up, float dh) {
  const moelora_activation_terms terms = moelora_activation_terms_of(p);
  switch (moelora_activation_form_of(p)) {
#define MOELORA_FORM(NAME, FUNCTION, HAS_UP)                                                       \
  case MOELORA_FORM_##NAME:                                                                        \
    return moelora_##FUNCTION##_gradient(&terms, gate, up, dh);
    MOELORA_ACTIVATION_FORMS(MOELORA_FORM)
#undef MOELORA_FORM
  }
  FAIL("activation %d has no form", (int)p->kind);
}

static void check_close(const char *what, int kind, float gate, float up, double got, double want,
                        double tolerance) {
  if (!(fabs(got - want) <= tolerance * fmax(1, fabs(want))))
    FAIL("activation %d, gate %g, up %g: %s is %.9g, expected %.9g", kind, gate, up, what, got,
         want);
}

/* Derivatives by central differences, where no clamp is near. */
static void check_slopes(const moelora_activation_problem *p, double alpha, double limit,
                         float gate, float up) {
  const double step = 1e-4;
  if (fabs(gate - p->gate_limit) < 2 * step || fabs(fabs(up) - p->limit) < 2 * step ||
      (!moelora_is_gated(p->kind) && fabs(gate) < 2 * step))
    return;
  float dgate = gate, dup = up;
  gradient(p, &dgate, &dup, 1);
  const double g[2] = {naive_activation(p->kind, alpha, limit, gate - step, up),
                       naive_activation(p->kind, alpha, limit, gate + step, up)};
  const double u[2] = {naive_activation(p->kind, alpha, limit, gate, up - step),
                       naive_activation(p->kind, alpha, limit, gate, up + step)};
  check_close("dgate", p->kind, gate, up, dgate, (g[1] - g[0]) / (2 * step), 1e-4);
  if (moelora_is_gated(p->kind))
    check_close("dup", p->kind, gate, up, dup, (u[1] - u[0]) / (2 * step), 1e-4);
}

static void check(const moelora_cpu_kernels *kernels, const moelora_activation_problem *p,
                  double alpha, double limit) {
  const bool gated = moelora_is_gated(p->kind);
  float gate[COUNT], up[COUNT], dh[COUNT], forward[COUNT], dgate[COUNT], dup[COUNT], h[COUNT];
  for (int i = 0; i < COUNT; i++) {
    const float scale = i % 5 == 0 ? 100 : 4;
    gate[i] = forward[i] = dgate[i] = scale * (2 * (float)rand() / (float)RAND_MAX - 1);
    up[i] = dup[i] = scale * (2 * (float)rand() / (float)RAND_MAX - 1);
    dh[i] = (float)rand() / (float)RAND_MAX;
  }
  kernels->activate(p, forward, gated ? up : NULL, COUNT);
  kernels->activate_backward(p, dgate, gated ? dup : NULL, dh, h, COUNT);
  for (int i = 0; i < COUNT; i++) {
    const double exact = naive_activation(p->kind, alpha, limit, gate[i], up[i]);
    check_close("h", p->kind, gate[i], up[i], forward[i], exact, 3e-6);
    check_close("h of the gradient", p->kind, gate[i], up[i], h[i], exact, 3e-6);
    float g = gate[i], u = up[i];
    gradient(p, &g, &u, dh[i]);
    check_close("dgate", p->kind, gate[i], up[i], dgate[i], g, 3e-5);
    if (gated)
      check_close("dup", p->kind, gate[i], up[i], dup[i], u, 3e-6);
    check_slopes(p, alpha, limit, gate[i], up[i]);
  }
}

int main(void) {
  static const struct {
    moelora_activation_problem problem;
    double alpha, limit;
  } cases[] = {
      {{MOELORA_SILU, 1, INFINITY, INFINITY, 0, 0}, 0, 0},
      {{MOELORA_SILU, 1, 2, 2, 0, 0}, 0, 2},
      {{MOELORA_GELU, 1, INFINITY, INFINITY, 0, 0}, 0, 0},
      {{MOELORA_SWIGLUOAI, 1.702f, 7, 7, 0, 0}, 1.702f, 7},
      {{MOELORA_SWIGLUOAI_UNINTERLEAVE, 0.5f, 3, 3, 0, 0}, 0.5, 3},
      {{MOELORA_RELU2, 1, INFINITY, INFINITY, 0, 0}, 0, 0},
      {{MOELORA_SITU, 4, 25, INFINITY, 0.25f, 0.04f}, 4, 25},
      {{MOELORA_SITU, 0.5f, 0.75f, INFINITY, 2, 1 / 0.75f}, 0.5, 0.75},
      {{MOELORA_SWIGLUSTEP, 1, 7, 7.0063428f, 0, 0}, 0, 7},
  };
  int kernels = 0;
  const moelora_variant *variant;
  for (int32_t i = 0; (variant = moelora_variant_at(i)); i++) {
    if (variant->device != MOELORA_CPU || ((uint32_t)variant->needs & ~moelora_cpu_isa()))
      continue;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
      check(moelora_cpu_kernels_of(variant), &cases[c].problem, cases[c].alpha, cases[c].limit);
    kernels++;
  }
  CHECK(kernels >= 3);
  printf("test_activation: %d tables of kernels agree with core/activation.h\n", kernels);
}
