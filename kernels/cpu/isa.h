// Which instruction sets this machine has, and the one in use.
#pragma once

#include <string>

#include "primitives.h"

namespace sdpa_cpu {

const InstructionSet& instruction_set();
// The names of those that this machine has, separated by commas, the narrowest first.
std::string available_instruction_sets();
// Throws where the machine does not have it; the message lists those that it has.
void choose_instruction_set(const std::string& name);

}  // namespace sdpa_cpu
