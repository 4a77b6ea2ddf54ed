/* csrc/cuda/ptx/arithmetic.cuh in C. */
#pragma once

#include "cuda/ptx/mma.cuh"

template <class T> uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return emulation::fma_pair(Element<T>::is_bf16, a, b, c);
}
inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  return (a & mask) | bits;
}
template <int SELECTOR> uint32_t select_bytes(uint32_t low, uint32_t high) {
  const uint64_t both = (uint64_t)high << 32 | low;
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) {
    const int selector = SELECTOR >> 4 * i & 15;
    const uint32_t byte = (uint32_t)(both >> 8 * (selector & 7)) & 0xff;
    d |= (selector & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return d;
}
template <int SELECTOR> uint32_t select_bytes(uint32_t x) {
  return select_bytes<SELECTOR>(x, 0);
}
template <int HALF> uint32_t both_halves(uint32_t pair) {
  return (HALF ? pair >> 16 : pair & 0xffff) * 0x10001u;
}
inline float max_nan(float a, float b) {
  return a != a || b != b ? NAN : a > b ? a : b;
}
inline float min_nan(float a, float b) {
  return a != a || b != b ? NAN : a < b ? a : b;
}

inline void multiply_in_place(float &x, float by) {
  x *= by;
}
inline float sigmoid_of_power(float x) {
  return 1.f / (exp2f(x) + 1.f);
}
inline float gated_activation(float gate, float up, float a, float b, float c, float gate_limit,
                              float limit) {
  const float g = min_nan(gate, gate_limit), u = max_nan(min_nan(up, limit), -limit) + c;
  const float t = 1.f / (exp2f(fmaf(g * g, b, a) * g) + 1.f);
  return u * g * t;
}
inline float silu_and_mul(float gate, float up) {
  return up * gate * (1.f / (exp2f(gate * -1.4426950408889634f) + 1.f));
}

inline float soft_cap(float x, float cap, float inverse, float &slope) {
  const double t = tanh((double)x * inverse);
  slope = (float)(1 - t * t);
  return (float)(cap * t);
}
inline float soft_capped_activation(float gate, float up, float alpha, float inverse_alpha,
                                    float limit, float inverse_limit) {
  float slope;
  const float g = soft_cap(gate, alpha, inverse_alpha, slope);
  const float q = 1.f / (exp2f(gate * -1.4426950408889634f) + 1.f);
  return g * q * soft_cap(up, limit, inverse_limit, slope);
}
