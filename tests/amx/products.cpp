// Products for a test to call: by tiles, by vectors, and the arithmetic of tiles spelled out value by value.
#include <algorithm>
#include <vector>

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
template <typename Operand, typename F>
void within(const Primitives<float, Operand>& table, F f) {
  alignas(Setup::kBytes) char saved[Setup::kBytes];
  if (table.setup) table.setup->begin(saved);
  f();
  if (table.setup) table.setup->end(saved);
}

// Room for operands, full of NaN: what is read and was not packed reaches the result.
struct Room {
  std::vector<uint16_t> bits;
  explicit Room(int64_t operands) : bits(static_cast<size_t>(operands) * sizeof(Split) / 2, 0x7fff) {}
  Split* operands() { return reinterpret_cast<Split*>(bits.data()); }
};

int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

constexpr int64_t kSpan = 32;

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

// float16 by tiles, with the packing. q [rows, depth], k [columns, depth].
VISIBLE void split_scores(int64_t rows, int64_t columns, int64_t depth, const uint16_t* q, const uint16_t* k,
                          float factor, float* c, int64_t ldc) {
  const int64_t ld = up(depth, kSpan), ldb = up(columns, kVector) + kVector;
  Room left(up(rows, kRoom<Split>) * ld / 2), right(ld / 2 * ldb);
  const auto& table = kAmxSplit;
  table.pack_left({q, Dtype::kFloat16, depth, 1}, rows, depth, left.operands(), ld);
  table.pack_columns({k, Dtype::kFloat16, depth, 1}, columns, depth, right.operands(), ldb);
  within(table,
         [&] { table.scores(rows, columns, depth, left.operands(), ld / 2, right.operands(), ldb, factor, c, ldc); });
}

// weights [rows, ld], v [steps, width]. The weights begin with the value `first`, which is a multiple of 16.
VISIBLE void split_sums(int64_t rows, int64_t width, int64_t steps, int64_t first, float* weights, int64_t ld,
                        const uint16_t* v, float* c, int64_t ldc, const float* alpha) {
  const int64_t v_ld = up(width, kSpan), row = up(ld, kSpan) / 2, depth = steps - first;
  Room left(up(rows, kRoom<Split>) * row), right(up(steps + kVector, kSpan) / 2 * v_ld);
  const auto& table = kAmxSplit;
  table.pack_steps({v, Dtype::kFloat16, width, 1}, steps, width, right.operands(), v_ld);
  const Split* packed = table.as_left(rows, depth, weights, left.operands(), ld);
  const Source values = {right.operands() + first / 2 * v_ld, Dtype::kFloat32, v_ld, 1};
  within(table, [&] { table.accumulate(rows, v_ld, depth, packed, row, 1, values, c, ldc, alpha); });
}
