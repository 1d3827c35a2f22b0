// The primitives in AVX-512 with products of bfloat16. An instruction multiplies pairs, at twice the rate of float32.
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics start from an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "avx512.h"

inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void narrow_bf16(__m512 x, uint16_t* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x)); }

// A vector of pairs. The register tile in microkernels.h finds widen and add_product by their arguments.
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

// Pairs of a query in a dot product. `count` values are left.
inline __m512i query_part(const Pair* a, int64_t count) {
  return count >= 32 ? _mm512_loadu_si512(a) : _mm512_maskz_loadu_epi32((1u << (count + 1) / 2) - 1, a);
}

#include "microkernels.h"

const BFloat16* bf16_row(Source src, int64_t row) {
  return static_cast<const BFloat16*>(src.data) + row * src.row_stride;
}

// Up to 32 values of a row, from `column` on, as 16 pairs. Values beyond the width are zero.
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

void pack_left(Source src, int64_t rows, int64_t width, Pair* dst, int64_t ld) {
  constexpr int64_t kValues = 32;
  assert(width <= ld && ld % kLanes<float> == 0);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t c = 0; c < ld; c += kValues) {
      const __mmask16 inside = ld - c < kValues ? 0x00ff : 0xffff;  // ld may be an odd multiple of 16
      _mm512_mask_storeu_epi32(dst + (row * ld + c) / 2, inside, pairs_of(src, row, c, width));
    }
}

// Packs keys as columns: a transpose of pairs, which are as wide as floats.
void pack_pair_columns(Source src, int64_t rows, int64_t width, Pair* dst, int64_t ld) {
  constexpr int64_t kSquare = 16, kValues = 2 * kSquare;
  assert(rows <= ld && ld % kSquare == 0);
  for (int64_t row = 0; row < rows; row += kSquare) {
    const BFloat16* first = bf16_row(src, row);
    for (int64_t c = 0; c < width; c += kValues) {
      Pair* to = dst + c / 2 * ld + row;
      if (src.column_stride == 1 && rows - row >= kSquare && width - c >= kValues)
        transpose_square<__m512, kSquare>(
            [=](int i) {
              prefetch(first + (kPrefetchRows + i) * src.row_stride + c);
              return _mm512_loadu_ps(first + i * src.row_stride + c);
            },
            [=](int i, __m512 column) { _mm512_storeu_ps(to + i * ld, column); });
      else
        transpose_square<__m512, kSquare>(
            [=](int i) {
              return row + i < rows ? _mm512_castsi512_ps(pairs_of(src, row + i, c, width)) : _mm512_setzero_ps();
            },
            [=](int i, __m512 column) {
              if (c + 2 * i < width) _mm512_storeu_ps(to + i * ld, column);
            });
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

void pack_steps(Source src, int64_t rows, int64_t width, Pair* dst, int64_t ld) {
  assert(width <= ld && ld % kLanes<float> == 0);
  for (int64_t row = 0; row < rows; row += 2) {
    if (src.column_stride == 1) prefetch_rows(bf16_row(src, row + kPrefetchRows), 2, src.row_stride, width);
    for (int64_t c = 0; c < ld; c += kLanes<float>)
      _mm512_storeu_si512(dst + row / 2 * ld + c,
                          pair_up(values_of(src, row, rows, c, width), values_of(src, row + 1, rows, c, width)));
  }
}

const Pair* as_left_pairs(int64_t rows, int64_t columns, float* s, Pair* buffer, int64_t ld) {
  assert(columns <= ld && ld % kLanes<float> == 0);
  for (int64_t r = 0; r < rows; ++r) {
    if (columns % 2 != 0) s[r * ld + columns] = 0.0f;
    for (int64_t c = 0; c < columns; c += kLanes<float>)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(buffer + r * ld + c / 2), to_bf16(load(s + r * ld + c)));
  }
  return buffer;
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
                               float* alpha, Pair* buffer) {
  softmax<float, ExpShort>(rows, columns, s, ld, row_max, row_sum, alpha,
                           [=](int64_t r, int64_t c, const auto& p) { store_pairs(p, buffer + r * ld + c / 2); });
  return buffer;
}

// Rows 2 i and 2 i + 1 of s become pairs in place, where row 2 i was.
const Pair* as_left_transposed_pairs(int64_t rows, int64_t columns, float* s, Pair*, int64_t ld) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t c = 0; c < columns; c += kLanes<float>) {
      float* first = s + r * ld + c;
      const __m256i second = r + 1 < rows ? to_bf16(load(first + ld)) : _mm256_setzero_si256();
      _mm512_storeu_si512(first, pair_up(to_bf16(load(first)), second));
    }
  return reinterpret_cast<const Pair*>(s);
}

constexpr int64_t kLineValues = kLine<BFloat16>;

// Two rows of a cache line of values as pairs, in the order that unpacking gives: of each eight columns, `fours` has
// the first four and `others` the second four.
struct ValuePairs {
  __m512i fours, others;
};
inline ValuePairs interleave_rows(__m512i first, __m512i second) {
  return {_mm512_unpacklo_epi16(first, second), _mm512_unpackhi_epi16(first, second)};
}

// The first or the second vector of such sums, in the order of memory.
template <int kHalf>
inline __m512 in_order(__m512 fours, __m512 others) {
  constexpr int kEither = kHalf == 0 ? 0x44 : 0xee, kByTurns = 0xd8;
  const __m512 both = _mm512_shuffle_f32x4(fours, others, kEither);
  return _mm512_shuffle_f32x4(both, both, kByTurns);
}

// A register tile of c = alpha * c + a b with rows of values in memory, kLines cache lines wide. The last line may be
// cut by `width`, which is a multiple of 16.
template <int kRows, int kLines>
void value_tile(int64_t depth, const Pair* a, int64_t lda, const BFloat16* b, int64_t ldb, int64_t width, float* c,
                int64_t ldc, const float* alpha, RowPrefetcher<BFloat16>& ahead) {
  __m512 acc[kRows][2 * kLines] = {};
  const bool whole = width >= kLines * kLineValues;
  const __mmask32 last = whole ? 0xffffffff : 0xffff;
  for (int64_t k = 0; k < depth; k += 2, b += 2 * ldb) {
    ahead.advance(2);
    const bool both = k + 1 < depth;
    ValuePairs pairs[kLines];
#pragma GCC unroll 4
    for (int l = 0; l < kLines; ++l) {
      const __mmask32 inside = l + 1 < kLines ? 0xffffffff : last;
      const BFloat16* at = b + l * kLineValues;
      pairs[l] =
          interleave_rows(_mm512_maskz_loadu_epi16(inside, at), _mm512_maskz_loadu_epi16(both ? inside : 0, at + ldb));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Pair x = a[r * lda + k / 2];
#pragma GCC unroll 4
      for (int l = 0; l < kLines; ++l) {
        add_product<float>(acc[r][2 * l], x, pairs[l].fours);
        add_product<float>(acc[r][2 * l + 1], x, pairs[l].others);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int l = 0; l < kLines; ++l) {
      const auto add = [=](float* at, __m512 sum) { store(at, (alpha ? load(at) * alpha[r] : load(at)) + sum); };
      float* at = c + r * ldc + l * kLineValues;
      add(at, in_order<0>(acc[r][2 * l], acc[r][2 * l + 1]));
      if (l + 1 < kLines || whole) add(at + kLanes<float>, in_order<1>(acc[r][2 * l], acc[r][2 * l + 1]));
    }
}

// A few rows of the product, in panels of kLines cache lines.
template <int kRows, int kLines>
void value_rows(int64_t depth, const Pair* a, int64_t lda, const BFloat16* b, int64_t ldb, int64_t width, float* c,
                int64_t ldc, const float* alpha, RowPrefetcher<BFloat16>& ahead) {
  int64_t v = 0;
  for (; width - v > (kLines - 1) * kLineValues; v += kLines * kLineValues)
    value_tile<kRows, kLines>(depth, a, lda, b + v, ldb, width - v, c + v, ldc, alpha, ahead);
  if constexpr (kLines > 1)
    if (v < width) value_rows<kRows, kLines / 2>(depth, a, lda, b + v, ldb, width - v, c + v, ldc, alpha, ahead);
}

// The number of panels that cover a width. They have up to `most` cache lines, 2 or 4.
inline int64_t panels(int64_t width, int64_t most) {
  const int64_t lines = (width + kLineValues - 1) / kLineValues;
  return lines / most + (lines % most + 1) / 2;
}

// c = alpha * c + a b with rows of values in memory.
void accumulate_values(int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t lda, Source values, float* c,
                       int64_t ldc, const float* alpha) {
  assert(width % kLanes<float> == 0 && values.column_stride == 1);
  if (width == 0) return;
  // A block of values stays in the first cache where several passes read it.
  constexpr int64_t kNearValues = 8192, kFewest = 16, kMost = 128;
  const int64_t fours = rows / 4, others = rows % 4 / 2 + rows % 2, ldb = values.row_stride;
  const int64_t passes = fours * panels(width, 2) + others * panels(width, 4);
  const int64_t keys = passes == 1 ? kMost : kNearValues / width < kFewest ? kFewest : kNearValues / width / 2 * 2;
  for (int64_t k = 0; k < depth; k += keys, a += keys / 2, alpha = nullptr) {
    const BFloat16* b = bf16_row(values, k);
    RowPrefetcher<BFloat16> ahead = {b + keys * ldb, ldb, width, passes};
    const auto add = [&](auto product, int64_t r) {
      product(depth - k < keys ? depth - k : keys, a + r * lda, lda, b, ldb, width, c + r * ldc, ldc,
              alpha ? alpha + r : nullptr, ahead);
    };
    for (int64_t r = 0; r < fours * 4; r += 4) add(value_rows<4, 2>, r);
    if (rows % 4 >= 2) add(value_rows<2, 4>, fours * 4);
    if (rows % 2 == 1) add(value_rows<1, 4>, rows - 1);
  }
}

void accumulate_pairs(int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t row_stride,
                      int64_t depth_stride, Source b, float* c, int64_t ldc, const float* alpha) {
  assert(width % kLanes<float> == 0 && b.column_stride == 1);
  if (b.dtype == Dtype::kBFloat16) return accumulate_values(rows, width, depth, a, row_stride, b, c, ldc, alpha);
  multiply<float, Pair, Pair, true>(rows, width / kLanes<float>, (depth + 1) / 2, a, row_stride, depth_stride,
                                    static_cast<const Pair*>(b.data), b.row_stride, 1.0f, c, ldc, alpha);
}

constexpr Primitives<float, Pair> kPairs = {kScorePrimitives<float, ExpShort>,
                                            kLanes<float>,
                                            pack_left,
                                            pack_pair_columns,
                                            pack_steps,
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
