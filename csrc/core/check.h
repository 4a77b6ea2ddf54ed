/* Checks of one tensor view, shared by the validation of all operators. Each returns MOELORA_OK or
 * records a message that names the argument, what was got and what was expected. */
#ifndef MOELORA_CORE_CHECK_H
#define MOELORA_CORE_CHECK_H

#include "core/backend.h"

/* A tensor under the name that its caller gave it, else its field's; `index` >= 0 names an entry of
 * a list, lora_a[index]. */
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

/* Where a number that sizes are compared with is from: a dimension of an argument, or words. It is
 * made into text only when a check fails. */
typedef struct moelora_source {
  const char *name;   /* of an argument, or the words */
  int32_t index, dim; /* dim < 0: words */
  const char *scale;  /* behind the dimension, " * 64"; NULL: nothing */
  int32_t slices;     /* above 1: among so many the number was divided */
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

/* As messages call them: "lora_a[1]", "w.size(1) * 64 / 2 slices". */
moelora_label moelora_label_of(moelora_arg arg);
moelora_label moelora_label_source(moelora_source source);

#define MOELORA_REQUIRE(CONDITION, ...)                                                            \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return moelora_fail(MOELORA_INVALID_ARGUMENT, __VA_ARGS__);                                  \
  } while (0)

/* More than any machine addresses, and far enough from 2^63 that multiples stay exact. */
#define MOELORA_MAX_BYTES ((int64_t)1 << 56)

/* Dtypes of torch that no argument may have. A descriptor says MOELORA_FOREIGN plus the place in
 * this list, or plus the length of the list for any other, so that the check which knows what an
 * argument may be names what it is. */
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
/* Bytes from the first element to the end of the last one; -1 beyond MOELORA_MAX_BYTES. Strides are
 * not negative. */
int64_t moelora_span_bytes(const moelora_tensor *tensor);

/* Dimensions, sizes up to INT32_MAX, strides that are not negative and keep every element
 * addressable, a data pointer aligned to its elements. `layout` describes the expected dimensions,
 * e.g. "[M, K]". */
moelora_status moelora_check_view(moelora_arg arg, int32_t ndim, const char *layout);
/* The same without the limit on sizes. */
moelora_status moelora_check_large_view(moelora_arg arg, int32_t ndim, const char *layout);
/* size(dim) == want, where `want` is the value of `source`. */
moelora_status moelora_check_size(moelora_arg arg, int32_t dim, int64_t want,
                                  moelora_source source);
/* `source` is the name of another argument, or NULL. */
moelora_status moelora_check_dtype(moelora_arg arg, moelora_dtype want, const char *source);
/* dtype float32, bfloat16 or float16 */
moelora_status moelora_check_compute_dtype(moelora_arg arg);
/* dtype int32 or int64 */
moelora_status moelora_check_id_dtype(moelora_arg arg);
/* The last dimension has stride 1. */
moelora_status moelora_check_rows(moelora_arg arg);
/* Elements follow each other in memory order. */
moelora_status moelora_check_contiguous(moelora_arg arg);
/* A contiguous vector of a fixed dtype. */
moelora_status moelora_check_vector(moelora_arg arg, moelora_dtype dtype, const char *layout);
/* No two indices of an output share memory. */
moelora_status moelora_check_distinct(moelora_arg arg);
/* An output shares no memory with another argument; an absent argument shares none. Views of equal
 * row stride that lie side by side in one buffer are told apart, others by their byte ranges. */
moelora_status moelora_check_disjoint(moelora_arg out, moelora_arg other);
/* The stride of a dimension; one of a single element gets that of a contiguous tensor, as callers
 * may leave anything there. */
int64_t moelora_stride(const moelora_tensor *tensor, int32_t dim);
/* Same memory, same layout. */
bool moelora_same_view(const moelora_tensor *a, const moelora_tensor *b);

/* One LoRA factor [max_loras, E or 1, *, *], where `dtype` is that of `dtype_source` and
 * `num_experts` the value of `experts_source`. */
moelora_status moelora_check_factor(moelora_arg arg, moelora_dtype dtype, const char *dtype_source,
                                    int64_t num_experts, moelora_source experts_source,
                                    const char *layout, moelora_factor *factor);
/* `out` shares no memory with the factors. */
moelora_status moelora_check_disjoint_lora(moelora_arg out, const moelora_lora *lora,
                                           const char *name_a, const char *name_b);

/* Expert weights as an argument, for activations `x`: what a check takes, and what messages call N
 * and K. Of quantised weights only tiles are there: N is in the layout, K is that of what they
 * multiply, `depth`, the value of `k`. */
typedef struct moelora_weights_arg {
  moelora_arg tensor, x;
  const moelora_layout *layout;
  const char *layout_name, *rows_name; /* "w_layout", "w_layout.rows" */
  moelora_row_order order;             /* that quantised rows must have */
  int64_t depth;
  moelora_source n, k; /* of other weights the check fills in both */
} moelora_weights_arg;

/* validate.c: all of a layer's arguments but `out` and `saved`. */
moelora_status moelora_check_layer(const moelora_experts_args *args,
                                   moelora_experts_problem *problem);
/* validate.c: `out` shares no memory with what a layer reads, `hidden_states` aside. */
moelora_status moelora_check_disjoint_layer(moelora_arg out, const moelora_experts_args *args);
/* validate_backward.c: where a layer saves, if it does. */
moelora_status moelora_check_saved(const moelora_experts_args *args,
                                   moelora_experts_problem *problem);

/* validate_weights.c: row-major, packed or quantised weights. */
moelora_status moelora_check_weights(moelora_weights_arg *arg, moelora_weights *weights,
                                     int32_t *num_experts);
/* The tensor that says in which dtype biases and factors are. */
moelora_arg moelora_dtype_source(const moelora_weights_arg *arg);

/* validate_routing.c: topk_ids, topk_weights, expert_map -> routes. */
moelora_status moelora_check_routing(const moelora_routing *routing, bool need_weights,
                                     moelora_routes *routes);
/* validate_routing.c: topk_weights -> routes, whose tokens and top_k are the values of sources. */
moelora_status moelora_check_topk_weights(const moelora_tensor *weights,
                                          moelora_source tokens_source, moelora_source top_k_source,
                                          moelora_routes *routes);
/* validate_routing.c: the adapter tables -> routes; `max_loras` is the value of `source`, the
 * tokens are those of `topk_ids`. */
moelora_status moelora_check_adapters(const moelora_adapters *adapters,
                                      const moelora_tensor *topk_ids, int64_t max_loras,
                                      moelora_source source, moelora_routes *routes);
/* validate_routing.c: `out` shares no memory with routing and adapters, all of them checked. */
moelora_status moelora_check_disjoint_routes(moelora_arg out, const moelora_routing *routing,
                                             const moelora_adapters *adapters);

#endif
