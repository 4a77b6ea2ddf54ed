#include "core/check.h"
#include "core/format.h"

#include <stdio.h>
#include <string.h>

#define NAME(dtype) #dtype,
static const char *const foreign_names[] = {MOELORA_FOREIGN_DTYPES(NAME) "of another library"};
#undef NAME

static bool is_foreign(moelora_dtype dtype) {
  const size_t place = (size_t)dtype - MOELORA_FOREIGN;
  return place < sizeof foreign_names / sizeof *foreign_names;
}

const char *moelora_dtype_name(moelora_dtype dtype) {
  if (is_foreign(dtype))
    return foreign_names[dtype - MOELORA_FOREIGN];
  static const char *const names[] = {"float32", "bfloat16", "float16", "int32",
                                      "int64",   "bool",     "uint8"};
  return (size_t)dtype < sizeof names / sizeof *names ? names[dtype] : "unknown";
}

const char *moelora_format_name(moelora_format format) {
  static const char *const names[] = {
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, ...) TEXT,
#include "formats.inc"
  };
  return moelora_is_format(format) ? names[format] : "unknown";
}

int32_t moelora_tile_bytes(moelora_format format) {
  return moelora_is_format(format) ? moelora_tile_size(format) : 0;
}

const char *moelora_kernel_name(moelora_kernel_format kernel) {
  static const char *const names[] = {
#define MOELORA_KERNEL(NAME, TEXT, FORMAT) TEXT,
#include "formats.inc"
  };
  return kernel == MOELORA_KERNEL_NONE ? "unknown" : names[kernel];
}

bool moelora_is_absent(const moelora_tensor *tensor) {
  return !tensor->data && tensor->ndim == 0;
}

moelora_label moelora_label_of(moelora_arg arg) {
  moelora_label label;
  if (arg.index < 0)
    snprintf(label.text, sizeof label.text, "%s", arg.name);
  else
    snprintf(label.text, sizeof label.text, "%s[%d]", arg.name, arg.index);
  return label;
}

moelora_label moelora_label_source(moelora_source source) {
  moelora_label label = moelora_label_of((moelora_arg){source.name, source.index, NULL});
  char size[24] = "", slices[24] = "";
  if (source.dim >= 0)
    snprintf(size, sizeof size, ".size(%d)", source.dim);
  if (source.slices > 1)
    snprintf(slices, sizeof slices, " / %d slices", source.slices);
  const size_t used = strlen(label.text);
  snprintf(label.text + used, sizeof label.text - used, "%s%s%s", size,
           source.scale ? source.scale : "", slices);
  return label;
}

static bool is_empty(const moelora_tensor *tensor) {
  for (int32_t i = 0; i < tensor->ndim; i++)
    if (tensor->size[i] == 0)
      return true;
  return false;
}

int64_t moelora_span_bytes(const moelora_tensor *tensor) {
  if (is_empty(tensor))
    return 0;
  int64_t last = 0;
  for (int32_t i = 0; i < tensor->ndim; i++) {
    int64_t reach;
    if (__builtin_mul_overflow(tensor->size[i] - 1, tensor->stride[i], &reach) ||
        __builtin_add_overflow(last, reach, &last))
      return -1;
  }
  int64_t bytes;
  if (__builtin_add_overflow(last, 1, &last) ||
      __builtin_mul_overflow(last, (int64_t)moelora_dtype_bytes(tensor->dtype), &bytes))
    return -1;
  return bytes <= MOELORA_MAX_BYTES ? bytes : -1;
}

moelora_status moelora_check_large_view(moelora_arg arg, int32_t ndim, const char *layout) {
  const moelora_tensor *t = arg.tensor;
  MOELORA_REQUIRE(!moelora_is_absent(t), "%s is absent, expected a tensor %s",
                  moelora_label_of(arg).text, layout);
  MOELORA_REQUIRE(t->ndim == ndim, "%s has %d dimensions, expected %d: %s",
                  moelora_label_of(arg).text, t->ndim, ndim, layout);
  MOELORA_REQUIRE((t->dtype >= MOELORA_F32 && t->dtype <= MOELORA_U8) || is_foreign(t->dtype),
                  "%s has dtype %d, which is not a moelora_dtype", moelora_label_of(arg).text,
                  (int)t->dtype);
  for (int32_t i = 0; i < ndim; i++) {
    MOELORA_REQUIRE(t->size[i] >= 0, "%s.size(%d) is %lld, expected 0 or more",
                    moelora_label_of(arg).text, i, (long long)t->size[i]);
    MOELORA_REQUIRE(t->size[i] <= 1 || t->stride[i] >= 0,
                    "%s.stride(%d) is %lld, expected 0 or more", moelora_label_of(arg).text, i,
                    (long long)t->stride[i]);
  }
  MOELORA_REQUIRE(moelora_span_bytes(t) >= 0, "%s has strides that reach beyond the address space",
                  moelora_label_of(arg).text);
  MOELORA_REQUIRE(
      t->data || is_empty(t),
      "%s has elements but its data is NULL, expected memory on the device of the call: "
      "bring it back if it was freed or offloaded",
      moelora_label_of(arg).text);
  MOELORA_REQUIRE((uintptr_t)t->data % moelora_dtype_bytes(t->dtype) == 0,
                  "%s starts at %p, expected a multiple of the %zu bytes of %s",
                  moelora_label_of(arg).text, t->data, moelora_dtype_bytes(t->dtype),
                  moelora_dtype_name(t->dtype));
  return MOELORA_OK;
}

moelora_status moelora_check_view(moelora_arg arg, int32_t ndim, const char *layout) {
  MOELORA_TRY(moelora_check_large_view(arg, ndim, layout));
  for (int32_t i = 0; i < ndim; i++)
    MOELORA_REQUIRE(arg.tensor->size[i] <= INT32_MAX,
                    "%s.size(%d) is %lld, expected at most 2147483647", moelora_label_of(arg).text,
                    i, (long long)arg.tensor->size[i]);
  return MOELORA_OK;
}

moelora_status moelora_check_size(moelora_arg arg, int32_t dim, int64_t want,
                                  moelora_source source) {
  MOELORA_REQUIRE(arg.tensor->size[dim] == want, "%s.size(%d) is %lld, %s is %lld",
                  moelora_label_of(arg).text, dim, (long long)arg.tensor->size[dim],
                  moelora_label_source(source).text, (long long)want);
  return MOELORA_OK;
}

moelora_status moelora_check_dtype(moelora_arg arg, moelora_dtype want, const char *source) {
  MOELORA_REQUIRE(arg.tensor->dtype == want, "%s has dtype %s, expected %s%s%s",
                  moelora_label_of(arg).text, moelora_dtype_name(arg.tensor->dtype),
                  moelora_dtype_name(want), source ? " as " : "", source ? source : "");
  return MOELORA_OK;
}

moelora_status moelora_check_compute_dtype(moelora_arg arg) {
  const moelora_dtype dtype = arg.tensor->dtype;
  MOELORA_REQUIRE(dtype == MOELORA_F32 || dtype == MOELORA_BF16 || dtype == MOELORA_F16,
                  "%s has dtype %s, expected float32, bfloat16 or float16",
                  moelora_label_of(arg).text, moelora_dtype_name(dtype));
  return MOELORA_OK;
}

moelora_status moelora_check_id_dtype(moelora_arg arg) {
  MOELORA_REQUIRE(arg.tensor->dtype == MOELORA_I32 || arg.tensor->dtype == MOELORA_I64,
                  "%s has dtype %s, expected int32 or int64", moelora_label_of(arg).text,
                  moelora_dtype_name(arg.tensor->dtype));
  return MOELORA_OK;
}

moelora_status moelora_check_at_least_one(moelora_arg arg) {
  for (int32_t i = 0; i < arg.tensor->ndim; i++)
    MOELORA_REQUIRE(arg.tensor->size[i] >= 1, "%s.size(%d) is 0, expected at least 1",
                    moelora_label_of(arg).text, i);
  return MOELORA_OK;
}

moelora_status moelora_check_at_least(const char *name, int64_t value, int64_t least) {
  MOELORA_REQUIRE(value >= least, "%s is %lld, expected at least %lld", name, (long long)value,
                  (long long)least);
  return MOELORA_OK;
}

moelora_status moelora_check_rows(moelora_arg arg) {
  const moelora_tensor *t = arg.tensor;
  int32_t last = t->ndim - 1;
  MOELORA_REQUIRE(t->size[last] <= 1 || t->stride[last] == 1,
                  "%s.stride(%d) is %lld, expected 1: the last dimension must be contiguous",
                  moelora_label_of(arg).text, last, (long long)t->stride[last]);
  return MOELORA_OK;
}

moelora_status moelora_check_contiguous(moelora_arg arg) {
  const moelora_tensor *t = arg.tensor;
  int64_t want = 1;
  if (is_empty(t))
    return MOELORA_OK;
  for (int32_t i = t->ndim - 1; i >= 0; i--) {
    MOELORA_REQUIRE(t->size[i] == 1 || t->stride[i] == want,
                    "%s.stride(%d) is %lld, expected %lld: %s must be contiguous",
                    moelora_label_of(arg).text, i, (long long)t->stride[i], (long long)want,
                    moelora_label_of(arg).text);
    want *= t->size[i];
  }
  return MOELORA_OK;
}

moelora_status moelora_check_distinct(moelora_arg arg) {
  const moelora_tensor *t = arg.tensor;
  if (is_empty(t))
    return MOELORA_OK;
  /* From the smallest stride on, each must exceed the extent of all smaller ones. */
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
    MOELORA_REQUIRE(t->stride[at] > reach,
                    "%s.stride(%d) is %lld, expected at least %lld: elements of an output must not "
                    "share memory",
                    moelora_label_of(arg).text, at, (long long)t->stride[at], (long long)reach + 1);
    reach += (t->size[at] - 1) * t->stride[at];
  }
  return MOELORA_OK;
}

/* Whether two matrices with the same row stride are disjoint columns of one buffer. */
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

moelora_status moelora_check_disjoint(moelora_arg out, moelora_arg other) {
  const moelora_tensor *a = out.tensor, *b = other.tensor;
  if (moelora_is_absent(a) || moelora_is_absent(b))
    return MOELORA_OK;
  uintptr_t a_begin = (uintptr_t)a->data, a_end = a_begin + (uintptr_t)moelora_span_bytes(a);
  uintptr_t b_begin = (uintptr_t)b->data, b_end = b_begin + (uintptr_t)moelora_span_bytes(b);
  bool apart = a_begin == a_end || b_begin == b_end || a_end <= b_begin || b_end <= a_begin;
  MOELORA_REQUIRE(apart || side_by_side(a, b), "%s shares memory with %s",
                  moelora_label_of(out).text, moelora_label_of(other).text);
  return MOELORA_OK;
}

int64_t moelora_stride(const moelora_tensor *tensor, int32_t dim) {
  int32_t inner = dim; /* next dimension with more than one element */
  while (inner + 1 < tensor->ndim && inner + 1 < MOELORA_MAX_DIMS && tensor->size[inner] <= 1)
    inner++;
  int64_t stride = tensor->size[inner] > 1 ? tensor->stride[inner] : 1;
  for (int32_t i = inner; i > dim; i--) /* overflow implies that there are no elements */
    (void)__builtin_mul_overflow(tensor->size[i], stride, &stride);
  return stride;
}

void *moelora_take_view(const moelora_tensor *tensor, int64_t *strides, int32_t count) {
  for (int32_t i = 0; i < count; i++)
    strides[i] = i < tensor->ndim ? moelora_stride(tensor, i) : 0;
  return tensor->data;
}

bool moelora_same_view(const moelora_tensor *a, const moelora_tensor *b) {
  if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim)
    return false;
  for (int32_t i = 0; i < a->ndim; i++)
    if (a->size[i] != b->size[i] || (a->size[i] > 1 && a->stride[i] != b->stride[i]))
      return false;
  return true;
}
