// The operators that torch sees: they take arguments off the stack, check them, and call the loops. And what runs a
// call again that one of them has checked.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "isa.h"
#include "params.h"

namespace sdpa_cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, "cpu_flash: expected float32, float64, bfloat16 or float16");
  }
  return Dtype::kFloat32;
}

template <typename List>
std::string shape_text(const List& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

View view_without_type(const Tensor& tensor) {
  View view;
  view.data = static_cast<char*>(tensor.data_ptr());
  view.element = static_cast<int64_t>(tensor.element_size());
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  STD_TORCH_CHECK(sizes.size() <= 4, "cpu_flash: expected at most four dimensions");
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  STD_TORCH_CHECK(bytes > 0 || tensor.numel() == 0,
                  "cpu_flash: expected tensors with memory behind them; got one of shape ", shape_text(sizes),
                  " whose storage holds 0 bytes: it was freed (untyped_storage().resize_(0)) before ",
                  "attention was called");
  for (size_t i = 0; i < sizes.size(); ++i) view.stride[i] = sizes[i] != 1 ? strides[i] : i < 3 ? 0 : 1;
  return view;
}

View view_of(const Tensor& tensor) {
  View view = view_without_type(tensor);
  view.dtype = dtype_of(tensor);
  return view;
}

using Sizes = std::initializer_list<int64_t>;

// The loops trust these sizes: with wrong ones they would read beyond a tensor.
template <typename List>
void check_sizes(const char* name, const List& sizes, Sizes wanted, bool broadcasts = false) {
  bool fits = sizes.size() == wanted.size();
  for (size_t i = 0; fits && i < wanted.size(); ++i)
    fits = sizes[i] == wanted.begin()[i] || (broadcasts && sizes[i] == 1);
  STD_TORCH_CHECK(fits, "cpu_flash: expected ", name, " of shape ", shape_text(wanted),
                  broadcasts ? ", or 1 in its place" : "", ", but got ", shape_text(sizes));
}

// A view whose dimensions of size 1 are broadcast, the last one, too. An empty tensor still counts as present.
View optional_view(const char* name, const std::optional<Tensor>& tensor, bool typed, Sizes wanted,
                   bool broadcasts = true) {
  if (!tensor) return View();
  check_sizes(name, tensor->sizes(), wanted, broadcasts);
  View view = typed ? view_of(*tensor) : view_without_type(*tensor);
  const int64_t last = tensor->dim() - 1;
  if (last >= 0 && tensor->size(last) == 1) view.stride[last] = 0;
  return view;
}

Tensor new_tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t dtype) {
  AtenTensorHandle handle;
  const AOTITorchError status =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                               aoti_torch_device_type_cpu(), 0, &handle);
  const auto elements = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
  STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS, "cpu_flash: out of memory: no room for ", elements, " numbers");
  return Tensor(handle);
}

int32_t type_code(const Tensor& tensor) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

// (B, H, M, width), in the memory order (B, M, H, width) when `like` has it.
Tensor new_like(const Tensor& like, int64_t width) {
  const int64_t B = like.size(0), H = like.size(1), M = like.size(2);
  const int64_t by_head = like.stride(1), by_row = like.stride(2);
  if (H > 1 && M > 1 && 0 < by_head && by_head < by_row)
    return new_tensor({B, H, M, width}, {M * H * width, width, H * width, 1}, type_code(like));
  return new_tensor({B, H, M, width}, {H * M * width, M * width, width, 1}, type_code(like));
}

int32_t compute_code(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
}

Tensor empty_result(int32_t code) { return new_tensor({0}, {1}, code); }

// The arguments that forward and backward share. All are taken before any is checked: arguments that a refusal left on
// the stack would never be freed.
struct Call {
  Tensor q, k, v;
  std::vector<std::optional<Tensor>> kept;  // in the order of the arguments
  std::optional<Tensor> rng, block_table;
  AttentionParams params;

  void take_tensors(Arguments* in) {
    q = in->next<Tensor>();
    k = in->next<Tensor>();
    v = in->next<Tensor>();
  }

  void take_band(Arguments* in) {
    params.scale = in->next<double>();
    params.left = in->next<int64_t>();
    params.right = in->next<int64_t>();
    params.bottom_right = in->next<bool>();
  }

  void take_optional(Arguments* in, int count) {
    kept.reserve(kOptionalTensors);
    for (int i = 0; i < count; ++i) kept.push_back(in->next_optional());
  }

  void take_dense(Arguments* in) { take_optional(in, kDenseTensors); }

  void take_options(Arguments* in) {
    take_optional(in, kOptionalTensors);
    params.softcap = in->next<double>();
    params.dropout_p = in->next<double>();
    rng = in->next_optional();
    params.block_m = in->next<int64_t>();
    params.block_n = in->next<int64_t>();
  }

  void take_pages(Arguments* in) { block_table = in->next_optional(); }

  void read() {
    read_tensors();
    params.left = side(params.left);
    params.right = side(params.right);
    read_dense();
    if (kept.size() > kDenseTensors) read_options();
    params.threads = torch::stable::get_num_threads();
  }

  const std::optional<Tensor>& bias() const { return kept[0]; }
  std::optional<Tensor> sinks() const { return params.sinks ? kept.back() : std::nullopt; }

 private:
  static constexpr int kDenseTensors = 2, kOptionalTensors = 9;

  void read_tensors() {
    const auto of_q = q.sizes(), of_k = k.sizes(), of_v = v.sizes();
    STD_TORCH_CHECK(of_q.size() == 4 && of_k.size() == 4 && of_v.size() == 4,
                    "cpu_flash: expected q, k and v of 4 dimensions");
    params.q = view_of(q);
    params.k = view_of(k);
    params.v = view_of(v);
    params.B = of_q[0], params.H = of_q[1], params.M = of_q[2], params.D = of_q[3];
    params.Hkv = of_k[1], params.N = of_k[2], params.Dv = of_v[3];
    int64_t entries = params.B;
    if (block_table) entries = read_pages(of_k[0]);
    STD_TORCH_CHECK(params.k.dtype == params.q.dtype && params.v.dtype == params.q.dtype,
                    "cpu_flash: expected q, k and v of one dtype");
    STD_TORCH_CHECK(params.Hkv > 0 ? params.H % params.Hkv == 0 : params.H == 0,
                    "cpu_flash: expected the heads of q to be a multiple of those of k, but got ", params.H, " and ",
                    params.Hkv);
    check_sizes("k", of_k, {entries, params.Hkv, of_k[2], params.D});
    check_sizes("v", of_v, {entries, params.Hkv, of_k[2], params.Dv});
    STD_TORCH_CHECK(!block_table || (params.M * params.G() <= kDirectRows && unit_stride(params.k)),
                    "cpu_flash: expected at most ", kDirectRows,
                    " queries of heads that share pages, and rows of keys ", "whose numbers lie side by side");
  }

  // The keys of a sequence are those of its pages. Returns the number of pages.
  int64_t read_pages(int64_t pages) {
    const int64_t places = block_table->dim() == 2 ? block_table->size(1) : 0;
    params.block_table = words("block_table", block_table, ScalarType::Int, {params.B, places}, false);
    params.pages = pages, params.page_size = params.N, params.N *= pages > 0 ? places : 0;
    return pages;
  }

  // A side of the band that is wider than the matrix hides nothing, and sums with it could overflow.
  int64_t side(int64_t keys) const {
    STD_TORCH_CHECK(keys >= kUnlimited, "cpu_flash: expected left and right to be -1 or more, but got ", keys);
    return keys < params.M + params.N ? keys : kUnlimited;
  }

  void read_dense() {
    const Sizes scores = {params.B, params.H, params.M, params.N};
    params.bias = optional_view("bias", kept[0], true, scores);
    params.allowed = words("allowed", kept[1], ScalarType::Bool, scores);
    STD_TORCH_CHECK(!params.bias || params.bias.dtype == params.q.dtype || params.bias.dtype == Dtype::kFloat32,
                    "cpu_flash: expected a bias of the dtype of q or float32");
  }

  void read_options() {
    constexpr ScalarType kInt = ScalarType::Int;
    params.q_lengths = words("q_lengths", kept[2], kInt, {params.B});
    params.k_lengths = words("k_lengths", kept[3], kInt, {params.B});
    STD_TORCH_CHECK(kept[4].has_value() == kept[5].has_value(),
                    "cpu_flash: expected segments of queries and keys, or none");
    params.q_segments = words("q_segments", kept[4], kInt, {params.B, params.M});
    params.k_segments = words("k_segments", kept[5], kInt, {params.B, params.N});
    params.prefix = words("prefix", kept[6], kInt, {params.B});
    params.alibi = optional_view("alibi", kept[7], true, {params.B, params.H});
    params.sinks = optional_view("sinks", kept[8], true, {params.H}, false);
    if (rng) read_rng();
    // Scratch memory is as large as the product of two blocks.
    constexpr int64_t kLargest = 1 << 16;
    for (const int64_t block : {params.block_m, params.block_n})
      STD_TORCH_CHECK(0 <= block && block <= kLargest, "cpu_flash: expected blocks from 0 to ", kLargest, ", but got ",
                      block);
  }

  // An optional argument of integers or booleans.
  static View words(const char* name, const std::optional<Tensor>& tensor, ScalarType type, Sizes wanted,
                    bool broadcasts = true) {
    STD_TORCH_CHECK(!tensor || tensor->scalar_type() == type, "cpu_flash: expected ", name,
                    type == ScalarType::Bool ? " in bool" : " in int32");
    return optional_view(name, tensor, false, wanted, broadcasts);
  }

  void read_rng() {
    check_sizes("rng", rng->sizes(), {rng->size(0) == 4 ? 4 : 2});
    STD_TORCH_CHECK(rng->scalar_type() == ScalarType::Long, "cpu_flash: expected rng in int64");
    params.random.read(static_cast<const uint64_t*>(rng->data_ptr()), rng->stride(0), rng->size(0));
  }
};

template <typename T>
Toolbox<T> toolbox(Dtype dtype) {
  const InstructionSet& set = instruction_set();
  if constexpr (sizeof(T) == sizeof(double))
    return {*set.f64};
  else
    return {*set.f32, dtype == Dtype::kBFloat16 ? set.bf16 : nullptr, dtype == Dtype::kFloat16 ? set.f16 : nullptr};
}

void run_forward(const AttentionParams& p, const ForwardResults& results) {
  if (p.q.dtype == Dtype::kFloat64)
    attention_forward(p, toolbox<double>(p.q.dtype), results);
  else
    attention_forward(p, toolbox<float>(p.q.dtype), results);
}

// A dense call has no options but a bias and a dense mask. Reading the other options takes as long as a small call.
template <bool kDense>
void flash_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Call call;
  call.take_tensors(&in);
  call.take_band(&in);
  if (kDense)
    call.take_dense(&in);
  else
    call.take_options(&in), call.take_pages(&in);
  call.read();
  const AttentionParams& p = call.params;
  const Tensor out = new_like(call.q, p.Dv);
  const Tensor lse = new_tensor({p.B, p.H, p.M}, {p.H * p.M, p.M, 1}, compute_code(p.q.dtype));
  run_forward(p, {view_of(out), lse.data_ptr()});
  put(stack, out, lse);
}

// A call that was checked, for others of the same form, whose tensors differ in their addresses alone.
struct Recorded {
  explicit Recorded(const Call& call) : params(call.params), has_rng(call.rng.has_value()) {
    for (const std::optional<Tensor>& tensor : call.kept) given.push_back(tensor.has_value());
    if (has_rng) rng_stride = call.rng->stride(0), rng_words = call.rng->size(0);
    has_pages = call.block_table.has_value();
  }
  virtual ~Recorded() = default;

  // Run it with the addresses of q, k, v, of the optional tensors that are there in the order of the arguments, of what
  // a backward reads beside them, and of the results.
  virtual void run(char* const* addresses) const = 0;

 protected:
  AttentionParams params;

  // The arguments at these addresses, which then begin behind them.
  AttentionParams params_at(char* const*& addresses) const {
    AttentionParams p = params;
    p.q.data = *addresses++, p.k.data = *addresses++, p.v.data = *addresses++;
    View* const views[] = {&p.bias,       &p.allowed, &p.q_lengths, &p.k_lengths, &p.q_segments,
                           &p.k_segments, &p.prefix,  &p.alibi,     &p.sinks};
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i]) continue;
      if (*views[i]) views[i]->data = *addresses;
      ++addresses;
    }
    if (has_rng) p.random.read(reinterpret_cast<const uint64_t*>(*addresses++), rng_stride, rng_words);
    if (has_pages) p.block_table.data = *addresses++;
    p.threads = torch::stable::get_num_threads();
    return p;
  }

 private:
  std::vector<bool> given;  // which optional tensors there are, an empty one too, whose view is absent
  bool has_rng, has_pages;
  int64_t rng_stride = 0, rng_words = 0;  // the stride in words, too
};

struct RecordedForward final : Recorded {
  View out;
  bool has_lse;
  RecordedForward(const Call& call, const View& out, bool has_lse) : Recorded(call), out(out), has_lse(has_lse) {}

  void run(char* const* addresses) const override {
    const AttentionParams p = params_at(addresses);
    ForwardResults results = {out, has_lse ? addresses[1] : nullptr};
    results.out.data = addresses[0];
    run_forward(p, results);
  }
};

// A result of a recorded call: its memory order is that of the others' results.
View result_like(const char* name, const std::optional<Tensor>& given, Sizes wanted, Dtype dtype) {
  STD_TORCH_CHECK(given.has_value(), "cpu_flash: expected ", name, ", whose memory order the others get");
  check_sizes(name, given->sizes(), wanted);
  STD_TORCH_CHECK(dtype_of(*given) == dtype, "cpu_flash: expected ", name, " in the dtype of q");
  return view_of(*given);
}

void record_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Call call;
  call.take_tensors(&in);
  call.take_band(&in);
  call.take_options(&in);
  call.take_pages(&in);
  const std::optional<Tensor> out = in.next_optional();
  const bool has_lse = in.next<bool>();
  call.read();
  const AttentionParams& p = call.params;
  const Recorded* recorded =
      new RecordedForward(call, result_like("out", out, {p.B, p.H, p.M, p.Dv}, p.q.dtype), has_lse);
  put(stack, reinterpret_cast<int64_t>(recorded));
}

// A gradient that is summed in the type computed in, and returned in the type of its tensor. Where both are the same,
// it is summed in its result.
template <typename T>
struct Sum {
  static constexpr Dtype kOwn = sizeof(T) == sizeof(double) ? Dtype::kFloat64 : Dtype::kFloat32;
  const std::optional<Tensor> like;
  std::optional<Tensor> result;
  std::vector<T> values;

  Sum(const std::optional<Tensor>& tensor, bool wanted) : like(tensor) {
    if (!wanted || !tensor) return;
    std::vector<int64_t> sizes, strides(static_cast<size_t>(like->dim()), 1);
    for (int64_t i = 0; i < like->dim(); ++i) sizes.push_back(like->size(i));
    for (int64_t i = like->dim() - 2; i >= 0; --i) strides[i] = strides[i + 1] * std::max<int64_t>(sizes[i + 1], 1);
    result = new_tensor(sizes, strides, type_code(*like));
    if (dtype_of(*like) == kOwn)
      std::fill_n(static_cast<T*>(result->data_ptr()), like->numel(), T(0));
    else
      values.resize(static_cast<size_t>(like->numel() + kMaxLanes));  // store_rows reads whole vectors
  }

  View view() {
    if (!result) return View();
    View view;
    view.data = values.empty() ? static_cast<char*>(result->data_ptr()) : reinterpret_cast<char*>(values.data());
    view.element = sizeof(T);
    view.dtype = kOwn;
    for (int64_t i = 0; i < like->dim(); ++i) view.stride[i] = like->size(i) == 1 ? 0 : result->stride(i);
    return view;
  }

  Tensor finish(const Primitives<T>& prim) const {
    if (!result) return empty_result(like ? type_code(*like) : aoti_torch_dtype_float32());
    const Dtype dtype = dtype_of(*like);
    const int64_t count = like->numel();
    if (dtype == kOwn) return *result;
    if (sizeof(T) == sizeof(double) && dtype == Dtype::kFloat32)
      std::copy_n(values.begin(), count, static_cast<float*>(result->data_ptr()));
    else
      prim.store_rows(values.data(), 0, nullptr, 1, count, result->data_ptr(), dtype, 0);
    return *result;
  }
};

template <bool kDense, typename T>
void backward_in(StableIValue* stack, const Call& call, BackwardTensors tensors, bool bias_grad) {
  const AttentionParams& p = call.params;
  const Tensor dq = new_like(call.q, p.D), dk = new_like(call.k, p.D), dv = new_like(call.v, p.Dv);
  Sum<T> dbias(call.bias(), bias_grad), dsinks(call.sinks(), true);
  tensors.dq = view_of(dq);
  tensors.dk = view_of(dk);
  tensors.dv = view_of(dv);
  tensors.dbias = dbias.view();
  tensors.dsinks = dsinks.view().data;
  const Toolbox<T> tools = toolbox<T>(p.q.dtype);
  attention_backward(p, tools, tensors);
  if (kDense)
    put(stack, dq, dk, dv);
  else
    put(stack, dq, dk, dv, dbias.finish(tools.plain), dsinks.finish(tools.plain));
}

// What a backward reads.
struct BackwardCall : Call {
  Tensor grad_out, out, lse;
  std::optional<Tensor> grad_lse;
  BackwardTensors tensors;

  void take_all_tensors(Arguments* in) {
    grad_out = in->next<Tensor>();
    take_tensors(in);
    out = in->next<Tensor>();
    lse = in->next<Tensor>();
    take_band(in);
  }

  void read_all() {
    read();
    const AttentionParams& p = params;
    check_sizes("out", out.sizes(), {p.B, p.H, p.M, p.Dv});
    check_sizes("grad_out", grad_out.sizes(), {p.B, p.H, p.M, p.Dv});
    check_sizes("lse", lse.sizes(), {p.B, p.H, p.M});
    tensors.out = view_of(out);
    tensors.grad_out = view_of(grad_out);
    tensors.lse = view_of(lse);
    tensors.grad_lse = optional_view("grad_lse", grad_lse, true, {p.B, p.H, p.M}, false);
    const Dtype compute = p.q.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
    STD_TORCH_CHECK(tensors.lse.dtype == compute && (!grad_lse || tensors.grad_lse.dtype == compute),
                    "cpu_flash: expected lse and its gradient in float32, or float64 for float64 inputs");
    STD_TORCH_CHECK(tensors.out.dtype == p.q.dtype && tensors.grad_out.dtype == p.q.dtype,
                    "cpu_flash: expected out and grad_out in the dtype of q");
  }
};

template <bool kDense>
void flash_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  BackwardCall call;
  call.take_all_tensors(&in);
  bool bias_grad = false;
  if (kDense) {
    call.take_dense(&in);
  } else {
    call.grad_lse = in.next_optional();
    call.take_options(&in);
    bias_grad = in.next<bool>();
  }
  call.read_all();
  if (call.params.q.dtype == Dtype::kFloat64)
    backward_in<kDense, double>(stack, call, call.tensors, bias_grad);
  else
    backward_in<kDense, float>(stack, call, call.tensors, bias_grad);
}

// A backward that gives the gradients of q, k and v.
struct RecordedBackward final : Recorded {
  BackwardTensors tensors;
  bool has_grad_lse;
  explicit RecordedBackward(const BackwardCall& call)
      : Recorded(call), tensors(call.tensors), has_grad_lse(call.grad_lse.has_value()) {}

  void run(char* const* addresses) const override {
    const AttentionParams p = params_at(addresses);
    BackwardTensors now = tensors;
    now.out.data = *addresses++, now.lse.data = *addresses++, now.grad_out.data = *addresses++;
    if (has_grad_lse) now.grad_lse.data = *addresses++;
    now.dq.data = *addresses++, now.dk.data = *addresses++, now.dv.data = *addresses++;
    if (p.q.dtype == Dtype::kFloat64)
      attention_backward(p, toolbox<double>(p.q.dtype), now);
    else
      attention_backward(p, toolbox<float>(p.q.dtype), now);
  }
};

void record_backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  BackwardCall call;
  call.take_all_tensors(&in);
  call.grad_lse = in.next_optional();
  call.take_options(&in);
  const std::optional<Tensor> dq = in.next_optional(), dk = in.next_optional(), dv = in.next_optional();
  call.read_all();
  const AttentionParams& p = call.params;
  STD_TORCH_CHECK(!call.sinks(), "cpu_flash: a backward with sinks is not recorded");
  call.tensors.dq = result_like("dq", dq, {p.B, p.H, p.M, p.D}, p.q.dtype);
  call.tensors.dk = result_like("dk", dk, {p.B, p.Hkv, p.N, p.D}, p.q.dtype);
  call.tensors.dv = result_like("dv", dv, {p.B, p.Hkv, p.N, p.Dv}, p.q.dtype);
  const Recorded* recorded = new RecordedBackward(call);
  put(stack, reinterpret_cast<int64_t>(recorded));
}

std::string isa() { return instruction_set().name; }
std::string isas() { return available_instruction_sets(); }
void set_isa(std::string name) { choose_instruction_set(name); }

const std::string kOptions =
    "Tensor? bias=None, Tensor? allowed=None, Tensor? q_lengths=None, Tensor? k_lengths=None, "
    "Tensor? q_segments=None, Tensor? k_segments=None, Tensor? prefix=None, Tensor? alibi=None, Tensor? sinks=None, "
    "float softcap=0.0, float dropout_p=0.0, Tensor? rng=None, int block_m=0, int block_n=0";
const std::string kPages = ", Tensor? block_table=None";

}  // namespace

STABLE_TORCH_LIBRARY(sdpa_cpu, library) {
  const std::string band = "float scale, int left=-1, int right=-1, bool bottom_right=False, *, ";
  const std::string dense = "float scale, int left, int right, bool bottom_right, Tensor? bias, Tensor? allowed";
  library.def(("flash_forward_dense(Tensor q, Tensor k, Tensor v, " + dense + ") -> (Tensor, Tensor)").c_str());
  library.def(("flash_backward_dense(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " + dense +
               ") -> (Tensor, Tensor, Tensor)")
                  .c_str());
  library.def(
      ("flash_forward(Tensor q, Tensor k, Tensor v, " + band + kOptions + kPages + ") -> (Tensor, Tensor)").c_str());
  library.def(("flash_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " + band +
               "Tensor? grad_lse=None, " + kOptions +
               ", bool bias_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
                  .c_str());
  library.def(("record_forward(Tensor q, Tensor k, Tensor v, " + band + kOptions + kPages +
               ", Tensor? out=None, bool lse=False) -> int")
                  .c_str());
  library.def(("record_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " + band +
               "Tensor? grad_lse=None, " + kOptions + ", Tensor? dq=None, Tensor? dk=None, Tensor? dv=None) -> int")
                  .c_str());
  library.def("isa() -> str");
  library.def("isas() -> str");
  library.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sdpa_cpu, CPU, library) {
  library.impl("flash_forward", &flash_forward<false>);
  library.impl("flash_forward_dense", &flash_forward<true>);
  library.impl("record_forward", &record_forward);
  library.impl("record_backward", &record_backward);
  library.impl("flash_backward", &flash_backward<false>);
  library.impl("flash_backward_dense", &flash_backward<true>);
}

STABLE_TORCH_LIBRARY_IMPL(sdpa_cpu, CompositeExplicitAutograd, library) {
  library.impl("isa", TORCH_BOX(&isa));
  library.impl("isas", TORCH_BOX(&isas));
  library.impl("set_isa", TORCH_BOX(&set_isa));
}

}  // namespace sdpa_cpu

// Called past torch's dispatcher, without a stream. A result other than 0: the operator says what is wrong.
extern "C" __attribute__((visibility("default"))) int sdpa_cpu_run(const void* recorded, char* const* addresses,
                                                                   void*) {
  try {
    static_cast<const sdpa_cpu::Recorded*>(recorded)->run(addresses);
    return 0;
  } catch (...) {
    return 1;
  }
}

extern "C" __attribute__((visibility("default"))) void sdpa_cpu_forget(const void* recorded) {
  delete static_cast<const sdpa_cpu::Recorded*>(recorded);
}
