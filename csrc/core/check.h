/* Checks of arguments, shared by the validation of all operators. Each check returns MOELORA_OK, or
 * records a message with the argument's name and its actual and expected values. */
#pragma once

#include "core/backend.h"

/* A tensor argument. Its name is the one that the caller gave it, or that of its field. `index` >=
 * 0 marks an entry of an array, as in lora_a[index]. */
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

/* A size that other dimensions must equal, and its origin for messages: a dimension of an argument,
 * or a phrase. Only a check that fails formats it. */
typedef struct moelora_extent {
  int64_t value;      /* MOELORA_ANY_SIZE: unknown, and not compared */
  const char *name;   /* of the argument, or the phrase */
  int32_t index, dim; /* dim < 0: `name` is a phrase */
  const char *scale;  /* appended to the dimension, e.g. " * 64"; NULL: nothing */
  int32_t slices;     /* above 1: the number of slices that the size was divided by */
} moelora_extent;

enum { MOELORA_ANY_SIZE = -1 };

static inline moelora_extent moelora_size_of(moelora_arg arg, int32_t dim) {
  return (moelora_extent){arg.tensor->size[dim], arg.name, arg.index, dim, NULL, 1};
}

static inline moelora_extent moelora_words(int64_t value, const char *words) {
  return (moelora_extent){value, words, -1, -1, NULL, 1};
}

typedef struct moelora_label {
  char text[96];
} moelora_label;

/* Return text for messages: "lora_a[1]", "w.size(1) * 64 / 2 slices". */
moelora_label moelora_label_of(moelora_arg arg);
moelora_label moelora_label_extent(moelora_extent extent);

#define MOELORA_REQUIRE(CONDITION, ...)                                                            \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return moelora_fail(MOELORA_INVALID_ARGUMENT, __VA_ARGS__);                                  \
  } while (0)

/* FIELD is size or stride. The message is "x.size(1) is 15, ", followed by the formatted text. */
#define MOELORA_REQUIRE_DIM(CONDITION, ARG, FIELD, DIM, ...)                                       \
  do {                                                                                             \
    if (!(CONDITION))                                                                              \
      return moelora_fail_dim(ARG, #FIELD, DIM, (ARG).tensor->FIELD[DIM], __VA_ARGS__);            \
  } while (0)
moelora_status moelora_fail_dim(moelora_arg arg, const char *field, int32_t dim, int64_t value,
                                const char *format, ...) __attribute__((format(printf, 5, 6)));

/* No process has more address space; small multiples of this stay below 2^63. */
#define MOELORA_MAX_BYTES ((int64_t)1 << 56)

/* names.c */
bool moelora_is_foreign(moelora_dtype dtype);
const char *moelora_dtype_name(moelora_dtype dtype);
const char *moelora_format_name(moelora_format format);
const char *moelora_kernel_name(moelora_kernel_format kernel);
const char *moelora_order_name(moelora_row_order order);

bool moelora_is_absent(const moelora_tensor *tensor);
/* Returns the number of bytes from the first element to the end of the last one, or -1 if it
 * exceeds MOELORA_MAX_BYTES. Strides must not be negative. */
int64_t moelora_span_bytes(const moelora_tensor *tensor);

/* ---- checks of one tensor ---- */

/* Dtypes that an argument may have: DTYPE in operators.inc. */
typedef enum moelora_class {
  MOELORA_CLASS_compute,
  MOELORA_CLASS_half,
  MOELORA_CLASS_scales,
  MOELORA_CLASS_bytes,
  MOELORA_CLASS_i32,
  MOELORA_CLASS_f32,
  MOELORA_CLASS_flags,
  MOELORA_CLASS_ids,
  MOELORA_CLASS_weights,
  MOELORA_CLASS_special, /* the checks of views in arguments.c skip this class and the next */
  MOELORA_CLASS_number,
} moelora_class;

/* Requires `ndim` dimensions, sizes and strides that are not negative and keep every element
 * addressable, and data aligned to elements. Messages quote `layout` as the expected shape. */
moelora_status moelora_check_memory(moelora_arg arg, int32_t ndim, const char *layout);
/* The same for a `layout` that is a SHAPE of operators.inc; also requires sizes up to INT32_MAX. */
moelora_status moelora_check_view(moelora_arg arg, const char *layout);
moelora_status moelora_check_size(moelora_arg arg, int32_t dim, moelora_extent want);
moelora_status moelora_check_class(moelora_arg arg, moelora_class dtypes);
/* Requires that `arg` has the dtype of `like`. */
moelora_status moelora_check_dtype(moelora_arg arg, moelora_arg like);
/* Requires that every dimension has elements. */
moelora_status moelora_check_at_least_one(moelora_arg arg);
/* Requires that a number among the arguments is at least `least`. */
moelora_status moelora_check_at_least(const char *name, int64_t value, int64_t least);
/* Requires stride 1 in the last dimension. */
moelora_status moelora_check_rows(moelora_arg arg);
/* Requires contiguous elements in memory order. */
moelora_status moelora_check_contiguous(moelora_arg arg);
/* Returns the stride of a dimension. If its size is 1, callers may leave any stride there; the
 * function then returns the one that a contiguous tensor would have. */
int64_t moelora_stride(const moelora_tensor *tensor, int32_t dim);
/* Returns the data of a tensor and stores its first `count` strides, 0 for missing dimensions. */
void *moelora_take_view(const moelora_tensor *tensor, int64_t *strides, int32_t count);

/* ---- rows of operators.inc: arguments.c ---- */

typedef enum moelora_use {
  MOELORA_READ,
  MOELORA_MAY_READ,
  MOELORA_WRITTEN,
  MOELORA_MAY_WRITE,
} moelora_use;

typedef struct moelora_row {
  const char *name, *name_b; /* name_b: of the factors B of a moelora_lora; NULL: a tensor */
  const char *shape;
  size_t at; /* offset in the arguments */
  moelora_class dtype;
  moelora_use use;
  int32_t least; /* minimum of a number */
} moelora_row;

enum { MOELORA_MAX_NAMED = 24 };

/* The arguments of a call, and the dtype and sizes that checks have found so far. */
typedef struct moelora_arguments {
  const void *args;
  const moelora_row *rows;
  int32_t count;
  moelora_arg compute; /* first compute tensor; others must have its dtype; tensor NULL: none yet */
  const moelora_tensor *written; /* an input that is checked as an output; NULL: none */
  const moelora_tensor *aliased; /* an input that an output may overwrite; NULL: none */
  moelora_extent slots;          /* max_loras; if unknown, the first factor defines it */
  int32_t num_sizes;
  struct {
    const char *name; /* ends at a comma or a bracket */
    size_t length;
    moelora_extent extent;
  } sizes[MOELORA_MAX_NAMED];
} moelora_arguments;

/* moelora_begin_<NAME> checks numbers, and the views and dtypes of tensors that are not special. */
#define OPERATOR(NAME, ...)                                                                        \
  moelora_status moelora_begin_##NAME(const moelora_##NAME##_args *args, moelora_arguments *all);
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#include "core/operators.inc"

/* Returns the row of a field of the arguments. */
const moelora_row *moelora_row_of(const moelora_arguments *all, const void *field);
/* Requires that an optional tensor is present, and checks its view. */
moelora_status moelora_check_present(const moelora_arguments *all, const moelora_tensor *field);
/* Defines the size that shapes call `name`, before moelora_check_fit() compares shapes with it. */
void moelora_name_size(moelora_arguments *all, const char *name, moelora_extent extent);
/* Requires that dimensions with the same name have the same size; the first row with a name defines
 * its size, unless moelora_name_size did. Then requires that elements of an output share no memory
 * with each other or with another tensor. */
moelora_status moelora_check_fit(moelora_arguments *all);

/* ---- weights, factors, layers, routing ---- */

/* Expert weights that multiply activations `x`. The tiles of quantized weights do not define N and
 * K: the layout defines N, and the caller K. */
typedef struct moelora_weights_arg {
  moelora_arg tensor, x;
  const moelora_layout *layout;
  const char *layout_name; /* "w_layout" */
  moelora_row_order order; /* required order of quantized rows */
  moelora_extent n, k;     /* the check fills in both for native weights, n for others */
} moelora_weights_arg;

/* validate_weights.c: checks row-major, packed or quantized weights. */
moelora_status moelora_check_weights(moelora_weights_arg *arg, moelora_weights *weights,
                                     int32_t *num_experts);

/* Requirements on the factors of a projection. */
typedef struct moelora_factors_arg {
  moelora_arg like;          /* defines the dtype, unless the factors are wide */
  bool may_be_wide;          /* may be float32 if `like` is 16-bit; the call then rounds them */
  int32_t least, most;       /* slices */
  const char *slices;        /* end of the message that refuses a number of slices */
  moelora_extent experts, k; /* k.value 0: a[] is not read */
  moelora_extent n; /* columns of all slices; MOELORA_ANY_SIZE: each has as many as the first */
  bool skips_b;
  bool widths_differ; /* each slice may have another number of columns, if n is MOELORA_ANY_SIZE */
} moelora_factors_arg;

/* validate_weights.c: describes the factors of a projection with weights. */
moelora_factors_arg moelora_factors_of(const moelora_weights_arg *arg, int32_t most);
/* validate_factors.c: describes the factors of a projection without weights. */
moelora_factors_arg moelora_factors_alone(moelora_arg x, int32_t num_experts, int32_t most);
/* validate_factors.c: checks all slices of a field. */
moelora_status moelora_check_factors(moelora_arguments *all, const moelora_lora *lora,
                                     const moelora_factors_arg *arg, moelora_factors *factors);

/* validate.c: checks the arguments of a projection, forward or backward, except `out`; with
 * num_experts, w may be absent. The caller calls moelora_check_fit(). */
moelora_status moelora_check_projection(moelora_arguments *all, const moelora_gemm_args *args,
                                        const int32_t *num_experts, moelora_gemm_problem *problem);
/* validate.c: checks the arguments of a layer, forward or backward, except `out` and `saved`. `all`
 * has the rows of the operator; the caller calls moelora_check_fit(). */
moelora_status moelora_check_layer(moelora_arguments *all, const moelora_experts_args *args,
                                   moelora_experts_problem *problem);
/* validate.c: checks the tensors that a layer saves for its backward; gate_up must be present. */
moelora_status moelora_check_saved(moelora_arguments *all, const moelora_experts_args *args,
                                   moelora_experts_problem *problem);

/* validate_routing.c: fill the routes, after the views are checked. The first two define the sizes
 * M, top_k and M * top_k, the third max_loras. */
moelora_status moelora_take_routing(moelora_arguments *all, const moelora_routing *routing,
                                    bool need_weights, moelora_routes *routes);
moelora_status moelora_take_rows(moelora_arguments *all, moelora_extent tokens,
                                 moelora_extent top_k, const moelora_routing *routing,
                                 bool need_weights, moelora_routes *routes);
void moelora_take_adapters(moelora_arguments *all, const moelora_adapters *adapters,
                           moelora_routes *routes);
/* Drops the adapter tables if no row has an adapter. */
void moelora_drop_unused_tables(moelora_routes *routes);
/* Requires that row numbers fit 32 bits after the rows of each expert, or (expert, adapter), are
 * padded to whole blocks. */
moelora_status moelora_check_padded_rows(const moelora_routing *routing,
                                         const moelora_routes *routes, bool by_adapter);
moelora_status moelora_take_lists(const moelora_arguments *all, const moelora_lists *lists,
                                  moelora_list_blocks *blocks);
