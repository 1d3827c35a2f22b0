// The online softmax of two rows per thread, which a quad of threads shares.
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
  float scale_log2;
  // The maximum so far, which is taken off the scores before the scale: the largest exponential of a row is 1, which
  // rounding leaves as it is. FlashAttention-4 lets it stay behind by up to 2^8; the largest error of a result was then
  // up to 1.5 times as large.
  float base[2];
  float row_sum[2] = {0.f, 0.f};  // of this thread's columns
  float alpha[2];                 // what the sums so far, and the output, have to be multiplied by

  // Before a row has seen a key, or while all scores are -inf, the base is finite: exponentials are 0 and not NaN.
  // Scores below it, near the end of float32, would be taken for -inf.
  CUTE_DEVICE explicit Softmax(float scale_log2) : scale_log2(scale_log2) {
    base[0] = base[1] = -kHuge / fmaxf(1.f, scale_log2);
  }

  // One more key of that score, without a value; one thread of the quad counts it.
  CUTE_DEVICE void begin_with(float score, bool counts) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = fmaxf(score, base[i]);
      row_sum[i] = counts ? exp2f((score - base[i]) * scale_log2) : 0.f;
    }
  }

  // Turns (2, columns) scores into exponentials.
  template <class Scores>
  CUTE_DEVICE void absorb(Scores& scores) {
    using namespace cute;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = scores(i, 0);
#pragma unroll
      for (int j = 1; j < size<1>(scores); ++j) top = fmaxf(top, scores(i, j));
      float const before = base[i];
      base[i] = fmaxf(before, quad_max(top));
      float const off = base[i] * scale_log2;
      alpha[i] = exp2f((before - base[i]) * scale_log2);  // exactly 1 where the base stays
      row_sum[i] *= alpha[i];
#pragma unroll
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = exp2f(scores(i, j) * scale_log2 - off);
        row_sum[i] += scores(i, j);
      }
    }
  }

  // Multiplies (2, columns) of the output by `factor`.
  template <class Rows>
  CUTE_DEVICE static void multiply(Rows& rows, float const (&factor)[2]) {
    using namespace cute;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < size<1>(rows); ++j) rows(i, j) *= factor[i];
  }

  // Where the maximum of no row of the warp has grown, nothing changes.
  template <class Rows>
  CUTE_DEVICE void rescale(Rows& rows) const {
    using namespace cute;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!__any_sync(0xffffffff, alpha[i] != 1.f)) continue;
#pragma unroll
      for (int j = 0; j < size<1>(rows); ++j) rows(i, j) *= alpha[i];
    }
  }

  // The natural log-sum-exp of row i; `inverse` of its sum. A row that saw no key has -inf and 0.
  CUTE_DEVICE float finish(int i, float& inverse) const {
    float const sum = quad_sum(row_sum[i]);
    bool const dead = sum == 0.f;
    inverse = dead ? 0.f : 1.f / sum;
    return dead ? -INFINITY : base[i] * scale_log2 * 0.693147180559945f + logf(sum);
  }

  // The same where one more key of that score has no value (-inf: there is none), for who does not know beforehand
  // whether the row sees a key: `dead` tells that it saw none.
  CUTE_DEVICE float finish_with(int i, float score, float& inverse, bool& dead) const {
    float const sum = quad_sum(row_sum[i]), top = fmaxf(base[i], score);
    float const kept = exp2f((base[i] - top) * scale_log2);
    float const all = sum * kept + exp2f((score - top) * scale_log2);
    dead = sum == 0.f;
    inverse = dead ? 0.f : kept / all;
    return all == 0.f ? -INFINITY : top * scale_log2 * 0.693147180559945f + logf(all);
  }
};

}  // namespace sdpa_cuda
