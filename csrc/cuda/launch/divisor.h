/* Division by an invariant integer (Granlund and Montgomery, "Division by invariant integers using
 * multiplication", 1994). */
#pragma once

#include <stdint.h>

/* n / value == (mulhi(n, magic) + n) >> shift for n < 2^31. */
typedef struct moelora_divisor {
  uint32_t value, magic, shift;
} moelora_divisor;

/* Returns the divisor for `value`. For 0, which divide() does not accept, only `value` is valid. */
static inline __host__ __device__ moelora_divisor moelora_divisor_of(uint32_t value) {
  moelora_divisor d = {value, 0, 0};
  if (value == 0)
    return d;
  while ((uint64_t)1 << d.shift < value)
    d.shift++;
  const uint64_t rest = ((uint64_t)1 << d.shift) - value;
  d.magic = (uint32_t)((rest << 32) / value + 1);
  return d;
}

#ifdef __CUDACC__
static __host__ __device__ __forceinline__ int ceil_divide(int a, int b) {
  return (a + b - 1) / b;
}

static __device__ __forceinline__ uint32_t divide(uint32_t n, const moelora_divisor &d) {
  return (__umulhi(n, d.magic) + n) >> d.shift;
}

/* Reconstructs a divisor from its value and magic. */
static __device__ __forceinline__ moelora_divisor divisor_with(uint32_t value, uint32_t magic) {
  return {value, magic, 32u - (uint32_t)__clz((int)value - 1)};
}
#endif
