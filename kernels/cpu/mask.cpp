// The mask's arithmetic: band, lengths, prefix, segments and dense booleans of one batch entry.
#include "mask.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sdpa_cpu {
namespace {

int64_t read_length(const View& lengths, int64_t batch, int64_t limit) {
  if (!lengths) return limit;
  return std::clamp<int64_t>(*reinterpret_cast<const int32_t*>(lengths.at(batch)), 0, limit);
}

struct IdRange {
  int32_t low, high;
};

// The smallest and the largest id of `count` positions.
IdRange ids(const View& segments, int64_t batch, int64_t first, int64_t count) {
  IdRange range = {std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
  for (int64_t i = first; i < first + count; ++i) {
    const int32_t id = *reinterpret_cast<const int32_t*>(segments.at(batch, i));
    range.low = std::min(range.low, id);
    range.high = std::max(range.high, id);
  }
  return range;
}

// Which part of a row of booleans is set: none, all, or some.
Cover cover_of(const char* row, int64_t stride, int64_t count) {
  if (stride == 0) return row[0] != 0 ? Cover::kFull : Cover::kNone;
  if (stride == 1) {
    if (row[0] != 0) return std::memchr(row, 0, static_cast<size_t>(count)) == nullptr ? Cover::kFull : Cover::kPartial;
    return std::memcmp(row, row + 1, static_cast<size_t>(count - 1)) == 0 ? Cover::kNone : Cover::kPartial;
  }
  int64_t seen = 0;
  for (int64_t j = 0; j < count; ++j) seen += row[j * stride] != 0;
  return seen == count ? Cover::kFull : seen > 0 ? Cover::kPartial : Cover::kNone;
}

}  // namespace

bool has_structure(const AttentionParams& p) {
  return p.left != kUnlimited || p.right != kUnlimited || p.q_lengths || p.k_lengths || p.q_segments;
}

Mask::Mask(const AttentionParams& params, int64_t batch) : params_(params), batch_(batch) {
  queries_ = read_length(params.q_lengths, batch, params.M);
  keys_ = read_length(params.k_lengths, batch, params.N);
  prefix_ = params.prefix ? std::min(read_length(params.prefix, batch, params.N), keys_) : 0;
  shift_ = params.bottom_right ? keys_ - queries_ : 0;
}

KeyRange Mask::band(int64_t query) const {
  if (query >= queries_) return {0, 0};
  const int64_t diagonal = query + shift_;
  const int64_t begin = params_.left == kUnlimited ? 0 : std::max<int64_t>(0, diagonal - params_.left);
  const int64_t end = params_.right == kUnlimited ? keys_ : std::min(keys_, diagonal + params_.right + 1);
  return {std::min(begin, keys_), std::max<int64_t>(end, 0)};
}

KeyRange Mask::keys(int64_t first, int64_t last) const {
  last = std::min(last, queries_ - 1);
  if (first > last) return {0, 0};
  const int64_t begin = prefix_ > 0 ? 0 : band(first).begin;
  return {begin, std::max(band(last).end, prefix_)};
}

Cover Mask::structured(int64_t first, int64_t last, int64_t begin, int64_t count) const {
  const KeyRange seen = keys(first, last);
  const int64_t end = begin + count;
  if (seen.begin >= end || seen.end <= begin) return Cover::kNone;
  const KeyRange low = band(first), high = band(std::min(last, queries_ - 1));
  const bool outside = begin >= prefix_ && (end <= low.begin || begin >= high.end);
  if (outside) return Cover::kNone;
  const int64_t latest_begin = prefix_ >= high.begin ? 0 : high.begin;
  bool whole = last < queries_ && end <= keys_ && (end <= prefix_ || (latest_begin <= begin && end <= low.end));
  if (params_.q_segments) {
    const IdRange q = ids(params_.q_segments, batch_, first, last - first + 1);
    const IdRange k = ids(params_.k_segments, batch_, begin, count);
    if (q.high < k.low || k.high < q.low) return Cover::kNone;
    whole = whole && q.low == q.high && k.low == k.high && q.low == k.low;
  }
  return whole ? Cover::kFull : Cover::kPartial;
}

Cover Mask::dense(const RowGroup& rows, int64_t begin, int64_t count) const {
  if (!params_.allowed) return Cover::kFull;
  const View& allowed = params_.allowed;
  const bool same_rows = rows.across_heads ? allowed.stride[1] == 0 : allowed.stride[2] == 0;
  const int64_t checked = same_rows ? 1 : rows.count;
  bool any = false, all = true;
  for (int64_t r = 0; r < checked; ++r) {
    const char* row = allowed.at(batch_, rows.head_of(r), rows.query_of(r), begin);
    const Cover cover = cover_of(row, allowed.stride[3], count);
    any |= cover != Cover::kNone;
    all &= cover == Cover::kFull;
    if (any && !all) return Cover::kPartial;
  }
  return all ? Cover::kFull : Cover::kNone;
}

template <typename T>
void Mask::apply(const ScorePrimitives<T>& prim, const RowGroup& rows, int64_t begin, int64_t count, T* s,
                 int64_t ld) const {
  constexpr T kHidden = -std::numeric_limits<T>::infinity();
  for (int64_t r = 0; r < rows.count; ++r) {
    T* line = s + r * ld;
    const int64_t query = rows.query_of(r);
    const KeyRange seen = band(query);
    const int64_t prefix = query < queries_ ? std::clamp<int64_t>(prefix_ - begin, 0, count) : 0;
    const int64_t first = std::clamp(seen.begin - begin, prefix, count);
    const int64_t last = std::clamp(seen.end - begin, first, count);
    std::fill(line + prefix, line + first, kHidden);
    std::fill(line + last, line + count, kHidden);
    if (params_.q_segments) {
      const int32_t id = *reinterpret_cast<const int32_t*>(params_.q_segments.at(batch_, query));
      for (int64_t j = 0; j < count; ++j)
        if (*reinterpret_cast<const int32_t*>(params_.k_segments.at(batch_, begin + j)) != id) line[j] = kHidden;
    }
  }
  const View& allowed = params_.allowed;
  if (allowed)
    prim.hide(reinterpret_cast<const uint8_t*>(allowed.at(batch_, rows.head, rows.query, begin)),
              allowed.stride[rows.across_heads ? 1 : 2], allowed.stride[3], rows.count, count, s, ld);
}

bool Mask::visible(int64_t query, int64_t key) const {
  const KeyRange seen = band(query);
  const bool inside = query < queries_ && key < keys_ && (key < prefix_ || (key >= seen.begin && key < seen.end));
  if (!inside || !params_.q_segments) return inside;
  return *reinterpret_cast<const int32_t*>(params_.q_segments.at(batch_, query)) ==
         *reinterpret_cast<const int32_t*>(params_.k_segments.at(batch_, key));
}

template void Mask::apply(const ScorePrimitives<float>&, const RowGroup&, int64_t, int64_t, float*, int64_t) const;
template void Mask::apply(const ScorePrimitives<double>&, const RowGroup&, int64_t, int64_t, double*, int64_t) const;

}  // namespace sdpa_cpu
