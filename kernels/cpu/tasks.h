// Independent tasks on torch's threads, and the scratch memory that each thread is given.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>

#include "carver.h"
#include "primitives.h"

namespace sdpa_cpu {

// Aligned memory for all threads of a call. It is allocated before the threads start, so that failing to is an ordinary
// exception.
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

// Calls run(task, thread) for every task. A thread takes the task of its own number first, because its caches may hold
// those inputs since the call before. Then threads take the other tasks in order. Last they take the first tasks of
// threads that have not started. Each thread calls setup->begin before its tasks and setup->end after them.
void run_tasks(int64_t tasks, int64_t threads, const Setup* setup,
               const std::function<void(int64_t task, int64_t thread)>& run);

}  // namespace sdpa_cpu
