// The host function of an instance: the build writes sources of lines of instances.def, which include this.
#pragma once
#include "sm90/flash.cuh"

#define INSTANCE(name, element, D, Dv, mask, groups, speed)                            \
  int sdpa_cuda::launch_##name(const FlashParams& params, void* stream) {              \
    return launch<Config<ElementOf<Element::element>, D, Dv, MaskKind::mask, groups>>( \
        params, static_cast<cudaStream_t>(stream));                                    \
  }
