// The primitives, written once on vectors of the compiler and instantiated by each instruction set in its own unnamed
// namespace. The including file defines kVectorBytes, kPanel (vectors side by side in a tile) and the conversions
// widen_bf16, widen_f16, narrow_bf16, narrow_f16 and widen_bytes (to as many integers as floats fill a vector); it may
// overload larger, largest, total, totals, interleave and transpose.
#pragma once

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T loose __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vec = typename VectorOf<T>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// Rows of a tile: 6 x 4 accumulators, 4 operands and a broadcast fill 32 registers; 6 x 2 fill 16.
constexpr int kTileRows = 6;

template <typename P>
struct Pointee;
template <typename S>
struct Pointee<const S*> {
  typedef S type;
};

constexpr int kRowPanel = 8;  // vectors of a tile of one row

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename T>
inline Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::loose*>(p);
}
template <typename T>
inline void store(T* p, Vec<T> x) {
  *reinterpret_cast<typename VectorOf<T>::loose*>(p) = x;
}
template <typename T>
inline Vec<T> fill(T x) {
  return x - Vec<T>{};
}

// NaN in either gives b.
template <typename V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}
template <typename V>
inline auto largest(V x) {
  auto result = x[0] + 0;
  for (unsigned i = 1; i < sizeof(V) / sizeof(x[0]); ++i) result = result > x[i] ? result : x[i];
  return result;
}
template <typename V>
inline auto total(V x) {
  auto result = x[0] + 0;
  for (unsigned i = 1; i < sizeof(V) / sizeof(x[0]); ++i) result += x[i];
  return result;
}
// The first halves of both by turns, then the second halves.
template <typename V>
inline void interleave(V& even, V& odd) {
  constexpr int kSize = sizeof(V) / sizeof(even[0]), kHalf = kSize / 2;
  const V a = even, b = odd;
  for (int i = 0; i < kSize; ++i) {
    even[i] = i % 2 == 0 ? a[i / 2] : b[i / 2];
    odd[i] = i % 2 == 0 ? a[kHalf + i / 2] : b[kHalf + i / 2];
  }
}
template <typename V>
inline void transpose(V* rows) {
  constexpr int kSize = sizeof(V) / sizeof(rows[0][0]);
  for (int i = 0; i < kSize; ++i)
    for (int j = 0; j < i; ++j) {
      const auto swapped = rows[i][j] + 0;
      rows[i][j] = rows[j][i];
      rows[j][i] = swapped;
    }
}

// A vector of T from memory of another type.
inline Vec<float> widen(const float* p) { return load(p); }
inline Vec<double> widen(const double* p) { return load(p); }
inline Vec<float> widen(const BFloat16* p) { return widen_bf16(&p->bits); }
inline Vec<float> widen(const Float16* p) { return widen_f16(&p->bits); }
inline void narrow(Vec<float> x, float* p) { store(p, x); }
inline void narrow(Vec<double> x, double* p) { store(p, x); }
inline void narrow(Vec<float> x, BFloat16* p) { narrow_bf16(x, &p->bits); }
inline void narrow(Vec<float> x, Float16* p) { narrow_f16(x, &p->bits); }

inline auto widen_bytes(const uint8_t* p, double) {
  typedef int64_t Words __attribute__((vector_size(kVectorBytes)));
  Words words;
  for (int i = 0; i < kLanes<double>; ++i) words[i] = p[i];
  return words;
}

// `count` elements, the rest zero.
template <typename T, typename S>
inline Vec<T> widen_part(const S* p, int64_t stride, int64_t count) {
  if (stride == 1 && count >= kLanes<T>) return widen(p);
  S part[kLanes<T>] = {};
  for (int64_t i = 0; i < count && i < kLanes<T>; ++i) part[i] = p[i * stride];
  return widen(part);
}

// Call f with a null pointer of the type that `dtype` names.
template <typename F>
inline void with_type(float, Dtype dtype, F f) {
  if (dtype == Dtype::kFloat32) f(static_cast<const float*>(nullptr));
  if (dtype == Dtype::kBFloat16) f(static_cast<const BFloat16*>(nullptr));
  if (dtype == Dtype::kFloat16) f(static_cast<const Float16*>(nullptr));
}
template <typename F>
inline void with_type(double, Dtype, F f) {
  f(static_cast<const double*>(nullptr));
}

template <typename T>
void load_rows(Source src, int64_t rows, int64_t width, T* dst, int64_t ld) {
  with_type(T(), src.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(src.data);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < ld; c += kLanes<T>)
        store(dst + row * ld + c,
              widen_part<T>(data + row * src.row_stride + c * src.column_stride, src.column_stride, width - c));
  });
}

// Of __builtin_prefetch; and elements of a line of the caches.
constexpr int kForReading = 0, kSecondCache = 2;
template <typename S>
constexpr int64_t kLine = 64 / sizeof(S);

// Asks the second cache for what is read a little later, of this block or the next: a processor does not foresee
// reading across rows.
inline void fetch(const void* line) { __builtin_prefetch(line, kForReading, kSecondCache); }
template <typename S>
inline void fetch_rows(const S* rows, int64_t count, int64_t row_stride, int64_t width) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t c = 0; c < width; c += kLine<S>) fetch(rows + row * row_stride + c);
}
constexpr int64_t kPackedAhead = 32;  // rows, of those that are packed

// The rows of values after those at hand, of which each of several passes over these asks for its share, row by row:
// memory is to be busy all the time.
template <typename S>
struct RowsAhead {
  const S* row;
  int64_t stride, width, passes;
  int64_t due = 0;

  void ask_for(int64_t rows) {
    for (due += rows; due >= passes; due -= passes, row += stride) fetch_rows(row, 1, stride, width);
  }
};

// A square whose rows `row_of` gives and whose columns `put_column` takes. Where both are whole vectors nothing
// branches: a processor that waits for one row asks memory for those of several squares. Rows ahead are asked for one
// by one between them, since many at once would be all that its few places for misses hold.
template <typename V, int kSize, typename RowOf, typename PutColumn>
inline void transpose_square(RowOf row_of, PutColumn put_column) {
  V block[kSize];
#pragma GCC unroll 16
  for (int i = 0; i < kSize; ++i) block[i] = row_of(i);
  transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kSize; ++i) put_column(i, block[i]);
}

template <typename T>
void load_columns(Source src, int64_t rows, int64_t width, T* dst, int64_t ld) {
  constexpr int L = kLanes<T>;
  with_type(T(), src.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(src.data);
    // Of rows ahead whole lines are asked for once (twice where a vector has 16 bytes), a shorter rest in part.
    constexpr int kSquares = kLine<typename Pointee<decltype(type)>::type> / L;  // that share a line
    const bool in_line = src.column_stride == 1;
    for (int64_t row = 0; row < rows; row += L) {
      auto* first = data + row * src.row_stride;
      for (int64_t c = 0; c < width; c += L) {
        T* to = dst + c * ld + row;
        if (in_line && rows - row >= L && width - c >= L)
          transpose_square<Vec<T>, L>(
              [=](int i) {
                const int64_t ahead = kPackedAhead + i * kSquares + c / L % kSquares;
                if (i * kSquares < L) fetch(first + ahead * src.row_stride + c);
                return widen(first + i * src.row_stride + c);
              },
              [=](int i, Vec<T> column) { store(to + i * ld, column); });
        else
          transpose_square<Vec<T>, L>(
              [=](int i) {
                auto* part = first + i * src.row_stride + c * src.column_stride;
                return row + i < rows ? widen_part<T>(part, src.column_stride, width - c) : Vec<T>{};
              },
              [=](int i, Vec<T> column) {
                if (c + i < width) store(to + i * ld, column);
              });
      }
    }
  });
}

template <typename T>
void store_rows(const T* src, int64_t ld, const T* factor, int64_t rows, int64_t width, void* dst, Dtype dtype,
                int64_t row_stride) {
  with_type(T(), dtype, [=](auto* type) {
    using S = typename Pointee<decltype(type)>::type;
    S* out = static_cast<S*>(dst);
    for (int64_t row = 0; row < rows; ++row) {
      const T scale = factor ? factor[row] : T(1);
      S* line = out + row * row_stride;
      int64_t c = 0;
      for (; c + kLanes<T> <= width; c += kLanes<T>) narrow(load(src + row * ld + c) * scale, line + c);
      if (c == width) continue;
      S part[kLanes<T>];
      narrow(load(src + row * ld + c) * scale, part);
      for (int64_t i = c; i < width; ++i) line[i] = part[i - c];
    }
  });
}

// Rows that the second cache is asked for ahead of their use, where they are read once and from memory: 16 KiB of heads
// of 128 values. The first cache can ask for fewer lines at a time than memory delivers.
template <typename S>
constexpr int64_t kKeysAhead = 128 / sizeof(S);

// Vectors of a row from memory. bfloat16 comes two vectors at a time, those in even places first: one operation makes
// a vector of them.
template <typename T, int kVectors, typename S, typename V>
inline void read_row(const S* p, V (&line)[kVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) line[v] = widen(p + v * kLanes<T>);
}
template <typename T, int kVectors>
inline void read_row(const BFloat16* p, Vec<float> (&line)[kVectors]) {
  typedef uint32_t Both __attribute__((vector_size(kVectorBytes)));
#pragma GCC unroll 4
  for (int v = 0; v + 1 < kVectors; v += 2) {
    const Both both = (Both)load(&p[v * kLanes<float>].bits);
    line[v] = (Vec<float>)(both << 16);
    line[v + 1] = (Vec<float>)(both & 0xffff0000u);
  }
  if (kVectors % 2 != 0) line[kVectors - 1] = widen(p + (kVectors - 1) * kLanes<float>);
}

// Sums of what `read_row` read, in the order of memory.
template <int kVectors, typename S, typename V>
inline void put_in_order(const S*, V (&)[kVectors]) {}
template <int kVectors, typename V>
inline void put_in_order(const BFloat16*, V (&sums)[kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v + 1 < kVectors; v += 2) interleave(sums[v], sums[v + 1]);
}

template <typename T>
inline void add_product(Vec<T>& sum, T a, Vec<T> b) {
  sum += a * b;
}
template <typename T>
inline void add_product(Vec<T>& sum, Vec<T> a, Vec<T> b) {
  sum += a * b;
}

// Whether so many rows of a product may be few enough for rows of b to come from memory.
template <typename A, typename S, int kRows>
constexpr bool kReadOnce = sizeof(S) < sizeof(A) || kRows <= 4;

// Products that are summed in a chain of roundings, before they meet the sums of others: of scores, of which an error
// is one of all the weight, and of values.
constexpr int64_t kScoreChain = 32, kValueChain = 64;

// Adds the product of a column of a and a row of b; the first makes the sums.
template <typename T, bool kFirst, int kRows, int kVectors, typename A, typename S>
inline __attribute__((always_inline)) void add_step(const A* a, int64_t row_stride, const S* b,
                                                    Vec<T> (&acc)[kRows][kVectors]) {
  decltype(widen(b)) line[kVectors];
  read_row<T>(b, line);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const A x = a[r * row_stride];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kFirst)
        acc[r][v] = x * line[v];
      else
        add_product<T>(acc[r][v], x, line[v]);
    }
  }
}

// One register tile of c = a b. With kAdd, c = keep * c + a b, or c + factor * a b where keep is null, in one chain;
// without, c = factor * a b, in chains of kScoreChain whose sums wait in c; there steps > 0.
template <typename T, typename A, typename S, int kRows, int kVectors, bool kAdd>
void tile(int64_t steps, const A* a, int64_t row_stride, int64_t step_stride, const S* b, int64_t ldb, T factor, T* c,
          int64_t ldc, const T* keep, RowsAhead<S>* ahead) {
  constexpr int L = kLanes<T>;
  // Operands of several values round more than any chain adds.
  constexpr int64_t kChain = kAdd || kDepth<A> > 1 ? INT64_MAX : kScoreChain;
  // AArch64 (vectors of 16 bytes, as the portable code has) clears registers in the pipes that multiply, so there the
  // first product is the sum.
  constexpr bool kFirstAlone = !kAdd && kDepth<A> == 1 && kVectorBytes == 16;
  int64_t k = 0;
  do {
    const bool first = k == 0, last = steps - k <= kChain;
    const int64_t end = last ? steps : k + kChain;
    Vec<T> acc[kRows][kVectors] = {};
    if constexpr (kFirstAlone) add_step<T, true>(a + k * step_stride, row_stride, b + k * ldb, acc);
    for (k += kFirstAlone; k < end; ++k) {
      if (kReadOnce<A, S, kRows> && ahead) ahead->ask_for(1);
      add_step<T, false>(a + k * step_stride, row_stride, b + k * ldb, acc);
    }
    asm("" : "+r"(c), "+r"(ldc));  // or GCC works out all addresses before the loop, and has no room for them
    const auto put = [&](auto value) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        put_in_order(b, acc[r]);
        T* line = c + r * ldc;
        Vec<T> sums[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] = value(line + v * L, r, acc[r][v]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) store(line + v * L, sums[v]);
      }
    };
    if (kAdd && keep)
      put([=](const T* at, int r, Vec<T> sum) { return load(at) * keep[r] + sum; });
    else if (kAdd)
      put([=](const T* at, int, Vec<T> sum) { return load(at) + sum * factor; });
    else if (first && last)
      put([=](const T*, int, Vec<T> sum) { return sum * factor; });
    else if (first)
      put([=](const T*, int, Vec<T> sum) { return sum; });
    else if (last)
      put([=](const T* at, int, Vec<T> sum) { return (load(at) + sum) * factor; });
    else
      put([=](const T* at, int, Vec<T> sum) { return load(at) + sum; });
  } while (k < steps);
}

template <typename T, typename A, typename S>
using Tile = void (*)(int64_t, const A*, int64_t, int64_t, const S*, int64_t, T, T*, int64_t, const T*, RowsAhead<S>*);

template <typename T, typename A, typename S, bool kAdd, int kVectors>
Tile<T, A, S> tile_of_rows(int64_t rows) {
  static constexpr Tile<T, A, S> tiles[kTileRows] = {
      tile<T, A, S, 1, kVectors, kAdd>, tile<T, A, S, 2, kVectors, kAdd>, tile<T, A, S, 3, kVectors, kAdd>,
      tile<T, A, S, 4, kVectors, kAdd>, tile<T, A, S, 5, kVectors, kAdd>, tile<T, A, S, 6, kVectors, kAdd>};
  return tiles[(rows < kTileRows ? rows : kTileRows) - 1];
}

template <typename T, typename A, typename S, bool kAdd>
Tile<T, A, S> tile_of(int64_t rows, int64_t vectors) {
  if (vectors == 1) return tile_of_rows<T, A, S, kAdd, 1>(rows);
  if (vectors == 2 || kPanel < 3) return tile_of_rows<T, A, S, kAdd, 2>(rows);
  if (vectors == 3) return tile_of_rows < T, A, S, kAdd, kPanel<3 ? 2 : 3>(rows);
  return tile_of_rows<T, A, S, kAdd, kPanel>(rows);
}

// How often `multiply` goes over rows of b.
inline int64_t passes_over(int64_t rows, int64_t vectors) {
  const int64_t wide = rows == 1 ? vectors / kRowPanel : 0, rest = vectors - wide * kRowPanel;
  return wide + (rest + kPanel - 1) / kPanel * ((rows + kTileRows - 1) / kTileRows);
}

// The whole product, tile by tile; `vectors` is its width.
template <typename T, typename A, typename S, bool kAdd>
void multiply(int64_t rows, int64_t vectors, int64_t steps, const A* a, int64_t row_stride, int64_t step_stride,
              const S* b, int64_t ldb, T factor, T* c, int64_t ldc, const T* keep, RowsAhead<S>* ahead = nullptr) {
  int64_t v = 0;
  // A single row has registers to spare, and reads the whole lines of b that memory delivers.
  for (; rows == 1 && v + kRowPanel <= vectors; v += kRowPanel)
    tile<T, A, S, 1, kRowPanel, kAdd>(steps, a, row_stride, step_stride, b + v * kLanes<T>, ldb, factor,
                                      c + v * kLanes<T>, ldc, keep, ahead);
  for (; v < vectors; v += kPanel) {
    const int64_t panel = vectors - v < kPanel ? vectors - v : kPanel;
    for (int64_t r = 0; r < rows; r += kTileRows)
      tile_of<T, A, S, kAdd>(rows - r, panel)(steps, a + r * row_stride, row_stride, step_stride, b + v * kLanes<T>,
                                              ldb, factor, c + r * ldc + v * kLanes<T>, ldc, keep ? keep + r : nullptr,
                                              ahead);
  }
}

template <typename T, typename A>
void scores(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb, T factor,
            T* c, int64_t ldc) {
  const int64_t vectors = (columns + kLanes<T> - 1) / kLanes<T>, steps = (depth + kDepth<A> - 1) / kDepth<A>;
  if (steps == 0)  // nothing to begin a sum with
    for (int64_t i = 0; i < rows * vectors; ++i) store(c + i / vectors * ldc + i % vectors * kLanes<T>, Vec<T>{});
  else
    multiply<T, A, A, false>(rows, vectors, steps, a, lda, 1, b, ldb, factor, c, ldc, nullptr);
}

template <typename T>
void accumulate(int64_t rows, int64_t width, int64_t depth, const T* a, int64_t row_stride, int64_t depth_stride,
                Source b, T* c, int64_t ldc, const T* keep) {
  with_type(T(), b.dtype, [=](auto* type) {
    using S = typename Pointee<decltype(type)>::type;
    const S* values = static_cast<const S*>(b.data);
    const int64_t passes = passes_over(rows, width / kLanes<T>);
    int64_t k = 0;
    do {
      const int64_t steps = depth - k < kValueChain ? depth - k : kValueChain;
      RowsAhead<S> ahead = {values + (k + steps) * b.row_stride, b.row_stride, width, passes};
      multiply<T, T, S, true>(rows, width / kLanes<T>, steps, a + k * depth_stride, row_stride, depth_stride,
                              values + k * b.row_stride, b.row_stride, T(1), c, ldc, k == 0 ? keep : nullptr, &ahead);
      k += steps;
    } while (k < depth);
  });
}

// Where operands are T, scores are operands as they are.
template <typename T>
const T* as_left(int64_t, int64_t, T* s, T*, int64_t) {
  return s;
}
template <typename T>
const T* as_left_transposed(int64_t, int64_t, T* s, T*, int64_t) {
  return s;
}

#include "direct.h"
#include "softmax.h"

template <typename T>
void probabilities(int64_t rows, int64_t columns, T* s, int64_t ld, const T* lse) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>)
      store(s + r * ld + c, exp<typename ExpOf<T>::type>(load(s + r * ld + c) - lse[r]));
}

template <typename T>
void score_gradient(int64_t rows, int64_t columns, const T* p, T* dp, int64_t ld, const T* delta) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>)
      store(dp + r * ld + c, load(p + r * ld + c) * (load(dp + r * ld + c) - delta[r]));
}

// tanh(y) = (e^2y - 1) / (e^2y + 1), with e^2y - 1 put together without cancellation.
template <typename T>
void softcap(int64_t rows, int64_t columns, T* s, T* slope, int64_t ld, T cap) {
  constexpr T kSaturated = 20;  // tanh is 1 there in float64
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      Vec<T> y = load(s + r * ld + c) / cap;
      y = larger(fill(-kSaturated), y);
      y = -larger(fill(-kSaturated), -y);
      const Vec<T> twice[1] = {y * T(2)};
      Vec<T> power[1], part[1];
      split_exp<typename ExpOf<T>::type>(twice, power, part);
      const Vec<T> minus_one = power[0] * part[0] + (power[0] - T(1));
      const Vec<T> t = minus_one / (minus_one + T(2));
      store(s + r * ld + c, t * cap);
      if (slope) store(slope + r * ld + c, T(1) - t * t);
    }
}

// A bias is of the type computed in or narrower.
template <typename F>
inline void with_bias_type(float, Dtype dtype, F f) {
  with_type(float(), dtype, f);
}
template <typename F>
inline void with_bias_type(double, Dtype dtype, F f) {
  if (dtype == Dtype::kFloat32) f(static_cast<const float*>(nullptr));
  if (dtype == Dtype::kFloat64) f(static_cast<const double*>(nullptr));
}
inline Vec<double> to_double(const float* p) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2), aligned(sizeof(float)), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Half*>(p), Vec<double>);
}
template <typename T, typename S>
inline Vec<T> bias_part(const S* p, int64_t stride, int64_t count) {
  if constexpr (sizeof(T) == sizeof(double) && sizeof(S) == sizeof(float)) {
    if (stride == 1 && count >= kLanes<T>) return to_double(p);
    S part[kLanes<T>] = {};
    for (int64_t i = 0; i < count && i < kLanes<T>; ++i) part[i] = p[i * stride];
    return to_double(part);
  } else {
    return widen_part<T>(p, stride, count);
  }
}

template <typename T>
void add_bias(Source bias, int64_t rows, int64_t columns, T* s, int64_t ld) {
  with_bias_type(T(), bias.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(bias.data);
    const int64_t stride = bias.column_stride;
    for (int64_t r = 0; r < rows; ++r) {
      auto* line = data + r * bias.row_stride;
      T* to = s + r * ld;
      if (stride == 0) {
        const Vec<T> same = fill(bias_part<T>(line, 0, 1)[0]);
        for (int64_t c = 0; c < columns; c += kLanes<T>) store(to + c, load(to + c) + same);
        continue;
      }
      for (int64_t c = 0; c < columns; c += kLanes<T>) {
        __builtin_prefetch(line + c * stride + kTileRows * bias.row_stride);  // the next tile
        store(to + c, load(to + c) + bias_part<T>(line + c * stride, stride, columns - c));
      }
    }
  });
}

template <typename T>
struct Columns {
  T index[kLanes<T>];
  constexpr Columns() : index() {
    for (int i = 0; i < kLanes<T>; ++i) index[i] = static_cast<T>(i);
  }
};

template <typename T>
void subtract_distance(int64_t columns, T slope, T diagonal, T* line) {
  static constexpr Columns<T> kFirst;
  const Vec<T> first = load(kFirst.index) - diagonal;
  for (int64_t c = 0; c < columns; c += kLanes<T>) {
    const Vec<T> distance = first + static_cast<T>(c);
    store(line + c, load(line + c) - slope * larger(distance, -distance));
  }
}

template <typename T>
inline Vec<T> hide_part(Vec<T> s, const uint8_t* allowed) {
  return widen_bytes(allowed, T()) != 0 ? s : fill(T(-__builtin_inff()));
}

template <typename T>
void hide(const uint8_t* allowed, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns, T* s,
          int64_t ld) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      const uint8_t* line = allowed + r * row_stride + c * column_stride;
      T* to = s + r * ld + c;
      if (column_stride == 1 && c + kLanes<T> <= columns) {
        store(to, hide_part<T>(load(to), line));
        continue;
      }
      uint8_t part[kLanes<T>] = {};
      for (int64_t i = 0; i < kLanes<T> && c + i < columns; ++i) part[i] = line[i * column_stride];
      store(to, hide_part<T>(load(to), part));
    }
}

template <typename T>
bool finite(const T* x, int64_t rows, int64_t width, int64_t ld) {
  Vec<T> zero = {};
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    for (; c + kLanes<T> <= width; c += kLanes<T>) zero += load(x + r * ld + c) * T(0);
    for (; c < width; ++c) zero[0] += x[r * ld + c] * T(0);
  }
  return total(zero) == T(0);
}

template <typename T, typename E = typename ExpOf<T>::type>
constexpr ScorePrimitives<T> kScorePrimitives = {
    softmax_step<T, E>,   probabilities<T>, score_gradient<T>, softcap<T>,          add_bias<T>,
    subtract_distance<T>, hide<T>,          finite<T>,         accumulate_direct<T>};

template <typename T>
constexpr Primitives<T> kPrimitives = {
    kScorePrimitives<T>, kLanes<T>,        load_rows<T>, load_rows<T>,    load_columns<T>,
    load_rows<T>,        store_rows<T>,    as_left<T>,   softmax_left<T>, as_left_transposed<T>,
    scores<T, T>,        scores_direct<T>, accumulate<T>};
