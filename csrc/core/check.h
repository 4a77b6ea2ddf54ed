/* Checks of single tensor views, shared by the validation of all operators. Each returns
 * MOELORA_OK or records a message with the argument's name, the actual and the expected value. */
#ifndef MOELORA_CORE_CHECK_H
#define MOELORA_CORE_CHECK_H

#include "core/backend.h"

/* A tensor argument, with the name that the caller gave it or its field's name; `index` >= 0:
 * entry of a list, as in lora_a[index]. */
typedef struct moelora_arg {
  const char *name;
  int32_t index;
  const moelora_tensor *tensor;
} moelora_arg;

static inline moelora_arg moelora_entry(const char *field, int32_t index,
                                        const moelora_tensor *tensor) {
  return (moelora_arg){tensor->name ? tensor->name : field, index, tensor};
}

#define MOELORA_ARG(FIELD, TENSOR) moelora_entry((FIELD), -1, (TENSOR))

/* Origin of an expected size: a dimension of an argument, or words. Formatted only if a check
 * fails. */
typedef struct moelora_source {
  const char *name;   /* of an argument, or the words */
  int32_t index, dim; /* dim < 0: words */
  const char *scale;  /* appended to the dimension, e.g. " * 64"; NULL: nothing */
  int32_t slices;     /* above 1: the number of slices that the size was divided by */
} moelora_source;

static inline moelora_source moelora_size_of(moelora_arg arg, int32_t dim) {
  return (moelora_source){arg.name, arg.index, dim, NULL, 1};
}

static inline moelora_source moelora_words(const char *words) {
  return (moelora_source){words, -1, -1, NULL, 1};
}

typedef struct moelora_label {
  char text[96];
} moelora_label;

/* Text for messages: "lora_a[1]", "w.size(1) * 64 / 2 slices". */
moelora_label moelora_label_of(moelora_arg arg);
moelora_label moelora_label_source(moelora_source source);

#define MOELORA_REQUIRE(CONDITION, ...)                                                            \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return moelora_fail(MOELORA_INVALID_ARGUMENT, __VA_ARGS__);                                  \
  } while (0)

/* More than any machine addresses, and far enough below 2^63 that multiples stay exact. */
#define MOELORA_MAX_BYTES ((int64_t)1 << 56)

/* Dtypes of torch that no argument may have. A dtype of MOELORA_FOREIGN plus an index into this
 * list, or plus its length for any other dtype, lets the check of an argument name what it got. */
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

const char *moelora_dtype_name(moelora_dtype dtype);
const char *moelora_format_name(moelora_format format);
const char *moelora_kernel_name(moelora_kernel_format kernel);
bool moelora_is_absent(const moelora_tensor *tensor);
/* Bytes from the first element to the end of the last one; -1 beyond MOELORA_MAX_BYTES. Strides
 * must not be negative. */
int64_t moelora_span_bytes(const moelora_tensor *tensor);

/* Checks the number of dimensions, sizes up to INT32_MAX, strides that are not negative and keep
 * every element addressable, and a data pointer aligned to elements. `layout` describes the
 * expected dimensions, e.g. "[M, K]". */
moelora_status moelora_check_view(moelora_arg arg, int32_t ndim, const char *layout);
/* moelora_check_view() without the limit on sizes. */
moelora_status moelora_check_large_view(moelora_arg arg, int32_t ndim, const char *layout);
/* Requires size(dim) == want; `source` is the origin of `want`. */
moelora_status moelora_check_size(moelora_arg arg, int32_t dim, int64_t want,
                                  moelora_source source);
/* `source` is the name of another argument, or NULL. */
moelora_status moelora_check_dtype(moelora_arg arg, moelora_dtype want, const char *source);
/* dtype float32, bfloat16 or float16 */
moelora_status moelora_check_compute_dtype(moelora_arg arg);
/* dtype int32 or int64 */
moelora_status moelora_check_id_dtype(moelora_arg arg);
/* Requires stride 1 in the last dimension. */
moelora_status moelora_check_rows(moelora_arg arg);
/* Requires contiguous elements in memory order. */
moelora_status moelora_check_contiguous(moelora_arg arg);
/* Requires a contiguous vector of a fixed dtype. */
moelora_status moelora_check_vector(moelora_arg arg, moelora_dtype dtype, const char *layout);
/* Requires that no two indices of an output share memory. */
moelora_status moelora_check_distinct(moelora_arg arg);
/* Requires that an output shares no memory with another argument. Disjoint columns of a common
 * buffer (views with equal row strides) are recognized; otherwise byte ranges are compared. */
moelora_status moelora_check_disjoint(moelora_arg out, moelora_arg other);
/* Stride of a dimension. A dimension of size 1 gets the contiguous stride, since callers may leave
 * any value there. */
int64_t moelora_stride(const moelora_tensor *tensor, int32_t dim);
/* Same memory and same layout. */
bool moelora_same_view(const moelora_tensor *a, const moelora_tensor *b);

/* Checks a LoRA factor [max_loras, E or 1, *, *] against `dtype` (of `dtype_source`) and
 * `num_experts` (of `experts_source`). */
moelora_status moelora_check_factor(moelora_arg arg, moelora_dtype dtype, const char *dtype_source,
                                    int64_t num_experts, moelora_source experts_source,
                                    const char *layout, moelora_factor *factor);
/* Whether factors are float32 beside a 16-bit `dtype`, to which they are rounded first. */
bool moelora_are_wide(const moelora_lora *lora, moelora_dtype dtype);
/* Requires that `out` shares no memory with the factors. */
moelora_status moelora_check_disjoint_lora(moelora_arg out, const moelora_lora *lora,
                                           const char *name_a, const char *name_b);

/* Expert weights as an argument for activations `x`, and the names of N and K in messages.
 * Quantized weights are tiles: N is given by the layout, K is `depth`, whose origin is `k`. */
typedef struct moelora_weights_arg {
  moelora_arg tensor, x;
  const moelora_layout *layout;
  const char *layout_name, *rows_name; /* "w_layout", "w_layout.rows" */
  moelora_row_order order;             /* required order of quantized rows */
  int64_t depth;
  moelora_source n, k; /* for native weights the check fills in both */
} moelora_weights_arg;

/* validate.c: checks all arguments of a layer except `out` and `saved`. */
moelora_status moelora_check_layer(const moelora_experts_args *args,
                                   moelora_experts_problem *problem);
/* validate.c: requires that `out` shares no memory with the inputs of a layer, except
 * hidden_states. */
moelora_status moelora_check_disjoint_layer(moelora_arg out, const moelora_experts_args *args);
/* validate.c: the tensors that a layer saves for its backward, as arguments: gate_up, and the
 * shrink outputs of w13 and w2. */
enum { MOELORA_SAVED = 3 };
void moelora_saved_args(const moelora_saved *saved, moelora_arg args[MOELORA_SAVED]);
/* validate.c: checks their dtypes, shapes and rows. */
moelora_status moelora_check_saved_views(const moelora_experts_args *args,
                                         moelora_experts_problem *problem);

/* validate_weights.c: checks row-major, packed or quantized weights. */
moelora_status moelora_check_weights(moelora_weights_arg *arg, moelora_weights *weights,
                                     int32_t *num_experts);
/* The tensor that defines the dtype of biases and factors. */
moelora_arg moelora_dtype_source(const moelora_weights_arg *arg);

/* validate_routing.c: topk_ids, topk_weights, expert_map -> routes. */
moelora_status moelora_check_routing(const moelora_routing *routing, bool need_weights,
                                     moelora_routes *routes);
/* validate_routing.c: topk_weights -> routes. The sources are the origins of tokens and top_k. */
moelora_status moelora_check_topk_weights(const moelora_tensor *weights,
                                          moelora_source tokens_source, moelora_source top_k_source,
                                          moelora_routes *routes);
/* validate_routing.c: adapter tables -> routes. `source` is the origin of `max_loras`; the number
 * of tokens is that of `topk_ids`. */
moelora_status moelora_check_adapters(const moelora_adapters *adapters,
                                      const moelora_tensor *topk_ids, int64_t max_loras,
                                      moelora_source source, moelora_routes *routes);
/* validate_routing.c: requires that `out` shares no memory with the (checked) routing and
 * adapters. */
moelora_status moelora_check_disjoint_routes(moelora_arg out, const moelora_routing *routing,
                                             const moelora_adapters *adapters);

#endif
