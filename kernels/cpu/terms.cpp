// Softcap, ALiBi, bias and dropout on a tile of scores.
#include "terms.h"

#include <cmath>
#include <cstring>

namespace sdpa_cpu {
namespace {

constexpr int kRounds = 10;
constexpr int kWords = 4;  // random numbers of one counter, for as many keys

void philox(uint32_t counter[kWords], uint64_t key) {
  uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t next0 = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key_low;
    const uint32_t next2 = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key_high;
    counter[1] = static_cast<uint32_t>(second);
    counter[3] = static_cast<uint32_t>(first);
    counter[0] = next0;
    counter[2] = next2;
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
}

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
void apply_dropout(const AttentionParams& params, int64_t batch, const RowGroup& rows, int64_t begin, int64_t count,
                   T* p, int64_t ld) {
  const uint64_t threshold = static_cast<uint64_t>(std::floor(params.dropout_p * 4294967296.0));
  const T kept = static_cast<T>(1.0 / (1.0 - params.dropout_p));
  for (int64_t r = 0; r < rows.count; ++r) {
    const uint32_t query = static_cast<uint32_t>(rows.query_of(r));
    const uint32_t head = static_cast<uint32_t>(batch * params.H + rows.head_of(r));
    uint32_t words[kWords] = {};
    for (int64_t j = 0; j < count; ++j) {
      const int64_t key = begin + j;
      if (j == 0 || key % kWords == 0) {
        words[0] = static_cast<uint32_t>(key / kWords);
        words[1] = query;
        words[2] = head;
        words[3] = static_cast<uint32_t>(params.philox_offset);
        philox(words, params.philox_key);
      }
      p[r * ld + j] *= words[key % kWords] >= threshold ? kept : T(0);
    }
  }
}

template class ScoreTerms<float>;
template class ScoreTerms<double>;
template void apply_dropout(const AttentionParams&, int64_t, const RowGroup&, int64_t, int64_t, float*, int64_t);
template void apply_dropout(const AttentionParams&, int64_t, const RowGroup&, int64_t, int64_t, double*, int64_t);

}  // namespace sdpa_cpu
