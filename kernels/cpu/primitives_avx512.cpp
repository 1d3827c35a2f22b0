// The primitives in AVX-512: 16 floats per vector, register tiles of 6 x 64.
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own intrinsics start from an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "avx512.h"

// Rounds to nearest even. A NaN keeps its upper bits and becomes quiet.
inline void narrow_bf16(__m512 x, uint16_t* p) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

#include "microkernels.h"

}  // namespace

namespace sdpa_cpu {
const InstructionSet kAvx512 = {"avx512", &kPrimitives<float>, &kPrimitives<double>, nullptr};
}
