// The tasks of a call: an atomic counter on torch's thread pool, and first one for each thread.
#include "tasks.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace sdpa_cpu {

namespace {

constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector

// Configures a thread's registers, and restores them at the end of the scope.
class SetupScope {
 public:
  explicit SetupScope(const Setup* setup) : setup_(setup) {
    if (setup_) setup_->begin(saved_);
  }
  ~SetupScope() {
    if (setup_) setup_->end(saved_);
  }
  SetupScope(const SetupScope&) = delete;
  SetupScope& operator=(const SetupScope&) = delete;

 private:
  const Setup* setup_;
  alignas(kAlignment) char saved_[Setup::kBytes];
};

}  // namespace

Scratch::Scratch(int64_t threads, int64_t bytes_per_thread) {
  stride_ = (bytes_per_thread + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = nullptr;
  const size_t bytes = static_cast<size_t>(threads * stride_ + kAlignment);
  if (posix_memalign(&memory, kAlignment, bytes) != 0)
    throw std::runtime_error("cpu_flash: could not allocate " + std::to_string(bytes) +
                             " bytes of scratch memory for " + std::to_string(threads) + " threads");
  memory_.reset(static_cast<char*>(memory));
}

void run_tasks(int64_t tasks, int64_t threads, const Setup* setup, const std::function<void(int64_t, int64_t)>& run) {
  if (threads <= 1 || tasks <= 1) {
    const SetupScope ready(setup);
    for (int64_t task = 0; task < tasks; ++task) run(task, 0);
    return;
  }
  threads = std::min(threads, tasks);
  struct alignas(kAlignment) FirstTask {
    std::atomic<bool> begun{false};
    bool begin() { return !begun.load(std::memory_order_relaxed) && !begun.exchange(true); }
  };
  std::vector<FirstTask> first_tasks(static_cast<size_t>(threads));
  std::atomic<int64_t> next{threads};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const SetupScope ready(setup);
    for (int64_t thread = begin; thread < end; ++thread) {
      if (first_tasks[static_cast<size_t>(thread)].begin()) run(thread, thread);
      for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) run(task, thread);
      for (int64_t task = 0; task < threads; ++task)  // of threads that have not started
        if (first_tasks[static_cast<size_t>(task)].begin()) run(task, thread);
    }
  });
}

}  // namespace sdpa_cpu
