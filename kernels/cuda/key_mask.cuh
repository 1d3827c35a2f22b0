// Masks as the backward needs them: by which rows of queries a block of keys is seen.
#pragma once
#include "mask.cuh"

namespace sdpa_cuda {

// The keys and rows of one batch entry. Keys are counted from its first one, rows likewise.
//
// MaskKind::kSegments stands here for its band. Its ids are in key_segments.cuh. SIDED are instances with dropout or a
// bias: `right` says whether their mask is causal.
template <MaskKind KIND, int BLOCK_M, int BLOCK_N>
struct KeyMask {
  static constexpr bool SEGMENTS = KIND == MaskKind::kSegments, BAND = SEGMENTS || KIND == MaskKind::kBand,
                        SIDED = KIND == MaskKind::kDropout || KIND == MaskKind::kBias,
                        CAUSAL = KIND == MaskKind::kCausal || SIDED;
  static CUTE_DEVICE Rows queries(FlashParams const& p, int batch) {
    return rows_between(BAND ? p.cu_q : nullptr, batch, p.M);
  }
  static CUTE_DEVICE Rows keys(FlashParams const& p, int batch) {
    return rows_between(BAND ? p.cu_k : nullptr, batch, p.N);
  }

  int N, rows;    // the keys from N on are seen by nobody, and the rows from `rows` on see nothing
  int shift = 0;  // row i is beside key i + shift
  int left = 0, right = 0;

  CUTE_DEVICE KeyMask(FlashParams const& p, int batch) : N(p.N), rows(p.M) {
    if (CAUSAL) shift = p.shift;
    if (SIDED) right = p.right;
    if constexpr (BAND) {
      N = keys(p, batch).count, rows = queries(p, batch).count;
      if (p.k_lengths) N = cute::max(0, cute::min(N, p.k_lengths[batch]));
      if (p.q_lengths) rows = cute::max(0, cute::min(rows, p.q_lengths[batch]));
      shift = p.bottom_right ? N - rows : 0;
      left = p.left, right = p.right;
    }
  }

  // The mask with these numbers, as the one before found them.
  CUTE_DEVICE KeyMask(FlashParams const& p, int keys, int rows_seeing, int beside) : N(p.N), rows(p.M) {
    if (CAUSAL) shift = p.shift;
    if (SIDED) right = p.right;
    if constexpr (BAND) N = keys, rows = rows_seeing, shift = beside, left = p.left, right = p.right;
  }

  // The first row that sees a key, and the row after the last one.
  CUTE_DEVICE int first_row(int key) const { return BAND || CAUSAL ? cute::max(0, key - shift - right) : 0; }
  CUTE_DEVICE int end_row(int key) const { return BAND ? cute::min(rows, key - shift + left + 1) : rows; }

  // The blocks of rows of which some row sees a key of the block that begins with key0.
  CUTE_DEVICE Blocks blocks(int key0) const {
    int const last = cute::min(N, key0 + BLOCK_N) - 1;
    int const begin = first_row(key0) / BLOCK_M, end = (end_row(last) + BLOCK_M - 1) / BLOCK_M;
    return {begin, BAND && key0 >= N ? begin : cute::max(begin, end)};
  }

  // The block of rows that a block of keys begins with. Neighbouring blocks of keys begin with different ones, because
  // all add to the gradients of the rows they visit. Where a row sees keys only up to one beside it, they begin apart
  // as it is. Where they add in their order, each has to visit its rows in the same one.
  CUTE_DEVICE int start(Blocks rows, int key_block, bool in_order = false) const {
    int const count = rows.end - rows.begin;
    bool const apart = (CAUSAL || BAND) && right < kUnlimited;
    return rows.begin + (!apart && count > 0 && !in_order ? key_block * (BLOCK_N / BLOCK_M) % count : 0);
  }

  // The last block of keys that visits block m of rows.
  CUTE_DEVICE int last_visit(int m) const {
    return ((BAND || CAUSAL ? cute::min(N, (m + 1) * BLOCK_M + shift + right) : N) - 1) / BLOCK_N;
  }

  // Whether some row of the block from row0 on does not see some of the kWarpgroupRows keys from key0 on.
  CUTE_DEVICE bool needs_mask(int row0, int key0) const {
    if (key0 + kWarpgroupRows > N) return true;
    if (!BAND && !CAUSAL) return false;
    return first_row(key0 + kWarpgroupRows - 1) > row0 || (BAND && end_row(key0) < cute::min(rows, row0 + BLOCK_M));
  }

  // Sets the masked weights of a thread to 0. Its weights are [2 keys, rows] of the block that begins at row0 and key0,
  // and `coords` are their (key, row) in the block.
  template <class Weights, class Coords>
  CUTE_DEVICE void apply(Weights& weights, Coords const& coords, int row0, int key0) const {
    using namespace cute;
    int const column = get<1>(coords(0, 0));
#pragma unroll
    for (int i = 0; i < size<0>(weights); ++i) {
      int const key = key0 + int(get<0>(coords(i, 0)));
      int const from = (key < N ? first_row(key) : kUnlimited) - row0 - column, to = end_row(key) - row0 - column;
#pragma unroll
      for (int j = 0; j < size<1>(weights); ++j) {
        int const distance = int(get<1>(coords(0, j))) - column;  // between rows of one thread: a constant
        if (distance < from || (BAND && distance >= to)) weights(i, j) = 0.f;
      }
    }
  }
};

}  // namespace sdpa_cuda
