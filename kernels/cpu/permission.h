// Whether this process may use the tiles of AMX.
#pragma once

namespace sdpa_cpu {

// Asks the processor, and the system for the permission that it gives once to all threads of a process.
bool tiles_permitted();

}  // namespace sdpa_cpu
