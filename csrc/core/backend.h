/* Interface of a backend. validate*.c turn the public arguments of a call into a problem
 * (problems.h), plan_*.c turn (problem, device) into a plan (plans.h), and the backend executes
 * (problem, plan, exec). */
#pragma once

#include "core/plans.h"
#include "core/problems.h"

MOELORA_BEGIN_C

/* Names of a moelora_dtype, in the order of the enumerators. */
#define MOELORA_DTYPES(X) X(float32) X(bfloat16) X(float16) X(int32) X(int64) X(bool) X(uint8)
/* Dtypes of torch that no argument may have. They are passed as MOELORA_FOREIGN plus an index into
 * this list, or plus its length for any other dtype, so that checks can name them. */
#define MOELORA_FOREIGN_DTYPES(X)                                                                  \
  X(float64)                                                                                       \
  X(int8)                                                                                          \
  X(int16)                                                                                         \
  X(uint16)                                                                                        \
  X(uint32)                                                                                        \
  X(uint64)                                                                                        \
  X(float8_e4m3fn)                                                                                 \
  X(float8_e4m3fnuz)                                                                               \
  X(float8_e5m2)                                                                                   \
  X(float8_e5m2fnuz)                                                                               \
  X(complex32)                                                                                     \
  X(complex64)                                                                                     \
  X(complex128)
enum { MOELORA_FOREIGN = 64 };

/* Maximum number of devices of one kind. */
#define MOELORA_MAX_DEVICES 64

/* Properties of a device that plans and launches may depend on; they are queried once. */
typedef struct moelora_device_info {
  moelora_device device;
  int32_t compute_capability;  /* CUDA: 80, 89, 90, ... */
  int32_t num_units;           /* SMs, or CPU threads */
  uint32_t cpu_isa;            /* bits of moelora_isa */
  int32_t l2_bytes;            /* CUDA */
  int32_t shared_bytes;        /* CUDA: maximum per CTA, by opt-in */
  int32_t clock_mhz;           /* CUDA: maximum SM clock; 0: unknown */
  int64_t memory_bytes_per_us; /* CUDA: peak memory bandwidth; 0: unknown */
  bool overlaps;               /* CUDA: the loaded code supports programmatic dependent launch */
} moelora_device_info;

/* Types of a backend's functions, moelora_<backend>_<NAME>, one for each operator and conversion.
 *
 * The layout of an operator's workspace is a function of (problem, plan, exec). If `bytes` is not
 * NULL, exec has no workspace, and the operator only sets *bytes to the size that it needs.
 * moelora_run passes the same device and at most as many workers, so that this size suffices. */
#define OPERATOR(NAME, PROBLEM, PLAN, ...)                                                         \
  typedef moelora_status moelora_##NAME##_function(const moelora_##PROBLEM *problem,               \
                                                   const moelora_##PLAN *plan,                     \
                                                   const moelora_exec *exec, size_t *bytes);
#define CONVERSION(NAME, PROBLEM)                                                                  \
  typedef moelora_status moelora_##NAME##_function(const moelora_##PROBLEM *problem,               \
                                                   const moelora_exec *exec);
#include "core/operators.inc"

/* A backend executes plans. Every backend implements all operators. */
typedef struct moelora_backend {
  const char *name;
  moelora_status (*count_devices)(int32_t *count);
  /* `enter` makes a device current for the calling thread and saves the previous one in `outer`;
   * `leave` restores it. `device_info` and launches are called in between. */
  moelora_status (*enter)(int32_t device_index, int32_t *outer);
  moelora_status (*leave)(int32_t device_index, int32_t outer);
  moelora_status (*device_info)(int32_t device_index, moelora_device_info *info);
#define OPERATOR(NAME, ...) moelora_##NAME##_function *NAME;
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"
  bool (*is_built)(const moelora_variant *variant); /* NULL: all variants of its table are built */
} moelora_backend;

extern const moelora_backend moelora_cpu_backend;
#ifdef MOELORA_WITH_CUDA
extern const moelora_backend moelora_cuda_backend;
#endif

/* Arguments of the conversions. */
typedef struct moelora_pack_weights_args {
  moelora_tensor w, out;
} moelora_pack_weights_args;

typedef struct moelora_pack_quantized_args {
  moelora_quantized w;
  moelora_layout layout;
  moelora_dtype dtype; /* of the activations */
  moelora_tensor tiles;
} moelora_pack_quantized_args;

typedef struct moelora_unpack_quantized_args {
  moelora_tensor tiles;
  moelora_layout layout;
  moelora_tensor out;
} moelora_unpack_quantized_args;

/* validate*.c: moelora_check_<NAME> checks the arguments and fills the problem.
 * run.c: moelora_run_<NAME> checks and runs a conversion.
 * plan_*.c: moelora_plan_<NAME> fills the plan, which plans.h describes. */
#define OPERATOR(NAME, PROBLEM, PLAN, ...)                                                         \
  moelora_status moelora_check_##NAME(const moelora_##NAME##_args *args,                           \
                                      moelora_##PROBLEM *problem);                                 \
  moelora_status moelora_plan_##NAME(const moelora_##PROBLEM *problem,                             \
                                     const moelora_device_info *device, moelora_##PLAN *plan);
#define CONVERSION(NAME, PROBLEM)                                                                  \
  moelora_status moelora_check_##NAME(const moelora_##NAME##_args *args,                           \
                                      moelora_##PROBLEM *problem);                                 \
  moelora_status moelora_run_##NAME(const moelora_##NAME##_args *args, const moelora_exec *exec);
#include "core/operators.inc"

/* plan_sort.c: returns the maximum number of blocks of `rows` rows in an alignment in which all
 * blocks of a cluster (`cluster` of them) belong to one expert. */
int64_t moelora_max_blocks(const moelora_routes *routes, int32_t rows, int32_t cluster);
/* plan_sort.c: returns how many adapters an alignment distinguishes, counting "none" as one; 1 if
 * it ignores adapters. */
int64_t moelora_adapter_keys(moelora_align_mode mode, const moelora_routes *routes);

/* device.c: returns the number of threads that a CPU call may use; 1 for a GPU. */
int32_t moelora_workers(const moelora_exec *exec);
/* device.c: returns the cached properties of a device that moelora_find_device has found. */
const moelora_device_info *moelora_known_device(moelora_device device, int32_t index);

/* status.c: clears this thread's error message. */
void moelora_clear_error(void);
/* status.c: records this thread's error message and returns `status`. */
moelora_status moelora_fail(moelora_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* status.c: reports that a backend has no kernel for a planned variant. That is a bug: checks and
 * plans reject invalid arguments before anything is launched. */
moelora_status moelora_no_kernel(const char *variant, const char *why);

#define MOELORA_TRY(CALL)                                                                          \
  do {                                                                                             \
    moelora_status status_ = (CALL);                                                               \
    if (status_ != MOELORA_OK)                                                                     \
      return status_;                                                                              \
  } while (0)

/* Sets *BYTES and returns from an operator, if it is called only for the size of its workspace. */
#define MOELORA_MEASURE(BYTES, SIZE)                                                               \
  do {                                                                                             \
    if (BYTES) {                                                                                   \
      *(BYTES) = (SIZE);                                                                           \
      return MOELORA_OK;                                                                           \
    }                                                                                              \
  } while (0)

/* Returns a * b, saturating at SIZE_MAX; for the sizes of workspaces. */
static inline size_t moelora_times(size_t a, size_t b) {
  size_t product;
  return __builtin_mul_overflow(a, b, &product) ? SIZE_MAX : product;
}

/* Carves a workspace into aligned parts. If base is NULL, parts are NULL and `used` is the
 * required size. On overflow `used` stays SIZE_MAX, and run.c rejects the call. */
typedef struct moelora_arena {
  char *base;
  size_t used;
} moelora_arena;

/* Returns an arena over the whole workspace of a call. */
static inline moelora_arena moelora_workspace_of(const moelora_exec *exec) {
  moelora_arena arena = {(char *)exec->workspace, 0};
  return arena;
}

static inline void *moelora_take(moelora_arena *arena, size_t bytes) {
  const size_t at = arena->used;
  size_t end;
  arena->used = __builtin_add_overflow(at, bytes, &end) || end > SIZE_MAX - 255
                    ? SIZE_MAX
                    : (end + 255) & ~(size_t)255;
  return arena->base ? arena->base + at : NULL;
}

/* Allocates `count` elements of `bytes` each. */
static inline void *moelora_take_array(moelora_arena *arena, size_t count, size_t bytes) {
  return moelora_take(arena, moelora_times(count, bytes));
}

/* plan_gemm.c: returns the factors that kernels read. Float32 factors of a 16-bit call get
 * contiguous copies in the arena, which the backend fills; without an arena (NULL) only their
 * strides are set. Other factors are returned as they are. depth: K of A. */
moelora_factors moelora_rounded(const moelora_factors *factors, int64_t depth,
                                const moelora_routes *routes, moelora_dtype dtype,
                                moelora_arena *arena);

MOELORA_END_C
