/* The tensors of each operator as rows of operators.inc, and what all of them are checked for. */
#include <assert.h>
#include <string.h>

#include "core/check.h"

#define ROW(NAME, SHAPE, DTYPE, FIELD, USE)                                                        \
  {NAME, NULL, SHAPE, offsetof(args_type, FIELD), MOELORA_CLASS_##DTYPE, USE, 0},
#define PAIR(NAME_A, NAME_B, FIELD, USE)                                                           \
  {NAME_A, NAME_B, "", offsetof(args_type, FIELD), MOELORA_CLASS_special, USE, 0},
#define OPERATOR(NAME, ...)                                                                        \
  void moelora_arguments_of_##NAME(const moelora_##NAME##_args *args, moelora_arguments *all) {    \
    typedef moelora_##NAME##_args args_type;                                                       \
    static const moelora_row rows[] = {
#define INPUT(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_READ)
#define OPTIONAL(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_MAY_READ)
#define OUTPUT(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_WRITTEN)
#define OPTIONAL_OUTPUT(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_MAY_WRITE)
#define AT_LEAST(NAME, LEAST, FIELD)                                                               \
  {NAME, NULL, "", offsetof(args_type, FIELD), MOELORA_CLASS_number, MOELORA_READ, LEAST},
#define FACTORS(NAME_A, NAME_B, FIELD) PAIR(NAME_A, NAME_B, FIELD, MOELORA_READ)
#define FACTOR_GRADIENTS(NAME_A, NAME_B, FIELD) PAIR(NAME_A, NAME_B, FIELD, MOELORA_WRITTEN)
#define END(NAME)                                                                                  \
  }                                                                                                \
  ;                                                                                                \
  all->args = args;                                                                                \
  all->rows = rows;                                                                                \
  all->count = sizeof rows / sizeof *rows;                                                         \
  all->compute.tensor = NULL;                                                                      \
  all->written = all->aliased = NULL;                                                              \
  all->num_sizes = 0;                                                                              \
  }
#include "core/operators.inc"

static bool is_output(const moelora_row *row) {
  return row->use == MOELORA_WRITTEN || row->use == MOELORA_MAY_WRITE;
}

/* Returns the argument of a row with one tensor. */
static moelora_arg arg_of(const moelora_arguments *all, const moelora_row *row) {
  return MOELORA_ARG(row->name, (const moelora_tensor *)((const char *)all->args + row->at));
}

/* Whether views and sizes of a row are checked here: not those of weights, factors and gradients,
 * and not of absent optional tensors. */
static bool is_checked(const moelora_arguments *all, const moelora_row *row) {
  const bool optional = row->use == MOELORA_MAY_READ || row->use == MOELORA_MAY_WRITE;
  return row->dtype < MOELORA_CLASS_special &&
         !(optional && moelora_is_absent(arg_of(all, row).tensor));
}

/* ---- shapes as text: "[M, K] or [M * top_k, K]" ---- */

/* Returns the length of the name at the start of `shape`, up to the next comma or bracket. */
static size_t name_length(const char *shape) {
  return strcspn(shape, ",]");
}

static int32_t count_dims(const char *shape) {
  int32_t ndim = 1;
  for (; *shape != ']'; shape++)
    ndim += *shape == ',';
  return ndim;
}

/* Returns the alternative after `shape`, or NULL. */
static const char *next_shape(const char *shape) {
  const char *at = strstr(shape, "or [");
  return at ? at + 3 : NULL;
}

/* Returns the first alternative with `ndim` dimensions; the first of all if none has them. */
static const char *shape_with(const char *shape, int32_t ndim) {
  const char *at = shape;
  while (at && count_dims(at) != ndim)
    at = next_shape(at);
  return at ? at : shape;
}

static const char *name_of_dim(const char *shape, int32_t dim) {
  const char *name = shape + 1;
  for (; dim > 0; dim--)
    name += name_length(name) + 2;
  return name;
}

/* ---- views ---- */

static moelora_status check_class(moelora_arguments *all, const moelora_row *row, moelora_arg arg) {
  switch (row->dtype) {
  case MOELORA_CLASS_compute:
    if (all->compute.tensor)
      return moelora_check_dtype(arg, all->compute.tensor->dtype, all->compute.name);
    all->compute = arg;
    return moelora_check_compute_dtype(arg);
  case MOELORA_CLASS_ids:
    return moelora_check_id_dtype(arg);
  case MOELORA_CLASS_i32:
    return moelora_check_dtype(arg, MOELORA_I32, NULL);
  case MOELORA_CLASS_flags:
    MOELORA_REQUIRE(arg.tensor->dtype == MOELORA_BOOL || arg.tensor->dtype == MOELORA_I32,
                    "%s has dtype %s, expected bool or int32", arg.name,
                    moelora_dtype_name(arg.tensor->dtype));
    return MOELORA_OK;
  default:
    return moelora_check_dtype(arg, MOELORA_F32, NULL);
  }
}

static moelora_status check_strides(const moelora_row *row, moelora_arg arg) {
  if (row->dtype == MOELORA_CLASS_ids || row->dtype == MOELORA_CLASS_weights)
    return MOELORA_OK;
  return arg.tensor->ndim == 1 ? moelora_check_contiguous(arg) : moelora_check_rows(arg);
}

moelora_status moelora_check_views(moelora_arguments *all) {
  for (int32_t i = 0; i < all->count; i++) {
    const moelora_row *row = &all->rows[i];
    if (row->dtype == MOELORA_CLASS_number)
      MOELORA_TRY(moelora_check_at_least(
          row->name, *(const int32_t *)((const char *)all->args + row->at), row->least));
    if (!is_checked(all, row))
      continue;
    const moelora_arg arg = arg_of(all, row);
    const int32_t ndim = count_dims(shape_with(row->shape, arg.tensor->ndim));
    MOELORA_TRY(moelora_check_view(arg, ndim, row->shape));
    MOELORA_TRY(check_class(all, row, arg));
    MOELORA_TRY(check_strides(row, arg));
  }
  return MOELORA_OK;
}

/* ---- sizes ---- */

static moelora_named_size *find_size(moelora_arguments *all, const char *name, size_t length) {
  for (int32_t i = 0; i < all->num_sizes; i++)
    if (all->sizes[i].length == length && all->sizes[i].name[0] == name[0] &&
        !memcmp(all->sizes[i].name, name, length))
      return &all->sizes[i];
  return NULL;
}

void moelora_name_size(moelora_arguments *all, const char *name, int64_t value,
                       moelora_source source) {
  assert(all->num_sizes < MOELORA_MAX_NAMED);
  all->sizes[all->num_sizes++] = (moelora_named_size){name, name_length(name), value, source};
}

/* Compares a dimension with the size of its name, which it defines if nothing else did. */
static moelora_status check_named(moelora_arguments *all, const char *shape, moelora_arg arg,
                                  int32_t dim) {
  const int64_t size = arg.tensor->size[dim];
  const char *name = name_of_dim(shape, dim);
  const moelora_named_size *named = find_size(all, name, name_length(name));
  if (!named) {
    moelora_name_size(all, name, size, moelora_size_of(arg, dim));
    return MOELORA_OK;
  }
  if (size == named->value || named->value == MOELORA_ANY_SIZE)
    return MOELORA_OK;
  const char *second = next_shape(shape);
  if (second && count_dims(second) == arg.tensor->ndim)
    name = name_of_dim(second, dim);
  const moelora_named_size *other = find_size(all, name, name_length(name));
  if (!other || other == named)
    return moelora_check_size(arg, dim, named->value, named->source);
  MOELORA_REQUIRE(size == other->value,
                  "%s.size(%d) is %lld, expected %s, which is %lld, or %.*s, which is %lld",
                  arg.name, dim, (long long)size, moelora_label_source(named->source).text,
                  (long long)named->value, (int)other->length, other->name,
                  (long long)other->value);
  return MOELORA_OK;
}

moelora_status moelora_check_sizes(moelora_arguments *all) {
  for (int32_t i = 0; i < all->count; i++) {
    const moelora_row *row = &all->rows[i];
    if (!is_checked(all, row))
      continue;
    const moelora_arg arg = arg_of(all, row);
    const char *shape = shape_with(row->shape, arg.tensor->ndim);
    for (int32_t dim = 0; dim < arg.tensor->ndim; dim++)
      MOELORA_TRY(check_named(all, shape, arg, dim));
  }
  return MOELORA_OK;
}

/* ---- memory ---- */

enum { MAX_TENSORS = 64 };

typedef struct tensors {
  int32_t count;
  struct {
    moelora_arg arg;
    bool written;
  } of[MAX_TENSORS];
} tensors;

static void add(tensors *list, moelora_arg arg, bool written) {
  if (!moelora_is_absent(arg.tensor)) {
    assert(list->count < MAX_TENSORS);
    list->of[list->count].arg = arg;
    list->of[list->count++].written = written;
  }
}

moelora_status moelora_check_apart(const moelora_arguments *all) {
  tensors list;
  list.count = 0;
  for (int32_t i = 0; i < all->count; i++) {
    const moelora_row *row = &all->rows[i];
    if (row->dtype == MOELORA_CLASS_number)
      continue;
    if (!row->name_b) {
      const moelora_arg arg = arg_of(all, row);
      if (arg.tensor != all->aliased)
        add(&list, arg, is_output(row) || arg.tensor == all->written);
      continue;
    }
    const moelora_lora *lora = (const void *)((const char *)all->args + row->at);
    for (int32_t slice = 0; slice < lora->num_slices; slice++) {
      add(&list, moelora_entry(row->name, slice, &lora->a[slice]), is_output(row));
      add(&list, moelora_entry(row->name_b, slice, &lora->b[slice]), is_output(row));
    }
  }
  for (int32_t i = 0; i < list.count; i++) {
    if (!list.of[i].written)
      continue;
    MOELORA_TRY(moelora_check_distinct(list.of[i].arg));
    for (int32_t j = 0; j < list.count; j++)
      if (j < i || (j > i && !list.of[j].written))
        MOELORA_TRY(moelora_check_disjoint(list.of[i].arg, list.of[j].arg));
  }
  return MOELORA_OK;
}
