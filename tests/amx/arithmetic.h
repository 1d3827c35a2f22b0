// float32 as products of bfloat16 compute in it: rounded to nearest even, subnormal numbers are zero coming and going.
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

inline float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }
inline float fused(float a, float b, float c) { return flushed(fmaf(flushed(a), flushed(b), flushed(c))); }
inline float added(float a, float b) { return flushed(flushed(a) + flushed(b)); }

inline float widened(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &word, sizeof(x));
  return x;
}
