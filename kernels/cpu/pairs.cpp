// The scan for values that are not finite.
#include "pairs.h"

#include <vector>

#include "mask.h"

namespace sdpa_cpu {
namespace {

constexpr int64_t kRows = 32;  // scanned at a time, through a buffer that stays in the first cache

template <typename T>
bool all_finite(const View& view, const int64_t size[4], const Primitives<T>& prim, std::vector<T>* buffer) {
  const int64_t ld = static_cast<int64_t>(buffer->size()) / kRows;
  for (int64_t b = 0; b < size[0]; ++b)
    for (int64_t h = 0; h < size[1]; ++h)
      for (int64_t row = 0; row < size[2]; row += kRows) {
        const int64_t rows = size[2] - row < kRows ? size[2] - row : kRows;
        prim.load_rows(view.rows(b, h, row), rows, size[3], buffer->data(), ld);
        if (!prim.finite(buffer->data(), rows, ld, ld)) return false;
      }
  return true;
}

}  // namespace

template <typename T>
bool pairs_are_exact(const AttentionParams& p, const Primitives<T>& prim, std::initializer_list<const View*> tensors) {
  if (!has_structure(p)) return true;
  for (const View* view : tensors) {
    const bool keys = view == &p.k || view == &p.v;
    const int64_t width = view == &p.q || view == &p.k ? p.D : p.Dv;
    const int64_t size[4] = {p.B, keys ? p.Hkv : p.H, keys ? p.N : p.M, width};
    std::vector<T> buffer(static_cast<size_t>(kRows * ((width + kMaxLanes - 1) / kMaxLanes * kMaxLanes)));
    if (!all_finite(*view, size, prim, &buffer)) return false;
  }
  return true;
}

template bool pairs_are_exact(const AttentionParams&, const Primitives<float>&, std::initializer_list<const View*>);
template bool pairs_are_exact(const AttentionParams&, const Primitives<double>&, std::initializer_list<const View*>);

}  // namespace sdpa_cpu
