// Which instruction sets this machine has, and the one in use.
#pragma once

#include <string>

#include "primitives.h"

namespace sdpa_cpu {

const InstructionSet& instruction_set();
// Comma separated, the narrowest first.
std::string available_instruction_sets();
// Throws with the list of what there is.
void choose_instruction_set(const std::string& name);

}  // namespace sdpa_cpu
