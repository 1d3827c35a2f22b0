// Products that read tensors in memory without packing: of few queries with keys, and of rows with rows. It is a part
// of microkernels.h, in the including file's unnamed namespace.
#pragma once

// The sum of each of the vectors.
template <typename V, typename T, int kCount>
inline void totals(const V (&x)[kCount], T* sums) {
  for (int i = 0; i < kCount; ++i) sums[i] = total(x[i]);
}

template <typename T>
void row_products(Source x, Source y, int64_t rows, int64_t width, T* sums) {
  with_type(T(), x.dtype, [=](auto* x_type) {
    with_type(T(), y.dtype, [=](auto* y_type) {
      auto* a = static_cast<decltype(x_type)>(x.data);
      auto* b = static_cast<decltype(y_type)>(y.data);
      const int64_t whole = x.column_stride == 1 && y.column_stride == 1 ? width - width % kLanes<T> : 0;
      for (int64_t row = 0; row < rows; ++row, a += x.row_stride, b += y.row_stride) {
        Vec<T> sum = {};
        int64_t c = 0;
        for (; c < whole; c += kLanes<T>) sum += widen(a + c) * widen(b + c);
        for (; c < width; c += kLanes<T>)
          sum += widen_part<T>(a + c * x.column_stride, x.column_stride, width - c) *
                 widen_part<T>(b + c * y.column_stride, y.column_stride, width - c);
        sums[row] = total(sum);
      }
    });
  });
}

// A vector of a query's operands, and one of a key, of which `count` values are left.
template <typename T>
inline Vec<T> query_part(const T* a, int64_t) {
  return load(a);
}
template <typename T, typename S>
inline Vec<T> key_part(const S* key, int64_t count, T) {
  return widen_part<T>(key, 1, count);
}

// sums [kRows, kKeys] += the products of kRows queries with one key. Keys ahead are prefetched row by row, because
// memory is fastest in that order.
template <typename T, typename A, typename S, int kRows, int kKeys>
inline void add_dots(int64_t depth, const A* a, int64_t lda, const S* key, int64_t stride, Vec<T>* sums) {
  constexpr int64_t kStep = kLanes<T> * kDepth<A>;
  const auto add = [=](int64_t d, int64_t count) {
    const auto line = key_part(key + d, count, A());
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      add_product<T>(sums[r * kKeys], query_part(a + r * lda + d / kDepth<A>, count), line);
  };
  prefetch_rows(key + kPrefetchKeys<S> * stride, 1, stride, depth);
  int64_t d = 0;
  for (; d + kStep <= depth; d += kStep) add(d, kStep);
  if (d < depth) add(d, depth - d);
}

// c [kRows, kKeys] = factor * the dot products of kRows queries with kKeys keys.
template <typename T, typename A, typename S, int kRows, int kKeys>
void dots(int64_t depth, const A* a, int64_t lda, const S* keys, int64_t stride, T factor, T* c, int64_t ldc) {
  Vec<T> acc[kRows * kKeys] = {};
#pragma GCC unroll 16
  for (int j = 0; j < kKeys; ++j) add_dots<T, A, S, kRows, kKeys>(depth, a, lda, keys + j * stride, stride, acc + j);
  T sums[kRows * kKeys];
  totals(acc, sums);
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kKeys; ++j) c[r * ldc + j] = factor * sums[r * kKeys + j];
}

template <typename T, typename A, typename S, int kRows>
void dot_rows(int64_t columns, int64_t depth, const A* a, int64_t lda, const S* keys, int64_t stride, T factor, T* c,
              int64_t ldc) {
  constexpr int kAccumulators = kPanel < 4 ? 8 : 16;  // of 16 or 32 registers
  constexpr int kKeys = kAccumulators / kRows;
  int64_t j = 0;
  for (; j + kKeys <= columns; j += kKeys)
    dots<T, A, S, kRows, kKeys>(depth, a, lda, keys + j * stride, stride, factor, c + j, ldc);
  for (; j < columns; ++j) dots<T, A, S, kRows, 1>(depth, a, lda, keys + j * stride, stride, factor, c + j, ldc);
}

template <typename T, typename A, typename S>
void dot_products(int64_t rows, int64_t columns, int64_t depth, const A* a, int64_t lda, const S* keys, int64_t stride,
                  T factor, T* c, int64_t ldc) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    dot_rows<T, A, S, 4>(columns, depth, a + r * lda, lda, keys, stride, factor, c + r * ldc, ldc);
  for (; r + 2 <= rows; r += 2)
    dot_rows<T, A, S, 2>(columns, depth, a + r * lda, lda, keys, stride, factor, c + r * ldc, ldc);
  for (; r < rows; ++r) dot_rows<T, A, S, 1>(columns, depth, a + r * lda, lda, keys, stride, factor, c + r * ldc, ldc);
}

template <typename T>
void scores_direct(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t lda, Source keys, T factor, T* c,
                   int64_t ldc) {
  assert(rows > 0 && columns > 0 && keys.column_stride == 1);
  with_type(T(), keys.dtype, [=](auto* type) {
    dot_products(rows, columns, depth, a, lda, static_cast<decltype(type)>(keys.data), keys.row_stride, factor, c, ldc);
  });
}

template <typename T>
void accumulate_direct(int64_t rows, int64_t width, int64_t depth, const T* a, int64_t lda, Source b, T* c, int64_t ldc,
                       const T* alpha) {
  accumulate(rows, width, depth, a, lda, 1, b, c, ldc, alpha);
}
