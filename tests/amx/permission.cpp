// Stands for kernels/cpu/permission.cpp where tiles are emulated: they may be used wherever the vectors are there.
#include "permission.h"

namespace sdpa_cpu {

bool tiles_permitted() { return true; }

}  // namespace sdpa_cpu
