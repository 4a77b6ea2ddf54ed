/* Activations on a GPU: includes core/activation.h and adds the forward of gated activations in
 * PTX. Epilogues are unrolled over a thread's outputs, so they branch on the form once for all. */
#pragma once

#include <type_traits>

#include "cuda/launch/launch.h"
#include "cuda/ptx/arithmetic.cuh"

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float moelora_min_nan(float x, float y) {
  return min_nan(x, y);
}
__device__ __forceinline__ float moelora_max_nan(float x, float y) {
  return max_nan(x, y);
}
__device__ __forceinline__ float moelora_multiply_add(float x, float y, float z) {
  return fmaf(x, y, z);
}
__device__ __forceinline__ float moelora_sigmoid(float x, float y) {
  return sigmoid_of_power(-kLog2E * x * y);
}
__device__ __forceinline__ float moelora_times_sigmoid(float x, float y, float z) {
  return x * moelora_sigmoid(y, z);
}
__device__ __forceinline__ float moelora_soft_cap(float x, float cap, float inverse, float *slope) {
  return soft_cap(x, cap, inverse, *slope);
}
#define MOELORA_ACTIVATION_MATH
#include "core/activation.h"

/* Forward of gated activations. */
struct Activation {
  const moelora_activation_problem &p;
  float a, b, c; // a and b include a factor of -log2(e)

  __device__ __forceinline__ explicit Activation(const moelora_activation_problem &p_) : p(p_) {
    MOELORA_SET_GATE_TERMS(p, -kLog2E, a, b, c);
  }

  template <moelora_activation_form FORM>
  __device__ __forceinline__ float apply(float gate, float up) const {
    if constexpr (FORM == MOELORA_FORM_SILU)
      return silu_and_mul(gate, up);
    else if constexpr (FORM == MOELORA_FORM_SOFT_CAPPED)
      return soft_capped_activation(gate, up, p.alpha, p.inverse_alpha, p.limit, p.inverse_limit);
    else
      return gated_activation(gate, up, a, b, c, p.gate_limit, p.limit);
  }

  /* Calls f(form) with the form, SOFT_CAPPED or GATED, as a constant. */
  template <class F> __device__ __forceinline__ void with_form(F f) const {
    if (moelora_has_form(p.kind, MOELORA_FORM_SOFT_CAPPED))
      f(std::integral_constant<moelora_activation_form, MOELORA_FORM_SOFT_CAPPED>());
    else
      f(std::integral_constant<moelora_activation_form, MOELORA_FORM_GATED>());
  }

  __device__ __forceinline__ float operator()(float gate, float up) const {
    return moelora_has_form(p.kind, MOELORA_FORM_SOFT_CAPPED)
               ? apply<MOELORA_FORM_SOFT_CAPPED>(gate, up)
               : apply<MOELORA_FORM_GATED>(gate, up);
  }
};

/* Gradients for which kernels are compiled. OTHER selects the form at run time. */
enum class GradientKind { SILU, GATED, OTHER };

/* Returns whether the gradient is of kind GATED or SILU. */
__device__ __forceinline__ bool has_gated_gradient(const moelora_activation_terms &p) {
  return p.gated && !p.soft_capped;
}

__device__ __forceinline__ GradientKind gradient_kind(const moelora_activation_terms &p) {
  return p.plain                 ? GradientKind::SILU
         : has_gated_gradient(p) ? GradientKind::GATED
                                 : GradientKind::OTHER;
}

/* Calls f with a functor (&gate, &up, dh) -> h that replaces gate and up by their gradients. */
template <GradientKind KIND, class F>
__device__ __forceinline__ void with_gradient(const moelora_activation_terms &p, F f) {
  if constexpr (KIND == GradientKind::SILU)
    f([&](float *g, float *u, float dh) { return moelora_silu_gradient(&p, g, u, dh); });
  else if constexpr (KIND == GradientKind::GATED)
    f([&](float *g, float *u, float dh) { return moelora_gated_gradient(&p, g, u, dh); });
  else if (p.gated)
    f([&](float *g, float *u, float dh) { return moelora_soft_capped_gradient(&p, g, u, dh); });
  else
    f([&](float *g, float *u, float dh) { return moelora_squared_gradient(&p, g, u, dh); });
}
