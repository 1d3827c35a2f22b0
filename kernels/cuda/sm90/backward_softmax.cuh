// From scores to weights, and from dP to dS, in the registers of a consumer of the backward.
#pragma once
#include "parts.cuh"

namespace sdpa_cuda {

// Scores become weights. `base2` and `delta` are of the thread's first row; its rows are two of every eight.
template <class Scores>
CUTE_DEVICE void exponentiate(Scores& scores, float const* base2, float scale_log2) {
#pragma unroll
  for (int j = 0; j < size<1>(scores) / 2; ++j) {
    float2 const base = *reinterpret_cast<float2 const*>(base2 + 8 * j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scores(i, 2 * j) = exp2f(scores(i, 2 * j) * scale_log2 - base.x);
      scores(i, 2 * j + 1) = exp2f(scores(i, 2 * j + 1) * scale_log2 - base.y);
    }
  }
}

// The same with ALiBi (Press et al., arXiv 2108.12409): less `slope` times the distance of row and key. `coords` are
// the (key, row) of each score, and `distance` is that of the row 0 and the key 0 among these.
template <class Scores, class Coords>
CUTE_DEVICE void exponentiate_alibi(Scores& scores, Coords const& coords, float const* base2, float scale_log2,
                                    float slope, int distance) {
  float const slope_log2 = slope * float(M_LOG2E);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const first = distance + int(get<1>(coords(i, 0))) - int(get<0>(coords(i, 0)));
#pragma unroll
    for (int j = 0; j < size<1>(scores); ++j) {
      int const further = int(get<1>(coords(i, j))) - int(get<1>(coords(i, 0)));  // a constant
      float const penalty = slope_log2 * fabsf(first + further);
      scores(i, j) = exp2f(scores(i, j) * scale_log2 - (base2[j / 2 * 8 + j % 2] + penalty));
    }
  }
}

// Either of both. `distance` computes what the second one asks for.
template <class C, class Scores, class Coords, class Distance>
CUTE_DEVICE void exponentiate(Scores& scores, Coords const& coords, float const* base2, BackwardParams const& p,
                              float const& slope, Distance const& distance) {
  if (C::BAND && p.slopes)
    exponentiate_alibi(scores, coords, base2, p.scale_log2, slope, distance());
  else
    exponentiate(scores, base2, p.scale_log2);
}

// dP becomes dS.
template <class Scores, class Weights>
CUTE_DEVICE void differentiate(Scores& dp, Weights const& weights, float const* delta) {
#pragma unroll
  for (int j = 0; j < size<1>(dp) / 2; ++j) {
    float2 const d = *reinterpret_cast<float2 const*>(delta + 8 * j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dp(i, 2 * j) = weights(i, 2 * j) * (dp(i, 2 * j) - d.x);
      dp(i, 2 * j + 1) = weights(i, 2 * j + 1) * (dp(i, 2 * j + 1) - d.y);
    }
  }
}

// What `cap` adds to a derivative: dS times 1 - tanh^2, with the tanh found again from the weight. `base2` is the
// thread's first row's.
template <class Scores, class Weights>
CUTE_DEVICE void uncap(Scores& ds, Weights const& weights, float const* base2, BackwardParams const& p) {
  float const inverse = 1.f / (p.softcap * float(M_LOG2E));
#pragma unroll
  for (int j = 0; j < size<1>(ds); ++j) {
    float const base = base2[j / 2 * 8 + j % 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const tanh = (log2f(weights(i, j)) + base) * inverse;
      ds(i, j) = weights(i, j) > 0.f ? ds(i, j) * (1.f - tanh * tanh) : 0.f;
    }
  }
}

}  // namespace sdpa_cuda
