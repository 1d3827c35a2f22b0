// What changes scores and probabilities besides the mask: softcap, ALiBi, bias, and dropout.
#pragma once

#include "mask.h"

namespace sdpa_cpu {

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

// From a product q k^T to a score in base 2: softcap(scale * q k^T) - alibi * |distance| + bias, times log2(e).
template <typename T>
class ScoreTerms {
 public:
  using Softcap = void (*)(int64_t rows, int64_t columns, T* s, T* slope, int64_t ld, T cap);  // of Primitives

  ScoreTerms(const AttentionParams& params, Softcap softcap);

  // What the product is to be multiplied with before `apply`.
  T factor() const { return factor_; }
  // Whether `apply` does anything.
  bool present() const { return present_; }
  // s [rows, ld]; slope (null: not wanted) receives the derivative of the softcap.
  void apply(const Mask& mask, int64_t batch, const RowGroup& rows, int64_t begin, int64_t count, T* s, T* slope,
             int64_t ld) const;

 private:
  const AttentionParams& params_;
  Softcap softcap_;
  T factor_;
  bool present_;
};

// Multiply by 0 or 1 / (1 - p): Philox4x32-10, whose counter is the position (key / 4, query, batch * H + head).
template <typename T>
void apply_dropout(const AttentionParams& params, int64_t batch, const RowGroup& rows, int64_t begin, int64_t count,
                   T* p, int64_t ld);

}  // namespace sdpa_cpu
