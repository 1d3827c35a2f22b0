// The operators sdpa::attention_* for programs without Python, such as one that runs a package of AOTInductor.
// cpu_flash answers on CPUs, alone: there is no selection here. Where Python has registered them before, Python
// answers.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "../arguments.h"

namespace sdpa_cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::detail::StableLibrary;

// As sdpa/operators.py has them; a test holds the two against each other.
const std::string kBand = "float scale, SymInt left=-1, SymInt right=-1, bool bottom_right=False";
const std::string kMasks =
    "Tensor? bias=None, Tensor? allowed=None, Tensor? q_lengths=None, Tensor? k_lengths=None, "
    "Tensor? q_segments=None, Tensor? k_segments=None, Tensor? prefix=None, Tensor? alibi=None, Tensor? sinks=None, "
    "float softcap=0.0, float dropout_p=0.0, Tensor? rng=None, Tensor? cu_q=None, Tensor? cu_k=None, "
    "Tensor? block_table=None, SymInt max_q=0, SymInt max_k=0";
const std::string kForward = "attention_forward(Tensor q, Tensor k, Tensor v, " + kBand +
                             ", bool needs_lse=False, str setting=\"\", " + kMasks + ") -> (Tensor, Tensor)";
const std::string kBackward =
    "attention_backward(Tensor grad_out, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, " + kBand +
    ", Tensor? grad_lse=None, bool bias_grad=False, str setting=\"\", " + kMasks +
    ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)";
const std::string kWeights = "attention_weights(Tensor lse, Tensor q, Tensor k, Tensor v, " + kBand +
                             ", bool average=False, str setting=\"\", " + kMasks + ") -> Tensor";

const char* const kAdvice = "; export the program under sdpa.decomposed(), or with sdpa.decomposition_table()";
std::string library_error;  // why libsdpa_cpu.so did not load; empty where it did

// Whether names and flags as dispatch/context.py writes them ("cpu_flash,math;pt5") leave cpu_flash on.
bool allows_cpu_flash(const std::string& setting) {
  const size_t end = std::min(setting.find(';'), setting.size());
  const std::string names = "," + setting.substr(0, end) + ",", flags = setting.substr(end);
  if (names.find(",cpu_flash,") != std::string::npos) return true;
  if (names != ",," && names.find(",flash,") == std::string::npos) return false;
  const size_t toggles = flags.find('t');  // torch's switches as bits, of which the lowest is that of flash
  return toggles == std::string::npos || std::stoi(flags.substr(toggles + 1)) % 2 == 1;
}

// The arguments of a call. All are taken before any is looked at: what a refusal left on the stack would never be
// freed.
struct Call {
  Tensor q, k, v;
  double scale = 1.0;
  int64_t left = -1, right = -1;
  bool bottom_right = false;
  std::string setting;
  std::vector<std::optional<Tensor>> masks;  // bias, allowed, .., sinks
  double softcap = 0.0, dropout_p = 0.0;
  std::optional<Tensor> rng;
  bool is_packed = false;

  void take_band(Arguments* in) {
    q = in->next<Tensor>();
    k = in->next<Tensor>();
    v = in->next<Tensor>();
    scale = in->next<double>();
    left = in->next<int64_t>();
    right = in->next<int64_t>();
    bottom_right = in->next<bool>();
  }

  void take_masks(Arguments* in) {
    constexpr int kMaskTensors = 9;
    setting = in->next<std::string>();
    for (int i = 0; i < kMaskTensors; ++i) masks.push_back(in->next_optional());
    softcap = in->next<double>();
    dropout_p = in->next<double>();
    rng = in->next_optional();
    for (int i = 0; i < 3; ++i) is_packed = in->next_optional().has_value() || is_packed;  // cu_q, cu_k, block_table
    in->next<int64_t>();
    in->next<int64_t>();
  }

  void check(const char* name) const {
    STD_TORCH_CHECK(library_error.empty(), "sdpa::", name,
                    " needs libsdpa_cpu.so beside libsdpa_operators.so: ", library_error);
    STD_TORCH_CHECK(allows_cpu_flash(setting), "sdpa::", name, " was exported for \"", setting,
                    "\", and a program without Python has cpu_flash alone", kAdvice);
    STD_TORCH_CHECK(!is_packed, "sdpa::", name, " was exported for a GPU, and a program without Python runs on a CPU",
                    kAdvice);
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "sdpa::", name,
                    " expected q, k and v of 4 dimensions");
  }

  const std::optional<Tensor>& bias() const { return masks.front(); }
  const std::optional<Tensor>& sinks() const { return masks.back(); }

  // Whether no query meets a key.
  bool is_empty() const {
    const bool keys = k.size(0) && k.size(1) && k.size(2);
    return q.size(0) == 0 || q.size(1) == 0 || q.size(2) == 0 || !(keys || sinks());
  }

  // Behind the tensors that an operator of libsdpa_cpu.so begins with.
  void give_band(std::vector<StableIValue>* stack) const { give(stack, scale, left, right, bottom_right); }

  void give_masks(std::vector<StableIValue>* stack) const {
    for (const std::optional<Tensor>& mask : masks) give(stack, mask);
    const int64_t usual_blocks = 0;
    give(stack, softcap, dropout_p, rng, usual_blocks, usual_blocks);
  }

  static void give_no_pages(std::vector<StableIValue>* stack) { give(stack, std::optional<Tensor>()); }

  template <typename... Values>
  static void give(std::vector<StableIValue>* stack, const Values&... values) {
    (stack->push_back(torch::stable::detail::from(values)), ...);
  }
};

Tensor result(StableIValue* stack, int place) { return torch::stable::detail::to<Tensor>(stack[place]); }

void dispatch(const char* name, std::vector<StableIValue>* stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack->data(), TORCH_ABI_VERSION));
}

ScalarType lse_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

Tensor no_tensor(const Tensor& q) { return torch::stable::new_empty(q, {0}, lse_type(q)); }

// Zeros of (B, H, M, last), in the memory order (B, M, H, last) where `like` has it.
Tensor zeros_as(const Tensor& like, int64_t last) {
  const int64_t B = like.size(0), H = like.size(1), M = like.size(2);
  if (H == 1 || M == 1 || like.stride(1) <= 0 || like.stride(1) >= like.stride(2))
    return torch::stable::new_zeros(like, {B, H, M, last});
  Tensor rows = torch::stable::new_zeros(like, {B, M, H, last});
  return torch::stable::transpose(rows, 1, 2);
}

void put_empty_forward(StableIValue* stack, const Call& call, bool needs_lse) {
  const Tensor& q = call.q;
  const Tensor out = zeros_as(q, call.v.size(3));
  if (!needs_lse) return put(stack, out, no_tensor(q));
  const Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, lse_type(q));
  put(stack, out, torch::stable::fill_(lse, -INFINITY));
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Call call;
  call.take_band(&in);
  const bool needs_lse = in.next<bool>();
  call.take_masks(&in);
  call.check("attention_forward");
  if (call.is_empty()) return put_empty_forward(stack, call, needs_lse);
  std::vector<StableIValue> given;
  Call::give(&given, call.q, call.k, call.v);
  call.give_band(&given);
  call.give_masks(&given);
  Call::give_no_pages(&given);
  dispatch("sdpa_cpu::flash_forward", &given);
  const Tensor out = result(given.data(), 0), lse = result(given.data(), 1);
  put(stack, out, needs_lse ? lse : no_tensor(call.q));
}

void put_empty_backward(StableIValue* stack, const Call& call, bool bias_grad) {
  const Tensor none = no_tensor(call.q);
  const auto zeros = [&none](const std::optional<Tensor>& like) {
    return like ? torch::stable::new_zeros(*like, like->sizes()) : none;
  };
  put(stack, zeros_as(call.q, call.q.size(3)), zeros_as(call.k, call.k.size(3)), zeros_as(call.v, call.v.size(3)),
      bias_grad ? zeros(call.bias()) : none, zeros(call.sinks()));
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor grad_out = in.next<Tensor>(), out = in.next<Tensor>(), lse = in.next<Tensor>();
  Call call;
  call.take_band(&in);
  const std::optional<Tensor> grad_lse = in.next_optional();
  const bool bias_grad = in.next<bool>();
  call.take_masks(&in);
  call.check("attention_backward");
  if (call.is_empty()) return put_empty_backward(stack, call, bias_grad);
  std::vector<StableIValue> given;
  Call::give(&given, grad_out, call.q, call.k, call.v, out, lse);
  call.give_band(&given);
  Call::give(&given, grad_lse);
  call.give_masks(&given);
  Call::give(&given, bias_grad);
  dispatch("sdpa_cpu::flash_backward", &given);
  std::vector<Tensor> gradients;
  for (int i = 0; i < 5; ++i) gradients.push_back(result(given.data(), i));
  if (!bias_grad) gradients[3] = no_tensor(call.q);
  if (!call.sinks()) gradients[4] = no_tensor(call.q);
  put(stack, gradients[0], gradients[1], gradients[2], gradients[3], gradients[4]);
}

// What cannot be answered. The arguments were all taken off the stack, and are freed as the exception passes.
void refuse(const std::string& reason) { STD_TORCH_CHECK(false, reason, kAdvice); }

void weights(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  in.next<Tensor>();
  Call call;
  call.take_band(&in);
  in.next<bool>();
  call.take_masks(&in);
  refuse("sdpa::attention_weights (need_weights=True) has no kernel in a program without Python");
}

template <void (*kOnCpu)(StableIValue*, uint64_t, uint64_t), int kTensorsBefore, bool kTakesGradient>
void elsewhere(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  for (int i = 0; i < kTensorsBefore; ++i) in.next<Tensor>();
  Call call;
  call.take_band(&in);
  if (kTakesGradient) in.next_optional();
  in.next<bool>();
  call.take_masks(&in);
  refuse("attention of sdpa runs on a CPU alone in a program without Python");
}

// The library with the kernel, from the folder of this one.
void load_kernels() {
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&load_kernels), &self) == 0) {
    library_error = "the folder of libsdpa_operators.so is not known";
    return;
  }
  const std::string path = self.dli_fname;
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  if (dlopen((folder + "libsdpa_cpu.so").c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) library_error = dlerror();
}

// Registered for as long as the process lives: torch may be gone before this library is.
void register_all() {
  auto* schemas = new StableLibrary(StableLibrary::Kind::FRAGMENT, "sdpa", nullptr, __FILE__, __LINE__);
  for (const std::string& schema : {kForward, kBackward, kWeights}) schemas->def(schema.c_str());
  auto* cpu = new StableLibrary(StableLibrary::Kind::IMPL, "sdpa", "CPU", __FILE__, __LINE__);
  cpu->impl("attention_forward", &forward).impl("attention_backward", &backward).impl("attention_weights", &weights);
  auto* others = new StableLibrary(StableLibrary::Kind::IMPL, "sdpa", "CompositeExplicitAutograd", __FILE__, __LINE__);
  others->impl("attention_forward", &elsewhere<forward, 0, false>);
  others->impl("attention_backward", &elsewhere<backward, 3, true>);
  others->impl("attention_weights", &elsewhere<weights, 1, false>);
  load_kernels();
}

const bool kRegistered = [] {
  try {
    register_all();
  } catch (const std::exception&) {
    return false;  // Python's are there
  }
  return true;
}();

}  // namespace
}  // namespace sdpa_cpu
