// The scan for values that are not finite.
#include "pairs.h"

#include <algorithm>
#include <atomic>

#include "mask.h"
#include "tasks.h"

namespace sdpa_cpu {
namespace {

constexpr int64_t kRows = 256;                // scanned by one task
constexpr int64_t kParallelValues = 1 << 18;  // scanning so many takes about as long as waking threads

bool finite_line(const int16_t* values, int64_t count, int64_t stride, int16_t exponent) {
  int16_t largest = 0;
  if (stride == 1)  // a loop of its own, so that the compiler vectorises it
    for (int64_t i = 0; i < count; ++i) largest = std::max<int16_t>(largest, values[i] & exponent);
  else
    for (int64_t i = 0; i < count; ++i) largest = std::max<int16_t>(largest, values[i * stride] & exponent);
  return largest != exponent;
}

bool all_finite(const View& view, const int64_t size[4], int64_t threads) {
  const int64_t blocks = (size[2] + kRows - 1) / kRows, tasks = size[0] * size[1] * blocks;
  std::atomic<bool> finite{true};
  const int64_t values = size[0] * size[1] * size[2] * size[3];
  run_tasks(tasks, values < kParallelValues ? 1 : std::min(threads, tasks), nullptr, [&](int64_t task, int64_t) {
    const int64_t head = task / blocks, row = task % blocks * kRows, rows = std::min(kRows, size[2] - row);
    if (finite && !finite_halves(view.rows(head / size[1], head % size[1], row), rows, size[3])) finite = false;
  });
  return finite;
}

}  // namespace

bool finite_halves(const Source& values, int64_t rows, int64_t width) {
  // A value that is not finite has all bits of the exponent set.
  const int16_t exponent = values.dtype == Dtype::kBFloat16 ? 0x7f80 : 0x7c00;
  const auto* line = static_cast<const int16_t*>(values.data);
  if (values.column_stride == 1 && values.row_stride == width) return finite_line(line, rows * width, 1, exponent);
  for (int64_t row = 0; row < rows; ++row, line += values.row_stride)
    if (!finite_line(line, width, values.column_stride, exponent)) return false;
  return true;
}

bool all_finite(const AttentionParams& p, std::initializer_list<const View*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const View* view) {
    const bool keys = view == &p.k || view == &p.v;
    const int64_t width = view == &p.q || view == &p.k ? p.D : p.Dv;
    const int64_t size[4] = {p.B, keys ? p.Hkv : p.H, keys ? p.N : p.M, width};
    return all_finite(*view, size, p.threads);
  });
}

bool pairs_are_exact(const AttentionParams& p, std::initializer_list<const View*> tensors) {
  return !has_structure(p) || all_finite(p, tensors);
}

}  // namespace sdpa_cpu
