/* moelora._C: importing it registers the operators; its functions query the core. */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include "core/format.h"
#include "core/log.h"
#include "glue/ops.h"

static PyObject *py_version(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyUnicode_FromString(MOELORA_VERSION);
}

static PyObject *variant_list(bool usable_only) {
  PyObject *list = PyList_New(0);
  const char *name;
  for (int32_t i = 0; list && (name = moelora_variant_name(i)); i++) {
    if (usable_only && !moelora_variant_usable(i)) {
      continue;
    }
    PyObject *item = PyUnicode_FromString(name);
    if (!item || PyList_Append(list, item) < 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(item);
  }
  return list;
}

static PyObject *py_variants(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return variant_list(false);
}

static PyObject *py_usable(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return variant_list(true);
}

static PyObject *py_force_variant(PyObject *self, PyObject *name) {
  (void)self;
  const char *text = NULL;
  if (name != Py_None && !(text = PyUnicode_AsUTF8AndSize(name, NULL))) {
    return NULL;
  }
  if (moelora_force_variant(text) != MOELORA_OK) {
    return PyErr_Format(PyExc_ValueError, "%s", moelora_error_message());
  }
  Py_RETURN_NONE;
}

static PyObject *py_limit_capability(PyObject *self, PyObject *args) {
  (void)self;
  int compute_capability;
  if (!PyArg_ParseTuple(args, "i", &compute_capability)) {
    return NULL;
  }
  if (moelora_limit_capability(compute_capability) != MOELORA_OK) {
    return PyErr_Format(PyExc_ValueError, "%s", moelora_error_message());
  }
  Py_RETURN_NONE;
}

/* Arguments in the order of moelora_tuned_plan. */
static PyObject *py_add_tuned_plan(PyObject *self, PyObject *args) {
  (void)self;
  int device, dtype;
  long long hidden, intermediate, tokens;
  moelora_tuned_plan plan;
  if (!PyArg_ParseTuple(args, "iiiiiiLLLs", &device, &plan.compute_capability, &plan.num_units,
                        &dtype, &plan.num_experts, &plan.top_k, &hidden, &intermediate, &tokens,
                        &plan.variant)) {
    return NULL;
  }
  plan.device = (moelora_device)device;
  plan.dtype = (moelora_dtype)dtype;
  plan.hidden = hidden, plan.intermediate = intermediate, plan.tokens = tokens;
  if (moelora_add_tuned_plan(&plan) != MOELORA_OK) {
    return PyErr_Format(PyExc_ValueError, "%s", moelora_error_message());
  }
  Py_RETURN_NONE;
}

static PyObject *py_clear_tuned_plans(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  moelora_clear_tuned_plans();
  Py_RETURN_NONE;
}

static PyObject *py_last_plan(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyUnicode_FromString(moelora_last_plan());
}

static PyObject *py_last_error(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  const op_error *error = op_last_error();
  return Py_BuildValue("is", (int)error->status, error->text);
}

static PyObject *py_error_number(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyLong_FromUnsignedLongLong(op_last_error()->number);
}

static PyObject *py_logs_shapes(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyBool_FromLong(moelora_log() >= MOELORA_LOG_SHAPES);
}

static PyObject *py_cpu_features(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyUnicode_FromString(moelora_cpu_features());
}

static PyObject *py_has_cuda(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  return PyBool_FromLong(moelora_has_device(MOELORA_CUDA));
}

/* The numbers of a format's codes; none unless it has four bits. */
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

/* Rows of formats.inc in the order of their enumerators, with the properties of their tiles. */
static PyObject *py_formats(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
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
    PyObject *codes = codes_of(format);
    PyObject *item = Py_BuildValue("ssiiiiiiN", rows[i].name, same ? rows[i].kernel : rows[i].name,
                                   rows[i].group_rows, rows[i].group_columns, rows[i].has_zeros,
                                   moelora_is_four_bits(format) ? 4 : 8, moelora_tile_depth(format),
                                   moelora_tile_size(format), codes);
    if (!item || PyList_Append(list, item) < 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(item);
  }
  return list;
}

/* Rows of ops.inc: ("op", name, ""), then (kind, argument, shape) for each tensor argument, then
 * ("returns", dtype, shape). Numbers and flags are omitted. */
static PyObject *py_operators(PyObject *self, PyObject *unused) {
  (void)self, (void)unused;
  static const struct {
    const char *kind, *name, *shape;
  } rows[] = {
#define OP(NAME, ...) {"op", #NAME, ""},
#define TENSOR(NAME, SHAPE, FIELD) {"tensor", #NAME, SHAPE},
#define OPTIONAL(NAME, SHAPE, FIELD) {"optional", #NAME, SHAPE},
#define WRITTEN(ALIAS, NAME, SHAPE, FIELD) {"tensor", #NAME, SHAPE},
#define WRITTEN_OPTIONAL(ALIAS, NAME, SHAPE, FIELD) {"optional", #NAME, SHAPE},
#define LIST(NAME, SHAPE, COUNT, FIELD) {"list", #NAME, SHAPE},
#define WRITTEN_LIST(ALIAS, NAME, SHAPE, COUNT, FIELD) {"list", #NAME, SHAPE},
#define LORA(A, SHAPE_A, B, SHAPE_B, FIELD) {"list", #A, SHAPE_A}, {"list", #B, SHAPE_B},
#define HOST_INT(NAME, FIELD) {"host", #NAME, "[1]"},
#define RETURNS(DTYPE, SHAPE) {"returns", DTYPE, SHAPE},
#include "glue/ops.inc"
  };
  PyObject *list = PyList_New(0);
  for (size_t i = 0; list && i < sizeof rows / sizeof *rows; i++) {
    PyObject *item = Py_BuildValue("sss", rows[i].kind, rows[i].name, rows[i].shape);
    if (!item || PyList_Append(list, item) < 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(item);
  }
  return list;
}

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
     "Operators, their tensors, and what they return: (kind, name or dtype, shape) of each."},
    {"formats", py_formats, METH_NOARGS,
     "Weight formats: (name, kernel, rows and columns that share a scale, zero points, bits, "
     "columns and bytes of a tile) of each, in the order of their codes."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
  const char *failed = moelora_register_ops();
  if (failed) {
    PyErr_Format(PyExc_ImportError, "moelora: torch refused an operator: %s", failed);
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
