/* Common parts of all C tests: checks that report their line, memory with guard bands, random
 * tensors. Programs print one line and return 0, or stop at the first failure. */
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moelora.h"

#define FAIL(...)                                                                                  \
  do {                                                                                             \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                \
    fprintf(stderr, __VA_ARGS__);                                                                  \
    fprintf(stderr, "\n");                                                                         \
    exit(1);                                                                                       \
  } while (0)

#define CHECK(CONDITION)                                                                           \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      FAIL("%s", #CONDITION);                                                                      \
  } while (0)

#define CHECK_INT(GOT, WANT)                                                                       \
  do {                                                                                             \
    long long got_ = (GOT), want_ = (WANT);                                                        \
    if (got_ != want_)                                                                             \
      FAIL("%s is %lld, expected %lld", #GOT, got_, want_);                                        \
  } while (0)

#define CHECK_OK(CALL)                                                                             \
  do {                                                                                             \
    moelora_status status_ = (CALL);                                                               \
    if (status_ != MOELORA_OK)                                                                     \
      FAIL("%s: status %d, %s", #CALL, (int)status_, moelora_error_message());                     \
    if (*moelora_error_message())                                                                  \
      FAIL("%s: succeeded with the message '%s'", #CALL, moelora_error_message());                 \
  } while (0)

#define CHECK_FAILS(CALL, STATUS, MESSAGE)                                                         \
  do {                                                                                             \
    moelora_status status_ = (CALL);                                                               \
    if (status_ != (STATUS) || strcmp(moelora_error_message(), (MESSAGE)) != 0)                    \
      FAIL("%s\n  got:      %d '%s'\n  expected: %d '%s'", #CALL, (int)status_,                    \
           moelora_error_message(), (int)(STATUS), (MESSAGE));                                     \
  } while (0)

#define CHECK_INVALID(CALL, MESSAGE) CHECK_FAILS(CALL, MOELORA_INVALID_ARGUMENT, MESSAGE)

/* ---- memory: every block lies between guard bands ---- */

enum { GUARD = 256, MAX_BLOCKS = 256 };

typedef struct block {
  unsigned char *raw;
  size_t bytes;
} block;

static block blocks[MAX_BLOCKS];
static int num_blocks;

static inline void *allocate(size_t bytes) {
  CHECK(num_blocks < MAX_BLOCKS);
  size_t whole = (bytes + 2 * GUARD + 255) & ~(size_t)255;
  unsigned char *raw = aligned_alloc(256, whole);
  CHECK(raw);
  memset(raw, 0xa5, whole);
  blocks[num_blocks++] = (block){raw, bytes};
  return raw + GUARD;
}

static inline void check_guards(void) {
  for (int i = 0; i < num_blocks; i++) {
    const block *b = &blocks[i];
    for (int j = 0; j < GUARD; j++)
      if (b->raw[j] != 0xa5 || b->raw[GUARD + b->bytes + (size_t)j] != 0xa5)
        FAIL("block %d of %zu bytes: a guard band was written", i, b->bytes);
  }
}

static inline void release_all(void) {
  check_guards();
  while (num_blocks)
    free(blocks[--num_blocks].raw);
}

/* ---- random numbers: xorshift64* ---- */

static uint64_t random_state = 1;

static inline void seed(uint64_t value) {
  random_state = value * 0x9e3779b97f4a7c15u + 1;
}

static inline uint64_t random_bits(void) {
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545f4914f6cdd1du >> 32;
}

static inline int64_t random_in(int64_t low, int64_t high) { /* inclusive */
  return low + (int64_t)(random_bits() % (uint64_t)(high - low + 1));
}

static inline double random_unit(void) { /* [-1, 1) */
  return (double)random_bits() / 2147483648.0 - 1.0;
}

/* ---- values ---- */

static inline size_t dtype_bytes(moelora_dtype dtype) {
  static const size_t bytes[] = {4, 2, 2, 4, 8, 1, 1};
  return bytes[dtype];
}

static inline const char *dtype_name(moelora_dtype dtype) {
  static const char *names[] = {"f32", "bf16", "f16", "i32", "i64", "bool", "u8"};
  return names[dtype];
}

/* Nearest value with `digits` binary digits and exponents from `least` on, ties to even. */
static inline double round_to_digits(double x, int digits, int least) {
  if (x == 0 || !isfinite(x))
    return x;
  int exponent;
  frexp(x, &exponent);
  int unit = (exponent < least ? least : exponent) - digits;
  return ldexp(nearbyint(ldexp(x, -unit)), unit);
}

static inline void write_value(void *data, moelora_dtype dtype, int64_t at, double x) {
  if (dtype == MOELORA_F32) {
    ((float *)data)[at] = (float)x;
  } else if (dtype == MOELORA_BF16) {
    float rounded = (float)round_to_digits(x, 8, -125);
    uint32_t bits;
    memcpy(&bits, &rounded, 4);
    ((uint16_t *)data)[at] = (uint16_t)(bits >> 16);
  } else if (dtype == MOELORA_F16) {
    double magnitude = fabs(round_to_digits(x, 11, -13));
    uint16_t bits = signbit(x) ? 0x8000 : 0;
    int exponent;
    frexp(magnitude, &exponent);
    if (magnitude >= 0x1p-14)
      bits |= (uint16_t)((exponent + 14) << 10 | ((int)ldexp(magnitude, 11 - exponent) & 1023));
    else
      bits |= (uint16_t)ldexp(magnitude, 24);
    ((uint16_t *)data)[at] = bits;
  } else if (dtype == MOELORA_I32) {
    ((int32_t *)data)[at] = (int32_t)x;
  } else if (dtype == MOELORA_I64) {
    ((int64_t *)data)[at] = (int64_t)x;
  } else if (dtype == MOELORA_U8) {
    ((uint8_t *)data)[at] = (uint8_t)x;
  } else {
    ((uint8_t *)data)[at] = x != 0;
  }
}

static inline double read_value(const void *data, moelora_dtype dtype, int64_t at) {
  switch (dtype) {
  case MOELORA_F32:
    return ((const float *)data)[at];
  case MOELORA_BF16: {
    uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  case MOELORA_F16: {
    uint16_t bits = ((const uint16_t *)data)[at];
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double x = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                              : ldexp(mantissa, -24);
    return bits & 0x8000 ? -x : x;
  }
  case MOELORA_I32:
    return ((const int32_t *)data)[at];
  case MOELORA_I64:
    return (double)((const int64_t *)data)[at];
  default:
    return ((const uint8_t *)data)[at];
  }
}

/* ---- tensors ---- */

static const moelora_tensor absent;

static inline moelora_tensor view(void *data, moelora_dtype dtype, int32_t ndim,
                                  const int64_t *size) {
  moelora_tensor t = {.data = data, .dtype = dtype, .ndim = ndim};
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; i--) {
    t.size[i] = size[i];
    t.stride[i] = stride;
    stride *= size[i];
  }
  return t;
}

static inline int64_t count_of(const moelora_tensor *t) {
  int64_t count = 1;
  for (int32_t i = 0; i < t->ndim; i++)
    count *= t->size[i];
  return count;
}

/* A contiguous tensor, filled with 0xa5 bytes. */
static inline moelora_tensor new_tensor(moelora_dtype dtype, int32_t ndim, const int64_t *size) {
  moelora_tensor t = view(NULL, dtype, ndim, size);
  t.data = allocate((size_t)count_of(&t) * dtype_bytes(dtype));
  return t;
}

#define SIZES(...)                                                                                 \
  (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]) {                     \
    __VA_ARGS__                                                                                    \
  }

static inline moelora_tensor random_tensor(moelora_dtype dtype, double scale, int32_t ndim,
                                           const int64_t *size) {
  moelora_tensor t = new_tensor(dtype, ndim, size);
  for (int64_t i = 0; i < count_of(&t); i++)
    write_value(t.data, dtype, i, scale * random_unit());
  return t;
}

static inline moelora_tensor random_ids(moelora_dtype dtype, int64_t low, int64_t high,
                                        int32_t ndim, const int64_t *size) {
  moelora_tensor t = new_tensor(dtype, ndim, size);
  for (int64_t i = 0; i < count_of(&t); i++)
    write_value(t.data, dtype, i, (double)random_in(low, high));
  return t;
}

/* A contiguous copy of a contiguous tensor. */
static inline moelora_tensor copy_of(const moelora_tensor *t) {
  moelora_tensor copy = new_tensor(t->dtype, t->ndim, t->size);
  memcpy(copy.data, t->data, (size_t)count_of(t) * dtype_bytes(t->dtype));
  return copy;
}

static inline bool same_bytes(const moelora_tensor *a, const moelora_tensor *b) {
  return memcmp(a->data, b->data, (size_t)count_of(a) * dtype_bytes(a->dtype)) == 0;
}

/* The same values with rows `stride` elements apart and large values in between. */
static inline moelora_tensor spread_rows(moelora_tensor t, int64_t stride) {
  moelora_tensor wide = new_tensor(t.dtype, SIZES(t.size[0], stride));
  int64_t cols = t.size[1];
  for (int64_t i = 0; i < t.size[0]; i++)
    for (int64_t j = 0; j < stride; j++)
      write_value(wide.data, t.dtype, i * stride + j,
                  j < cols ? read_value(t.data, t.dtype, i * cols + j) : 3e4);
  wide.size[1] = cols;
  return wide;
}

/* ---- calls ---- */

static const moelora_exec serial = {.device = MOELORA_CPU};

static inline void give_workspace(moelora_exec *exec, size_t bytes) {
  exec->workspace = bytes ? allocate(bytes) : NULL;
  exec->workspace_bytes = bytes;
}

/* call_gemm(args, exec) prepares and runs; gemm_bytes(args, exec, bytes) queries the workspace
 * size. */
#define CALLS(NAME)                                                                                \
  static inline moelora_status call_##NAME(const moelora_##NAME##_args *args,                      \
                                           const moelora_exec *exec) {                             \
    moelora_call call;                                                                             \
    moelora_status status = moelora_prepare_##NAME(args, exec, &call);                             \
    return status == MOELORA_OK ? moelora_run(&call, exec) : status;                               \
  }                                                                                                \
  static inline moelora_status NAME##_bytes(const moelora_##NAME##_args *args,                     \
                                            const moelora_exec *exec, size_t *bytes) {             \
    moelora_call call = {0};                                                                       \
    moelora_status status = moelora_prepare_##NAME(args, exec, &call);                             \
    *bytes = call.workspace_bytes;                                                                 \
    return status;                                                                                 \
  }
CALLS(align)
CALLS(gemm)
CALLS(gemm_backward)
CALLS(experts)
CALLS(experts_backward)
CALLS(align_lists)
CALLS(delta)
CALLS(mlp_delta)

/* A call with exactly the workspace that it asks for; with a byte less it is refused. */
#define CHECK_RUN(NAME, ARGS, EXEC)                                                                \
  do {                                                                                             \
    moelora_exec exec_ = (EXEC);                                                                   \
    size_t bytes_;                                                                                 \
    CHECK_OK(NAME##_bytes(ARGS, &exec_, &bytes_));                                                 \
    give_workspace(&exec_, bytes_);                                                                \
    CHECK_OK(call_##NAME(ARGS, &exec_));                                                           \
    exec_.workspace_bytes -= bytes_ ? 1 : 0;                                                       \
    if (bytes_)                                                                                    \
      CHECK_INT(call_##NAME(ARGS, &exec_), MOELORA_WORKSPACE_TOO_SMALL);                           \
  } while (0)

/* ---- activations ---- */

enum { NUM_ACTIVATIONS = MOELORA_SWIGLUSTEP + 1 };

static inline bool takes_limit(moelora_activation activation) {
  return activation != MOELORA_GELU && activation != MOELORA_RELU2;
}
