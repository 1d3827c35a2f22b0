// Counters from which the persistent thread blocks of a launch draw their work tiles.
#pragma once
#include <cstdint>

namespace sdpa_cuda {

// A counter for a launch on a stream of the device, which is the current one. The counter is 0, and the launch leaves
// it at 0. Launches of one stream share a counter. A captured launch keeps its own for good, so that its graph may run
// beside anything but another instance of itself. Null where no counter is left: the launch then does without.
int32_t* take_counter(int device, void* stream);

}  // namespace sdpa_cuda
