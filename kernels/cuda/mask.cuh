// Masks as policies: which blocks of keys a work tile visits, which of them need no mask, and applying it to scores.
#pragma once
#include <cute/tensor.hpp>
#include <type_traits>

#include "params.h"

namespace sdpa_cuda {

// The blocks of keys from begin to end - 1. There is at least one; where no key is seen, its scores are all masked.
struct Blocks {
  int begin, end;
};

// The rows in memory that belong to a batch entry. Packed sequences share one entry of the tensors.
struct Rows {
  int batch, first, count;
};

CUTE_DEVICE Rows rows_between(int32_t const* cu, int batch, int most) {
  if (!cu) return {batch, 0, most};
  int const first = cu[batch];
  return {0, first, cute::min(cu[batch + 1] - first, most)};
}

// The same number, hidden from the compiler: it computes again what depends on the number, instead of keeping it in a
// register.
CUTE_DEVICE int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// On which sides a block of keys may reach beyond what its rows see, and so has to be masked.
enum class Masking { kNone, kLeft, kBoth };
template <Masking MASKING>
using MaskingTag = std::integral_constant<Masking, MASKING>;

// What the rows of one batch entry see: every key before the entry's length, the keys up to the diagonal, or a band of
// the keys before the length. A block has BLOCK_N keys, and a consumer warpgroup ROWS rows of queries.
//
// Where the mask is not causal, the last block ends with the last key that is seen. The first block then begins `pad`
// keys before the first key. There TMA reads zeros or, of packed sequences, the sequence before. Blocks behind the
// length are not even loaded.
//
// MaskKind::kSegments stands here for its band, without packed sequences.
// MaskKind::kDropout counts as causal, also without a mask: its keys have no pad, because the random numbers go by
// blocks that begin at multiples of 16 keys.
template <MaskKind KIND, int BLOCK_N, int ROWS>
struct Mask {
  static constexpr bool PACKED = KIND == MaskKind::kBand, BAND = PACKED || KIND == MaskKind::kSegments;
  static constexpr bool DROPOUT = KIND == MaskKind::kDropout, CAUSAL = KIND == MaskKind::kCausal || DROPOUT,
                        ALL = !CAUSAL && !BAND;
  static CUTE_DEVICE Rows queries(FlashParams const& p, int batch) {
    return rows_between(PACKED ? p.cu_q : nullptr, batch, p.M);
  }
  static CUTE_DEVICE Rows keys(FlashParams const& p, int batch) {
    return rows_between(PACKED ? p.cu_k : nullptr, batch, p.N);
  }

  // Keys are counted with the pad in front of them: N is the end of the last block, and row i is beside key i + shift.
  int N, shift;
  int pad = 0;
  int left = 0, right = 0, rows = 0;  // of a band; the rows from `rows` on see nothing. With dropout `right`, too

  CUTE_DEVICE Mask(FlashParams const& p, int batch) : N(p.N), shift(p.shift) {
    if constexpr (DROPOUT) right = p.right;
    if constexpr (ALL) {
      int const seen = p.k_lengths ? cute::max(0, cute::min(p.N, p.k_lengths[batch])) : p.N;
      N = cute::max(1, (seen + BLOCK_N - 1) / BLOCK_N) * BLOCK_N;
      pad = N - seen;
    }
    if constexpr (BAND) {
      int const there = keys(p, batch).count;
      int const seen = p.k_lengths ? cute::max(0, cute::min(there, p.k_lengths[batch])) : there;
      rows = p.q_lengths ? p.q_lengths[batch] : kUnlimited;
      if (PACKED && p.cu_q) rows = cute::min(rows, queries(p, batch).count);
      N = cute::max(1, (seen + BLOCK_N - 1) / BLOCK_N) * BLOCK_N;
      pad = N - seen;
      left = p.left, right = p.right;
      shift = pad + (p.bottom_right ? seen - cute::min(p.M, rows) : 0);
    }
  }

  // The first key that a row sees, and the key after the last one.
  CUTE_DEVICE int first_key(int row) const { return BAND ? cute::max(pad, row + shift - left) : pad; }
  CUTE_DEVICE int end_key(int row) const { return CAUSAL || BAND ? cute::min(N, row + shift + right + 1) : N; }

  CUTE_DEVICE bool sees_any(int row) const {
    return !(CAUSAL || BAND) || (end_key(row) > first_key(row) && (!BAND || row < rows));
  }

  // The blocks of which some row from row0 to row_end - 1 sees a key.
  CUTE_DEVICE Blocks blocks(int row0, int row_end) const {
    if (BAND && row0 >= rows) return {0, 1};
    int const last = (BAND ? cute::min(row_end, rows) : row_end) - 1;
    int const end = cute::max(1, (end_key(last) + BLOCK_N - 1) / BLOCK_N);
    return {BAND ? cute::min(first_key(row0) / BLOCK_N, end - 1) : 0, end};
  }

  // Of a work tile's blocks, those that the consumer with the rows from row0 on needs; one where none of these rows
  // sees a key.
  CUTE_DEVICE Blocks blocks_of_consumer(Blocks tile, int row0, int M) const {
    if (row0 >= (BAND ? cute::min(M, rows) : M)) return {tile.end - 1, tile.end};
    return CAUSAL || BAND ? blocks(row0, cute::min(M, row0 + ROWS)) : tile;
  }

  // Of a consumer's blocks, those from unmasked_begin on need no mask on their left, and those before unmasked_end need
  // none on their right.
  CUTE_DEVICE int unmasked_begin(int row0) const {
    return BAND ? (first_key(row0 + ROWS - 1) + BLOCK_N - 1) / BLOCK_N : 0;
  }
  CUTE_DEVICE int unmasked_end(int row0) const {
    return BAND && row0 + ROWS > rows ? 0 : cute::max(0, end_key(row0)) / BLOCK_N;
  }

  // Blocks on the diagonal are visited first, so that the main loop after them needs no mask: blocks descend. Where
  // every key is seen, the block with the pad is the only one to mask, and blocks ascend from it. With descending
  // blocks the largest error was above cuDNN's in 10 of 36 cells of the suite, with ascending ones in 4.
  static constexpr bool ASCENDS = ALL;
  // The first key of the block that a consumer counts as n. A consumer counts down to 0 in either order; where blocks
  // ascend, only the first one is ever masked, which begins with key 0.
  CUTE_DEVICE int key_of(int n) const { return ASCENDS ? 0 : n * BLOCK_N; }

  // Sets the masked scores of a thread to -inf. Its scores are [2 rows, columns] of the block that begins at row0 and
  // key0, and `coords` are their (row, column) in the block.
  template <Masking MASKING, class Scores, class Coords>
  CUTE_DEVICE void apply(Scores& scores, Coords const& coords, int row0, int key0) const {
    using namespace cute;
    int const column = get<1>(coords(0, 0));
#pragma unroll
    for (int i = 0; i < size<0>(scores); ++i) {
      int const row = row0 + int(get<0>(coords(i, 0)));
      int const to = (BAND && row >= rows ? 0 : end_key(row)) - key0 - column, from = first_key(row) - key0 - column;
#pragma unroll
      for (int j = 0; j < size<1>(scores); ++j) {
        int const distance = int(get<1>(coords(0, j))) - column;  // between columns of one thread: a constant
        if ((!ALL && MASKING == Masking::kBoth && distance >= to) || (!CAUSAL && distance < from))
          scores(i, j) = -INFINITY;
      }
    }
  }
};

}  // namespace sdpa_cuda
