// What happens to a product of query and key until it is a score, and to a weight under dropout.

constant constexpr float kLog2E = 1.44269504088896340736f;

// softcap(scale * product) - ALiBi's penalty + bias. `slope` becomes softcap's derivative.
inline float score_of(thread const Call& call, thread const Entry& e, int head, int query, int key, float product,
                      thread float& slope) {
  float s = product * call.x[X_SCALE];
  slope = 1.0f;
  if (SOFTCAP) {
    const float share = precise::tanh(s / call.x[X_SOFTCAP]);
    slope = 1.0f - share * share;
    s = call.x[X_SOFTCAP] * share;
  }
  if (ALIBI) s -= call.alibi[e.batch * call.n[I_ALIBI] + head] * fabs(float(query + e.shift - key));
  if (BIAS) {
    constant long* stride = call.n + I_BIAS;
    s += float(call.bias[e.batch * stride[0] + head * stride[1] + query * stride[2] + key * stride[3]]);
  }
  return s;
}

// The score of a pair from its product: -inf where, with `cut`, the mask hides the key.
inline float masked_score(thread const Call& call, thread const Entry& e, int head, int query, int key, bool cut,
                          float product, thread float& slope) {
  slope = 0.0f;
  if (cut && !is_visible(call, e, head, query, key)) return -INFINITY;
  return score_of(call, e, head, query, key, product, slope);
}

// exp(x), 0 at -inf.
inline float exponential(float x) { return exp2(x * kLog2E); }

constant constexpr uint kMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};
constant constexpr uint kIncrements[2] = {0x9E3779B9u, 0xBB67AE85u};

// Philox4x32-7 (Salmon et al., SC 2011).
inline uint4 philox(uint4 counter, uint2 key) {
  for (int round = 0; round < 7; ++round) {
    const uint high0 = mulhi(kMultipliers[0], counter.x), low0 = kMultipliers[0] * counter.x;
    const uint high1 = mulhi(kMultipliers[1], counter.z), low1 = kMultipliers[1] * counter.z;
    counter = uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key += uint2(kIncrements[0], kIncrements[1]);
  }
  return counter;
}

// The factor of the weight of `query` for `key`: 0, or that of kept weights. The counter, and which half of which word
// is the pair's number, are those of sdpa/philox.py.
inline float kept(thread const Call& call, thread const Entry& e, int head, int query, int key) {
  const ulong seed = as_type<ulong>(call.rng[0]);
  uint stream = uint(e.batch) * uint(call.n[I_H]) + uint(head), i = uint(query), j = uint(key);
  if (call.n[I_PART] != 0) {
    const ulong heads = as_type<ulong>(call.rng[2]), first = as_type<ulong>(call.rng[3]);
    stream = uint(e.batch) * uint(heads >> 32) + uint(heads) + uint(head);
    i += uint(first >> 32), j += uint(first);
  }
  const uint4 counter = uint4(j / 16 * 4 + j % 8 / 2, i / 16 * 8 + i % 8, stream, uint(as_type<ulong>(call.rng[1])));
  const uint4 words = philox(counter, uint2(uint(seed), uint(seed >> 32)));
  const uint number = words[i / 8 % 2 * 2 + j / 8 % 2] >> (j % 2 * 16) & 0xFFFFu;
  return number >= uint(call.n[I_DROPOUT]) ? call.x[X_KEPT] : 0.0f;
}

// What a row's probabilities are computed from again: exp(score - base) * inverse.
struct RowBase {
  float base, inverse;
};

// Of row `place`. The base is +inf where the row sees no key, so that its probabilities are 0.
inline RowBase row_base_of(device const float* lse, device const float* inverses, long place) {
  RowBase row;
  row.base = lse[place] == -INFINITY ? INFINITY : lse[place];
  row.inverse = RENORMALISED ? inverses[place] : 1.0f;
  return row;
}

inline float probability(RowBase row, float score) { return exponential(score - row.base) * row.inverse; }

// The logit of a head's sink, -inf where there is none.
inline float sink_of(thread const Call& call, int head) { return SINKS ? float(call.sinks[head]) : -INFINITY; }

// The online softmax of one row.
struct RowState {
  float row_max, row_sum;
};

// scores become weights. Returns the factor of older sums.
template <int COUNT>
inline float softmax_step(thread RowState& state, thread float2* scores) {
  float top = state.row_max;
  UNROLL
  for (int n = 0; n < COUNT; ++n) top = max(top, max(scores[n].x, scores[n].y));
  top = max_of_row(top);
  const float reference = top == -INFINITY ? 0.0f : top;  // a row that has seen no key yet
  float sum = 0.0f;
  UNROLL
  for (int n = 0; n < COUNT; ++n) {
    scores[n] = float2(exponential(scores[n].x - reference), exponential(scores[n].y - reference));
    sum += scores[n].x + scores[n].y;
  }
  const float alpha = exponential(state.row_max - reference);
  state.row_sum = state.row_sum * alpha + sum_of_row(sum);
  state.row_max = top;
  return alpha;
}
