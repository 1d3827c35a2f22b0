// Stands for kernels/cpu/carver.h under AddressSanitizer: parts begin as NaN, and what lies between two is not touched.
#pragma once
#include <sanitizer/asan_interface.h>

#include <cassert>
#include <cstdint>
#include <cstring>

namespace sdpa_cpu {

class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {
    assert(reinterpret_cast<uintptr_t>(base) % kCacheLine == 0);
  }
  template <typename T>
  T* take(int64_t count) {
    assert(count >= 0);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    char* part = base_ ? base_ + used_ : nullptr;
    used_ += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine + kGap;
    if (part) {
      std::memset(part, 0xff, static_cast<size_t>(bytes));
      __asan_poison_memory_region(part + bytes, static_cast<size_t>(base_ + used_ - part - bytes));
    }
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kCacheLine = 64, kGap = 256;  // as wide as the widest row of a tile
  char* base_;
  int64_t used_ = 0;
};

}  // namespace sdpa_cpu
