// From scores to weights, and from dP to dS, in the registers of a consumer of the backward, and dS to shared memory.
#pragma once
#include "../dropout.cuh"
#include "parts.cuh"

namespace sdpa_cuda {

// With C::WIDE the accumulators of scores and dP begin with -lse / scale and -delta, and nothing is subtracted later
// (but for BEGINS_S and BEGINS_DP).
// Functions get these numbers as a pointer to the number of the thread's first row. A thread has two rows of every
// eight.

// An accumulator, [2 keys, rows], begins with the numbers of its rows.
template <class Acc>
CUTE_DEVICE void begin_with(Acc& acc, float const* numbers) {
#pragma unroll
  for (int j = 0; j < size<1>(acc) / 2; ++j) {
    float2 const x = *reinterpret_cast<float2 const*>(numbers + 8 * j);
#pragma unroll
    for (int i = 0; i < 2; ++i) acc(i, 2 * j) = x.x, acc(i, 2 * j + 1) = x.y;
  }
}

// What is yet to be subtracted of a thread's rows 2 j and 2 j + 1.
template <bool BEGINS>
CUTE_DEVICE float2 remaining(float const* numbers, int j) {
  return BEGINS ? make_float2(0.f, 0.f) : *reinterpret_cast<float2 const*>(numbers + 8 * j);
}

// Caps scores. Those that began with a number are less that number while they are capped.
template <class C, class Scores>
CUTE_DEVICE void cap(Scores& scores, float const* base2, BackwardParams const& p) {
  auto const add = [&](float sign) {
#pragma unroll
    for (int j = 0; j < size<1>(scores); ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) scores(i, j) += sign * base2[j / 2 * 8 + j % 2];
    }
  };
  if (C::WIDE) add(-1.f);
  cap(scores, p);
  if (C::WIDE) add(1.f);
}

// With ALiBi (Press et al., arXiv 2108.12409), scores are less the head's slope times the distance of row and key.
// `coords` are the (key, row) of each score, and `between` is the distance of the row 0 and the key 0 among these.
template <class Scores, class Coords>
CUTE_DEVICE void add_alibi(Scores& scores, Coords const& coords, float slope, int between) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const first = between + int(get<1>(coords(i, 0))) - int(get<0>(coords(i, 0)));
#pragma unroll
    for (int j = 0; j < size<1>(scores); ++j) {
      int const further = int(get<1>(coords(i, j))) - int(get<1>(coords(i, 0)));  // a constant
      scores(i, j) -= slope * fabsf(first + further);
    }
  }
}

// What few calls ask for: a softcap or ALiBi, of scores that the scale does not yet multiply.
template <class C, class Scores, class Coords>
CUTE_DEVICE void adjust(Scores& scores, Coords const& coords, float const* base2, BackwardParams const& p,
                        float const& slope, int between) {
  if (p.slopes)
    add_alibi(scores, coords, slope * float(M_LOG2E) / p.scale_log2, between);
  else
    cap<C>(scores, base2, p);
}

// Scores become weights.
template <class C, class Scores>
CUTE_DEVICE void exponentiate(Scores& scores, float const* base2, BackwardParams const& p) {
#pragma unroll
  for (int j = 0; j < size<1>(scores) / 2; ++j) {
    float2 const base = remaining<C::BEGINS_S>(base2, j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scores(i, 2 * j) = exp2f(scores(i, 2 * j) * p.scale_log2 - base.x);
      scores(i, 2 * j + 1) = exp2f(scores(i, 2 * j + 1) * p.scale_log2 - base.y);
    }
  }
}

// The same with a bias: exp(score * scale + bias - lse). The block of the bias lies as dS will (store_transposed), from
// `first` on. Its sum with the score is first, because it may be as large as lse.
template <class C, class Scores>
CUTE_DEVICE void exponentiate_biased(Scores& scores, uint32_t first, float const* lse, float scale) {
  constexpr int kBytes = 16 * kRows * 2, kGroups = 2;  // of 8 rows
#pragma unroll
  for (int i = 0; i < size<1>(scores) / (2 * kGroups); ++i) {
    uint32_t words[2 * kGroups];  // of each group two keys, of each of these two rows
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(first + kBytes * i)
                 : "memory");
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      int const j = kGroups * i + group;
      float2 const row = *reinterpret_cast<float2 const*>(lse + 8 * j);
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        auto const bias = reinterpret_cast<cutlass::Array<typename C::E, 2> const&>(words[2 * group + key]);
        auto const weight = [&](float& score, float add, float less) {
          score = exp2f((score * scale + add - less) * float(M_LOG2E));
        };
        weight(scores(key, 2 * j), float(bias[0]), row.x);
        weight(scores(key, 2 * j + 1), float(bias[1]), row.y);
      }
    }
  }
}

// What dropout drops of a step's block of rows and of the 64 keys from key0 on.
template <class C, class Step>
CUTE_DEVICE Dropped find_dropped(BackwardParams const& p, Step const& step, int key0, int thread) {
  if constexpr (C::DROPOUT)
    return find_dropped<C::BLOCK_M>(Philox(p), p, step.stream, step.m * C::BLOCK_M, key0, thread);
  else
    return {};
}

// Sets numbers of a thread that are dropped to 0, [2 keys, rows].
template <class C, class Numbers>
CUTE_DEVICE void drop(Numbers& numbers, Dropped const& dropped) {
  if constexpr (!C::DROPOUT) return;
#pragma unroll
  for (int j = 0; j < size<1>(numbers); ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (dropped(i, j)) numbers(i, j) = 0.f;
    }
  }
}

// dP becomes dS.
template <class C, class Scores, class Weights>
CUTE_DEVICE void differentiate(Scores& dp, Weights const& weights, float const* delta, Dropped const& dropped = {}) {
  drop<C>(dp, dropped);
#pragma unroll
  for (int j = 0; j < size<1>(dp) / 2; ++j) {
    float2 const d = remaining<C::BEGINS_DP>(delta, j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dp(i, 2 * j) = weights(i, 2 * j) * (dp(i, 2 * j) - d.x);
      dp(i, 2 * j + 1) = weights(i, 2 * j + 1) * (dp(i, 2 * j + 1) - d.y);
    }
  }
}

// What `cap` adds to a derivative: dS times 1 - tanh^2, with the tanh found again from the weight.
template <class C, class Scores, class Weights>
CUTE_DEVICE void uncap(Scores& ds, Weights const& weights, float const* base2, BackwardParams const& p) {
  float const inverse = 1.f / (p.softcap * float(M_LOG2E)), sign = C::WIDE ? -p.scale_log2 : 1.f;
#pragma unroll
  for (int j = 0; j < size<1>(ds); ++j) {
    float const base = sign * base2[j / 2 * 8 + j % 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const tanh = (log2f(weights(i, j)) + base) * inverse;
      ds(i, j) = weights(i, j) > 0.f ? ds(i, j) * (1.f - tanh * tanh) : 0.f;
    }
  }
}

// Where a thread's first 16 bytes of an accumulator of `mma` are written, transposed, to `target`.
template <class Mma, class Target>
CUTE_DEVICE uint32_t first_of_transposed(Mma const& mma, Target const& target, int thread) {
  using Atom = Copy_Atom<SM90_U16x8_STSM_T, typename Target::value_type>;
  return cast_smem_ptr_to_uint(&make_tiled_copy_C(Atom{}, mma).get_slice(thread).partition_D(target)(_0{}));
}

// Writes dS [64 keys, rows], in the registers of a WGMMA's operand, to shared memory as [rows, 64 keys] of 128 bytes a
// row. Each instruction writes 16 rows; `first` is where this thread writes of the first ones. 16 rows further the
// swizzle is the same.
template <class DS>
CUTE_DEVICE void store_transposed(DS const& ds, uint32_t first) {
  constexpr int kBytes = 16 * kRows * 2;
  auto const* const words = reinterpret_cast<uint32_t const*>(ds.data());
#pragma unroll
  for (int i = 0; i < size(ds) / 8; ++i)
    asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(first + kBytes * i),
                 "r"(words[4 * i]), "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                 : "memory");
}

}  // namespace sdpa_cuda
