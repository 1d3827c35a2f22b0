// Independent tasks on torch's threads, and the scratch memory that each thread is given.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

#include "carver.h"
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

// Calls run(task, thread) for every task: each thread takes that of its own number first, whose inputs its caches may
// hold since the call before, then the others in order as threads become free, and last those of threads that have not
// come. It sets its registers up before the first and back after the last.
void run_tasks(int64_t tasks, int64_t threads, const Setup* setup,
               const std::function<void(int64_t task, int64_t thread)>& run);

}  // namespace sdpa_cpu
