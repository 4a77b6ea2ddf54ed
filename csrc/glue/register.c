/* Registers the operators of ops.inc with torch: for each, a schema and a boxed function for both
 * devices. */
#include <stdio.h>

#include "glue/ops.h"

enum {
#define OP(NAME, ...) OP_##NAME,
#include "glue/ops.inc"
  NUM_OPS
};

/* ---- schemas ---- */

static const char *const names[NUM_OPS] = {
#define OP(NAME, ...) #NAME,
#include "glue/ops.inc"
};

#define SCHEMA_TENSOR(NAME, ...) ", Tensor " #NAME
#define SCHEMA_OPTIONAL SCHEMA_TENSOR
#define SCHEMA_WRITTEN(ALIAS, NAME, ...) ", Tensor(" #ALIAS "!) " #NAME
#define SCHEMA_WRITTEN_OPTIONAL SCHEMA_WRITTEN
#define SCHEMA_LIST(NAME, ...) ", Tensor[] " #NAME
#define SCHEMA_LORA(A, B, ...) ", Tensor[] " #A ", Tensor[] " #B
#define SCHEMA_WRITTEN_LORA(ALIAS_A, A, ALIAS_B, B, ...)                                           \
  ", Tensor(" #ALIAS_A "!)[] " #A ", Tensor(" #ALIAS_B "!)[] " #B
#define SCHEMA_INT(NAME, ...) ", int " #NAME
#define SCHEMA_WIDE_INT SCHEMA_INT
#define SCHEMA_INT_OR_ZERO(NAME, ...) ", int " #NAME "=0"
#define SCHEMA_FLOAT(NAME, ...) ", float " #NAME
#define SCHEMA_FLOAT_OR_ZERO(NAME, ...) ", float " #NAME "=0.0"
#define SCHEMA_FLAG(NAME, ...) ", bool " #NAME
static const char *const arguments[NUM_OPS] = {
#define ARG(KIND, ...) SCHEMA_##KIND(__VA_ARGS__)
#define HOST_INT(NAME, ...) SCHEMA_TENSOR(NAME)
#define END ,
#include "glue/ops.inc"
};

static const int returned[NUM_OPS] = {
#define OP(...) 0
#define RETURNS(...) +1
#define RETURNS_OF_FAKE(COUNT) +COUNT
#define END ,
#include "glue/ops.inc"
};

static void write_schema(int op, char *to, size_t bytes) {
  const int outputs = returned[op];
  int used =
      snprintf(to, bytes, "%s(%s) -> %s", names[op], arguments[op] + 2, outputs == 1 ? "" : "(");
  for (int i = 0; i < outputs; i++)
    used += snprintf(to + used, bytes - used, "%sTensor", i ? ", " : "");
  snprintf(to + used, bytes - used, "%s", outputs == 1 ? "" : ")");
}

/* ---- arguments ---- */

#define UNPACK_TENSOR(NAME, FIELD) args->FIELD = op_tensor(ctx, #NAME, *stack++);
#define UNPACK_OPTIONAL(NAME, FIELD) args->FIELD = op_optional(ctx, #NAME, *stack++);
#define UNPACK_WRITTEN(ALIAS, NAME, FIELD) UNPACK_TENSOR(NAME, FIELD)
#define UNPACK_WRITTEN_OPTIONAL(ALIAS, NAME, FIELD) UNPACK_OPTIONAL(NAME, FIELD)
#define UNPACK_LIST(NAME, COUNT, FIELD) args->COUNT = op_tensors(ctx, #NAME, *stack++, args->FIELD);
#define UNPACK_EITHER(A, B, EITHER, FIELD)                                                         \
  args->FIELD = op_lora(ctx, #A, stack[0], #B, stack[1], EITHER);                                  \
  stack += 2;
#define UNPACK_LORA(A, B, FIELD) UNPACK_EITHER(A, B, false, FIELD)
#define UNPACK_WRITTEN_LORA(ALIAS_A, A, ALIAS_B, B, FIELD) UNPACK_EITHER(A, B, true, FIELD)
#define UNPACK_INT(NAME, FIELD) args->FIELD = op_int(ctx, #NAME, *stack++);
#define UNPACK_INT_OR_ZERO UNPACK_INT
#define UNPACK_WIDE_INT(NAME, FIELD) args->FIELD = (int64_t)*stack++;
#define UNPACK_FLOAT(NAME, FIELD) args->FIELD = op_float(*stack++);
#define UNPACK_FLOAT_OR_ZERO(NAME, FIELD) args->FIELD = (float)op_float(*stack++);
#define UNPACK_FLAG(NAME, FIELD) args->FIELD = *stack++ != 0;

/* unpack_<NAME>(ctx, stack, args) converts torch's arguments to the fields that the rows name. */
#define OP(NAME, ARGS, RUN)                                                                        \
  static void unpack_##NAME(moelora_op_context *ctx, const StableIValue *stack, ARGS *args) {
#define ARG(KIND, ...) UNPACK_##KIND(__VA_ARGS__)
#define HOST_INT(NAME, FIELD) args->FIELD = op_host_int(ctx, #NAME, *stack++);
#define MAPPED(AT, FIELD, NAME)                                                                    \
  op_need_mapping(ctx, &args->AT routing.topk_ids, &args->AT adapters.token_lora_mapping,          \
                  &args->AT FIELD, #NAME);
#define END                                                                                        \
  (void)stack;                                                                                     \
  }
#include "glue/ops.inc"

/* ---- calls ---- */

#define OP(NAME, ARGS, RUN)                                                                        \
  static void boxed_##NAME(StableIValue *stack, uint64_t inputs, uint64_t outputs) {               \
    (void)inputs, (void)outputs;                                                                   \
    moelora_op_context ctx;                                                                        \
    ARGS args = {0};                                                                               \
    op_open(&ctx, #NAME);                                                                          \
    unpack_##NAME(&ctx, stack, &args);                                                             \
    if (op_ready(&ctx)) {                                                                          \
      RUN(&ctx, &args);                                                                            \
    }                                                                                              \
    op_close(&ctx, stack);                                                                         \
  }
#include "glue/ops.inc"

typedef void boxed_function(StableIValue *stack, uint64_t inputs, uint64_t outputs);

static boxed_function *const functions[NUM_OPS] = {
#define OP(NAME, ...) boxed_##NAME,
#include "glue/ops.inc"
};

const char *moelora_register_ops(const char *name) {
  /* torch keeps the operators while these handles live, which are never deleted. */
  static TorchLibraryHandle definitions, cpu, cuda;
  /* A second registration, for meta tensors. Python shape functions, which support symbolic sizes,
   * implement the Meta key of the operators above, and call these to validate arguments. */
  static TorchLibraryHandle meta_definitions, meta;
  static char schema[2048];
  char name_meta[MOELORA_NAMESPACE_BYTES + sizeof "_meta"];
  if (definitions)
    return NULL;
  snprintf(name_meta, sizeof name_meta, "%s_meta", name);
  if (aoti_torch_library_init_def(name, __FILE__, __LINE__, &definitions) ||
      aoti_torch_library_init_impl(name, "CPU", __FILE__, __LINE__, &cpu) ||
      aoti_torch_library_init_impl(name, "CUDA", __FILE__, __LINE__, &cuda) ||
      aoti_torch_library_init_def(name_meta, __FILE__, __LINE__, &meta_definitions) ||
      aoti_torch_library_init_impl(name_meta, "Meta", __FILE__, __LINE__, &meta))
    return "cannot create torch's operator library";
  for (int op = 0; op < NUM_OPS; op++) {
    write_schema(op, schema, sizeof schema);
    if (aoti_torch_library_def(definitions, schema) ||
        torch_library_impl(cpu, names[op], functions[op], MOELORA_TORCH_ABI_VERSION) ||
        torch_library_impl(cuda, names[op], functions[op], MOELORA_TORCH_ABI_VERSION) ||
        aoti_torch_library_def(meta_definitions, schema) ||
        torch_library_impl(meta, names[op], functions[op], MOELORA_TORCH_ABI_VERSION))
      return schema;
  }
  return NULL;
}
