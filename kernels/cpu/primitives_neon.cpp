// The primitives in NEON, which every AArch64 processor has: 4 floats per vector, register tiles of 6 x 16.
#include <arm_neon.h>

#include "primitives.h"

namespace {

using namespace sdpa_cpu;

#include "neon.h"

// Rounds to nearest even. A NaN keeps its upper bits and becomes quiet.
inline void narrow_bf16(Floats x, uint16_t* p) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16));
}

#include "microkernels.h"

}  // namespace

namespace sdpa_cpu {
const InstructionSet kNeon = {"neon", &kPrimitives<float>, &kPrimitives<double>, nullptr};
}
