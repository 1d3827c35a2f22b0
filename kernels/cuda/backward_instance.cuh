// The host function of an instance of the backward. The build writes sources that include this and then list lines of
// backward_instances.def.
#pragma once
// CuTe's products of any multiple of 8 columns: without these one of 48 is made of three.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "sm90/flash_backward_pair.cuh"

#define INSTANCE(name, element, D, Dv, mask)                                      \
  int sdpa_cuda::launch_##name(const BackwardParams& params, void* stream) {      \
    using C = BackwardConfig<ElementOf<Element::element>, D, Dv, MaskKind::mask>; \
    return launch_backward<C>(params, static_cast<cudaStream_t>(stream));         \
  }
