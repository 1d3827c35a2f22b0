// Conversions, reductions and a transpose in AVX-512. Each translation unit built for AVX-512 includes this file in its
// own unnamed namespace.
#pragma once

#include <assert.h>

constexpr int kVectorBytes = 64;
constexpr int kPanel = 4;

inline __m512 widen_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512 widen_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Of less than a vector; none where count is negative. GCC does not instrument masked loads, so the sanitizer build
// reads the last element by itself.
inline __m512 widen_first(const float* p, int64_t count, float) {
  assert(count <= 0 || (static_cast<const volatile float*>(p)[count - 1], true));
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(count > 0 ? (1u << count) - 1 : 0), p);
}

typedef int32_t Words __attribute__((vector_size(kVectorBytes)));
inline Words widen_bytes(const uint8_t* p, float) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

typedef uint64_t Wide __attribute__((vector_size(kVectorBytes)));
inline Wide multiply_low(Wide x, Wide y) { return (Wide)_mm512_mul_epu32((__m512i)x, (__m512i)y); }

inline void narrow_f16(__m512 x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

inline __m512 larger(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
inline float largest(__m512 x) { return _mm512_reduce_max_ps(x); }
inline float total(__m512 x) { return _mm512_reduce_add_ps(x); }

// The sums of 16 vectors. Two vectors become one by adding their halves: first within 128 bits, then the 128-bit parts.
inline void totals(const __m512 (&x)[16], float* sums) {
  __m512 four[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512* y = x + 4 * i;
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(y[0], y[1]), _mm512_unpackhi_ps(y[0], y[1]));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(y[2], y[3]), _mm512_unpackhi_ps(y[2], y[3]));
    four[i] = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  }
  const auto add_parts = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  _mm512_storeu_ps(sums, add_parts(add_parts(four[0], four[1]), add_parts(four[2], four[3])));
}

inline void interleave(__m512& even, __m512& odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = _mm512_permutex2var_ps(even, low, odd);
  odd = _mm512_permutex2var_ps(even, high, odd);
  even = first;
}

// Transposes 16 x 16: pairs, then fours within 128 bits, then the 128-bit parts.
inline void transpose(__m512* rows) {
  __m512 pairs[16], fours[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    fours[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 even_low = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}
