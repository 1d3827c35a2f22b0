// Memory of a dispatch between pages that cannot be touched: each buffer has a range of addresses of its own, so that
// an address out of bounds tells which buffer was meant.
#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

char* threadgroup_memory;

namespace {

constexpr uint64_t PAGE = 4096, ALIGNMENT = 16;  // the alignment of the longest vectors
constexpr uint8_t POISON = 0xff;                 // NaN in every floating-point type, -1 in every integer
constexpr int UNMAPPED = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

struct Array {
  int line;
  const char* name;
  uint64_t begin, bytes;
};

char* slots;
Slot slot[BUFFERS];
Array arrays[ARRAYS];
int array_count;
uint64_t arena_used;

uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

char* mapped(void* at, uint64_t bytes, int protection, int flags, int descriptor = -1) {
  void* memory = mmap(at, bytes, protection, flags, descriptor, 0);
  if (memory == MAP_FAILED) {
    perror("the Metal emulator has no memory");
    abort();
  }
  return static_cast<char*>(memory);
}

void reserve() {
  slots = mapped(nullptr, BUFFERS * SLOT_BYTES, PROT_NONE, UNMAPPED);
  for (Slot& s : slot) s.descriptor = -1;
  char* arena = mapped(nullptr, pages(ARENA_BYTES) + 2 * PAGE, PROT_NONE, UNMAPPED);
  threadgroup_memory = arena + PAGE;
  mprotect(threadgroup_memory, pages(ARENA_BYTES), PROT_READ | PROT_WRITE);
}

// Whether the storage of buffer `i` is another one's too, and one of them is written: then they have to be one memory.
bool is_shared(int i) {
  const Buffer* buffers = current->buffers;
  bool others = false, written = false;
  for (int j = 0; j < BUFFERS; ++j) {
    if (!buffers[j].bound || buffers[j].shares != buffers[i].shares) continue;
    others |= j != i;
    written |= buffers[j].writable != 0;
  }
  return others && written;
}

void unmap(Slot& s) {
  if (s.mapped) mapped(s.pages_begin, s.mapped, PROT_NONE, UNMAPPED | MAP_FIXED);
  if (s.descriptor >= 0) close(s.descriptor);
  s.mapped = 0;
  s.descriptor = -1;
}

// Pages for buffer `i`. Those of the last dispatch stay where as many are wanted, which is faster.
void map(int i, bool shared) {
  Slot& s = slot[i];
  const Buffer& buffer = current->buffers[i];
  const uint64_t wanted = pages(buffer.bytes ? buffer.bytes : 1);
  if (s.mapped != wanted || s.descriptor >= 0 || shared) {
    unmap(s);
    s.pages_begin = slots + i * SLOT_BYTES + SLOT_BYTES / 2;
    s.mapped = wanted;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (shared) {
      flags = MAP_SHARED | MAP_FIXED;
      s.descriptor = buffer.shares == i ? memfd_create("metal", 0) : dup(slot[buffer.shares].descriptor);
      if (ftruncate(s.descriptor, long(wanted))) abort();
    }
    mapped(s.pages_begin, wanted, PROT_READ | PROT_WRITE, flags, s.descriptor);
  }
  s.begin = s.pages_begin + (current->left ? 0 : (wanted - buffer.bytes) / ALIGNMENT * ALIGNMENT);
}

// The bytes of the mapped pages before and behind the storage.
template <typename Function>
void around(int i, Function function) {
  const Slot& s = slot[i];
  function(s.pages_begin, s.begin);
  function(s.begin + current->buffers[i].bytes, s.pages_begin + s.mapped);
}

bool is_poison(const char* begin, const char* end) {
  for (; begin < end; ++begin)
    if (uint8_t(*begin) != POISON) return false;
  return true;
}

}  // namespace

const Slot& slot_of(int i) { return slot[i]; }

int buffer_of(uint64_t address) {
  const uint64_t distance = address - reinterpret_cast<uint64_t>(slots);
  return distance < BUFFERS * SLOT_BYTES ? int(distance / SLOT_BYTES) : -1;
}

void bind_memory(void** pointers) {
  if (!slots) reserve();
  for (int i = 0; i < BUFFERS; ++i) {
    const Buffer& buffer = current->buffers[i];
    pointers[i] = nullptr;
    if (!buffer.bound) continue;
    const bool shared = is_shared(i);
    map(i, shared);
    pointers[i] = slot[i].begin + buffer.offset;
    if (buffer.bytes && (buffer.shares == i || !shared)) memcpy(slot[i].begin, buffer.data, buffer.bytes);
    around(i, [](char* begin, char* end) { memset(begin, POISON, uint64_t(end - begin)); });
  }
}

void unbind_memory(bool copy_back) {
  for (int i = 0; i < BUFFERS; ++i) {
    const Buffer& buffer = current->buffers[i];
    if (copy_back && buffer.bound && buffer.writable && buffer.bytes) memcpy(buffer.data, slot[i].begin, buffer.bytes);
  }
}

void check_buffers() {
  for (int i = 0; i < BUFFERS; ++i) {
    if (!current->buffers[i].bound) continue;
    around(i, [i](char* begin, char* end) {
      if (!is_poison(begin, end))
        fail(OUT_OF_BOUNDS, "%s wrote out of bounds of buffer %d, less than a page from it", current->name, i);
    });
  }
}

void clear_threadgroup_memory() {
  memset(threadgroup_memory, POISON, ARENA_BYTES);
  arena_used = 0;
  array_count = 0;
}

void check_threadgroup_memory() {
  const Position& p = emulator_position;
  for (int i = 0; i < array_count; ++i) {
    const char* end = threadgroup_memory + arrays[i].begin + arrays[i].bytes;
    if (!is_poison(end, end + RED))
      fail(OUT_OF_BOUNDS, "%s: threadgroup (%u, %u, %u) wrote behind the threadgroup array %s of line %d",
           current->name, p.x, p.y, p.z, arrays[i].name, arrays[i].line);
  }
}

const char* array_at(uint64_t address, uint64_t bytes) {
  const uint64_t from = address - reinterpret_cast<uint64_t>(threadgroup_memory);
  for (int i = 0; i < array_count; ++i)
    if (from >= arrays[i].begin && from + bytes <= arrays[i].begin + arrays[i].bytes) return arrays[i].name;
  return nullptr;
}

extern "C" void* emulator_threadgroup_array(int line, const char* name, uint64_t bytes) {
  uint64_t total = bytes;
  for (int i = 0; i < array_count; ++i) {
    if (arrays[i].line == line && !strcmp(arrays[i].name, name)) return threadgroup_memory + arrays[i].begin;
    total += arrays[i].bytes;
  }
  if (total > THREADGROUP_BYTES || array_count == ARRAYS)
    fail(THREADGROUP_MEMORY, "%s: %lu bytes of threadgroup memory with the array %s of line %d, an Apple GPU has %lu",
         current->name, total, name, line, THREADGROUP_BYTES);
  if (total > current->threadgroup_bytes) current->threadgroup_bytes = total;
  arrays[array_count++] = {line, name, arena_used, bytes};
  void* memory = threadgroup_memory + arena_used;
  arena_used += (bytes + 15) / 16 * 16 + RED;
  return memory;
}

void explain_address(uint64_t address, char* text, uint64_t size) {
  const int i = buffer_of(address);
  const uint64_t arena = reinterpret_cast<uint64_t>(threadgroup_memory);
  if (i >= 0 && current->buffers[i].bound) {
    const Buffer& buffer = current->buffers[i];
    const long from_view = long(address - reinterpret_cast<uint64_t>(slot[i].begin) - buffer.offset);
    snprintf(text, size, "out of bounds of buffer %d: byte %ld of a view that begins at byte %lu of a storage of %lu",
             i, from_view, buffer.offset, buffer.bytes);
  } else if (i >= 0) {
    snprintf(text, size, "memory of buffer %d, which is no argument", i);
  } else if (address - (arena - PAGE) < pages(ARENA_BYTES) + 2 * PAGE) {
    snprintf(text, size, "out of bounds of threadgroup memory: byte %ld", long(address - arena));
  } else if (address == 0) {
    snprintf(text, size, "a vector that is not aligned, a null pointer, or no address at all");
  } else {
    snprintf(text, size, "at 0x%lx, which belongs to no buffer (or the thread's stack overflowed)", address);
  }
}

}  // namespace emulator
