// One recorded launch: a kernel of the driver's, or a function of a library of ours.

#pragma once

#include "shared.h"

namespace sdpa {

constexpr int kMaxWords = 512;  // 4 KiB, the most that a kernel took by value before CUDA 12.1
constexpr int kMaxMaps = 16;
constexpr int kMapBytes = 128;  // of a CUtensorMap, which is also its alignment

// CUlaunchAttribute and CUlaunchConfig, as cuLaunchKernelEx reads them.
struct Attribute {
  unsigned id, pad;
  alignas(8) unsigned char value[64];
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned number;
};
constexpr unsigned kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
using LaunchKernel = int (*)(const Config*, void* function, void** arguments, void** extra);
using ReplaceAddress = int (*)(void* map, void* address);
using Run = int (*)(const void* handle, void* const* addresses, void* stream);

struct Slot {
  int32_t at, number;  // a word or the offset of a map, and which of the tensors' addresses stands there
};

// One launch. Its arguments are copied for each, so that neither threads nor signal handlers meet in them.
struct Step {
  PyObject* otherwise;  // (tensors, addresses, stream): the launch by other means, where the one below fails
  Run run;              // of a library's function; nullptr for a kernel of the driver's
  const void* handle;
  LaunchKernel launch;
  ReplaceAddress replace_address;
  void* function;
  unsigned grid[3], block[3], shared;
  int dependent;
  int32_t words, maps, arguments, pointers, bases;  // how many
  uint64_t* word;
  unsigned char* map;
  int32_t* argument;  // offsets: of a word in bytes, or of a map in bytes, less one, negated
  Slot *pointer, *base;
};

inline void free_step(Step& step) {
  Py_XDECREF(step.otherwise);
  for (void* block : {static_cast<void*>(step.word), static_cast<void*>(step.map), static_cast<void*>(step.argument),
                      static_cast<void*>(step.pointer), static_cast<void*>(step.base)})
    PyMem_Free(block);
}

// A copy of a bytes object as numbers; false with an exception where it is not whole or too long.
template <typename Number>
bool copied(PyObject* bytes, Number*& to, int32_t& count, int most) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) < 0) return false;
  if (size % sizeof(Number) || size / static_cast<Py_ssize_t>(sizeof(Number)) > most) {
    PyErr_SetString(PyExc_ValueError, "too many arguments for a recorded launch");
    return false;
  }
  count = static_cast<int32_t>(size / sizeof(Number));
  to = static_cast<Number*>(PyMem_Malloc(size ? size : 1));
  if (to == nullptr) return PyErr_NoMemory(), false;
  std::memcpy(to, data, size);
  return true;
}

inline bool in_range(const Slot* places, int32_t count, int limit, int tensors) {
  for (int i = 0; i < count; i++)
    if (places[i].at < 0 || places[i].at >= limit || places[i].number < 0 || places[i].number >= tensors) {
      PyErr_SetString(PyExc_ValueError, "a recorded launch names a tensor or an argument that is not there");
      return false;
    }
  return true;
}

// (otherwise, None), (otherwise, (run, handle)), or (otherwise, (launch, replace_address, function, grid, block,
// shared, dependent, words, maps, arguments, pointers, bases)).
inline bool read_step(PyObject* given, Step& step, int tensors) {
  PyObject *otherwise, *native;
  if (!PyArg_ParseTuple(given, "OO", &otherwise, &native)) return false;
  step.otherwise = Ref::borrowed(otherwise);
  if (native == Py_None) return true;
  unsigned long long first, second, function;
  if (PyTuple_Size(native) == 2) {
    if (!PyArg_ParseTuple(native, "KK", &first, &second)) return false;
    step.run = reinterpret_cast<Run>(first);
    step.handle = reinterpret_cast<const void*>(second);
    return true;
  }
  PyObject *words, *maps, *arguments, *pointers, *bases;
  unsigned *grid = step.grid, *block = step.block;
  if (!PyArg_ParseTuple(native, "KKK(III)(III)IpSSSSS", &first, &second, &function, grid, grid + 1, grid + 2, block,
                        block + 1, block + 2, &step.shared, &step.dependent, &words, &maps, &arguments, &pointers,
                        &bases))
    return false;
  step.launch = reinterpret_cast<LaunchKernel>(first);
  step.replace_address = reinterpret_cast<ReplaceAddress>(second);
  step.function = reinterpret_cast<void*>(function);
  return copied(words, step.word, step.words, kMaxWords) && copied(maps, step.map, step.maps, kMaxMaps * kMapBytes) &&
         copied(arguments, step.argument, step.arguments, kMaxWords + kMaxMaps) &&
         copied(pointers, step.pointer, step.pointers, kMaxWords) && copied(bases, step.base, step.bases, kMaxMaps) &&
         in_range(step.pointer, step.pointers, step.words, tensors) &&
         in_range(step.base, step.bases, step.maps, tensors);
}

// The launch itself, without the interpreter's lock: a driver whose queue is full waits, perhaps for a thread of this
// process. What the driver or the library answers: 0 where it went well.
inline int run_step(const Step& step, void* const* addresses, uint64_t stream) {
  if (step.run != nullptr) return step.run(step.handle, addresses, reinterpret_cast<void*>(stream));
  uint64_t words[kMaxWords];
  alignas(kMapBytes) unsigned char maps[kMaxMaps * kMapBytes];
  void* arguments[kMaxWords + kMaxMaps];
  std::memcpy(words, step.word, step.words * sizeof(uint64_t));
  std::memcpy(maps, step.map, step.maps);
  for (int i = 0; i < step.pointers; i++)
    words[step.pointer[i].at] = reinterpret_cast<uint64_t>(addresses[step.pointer[i].number]);
  for (int i = 0; i < step.bases; i++)
    if (int answer = step.replace_address(maps + step.base[i].at, addresses[step.base[i].number])) return answer;
  for (int i = 0; i < step.arguments; i++) {
    int32_t offset = step.argument[i];
    arguments[i] = offset < 0 ? maps + (-offset - 1) : reinterpret_cast<unsigned char*>(words) + offset;
  }
  Attribute attribute = {kProgrammaticSerialization, 0, {1}};
  Config config = {{step.grid[0], step.grid[1], step.grid[2]},
                   {step.block[0], step.block[1], step.block[2]},
                   step.shared,
                   reinterpret_cast<void*>(stream),
                   &attribute,
                   static_cast<unsigned>(step.dependent)};
  return step.launch(&config, step.function, arguments, nullptr);
}

}  // namespace sdpa
