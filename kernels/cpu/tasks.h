// Independent tasks on torch's threads, and the scratch memory that each thread is given.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

#include "primitives.h"

namespace sdpa_cpu {

// Aligned memory for all threads of a call, allocated before they start so that failing is an ordinary exception.
class Scratch {
 public:
  Scratch(int64_t threads, int64_t bytes_per_thread);
  void* of(int64_t thread) const { return memory_.get() + thread * stride_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  int64_t stride_;
  std::unique_ptr<char, Free> memory_;
};

// Hands out parts of a thread's scratch; with a null base it only adds up sizes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
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

// Calls run(task, thread) for every task, in order of their numbers as threads become free; each thread sets its
// registers up before the first and back after the last.
void run_tasks(int64_t tasks, int64_t threads, const Setup* setup,
               const std::function<void(int64_t task, int64_t thread)>& run);

}  // namespace sdpa_cpu
