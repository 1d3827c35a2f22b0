// A call like one before, recognised by its state and by guards of its tensors, and answered by what was prepared for
// it. entry.py makes the same state of a call that is not recognised.

#include "shared.h"

namespace sdpa {
namespace {

// A call's arguments, borrowed; the options are those of `validate.Options`, in their order.
struct Call {
  PyObject *kind, *query, *key, *value;
  PyObject *mask, *dropout_p, *is_causal, *scale, *enable_gqa, *softcap, *sinks;
  PyObject *returns_lse, *kernel, *places;
};

enum Fact { kAutocast, kAlignment, kPrecision, kFacts };  // of `calls.Facts`, in their order

// A number that is equal to another one, and hashed like it, if they mean the same; a bool is none.
bool is_number(PyObject* object) { return PyFloat_Check(object) || PyLong_CheckExact(object); }
bool is_number_or_none(PyObject* object) { return object == Py_None || is_number(object); }

bool is_usual(const Call& call) {
  return PyBool_Check(call.is_causal) && PyBool_Check(call.enable_gqa) && PyBool_Check(call.returns_lse) &&
         (is_number(call.dropout_p) || PyBool_Check(call.dropout_p)) && is_number_or_none(call.scale) &&
         is_number_or_none(call.softcap);
}

// Whether a mode, forward mode or torch's context_parallel stands between the call and its kernel; -1 with an
// exception. The guards see what has a dispatch key of its own, as functorch and torch.jit have.
int is_transformed() {
  for (PyObject* asked : {parts.function_modes, parts.dispatch_modes}) {
    int on = is_true(PyObject_CallNoArgs(asked));
    if (on) return on;
  }
  Ref level(PyObject_GetAttr(parts.forward_ad, names._current_level));
  if (!level) return -1;
  if (PyLong_AsLong(level.get()) >= 0) return 1;
  Ref function(PyObject_GetAttr(parts.functional, names.scaled_dot_product_attention));
  if (!function) return -1;
  if (function.get() == parts.torchs || function.get() == parts.own) return 0;
  return is_true(PyObject_CallNoArgs(parts.is_sharded));  // another one is in its place
}

// Whether all are torch's own tensors or parameters: asking a subclass for anything calls its __torch_function__.
bool are_plain(PyObject* const* tensors, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensors[i]));
    if (type != parts.tensor_type && type != parts.parameter_type) return false;
  }
  return true;
}

// Whether one of the tensors is nested: it has no strides, for which a guard ends the process. -1 with an exception.
int is_nested(PyObject* const* tensors, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    int nested = is_true(PyObject_GetAttr(tensors[i], names.is_nested));
    if (nested) return nested;
  }
  return 0;
}

// The bits of the addresses below multiples of 16 bytes, as `calls.form_of` has them.
PyObject* form_of(PyObject* const* tensors, Py_ssize_t count) {
  uint64_t bits = 0, address = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!address_of(tensors[i], address)) return nullptr;
    bits |= address;
  }
  return PyLong_FromUnsignedLongLong(bits & kAlignmentBits);
}

// What `sdpa_kernel` is set to in this context, as a text; what is false where it is set to nothing.
PyObject* setting() {
  PyObject* current = PyObject_CallNoArgs(parts.current);
  int on = current == nullptr ? -1 : PyObject_IsTrue(current);
  if (on == 0) return current;
  Py_XDECREF(current);
  return on < 0 ? nullptr : PyObject_CallNoArgs(parts.current_text);
}

// Whether a call has the facts (`calls.Facts`) of one before: 1, 0, or -1 with an exception.
int has_facts(PyObject* facts, const Items& tensors) {
  for (int i = 0; i < kFacts; i++) {
    PyObject* known = PyTuple_GetItem(facts, i);
    if (known == Py_None) continue;
    Ref found(i == kAutocast    ? PyObject_CallFunctionObjArgs(parts.autocast_dtype, tensors.item[0], nullptr)
              : i == kAlignment ? form_of(tensors.item, tensors.count)
                                : PyObject_CallNoArgs(parts.float32_precision));
    int same = found ? PyObject_RichCompareBool(found.get(), known, Py_EQ) : -1;
    if (same <= 0) return same;
  }
  return 1;
}

// The key of a call's state, the same as `entry.unrecognised` makes. No tuple is made before all its parts are there:
// Python code runs between, and other threads may look at a tuple.
PyObject* state_of(const Call& call, PyObject* form) {
  PyObject* given[] = {PyTuple_GetItem(call.kind, 0),
                       form,
                       call.dropout_p,
                       call.is_causal,
                       call.scale,
                       call.enable_gqa,
                       call.softcap,
                       call.returns_lse,
                       call.kernel};
  PyObject* switches[] = {parts.flash_enabled, parts.efficient_enabled, parts.math_enabled,  parts.cudnn_enabled,
                          parts.deterministic, parts.grad_enabled,      parts.inference_mode};
  constexpr Py_ssize_t kGiven = sizeof(given) / sizeof(*given), kSwitches = sizeof(switches) / sizeof(*switches);
  Ref found[kSwitches + 1];
  PyObject* parts_of_state[kGiven + kSwitches + 1];
  Py_ssize_t place = 0, number = 0;
  auto add = [&](PyObject* owned) {
    found[number].take(owned);
    parts_of_state[place++] = found[number++].get();
    return owned != nullptr;
  };
  for (PyObject* part : given) parts_of_state[place++] = part;  // the call has them
  if (!add(setting())) return nullptr;
  for (PyObject* asked : switches)
    if (!add(PyObject_CallNoArgs(asked))) return nullptr;
  return tuple_of(parts_of_state, place);
}

// The same of a backward, as `prepared.Prepared.gradients` makes it.
PyObject* backward_state_of(PyObject* call, bool without_lse, bool bias_grad) {
  PyObject* toggles[] = {parts.flash_enabled, parts.efficient_enabled, parts.math_enabled, parts.cudnn_enabled};
  long bits = 0, bit = 1;
  for (PyObject* asked : toggles) {
    int on = is_true(PyObject_CallNoArgs(asked));
    if (on < 0) return nullptr;
    bits |= on ? bit : 0, bit <<= 1;
  }
  Ref families(PyLong_FromLong(bits)), deterministic(PyObject_CallNoArgs(parts.deterministic));
  if (!families || !deterministic) return nullptr;
  PyObject* state[] = {call, families.get(), deterministic.get(), without_lse ? Py_True : Py_False,
                       bias_grad ? Py_True : Py_False};
  return tuple_of(state, sizeof(state) / sizeof(*state));
}

PyObject* unknown() { return Ref::borrowed(Py_NotImplemented); }
PyObject* none() { return Ref::borrowed(Py_None); }

// The ordinary way raises for what no state can be made of, or serves it.
PyObject* unknown_or_raised() {
  for (PyObject* kind : {PyExc_TypeError, PyExc_AttributeError, PyExc_ValueError, PyExc_RuntimeError})
    if (PyErr_ExceptionMatches(kind)) return PyErr_Clear(), unknown();
  return nullptr;
}

PyObject* results_of(PyObject* run, const Call& call, PyObject* const* tensors, PyObject* given) {
  Ref found;
  Py_ssize_t beside = PyTuple_Size(given);
  if (beside == 0 && PyObject_TypeCheck(run, repeated_type)) {
    found.take(run_repeated(run, tensors, 3));
  } else {
    Ref args(PyTuple_New(3 + beside));
    if (!args) return nullptr;
    for (int i = 0; i < 3; i++) PyTuple_SetItem(args.get(), i, Ref::borrowed(tensors[i]));
    for (Py_ssize_t i = 0; i < beside; i++)
      PyTuple_SetItem(args.get(), 3 + i, Ref::borrowed(PyTuple_GetItem(given, i)));
    found.take(PyObject_Call(run, args.get(), nullptr));
  }
  if (!found) return nullptr;
  return call.returns_lse == Py_True ? PySequence_Tuple(found.get()) : PySequence_GetItem(found.get(), 0);
}

// The first of the latest calls of a state whose guard takes the tensors and whose facts are theirs, as what was
// prepared for it.
PyObject* look_up(PyObject* latest, PyObject* arguments, const Items& tensors, Ref& run) {
  for (Py_ssize_t i = 0, n = PyTuple_Size(latest); i < n; i++) {
    PyObject* entry = PyTuple_GetItem(latest, i);
    int alike = is_true(PyObject_Call(PyTuple_GetItem(entry, 0), arguments, nullptr));
    if (alike > 0) alike = has_facts(PyTuple_GetItem(entry, 3), tensors);
    if (alike < 0) return nullptr;
    if (alike) return run.take(Ref::borrowed(PyTuple_GetItem(entry, 1))), run.get();
  }
  return nullptr;
}

}  // namespace

PyObject* recognise(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (parts.recent == nullptr || count != 6 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) ||
      PyTuple_Size(args[1]) != 3 || PyTuple_Size(args[2]) != 7)
    return unknown();
  PyObject *tensors = args[1], *options = args[2];
  auto option = [&](int i) { return PyTuple_GetItem(options, i); };
  Call call = {args[0],
               PyTuple_GetItem(tensors, 0),
               PyTuple_GetItem(tensors, 1),
               PyTuple_GetItem(tensors, 2),
               option(0),
               option(1),
               option(2),
               option(3),
               option(4),
               option(5),
               option(6),
               args[3],
               args[4],
               args[5]};
  if (!is_usual(call)) return unknown();
  int transformed = is_transformed();
  if (transformed) return transformed < 0 ? nullptr : unknown();
  Ref own;
  PyObject *form = Py_None, *given = nullptr;
  Items all(tensors);
  if (call.mask != Py_None || call.sinks != Py_None || call.places != Py_None) {
    own.take(PyObject_CallFunctionObjArgs(parts.parts_of, call.mask, call.sinks, call.places, nullptr));
    if (!own) return nullptr;
    if (own.get() == Py_None) return unknown();
    form = PyTuple_GetItem(own.get(), 0);
    given = PyTuple_GetItem(own.get(), 2);
    Ref others(PySequence_Tuple(PyTuple_GetItem(own.get(), 1)));
    Py_ssize_t beside = others ? PyTuple_Size(others.get()) : 0;
    if (!others || beside > kMaxTensors - 3) return others ? unknown() : nullptr;
    for (Py_ssize_t i = 0; i < beside; i++) all.item[all.count++] = PyTuple_GetItem(others.get(), i);  // `own` has them
  }
  if (!are_plain(all.item, all.count)) return unknown();
  Ref state(state_of(call, form));
  int nested = state ? is_nested(all.item, all.count) : -1;
  if (nested) return nested < 0 ? unknown_or_raised() : unknown();
  PyObject* latest = PyDict_GetItemWithError(parts.recent, state.get());
  if (latest == nullptr) return PyErr_Occurred() ? unknown_or_raised() : unknown();
  Ref held(Ref::borrowed(latest)), run,
      arguments(all.count == 3 ? Ref::borrowed(tensors) : tuple_of(all.item, all.count));
  if (!arguments) return nullptr;
  if (look_up(held.get(), arguments.get(), all, run) == nullptr)
    return PyErr_Occurred() ? unknown_or_raised() : unknown();
  Ref nothing(given == nullptr ? PyTuple_New(0) : nullptr);
  return results_of(run.get(), call, all.item, given == nullptr ? nothing.get() : given);
}

PyObject* recognise_backward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (parts.recent == nullptr || count != 5 || !PyTuple_Check(args[1])) return none();
  PyObject *call = args[0], *grad_out = args[2], *grad_lse = args[3];
  Items given(args[1]);
  if (given.count < 5 || given.count > kMaxTensors - 2) return none();
  const Py_ssize_t inputs = given.count - 2;  // out and lse follow them
  const long bias = args[4] == Py_None ? -1 : PyLong_AsLong(args[4]);
  if (bias == -1 && PyErr_Occurred()) return nullptr;
  given.item[given.count++] = grad_out;
  if (grad_lse != Py_None) given.item[given.count++] = grad_lse;
  int differentiable = is_true(PyObject_CallNoArgs(parts.grad_enabled));
  if (!differentiable) differentiable = is_true(PyObject_CallNoArgs(parts.dispatch_modes));
  if (differentiable) return differentiable < 0 ? nullptr : none();
  Ref state(backward_state_of(call, grad_lse == Py_None, bias >= 0)), arguments(tuple_of(given.item, given.count));
  if (!state || !arguments) return nullptr;
  PyObject* latest = PyDict_GetItemWithError(parts.recent, state.get());
  if (latest == nullptr) return PyErr_Occurred() ? nullptr : none();
  Ref held(Ref::borrowed(latest)), run;
  if (look_up(held.get(), arguments.get(), given, run) == nullptr) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return nullptr;
    return PyErr_Clear(), none();  // a gradient without memory
  }
  Ref found(PyObject_TypeCheck(run.get(), repeated_type) ? run_repeated(run.get(), given.item, given.count) : none());
  if (!found || found.get() == Py_None) return found.release();
  Ref placed(PyTuple_New(1 + inputs));
  for (Py_ssize_t i = 0; placed && i < 1 + inputs; i++) {
    const Py_ssize_t place = 1 <= i && i <= 3 ? i - 1 : i == 1 + bias ? 3 : -1;
    PyObject* gradient = place < 0 ? none() : PySequence_GetItem(found.get(), place);
    if (gradient == nullptr) return nullptr;
    PyTuple_SetItem(placed.get(), i, gradient);
  }
  return placed.release();
}

}  // namespace sdpa
