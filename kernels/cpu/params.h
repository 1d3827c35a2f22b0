// The parameters of the attention loops: sizes, strided views of the tensors, and the options of one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "primitives.h"

namespace sdpa_cpu {

constexpr int64_t kUnlimited = -1;
constexpr int64_t kDirectRows = 8;  // up to so many rows, reading keys in place is faster than packing them

inline size_t size_of(Dtype dtype) {
  if (dtype == Dtype::kFloat64) return 8;
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

// Where dropout's numbers begin (sdpa/philox.py): Philox' key and offset; of a part of a call also how many query heads
// all of it has, and which of its heads, rows and keys come first. Rows and keys are multiples of 16.
struct RandomNumbers {
  uint64_t key = 0, offset = 0;
  int64_t heads = 0, first_head = 0, first_row = 0, first_key = 0;

  // Of two words, or of four.
  void read(const uint64_t* words, int64_t stride, int64_t count) {
    key = words[0], offset = words[stride];
    if (count == 2) return;
    const auto upper = [&](int64_t word) { return static_cast<int64_t>(words[word * stride] >> 32); };
    const auto lower = [&](int64_t word) { return static_cast<int64_t>(words[word * stride] & 0xFFFFFFFF); };
    heads = upper(2), first_head = lower(2), first_row = upper(3), first_key = lower(3);
  }

  // The number of the stream of a head of a batch entry, of `own` heads.
  uint32_t stream(int64_t batch, int64_t head, int64_t own) const {
    return static_cast<uint32_t>(batch * (heads ? heads : own) + first_head + head);
  }
};

// A tensor of up to four dimensions. Strides count elements; a dimension of size 1 that is broadcast has stride 0.
// `data` is null for a tensor that is absent.
struct View {
  char* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t element = 4;  // bytes
  Dtype dtype = Dtype::kFloat32;

  explicit operator bool() const { return data != nullptr; }
  char* at(int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) const {
    return data + (a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]) * element;
  }
  // Rows from (a, b, c) on, as the primitives read them.
  Source rows(int64_t a, int64_t b, int64_t c) const { return {at(a, b, c), dtype, stride[2], stride[3]}; }
};

// Whether a row of the tensor can be read in place, because its last dimension is contiguous.
inline bool unit_stride(const View& view) { return view.stride[3] == 1; }

// Whether rows in memory are whole vectors.
inline bool whole_vectors(const View& view, int64_t width, int64_t lanes) {
  return unit_stride(view) && width % lanes == 0;
}

// Whether rows in memory are an operand of products as they lie: whole vectors of the type computed in. Rows that lie
// far apart share few places of a cache, and nothing fetches them ahead: they are packed where many others read them.
template <typename T, typename Operand>
bool in_place(const View& view, int64_t width, const Primitives<T, Operand>& prim, int64_t readers) {
  constexpr int64_t kFewReaders = 256, kNear = 1024;  // bytes
  return kDepth<Operand> == 1 && view.element == static_cast<int64_t>(sizeof(T)) && width > 0 &&
         whole_vectors(view, width, prim.lanes) && view.stride[2] >= width &&
         (readers <= kFewReaders || view.stride[2] * view.element < kNear);
}

double read_number(const char* p, Dtype dtype);

struct AttentionParams {
  int64_t B, H, Hkv, M, N, D, Dv;
  View q, k, v;  // [B, H, M, D], [B, Hkv, N, D], [B, Hkv, N, Dv]
  double scale;
  int64_t left = kUnlimited, right = kUnlimited;
  bool bottom_right = false;
  View bias, allowed;           // [B, H, M, N]
  View q_lengths, k_lengths;    // [B], int32
  View q_segments, k_segments;  // [B, M], [B, N], int32
  View prefix;                  // [B], int32
  View alibi;                   // [B, H], float32 or float64
  View sinks;                   // [H]
  View block_table;             // [B, pages of a sequence], int32; then k and v are [pages, Hkv, page_size, .]
  int64_t pages = 0, page_size = 0;
  double softcap = 0.0;
  double dropout_p = 0.0;
  RandomNumbers random;              // of dropout
  int64_t block_m = 0, block_n = 0;  // the tile BLOCK_M x BLOCK_N; 0: the loops choose
  int64_t threads = 1;

  int64_t G() const { return H / Hkv; }
};

// Where a forward writes. The last dimension of out has stride 1; lse is contiguous [B, H, M], or null where it is not
// wanted.
struct ForwardResults {
  View out;
  void* lse;
};

// What a backward reads beside the inputs, and where it writes. The last dimension of the gradients has stride 1.
struct BackwardTensors {
  View out, grad_out;      // [B, H, M, Dv]
  View lse, grad_lse;      // [B, H, M] in the type computed in
  View dq, dk, dv;         // like q, k, v
  View dbias;              // like bias, in the type computed in, zero at the start; absent when not wanted
  void* dsinks = nullptr;  // [H] in the type computed in; null when not wanted
};

// The primitives that compute a call, in the type the call computes in. `pairs`, which may be null, are primitives that
// multiply bfloat16 in pairs or quads: faster, and allowed where they give the same result. `split`, which may be
// null, are those that multiply float16 as sums of bfloat16, in a forward.
template <typename T>
struct Toolbox {
  const Primitives<T>& plain;
  const Primitives<T, Narrow>* pairs = nullptr;
  const Primitives<T, Split>* split = nullptr;
};

template <typename T>
void attention_forward(const AttentionParams& params, const Toolbox<T>& tools, const ForwardResults& results);
template <typename T>
void attention_backward(const AttentionParams& params, const Toolbox<T>& tools, const BackwardTensors& tensors);

}  // namespace sdpa_cpu
