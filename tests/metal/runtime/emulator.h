// What compiled Metal source sees of the emulator's runtime: the running thread, its simdgroup, and where threads meet.
#pragma once

#include <stdint.h>

namespace emulator {

constexpr int LANES = 32;  // of a simdgroup, on every Apple GPU

// What the lanes of a simdgroup meet for. All of them have to name the same kind and the same line of the source.
enum Kind : int {
  NOTHING,
  THREADGROUP_BARRIER,
  SIMDGROUP_BARRIER,
  SHUFFLE_XOR,
  BROADCAST,
  SIMD_SUM,
  SIMD_MAX,
  SIMD_MIN,
  SIMD_ANY,
  SIMD_ALL,
  MULTIPLY,
  MULTIPLY_ACCUMULATE,
  KINDS
};

struct Simdgroup {
  // The operands of a matrix product by row and column, and its result.
  alignas(64) float a[64], b[64], c[64], product[64];
  // What each lane brings, for meetings of even and odd number: a lane may be one meeting ahead of those that still
  // read.
  uint64_t value[2][LANES], parameter[2][LANES];
  uint64_t result;
  int parity;

  // The meeting: what for, in which line, and how many lanes are there.
  int kind, line, flags, arrived;
  int finished;
  bool waits;            // at a threadgroup barrier
  const uint8_t* order;  // in which the lanes run until the next meeting
  int next;              // place in `order` of the lane after the running one
  uint32_t index;        // within the threadgroup
  uint32_t fences;       // barriers of this simdgroup that order threadgroup memory, and one
  uint32_t device_fences;
};

struct Lane {
  void* stack_pointer;
  Simdgroup* simdgroup;
  uint32_t lane, thread;  // within the simdgroup; within the threadgroup
};

struct Position {
  uint32_t x, y, z;
};

// What a kernel may ask of the thread that runs.
struct Ids {
  Position group;
  uint32_t simdgroup, lane, index;
  Position place, threads, groups;
};

extern "C" {
extern Lane* emulator_lane;         // the thread that runs
extern Position emulator_position;  // of its threadgroup in the grid

// The running lane comes to a meeting. Only the last one gets true, at once: it computes what all of them asked for and
// calls emulator_release. The others go on from here afterwards.
bool emulator_arrive(int kind, int line, int flags);
void emulator_release();
void* emulator_threadgroup_array(int line, const char* name, uint64_t bytes);
[[noreturn]] void emulator_fail(const char* reason, int line);
}

}  // namespace emulator
