// Launches of planned calls, and of recorded ones again.
#include "recorded.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "counters.h"

namespace sdpa_cuda {
namespace {

void place(BackwardParams& p, const Kept& kept, const Workspace& workspace, cudaStream_t stream) {
  static_assert(sizeof(int32_t) == sizeof(float) && sizeof(RowSpan) == 2 * sizeof(float));
  p.base2 = workspace.at<float>(0);
  p.delta = p.base2 + kept.rows;
  p.grad_q_acc = p.delta + kept.rows;
  if (kept.grad_k > 0) {
    p.grad_k_acc = p.grad_q_acc + kept.grad_q;
    p.grad_v_acc = p.grad_k_acc + kept.grad_k;
    check_status(cudaMemsetAsync(p.grad_k_acc, 0, (kept.grad_k + kept.grad_v) * sizeof(float), stream),
                 "clearing sums of the backward");
  }
  p.row_ids = workspace.at<int32_t>(kept.sums() * sizeof(float));
  p.key_ids = p.row_ids + kept.row_ids;
  p.row_spans = reinterpret_cast<RowSpan*>(p.key_ids + kept.key_ids);
  if (kept.semaphores > 0) {
    p.semaphores = reinterpret_cast<int32_t*>(p.row_spans + kept.spans);
    p.counter = p.semaphores + kept.semaphores - 1;
  }
}

// Where the parameters of a plan say where tensors are.
template <class T>
void** place_of(T*& pointer) {
  return (void**)&pointer;  // of what is const, too
}

std::vector<void**> pointers_of(FlashParams& p) {
  return {&p.q.data,
          &p.k.data,
          &p.v.data,
          &p.out.data,
          place_of(p.lse),
          place_of(p.k_lengths),
          place_of(p.q_lengths),
          place_of(p.sinks),
          place_of(p.cu_q),
          place_of(p.cu_k),
          place_of(p.rng)};
}

std::vector<void**> pointers_of(ForwardPlan& plan) {
  std::vector<void**> all = pointers_of(static_cast<FlashParams&>(plan.p));
  all.insert(all.end(), {place_of(plan.p.q_ids.data), place_of(plan.p.k_ids.data)});
  return all;
}

std::vector<void**> pointers_of(BackwardPlan& plan) {
  BackwardParams& p = plan.p;
  std::vector<void**> all = pointers_of(static_cast<FlashParams&>(p));
  all.insert(all.end(), {&p.grad_out.data, &p.grad_q.data, &p.grad_k.data, &p.grad_v.data, place_of(p.grad_lse),
                         place_of(p.delta_rows), place_of(p.slopes), &p.bias.data, place_of(p.q_ids.data),
                         place_of(p.k_ids.data)});
  return all;
}

struct Recorded {
  virtual ~Recorded() = default;
  // Whether each tensor of the plan is at one of these addresses, in whose order `run` is given others.
  virtual bool find(const uint64_t* addresses, int count) = 0;
  virtual cudaError_t run(void* const* addresses, void* stream) const = 0;
};

template <class Plan>
struct RecordedPlan final : Recorded {
  Plan plan;
  std::vector<int> numbers;  // of the addresses that the plan's pointers hold, -1 for those that hold none
  explicit RecordedPlan(const Plan& plan) : plan(plan) {}

  bool find(const uint64_t* addresses, int count) override {
    for (void** pointer : pointers_of(plan)) {
      const uint64_t* end = addresses + count;
      const uint64_t* found = std::find(addresses, end, reinterpret_cast<uint64_t>(*pointer));
      if (*pointer != nullptr && found == end) return false;
      numbers.push_back(*pointer == nullptr ? -1 : static_cast<int>(found - addresses));
    }
    return true;
  }

  cudaError_t run(void* const* addresses, void* stream) const override {
    Plan own = plan;
    size_t place = 0;
    for (void** pointer : pointers_of(own))
      if (const int number = numbers[place++]; number >= 0) *pointer = addresses[number];
    return launched(own, stream);
  }
};

thread_local bool recording = false;
thread_local std::unique_ptr<Recorded> last_call;

template <class Plan>
void record_plan(const Plan& plan) {
  if (recording) last_call = std::make_unique<RecordedPlan<Plan>>(plan);
}

}  // namespace

cudaError_t launched(ForwardPlan plan, void* stream) {
  make_context_current(plan.p.device);
  std::optional<Workspace> workspace;
  if (plan.bytes() > 0) {
    workspace.emplace(plan.bytes(), plan.need);
    plan.p.spans = workspace->at<Span>(0);
    plan.p.id_ranges = workspace->at<IdRange>(plan.spans);
    plan.p.padded_k_ids = workspace->at<int32_t>(plan.spans + plan.id_ranges);
  }
  if (plan.draws) plan.p.counter = take_counter(plan.p.device, stream);
  return static_cast<cudaError_t>(plan.instance->launch(plan.p, stream));
}

cudaError_t launched(BackwardPlan plan, void* stream) {
  make_context_current(plan.p.device);
  const Workspace workspace(plan.kept.all() * sizeof(float), plan.need);
  place(plan.p, plan.kept, workspace, static_cast<cudaStream_t>(stream));
  if (plan.draws) plan.p.counter = take_counter(plan.p.device, stream);
  if (plan.p.delta_rows && plan.p.cu_q)
    check_status(cudaMemsetAsync(plan.p.delta_rows, 0, plan.rows * sizeof(float), static_cast<cudaStream_t>(stream)),
                 "clearing delta of the backward");
  return static_cast<cudaError_t>(plan.instance->launch(plan.p, stream));
}

void record(const ForwardPlan& plan) { record_plan(plan); }
void record(const BackwardPlan& plan) { record_plan(plan); }

}  // namespace sdpa_cuda

// What follows is called past torch's dispatcher.
#define SDPA_EXPORT extern "C" __attribute__((visibility("default")))

// From now on this thread records its last call.
SDPA_EXPORT void sdpa_cuda_record() {
  sdpa_cuda::last_call.reset();
  sdpa_cuda::recording = true;
}

// The call that was recorded, which reads and writes the tensors at these addresses; null where it has others, too, or
// where there was none. This thread records no further calls.
SDPA_EXPORT const void* sdpa_cuda_recorded(const uint64_t* addresses, int count) {
  sdpa_cuda::recording = false;
  std::unique_ptr<sdpa_cuda::Recorded> call = std::move(sdpa_cuda::last_call);
  return call && call->find(addresses, count) ? call.release() : nullptr;
}

// A result other than 0: the operator says what is wrong.
SDPA_EXPORT int sdpa_cuda_run(const void* recorded, void* const* addresses, void* stream) {
  try {
    return static_cast<const sdpa_cuda::Recorded*>(recorded)->run(addresses, stream);
  } catch (...) {
    return -1;
  }
}

SDPA_EXPORT void sdpa_cuda_forget(const void* recorded) { delete static_cast<const sdpa_cuda::Recorded*>(recorded); }
