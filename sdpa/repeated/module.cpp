// The module `sdpa.repeated._native`.

#include "steps.h"

namespace sdpa {

Parts parts;
Names names;

namespace {

PyObject* configure(PyObject*, PyObject* args, PyObject* keywords) {
  if (PyTuple_Size(args)) return PyErr_SetString(PyExc_TypeError, "parts are given by name"), nullptr;
#define TAKE(name)                                                                               \
  if (PyObject* given = keywords == nullptr ? nullptr : PyDict_GetItemString(keywords, #name)) { \
    PyObject* before = parts.name;                                                               \
    parts.name = Ref::borrowed(given);                                                           \
    Py_XDECREF(before);                                                                          \
  }
  SDPA_PARTS(TAKE)
#undef TAKE
#define REQUIRE(name)                                   \
  if (parts.recent != nullptr && parts.name == nullptr) \
    return PyErr_SetString(PyExc_TypeError, "missing: " #name), nullptr;
  SDPA_PARTS(REQUIRE)
#undef REQUIRE
  return Ref::borrowed(Py_None);
}

PyMethodDef methods[] = {
    {"recognise", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recognise)), METH_FASTCALL,
     "The results of a call like one before, else NotImplemented."},
    {"recognise_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recognise_backward)),
     METH_FASTCALL, "The gradients of a call whose backward is like one before, else None."},
    {"configure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(configure)), METH_VARARGS | METH_KEYWORDS,
     "Hand over the functions and objects that calls are recognised by."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "sdpa.repeated._native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace sdpa

PyMODINIT_FUNC PyInit__native() {
#define INTERN(name) sdpa::names.name = PyUnicode_InternFromString(#name);
  SDPA_NAMES(INTERN)
#undef INTERN
  PyTypeObject* types[] = {sdpa::make_launches_type(), sdpa::make_repeated_type(), sdpa::make_operator_type()};
  PyObject* module = PyModule_Create(&sdpa::definition);
  for (PyTypeObject* type : types)
    if (module == nullptr || type == nullptr || PyModule_AddType(module, type) < 0) return nullptr;
  if (PyModule_AddIntConstant(module, "MAX_TENSORS", sdpa::kMaxTensors) < 0 ||
      PyModule_AddIntConstant(module, "MAX_WORDS", sdpa::kMaxWords) < 0 ||
      PyModule_AddIntConstant(module, "MAX_MAPS", sdpa::kMaxMaps) < 0)
    return nullptr;
  return module;
}
