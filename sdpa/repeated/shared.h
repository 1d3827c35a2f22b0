// What the parts of a repeated call share: references, tuples, and what `configure` hands over.
//
// By CPython's limited API, so that one build serves every Python from 3.10 on. Nothing is included of torch.

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace sdpa {

constexpr int kMaxTensors = 48;
constexpr uint64_t kAlignmentBits = 15;  // the bits of an address below a multiple of 16 bytes

// A reference that is given back at the end of its scope.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object(owned) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object); }
  static PyObject* borrowed(PyObject* object) {
    Py_XINCREF(object);
    return object;
  }
  PyObject* release() {
    PyObject* given = object;
    object = nullptr;
    return given;
  }
  void take(PyObject* owned) {
    Py_XDECREF(object);
    object = owned;
  }
  explicit operator bool() const { return object != nullptr; }
  PyObject* get() const { return object; }

 private:
  PyObject* object = nullptr;
};

// What `configure` is handed: functions and objects of torch's and ours, by name.
#define SDPA_STATE(X) X(function_modes) X(dispatch_modes) X(forward_ad) X(grad_enabled) X(inference_mode)
#define SDPA_SHARDED(X) X(functional) X(torchs) X(own) X(is_sharded)
#define SDPA_TOGGLES(X) X(flash_enabled) X(efficient_enabled) X(math_enabled) X(cudnn_enabled) X(deterministic)
#define SDPA_OTHERS(X) X(autocast_dtype) X(float32_precision) X(current) X(current_text)
#define SDPA_CALLS(X) X(parts_of) X(recent) X(last) X(tensor_type) X(parameter_type)
#define SDPA_TENSORS(X) X(data_ptr) X(get_device)
#define SDPA_PARTS(X) SDPA_STATE(X) SDPA_SHARDED(X) SDPA_TOGGLES(X) SDPA_OTHERS(X) SDPA_CALLS(X) SDPA_TENSORS(X)
// Names that attributes and methods are asked by.
#define SDPA_NAMES(X) \
  X(is_nested) X(_current_level) X(choice) X(fill_) X(first_time) X(recovered) X(scaled_dot_product_attention)
#define SDPA_DECLARE(name) PyObject* name = nullptr;
struct Parts {
  SDPA_PARTS(SDPA_DECLARE)
};
struct Names {
  SDPA_NAMES(SDPA_DECLARE)
};
#undef SDPA_DECLARE
extern Parts parts;
extern Names names;

inline PyObject* tuple_of(PyObject* const* items, Py_ssize_t count) {
  PyObject* made = PyTuple_New(count);
  for (Py_ssize_t i = 0; made != nullptr && i < count; i++) PyTuple_SetItem(made, i, Ref::borrowed(items[i]));
  return made;
}

// 1, 0, or -1 with an exception.
inline int is_true(PyObject* owned) {
  if (owned == nullptr) return -1;
  int answer = PyObject_IsTrue(owned);
  Py_DECREF(owned);
  return answer;
}

// Whether its address could be asked; else an exception is set.
inline bool address_of(PyObject* tensor, uint64_t& address) {
  Ref number(PyObject_CallFunctionObjArgs(parts.data_ptr, tensor, nullptr));
  if (!number) return false;
  address = PyLong_AsUnsignedLongLong(number.get());
  return !(address == static_cast<uint64_t>(-1) && PyErr_Occurred());
}

// The items of a tuple as an array; they are borrowed.
struct Items {
  PyObject* item[kMaxTensors];
  Py_ssize_t count;
  explicit Items(PyObject* tuple) : count(PyTuple_Size(tuple)) {
    if (count > kMaxTensors) count = -1;
    for (Py_ssize_t i = 0; i < count; i++) item[i] = PyTuple_GetItem(tuple, i);
  }
};

inline bool without_keywords(PyObject* keywords) {
  if (keywords == nullptr || PyDict_Size(keywords) == 0) return true;
  PyErr_SetString(PyExc_TypeError, "tensors are given by position");
  return false;
}

// Frees what a type made by PyType_FromSpec allocated.
inline void free_object(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

// launches.cpp: recorded launches. None where the ordinary way must be taken.
extern PyTypeObject* launches_type;
PyObject* run_launches(PyObject* launches, PyObject* const* given, Py_ssize_t count);
PyTypeObject* make_launches_type();

// operator.cpp: one of torch's own operators. None where the ordinary way must be taken.
extern PyTypeObject* operator_type;
PyObject* run_operator(PyObject* object, PyObject* const* given, Py_ssize_t count);
PyTypeObject* make_operator_type();

// repeated.cpp: one direction of a prepared call.
extern PyTypeObject* repeated_type;
PyObject* run_repeated(PyObject* repeated, PyObject* const* given, Py_ssize_t count);
PyTypeObject* make_repeated_type();

// recognise.cpp: (kind, (query, key, value), options, returns_lse, kernel, places) -> the results of a call like one
// before, else NotImplemented; and (call, saved tensors, gradient of out, that of lse, place of a bias that has one) ->
// the gradients of what the call's node was given, else None.
PyObject* recognise(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* recognise_backward(PyObject* module, PyObject* const* args, Py_ssize_t count);

}  // namespace sdpa
