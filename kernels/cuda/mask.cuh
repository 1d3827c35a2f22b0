// Masks as policies: which blocks of keys a block of queries visits, which of them are seen whole, and hiding the rest.
#pragma once
#include <cute/tensor.hpp>
#include <type_traits>

#include "params.h"

namespace sdpa_cuda {

// Blocks of keys from begin to end - 1: at least one, which is hidden where none is seen.
struct Blocks {
  int begin, end;
};

// Rows in memory: what a batch entry has. Packed sequences share one entry of the tensors.
struct Rows {
  int batch, first, count;
};

CUTE_DEVICE Rows rows_between(int32_t const* cu, int batch, int most) {
  if (!cu) return {batch, 0, most};
  int const first = cu[batch];
  return {0, first, cute::min(cu[batch + 1] - first, most)};
}

// The same number, of which the compiler does not know it: what depends on it is computed again, and needs no register.
CUTE_DEVICE int anew(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Which side of what a row sees ends inside a block.
enum class Cut { kNone, kLeft, kBoth };
template <Cut CUT>
using CutBy = std::integral_constant<Cut, CUT>;

// What rows of one batch entry see: every key before the entry's length, those up to the diagonal, or a band of those
// before the length. BN keys are a block. Where not causal, blocks end with the last key that there is; so the first
// one begins `pad` keys before the first key, where the copy engine reads zeros, or the sequence before. What lies
// behind the length is not even loaded. Of segments, this is the band without packed sequences.
template <MaskKind KIND, int BN, int ROWS>
struct Mask {
  static constexpr bool PACKED = KIND == MaskKind::kBand, BAND = PACKED || KIND == MaskKind::kSegments;
  static constexpr bool CAUSAL = KIND == MaskKind::kCausal, ALL = !CAUSAL && !BAND;
  static CUTE_DEVICE Rows queries(FlashParams const& p, int batch) {
    return rows_between(PACKED ? p.cu_q : nullptr, batch, p.M);
  }
  static CUTE_DEVICE Rows keys(FlashParams const& p, int batch) {
    return rows_between(PACKED ? p.cu_k : nullptr, batch, p.N);
  }

  int N, shift;  // the last block's end; row i is beside key i + shift
  int pad = 0;
  int left = 0, right = 0, rows = 0;  // of a band; rows that see anything

  CUTE_DEVICE Mask(FlashParams const& p, int batch) : N(p.N), shift(p.shift) {
    if constexpr (ALL) {
      int const seen = p.k_lengths ? cute::max(0, cute::min(p.N, p.k_lengths[batch])) : p.N;
      N = cute::max(1, (seen + BN - 1) / BN) * BN;
      pad = N - seen;
    }
    if constexpr (BAND) {
      int const there = keys(p, batch).count;
      int const seen = p.k_lengths ? cute::max(0, cute::min(there, p.k_lengths[batch])) : there;
      rows = p.q_lengths ? p.q_lengths[batch] : kUnlimited;
      if (PACKED && p.cu_q) rows = cute::min(rows, queries(p, batch).count);
      N = cute::max(1, (seen + BN - 1) / BN) * BN;
      pad = N - seen;
      left = p.left, right = p.right;
      shift = pad + (p.bottom_right ? seen - cute::min(p.M, rows) : 0);
    }
  }

  // The first key that a row sees, and the key after its last.
  CUTE_DEVICE int first(int row) const { return BAND ? cute::max(pad, row + shift - left) : pad; }
  CUTE_DEVICE int limit(int row) const {
    return CAUSAL || BAND ? cute::min(N, row + shift + (BAND ? right : 0) + 1) : N;
  }

  CUTE_DEVICE bool sees_any(int row) const {
    return !(CAUSAL || BAND) || (limit(row) > first(row) && (!BAND || row < rows));
  }

  // Some of the rows row0 .. row_end - 1 see a key of these.
  CUTE_DEVICE Blocks blocks(int row0, int row_end) const {
    if (BAND && row0 >= rows) return {0, 1};
    int const last = (BAND ? cute::min(row_end, rows) : row_end) - 1;
    int const end = cute::max(1, (limit(last) + BN - 1) / BN);
    return {BAND ? cute::min(first(row0) / BN, end - 1) : 0, end};
  }

  // Of these, those that the group of ROWS from row0 needs; one where it has no row that sees anything.
  CUTE_DEVICE Blocks blocks_of_group(Blocks all, int row0, int M) const {
    if (row0 >= (BAND ? cute::min(M, rows) : M)) return {all.end - 1, all.end};
    return CAUSAL || BAND ? blocks(row0, cute::min(M, row0 + ROWS)) : all;
  }

  // No row of the ROWS from row0 has its limit in a block before this one, nor its first key in one from `reached` on.
  CUTE_DEVICE int whole(int row0) const { return BAND && row0 + ROWS > rows ? 0 : cute::max(0, limit(row0)) / BN; }
  CUTE_DEVICE int reached(int row0) const { return BAND ? (first(row0 + ROWS - 1) + BN - 1) / BN : 0; }

  // Blocks that a diagonal cuts come first, so that the others follow without a mask. Where every key is seen, that is
  // the block with the pad, and keys are met in their order: the largest error was then above cuDNN's in 4 of 36 cells
  // of the suite, and last keys first in 10.
  static constexpr bool ASCENDS = ALL;
  // The first key of what is the n-th block before the last to come, if it may have to be masked.
  CUTE_DEVICE int key_of(int n) const { return ASCENDS ? 0 : n * BN; }

  // `scores` of a thread are (2, columns) and `place` their (row, column) in the tile at (row0, key0).
  template <Cut CUT, class Scores, class Place>
  CUTE_DEVICE void hide(Scores& scores, Place const& place, int row0, int key0) const {
    using namespace cute;
    int const column = get<1>(place(0, 0));
#pragma unroll
    for (int i = 0; i < size<0>(scores); ++i) {
      int const row = row0 + int(get<0>(place(i, 0)));
      int const to = (BAND && row >= rows ? 0 : limit(row)) - key0 - column, from = first(row) - key0 - column;
#pragma unroll
      for (int j = 0; j < size<1>(scores); ++j) {
        int const distance = int(get<1>(place(0, j))) - column;  // of two columns of a thread: known when compiling
        if ((!ALL && CUT == Cut::kBoth && distance >= to) || (!CAUSAL && distance < from)) scores(i, j) = -INFINITY;
      }
    }
  }
};

}  // namespace sdpa_cuda
