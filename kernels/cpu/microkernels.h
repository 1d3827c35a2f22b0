// The primitives, written once on the compiler's vectors. Each instruction set includes this file in its own unnamed
// namespace.
//
// The including file defines kVectorBytes, kPanel (vectors side by side in a register tile) and the conversions
// widen_bf16, widen_f16, narrow_bf16, narrow_f16 and widen_bytes (to as many integers as floats fill a vector). It may
// overload larger, largest, total, totals, interleave, transpose and multiply_low. Vectors lie at any address.
// Asserts state the preconditions of primitives.h, for the sanitizer build only: the ordinary build defines NDEBUG.
#pragma once

#include <assert.h>

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T loose __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vec = typename VectorOf<T>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// Rows of a register tile. 6 x 4 accumulators, 4 operands and a broadcast take 29 of 32 registers. 6 x 2 accumulators,
// 2 operands and a broadcast take 15 of 16.
constexpr int kTileRows = 6;

template <typename P>
struct Pointee;
template <typename S>
struct Pointee<const S*> {
  typedef S type;
};

constexpr int kRowPanel = 8;  // vectors side by side in a register tile of one row

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

template <typename T>
struct Columns {
  T index[kLanes<T>];
  constexpr Columns() : index() {
    for (int i = 0; i < kLanes<T>; ++i) index[i] = static_cast<T>(i);
  }
};
// Which lanes are among the first `count`.
template <typename T>
inline auto first_lanes(int64_t count) {
  static constexpr Columns<T> kAll;
  return load(kAll.index) < static_cast<T>(count);
}

// The larger of each two lanes; b where one of them is NaN.
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
// Alternates lanes of both: `even` becomes those of the first halves, `odd` those of the second halves.
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

// widen: a vector of T from memory of another type. narrow: the reverse.
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

// A vector of up to `count` elements; the other lanes are zero.
template <typename T, typename S>
inline Vec<T> widen_first(const S* p, int64_t count, T) {
  S part[kLanes<T>] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = p[i];
  return widen(part);
}
template <typename T, typename S>
inline Vec<T> widen_part(const S* p, int64_t stride, int64_t count) {
  if (stride == 1) return count >= kLanes<T> ? widen(p) : widen_first(p, count, T());
  S part[kLanes<T>] = {};
  for (int64_t i = 0; i < count && i < kLanes<T>; ++i) part[i] = p[i * stride];
  return widen(part);
}

// Calls f with a null pointer of the type that `dtype` names.
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

// dst = src, with zeros in the columns from width to ld.                                     dst [rows, ld]
template <typename T>
void load_rows(Source src, int64_t rows, int64_t width, T* dst, int64_t ld) {
  assert(width <= ld && ld % kLanes<T> == 0);
  with_type(T(), src.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(src.data);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < ld; c += kLanes<T>)
        store(dst + row * ld + c,
              widen_part<T>(data + row * src.row_stride + c * src.column_stride, src.column_stride, width - c));
  });
}

// Arguments of __builtin_prefetch, and the elements of a cache line.
constexpr int kForReading = 0, kSecondCache = 2;
template <typename S>
constexpr int64_t kLine = 64 / sizeof(S);

// Prefetches, into the second cache, lines that this block or the next one reads a little later. The hardware's own
// prefetching does not follow reads that go across rows.
inline void prefetch(const void* line) { __builtin_prefetch(line, kForReading, kSecondCache); }
template <typename S>
inline void prefetch_rows(const S* rows, int64_t count, int64_t row_stride, int64_t width) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t c = 0; c < width; c += kLine<S>) prefetch(rows + row * row_stride + c);
}
constexpr int64_t kPrefetchRows = 32;  // so many rows ahead of the packing

// Prefetches the rows of values after the present ones. Each of several passes over the present rows prefetches its
// share, row by row, so that memory is busy all the time.
template <typename S>
struct RowPrefetcher {
  const S* row;
  int64_t stride, width, passes;
  int64_t due = 0;

  void advance(int64_t rows) {
    for (due += rows; due >= passes; due -= passes, row += stride) prefetch_rows(row, 1, stride, width);
  }
};

// Transposes a square: `row_of` gives its rows, `put_column` takes its columns. Where both are whole vectors nothing
// branches, so that a processor waiting for one row already requests those of several squares. Rows ahead are
// prefetched one by one in between: many at once would fill the few places that a core has for misses.
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
void pack_columns(Source src, int64_t rows, int64_t width, T* dst, int64_t ld) {
  constexpr int L = kLanes<T>;
  assert(rows > 0 && rows <= ld && ld % L == 0);
  with_type(T(), src.dtype, [=](auto* type) {
    auto* data = static_cast<decltype(type)>(src.data);
    // Each whole cache line of a row ahead is prefetched once (twice where a vector has 16 bytes).
    constexpr int kSquares = kLine<typename Pointee<decltype(type)>::type> / L;  // squares that share a cache line
    const bool in_line = src.column_stride == 1;
    for (int64_t row = 0; row < rows; row += L) {
      auto* first = data + row * src.row_stride;
      for (int64_t c = 0; c < width; c += L) {
        T* to = dst + c * ld + row;
        if (in_line && rows - row >= L && width - c >= L)
          transpose_square<Vec<T>, L>(
              [=](int i) {
                const int64_t ahead = kPrefetchRows + i * kSquares + c / L % kSquares;
                if (i * kSquares < L) prefetch(first + ahead * src.row_stride + c);
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
  assert(rows <= 1 || ld >= (width + kLanes<T> - 1) / kLanes<T> * kLanes<T>);
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

// So many rows ahead of their use, keys are prefetched into the second cache where they are read once and from memory:
// 16 KiB at a head size of 128. The first cache can request fewer lines at a time than memory delivers.
template <typename S>
constexpr int64_t kPrefetchKeys = 128 / sizeof(S);

// Reads vectors of a row from memory. bfloat16 is read two vectors at a time; the first gets the elements at even
// positions, the second those at odd ones, because each is then one operation.
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

// Brings sums of vectors of `read_row` back into the order of memory.
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

// Whether a product may have so few rows that its rows of b come from memory, and are worth prefetching.
template <typename A, typename S, int kRows>
constexpr bool kReadOnce = sizeof(S) < sizeof(A) || kRows <= 4;

// How many products are summed in one chain of roundings; longer sums are sums of chains (kValueChain). Chains of
// scores are shorter, because a weight inherits the whole error of its score.
constexpr int64_t kScoreChain = 32;

// acc += the product of a column of a and a row of b. With kFirst, acc = that product.
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

// One register tile [kRows, kVectors vectors] of c. With kAdd, c = alpha * c + a b in one chain, or c + factor * a b
// where alpha is null. Without, c = factor * a b in chains of kScoreChain, whose sums are kept in c; steps > 0 there.
template <typename T, typename A, typename S, int kRows, int kVectors, bool kAdd>
void tile(int64_t steps, const A* a, int64_t row_stride, int64_t step_stride, const S* b, int64_t ldb, T factor, T* c,
          int64_t ldc, const T* alpha, RowPrefetcher<S>* ahead) {
  constexpr int L = kLanes<T>;
  assert(kAdd || steps > 0);
  // One chain for operands of several values: their own rounding is larger than what a chain adds.
  constexpr int64_t kChain = kAdd || kDepth<A> > 1 ? INT64_MAX : kScoreChain;
  // AArch64 clears registers in the pipes that multiply. So where vectors have 16 bytes, as there and in the portable
  // code, the first product begins the sum.
  constexpr bool kFirstAlone = !kAdd && kDepth<A> == 1 && kVectorBytes == 16;
  int64_t k = 0;
  do {
    const bool first = k == 0, last = steps - k <= kChain;
    const int64_t end = last ? steps : k + kChain;
    Vec<T> acc[kRows][kVectors] = {};
    if constexpr (kFirstAlone) add_step<T, true>(a + k * step_stride, row_stride, b + k * ldb, acc);
    for (k += kFirstAlone; k < end; ++k) {
      if (kReadOnce<A, S, kRows> && ahead) ahead->advance(1);
      add_step<T, false>(a + k * step_stride, row_stride, b + k * ldb, acc);
    }
    // Otherwise GCC computes all addresses before the loop, and spills them.
    asm("" : "+r"(c), "+r"(ldc));
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
    if (kAdd && alpha)
      put([=](const T* at, int r, Vec<T> sum) { return load(at) * alpha[r] + sum; });
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
using Tile = void (*)(int64_t, const A*, int64_t, int64_t, const S*, int64_t, T, T*, int64_t, const T*,
                      RowPrefetcher<S>*);

template <typename T, typename A, typename S, bool kAdd, int kVectors>
Tile<T, A, S> tile_of_rows(int64_t rows) {
  assert(rows > 0);
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

// How many of the vectors that are left are the next panel. No panel of a single vector is left over, whose tile would
// wait for its own sums.
inline int64_t panel_of(int64_t vectors) {
  return vectors == kPanel + 1 ? kPanel - 1 : vectors < kPanel ? vectors : kPanel;
}

// How many times `multiply` passes over the rows of b.
inline int64_t passes_over(int64_t rows, int64_t vectors) {
  const int64_t wide = rows == 1 ? vectors / kRowPanel : 0, rest = vectors - wide * kRowPanel;
  return wide + (rest + kPanel - 1) / kPanel * ((rows + kTileRows - 1) / kTileRows);
}

// The whole product, register tile by register tile. `vectors` is the width of c.
template <typename T, typename A, typename S, bool kAdd>
void multiply(int64_t rows, int64_t vectors, int64_t steps, const A* a, int64_t row_stride, int64_t step_stride,
              const S* b, int64_t ldb, T factor, T* c, int64_t ldc, const T* alpha, RowPrefetcher<S>* ahead = nullptr) {
  assert(rows > 0 && vectors >= 0 && (rows == 1 || ldc >= vectors * kLanes<T>));
  assert(row_stride == kInterleave<A> || step_stride == kInterleave<A>);
  int64_t v = 0;
  // A single row leaves registers free. Its tile is wider, and reads the whole cache lines that memory delivers.
  for (; rows == 1 && v + kRowPanel <= vectors; v += kRowPanel)
    tile<T, A, S, 1, kRowPanel, kAdd>(steps, a, row_stride, step_stride, b + v * kLanes<T>, ldb, factor,
                                      c + v * kLanes<T>, ldc, alpha, ahead);
  for (; v < vectors; v += panel_of(vectors - v)) {
    const int64_t panel = panel_of(vectors - v);
    for (int64_t r = 0; r < rows; r += kTileRows)
      tile_of<T, A, S, kAdd>(rows - r, panel)(steps, a + r * row_stride, row_stride, step_stride, b + v * kLanes<T>,
                                              ldb, factor, c + r * ldc + v * kLanes<T>, ldc,
                                              alpha ? alpha + r : nullptr, ahead);
  }
}

template <typename T, typename A>
void scores(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t lda, const A* b, int64_t ldb, T factor,
            T* c, int64_t ldc) {
  const int64_t vectors = (columns + kLanes<T> - 1) / kLanes<T>, steps = (depth + kDepth<A> - 1) / kDepth<A>;
  assert(columns > 0 && ldb >= vectors * kLanes<T> && (rows == 1 || lda >= steps));
  if (steps == 0)  // an empty sum
    for (int64_t i = 0; i < rows * vectors; ++i) store(c + i / vectors * ldc + i % vectors * kLanes<T>, Vec<T>{});
  else
    multiply<T, A, A, false>(rows, vectors, steps, a, lda, 1, b, ldb, factor, c, ldc, nullptr);
}

template <typename T>
void accumulate(int64_t rows, int64_t width, int64_t depth, const T* a, int64_t row_stride, int64_t depth_stride,
                Source b, T* c, int64_t ldc, const T* alpha) {
  assert(width % kLanes<T> == 0 && b.column_stride == 1);
  with_type(T(), b.dtype, [=](auto* type) {
    using S = typename Pointee<decltype(type)>::type;
    const S* values = static_cast<const S*>(b.data);
    const int64_t passes = passes_over(rows, width / kLanes<T>);
    int64_t k = 0;
    do {
      const int64_t steps = depth - k < kValueChain ? depth - k : kValueChain;
      RowPrefetcher<S> ahead = {values + (k + steps) * b.row_stride, b.row_stride, width, passes};
      multiply<T, T, S, true>(rows, width / kLanes<T>, steps, a + k * depth_stride, row_stride, depth_stride,
                              values + k * b.row_stride, b.row_stride, T(1), c, ldc, k == 0 ? alpha : nullptr, &ahead);
      k += steps;
    } while (k < depth);
  });
}

// Where operands are T, scores need no packing.
template <typename T>
const T* as_left(int64_t, int64_t, T* s, T*, int64_t) {
  return s;
}
template <typename T>
const T* as_left_transposed(int64_t, int64_t, T* s, T*, int64_t) {
  return s;
}

#include "direct.h"
#include "dropout.h"
#include "softmax.h"

template <typename T>
void add_rows(int64_t rows, int64_t columns, const T* x, int64_t ld, T* to, int64_t to_ld) {
  assert(columns <= ld);
  for (int64_t r = 0; r < rows; ++r, x += ld, to += to_ld) {
    int64_t c = 0;
    for (; c + kLanes<T> <= columns; c += kLanes<T>) store(to + c, load(to + c) + load(x + c));
    for (; c < columns; ++c) to[c] += x[c];
  }
}

// A bias has the type computed in, or a narrower one.
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
  assert(columns <= ld && ld % kLanes<T> == 0);
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
        __builtin_prefetch(line + c * stride + kTileRows * bias.row_stride);  // for the next register tile
        store(to + c, load(to + c) + bias_part<T>(line + c * stride, stride, columns - c));
      }
    }
  });
}

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
  assert(columns <= ld && ld % kLanes<T> == 0);
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
  constexpr int L = kLanes<T>, kChains = 4;  // of additions that wait for one another
  Vec<T> zero[kChains] = {};
  for (int64_t r = 0; r < rows; ++r, x += ld) {
    int64_t c = 0;
    for (; c + kChains * L <= width; c += kChains * L)
      for (int i = 0; i < kChains; ++i) zero[i] += load(x + c + i * L) * T(0);
    for (; c + L <= width; c += L) zero[0] += load(x + c) * T(0);
    for (; c < width; ++c) zero[0][0] += x[c] * T(0);
  }
  return total(zero[0] + zero[1] + (zero[2] + zero[3])) == T(0);
}

template <typename T, typename E = typename ExpOf<T>::type>
constexpr ScorePrimitives<T> kScorePrimitives = {
    softmax_step<T, E>,   probabilities<T>, score_gradient<T>, softcap<T>,      add_rows<T>, add_bias<T>,
    subtract_distance<T>, hide<T>,          drop<T>,           row_products<T>, finite<T>,   accumulate_direct<T>};

template <typename T>
constexpr Primitives<T> kPrimitives = {kScorePrimitives<T>,   kLanes<T>,     load_rows<T>,     pack_columns<T>,
                                       load_rows<T>,          store_rows<T>, as_left<T>,       softmax_left<T>,
                                       as_left_transposed<T>, scores<T, T>,  scores_direct<T>, accumulate<T>};
