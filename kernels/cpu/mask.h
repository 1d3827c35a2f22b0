// The mask as a policy, the only place that knows which key a query sees: the range of keys worth visiting, whether a
// block needs masking, and its application. Forward and backward share it.
#pragma once

#include "params.h"

namespace sdpa_cpu {

// Rows of a tile: consecutive queries of one head, or one query of consecutive heads.
struct RowGroup {
  int64_t head;
  int64_t query;
  int64_t count;
  bool across_heads;

  int64_t head_of(int64_t row) const { return across_heads ? head + row : head; }
  int64_t query_of(int64_t row) const { return across_heads ? query : query + row; }
  int64_t last_query() const { return query_of(count - 1); }
};

struct KeyRange {
  int64_t begin, end;
};

// Whether anything but a dense mask hides keys.
bool has_structure(const AttentionParams& params);

enum class Cover { kNone, kWhole, kCut };  // what part of a block is visible

class Mask {
 public:
  Mask(const AttentionParams& params, int64_t batch);

  // The keys that any of the queries [first, last] may see.
  KeyRange keys(int64_t first, int64_t last) const;
  // What band, lengths, prefix and segments leave of queries [first, last] x keys [begin, begin + count).
  Cover structured(int64_t first, int64_t last, int64_t begin, int64_t count) const;
  // What the dense mask leaves.
  Cover dense(const RowGroup& rows, int64_t begin, int64_t count) const;
  // Minus infinity where a pair is not visible.                                                s [rows, ld]
  template <typename T>
  void apply(const ScorePrimitives<T>& prim, const RowGroup& rows, int64_t begin, int64_t count, T* s,
             int64_t ld) const;
  // Whether band, lengths, prefix and segments let `query` see `key`.
  bool visible(int64_t query, int64_t key) const;
  // How far the diagonal is moved to the right.
  int64_t shift() const { return shift_; }

 private:
  // The keys inside the band of one query, the prefix apart; empty for a query beyond its length.
  KeyRange band(int64_t query) const;

  const AttentionParams& params_;
  int64_t batch_, queries_, keys_, prefix_, shift_;
};

}  // namespace sdpa_cpu
