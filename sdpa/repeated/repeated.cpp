// One direction of a prepared call: its recorded launches, else the ordinary way to its kernel (calls.py).

#include "shared.h"

namespace sdpa {

PyTypeObject* repeated_type = nullptr;

namespace {

struct Repeated {
  PyObject_HEAD PyObject*
      again;  // the recorded launches, torch's operator, or another function of the tensors; None before there are any
  PyObject* choice;  // the selected kernel, which `last_choice` tells
};

// The exception that is set, taken out of the interpreter's hands with its traceback.
PyObject* taken_exception() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
}

PyObject* repeated_call(PyObject* object, PyObject* args, PyObject* keywords) {
  if (!without_keywords(keywords)) return nullptr;
  Items given(args);
  if (given.count < 0) return PyErr_SetString(PyExc_ValueError, "too many tensors"), nullptr;
  return run_repeated(object, given.item, given.count);
}

int repeated_visit(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Repeated*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->again);
  Py_VISIT(self->choice);
  return 0;
}

int repeated_clear(PyObject* object) {
  auto* self = reinterpret_cast<Repeated*>(object);
  Py_CLEAR(self->again);
  Py_CLEAR(self->choice);
  return 0;
}

void repeated_free(PyObject* object) {
  PyObject_GC_UnTrack(object);
  repeated_clear(object);
  free_object(object);
}

PyMemberDef members[] = {
    {const_cast<char*>("again"), T_OBJECT, offsetof(Repeated, again), 0, nullptr},
    {const_cast<char*>("choice"), T_OBJECT, offsetof(Repeated, choice), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(repeated_call)},
    {Py_tp_members, members},
    {Py_tp_traverse, reinterpret_cast<void*>(repeated_visit)},
    {Py_tp_clear, reinterpret_cast<void*>(repeated_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(repeated_free)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_doc, const_cast<char*>("One direction of a prepared call: `again` of its tensors, else `first_time`.")},
    {0, nullptr},
};
PyType_Spec spec = {"sdpa.repeated._native.Repeated", sizeof(Repeated), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

PyObject* run_repeated(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  auto* self = reinterpret_cast<Repeated*>(object);
  if (self->choice != nullptr && parts.last != nullptr && PyObject_SetAttr(parts.last, names.choice, self->choice) < 0)
    return nullptr;
  if (self->again != nullptr && self->again != Py_None) {
    Ref again(Ref::borrowed(self->again)), found;
    if (PyObject_TypeCheck(again.get(), launches_type)) {
      found.take(run_launches(again.get(), given, count));
    } else if (PyObject_TypeCheck(again.get(), operator_type)) {
      found.take(run_operator(again.get(), given, count));
    } else {
      Ref tensors(tuple_of(given, count));
      found.take(tensors ? PyObject_Call(again.get(), tensors.get(), nullptr) : nullptr);
    }
    if (found && found.get() != Py_None) return found.release();
    if (!found) {
      if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
      Ref error(taken_exception()), tensors(tuple_of(given, count));
      if (!error || !tensors) return nullptr;
      return PyObject_CallMethodObjArgs(object, names.recovered, error.get(), tensors.get(), nullptr);
    }
  }
  Ref tensors(tuple_of(given, count));
  return tensors ? PyObject_CallMethodObjArgs(object, names.first_time, tensors.get(), nullptr) : nullptr;
}

PyTypeObject* make_repeated_type() { return repeated_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec)); }

}  // namespace sdpa
