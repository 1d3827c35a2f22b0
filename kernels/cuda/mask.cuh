// Masks as policies: how many blocks of keys some row sees, how many of those every row sees whole, and hiding the
// rest.
#pragma once
#include <cute/tensor.hpp>

#include "params.h"

namespace sdpa_cuda {

// Keys up to the last one; where causal, up to the diagonal.
template <bool CAUSAL>
struct Band {
  int N, shift;

  CUTE_DEVICE int keys_before(int row) const { return CAUSAL ? cute::min(N, row + shift) : N; }

  // Blocks 0 .. end - 1 are seen by some of the rows before `row_end`; one is taken, and hidden, where none is seen.
  template <int BN>
  CUTE_DEVICE int end(int row_end) const {
    return cute::max(1, (keys_before(row_end) + BN - 1) / BN);
  }

  // Blocks 0 .. whole - 1 are seen whole by `row` and those after it.
  template <int BN>
  CUTE_DEVICE int whole(int row) const {
    return cute::max(0, keys_before(row + 1)) / BN;
  }

  // `scores` of a thread are (2, columns) and `place` their (row, column) in the tile at (row0, key0).
  template <class Scores, class Place>
  CUTE_DEVICE void hide(Scores& scores, Place const& place, int row0, int key0) const {
    using namespace cute;
    int const first = get<1>(place(0, 0));
#pragma unroll
    for (int i = 0; i < size<0>(scores); ++i) {
      int const limit = keys_before(row0 + int(get<0>(place(i, 0))) + 1) - key0 - first;
#pragma unroll
      for (int j = 0; j < size<1>(scores); ++j)
        // The distance of two columns of a thread is known when compiling.
        if (int(get<1>(place(0, j))) - first >= limit) scores(i, j) = -INFINITY;
    }
  }
};

}  // namespace sdpa_cuda
