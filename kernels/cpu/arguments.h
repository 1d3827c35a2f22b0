// The stack of a boxed operator: arguments off it, results onto it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace sdpa_cpu {

// The arguments of a boxed call, taken one after the other.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : stack_(stack) {}
  template <typename A>
  A next() {
    return torch::stable::detail::to<A>(stack_[position_++]);
  }
  std::optional<torch::stable::Tensor> next_optional() { return next<std::optional<torch::stable::Tensor>>(); }

 private:
  StableIValue* stack_;
  int position_ = 0;
};

template <typename... Values>
void put(StableIValue* stack, const Values&... values) {
  int position = 0;
  ((stack[position++] = torch::stable::detail::from(values)), ...);
}

}  // namespace sdpa_cpu
