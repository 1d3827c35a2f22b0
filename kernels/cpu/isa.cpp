// The choice of an instruction set: the widest that the processor and the system support, or the one that was asked
// for.
#include "isa.h"

#include <atomic>
#include <stdexcept>
#include <vector>

#if defined(SDPA_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SDPA_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "permission.h"

namespace sdpa_cpu {
namespace {

#ifdef SDPA_X86
// Products of bfloat16 and float16 are computed by AMX tiles, everything else in vectors.
const InstructionSet* amx() {
  static const Primitives<float, Pair> pairs = [] {
    Primitives<float, Pair> table = *kAvx512Bf16.bf16;
    use_tiles(&table);
    return table;
  }();
  static const InstructionSet set = {"amx", kAvx512Bf16.f32, kAvx512Bf16.f64, &pairs, &kAmxSplit};
  return &set;
}
#endif

#ifdef SDPA_ARM
bool has_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16; older headers do not have the name
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}
#endif

// The narrowest first. The compiler's built-in asks cpuid, and whether the system saves the wide registers.
std::vector<const InstructionSet*> find_instruction_sets() {
  std::vector<const InstructionSet*> found = {&kScalar};
#ifdef SDPA_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) found.push_back(&kAvx2);
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) found.push_back(&kAvx512);
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16) found.push_back(&kAvx512Bf16);
  if (bf16 && tiles_permitted()) found.push_back(amx());
#endif
#ifdef SDPA_ARM
  found.push_back(&kNeon);  // a part of every AArch64 processor
  if (has_bf16()) found.push_back(&kNeonBf16);
#endif
  return found;
}

const std::vector<const InstructionSet*>& instruction_sets() {
  static const std::vector<const InstructionSet*> found = find_instruction_sets();
  return found;
}

std::atomic<const InstructionSet*>& current() {
  static std::atomic<const InstructionSet*> chosen{instruction_sets().back()};
  return chosen;
}

}  // namespace

const InstructionSet& instruction_set() { return *current().load(std::memory_order_relaxed); }

std::string available_instruction_sets() {
  std::string names;
  for (const InstructionSet* set : instruction_sets()) names += (names.empty() ? "" : ",") + std::string(set->name);
  return names;
}

void choose_instruction_set(const std::string& name) {
  for (const InstructionSet* set : instruction_sets())
    if (name == set->name) {
      current().store(set, std::memory_order_relaxed);
      return;
    }
  throw std::runtime_error("instruction set '" + name + "' is not available on this machine, which has " +
                           available_instruction_sets());
}

}  // namespace sdpa_cpu
