// exp, the online softmax and its gradient on vectors. It is a part of microkernels.h, in the including file's unnamed
// namespace.
#pragma once

// The constants of exp by type, for y = x log2(e). With `magic` added, the low bits of the sum are round(y) + exponent
// bias. A shift makes of them the power of two, and an exact zero of everything up to `lowest`.
struct ExpFloat {
  typedef int32_t Int;
  static constexpr float magic = 12582912.0f + 127.0f;  // 1.5 * 2^23
  static constexpr float lowest = -127.0f, ln2 = 0.69314718f, log2e = 1.44269504f;
  static constexpr int shift = 23;
  static constexpr int terms = 6;
  // The minimax polynomial of (2^f - 1) / f on [-1/2, 1/2]. The relative error of 2^f is below 2e-9.
  static constexpr float series[terms] = {0.6931471824645996f,  0.24022647738456726f,   0.055503323674201965f,
                                          0.00961843691766262f, 0.0013398875016719103f, 0.00015353360504377633f};
};
struct ExpDouble {
  typedef int64_t Int;
  static constexpr double magic = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52
  static constexpr double lowest = -1023.0, ln2 = 0.69314718055994530942, log2e = 1.44269504088896340736;
  static constexpr int shift = 52;
  static constexpr int terms = 13;
  // ln(2)^k / k!. The remainder is below 1e-17.
  static constexpr double series[terms] = {
      0.69314718055994530942,    0.24022650695910071233,    0.055504108664821579953,   0.0096181291076284771619,
      0.0013333558146428443423,  0.00015403530393381609954, 1.5252733804059840280e-05, 1.3215486790144309488e-06,
      1.0178086009239699728e-07, 7.0549116208011233299e-09, 4.4455382718708114976e-10, 2.5678435993488205142e-11,
      1.3691488853904128881e-12};
};
// For weights that are rounded to bfloat16, which costs up to 4e-3. The relative error of 2^f is below 3e-6.
struct ExpShort : ExpFloat {
  static constexpr int terms = 4;
  static constexpr float series[terms] = {0.6931241750717163f, 0.24024099111557007f, 0.055906426161527634f,
                                          0.009582852944731712f};
};
template <typename T>
struct ExpOf {
  typedef ExpFloat type;
};
template <>
struct ExpOf<double> {
  typedef ExpDouble type;
};
template <typename T>
constexpr T kMinusInfinity = -__builtin_inff();
template <typename T>
inline T zero_if_minus_infinity(T x) {
  return x == kMinusInfinity<T> ? T(0) : x;
}

// e^x of several vectors as power * (1 + part), with x log2(e) not rounded. The caller combines them by a product, not
// by an integer addition, so that NaN stays NaN. Several vectors are independent chains of instructions; a single one
// would wait for its own results.
template <typename E, typename V, int kVectors>
inline void split_exp(const V (&x)[kVectors], V (&power)[kVectors], V (&part)[kVectors]) {
  typedef typename E::Int Bits __attribute__((vector_size(kVectorBytes)));
  V f[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const V within = larger(V{} + E::lowest * E::ln2, x[v]);
    const V sum = within * E::log2e + E::magic;
    f[v] = within * E::log2e - (sum - E::magic);
    power[v] = (V)((Bits)sum << E::shift);
    part[v] = f[v] * E::series[E::terms - 1] + E::series[E::terms - 2];
  }
#pragma GCC unroll 16
  for (int i = E::terms - 3; i >= 0; --i)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) part[v] = part[v] * f[v] + E::series[i];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) part[v] *= f[v];
}

// x = e^x.
template <typename E, typename V, int kVectors>
inline void exp(V (&x)[kVectors]) {
  V power[kVectors], part[kVectors];
  split_exp<E>(x, power, part);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) x[v] = power[v] * part[v] + power[v];
}

template <typename E, typename V>
inline V exp(V x) {
  V one[1] = {x};
  exp<E>(one);
  return one[0];
}

// The largest of a row of scores. Fills it with -inf up to a whole vector.
template <typename T>
inline T row_maximum(int64_t columns, T* line) {
  const int64_t whole = columns / kLanes<T> * kLanes<T>;
  Vec<T> top = fill(kMinusInfinity<T>);
  for (int64_t c = 0; c < whole; c += kLanes<T>) top = larger(top, load(line + c));
  if (whole < columns) {
    const Vec<T> rest = first_lanes<T>(columns - whole) ? load(line + whole) : fill(kMinusInfinity<T>);
    store(line + whole, rest);
    top = larger(top, rest);
  }
  return largest(top);
}

// Updates row_max with these scores, and computes alpha: of as many rows at once as a vector has lanes.
template <typename T, typename E>
inline void raise_maxima(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* alpha) {
  for (int64_t first = 0; first < rows; first += kLanes<T>) {
    const int64_t count = rows - first < kLanes<T> ? rows - first : kLanes<T>;
    T change[kLanes<T>] = {};
    for (int64_t i = 0; i < count; ++i) {
      const T old_max = row_max[first + i], block_max = row_maximum(columns, s + (first + i) * ld);
      const T new_max = old_max > block_max ? old_max : block_max;
      change[i] = old_max == new_max ? T(0) : old_max - zero_if_minus_infinity(new_max);
      row_max[first + i] = new_max;
    }
    const Vec<T> factor = exp<E>(load(change));
    for (int64_t i = 0; i < count; ++i) alpha[first + i] = factor[i];
  }
}

// A step of the online softmax. store_at(row, column, vectors) takes the weights. All maxima are computed first, so
// that no row waits for its own.
template <typename T, typename E, typename Store>
inline void softmax(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* alpha, Store store_at) {
  constexpr int kMany = 4;
  assert(rows > 0 && columns > 0 && columns <= ld && ld % kLanes<T> == 0);
  raise_maxima<T, E>(rows, columns, s, ld, row_max, alpha);
  for (int64_t r = 0; r < rows; ++r) {
    const T* line = s + r * ld;
    const T top = zero_if_minus_infinity(row_max[r]);
    Vec<T> sum = {};
    int64_t c = 0;
    for (; c + (kMany - 1) * kLanes<T> < columns; c += kMany * kLanes<T>) {
      Vec<T> p[kMany];
#pragma GCC unroll 4
      for (int v = 0; v < kMany; ++v) p[v] = load(line + c + v * kLanes<T>) - top;
      exp<E>(p);
      store_at(r, c, p);
#pragma GCC unroll 4
      for (int v = 0; v < kMany; ++v) sum += p[v];
    }
    for (; c < columns; c += kLanes<T>) {
      Vec<T> p[1] = {load(line + c) - top};
      exp<E>(p);
      store_at(r, c, p);
      sum += p[0];
    }
    store(row_sum + r * kMaxLanes, load(row_sum + r * kMaxLanes) * alpha[r] + sum);
  }
}

template <typename T, typename E>
void softmax_step(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* alpha) {
  softmax<T, E>(rows, columns, s, ld, row_max, row_sum, alpha, [=](int64_t r, int64_t c, const auto& p) {
    constexpr int kVectors = sizeof(p) / sizeof(p[0]);
    for (int v = 0; v < kVectors; ++v) store(s + r * ld + c + v * kLanes<T>, p[v]);
  });
}

// Where operands are T, weights need no packing.
template <typename T>
const T* softmax_left(int64_t rows, int64_t columns, T* s, int64_t ld, T* row_max, T* row_sum, T* alpha, T*) {
  softmax_step<T, typename ExpOf<T>::type>(rows, columns, s, ld, row_max, row_sum, alpha);
  return s;
}

template <typename T>
void probabilities(int64_t rows, int64_t columns, T* s, int64_t ld, const T* lse) {
  assert(columns <= ld && ld % kLanes<T> == 0);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>)
      store(s + r * ld + c, exp<typename ExpOf<T>::type>(load(s + r * ld + c) - lse[r]));
}

template <typename T>
void score_gradient(int64_t rows, int64_t columns, const T* p, const T* kept, T* dp, int64_t ld, const T* delta) {
  assert(columns <= ld && ld % kLanes<T> == 0);
  const auto each = [=](auto gradient) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; c += kLanes<T>) {
        const int64_t at = r * ld + c;
        store(dp + at, gradient(at, load(p + at), load(dp + at), delta[r]));
      }
  };
  if (kept)
    each([=](int64_t at, Vec<T> p, Vec<T> dp, T delta) { return load(kept + at) * dp - p * delta; });
  else
    each([](int64_t, Vec<T> p, Vec<T> dp, T delta) { return p * (dp - delta); });
}

// tanh(y) = (e^2y - 1) / (e^2y + 1), where e^2y - 1 is computed without cancellation.
template <typename T>
void softcap(int64_t rows, int64_t columns, T* s, T* slope, int64_t ld, T cap) {
  assert(columns <= ld && ld % kLanes<T> == 0 && cap != T(0));
  constexpr T kSaturated = 20;  // from here on tanh is 1, in float64, too
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      Vec<T> y = load(s + r * ld + c) / cap;
      y = larger(fill(-kSaturated), y);
      y = -larger(fill(-kSaturated), -y);
      const Vec<T> twice[1] = {y * T(2)};
      Vec<T> power[1], part[1];
      split_exp<typename ExpOf<T>::type>(twice, power, part);
      const Vec<T> minus_one = power[0] * part[0] + (power[0] - T(1));
      const Vec<T> t = minus_one / (minus_one + T(2));
      store(s + r * ld + c, t * cap);
      if (slope) store(slope + r * ld + c, T(1) - t * t);
    }
}
