// The online softmax of two rows per thread. A quad of threads shares these rows.
#pragma once
#include <cute/tensor.hpp>

namespace sdpa_cuda {

CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
}

CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 2);
  return x + __shfl_xor_sync(0xffffffff, x, 1);
}

struct Softmax {
  static constexpr float kHuge = 3e38f;
  static constexpr float kLn2 = 0.693147180559945f;
  float scale_log2;
  // The maximum so far of q k^T, before the scale. It is subtracted before the scale, too, so that the largest weight
  // of a row is exactly 1, which rounding leaves as it is. FlashAttention-4 lets its maximum stay behind by up to 2^8;
  // with that the largest error of a result was up to 1.5 times as large.
  float row_max[2];
  float row_sum[2] = {0.f, 0.f};  // of the weights in this thread's columns
  float alpha[2];                 // the factor of row_sum and acc after the maximum has grown

  // The maximum begins finite: before a row has seen a key, and while all of its scores are -inf, its weights are 0 and
  // not NaN. Scores below that, near the end of float32, would be taken for -inf.
  CUTE_DEVICE explicit Softmax(float scale_log2) : scale_log2(scale_log2) {
    row_max[0] = row_max[1] = -kHuge / fmaxf(1.f, scale_log2);
  }

  // Begins with one more key of that score, which has no value. Only one thread of the quad counts it.
  CUTE_DEVICE void add_sink(float score, bool counts) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_max[i] = fmaxf(score, row_max[i]);
      row_sum[i] = counts ? exp2f((score - row_max[i]) * scale_log2) : 0.f;
    }
  }

  // One step of the online softmax: the scores [2 rows, columns] become weights exp(score - row_max).
  template <class Scores>
  CUTE_DEVICE void update(Scores& scores) {
    using namespace cute;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = scores(i, 0);
#pragma unroll
      for (int j = 1; j < size<1>(scores); ++j) top = fmaxf(top, scores(i, j));
      float const before = row_max[i];
      row_max[i] = fmaxf(before, quad_max(top));
      float const max_log2 = row_max[i] * scale_log2;
      alpha[i] = exp2f((before - row_max[i]) * scale_log2);  // exactly 1 where the maximum stays
      row_sum[i] *= alpha[i];
#pragma unroll
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = exp2f(scores(i, j) * scale_log2 - max_log2);
        row_sum[i] += scores(i, j);
      }
    }
  }

  // acc [2 rows, columns] *= factor.
  template <class Acc>
  CUTE_DEVICE static void multiply(Acc& acc, float const (&factor)[2]) {
    using namespace cute;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= factor[i];
  }

  // acc [2 rows, columns] *= alpha. A warp skips this where the maximum of none of its rows has grown.
  template <class Acc>
  CUTE_DEVICE void rescale(Acc& acc) const {
    using namespace cute;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!__any_sync(0xffffffff, alpha[i] != 1.f)) continue;
#pragma unroll
      for (int j = 0; j < size<1>(acc); ++j) acc(i, j) *= alpha[i];
    }
  }

  // Returns the natural log-sum-exp of row i, and in `inverse` one over its sum. A row that saw no key has -inf and 0.
  CUTE_DEVICE float finish(int i, float& inverse) const {
    float const sum = quad_sum(row_sum[i]);
    bool const dead = sum == 0.f;
    inverse = dead ? 0.f : 1.f / sum;
    return dead ? -INFINITY : row_max[i] * scale_log2 * kLn2 + logf(sum);
  }

  // The same with a sink of that score, or -inf for none. It is for masks that do not know beforehand whether a row
  // sees a key: `dead` says that the row saw none.
  CUTE_DEVICE float finish_with_sink(int i, float score, float& inverse, bool& dead) const {
    float const sum = quad_sum(row_sum[i]), top = fmaxf(row_max[i], score);
    float const kept = exp2f((row_max[i] - top) * scale_log2);
    float const all = sum * kept + exp2f((score - top) * scale_log2);
    dead = sum == 0.f;
    inverse = dead ? 0.f : kept / all;
    return all == 0.f ? -INFINITY : top * scale_log2 * kLn2 + logf(all);
  }
};

}  // namespace sdpa_cuda
