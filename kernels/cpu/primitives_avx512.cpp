// The primitives in AVX-512: 16 floats a vector, tiles of 6 x 64.
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics start from an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

constexpr int kVectorBytes = 64;
constexpr int kPanel = 4;

inline __m512 widen_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512 widen_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

typedef int32_t Words __attribute__((vector_size(kVectorBytes)));
inline Words widen_bytes(const uint8_t* p, float) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void narrow_f16(__m512 x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Round to nearest even; a NaN keeps its upper bits and is made quiet.
inline void narrow_bf16(__m512 x, uint16_t* p) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

inline __m512 larger(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
inline float largest(__m512 x) { return _mm512_reduce_max_ps(x); }
inline float total(__m512 x) { return _mm512_reduce_add_ps(x); }

// 16 x 16: pairs, then fours within 128 bits, then the 128-bit parts.
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

#include "microkernels.h"

}  // namespace

namespace sdpa_cpu {
const InstructionSet kAvx512 = {"avx512", &kPrimitives<float>, &kPrimitives<double>, nullptr};
}
