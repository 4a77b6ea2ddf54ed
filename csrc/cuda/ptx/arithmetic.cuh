/* Arithmetic, in PTX where the compiler would choose worse instructions. */
#ifndef MOELORA_CUDA_PTX_ARITHMETIC_CUH
#define MOELORA_CUDA_PTX_ARITHMETIC_CUH

#include "cuda/ptx/mma.cuh"

/* Returns the packed a * b + c, rounded once. */
template <class T> __device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (Element<T>::is_bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/* Returns (a & mask) | bits. In PTX, because the compiler emits two instructions if mask and bits
 * are constants. */
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

/* Returns the four bytes that PTX's prmt selects. Unlike __byte_perm, it obeys bit 3 of each
 * nibble of SELECTOR, which replicates the sign bit of the selected byte. */
template <int SELECTOR> __device__ __forceinline__ uint32_t select_bytes(uint32_t x) {
  uint32_t d;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(d) : "r"(x), "n"(SELECTOR));
  return d;
}

template <int SELECTOR>
__device__ __forceinline__ uint32_t select_bytes(uint32_t low, uint32_t high) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "n"(SELECTOR));
  return d;
}

/* Broadcasts the low or high half of a register. This is free: the multiply that consumes it
 * selects the half. */
template <int HALF> __device__ __forceinline__ uint32_t both_halves(uint32_t pair) {
  uint32_t d;
#define MOELORA_BOTH(WHICH)                                                                        \
  asm("{\n"                                                                                        \
      ".reg .b16 low, high;\n"                                                                     \
      "mov.b32 {low, high}, %1;\n"                                                                 \
      "mov.b32 %0, {" WHICH ", " WHICH "};\n"                                                      \
      "}"                                                                                          \
      : "=r"(d)                                                                                    \
      : "r"(pair))
  if constexpr (HALF == 0)
    MOELORA_BOTH("low");
  else
    MOELORA_BOTH("high");
#undef MOELORA_BOTH
  return d;
}

/* Returns max(a, b); NaN if either is. */
__device__ __forceinline__ float max_nan(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

/* Returns min(a, b); NaN if either is. */
__device__ __forceinline__ float min_nan(float a, float b) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

/* Multiplies x by `by` in place. If the compiler could move the multiplication, it would keep
 * accumulators and products alive, and ptxas would serialize the wgmmas for lack of registers. */
__device__ __forceinline__ void multiply_in_place(float &x, float by) {
  asm volatile("mul.f32 %0, %0, %1;" : "+f"(x) : "f"(by));
}

/* Returns 1 / (1 + 2^x). */
__device__ __forceinline__ float sigmoid_of_power(float x) {
  float y;
  asm("{\n"
      "ex2.approx.ftz.f32 %0, %1;\n"
      "add.f32 %0, %0, 0f3F800000;\n"
      "rcp.approx.ftz.f32 %0, %0;\n"
      "}"
      : "=&f"(y)
      : "f"(x));
  return y;
}

/* Returns g sigmoid(g (a + b g^2)) (u + c) with g = min(gate, gate_limit) and u = up, clamped to
 * +-limit. The caller multiplies a and b by -log2(e). One asm statement computes all, because the
 * compiler would interleave the outputs of a thread and run out of registers. */
__device__ __forceinline__ float gated_activation(float gate, float up, float a, float b, float c,
                                                  float gate_limit, float limit) {
  float y;
  asm volatile("{\n"
               ".reg .f32 g, u, t;\n"
               "min.NaN.f32 g, %1, %8;\n"
               "min.NaN.f32 u, %2, %5;\n"
               "max.NaN.f32 u, u, %6;\n"
               "add.f32 u, u, %7;\n"
               "mul.f32 t, g, g;\n"
               "fma.rn.f32 t, t, %4, %3;\n"
               "mul.f32 t, t, g;\n"
               "ex2.approx.ftz.f32 t, t;\n"
               "add.f32 t, t, 0f3F800000;\n"
               "rcp.approx.ftz.f32 t, t;\n"
               "mul.f32 u, u, g;\n"
               "mul.f32 %0, u, t;\n"
               "}"
               : "=f"(y)
               : "f"(gate), "f"(up), "f"(a), "f"(b), "f"(limit), "f"(-limit), "f"(c),
                 "f"(gate_limit));
  return y;
}

/* Returns gate sigmoid(gate) up. */
__device__ __forceinline__ float silu_and_mul(float gate, float up) {
  float y;
  asm volatile("{\n"
               ".reg .f32 u, t;\n"
               "mul.f32 t, %1, 0fBFB8AA3B;\n" // -log2(e)
               "ex2.approx.ftz.f32 t, t;\n"
               "add.f32 t, t, 0f3F800000;\n"
               "rcp.approx.ftz.f32 t, t;\n"
               "mul.f32 u, %2, %1;\n"
               "mul.f32 %0, u, t;\n"
               "}"
               : "=f"(y)
               : "f"(gate), "f"(up));
  return y;
}

/* to = cap tanh(z) with z = x / cap: if |z| < 1/4, the polynomial x (1 + z^2 p(z^2)); otherwise
 * cap (1 - 2 / (1 + exp(2 |z|))) with the sign of x. The latter would cancel near 0. */
#define MOELORA_PTX_SOFT_CAP(to, x, cap, inverse)                                                  \
  "mul.f32 z, " x ", " inverse ";\n"                                                               \
  "abs.f32 t, z;\n"                                                                                \
  "setp.lt.f32 near, t, 0f3E800000;\n"                                                             \
  "mul.f32 t, t, 0f4038AA3B;\n" /* 2 log2(e) */                                                    \
  "ex2.approx.ftz.f32 t, t;\n"                                                                     \
  "add.f32 t, t, 0f3F800000;\n"                                                                    \
  "rcp.approx.ftz.f32 t, t;\n"                                                                     \
  "fma.rn.f32 t, t, 0fC0000000, 0f3F800000;\n"                                                     \
  "mul.f32 t, t, " cap ";\n"                                                                       \
  "copysign.f32 t, " x ", t;\n"                                                                    \
  "mul.f32 z, z, z;\n"                                                                             \
  "fma.rn.f32 " to ", z, 0f3E03DC86, 0fBEAA9F3A;\n"                                                \
  "mul.f32 z, z, " x ";\n"                                                                         \
  "fma.rn.f32 " to ", " to ", z, " x ";\n"                                                         \
  "selp.f32 " to ", " to ", t, near;\n"

/* Returns alpha tanh(gate / alpha) sigmoid(gate) * limit tanh(up / limit), given alpha, limit and
 * their reciprocals. The gate is multiplied by its sigmoid first: gate * up could overflow, and
 * infinity times a sigmoid of 0 is NaN. */
__device__ __forceinline__ float soft_capped_activation(float gate, float up, float alpha,
                                                        float inverse_alpha, float limit,
                                                        float inverse_limit) {
  float y;
  asm volatile("{\n"
               ".reg .f32 g, u, z, t;\n"
               ".reg .pred near;\n" MOELORA_PTX_SOFT_CAP("g", "%1", "%3", "%4")
                   MOELORA_PTX_SOFT_CAP("u", "%2", "%5", "%6") //
               "mul.f32 t, %1, 0fBFB8AA3B;\n"                  // -log2(e)
               "ex2.approx.ftz.f32 t, t;\n"
               "add.f32 t, t, 0f3F800000;\n"
               "rcp.approx.ftz.f32 t, t;\n"
               "mul.f32 g, g, t;\n"
               "mul.f32 %0, g, u;\n"
               "}"
               : "=f"(y)
               : "f"(gate), "f"(up), "f"(alpha), "f"(inverse_alpha), "f"(limit),
                 "f"(inverse_limit));
  return y;
}

/* Returns cap tanh(x / cap), and sets `slope` to its derivative. `inverse` is 1 / cap. */
__device__ __forceinline__ float soft_cap(float x, float cap, float inverse, float &slope) {
  const float z = x * inverse, r = sigmoid_of_power(2.8853900817779268f * fabsf(z));
  slope = 4.f * r * (1.f - r);
  const float near = fmaf(fmaf(z * z, 0.12877092f, -0.33324607f), z * z * x, x);
  return fabsf(z) < 0.25f ? near : copysignf(cap * fmaf(-2.f, r, 1.f), x);
}

#endif
