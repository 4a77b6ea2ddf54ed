/* Checks the tensors of every operator against its rows of operators.inc. */
#include <assert.h>
#include <string.h>

#include "core/check.h"

static moelora_status check_views(moelora_arguments *all);

#define ROW(NAME, SHAPE, DTYPE, FIELD, USE)                                                        \
  {NAME, NULL, SHAPE, offsetof(args_type, FIELD), MOELORA_CLASS_##DTYPE, USE, 0},
#define PAIR(NAME_A, NAME_B, FIELD, USE)                                                           \
  {NAME_A, NAME_B, "", offsetof(args_type, FIELD), MOELORA_CLASS_special, USE, 0},
#define OPERATOR(NAME, ...)                                                                        \
  moelora_status moelora_begin_##NAME(const moelora_##NAME##_args *args, moelora_arguments *all) { \
    typedef moelora_##NAME##_args args_type;                                                       \
    static const moelora_row rows[] = {
#define CONVERSION(NAME, ...) OPERATOR(NAME)
#define ARG(KIND, ...) ARG_##KIND(__VA_ARGS__)
#define ARG_INPUT(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_READ)
#define ARG_OPTIONAL(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_MAY_READ)
#define ARG_OUTPUT(NAME, SHAPE, DTYPE, FIELD) ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_WRITTEN)
#define ARG_OPTIONAL_OUTPUT(NAME, SHAPE, DTYPE, FIELD)                                             \
  ROW(NAME, SHAPE, DTYPE, FIELD, MOELORA_MAY_WRITE)
#define ARG_AT_LEAST(NAME, LEAST, FIELD)                                                           \
  {NAME, NULL, "", offsetof(args_type, FIELD), MOELORA_CLASS_number, MOELORA_READ, LEAST},
#define ARG_FACTORS(NAME_A, NAME_B, FIELD) PAIR(NAME_A, NAME_B, FIELD, MOELORA_READ)
#define ARG_FACTOR_GRADIENTS(NAME_A, NAME_B, FIELD) PAIR(NAME_A, NAME_B, FIELD, MOELORA_WRITTEN)
#define END(NAME)                                                                                  \
  }                                                                                                \
  ;                                                                                                \
  all->args = args;                                                                                \
  all->rows = rows;                                                                                \
  all->count = sizeof rows / sizeof *rows;                                                         \
  all->compute.tensor = NULL;                                                                      \
  all->written = all->aliased = NULL;                                                              \
  all->slots.value = MOELORA_ANY_SIZE;                                                             \
  all->num_sizes = 0;                                                                              \
  return check_views(all);                                                                         \
  }
#define CONVERSION_END(NAME) END(NAME)
#include "core/operators.inc"

static const void *field_of(const moelora_arguments *all, const moelora_row *row) {
  return (const char *)all->args + row->at;
}

const moelora_row *moelora_row_of(const moelora_arguments *all, const void *field) {
  const moelora_row *row = all->rows;
  while (field_of(all, row) != field || row->dtype == MOELORA_CLASS_number)
    row++;
  return row;
}

static bool is_output(const moelora_row *row) {
  return row->use == MOELORA_WRITTEN || row->use == MOELORA_MAY_WRITE;
}

/* Returns the argument of a row with one tensor. */
static moelora_arg arg_of(const moelora_arguments *all, const moelora_row *row) {
  return MOELORA_ARG(row->name, (const moelora_tensor *)field_of(all, row));
}

/* Returns whether this file checks the view and the sizes of a row. It does not for numbers,
 * factors, `special` tensors and absent optional tensors. */
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

/* Returns the first alternative with `ndim` dimensions, or the first one if there is none. */
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

moelora_status moelora_check_view(moelora_arg arg, const char *layout) {
  const int32_t ndim = count_dims(shape_with(layout, arg.tensor->ndim));
  MOELORA_TRY(moelora_check_memory(arg, ndim, layout));
  for (int32_t i = 0; i < ndim; i++)
    MOELORA_REQUIRE_DIM(arg.tensor->size[i] <= INT32_MAX, arg, size, i,
                        "expected at most 2147483647");
  return MOELORA_OK;
}

moelora_status moelora_check_present(const moelora_arguments *all, const moelora_tensor *field) {
  const moelora_row *row = moelora_row_of(all, field);
  return moelora_check_view(arg_of(all, row), row->shape);
}

static moelora_status check_row(moelora_arguments *all, const moelora_row *row) {
  const moelora_arg arg = arg_of(all, row);
  MOELORA_TRY(moelora_check_view(arg, row->shape));
  if (row->dtype == MOELORA_CLASS_compute && all->compute.tensor)
    MOELORA_TRY(moelora_check_dtype(arg, all->compute));
  else
    MOELORA_TRY(moelora_check_class(arg, row->dtype));
  if (row->dtype == MOELORA_CLASS_compute)
    all->compute = all->compute.tensor ? all->compute : arg;
  if (row->dtype == MOELORA_CLASS_ids || row->dtype == MOELORA_CLASS_weights)
    return MOELORA_OK;
  return arg.tensor->ndim == 1 ? moelora_check_contiguous(arg) : moelora_check_rows(arg);
}

static moelora_status check_views(moelora_arguments *all) {
  for (const moelora_row *row = all->rows; row < all->rows + all->count; row++)
    if (row->dtype == MOELORA_CLASS_number)
      MOELORA_TRY(
          moelora_check_at_least(row->name, *(const int32_t *)field_of(all, row), row->least));
    else if (is_checked(all, row))
      MOELORA_TRY(check_row(all, row));
  return MOELORA_OK;
}

/* ---- sizes ---- */

/* Returns the size with this name, or NULL if it is not defined yet. */
static const moelora_extent *find_size(const moelora_arguments *all, const char *name) {
  const size_t length = name_length(name);
  for (int32_t i = 0; i < all->num_sizes; i++)
    if (all->sizes[i].length == length && !memcmp(all->sizes[i].name, name, length))
      return &all->sizes[i].extent;
  return NULL;
}

void moelora_name_size(moelora_arguments *all, const char *name, moelora_extent extent) {
  assert(all->num_sizes < MOELORA_MAX_NAMED);
  all->sizes[all->num_sizes].name = name;
  all->sizes[all->num_sizes].length = name_length(name);
  all->sizes[all->num_sizes++].extent = extent;
}

/* Compares a dimension with the size of its name; defines that size if it is not defined yet. */
static moelora_status check_named(moelora_arguments *all, const char *shape, moelora_arg arg,
                                  int32_t dim) {
  const int64_t size = arg.tensor->size[dim];
  const char *name = name_of_dim(shape, dim), *second = next_shape(shape);
  const moelora_extent *first = find_size(all, name);
  if (!first)
    moelora_name_size(all, name, moelora_size_of(arg, dim));
  if (!first || size == first->value || first->value == MOELORA_ANY_SIZE)
    return MOELORA_OK;
  if (second && count_dims(second) == arg.tensor->ndim)
    name = name_of_dim(second, dim);
  const moelora_extent *other = find_size(all, name);
  if (!other || other == first)
    return moelora_check_size(arg, dim, *first);
  MOELORA_REQUIRE_DIM(size == other->value, arg, size, dim,
                      "expected %s, which is %lld, or %.*s, which is %lld",
                      moelora_label_extent(*first).text, (long long)first->value,
                      (int)name_length(name), name, (long long)other->value);
  return MOELORA_OK;
}

static moelora_status check_sizes(moelora_arguments *all, moelora_arg arg, const char *shape) {
  for (int32_t dim = 0; dim < arg.tensor->ndim; dim++)
    MOELORA_TRY(check_named(all, shape_with(shape, arg.tensor->ndim), arg, dim));
  return MOELORA_OK;
}

/* ---- memory ---- */

/* Requires that no two indices of an output share memory. */
static moelora_status check_distinct(moelora_arg arg) {
  const moelora_tensor *t = arg.tensor;
  if (moelora_span_bytes(t) == 0)
    return MOELORA_OK;
  /* Each stride must exceed the largest offset that all smaller strides together reach. */
  int64_t reach = 0;
  bool done[MOELORA_MAX_DIMS] = {false};
  for (int32_t step = 0; step < t->ndim; step++) {
    int32_t at = -1;
    for (int32_t i = 0; i < t->ndim; i++)
      if (!done[i] && (at < 0 || t->stride[i] < t->stride[at]))
        at = i;
    done[at] = true;
    if (t->size[at] == 1)
      continue;
    MOELORA_REQUIRE_DIM(t->stride[at] > reach, arg, stride, at,
                        "expected at least %lld: elements of an output must not share memory",
                        (long long)reach + 1);
    reach += (t->size[at] - 1) * t->stride[at];
  }
  return MOELORA_OK;
}

/* Returns whether two matrices are disjoint columns of one buffer, with equal row strides. */
static bool side_by_side(const moelora_tensor *a, const moelora_tensor *b) {
  if (a->ndim != 2 || b->ndim != 2 || a->size[0] < 1 || b->size[0] < 1)
    return false;
  int64_t bytes_a = (int64_t)moelora_dtype_bytes(a->dtype);
  int64_t bytes_b = (int64_t)moelora_dtype_bytes(b->dtype);
  int64_t width_a = a->size[1] * bytes_a, width_b = b->size[1] * bytes_b, pitch, pitch_b;
  if (__builtin_mul_overflow(a->stride[0], bytes_a, &pitch) ||
      __builtin_mul_overflow(b->stride[0], bytes_b, &pitch_b))
    return false;
  if (pitch <= 0 || pitch_b != pitch || a->stride[1] != 1 || b->stride[1] != 1)
    return false;
  int64_t shift = ((int64_t)((uintptr_t)b->data - (uintptr_t)a->data) % pitch + pitch) % pitch;
  return width_a <= shift && shift + width_b <= pitch;
}

/* Requires that an output shares no memory with another argument. Disjoint columns of a common
 * buffer (views with equal row strides) are recognized; otherwise byte ranges are compared. */
static moelora_status check_disjoint(moelora_arg out, moelora_arg other) {
  const moelora_tensor *a = out.tensor, *b = other.tensor;
  uintptr_t a_begin = (uintptr_t)a->data, a_end = a_begin + (uintptr_t)moelora_span_bytes(a);
  uintptr_t b_begin = (uintptr_t)b->data, b_end = b_begin + (uintptr_t)moelora_span_bytes(b);
  bool apart = a_begin == a_end || b_begin == b_end || a_end <= b_begin || b_end <= a_begin;
  MOELORA_REQUIRE(apart || side_by_side(a, b), "%s shares memory with %s",
                  moelora_label_of(out).text, moelora_label_of(other).text);
  return MOELORA_OK;
}

enum { MAX_TENSORS = 64 };

typedef struct tensors {
  int32_t count;
  moelora_arg of[MAX_TENSORS];
  bool written[MAX_TENSORS];
} tensors;

static void add(tensors *list, moelora_arg arg, bool written) {
  if (moelora_is_absent(arg.tensor))
    return;
  assert(list->count < MAX_TENSORS);
  list->of[list->count] = arg;
  list->written[list->count++] = written;
}

static void add_row(tensors *list, const moelora_arguments *all, const moelora_row *row) {
  if (!row->name_b) {
    const moelora_arg arg = arg_of(all, row);
    if (arg.tensor != all->aliased)
      add(list, arg, is_output(row) || arg.tensor == all->written);
    return;
  }
  const moelora_lora *lora = field_of(all, row);
  for (int32_t slice = 0; slice < lora->num_slices; slice++) {
    add(list, moelora_entry(row->name, slice, &lora->a[slice]), is_output(row));
    add(list, moelora_entry(row->name_b, slice, &lora->b[slice]), is_output(row));
  }
}

moelora_status moelora_check_fit(moelora_arguments *all) {
  tensors list;
  list.count = 0;
  for (const moelora_row *row = all->rows; row < all->rows + all->count; row++) {
    if (is_checked(all, row))
      MOELORA_TRY(check_sizes(all, arg_of(all, row), row->shape));
    if (row->dtype != MOELORA_CLASS_number)
      add_row(&list, all, row);
  }
  for (int32_t i = 0; i < list.count; i++) {
    if (!list.written[i])
      continue;
    MOELORA_TRY(check_distinct(list.of[i]));
    for (int32_t j = 0; j < list.count; j++)
      if (j < i || (j > i && !list.written[j]))
        MOELORA_TRY(check_disjoint(list.of[i], list.of[j]));
  }
  return MOELORA_OK;
}
