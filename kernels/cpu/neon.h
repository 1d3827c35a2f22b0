// Conversions, reductions and a transpose in NEON. Each NEON translation unit includes this file in its own unnamed
// namespace.
#pragma once

constexpr int kVectorBytes = 16;
constexpr int kPanel = 4;  // register tiles of 6 x 16: 24 accumulators leave 8 registers for operands

// The vectors of microkernels.h. arm_neon.h's float32x4_t is another type; the two convert implicitly.
typedef float Floats __attribute__((vector_size(kVectorBytes)));

inline Floats widen_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

inline Floats widen_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

typedef int32_t Words __attribute__((vector_size(kVectorBytes)));
inline Words widen_bytes(const uint8_t* p, float) {
  uint32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  return (Words)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

inline void narrow_f16(Floats x, uint16_t* p) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

inline Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline float largest(Floats x) { return vmaxvq_f32(x); }
inline float total(Floats x) { return vaddvq_f32(x); }

// Transposes 4 x 4: pairs of columns, then the 64-bit halves.
inline void transpose(Floats* rows) {
  const float64x2_t even_low = vreinterpretq_f64_f32(vtrn1q_f32(rows[0], rows[1]));
  const float64x2_t odd_low = vreinterpretq_f64_f32(vtrn2q_f32(rows[0], rows[1]));
  const float64x2_t even_high = vreinterpretq_f64_f32(vtrn1q_f32(rows[2], rows[3]));
  const float64x2_t odd_high = vreinterpretq_f64_f32(vtrn2q_f32(rows[2], rows[3]));
  rows[0] = vreinterpretq_f32_f64(vzip1q_f64(even_low, even_high));
  rows[1] = vreinterpretq_f32_f64(vzip1q_f64(odd_low, odd_high));
  rows[2] = vreinterpretq_f32_f64(vzip2q_f64(even_low, even_high));
  rows[3] = vreinterpretq_f32_f64(vzip2q_f64(odd_low, odd_high));
}
