// Products for a test to call: by tiles, by vectors, and the arithmetic of tiles spelled out value by value.
#include <algorithm>

#include "arithmetic.h"
#include "primitives.h"

using namespace sdpa_cpu;

namespace {

constexpr int64_t kDepthOfTile = 16;  // pairs
constexpr int64_t kVector = 16;       // numbers; results are written up to a whole one

// The sum of a row of a times a column of b as a chain of tiles gives it; strides count pairs.
float summed(int64_t pairs, const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride) {
  float sum = 0.0f;
  for (int64_t begin = 0; begin < pairs; begin += kDepthOfTile) {
    float first = 0.0f, second = 0.0f;
    for (int64_t k = begin; k < std::min(begin + kDepthOfTile, pairs); ++k) {
      const Pair &x = a[k * a_stride], &y = b[k * b_stride];
      first = fused(widened(x.first), widened(y.first), first);
      second = fused(widened(x.second), widened(y.second), second);
    }
    sum = added(sum, added(first, second));
  }
  return sum;
}

void plain_scores(int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t lda, const Pair* b, int64_t ldb,
                  float factor, float* c, int64_t ldc) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < (columns + kVector - 1) / kVector * kVector; ++j)
      c[i * ldc + j] = factor * summed((depth + 1) / 2, a + i * lda, 1, b + j, ldb);
}

void plain_accumulate(int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t row_stride,
                      int64_t depth_stride, Source b, float* c, int64_t ldc, const float* alpha) {
  const Pair* right = static_cast<const Pair*>(b.data);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; ++j) {
      const float sum = summed((depth + 1) / 2, a + i * row_stride, depth_stride, right + j, b.row_stride);
      c[i * ldc + j] = fmaf(c[i * ldc + j], alpha ? alpha[i] : 1.0f, sum);
    }
}

Primitives<float, Pair> table_of(const char* by) {
  Primitives<float, Pair> table = *kAvx512Bf16.bf16;
  if (!strcmp(by, "tiles")) use_tiles(&table);
  if (!strcmp(by, "plain")) table.scores = plain_scores, table.accumulate = plain_accumulate;
  return table;
}

// Calls f between what has to come before products and after them.
template <typename F>
void within(const Primitives<float, Pair>& table, F f) {
  alignas(Setup::kBytes) char saved[Setup::kBytes];
  if (table.setup) table.setup->begin(saved);
  f();
  if (table.setup) table.setup->end(saved);
}

}  // namespace

#define VISIBLE extern "C" __attribute__((visibility("default")))

VISIBLE void scores(const char* by, int64_t rows, int64_t columns, int64_t depth, const Pair* a, int64_t lda,
                    const Pair* b, int64_t ldb, float factor, float* c, int64_t ldc) {
  const auto table = table_of(by);
  within(table, [&] { table.scores(rows, columns, depth, a, lda, b, ldb, factor, c, ldc); });
}

VISIBLE void accumulate(const char* by, int64_t rows, int64_t width, int64_t depth, const Pair* a, int64_t row_stride,
                        int64_t depth_stride, const Pair* b, int64_t ldb, float* c, int64_t ldc, const float* alpha) {
  const auto table = table_of(by);
  const Source right = {b, Dtype::kFloat32, ldb, 1};
  within(table, [&] { table.accumulate(rows, width, depth, a, row_stride, depth_stride, right, c, ldc, alpha); });
}
