// Metal's functions of numbers. Overloads are those of Metal: a call with operands of two types is ambiguous there too.
#pragma once

namespace metal {

template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type wants types of one size");
  return __builtin_bit_cast(To, x);
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }

#define EMULATOR_UNARY(name, builtin)               \
  inline float name(float x) { return builtin(x); } \
  inline half name(half x) { return half(builtin(float(x))); }
#define EMULATOR_MATHEMATICS                                        \
  EMULATOR_UNARY(exp, __builtin_expf)                               \
  EMULATOR_UNARY(exp2, __builtin_exp2f)                             \
  EMULATOR_UNARY(log, __builtin_logf)                               \
  EMULATOR_UNARY(log2, __builtin_log2f)                             \
  EMULATOR_UNARY(tanh, __builtin_tanhf)                             \
  EMULATOR_UNARY(sqrt, __builtin_sqrtf)                             \
  EMULATOR_UNARY(cos, __builtin_cosf)                               \
  EMULATOR_UNARY(sin, __builtin_sinf)                               \
  inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); } \
  inline float divide(float x, float y) { return x / y; }
EMULATOR_MATHEMATICS
namespace fast {
EMULATOR_MATHEMATICS
}
namespace precise {
EMULATOR_MATHEMATICS
}
EMULATOR_UNARY(fabs, __builtin_fabsf)
EMULATOR_UNARY(floor, __builtin_floorf)
EMULATOR_UNARY(ceil, __builtin_ceilf)
EMULATOR_UNARY(rint, __builtin_rintf)
EMULATOR_UNARY(round, __builtin_roundf)
EMULATOR_UNARY(trunc, __builtin_truncf)
#undef EMULATOR_MATHEMATICS
#undef EMULATOR_UNARY

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float fmin(float x, float y) { return __builtin_fminf(x, y); }
inline float fmax(float x, float y) { return __builtin_fmaxf(x, y); }

#define EMULATOR_ORDERED(T)                                             \
  inline T min(T x, T y) { return y < x ? y : x; }                      \
  inline T max(T x, T y) { return x < y ? y : x; }                      \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  inline T select(T no, T yes, bool which) { return which ? yes : no; }
EMULATOR_ORDERED(short)
EMULATOR_ORDERED(ushort)
EMULATOR_ORDERED(int)
EMULATOR_ORDERED(uint)
EMULATOR_ORDERED(long)
EMULATOR_ORDERED(ulong)
EMULATOR_ORDERED(half)
EMULATOR_ORDERED(bfloat)
EMULATOR_ORDERED(float)
#undef EMULATOR_ORDERED

inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline uint mulhi(uint x, uint y) { return uint((ulong(x) * y) >> 32); }
inline int mulhi(int x, int y) { return int((long(x) * y) >> 32); }

template <int N>
inline float dot(vec<float, N> x, vec<float, N> y) {
  float sum = 0;
  for (int i = 0; i < N; ++i) sum = fma(x[i], y[i], sum);
  return sum;
}

}  // namespace metal
