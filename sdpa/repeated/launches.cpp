// Recorded launches, run again with the addresses of other tensors: by the driver, or by a function of a library of
// ours.

#include "steps.h"

namespace sdpa {

PyTypeObject* launches_type = nullptr;

namespace {

constexpr int kMembers = 9;

struct Launches {
  PyObject_HEAD union {
    PyObject* members[kMembers];
    struct {
      PyObject* forms;         // of the tensors made: (size, stride, dtype)
      PyObject* empty;         // makes one of them
      PyObject* copy;          // given -> the tensors as kernels read them; None where they read those given
      PyObject* fills;         // (number of a tensor made, its value) for what is filled before the first launch
      PyObject* watched;       // whether somebody wants to see launches
      PyObject* unseen;        // lists: somebody does where one is not empty
      PyObject* check_memory;  // (tensors): raises, or returns false, where one has no memory
      PyObject* stream_of;     // (device): its current stream; None on a CPU
      PyObject* finish;        // (read, made): what the call returns; or numbers of tensors made, -1 for None
    };
  };
  int count, made, parts, device, steps;
  bool ready;     // all that follows was read without an error
  bool anywhere;  // addresses may be multiples of any number
  uint64_t unaligned, low;
  uint64_t offset[kMaxTensors];  // of the parts of the last tensor made, in bytes
  Step* step;
};

// Takes a `Recording`, a tuple of what the members say, in their order.
int launches_init(PyObject* object, PyObject* args, PyObject* keywords) {
  auto* self = reinterpret_cast<Launches*>(object);
  PyObject *given, *forms, *empty, *steps, *copy, *fills, *watched, *unseen, *check, *unaligned, *stream_of, *finish,
      *offsets;
  unsigned long long low;
  if (!without_keywords(keywords) || !PyArg_ParseTuple(args, "O!", &PyTuple_Type, &given)) return -1;
  if (!PyArg_ParseTuple(given, "iiO!OO!OOKOO!OO!OOO!", &self->count, &self->device, &PyTuple_Type, &forms, &empty,
                        &PyTuple_Type, &steps, &finish, &watched, &low, &check, &PyTuple_Type, &unseen, &copy,
                        &PyTuple_Type, &fills, &unaligned, &stream_of, &PyTuple_Type, &offsets))
    return -1;
  if (self->step != nullptr) return PyErr_SetString(PyExc_ValueError, "recorded launches are made once"), -1;
  self->made = static_cast<int>(PyTuple_Size(forms));
  self->parts = static_cast<int>(PyTuple_Size(offsets));
  const int tensors = self->count + self->made + self->parts, number = static_cast<int>(PyTuple_Size(steps));
  const bool fits = self->count >= 0 && self->made > 0 && tensors <= kMaxTensors &&
                    (!PyTuple_Check(finish) || PyTuple_Size(finish) <= kMaxTensors);
  if (!fits) return PyErr_SetString(PyExc_ValueError, "too many tensors for recorded launches, or too few"), -1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(unseen); i++)
    if (!PyList_Check(PyTuple_GetItem(unseen, i))) return PyErr_SetString(PyExc_TypeError, "unseen holds lists"), -1;
  for (int i = 0; i < self->parts; i++) self->offset[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(offsets, i));
  if (PyErr_Occurred()) return -1;
  self->anywhere = unaligned == Py_False;
  if (PyTuple_Check(unaligned))
    for (int i = 0; i < tensors && i < PyTuple_Size(unaligned); i++)
      self->unaligned |= static_cast<uint64_t>(PyTuple_GetItem(unaligned, i) == Py_True) << i;
  self->low = low;
  PyObject* values[] = {forms, empty, copy, fills, watched, unseen, check, stream_of, finish};
  for (int i = 0; i < kMembers; i++) self->members[i] = Ref::borrowed(values[i]);
  self->step = static_cast<Step*>(PyMem_Calloc(number ? number : 1, sizeof(Step)));
  if (self->step == nullptr) return PyErr_NoMemory(), -1;
  self->steps = number;
  for (int i = 0; i < number; i++)
    if (!read_step(PyTuple_GetItem(steps, i), self->step[i], tensors)) return -1;
  self->ready = true;
  return 0;
}

// Whether launches may be run past those who want to see them: 1, 0, or -1 with an exception.
int is_unwatched(const Launches* self) {
  for (Py_ssize_t i = 0, n = PyTuple_Size(self->unseen); i < n; i++)
    if (PyList_Size(PyTuple_GetItem(self->unseen, i)) > 0) return 0;
  int watched = is_true(PyObject_CallNoArgs(self->watched));
  return watched < 0 ? -1 : !watched;
}

// The tensors of one run: those read, and those made, which are given back at its end. The addresses of parts of the
// last one follow theirs.
struct Tensors {
  PyObject* all[kMaxTensors];
  uint64_t addresses[kMaxTensors];
  int read = 0, made = 0;
  Ref copies;
  ~Tensors() {
    for (int i = 0; i < made; i++) Py_DECREF(all[read + i]);
  }
};

// 1; 0 where the current device is another; -1 with an exception.
int make_tensors(const Launches* self, Tensors& tensors) {
  for (int i = 0; i < self->made; i++) {
    PyObject* made = PyObject_Call(self->empty, PyTuple_GetItem(self->forms, i), nullptr);
    if (made == nullptr) return -1;
    tensors.all[tensors.read + tensors.made++] = made;
  }
  if (self->device < 0) return 1;
  Ref device(PyObject_CallFunctionObjArgs(parts.get_device, tensors.all[tensors.read], nullptr));
  if (!device) return -1;
  return PyLong_AsLong(device.get()) == self->device;
}

// Contiguous copies of what kernels read so, and the numbers that some tensors hold before the first launch.
bool fill_tensors(const Launches* self, PyObject* const* given, Tensors& tensors) {
  if (self->copy != Py_None) {
    Ref originals(tuple_of(given, self->count));
    Ref found(originals ? PyObject_CallFunctionObjArgs(self->copy, originals.get(), nullptr) : nullptr);
    tensors.copies.take(found ? PySequence_Tuple(found.get()) : nullptr);
    if (!tensors.copies) return false;
    if (PyTuple_Size(tensors.copies.get()) != self->count)
      return PyErr_SetString(PyExc_ValueError, "copies are as many as tensors"), false;
    for (int i = 0; i < self->count; i++) tensors.all[i] = PyTuple_GetItem(tensors.copies.get(), i);
  }
  for (Py_ssize_t i = 0, n = PyTuple_Size(self->fills); i < n; i++) {
    PyObject* fill = PyTuple_GetItem(self->fills, i);
    long number = PyLong_AsLong(PyTuple_GetItem(fill, 0));
    if (number < 0 || number >= tensors.made) return PyErr_SetString(PyExc_ValueError, "no such tensor"), false;
    Ref filled(
        PyObject_CallMethodObjArgs(tensors.all[tensors.read + number], names.fill_, PyTuple_GetItem(fill, 1), nullptr));
    if (!filled) return false;
  }
  return true;
}

// 1; 0 where another kernel was compiled for addresses like these, or a tensor has no memory; -1 with an exception.
int find_addresses(const Launches* self, Tensors& tensors) {
  int count = tensors.read + tensors.made;
  uint64_t lowest = UINT64_MAX, unaligned = 0;
  for (int i = 0; i < count; i++) {
    if (!address_of(tensors.all[i], tensors.addresses[i])) return -1;
    if (tensors.addresses[i] < lowest) lowest = tensors.addresses[i];
    unaligned |= static_cast<uint64_t>((tensors.addresses[i] & kAlignmentBits) != 0) << i;
  }
  if (lowest < self->low) {
    Ref all(tuple_of(tensors.all, count));
    int sound = all ? is_true(PyObject_CallFunctionObjArgs(self->check_memory, all.get(), nullptr)) : -1;
    if (sound <= 0) return sound;
  }
  for (int i = 0; i < self->parts; i++) tensors.addresses[count + i] = tensors.addresses[count - 1] + self->offset[i];
  return self->anywhere || unaligned == self->unaligned;
}

PyObject* numbers_of(const uint64_t* values, int count) {
  PyObject* made = PyList_New(count);
  for (int i = 0; made != nullptr && i < count; i++) {
    PyObject* number = PyLong_FromUnsignedLongLong(values[i]);
    if (number == nullptr) return Py_DECREF(made), nullptr;
    PyList_SetItem(made, i, number);
  }
  return made;
}

// 1; 0 where a step has to be run otherwise and there is no other way; -1 with an exception.
int run_steps(const Launches* self, Tensors& tensors) {
  uint64_t stream = 0;
  if (self->stream_of != Py_None) {
    Ref device(PyLong_FromLong(self->device));
    Ref found(device ? PyObject_CallFunctionObjArgs(self->stream_of, device.get(), nullptr) : nullptr);
    if (!found) return -1;
    stream = PyLong_AsUnsignedLongLong(found.get());
    if (stream == static_cast<uint64_t>(-1) && PyErr_Occurred()) return -1;
  }
  void* addresses[kMaxTensors];
  int count = tensors.read + tensors.made;
  for (int i = 0; i < count + self->parts; i++) addresses[i] = reinterpret_cast<void*>(tensors.addresses[i]);
  for (int i = 0; i < self->steps; i++) {
    const Step& step = self->step[i];
    int answer = -1;
    if (step.run != nullptr || step.launch != nullptr) {
      Py_BEGIN_ALLOW_THREADS answer = run_step(step, addresses, stream);
      Py_END_ALLOW_THREADS
    }
    if (answer == 0) continue;
    if (step.otherwise == Py_None || self->parts) return 0;
    Ref all(tuple_of(tensors.all, count)), numbers(numbers_of(tensors.addresses, count));
    Ref current(PyLong_FromUnsignedLongLong(stream));
    if (!all || !numbers || !current) return -1;
    Ref done(PyObject_CallFunctionObjArgs(step.otherwise, all.get(), numbers.get(), current.get(), nullptr));
    if (!done) return -1;
  }
  return 1;
}

// What the call returns.
PyObject* finished(const Launches* self, const Tensors& tensors) {
  PyObject* const* made = tensors.all + tensors.read;
  if (!PyTuple_Check(self->finish)) {
    Ref all_read(tuple_of(tensors.all, tensors.read)), all_made(tuple_of(made, tensors.made));
    if (!all_read || !all_made) return nullptr;
    return PyObject_CallFunctionObjArgs(self->finish, all_read.get(), all_made.get(), nullptr);
  }
  Py_ssize_t count = PyTuple_Size(self->finish);
  PyObject* results[kMaxTensors];
  for (Py_ssize_t i = 0; i < count && i < kMaxTensors; i++) {
    long number = PyLong_AsLong(PyTuple_GetItem(self->finish, i));
    results[i] = number >= 0 && number < tensors.made ? made[number] : Py_None;
  }
  return tuple_of(results, count);
}

PyObject* not_this_way() { return Ref::borrowed(Py_None); }

PyObject* launches_call(PyObject* object, PyObject* args, PyObject* keywords) {
  if (!without_keywords(keywords)) return nullptr;
  Items given(args);
  return run_launches(object, given.item, given.count);
}

int launches_visit(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Launches*>(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* member : self->members) Py_VISIT(member);
  for (int i = 0; i < self->steps; i++) Py_VISIT(self->step[i].otherwise);
  return 0;
}

void launches_free(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Launches*>(object);
  for (PyObject* member : self->members) Py_XDECREF(member);
  for (int i = 0; i < self->steps; i++) free_step(self->step[i]);
  PyMem_Free(self->step);
  free_object(object);
}

PyMemberDef members[] = {
    {const_cast<char*>("forms"), T_OBJECT, offsetof(Launches, forms), READONLY, nullptr},
    {const_cast<char*>("copy"), T_OBJECT, offsetof(Launches, copy), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_members, members},
    {Py_tp_init, reinterpret_cast<void*>(launches_init)},
    {Py_tp_call, reinterpret_cast<void*>(launches_call)},
    {Py_tp_traverse, reinterpret_cast<void*>(launches_visit)},
    {Py_tp_dealloc, reinterpret_cast<void*>(launches_free)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_doc, const_cast<char*>("Recorded launches: run again with the addresses of other tensors.")},
    {0, nullptr},
};
PyType_Spec spec = {"sdpa.repeated._native.Launches", sizeof(Launches), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

PyObject* run_launches(PyObject* launches, PyObject* const* given, Py_ssize_t count) {
  auto* self = reinterpret_cast<Launches*>(launches);
  if (count != self->count || !self->ready) return not_this_way();
  int well = is_unwatched(self);
  if (well <= 0) return well < 0 ? nullptr : not_this_way();
  Tensors tensors;
  tensors.read = self->count;
  for (int i = 0; i < self->count; i++) tensors.all[i] = given[i];
  well = make_tensors(self, tensors);
  if (well > 0 && !fill_tensors(self, given, tensors)) well = -1;
  if (well > 0) well = find_addresses(self, tensors);
  if (well > 0) well = run_steps(self, tensors);
  if (well <= 0) return well < 0 ? nullptr : not_this_way();
  return finished(self, tensors);
}

PyTypeObject* make_launches_type() { return launches_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec)); }

}  // namespace sdpa
