// The tests for AMX: cpuid for the instructions, XCR0 for the state that the system saves, arch_prctl for permission.
#include "permission.h"

#if defined(SDPA_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sdpa_cpu {
namespace {

constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // of EDX in leaf 7
constexpr unsigned kOsxsave = 1u << 27;                       // of ECX in leaf 1: XCR0 can be read
constexpr unsigned kTileStates = 3u << 17;                    // of XCR0: configuration and data
constexpr long kRequestPermission = 0x1023, kTileData = 18;   // of arch_prctl

bool processor_has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kAmxBf16) != 0 && (d & kAmxTile) != 0;
}

bool system_saves_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kOsxsave) == 0) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileStates) == kTileStates;
}

}  // namespace

bool tiles_permitted() {
  return processor_has_tiles() && system_saves_tiles() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace sdpa_cpu
#else
namespace sdpa_cpu {

bool tiles_permitted() { return false; }

}  // namespace sdpa_cpu
#endif
