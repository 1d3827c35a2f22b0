// The primitives in portable C++, for any machine and as the reference of the others. The compiler's 16-byte vectors
// become SSE2 or NEON where the machine has them.
#include "primitives.h"

namespace {

using namespace sdpa_cpu;

constexpr int kVectorBytes = 16;
constexpr int kPanel = 2;
constexpr int kFloats = 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline Floats widen_bf16(const uint16_t* p) {
  Floats x;
  for (int i = 0; i < kFloats; ++i) x[i] = float_of(static_cast<uint32_t>(p[i]) << 16);
  return x;
}

// A product with 2^112 shifts the exponent. It is exact, for subnormal numbers, too.
inline float half_to_float(uint16_t h) {
  const float magnitude = float_of(static_cast<uint32_t>(h & 0x7fff) << 13) * 0x1p112f;
  const uint32_t inf_or_nan = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return float_of(bits_of(magnitude) | inf_or_nan | static_cast<uint32_t>(h & 0x8000) << 16);
}

inline uint16_t float_to_half(float x) {
  constexpr float kSmallestNormal = 0x1p-14f;
  const uint16_t sign = static_cast<uint16_t>(bits_of(x) >> 16 & 0x8000);
  const uint32_t magnitude = bits_of(x) & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  const float absolute = float_of(magnitude);
  // After adding 2^-1 the last bits of the sum are those of the subnormal number, rounded.
  if (absolute < kSmallestNormal) return sign | static_cast<uint16_t>(bits_of(absolute + 0.5f) - bits_of(0.5f));
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded - 0x38000000) >> 13);
}

typedef int32_t Words __attribute__((vector_size(kVectorBytes)));
inline Words widen_bytes(const uint8_t* p, float) { return Words{p[0], p[1], p[2], p[3]}; }

inline Floats widen_f16(const uint16_t* p) {
  Floats x;
  for (int i = 0; i < kFloats; ++i) x[i] = half_to_float(p[i]);
  return x;
}

inline void narrow_f16(Floats x, uint16_t* p) {
  for (int i = 0; i < kFloats; ++i) p[i] = float_to_half(x[i]);
}

// Rounds to nearest even. A NaN keeps its upper bits and becomes quiet.
inline void narrow_bf16(Floats x, uint16_t* p) {
  for (int i = 0; i < kFloats; ++i) {
    const uint32_t bits = bits_of(x[i]);
    const uint32_t rounded = x[i] != x[i] ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    p[i] = static_cast<uint16_t>(rounded >> 16);
  }
}

#include "microkernels.h"

}  // namespace

namespace sdpa_cpu {
const InstructionSet kScalar = {"scalar", &kPrimitives<float>, &kPrimitives<double>, nullptr};
}
