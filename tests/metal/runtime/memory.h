// Where the buffers of a dispatch lie, for the files of the runtime.
#pragma once

#include "dispatch.h"

namespace emulator {

constexpr uint64_t SLOT_BYTES = 1ull << 36;  // addresses of one buffer: an index out of bounds stays inside

// A threadgroup's arrays lie behind each other, with poisoned bytes between them.
constexpr int ARRAYS = 64;
constexpr uint64_t RED = 64;
constexpr uint64_t ARENA_BYTES = THREADGROUP_BYTES + ARRAYS * (RED + 16);

struct Slot {
  char* begin;        // of the storage
  char* pages_begin;  // of the mapped pages around it
  uint64_t mapped;
  int descriptor;  // of memory that several buffers share, or -1
};

extern char* threadgroup_memory;

const Slot& slot_of(int buffer);
int buffer_of(uint64_t address);  // the buffer whose range of addresses has this one, or -1
// The arguments, copied between guard pages; `pointers` [BUFFERS] are what the kernel gets.
void bind_memory(void** pointers);
void unbind_memory(bool copy_back);
void check_buffers();  // what lies around them is as it was
void clear_threadgroup_memory();
void check_threadgroup_memory();
const char* array_at(uint64_t address, uint64_t bytes);  // the threadgroup array that has all these bytes, or null
// What lies at an address that cannot be touched.
void explain_address(uint64_t address, char* text, uint64_t size);

}  // namespace emulator
