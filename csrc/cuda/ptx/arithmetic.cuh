/* Arithmetic in PTX, where the compiler's choice of instructions is worse. */
#ifndef MOELORA_CUDA_PTX_ARITHMETIC_CUH
#define MOELORA_CUDA_PTX_ARITHMETIC_CUH

#include "cuda/ptx/mma.cuh"

/* Packed a * b + c, rounded once. */
template <class T> __device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (Element<T>::is_bf16)
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/* (a & mask) | bits. With two constants, the compiler emits two instructions. */
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

/* Broadcasts the low or high half of a register. Free: the multiply that consumes it selects the
 * half. */
template <int HALF> __device__ __forceinline__ uint32_t both_halves(uint32_t pair) {
  uint32_t d;
  if constexpr (HALF == 0)
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "mov.b32 %0, {low, low};\n"
        "}"
        : "=r"(d)
        : "r"(pair));
  else
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %1;\n"
        "mov.b32 %0, {high, high};\n"
        "}"
        : "=r"(d)
        : "r"(pair));
  return d;
}

/* max(a, b); NaN if either is. */
__device__ __forceinline__ float max_nan(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

/* min(a, b); NaN if either is. */
__device__ __forceinline__ float min_nan(float a, float b) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

/* 1 / (1 + 2^x) */
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

/* g' sigmoid(g' (a + b g'^2)) (u' + c) of the clamped g' and u'; a and b include a factor of
 * -log2(e). A single asm statement: otherwise the compiler interleaves all outputs of a thread and
 * runs out of registers. */
__device__ __forceinline__ float gated_activation(float gate, float up, float a, float b, float c,
                                                  float limit) {
  float y;
  asm volatile("{\n"
               ".reg .f32 g, u, t;\n"
               "min.NaN.f32 g, %1, %5;\n"
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
               : "f"(gate), "f"(up), "f"(a), "f"(b), "f"(limit), "f"(-limit), "f"(c));
  return y;
}

/* gated_activation with the constants of silu, without a limit. */
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

#endif
