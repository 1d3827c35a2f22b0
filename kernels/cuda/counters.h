// Counters from which the thread blocks of a launch draw their work.
#pragma once
#include <cstdint>

namespace sdpa_cuda {

// For a launch on a stream of the device, which is the current one: its number is 0, and will be again when the launch
// has ended. Launches of one stream share one; a captured launch has one for good, so that a graph may run beside
// anything but another instance of itself. Null where there is none left: the launch then does without.
int32_t* take_counter(int device, void* stream);

}  // namespace sdpa_cuda
