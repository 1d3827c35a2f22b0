// A thread's scratch memory, handed out in parts.
#pragma once

#include <cassert>
#include <cstdint>

namespace sdpa_cpu {

// With a null base it only adds up sizes. Every part begins at a cache line, which is as wide as the widest vector.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {
    assert(reinterpret_cast<uintptr_t>(base) % kCacheLine == 0);
  }
  template <typename T>
  T* take(int64_t count) {
    assert(count >= 0);
    T* part = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kCacheLine - 1) / kCacheLine * kCacheLine;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kCacheLine = 64;
  char* base_;
  int64_t used_ = 0;
};

}  // namespace sdpa_cpu
