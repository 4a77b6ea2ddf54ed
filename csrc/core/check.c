#include "core/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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

moelora_label moelora_label_extent(moelora_extent extent) {
  moelora_label label = moelora_label_of((moelora_arg){extent.name, extent.index, NULL});
  char size[24] = "", slices[24] = "";
  if (extent.dim >= 0)
    snprintf(size, sizeof size, ".size(%d)", extent.dim);
  if (extent.slices > 1)
    snprintf(slices, sizeof slices, " / %d slices", extent.slices);
  const size_t used = strlen(label.text);
  snprintf(label.text + used, sizeof label.text - used, "%s%s%s", size,
           extent.scale ? extent.scale : "", slices);
  return label;
}

moelora_status moelora_fail_dim(moelora_arg arg, const char *field, int32_t dim, int64_t value,
                                const char *format, ...) {
  char text[256];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return moelora_fail(MOELORA_INVALID_ARGUMENT, "%s.%s(%d) is %lld, %s", moelora_label_of(arg).text,
                      field, dim, (long long)value, text);
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

/* Names `arg` in messages; only a check that fails formats it. */
#define LABEL moelora_label_of(arg).text

moelora_status moelora_check_memory(moelora_arg arg, int32_t ndim, const char *layout) {
  const moelora_tensor *t = arg.tensor;
  MOELORA_REQUIRE(!moelora_is_absent(t), "%s is absent, expected a tensor %s", LABEL, layout);
  MOELORA_REQUIRE(t->ndim == ndim, "%s has %d dimensions, expected %d: %s", LABEL, t->ndim, ndim,
                  layout);
  MOELORA_REQUIRE((t->dtype >= MOELORA_F32 && t->dtype <= MOELORA_U8) ||
                      moelora_is_foreign(t->dtype),
                  "%s has dtype %d, which is not a moelora_dtype", LABEL, (int)t->dtype);
  for (int32_t i = 0; i < ndim; i++) {
    MOELORA_REQUIRE_DIM(t->size[i] >= 0, arg, size, i, "expected 0 or more");
    MOELORA_REQUIRE_DIM(t->size[i] <= 1 || t->stride[i] >= 0, arg, stride, i, "expected 0 or more");
  }
  MOELORA_REQUIRE(moelora_span_bytes(t) >= 0, "%s has strides that reach beyond the address space",
                  LABEL);
  MOELORA_REQUIRE(
      t->data || is_empty(t),
      "%s has elements but its data is NULL, expected memory on the device of the call: "
      "bring it back if it was freed or offloaded",
      LABEL);
  MOELORA_REQUIRE((uintptr_t)t->data % moelora_dtype_bytes(t->dtype) == 0,
                  "%s starts at %p, expected a multiple of the %zu bytes of %s", LABEL, t->data,
                  moelora_dtype_bytes(t->dtype), moelora_dtype_name(t->dtype));
  return MOELORA_OK;
}

moelora_status moelora_check_size(moelora_arg arg, int32_t dim, moelora_extent want) {
  MOELORA_REQUIRE_DIM(arg.tensor->size[dim] == want.value, arg, size, dim, "%s is %lld",
                      moelora_label_extent(want).text, (long long)want.value);
  return MOELORA_OK;
}

moelora_status moelora_check_dtype(moelora_arg arg, moelora_arg like) {
  MOELORA_REQUIRE(arg.tensor->dtype == like.tensor->dtype, "%s has dtype %s, expected %s as %s",
                  LABEL, moelora_dtype_name(arg.tensor->dtype),
                  moelora_dtype_name(like.tensor->dtype), like.name);
  return MOELORA_OK;
}

moelora_status moelora_check_class(moelora_arg arg, moelora_class dtypes) {
  enum { F32 = 1 << MOELORA_F32, HALF = 1 << MOELORA_BF16 | 1 << MOELORA_F16 };
  static const struct {
    uint32_t dtypes;
    const char *names;
  } classes[] = {
      [MOELORA_CLASS_compute] = {F32 | HALF, "float32, bfloat16 or float16"},
      [MOELORA_CLASS_half] = {HALF, "bfloat16 or float16"},
      [MOELORA_CLASS_scales] = {F32 | HALF | 1 << MOELORA_U8,
                                "float32, bfloat16, float16 or uint8"},
      [MOELORA_CLASS_bytes] = {1 << MOELORA_U8, "uint8"},
      [MOELORA_CLASS_i32] = {1 << MOELORA_I32, "int32"},
      [MOELORA_CLASS_f32] = {F32, "float32"},
      [MOELORA_CLASS_flags] = {1 << MOELORA_BOOL | 1 << MOELORA_I32, "bool or int32"},
      [MOELORA_CLASS_ids] = {1 << MOELORA_I32 | 1 << MOELORA_I64, "int32 or int64"},
      [MOELORA_CLASS_weights] = {F32, "float32"},
  };
  const moelora_dtype dtype = arg.tensor->dtype;
  MOELORA_REQUIRE(dtype <= MOELORA_U8 && classes[dtypes].dtypes >> dtype & 1,
                  "%s has dtype %s, expected %s", LABEL, moelora_dtype_name(dtype),
                  classes[dtypes].names);
  return MOELORA_OK;
}

moelora_status moelora_check_at_least_one(moelora_arg arg) {
  for (int32_t i = 0; i < arg.tensor->ndim; i++)
    MOELORA_REQUIRE_DIM(arg.tensor->size[i] >= 1, arg, size, i, "expected at least 1");
  return MOELORA_OK;
}

moelora_status moelora_check_at_least(const char *name, int64_t value, int64_t least) {
  MOELORA_REQUIRE(value >= least, "%s is %lld, expected at least %lld", name, (long long)value,
                  (long long)least);
  return MOELORA_OK;
}

moelora_status moelora_check_rows(moelora_arg arg) {
  const moelora_tensor *t = arg.tensor;
  const int32_t last = t->ndim - 1;
  MOELORA_REQUIRE_DIM(t->size[last] <= 1 || t->stride[last] == 1, arg, stride, last,
                      "expected 1: the last dimension must be contiguous");
  return MOELORA_OK;
}

moelora_status moelora_check_contiguous(moelora_arg arg) {
  const moelora_tensor *t = arg.tensor;
  int64_t want = 1;
  for (int32_t i = is_empty(t) ? -1 : t->ndim - 1; i >= 0; i--) {
    MOELORA_REQUIRE_DIM(t->size[i] == 1 || t->stride[i] == want, arg, stride, i,
                        "expected %lld: %s must be contiguous", (long long)want, LABEL);
    want *= t->size[i];
  }
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
