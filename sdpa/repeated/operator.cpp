// One of torch's own operators with fixed options.

#include "shared.h"

namespace sdpa {

PyTypeObject* operator_type = nullptr;

namespace {

constexpr int kMembers = 3;

struct Operator {
  PyObject_HEAD union {
    PyObject* members[kMembers];
    struct {
      PyObject* function;  // of (query, key, value, *options, **keywords); its first result is the output
      PyObject* options;
      PyObject* keywords;
    };
  };
};

int operator_init(PyObject* object, PyObject* args, PyObject* keywords) {
  auto* self = reinterpret_cast<Operator*>(object);
  PyObject *function, *options, *named;
  if (!without_keywords(keywords) ||
      !PyArg_ParseTuple(args, "OO!O!", &function, &PyTuple_Type, &options, &PyDict_Type, &named))
    return -1;
  if (PyTuple_Size(options) > kMaxTensors) return PyErr_SetString(PyExc_ValueError, "too many options"), -1;
  PyObject* values[] = {function, options, named};
  for (int i = 0; i < kMembers; i++) {
    PyObject* before = self->members[i];
    self->members[i] = Ref::borrowed(values[i]);
    Py_XDECREF(before);
  }
  return 0;
}

PyObject* operator_call(PyObject* object, PyObject* args, PyObject* keywords) {
  if (!without_keywords(keywords)) return nullptr;
  Items given(args);
  return run_operator(object, given.item, given.count);
}

int operator_visit(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  for (PyObject* member : reinterpret_cast<Operator*>(object)->members) Py_VISIT(member);
  return 0;
}

int operator_clear(PyObject* object) {
  for (PyObject*& member : reinterpret_cast<Operator*>(object)->members) Py_CLEAR(member);
  return 0;
}

void operator_free(PyObject* object) {
  PyObject_GC_UnTrack(object);
  operator_clear(object);
  free_object(object);
}

PyType_Slot slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(operator_init)},
    {Py_tp_call, reinterpret_cast<void*>(operator_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(operator_visit)},
    {Py_tp_clear, reinterpret_cast<void*>(operator_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(operator_free)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_doc, const_cast<char*>("One of torch's own operators with fixed options.")},
    {0, nullptr},
};
PyType_Spec spec = {"sdpa.repeated._native.Operator", sizeof(Operator), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                    slots};

}  // namespace

PyObject* run_operator(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  auto* self = reinterpret_cast<Operator*>(object);
  if (self->function == nullptr || count < 0) return PyErr_SetString(PyExc_ValueError, "too many tensors"), nullptr;
  Py_ssize_t beside = PyTuple_Size(self->options);
  Ref args(PyTuple_New(count + beside));
  if (!args) return nullptr;
  for (Py_ssize_t i = 0; i < count; i++) PyTuple_SetItem(args.get(), i, Ref::borrowed(given[i]));
  for (Py_ssize_t i = 0; i < beside; i++)
    PyTuple_SetItem(args.get(), count + i, Ref::borrowed(PyTuple_GetItem(self->options, i)));
  Ref function(Ref::borrowed(self->function));
  Ref results(PyObject_Call(function.get(), args.get(), PyDict_Size(self->keywords) ? self->keywords : nullptr));
  Ref out(results ? PySequence_GetItem(results.get(), 0) : nullptr);
  PyObject* alone[] = {out.get()};
  return out ? tuple_of(alone, 1) : nullptr;
}

PyTypeObject* make_operator_type() { return operator_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec)); }

}  // namespace sdpa
