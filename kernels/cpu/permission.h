// Whether this process may use the tiles of AMX.
#pragma once

namespace sdpa_cpu {

// Asks the processor whether it has tiles, and the system for permission. The system grants it once, for all threads of
// the process.
bool tiles_permitted();

}  // namespace sdpa_cpu
