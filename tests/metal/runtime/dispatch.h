// What Python asks of the runtime: one kernel over a grid. emulator.py declares the same structures to ctypes.
#pragma once

#include <stdint.h>

#include "emulator.h"

namespace emulator {

constexpr int BUFFERS = 31;                    // Metal's limit of buffers of a kernel
constexpr uint64_t THREADGROUP_BYTES = 32768;  // of Apple GPUs
constexpr int MAX_THREADS = 1024;              // of a threadgroup

using Kernel = void (*)(void* const* buffers, const Ids* ids);

struct Buffer {
  void* data;        // of the storage, or of the numbers
  uint64_t bytes;    // of the storage
  uint64_t offset;   // of the view's first byte
  uint64_t end;      // behind the view's last byte
  int32_t bound;     // whether there is an argument
  int32_t writable;  // whether the kernel may write
  int32_t shares;    // the first buffer with the same storage, its own number if there is none before
  int32_t reserved;
};

struct Traffic {
  uint64_t read, written;            // bytes of all threads
  uint64_t read_per_group;           // bytes that differ within a threadgroup, summed over threadgroups
  uint64_t read_once, written_once;  // bytes that differ
};

struct Dispatch {
  Kernel kernel;
  const char* name;
  Buffer* buffers;   // [BUFFERS]
  Traffic* traffic;  // [BUFFERS]
  Position groups;   // of the grid
  Position threads;  // of a threadgroup
  uint64_t seed;
  int32_t random;              // schedule: 0 greedy, 1 random
  int32_t left;                // 1: memory begins at a guard page, 0: it ends at one
  int32_t checked;             // 1: the kernel reports its accesses
  int32_t strict_views;        // 1: the view's bounds hold, 0: the storage's
  int32_t flush;               // 1: subnormal float32 are zero
  double seconds;              // of computing time, at most
  uint64_t threadgroup_bytes;  // out: of a threadgroup's arrays
  uint64_t library;            // where the kernel's library begins
  uint64_t code, code_before;  // out: what went wrong, and what it met, by the distance from there
  char message[1024];          // out: what went wrong
};

extern "C" int emulator_dispatch(Dispatch* dispatch);  // 0 if all went well, else a Failure

enum Failure : int { NONE, OUT_OF_BOUNDS, DIVERGENCE, THREADGROUP_MEMORY, RACE, TIME, UNDEFINED };

// --- between the files of the runtime

extern Dispatch* current;  // the dispatch that runs
[[noreturn]] void fail(Failure failure, const char* format, ...) __attribute__((format(printf, 2, 3)));
const char* place();  // "kernel, threadgroup, thread", for messages

// checks.cpp
void begin_checks();
void begin_group();
void end_checks();
extern uint32_t threadgroup_fences[2];  // barriers of the threadgroup for threadgroup memory, for device memory

// schedule.cpp
uint64_t random_bits();
int run_guarded(void** pointers);  // a Failure

}  // namespace emulator
