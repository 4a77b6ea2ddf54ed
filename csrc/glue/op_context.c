#include "glue/op_context.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"

static _Thread_local op_error last_error;

const op_error *op_last_error(void) {
  return &last_error;
}

void op_fail(moelora_op_context *ctx, moelora_status status, const char *format, ...) {
  if (ctx->status != MOELORA_OK)
    return;
  ctx->status = last_error.status = status;
  last_error.number++;
  int used = snprintf(last_error.text, sizeof last_error.text, "%s: ", ctx->op);
  va_list args;
  va_start(args, format);
  vsnprintf(last_error.text + used, sizeof last_error.text - (size_t)used, format, args);
  va_end(args);
}

bool op_check(moelora_op_context *ctx, moelora_status status) {
  if (status != MOELORA_OK)
    op_fail(ctx, status, "%s", moelora_error_message());
  return ctx->status == MOELORA_OK;
}

void op_open(moelora_op_context *ctx, const char *op) {
  memset(ctx, 0, offsetof(moelora_op_context, handles));
  ctx->op = op;
  ctx->device_type = -1;
  ctx->num_outputs = 0;
  ctx->guard = NULL;
  ctx->status = MOELORA_OK;
}

#define CODE(dtype) aoti_torch_dtype_##dtype,
static int32_t (*const known_dtypes[])(void) = {MOELORA_DTYPES(CODE)};
static int32_t (*const foreign_dtypes[])(void) = {MOELORA_FOREIGN_DTYPES(CODE)};
#undef CODE

/* Returns uint8 for a foreign dtype, which the core refuses before it checks outputs. */
static int32_t dtype_to_torch(moelora_dtype dtype) {
  return dtype <= MOELORA_U8 ? known_dtypes[dtype]() : aoti_torch_dtype_uint8();
}

static moelora_dtype dtype_from_torch(int32_t code) {
  for (int32_t i = MOELORA_F32; i <= MOELORA_U8; i++)
    if (known_dtypes[i]() == code)
      return (moelora_dtype)i;
  size_t place = 0;
  while (place < sizeof foreign_dtypes / sizeof *foreign_dtypes && foreign_dtypes[place]() != code)
    place++;
  return (moelora_dtype)(MOELORA_FOREIGN + place);
}

/* Address of tensors without elements, since NULL means absent. */
static char no_elements[256] __attribute__((aligned(256)));

/* Distance between the addresses of meta tensors, so large that none overlap. */
static const uintptr_t meta_spacing = (uintptr_t)1 << 57;

static void *meta_address(const moelora_op_context *ctx) {
  return (void *)(meta_spacing * (uintptr_t)(ctx->num_handles + ctx->num_outputs));
}

bool op_is_meta(const moelora_op_context *ctx) {
  return ctx->device_type == aoti_torch_device_type_meta();
}

static const char *device_name(int32_t type) {
  return type == aoti_torch_device_type_cuda()   ? "cuda"
         : type == aoti_torch_device_type_cpu()  ? "cpu"
         : type == aoti_torch_device_type_meta() ? "meta"
                                                 : "another device type";
}

/* Checks that a view lies within its storage. If a storage was freed or shrunk, torch returns NULL
 * or a stale address. */
static void check_storage(moelora_op_context *ctx, moelora_arg arg, AtenTensorHandle handle) {
  const int64_t span = moelora_span_bytes(arg.tensor);
  int64_t bytes = 0, offset = 0;
  if (span <= 0) /* no elements, or invalid strides, which the core reports */
    return;
  aoti_torch_get_storage_size(handle, &bytes);
  aoti_torch_get_storage_offset(handle, &offset);
  const int64_t element = (int64_t)moelora_dtype_bytes(arg.tensor->dtype);
  if (!arg.tensor->data || bytes < span || offset > (bytes - span) / element)
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "%s has elements up to byte %" PRId64 " of a storage of %" PRId64
            " bytes: it was freed or shrunk, as by FSDP or offloading; expected a tensor whose "
            "storage holds its elements: gather or load it before the call",
            moelora_label_of(arg).text, offset * element + span, bytes);
}

static void check_device(moelora_op_context *ctx, const char *name, AtenTensorHandle handle) {
  int32_t type = -1, index = -1;
  aoti_torch_get_device_type(handle, &type);
  if (type == aoti_torch_device_type_cuda())
    aoti_torch_get_device_index(handle, &index);
  if (ctx->device_type < 0) {
    ctx->device_type = type;
    ctx->exec.device = type == aoti_torch_device_type_cuda() ? MOELORA_CUDA : MOELORA_CPU;
    ctx->exec.device_index = index;
  } else if (type != ctx->device_type || index != ctx->exec.device_index) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "%s is on %s (index %" PRId32 "), the first tensor is on %s (index %" PRId32 ")", name,
            device_name(type), index, device_name(ctx->device_type), ctx->exec.device_index);
  }
}

/* Converts a tensor; `index` >= 0: entry of the list `name`. */
static moelora_tensor view(moelora_op_context *ctx, const char *name, int32_t index,
                           StableIValue value, bool optional) {
  AtenTensorHandle handle = (AtenTensorHandle)(uintptr_t)value;
  moelora_tensor tensor = {.name = name};
  if (ctx->num_handles == OP_MAX_HANDLES) {
    aoti_torch_delete_tensor_object(handle);
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s: too many tensors", name);
    return tensor;
  }
  ctx->handles[ctx->num_handles++] = handle;

  int64_t ndim = 0, *sizes = NULL, *strides = NULL;
  int32_t code = -1;
  bool defined = false;
  aoti_torch_is_defined(handle, &defined);
  if (!defined) { /* torch passes None as an undefined tensor */
    if (!optional)
      op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s is None, expected a tensor", name);
    return tensor;
  }
  aoti_torch_get_dim(handle, &ndim);
  aoti_torch_get_sizes(handle, &sizes);
  if (optional && ndim == 1 && sizes && sizes[0] == 0)
    return tensor;
  check_device(ctx, name, handle);
  aoti_torch_get_dtype(handle, &code);
  tensor.dtype = dtype_from_torch(code);
  if (ndim > MOELORA_MAX_DIMS) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s has %" PRId64 " dimensions, at most %d are known",
            name, ndim, MOELORA_MAX_DIMS);
    return tensor;
  }
  if (op_is_meta(ctx))
    tensor.data = meta_address(ctx);
  if (aoti_torch_get_strides(handle, &strides) ||
      (!tensor.data && aoti_torch_get_data_ptr(handle, &tensor.data))) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s is not a plain strided tensor", name);
    return tensor;
  }
  tensor.ndim = (int32_t)ndim;
  memcpy(tensor.size, sizes, (size_t)ndim * sizeof *sizes);
  memcpy(tensor.stride, strides, (size_t)ndim * sizeof *strides);
  if (!op_is_meta(ctx))
    check_storage(ctx, (moelora_arg){name, index, &tensor}, handle);
  if (!tensor.data)
    tensor.data = no_elements;
  return tensor;
}

moelora_tensor op_tensor(moelora_op_context *ctx, const char *name, StableIValue value) {
  return view(ctx, name, -1, value, false);
}

moelora_tensor op_optional(moelora_op_context *ctx, const char *name, StableIValue value) {
  return view(ctx, name, -1, value, true);
}

int32_t op_tensors(moelora_op_context *ctx, const char *name, StableIValue value,
                   moelora_tensor *out) {
  StableListHandle list = (StableListHandle)(uintptr_t)value;
  size_t size = 0;
  torch_list_size(list, &size);
  out[0].name = name; /* names an empty list, too */
  if (size > MOELORA_MAX_SLICES)
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s has %zu slices, at most %d are known", name, size,
            MOELORA_MAX_SLICES);
  for (size_t i = 0; i < size; i++) {
    StableIValue item = 0;
    torch_list_get_item(list, i, &item);
    if (i < MOELORA_MAX_SLICES)
      out[i] = view(ctx, name, (int32_t)i, item, false);
    else
      aoti_torch_delete_tensor_object((AtenTensorHandle)(uintptr_t)item);
  }
  torch_delete_list(list);
  return (int32_t)size;
}

moelora_lora op_lora(moelora_op_context *ctx, const char *name_a, StableIValue a,
                     const char *name_b, StableIValue b, bool either) {
  moelora_lora lora = {0};
  const int32_t num_a = op_tensors(ctx, name_a, a, lora.a);
  const int32_t num_b = op_tensors(ctx, name_b, b, lora.b);
  lora.num_slices = num_a ? num_a : num_b;
  if (num_a != num_b && !(either && (num_a == 0 || num_b == 0)))
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s has %d slices, %s has %d", name_a, num_a, name_b,
            num_b);
  return lora;
}

int32_t op_int(moelora_op_context *ctx, const char *name, StableIValue value) {
  int64_t wide = (int64_t)value;
  if (wide < INT32_MIN || wide > INT32_MAX) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s is %" PRId64 ", which is outside int32", name, wide);
    return 0;
  }
  return (int32_t)wide;
}

double op_float(StableIValue value) {
  double number;
  memcpy(&number, &value, sizeof number);
  return number;
}

int32_t op_host_int(moelora_op_context *ctx, const char *name, StableIValue value) {
  AtenTensorHandle handle = (AtenTensorHandle)(uintptr_t)value;
  int64_t numel = 0, wide = 0;
  int32_t type = -1, code = -1;
  aoti_torch_get_numel(handle, &numel);
  aoti_torch_get_device_type(handle, &type);
  aoti_torch_get_dtype(handle, &code);
  const bool is_64 = code == aoti_torch_dtype_int64();
  const bool is_meta = op_is_meta(ctx) && type != aoti_torch_device_type_cuda();
  if (numel > 1 || (numel && !is_meta && type != aoti_torch_device_type_cpu())) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "%s has %" PRId64 " elements on %s, expected 1 on cpu: reading it elsewhere would wait",
            name, numel, device_name(type));
  } else if (numel && !is_64 && code != aoti_torch_dtype_int32()) {
    op_fail(ctx, MOELORA_INVALID_ARGUMENT, "%s has another dtype than int32 or int64", name);
  } else if (numel && !is_meta) {
    moelora_tensor one = {.dtype = is_64 ? MOELORA_I64 : MOELORA_I32};
    aoti_torch_get_data_ptr(handle, &one.data);
    check_storage(ctx, (moelora_arg){name, -1, &one}, handle);
    if (ctx->status == MOELORA_OK)
      wide = is_64 ? *(const int64_t *)one.data : *(const int32_t *)one.data;
  }
  aoti_torch_delete_tensor_object(handle);
  return op_int(ctx, name, (StableIValue)wide);
}

void op_need_mapping(moelora_op_context *ctx, const moelora_tensor *topk_ids,
                     const moelora_tensor *token_lora_mapping, const moelora_lora *lora,
                     const char *name_a) {
  const bool any_token = topk_ids->ndim > 0 && topk_ids->size[0] > 0;
  if (any_token && lora->num_slices > 0 && !token_lora_mapping->data)
    op_fail(ctx, MOELORA_INVALID_ARGUMENT,
            "token_lora_mapping is None, but %s is not: expected the adapter slot of each of "
            "%" PRId64 " tokens, -1 for those without an adapter",
            name_a, topk_ids->size[0]);
}

struct range_call {
  moelora_task task;
  void *context;
};

static void run_range(int64_t begin, int64_t end, void *ctx) {
  const struct range_call *call = ctx;
  call->task(call->context, begin, end);
}

static void torch_parallel(int64_t count, moelora_task task, void *context) {
  struct range_call call = {task, context};
  torch_parallel_for(0, count, 1, run_range, &call);
}

static void ready_cuda(moelora_op_context *ctx) {
  if (!aoti_torch_get_current_cuda_stream || !aoti_torch_create_cuda_guard ||
      !aoti_torch_delete_cuda_guard) {
    op_fail(ctx, MOELORA_UNSUPPORTED, "tensors are on CUDA, but this torch has no CUDA");
    return;
  }
  int32_t current = -1, index = ctx->exec.device_index;
  aoti_torch_get_current_device_index(&current);
  if (current != index && aoti_torch_create_cuda_guard(index, &ctx->guard))
    op_fail(ctx, MOELORA_DEVICE_ERROR, "cannot switch to cuda:%d", index);
  else if (aoti_torch_get_current_cuda_stream(index, &ctx->exec.stream))
    op_fail(ctx, MOELORA_DEVICE_ERROR, "cannot get the current stream of cuda:%d", index);
}

bool op_ready(moelora_op_context *ctx) {
  if (ctx->status != MOELORA_OK)
    return false;
  if (ctx->exec.device == MOELORA_CUDA) {
    ready_cuda(ctx);
  } else {
    uint32_t threads = 1;
    torch_get_num_threads(&threads);
    ctx->exec.parallel_for = torch_parallel;
    ctx->exec.num_threads = (int32_t)threads;
  }
  return ctx->status == MOELORA_OK;
}

static AtenTensorHandle allocate(moelora_op_context *ctx, const char *what, int32_t dtype,
                                 int32_t ndim, const int64_t *sizes, const int64_t *strides) {
  AtenTensorHandle handle = NULL;
  if (aoti_torch_empty_strided(ndim, sizes, strides, dtype, ctx->device_type,
                               ctx->exec.device_index, &handle)) {
    op_fail(ctx, MOELORA_DEVICE_ERROR, "cannot allocate %s [%" PRId64 ", ...] on %s", what,
            sizes[0], device_name(ctx->device_type));
    return NULL;
  }
  return handle;
}

moelora_tensor op_output(moelora_op_context *ctx, moelora_dtype dtype, int32_t ndim,
                         const int64_t *sizes) {
  moelora_tensor tensor = {.dtype = dtype, .ndim = ndim};
  int64_t stride = 1;
  for (int32_t i = ndim - 1; i >= 0; i--) {
    tensor.size[i] = sizes[i];
    tensor.stride[i] = stride;
    if (__builtin_mul_overflow(stride, sizes[i] > 1 ? sizes[i] : 1, &stride)) {
      op_fail(ctx, MOELORA_INVALID_ARGUMENT,
              "an output of %" PRId64 " x %" PRId64 " elements a row is too large", sizes[ndim - 2],
              sizes[ndim - 1]);
      return tensor;
    }
  }
  AtenTensorHandle handle =
      allocate(ctx, "an output", dtype_to_torch(dtype), ndim, tensor.size, tensor.stride);
  if (handle) {
    ctx->outputs[ctx->num_outputs++] = handle;
    if (op_is_meta(ctx))
      tensor.data = meta_address(ctx);
    else
      aoti_torch_get_data_ptr(handle, &tensor.data);
    if (!tensor.data)
      tensor.data = no_elements;
  }
  return tensor;
}

bool op_workspace(moelora_op_context *ctx, size_t bytes) {
  if (op_is_meta(ctx))
    return false;
  if (ctx->status != MOELORA_OK || bytes == 0)
    return ctx->status == MOELORA_OK;
  /* torch aligns CPU memory to 64 bytes only. */
  int64_t size = (int64_t)bytes + 255, stride = 1;
  AtenTensorHandle handle =
      allocate(ctx, "a workspace", aoti_torch_dtype_uint8(), 1, &size, &stride);
  if (!handle)
    return false;
  ctx->handles[ctx->num_handles++] = handle;
  void *data = NULL;
  aoti_torch_get_data_ptr(handle, &data);
  ctx->exec.workspace = (void *)(((uintptr_t)data + 255) & ~(uintptr_t)255);
  ctx->exec.workspace_bytes = bytes;
  return true;
}

void op_run(moelora_op_context *ctx, const moelora_call *call) {
  if (op_workspace(ctx, call->workspace_bytes))
    op_check(ctx, moelora_run(call, &ctx->exec));
}

void op_close(moelora_op_context *ctx, StableIValue *stack) {
  for (int32_t i = 0; i < ctx->num_handles; i++)
    aoti_torch_delete_tensor_object(ctx->handles[i]);
  if (ctx->guard)
    aoti_torch_delete_cuda_guard(ctx->guard);
  for (int32_t i = 0; i < ctx->num_outputs; i++) {
    if (ctx->status == MOELORA_OK)
      stack[i] = (StableIValue)(uintptr_t)ctx->outputs[i];
    else
      aoti_torch_delete_tensor_object(ctx->outputs[i]);
  }
  if (ctx->status != MOELORA_OK)
    aoti_torch_check(false, ctx->op, "moelora", 0, last_error.text);
}
