/* The extension moelora._C: registers the operators on import, and wraps functions of the core. */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <ctype.h>
#include <string.h>

#include "core/format.h"
#include "core/log.h"
#include "glue/ops.h"

/* Defines a function of the module that takes no arguments and returns VALUE. */
#define GETTER(NAME, VALUE)                                                                        \
  static PyObject *py_##NAME(PyObject *self, PyObject *unused) {                                   \
    (void)self, (void)unused;                                                                      \
    return VALUE;                                                                                  \
  }

/* Returns None, or raises the error that the core recorded. */
static PyObject *none_if(moelora_status status) {
  if (status != MOELORA_OK)
    return PyErr_Format(PyExc_ValueError, "%s", moelora_error_message());
  Py_RETURN_NONE;
}

/* Appends a new item and releases it; clears the list after a failure, or if the item is NULL. */
static void append(PyObject **list, PyObject *item) {
  if (!item || PyList_Append(*list, item) < 0)
    Py_CLEAR(*list);
  Py_XDECREF(item);
}

static PyObject *variant_list(bool usable_only) {
  PyObject *list = PyList_New(0);
  const char *name;
  for (int32_t i = 0; list && (name = moelora_variant_name(i)); i++)
    if (!usable_only || moelora_variant_usable(i))
      append(&list, PyUnicode_FromString(name));
  return list;
}

static PyObject *last_error(void) {
  const op_error *error = op_last_error();
  return Py_BuildValue("is", (int)error->status, error->text);
}

GETTER(version, PyUnicode_FromString(MOELORA_VERSION))
GETTER(variants, variant_list(false))
GETTER(usable, variant_list(true))
GETTER(last_plan, PyUnicode_FromString(moelora_last_plan()))
GETTER(last_error, last_error())
GETTER(error_number, PyLong_FromUnsignedLongLong(op_last_error()->number))
GETTER(logs_shapes, PyBool_FromLong(moelora_log() >= MOELORA_LOG_SHAPES))
GETTER(cpu_features, PyUnicode_FromString(moelora_cpu_features()))
GETTER(has_cuda, PyBool_FromLong(moelora_has_device(MOELORA_CUDA)))
GETTER(clear_tuned_plans, (moelora_clear_tuned_plans(), none_if(MOELORA_OK)))

static PyObject *py_force_variant(PyObject *self, PyObject *name) {
  (void)self;
  const char *text = NULL;
  if (name != Py_None && !(text = PyUnicode_AsUTF8AndSize(name, NULL)))
    return NULL;
  return none_if(moelora_force_variant(text));
}

static PyObject *py_limit_capability(PyObject *self, PyObject *args) {
  (void)self;
  int compute_capability;
  if (!PyArg_ParseTuple(args, "i", &compute_capability))
    return NULL;
  return none_if(moelora_limit_capability(compute_capability));
}

/* Takes the fields of moelora_tuned_plan in their order. */
static PyObject *py_add_tuned_plan(PyObject *self, PyObject *args) {
  (void)self;
  int device, dtype;
  long long hidden, intermediate, tokens;
  moelora_tuned_plan plan;
  if (!PyArg_ParseTuple(args, "iiiiiiLLLs", &device, &plan.compute_capability, &plan.num_units,
                        &dtype, &plan.num_experts, &plan.top_k, &hidden, &intermediate, &tokens,
                        &plan.variant))
    return NULL;
  plan.device = (moelora_device)device;
  plan.dtype = (moelora_dtype)dtype;
  plan.hidden = hidden, plan.intermediate = intermediate, plan.tokens = tokens;
  return none_if(moelora_add_tuned_plan(&plan));
}

/* Returns the numbers of a 4-bit format's codes; an empty tuple for other formats. */
static PyObject *codes_of(moelora_format format) {
  static const float codes[][16] = {
#define MOELORA_CODES(VALUES, ...) [MOELORA_VALUES_##VALUES] = {__VA_ARGS__},
#include "formats.inc"
  };
  const int count = moelora_is_four_bits(format) ? 16 : 0;
  PyObject *tuple = PyTuple_New(count);
  for (int i = 0; tuple && i < count; i++) {
    PyObject *number = PyFloat_FromDouble(codes[moelora_values_of(format)][i]);
    if (!number || PyTuple_SetItem(tuple, i, number) < 0)
      Py_CLEAR(tuple);
  }
  return tuple;
}

/* Lists the rows of formats.inc in the order of their enumerators, with the properties of their
 * tiles. */
static PyObject *format_list(void) {
  static const struct {
    const char *name, *kernel;
    int group_rows, group_columns, has_zeros;
  } rows[] = {
#define MOELORA_FORMAT_OF(KERNEL, NAME, TEXT, VALUES, ROWS, COLUMNS, SCALE, ZEROS, X_KERNEL)       \
  {#NAME, #KERNEL, ROWS, COLUMNS, ZEROS},
#include "formats.inc"
  };
  PyObject *list = PyList_New(0);
  for (int i = 0; list && i < MOELORA_FORMATS; i++) {
    const moelora_format format = (moelora_format)i;
    const moelora_kernel_format kernel = moelora_kernel_format_of(format, MOELORA_X_NATIVE);
    const moelora_format first = moelora_format_of_kernel(kernel);
    const bool same = moelora_values_of(format) == moelora_values_of(first);
    append(&list, Py_BuildValue("ssiiiiiiN", rows[i].name, same ? rows[i].kernel : rows[i].name,
                                rows[i].group_rows, rows[i].group_columns, rows[i].has_zeros,
                                moelora_is_four_bits(format) ? 4 : 8, moelora_tile_depth(format),
                                moelora_tile_size(format), codes_of(format)));
  }
  return list;
}

/* Lists rows of ops.inc in order: OP as ("op", name, ""), HOST_INT as ("host", argument, ""), and
 * RETURNS as ("returns", dtype, shape). */
static PyObject *operator_list(void) {
  static const struct {
    const char *kind, *name, *shape;
  } rows[] = {
#define OP(NAME, ...) {"op", #NAME, ""},
#define HOST_INT(NAME, FIELD) {"host", #NAME, ""},
#define RETURNS(DTYPE, SHAPE) {"returns", DTYPE, SHAPE},
#include "glue/ops.inc"
  };
  PyObject *list = PyList_New(0);
  for (size_t i = 0; list && i < sizeof rows / sizeof *rows; i++)
    append(&list, Py_BuildValue("sss", rows[i].kind, rows[i].name, rows[i].shape));
  return list;
}

GETTER(formats, format_list())
GETTER(operators, operator_list())

static PyMethodDef methods[] = {
    {"version", py_version, METH_NOARGS, "Version of the compiled library."},
    {"variants", py_variants, METH_NOARGS, "Names of all kernel variants compiled in."},
    {"usable", py_usable, METH_NOARGS, "Names of the kernel variants that can run here."},
    {"force_variant", py_force_variant, METH_O,
     "Prefer the kernel variant of this name in every plan that can use it; None undoes it."},
    {"limit_capability", py_limit_capability, METH_VARARGS,
     "Plan for GPUs as if they had at most this compute capability (80, 90, ...); 0 undoes it."},
    {"add_tuned_plan", py_add_tuned_plan, METH_VARARGS,
     "Prefer a variant for layers of one shape: (device, compute_capability, num_units, dtype, "
     "num_experts, top_k, hidden, intermediate, tokens, variant)."},
    {"clear_tuned_plans", py_clear_tuned_plans, METH_NOARGS, "Forget all tuned plans."},
    {"last_plan", py_last_plan, METH_NOARGS, "What the last operator of this thread ran."},
    {"last_error", py_last_error, METH_NOARGS,
     "(status, text) of the last error that an operator raised in this thread."},
    {"error_number", py_error_number, METH_NOARGS,
     "How many errors operators have raised in this thread: last_error() is the one of this "
     "number."},
    {"logs_shapes", py_logs_shapes, METH_NOARGS,
     "True if MOELORA_LOG is to print the arguments of every call."},
    {"cpu_features", py_cpu_features, METH_NOARGS, "CPU features that dispatch depends on."},
    {"has_cuda", py_has_cuda, METH_NOARGS, "True if CUDA kernels are compiled in and can run."},
    {"operators", py_operators, METH_NOARGS,
     "Operators, their numbers in host memory, and what they return: (kind, name or dtype, "
     "shape)."},
    {"formats", py_formats, METH_NOARGS,
     "Weight formats: (name, kernel, rows and columns that share a scale, zero points, bits, "
     "columns and bytes of a tile) of each, in the order of their codes."},
    {NULL, NULL, 0, NULL},
};

/* Stores the package's name, which is the module's without "._C": "moelora", or the name under
 * which Hugging Face's `kernels` loads a copy. Characters that torch does not allow become '_'. */
static void name_of_package(PyObject *module, char name[MOELORA_NAMESPACE_BYTES]) {
  const char *full = PyModule_GetName(module);
  const char *end = full ? strrchr(full, '.') : NULL;
  const char *from = end ? full : "moelora";
  int count = 0;
  for (; from != end && *from && count < MOELORA_NAMESPACE_BYTES - 1; from++) {
    name[count++] = isalnum((unsigned char)*from) ? *from : '_';
  }
  name[count] = 0;
}

static int execute(PyObject *module) {
  char name[MOELORA_NAMESPACE_BYTES];
  name_of_package(module, name);
  const char *failed = moelora_register_ops(name);
  if (failed) {
    PyErr_Format(PyExc_ImportError, "moelora: torch refused an operator: %s", failed);
    return -1;
  }
  if (PyModule_AddStringConstant(module, "NAMESPACE", name)) {
    return -1;
  }
#ifdef MOELORA_WITH_CUDA
  return PyModule_AddIntConstant(module, "WITH_CUDA", 1);
#else
  return PyModule_AddIntConstant(module, "WITH_CUDA", 0);
#endif
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "moelora._C", .m_doc = "The compiled part of moelora.",
    .m_methods = methods,  .m_slots = slots,
};

PyMODINIT_FUNC PyInit__C(void) {
  return PyModuleDef_Init(&definition);
}
