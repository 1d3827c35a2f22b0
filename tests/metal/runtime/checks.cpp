// Each access of a checked kernel to memory: bounds to the byte, traffic of each buffer, races between threads.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "memory.h"

namespace emulator {

namespace {

constexpr uint16_t MANY = 0xffff;  // threads or simdgroups: a number that none has
constexpr uint32_t MANY_GROUPS = 0xffffffff;

// Who touched a byte last. `fence` counts barriers of the threadgroup, `simd_fence` those of the simdgroup: an access
// comes after another one if one of its own counts is higher. `code` is where in the library.
struct Touch {
  uint32_t group, fence, simd_fence, code;
  uint16_t thread, simdgroup;
};
struct Cell {
  Touch write, read;
};

struct Range {
  uint64_t low, high;  // addresses that may be touched
  Cell* cells;         // of the storage, if a kernel writes it
  uint32_t* reader;    // the threadgroup that read a byte last
  uint8_t* written;
};

Range ranges[BUFFERS];
Cell group_cells[ARENA_BYTES];
uint32_t group_number, first_group;  // counted over all dispatches, so that older cells say nothing
uint64_t library;                    // where the kernel's library lies

template <typename T>
T* zeros(uint64_t count) {
  void* memory =
      mmap(nullptr, count * sizeof(T) + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return static_cast<T*>(memory);
}

template <typename T>
void drop(T*& memory, uint64_t count) {
  if (memory) munmap(memory, count * sizeof(T) + 1);
  memory = nullptr;
}

bool is_written(int storage) {
  for (int i = 0; i < BUFFERS; ++i)
    if (current->buffers[i].bound && current->buffers[i].shares == storage && current->buffers[i].writable) return true;
  return false;
}

// What a byte's place is called: buffer and offset from the view's begin, or threadgroup array.
void name_place(uint64_t address, char* text, uint64_t size) {
  const int i = buffer_of(address);
  if (i >= 0) {
    const long from_view = long(address - reinterpret_cast<uint64_t>(slot_of(i).begin) - current->buffers[i].offset);
    snprintf(text, size, "byte %ld of buffer %d", from_view, i);
  } else {
    const uint64_t arena = reinterpret_cast<uint64_t>(threadgroup_memory);
    const char* name = array_at(address, 1);
    snprintf(text, size, "threadgroup array %s (byte %lu of threadgroup memory)", name ? name : "?", address - arena);
  }
}

[[noreturn]] void report_race(uint64_t address, const Touch& before, bool wrote_before, bool writes, uint64_t code) {
  char where[128], who[64] = "several threads", group[64] = "several threadgroups";
  name_place(address, where, sizeof where);
  if (before.thread != MANY) snprintf(who, sizeof who, "thread %u", before.thread);
  if (before.group != MANY_GROUPS) snprintf(group, sizeof group, "threadgroup number %u", before.group - first_group);
  current->code = code - library;
  current->code_before = before.code;
  fail(RACE, "race: %s %s %s, which %s of %s %s with no barrier between them", place(), writes ? "writes" : "reads",
       where, who, group, wrote_before ? "wrote" : "read");
}

struct Now {
  Touch touch;
  bool device;
};

// Whether `before` has ended for the running thread. Threadgroups of one dispatch have no order.
bool ended(const Touch& before, const Now& now) {
  if (!before.group) return true;
  if (before.group != now.touch.group) return !now.device;
  if (before.thread == now.touch.thread) return true;
  if (before.fence < now.touch.fence) return true;
  return before.simdgroup == now.touch.simdgroup && before.simd_fence < now.touch.simd_fence;
}

// The readers of a byte as one: whether all of them have ended has to follow from it.
void join(Touch& readers, const Now& now) {
  const Touch& touch = now.touch;
  if (!readers.group || (!now.device && readers.group != touch.group)) {
    readers = touch;
  } else if (readers.group != touch.group) {
    readers.thread = readers.simdgroup = MANY;
    readers.group = MANY_GROUPS;  // whoever writes, another threadgroup has read
  } else if (readers.fence < touch.fence) {
    readers = touch;
  } else if (readers.simdgroup != touch.simdgroup) {
    readers.thread = readers.simdgroup = MANY;
  } else if (readers.simd_fence < touch.simd_fence) {
    readers = touch;
  } else if (readers.thread != touch.thread) {
    readers.thread = MANY;
  }
}

void check_race(Cell* cells, uint64_t size, bool writes, const Now& now, uint64_t address, uint64_t code) {
  for (uint64_t i = 0; i < size; ++i) {
    Cell& cell = cells[i];
    if (!ended(cell.write, now)) report_race(address + i, cell.write, true, writes, code);
    if (!writes) {
      join(cell.read, now);
      continue;
    }
    if (!ended(cell.read, now)) report_race(address + i, cell.read, false, writes, code);
    cell.write = now.touch;
    cell.read.group = 0;
  }
}

Now now(bool device, uint64_t code) {
  const Simdgroup* simdgroup = emulator_lane->simdgroup;
  const uint32_t simd_fence = device ? simdgroup->device_fences : simdgroup->fences;
  return {{group_number, threadgroup_fences[device], simd_fence, uint32_t(code - library),
           uint16_t(emulator_lane->thread), uint16_t(simdgroup->index)},
          device};
}

void touch_buffer(int i, uint64_t address, uint64_t size, bool writes, uint64_t code) {
  const Range& range = ranges[i];
  if (address < range.low || address + size > range.high) {
    char text[512];
    explain_address(address, text, sizeof text);
    current->code = code - library;
    fail(OUT_OF_BOUNDS, "%s %s %lu bytes %s", place(), writes ? "wrote" : "read", size, text);
  }
  Traffic& traffic = current->traffic[i];
  const uint64_t offset = address - reinterpret_cast<uint64_t>(slot_of(i).begin);
  if (writes) {
    traffic.written += size;
    for (uint64_t k = 0; k < size; ++k) {
      traffic.written_once += !range.written[offset + k];
      range.written[offset + k] = 1;
    }
  } else {
    traffic.read += size;
    for (uint64_t k = 0; k < size; ++k) {
      uint32_t& reader = range.reader[offset + k];
      traffic.read_once += !reader;
      traffic.read_per_group += reader != group_number;
      reader = group_number;
    }
  }
  if (range.cells) check_race(range.cells + offset, size, writes, now(true, code), address, code);
}

void touch_threadgroup(uint64_t address, uint64_t from, uint64_t size, bool writes, uint64_t code) {
  if (!array_at(address, size)) {
    current->code = code - library;
    fail(OUT_OF_BOUNDS, "%s %s %lu bytes out of bounds of the threadgroup arrays, at byte %lu", place(),
         writes ? "wrote" : "read", size, from);
  }
  check_race(group_cells + from, size, writes, now(false, code), address, code);
}

void touch(const void* pointer, uint64_t size, bool writes, void* caller) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer), code = reinterpret_cast<uint64_t>(caller) - 1;
  const uint64_t from = address - reinterpret_cast<uint64_t>(threadgroup_memory);
  if (from < ARENA_BYTES) {
    touch_threadgroup(address, from, size, writes, code);
  } else {
    const int i = buffer_of(address);
    if (i >= 0) touch_buffer(i, address, size, writes, code);
  }
}

}  // namespace

uint32_t threadgroup_fences[2];

void begin_checks() {
  library = current->library;
  first_group = group_number + 1;
  for (int i = 0; i < BUFFERS && current->checked; ++i) {
    const Buffer& buffer = current->buffers[i];
    if (!buffer.bound) continue;
    const uint64_t begin = reinterpret_cast<uint64_t>(slot_of(i).begin);
    Range& range = ranges[i];
    range.low = begin + (current->strict_views ? buffer.offset : 0);
    range.high = begin + (current->strict_views ? buffer.end : buffer.bytes);
    range.reader = zeros<uint32_t>(buffer.bytes);
    range.written = zeros<uint8_t>(buffer.bytes);
    if (is_written(buffer.shares))
      range.cells = buffer.shares == i ? zeros<Cell>(buffer.bytes) : ranges[buffer.shares].cells;
  }
}

void begin_group() {
  ++group_number;
  threadgroup_fences[0] = threadgroup_fences[1] = 1;
}

void end_checks() {
  for (int i = 0; i < BUFFERS; ++i) {
    const Buffer& buffer = current->buffers[i];
    Range& range = ranges[i];
    drop(range.reader, buffer.bytes);
    drop(range.written, buffer.bytes);
    if (buffer.shares == i) drop(range.cells, buffer.bytes);
    range.cells = nullptr;
  }
}

// What clang's instrumentation calls, under the names of its thread sanitizer.
extern "C" {

void __tsan_init() {}

#define ACCESS(size)                                                                                \
  void __tsan_read##size(void* p) { touch(p, size, false, __builtin_return_address(0)); }           \
  void __tsan_write##size(void* p) { touch(p, size, true, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##size(void* p) { touch(p, size, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##size(void* p) { touch(p, size, true, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS

void* __tsan_memcpy(void* to, const void* from, uint64_t size) {
  touch(from, size, false, __builtin_return_address(0));
  touch(to, size, true, __builtin_return_address(0));
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, uint64_t size) {
  touch(from, size, false, __builtin_return_address(0));
  touch(to, size, true, __builtin_return_address(0));
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, uint64_t size) {
  touch(to, size, true, __builtin_return_address(0));
  return memset(to, value, size);
}

}  // extern "C"

}  // namespace emulator
