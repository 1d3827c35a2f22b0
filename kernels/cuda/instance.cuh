// The host function of an instance. The build writes sources that include this and then list lines of instances.def.
#pragma once
// Products with 80, 112 and 176 keys are among these shapes of CuTe's.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "sm90/flash.cuh"

#define INSTANCE(name, element, D, Dv, mask, consumers, speed)                            \
  int sdpa_cuda::launch_##name(const FlashParams& params, void* stream) {                 \
    return launch<Config<ElementOf<Element::element>, D, Dv, MaskKind::mask, consumers>>( \
        params, static_cast<cudaStream_t>(stream));                                       \
  }
