// The mask as a policy, which forward and backward share. It says which keys are worth visiting, whether a block needs
// masking, and applies the mask to scores. No other file knows which key a query sees.
#pragma once

#include "params.h"

namespace sdpa_cpu {

// The rows of a tile of scores: consecutive queries of one head, or one query of consecutive heads.
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

enum class Cover { kNone, kFull, kPartial };  // the part of a block that is visible

class Mask {
 public:
  Mask(const AttentionParams& params, int64_t batch);

  // The keys that any of the queries [first, last] may see.
  KeyRange keys(int64_t first, int64_t last) const;
  // What band, lengths, prefix and segments leave of queries [first, last] and keys [begin, begin + count).
  Cover structured(int64_t first, int64_t last, int64_t begin, int64_t count) const;
  // What the dense mask leaves of these rows and keys.
  Cover dense(const RowGroup& rows, int64_t begin, int64_t count) const;
  // s = -inf where a key is not visible.                                                       s [rows, ld]
  template <typename T>
  void apply(const ScorePrimitives<T>& prim, const RowGroup& rows, int64_t begin, int64_t count, T* s,
             int64_t ld) const;
  // Whether band, lengths, prefix and segments let `query` see `key`.
  bool visible(int64_t query, int64_t key) const;
  // How many keys the diagonal is moved to the right.
  int64_t shift() const { return shift_; }

 private:
  // The keys inside the band of one query, without the prefix. None for a query beyond the length of queries.
  KeyRange band(int64_t query) const;

  const AttentionParams& params_;
  int64_t batch_, queries_, keys_, prefix_, shift_;
};

}  // namespace sdpa_cpu
