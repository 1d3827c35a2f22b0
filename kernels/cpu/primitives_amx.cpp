// Products of bfloat16 by AMX tiles, and those of float16, each of whose numbers is the sum of two bfloat16 numbers:
// the difference between the instruction sets "amx" and "avx512bf16".
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics start from an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <assert.h>
#include <immintrin.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "avx512.h"

// Rounds to nearest even.
inline void narrow_bf16(__m512 x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}

#include "microkernels.h"

constexpr int64_t kTile = 16;          // rows of a tile, and its columns of floats or pairs
constexpr int64_t kSide = 2 * kTile;   // of a square of sums: four tiles, beside two tiles of each operand
constexpr int64_t kChunk = 4 * kTile;  // pairs along the depth that are copied at a time: 8 KiB for 32 rows
constexpr int64_t kFewestRows = 4;     // fewer left over rows go to vectors: a tile takes as long for one row as for 16

// The memory operand of LDTILECFG.
struct alignas(64) Configuration {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Configuration) == Setup::kBytes, "the size of the instruction's operand");

constexpr Configuration kAllTilesFull = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile}};

// Another library that finds its configuration gone would fault, so it is saved and restored. Most threads have none.
void begin(void* saved) {
  _tile_storeconfig(saved);
  _tile_loadconfig(&kAllTilesFull);
}

void end(const void* saved) {
  if (static_cast<const Configuration*>(saved)->palette == 0)
    _tile_release();
  else
    _tile_loadconfig(saved);
}

// The intrinsics do not tell the compiler that they read memory.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

// Tiles 0 to 3 += a b. a [kRows tiles, steps tiles], b [steps tiles, kColumns tiles].
template <int kRows, int kColumns>
inline void add_tiles(int64_t steps, const Pair* a, int64_t lda, const Pair* b, int64_t ldb) {
  const int64_t a_bytes = lda * static_cast<int64_t>(sizeof(Pair)), b_bytes = ldb * static_cast<int64_t>(sizeof(Pair));
  settle_memory();
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) {
      _tile_loadd(7, b + kTile, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows == 2) {
      _tile_loadd(5, a + kTile * lda, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
    a += kTile;
    b += kTile * ldb;
  }
  settle_memory();
}

// Up to 32 rows of a left operand. Tiles are loaded from where they are. Rows that do not fill a tile, the end of the
// depth, and transposed operands are copied first, filled up with zeros.
struct Left {
  const Pair* data;
  int64_t rows, row_stride, depth_stride;

  bool in_place() const { return depth_stride == 1 && rows % kTile == 0; }
  int64_t tiles() const { return (rows + kTile - 1) / kTile; }

  // Copies `pairs` of the depth, from `first` on.                                                 to [kSide, kChunk]
  void copy(int64_t first, int64_t pairs, Pair* to) const {
    for (int64_t row = 0; row < tiles() * kTile; row += kTile)
      for (int64_t k = 0; k < pairs; k += kTile) {
        const Pair* from = data + row * row_stride + (first + k) * depth_stride;
        __m512 square[kTile];
        if (depth_stride == 1)
          load(from, row_stride, rows - row, pairs - k, square);
        else
          load(from, depth_stride, pairs - k, rows - row, square);
        if (depth_stride != 1) transpose(square);
        for (int64_t i = 0; i < kTile; ++i) _mm512_store_ps(to + (row + i) * kChunk + k, square[i]);
      }
  }

  // Loads 16 lines of 16 pairs. Only `lines` and `pairs` of them exist; the others are zero.
  static void load(const Pair* from, int64_t stride, int64_t lines, int64_t pairs, __m512* square) {
    const __mmask16 there = static_cast<__mmask16>(pairs < kTile ? (1 << pairs) - 1 : 0xffff);
    for (int64_t i = 0; i < kTile; ++i)
      square[i] = i < lines ? _mm512_maskz_loadu_ps(there, from + i * stride) : _mm512_setzero_ps();
  }
};

// Copies the end of the depth of a right operand, filled up with zeros.                             to [kTile, kSide]
inline void copy_right(const Pair* b, int64_t ldb, int64_t pairs, int64_t vectors, Pair* to) {
  for (int64_t k = 0; k < kTile; ++k)
    for (int64_t v = 0; v < vectors; ++v)
      _mm512_store_ps(to + k * kSide + v * kTile,
                      k < pairs ? _mm512_loadu_ps(b + k * ldb + v * kTile) : _mm512_setzero_ps());
}

struct Staging {
  alignas(64) Pair left[kSide * kChunk];
  alignas(64) Pair right[kTile * kSide];
  alignas(64) float sums[kSide * kSide];
};

template <int kRows, int kColumns>
inline void clear_square() {
  _tile_zero(0);
  if constexpr (kColumns == 2) _tile_zero(1);
  if constexpr (kRows == 2) _tile_zero(2);
  if constexpr (kRows == 2 && kColumns == 2) _tile_zero(3);
}

// sums [kSide, kSide] = the tiles of sums.
template <int kRows, int kColumns>
inline void store_square(float* sums) {
  constexpr int64_t kLine = kSide * sizeof(float);
  _tile_stored(0, sums, kLine);
  if constexpr (kColumns == 2) _tile_stored(1, sums + kTile, kLine);
  if constexpr (kRows == 2) _tile_stored(2, sums + kTile * kSide, kLine);
  if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, sums + kTile * kSide + kTile, kLine);
}

// staging.sums = a b for one square of sums. Where one chunk holds all that is copied of `a`, the copy for the first
// square of a row serves the others, too.
template <int kRows, int kColumns>
void sum_square(const Left& a, int64_t pairs, const Pair* b, int64_t ldb, bool first, Staging& staging) {
  clear_square<kRows, kColumns>();
  const int64_t in_place = a.in_place() ? pairs / kTile * kTile : 0;
  add_tiles<kRows, kColumns>(in_place / kTile, a.data, a.row_stride, b, ldb);
  for (int64_t k = in_place; k < pairs; k += kChunk) {
    const int64_t count = pairs - k < kChunk ? pairs - k : kChunk, whole = count / kTile * kTile;
    if (first || pairs - in_place > kChunk) a.copy(k, count, staging.left);
    add_tiles<kRows, kColumns>(whole / kTile, staging.left, kChunk, b + k * ldb, ldb);
    if (whole == count) continue;
    copy_right(b + (k + whole) * ldb, ldb, count - whole, kColumns, staging.right);
    add_tiles<kRows, kColumns>(1, staging.left + whole, kChunk, staging.right, kSide);
  }
  store_square<kRows, kColumns>(staging.sums);
}

// c = factor * sums, or with kAdd c = alpha * c + sums (alpha null: 1).
template <bool kAdd>
void finish(int64_t rows, int64_t vectors, const float* sums, float factor, float* c, int64_t ldc, const float* alpha) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t v = 0; v < vectors; ++v) {
      float* at = c + r * ldc + v * kTile;
      const __m512 sum = _mm512_load_ps(sums + r * kSide + v * kTile);
      if (kAdd)
        _mm512_storeu_ps(at, alpha ? _mm512_fmadd_ps(_mm512_loadu_ps(at), _mm512_set1_ps(alpha[r]), sum)
                                   : _mm512_add_ps(_mm512_loadu_ps(at), sum));
      else
        _mm512_storeu_ps(at, _mm512_mul_ps(sum, _mm512_set1_ps(factor)));
    }
}

// The product of up to 32 rows. `vectors` is the width of c.
template <bool kAdd>
void multiply_rows(const Left& a, int64_t vectors, int64_t pairs, const Pair* b, int64_t ldb, float factor, float* c,
                   int64_t ldc, const float* alpha) {
  using Square = void (*)(const Left&, int64_t, const Pair*, int64_t, bool, Staging&);
  static constexpr Square squares[2][2] = {{sum_square<1, 1>, sum_square<1, 2>}, {sum_square<2, 1>, sum_square<2, 2>}};
  Staging staging;
  for (int64_t v = 0; v < vectors; v += 2) {
    const int64_t side = vectors - v < 2 ? 1 : 2;
    squares[a.tiles() - 1][side - 1](a, pairs, b + v * kTile, ldb, v == 0, staging);
    finish<kAdd>(a.rows, side, staging.sums, factor, c + v * kTile, ldc, alpha);
  }
}

// How many of these rows go to tiles. The others go to vectors.
inline int64_t tiled(int64_t rows) { return rows % kSide < kFewestRows ? rows / kSide * kSide : rows; }

void scores(int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t lda, const Pair* b, int64_t ldb,
            float factor, float* c, int64_t ldc) {
  assert(rows > 0 && columns > 0);
  const int64_t vectors = (columns + kTile - 1) / kTile, pairs = (depth + 1) / 2, end = tiled(rows);
  assert(ldb >= vectors * kTile && (rows == 1 || (lda >= pairs && ldc >= vectors * kTile)));
  for (int64_t r = 0; r < end; r += kSide) {
    const Left left = {a + r * lda, end - r < kSide ? end - r : kSide, lda, 1};
    multiply_rows<false>(left, vectors, pairs, b, ldb, factor, c + r * ldc, ldc, nullptr);
  }
  if (end < rows)
    kAvx512Bf16.bf16->scores(rows - end, columns, depth, a + end * lda, lda, b, ldb, factor, c + end * ldc, ldc);
}

void accumulate(int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t row_stride, int64_t depth_stride,
                Source b, float* c, int64_t ldc, const float* alpha) {
  assert(rows > 0 && width % kTile == 0 && b.column_stride == 1);
  assert(row_stride == 1 || depth_stride == 1);
  const bool in_place = b.dtype == Dtype::kBFloat16;
  const int64_t vectors = width / kTile, pairs = (depth + 1) / 2, end = in_place ? 0 : tiled(rows);
  for (int64_t r = 0; r < end; r += kSide) {
    const Left left = {a + r * row_stride, end - r < kSide ? end - r : kSide, row_stride, depth_stride};
    multiply_rows<true>(left, vectors, pairs, static_cast<const Pair*>(b.data), b.row_stride, 1.0f, c + r * ldc, ldc,
                        alpha ? alpha + r : nullptr);
  }
  if (end < rows)
    kAvx512Bf16.bf16->accumulate(rows - end, width, depth, a + end * row_stride, row_stride, depth_stride, b,
                                 c + end * ldc, ldc, alpha ? alpha + end : nullptr);
}

// -- float16 as two bfloat16 numbers ----------------------------------------------------------------------------------

constexpr int64_t kSpan = 2 * kTile;  // values along the depth whose pairs fill a tile's row
constexpr int64_t kBothParts = 2;

inline __m512i all_words(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

// The two parts of a vector, in the upper halves of words: x rounded, halves away from zero, and what that leaves of x,
// rounded likewise. x is finite, and far from the largest number.
struct Halves {
  __m512i first, second;

  explicit Halves(__m512 x) {
    const auto rounded = [](__m512 y) { return _mm512_add_epi32(_mm512_castps_si512(y), all_words(0x8000)); };
    first = rounded(x);
    const __m512 rest = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_and_si512(first, all_words(0xffff0000))));
    second = rounded(rest);
  }
};

// The upper halves of two vectors of words, in order.
inline __m512i upper_halves(__m512i low, __m512i high) {
  alignas(64) static constexpr uint16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(kOdd), high);
}

// A span of consecutive values as 16 pairs of first parts and 16 of second ones.
struct SpanPairs {
  __m512i first, second;

  SpanPairs() : first(_mm512_setzero_si512()), second(first) {}
  SpanPairs(__m512 low, __m512 high) {
    const Halves a(low), b(high);
    first = upper_halves(a.first, b.first);
    second = upper_halves(a.second, b.second);
  }
  // Of a row, from `column` on. Values beyond the width are zero.
  template <typename S>
  SpanPairs(const S* row, int64_t stride, int64_t column, int64_t width)
      : SpanPairs(widen_part<float>(row + column * stride, stride, width - column),
                  widen_part<float>(row + (column + kTile) * stride, stride, width - column - kTile)) {}

  void store(Pair* to) const {
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + kTile, second);
  }
};

// Where the pairs of a row of operands begin, and those of the operand so many columns, or pairs of the depth, further.
inline Pair* pairs_of(Split* row, int64_t further = 0) { return &row->first + further * kBothParts; }
inline const Pair* pairs_of(const Split* row, int64_t further = 0) { return &row->first + further * kBothParts; }

void pack_left_split(Source src, int64_t rows, int64_t width, Split* dst, int64_t ld) {
  assert(width <= ld && ld % kSpan == 0);
  with_type(float(), src.dtype, [=](auto* type) {
    auto* row = static_cast<decltype(type)>(src.data);
    for (int64_t r = 0; r < rows; ++r, row += src.row_stride)
      for (int64_t c = 0; c < ld; c += kSpan)
        SpanPairs(row, src.column_stride, c, width).store(pairs_of(dst + r * ld / 2, c / 2));
  });
}

void pack_columns_split(Source src, int64_t rows, int64_t width, Split* dst, int64_t ld) {
  assert(rows <= ld && ld % kTile == 0);
  with_type(float(), src.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(src.data);
    for (int64_t row = 0; row < rows; row += kTile)
      for (int64_t c = 0; c < width; c += kSpan) {
        __m512 first[kTile], second[kTile];
        for (int64_t i = 0; i < kTile; ++i) {
          SpanPairs pairs;
          if (row + i < rows) pairs = {data + (row + i) * src.row_stride, src.column_stride, c, width};
          first[i] = _mm512_castsi512_ps(pairs.first);
          second[i] = _mm512_castsi512_ps(pairs.second);
        }
        transpose(first);
        transpose(second);
        for (int64_t i = 0; i < kTile; ++i) {
          Pair* to = pairs_of(dst + (c / 2 + i) * ld, row);
          _mm512_storeu_ps(to, first[i]);
          _mm512_storeu_ps(to + kTile, second[i]);
        }
      }
  });
}

// The upper halves of two rows' words as pairs.
inline __m512i pair_up(__m512i first, __m512i second) {
  constexpr int kEitherOfUpper = 0xf8;  // first | (second & mask)
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(first, 16), second, all_words(0xffff0000), kEitherOfUpper);
}

// Zeros follow the last row, as far as a span reaches that begins in the middle of another one.
void pack_steps_split(Source src, int64_t rows, int64_t width, Split* dst, int64_t ld) {
  assert(width <= ld && ld % kTile == 0);
  with_type(float(), src.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(src.data);
    const int64_t stride = src.column_stride, end = (rows + kTile + kSpan - 1) / kSpan * kSpan;
    const auto halves_of = [=](int64_t row, int64_t c) {
      if (row >= rows) return Halves(_mm512_setzero_ps());
      return Halves(widen_part<float>(data + row * src.row_stride + c * stride, stride, width - c));
    };
    for (int64_t row = 0; row < end; row += 2)
      for (int64_t c = 0; c < ld; c += kTile) {
        const Halves even = halves_of(row, c), odd = halves_of(row + 1, c);
        Pair* to = pairs_of(dst + row / 2 * ld, c);
        _mm512_storeu_si512(to, pair_up(even.first, odd.first));
        _mm512_storeu_si512(to + kTile, pair_up(even.second, odd.second));
      }
  });
}

// A vector of weights, from `column` on of a row of operands: half of a span.
inline void store_half(__m512 p, int64_t column, Split* row) {
  const SpanPairs pairs(p, _mm512_setzero_ps());
  Pair* to = pairs_of(row, column / kSpan * kTile) + column % kSpan / 2;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(pairs.first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kTile), _mm512_castsi512_si256(pairs.second));
}

// The second half of a row's last span, where weights end in its first one.
inline void clear_half(int64_t columns, Split* row) {
  const int64_t end = (columns + kTile - 1) / kTile * kTile;
  if (end % kSpan != 0) store_half(_mm512_setzero_ps(), end, row);
}

// The operands of a row of weights, where `ld` is that of scores.
inline int64_t row_of_weights(int64_t ld) { return (ld + kSpan - 1) / kSpan * kTile; }

const Split* as_left_split(int64_t rows, int64_t columns, float* s, Split* buffer, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    Split* row = buffer + r * row_of_weights(ld);
    for (int64_t c = columns; c % kTile != 0; ++c) s[r * ld + c] = 0.0f;
    for (int64_t c = 0; c < columns; c += kTile) store_half(load(s + r * ld + c), c, row);
    clear_half(columns, row);
  }
  return buffer;
}

const Split* softmax_left_split(int64_t rows, int64_t columns, float* s, int64_t ld, float* row_max, float* row_sum,
                                float* alpha, Split* buffer) {
  const int64_t pitch = row_of_weights(ld);
  softmax<float, ExpFloat>(rows, columns, s, ld, row_max, row_sum, alpha, [=](int64_t r, int64_t c, const auto& p) {
    if constexpr (sizeof(p) / sizeof(p[0]) == 4) {
      Pair* to = pairs_of(buffer + r * pitch, c / 2);
      SpanPairs(p[0], p[1]).store(to);
      SpanPairs(p[2], p[3]).store(to + kTile * kBothParts);
    } else {
      store_half(p[0], c, buffer + r * pitch);
    }
  });
  for (int64_t r = 0; r < rows; ++r) clear_half(columns, buffer + r * pitch);
  return buffer;
}

// Which parts are multiplied, one after the other; each step changes one operand. Scores take all four products, which
// are those of the float16 numbers. Sums take three: the fourth is below 2^-17 of the whole, as is what two parts leave
// of a weight.
constexpr int kSteps[2] = {4, 3};  // of scores, of sums
constexpr int kLeftPart[4] = {1, 0, 0, 1}, kRightPart[4] = {0, 0, 1, 1};

template <int kRows, int kColumns, int kCount, int kStep = 0>
inline __attribute__((always_inline)) void add_span(const Pair* a, int64_t a_bytes, const Pair* b, int64_t b_bytes) {
  if constexpr (kStep < kCount) {
    constexpr int kLeft = kLeftPart[kStep], kRight = kRightPart[kStep], kBefore = kStep > 0 ? kStep - 1 : 0;
    constexpr bool kNewLeft = kStep == 0 || kLeftPart[kBefore] != kLeft;
    constexpr bool kNewRight = kStep == 0 || kRightPart[kBefore] != kRight;
    if constexpr (kNewRight) _tile_loadd(6, b + kRight * kTile, b_bytes);
    if constexpr (kNewLeft) _tile_loadd(4, a + kLeft * kTile, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) {
      if constexpr (kNewRight) _tile_loadd(7, b + (kBothParts + kRight) * kTile, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows == 2) {
      if constexpr (kNewLeft)
        _tile_loadd(5, reinterpret_cast<const char*>(a + kLeft * kTile) + kTile * a_bytes, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
    add_span<kRows, kColumns, kCount, kStep + 1>(a, a_bytes, b, b_bytes);
  }
}

// sums = a b for one square. The rows of a that fill a tile beyond the last one may hold anything.
template <int kRows, int kColumns, int kCount>
void sum_spans(int64_t spans, const Split* a, int64_t lda, const Split* b, int64_t ldb, float* sums) {
  const int64_t a_bytes = lda * int64_t{sizeof(Split)}, b_bytes = ldb * int64_t{sizeof(Split)};
  clear_square<kRows, kColumns>();
  settle_memory();
  for (int64_t span = 0; span < spans; ++span)
    add_span<kRows, kColumns, kCount>(pairs_of(a, span * kTile), a_bytes, pairs_of(b + span * kTile * ldb), b_bytes);
  settle_memory();
  store_square<kRows, kColumns>(sums);
}

template <bool kAdd>
void multiply_split(int64_t rows, int64_t vectors, int64_t depth, const Split* a, int64_t lda, const Split* b,
                    int64_t ldb, float factor, float* c, int64_t ldc, const float* alpha) {
  using Square = void (*)(int64_t, const Split*, int64_t, const Split*, int64_t, float*);
  constexpr int kCount = kSteps[kAdd];
  static constexpr Square squares[2][2] = {{sum_spans<1, 1, kCount>, sum_spans<1, 2, kCount>},
                                           {sum_spans<2, 1, kCount>, sum_spans<2, 2, kCount>}};
  alignas(64) float sums[kSide * kSide];
  for (int64_t r = 0; r < rows; r += kSide) {
    const int64_t count = rows - r < kSide ? rows - r : kSide;
    for (int64_t v = 0; v < vectors; v += 2) {
      const int64_t side = vectors - v < 2 ? 1 : 2;
      squares[count > kTile][side - 1]((depth + kSpan - 1) / kSpan, a + r * lda, lda, b + v * kTile, ldb, sums);
      finish<kAdd>(count, side, sums, factor, c + r * ldc + v * kTile, ldc, alpha ? alpha + r : nullptr);
    }
  }
}

void scores_split(int64_t rows, int64_t columns, int64_t depth, const Split* a, int64_t lda, const Split* b,
                  int64_t ldb, float factor, float* c, int64_t ldc) {
  assert(rows > 0 && columns > 0);
  multiply_split<false>(rows, (columns + kTile - 1) / kTile, depth, a, lda, b, ldb, factor, c, ldc, nullptr);
}

void accumulate_split(int64_t rows, int64_t width, int64_t depth, const Split* a, int64_t row_stride, int64_t, Source b,
                      float* c, int64_t ldc, const float* alpha) {
  assert(rows > 0 && width % kTile == 0 && b.column_stride == 1);
  multiply_split<true>(rows, width / kTile, depth, a, row_stride, static_cast<const Split*>(b.data), b.row_stride, 1.0f,
                       c, ldc, alpha);
}

constexpr Setup kSetup = {begin, end};

// Products are so fast that packing a key and reading acc count. So many queries share a key, and many keys share a
// pass over acc, as far as the second cache allows. Blocks are multiples of 32, because a part of a square takes as
// long as the whole.
constexpr Blocking kBlocking = {kSide, 1024, kSide, 512};
// Two parts of a key take twice the room.
constexpr Blocking kSplitBlocking = {kSide, 1024, kSide, 256};

}  // namespace

namespace sdpa_cpu {

void use_tiles(Primitives<float, Pair>* table) {
  table->scores = scores;
  table->accumulate = accumulate;
  table->blocking = kBlocking;
  table->setup = &kSetup;
}

const Primitives<float, Split> kAmxSplit = {kScorePrimitives<float>,
                                            kSpan,
                                            pack_left_split,
                                            pack_columns_split,
                                            pack_steps_split,
                                            store_rows<float>,
                                            as_left_split,
                                            softmax_left_split,
                                            nullptr,
                                            scores_split,
                                            nullptr,
                                            accumulate_split,
                                            kSplitBlocking,
                                            &kSetup};

}  // namespace sdpa_cpu
