// Softcap, ALiBi, bias and dropout on a tile of scores.
#include "terms.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace sdpa_cpu {
namespace {

float half_to_float(uint16_t h) {
  const int exponent = h >> 10 & 0x1f, mantissa = h & 0x3ff;
  float x = exponent == 0   ? std::ldexp(static_cast<float>(mantissa), -24)
            : exponent < 31 ? std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25)
            : mantissa == 0 ? INFINITY
                            : NAN;
  return h & 0x8000 ? -x : x;
}

}  // namespace

double read_number(const char* p, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return *reinterpret_cast<const double*>(p);
  if (dtype == Dtype::kFloat32) return *reinterpret_cast<const float*>(p);
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(p);
  if (dtype == Dtype::kFloat16) return half_to_float(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

template <typename T>
ScoreTerms<T>::ScoreTerms(const AttentionParams& params, const ScorePrimitives<T>& prim)
    : params_(params), prim_(prim), present_(params.softcap != 0.0 || params.alibi || params.bias) {}

template <typename T>
void ScoreTerms<T>::apply(const Mask& mask, int64_t batch, const RowGroup& rows, int64_t begin, int64_t count, T* s,
                          T* slope, int64_t ld) const {
  if (params_.softcap != 0.0) prim_.softcap(rows.count, count, s, slope, ld, static_cast<T>(params_.softcap));
  for (int64_t r = 0; params_.alibi && r < rows.count; ++r) {
    const T penalty = static_cast<T>(read_number(params_.alibi.at(batch, rows.head_of(r)), params_.alibi.dtype));
    const int64_t diagonal = rows.query_of(r) + mask.shift() - begin;
    prim_.subtract_distance(count, penalty, static_cast<T>(diagonal), s + r * ld);
  }
  if (!params_.bias) return;
  Source bias = params_.bias.rows(batch, rows.head, rows.query);
  bias.data = params_.bias.at(batch, rows.head, rows.query, begin);
  if (rows.across_heads) bias.row_stride = params_.bias.stride[1];
  prim_.add_bias(bias, rows.count, count, s, ld);
}

template <typename T>
void apply_dropout(const AttentionParams& params, const ScorePrimitives<T>& prim, int64_t batch, const RowGroup& rows,
                   int64_t begin, int64_t count, T* p, int64_t ld) {
  constexpr int32_t kNumbers = 1 << 16;  // that a pair may get
  const int32_t threshold = std::min(kNumbers - 1, static_cast<int32_t>(params.dropout_p * kNumbers + 0.5));
  const T kept = static_cast<T>(static_cast<double>(kNumbers) / (kNumbers - threshold));
  constexpr int64_t kApart = 8;  // of two rows that share their random words
  for (int64_t r = 0; r < rows.count; ++r) {
    const uint32_t query = static_cast<uint32_t>(params.random.first_row + rows.query_of(r));
    const bool upper = query / kApart % 2 == 1, alone = rows.across_heads;
    if (upper && !alone && r >= kApart) continue;  // done with the row before
    const Dropout words{params.random.key, static_cast<uint32_t>(query / 16 * 8 + query % 8),
                        params.random.stream(batch, rows.head_of(r), params.H),
                        static_cast<uint32_t>(params.random.offset), threshold};
    T* const line = p + r * ld;
    T* const partner = !alone && r + kApart < rows.count ? line + kApart * ld : nullptr;
    prim.drop(words, params.random.first_key + begin, count, kept, upper ? nullptr : line, upper ? line : partner);
  }
}

template class ScoreTerms<float>;
template class ScoreTerms<double>;
template void apply_dropout(const AttentionParams&, const ScorePrimitives<float>&, int64_t, const RowGroup&, int64_t,
                            int64_t, float*, int64_t);
template void apply_dropout(const AttentionParams&, const ScorePrimitives<double>&, int64_t, const RowGroup&, int64_t,
                            int64_t, double*, int64_t);

}  // namespace sdpa_cpu
