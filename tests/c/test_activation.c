/* Activations over vectors, of every instruction set that this processor has: the forward against
 * formulas in double, the gradient against their differences. */
#include "core/plan.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "harness.h"

enum { COUNT = 203 };
#define STEP 1e-4

static double exact_activation(moelora_activation activation, double alpha, double limit, double g,
                               double u) {
  bool oai = activation == MOELORA_SWIGLUOAI || activation == MOELORA_SWIGLUOAI_UNINTERLEAVE;
  if (alpha == 0)
    alpha = oai ? 1.702 : 1;
  if (limit == 0)
    limit = oai || activation == MOELORA_SWIGLUSTEP ? 7 : INFINITY;
  switch (activation) {
  case MOELORA_SILU:
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g / (1 + exp(-g)) * u;
  case MOELORA_GELU:
    return 0.5 * g * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g))) * u;
  case MOELORA_SWIGLUOAI:
  case MOELORA_SWIGLUOAI_UNINTERLEAVE:
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    return g / (1 + exp(-alpha * g)) * (u + 1);
  case MOELORA_SITU:
    u = limit < INFINITY ? limit * tanh(u / limit) : u;
    return alpha * tanh(g / alpha) / (1 + exp(-g)) * u;
  case MOELORA_SWIGLUSTEP:
    u = u > limit ? limit : u < -limit ? -limit : u;
    return fmin(g / (1 + exp(-g)), limit) * u;
  default:
    return g > 0 ? g * g : 0;
  }
}

static void check_close(const char *what, int kind, float gate, float up, double got, double want,
                        double tolerance) {
  if (!(fabs(got - want) <= tolerance * fmax(1, fabs(want))))
    FAIL("activation %d, gate %g, up %g: %s is %.9g, expected %.9g", kind, gate, up, what, got,
         want);
}

/* Whether a clamp, or the corner of relu2, is so near that differences are no derivative. */
static bool has_corner(const moelora_activation_problem *p, float gate, float up) {
  return fabs(gate - p->gate_limit) < 2 * STEP || fabs(fabs(up) - p->limit) < 2 * STEP ||
         (!moelora_is_gated(p->kind) && fabs(gate) < 2 * STEP);
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
    const double exact = exact_activation(p->kind, alpha, limit, gate[i], up[i]);
    check_close("h", p->kind, gate[i], up[i], forward[i], exact, 3e-6);
    check_close("h of the gradient", p->kind, gate[i], up[i], h[i], exact, 3e-6);
    if (has_corner(p, gate[i], up[i]))
      continue;
    const double by_gate = exact_activation(p->kind, alpha, limit, gate[i] + STEP, up[i]) -
                           exact_activation(p->kind, alpha, limit, gate[i] - STEP, up[i]);
    const double by_up = exact_activation(p->kind, alpha, limit, gate[i], up[i] + STEP) -
                         exact_activation(p->kind, alpha, limit, gate[i], up[i] - STEP);
    check_close("dgate", p->kind, gate[i], up[i], dgate[i], dh[i] * by_gate / (2 * STEP), 3e-5);
    if (gated)
      check_close("dup", p->kind, gate[i], up[i], dup[i], dh[i] * by_up / (2 * STEP), 3e-6);
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
  printf("test_activation: %d tables of kernels agree with differences\n", kernels);
}
