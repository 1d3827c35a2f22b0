// The terms that change scores and weights besides the mask: softcap, ALiBi, bias, and dropout.
#pragma once

#include "mask.h"

namespace sdpa_cpu {

// scores = softcap(scale * q k^T) - alibi * |distance| + bias.
template <typename T>
class ScoreTerms {
 public:
  ScoreTerms(const AttentionParams& params, const ScorePrimitives<T>& prim);

  // Whether `apply` does anything.
  bool present() const { return present_; }
  // Changes s [rows, ld] from scale * q k^T to scores. slope (null: not wanted) becomes the softcap's derivative.
  void apply(const Mask& mask, int64_t batch, const RowGroup& rows, int64_t begin, int64_t count, T* s, T* slope,
             int64_t ld) const;

 private:
  const AttentionParams& params_;
  const ScorePrimitives<T>& prim_;
  const bool present_;
};

// Multiplies p [rows, ld] by 0 or the factor of kept weights, as sdpa/philox.py has it.
template <typename T>
void apply_dropout(const AttentionParams& params, const ScorePrimitives<T>& prim, int64_t batch, const RowGroup& rows,
                   int64_t begin, int64_t count, T* p, int64_t ld);

}  // namespace sdpa_cpu
