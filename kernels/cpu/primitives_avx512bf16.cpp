// The primitives in AVX-512 with products of bfloat16: a multiplication takes pairs, at twice the rate of float32.
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics start from an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "avx512.h"

inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void narrow_bf16(__m512 x, uint16_t* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }

// A vector of pairs; add_product and widen are found by the tile that microkernels.h defines.
inline __m512i widen(const Pair* p) { return _mm512_loadu_si512(p); }

template <typename T>
inline void add_product(__m512& sum, Pair a, __m512i b) {
  int both;
  __builtin_memcpy(&both, &a, sizeof(both));
  sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), (__m512bh)b);
}

template <typename T>
inline void add_product(__m512& sum, __m512i a, __m512i b) {
  sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Of a dot product: pairs of a query, of which `count` values are left.
inline __m512i query_part(const Pair* a, int64_t count) {
  return count >= 32 ? _mm512_loadu_si512(a) : _mm512_maskz_loadu_epi32((1u << (count + 1) / 2) - 1, a);
}

#include "microkernels.h"

const BFloat16* bf16_row(Source src, int64_t row) {
  return static_cast<const BFloat16*>(src.data) + row * src.row_stride;
}

// Up to 32 values of a row, from `column` on, as 16 pairs; the rest zero.
inline __m512i pairs_of(Source src, int64_t row, int64_t column, int64_t width) {
  constexpr int64_t kValues = 32;
  const BFloat16* p = bf16_row(src, row) + column * src.column_stride;
  if (src.column_stride == 1 && column + kValues <= width) return _mm512_loadu_si512(p);
  uint16_t part[kValues] = {};
  for (int64_t i = 0; i < kValues && column + i < width; ++i) part[i] = p[i * src.column_stride].bits;
  return _mm512_loadu_si512(part);
}

inline __m512i key_part(const BFloat16* key, int64_t count, Pair) {
  return count >= 32 ? _mm512_loadu_si512(key) : _mm512_maskz_loadu_epi16((1u << count) - 1, key);
}

void score_pairs_direct(int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t lda, Source keys,
                        float factor, float* c, int64_t ldc) {
  dot_products(rows, columns, depth, a, lda, bf16_row(keys, 0), keys.row_stride, factor, c, ldc);
}

void load_left(Source src, int64_t rows, int64_t width, Pair* dst, int64_t ld) {
  constexpr int64_t kValues = 32;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < ld; c += kValues) {
      const __mmask16 inside = ld - c < kValues ? 0x00ff : 0xffff;  // ld is a multiple of 16 values
      _mm512_mask_storeu_epi32(dst + (row * ld + c) / 2, inside, pairs_of(src, row, c, width));
    }
}

// Keys side by side: a transpose of pairs, which are as wide as floats.
void load_pair_columns(Source src, int64_t rows, int64_t width, Pair* dst, int64_t ld) {
  constexpr int64_t kSquare = 16;
  for (int64_t row = 0; row < rows; row += kSquare) {
    if (src.column_stride == 1) fetch_rows(bf16_row(src, row + kPackedAhead), kSquare, src.row_stride, width);
    for (int64_t c = 0; c < width; c += 2 * kSquare) {
      __m512 block[kSquare];
      for (int64_t i = 0; i < kSquare; ++i)
        block[i] = row + i < rows ? _mm512_castsi512_ps(pairs_of(src, row + i, c, width)) : _mm512_setzero_ps();
      transpose(block);
      for (int64_t i = 0; i < kSquare && c + 2 * i < width; ++i)
        _mm512_storeu_ps(dst + (c / 2 + i) * ld + row, block[i]);
    }
  }
}

inline __m512i pair_up(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

inline __m256i values_of(Source src, int64_t row, int64_t rows, int64_t column, int64_t width) {
  constexpr int64_t kValues = 16;
  if (row >= rows) return _mm256_setzero_si256();
  const BFloat16* p = bf16_row(src, row) + column * src.column_stride;
  if (src.column_stride == 1 && column + kValues <= width)
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  uint16_t part[kValues] = {};
  for (int64_t i = 0; i < kValues && column + i < width; ++i) part[i] = p[i * src.column_stride].bits;
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(part));
}

void load_steps(Source src, int64_t rows, int64_t width, Pair* dst, int64_t ld) {
  for (int64_t row = 0; row < rows; row += 2) {
    if (src.column_stride == 1) fetch_rows(bf16_row(src, row + kPackedAhead), 2, src.row_stride, width);
    for (int64_t c = 0; c < ld; c += kLanes<float>)
      _mm512_storeu_si512(dst + row / 2 * ld + c,
                          pair_up(values_of(src, row, rows, c, width), values_of(src, row + 1, rows, c, width)));
  }
}

const Pair* as_left_pairs(int64_t rows, int64_t columns, float* s, Pair* room, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    if (columns % 2 != 0) s[r * ld + columns] = 0.0f;
    for (int64_t c = 0; c < columns; c += kLanes<float>)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(room + r * ld + c / 2), to_bf16(load(s + r * ld + c)));
  }
  return room;
}

inline void store_pairs(const __m512 (&p)[1], Pair* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bf16(p[0]));
}
inline void store_pairs(const __m512 (&p)[4], Pair* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
  _mm512_storeu_si512(to + kLanes<float>, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
}

// Weights beyond the columns are zero.
const Pair* softmax_left_pairs(int64_t rows, int64_t columns, float* s, int64_t ld, float* row_max, float* row_sum,
                               float* keep, Pair* room) {
  softmax<float, ExpShort>(rows, columns, s, ld, row_max, row_sum, keep,
                           [=](int64_t r, int64_t c, const auto& p) { store_pairs(p, room + r * ld + c / 2); });
  return room;
}

// In place: rows 2 i and 2 i + 1 become pairs where row 2 i was.
const Pair* as_left_transposed_pairs(int64_t rows, int64_t columns, float* s, Pair*, int64_t ld) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t c = 0; c < columns; c += kLanes<float>) {
      float* first = s + r * ld + c;
      const __m256i second = r + 1 < rows ? to_bf16(load(first + ld)) : _mm256_setzero_si256();
      _mm512_storeu_si512(first, pair_up(to_bf16(load(first)), second));
    }
  return reinterpret_cast<const Pair*>(s);
}

void accumulate_pairs(int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t row_stride,
                      int64_t depth_stride, Source b, float* c, int64_t ldc, const float* keep) {
  multiply<float, Pair, Pair, true>(rows, width / kLanes<float>, (depth + 1) / 2, a, row_stride, depth_stride,
                                    static_cast<const Pair*>(b.data), b.row_stride, 1.0f, c, ldc, keep);
}

constexpr Primitives<float, Pair> kPairs = {kScorePrimitives<float, ExpShort>,
                                            kLanes<float>,
                                            load_rows<float>,
                                            load_left,
                                            load_pair_columns,
                                            load_steps,
                                            store_rows<float>,
                                            as_left_pairs,
                                            softmax_left_pairs,
                                            as_left_transposed_pairs,
                                            scores<float, Pair>,
                                            score_pairs_direct,
                                            accumulate_pairs};

}  // namespace

namespace sdpa_cpu {
const InstructionSet kAvx512Bf16 = {"avx512bf16", &kPrimitives<float>, &kPrimitives<double>, &kPairs};
}
