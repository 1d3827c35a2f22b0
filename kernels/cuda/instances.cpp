// The table of instances; the build writes their sources.
#include "params.h"

namespace sdpa_cuda {

const Instance kInstances[] = {
#define INSTANCE(name, element, D, causal) {Element::element, D, causal, &launch_##name},
#include "instances.def"
#undef INSTANCE
};
const int kInstanceCount = sizeof(kInstances) / sizeof(kInstances[0]);

}  // namespace sdpa_cuda
